"""The tree of sessions: creates, reads, updates and closes sessions.

One write closes a session with all descendants that are deleted with it. Children that stay become
roots with their subtrees, and their depths change accordingly.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final

from casstore.engine.protocol import RowIs, RowStarts, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    HeadConflictError,
    InvalidInputError,
    SessionExistsError,
    SessionNotFoundError,
    SpawnDepthError,
)
from casstore.records.log.data import (
    ACTIVE,
    ARCHIVED,
    COMPLETED,
    DETACHED,
    EPHEMERAL,
    KINDS,
    LIFECYCLES,
    SUBAGENT,
    LogSession,
)
from casstore.records.log.state import LogState, pack
from casstore.records.log.tables import LogSessionRow, LogTables
from casstore.session import catalogue, commit, keys
from casstore.session.arguments import check_count, check_flag, check_text
from casstore.session.attempts import read_again, transact, transaction
from casstore.session.catalogue import KnownSession
from casstore.session.data import Checkpoint, Commit, SessionMeta
from casstore.session.records import Draft, Record
from casstore.session.state import decode_head, head_key, meta_key, tombstone_key

_ID_BYTES: Final = 12
_PREFIX: Final = "sess_"
_CHANGEABLE: Final = ("prompt", "model", "config", "metadata")


def new_id() -> str:
    """A unique random id."""
    return _PREFIX + secrets.token_hex(_ID_BYTES)


def check_row(row: LogSessionRow) -> None:
    """Refuse an invalid session row."""
    if row.kind not in KINDS or row.lifecycle not in LIFECYCLES:
        raise InvalidInputError(
            f"kind must be {' or '.join(KINDS)} and lifecycle {' or '.join(LIFECYCLES)}, got "
            f"{row.kind!r} and {row.lifecycle!r}"
        )
    if row.status not in (ACTIVE, ARCHIVED):
        raise InvalidInputError(f"status must be {ACTIVE!r} or {ARCHIVED!r}, got {row.status!r}")
    for text in (row.spawn_call, row.prompt, row.model):
        if text is not None and type(text) is not str:
            raise InvalidInputError(
                f"prompt, model and spawn_call must be str or None, got {text!r:.80}"
            )
    for known in (row.config, row.metadata):
        if type(known) is not dict:
            raise InvalidInputError(f"config and metadata must be dicts, got {known!r:.80}")


# --- creating -----------------------------------------------------------------------------


@transaction("the parent of session {row.session!r}")
def create(tables: LogTables, row: LogSessionRow, depth_limit: int) -> LogSession:
    """Create a session, as a child of its parent if it has one.

    SessionNotFoundError if the parent does not exist, SpawnDepthError if the session would be too
    deep, SessionExistsError if the id is taken. After an error nothing was created.
    """
    check_row(row)
    session = row.session
    draft = Draft(tables.store)
    placed = below_parent(tables, draft, row, depth_limit)
    change = Commit(
        checkpoint=Checkpoint(turn_state=pack(LogState())),
        expected=0,
        also=born(tables, draft, placed),
    )
    try:
        commit.commit(tables.runtime, session, change)
    except HeadConflictError as exc:
        raise SessionExistsError(session) from exc
    except ConditionFailedError:
        if _is_taken(tables, session):
            raise SessionExistsError(session) from None
        raise
    return placed.public()


def _is_taken(tables: LogTables, session: str) -> bool:
    place = meta_key(keys.session_key(session))
    return (
        tables.sessions.find(session) is not None
        or tables.store.engine.get_rows([place])[0] is not None
    )


def below_parent(
    tables: LogTables, draft: Draft, row: LogSessionRow, depth_limit: int
) -> LogSessionRow:
    """The row of a session with its times, depth, and number among its parent's children.

    Adds the parent's new count of children to ``draft``. SessionNotFoundError without the parent,
    SpawnDepthError if the session would be too deep.
    """
    now_ms = tables.now_ms()
    row = row._replace(created_at_ms=row.created_at_ms or now_ms)
    row = row._replace(updated_at_ms=row.updated_at_ms or row.created_at_ms)
    if row.parent is None:
        return row._replace(depth=0)
    found = tables.sessions.find(row.parent)
    if found is None:
        raise SessionNotFoundError(row.parent)
    parent_key = keys.session_key(row.parent)
    if tables.store.engine.get_rows([head_key(parent_key)])[0] is None:
        raise SessionNotFoundError(row.parent)
    parent = tables.sessions.decode(found)
    if parent.depth + 1 > depth_limit:
        raise SpawnDepthError(row.parent, parent.depth + 1, depth_limit)
    place = parent.children + 1
    draft.expect(tables.sessions, (row.parent,), found)
    draft.also(Write(conditions=[RowStarts(*head_key(parent_key), b"")]))
    tables.sessions.put(draft, parent._replace(children=place), parent)
    return row._replace(kind=SUBAGENT, depth=parent.depth + 1, place=place)


@transaction("session {row.session!r} or its parent")
def adopt(tables: LogTables, row: LogSessionRow, depth_limit: int) -> LogSession:
    """Add a row for a session that has log messages but no row: a fork, or one from a bundle.

    Errors as for ``create``, and SessionNotFoundError if the session does not exist.
    """
    check_row(row)
    session = row.session
    at = tables.load(session)
    known = row._replace(created_at_ms=at.revision.head.created_at_ms)
    draft = Draft(tables.store)
    placed = below_parent(tables, draft, known, depth_limit)
    draft.expect(tables.sessions, (session,), None)
    tables.sessions.put(draft, placed)
    there = RowStarts(*head_key(keys.session_key(session)), b"")
    draft.also(Write(conditions=[there]))
    try:
        draft.commit()
    except ConditionFailedError:
        if tables.sessions.find(session) is not None:
            raise SessionExistsError(session) from None
        raise
    return placed.as_of(at.revision.head).public()


def born(tables: LogTables, draft: Draft, row: LogSessionRow) -> Write:
    """The rows of a new session, for the commit that creates its graph."""
    session = row.session
    draft.expect(tables.sessions, (session,), None)
    tables.sessions.put(draft, row)
    meta = SessionMeta(
        session=session,
        name=session,
        created_at_ms=row.created_at_ms,
        model=row.model or None,
        cwd=None,
        parent=row.parent,
    )
    free = RowIs(*meta_key(keys.session_key(session)), None)
    draft.also(Write(conditions=[free], rows=[catalogue.put_meta(meta)]))
    return draft.as_write()


# --- reading ------------------------------------------------------------------------------


def find(tables: LogTables, session: str) -> LogSession | None:
    """A session, or None if it does not exist."""

    def read() -> LogSession | None:
        record = tables.sessions.find(session)
        return None if record is None else _public(tables, record)

    return read_again(read, (CorruptionError,))


def get_row(tables: LogTables, session: str) -> LogSessionRow:
    """The row of a session; SessionNotFoundError if it does not exist."""
    row = read_again(lambda: tables.sessions.get(session), (CorruptionError,))
    if row is None:
        raise SessionNotFoundError(session)
    return row


def _public(tables: LogTables, record: Record) -> LogSession | None:
    session = record.key[0]
    head = tables.store.engine.get_rows([head_key(keys.session_key(session))])[0]
    if head is None:
        # The store deleted the session, and the log has not closed it yet.
        return None
    return tables.sessions.decode(record).as_of(decode_head(head)).public()


def listed(tables: LogTables, after: str | None, limit: int | None) -> Iterator[LogSession]:
    """All sessions in order of id, a page at a time."""
    if limit is not None:
        check_count(limit, "limit")
    left = -1 if limit is None else limit
    records = tables.sessions.scan_starting("", after=after) if left else ()
    for found in tables.sessions.read_each(records, lambda record: _public(tables, record)):
        if found is not None:
            yield found
            left -= 1
            if not left:
                return


def children(tables: LogTables, session: str) -> list[LogSession]:
    """The direct children of a session, in order of creation."""
    rows = tables.sessions.indexed(tables.children, session)
    found = tables.sessions.read_each(rows, lambda record: _public(tables, record))
    return [each for each in found if each is not None]


# --- updating -----------------------------------------------------------------------------


def update_known(tables: LogTables, session: str, changes: dict[str, Any]) -> LogSession:
    """As ``update``; InvalidInputError for fields that callers may not change."""
    for name in changes:
        if name not in _CHANGEABLE:
            raise InvalidInputError(f"changes must be among {', '.join(_CHANGEABLE)}, got {name!r}")
    return update(tables, session, changes)


@transaction("session {session!r}")
def update(tables: LogTables, session: str, changes: dict[str, Any]) -> LogSession:
    """Change fields of a session."""
    record = tables.sessions.find(session)
    shown = None if record is None else _public(tables, record)
    if record is None or shown is None:
        raise SessionNotFoundError(session)
    before = tables.sessions.decode(record)
    row = before._replace(**changes, updated_at_ms=tables.now_ms())
    check_row(row)
    draft = Draft(tables.store)
    draft.expect(tables.sessions, (session,), record)
    tables.sessions.put(draft, row, before)
    draft.commit()
    updated_at_ms = max(row.updated_at_ms, shown.updated_at_ms)
    return row._replace(updated_at_ms=updated_at_ms).public()


# --- deleting -----------------------------------------------------------------------------


def finish(tables: LogTables, session: str, status: str) -> bool:
    """Delete an ephemeral child session if it has completed; returns whether it was deleted.

    A session with another status stays for inspection until its parent is deleted.
    """
    check_text(status, "status")
    row = get_row(tables, session)
    if status != COMPLETED or row.lifecycle != EPHEMERAL or row.parent is None:
        return False
    return close(tables, session, cascade=True) > 0


def close(tables: LogTables, session: str, *, cascade: bool) -> int:
    """Delete a session and the descendants that go with it; returns how many sessions."""
    check_flag(cascade, "cascade")

    def attempt() -> list[str]:
        going = _Closing(tables, session, cascade=cascade)
        if going.sessions:
            going.draft.commit()
        return going.sessions

    gone = transact(f"session {session!r}", attempt)
    for name in gone:
        catalogue.clear(tables.runtime, name, keys.session_key(name))
    return len(gone)


class _Closing:
    """The changes that close a session, and the sessions deleted: none if it does not exist."""

    def __init__(self, tables: LogTables, session: str, *, cascade: bool) -> None:
        self._tables = tables
        self.draft = Draft(tables.store)
        self.sessions: list[str] = []
        top = tables.sessions.find(session)
        going = [] if top is None else [top]
        while going:
            record = going.pop()
            self._take(record)
            for child in self._children(record.key[0]):
                row = self._tables.sessions.decode(child)
                if cascade and row.lifecycle != DETACHED:
                    going.append(child)
                else:
                    self._let_stay(child)

    def _children(self, session: str) -> list[Record]:
        return self._tables.sessions.indexed(self._tables.children, session)

    def _take(self, record: Record) -> None:
        tables, draft, session = self._tables, self.draft, record.key[0]
        # These conditions, and the head in ``whole_burial``, make the write fail if the session has
        # changed: a new child changes this row, usage the totals row, anything else the head.
        draft.expect(tables.sessions, record.key, record)
        draft.expect(tables.totals, record.key, tables.totals.find(session))
        tables.sessions.remove(draft, tables.sessions.decode(record))
        draft.delete(tables.totals, record.key)
        for table in (tables.folds, tables.usage, tables.inbox):
            for row in table.scan(session):
                draft.delete(table, row.key)
        key = keys.session_key(session)
        wanted = [tombstone_key(key), head_key(key), meta_key(key)]
        gone, head, meta = tables.store.engine.get_rows(wanted)
        if gone is None:
            draft.also(catalogue.whole_burial(tables.runtime, KnownSession(key, head, meta)))
        self.sessions.append(session)

    def _let_stay(self, top: Record) -> None:
        """Make a child a root, and reduce the depths of its descendants accordingly."""
        sessions = self._tables.sessions
        up = sessions.decode(top).depth
        rising = [top]
        while rising:
            record = rising.pop()
            before = sessions.decode(record)
            row = before._replace(depth=before.depth - up)
            if record is top:
                row = row._replace(parent=None, place=0)
            self.draft.expect(sessions, record.key, record)
            sessions.put(self.draft, row, before)
            rising += self._children(record.key[0])
