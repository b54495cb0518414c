"""Deleting a thread: everything in it, all or nothing, and its content is freed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import DeleteRow, Write
from casstore.errors import CorruptionError, RecordNotFoundError, StorageError
from casstore.maintenance import gc
from casstore.maintenance.expiring import expire_rows
from casstore.records.runs import WAITING, Runs, steps, threads
from casstore.session.records import Table
from casstore.store import Store
from tests.records.one_transaction import contents

SHARED = b"what two threads have made " * 100


def fill(runs: Runs, thread: str, *, events: int = 5) -> None:
    """One of everything, and several of some."""
    runs.create_thread(thread, "agent")
    for run in (f"{thread} 1", f"{thread} 2"):
        runs.create_run(thread, run, "agent", "graph")
        runs.set_state(thread, run, WAITING, checkpoint=f"checkpoint of {run}")
        runs.request_approval(thread, run, f"asked by {run}", "shell")
        runs.save_request(thread, run, f"input of {run} " * 50)
        runs.save_intent(thread, run, f"payload of {run} " * 50)
        for number in range(events):
            runs.append_event(thread, run, {"text": f"event {number} of {run} " * 50})
        runs.append_message(thread, "user", f"said in {run} " * 50, run=run)
        runs.put_artifact(thread, run, "own", f"made by {run} ".encode() * 50, "bin")
        runs.put_artifact(thread, run, "shared", SHARED, "bin")
    runs.resolve_approval(thread, f"{thread} 1", f"asked by {thread} 1", "approve")


def rows(store: Store) -> list[tuple[bytes, bytes]]:
    """The rows of runs, without the counter, which never goes back."""
    found = store.engine.scan_rows("records", start=b"runs.", stop=b"runs/", limit=100_000)
    return [(key, value) for key, value in found if not key.startswith(b"runs.counter")]


def digests(store: Store) -> list[bytes]:
    engine: Any = store.engine
    return list(engine.digests(bytes(32), b"\xff" * 32, limit=1_000_000))


def test_nothing_is_left_of_a_deleted_thread_and_its_content_is_freed(
    runs: Runs, store: Store
) -> None:
    fill(runs, "stays")
    before = rows(store), digests(store)
    fill(runs, "goes")
    assert runs.delete_thread("goes") is True
    assert rows(store) == before[0]
    gc.collect(store, grace_ms=0)
    assert digests(store) == before[1]
    assert runs.read_artifact("stays", "stays 1", "shared") == SHARED
    assert runs.delete_thread("goes") is False
    assert runs.delete_thread("never was") is False


def test_a_deleted_thread_is_gone_from_every_view(runs: Runs) -> None:
    fill(runs, "goes")
    assert runs.delete_thread("goes")
    assert runs.find_thread("goes") is None
    assert runs.find_run("goes 1") is None
    assert runs.find_approval("asked by goes 2") is None
    for page in (runs.threads(), runs.runs(), runs.approvals(), runs.requests(), runs.intents()):
        assert page.items == []
    assert runs.approvals(status="pending").items == []
    assert runs.protected_threads() == set()
    with pytest.raises(RecordNotFoundError):
        runs.messages("goes")
    with pytest.raises(RecordNotFoundError):
        runs.append_event("goes", "goes 1", 1)


def test_a_recreated_thread_has_no_records_of_the_deleted_one(runs: Runs) -> None:
    fill(runs, "t")
    assert runs.delete_thread("t")
    runs.create_thread("t", "another")
    runs.create_run("t", "t 1", "another", "graph")
    assert runs.messages("t") == []
    assert runs.events("t", "t 1").items == []
    assert runs.artifacts("t", "t 1").items == []
    assert runs.find_intent("t", "t 1") is None
    assert runs.append_event("t", "t 1", "first").sequence == 1


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every thread were large."""
    monkeypatch.setattr(threads, "_AT_ONCE_ROWS", 3)
    monkeypatch.setattr(threads, "_BATCH_ROWS", 4)


@pytest.mark.usefixtures("few_at_once")
def test_a_large_thread_is_invisible_after_the_first_write_of_its_deletion(
    runs: Runs, store: Store
) -> None:
    fill(runs, "stays")
    left = rows(store)
    engine: Any = store.engine
    whole = engine.write
    writes = 0
    while True:
        fill(runs, "goes")
        before = contents(store)
        allowed = writes

        def write(change: Write) -> Any:
            nonlocal allowed
            if not allowed:
                raise StorageError("killed")
            allowed -= 1
            return whole(change)

        engine.write = write
        try:
            deleted = runs.delete_thread("goes")
        except StorageError:
            deleted = None
        finally:
            engine.write = whole
        if not writes:
            # Killed before the first: nothing has happened.
            assert contents(store) == before
            assert deleted is None
            assert runs.delete_thread("goes")
        # Killed at any time after: it is gone, its names are free, and nothing old is met.
        assert runs.find_thread("goes") is None
        assert [run.thread for run in runs.runs().items] == ["stays", "stays"]
        assert runs.delete_thread("goes") is False
        runs.create_thread("goes", "agent")
        runs.create_run("goes", "goes 1", "agent", "graph")
        assert runs.messages("goes") == []
        assert runs.events("goes", "goes 1").items == []
        assert runs.artifacts("goes", "goes 1").items == []
        assert runs.delete_thread("goes")
        runs.finish_deletions()
        assert rows(store) == left
        writes += 1
        if deleted:
            break
    assert writes > 5


@pytest.mark.usefixtures("few_at_once")
def test_expire_rows_removes_the_rows_that_a_killed_deletion_left(runs: Runs, store: Store) -> None:
    fill(runs, "stays")
    left = rows(store)
    fill(runs, "goes")
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = fail
        return whole(change)

    def fail(change: Write) -> Any:
        raise StorageError("killed")

    engine.write = write
    with pytest.raises(StorageError):
        runs.delete_thread("goes")
    engine.write = whole
    assert len(rows(store)) > len(left)
    assert expire_rows(store).records == 1
    assert rows(store) == left
    assert expire_rows(store).records == 0


def test_records_added_during_the_deletion_of_a_thread_are_deleted(
    busy: Runs, store: Store
) -> None:
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = whole
        busy.append_event("t", "r", "late", sequence=77)
        busy.create_run("t", "late", "agent", "graph")
        return whole(change)

    engine.write = write
    assert busy.delete_thread("t") is True
    assert [key for key, _ in rows(store)] == [
        b"runs.schema\0runs\0",
    ]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("view", range(7))
def test_a_thread_that_goes_while_it_is_read_is_not_read_as_empty(
    runs: Runs, store: Store, view: int, again: bool
) -> None:
    fill(runs, "t")
    views: list[Callable[[], object]] = [
        lambda: runs.events("t", "t 1"),
        lambda: runs.messages("t"),
        lambda: runs.artifacts("t", "t 1"),
        lambda: runs.thread_runs("t"),
        lambda: runs.approvals(thread="t"),
        lambda: runs.find_event("t", "t 1", 1),
        lambda: runs.find_artifact("t", "t 1", "own"),
    ]
    engine: Any = store.engine
    scan_rows, get_rows = engine.scan_rows, engine.get_rows
    reads = 0

    def meanwhile() -> None:
        # The name of the thread, or of its run, is looked up first.
        nonlocal reads
        reads += 1
        if reads == 2:
            engine.scan_rows, engine.get_rows = scan_rows, get_rows
            runs.delete_thread("t")
            if again:
                runs.create_thread("t", "agent")
                runs.create_run("t", "t 1", "agent", "graph")

    def interrupted(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*given: Any, **named: Any) -> Any:
            meanwhile()
            return read(*given, **named)

        return reading

    engine.scan_rows, engine.get_rows = interrupted(scan_rows), interrupted(get_rows)
    with pytest.raises(RecordNotFoundError):
        views[view]()


@pytest.mark.leaves_damage
@pytest.mark.parametrize(
    ("table", "parts"),
    [("runs.runs", 1), ("runs.thread_runs", 2), ("runs.events", 2), ("runs.messages", 2),
     ("runs.approvals", 1), ("runs.thread_approvals", 2), ("runs.artifacts", 2)],
)  # fmt: skip
def test_deleting_a_thread_with_missing_rows_raises(
    runs: Runs, store: Store, table: str, parts: int
) -> None:
    fill(runs, "t")
    lost = next(Table(store, table, parts).scan())
    key = Table(store, table, parts).keys.key(lost.key)
    store.engine.write(Write(rows=[DeleteRow("records", key)]))
    before = contents(store)
    with pytest.raises(CorruptionError):
        runs.delete_thread("t")
    assert contents(store) == before


def test_a_thread_of_thousands_of_events_goes_in_batches(tmp_path: Path) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        runs = Runs(store)
        runs.create_thread("t", "agent")
        runs.create_run("t", "r", "agent", "graph")
        for start in range(0, 5000, 1000):
            runs.apply("t", *[steps.AppendEvent("r", start + n) for n in range(1000)])
        sizes: list[int] = []
        engine: Any = store.engine
        whole = engine.write

        def write(change: Write) -> Any:
            sizes.append(len(change.rows))
            return whole(change)

        engine.write = write
        assert runs.delete_thread("t")
        engine.write = whole
        assert max(sizes) <= 1000
        assert len(rows(store)) == 1
