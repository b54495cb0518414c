"""Plans retention, session by session; changes nothing.

A plan is executed later, while other processes write. So the planner reads marks
(``session.marks``) before the labels, forks, protections and pins that they stand for. If it misses
a new label, the mark has changed by the time of the execution, which then keeps the revision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from casstore.engine.protocol import Row, RowKey
from casstore.errors import (
    CorruptionError,
    FormatError,
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.maintenance.policy import Policy, RevisionKeeper, check_policy, decode_policy
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.retention_plan import Kept, Plan, Removed, SessionPlan
from casstore.maintenance.rows import decoded
from casstore.maintenance.transfer.rows import label_revision
from casstore.session import catalogue, expiry, keys, leases, pins, protection
from casstore.session.arguments import check_flag, check_text, list_of
from casstore.session.catalogue import KnownSession
from casstore.session.data import Lease, Protection
from casstore.session.scanning import scan
from casstore.session.state import HeadRow, Runtime, decode_head, head_key, meta_key, runtime_of
from casstore.store import Store, check_store

# How many revisions a part of a plan holds, and how many are read at once.
PART_REVISIONS: Final = 4096
_PAGE: Final = 256
_LABEL_AT: Final = 8


def plan(
    store: Store,
    *,
    sessions: Iterable[str] | None = None,
    prefix: str = "",
    policy: Policy | None = None,
    override_policies: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """What retention would do now: to these sessions, or to all whose ids begin with ``prefix``.

    The policy stored for a session decides; for a session without one, ``policy``; without
    that, the stored default. ``override_policies`` lets ``policy`` decide for all of these
    sessions, and the plan names each whose stored policy it overrides. Sessions are read while
    the plan is iterated over. CorruptionError or FormatError if the default policy cannot
    be read.

    >>> from casstore.maintenance import retention
    >>> [found] = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> [kept.revision for kept in found.kept], [gone.revision for gone in found.removed]
    ([2], [1])
    """
    check_store(store)
    check_text(prefix, "prefix")
    if policy is not None:
        check_policy(policy)
    check_flag(override_policies, "override_policies")
    if override_policies and policy is None:
        raise InvalidInputError(
            "override_policies needs policy, which replaces the stored policies"
        )
    names = None if sessions is None else list_of(sessions, "sessions")
    for name in names or ():
        keys.session_key(name)
    runtime = runtime_of(store)
    now_ms = runtime.engine.now_ms()
    decode_policy(runtime.engine.get_rows([keys.policy(None)])[0])

    def planned() -> Iterator[SessionPlan]:
        report = Phase(progress, "plan", "sessions")
        planner = _Planner(runtime, now_ms, policy, override=override_policies)
        known = _all(runtime, prefix) if names is None else _named(runtime, names)
        for done, one in enumerate(known):
            yield from planner.parts(one)
            report(done + 1)

    return Plan(now_ms, planned)


def _all(runtime: Runtime, prefix: str) -> Iterator[KnownSession]:
    for known in catalogue.scan_sessions(runtime, *keys.prefix_range(prefix)):
        # If the prefix is too long for a key, the range contains other sessions, too.
        if not prefix or _name(known).startswith(prefix):
            yield known


def _named(runtime: Runtime, names: list[str]) -> Iterator[KnownSession]:
    for name in names:
        key = keys.session_key(name)
        head, meta = runtime.rows(name, [meta_key(key)])
        if head is None and meta is None:
            raise SessionNotFoundError(name)
        yield KnownSession(key, head, meta)


def _name(known: KnownSession) -> str:
    try:
        return catalogue.name_of(known)
    except CorruptionError:
        # Its id is too long for its key, and the row that has it is damaged.
        return known.key.hex()


class _Decision(NamedTuple):
    """The policy that decides about a session, and where it comes from."""

    policy: Policy | None
    given: bool = False
    own: bool = False
    overridden: Policy | None = None


class _SessionRows(NamedTuple):
    """The decoded rows of a session, other than its history."""

    head: HeadRow | None
    decision: _Decision
    expires_at_ms: int | None
    lease: Lease | None
    protections: list[Protection]
    labels: dict[int, tuple[str, ...]]
    marks: dict[int, bytes]


class _Planner:
    """Plans sessions, all as of the same time."""

    def __init__(
        self, runtime: Runtime, now_ms: int, given: Policy | None, *, override: bool
    ) -> None:
        self._runtime = runtime
        self._now_ms = now_ms
        self._given = given
        self._override = override
        self._pinned = _Pinned(runtime)

    def parts(self, known: KnownSession) -> Iterator[SessionPlan]:
        """The plan for one session."""
        session = _name(known)
        blank = SessionPlan(session, None, False, 0, None)
        try:
            rows = self._read(session, known.key)
            if rows is None:
                return  # deleted since it was listed
            if rows.head is not None:
                blank = blank._replace(
                    head_revision=rows.head.revision, head_manifest=rows.head.manifest.hex()
                )
            blank = blank._replace(**rows.decision._asdict(), mark=hex_of(rows.marks.get(0)))
            reasons, spared = self._ending(rows)
            if reasons and not spared:
                yield blank._replace(deleted=reasons)
                return
            for part in self._history(blank, known.key, rows):
                yield part._replace(spared=spared)
        except (CorruptionError, FormatError) as exc:
            yield blank._replace(refused=str(exc))

    def _read(self, session: str, key: bytes) -> _SessionRows | None:
        runtime = self._runtime
        start = keys.marks(key)
        found = {
            int.from_bytes(row.key[len(start) :], "big"): row.value
            for row in scan(runtime.engine, "retention", start, keys.past(start))
        }
        head_at, policy_at = head_key(key), keys.policy(key)
        expiry_at, lease_at = keys.expiry(key), leases.lease_key(key)
        head, meta, own, default, expires, lease = runtime.engine.get_rows(
            [head_at, meta_key(key), policy_at, keys.policy(None), expiry_at, lease_at]
        )
        if head is None and meta is None:
            return None
        return _SessionRows(
            decoded(head_at, head, lambda row: None if row is None else decode_head(row)),
            self._decide(decoded(policy_at, own, decode_policy), default),
            decoded(expiry_at, expires, expiry.decode),
            decoded(
                lease_at,
                lease,
                lambda row: None if row is None else leases.decode_lease(session, row),
            ),
            [
                one
                for _, one in protection.scan_protections(runtime, session)
                if not protection.is_lapsed(one, self._now_ms)
            ],
            labels_of(runtime, key),
            found,
        )

    def _decide(self, own: Policy | None, default: bytes | None) -> _Decision:
        if self._given is not None and (own is None or self._override):
            return _Decision(self._given, given=True, overridden=own)
        if own is not None:
            return _Decision(own, own=True)
        return _Decision(decode_policy(default))

    # --- the session as a whole -----------------------------------------------------------

    def _ending(self, rows: _SessionRows) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Why the session should be deleted, and why it is kept nevertheless."""
        policy = rows.decision.policy
        reasons: list[str] = []
        spared: list[str] = []
        if rows.expires_at_ms is not None and rows.expires_at_ms <= self._now_ms:
            reasons.append(f"expired at {_time(rows.expires_at_ms)}")
        elif policy is not None and policy.idle_ms is not None and rows.head is not None:
            since_ms = rows.head.committed_at_ms
            if since_ms + policy.idle_ms <= self._now_ms:
                reasons.append(f"idle since {_time(since_ms)}")
                if policy.labelled:
                    spared += [f"labelled {name}" for name in _flat(rows.labels)]
        if reasons:
            if self._is_live(rows.lease):
                assert rows.lease is not None
                spared.append(f"lease held by {rows.lease.owner}")
            spared += [f"protected by {one.by}" for one in rows.protections]
        return tuple(reasons), tuple(spared)

    def _is_live(self, lease: Lease | None) -> bool:
        return lease is not None and lease.expires_at_ms > self._now_ms

    # --- its history ------------------------------------------------------------------------

    def _history(self, blank: SessionPlan, key: bytes, rows: _SessionRows) -> Iterator[SessionPlan]:
        if rows.head is None:
            yield blank
            return
        keeper = RevisionKeeper(rows.decision.policy, self._now_ms)
        protectors: dict[int, list[str]] = {}
        for one in rows.protections:
            protectors.setdefault(one.revision, []).append(f"protected by {one.by}")
        # The holder of a lease may rewind to the head at the time of its claim, not further.
        claimed_at_ms = rows.lease.claimed_at_ms if self._is_live(rows.lease) and rows.lease else 0
        leased = claimed_at_ms > 0
        kept: list[Kept] = []
        removed: list[Removed] = []
        part, proven = 0, False
        for page in self._pages(key, rows.head):
            pin_marks = self._pinned.look_at([head.manifest for head in page])
            for head in page:
                labels = rows.labels.get(head.revision, ())
                reasons = ["head"] if head.revision == rows.head.revision else []
                reasons += keeper.reasons(head.committed_at_ms, labels)
                if leased:
                    reasons.append("lease")
                    # Keep the base of the lease: the newest revision before the claim. One of the
                    # same millisecond may be after it, so the next older one is kept as well.
                    leased = head.committed_at_ms >= claimed_at_ms
                reasons += protectors.get(head.revision, [])
                reasons += self._pinned.reasons(head.manifest)
                if reasons:
                    kept.append(Kept(head.revision, tuple(reasons)))
                else:
                    removed.append(
                        Removed(
                            head.revision,
                            head.manifest.hex(),
                            head.committed_at_ms,
                            labels,
                            hex_of(rows.marks.get(head.revision)),
                            hex_of(pin_marks.get(head.manifest)),
                        )
                    )
            if len(kept) + len(removed) >= PART_REVISIONS:
                if not proven:
                    # If any row of a session cannot be read, nothing of it is removed.
                    for _ in self._pages(key, page[-1]):
                        pass
                    proven = True
                yield blank._replace(kept=tuple(kept), removed=tuple(removed), part=part)
                kept, removed, part = [], [], part + 1
        if kept or removed or not part:
            yield blank._replace(kept=tuple(kept), removed=tuple(removed), part=part)

    def _pages(self, key: bytes, newest: HeadRow) -> Iterator[list[HeadRow]]:
        """A revision and all before it, newest first."""
        page = [newest]
        while True:
            rows = self._runtime.engine.scan_rows(
                "history",
                start=keys.history(key, 0),
                stop=keys.history(key, page[-1].revision),
                limit=_PAGE,
                reverse=True,
            )
            yield page
            if not rows:
                return
            page = [_revision(key, row) for row in rows]


def _revision(key: bytes, row: Row) -> HeadRow:
    head = decoded(RowKey("history", row.key), row.value, decode_head)
    if row.key != keys.history(key, head.revision):
        raise CorruptionError(f"row {row.key.hex()} of table history is of another revision")
    return head


def labels_of(runtime: Runtime, key: bytes) -> dict[int, tuple[str, ...]]:
    """The labels of a session by revision; one that cannot be read is an error."""
    found: dict[int, tuple[str, ...]] = {}
    for row in scan(runtime.engine, "history", keys.labels(key), keys.past(key)):
        place = RowKey("history", row.key)
        if len(row.value) <= _LABEL_AT:
            raise CorruptionError(f"row {row.key.hex()} of table history cannot be read")
        name = decoded(place, row.value[_LABEL_AT:], bytes.decode)
        revision = label_revision(row.value)
        found[revision] = (*found.get(revision, ()), name)
    return found


def _flat(labels: dict[int, tuple[str, ...]]) -> list[str]:
    return sorted(name for names in labels.values() for name in names)


def hex_of(row: bytes | None) -> str | None:
    """A mark as plans have it."""
    return None if row is None else row.hex()


def _time(time_ms: int) -> str:
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).isoformat()
    except OverflowError:
        return f"{time_ms} ms"


class _Pinned:
    """The objects that tags and pins name; all are read again when a new pin's mark appears."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: set[bytes] | None = None
        self._names: dict[bytes, str] = {}

    def look_at(self, manifests: list[bytes]) -> dict[bytes, bytes]:
        """The marks of these manifests; ``reasons`` then has all pins made before this read."""
        engine = self._runtime.engine
        rows = engine.get_rows([keys.pin_mark(one) for one in manifests])
        found = {
            manifest: row for manifest, row in zip(manifests, rows, strict=True) if row is not None
        }
        if self._known is None or not self._known.issuperset(found.values()):
            # Compared by content, not by time: clocks can be set back.
            marked = scan(engine, "retention", *keys.all_pin_marks())
            self._known = {row.value for row in marked}
            self._names = {
                bytes(pin.digest): pin.name
                for pin in pins.list_pins(self._runtime, "", expired=False)
            }
        return found

    def reasons(self, manifest: bytes) -> list[str]:
        """Why a revision with this manifest stays."""
        name = self._names.get(manifest)
        return [] if name is None else [f"pinned by {name}"]
