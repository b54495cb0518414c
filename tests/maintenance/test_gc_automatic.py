"""gc by itself, every so many commits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import casstore
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Collecting
from casstore.errors import InvalidInputError
from casstore.maintenance import gc
from casstore.maintenance.automatic import AutoCollector
from casstore.store import Store


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        made = Store(MemoryEngine())
    else:
        made = casstore.open(tmp_path / "s", "relaxed")
    with made:
        yield made


def since(store: Store) -> int:
    assert isinstance(store.engine, Collecting)
    return store.engine.commits_since_collection()


class Reports:
    """Waits for what a collector tells."""

    def __init__(self) -> None:
        self.all: list[gc.GcReport] = []
        self._came = threading.Condition()

    def __call__(self, report: gc.GcReport) -> None:
        with self._came:
            self.all.append(report)
            self._came.notify_all()

    def wait(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.all) >= count, timeout=60)


def test_commits_are_counted_from_the_last_collection_on(store: Store) -> None:
    for n in range(5):
        store.put_blob(b"%d" % n)
    assert since(store) >= 5
    assert gc.collect(store, grace_ms=0, stop=lambda: True).outcome is gc.Outcome.INCOMPLETE
    assert since(store) >= 5
    gc.plan(store, grace_ms=0)
    assert since(store) >= 5
    gc.collect(store, grace_ms=0)
    assert since(store) <= 1
    store.put_blob(b"more")
    assert 1 <= since(store) <= 2
    gc.collect(store)
    assert since(store) <= 1


def test_the_auto_collector_runs_after_every_commits_commits_and_not_earlier(store: Store) -> None:
    reports = Reports()
    with AutoCollector(
        store, every_commits=40, interval_s=0.01, grace_ms=0, on_report=reports
    ) as collector:
        for n in range(39 - since(store)):
            store.put_blob(b"first %d" % n)
        threading.Event().wait(0.1)
        assert reports.all == []
        for n in range(20):
            store.put_blob(b"second %d" % n)
        reports.wait(1)
        assert reports.all[0].outcome is gc.Outcome.SWEPT
        for n in range(60):
            store.put_blob(b"third %d" % n)
        reports.wait(2)
    assert collector.failure is None
    assert collector.last_report == reports.all[-1]


def test_the_auto_collector_ends_when_the_store_is_closed(store: Store) -> None:
    collector = AutoCollector(store, every_commits=1, interval_s=0.01)
    with collector:
        store.close()
    assert collector.failure is None


def test_the_auto_collector_keeps_the_exception_of_its_listener(store: Store) -> None:
    def listen(report: gc.GcReport) -> None:
        raise casstore.CasstoreError("no room for reports")

    collector = AutoCollector(store, every_commits=1, interval_s=0.01, on_report=listen)
    with collector:
        store.put_blob(b"x")
        [thread] = [each for each in threading.enumerate() if each.name == "casstore-gc"]
        thread.join(60)
    assert isinstance(collector.failure, casstore.CasstoreError)


def test_bad_arguments_are_refused(store: Store) -> None:
    for every in (0, -1, 1.5):
        with pytest.raises(InvalidInputError):
            AutoCollector(store, every_commits=every)  # type: ignore[arg-type]
    for interval in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInputError):
            AutoCollector(store, interval_s=interval)
