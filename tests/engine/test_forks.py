"""What threads of the parent hold at the moment of a fork, no child may be left waiting for."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import casstore
import casstore.aio
from casstore.aio.pool import StorePool
from casstore.engine import forks
from casstore.engine.lmdb import creation, hot_copy, inheritance
from casstore.engine.lmdb.directory import StoreDirectory
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.environment import Environment
from casstore.engine.memory import MemoryEngine
from casstore.engine.postgres.disk_cache import DiskCache
from casstore.engine.protocol import Watch
from casstore.errors import BusyError, ClosedError, ForkedError
from casstore.format.header import header_rows
from casstore.maintenance import gc
from casstore.maintenance.automatic import AutoCollector
from casstore.maintenance.backup import backup
from casstore.maintenance.roots import ROOTS
from casstore.records.lifecycles.working_state import WorkingState
from casstore.store import Store
from tests.faults.children import Child, held, in_child

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
# How long a thread stays where a fork must not find it. Whoever forks without waiting for it is
# quicker than this, and the test fails; whoever waits is held up for so long.
MIDST_S = 0.3
OPEN = "import casstore, sys; casstore.open(sys.argv[1], verify=True).close()"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    with casstore.open(place, "relaxed") as opened:
        yield opened


def engine_of(store: Store) -> LmdbEngine:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


def opens(place: Path) -> Callable[[], str]:
    """Work for a child: use a store of its own."""

    def use() -> str:
        with casstore.open(place, "relaxed") as own:
            return "open" if own.get_value(own.put_value([1])) == [1] else "?"

    return use


def open_elsewhere(place: Path) -> None:
    """Another process has the store to itself."""
    subprocess.run(
        [sys.executable, "-c", OPEN, str(place)], cwd=ROOT, check=True, timeout=PATIENCE_S
    )


class Midst:
    """A place that a thread comes to, and stays at for a while."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._over = threading.Event()

    def stay(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            self._over.wait(MIDST_S)


# --- files and LMDB --------------------------------------------------------------------------


def test_a_child_forked_while_a_store_is_opened_blocks_no_other_process(place: Path) -> None:
    casstore.open(place).close()
    with StoreDirectory(str(place)).exclusive():
        child = Child(opens(place))
    open_elsewhere(place)
    assert child.answer() == "open"


def test_a_subprocess_that_is_being_started_blocks_no_other_process(place: Path) -> None:
    """Between fork and exec it has a copy of every descriptor, and runs nothing of ours."""
    casstore.open(place).close()
    # As subprocess forks: without the fork hooks of the interpreter.
    fork = ctypes.PyDLL(None).fork
    with StoreDirectory(str(place)).exclusive():
        pid = fork()
        if pid == 0:
            while True:
                signal.pause()
    try:
        open_elsewhere(place)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_forked_during_the_check_for_other_processes_does_not_count_as_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Child] = []
    look = StoreDirectory.writers_present

    def look_and_fork(directory: StoreDirectory) -> bool | None:
        directory.hold()
        found = look(directory)
        if not children:
            children.append(Child(opens(place)))
        directory.release()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "writers_present", look_and_fork)
        store = casstore.open(place, "relaxed")
    store.close()
    open_elsewhere(place)
    assert children[0].answer() == "open"


def test_a_fork_waits_for_a_thread_that_opens_a_store(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child could neither close nor reopen files that LMDB opened without registration."""
    midst = Midst()
    open_data = StoreDirectory.open_data

    def slowly(directory: StoreDirectory) -> int:
        midst.stay()
        return open_data(directory)

    monkeypatch.setattr(StoreDirectory, "open_data", slowly)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(casstore.open, place, "relaxed")
        assert midst.reached.wait(PATIENCE_S)
        assert in_child(opens(place)) == "open"
        opening.result().close()


def test_a_fork_waits_for_a_thread_that_creates_a_store(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB knows a file again that was renamed."""
    midst = Midst()

    def slowly(now_ms: int) -> dict[bytes, bytes]:
        midst.stay()
        return header_rows(now_ms)

    monkeypatch.setattr(creation, "header_rows", slowly)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(casstore.open, place, "relaxed")
        assert midst.reached.wait(PATIENCE_S)
        child = Child(opens(place))
        opening.result().close()
    assert child.answer() == "open"


def test_a_fork_waits_for_a_thread_that_closes_a_store(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    midst = Midst()
    opened = casstore.open(place, "relaxed")
    watch = opened.engine.watch()
    monkeypatch.setattr(type(watch), "wake", lambda watch: midst.stay())
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(opened.close)
        assert midst.reached.wait(PATIENCE_S)
        # LMDB refuses to open a file twice, and only LMDB could close it.
        child = Child(opens(place))
        closing.result()
    open_elsewhere(place)
    assert child.answer() == "open"


def test_a_store_that_is_closed_while_a_fork_waits_is_not_closed_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its descriptor may belong to another file by then."""
    before_fork = Environment.before_fork
    opened = casstore.open(place, "relaxed")
    number = engine_of(opened)._env.data_handle
    others: list[int] = []

    def close_first(env: Environment) -> None:
        opened.close()
        others.append(os.open(os.devnull, os.O_RDONLY))
        while others[-1] != number:
            others.append(os.dup(others[0]))
        before_fork(env)

    def look() -> str:
        os.fstat(number)
        with pytest.raises(ClosedError):
            opened.put_value(1)
        # Whatever goes wrong in a child at first is only printed; the next fork would hang.
        assert in_child(lambda: "grandchild") == "grandchild"
        return "mine"

    with monkeypatch.context() as patch:
        patch.setattr(Environment, "before_fork", close_first)
        child = Child(look)
    assert child.answer() == "mine"
    for other in others:
        os.close(other)


def test_a_child_forked_during_a_collection_does_not_hold_up_the_next(store: Store) -> None:
    store.put_value({"nobody": "names this"})
    with engine_of(store).collection(ROOTS, grace_ms=0) as collection:
        collection.mark()
        child = Child(lambda: "lives")
    assert gc.collect(store, grace_ms=0).objects_swept == 1
    assert child.answer() == "lives"


def test_a_child_forked_as_a_backup_begins_does_not_hold_it_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the pipe's end would keep the thread reading that writes the file."""
    children: list[Child] = []
    dump = hot_copy._Copy._dump

    def fork_and_dump(copy: hot_copy._Copy, into: Any) -> None:
        if not children:
            children.append(Child(lambda: "lives"))
        dump(copy, into)

    digest = store.put_value({"kept": True})
    monkeypatch.setattr(hot_copy._Copy, "_dump", fork_and_dump)
    thread = threading.Thread(target=backup, args=(store, tmp_path / "backup"), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert children[0].answer() == "lives"
    with casstore.open(tmp_path / "backup") as copy:
        assert copy.get_value(digest) == {"kept": True}


# --- locks -----------------------------------------------------------------------------------


def test_closing_a_store_in_a_child_waits_for_no_thread_that_closes_it(store: Store) -> None:
    def close() -> str:
        store.close()
        return "closed"

    with held(store._closing):
        assert in_child(close) == "closed"


def test_closing_a_watch_in_a_child_waits_for_no_thread_that_wakes_it(store: Store) -> None:
    watch: Any = store.engine.watch()

    def close() -> str:
        watch.close()
        return "closed"

    with held(watch._lock):
        assert in_child(close) == "closed"
    watch.close()


def test_a_collector_is_closed_in_a_child_though_its_thread_has_the_lock(store: Store) -> None:
    def close() -> str:
        collector.close()
        return "closed"

    collector = AutoCollector(store)
    with collector, held(collector._stop._cond):  # type: ignore[attr-defined]
        assert in_child(close) == "closed"


def test_a_cache_on_disk_is_closed_in_a_child_though_a_thread_uses_it(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 8 << 20)
    cache.begin(1, 1)

    def close() -> str:
        cache.close()
        return "closed"

    with held(cache._lock):
        assert in_child(close) == "closed"
    # And its lock for other processes is not kept by a child that lives.
    with cache._alone():
        child = Child(lambda: "lives")
    other = DiskCache(str(tmp_path), 8 << 20)
    beginning = threading.Thread(target=other.begin, args=(1, 1), daemon=True)
    beginning.start()
    beginning.join(PATIENCE_S)
    assert not beginning.is_alive()
    assert child.answer() == "lives"
    other.close()
    cache.close()


def test_ctrl_c_at_no_point_leaves_a_lock_held() -> None:
    lock = forks.Lock()
    for point in count():
        left = point

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            # Where Python looks for signals: as a function begins, and when a call is through.
            if event in ("call", "c_return"):
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            with lock:
                len("")
        except KeyboardInterrupt:
            assert not lock._lock.locked(), point
            continue
        finally:
            sys.setprofile(None)
        break
    assert point > 2


def test_working_state_can_be_read_in_a_child_though_a_parent_thread_held_its_lock() -> None:
    state = WorkingState()
    state.set("plan", "go on")
    with held(state._lock):
        assert in_child(lambda: str(state.get("plan"))) == "go on"


def test_a_fork_waits_for_a_thread_that_writes_to_a_store_in_memory() -> None:
    """The child goes on with a whole copy."""
    midst = Midst()

    def clock() -> int:
        midst.stay()
        return 1

    store = Store(MemoryEngine(clock=clock))

    def use() -> str:
        return str(store.get_value(store.put_value([1])))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(store.put_value, {"by": "a thread"})
        assert midst.reached.wait(PATIENCE_S)
        assert in_child(use) == "[1]"
        assert store.get_value(writing.result()) == {"by": "a thread"}


# --- asyncio ---------------------------------------------------------------------------------


@contextmanager
def a_loop_elsewhere() -> Iterator[Callable[[Any], Any]]:
    """Runs coroutines in an event loop that another thread has."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_awaited_store_is_refused_in_a_child_and_can_be_opened_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are the parent's: a call in the child would wait for ever."""
    midst = Midst()
    watch = LmdbEngine.watch

    def slowly(engine: LmdbEngine) -> Watch:
        midst.stay()
        return watch(engine)

    monkeypatch.setattr(LmdbEngine, "watch", slowly)
    with a_loop_elsewhere() as run:
        store = casstore.aio.open(place, "relaxed")
        run(store.start())
        session = store.session("s")
        digest = run(store.put_value([1]))
        waiting = run(started(session.wait(0)))
        assert midst.reached.wait(PATIENCE_S)

        async def use() -> str:
            for call in (
                lambda: store.get_value(digest),
                store.start,
                session.head,
                lambda: session.wait(0),
            ):
                with pytest.raises(ForkedError):
                    await call()
            with pytest.raises(ForkedError):
                store.session("other")
            await store.close()
            async with store as own:
                return str(await own.get_value(digest))

        assert in_child(lambda: asyncio.run(use())) == "[1]"
        assert run(store.get_value(digest)) == [1]
        run(store.close())
        with pytest.raises(ClosedError):
            run(ended(waiting))


async def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


async def ended(task: asyncio.Task[Any]) -> Any:
    return await task


def test_a_pool_that_opens_on_demand_is_refused_in_a_child_if_its_store_was_open(
    place: Path,
) -> None:
    pool = StorePool(lambda: casstore.open(place, "relaxed"), on_demand=True)
    with a_loop_elsewhere() as run:
        digest = run(pool.run(lambda: pool.store.put_value([1])))

        async def use() -> str:
            with pytest.raises(ForkedError):
                await pool.run(lambda: pool.store.get_value(digest))
            await pool.close()
            return "refused"

        with held(pool._lock):
            assert in_child(lambda: asyncio.run(use())) == "refused"
        assert run(pool.run(lambda: pool.store.get_value(digest))) == [1]
        run(pool.close())


def test_a_pool_that_opens_on_demand_opens_its_store_in_a_child_if_it_was_not_open(
    place: Path,
) -> None:
    pool = StorePool(lambda: casstore.open(place, "relaxed"), on_demand=True)

    async def use() -> str:
        found = await pool.run(lambda: pool.store.get_value(pool.store.put_value([1])))
        await pool.close()
        return str(found)

    assert in_child(lambda: asyncio.run(use())) == "[1]"
    pool.close_blocking()


def test_a_pool_with_a_borrowed_store_works_in_a_child_only_if_the_store_does(
    store: Store,
) -> None:
    in_memory = StorePool.borrowing(Store(MemoryEngine()))
    on_disk = StorePool.borrowing(store)
    with a_loop_elsewhere() as run:
        digest = run(in_memory.run(lambda: in_memory.store.put_value([1])))
        run(on_disk.run(lambda: on_disk.store.put_value([1])))

        async def use() -> str:
            with pytest.raises(ForkedError):
                await on_disk.run(lambda: on_disk.store.get_value(digest))
            return str(await in_memory.run(lambda: in_memory.store.get_value(digest)))

        assert in_child(lambda: asyncio.run(use())) == "[1]"


# --- modules ---------------------------------------------------------------------------------


class SlowModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A module of casstore that takes a while to be imported."""

    NAME = "casstore.slow_to_import"

    def __init__(self, midst: Midst) -> None:
        self.midst = midst

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.NAME else None

    def exec_module(self, module: ModuleType) -> None:
        self.midst.stay()


def test_a_fork_waits_for_a_thread_that_imports_a_module_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose lock a child would have, and never get."""
    midst = Midst()
    monkeypatch.setattr(sys, "meta_path", [SlowModule(midst), *sys.meta_path])

    def use() -> str:
        importlib.import_module(SlowModule.NAME)
        return "imported"

    with ThreadPoolExecutor(1) as pool:
        importing = pool.submit(importlib.import_module, SlowModule.NAME)
        assert midst.reached.wait(PATIENCE_S)
        try:
            assert in_child(use) == "imported"
        finally:
            importing.result()
            sys.modules.pop(SlowModule.NAME, None)


def test_a_fork_by_the_thread_that_imports_does_not_wait_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []

    class Midway(Midst):
        def stay(self) -> None:
            answers.append(in_child(lambda: "forked"))

    monkeypatch.setattr(sys, "meta_path", [SlowModule(Midway()), *sys.meta_path])
    importlib.import_module(SlowModule.NAME)
    sys.modules.pop(SlowModule.NAME)
    assert answers == ["forked"]


# --- readers of the parent -------------------------------------------------------------------


def places_of_readers(engine: LmdbEngine) -> list[str]:
    """The states that are being read, as LMDB's table says."""
    return [line.split()[-1] for line in engine._env.handle.readers().splitlines()[1:]]


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("moved", [False, True])
def test_closing_in_a_child_frees_no_reader_slot_of_the_parent(
    place: Path, version: int, moved: bool
) -> None:
    """A reader that has ended keeps its place in LMDB's table as long as its object lives.

    A child that closes its copy of the environment used to free the places of such readers in
    the table that it shares with its parent. The next reader of the parent took one, and lost it
    when the object went whose place it had been: then writers reused the pages it was reading.
    """
    engine = LmdbEngine(str(place), durability="relaxed", lmdb_version=version)
    env = engine._env
    with env.reading() as ended:
        assert ended.id()
    now = place
    if moved:
        now = place.rename(place.with_name("elsewhere"))
    # It has closed its copy, and can reopen the store.
    assert in_child(lambda: str(casstore.open(now, "relaxed").engine.missing([]))) == "[]"
    with env.reading() as txn:
        del ended
        assert str(txn.id()) in places_of_readers(engine)
    if moved:
        now.rename(place)
    engine.close()


def test_a_child_that_cannot_identify_the_reader_table_leaves_the_parents_slots_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inheritance, "_MAPS", str(place / "nowhere"))
    engine = LmdbEngine(str(place), durability="relaxed")
    env = engine._env
    with env.reading() as ended:
        assert ended.id()

    def again() -> str:
        try:
            casstore.open(place, "relaxed")
        except BusyError:
            return "busy"
        return "opened"

    assert in_child(again) == "busy"
    with env.reading() as txn:
        del ended
        assert str(txn.id()) in places_of_readers(engine)
    engine.close()


def test_readers_during_forks_read_the_right_content(store: Store) -> None:
    """What the rule is for: readers that are long about it, a writer, and children that come."""
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    env = engine._env
    for number in range(200):
        store.put_blob(b"%d " % number * 500)
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            with env.reading() as txn:
                counts = {sum(1 for _ in txn.cursor(db=env.slabs)) for _ in range(3)}
                assert len(counts) == 1, "one state, and not always the same"
                seen.append(counts.pop())

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            store.put_blob(b"more %d " % number * 500)
            if number % 50 == 0:
                engine.pack()

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(work) for work in (read, read, read, read, write)]
        try:
            for _ in range(25):
                assert in_child(lambda: "closed") == "closed"
        finally:
            stop.set()
        for each in running:
            each.result(PATIENCE_S)
    assert seen
    assert not engine.verify() < 200
