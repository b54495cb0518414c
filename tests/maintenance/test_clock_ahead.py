"""A clock that ran ahead once and was corrected leaves no row that names what is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write
from casstore.maintenance import gc, retention, vacuum
from casstore.maintenance.check import check, rebuild
from casstore.maintenance.copy import copy
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.findings import INFO
from casstore.maintenance.retention import Plan, Policy
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.maintenance.lifetimes import DAY_MS, HOUR_MS, grow, revisions


def require_sound(store: Store) -> None:
    """Nothing is damaged, no row names what is gone, and collecting works."""
    found = [one for one in check(store, level="full").findings if one.severity != INFO]
    assert found == []
    assert gc.collect(store, grace_ms=0).problem is None
    assert vacuum.vacuum(store, grace_ms=0).outcome is not vacuum.VacuumOutcome.FAILED


def test_gc_deletes_an_expired_pin_before_its_object(store: Store, clock: ManualClock) -> None:
    pinned = store.put_blob(b"kept for an hour")
    store.pin("hour", pinned, ttl_ms=HOUR_MS)
    clock.now_ms += 2 * HOUR_MS
    report = gc.collect(store, grace_ms=0)
    assert (report.pins_expired, report.objects_swept) == (1, 1)
    clock.now_ms -= 2 * HOUR_MS
    assert list(store.pins(expired=True)) == []
    assert store.missing([pinned]) == [pinned]
    require_sound(store)


def test_gc_deletes_an_expired_pin_though_its_object_stays(
    store: Store, clock: ManualClock
) -> None:
    store.pin("second", store.put_blob(b"put just now"), ttl_ms=1000)
    clock.now_ms += 1000
    report = gc.collect(store, grace_ms=HOUR_MS)
    assert (report.outcome, report.pins_expired) == (gc.Outcome.SWEPT, 1)
    assert (report.objects_swept, list(store.pins(expired=True))) == (0, [])
    assert gc.collect(store, grace_ms=HOUR_MS).outcome is gc.Outcome.NOTHING


def test_a_gc_plan_counts_expired_pins_and_their_objects_and_deletes_neither(
    store: Store, clock: ManualClock
) -> None:
    store.pin("hour", store.put_blob(b"kept for an hour"), ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    with nothing_written(store):
        plan = gc.plan(store, grace_ms=0)
    assert (plan.report.pins_expired, plan.report.objects_unreached) == (1, 1)
    report = gc.execute(store, plan)
    assert (report.pins_expired, report.objects_swept) == (1, 1)


def test_a_pin_renewed_during_gc_keeps_its_object(store: Store, clock: ManualClock) -> None:
    pinned = store.put_blob(b"wanted after all")
    store.pin("wanted", pinned, ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    late = interrupted(store, before=lambda: store.pin("wanted", pinned, ttl_ms=HOUR_MS))
    assert gc.collect(late, grace_ms=0).objects_swept == 0
    assert store.get_blob(pinned) == b"wanted after all"


def test_rebuilding_removes_expired_pins_before_it_forgets_their_objects(
    tmp_path: Path, clock: ManualClock
) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)) as store:
        grow(store, "s", 2)
        store.pin("hour", store.put_blob(b"kept for an hour"), ttl_ms=HOUR_MS)
        clock.now_ms += 2 * HOUR_MS
        assert rebuild(store, grace_ms=0).objects_dropped == 1
        clock.now_ms -= 2 * HOUR_MS
        require_sound(store)


def test_a_copy_has_the_objects_of_expired_pins_that_it_takes_along(clock: ManualClock) -> None:
    source, target = Store(MemoryEngine(clock=clock)), Store(MemoryEngine(clock=clock))
    source.pin("hour", source.put_blob(b"kept for an hour"), ttl_ms=HOUR_MS)
    gone = source.put_blob(b"collected by an earlier release, which left the pin")
    source.pin("left", gone, ttl_ms=HOUR_MS)
    source.engine.write(Write(deletes=[gone]))
    clock.now_ms += 2 * HOUR_MS
    copy(source, target)
    clock.now_ms -= 2 * HOUR_MS
    assert [pin.name for pin in target.pins()] == ["hour"]
    require_sound(target)


def test_retention_deletes_an_expired_protection_with_its_revision(
    store: Store, clock: ManualClock
) -> None:
    grow(store, "s", 3)
    session = store.session("s")
    session.protect(1, by="run", ttl_ms=HOUR_MS)
    clock.now_ms += 2 * HOUR_MS
    report = retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    assert report.revisions_removed == 2
    clock.now_ms -= 2 * HOUR_MS
    assert session.protections(lapsed=True) == []
    require_sound(store)


@pytest.mark.parametrize("whole", [False, True])
def test_a_plan_made_with_the_clock_ahead_spares_what_the_corrected_clock_protects(
    store: Store, clock: ManualClock, *, whole: bool
) -> None:
    grow(store, "s", 3)
    session = store.session("s")
    if whole:
        session.expire_in(0)
    session.protect(1, by="run", ttl_ms=HOUR_MS)
    clock.now_ms += 2 * HOUR_MS
    plan = list(retention.plan(store, policy=Policy(last=1)).to_json())
    clock.now_ms -= 2 * HOUR_MS
    report = retention.execute(store, Plan.from_json(plan))
    assert 1 in revisions(store, "s")
    assert "it is protected by run" in [one.why for one in report.skipped]
    require_sound(store)


@pytest.mark.parametrize("whole", [False, True])
def test_a_label_keeps_its_revision_from_an_old_plan_though_its_mark_expired_early(
    store: Store, clock: ManualClock, *, whole: bool
) -> None:
    """Marks go by their age, and a clock that runs ahead makes them old."""
    grow(store, "s", 3)
    clock.now_ms += 2 * HOUR_MS
    policy = Policy(last=1, idle_ms=HOUR_MS if whole else None)
    plan = list(retention.plan(store, policy=policy).to_json())
    store.session("s").label("wanted", 1)
    clock.now_ms += 9 * DAY_MS
    assert expire_rows(store).marks > 0
    clock.now_ms -= 9 * DAY_MS
    report = retention.execute(store, Plan.from_json(plan))
    assert 1 in revisions(store, "s")
    assert report.skipped[0].why.startswith("it is labelled")
    require_sound(store)
