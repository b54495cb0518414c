"""The expected content of a store, from the journals of the ``sessions`` campaign.

This module opens no store; the examiner compares a store with the story.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from campaigns import session_turns
from campaigns.replay import Violation
from campaigns.session_journal import Call
from campaigns.session_turns import Turn
from casstore import Usage


class Fate(NamedTuple):
    """A turn and the answers that its workers got, in order."""

    turn: Turn
    calls: list[Call]

    @property
    def acknowledged(self) -> Call | None:
        """The first call that was acknowledged."""
        return next((call for call in self.calls if call.done), None)

    @property
    def unknown(self) -> bool:
        """True if the workers learned neither that the turn happened nor that it did not."""
        return self.acknowledged is None and self.calls[-1].unknown

    def attempt_of(self, leaf: str | None) -> Call | None:
        """The attempt that created this leaf, the last node of the turn."""
        for call in self.calls:
            if self.turn.node_ids(call.asked["attempt"])[-1] == leaf:
                return call
        return None


class Moment(NamedTuple):
    """The expected content of a revision."""

    graph: tuple[str, ...]
    path: tuple[str, ...]
    usage: Mapping[tuple[str, str], Usage]
    #: The turn whose checkpoint it has.
    turn: str | None


NOTHING = Moment((), (), {}, None)


class Made(NamedTuple):
    """The origin of a node."""

    parent: str | None
    payload: dict[str, Any]


class Story:
    """All journals of a store, combined."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        #: By session and id.
        self.fates: dict[tuple[str, str], Fate] = {}
        for call in self.of("turn"):
            turn = Turn.from_journal(call.asked)
            self.fates.setdefault((turn.session, turn.id), Fate(turn, [])).calls.append(call)
        #: Filled as turns are found in a history; node ids are unique across sessions.
        self.made: dict[str, Made] = {}
        self._check_answers()
        self._check_fencing()
        self._check_claims()

    def of(self, op: str, session: str | None = None) -> Iterable[Call]:
        """The calls of one kind, on one session or all."""
        return [
            call
            for call in self.calls
            if call.op == op and session in (None, call.asked.get("session"))
        ]

    def fates_of(self, session: str) -> list[Fate]:
        """The turns of a session, committed or not."""
        return [fate for fate in self.fates.values() if fate.turn.session == session]

    def after(self, before: Moment, attempt: Call) -> Moment:
        """The expected content of a revision after a turn."""
        turn = Turn.from_journal(attempt.asked)
        nodes = turn.node_ids(attempt.asked["attempt"])
        parent = attempt.asked["parent"]
        path = before.path if parent is None else self.path_to(parent)
        above = path[-1] if path else None
        for node, payload in zip(nodes, session_turns.payloads(turn), strict=True):
            self.made[node] = Made(above, payload)
            above = node
        return Moment(
            (*before.graph, *nodes),
            (*path, *nodes),
            session_turns.add_usage(before.usage, turn.id),
            turn.id,
        )

    def path_to(self, node: str) -> tuple[str, ...]:
        """The nodes from the root to this one."""
        path: list[str] = []
        at: str | None = node
        while at is not None:
            path.append(at)
            at = self.made[at].parent
        return tuple(reversed(path))

    # --- what the journals must agree on among themselves ---------------------------------------

    def _check_answers(self) -> None:
        for (session, name), fate in self.fates.items():
            told = [call for call in fate.calls if call.done]
            if len({str(call.answer[:4]) for call in told}) > 1:
                raise Violation(f"contradiction: turn {name} of {session}: {told}")
            if sum(not call.answer[4] for call in told) > 1:
                raise Violation(f"done twice: turn {name} of {session}: {told}")
            for call, later in zip(fate.calls, fate.calls[1:], strict=False):
                if call.done and not later.done and not later.unknown:
                    raise Violation(f"lost: turn {name} of {session} was refused later: {later}")
            for call in told:
                if call.asked["late"]:
                    raise Violation(f"late: a lease was over and {call} was done")

    def _check_fencing(self) -> None:
        """A claim's fencing token is higher than all that were answered before it began."""
        granted = [call for call in self.of("lease") if call.done and call.answer is not None]
        events = [(call.asked_at_ns, 0, at) for at, call in enumerate(granted)]
        events += [(call.answered_at_ns or 0, 1, at) for at, call in enumerate(granted)]
        highest: dict[str, int] = {}
        below: dict[int, int] = {}
        given: dict[tuple[str, int], Call] = {}
        for _, answered, at in sorted(events):
            call = granted[at]
            session = call.asked["session"]
            if not answered:
                below[at] = highest.get(session, 0)
                continue
            if call.answer <= below[at]:
                raise Violation(f"fencing: went back from {below[at]} in {call}")
            if (session, call.answer) in given:
                raise Violation(f"fencing: {given[session, call.answer]} and {call} are equal")
            given[session, call.answer] = call
            highest[session] = max(highest.get(session, 0), call.answer)

    def _check_claims(self) -> None:
        given: dict[tuple[str, str, int], Call] = {}
        for call in self.of("claim"):
            for batch, fence in call.answer or ():
                place = call.asked["session"], batch, fence
                if place in given:
                    raise Violation(f"claimed twice: {given[place]} and {call}")
                given[place] = call
