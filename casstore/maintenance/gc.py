"""gc: find unreachable objects (mark) and remove them from the index (sweep).

``plan`` marks and changes nothing. ``execute`` removes the objects of a plan that are still
unreachable. ``collect`` does both. All of them can run concurrently with readers and writers, in
any process: marking blocks no writer, and sweeping uses small transactions with pauses for writers.
Interrupting at any point is safe; the next collection continues with what is left. The work is done
by the engine's ``Collection``, which also decides what is within the grace period.

The report says how a collection ended, not an exception: see ``Outcome``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from casstore.engine.protocol import (
    DEFAULT_BATCH,
    DEFAULT_GRACE_MS,
    Collecting,
    Collection,
    MarkReport,
    reclaiming,
)
from casstore.errors import (
    BusyError,
    CasstoreError,
    CollectionOvertakenError,
    CorruptionError,
    InvalidInputError,
    ReadOnlyError,
)
from casstore.format.printing import count, size
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.roots import ROOTS, live_roots
from casstore.maintenance.rows import count_pins, remove_pins
from casstore.maintenance.systems import unregistered
from casstore.session.arguments import check_callable, check_count, check_flag, check_ms
from casstore.store import Store, check_store

# The longest pause between two steps, in which writers can take the lock.
_MAX_REST_S: Final = 0.005
MAX_BATCH: Final = 100_000


class Outcome(Enum):
    """How a collection ended."""

    #: A plan or a dry run, which removes nothing.
    PLANNED = "planned"
    #: All unreachable objects were removed.
    SWEPT = "swept"
    #: Nothing was unreachable.
    NOTHING = "nothing to do"
    #: Stopped, or overtaken by writers. The objects removed so far were unreachable. Run it again.
    INCOMPLETE = "incomplete"
    #: Nothing was removed, because something that is reached is missing or cannot be
    #: read, or because another collection is going on. ``problem`` says what.
    REFUSED = "refused"
    #: Failed with an error. The objects removed before it were unreachable.
    FAILED = "failed"


class GcReport(NamedTuple):
    """What a collection did, or would do.

    Attributes:
        outcome: how it ended
        roots: distinct digests that sessions, tags and other roots name
        objects_kept: objects that are reachable
        objects_unreached: objects that are not reachable and older than the grace period, removed
            or not
        objects_swept: of those, objects removed now
        bytes_kept: the size of the reachable objects before compression
        bytes_unreached: the size of the unreachable objects before compression
        bytes_swept: the size of the removed objects before compression
        bytes_freed: space in the file freed at once: slabs without an object; pack frees the rest
        pins_expired: expired pins: removed, or found by a dry run
        longest_pause_ms: the longest time that writers had to wait
        problem: the error that stopped it, if one did
        missing_systems: record systems in the store that are not installed: their objects are kept
    """

    outcome: Outcome
    roots: int = 0
    objects_kept: int = 0
    objects_unreached: int = 0
    objects_swept: int = 0
    bytes_kept: int = 0
    bytes_unreached: int = 0
    bytes_swept: int = 0
    bytes_freed: int = 0
    pins_expired: int = 0
    longest_pause_ms: float = 0.0
    problem: CasstoreError | None = None
    missing_systems: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (
            f"{self.outcome.value}: {count(self.objects_unreached, 'unreachable object')} "
            f"({size(self.bytes_unreached)}), {self.objects_swept:,} removed "
            f"({size(self.bytes_swept)}); {count(self.objects_kept, 'object')} kept "
            f"({size(self.bytes_kept)})"
        )
        if self.pins_expired:
            text += f"; {count(self.pins_expired, 'expired pin')}"
        if self.missing_systems:
            text += f"; not installed: {', '.join(self.missing_systems)}"
        return text if self.problem is None else f"{text}; {self.problem}"


class GcPlan(NamedTuple):
    """The unreachable objects, as a bitmap, for ``execute`` to remove."""

    report: GcReport
    grace_ms: int
    made_at_ms: int
    #: Which objects, by their numbers within this store.
    unreached: bytes


def plan(
    store: Store, *, grace_ms: int = DEFAULT_GRACE_MS, progress: Progress | None = None
) -> GcPlan:
    """Find unreachable objects; changes nothing, and works on a read-only store.

    Objects put within the grace period ``grace_ms`` are kept, with all they link to.

    >>> digest = store.put_blob(b"not referred to")
    >>> found = plan(store, grace_ms=0)
    >>> found.report.objects_unreached, digest in store
    (1, True)
    """
    check_store(store)
    made_at_ms = store.engine.now_ms()
    unreached = b""
    try:
        with _collection(store, grace_ms, dry_run=True) as collection:
            expired = count_pins(store.engine)
            found = collection.mark(progress=Phase(progress, "mark", "objects"))
            unreached = collection.unreached()
            missing = unregistered(store.engine)
    except CorruptionError as exc:
        return GcPlan(GcReport(Outcome.REFUSED, problem=exc), grace_ms, made_at_ms, b"")
    is_due = found.objects_unreached or expired
    report = _report(Outcome.PLANNED if is_due else Outcome.NOTHING, found)
    report = report._replace(pins_expired=expired, missing_systems=missing)
    return GcPlan(report, grace_ms, made_at_ms, unreached)


def execute(
    store: Store,
    plan: GcPlan,
    *,
    batch: int = DEFAULT_BATCH,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> GcReport:
    """Remove the objects of a plan, except those that became reachable or were put again since.

    >>> digest = store.put_blob(b"not referred to")
    >>> execute(store, plan(store, grace_ms=0)).objects_swept, digest in store
    (1, False)
    """
    check_store(store)
    if not isinstance(plan, GcPlan) or not isinstance(plan.report, GcReport):
        raise InvalidInputError(f"plan must be a GcPlan, got {plan!r:.60}")
    if plan.report.outcome in (Outcome.REFUSED, Outcome.NOTHING):
        return plan.report
    return _run(store, plan.grace_ms, plan, batch, progress, stop)


def collect(
    store: Store,
    *,
    grace_ms: int = DEFAULT_GRACE_MS,
    dry_run: bool = False,
    batch: int = DEFAULT_BATCH,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> GcReport:
    """Remove objects that no session, revision, pin, queued work, attachment or record reaches.

    Objects put within the grace period ``grace_ms`` are kept, with all they link to. ``batch``
    limits how many objects one transaction removes, and so how long a writer waits. ``stop`` is
    called between transactions; if it returns true, the outcome is ``INCOMPLETE``. A dry run
    returns the report of the plan.

    >>> digest = store.put_blob(b"not referred to")
    >>> collect(store).objects_swept  # it was put just now, and may be needed in a moment
    0
    >>> collect(store, grace_ms=0).objects_swept
    1
    """
    check_store(store)
    check_flag(dry_run, "dry_run")
    if dry_run:
        return plan(store, grace_ms=grace_ms, progress=progress).report
    return _run(store, grace_ms, None, batch, progress, stop)


def check_batch(batch: int) -> None:
    """Raise InvalidInputError unless this is a valid number of objects for one transaction."""
    check_count(batch, "batch", least=1, most=MAX_BATCH)


def _run(
    store: Store,
    grace_ms: int,
    plan: GcPlan | None,
    batch: int,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> GcReport:
    check_batch(batch)
    if stop is not None:
        check_callable(stop, "stop")
    with reclaiming(store.engine):
        only = None if plan is None else plan.unreached
        return _sweep_objects(store, grace_ms, only, batch, progress, stop)


def _sweep_objects(
    store: Store,
    grace_ms: int,
    only: bytes | None,
    batch: int,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> GcReport:
    report = GcReport(Outcome.REFUSED)
    try:
        with _collection(store, grace_ms, dry_run=False) as collection:
            # Before marking, which starts from the remaining rows.
            expired = _remove_pins(store, progress)
            found = collection.mark(only=only, progress=Phase(progress, "mark", "objects"))
            report = _report(Outcome.INCOMPLETE, found)._replace(
                pins_expired=expired, missing_systems=unregistered(store.engine)
            )
            if not found.objects_unreached:
                return report._replace(outcome=Outcome.SWEPT if expired else Outcome.NOTHING)
            sweeping = Phase(progress, "sweep", "objects")
            done = False
            while not done:
                if stop is not None and stop():
                    return report
                swept = collection.sweep(batch)
                done = swept.done
                report = report._replace(
                    objects_swept=report.objects_swept + swept.objects,
                    bytes_swept=report.bytes_swept + swept.size_bytes,
                    bytes_freed=report.bytes_freed + swept.freed_bytes,
                    longest_pause_ms=max(report.longest_pause_ms, swept.held_s * 1000),
                )
                sweeping(report.objects_swept, found.objects_unreached)
                if not done:
                    # The lock is not fair: without a pause, this thread would get it again.
                    time.sleep(min(swept.held_s, _MAX_REST_S))
    except CollectionOvertakenError as exc:
        return report._replace(outcome=Outcome.INCOMPLETE, problem=exc)
    except (CorruptionError, BusyError) as exc:
        refused = not report.objects_swept
        return report._replace(outcome=Outcome.REFUSED if refused else Outcome.FAILED, problem=exc)
    except CasstoreError as exc:
        if not report.objects_unreached:
            raise
        return report._replace(outcome=Outcome.FAILED, problem=exc)
    return report._replace(outcome=Outcome.SWEPT)


def _remove_pins(store: Store, progress: Progress | None) -> int:
    try:
        return remove_pins(store.engine, progress)
    except ReadOnlyError:
        # This role of the server may run gc but not change rows: expired pins stay, and so do their
        # objects.
        return 0


def _collection(store: Store, grace_ms: int, *, dry_run: bool) -> Collection:
    engine = store.engine
    if not isinstance(engine, Collecting):
        raise InvalidInputError("the engine of this store does not support gc")
    check_ms(grace_ms, "grace_ms")
    roots = live_roots(engine.now_ms()) if dry_run else ROOTS
    return engine.collection(roots, grace_ms=grace_ms, dry_run=dry_run)


def _report(outcome: Outcome, found: MarkReport) -> GcReport:
    return GcReport(outcome, **found._asdict())
