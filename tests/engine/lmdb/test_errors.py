"""What LMDB says, in our words: who catches an error must know what to do about it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

import casstore
from casstore.engine.files import part_directory, storage_error
from casstore.engine.lmdb.dictionaries import FIRST_TRIAL_BYTES
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.reserve import Reserve
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import Write
from casstore.errors import (
    BusyError,
    CasstoreError,
    ClosedError,
    CorruptionError,
    ReadOnlyError,
    StorageError,
    StorageFullError,
)
from casstore.testing.engine_fixtures import assert_reads_back, new_blob


def told(error: type[lmdb.Error], text: str, code: int = 0) -> lmdb.Error:
    """An error as py-lmdb raises it."""
    said = error(text)
    vars(said)["code"] = code
    return said


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (told(lmdb.MapFullError, "mdb_put"), StorageFullError),
        (told(lmdb.ReadersFullError, "mdb_txn_begin"), BusyError),
        (told(lmdb.ReadonlyError, "mdb_put"), ReadOnlyError),
        (told(lmdb.CorruptedError, "mdb_get"), CorruptionError),
        (told(lmdb.PageNotFoundError, "mdb_get"), CorruptionError),
        (told(lmdb.InvalidError, "mdb_env_open"), CorruptionError),
        (told(lmdb.VersionMismatchError, "mdb_env_open"), CorruptionError),
        # A handle that does not match: LMDB's text mentions closing, but it was not closed.
        (
            told(lmdb.BadDbiError, "MDB_BAD_DBI: The specified DBI handle was closed/changed"),
            CorruptionError,
        ),
        (told(lmdb.Error, "Attempt to operate on closed/deleted/dropped object."), ClosedError),
        (told(lmdb.Error, "something else"), StorageError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_each_lmdb_error_is_translated_to_its_typed_error(
    said: lmdb.Error, means: type[CasstoreError]
) -> None:
    found = translate(said, "my-store")
    assert type(found) is means
    assert "my-store" in str(found)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_raises_storage_full_error_whichever_layer_reports_it(code: int) -> None:
    """Also where a quota is used up, or a file may not become longer."""
    said = told(lmdb.DiskError, "mdb_txn_commit", code)
    assert type(translate(said, "s")) is StorageFullError
    assert type(storage_error("cannot write", OSError(code, "full"))) is StorageFullError
    assert type(storage_error("cannot write", OSError(errno.EACCES, "no"))) is StorageError


def test_mdb_short_write_is_translated_to_storage_full_error() -> None:
    assert type(translate(told(lmdb.Error, "MDB_SHORT_WRITE"), "s")) is StorageFullError


@pytest.mark.parametrize(
    ("free_bytes", "kind"), [(4096, StorageFullError), (1 << 30, StorageError)]
)
def test_a_short_write_on_a_full_disk_is_reported_as_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, kind: type[StorageError]
) -> None:
    """LMDB calls it an I/O error, and says nothing of room."""
    said = told(lmdb.Error, "mdb_txn_commit: Input/output error", errno.EIO)
    room = list(os.statvfs(tmp_path))
    room[1], room[4] = 1, free_bytes
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(room))
    assert type(translate(said, str(tmp_path))) is kind


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread start: none of them finds room for its stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_a_commit_succeeds_though_the_training_thread_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LmdbEngine, "train_dictionary", lambda engine: pytest.fail("trained"))
    blobs = [new_blob(random.Random(n).randbytes(4000)) for n in range(80)]
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with no_more_threads():
        for blob in blobs:
            # Each becomes a short slab, so training is due before the last.
            assert engine.write(Write(objects=[blob])).new_objects == 1
            engine.apply_log()
        assert engine._training is not None
        assert engine._training.due_bytes > FIRST_TRIAL_BYTES, "no trial was due"
    engine.close()
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    assert_reads_back(engine, *blobs)
    engine.close()


def test_a_store_whose_packer_cannot_be_started_is_not_left_open(tmp_path: Path) -> None:
    with no_more_threads(), pytest.raises(StorageError, match="thread"):
        LmdbEngine(str(tmp_path / "s"), auto_pack=True)
    engine = LmdbEngine(str(tmp_path / "s"), auto_pack=True)
    assert engine.write(Write(objects=[new_blob(b"one")])).new_objects == 1
    engine.close()


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_commits_need_no_background_thread(tmp_path: Path, durability: str) -> None:
    blobs = [new_blob(b"%d" % number) for number in range(20)]
    engine = LmdbEngine(str(tmp_path / "s"), durability=durability)
    with no_more_threads():
        for blob in blobs:
            assert engine.write(Write(objects=[blob])).new_objects == 1
    # The next commit starts it.
    engine.write(Write(objects=[new_blob(b"after")]))
    assert engine._behind is not None
    assert engine._behind._added
    engine.close()
    engine = LmdbEngine(str(tmp_path / "s"))
    assert_reads_back(engine, *blobs)
    engine.close()


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_a_file_system_without_locks_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Network and user-space file systems may refuse any of them; whichever it is, it is said."""
    lock = fcntl.flock
    calls = 0

    def refused(handle: Any, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == wanted:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        lock(handle, operation)

    wanted = 0
    outcomes = set()
    while calls >= wanted:
        calls, wanted = 0, wanted + 1
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refused)
            try:
                with casstore.open(tmp_path / "store", durability) as store:
                    store.put_blob(b"x")
                outcomes.add("")
            except StorageError as exc:
                outcomes.add(str(exc))
        # Nobody is left holding a lock.
        with casstore.open(tmp_path / "store", verify=True):
            pass
    told = [text for text in outcomes if text]
    assert "" in outcomes  # as where a lock could not be given back: closing does that
    assert told
    assert all("No locks available" in text for text in told)


_NO_DESCRIPTORS = """if True:
    import os, resource, sys
    import casstore
    from casstore import Commit, NodeDraft
    from casstore.errors import CasstoreError
    from casstore.maintenance import backup, check, copy, export, gc, salvage, vacuum
    place = sys.argv[1]
    store = casstore.open(place + "/store")
    store.session("s").commit(Commit(append=[NodeDraft("n", "hello")]))
    other = casstore.open(place + "/other")
    calls = {
        "gc": lambda: gc.collect(store),
        "check": lambda: check.check(store, level="full"),
        "vacuum": lambda: vacuum.vacuum(store),
        "pack": lambda: store.pack(min_age_ms=0),
        "backup": lambda: backup.backup(store, place + "/backup"),
        "copy": lambda: copy.copy(store, other),
        "export": lambda: export.export_session(store, "s", place + "/bundle"),
        "salvage": lambda: salvage.salvage(place + "/store", place + "/saved"),
        "watch": lambda: store.engine.watch(),
        "put": lambda: store.put_blob(os.urandom(200_000)),
        "diff": lambda: list(store.diff(store.put_value([1]), store.put_value([2]))),
        "open": lambda: casstore.open(place + "/third"),
    }
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    while True:
        try:
            held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            break
    told = []
    # Nothing is left at first, then one more each time: each call fails wherever it can.
    for spare in range(8):
        for name, call in calls.items():
            try:
                call()
                told.append(f"{name} done")
            except CasstoreError:
                pass
            except BaseException as exc:
                told.append(f"{name} {exc!r}")
        os.close(held.pop())
    for handle in held:
        os.close(handle)
    print(chr(10).join(sorted({line for line in told if not line.endswith(" done")})), end="")
    assert any(line == "gc done" for line in told)
"""


def test_where_no_descriptor_is_left_every_call_ends_with_a_typed_error(tmp_path: Path) -> None:
    """Parts of casstore are loaded when they are first needed, which takes a descriptor, too."""
    ran = subprocess.run(
        [sys.executable, "-B", "-c", _NO_DESCRIPTORS, str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""


def test_a_part_directory_that_cannot_be_created_raises_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    place = str(tmp_path / "target")
    for name in ("makedirs", "open", "mkdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refused)
            with pytest.raises(StorageError, match="Read-only"), part_directory(place):
                raise AssertionError("nothing can be built there")
    with part_directory(place) as part:
        assert os.listdir(part.path) == []
    assert list(tmp_path.iterdir()) == []


class _Resized:
    """Stands for LMDB's handle while another process has outgrown the map."""

    def begin(self, **options: Any) -> None:
        raise lmdb.MapResizedError("the map is too short")


def test_a_read_that_cannot_reopen_a_file_that_outgrew_its_map_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LmdbEngine(str(tmp_path / "s"))
    with monkeypatch.context() as patch:
        patch.setattr(engine._env, "handle", _Resized())
        patch.setattr(engine._env, "_open", lambda: (_ for _ in ()).throw(StorageError("full")))
        patch.setattr(_Resized, "close", lambda handle: None, raising=False)
        with pytest.raises(StorageError, match="full"):
            engine.used_bytes()
        assert not engine._env.gate.is_inside
    engine.close()


def test_a_reader_that_waits_for_a_larger_map_does_not_block_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the log, and so holds the memtable's lock, while it waits to reopen the file."""
    engine = LmdbEngine(str(tmp_path / "s"))
    env = engine._env
    holds, done = threading.Event(), threading.Event()

    def read() -> None:
        with env.recent._memtable_lock:
            holds.set()
            with env.tables_lock:
                done.set()

    cover = env.cover

    def covering() -> None:
        threading.Thread(target=read, daemon=True).start()
        assert holds.wait(30)
        cover()

    monkeypatch.setattr(env, "cover", covering)
    writer = threading.Thread(
        target=lambda: engine.write(Write(objects=[new_blob(b"one")])), daemon=True
    )
    writer.start()
    writer.join(30)
    assert not writer.is_alive(), "reader and writer wait for each other"
    assert done.wait(30)
    monkeypatch.undo()
    engine.close()


def test_a_store_whose_opening_was_interrupted_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(reserve: Reserve, data_bytes: int, log_bytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reserve, "allocate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            LmdbEngine(str(tmp_path / "s"))
    LmdbEngine(str(tmp_path / "s")).close()
