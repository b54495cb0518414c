"""A session brought in from elsewhere: its messages first, in steps; then, at once, all the rest.

Until the last step nobody sees it. If it is cut short, doing it again goes on where it was: what
is there already must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import HeadConflictError, InvalidInputError, SessionExistsError
from casstore.records.log.data import Fold, RoundUsage, UsageTotals
from casstore.records.log.ground import Ground, digits
from casstore.records.log.messages import call_ids, check_number
from casstore.records.log.reading import nodes_of
from casstore.records.log.state import LogState, pack, state_fault
from casstore.records.log.tree import Row, born, check_row
from casstore.records.log.usage import check_tokens
from casstore.session import commit
from casstore.session.attempts import read_again
from casstore.session.data import UNFENCED, Checkpoint, Commit, NodeDraft
from casstore.session.records import Draft
from casstore.session.state import State


class Rest(NamedTuple):
    """All of a session but its messages."""

    row: Row
    state: LogState
    folds: Sequence[Fold] = ()
    usage: Sequence[RoundUsage] = ()
    totals: UsageTotals = UsageTotals()


class Arrived(NamedTuple):
    """A message as it was elsewhere."""

    number: int
    payload: dict[str, Any]
    created_at_ms: int

    def draft(self) -> NodeDraft:
        """The node that it becomes."""
        return NodeDraft(str(self.number), self.payload, time=self.created_at_ms)


class Intake:
    """Brings one session in."""

    def __init__(self, ground: Ground, session: str) -> None:
        self._ground = ground
        self._session = session
        self._state = state = read_again(self._find)
        #: The number of the last message that is in.
        self.last = 0 if state is None else int(state.manifest.leaf_id or 0)

    def _find(self) -> State | None:
        state = self._ground.runtime.find(self._session)
        if state is not None and self._ground.states.read(self._session, state).whole:
            raise SessionExistsError(self._session)
        return state

    def add(self, messages: Sequence[Arrived]) -> None:
        """Take the next messages, in one commit; those that are in already are compared."""
        fresh = self._fresh(messages)
        if fresh or self._state is None:
            state = None if self._state is not None else LogState(whole=False)
            self._commit(fresh, state, None)

    def require_none_behind(self, last: int) -> None:
        """Refuse to go on with a session that has got further than this one ever was."""
        if self.last > last:
            raise SessionExistsError(self._session)

    def finish(self, messages: Sequence[Arrived], rest: Rest, draft: Draft) -> None:
        """Take the last messages and all the rest, in one commit: from now on it is seen.

        ``draft`` has what else changes with it.
        """
        ground, session = self._ground, self._session
        fresh = self._fresh(messages)
        check_rest(rest, fresh[-1].number if fresh else self.last)
        self._check_calls(rest.state, fresh)
        for fold in rest.folds:
            flat = [each for run in fold.runs for each in run]
            key = (session, digits(fold.number))
            draft.put(ground.folds, key, [fold.note, flat, *fold[3:]])
        for used in rest.usage:
            key3 = (session, digits(used.send), digits(used.round))
            draft.put(ground.usage, key3, [*used.tokens, used.created_at_ms])
        if rest.totals != UsageTotals():
            draft.put(ground.totals, (session,), list(rest.totals))
        row = rest.row._replace(brought_in=self._revision + 1)
        self._commit(fresh, rest.state, born(ground, draft, session, row))

    def _check_calls(self, state: LogState, fresh: Sequence[Arrived]) -> None:
        """Refuse calls that wait and that no message makes: nobody could ever end the waiting."""
        made: dict[str, Any] = {}
        if state.calling > self.last:
            made = next((one.payload for one in fresh if one.number == state.calling), made)
        elif state.calling and self._state is not None:
            nodes = nodes_of(self._ground, self._session, self._state, self.last)
            made = next((node.payload for node in nodes.between(*[state.calling] * 2)), made)
        if Counter(state.calls) - Counter(call_ids(made.get("tool_calls"))) or (
            bool(state.calling) != bool(state.calls)
        ):
            raise InvalidInputError(
                f"message {state.calling} does not make the calls {state.calls!r:.80} that wait"
            )

    def _fresh(self, messages: Sequence[Arrived]) -> list[Arrived]:
        """Those that are not in yet. SessionExistsError if one that is, is another."""
        before = 0
        for one in messages:
            if one.number <= before:
                raise InvalidInputError(f"message {one.number} does not come behind {before}")
            before = one.number
        known = [one for one in messages if one.number <= self.last]
        if known:
            assert self._state is not None
            nodes = nodes_of(self._ground, self._session, self._state, self.last)
            found = list(nodes.between(known[0].number, known[-1].number))
            there = [(node.id, node.payload, node.time) for node in found]
            if there != [(str(one.number), *one[1:]) for one in known]:
                raise SessionExistsError(self._session)
        return list(messages[len(known) :])

    @property
    def _revision(self) -> int:
        return 0 if self._state is None else self._state.head.revision

    def _commit(self, fresh: list[Arrived], state: LogState | None, beside: Write | None) -> None:
        runtime = self._ground.runtime
        try:
            commit.commit(
                runtime,
                self._session,
                Commit(
                    append=[one.draft() for one in fresh],
                    checkpoint=None if state is None else Checkpoint(turn_state=pack(state)),
                    expected=self._revision,
                    lease=UNFENCED,
                    beside=beside,
                ),
            )
        except HeadConflictError as exc:
            raise SessionExistsError(self._session) from exc
        self._state = read_again(lambda: runtime.get(self._session))
        if fresh:
            self.last = fresh[-1].number


def check_rest(rest: Rest, last: int) -> None:
    """Refuse what no session is whose last message is ``last``."""
    check_row(rest.row)
    check_number(rest.row.created_at_ms, "the time when a session began", least=1)
    check_number(rest.row.updated_at_ms, "the time when a session changed", least=1)
    state = rest.state
    for number in (state.send, state.round, state.folds):
        check_number(number, "a send, a round or a number of folds")
    if any(type(call) is not str for call in state.calls):
        raise InvalidInputError(f"calls are named by texts, not {state.calls!r:.80}")
    fault = state_fault(state, last)
    if fault is not None:
        raise InvalidInputError(f"the session's state {fault}")
    before = 0
    for fold in rest.folds:
        _check_fold(fold, last)
        if not before < fold.number <= state.folds:
            raise InvalidInputError(f"fold {fold.number} does not follow {before}")
        before = fold.number
    for used in rest.usage:
        check_number(used.send, "a send")
        check_number(used.round, "a round")
        check_number(used.created_at_ms, "the time of a round")
        check_tokens(used.tokens)
    used_rounds = [(1, *[number or 0 for number in used.tokens[:3]]) for used in rest.usage]
    for at, total in enumerate(rest.totals):
        check_number(total, "a total")
        if total < sum([each[at] for each in used_rounds]):
            raise InvalidInputError("the totals are less than what the rounds have used")


def _check_fold(fold: Fold, last: int) -> None:
    check_number(fold.number, "a fold")
    check_number(fold.created_at_ms, "the time of a fold")
    for number in (fold.before_tokens, fold.after_tokens, fold.round):
        if number is not None:
            check_number(number, "what a fold counts")
    for number in (fold.note, *[each for run in fold.runs for each in run]):
        check_number(number, "a message of a fold")
    if not fold.runs or any(first > end for first, end in fold.runs):
        raise InvalidInputError(f"fold {fold.number} is of no messages")
    if not fold.last < fold.note <= last:
        raise InvalidInputError(f"fold {fold.number} is of messages that are not there")
