"""A process is killed inside LMDB's commit, while another has the store open.

LMDB writes the meta page of a transaction first, and then its number into lock.mdb, which all
processes map. A process killed in between leaves a number that is too low: read transactions do not
see the last transaction, until a write transaction begins and corrects the number.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import StorageError
from casstore.testing.engine_fixtures import new_blob

ROOT = Path(__file__).parents[3]
KEY = RowKey("records", b"key")

KILLED = """
import os, signal, struct, sys
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write
from casstore.testing.engine_fixtures import new_blob

def numbers():
    return struct.unpack("<32Q", os.pread(lock, 256, 0))

def die():
    # As if this process had been killed before LMDB wrote the number: it holds the write lock, and
    # the number is that of the transaction before.
    last = env.last_transaction()
    places = [n for n in range(32) if numbers()[n] == last == before[n] + 1]
    held = env.handle.begin(write=True)
    os.pwrite(lock, struct.pack("<Q", last - 1), 8 * places[0])
    assert len(places) == 1
    os.kill(os.getpid(), signal.SIGKILL)

engine = LmdbEngine(sys.argv[1])
env = engine._env
lock = os.open(os.path.join(engine.path, "lock.mdb"), os.O_RDWR)
if sys.argv[2] == "begins the log":
    engine.write(Write(rows=[PutRow("records", b"other", b"acknowledged")]))
before = numbers()
# Called right after each commit to the tables.
env.cover = die
if sys.argv[2] == "maintenance":
    with env.writing():
        pass
# Too long for the log: it goes straight into the tables.
blob = new_blob(bytes(2 << 20))
engine.write(Write(objects=[blob], rows=[PutRow("records", b"killed", b"unknown")]))
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "store"))
    yield engine
    engine.close()


def put(engine: LmdbEngine, value: bytes) -> None:
    rows = [PutRow(KEY.table, KEY.key, value)]
    engine.write(Write(objects=[new_blob(value * 20)], rows=rows))


def value_of(engine: LmdbEngine, key: bytes = KEY.key) -> bytes | None:
    return engine.get_rows([RowKey(KEY.table, key)])[0]


@pytest.mark.parametrize(
    ("earlier", "killed_in"),
    [
        (0, "a commit without a log"),
        (1, "a commit without a log"),
        (0, "begins the log"),
        (6, "a commit next to a log"),
        (6, "maintenance"),
    ],
)
def test_a_commit_after_one_that_a_killed_process_hid_is_not_lost(
    engine: LmdbEngine, earlier: int, killed_in: str
) -> None:
    for number in range(earlier):
        put(engine, b"%d" % number)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, engine.path, killed_in], cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    for value in (b"first", b"second", b"third"):
        put(engine, value)
        assert value_of(engine) == value
        # What the killed process committed stays as well; in maintenance it had not come so far.
        assert value_of(engine, b"killed") == (None if killed_in == "maintenance" else b"unknown")
        engine.apply_log()
        assert value_of(engine) == value
    if killed_in == "begins the log":
        assert value_of(engine, b"other") == b"acknowledged"
    engine.verify()
    engine.close()
    again = LmdbEngine(engine.path, verify=True)
    try:
        assert value_of(again) == b"third"
    finally:
        again.close()


def test_nothing_is_written_over_commits_that_the_process_has_not_read(engine: LmdbEngine) -> None:
    """Its own entry would have the LSN of one of them, and be left out."""
    for number in range(6):
        put(engine, b"%d" % number)
    env = engine._env
    stale = env.recent.memtable.view().memtable.after(env.recent.memtable.recovery_point.applied)
    put(engine, b"later")
    engine.apply_log()
    current, env.recent.memtable = env.recent.memtable, stale
    with env.tables_lock, env.begin_write() as txn, pytest.raises(StorageError, match="not read"):
        env.recent.apply_into(txn)
    env.recent.memtable = current
    put(engine, b"last")
    assert value_of(engine) == b"last"
