"""Imports a session: first the messages, in several commits; then everything else, in one.

The session is visible only after the last commit. An interrupted import continues when it is
repeated: messages that exist already must be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import HeadConflictError, InvalidInputError, SessionExistsError
from casstore.records.log.data import Fold, RoundUsage, UsageTotals, check_number
from casstore.records.log.messages import call_ids, nodes_of
from casstore.records.log.state import LogState, pack, state_fault
from casstore.records.log.tables import FoldRow, LogSessionRow, LogTables, TotalsRow, UsageRow
from casstore.records.log.tree import born, check_row
from casstore.records.log.usage import check_tokens
from casstore.session import commit
from casstore.session.attempts import read_again
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.session.records import Draft
from casstore.session.state import State


class Rest(NamedTuple):
    """Everything of a session except its messages."""

    row: LogSessionRow
    state: LogState
    folds: Sequence[Fold] = ()
    usage: Sequence[RoundUsage] = ()
    totals: UsageTotals = UsageTotals()


class Arrived(NamedTuple):
    """A message to import."""

    number: int
    payload: dict[str, Any]
    created_at_ms: int

    def draft(self) -> NodeDraft:
        """The node of this message."""
        return NodeDraft(str(self.number), self.payload, time=self.created_at_ms)


class Intake:
    """Imports one session: ``add`` any number of times, ``require_none_behind``, ``finish``."""

    def __init__(self, tables: LogTables, session: str) -> None:
        self._tables = tables
        self._session = session
        self._state = state = read_again(self._find)
        #: The number of the last imported message.
        self.last = 0 if state is None else int(state.manifest.leaf_id or 0)

    def _find(self) -> State | None:
        state = self._tables.runtime.find(self._session)
        if state is not None and self._tables.states.read(self._session, state).whole:
            raise SessionExistsError(self._session)
        return state

    def add(self, messages: Sequence[Arrived]) -> None:
        """Import the next messages in one commit; SessionExistsError if a stored one differs."""
        fresh = self._fresh(messages)
        if fresh or self._state is None:
            state = None if self._state is not None else LogState(whole=False)
            self._commit(fresh, state, None)
            self._state = read_again(lambda: self._tables.runtime.get(self._session))
            if fresh:
                self.last = fresh[-1].number

    def require_none_behind(self, last: int) -> None:
        """Refuse to continue an import whose stored session has more messages than the source."""
        if self.last > last:
            raise SessionExistsError(self._session)

    def finish(self, messages: Sequence[Arrived], rest: Rest, draft: Draft) -> None:
        """Import the last messages and the rest in one commit; it makes the session visible.

        ``draft`` has the other changes of this commit.
        """
        tables, session = self._tables, self._session
        fresh = self._fresh(messages)
        check_rest(rest, fresh[-1].number if fresh else self.last)
        self._check_calls(rest.state, fresh)
        for fold in rest.folds:
            tables.folds.put(draft, FoldRow(session, *fold))
        for used in rest.usage:
            tables.usage.put(draft, UsageRow.of(session, used))
        if rest.totals != UsageTotals():
            tables.totals.put(draft, TotalsRow(session, *rest.totals))
        row = rest.row._replace(brought_in=self._revision + 1)
        self._commit(fresh, rest.state, born(tables, draft, row))

    def _check_calls(self, state: LogState, fresh: Sequence[Arrived]) -> None:
        """Refuse pending calls that no message makes: they could never be resolved."""
        made: dict[str, Any] = {}
        if state.calling > self.last:
            made = next((one.payload for one in fresh if one.number == state.calling), made)
        elif state.calling and self._state is not None:
            nodes = nodes_of(self._tables, self._session, self._state, self.last)
            made = next((node.payload for node in nodes.between(*[state.calling] * 2)), made)
        if Counter(state.calls) - Counter(call_ids(made.get("tool_calls"))) or (
            bool(state.calling) != bool(state.calls)
        ):
            raise InvalidInputError(
                f"pending calls {state.calls!r:.80} are not tool calls of message {state.calling}"
            )

    def _fresh(self, messages: Sequence[Arrived]) -> list[Arrived]:
        """The messages not imported yet. SessionExistsError if a stored message differs."""
        before = 0
        for one in messages:
            if one.number <= before:
                raise InvalidInputError(
                    f"message {one.number} must have a higher number than {before}"
                )
            before = one.number
        known = [one for one in messages if one.number <= self.last]
        if known:
            assert self._state is not None
            nodes = nodes_of(self._tables, self._session, self._state, self.last)
            found = list(nodes.between(known[0].number, known[-1].number))
            there = [(node.id, node.payload, node.time) for node in found]
            if there != [(str(one.number), *one[1:]) for one in known]:
                raise SessionExistsError(self._session)
        return list(messages[len(known) :])

    @property
    def _revision(self) -> int:
        return 0 if self._state is None else self._state.head.revision

    def _commit(self, fresh: list[Arrived], state: LogState | None, also: Write | None) -> None:
        runtime = self._tables.runtime
        try:
            commit.commit(
                runtime,
                self._session,
                Commit(
                    append=[one.draft() for one in fresh],
                    checkpoint=None if state is None else Checkpoint(turn_state=pack(state)),
                    expected=self._revision,
                    also=also,
                ),
            )
        except HeadConflictError as exc:
            raise SessionExistsError(self._session) from exc


def check_rest(rest: Rest, last: int) -> None:
    """Refuse a state that is invalid for a session whose last message is ``last``."""
    check_row(rest.row)
    check_number(rest.row.created_at_ms, "created_at_ms of the session", least=1)
    check_number(rest.row.updated_at_ms, "updated_at_ms of the session", least=1)
    state = rest.state
    for number in (state.send, state.round, state.folds):
        check_number(number, "send, round and folds of the state")
    if any(type(call) is not str for call in state.calls):
        raise InvalidInputError(f"ids of pending calls must be str, got {state.calls!r:.80}")
    fault = state_fault(state, last)
    if fault is not None:
        raise InvalidInputError(f"the session's state {fault}")
    before = 0
    for fold in rest.folds:
        _check_fold(fold, last)
        if not before < fold.number <= state.folds:
            raise InvalidInputError(
                f"fold {fold.number} must have a number from {before + 1} to {state.folds}"
            )
        before = fold.number
    for used in rest.usage:
        check_number(used.send, "send of a usage entry")
        check_number(used.round, "round of a usage entry")
        check_number(used.created_at_ms, "created_at_ms of a usage entry")
        check_tokens(used.tokens)
    used_rounds = [(1, *[number or 0 for number in used.tokens[:3]]) for used in rest.usage]
    for at, total in enumerate(rest.totals):
        check_number(total, "each of the totals")
        if total < sum([each[at] for each in used_rounds]):
            raise InvalidInputError("the totals are less than what the rounds have used")


def _check_fold(fold: Fold, last: int) -> None:
    check_number(fold.number, "the number of a fold")
    check_number(fold.created_at_ms, "created_at_ms of a fold")
    for number in (fold.before_tokens, fold.after_tokens, fold.round):
        if number is not None:
            check_number(number, "a count of a fold")
    for number in (fold.note, *[each for run in fold.runs for each in run]):
        check_number(number, "a message number of a fold")
    if not fold.runs or any(first > end for first, end in fold.runs):
        raise InvalidInputError(f"fold {fold.number} has no messages")
    if not fold.last < fold.note <= last:
        raise InvalidInputError(f"fold {fold.number} has messages that do not exist")
