"""The session log as a record system: what it stores, its check, and rows of deleted sessions.

``store.delete_session`` deletes the graph of a session, but not the log's rows about it. Until they
are removed, they still hold its prompt, metadata and usage. Children of a deleted session stay, as
roots. A fork that was not adopted has no session row, but may have rows for usage, folds and the
inbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.log import tree
from casstore.records.log.check import CODES, LogCheck
from casstore.records.log.layout import SCHEMAS
from casstore.records.log.tables import LogTables
from casstore.records.schema import tables_of
from casstore.session import keys
from casstore.session.records import Draft, Table
from casstore.session.state import decode_head, head_key, tombstone_key
from casstore.store import Store

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


def sweep(store: Store, pulse: Callable[[int], None]) -> int:
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
                pulse(seen)
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
        return LogCheck(store, facts, whole=whole).judges()

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove the rows about deleted sessions; returns the number of those sessions."""
        return sweep(store, pulse)

    def rows_of_session(self, store: Store, session: str) -> Iterator[bytes]:
        """The keys of the rows about a session."""
        tables = LogTables(store)
        for table in (tables.sessions, *_below(tables)):
            for record in table.scan(session):
                yield table.keys.key(record.key)

    def forget_session(self, store: Store, session: str) -> None:
        """Remove the rows about a session that was deleted."""
        forget(store, session)


SYSTEM: Final = LogSystem()
