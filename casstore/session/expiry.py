"""The expiry time of a session, by the engine's clock, in a row of its own.

    expiry = expires_at (8) ‖ set_at (8)

Nothing happens at that time by itself. The next retention run finds the session and deletes it,
unless its lease is live or one of its revisions is protected.
"""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import DeleteRow, PutRow, RowChange, RowIs, Stamp, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    SessionNotFoundError,
)
from casstore.session import keys
from casstore.session.arguments import check_ms
from casstore.session.state import Runtime, meta_key, tombstone_key

#: The offset of the expiry time in the row.
EXPIRES_AT: Final = 0
_SET_AT: Final = 8
_ROW_BYTES: Final = 16


def put(key: bytes, ttl_ms: int) -> PutRow:
    """The change that makes a session expire ``ttl_ms`` after the write."""
    check_ms(ttl_ms, "ttl_ms")
    return PutRow(*keys.expiry(key), bytes(_ROW_BYTES), (Stamp(EXPIRES_AT, ttl_ms), Stamp(_SET_AT)))


def decode(row: bytes | None) -> int | None:
    """When a session expires; None: never."""
    if row is None:
        return None
    if len(row) != _ROW_BYTES:
        raise CorruptionError("the expiry of a session is damaged")
    return int.from_bytes(row[EXPIRES_AT:_SET_AT], "big")


def find(runtime: Runtime, session: str) -> int | None:
    """When a session expires; None: never. SessionNotFoundError if it does not exist."""
    return decode(_row(runtime, session, keys.session_key(session)))


def change(runtime: Runtime, session: str, ttl_ms: int | None) -> int | None:
    """Set a session to expire ``ttl_ms`` from now, replacing any earlier expiry; None: never."""
    key = keys.session_key(session)
    wanted: RowChange = DeleteRow(*keys.expiry(key)) if ttl_ms is None else put(key, ttl_ms)
    _row(runtime, session, key)
    try:
        done = runtime.engine.write(
            Write(conditions=[RowIs(*tombstone_key(key), None)], rows=[wanted])
        )
    except ConditionFailedError:
        runtime.rows(session)  # raises SessionDeletedError if it was deleted
        raise
    return None if ttl_ms is None else done.now_ms + ttl_ms


def _row(runtime: Runtime, session: str, key: bytes) -> bytes | None:
    head, meta, row = runtime.rows(session, [meta_key(key), keys.expiry(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return row
