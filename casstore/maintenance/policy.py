"""Which revisions a policy keeps, and how policies are stored.

    policy = version (1) ‖ map of the fields that are not the default

A policy says which revisions to keep; retention may remove all others. The store has a default
policy, and a session can have its own instead. Without a policy, everything is kept. Hours, days
and so on are in UTC; of each, the revision with the highest number is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import DeleteRow, PutRow, RowChange, RowIs, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.format import canonical
from casstore.session import keys
from casstore.session.arguments import check_count, check_flag, check_kind, check_ms
from casstore.session.state import meta_key, runtime_of, tombstone_key
from casstore.store import Store, check_store

HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
_VERSION: Final = 1
# 1970-01-01 by the count of ``date``; it was a Thursday, and weeks begin on Mondays.
_EPOCH_ORDINAL: Final = 719_163
_EPOCH_WEEKDAY: Final = 3
_DAYS_A_WEEK: Final = 7
_MOST_KEPT: Final = (1 << 32) - 1


class Policy(NamedTuple):
    """Which revisions of a session stay. Besides these, its head stays, and what is protected,
    pinned, or needed by the holder of a live lease.

    >>> from casstore.maintenance import retention
    >>> [found] = retention.plan(store, policy=Policy(last=1, labelled=True))
    >>> [(kept.revision, kept.reasons) for kept in found.kept]
    [(2, ('head', 'last')), (1, ('labelled start',))]
    """

    #: How many of the newest revisions to keep, the head included.
    last: int = 0
    #: The newest revision of each of this many hours, days …: the latest that have revisions.
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0
    yearly: int = 0
    #: Everything committed less than this ago.
    within_ms: int | None = None
    #: Every revision that has a label.
    labelled: bool = True
    #: Keep all revisions: for a session that the default policy is not meant for.
    everything: bool = False
    #: Delete the whole session once its head is this old; None: never.
    idle_ms: int | None = None


_COUNTS: Final = ("last", "hourly", "daily", "weekly", "monthly", "yearly")


def check_policy(policy: Policy) -> None:
    """Raise InvalidInputError unless this is a valid Policy that keeps something."""
    check_kind(policy, "policy", Policy)
    for name in _COUNTS:
        check_count(getattr(policy, name), name, most=_MOST_KEPT)
    for name in ("within_ms", "idle_ms"):
        time = getattr(policy, name)
        if time is not None:
            check_ms(time, name, least=1)
    for name in ("labelled", "everything"):
        check_flag(getattr(policy, name), name)
    if not (
        policy.everything
        or policy.within_ms is not None
        or any(getattr(policy, name) for name in _COUNTS)
    ):
        raise InvalidInputError("the policy keeps nothing; to keep only the head, set last=1")


# --- storing policies -----------------------------------------------------------------------


def set_policy(store: Store, policy: Policy | None, session: str | None = None) -> None:
    """Set the policy of a session, or the default policy; None removes it.

    >>> set_policy(store, Policy(last=10, daily=7))
    >>> set_policy(store, Policy(everything=True), "s")  # but all of this one
    >>> find_policy(store).daily, find_policy(store, "s").everything
    (7, True)
    """
    check_store(store)
    if policy is not None:
        check_policy(policy)
    key = None if session is None else keys.session_key(session)
    place = keys.policy(key)
    change: RowChange = DeleteRow(*place)
    if policy is not None:
        change = PutRow(*place, bytes((_VERSION,)) + canonical.encode(policy_fields(policy)))
    if key is None or session is None:
        store.engine.write(Write(rows=[change]))
        return
    runtime = runtime_of(store)
    head, meta = runtime.rows(session, [meta_key(key)])
    if head is None and meta is None:
        raise SessionNotFoundError(session)
    try:
        store.engine.write(Write(conditions=[RowIs(*tombstone_key(key), None)], rows=[change]))
    except ConditionFailedError:
        runtime.rows(session)  # raises SessionDeletedError if it was deleted
        raise


def find_policy(store: Store, session: str | None = None) -> Policy | None:
    """The policy stored for a session, without ``session`` the default; None if none is stored.

    >>> find_policy(store) is None  # none is set: everything stays
    True
    """
    check_store(store)
    key = None if session is None else keys.session_key(session)
    return decode_policy(store.engine.get_rows([keys.policy(key)])[0])


def policy_fields(policy: Policy) -> dict[str, Any]:
    """The fields of a policy that differ from those of ``Policy()``."""
    plain = Policy()
    return {
        name: value
        for name, value in sorted(policy._asdict().items())
        if value != getattr(plain, name)
    }


def policy_from(fields: Any) -> Policy:
    """A policy from its fields. Unknown fields are refused: they might keep revisions."""
    if type(fields) is not dict:
        raise InvalidInputError(f"a policy must be a map of fields, got {fields!r}")
    strange = [name for name in fields if name not in Policy._fields]
    if strange:
        raise InvalidInputError(
            f"unknown policy field {strange[0]!r}; use {', '.join(Policy._fields)}"
        )
    policy = Policy(**fields)
    check_policy(policy)
    return policy


def decode_policy(row: bytes | None) -> Policy | None:
    """Decode a policy's row. A damaged policy is an error: it is never treated as absent."""
    if row is None:
        return None
    if row[:1] != bytes((_VERSION,)):
        raise FormatError(
            f"a retention policy has version {row[:1].hex()}, this release reads {_VERSION}: "
            "upgrade casstore, or set the policy again"
        )
    try:
        return policy_from(canonical.decode(row[1:]))
    except (TypeError, ValueError) as exc:
        raise CorruptionError(f"a retention policy cannot be read: {exc}") from exc


# --- what a policy keeps --------------------------------------------------------------------


def _date(time_ms: int) -> date:
    try:
        return date.fromordinal(_EPOCH_ORDINAL + time_ms // DAY_MS)
    except (ValueError, OverflowError) as exc:
        raise CorruptionError(f"a revision has the time {time_ms} ms, which is no date") from exc


#: The period that a time lies in, as a value that no other period of its kind has.
_PERIODS: Final[dict[str, Callable[[int], object]]] = {
    "hourly": lambda time_ms: time_ms // HOUR_MS,
    "daily": lambda time_ms: time_ms // DAY_MS,
    "weekly": lambda time_ms: (time_ms // DAY_MS + _EPOCH_WEEKDAY) // _DAYS_A_WEEK,
    "monthly": lambda time_ms: _date(time_ms).replace(day=1),
    "yearly": lambda time_ms: _date(time_ms).year,
}


class RevisionKeeper:
    """Decides for each revision, newest first, why a policy keeps it."""

    def __init__(self, policy: Policy | None, now_ms: int) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self._count = 0
        self._seen: dict[str, set[object]] = {name: set() for name in _PERIODS}

    def reasons(self, committed_at_ms: int, labels: tuple[str, ...]) -> list[str]:
        """Why the next revision stays; empty if the policy does not keep it."""
        policy = self._policy
        if policy is None:
            return ["no policy"]
        found: list[str] = []
        if policy.everything:
            found.append("everything")
        if self._count < policy.last:
            found.append("last")
        self._count += 1
        for name, period_of in _PERIODS.items():
            wanted = getattr(policy, name)
            seen = self._seen[name]
            if len(seen) < wanted:
                period = period_of(committed_at_ms)
                if period not in seen:
                    seen.add(period)
                    found.append(name)
        if policy.within_ms is not None and committed_at_ms > self._now_ms - policy.within_ms:
            found.append("within")
        if policy.labelled:
            found += [f"labelled {label}" for label in labels]
        return found
