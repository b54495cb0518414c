"""Sessions below sessions: how they are made, what is known of them, and how they go.

    log.sessions   session → what is known of it, and how many children it ever had
    log.children   parent, place → session

A session goes in one write with all that go with it. Children that stay become roots, with their
own subtrees, and stand accordingly less deep.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

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
from casstore.records.log.ground import At, Ground, digits
from casstore.records.log.state import LogState, pack
from casstore.session import catalogue, commit, keys
from casstore.session.arguments import check_count, check_flag, check_text
from casstore.session.attempts import Attempts, read_again, transact
from casstore.session.catalogue import KnownSession
from casstore.session.data import UNFENCED, Checkpoint, Commit, SessionMeta
from casstore.session.heads import HeadRow, decode_head, head_key
from casstore.session.records import Draft, Record
from casstore.session.state import meta_key, tombstone_key

_ID_BYTES: Final = 12
_PREFIX: Final = "sess_"
_CHANGEABLE: Final = ("prompt", "model", "config", "metadata")


class Row(NamedTuple):
    """A session's row."""

    created_at_ms: int
    updated_at_ms: int
    status: str
    kind: str
    lifecycle: str
    parent: str | None
    #: Where it stands among its parent's children.
    place: int
    depth: int
    spawn_call: str | None
    prompt: str | None
    model: str | None
    config: Any
    metadata: Any
    #: How many children it ever had.
    children: int
    #: The revision with which it was brought in from elsewhere: no change of the session. 0: none.
    brought_in: int = 0

    def packed(self) -> list[Any]:
        """As it is stored. Without the last field if it is 0, as in rows of older releases."""
        return list(self) if self.brought_in else list(self[:-1])

    def as_of(self, head: HeadRow) -> Row:
        """The row with the time of the session's last commit, if that is later and a change."""
        if head.revision <= self.brought_in:
            return self
        return self._replace(updated_at_ms=max(self.updated_at_ms, head.committed_at_ms))

    def public(self, session: str) -> LogSession:
        """As callers see it."""
        return LogSession(
            session,
            self.created_at_ms,
            self.updated_at_ms,
            self.status,
            self.kind,
            self.lifecycle,
            self.parent,
            self.depth,
            self.spawn_call,
            self.prompt,
            self.model,
            self.config,
            self.metadata,
        )


def new_id() -> str:
    """An id that nobody else will give."""
    return _PREFIX + secrets.token_hex(_ID_BYTES)


def decode(record: Record) -> Row:
    """A session's row as it was found; CorruptionError if it is none."""
    try:
        return Row(*record.value)
    except TypeError as exc:
        raise CorruptionError(f"the log's row of session {record.key[0]!r} is damaged") from exc


def check_row(row: Row) -> None:
    """Refuse what a session cannot be."""
    if row.kind not in KINDS or row.lifecycle not in LIFECYCLES:
        raise InvalidInputError(
            f"a session is of kind {' or '.join(KINDS)} and {', '.join(LIFECYCLES)}, not "
            f"{row.kind!r} and {row.lifecycle!r}"
        )
    if row.status not in (ACTIVE, ARCHIVED):
        raise InvalidInputError(f"a session is {ACTIVE} or {ARCHIVED}, not {row.status!r}")
    for text in (row.spawn_call, row.prompt, row.model):
        if text is not None and type(text) is not str:
            raise InvalidInputError(f"prompt, model and spawn call are texts, not {text!r:.80}")
    for known in (row.config, row.metadata):
        if type(known) is not dict:
            raise InvalidInputError(f"config and metadata are dicts, not {known!r:.80}")


# --- making -------------------------------------------------------------------------------


def create(ground: Ground, session: str, row: Row, depth_limit: int) -> LogSession:
    """Make a session, below its parent if it has one.

    SessionNotFoundError if the parent is not there, SpawnDepthError if it stands too deep,
    SessionExistsError if the id is taken; then nothing was made.
    """
    check_row(row)

    def prepared() -> tuple[Row, Write]:
        draft = Draft(ground.store)
        placed = below_parent(ground, draft, session, row, depth_limit)
        return placed, born(ground, draft, session, placed)

    attempts = Attempts(f"the parent of session {session!r}")
    while True:
        attempts.begin()
        placed, beside = read_again(prepared, (CorruptionError,))
        try:
            commit.commit(
                ground.runtime,
                session,
                Commit(
                    checkpoint=Checkpoint(turn_state=pack(LogState())),
                    expected=0,
                    lease=UNFENCED,
                    beside=beside,
                ),
            )
        except HeadConflictError as exc:
            raise SessionExistsError(session) from exc
        except ConditionFailedError:
            if _is_taken(ground, session):
                raise SessionExistsError(session) from None
            continue
        return placed.public(session)


def _is_taken(ground: Ground, session: str) -> bool:
    place = meta_key(keys.session_key(session))
    return (
        ground.sessions.find(session) is not None
        or ground.store.engine.get_rows([place])[0] is not None
    )


def below_parent(ground: Ground, draft: Draft, session: str, row: Row, depth_limit: int) -> Row:
    """The row of a session with its place below its parent, which the write notes as well."""
    now_ms = ground.now_ms()
    row = row._replace(created_at_ms=row.created_at_ms or now_ms)
    row = row._replace(updated_at_ms=row.updated_at_ms or row.created_at_ms)
    if row.parent is None:
        return row._replace(depth=0)
    found = ground.sessions.find(row.parent)
    if found is None:
        raise SessionNotFoundError(row.parent)
    parent_key = keys.session_key(row.parent)
    if ground.store.engine.get_rows([head_key(parent_key)])[0] is None:
        raise SessionNotFoundError(row.parent)
    parent = decode(found)
    if parent.depth + 1 > depth_limit:
        raise SpawnDepthError(row.parent, parent.depth + 1, depth_limit)
    place = parent.children + 1
    draft.expect(ground.sessions, (row.parent,), found)
    draft.also(Write(conditions=[RowStarts(*head_key(parent_key), b"")]))
    draft.put(ground.sessions, (row.parent,), parent._replace(children=place).packed())
    draft.put(ground.children, (row.parent, digits(place)), session)
    return row._replace(kind=SUBAGENT, depth=parent.depth + 1, place=place)


def adopt(ground: Ground, session: str, row: Row, depth_limit: int) -> LogSession:
    """Let a session that has messages of the log, but no row, be one of the log's.

    As ``create``; SessionNotFoundError if there is no such session.
    """
    check_row(row)

    def prepared() -> tuple[At, Row, Draft]:
        at = ground.at(session)
        known = row._replace(created_at_ms=at.revision.head.created_at_ms)
        draft = Draft(ground.store)
        placed = below_parent(ground, draft, session, known, depth_limit)
        draft.expect(ground.sessions, (session,), None)
        draft.put(ground.sessions, (session,), placed.packed())
        there = RowStarts(*head_key(keys.session_key(session)), b"")
        draft.also(Write(conditions=[there]))
        return at, placed, draft

    attempts = Attempts(f"session {session!r} or its parent")
    while True:
        attempts.begin()
        at, placed, draft = read_again(prepared, (CorruptionError,))
        try:
            draft.commit()
        except ConditionFailedError:
            if ground.sessions.find(session) is not None:
                raise SessionExistsError(session) from None
            continue
        return placed.as_of(at.revision.head).public(session)


def born(ground: Ground, draft: Draft, session: str, row: Row) -> Write:
    """The rows by which there is a session; for the commit that makes its graph."""
    draft.expect(ground.sessions, (session,), None)
    draft.put(ground.sessions, (session,), row.packed())
    meta = SessionMeta(session, session, row.created_at_ms, row.model or None, None, row.parent)
    free = RowIs(*meta_key(keys.session_key(session)), None)
    draft.also(Write(conditions=[free], rows=[catalogue.put_meta(meta)]))
    return draft.as_write()


# --- looking ------------------------------------------------------------------------------


def find(ground: Ground, session: str) -> LogSession | None:
    """What is known of a session; None if it is not there."""

    def read() -> LogSession | None:
        record = ground.sessions.find(session)
        return None if record is None else _public(ground, record)

    return read_again(read, (CorruptionError,))


def get_row(ground: Ground, session: str) -> Row:
    """What is stored of a session; SessionNotFoundError if it is not there."""
    record = ground.sessions.find(session)
    if record is None:
        raise SessionNotFoundError(session)
    return decode(record)


def _public(ground: Ground, record: Record) -> LogSession | None:
    session = record.key[0]
    head = ground.store.engine.get_rows([head_key(keys.session_key(session))])[0]
    if head is None:
        # Deleted by its store, and not yet closed here.
        return None
    return decode(record).as_of(decode_head(head)).public(session)


def listed(ground: Ground, after: str | None, limit: int | None) -> Iterator[LogSession]:
    """All sessions in order of id, a page at a time."""
    if limit is not None:
        check_count(limit, "a limit")
    left = -1 if limit is None else limit
    records = ground.sessions.scan_starting("", after=after) if left else ()
    for found in ground.sessions.read_each(records, lambda record: _public(ground, record)):
        if found is not None:
            yield found
            left -= 1
            if not left:
                return


def children(ground: Ground, session: str) -> list[LogSession]:
    """The sessions right below one, in the order in which they were made."""
    ids = [(row.value,) for row in ground.children.scan(session)]
    rows = [row for row in ground.sessions.find_many(ids) if row is not None]
    found = ground.sessions.read_each(rows, lambda record: _public(ground, record))
    return [each for each in found if each is not None]


# --- changing -----------------------------------------------------------------------------


def update_known(ground: Ground, session: str, changes: dict[str, Any]) -> LogSession:
    """Change what callers may change."""
    for name in changes:
        if name not in _CHANGEABLE:
            raise InvalidInputError(f"{', '.join(_CHANGEABLE)} can change, not {name!r}")
    return update(ground, session, changes)


def update(ground: Ground, session: str, changes: dict[str, Any]) -> LogSession:
    """Change what is known of a session."""

    def attempt() -> LogSession:
        record = ground.sessions.find(session)
        shown = None if record is None else _public(ground, record)
        if record is None or shown is None:
            raise SessionNotFoundError(session)
        row = decode(record)._replace(**changes, updated_at_ms=ground.now_ms())
        check_row(row)
        draft = Draft(ground.store)
        draft.expect(ground.sessions, (session,), record)
        draft.put(ground.sessions, (session,), row.packed())
        draft.commit()
        updated_at_ms = max(row.updated_at_ms, shown.updated_at_ms)
        return row._replace(updated_at_ms=updated_at_ms).public(session)

    return transact(f"session {session!r}", attempt)


# --- going --------------------------------------------------------------------------------


def finish(ground: Ground, session: str, status: str) -> bool:
    """Take an ephemeral session below another away if it has completed; did it go?

    One that ended otherwise stays to be looked at, until its parent goes.
    """
    check_text(status, "the status of a session that ended")
    row = read_again(lambda: get_row(ground, session), (CorruptionError,))
    if status != COMPLETED or row.lifecycle != EPHEMERAL or row.parent is None:
        return False
    return close(ground, session, cascade=True) > 0


def close(ground: Ground, session: str, *, cascade: bool) -> int:
    """Take a session away for good with those that go with it; how many went."""
    check_flag(cascade, "cascade")
    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        going = read_again(lambda: _gathered(ground, session, cascade=cascade), (CorruptionError,))
        if going is None:
            return 0
        try:
            going.draft.commit()
        except ConditionFailedError:
            continue
        for name in going.sessions:
            catalogue.clear(ground.runtime, name, keys.session_key(name))
        return len(going.sessions)


def _gathered(ground: Ground, session: str, *, cascade: bool) -> _Going | None:
    """What closing a session takes away; None if there is no such session."""
    going = _Going(ground)
    return going if going.gather(session, cascade=cascade) else None


class _Going:
    """What one closing takes away, and what it changes."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.draft = Draft(ground.store)
        self.sessions: list[str] = []

    def gather(self, session: str, *, cascade: bool) -> bool:
        """List everything; False if there is no such session."""
        ground = self._ground
        top = ground.sessions.find(session)
        if top is None:
            return False
        row = decode(top)
        if row.parent is not None:
            self.draft.delete(ground.children, (row.parent, digits(row.place)))
        going = [top]
        while going:
            record = going.pop()
            self._take(record)
            for child in self._children(record.key[0]):
                self.draft.delete(ground.children, (record.key[0], digits(decode(child).place)))
                if cascade and decode(child).lifecycle != DETACHED:
                    going.append(child)
                else:
                    self._let_stay(child)
        return True

    def _children(self, session: str) -> list[Record]:
        ids = [(row.value,) for row in self._ground.children.scan(session)]
        return [row for row in self._ground.sessions.find_many(ids) if row is not None]

    def _take(self, record: Record) -> None:
        ground, draft, session = self._ground, self.draft, record.key[0]
        # Children change this row when they are made, usage the totals, all else the head.
        draft.expect(ground.sessions, record.key, record)
        draft.expect(ground.totals, record.key, ground.totals.find(session))
        draft.delete(ground.sessions, record.key)
        draft.delete(ground.totals, record.key)
        for table in (ground.folds, ground.usage, ground.inbox):
            for row in table.scan(session):
                draft.delete(table, row.key)
        key = keys.session_key(session)
        wanted = [tombstone_key(key), head_key(key), meta_key(key)]
        gone, head, meta = ground.store.engine.get_rows(wanted)
        if gone is None:
            draft.also(catalogue.whole_burial(ground.runtime, KnownSession(key, head, meta)))
        self.sessions.append(session)

    def _let_stay(self, top: Record) -> None:
        """Make a child a root; what is below it stands less deep by as much."""
        ground = self._ground
        up = decode(top).depth
        rising = [top]
        while rising:
            record = rising.pop()
            row = decode(record)
            row = row._replace(depth=row.depth - up)
            if record is top:
                row = row._replace(parent=None, place=0)
            self.draft.expect(ground.sessions, record.key, record)
            self.draft.put(ground.sessions, record.key, row.packed())
            rising += self._children(record.key[0])
