"""Packing in the background: it works, it stops, and its errors are reported."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb import background
from casstore.engine.lmdb.background import BackgroundPacker
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PackReport
from casstore.errors import ClosedError, StorageFullError
from casstore.store import Store

ROOT = Path(__file__).parents[3]
DONE = PackReport(3, 1, 300, 100, 0)


def engine_of(store: Store) -> LmdbEngine:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


class Rounds:
    """A pack function that counts its calls and runs the given action in each round."""

    def __init__(self, *deeds: Callable[[], object]) -> None:
        self.deeds = list(deeds)
        self.count = 0
        self.all_done = threading.Event()

    def __call__(self, progress: Callable[[PackReport], None]) -> PackReport:
        self.count += 1
        if self.deeds:
            self.deeds.pop(0)()
        if not self.deeds:
            self.all_done.set()
        progress(DONE)
        return DONE


def fail() -> None:
    raise StorageFullError("no room for this test")


@pytest.mark.usefixtures("slab_a_commit")
@pytest.mark.filterwarnings("error")
def test_cold_slabs_are_packed_while_the_store_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "INTERVAL_S", 0.01)
    monkeypatch.setattr("casstore.engine.lmdb.engine.COLD_AGE_MS", 1)
    with casstore.open(tmp_path / "s", "relaxed", auto_pack=True) as store:
        packer = engine_of(store).packer
        assert packer is not None
        digests = [store.put_blob(b"%d" % n) for n in range(300)]
        waited = threading.Event()
        for _ in range(6000):
            if packer.report.slabs_after:
                break
            assert not waited.wait(0.01)
            assert packer.last_error is None
        else:
            pytest.fail("nothing was packed in a minute")
        assert len(store.get_many(digests)) == 300
        assert engine_of(store)._count_slabs() < 300
    assert not [thread for thread in threading.enumerate() if thread.name == "casstore-pack"]


def test_no_packing_thread_runs_by_default_or_in_a_read_only_store(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        assert engine_of(store).packer is None
    with casstore.open(tmp_path / "s", readonly=True, auto_pack=True) as store:
        assert engine_of(store).packer is None


def test_the_packer_skips_a_round_while_there_are_few_new_slabs() -> None:
    counts = iter([0, background.MIN_NEW_SLABS - 1, background.MIN_NEW_SLABS, 10, 10, 10])
    asked = threading.Event()
    rounds = Rounds()

    def count() -> int:
        found = next(counts, None)
        if found is None:
            asked.set()
            return 10
        return found

    packer = BackgroundPacker(rounds, count, interval_s=0.001)
    assert asked.wait(60)
    packer.stop()
    assert rounds.count == 1
    assert packer.report == DONE


def test_an_error_is_reported_and_the_next_round_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    rounds = Rounds(fail, lambda: None)
    # Each count is far above the one before.
    numbers = iter(range(10_000, 10_000_000, 10_000))
    packer = BackgroundPacker(rounds, lambda: next(numbers), interval_s=0.001)
    assert rounds.all_done.wait(60)
    packer.stop()
    assert [args.exc_type for args in told] == [StorageFullError]
    assert told[0].thread is not None
    assert told[0].thread.name == "casstore-pack"
    assert rounds.count >= 2
    assert packer.report.slabs_before >= 3


def test_the_packer_keeps_its_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    failed = threading.Event()

    def fail_and_say() -> None:
        failed.set()
        fail()

    packer = BackgroundPacker(Rounds(fail_and_say), lambda: 10_000, interval_s=0.2)
    assert failed.wait(60)
    packer.stop()
    assert isinstance(packer.last_error, StorageFullError)


def test_stopping_ends_a_round_between_two_steps() -> None:
    inside, go_on = threading.Event(), threading.Event()
    steps: list[int] = []

    def pack(progress: Callable[[PackReport], None]) -> PackReport:
        for step in range(1000):
            steps.append(step)
            inside.set()
            go_on.wait(60)
            progress(DONE)
        return DONE

    packer = BackgroundPacker(pack, lambda: 10_000, interval_s=0.001)
    assert inside.wait(60)
    stopper = threading.Thread(target=packer.stop)
    stopper.start()
    packer._stop.wait(60)
    # It waits for the step.
    stopper.join(0.05)
    assert stopper.is_alive()
    go_on.set()
    stopper.join()
    assert steps == [0]
    assert packer.last_error is None


def test_the_packing_thread_ends_without_an_error_when_the_store_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    def count() -> int:
        raise ClosedError("closed")

    packer = BackgroundPacker(Rounds(), count, interval_s=0.001)
    packer._thread.join()
    assert told == []


_IMPORTING = """
import sys, threading, time
told = []

def note(event, args):
    if event == "import" and threading.current_thread().name.startswith("casstore-"):
        told.append((threading.current_thread().name, args[0]))

import casstore
from casstore.engine.lmdb import background, engine
background.INTERVAL_S = 0.001
background.MIN_NEW_SLABS = 1
engine.COLD_AGE_MS = 0
sys.addaudithook(note)
with casstore.open(sys.argv[1], "relaxed", auto_pack=True) as store:
    for n in range(3000):
        store.put_value({"number": n, "text": f"some text that is {n} long" * 9})
    deadline = time.monotonic() + 60
    while not store.engine.packer.report.slabs_after and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.engine.packer.report.slabs_after, "nothing was packed"
    store.engine._training.start(0)
    store.engine._training.join()
print(told)
"""


def test_no_background_thread_imports_a_module(tmp_path: Path) -> None:
    # A process that forks while a thread imports leaves its child the lock of that module.
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTING, str(tmp_path / "s")],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


_FORKING = """
import os, sys, warnings, casstore
# Since 3.12 Python warns of every fork of a process with threads, which is tested here.
warnings.simplefilter("ignore", DeprecationWarning)
from casstore.engine.lmdb import background
background.INTERVAL_S = 0.001
background.MIN_NEW_SLABS = 1
store = casstore.open(sys.argv[1], "relaxed", auto_pack=True)
for n in range(20):
    for m in range(20):
        store.put_blob(b"%d %d" % (n, m))
    child = os.fork()
    if not child:
        store.close()
        with casstore.open(sys.argv[1], "relaxed", auto_pack=True) as own:
            own.put_blob(b"child %d" % n)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
store.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_closes_and_reopens_the_store(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(tmp_path / "s")],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with casstore.open(tmp_path / "s", "relaxed", verify=True) as store:
        assert engine_of(store).verify() == 420
