"""Collection on LMDB: slabs and index rows go together, and touches keep what is put again."""

from __future__ import annotations

import fcntl
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb import notes
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write
from casstore.errors import CollectionOvertakenError, StorageError
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import new_blob
from tests.maintenance.wounds import LONG, engine_of, step


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        yield store


def sweep(store: Store, **options: Any) -> gc.GcReport:
    return gc.collect(store, grace_ms=0, **options)


def names(store: Store) -> set[bytes]:
    return {info.digest for info in store.engine.scan_objects(limit=1_000_000)}


def test_gc_and_pack_free_the_space_of_a_deleted_session(store: Store) -> None:
    engine = engine_of(store)
    step(store, "kept", "a")
    source = random.Random(1)
    for n in range(200):
        step(store, "dropped", f"n{n}", text=source.randbytes(3000).hex())
    before = engine.used_bytes()
    store.delete_session("dropped")
    report = sweep(store)
    assert report.bytes_freed > 0
    store.pack(min_age_ms=0)
    assert engine.used_bytes() < before / 4
    with engine._env.reading() as txn:
        # The newest slab is never removed, but what is dead in it is.
        assert all(len(value) < 70_000 for _, value in txn.cursor(db=engine._env.slabs))


def test_a_collector_interrupted_as_it_begins_does_not_block_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_blob(b"loose")
    lock = fcntl.flock

    def interrupted(handle: Any, operation: int) -> None:
        lock(handle, operation)
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gc.collect(store, grace_ms=0)
    assert gc.collect(store, grace_ms=0).objects_swept == 1


def test_a_collector_that_was_taken_for_dead_removes_nothing_more(
    store: Store, clock: ManualClock
) -> None:
    """Writers stop taking notes for a collector that was not seen for an hour."""
    for n in range(50):
        store.put_blob(b"loose %d" % n)
    kept = Digest.of_blob(b"loose 7")

    def progress(at: Step) -> None:
        if at.phase == "sweep" and at.done == 5:
            clock.now_ms += notes.OPEN_MS
            step(store, "s", "a")
            store.tag("kept", kept)

    report = sweep(store, batch=5, progress=progress)
    assert report.outcome is gc.Outcome.INCOMPLETE
    assert isinstance(report.problem, CollectionOvertakenError)
    assert store.missing([kept]) == []
    assert sweep(store).outcome is gc.Outcome.SWEPT
    assert store.missing([kept]) == []


def test_repeated_puts_write_one_touch_per_interval_and_gc_deletes_all_but_the_last(
    store: Store, clock: ManualClock
) -> None:
    engine = engine_of(store)

    def touches() -> int:
        engine.apply_log()
        with engine._env.reading() as txn:
            return int(txn.stat(engine._env.touches)["entries"])

    for _ in range(3):
        for n in range(10):
            store.put_blob(b"again %d" % n)
    assert touches() == 0
    clock.now_ms += notes.TOUCH_INTERVAL_MS
    for _ in range(3):
        for n in range(10):
            store.put_blob(b"again %d" % n)
    assert touches() == 10
    clock.now_ms += 1
    store.put_blob(b"never again")
    assert sweep(store).objects_swept == 11
    # The last of them: numbers go on after it.
    assert touches() == 1


def test_gc_deletes_slabs_without_live_objects_immediately(store: Store) -> None:
    source = random.Random(3)
    for _ in range(20):
        store.put_many([source.randbytes(1000) for _ in range(60)])
    step(store, "s", "a")
    report = sweep(store)
    assert report.objects_swept == 1200
    assert report.bytes_freed > 1_150_000
    engine_of(store).verify()
    assert sweep(store).outcome is gc.Outcome.NOTHING


def test_gc_deletes_a_slab_together_with_the_index_rows_of_its_deleted_objects(
    store: Store,
) -> None:
    """The log said that they are gone; the index still led to a slab that was not there."""
    engine = engine_of(store)
    deleted, last = store.put_blob(b"deleted"), store.put_blob(b"the newest slab stays")
    engine.apply_log()
    engine.write(Write(deletes=[deleted]))
    assert sweep(store).objects_swept == 1
    store.put_blob(b"after")
    assert engine.digests(bytes(32), b"\xff" * 32, limit=10) == [Digest.of_blob(b"after")]
    assert engine.check_index(lambda _: False) == []
    assert store.missing([deleted, last]) == [deleted, last]
    assert engine.verify() == 1


def test_collected_objects_whose_bytes_are_still_in_a_slab_stay_dead(store: Store) -> None:
    """Marking may believe the slabs only while all that they hold has a name."""
    loose = [store.put_blob(b"loose %d" % n) for n in range(10)]
    store.put_many([{"kept": LONG}, {"loose": LONG}])
    store.tag("kept", store.put_value({"kept": LONG}))
    first = sweep(store)
    assert first.objects_swept == 11
    again = gc.plan(store, grace_ms=0).report
    assert again.outcome is gc.Outcome.NOTHING
    assert again.objects_kept == first.objects_kept == len(names(store))
    assert gc.plan(store).report.objects_kept == first.objects_kept
    assert store.missing(loose) == loose
    store.pack(min_age_ms=0)
    assert gc.plan(store, grace_ms=0).report.objects_kept == first.objects_kept


def test_an_object_put_again_after_old_touches_were_deleted_stays(
    store: Store, clock: ManualClock
) -> None:
    """Touches are numbered, and a collector asks for those behind the last that it has seen."""
    blobs = [b"loose %d" % n for n in range(20)]
    for blob in blobs:
        store.put_blob(blob)
    clock.now_ms += notes.TOUCH_INTERVAL_MS
    for blob in blobs[18:]:
        store.put_blob(blob)
    clock.now_ms += 3_600_000

    def progress(step: Step) -> None:
        if step.phase == "sweep" and step.done == 4:
            store.put_blob(blobs[3])

    report = gc.collect(store, grace_ms=1000, progress=progress, batch=4)
    assert report.objects_swept == 19
    assert store.get_blob(Digest.of_blob(blobs[3])) == blobs[3]


def test_retrying_a_failed_put_of_a_stored_object_restarts_its_grace_period(
    store: Store, clock: ManualClock
) -> None:
    """After the error of a full disk, the caller makes room and retries within a minute."""
    again, long = new_blob(b"again"), new_blob(random.Random(5).randbytes(1 << 20))
    store.engine.write(Write(objects=[again]))
    clock.now_ms += 3_600_000
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    try:
        with pytest.raises(StorageError):
            store.engine.write(Write(objects=[again, long]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    store.engine.write(Write(objects=[again]))
    assert gc.collect(store, grace_ms=60_000).outcome is gc.Outcome.NOTHING
    assert store.missing([again.digest]) == []
