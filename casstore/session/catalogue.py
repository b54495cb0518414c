"""Which sessions there are, what they are called, and how one goes away for good.

    meta row = created_at (8) ‖ [name, model, cwd, parent, cause, extra, long id]

A session is there once it has a head or a meta row. Deleting leaves a tombstone that is
never taken away: an id is not given twice, so nobody who still holds the old one can be
led to a new session by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    PutRow,
    RowChange,
    RowIs,
    Stamp,
    Write,
)
from casstore.errors import (
    BusyError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.format import canonical
from casstore.session import attachments, keys
from casstore.session.arguments import check_count, check_text
from casstore.session.data import SessionInfo, SessionMeta
from casstore.session.heads import HeadRow, decode_head, head_key
from casstore.session.loading import head_of
from casstore.session.picking import picked
from casstore.session.scanning import scan
from casstore.session.state import Runtime, State, meta_key, tombstone_key

_CREATED_BYTES: Final = 8
_MAX_ATTEMPTS: Final = 64
# How many rows of a deleted session go in one transaction.
_DELETE_BATCH: Final = 4096
# Where a session has rows of its own beside the head, the meta row and the tombstone.
_OWN_TABLES: Final = ("attachments", "history", "leases", "queue", "receipts")
_FIELDS: Final = ("name", "model", "cwd", "parent", "cause", "extra")


def create(runtime: Runtime, session: str, **given: Any) -> SessionMeta:
    """Write a session's meta down unless it has some; what it has is returned as it is."""
    key = keys.session_key(session)
    name = given.pop("name")
    asked = SessionMeta(session, session if name is None else name, 0, **given)
    _encode(asked)
    for _ in range(_MAX_ATTEMPTS):
        head, row = runtime.rows(session, [meta_key(key)])
        if row is not None:
            return _decode(key, row)
        wanted, stamps = asked, [Stamp(0)]
        if head is not None:
            # Committed or forked before it was created: that was its beginning.
            known = _meta_of_head(session, decode_head(head))
            parent = known.parent if asked.parent is None else asked.parent
            wanted = asked._replace(created_at_ms=known.created_at_ms, parent=parent)
            stamps = []
        conditions = [
            RowIs(*tombstone_key(key), None),
            RowIs(*meta_key(key), None),
            RowIs(*head_key(key), head),
        ]
        put = PutRow(*meta_key(key), _encode(wanted), stamps)
        try:
            done = runtime.engine.write(Write(conditions=conditions, rows=[put]))
        except ConditionFailedError:
            continue
        return wanted if head is not None else wanted._replace(created_at_ms=done.now_ms)
    raise BusyError(f"session {session!r} kept changing while it was being created")


def update(runtime: Runtime, session: str, changes: dict[str, Any]) -> SessionMeta:
    """Change what is known of a session."""
    strange = [name for name in changes if name not in _FIELDS]
    if strange:
        raise InvalidInputError(f"a session has no {strange[0]!r}; it has {', '.join(_FIELDS)}")
    key = keys.session_key(session)
    for _ in range(_MAX_ATTEMPTS):
        row = runtime.rows(session, [meta_key(key)])[1]
        known = _decode(key, row) if row is not None else _derived(runtime, session)
        wanted = known._replace(**changes)
        conditions: list[Condition] = [
            RowIs(*meta_key(key), row),
            RowIs(*tombstone_key(key), None),
        ]
        put = PutRow(*meta_key(key), _encode(wanted))
        try:
            runtime.engine.write(Write(conditions=conditions, rows=[put]))
        except ConditionFailedError:
            continue
        return wanted
    raise BusyError(f"session {session!r} kept changing while its meta was being written")


def find_meta(runtime: Runtime, session: str) -> SessionMeta:
    """What is known of a session; SessionNotFoundError if there is none."""
    key = keys.session_key(session)
    row = runtime.rows(session, [meta_key(key)])[1]
    return _decode(key, row) if row is not None else _derived(runtime, session)


def put_meta(meta: SessionMeta) -> PutRow:
    """The change that writes a session's meta down as it is, its time included."""
    return PutRow(*meta_key(keys.session_key(meta.session)), _encode(meta))


def _derived(runtime: Runtime, session: str) -> SessionMeta:
    """The meta of a session that was never given any."""
    return _meta_of_head(session, runtime.get(session).head)


def _meta_of_head(session: str, head: HeadRow) -> SessionMeta:
    parent = None if head.origin is None else head.origin.session
    return SessionMeta(session, session, head.created_at_ms, parent=parent)


def _encode(meta: SessionMeta) -> bytes:
    keys.id_bytes(meta.name, "a name")
    for text, what in ((meta.model, "a model"), (meta.cwd, "a directory")):
        if text is not None:
            keys.id_bytes(text, what)
    if meta.parent is not None:
        keys.session_key(meta.parent)
    long_id = meta.session if keys.is_cut(meta.session) else None
    data = canonical.encode(
        [meta.name, meta.model, meta.cwd, meta.parent, meta.cause, meta.extra, long_id]
    )
    if canonical.links_in(data):
        raise InvalidInputError("the meta of a session keeps nothing alive and takes no links")
    return meta.created_at_ms.to_bytes(_CREATED_BYTES, "big") + data


def _decode(key: bytes, row: bytes) -> SessionMeta:
    try:
        name, model, cwd, parent, cause, extra, long_id = canonical.decode(row[_CREATED_BYTES:])
    except (TypeError, ValueError) as exc:
        raise CorruptionError("the meta row of a session is damaged") from exc
    created_at_ms = int.from_bytes(row[:_CREATED_BYTES], "big")
    session = long_id or keys.session_of(key) or ""
    return SessionMeta(session, name, created_at_ms, model, cwd, parent, cause, extra)


# --- listing ------------------------------------------------------------------------------


def find_info(runtime: Runtime, session: str) -> SessionInfo:
    """What a picker shows of one session."""
    key = keys.session_key(session)
    head, meta = runtime.rows(session, [meta_key(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return _info(runtime, key, head, meta)


def _info(runtime: Runtime, key: bytes, head: bytes | None, meta: bytes | None) -> SessionInfo:
    known = None if meta is None else _decode(key, meta)
    if head is None:
        assert known is not None
        return SessionInfo(known, None, None, 0)
    state: State = runtime.state_of(key, head)
    session = state.head.long_id or keys.session_of(key) or ""
    text, count = picked(runtime, state)
    shown = known if known is not None else _meta_of_head(session, state.head)
    return SessionInfo(shown, head_of(session, state), text, count)


def list_sessions(
    runtime: Runtime, after: str | None, limit: int | None, prefix: str
) -> Iterator[SessionInfo]:
    """All sessions in order of id, a page at a time."""
    if limit is not None:
        check_count(limit, "a limit")
    check_text(prefix, "a prefix")
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
    heads = _Rows(runtime, "heads", start, stop)
    metas = _Rows(runtime, "sessions", start, stop)
    while left:
        candidates = [rows.key for rows in (heads, metas) if rows.key is not None]
        if not candidates:
            return
        key = min(candidates)
        info = _info(runtime, key, heads.take(key), metas.take(key))
        if info.meta.session.startswith(prefix):
            yield info
            left -= 1


class _Rows:
    """The rows of one table in order, the next one in sight."""

    def __init__(self, runtime: Runtime, table: str, start: bytes, stop: bytes | None) -> None:
        self._rows = scan(runtime.engine, table, start, stop)
        self._next = next(self._rows, None)

    @property
    def key(self) -> bytes | None:
        """The key of the next row."""
        return None if self._next is None else self._next.key

    def take(self, key: bytes) -> bytes | None:
        """The next row, if it is this one."""
        row = self._next
        if row is None or row.key != key:
            return None
        self._next = next(self._rows, None)
        return row.value


# --- deleting -----------------------------------------------------------------------------


def delete(runtime: Runtime, session: str) -> bool:
    """Take a session away for good; False if it was not there, or no longer.

    From the first transaction on it is gone for everybody. Its other rows follow in
    batches; if that is cut short, calling again goes on with it.
    """
    key = keys.session_key(session)
    there = False
    for _ in range(_MAX_ATTEMPTS):
        wanted = [tombstone_key(key), head_key(key), meta_key(key)]
        deleted, head, meta = runtime.engine.get_rows(wanted)
        there = deleted is None and (head is not None or meta is not None)
        if not there:
            break
        try:
            runtime.engine.write(
                Write(
                    conditions=[
                        RowIs(*tombstone_key(key), None),
                        RowIs(*head_key(key), head),
                        RowIs(*meta_key(key), meta),
                    ],
                    rows=[
                        PutRow(*tombstone_key(key), bytes(_CREATED_BYTES), (Stamp(0),)),
                        DeleteRow(*head_key(key)),
                        DeleteRow(*meta_key(key)),
                        DeleteRow("leases", key),
                    ],
                )
            )
        except ConditionFailedError:
            continue
        break
    else:
        raise BusyError(f"session {session!r} kept moving while it was being deleted")
    if there or deleted is not None:
        _remove_rows(runtime, session, key)
    return there


def _remove_rows(runtime: Runtime, session: str, key: bytes) -> None:
    for table in _OWN_TABLES:
        start = key
        while True:
            page = runtime.engine.scan_rows(
                table, start=start, stop=keys.past(key), limit=_DELETE_BATCH
            )
            changes: list[RowChange] = []
            for row in page:
                kept = table == "attachments" and attachments.condemned(session, row.value)
                if not kept:
                    changes.append(DeleteRow(table, row.key))
                elif kept != row.value:
                    changes.append(PutRow(table, row.key, kept))
            if changes:
                runtime.engine.write(Write(rows=changes))
            if len(page) < _DELETE_BATCH:
                break
            start = page[-1].key + b"\0"
