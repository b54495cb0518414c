"""A backup is a store: whole, verified, as of one moment, or not there at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Digest, Store
from casstore.engine.files import leftovers
from casstore.engine.lmdb import hot_copy
from casstore.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    ForeignStoreError,
    InvalidInputError,
    SessionDivergedError,
    StorageError,
    TargetExistsError,
)
from casstore.maintenance import gc
from casstore.maintenance.backup import backup
from casstore.maintenance.progress import Step
from tests.maintenance import sessions
from tests.maintenance.sessions import MakeStore

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 120


def names_beside(target: Path) -> list[str]:
    """What lies beside a target because of it."""
    return sorted(path.name for path in target.parent.glob(f"{target.name}*"))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_backup_opens_without_conversion_and_holds_everything(
    tmp_path: Path, durability: str, compact: bool
) -> None:
    target = tmp_path / "backup"
    steps: list[Step] = []
    with casstore.open(tmp_path / "store", durability, auto_train=False) as store:
        sessions.fill(store)
        store.train_dictionary()
        for number in range(40):
            sessions.step(store, "t", sessions.message(f"n{number}", sessions.LONG_TEXT))
        report = backup(store, target, compact=compact, progress=steps.append)
        assert sorted(os.listdir(target)) == ["data.mdb"]
        assert report.size_bytes == (target / "data.mdb").stat().st_size
        assert steps[-1].done > 0
        with casstore.open(target, verify=True) as copied:
            assert sessions.seen(copied, "s") == sessions.seen(store, "s")
            assert list(copied.session("t").nodes()) == list(store.session("t").nodes())
            sessions.step(copied, "t", sessions.message("and on"))
            assert gc.collect(copied, grace_ms=0).outcome is not gc.Outcome.REFUSED
    assert names_beside(target) == ["backup"]


def test_a_store_in_memory_is_backed_up_into_a_directory(
    make_memory: MakeStore, tmp_path: Path
) -> None:
    store = make_memory()
    sessions.fill(store)
    backup(store, tmp_path / "backup")
    assert names_beside(tmp_path / "backup") == ["backup"]
    with casstore.open(tmp_path / "backup", verify=True) as copied:
        assert sessions.seen(copied, "s") == sessions.seen(store, "s")
    with pytest.raises(TargetExistsError):
        backup(store, tmp_path / "backup")


def test_a_backup_does_not_overwrite_an_existing_target(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    store = make_lmdb()
    sessions.step(store, "s", sessions.message("a"))
    for name in ("file", "directory", "backup"):
        if name == "file":
            (tmp_path / name).write_bytes(b"mine")
        elif name == "directory":
            (tmp_path / name).mkdir()
            (tmp_path / name / "mine").write_bytes(b"mine")
        else:
            backup(store, tmp_path / name)
        with pytest.raises(TargetExistsError):
            backup(store, tmp_path / name)
    with pytest.raises(InvalidInputError):
        backup(store, tmp_path / "file", replace=True)
    with pytest.raises(ForeignStoreError):
        backup(store, tmp_path / "directory", replace=True)
    assert (tmp_path / "file").read_bytes() == b"mine"
    assert (tmp_path / "directory" / "mine").read_bytes() == b"mine"


def test_a_backup_is_replaced_only_on_request_and_only_if_no_process_has_it_open(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    store, target = make_lmdb(), tmp_path / "backup"
    sessions.step(store, "s", sessions.message("a"))
    backup(store, target)
    sessions.step(store, "s", sessions.message("b"))
    with casstore.open(target, readonly=True) as copied, pytest.raises(BusyError):
        backup(store, target, replace=True)
    with casstore.open(target) as copied:
        assert copied.session("s").node("b") is None
    backup(store, target, replace=True)
    with casstore.open(target, verify=True) as copied:
        assert copied.session("s").node("b") is not None
    assert names_beside(target) == ["backup"]


def test_a_backup_that_is_replaced_keeps_its_owner_and_its_mode(
    make_lmdb: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that may read the backups could not read the next one any more."""
    store, target = make_lmdb(), tmp_path / "backup"
    data = target / "data.mdb"
    backup(store, target)
    data.chmod(0o640)
    before = data.stat()
    given: list[tuple[int, int]] = []
    real = os.stat

    def stat(path: str, **options: Any) -> Any:
        # As if somebody else owned it, which only root could arrange.
        found = real(path, **options)
        if path != str(data):
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, found.st_gid + 2, *found[6:10]])

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        patched.setattr(os, "fchown", lambda handle, uid, gid: given.append((uid, gid)))
        backup(store, target, replace=True)
    assert given == [(before.st_uid + 1, before.st_gid + 2)]
    assert data.stat().st_mode == before.st_mode
    assert data.stat().st_ino != before.st_ino


@pytest.mark.parametrize("inside", [".", "backup", "locks/backup"])
def test_a_place_inside_the_store_is_refused(
    make_lmdb: MakeStore, tmp_path: Path, inside: str
) -> None:
    store = make_lmdb()
    before = sorted(os.listdir(tmp_path / "store-0"))
    (tmp_path / "link").symlink_to(tmp_path / "store-0")
    for way in ("store-0", "link"):
        with pytest.raises(InvalidInputError):
            backup(store, tmp_path / way / inside, replace=True)
    assert sorted(os.listdir(tmp_path / "store-0")) == before


def test_a_backup_of_a_damaged_store_raises_and_leaves_no_target(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    store = make_lmdb()
    content = sessions.noise("content", 30_000)
    store.put_blob(content)
    data = tmp_path / "store-0" / "data.mdb"
    raw = bytearray(data.read_bytes())
    at = raw.index(content[10_000:10_020])
    with data.open("r+b") as file:
        file.seek(at)
        file.write(bytes([raw[at] ^ 1]))
    with pytest.raises(CorruptionError):
        backup(store, tmp_path / "backup")
    assert names_beside(tmp_path / "backup") == []


# --- stopped, closed, forked -----------------------------------------------------------------


def large(store: Store, size: int = 24 << 20) -> None:
    """Put in more than a pipe holds, and enough that copying it takes a moment."""
    for number in range(size >> 20):
        store.put_blob(sessions.noise(f"large {number}", 1 << 20))


def test_raising_from_progress_stops_the_backup_and_leaves_no_target(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    store = make_lmdb()
    large(store, 4 << 20)

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(store, tmp_path / "backup", progress=stop)
    assert names_beside(tmp_path / "backup") == []
    backup(store, tmp_path / "backup")


def slowly(monkeypatch: pytest.MonkeyPatch, reading: threading.Event) -> None:
    """Make the copy as slow as on a slow disk: it waits for more at every chunk."""
    monkeypatch.setattr(hot_copy, "_CHUNK_BYTES", 4096)
    read = os.read

    def wait_and_read(handle: int, size: int) -> bytes:
        if size == 4096:
            reading.set()
            time.sleep(0.002)
        return read(handle, size)

    monkeypatch.setattr("casstore.engine.lmdb.hot_copy.os.read", wait_and_read)


@pytest.mark.parametrize(
    ("failing", "begins", "error"),
    [(1, True, KeyboardInterrupt), (1, False, RuntimeError), (2, False, RuntimeError)],
)
def test_a_backup_whose_threads_cannot_start_does_not_hang(
    make_lmdb: MakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    begins: bool,
    error: type[BaseException],
) -> None:
    """Ctrl-C as its first thread begins, or the system gives it none, or only one."""
    store = make_lmdb()
    # More than a pipe holds: who writes into it waits for somebody to read.
    store.put_blob(random.Random(3).randbytes(1 << 20))
    start = threading.Thread.start
    copies: list[threading.Thread] = []

    def cut_short(thread: threading.Thread) -> None:
        if thread.name == "casstore-copy":
            copies.append(thread)
            if len(copies) == failing:
                if begins:
                    start(thread)
                raise error("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cut_short)
        with pytest.raises((KeyboardInterrupt, StorageError), match="new thread"):
            backup(store, tmp_path / "copy")
    assert len(copies) >= failing
    assert not [each for each in threading.enumerate() if each.name == "casstore-copy"]
    assert names_beside(tmp_path / "copy") == []
    # Nobody is inside: a fork, and whoever closes, would wait for ever.
    store.close()


GIVES_UP = """
import os, sys, threading
import casstore
from casstore.maintenance.backup import backup
store = casstore.open(sys.argv[1] + "/store", auto_train=False)
store.put_blob(bytes(100_000))
env = store.engine._env
for number in range(8):
    copying = threading.Thread(target=backup, args=(store, f"{sys.argv[1]}/copy {number}"))
    with env.writing() as txn:
        copying.start()
        while len([each for each in threading.enumerate() if each.name == "casstore-copy"]) < 2:
            pass
        # It gets as far as it can.
        for _ in range(500):
            os.sched_yield()
        txn.abort()
    copying.join()
store.close()
print("done")
"""


def test_aborting_a_write_transaction_while_a_backup_begins_does_not_deadlock(
    tmp_path: Path,
) -> None:
    """LMDB waits for the writer, and py-lmdb's abort for the copy: the whole process stood still.

    Whoever keeps a state behind the writers (``relaxed``) gives a transaction up every time.
    """
    answer = subprocess.run(
        [sys.executable, "-c", GIVES_UP, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    assert answer.stdout == "done\n"


def test_closing_the_store_does_not_wait_for_a_long_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = casstore.open(tmp_path / "store", auto_train=False)
    large(store, 8 << 20)
    reading = threading.Event()
    slowly(monkeypatch, reading)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            backup(store, tmp_path / "backup")
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    assert reading.wait(TIMEOUT_S)
    store.close()
    thread.join(TIMEOUT_S)
    assert [type(exc) for exc in errors] == [ClosedError]
    assert names_beside(tmp_path / "backup") == []


def test_a_fork_does_not_wait_for_a_long_backup_and_the_backup_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[int] = []

    def fork(step: Step) -> None:
        if not forked and step.done:
            child = os.fork()
            if not child:
                os._exit(7)
            forked.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            monkeypatch.undo()

    with casstore.open(tmp_path / "store", auto_train=False) as store:
        large(store, 8 << 20)
        slowly(monkeypatch, threading.Event())
        backup(store, tmp_path / "backup", progress=fork)
    assert forked == [7]
    with casstore.open(tmp_path / "backup", verify=True):
        pass


# --- no room, killed ---------------------------------------------------------------------------


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_backup_to_a_full_disk_raises_a_typed_error_and_leaves_no_file(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", auto_train=False) as store:
        large(store, 4 << 20)
    code = """if True:
        import resource, signal, sys
        import casstore
        from casstore.errors import StorageFullError
        from casstore.maintenance.backup import backup
        from casstore.maintenance.export import export_session
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with casstore.open(sys.argv[1], auto_train=False) as store:
            for limit in (0, 100_000, 1 << 20, 4 << 20):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                for compact in (False, True):
                    try:
                        backup(store, sys.argv[2], compact=compact)
                        print("done")
                    except StorageFullError as exc:
                        print("full")
    """
    with run_python(code, tmp_path / "store", tmp_path / "backup") as child:
        assert child.stdout is not None
        assert child.stdout.read().split() == ["full"] * 8
    assert names_beside(tmp_path / "backup") == []


def test_a_killed_backup_leaves_no_target_and_nothing_that_stops_the_next(tmp_path: Path) -> None:
    target = tmp_path / "backup"
    with casstore.open(tmp_path / "store", auto_train=False) as store:
        large(store)
        code = """if True:
            import sys
            import casstore
            from casstore.maintenance.backup import backup
            with casstore.open(sys.argv[1], auto_train=False) as store:
                print("open", flush=True)
                backup(store, sys.argv[2])
        """
        killed = 0
        for delay_ms in (0, 5, 20, 60, 120):
            with run_python(code, tmp_path / "store", target) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == "open\n"
                time.sleep(delay_ms / 1000)
                child.send_signal(signal.SIGKILL)
            if target.exists():
                with casstore.open(target, verify=True):
                    break
            killed += 1
        assert killed
        left = leftovers(str(target))
        assert 0 < len(left) <= killed
        backup(store, target, replace=target.exists())
    # They may be of one that runs, so nobody else removes them.
    assert leftovers(str(target)) == left
    assert names_beside(target) == ["backup", *[os.path.basename(path) for path in left]]
    with casstore.open(target, verify=True):
        pass


def test_the_later_of_two_concurrent_backups_to_one_target_is_refused(
    make_lmdb: MakeStore, tmp_path: Path
) -> None:
    store = make_lmdb()
    large(store, 1 << 20)
    refused: list[str] = []

    def again(step: Step) -> None:
        if not refused:
            refused.append("")
            backup(store, tmp_path / "backup")
            store.put_blob(b"not in the backup that came first")

    with pytest.raises(TargetExistsError):
        backup(store, tmp_path / "backup", progress=again)
    assert refused
    assert names_beside(tmp_path / "backup") == ["backup"]
    with casstore.open(tmp_path / "backup", verify=True) as copied:
        assert Digest.of_blob(b"not in the backup that came first") not in copied


# --- beside others -----------------------------------------------------------------------------

_WRITER = """if True:
    import sys
    import casstore
    from casstore import Commit, NodeDraft
    name = sys.argv[2]
    with casstore.open(sys.argv[1], "relaxed", auto_train=False) as store:
        session = store.session(name)
        for number in range(100_000):
            text = f"{name} {number} " * 60
            session.commit(Commit(append=[NodeDraft(f"n{number}", text)]))
            print(number, flush=True)
            if number % 20 == 19:
                store.session(f"{name}/{number}").commit(
                    Commit(append=[NodeDraft("x", text)]))
                store.delete_session(f"{name}/{number}")
"""
_COLLECTOR = """if True:
    import sys
    import casstore
    from casstore.maintenance import gc
    with casstore.open(sys.argv[1], "relaxed", auto_train=False) as store:
        while True:
            print(gc.collect(store, grace_ms=0).outcome.name, flush=True)
            store.pack(min_age_ms=0)
"""


class Acknowledged(threading.Thread):
    """Reads what a process says, and knows the last line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.last = ""
        self.lines = 0
        self.start()

    def run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = line.strip()
            self.lines += 1

    def wait(self, lines: int) -> None:
        while self.lines < lines and self.process.poll() is None:
            time.sleep(0.005)
        assert self.process.poll() is None, "it ended by itself"


def test_backups_concurrent_with_writers_and_a_collector_hold_all_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store"
    with casstore.open(place, "relaxed", auto_train=False) as store:
        writers = [Acknowledged(run_python(_WRITER, place, f"w{n}")) for n in range(2)]
        collector = Acknowledged(run_python(_COLLECTOR, place))
        try:
            for number in range(2):
                for other in (*writers, collector):
                    other.wait(other.lines + (2 if other is collector else 10))
                before = [int(writer.last) for writer in writers]
                target = tmp_path / f"backup-{number}"
                backup(store, target, compact=number % 2 == 1)
                with casstore.open(target, verify=True) as copied:
                    for name, acknowledged in zip(("w0", "w1"), before, strict=True):
                        nodes = list(copied.session(name).nodes())
                        assert len(nodes) > acknowledged
                        assert [node.id for node in nodes] == [f"n{n}" for n in range(len(nodes))]
                    assert gc.plan(copied, grace_ms=0).report.outcome is not gc.Outcome.REFUSED
            update = tmp_path / "backup-0"
            before = [int(writer.last) for writer in writers]
            backup(store, update, update=True)
            with casstore.open(update, verify=True) as copied:
                for name, acknowledged in zip(("w0", "w1"), before, strict=True):
                    nodes = list(copied.session(name).nodes())
                    assert len(nodes) > acknowledged
                    assert [node.id for node in nodes] == [f"n{n}" for n in range(len(nodes))]
        finally:
            for other in (*writers, collector):
                other.process.kill()
                other.process.wait()
                other.join(TIMEOUT_S)
                assert other.process.stdout is not None
                other.process.stdout.close()


# --- again ---------------------------------------------------------------------------------------


def test_a_backup_update_sends_only_missing_objects(make_lmdb: MakeStore, tmp_path: Path) -> None:
    store, target = make_lmdb(), tmp_path / "backup"
    sessions.fill(store)
    assert backup(store, target, update=True).updated is False
    sessions.step(store, "s", sessions.message("new"))
    store.create_session("renamed", name="before")
    report = backup(store, target, update=True)
    assert (report.updated, report.objects) == (True, 2)
    with casstore.open(target, verify=True) as copied:
        assert sessions.seen(copied, "s") == sessions.seen(store, "s")
        sessions.step(copied, "s", sessions.message("not in the store"))
    sessions.step(store, "s", sessions.message("not in the backup"))
    with pytest.raises(SessionDivergedError):
        backup(store, target, update=True)
    with pytest.raises(InvalidInputError):
        backup(store, target, update=True, compact=True)


def test_the_error_for_an_unusable_target_names_it(make_lmdb: MakeStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        backup(make_lmdb(), tmp_path / "file" / "backup")
