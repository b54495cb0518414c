"""gc: what nobody reaches goes, everything else stays, whoever else is at work."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write
from casstore.errors import (
    BusyError,
    ClosedError,
    ComponentNotFoundError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    ReadOnlyError,
)
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.store import Store
from casstore.testing import ManualClock

ROOT = Path(__file__).parent.parent.parent
LONG = "long " * 800


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        yield store


def sweep(store: Store, **options: Any) -> gc.GcReport:
    return gc.collect(store, grace_ms=0, **options)


def names(store: Store) -> set[bytes]:
    return {info.digest for info in store.engine.scan_objects(limit=1_000_000)}


def verify(store: Store) -> int:
    engine = store.engine
    if not isinstance(engine, LmdbEngine):
        return len(names(store))
    return engine.verify()


def step(store: Store, session: str, *ids: str, text: str = "", **fields: Any) -> None:
    drafts = [NodeDraft(each, {"role": "user", "text": f"{each} {text}"}) for each in ids]
    store.session(session).commit(Commit(append=drafts, **fields))


def everything(store: Store) -> dict[str, list[Any]]:
    """All that can be read of all sessions, at all revisions."""
    found: dict[str, list[Any]] = {}
    for info in store.sessions():
        session = store.session(info.meta.session)
        found[session.id] = [
            (entry, session.checkpoint(entry, hydrate=True), list(session.nodes("full", at=entry)))
            for entry in session.history()
        ]
    return found


def test_gc_of_an_empty_store_removes_nothing(any_store: Store) -> None:
    store = any_store
    assert sweep(store) == gc.GcReport(gc.Outcome.NOTHING)


def test_gc_removes_unreachable_objects_and_keeps_those_that_a_session_reaches(
    any_store: Store,
) -> None:
    store = any_store
    loose = [store.put_blob(b"loose"), store.put_value({"loose": [LONG]})]
    for n in range(20):
        step(store, "s", f"n{n}", text=LONG, checkpoint=Checkpoint(tool_state={"n": n, "t": LONG}))
    before = everything(store)
    kept = names(store)
    report = sweep(store)
    assert names(store) < kept
    assert report.objects_swept == 2  # the long text is the sessions' too
    assert store.missing(loose) == loose
    assert everything(store) == before
    assert verify(store) == report.objects_kept == len(names(store))


def test_gc_of_a_deleted_session_keeps_what_its_fork_shares(any_store: Store) -> None:
    store = any_store
    for n in range(30):
        step(store, "source", f"n{n}", text=LONG)
    store.fork("source", "fork", at=10)
    step(store, "fork", "mine")
    step(store, "source", "theirs", text="CANARY" * 100)
    store.delete_session("source")
    before = everything(store)
    report = sweep(store)
    assert report.objects_swept > 20
    assert everything(store) == before
    assert [node.id for node in store.session("fork").nodes()] == [
        *(f"n{n}" for n in range(10)), "mine",
    ]  # fmt: skip
    verify(store)


def test_gc_keeps_every_revision_including_those_that_a_rewind_left_behind(
    any_store: Store,
) -> None:
    store = any_store
    for n in range(10):
        step(store, "s", f"n{n}", checkpoint=Checkpoint(tool_state={"state": [n, LONG]}))
    store.session("s").rewind(3)
    step(store, "s", "other")
    before = everything(store)
    assert sweep(store).objects_swept == 0
    assert everything(store) == before


def test_hidden_nodes_stay_hidden(any_store: Store) -> None:
    store = any_store
    step(store, "s", "a", "b", "c")
    store.session("s").tombstone(["b"])
    sweep(store)
    assert [node.id for node in store.session("s").nodes()] == ["a", "c"]


def test_tags_and_unexpired_pins_keep_their_objects(any_store: Store, clock: ManualClock) -> None:
    store = any_store
    tagged, pinned = store.put_value({"tagged": LONG}), store.put_blob(b"pinned")
    store.tag("t", tagged)
    store.pin("p", pinned, ttl_ms=1000)
    sweep(store)
    assert store.missing([tagged, pinned]) == []
    clock.now_ms += 1000
    assert sweep(store).objects_swept == 1
    assert store.missing([tagged, pinned]) == [pinned]
    assert store.get_value(tagged) == {"tagged": LONG}


def test_queued_work_keeps_its_items(any_store: Store) -> None:
    store = any_store
    session = store.session("s" * 300)  # an id too long for its key
    batch = session.queue.enqueue([{"text": LONG}], source_key="key")
    assert sweep(store).objects_swept == 0
    assert session.queue.batches()[0].items == batch.items
    session.queue.cancel(batch.id)
    assert sweep(store).objects_swept == 2


def test_attachments_keep_their_blobs(any_store: Store) -> None:
    store = any_store
    attachments = store.session("s").attachments
    put = attachments.put(b"attached")
    assert put.digest is not None
    sweep(store)
    assert store.get_blob(put.digest) == b"attached"
    attachments.forget(put.id)
    sweep(store)
    assert store.missing([put.digest]) == [put.digest]


def test_gc_ignores_labels(any_store: Store) -> None:
    store = any_store
    for name in ("s", "long id " * 60):
        step(store, name, "a", label="first")
        step(store, name, "b", label="second " * 60)
        store.session(name).label("third", 1)
    assert sweep(store).objects_swept == 0
    assert store.session("s").entry("third").revision == 1


def test_an_object_within_the_grace_period_stays_with_everything_it_links_to(
    any_store: Store, clock: ManualClock
) -> None:
    store = any_store
    old = store.put_value({"old": LONG})
    clock.now_ms += 10_000
    young = store.put_value({"young": casstore.Link(old)})
    gone = Digest.of_blob(b"gone")
    assert gc.collect(store, grace_ms=5_000).objects_swept == 0
    clock.now_ms += 5_000
    assert store.missing([old, young, gone]) == [gone]
    assert gc.collect(store, grace_ms=5_000).objects_swept == 3


def test_a_dry_run_says_the_same_and_changes_nothing(any_store: Store) -> None:
    store = any_store
    for n in range(5):
        store.put_blob(b"loose %d" % n)
    step(store, "s", "a")
    before = names(store)
    planned = sweep(store, dry_run=True)
    assert names(store) == before
    done = sweep(store)
    assert planned.outcome is gc.Outcome.PLANNED
    assert done.outcome is gc.Outcome.SWEPT
    assert planned.objects_unreached == done.objects_swept == 5
    assert planned == done._replace(
        outcome=planned.outcome, objects_swept=0, bytes_swept=0, bytes_freed=0,
        longest_pause_ms=0,
    )  # fmt: skip


def test_gc_refuses_to_run_if_a_row_names_a_missing_object(any_store: Store) -> None:
    store = any_store
    step(store, "s", "a")
    loose = store.put_blob(b"loose")
    head = store.session("s").head()
    assert head is not None
    store.engine.write(Write(deletes=[head.manifest]))
    report = sweep(store)
    assert report.outcome is gc.Outcome.REFUSED
    assert head.manifest.hex() in str(report.problem)
    assert sweep(store, dry_run=True).outcome is gc.Outcome.REFUSED
    assert store.missing([loose]) == []


@pytest.mark.parametrize("table", ["heads", "history", "pins", "queue", "attachments"])
def test_gc_refuses_to_run_if_a_row_cannot_be_decoded(any_store: Store, table: str) -> None:
    store = any_store
    step(store, "s", "a")
    loose = store.put_blob(b"loose")
    key = b"x\0\x01" + bytes(8)
    store.engine.write(Write(rows=[PutRow(table, key, b"nonsense")]))
    for dry_run in (True, False):
        report = sweep(store, dry_run=dry_run)
        assert report.outcome is gc.Outcome.REFUSED
        assert isinstance(report.problem, CorruptionError)
    assert store.missing([loose]) == []


def test_a_component_that_was_collected_is_refused_by_name(any_store: Store) -> None:
    store = any_store
    loose = store.put_value({"tools": LONG})
    sweep(store)
    with pytest.raises(ComponentNotFoundError):
        step(store, "s", "a", checkpoint=Checkpoint(tool_state=casstore.Link(loose)))
    with pytest.raises(ObjectNotFoundError):
        store.get_value(loose)


def test_what_was_collected_can_be_stored_again(any_store: Store) -> None:
    store = any_store
    value = {"again": [LONG, {"n": 1}]}
    digest = store.put_value(value)
    sweep(store)
    assert store.put_value(value) == digest
    assert store.get_value(digest) == value
    verify(store)


def test_writers_that_repeatedly_store_the_same_objects_never_lose_one(tmp_path: Path) -> None:
    """Deduplication is where a collector and a writer meet: what the one has just found, the
    other is about to take away.
    """
    with casstore.open(tmp_path / "s", "relaxed") as store:
        stop = threading.Event()
        errors: list[BaseException] = []

        def write(number: int) -> None:
            try:
                for n in range(60):
                    name = f"w{number}-{n}"
                    state = {"shared": LONG, "n": [n % 3, LONG + str(n % 5)]}
                    step(store, name, "a", text=LONG, checkpoint=Checkpoint(tool_state=state))
                    loaded = store.session(name).load()
                    assert loaded is not None
                    assert loaded.checkpoint.tool_state == state
                    store.delete_session(name)
                step(store, f"last-{number}", "a", checkpoint=Checkpoint(tool_state=state))
            except BaseException as exc:
                errors.append(exc)

        def collect() -> None:
            try:
                while not stop.is_set():
                    report = sweep(store, batch=7)
                    assert report.problem is None
            except BaseException as exc:
                errors.append(exc)

        collector = threading.Thread(target=collect)
        writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in (collector, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        collector.join()
        assert errors == []
        sweep(store)
        assert verify(store) == len(names(store))
        assert len(everything(store)) == 3


_WRITER = """
import sys, casstore
from casstore import Checkpoint, Commit, NodeDraft
long = "long " * 800
with casstore.open(sys.argv[1], "relaxed") as store:
    print("open", flush=True)
    for n in range(150):
        session = store.session(f"{sys.argv[2]}-{n}")
        session.commit(Commit(append=[NodeDraft("a", {"text": long + str(n % 4)})],
                              checkpoint=Checkpoint(tool_state={"t": [long, n % 3]})))
        if n % 10:
            store.delete_session(session.id)
"""


def test_writers_in_other_processes_never_lose_anything(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    with casstore.open(place, "relaxed") as store:
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, place, str(number)],
                stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for number in range(2)
        ]  # fmt: skip
        while any(writer.poll() is None for writer in writers):
            assert sweep(store, batch=7).problem is None
        for writer in writers:
            writer.communicate()
            assert writer.returncode == 0
        sweep(store)
        assert verify(store) == len(names(store))
        assert len(everything(store)) == 30


_COLLECTOR = """
import sys, casstore
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
with casstore.open(sys.argv[1], "relaxed") as store:
    print("open", flush=True)
    while True:
        gc.collect(store, grace_ms=0)
        for n in range(30):
            store.put_blob(b"loose %d " % n * 50)
"""


def test_a_collector_that_is_killed_leaves_a_sound_store(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for n in range(30):
            step(store, "s", f"n{n}", text=LONG)
        before = everything(store)
    for delay in (0.0, 0.02, 0.05):
        collector = subprocess.Popen(
            [sys.executable, "-c", _COLLECTOR, str(tmp_path / "s")],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert collector.stdout is not None
        assert collector.stdout.readline() == "open\n"
        threading.Event().wait(delay)
        collector.kill()
        collector.wait()
        collector.stdout.close()
        with casstore.open(tmp_path / "s", "relaxed", verify=True) as store:
            assert everything(store) == before


def test_gc_refuses_invalid_arguments_and_a_read_only_store(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for batch in (0, -1, 1.5, gc.MAX_BATCH + 1):
            with pytest.raises(InvalidInputError):
                gc.collect(store, batch=batch)  # type: ignore[arg-type]
        for grace_ms in (-1, 1.5, "1", 1 << 62):
            with pytest.raises(InvalidInputError):
                gc.collect(store, grace_ms=grace_ms)  # type: ignore[arg-type]
    with casstore.open(tmp_path / "s", readonly=True) as store, pytest.raises(ReadOnlyError):
        sweep(store)


# --- plans, outcomes, and what comes in between -------------------------------------------------


def test_executing_a_gc_plan_removes_only_objects_that_it_lists(any_store: Store) -> None:
    store = any_store
    step(store, "s", "a")
    before = [store.put_blob(b"before %d" % n) for n in range(5)]
    plan = gc.plan(store, grace_ms=0)
    assert plan.report.outcome is gc.Outcome.PLANNED
    after = store.put_blob(b"after")
    store.tag("kept", before[2])
    report = gc.execute(store, plan)
    assert report.outcome is gc.Outcome.SWEPT
    assert report.objects_swept == 4
    assert store.missing([*before, after]) == [*before[:2], *before[3:]]


def test_a_plan_with_nothing_to_do_and_one_that_was_refused_do_nothing(any_store: Store) -> None:
    store = any_store
    step(store, "s", "a")
    plan = gc.plan(store, grace_ms=0)
    loose = store.put_blob(b"loose")
    assert gc.execute(store, plan).outcome is gc.Outcome.NOTHING
    head = store.session("s").head()
    assert head is not None
    store.engine.write(Write(deletes=[head.manifest]))
    plan = gc.plan(store, grace_ms=0)
    assert gc.execute(store, plan).outcome is gc.Outcome.REFUSED
    assert store.missing([loose]) == []


def test_a_plan_can_be_made_of_a_store_that_is_open_for_reading(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        store.put_blob(b"loose")
    with casstore.open(tmp_path / "s", readonly=True) as store:
        assert gc.plan(store, grace_ms=0).report.objects_unreached == 1


def test_a_stopped_gc_leaves_the_rest_for_the_next_run(any_store: Store) -> None:
    store = any_store
    for n in range(50):
        store.put_blob(b"loose %d" % n)
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    report = sweep(store, batch=5, stop=stop)
    assert report.outcome is gc.Outcome.INCOMPLETE
    assert (report.objects_swept, report.objects_unreached) == (15, 50)
    assert len(names(store)) == 35
    report = sweep(store)
    assert (report.outcome, report.objects_swept) == (gc.Outcome.SWEPT, 35)
    assert sweep(store).outcome is gc.Outcome.NOTHING


@pytest.mark.parametrize("phase", ["mark", "sweep"])
def test_raising_from_progress_stops_it_and_it_can_run_again(any_store: Store, phase: str) -> None:
    store = any_store
    for n in range(50):
        store.put_blob(b"loose %d" % n)
    step(store, "s", "a")

    def progress(step: Step) -> None:
        if step.phase == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(store, batch=5, progress=progress)
    report = sweep(store)
    assert report.outcome is gc.Outcome.SWEPT
    assert report.objects_swept == 50 - (5 if phase == "sweep" else 0)


def test_two_collections_at_once_are_refused(any_store: Store) -> None:
    store = any_store
    for n in range(10):
        store.put_blob(b"loose %d" % n)
    second: list[gc.GcReport] = []

    def progress(step: Step) -> None:
        if step.phase == "sweep" and not second:
            assert gc.plan(store, grace_ms=0).report.problem is None
            second.append(sweep(store))

    assert sweep(store, batch=3, progress=progress).outcome is gc.Outcome.SWEPT
    assert second[0].outcome is gc.Outcome.REFUSED
    assert isinstance(second[0].problem, BusyError)


def test_an_error_in_the_middle_is_reported_with_what_was_done(store: Store) -> None:
    for n in range(50):
        store.put_blob(b"loose %d" % n)

    def progress(step: Step) -> None:
        if step.phase == "sweep":
            store.close()

    report = sweep(store, batch=5, progress=progress)
    assert report.outcome is gc.Outcome.FAILED
    assert report.objects_swept == 5
    assert isinstance(report.problem, ClosedError)


def test_no_sweep_step_removes_more_objects_than_the_batch_size(store: Store) -> None:
    for n in range(100):
        store.put_blob(b"loose %d" % n)
    done: list[int] = []

    def progress(step: Step) -> None:
        if step.phase == "sweep":
            done.append(step.done)

    sweep(store, batch=7, progress=progress)
    steps = [after - before for before, after in zip([0, *done], done, strict=False)]
    assert max(steps) == 7
    assert sum(steps) == 100


def test_gc_marks_concurrently_tagged_objects_in_bounded_steps(store: Store) -> None:
    """A tag on a long path reaches more than one step may look at while writers wait."""
    for n in range(200):
        step(store, "dropped", f"n{n}")
    head = store.session("dropped").head()
    assert head is not None
    store.delete_session("dropped")
    whole = names(store)

    def progress(step: Step) -> None:
        if step.phase == "mark":
            store.tag("kept", head.manifest)

    report = sweep(store, batch=3, progress=progress)
    assert report.outcome is gc.Outcome.SWEPT
    assert report.objects_swept < len(whole)
    assert store.missing([head.manifest]) == []
    verify(store)
    assert sweep(store).outcome is gc.Outcome.NOTHING


def test_putting_an_object_again_restarts_its_grace_period(
    any_store: Store, clock: ManualClock
) -> None:
    store = any_store
    value = {"again": [LONG, {"n": 1}]}
    digest = store.put_value(value)
    clock.now_ms += 3_600_000
    assert store.put_value(value) == digest
    assert gc.collect(store, grace_ms=60_000).outcome is gc.Outcome.NOTHING
    assert store.get_value(digest) == value
    clock.now_ms += 60_000
    assert gc.collect(store, grace_ms=60_000).objects_swept == 2
    assert store.missing([digest]) == [digest]


def test_an_object_put_again_during_gc_stays(store: Store, clock: ManualClock) -> None:
    blobs = [b"loose %d" % n for n in range(20)]
    for blob in blobs:
        store.put_blob(blob)
    clock.now_ms += 3_600_000

    def progress(step: Step) -> None:
        if step.phase == "mark":
            store.put_blob(blobs[3])

    report = gc.collect(store, grace_ms=1000, progress=progress, batch=4)
    assert report.objects_swept == 19
    assert store.missing([Digest.of_blob(blob) for blob in blobs if blob != blobs[3]])
    assert store.get_blob(Digest.of_blob(blobs[3])) == blobs[3]


def test_executing_a_gc_plan_keeps_slabs_with_objects_that_it_does_not_list(
    any_store: Store,
) -> None:
    """What was unreached only after the plan was made keeps its name, so it keeps its bytes."""
    store = any_store
    reached = store.put_blob(b"reached when the plan was made")
    store.tag("for a while", reached)
    store.put_blob(b"loose")
    plan = gc.plan(store, grace_ms=0)
    after = store.put_blob(b"after")
    store.unpin("for a while")
    step(store, "s", "a")
    assert gc.execute(store, plan).objects_swept == 1
    assert store.get_blob(reached) == b"reached when the plan was made"
    assert store.get_blob(after) == b"after"
    verify(store)
    assert sweep(store).objects_swept == 2


def test_an_object_outside_the_gc_plan_can_be_tagged_while_the_plan_is_executed(
    any_store: Store,
) -> None:
    store = any_store
    loose = [store.put_blob(b"loose %d" % n) for n in range(9)]
    plan = gc.plan(store, grace_ms=0)
    after = store.put_blob(b"after")

    def progress(step: Step) -> None:
        if step.phase == "sweep" and store.find_pin("wanted") is None:
            store.tag("wanted", after)

    report = gc.execute(store, plan, batch=4, progress=progress)
    assert (report.outcome, report.problem) == (gc.Outcome.SWEPT, None)
    assert store.missing([*loose, after]) == loose
    verify(store)


def test_an_object_stored_after_the_plan_keeps_the_listed_objects_it_links_to(
    any_store: Store,
) -> None:
    store = any_store
    store.put_many([{"shared": LONG}, {"loose": LONG * 2}])
    plan = gc.plan(store, grace_ms=0)
    whole = store.put_value(["stored since", {"shared": LONG}])
    store.put_blob(b"newest")
    assert gc.execute(store, plan).outcome is gc.Outcome.SWEPT
    assert store.get_value(whole) == ["stored since", {"shared": LONG}]
    verify(store)
