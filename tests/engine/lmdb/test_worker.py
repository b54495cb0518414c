"""The background thread: no relaxed commit waits long for its flush, and no failure ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.log import FLUSHED, PUBLISHED
from casstore.engine.lmdb.recent import Recent
from casstore.engine.lmdb.worker import Task
from casstore.engine.protocol import PutRow, Write

TIMEOUT_S = 30


@pytest.fixture
def tasks() -> Iterator[list[Task]]:
    """Tasks to stop at the end."""
    made: list[Task] = []
    yield made
    for task in made:
        task.stop()


def test_a_request_during_the_work_is_not_forgotten(tasks: list[Task]) -> None:
    """The work flushes first, then applies the log: a commit meanwhile needs another flush."""
    asked, done = threading.Event(), threading.Event()

    def work() -> float:
        if asked.is_set():
            done.set()
        else:
            asked.set()
            task.wake()
        # As if nothing were left to do.
        return inf

    task = Task(work)
    tasks.append(task)
    task.wake()
    assert done.wait(TIMEOUT_S)


def test_an_unexpected_error_of_one_store_does_not_end_the_thread_of_all(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    failed, other, retried = threading.Event(), threading.Event(), threading.Event()

    def fail() -> float:
        if failed.is_set():
            retried.set()
            return inf
        failed.set()
        raise ValueError("unexpected")

    def serve() -> float:
        other.set()
        return inf

    tasks += [Task(fail), Task(serve)]
    tasks[1].wake()
    assert other.wait(TIMEOUT_S)
    other.clear()
    tasks[0].wake()
    assert failed.wait(TIMEOUT_S)
    tasks[1].wake()
    assert other.wait(TIMEOUT_S)
    assert retried.wait(TIMEOUT_S)
    assert [each.exc_type for each in reported] == [ValueError]


def test_a_relaxed_commit_is_flushed_though_the_leader_of_its_batch_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writers of the batch have their answers, and nothing else asks for the flush."""
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    for number in range(4):
        engine.write(Write(rows=[PutRow("pins", b"key", b"%d" % number)]))
    engine.flush()
    assert engine._behind is not None
    monkeypatch.setattr(engine._behind, "at_s", inf)
    commit = Recent.commit

    def interrupted(self: Recent, *arguments: Any, **options: Any) -> None:
        commit(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Recent, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.write(Write(rows=[PutRow("pins", b"key", b"shared batch")]))
    log = engine._env.recent._log
    assert log is not None
    deadline = time.monotonic() + TIMEOUT_S
    while log.lsns[FLUSHED] < log.lsns[PUBLISHED]:
        assert time.monotonic() < deadline, "the commit is not flushed"
        time.sleep(0.001)
    engine.close()
