"""When a session may go: a time by the engine's clock, kept beside it.

    expiry = expires_at (8) ‖ set_at (8)

Nothing happens by itself when the time has come. Retention finds the session then and
takes it away, unless somebody holds its lease or protects it.
"""

from __future__ import annotations

from typing import Final

from casstore.engine.protocol import MAX_STAMP_MS, DeleteRow, PutRow, RowChange, RowIs, Stamp, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.session import keys
from casstore.session.state import Runtime, meta_key, tombstone_key

#: Where the time stands in the row.
EXPIRES_AT: Final = 0
_SET_AT: Final = 8
_ROW_BYTES: Final = 16


def put(key: bytes, ttl_ms: int) -> PutRow:
    """The row of a session that expires ``ttl_ms`` from now."""
    if type(ttl_ms) is not int or not 0 <= ttl_ms <= MAX_STAMP_MS:
        raise InvalidInputError(f"a session lasts 0 ms or more, not {ttl_ms!r}")
    return PutRow(*keys.expiry(key), bytes(_ROW_BYTES), (Stamp(EXPIRES_AT, ttl_ms), Stamp(_SET_AT)))


def decode(row: bytes | None) -> int | None:
    """When a session expires; None: never."""
    if row is None:
        return None
    if len(row) != _ROW_BYTES:
        raise CorruptionError("the expiry of a session is damaged")
    return int.from_bytes(row[EXPIRES_AT:_SET_AT], "big")


def find(runtime: Runtime, session: str) -> int | None:
    """When a session expires; None: never. SessionNotFoundError if there is none."""
    return decode(_row(runtime, session, keys.session_key(session)))


def change(runtime: Runtime, session: str, ttl_ms: int | None) -> int | None:
    """Let a session expire ``ttl_ms`` from now, whatever was said before; None: never."""
    key = keys.session_key(session)
    wanted: RowChange = DeleteRow(*keys.expiry(key)) if ttl_ms is None else put(key, ttl_ms)
    _row(runtime, session, key)
    try:
        done = runtime.engine.write(
            Write(conditions=[RowIs(*tombstone_key(key), None)], rows=[wanted])
        )
    except ConditionFailedError:
        runtime.rows(session)  # says that it was deleted
        raise
    return None if ttl_ms is None else done.now_ms + ttl_ms


def _row(runtime: Runtime, session: str, key: bytes) -> bytes | None:
    head, meta, row = runtime.rows(session, [meta_key(key), keys.expiry(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    return row
