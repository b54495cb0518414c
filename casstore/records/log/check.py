"""Session logs: numbers of messages against the graph, sessions below sessions, usage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from casstore.engine.protocol import Row, RowKey
from casstore.errors import CorruptionError, NotALogError
from casstore.format.manifest import NOTHING
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, INFO, RESTORE, Meaning, Where
from casstore.records.log import folding, tree
from casstore.records.log.data import UsageTotals
from casstore.records.log.ground import At, Ground, digits
from casstore.records.log.reading import Numbered, numbered
from casstore.records.log.state import state_fault
from casstore.records.log.usage import decode as decode_usage
from casstore.session import keys
from casstore.session.attempts import read_again
from casstore.session.records import Record, Table
from casstore.store import Store

LOG_NUMBERS_WRONG: Final = "log_numbers_wrong"
LOG_GAP: Final = "log_gap"
LOG_TREE_WRONG: Final = "log_tree_wrong"

#: What only the check of session logs finds.
CODES: Final = {
    LOG_NUMBERS_WRONG: Meaning(
        ERROR, "the messages of a log are not numbered without a gap, or it shows some that it "
        "does not have, or its leaf was moved back",
        f"rewind the session to a revision before that; else {RESTORE}",
    ),
    LOG_GAP: Meaning(
        INFO, "a log shows messages that were hidden or removed one by one, not by pruning",
        codes.NOTHING,
    ),
    LOG_TREE_WRONG: Meaning(
        ERROR, "a session of a log and its parent do not agree about each other",
        f"{RESTORE}; or close the session, if nobody needs it",
    ),
}  # fmt: skip


class LogCheck:
    """Judges the records of session logs; ``whole``: every message, not only how many."""

    def __init__(self, store: Store, facts: Facts, *, whole: bool) -> None:
        self._ground = Ground(store)
        self._facts = facts
        self._whole = whole

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        ground = self._ground
        return {
            ground.sessions: self._session,
            ground.children: self._child,
            ground.totals: self._totals,
            ground.usage: self._usage,
        }

    # --- sessions below sessions ------------------------------------------------------------------

    def _session(self, record: Record) -> None:
        row, ground, session = tree.decode(record), self._ground, record.key[0]
        tree.check_row(row)
        key, own = keys.session_key(session), ground.sessions.place(session)
        head = RowKey("heads", key)

        def judge_there(values: Sequence[bytes | None]) -> str | None:
            found, there, deleted = values
            # One that its store has deleted stays until the log closes it.
            if found != record.row or there is not None or deleted is not None:
                return None
            return f"the log knows session {session!r}, which is not there"

        where = where_is(ground.sessions, [session], session)
        places = [own, head, RowKey("tombstones", key)]
        self._facts.ask(codes.RECORD_ORPHANED, where, places, judge_there)
        if row.parent is not None:
            self._below(record, row, row.parent)
        self._facts.count(head, lambda _: self._look(session))

    def _below(self, record: Record, row: tree.Row, parent: str) -> None:
        ground, session = self._ground, record.key[0]
        places = [
            ground.sessions.place(session),
            ground.sessions.place(parent),
            ground.children.place(parent, digits(row.place)),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, above, entry = values
            if own != record.row:
                return None
            title = f"session {session!r} stands below {parent!r}"
            if above is None:
                return f"{title}, which the log does not know"
            told = tree.decode(self._record(ground.sessions, (parent,), above))
            if told.depth + 1 != row.depth or told.children < row.place:
                return f"{title} at depth {row.depth} and place {row.place}, unlike that one says"
            if entry is None or self._child_of(parent, row.place, entry) != session:
                return f"{title}, and is not found there"
            return None

        where = where_is(ground.sessions, [session], session)
        self._facts.ask(LOG_TREE_WRONG, where, places, judge)

    def _record(self, table: Table, key: tuple[str, ...], row: bytes) -> Record:
        return table.record_of(Row(table.keys.key(key), row))

    def _child_of(self, parent: str, place: int, entry: bytes) -> object:
        return self._record(self._ground.children, (parent, digits(place)), entry).value

    def _child(self, record: Record) -> None:
        ground, (parent, place), session = self._ground, record.key, record.value
        places = [ground.children.place(parent, place), ground.sessions.place(session)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, child = values
            if own != record.row:
                return None
            if child is not None:
                told = tree.decode(self._record(ground.sessions, (session,), child))
                if (told.parent, told.place) == (parent, int(place)):
                    return None
            return f"session {parent!r} has {session!r} below it, which does not stand there"

        where = where_is(ground.children, [parent, place], parent)
        self._facts.ask(LOG_TREE_WRONG, where, places, judge)

    # --- messages ---------------------------------------------------------------------------------

    def _look(self, session: str) -> Iterator[Wrong]:
        where = Where(session)
        ground = self._ground
        state = read_again(lambda: ground.runtime.get(session))
        try:
            if not ground.states.read(session, state).whole:
                return  # an import that was not finished says so itself
            at = ground.at(session)
        except (NotALogError, CorruptionError) as exc:
            yield Wrong(LOG_NUMBERS_WRONG, f"session {session!r}: {exc}", where)
            return
        what = state_fault(at.state, at.last) or self._fold_fault(at)
        nodes = numbered(ground, at, payloads=False)
        if what is None:
            what = self._count_fault(at, nodes)
        if what is None and at.revision.manifest.tips.data != NOTHING.data:
            what = f"has messages beside those up to its last, {at.last}: its leaf was moved back"
        if what is None and self._whole:
            what = self._order_fault(at, nodes)
        if what is not None:
            says = f"the log of session {session!r} {what}"
            yield Wrong(LOG_NUMBERS_WRONG, says, where)
            return
        missing = _missing(at, nodes)
        if missing:
            says = f"the log of session {session!r} shows {missing} messages that are gone"
            yield Wrong(LOG_GAP, says, where)

    def _fold_fault(self, at: At) -> str | None:
        folds = self._ground.folds.scan(at.session, before=digits(at.state.folds + 1))
        for row in folds:
            fold = folding.decode(row)
            if not fold.last < fold.note <= at.last:
                return f"has fold {fold.number}, of messages that it does not have"
        return None

    def _count_fault(self, at: At, nodes: Numbered) -> str | None:
        count = len(nodes.nodes)
        if count > at.last:
            return f"has {count} messages, and the last is number {at.last}"
        return None

    def _order_fault(self, at: At, nodes: Numbered) -> str | None:
        before = 0
        for node in nodes.nodes:
            if not node.id.isdecimal() or not before < int(node.id) <= at.last:
                return f"has message {node.id!r} behind number {before}"
            before = int(node.id)
        return None

    # --- usage ------------------------------------------------------------------------------------

    def _totals(self, record: Record) -> None:
        UsageTotals(*record.value)
        table, session = self._ground.totals, record.key[0]
        self._facts.count(
            table.place(session),
            lambda row: self._look_at_usage(session, self._record(table, (session,), row)),
        )

    def _look_at_usage(self, session: str, record: Record) -> Iterator[Wrong]:
        """Rounds may be pruned, and totals stay: they come to no less than what is there."""
        told = UsageTotals(*record.value)
        summed = [0, 0, 0, 0]
        for row in self._ground.usage.scan(session):
            tokens = decode_usage(row).tokens
            summed[0] += 1
            for at, number in enumerate(tokens[:3], 1):
                summed[at] += number or 0
        if any(less < more for less, more in zip(told, summed, strict=True)):
            says = (
                f"the usage of session {session!r} comes to {tuple(told)}, and its rounds alone "
                f"to {tuple(summed)}"
            )
            where = where_is(self._ground.totals, [session], session)
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def _usage(self, record: Record) -> None:
        decode_usage(record)
        ground, session = self._ground, record.key[0]
        places = [ground.usage.place(*record.key), ground.totals.place(session)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or values[1] is not None:
                return None
            return f"session {session!r} has used something, and its totals are lost"

        where = where_is(ground.usage, record.key, session)
        self._facts.ask(codes.RECORD_COUNT_WRONG, where, places, judge)


def _missing(at: At, nodes: Numbered) -> int:
    """How many of the messages that are shown are not there: hidden one by one, or lost."""
    if len(nodes.nodes) == at.last:
        return 0
    return sum(
        last - first + 1 - len(nodes.between(first, last))
        for first, last in at.state.view.shown(at.last)
    )
