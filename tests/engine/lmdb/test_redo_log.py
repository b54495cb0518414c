"""The redo log: what a killed process or a damaged file leaves is read right, or refused.

Most tests copy the files of an open store, as its process would leave them if it were killed.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import casstore
from casstore import Commit, NodeDraft
from casstore.engine import files
from casstore.engine.compression import Compressor
from casstore.engine.forks import open_file
from casstore.engine.lmdb import log as redo_log
from casstore.engine.lmdb import memtable as memtables
from casstore.engine.lmdb import recent, verification
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.log import FLUSHED, LOG_FILE, PUBLISHED, Position, RecoveryPoint, RedoLog
from casstore.engine.lmdb.memtable import BatchEntry, Memtable, MemtableView, Unchanged
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import (
    BusyError,
    CorruptionError,
    InvalidInputError,
    StorageError,
)
from casstore.testing.engine_fixtures import all_objects, new_blob

ROOT = Path(__file__).parents[3]
KEY = RowKey("records", b"key")
# The first commits of a process go straight into the tables.
DIRECT = 2


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "store"))
    yield engine
    engine.close()


def put(
    engine: LmdbEngine, value: bytes, key: bytes = KEY.key, *, durable: bool | None = None
) -> None:
    engine.write(Write(rows=[PutRow(KEY.table, key, value)], durable=durable))


def value_of(engine: LmdbEngine, key: bytes = KEY.key) -> bytes | None:
    return engine.get_rows([RowKey(KEY.table, key)])[0]


def copy_files(engine: LmdbEngine, place: Path) -> Path:
    """The files of a store as its process would leave them if it were killed now."""
    place.mkdir()
    for name in ("data.mdb", LOG_FILE):
        shutil.copyfile(Path(engine.path) / name, place / name)
    return place


def read_copy(place: Path, key: bytes = KEY.key) -> bytes | None:
    with_log = LmdbEngine(str(place))
    try:
        return value_of(with_log, key)
    finally:
        with_log.close()


def log_of(engine: LmdbEngine) -> RedoLog:
    log = engine._env.recent._log
    assert log is not None
    return log


def numbered(engine: LmdbEngine, count: int) -> None:
    """Commit a row and an object for each number, and its number as the latest."""
    for number in range(count):
        name = b"%04d" % number
        rows = [PutRow(KEY.table, name, name), PutRow(*KEY, name)]
        engine.write(Write(objects=[new_blob(name * 20)], rows=rows))


# --- a process that was killed ------------------------------------------------------------------


def test_commits_of_a_killed_process_are_read_from_the_log_also_read_only(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    numbered(engine, 20)
    place = copy_files(engine, tmp_path / "killed")
    for readonly in (True, False, True):
        again = LmdbEngine(str(place), readonly=readonly)
        assert value_of(again) == b"0019"
        assert len(all_objects(again)) == 20
        assert again.verify() == 20
        again.close()


@pytest.mark.parametrize("readonly", [True, False])
def test_the_header_of_a_crashed_store_may_be_ahead_of_its_last_record(
    tmp_path: Path, engine: LmdbEngine, readonly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may keep the published LSN and lose the record, which was not flushed yet."""
    numbered(engine, 6)
    assert engine._behind is not None
    monkeypatch.setattr(engine._behind, "_work", lambda: 60.0)
    put(engine, b"relaxed", durable=False)
    place = copy_files(engine, tmp_path / "crashed")
    with (place / LOG_FILE).open("r+b") as log:
        log.seek(engine._env.recent.memtable.entries[-1].offset)
        log.write(bytes(redo_log._RECORD_BYTES))
    crashed = LmdbEngine(str(place), readonly=readonly)
    try:
        assert value_of(crashed) == b"0005"
        assert value_of(crashed) == b"0005"
    finally:
        crashed.close()


def test_recovery_flushes_the_log_before_it_calls_it_flushed(
    tmp_path: Path, engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine goes on when a process is killed: its relaxed commits may be in memory alone.

    Later durable commits flush only what follows the flushed LSN.
    """
    numbered(engine, 6)
    place = copy_files(engine, tmp_path / "killed")
    calls: list[str] = []
    flush, pwrite = files.flush_file, os.pwrite

    def flushing(handle: int) -> None:
        calls.append("flush")
        flush(handle)

    def writing(handle: int, content: bytes, offset: int) -> int:
        if offset == redo_log._PUBLISHED_AT:
            calls.append("numbers")
        return pwrite(handle, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(redo_log, "flush_file", flushing)
        patch.setattr(os, "pwrite", writing)
        LmdbEngine(str(place)).close()
    assert calls[:2] == ["flush", "numbers"]


def test_a_closed_store_needs_no_log(tmp_path: Path) -> None:
    engine = LmdbEngine(str(tmp_path / "store"))
    numbered(engine, 20)
    engine.close()
    (tmp_path / "store" / LOG_FILE).unlink()
    assert read_copy(tmp_path / "store") == b"0019"


KILLED = """
import os, signal, sys
from casstore.engine.lmdb import recent, verification
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

engine = LmdbEngine(sys.argv[1])
if sys.argv[2] == "appended":
    # Flushed, but not acknowledged.
    recent.RedoLog.publication = die
else:
    # Half of it.
    recent.RedoLog.append, append = die, recent.RedoLog.append
    def half(log, end, offset, body, *, flush):
        append(log, end, offset, body, flush=True)
        os.pwrite(log.fileno(), bytes(64), offset + 64)
        die()
    recent.RedoLog.append = half
engine.write(Write(rows=[PutRow("records", b"key", b"never acknowledged" * 20)]))
"""


@pytest.mark.parametrize("when", ["appended", "torn"])
@pytest.mark.parametrize("applied", [False, True])
def test_a_record_that_a_killed_process_did_not_publish_does_not_replace_a_later_commit(
    tmp_path: Path, engine: LmdbEngine, when: str, applied: bool
) -> None:
    """It stands where readers look first, with the number that the next commit gets."""
    numbered(engine, 6)
    done = subprocess.run([sys.executable, "-c", KILLED, engine.path, when], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert value_of(engine) == b"0005"
    if applied:
        # The log is empty then, and the next record begins at its start.
        assert engine._env.recent.apply_concurrently()
    put(engine, b"acknowledged")
    assert value_of(engine) == b"acknowledged"
    assert read_copy(copy_files(engine, tmp_path / "killed")) == b"acknowledged"


def test_an_interrupted_commit_does_not_replace_a_later_one(
    tmp_path: Path, engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(engine, 6)

    def interrupt(*arguments: object, **options: object) -> tuple[int, bytes, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "publication", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(engine, b"interrupted")
    engine._env.recent.apply_concurrently()
    put(engine, b"acknowledged")
    assert read_copy(copy_files(engine, tmp_path / "killed")) == b"acknowledged"


def test_an_unpublished_record_is_cleared_durably_before_another_takes_its_number(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a power loss kept the old record and the new one, the old one would be read."""
    numbered(engine, 6)

    def interrupt(*arguments: object, **options: object) -> tuple[int, bytes, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "publication", interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(engine, b"interrupted")
    # The log is empty now, and the next record begins at its start.
    assert engine._env.recent.apply_concurrently()
    done: list[str] = []
    flush, write = files.flush_file, os.pwritev

    def flush_file(number: int) -> None:
        flush(number)
        done.append("flushed")

    def pwritev(number: int, parts: list[bytes], offset: int, flags: int = 0) -> int:
        if offset == redo_log._FIRST_OFFSET:
            done.append("appended")
        return write(number, parts, offset, flags)

    monkeypatch.setattr(redo_log, "flush_file", flush_file)
    monkeypatch.setattr(os, "pwritev", pwritev)
    put(engine, b"acknowledged")
    assert done[:2] == ["flushed", "appended"]


def test_a_slab_that_does_not_inflate_to_its_objects_is_not_applied(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log, the other copy of the objects, is overwritten once they are applied."""
    numbered(engine, 6)
    compress = Compressor.compress

    def compress_badly(self: Compressor, raw: bytes) -> tuple[int, int, bytes]:
        return compress(self, raw[::-1])

    with monkeypatch.context() as patch:
        patch.setattr(Compressor, "compress", compress_badly)
        with pytest.raises(CorruptionError, match="check the memory of this machine"):
            engine.apply_log()
    assert len(engine._env.recent.memtable.entries) == 6 - DIRECT
    engine.apply_log()
    assert engine.verify() == len(all_objects(engine)) == 6


def test_an_object_that_its_own_batch_deletes_stays_deleted(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    numbered(engine, DIRECT + 1)
    blob = new_blob(b"stored and deleted")
    engine.write(Write(objects=[blob], deletes=[blob.digest]))
    assert engine.missing([blob.digest]) == [blob.digest]
    again = LmdbEngine(str(copy_files(engine, tmp_path / "killed")))
    assert again.missing([blob.digest]) == [blob.digest]
    assert again.verify() == len(all_objects(again)) == DIRECT + 1
    again.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_log_that_wraps_around_is_read_correctly_after_every_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Records of all lengths, applied and killed at any moment, compared with a model."""
    monkeypatch.setattr(redo_log, "FIRST_LOG_BYTES", 16 << 10)
    monkeypatch.setattr(recent, "MAX_LOGGED_BYTES", 12 << 10)
    monkeypatch.setattr(memtables, "APPLY_BYTES", 1 << 30)
    rng = random.Random(seed)
    engine = LmdbEngine(str(tmp_path / "store"), durability="relaxed", log_bytes=32 << 10)
    model: dict[bytes, bytes] = {}
    rounds = 0
    for step in range(160):
        key, value = b"%d" % rng.randrange(12), rng.randbytes(rng.choice((3, 60, 900, 5000, 13000)))
        at = log_of(engine).size_bytes and engine._env.recent.memtable.last.offset
        put(engine, value, key, durable=rng.random() < 0.3)
        rounds += engine._env.recent.memtable.last.offset < at
        model[key] = value
        if rng.random() < 0.1:
            engine._env.recent.apply_concurrently()
        if rng.random() < 0.15:
            again = LmdbEngine(str(copy_files(engine, tmp_path / f"killed {step}")))
            assert {row.key: row.value for row in again.scan_rows(KEY.table)} == model
            again.close()
    engine.close()
    assert rounds > 5


# --- damage -------------------------------------------------------------------------------------


def prefix_of(place: Path) -> int | None:
    """How many of the numbered commits a store holds, each whole; None if it is refused."""
    try:
        engine = LmdbEngine(str(place))
    except CorruptionError as exc:
        refused = str(exc)
    else:
        refused = ""
    if refused:
        assert "recover --discard-log" in refused
        return None
    try:
        latest = int(value_of(engine) or b"-1")
        rows = engine.scan_rows(KEY.table)
        names = [b"%04d" % number for number in range(latest + 1)]
        assert [row.key for row in rows if row.key != KEY.key] == names
        assert len(all_objects(engine)) == engine.verify() == latest + 1
        return latest + 1
    finally:
        engine.close()


@pytest.mark.parametrize("start", range(4))
def test_a_flipped_bit_anywhere_in_the_log_loses_nothing_unnoticed(
    tmp_path: Path, engine: LmdbEngine, start: int
) -> None:
    numbered(engine, 8)
    used = engine._env.recent.memtable.last.offset
    killed = copy_files(engine, tmp_path / "killed")
    sound = (killed / LOG_FILE).read_bytes()
    header = range(128)
    found: dict[int | None, int] = {None: 0, 8: 0}
    for at in [*header, *range(redo_log._FIRST_OFFSET, used)][start::4][::5]:
        place = tmp_path / "damaged"
        shutil.copytree(killed, place)
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        (place / LOG_FILE).write_bytes(damaged)
        found[prefix_of(place)] += 1
        shutil.rmtree(place)
    assert found[None] > 50


def test_a_damaged_record_is_refused_though_the_header_is_older_than_the_last_flush(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    """The header is not flushed with each commit. The records after the damaged one say so too."""
    numbered(engine, 8)
    memtable = engine._env.recent.memtable
    killed = copy_files(engine, tmp_path / "killed")
    with open(killed / LOG_FILE, "r+b") as log:
        log.seek(redo_log._FLUSHED_AT)
        log.write(memtable.entries[1].position.lsn.to_bytes(8, "little"))
        log.seek(memtable.entries[2].offset + redo_log._RECORD_BYTES)
        log.write(b"damaged")
    assert prefix_of(killed) is None


def test_a_log_that_was_cut_loses_nothing_unnoticed(tmp_path: Path, engine: LmdbEngine) -> None:
    numbered(engine, 8)
    used = engine._env.recent.memtable.last.offset
    killed = copy_files(engine, tmp_path / "killed")
    for length in [0, 10, 64, 100, 4000, *range(4096, used, 192), used]:
        place = tmp_path / "cut"
        shutil.copytree(killed, place)
        os.truncate(place / LOG_FILE, length)
        assert prefix_of(place) == (8 if length == used else None)
        shutil.rmtree(place)


def test_a_lost_foreign_or_stale_log_is_refused(tmp_path: Path, engine: LmdbEngine) -> None:
    numbered(engine, 8)
    early = copy_files(engine, tmp_path / "early")
    engine.apply_log()
    for number in range(8, 12):
        numbered_from(engine, number)
    late = copy_files(engine, tmp_path / "late")
    other = LmdbEngine(str(tmp_path / "other"))
    numbered(other, 8)
    foreign = copy_files(other, tmp_path / "foreign")
    other.close()

    def mixed(data: Path, log: Path | None) -> int | None:
        place = tmp_path / "mixed"
        place.mkdir()
        shutil.copyfile(data / "data.mdb", place / "data.mdb")
        if log is not None:
            shutil.copyfile(log / LOG_FILE, place / LOG_FILE)
        try:
            return prefix_of(place)
        finally:
            shutil.rmtree(place)

    assert mixed(late, late) == 12
    assert mixed(early, early) == 8
    assert mixed(late, None) is None
    assert mixed(late, foreign) is None
    # The tables are newer than the log: what it says is there already, and the end is missing.
    assert mixed(late, early) is None
    # The tables are older: the records between were overwritten.
    assert mixed(early, late) is None


def numbered_from(engine: LmdbEngine, number: int) -> None:
    name = b"%04d" % number
    rows = [PutRow(KEY.table, name, name), PutRow(*KEY, name)]
    engine.write(Write(objects=[new_blob(name * 20)], rows=rows))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RedoLog]:
    path = str(tmp_path / "log")
    log = RedoLog(open_file(path, os.O_RDWR | os.O_CREAT, 0o600), path, redo_log.MAX_LOG_BYTES)
    yield log
    log.close()


def test_a_record_after_a_lost_one_is_not_read_as_the_successor_of_its_replacement(
    log: RedoLog,
) -> None:
    """The power fails when only the second of two records has reached the disk."""
    start = log.begin(b"the log.", 5)
    lost = log.append(start, start.offset, b"lost", flush=False)
    log.append(lost, lost.offset, b"behind", flush=False)
    kept = log.append(start, start.offset, b"kept", flush=False)
    found = log.read_next(start)
    assert found is not None
    assert (found.position, found.body) == (kept, b"kept")
    assert log.read_next(kept) is None


def test_an_unpublished_record_is_not_read_after_a_commit_that_bypassed_the_log(
    log: RedoLog,
) -> None:
    """A commit straight into the tables takes a number and leaves the end of the log."""
    start = log.begin(b"the log.", 5)
    log.append(start, start.offset, b"unpublished", flush=False)
    assert log.read_next(start._replace(lsn=start.lsn + 1)) is None


def test_a_record_of_another_log_is_not_read(log: RedoLog) -> None:
    start = log.begin(b"the log.", 5)
    log.append(start, start.offset, b"body", flush=False)
    log.id = b"another."
    assert log.read_next(start) is None


def test_the_log_of_another_store_is_refused_though_its_numbers_fit(tmp_path: Path) -> None:
    for name in ("one", "other"):
        engine = LmdbEngine(str(tmp_path / name))
        # The other log has begun at the same number, and was never flushed since.
        numbered(engine, 8 if name == "one" else DIRECT)
        copy_files(engine, tmp_path / f"killed {name}")
        engine.close()
    shutil.copyfile(tmp_path / "killed other" / LOG_FILE, tmp_path / "killed one" / LOG_FILE)
    with pytest.raises(CorruptionError, match="log of another store"):
        read_copy(tmp_path / "killed one")


def test_the_log_of_another_store_next_to_a_closed_one_is_ignored(tmp_path: Path) -> None:
    for name in ("one", "other"):
        engine = LmdbEngine(str(tmp_path / name))
        numbered(engine, 8 if name == "one" else 3)
        if name == "other":
            copy_files(engine, tmp_path / "killed")
        engine.close()
    shutil.copyfile(tmp_path / "killed" / LOG_FILE, tmp_path / "one" / LOG_FILE)
    assert prefix_of(tmp_path / "one") == 8


def test_a_lost_log_can_be_discarded_unless_another_process_writes(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    numbered(engine, 3)
    engine.apply_log()
    numbered_from(engine, 3)
    place = copy_files(engine, tmp_path / "killed")
    (place / LOG_FILE).unlink()
    assert prefix_of(place) is None
    LmdbEngine(str(place), discard_log=True).close()
    assert prefix_of(place) == 3
    code = "import sys; from casstore.engine.lmdb.engine import LmdbEngine as E\n"
    code += "E(sys.argv[1], discard_log=True)"
    refused = subprocess.run(
        [sys.executable, "-c", code, engine.path], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert BusyError.__name__ in refused.stderr
    assert value_of(engine) == b"0003"


# --- errors of the disk -------------------------------------------------------------------------


def failing(error: int, times: int, call: Callable[..., object]) -> Callable[..., object]:
    """A call that fails a number of times, then works."""
    left = [times]

    def fail(*arguments: object, **options: object) -> object:
        if left[0]:
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        return call(*arguments, **options)

    return fail


def test_a_commit_whose_flush_failed_is_never_visible(
    tmp_path: Path, engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(engine, 6)
    monkeypatch.setattr(redo_log, "_WRITE_AND_FLUSH", 0)
    monkeypatch.setattr(redo_log, "flush_file", failing(errno.EIO, 1, files.flush_file))
    with pytest.raises(StorageError):
        put(engine, b"failed")
    assert value_of(engine) == b"0005"
    assert read_copy(copy_files(engine, tmp_path / "killed")) == b"0005"
    put(engine, b"later")
    assert read_copy(copy_files(engine, tmp_path / "later")) == b"later"


def test_a_failed_flush_of_earlier_commits_stops_the_store(
    tmp_path: Path, engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what it could not write and reports the next flush as done.

    A later commit would be acknowledged although one that it follows is not on the disk.
    """
    numbered(engine, 6)
    assert engine._behind is not None
    monkeypatch.setattr(engine._behind, "_work", lambda: 60.0)
    put(engine, b"relaxed", durable=False)
    with monkeypatch.context() as patch:
        patch.setattr(redo_log, "flush_file", failing(errno.EIO, 1, files.flush_file))
        with pytest.raises(StorageError, match="could not be flushed"):
            put(engine, b"failed", durable=True)
    with pytest.raises(StorageError, match="open it again"):
        put(engine, b"refused", durable=True)
    assert value_of(engine) == b"relaxed"


def test_a_commit_that_could_not_be_published_never_happens(
    tmp_path: Path, engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is in the log, flushed, when the call fails: recovery must not find it there."""
    numbered(engine, 6)
    with monkeypatch.context() as patch:
        # Not a descriptor that can be written to.
        patch.setattr(RedoLog, "publication", lambda log, lsn, *, flushed: (-1, b"", 0))
        with pytest.raises(StorageError):
            put(engine, b"failed")
    assert value_of(engine) == b"0005"
    assert read_copy(copy_files(engine, tmp_path / "killed")) == b"0005"
    put(engine, b"later")
    assert read_copy(copy_files(engine, tmp_path / "later")) == b"later"


def test_a_commit_that_can_neither_be_flushed_nor_cancelled_stops_the_store(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(engine, 6)
    with monkeypatch.context() as patch:
        patch.setattr(redo_log, "_WRITE_AND_FLUSH", 0)
        patch.setattr(redo_log, "flush_file", failing(errno.EIO, 2, files.flush_file))
        with pytest.raises(StorageError, match="may or may not have happened"):
            put(engine, b"unknown")
    with pytest.raises(StorageError, match="open it again"):
        put(engine, b"refused")
    assert value_of(engine) == b"0005"


def test_a_log_that_cannot_grow_is_applied_instead(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is nearly full a longer log could perhaps not be applied."""
    numbered(engine, 3)
    monkeypatch.setattr(memtables, "APPLY_BYTES", 1 << 30)
    monkeypatch.setattr(RedoLog, "_is_disk_low", lambda log, wanted_bytes: True)
    for number in range(12):
        put(engine, os.urandom(100_000), b"%d" % number)
    assert log_of(engine).size_bytes == redo_log.FIRST_LOG_BYTES
    assert len(engine.scan_rows(KEY.table)) == 12 + 3 + 1


def test_the_log_never_exceeds_log_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memtables, "APPLY_BYTES", 1 << 30)
    for log_bytes in (1 << 20, 4 << 20):
        path = tmp_path / str(log_bytes)
        with casstore.open(path, "relaxed", log_bytes=log_bytes) as store:
            for _ in range(80):
                store.put_blob(os.urandom(100_000))
            assert (path / LOG_FILE).stat().st_size == log_bytes
    with pytest.raises(InvalidInputError, match="log_bytes"):
        casstore.open(tmp_path / "none", log_bytes=1000)


# --- what a durable call promises ---------------------------------------------------------------


def test_a_full_commit_flushes_the_relaxed_ones_before_it(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(engine, 6)
    monkeypatch.setattr(engine, "_work_behind", lambda: 60.0)
    log = log_of(engine)
    flushes: list[int] = []
    flush = files.flush_file

    def count(number: int) -> None:
        flushes.append(number)
        flush(number)

    monkeypatch.setattr(redo_log, "flush_file", count)
    put(engine, b"relaxed", durable=False)
    assert log.lsns[FLUSHED] < log.lsns[PUBLISHED]
    put(engine, b"full", durable=True)
    # Not only its own bytes.
    assert flushes == [log.fileno()]
    assert log.lsns[FLUSHED] == log.lsns[PUBLISHED]


def test_a_full_call_that_writes_nothing_flushes_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        assert engine._behind is not None
        monkeypatch.setattr(engine._behind, "_work", lambda: 60.0)
        numbered(engine, 4)
        log = log_of(engine)

        turn = Commit(append=[NodeDraft("a", "b")], turn="t")
        store.session("s").commit(turn)
        assert log.lsns[FLUSHED] < log.lsns[PUBLISHED]
        assert store.session("s").commit(turn._replace(durability="full")).replayed
        assert log.lsns[FLUSHED] == log.lsns[PUBLISHED]

        digest = store.put_blob(b"twice")
        assert log.lsns[FLUSHED] < log.lsns[PUBLISHED]
        with casstore.open(tmp_path / "store", "full") as waiting:
            assert waiting.put_blob(b"twice") == digest
        assert log.lsns[FLUSHED] == log.lsns[PUBLISHED]


def test_objects_in_the_memtable_and_in_the_tables_are_listed_once(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    numbered(engine, 6)
    code = (
        "import sys; from casstore.engine.lmdb.engine import LmdbEngine\n"
        "engine = LmdbEngine(sys.argv[1]); print(engine._env.recent.apply_concurrently())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, engine.path], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert len(engine._env.recent.memtable.entries) == 6 - DIRECT
    assert [info.id for info in all_objects(engine)] == [6, 5, 4, 3, 2, 1]


def test_a_write_of_many_objects_may_be_longer_than_a_slab(engine: LmdbEngine) -> None:
    """A slab that claims more than the longest object is taken for damage."""
    objects = [new_blob(b"%5d" % at + bytes(1 << 20)) for at in range(40)]
    put(engine, b"before")
    engine.write(Write(objects=objects))
    put(engine, b"after")
    assert [found and found.data for found in engine.get_many([one.digest for one in objects])] == [
        one.data for one in objects
    ]


KILLED_AFTER_ITS_TRANSACTION = """
import os, signal, sys
from casstore.engine.lmdb import recent, verification
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write
from casstore.testing.engine_fixtures import new_blob

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

engine = LmdbEngine(sys.argv[1])
recent.Recent.replace_memtable = die
# Too long for the log: it goes straight into the tables, and is never published.
engine.write(Write(objects=[new_blob(bytes(2 << 20))]))
"""


def test_a_commit_does_not_reuse_a_sequence_number_that_a_killed_process_applied(
    tmp_path: Path, engine: LmdbEngine
) -> None:
    numbered(engine, 6)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER_ITS_TRANSACTION, engine.path], cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    put(engine, b"acknowledged")
    assert value_of(engine) == b"acknowledged"
    assert read_copy(copy_files(engine, tmp_path / "killed")) == b"acknowledged"


def test_the_memtable_keeps_entries_while_another_process_has_applied_later_commits(
    engine: LmdbEngine,
) -> None:
    """The next free id and the end of the log are known only after reading its commits."""
    numbered(engine, 6)
    recent = engine._env.recent
    before = recent.memtable
    recent._forget(before.last._replace(lsn=before.last.lsn + 1))
    assert recent.memtable is before
    recent._forget(before.last)
    assert not recent.memtable.entries


def test_a_stale_memtable_is_not_combined_with_tables_that_hold_later_commits(
    engine: LmdbEngine,
) -> None:
    """A reader takes the memtable first; the log may be applied before it reads the tables."""
    numbered(engine, 6)
    recent = engine._env.recent
    before = recent.memtable
    assert recent.apply_concurrently()
    with engine._env.reading() as txn:
        assert recent.view(txn, before) is not None
    numbered(engine, 6)
    assert recent.apply_concurrently()
    with engine._env.reading() as txn:
        assert recent.view(txn, before) is None


BEGINS_THE_LOG = """
import os, sys
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write

engine = LmdbEngine(sys.argv[1])
for number in range(6):
    engine.write(Write(rows=[PutRow("records", b"key", b"%04d" % number)]))
os._exit(0)
"""


def test_a_reader_that_found_no_log_in_use_reads_the_one_that_another_process_began(
    tmp_path: Path,
) -> None:
    with_log = tmp_path / "store"
    LmdbEngine(str(with_log)).close()
    reader = LmdbEngine(str(with_log), readonly=True)
    try:
        assert value_of(reader) is None
        subprocess.run([sys.executable, "-c", BEGINS_THE_LOG, with_log], cwd=ROOT, check=True)
        assert value_of(reader) == b"0005"
    finally:
        reader.close()


def test_the_log_announces_durably_what_is_about_to_be_applied(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a power loss undid the announcement, the tables would be newer than the log says."""
    numbered(engine, 6)
    flushed: list[int] = []
    real = os.pwritev

    def pwritev(number: int, parts: list[bytes], offset: int, flags: int = 0) -> int:
        if offset == redo_log._APPLYING_AT:
            assert flags & os.RWF_DSYNC
            flushed.append(int.from_bytes(parts[0], "little"))
        return real(number, parts, offset, flags)

    monkeypatch.setattr(os, "pwritev", pwritev)
    last = engine._env.recent.memtable.last.lsn
    assert engine._env.recent.apply_concurrently()
    assert flushed == [last]


def test_a_memtable_view_is_unchanged_by_later_stores_and_deletes() -> None:
    blob = new_blob(b"one")
    memtable = Memtable(RecoveryPoint(True, b"", Position(0, 4096, b"")), 7)
    before = memtable.view()
    memtable.add(4096, Position(1, 8192, b""), BatchEntry(1, 7, [blob], [[]], [], [], []))
    stored = memtable.view()
    memtable.add(
        8192, Position(2, 12288, b""), BatchEntry(2, 8, [], [], [], [(blob.digest, 7)], [])
    )
    assert isinstance(before.find_id(blob.digest), Unchanged)
    assert stored.find_id(blob.digest) == 7
    assert memtable.view().find_id(blob.digest) is None
    assert memtable.newest_id(blob.digest) is None
    memtable.add(12288, Position(3, 16384, b""), BatchEntry(3, 8, [blob], [[]], [], [], []))
    assert memtable.newest_id(blob.digest) == 8
    assert [view.find_id(blob.digest) for view in (stored, memtable.view())] == [7, 8]


def test_a_memtable_view_reads_only_the_rows_in_the_range_of_a_scan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 scans, one for each checkpoint of a thread, each examined every row of the memtable."""
    memtable = Memtable(RecoveryPoint(True, b"", Position(0, 4096, b"")), 1)
    keys = [b"%03d" % number for number in range(200)]

    def add(lsn: int, rows: list[tuple[str, bytes, bytes | None]]) -> None:
        memtable.add(4096, Position(lsn, 8192, b""), BatchEntry(lsn, 1, [], [], rows, [], []))

    add(1, [("heads", key, b"one") for key in reversed(keys)])
    found: list[bytes] = []
    whole = MemtableView.find_row

    def find_row(self: MemtableView, table: str, key: bytes) -> bytes | Unchanged | None:
        found.append(key)
        return whole(self, table, key)

    monkeypatch.setattr(MemtableView, "find_row", find_row)
    before = memtable.view()
    assert before.changed_between("heads", b"100", b"102", reverse=False) == [
        (b"100", b"one"), (b"101", b"one"),
    ]  # fmt: skip
    assert found == [b"100", b"101"]
    # Rows of later commits, also of other tables, are in the range of later views only.
    add(2, [("heads", b"1005", b"two"), ("pins", b"1006", b"two"), ("heads", b"101", None)])
    after = memtable.view()
    assert after.changed_between("heads", b"100", b"102", reverse=True) == [
        (b"101", None), (b"1005", b"two"), (b"100", b"one"),
    ]  # fmt: skip
    assert len(before.changed_between("heads", b"", None, reverse=False)) == 200
    assert len(after.changed_between("heads", b"", None, reverse=False)) == 201


@pytest.mark.parametrize("slabs", [1, 64])
def test_a_store_whose_log_is_applied_while_it_is_verified_is_sound(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch, slabs: int
) -> None:
    """The number of objects and the index were read from two states of the tables, and the log was
    applied between them: a sound store was called damaged.
    """
    direct = [new_blob(b"direct %d" % number) for number in range(DIRECT)]
    for blob in direct:
        engine.write(Write(objects=[blob]))
    logged = [new_blob(b"logged %d" % number) for number in range(30)]
    engine.write(Write(objects=logged, deletes=[direct[0].digest]))
    verify_slab = verification._verify_slab

    def apply_after(*arguments: object) -> int:
        proven = verify_slab(*arguments)  # type: ignore[arg-type]
        if isinstance(arguments[3], partial):
            # A slab of the tables, and not one of the log.
            applier = threading.Thread(target=engine._env.apply_log)
            applier.start()
            applier.join()
        return proven

    monkeypatch.setattr(verification, "_BATCH", slabs)
    monkeypatch.setattr(verification, "_verify_slab", apply_after)
    assert engine.verify() == len(direct) + len(logged) - 1
