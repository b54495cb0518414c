"""The right to commit to a session: one holder at a time, told apart by a counter.

    lease = fencing (8) ‖ token (16) ‖ hash of the owner (8)
            ‖ expires_at (8) ‖ claimed_at (8) ‖ owner

The engine's clock decides what is live. The row stays when a lease is released or runs
out, so the fencing counter never goes back: whoever comes late with an old lease is told
apart from the holder by it, whatever the clocks say.
"""

from __future__ import annotations

import secrets
from functools import lru_cache
from typing import Any, Final

from casstore.engine.conditions import stamped
from casstore.engine.protocol import (
    MAX_STAMP_MS,
    Condition,
    PutRow,
    RowIs,
    RowKey,
    RowLapsed,
    RowLive,
    Stamp,
    Write,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    LeaseLostError,
    SessionBindingError,
)
from casstore.format.hashing import plain_hash
from casstore.session import keys
from casstore.session.attempts import Attempts
from casstore.session.data import UNFENCED, Given, Lease
from casstore.session.state import Runtime

_TOKEN_BYTES: Final = 16
_OWNER_HASH_BYTES: Final = 8
_EXPIRES_AT: Final = 8 + _TOKEN_BYTES + _OWNER_HASH_BYTES
_CLAIMED_AT: Final = _EXPIRES_AT + 8
_OWNER: Final = _CLAIMED_AT + 8
_NO_TIME: Final = bytes(8)


def lease_key(key: bytes) -> RowKey:
    """Where the lease of a session stands."""
    return RowKey("leases", key)


def _prefix(lease: Lease) -> bytes:
    try:
        return _known_prefix(lease.fencing, lease.token, lease.owner)
    except (AttributeError, TypeError, ValueError, OverflowError) as exc:
        raise _no_lease(lease) from exc


def _no_lease(lease: Lease) -> InvalidInputError:
    return InvalidInputError(f"not a lease: {lease!r}")


# Every commit of a turn asks for it, most of them for the same few leases.
@lru_cache(maxsize=256, typed=True)
def _known_prefix(fencing: int, token: bytes, owner: str) -> bytes:
    return fencing.to_bytes(8, "big") + token + plain_hash(owner.encode(), _OWNER_HASH_BYTES)


def decode_lease(session: str, row: bytes) -> Lease:
    """A lease as its row holds it."""
    if len(row) < _OWNER:
        raise CorruptionError(f"the lease of session {session!r} is damaged")
    return Lease(
        session,
        row[_OWNER:].decode(),
        row[8 : 8 + _TOKEN_BYTES],
        int.from_bytes(row[:8], "big"),
        int.from_bytes(row[_CLAIMED_AT:_OWNER], "big"),
        int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big"),
    )


def _check_ttl(ttl_ms: int) -> None:
    if type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_STAMP_MS:
        raise InvalidInputError(f"ttl_ms of a lease is 1 ms or more, not {ttl_ms!r}")


def claim(runtime: Runtime, session: str, owner: str, ttl_ms: int) -> Lease | None:
    """Take the lease if nobody holds it."""
    key = keys.session_key(session)
    keys.id_bytes(owner, "an owner")
    _check_ttl(ttl_ms)
    attempts = Attempts(f"the lease of session {session!r}")
    while True:
        attempts.begin()
        row = runtime.rows(session, [lease_key(key)])[1]
        fencing = 0
        condition: Condition = RowIs("leases", key, None)
        if row is not None:
            last = decode_lease(session, row)
            if last.expires_at_ms > runtime.engine.now_ms():
                return None
            fencing, condition = last.fencing, RowLapsed("leases", key, row, _EXPIRES_AT)
        lease = Lease(session, owner, secrets.token_bytes(_TOKEN_BYTES), fencing + 1, 0, 0)
        put = _put(key, lease, ttl_ms, stamp_claim=True)
        try:
            done = runtime.engine.write(
                Write(conditions=(RowIs("tombstones", key, None), condition), rows=(put,))
            )
        except ConditionFailedError:
            # Somebody else was faster. Whether they hold it now, or have only given back what
            # had run out, is for the row to say; so is that the session was deleted.
            continue
        return decode_lease(session, stamped(put, done.now_ms))


def _put(key: bytes, lease: Lease, ttl_ms: int, *, stamp_claim: bool) -> PutRow:
    value = b"".join(
        (
            _prefix(lease),
            _NO_TIME,
            lease.claimed_at_ms.to_bytes(8, "big"),
            lease.owner.encode(),
        )
    )
    stamps = [Stamp(_EXPIRES_AT, ttl_ms)]
    if stamp_claim:
        stamps.append(Stamp(_CLAIMED_AT))
    return PutRow("leases", key, value, stamps)


def renew(runtime: Runtime, session: str, lease: Lease, ttl_ms: int) -> Lease:
    """Hold on to a lease that is current and live."""
    _check_ttl(ttl_ms)
    bind(session, lease)
    key = keys.session_key(session)
    # The row says when the lease was claimed; the caller need not know.
    row = runtime.rows(session, [lease_key(key)])[1]
    if row is None or not row.startswith(_prefix(lease)):
        raise LeaseLostError(session, "somebody else holds it")
    put = _put(key, decode_lease(session, row), ttl_ms, stamp_claim=False)
    try:
        done = runtime.engine.write(Write(conditions=(live(key, lease),), rows=(put,)))
    except ConditionFailedError as exc:
        runtime.rows(session)  # says so if it was deleted
        raise lost(session, exc.actual, lease) from exc
    return decode_lease(session, stamped(put, done.now_ms))


def release(runtime: Runtime, session: str, lease: Lease) -> bool:
    """Give a lease back; False if it is not the current one."""
    bind(session, lease)
    key = keys.session_key(session)
    attempts = Attempts(f"the lease of session {session!r}")
    while True:
        attempts.begin()
        row = runtime.rows(session, [lease_key(key)])[1]
        if row is None or not row.startswith(_prefix(lease)) or _is_released(row):
            return False
        try:
            runtime.engine.write(
                Write(
                    conditions=(RowIs("leases", key, row),),
                    rows=(put_released(key, decode_lease(session, row)),),
                )
            )
        except ConditionFailedError:
            continue  # renewed, and still to be given back; or given back by somebody else
        return True


def _is_released(row: bytes) -> bool:
    return row[_EXPIRES_AT:_CLAIMED_AT] == _NO_TIME


# --- for commits --------------------------------------------------------------------------


def check_lease(lease: Any) -> None:
    """Refuse what is no lease."""
    if not isinstance(lease, Lease):
        raise InvalidInputError(f"a lease is a Lease, not {type(lease).__name__}")


def bind(session: str, lease: Lease) -> None:
    """Refuse a lease on another session."""
    check_lease(lease)
    if lease.session != session:
        raise SessionBindingError(session, lease.session)
    claimed_at_ms = lease.claimed_at_ms
    if type(claimed_at_ms) is not int or not 0 <= claimed_at_ms < 1 << 64:
        raise _no_lease(lease)


def live(key: bytes, lease: Lease) -> RowLive:
    """The condition that this lease is current and its time not up."""
    return RowLive("leases", key, _prefix(lease), _EXPIRES_AT)


def put_released(key: bytes, lease: Lease) -> PutRow:
    """The row of a lease that was given back: the counter stays."""
    value = b"".join(
        (_prefix(lease), _NO_TIME, lease.claimed_at_ms.to_bytes(8, "big"), lease.owner.encode())
    )
    return PutRow("leases", key, value)


def require(
    session: str, key: bytes, row: bytes | None, lease: Lease | Given | None, now_ms: int
) -> Condition:
    """The condition a commit with ``lease`` stands under; LeaseLostError if it fails already."""
    if lease is None:
        raise LeaseLostError(session, "none was given (claim one, or commit UNFENCED)")
    if lease is UNFENCED:
        if row is None:
            return RowIs("leases", key, None)
        if decode_lease(session, row).expires_at_ms > now_ms:
            raise LeaseLostError(session, "somebody holds it, and the commit is unfenced")
        return RowLapsed("leases", key, row, _EXPIRES_AT)
    if not isinstance(lease, Lease):
        raise InvalidInputError(f"a lease is a Lease, not {lease!r}")
    if not is_live(row, lease, now_ms):
        raise lost(session, row, lease)
    return live(key, lease)


def is_live(row: bytes | None, lease: Lease, now_ms: int) -> bool:
    """Is this lease current, and its time not up?"""
    return (
        row is not None
        and row.startswith(_prefix(lease))
        and int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big") > now_ms
    )


def live_generation(row: bytes | None, now_ms: int) -> int:
    """The fencing counter of the lease that is live; 0 if none is."""
    if row is None or int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big") <= now_ms:
        return 0
    return int.from_bytes(row[:8], "big")


def lost(session: str, row: bytes | None, lease: Lease) -> LeaseLostError:
    """Why a lease is not good any more."""
    if row is None or not row.startswith(_prefix(lease)):
        return LeaseLostError(session, "it is not the current one")
    return LeaseLostError(session, "its time is up, or it was released")


def free(key: bytes, row: bytes | None) -> Condition:
    """The condition that nobody holds the lease whose row this is."""
    if row is None:
        return RowIs("leases", key, None)
    return RowLapsed("leases", key, row, _EXPIRES_AT)
