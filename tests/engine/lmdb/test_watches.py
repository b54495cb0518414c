"""Watching an LMDB store: across processes and forks, with and without help of the kernel."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import NoReturn

import pytest

from casstore.engine.lmdb import watching
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.engine.watches import PipeWatch
from casstore.errors import ForkedError
from casstore.testing import EngineFactory
from casstore.testing.engine_fixtures import put_row
from casstore.testing.engine_threads import TIMEOUT_S, start
from casstore.testing.engine_watch import WatchContract, falls_silent, watch_heads
from tests.faults.children import in_child, killed_at_the_end
from tests.faults.test_processes import finish, first_line, python

COMMITS = 10_000
ROUNDS = 300

# Increments a head; with a last argument, only once for each line of its input.
COUNT = """
import sys
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write
path, durability, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = LmdbEngine(path, durability=durability)
print("open", flush=True)
for n in range(1, last + 1):
    if len(sys.argv) > 4:
        sys.stdin.readline()
    engine.write(Write(rows=[PutRow("heads", b"key", b"%d" % n)]))
engine.close()
"""


def refuse(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "inotify_init1")


def force_polling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(watching, "_open_native", refuse)
    patch.setattr(watching, "_POLL_INTERVAL_S", 0.001)


@pytest.fixture(params=["native", "polling"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the kernel's help, and without."""
    if request.param == "polling":
        force_polling(monkeypatch)
    return str(request.param)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    with closing(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as made:
        yield made


class TestPolling(WatchContract):
    """What the contract says of watches holds without the kernel's help."""

    @pytest.fixture
    def make_engine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[EngineFactory]:
        force_polling(monkeypatch)
        made: list[LmdbEngine] = []
        names = count()

        def make(*, clock: Callable[[], int] | None = None) -> Engine:
            path = str(tmp_path / str(next(names)))
            made.append(LmdbEngine(path, durability="relaxed", clock=clock))
            return made[-1]

        yield make
        for engine in made:
            engine.close()


def test_a_watch_uses_the_kernel_and_falls_back_to_polling(engine: LmdbEngine, means: str) -> None:
    with closing(engine.watch()) as watch:
        assert isinstance(watch, watching.PollingWatch) == (means == "polling")


# --- other processes ------------------------------------------------------------------------


@contextmanager
def one_processor() -> Iterator[None]:
    """Run this thread and what it starts on one processor.

    There the kernel likes to let the woken run before the waker goes on, so that a waiter
    who is woken before a commit can be seen reads too early almost every time.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("lmdb_version", [0, 1])
@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("readonly", [False, True])
def test_no_waiter_misses_a_write_of_another_process(
    tmp_path: Path, durability: str, lmdb_version: int, readonly: bool
) -> None:
    path = str(tmp_path / "s")
    LmdbEngine(path, durability=durability, lmdb_version=lmdb_version).close()
    with (
        one_processor(),
        closing(LmdbEngine(path, durability=durability, readonly=readonly)) as engine,
        closing(engine.watch()) as watch,
    ):
        writer = python(COUNT, path, durability, ROUNDS, "told")
        assert writer.stdin is not None
        assert first_line(writer) == "open"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        for expected, seen in enumerate(watch_heads(engine, watch, ROUNDS), 1):
            assert seen == expected
            if seen < ROUNDS:
                writer.stdin.write("go\n")
                writer.stdin.flush()
        finish(writer)


@pytest.mark.parametrize("readonly", [False, True])
def test_no_waiter_misses_the_last_of_many_writes_of_another_process(
    tmp_path: Path, means: str, readonly: bool
) -> None:
    path = str(tmp_path / "s")
    LmdbEngine(path).close()
    with (
        closing(LmdbEngine(path, durability="relaxed", readonly=readonly)) as engine,
        closing(engine.watch()) as watch,
    ):
        writer = python(COUNT, path, "relaxed", COMMITS)
        seen = list(watch_heads(engine, watch, COMMITS))
        finish(writer)
    assert seen[-1] == COMMITS
    assert all(earlier < later for earlier, later in pairwise(seen))


def test_writers_in_several_processes_wake_waiters_in_several_threads(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with closing(LmdbEngine(path, durability="relaxed")) as engine:

        def see_all() -> int:
            with closing(engine.watch()) as watch:
                ready.release()
                return list(watch_heads(engine, watch, 1000))[-1]

        ready = threading.Semaphore(0)
        waiters = [start(see_all) for _ in range(4)]
        for _ in waiters:
            ready.acquire()
        # Both count to the same end, so the end is what the last write leaves.
        writers = [python(COUNT, path, "relaxed", 1000) for _ in range(2)]
        assert [waiter.result(TIMEOUT_S) for waiter in waiters] == [1000] * 4
        for writer in writers:
            finish(writer)


# --- forks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["native", "polling", "memory"])
def test_a_watch_is_refused_in_a_forked_child_and_keeps_working_in_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "polling":
        force_polling(monkeypatch)
    engine = MemoryEngine() if kind == "memory" else LmdbEngine(str(tmp_path / "s"))
    with closing(engine), closing(engine.watch()) as watch:
        put_row(engine, "heads", b"key", b"1")

        def use() -> str:
            calls: list[Callable[[], object]] = [watch.fileno, watch.drain, watch.wait]
            if kind != "memory":
                calls.append(engine.watch)
            for call in calls:
                try:
                    call()
                except ForkedError:
                    continue
                return f"{call} went through"
            watch.close()
            watch.close()
            engine.close()
            return "refused"

        assert in_child(use) == "refused"
        assert watch.wait(TIMEOUT_S), "the child has taken the wake-up"
        assert falls_silent(watch)
        put_row(engine, "heads", b"key", b"2")
        assert watch.wait(TIMEOUT_S)


# --- what is held and given back -------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="nowhere to count descriptors")
@pytest.mark.parametrize("kind", ["native", "polling", "memory"])
def test_closing_watches_releases_their_descriptors_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "polling":
        force_polling(monkeypatch)
    gc.collect()
    threads = threading.active_count()
    nothing_open = open_descriptors()
    engine = MemoryEngine() if kind == "memory" else LmdbEngine(str(tmp_path / "s"))
    before, running = open_descriptors(), threading.active_count()
    watches = [engine.watch() for _ in range(20)]
    assert open_descriptors() >= before + 20
    for watch in watches:
        watch.close()
    assert open_descriptors() == before

    dropped: object = [engine.watch() for _ in range(20)]
    del dropped
    gc.collect()
    await_threads(running)  # a polling thread may hold one for a moment
    assert open_descriptors() == before

    watches = [engine.watch() for _ in range(20)]
    engine.close()
    del watch
    watches.pop()
    for watch in watches:
        watch.close()
    await_threads(threads)
    assert open_descriptors() == nothing_open


def await_threads(most: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while threading.active_count() > most:
        assert time.monotonic() < deadline, "threads are left over"
        time.sleep(0.001)


def test_creating_a_watch_without_free_descriptors_raises_storage_error(tmp_path: Path) -> None:
    script = """
import os, resource, sys
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import StorageError
engine = LmdbEngine(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
hogs = []
try:
    while True:
        hogs.append(os.dup(0))
except OSError:
    os.close(hogs.pop())
# One is left, and a pipe takes two.
try:
    for _ in range(2):
        hogs.append(engine.watch())
except StorageError as exc:
    print(exc)
print(engine.scan_rows("heads"))
engine.close()
"""
    said = finish(python(script, tmp_path / "s")).splitlines()
    assert said == ["cannot open a pipe for a watch: Too many open files", "[]"]


def test_a_store_is_opened_and_used_without_loading_what_only_watches_need(tmp_path: Path) -> None:
    script = """
import sys, casstore
with casstore.open(sys.argv[1]) as store:
    store.get_value(store.put_value([1]))
    print(*sorted(sys.modules.keys() & {"ctypes", "casstore.engine.lmdb.watching"}))
"""
    assert finish(python(script, tmp_path / "s")) == ""


# --- other ways to wait -----------------------------------------------------------------------


def test_a_watch_works_after_the_current_directory_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(LmdbEngine("s", durability="relaxed")) as engine:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        with closing(engine.watch()) as watch:
            put_row(engine, "heads", b"key", b"1")
            assert watch.wait(TIMEOUT_S)


def test_an_event_loop_can_wait_on_the_descriptor_of_a_watch(
    engine: LmdbEngine, means: str
) -> None:
    async def count_up() -> list[int]:
        loop = asyncio.get_running_loop()
        seen: list[int] = []
        with closing(engine.watch()) as watch:
            woken = asyncio.Event()
            loop.add_reader(watch.fileno(), woken.set)
            try:
                while not seen or seen[-1] < 50:
                    put_row(engine, "heads", b"key", b"%d" % len(seen))
                    await asyncio.wait_for(woken.wait(), TIMEOUT_S)
                    woken.clear()
                    watch.drain()
                    seen.append(len(seen))
            finally:
                loop.remove_reader(watch.fileno())
        return seen

    assert asyncio.run(count_up()) == list(range(51))


@pytest.mark.parametrize("native", [True, False])
def test_an_interrupt_ends_a_wait(tmp_path: Path, native: bool) -> None:
    script = """
import sys, time
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb import watching
if sys.argv[2] == "False":
    def refuse(*_):
        raise OSError
    watching._open_native = refuse
watch = LmdbEngine(sys.argv[1]).watch()
print(type(watch).__name__, flush=True)
try:
    watch.wait()
except KeyboardInterrupt:
    print("interrupted")
"""
    with killed_at_the_end(python(script, tmp_path / "s", native)) as waiter:
        assert (first_line(waiter) == "PollingWatch") is not native
        # Time to begin the wait; the answer is the same if it begins later.
        time.sleep(0.2)
        assert waiter.poll() is None
        waiter.send_signal(signal.SIGINT)
        assert finish(waiter) == "interrupted"


def test_a_process_can_exit_while_a_daemon_thread_waits(tmp_path: Path) -> None:
    script = """
import sys, threading
from casstore.engine.lmdb.engine import LmdbEngine
watch = LmdbEngine(sys.argv[1]).watch()
threading.Thread(target=watch.wait, daemon=True).start()
"""
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "s")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_watch_closed_by_two_threads_at_once_closes_its_descriptors_once() -> None:
    # Closed a second time, the number may belong to another file by then: a socket, or LMDB's file.
    both = threading.Barrier(2)

    class Met:
        """The lock of a watch, at which the two meet."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            both.wait(TIMEOUT_S)
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    class Counted(PipeWatch):
        released = 0

        def _release(self) -> None:
            self.released += 1
            if self.released == 1:
                super()._release()

    watch = Counted(lambda: None)
    watch._lock = Met()  # type: ignore[assignment]
    threads = [threading.Thread(target=watch.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert watch.released == 1
