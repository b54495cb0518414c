"""The session log as a record system: what it stores, its check, and rows of deleted sessions.

``store.delete_session`` deletes the graph of a session, but not the log's rows about it. Until they
are removed, they still hold its prompt, metadata and usage. Children of a deleted session stay, as
roots. A fork that was not adopted has no session row, but may have rows for usage, folds and the
inbox.

The check compares message numbers, the tree of sessions, and the totals of usage. The schemas check
the rest: every row decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Final

from casstore.engine.protocol import RowKey
from casstore.errors import CorruptionError, NotALogError
from casstore.format.graph import NIL
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, INFO, RESTORE, Meaning, Where
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.log import tree
from casstore.records.log.folding import folds_of
from casstore.records.log.messages import Numbered, numbered
from casstore.records.log.state import state_fault
from casstore.records.log.tables import (
    SCHEMAS,
    SESSIONS,
    TOTALS,
    At,
    LogSessionRow,
    LogTables,
    TotalsRow,
)
from casstore.records.schema import RowTable, tables_of
from casstore.records.schema_check import judges
from casstore.session import keys
from casstore.session.attempts import read_again
from casstore.session.records import Draft, Record, Table
from casstore.session.state import decode_head, head_key, tombstone_key
from casstore.store import Store

LOG_NUMBERS_WRONG: Final = "log_numbers_wrong"
LOG_GAP: Final = "log_gap"
LOG_TREE_WRONG: Final = "log_tree_wrong"

#: Findings that only this check reports.
CODES: Final = {
    LOG_NUMBERS_WRONG: Meaning(
        ERROR, "the messages of a log are not in order of their numbers, or its state refers to "
        "messages that it does not have, or its leaf was moved back",
        f"rewind the session to a revision before that; else {RESTORE}",
    ),
    LOG_GAP: Meaning(
        INFO, "a log shows messages that were hidden or removed one by one, not by pruning",
        codes.NOTHING,
    ),
    LOG_TREE_WRONG: Meaning(
        ERROR, "the parent of a session of a log has no row, or disagrees about depth or number of "
        "children",
        f"{RESTORE}; or close the session, if it is not needed",
    ),
}  # fmt: skip
_PAGE: Final = 256


def forget(store: Store, session: str) -> bool:
    """Remove the rows of a session if the store has deleted it; returns whether there were any."""
    tables = LogTables(store)
    if not _are_deleted(tables, [session])[0]:
        return False
    if tree.close(tables, session, cascade=False):
        return True
    # No writer adds rows about a session that was deleted for good, so no condition is needed.
    draft = Draft(store)
    rows = [(table, row) for table in _below(tables) for row in table.scan(session)]
    for table, row in rows:
        draft.delete(table, row.key)
    draft.commit()
    return bool(rows)


def sweep(store: Store, progress: Callable[[int], None]) -> int:
    """Remove the rows of all sessions that the store has deleted; returns how many sessions."""
    tables = LogTables(store)
    seen = forgotten = 0
    # Every session with usage also has a totals row, so ``usage`` need not be scanned.
    for table in (tables.sessions, tables.totals, tables.folds, tables.inbox):
        names = (session for session, _ in groupby(table.scan(), lambda record: record.key[0]))
        while page := list(islice(names, _PAGE)):
            for session, is_deleted in zip(page, _are_deleted(tables, page), strict=True):
                forgotten += is_deleted and forget(store, session)
                seen += 1
                progress(seen)
    return forgotten


def _below(tables: LogTables) -> tuple[Table, ...]:
    """The tables keyed by session, other than that of sessions."""
    return tables.totals, tables.folds, tables.usage, tables.inbox


def _are_deleted(tables: LogTables, sessions: list[str]) -> list[bool]:
    places = [tombstone_key(keys.session_key(session)) for session in sessions]
    return [row is not None for row in tables.store.engine.get_rows(places)]


class LogSystem(RecordSystem):
    """Sessions of the log. Their messages are nodes of the store's sessions of the same ids."""

    name = "log"
    version = 1
    title = "Session log"
    tables = tables_of(*SCHEMAS)
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """A page of the sessions that have a row in the log, by id."""
        tables = LogTables(store)
        found: list[SystemEntry] = []
        for (session,) in entry_keys(tables.sessions, 1, after=after, limit=limit):
            row = tables.sessions.get(session)
            if row is None:
                continue
            [head] = store.engine.get_rows([head_key(keys.session_key(session))])
            if head is not None:
                row = row.as_of(decode_head(head))
            size_bytes = sum(
                [table.size_bytes(session) for table in (tables.sessions, *_below(tables))]
            )
            title = f"{row.kind}, {row.status}"
            found.append(SystemEntry(session, title, row.updated_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """The checks of message numbers, the tree of sessions, and the totals of usage."""
        own = LogCheck(store, facts, whole=whole)
        tables = [RowTable(store, schema) for schema in SCHEMAS]
        return judges(store, facts, tables, {SESSIONS: own.session}, {TOTALS: own.usage})

    def expire(self, store: Store, progress: Callable[[int], None]) -> int:
        """Remove the rows about deleted sessions; returns the number of those sessions."""
        return sweep(store, progress)

    def rows_of_session(self, store: Store, session: str) -> Iterator[bytes]:
        """The keys of the rows about a session."""
        tables = LogTables(store)
        for table in (tables.sessions, *_below(tables)):
            for record in table.scan(session):
                yield table.keys.key(record.key)

    def forget_session(self, store: Store, session: str) -> None:
        """Remove the rows about a session that was deleted."""
        forget(store, session)


# --- the check ------------------------------------------------------------------------------------


class LogCheck:
    """Checks the records of session logs; ``whole``: every message, not only their count."""

    def __init__(self, store: Store, facts: Facts, *, whole: bool) -> None:
        self._tables = LogTables(store)
        self._facts = facts
        self._whole = whole

    # --- child sessions ---------------------------------------------------------------------------

    def session(self, record: Record, row: LogSessionRow) -> None:
        """Compare a session of the log with the store's session, its parent and its messages."""
        tree.check_row(row)
        tables, session = self._tables, row.session
        key, own = keys.session_key(session), tables.sessions.place(session)
        head = RowKey("heads", key)

        def judge_there(values: Sequence[bytes | None]) -> str | None:
            found, there, deleted = values
            # No error: a session that the store has deleted keeps its row until the log closes it.
            if found != record.row or there is not None or deleted is not None:
                return None
            return f"the log has a row of session {session!r}, which does not exist"

        where = where_is(tables.sessions, [session], session)
        places = [own, head, RowKey("tombstones", key)]
        self._facts.ask(codes.RECORD_ORPHANED, where, places, judge_there)
        if row.parent is not None:
            self._below(record, row, row.parent)
        self._facts.count(head, lambda _: self._look(session))

    def _below(self, record: Record, row: LogSessionRow, parent: str) -> None:
        sessions = self._tables.sessions
        places = [sessions.place(row.session), sessions.place(parent)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, above = values
            if own != record.row:
                return None
            title = f"session {row.session!r} has the parent {parent!r}"
            if above is None:
                return f"{title}, of which the log has no row"
            found = sessions.row_of((parent,), above)
            if found.depth + 1 != row.depth or found.children < row.place:
                return f"{title}, depth {row.depth} and place {row.place}; the parent disagrees"
            return None

        where = where_is(sessions, [row.session], row.session)
        self._facts.ask(LOG_TREE_WRONG, where, places, judge)

    # --- messages ---------------------------------------------------------------------------------

    def _look(self, session: str) -> Iterator[Wrong]:
        where = Where(session)
        tables = self._tables
        state = read_again(lambda: tables.runtime.get(session))
        try:
            if not tables.states.read(session, state).whole:
                return  # using it raises an error that says its import is unfinished
            at = tables.at(session)
        except (NotALogError, CorruptionError) as exc:
            yield Wrong(LOG_NUMBERS_WRONG, f"session {session!r}: {exc}", where)
            return
        nodes = numbered(tables, at, payloads=False)
        what = self._fault(at, nodes)
        if what is not None:
            says = f"the log of session {session!r} {what}"
            yield Wrong(LOG_NUMBERS_WRONG, says, where)
            return
        missing = _missing(at, nodes)
        if missing:
            says = f"the log of session {session!r} shows {missing} messages that are gone"
            yield Wrong(LOG_GAP, says, where)

    def _fault(self, at: At, nodes: Numbered) -> str | None:
        """What is wrong with the state and the messages of a log, or None."""
        fault = state_fault(at.state, at.last)
        if fault is not None:
            return fault
        for fold in folds_of(self._tables, at.session, at.state):
            if not fold.last < fold.note <= at.last:
                return f"has fold {fold.number}, of messages that it does not have"
        if len(nodes.nodes) > at.last:
            return f"has {len(nodes.nodes)} messages, and the last is number {at.last}"
        if at.revision.manifest.tips.data != NIL.data:
            return f"has messages after its last, {at.last}: its leaf was moved back"
        before = 0
        for node in nodes.nodes if self._whole else ():
            if not node.id.isdecimal() or not before < int(node.id) <= at.last:
                return f"has message {node.id!r} after number {before}"
            before = int(node.id)
        return None

    # --- usage ------------------------------------------------------------------------------------

    def usage(self, row: TotalsRow) -> Iterator[Wrong]:
        """Compare totals with the rounds. Totals may be greater, because rounds may be pruned."""
        summed = [0, 0, 0, 0]
        for used in self._tables.usage.rows(row.session):
            summed[0] += 1
            for at, number in enumerate(used.tokens[:3], 1):
                summed[at] += number or 0
        if any(less < more for less, more in zip(row[1:], summed, strict=True)):
            says = (
                f"the totals of session {row.session!r} are {row[1:]}, less than the sum of its "
                f"rounds, {tuple(summed)}"
            )
            where = where_is(self._tables.totals, [row.session], row.session)
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)


def _missing(at: At, nodes: Numbered) -> int:
    """How many shown messages do not exist: hidden one by one, or lost."""
    if len(nodes.nodes) == at.last:
        return 0
    return sum(
        last - first + 1 - len(nodes.between(first, last))
        for first, last in at.state.view.shown(at.last)
    )


SYSTEM: Final = LogSystem()
