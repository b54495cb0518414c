"""The session log as a record system: what it stores, its check, and rows of deleted sessions.

A store deletes the graph of a session and does not know the log. Until the log's rows about a
deleted session are gone they hold what was to be deleted: the prompt, the metadata, the usage.
Sessions below a deleted one stay, as roots. A fork that was not adopted has no row of its own, but
usage, folds and the inbox stand under its name as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.log import tree
from casstore.records.log.check import CODES, LogCheck
from casstore.records.log.ground import Ground
from casstore.session import keys
from casstore.session.heads import decode_head, head_key
from casstore.session.records import Draft, Table
from casstore.session.state import tombstone_key
from casstore.store import Store

_PAGE: Final = 256


def forget(store: Store, session: str) -> bool:
    """Remove the rows about a session if the store has deleted it; were there any?"""
    ground = Ground(store)
    if not _are_deleted(ground, [session])[0]:
        return False
    if tree.close(ground, session, cascade=False):
        return True
    # No writer adds rows about a session that was deleted for good, so no condition is needed.
    draft = Draft(store)
    rows = [(table, row) for table in _below(ground) for row in table.scan(session)]
    for table, row in rows:
        draft.delete(table, row.key)
    draft.commit()
    return bool(rows)


def sweep(store: Store, pulse: Callable[[int], None]) -> int:
    """Remove the rows about all sessions that the store has deleted; of how many sessions."""
    ground = Ground(store)
    seen = forgotten = 0
    # A session that has usage has totals, too.
    for table in (ground.sessions, ground.totals, ground.folds, ground.inbox):
        names = (session for session, _ in groupby(table.scan(), lambda record: record.key[0]))
        while page := list(islice(names, _PAGE)):
            for session, is_deleted in zip(page, _are_deleted(ground, page), strict=True):
                forgotten += is_deleted and forget(store, session)
                seen += 1
                pulse(seen)
    return forgotten


def _below(ground: Ground) -> tuple[Table, ...]:
    """The tables keyed by session, other than that of sessions."""
    return ground.totals, ground.folds, ground.usage, ground.inbox


def _are_deleted(ground: Ground, sessions: list[str]) -> list[bool]:
    places = [tombstone_key(keys.session_key(session)) for session in sessions]
    return [row is not None for row in ground.store.engine.get_rows(places)]


class LogSystem(RecordSystem):
    """Sessions of the log. Their messages are nodes of the store's sessions of the same ids."""

    name = "log"
    version = 1
    title = "Session log"
    tables = (
        "log.children",
        "log.folds",
        "log.inbox",
        "log.sessions",
        "log.totals",
        "log.usage",
    )
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Sessions that the log has a row of, by id."""
        ground = Ground(store)
        found: list[SystemEntry] = []
        for (session,) in entry_keys(ground.sessions, 1, after=after, limit=limit):
            record = ground.sessions.find(session)
            if record is None:
                continue
            row = tree.decode(record)
            [head] = store.engine.get_rows([head_key(keys.session_key(session))])
            if head is not None:
                row = row.as_of(decode_head(head))
            size_bytes = sum(
                [table.size_bytes(session) for table in (ground.sessions, *_below(ground))]
            )
            title = f"{row.kind}, {row.status}"
            found.append(SystemEntry(session, title, row.updated_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Compare numbers of messages, the tree of sessions and usage with the store."""
        return LogCheck(store, facts, whole=whole).judges()

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove the rows about sessions that were deleted; of how many sessions."""
        return sweep(store, pulse)

    def rows_of_session(self, store: Store, session: str) -> Iterator[bytes]:
        """The keys of the rows about a session."""
        ground = Ground(store)
        for table in (ground.sessions, *_below(ground)):
            for record in table.scan(session):
                yield table.keys.key(record.key)

    def forget_session(self, store: Store, session: str) -> None:
        """Remove the rows about a session that was deleted."""
        forget(store, session)


SYSTEM: Final = LogSystem()
