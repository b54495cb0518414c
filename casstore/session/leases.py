"""Leases: the right to commit to a session, for one holder at a time, with a fencing counter.

    lease = fencing (8) ‖ token (16) ‖ hash of the owner (8)
            ‖ expires_at (8) ‖ claimed_at (8) ‖ owner

The engine's clock decides whether a lease is *live*: not released and not expired. The row stays
when a lease ends, so the fencing counter never decreases. The counter distinguishes the current
holder from a late process with an old lease, independently of the clocks.
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
    LeaseHeldError,
    LeaseLostError,
    SessionBindingError,
)
from casstore.format.digest import plain_hash
from casstore.session import keys
from casstore.session.arguments import check_kind, check_ms, check_positive, check_seconds
from casstore.session.attempts import transaction
from casstore.session.data import Lease
from casstore.session.state import Runtime
from casstore.session.waiting import until

_TOKEN_BYTES: Final = 16
_OWNER_HASH_BYTES: Final = 8
_EXPIRES_AT: Final = 8 + _TOKEN_BYTES + _OWNER_HASH_BYTES
_CLAIMED_AT: Final = _EXPIRES_AT + 8
_OWNER: Final = _CLAIMED_AT + 8
_NO_TIME: Final = bytes(8)


def lease_key(key: bytes) -> RowKey:
    """The key of a session's lease row."""
    return RowKey("leases", key)


def _prefix(lease: Lease) -> bytes:
    try:
        return _known_prefix(lease.fencing, lease.token, lease.owner)
    except (AttributeError, TypeError, ValueError, OverflowError) as exc:
        raise _no_lease(lease) from exc


def _no_lease(lease: Lease) -> InvalidInputError:
    return InvalidInputError(f"lease must be a Lease as claim_lease returned it, got {lease!r:.80}")


# Every commit with a lease needs it, and most commits use a few leases.
@lru_cache(maxsize=256, typed=True)
def _known_prefix(fencing: int, token: bytes, owner: str) -> bytes:
    return fencing.to_bytes(8, "big") + token + plain_hash(owner.encode(), _OWNER_HASH_BYTES)


def decode_lease(session: str, row: bytes) -> Lease:
    """Decode a lease row."""
    if len(row) < _OWNER:
        raise CorruptionError(f"the lease of session {session!r} is damaged")
    return Lease(
        session=session,
        owner=row[_OWNER:].decode(),
        token=row[8 : 8 + _TOKEN_BYTES],
        fencing=int.from_bytes(row[:8], "big"),
        claimed_at_ms=int.from_bytes(row[_CLAIMED_AT:_OWNER], "big"),
        expires_at_ms=int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big"),
    )


def ttl_ms_of(ttl_s: float) -> int:
    """A time to live in milliseconds, from seconds."""
    check_positive(ttl_s, "ttl_s", most=MAX_STAMP_MS / 1000)
    return max(1, round(ttl_s * 1000))


class Claiming:
    """Claims a lease as soon as no other is live: a ``Look`` (``waiting``)."""

    def __init__(self, runtime: Runtime, session: str, owner: str, ttl_ms: int) -> None:
        keys.session_key(session)
        keys.id_bytes(owner, "owner")
        check_ms(ttl_ms, "ttl_ms", least=1)
        self._runtime = runtime
        self._session = session
        self._owner = owner
        self.ttl_ms = ttl_ms
        self._holder: Lease | None = None
        self.due_s: float | None = None

    def __call__(self) -> Lease | None:
        """The lease; None while another is live."""
        lease, self._holder = _claim(self._runtime, self._session, self._owner, self.ttl_ms)
        if self._holder is not None:
            left_ms = self._holder.expires_at_ms - self._runtime.engine.now_ms()
            self.due_s = left_ms / 1000
        return lease

    def held(self) -> LeaseHeldError:
        """The error that names the owner that the last call found."""
        assert self._holder is not None
        return LeaseHeldError(self._session, self._holder.owner, self._holder.expires_at_ms)


def claim(
    runtime: Runtime, session: str, owner: str, ttl_ms: int, wait_s: float | None = None
) -> Lease | None:
    """Claim the lease, or wait for it up to ``wait_s``; see ``Session.claim_lease``."""
    claiming = Claiming(runtime, session, owner, ttl_ms)
    if wait_s is None:
        return claiming()
    check_seconds(wait_s, "wait_s")
    lease = until(runtime, claiming, wait_s)
    if lease is None:
        raise claiming.held()
    return lease


@transaction("the lease of session {session!r}")
def _claim(
    runtime: Runtime, session: str, owner: str, ttl_ms: int
) -> tuple[Lease, None] | tuple[None, Lease]:
    """The lease that was claimed, and None; or None, and the live lease that prevents it."""
    key = keys.session_key(session)
    row = runtime.rows(session, [lease_key(key)])[1]
    fencing = 0
    condition: Condition = RowIs("leases", key, None)
    if row is not None:
        last = decode_lease(session, row)
        if last.expires_at_ms > runtime.engine.now_ms():
            return None, last
        fencing, condition = last.fencing, RowLapsed("leases", key, row, _EXPIRES_AT)
    lease = Lease(session, owner, secrets.token_bytes(_TOKEN_BYTES), fencing + 1, 0, 0)
    put = _put(key, lease, ttl_ms, stamp_claim=True)
    done = runtime.engine.write(
        Write(conditions=(RowIs("tombstones", key, None), condition), rows=(put,))
    )
    return decode_lease(session, stamped(put, done.now_ms)), None


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
    """Extend a lease to ``ttl_ms`` from now; LeaseLostError if it is not current or not live."""
    check_ms(ttl_ms, "ttl_ms", least=1)
    bind(session, lease)
    key = keys.session_key(session)
    # The row is needed for the time of the claim, which the caller's lease may lack.
    row = runtime.rows(session, [lease_key(key)])[1]
    if row is None or not row.startswith(_prefix(lease)):
        raise lost(session, row, lease)
    put = _put(key, decode_lease(session, row), ttl_ms, stamp_claim=False)
    try:
        done = runtime.engine.write(Write(conditions=(live(key, lease),), rows=(put,)))
    except ConditionFailedError as exc:
        runtime.rows(session)  # raises SessionDeletedError if it was deleted
        raise lost(session, exc.actual, lease) from exc
    return decode_lease(session, stamped(put, done.now_ms))


@transaction("the lease of session {session!r}")
def release(runtime: Runtime, session: str, lease: Lease) -> bool:
    """Release a lease; False if it is not the current one."""
    bind(session, lease)
    key = keys.session_key(session)
    row = runtime.rows(session, [lease_key(key)])[1]
    if row is None or not row.startswith(_prefix(lease)) or _is_released(row):
        return False
    runtime.engine.write(
        Write(
            conditions=(RowIs("leases", key, row),),
            rows=(put_released(key, decode_lease(session, row)),),
        )
    )
    return True


def _is_released(row: bytes) -> bool:
    return row[_EXPIRES_AT:_CLAIMED_AT] == _NO_TIME


# --- for commits --------------------------------------------------------------------------


def check_lease(lease: Any) -> None:
    """Raise InvalidInputError unless this is a Lease."""
    check_kind(lease, "lease", Lease)


def bind(session: str, lease: Lease) -> None:
    """SessionBindingError if the lease is of another session; InvalidInputError if not a Lease."""
    check_lease(lease)
    if lease.session != session:
        raise SessionBindingError(session, lease.session)
    claimed_at_ms = lease.claimed_at_ms
    if type(claimed_at_ms) is not int or not 0 <= claimed_at_ms < 1 << 64:
        raise _no_lease(lease)


def live(key: bytes, lease: Lease) -> RowLive:
    """The condition that this lease is current and has not expired."""
    return RowLive("leases", key, _prefix(lease), _EXPIRES_AT)


def put_released(key: bytes, lease: Lease) -> PutRow:
    """The change that releases a lease: the row keeps the fencing counter."""
    value = b"".join(
        (_prefix(lease), _NO_TIME, lease.claimed_at_ms.to_bytes(8, "big"), lease.owner.encode())
    )
    return PutRow("leases", key, value)


def require(
    session: str, key: bytes, row: bytes | None, lease: Lease | None, now_ms: int
) -> Condition:
    """The condition under which a commit with ``lease``, or without one, is written.

    LeaseHeldError or LeaseLostError if the condition fails already.
    """
    if lease is None:
        if row is not None:
            holder = decode_lease(session, row)
            if holder.expires_at_ms > now_ms:
                raise LeaseHeldError(session, holder.owner, holder.expires_at_ms)
        return free(key, row)
    check_lease(lease)
    if not is_live(row, lease, now_ms):
        raise lost(session, row, lease)
    return live(key, lease)


def is_live(row: bytes | None, lease: Lease, now_ms: int) -> bool:
    """True if ``row``, the current lease row, is of this lease, and it has not expired."""
    return (
        row is not None
        and row.startswith(_prefix(lease))
        and int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big") > now_ms
    )


def live_generation(row: bytes | None, now_ms: int) -> int:
    """The fencing counter in a lease row, if that lease is live; else 0."""
    if row is None or int.from_bytes(row[_EXPIRES_AT:_CLAIMED_AT], "big") <= now_ms:
        return 0
    return int.from_bytes(row[:8], "big")


def lost(session: str, row: bytes | None, lease: Lease) -> LeaseLostError:
    """The error for a lease that is not current or not live; ``row`` is the current lease row."""
    if row is None:
        return LeaseLostError(session, "it is not the current one")
    if not row.startswith(_prefix(lease)):
        owner = decode_lease(session, row).owner
        return LeaseLostError(session, f"{owner!r} has claimed the session since")
    return LeaseLostError(session, "it has expired, or was released")


def free(key: bytes, row: bytes | None) -> Condition:
    """The condition that this is still the lease row, and that its lease is not live."""
    if row is None:
        return RowIs("leases", key, None)
    return RowLapsed("leases", key, row, _EXPIRES_AT)
