"""The catalogue of sessions: their metadata, listing them, and deleting them.

    meta row = created_at (8) ‖ [name, model, cwd, parent, cause, extra, long id]

A session exists once it has a head or a meta row. Deleting a session leaves a tombstone that is
never removed: ids are not reused, so a process that still holds the id of a deleted session cannot
reach another session with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import (
    MAX_ROW_VALUE_BYTES,
    Condition,
    DeleteRow,
    PutRow,
    RowChange,
    RowIs,
    RowStarts,
    Stamp,
    Write,
)
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format import canonical
from casstore.session import attachments, expiry, keys, subjects
from casstore.session.arguments import check_count, check_text
from casstore.session.attempts import read_again, transaction
from casstore.session.data import SessionInfo, SessionMeta
from casstore.session.loading import head_of
from casstore.session.picking import picked
from casstore.session.scanning import scan
from casstore.session.state import (
    HeadRow,
    Runtime,
    State,
    decode_head,
    head_key,
    meta_key,
    tombstone_key,
)

_CREATED_BYTES: Final = 8
# How many rows of a deleted session one transaction removes.
_DELETE_BATCH: Final = 4096
# The tables with rows of a session, in addition to the head, the meta row and the tombstone.
_OWN_TABLES: Final = ("attachments", "history", "leases", "queue", "receipts")
_FIELDS: Final = ("name", "model", "cwd", "parent", "cause", "extra")


@transaction("session {session!r}")
def create(
    runtime: Runtime,
    session: str,
    *,
    about: tuple[str, ...] = (),
    ttl_ms: int | None = None,
    **given: Any,
) -> SessionMeta:
    """Write the meta row of a session unless it has one; return the meta that is stored.

    The subjects in ``about`` are added in either case, so that the session can be found by them.
    """
    key = keys.session_key(session)
    name = given.pop("name")
    expires = [] if ttl_ms is None else [expiry.put(key, ttl_ms)]
    asked = SessionMeta(session, session if name is None else name, 0, **given)
    _encode(asked)
    head, row, known_about = runtime.rows(session, [meta_key(key), keys.subjects(key)])
    if row is not None:
        if about:
            subjects.change(runtime, session, add=about)
        return decode_meta(key, row)
    wanted, stamps = asked, [Stamp(0)]
    if head is not None:
        # The session exists without a meta row: keep the time of its first commit or fork.
        known = _meta_of_head(session, decode_head(head))
        parent = known.parent if asked.parent is None else asked.parent
        wanted = asked._replace(created_at_ms=known.created_at_ms, parent=parent)
        stamps = []
    conditions = [
        RowIs(*tombstone_key(key), None),
        RowIs(*meta_key(key), None),
        RowIs(*head_key(key), head),
    ]
    changes: list[RowChange] = [PutRow(*meta_key(key), _encode(wanted), stamps), *expires]
    if about:
        before = subjects.decode(known_about)
        conditions.append(RowIs(*keys.subjects(key), known_about))
        after = subjects.checked((*before, *about))
        changes += subjects.changes(session, key, before, after)
    done = runtime.engine.write(Write(conditions=conditions, rows=changes))
    return wanted if head is not None else wanted._replace(created_at_ms=done.now_ms)


@transaction("session {session!r}")
def update(runtime: Runtime, session: str, changes: dict[str, Any]) -> SessionMeta:
    """Change fields of a session's metadata, and create its meta row if it has none."""
    strange = [name for name in changes if name not in _FIELDS]
    if strange:
        raise InvalidInputError(f"unknown field {strange[0]!r}; use {', '.join(_FIELDS)}")
    key = keys.session_key(session)
    row = runtime.rows(session, [meta_key(key)])[1]
    known = decode_meta(key, row) if row is not None else _derived(runtime, session)
    wanted = known._replace(**changes)
    conditions: list[Condition] = [
        RowIs(*meta_key(key), row),
        RowIs(*tombstone_key(key), None),
    ]
    put = PutRow(*meta_key(key), _encode(wanted))
    runtime.engine.write(Write(conditions=conditions, rows=[put]))
    return wanted


def find_meta(runtime: Runtime, session: str) -> SessionMeta:
    """The metadata of a session; SessionNotFoundError if it does not exist."""
    key = keys.session_key(session)
    row = runtime.rows(session, [meta_key(key)])[1]
    return decode_meta(key, row) if row is not None else _derived(runtime, session)


def put_meta(meta: SessionMeta) -> PutRow:
    """The change that writes a session's meta row, its creation time included."""
    return PutRow(*meta_key(keys.session_key(meta.session)), _encode(meta))


def _derived(runtime: Runtime, session: str) -> SessionMeta:
    """The metadata of a session without a meta row, derived from its head row."""
    row = runtime.rows(session)[0]
    if row is None:
        raise SessionNotFoundError(session)
    return _meta_of_head(session, decode_head(row))


def _meta_of_head(session: str, head: HeadRow) -> SessionMeta:
    parent = None if head.origin is None else head.origin.session
    return SessionMeta(session, session, head.created_at_ms, parent=parent)


def _encode(meta: SessionMeta) -> bytes:
    keys.id_bytes(meta.name, "name")
    for text, what in ((meta.model, "a model"), (meta.cwd, "a directory")):
        if text is not None:
            keys.id_bytes(text, what)
    if meta.parent is not None:
        keys.session_key(meta.parent)
    long_id = meta.session if keys.is_cut(meta.session) else None
    data = canonical.encode(
        [meta.name, meta.model, meta.cwd, meta.parent, meta.cause, meta.extra, long_id],
        max_bytes=MAX_ROW_VALUE_BYTES,
    )
    if canonical.links_in(data):
        raise InvalidInputError("the meta of a session cannot hold links: they keep nothing alive")
    return meta.created_at_ms.to_bytes(_CREATED_BYTES, "big") + data


def decode_meta(key: bytes, row: bytes) -> SessionMeta:
    """Decode a session's meta row; CorruptionError if it is damaged."""
    try:
        name, model, cwd, parent, cause, extra, long_id = canonical.decode(row[_CREATED_BYTES:])
    except (TypeError, ValueError) as exc:
        raise CorruptionError("the meta row of a session is damaged") from exc
    created_at_ms = int.from_bytes(row[:_CREATED_BYTES], "big")
    session = keys.name_of(key, long_id)
    return SessionMeta(session, name, created_at_ms, model, cwd, parent, cause, extra)


# --- listing ------------------------------------------------------------------------------


def find_info(runtime: Runtime, session: str) -> SessionInfo:
    """The summary of one session; SessionNotFoundError if it does not exist."""
    key = keys.session_key(session)
    head, meta = runtime.rows(session, [meta_key(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return _info(runtime, key, head, meta)


def _info(runtime: Runtime, key: bytes, head: bytes | None, meta: bytes | None) -> SessionInfo:
    known = None if meta is None else decode_meta(key, meta)
    if head is None:
        assert known is not None
        return SessionInfo(known, None, None, 0)
    state: State = runtime.state_of(key, head)
    session = keys.name_of(key, state.head.long_id)
    text, count = picked(runtime, session, state)
    shown = known if known is not None else _meta_of_head(session, state.head)
    return SessionInfo(shown, head_of(session, state), text, count)


def list_sessions(
    runtime: Runtime, after: str | None, limit: int | None, prefix: str
) -> Iterator[SessionInfo]:
    """The summaries of sessions whose ids start with ``prefix``, in order of id, read in pages."""
    if limit is not None:
        check_count(limit, "limit")
    check_text(prefix, "prefix")
    if after is not None:
        keys.session_key(after)
    return _listed(runtime, after, limit, prefix)


def _listed(
    runtime: Runtime, after: str | None, limit: int | None, prefix: str
) -> Iterator[SessionInfo]:
    start, stop = keys.prefix_range(prefix)
    if after is not None:
        start = max(start, keys.session_key(after) + b"\0")
    left = -1 if limit is None else limit
    found = scan_sessions(runtime, start, stop)
    while left:
        known = next(found, None)
        if known is None:
            return
        info = _info_now(runtime, known)
        if info is not None and info.meta.session.startswith(prefix):
            yield info
            left -= 1


def _info_now(runtime: Runtime, known: KnownSession) -> SessionInfo | None:
    """The summary of a session that was listed earlier; None if it was deleted since."""
    try:
        return _info(runtime, *known)
    except (CorruptionError, NotFoundError, SessionDeletedError):
        # The head has moved, or the session was deleted; gc may have removed the old objects.
        session = name_of(known)
    try:
        return read_again(lambda: find_info(runtime, session))
    except (SessionNotFoundError, SessionDeletedError):
        return None


class KnownSession(NamedTuple):
    """The rows of an existing session: its head, its meta row, or both."""

    key: bytes
    head: bytes | None
    meta: bytes | None


def scan_sessions(runtime: Runtime, start: bytes, stop: bytes | None) -> Iterator[KnownSession]:
    """The sessions with ``start <= key < stop``, in key order, as undecoded rows, in pages."""
    heads = _RowsAhead(runtime, "heads", start, stop)
    metas = _RowsAhead(runtime, "sessions", start, stop)
    while True:
        candidates = [rows.key for rows in (heads, metas) if rows.key is not None]
        if not candidates:
            return
        key = min(candidates)
        yield KnownSession(key, heads.take(key), metas.take(key))


def name_of(known: KnownSession) -> str:
    """The id of a session, also if it is too long for the key: from the head or meta row."""
    whole = keys.session_of(known.key)
    if whole is not None:
        return whole
    if known.head is not None:
        return decode_head(known.head).long_id or ""
    assert known.meta is not None
    return decode_meta(known.key, known.meta).session


class _RowsAhead:
    """The rows of one table in order, with a lookahead of one row."""

    def __init__(self, runtime: Runtime, table: str, start: bytes, stop: bytes | None) -> None:
        self._rows = scan(runtime.engine, table, start, stop)
        self._next = next(self._rows, None)

    @property
    def key(self) -> bytes | None:
        """The key of the next row."""
        return None if self._next is None else self._next.key

    def take(self, key: bytes) -> bytes | None:
        """Consume the next row if it has this key; else None."""
        row = self._next
        if row is None or row.key != key:
            return None
        self._next = next(self._rows, None)
        return row.value


# --- deleting -----------------------------------------------------------------------------


def delete(runtime: Runtime, session: str) -> bool:
    """Delete a session for good; False if it did not exist or was deleted before.

    A session that has only queued work, an attachment or a lease, and no commit, is deleted, too:
    such rows are found by the id alone, so no other operation could remove them. The first
    transaction deletes the session for all readers. Later transactions remove its other rows in
    batches; if the process stops in between, calling again continues.
    """
    there = _begin_deletion(runtime, session)
    finish(runtime, session)
    return there


@transaction("session {session!r}")
def _begin_deletion(runtime: Runtime, session: str) -> bool:
    """Delete a session for all readers; False if it did not exist or was deleted before."""
    key = keys.session_key(session)
    wanted = [tombstone_key(key), head_key(key), meta_key(key)]
    deleted, head, meta = runtime.engine.get_rows(wanted)
    begun = head is not None or meta is not None
    if deleted is not None or not (begun or _is_awaited(runtime, session, key)):
        return False
    # The head may move (``moving``): a fast writer must not prevent the deletion.
    runtime.engine.write(burial(KnownSession(key, head, meta), moving=True, session=session))
    return True


def finish(runtime: Runtime, session: str) -> bool:
    """Complete an interrupted deletion; False if the session was not deleted."""
    key = keys.session_key(session)
    if runtime.engine.get_rows([tombstone_key(key)])[0] is None:
        return False
    clear(runtime, session, key)
    return True


def bury(runtime: Runtime, known: KnownSession, conditions: Sequence[Condition] = ()) -> None:
    """Delete a session for all readers if its rows are unchanged; ConditionFailedError if not.

    The caller must call ``clear`` next. Until ``clear`` has finished, a row marks the deletion as
    unfinished, and ``delete`` or a later maintenance run continues it.
    """
    write = burial(known)
    runtime.engine.write(write._replace(conditions=[*write.conditions, *conditions]))


def burial(known: KnownSession, *, moving: bool = False, session: str | None = None) -> Write:
    """The write that deletes a session for all readers; ``clear`` removes its other rows later.

    It requires that the rows in ``known`` are unchanged; with ``moving``, the head may have moved.
    ``session`` is the id, needed if the session has neither a head nor a meta row.
    """
    key = known.key
    head: Condition = RowIs(*head_key(key), known.head)
    if moving and known.head is not None:
        head = RowStarts(*head_key(key), b"")
    return Write(
        conditions=[
            RowIs(*tombstone_key(key), None),
            head,
            RowIs(*meta_key(key), known.meta),
        ],
        rows=[
            PutRow(*tombstone_key(key), bytes(_CREATED_BYTES), (Stamp(0),)),
            PutRow(*keys.unfinished(key), (session or name_of(known)).encode()),
            DeleteRow(*head_key(key)),
            DeleteRow(*meta_key(key)),
            # This removes the fencing counter. That is safe: the id is never leased again.
            DeleteRow("leases", key),
            DeleteRow(*keys.expiry(key)),
            DeleteRow(*keys.policy(key)),
        ],
    )


def whole_burial(runtime: Runtime, known: KnownSession) -> Write:
    """As ``burial``, and the write removes all other rows, unless they are too many for one write.

    The caller must still call ``clear``, for rows that were written after the rows were listed.
    """
    key, session = known.key, name_of(known)
    # Read before the rows are listed: a row that the listing misses has changed one of these.
    seen = [keys.queue_counter(key), keys.subjects(key), keys.mark(key, 0)]
    counter, about, mark = runtime.engine.get_rows(seen)
    changes = list(islice(_leftovers(runtime, session, key), _DELETE_BATCH + 1))
    write = burial(known)
    if len(changes) > _DELETE_BATCH:
        return write
    if about is not None:
        changes += subjects.changes(session, key, subjects.decode(about), ())
    conditions = [
        *write.conditions,
        # These conditions hold if, since the listing, nothing was queued, labelled, protected or
        # attached, and no subject was added. Otherwise a new row would be left behind.
        RowIs(*keys.queue_counter(key), counter),
        RowIs(*keys.subjects(key), about),
        RowIs(*keys.mark(key, 0), mark),
    ]
    rows = [row for row in write.rows if row[:2] != keys.unfinished(key)]
    return Write(conditions=conditions, rows=[*rows, *changes])


def clear(runtime: Runtime, session: str, key: bytes) -> int:
    """Remove the remaining rows of a deleted session; returns how many.

    The subjects are removed last, so that the session can be found by them until then.
    """
    cleared = 0
    changes: list[RowChange] = []
    for change in _leftovers(runtime, session, key):
        changes.append(change)
        if len(changes) >= _DELETE_BATCH:
            runtime.engine.write(Write(rows=changes))
            cleared += len(changes)
            changes = []
    about, unfinished = runtime.engine.get_rows([keys.subjects(key), keys.unfinished(key)])
    if about is not None:
        changes += subjects.changes(session, key, subjects.decode(about), ())
    if unfinished is not None:
        changes.append(DeleteRow(*keys.unfinished(key)))
    if changes:
        runtime.engine.write(Write(rows=changes))
    return cleared + len(changes)


def _is_awaited(runtime: Runtime, session: str, key: bytes) -> bool:
    """True if a session without a head and meta row has queued work, attachments or a lease."""
    # Rows of the table retention (marks) do not count: they keep nothing alive, and are removed by
    # age.
    return any(change.table != "retention" for change in _leftovers(runtime, session, key))


def _leftovers(runtime: Runtime, session: str, key: bytes) -> Iterator[RowChange]:
    ranges = [(table, key) for table in _OWN_TABLES]
    ranges += [("retention", keys.protections(key)), ("retention", keys.marks(key))]
    for table, prefix in ranges:
        for row in scan(runtime.engine, table, prefix, keys.past(prefix)):
            kept = table == "attachments" and attachments.condemned(session, row.value)
            if not kept:
                yield DeleteRow(table, row.key)
            elif kept != row.value:
                yield PutRow(table, row.key, kept)
