"""Retention: which revisions, labels and sessions stay, and the removal of the others.

    set_policy(store, Policy(last=10, daily=7))     what stays
    for session in plan(store): ...                 what would go, and why the rest stays
    execute(store, plan(store))                     removes that

Only rows are removed. gc then removes the objects, and compacting the file reclaims its space.

``execute`` removes what a plan lists, or less, never more. Each removal is a write with the
conditions that the row is the planned one and that the revision was not labelled, forked, protected
or pinned since. Revisions that have changed stay and are reported. After an interruption, the next
run skips what is already removed and continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, TypeVar

from casstore.engine.protocol import (
    Condition,
    DeleteRow,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowKey,
    RowLapsed,
    Write,
)
from casstore.errors import (
    ContendedError,
    CorruptionError,
    FormatError,
    InvalidInputError,
)
from casstore.format.printing import count
from casstore.maintenance.policy import (
    DAY_MS,
    Policy,
    decode_policy,
    find_policy,
    set_policy,
)
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.retention_plan import Kept, Plan, Removed, SessionPlan
from casstore.maintenance.retention_planning import hex_of, labels_of, plan
from casstore.maintenance.systems import Held, held_by
from casstore.maintenance.transfer.rows import label_revision
from casstore.session import catalogue, expiry, keys, leases, protection
from casstore.session.arguments import check_kind
from casstore.session.attempts import transact
from casstore.session.catalogue import KnownSession
from casstore.session.data import Protection
from casstore.session.scanning import scan
from casstore.session.state import (
    HeadRow,
    Runtime,
    decode_head,
    head_key,
    meta_key,
    runtime_of,
    tombstone_key,
)
from casstore.session.turns import receipt_key, settle_receipt
from casstore.store import Store, check_store

__all__ = [
    "Kept",
    "Overridden",
    "Plan",
    "Policy",
    "Removed",
    "RetentionReport",
    "SessionPlan",
    "Skipped",
    "execute",
    "find_policy",
    "plan",
    "set_policy",
]

#: How old a plan may be. Marks are kept longer than that, so it can trust them.
MAX_PLAN_AGE_MS: Final = 7 * DAY_MS
#: How far the clock may have gone back since a plan was made. Marks are kept that much longer.
MAX_CLOCK_BACK_MS: Final = DAY_MS
#: How many single cases a report lists; it counts all.
LISTED: Final = 1000
_BATCH: Final = 256

Case = TypeVar("Case")


class Skipped(NamedTuple):
    """A planned removal that was not carried out; revision None: the session as a whole.

    >>> from casstore.maintenance import retention
    >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> plan = retention.Plan.from_json(list(found.to_json()))  # as it is now
    >>> kept = session.protect("start", by="reviewer")
    >>> [(one.session, one.revision) for one in retention.execute(store, plan).skipped]
    [('s', 1)]
    """

    session: str
    revision: int | None
    why: str


class Overridden(NamedTuple):
    """A session that was pruned by a given policy, and the stored policy that would have decided.

    >>> from casstore.maintenance import retention
    >>> retention.set_policy(store, retention.Policy(everything=True), "s")
    >>> found = retention.plan(
    ...     store, policy=retention.Policy(last=1, labelled=False), override_policies=True
    ... )
    >>> [(one.session, one.policy.everything) for one in retention.execute(store, found).overridden]
    [('s', True)]

    Attributes:
        session: the session
        policy: the stored policy
    """

    session: str
    policy: Policy


class RetentionReport(NamedTuple):
    """What carrying out a plan did.

    >>> from casstore.maintenance import retention
    >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> report = retention.execute(store, found)
    >>> report.revisions_removed, report.labels_removed, report.skipped
    (1, 1, ())

    Attributes:
        sessions: sessions examined
        sessions_deleted: sessions deleted, or that would be
        revisions_removed: revisions removed, or that would be
        labels_removed: labels removed with them, or that would be
        already_gone: removals in the plan that another run had done before
        skipped_count: revisions that the plan removes and that are in use now
        skipped: the first of them
        refused_count: sessions that were left unchanged because a row of them cannot be read
        refused: the first of them
        overridden_count: sessions whose stored policy the given one overrode
        overridden: the first of them
        own_policies: sessions that their own policy decided about
    """

    sessions: int
    sessions_deleted: int
    revisions_removed: int
    labels_removed: int
    already_gone: int
    skipped_count: int
    skipped: tuple[Skipped, ...]
    refused_count: int
    refused: tuple[Skipped, ...]
    overridden_count: int = 0
    overridden: tuple[Overridden, ...] = ()
    own_policies: int = 0

    def __str__(self) -> str:
        text = (
            f"{count(self.sessions, 'session')}: {self.sessions_deleted:,} deleted, "
            f"{count(self.revisions_removed, 'revision')} and "
            f"{count(self.labels_removed, 'label')} removed"
        )
        if self.already_gone:
            text += f", {self.already_gone:,} already gone"
        for number, what, which in (
            (self.skipped_count, "skipped", self.skipped),
            (self.refused_count, "refused", self.refused),
        ):
            if number:
                first = which[0] if which else None
                text += f"; {number:,} {what}"
                text += f" ({first.session!r}: {first.why})" if first is not None else ""
        return text


class Tally:
    """Counts what a plan does, or would do; lists single cases up to ``listed``, None: all."""

    def __init__(self, listed: int | None) -> None:
        self._listed = listed
        self.sessions = self.deleted = self.revisions = self.labels = self.gone = 0
        self.skipped_count = self.refused_count = self.overridden_count = self.own = 0
        self.skipped: list[Skipped] = []
        self.refused: list[Skipped] = []
        self.overridden: list[Overridden] = []

    def begin(self, part: SessionPlan) -> None:
        """Count a session; further parts of its plan are not counted again."""
        if part.part:
            return
        self.sessions += 1
        self.own += part.own
        if part.overridden is not None:
            self.overridden_count += 1
            self._list(self.overridden, Overridden(part.session, part.overridden))

    def _list(self, cases: list[Case], case: Case) -> None:
        if self._listed is None or len(cases) < self._listed:
            cases.append(case)

    def skip(self, session: str, revision: int | None, why: str) -> None:
        """Record a planned removal that is not carried out."""
        self.skipped_count += 1
        self._list(self.skipped, Skipped(session, revision, why))

    def refuse(self, session: str, why: str) -> None:
        """Record a session that the plan could not decide about."""
        self.refused_count += 1
        self._list(self.refused, Skipped(session, None, why))

    def report(self) -> RetentionReport:
        """The counts and cases so far."""
        return RetentionReport(
            sessions=self.sessions,
            sessions_deleted=self.deleted,
            revisions_removed=self.revisions,
            labels_removed=self.labels,
            already_gone=self.gone,
            skipped_count=self.skipped_count,
            skipped=tuple(self.skipped),
            refused_count=self.refused_count,
            refused=tuple(self.refused),
            overridden_count=self.overridden_count,
            overridden=tuple(self.overridden),
            own_policies=self.own,
        )


def execute(store: Store, plan: Plan, *, progress: Progress | None = None) -> RetentionReport:
    """Remove the sessions and revisions of a plan that have not changed since it was made.

    It can run concurrently with writers, and can be interrupted and run again. InvalidInputError if
    the plan is more than a week old, or the clock was set back by more than a day since.

    >>> from casstore.maintenance import retention
    >>> found = retention.plan(store, policy=retention.Policy(last=1, labelled=False))
    >>> retention.execute(store, found).revisions_removed
    1
    >>> [entry.revision for entry in session.history()]
    [2]
    """
    check_store(store)
    check_kind(plan, "plan", Plan)
    runtime = runtime_of(store)
    age_ms = runtime.engine.now_ms() - plan.planned_at_ms
    if age_ms > MAX_PLAN_AGE_MS:
        raise InvalidInputError("the plan is more than a week old: plan again")
    if age_ms < -MAX_CLOCK_BACK_MS:
        # By the current clock, the plan would stay valid for longer than marks are kept.
        raise InvalidInputError(
            "the plan is from the future, so the clock was set back: plan again"
        )
    tally = Tally(LISTED)
    report = Phase(progress, "retain", "sessions")
    held: Held | None = None
    for part in plan:
        tally.begin(part)
        if part.refused is not None:
            tally.refuse(part.session, part.refused)
        elif part.deleted:
            held = held or held_by(store)
            _delete(store, runtime, held, part, tally)
        else:
            _trim(runtime, part, tally)
        report(tally.sessions)
    return tally.report()


class _ChangedError(Exception):
    """Something is not as it was planned; the message says what."""


def _policy_conditions(
    part: SessionPlan, key: bytes, rows: Sequence[bytes | None]
) -> list[Condition]:
    """Conditions that the stored policies are those of the plan; _ChangedError if they are not."""
    own, default = rows
    found = decode_policy(own)
    if part.given:
        if found != part.overridden:
            raise _ChangedError("its own policy was changed, or the plan does not override it")
        return [RowIs(*keys.policy(key), own)]
    if found is None:
        found = decode_policy(default)
    if found != part.policy:
        raise _ChangedError("the policy was changed")
    return [RowIs(*keys.policy(key), own), RowIs(*keys.policy(None), default)]


# --- sessions -------------------------------------------------------------------------------


def _delete(store: Store, runtime: Runtime, held: Held, part: SessionPlan, tally: Tally) -> None:
    key = keys.session_key(part.session)

    def bury() -> bool:
        known, conditions = _doomed(runtime, part, key)
        if known is not None:
            catalogue.bury(runtime, known, conditions)
        return known is not None

    try:
        is_buried = transact(f"session {part.session!r}", bury)
    except (_ChangedError, ContendedError, CorruptionError, FormatError) as exc:
        tally.skip(part.session, None, str(exc))
        return
    # Also completes the deletion if an earlier run was interrupted.
    held.finish_deletion(store, runtime, part.session)
    tally.deleted += is_buried
    tally.gone += not is_buried


def _doomed(
    runtime: Runtime, part: SessionPlan, key: bytes
) -> tuple[KnownSession | None, list[Condition]]:
    """A session that is unchanged since the plan, and the conditions for deleting it."""
    places = [
        tombstone_key(key),
        head_key(key),
        meta_key(key),
        keys.expiry(key),
        leases.lease_key(key),
        keys.mark(key, 0),
        keys.policy(key),
        keys.policy(None),
    ]
    deleted, head, meta, expires, lease, mark, *policies = runtime.engine.get_rows(places)
    if deleted is not None or (head is None and meta is None):
        return None, []
    now_ms = runtime.engine.now_ms()
    found = None if head is None else decode_head(head)
    planned = (part.head_revision, part.head_manifest)
    if planned != ((0, None) if found is None else (found.revision, found.manifest.hex())):
        raise _ChangedError("something was committed")
    if hex_of(mark) != part.mark:
        raise _ChangedError("it was protected or labelled, or its attachments changed")
    conditions: list[Condition] = [RowIs(*keys.mark(key, 0), mark)]
    expires_at_ms = expiry.decode(expires)
    if expires is not None and expires_at_ms is not None and expires_at_ms <= now_ms:
        conditions.append(RowLapsed(*keys.expiry(key), expires, expiry.EXPIRES_AT))
    elif any(reason.startswith("idle") for reason in part.deleted):
        conditions += _policy_conditions(part, key, policies)
        if part.policy is not None and part.policy.labelled and labels_of(runtime, key):
            raise _ChangedError("it is labelled")
    else:
        raise _ChangedError("its time was extended")
    if leases.live_generation(lease, now_ms):
        raise _ChangedError("its lease is live")
    # If the clock was set back since the plan was made, protections may be live again.
    for _, one in chain.from_iterable(_protections(runtime, key).values()):
        _require_lapsed(one, now_ms)
    conditions.append(leases.free(key, lease))
    return KnownSession(key, head, meta), conditions


# --- revisions ------------------------------------------------------------------------------


def _trim(runtime: Runtime, part: SessionPlan, tally: Tally) -> None:
    key = keys.session_key(part.session)
    for start in range(0, len(part.removed), _BATCH):
        left = part.removed[start : start + _BATCH]
        try:
            what = f"session {part.session!r}"
            transact(what, partial(_remove, runtime, part, key, left, tally))
        except (_ChangedError, ContendedError, FormatError, CorruptionError) as exc:
            for one in left:
                tally.skip(part.session, one.revision, str(exc))


def _remove(
    runtime: Runtime, part: SessionPlan, key: bytes, planned: Sequence[Removed], tally: Tally
) -> None:
    """Remove these revisions in one write; ConditionFailedError if a row changes meanwhile."""
    places: list[RowKey] = [head_key(key), keys.policy(key), keys.policy(None)]
    for one in planned:
        places.append(RowKey("history", keys.history(key, one.revision)))
        places.append(keys.mark(key, one.revision))
        places.append(keys.pin_mark(bytes.fromhex(one.manifest)))
    head, own, default, *rest = runtime.engine.get_rows(places)
    if head is None:
        tally.gone += len(planned)
        return
    conditions = _policy_conditions(part, key, (own, default))
    now_labels, protections = labels_of(runtime, key), _protections(runtime, key)
    now_ms = runtime.engine.now_ms()
    changes: list[RowChange] = []
    skipped: list[tuple[int, str]] = []
    gone = revisions = labels = 0
    for at, one in enumerate(planned):
        row, mark, pin_mark = rest[3 * at : 3 * at + 3]
        if row is None:
            gone += 1
            continue
        try:
            found = _unchanged(one, row, mark, pin_mark)
            for name in now_labels.get(one.revision, ()):
                if name not in one.labels:
                    raise _ChangedError(f"it is labelled {name}")
            lapsed = protections.get(one.revision, [])
            for _, protected in lapsed:
                _require_lapsed(protected, now_ms)
            needs, goes, names = _with_it(runtime, key, one, found)
        except _ChangedError as exc:
            skipped.append((one.revision, str(exc)))
            continue
        conditions += [
            RowIs("history", keys.history(key, one.revision), row),
            RowIs(*keys.mark(key, one.revision), mark),
            RowIs(*keys.pin_mark(found.manifest), pin_mark),
            *[RowLapsed("retention", *row, protection.UNTIL) for row, _ in lapsed],
            *needs,
        ]
        changes += [
            DeleteRow("history", keys.history(key, one.revision)),
            DeleteRow(*keys.mark(key, one.revision)),
            # In the same write: a clock that is set back must not bring back a protection of a
            # revision that is gone.
            *[DeleteRow("retention", row.key) for row, _ in lapsed],
            *goes,
        ]
        revisions += 1
        labels += names
    if changes:
        runtime.engine.write(Write(conditions=conditions, rows=changes))
    # Counted after the write: a failed write is retried as a whole.
    tally.revisions += revisions
    tally.labels += labels
    tally.gone += gone
    for revision, why in skipped:
        tally.skip(part.session, revision, why)


def _protections(runtime: Runtime, key: bytes) -> dict[int, list[tuple[Row, Protection]]]:
    """The protections of a session by revision, as rows and decoded."""
    found: dict[int, list[tuple[Row, Protection]]] = {}
    start = keys.protections(key)
    for row in scan(runtime.engine, "retention", start, keys.past(start)):
        one = protection.decode("", row.key, row.value)
        found.setdefault(one.revision, []).append((row, one))
    return found


def _require_lapsed(one: Protection, now_ms: int) -> None:
    if not protection.is_lapsed(one, now_ms):
        raise _ChangedError(f"it is protected by {one.by}")


def _unchanged(planned: Removed, row: bytes, mark: bytes | None, pin_mark: bytes | None) -> HeadRow:
    """The revision, if it and its marks are as they were when it was planned."""
    try:
        found = decode_head(row)
    except CorruptionError as exc:
        raise _ChangedError(str(exc)) from exc
    if (found.manifest.hex(), found.committed_at_ms) != (
        planned.manifest,
        planned.committed_at_ms,
    ):
        raise _ChangedError("it is another one than was planned")
    if hex_of(mark) != planned.mark:
        raise _ChangedError("it was labelled, protected or forked")
    if hex_of(pin_mark) != planned.pin_mark:
        raise _ChangedError("it was pinned")
    return found


def _with_it(
    runtime: Runtime, key: bytes, planned: Removed, head: HeadRow
) -> tuple[list[Condition], list[RowChange], int]:
    """The changes that come with a removal: labels are deleted, the turn's receipt is settled."""
    conditions: list[Condition] = []
    changes: list[RowChange] = []
    places = [RowKey("history", keys.label(key, name)) for name in planned.labels]
    for place, row in zip(places, runtime.engine.get_rows(places), strict=True):
        # A label that names another revision by now stays with that one.
        if row is not None and label_revision(row) == head.revision:
            conditions.append(RowIs(*place, row))
            changes.append(DeleteRow(*place))
    removed = len(changes)
    if head.turn is not None:
        receipt = receipt_key(key, head.turn)
        row = runtime.engine.get_rows([receipt])[0]
        if row is not None:
            try:
                settled = settle_receipt(runtime, row, head.committed_at_ms)
            except (CorruptionError, FormatError) as exc:
                raise _ChangedError(f"the receipt of its turn cannot be kept: {exc}") from exc
            conditions.append(RowIs(*receipt, row))
            changes.append(PutRow(*receipt, settled))
    return conditions, changes, removed
