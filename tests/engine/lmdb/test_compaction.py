"""Compacting: the same store in a shorter file, or the old one untouched."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

import casstore
from casstore.engine.lmdb import compaction, packing
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.page_scan import read_extent
from casstore.engine.protocol import TABLES, Write
from casstore.errors import (
    BusyError,
    CorruptionError,
    InvalidInputError,
    StorageError,
    StoreNotFoundError,
)
from casstore.maintenance import gc
from casstore.maintenance.compact import compact
from casstore.maintenance.progress import Step
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

pytestmark = pytest.mark.usefixtures("slab_a_commit")

ROOT = Path(__file__).parents[3]


def engine_of(store: Store) -> LmdbEngine:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


def fill(path: Path, **options: Any) -> None:
    """A store with sessions, one of them dropped and collected, and rows of several kinds."""
    source = random.Random(7)
    with casstore.open(path, "relaxed", **options) as store:
        for turn in range(60):
            for name in ("a", "b", "c"):
                text = " ".join(str(source.randrange(10_000)) for _ in range(200))
                draft = NodeDraft(f"n{turn}", {"role": "user", "content": text})
                store.session(name).commit(Commit(append=[draft]))
        store.tag("kept", store.put_blob(source.randbytes(300_000)))
        store.fork("a", "a2")
        store.delete_session("b")
        gc.collect(store, grace_ms=0)
        for turn in range(60, 70):
            draft = NodeDraft(f"n{turn}", {"role": "user", "content": f"late {turn}"})
            store.session("c").commit(Commit(append=[draft]))


def everything(store: Store) -> tuple[Any, ...]:
    """Objects with their ids, rows, and what the store says of itself."""
    env = engine_of(store)._env
    rows: dict[str, Any] = {table: store.engine.scan_rows(table, limit=10**6) for table in TABLES}
    with env.reading() as txn:
        for name in ("collection", "touches"):
            database = env.databases[name]
            rows[name] = [(bytes(key), bytes(value)) for key, value in txn.cursor(db=database)]
        meta = {bytes(key): bytes(value) for key, value in txn.cursor(db=env.meta)}
    meta.pop(b"packed_to", None)
    meta.pop(b"collected", None)  # counted in transactions, which begin anew
    infos = engine_of(store).scan_objects(limit=1_000_000)
    found = store.engine.get_many([info.digest for info in infos])
    objects = [
        (info.id, info.digest, info.children, item) for info, item in zip(infos, found, strict=True)
    ]
    return rows, meta, objects


def snapshot(path: Path) -> tuple[Any, ...]:
    with casstore.open(path, "relaxed") as store:
        return everything(store)


@pytest.mark.parametrize("version", [0, 1])
def test_compact_keeps_all_content_in_a_shorter_file(tmp_path: Path, version: int) -> None:
    path = tmp_path / "s"
    fill(path, lmdb_version=version, map_bytes=1 << 28)
    before = snapshot(path)
    old = read_extent(str(path / "data.mdb"))
    report = compact(path)
    new = read_extent(str(path / "data.mdb"))
    assert report.file_bytes_before == old.file_bytes
    assert report.file_bytes_after == new.file_bytes == (path / "data.mdb").stat().st_size
    assert report.file_bytes_after < 0.7 * report.file_bytes_before
    assert report.slabs_after < 5
    assert (new.lmdb_version, new.map_bytes) == (version, old.map_bytes) == (version, 1 << 28)
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.mdb", "locks", "reserve"]
    with casstore.open(path, verify=True) as store:
        assert everything(store) == before
        assert report.objects == len(before[2])
        # Ids go on where they were.
        newest = max(info.id for info in engine_of(store).scan_objects())
        store.put_blob(b"the next")
        assert max(info.id for info in engine_of(store).scan_objects()) > newest
    again = compact(path)
    assert again.file_bytes_after <= again.file_bytes_before
    assert again.objects_dropped == 0


def test_compact_removes_the_bytes_of_deleted_objects_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    secret = random.Random("secret").randbytes(64)
    with casstore.open(path, "relaxed") as store:
        kept = store.put_many([random.Random(n).randbytes(1_000) for n in range(40)])
        for n, digest in enumerate(kept):
            store.tag(f"t{n}", digest)
        gone = store.put_many([secret, *[random.Random(n).randbytes(90) for n in range(9)]])
        # Packed already, and so little of it that packing would leave it.
        store.pack(min_age_ms=0)
        store.engine.write(Write(deletes=gone))
    assert secret in (path / "data.mdb").read_bytes()
    report = compact(path)
    assert report.objects_dropped == 10
    assert secret not in (path / "data.mdb").read_bytes()
    with casstore.open(path, "relaxed", verify=True) as store:
        assert len(store.get_many(kept)) == 40


def test_commits_since_a_collection_are_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with casstore.open(path, "relaxed") as store:
        before = engine_of(store).commits_since_collection()
        assert before > 0
    compact(path)
    with casstore.open(path, "relaxed") as store:
        assert engine_of(store).commits_since_collection() == before
        store.put_blob(b"one more")
        assert engine_of(store).commits_since_collection() == before + 1


def test_compact_handles_an_empty_store_and_one_with_only_dead_objects(tmp_path: Path) -> None:
    path = tmp_path / "s"
    casstore.open(path).close()
    assert compact(path).objects == 0
    with casstore.open(path, "relaxed") as store:
        digests = [store.put_blob(b"%d" % n) for n in range(20)]
        store.engine.write(Write(deletes=digests))
    compact(path)
    with casstore.open(path, "relaxed", verify=True) as store:
        store.put_blob(b"again")
        assert [info.id for info in engine_of(store).scan_objects()] == [21]


def test_compact_keeps_only_dictionaries_that_slabs_use(tmp_path: Path) -> None:
    path = tmp_path / "s"
    source = random.Random(3)
    words = [source.randbytes(6).hex() for _ in range(500)]
    with casstore.open(path, "relaxed", auto_train=False) as store:
        engine = engine_of(store)
        for generation in range(2):
            for _ in range(400):
                text = " ".join(source.choice(words) for _ in range(150))
                store.put_value({"generation": generation, "text": text})
            engine._compressor.use(engine._shelf.add(words[generation].encode() * 900))
        store.put_blob(b"with the newest " * 300)
    before = snapshot(path)
    report = compact(path)
    assert report.dictionaries_dropped == 1
    with casstore.open(path, "relaxed", verify=True) as store:
        assert everything(store) == before
        assert engine_of(store)._shelf.newest() == 2


def test_mode_of_the_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    os.chmod(path / "data.mdb", 0o640)
    compact(path)
    assert stat.S_IMODE((path / "data.mdb").stat().st_mode) == 0o640


# --- nobody else -------------------------------------------------------------------------

_HOLDER = """
import sys, casstore
with casstore.open(sys.argv[1], sys.argv[2], sys.argv[3] == "readonly"):
    print("open", flush=True)
    sys.stdin.read()
"""


def hold(path: Path, *arguments: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    return holder


def let_go(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.close()
    holder.wait()
    holder.stdout.close()


@pytest.mark.parametrize(
    "how", [("full", "write"), ("relaxed", "write"), ("full", "readonly")], ids="-".join
)
def test_a_store_that_another_process_has_open_is_refused(
    tmp_path: Path, how: tuple[str, str]
) -> None:
    path = tmp_path / "s"
    fill(path)
    before = (path / "data.mdb").stat().st_ino
    holder = hold(path, *how)
    try:
        with pytest.raises(BusyError, match="is open"):
            compact(path)
    finally:
        let_go(holder)
    assert (path / "data.mdb").stat().st_ino == before
    compact(path)
    assert (path / "data.mdb").stat().st_ino != before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_that_this_process_has_open_is_refused(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "s"
    fill(path)
    with casstore.open(path, readonly=readonly), pytest.raises(BusyError, match="is open"):
        compact(path)
    compact(path)


def test_compact_waits_with_wait_s_until_the_other_process_closes_the_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    holder = hold(path, "full", "write")
    release = threading.Timer(0.2, let_go, (holder,))
    release.start()
    try:
        assert compact(path, wait_s=60).objects > 0
    finally:
        release.join()


def test_a_file_that_plain_lmdb_has_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    program = (
        "import lmdb, sys\nenv = lmdb.open(sys.argv[1], map_size=1 << 28, create=False)\n"
        "print('open', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    try:
        with pytest.raises(BusyError, match="is open"):
            compact(path)
    finally:
        let_go(holder)


def test_opening_during_a_compaction_waits_and_finds_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path)
    before = snapshot(path)
    old_inode = (path / "data.mdb").stat().st_ino
    program = (
        "import casstore, os, sys\nprint('starting', flush=True)\n"
        "with casstore.open(sys.argv[1]) as store:\n"
        "    store.put_blob(b'written by the one that waited')\n"
        "    print(os.fstat(store.engine._env.data_handle).st_ino, flush=True)"
    )
    openers: list[subprocess.Popen[str]] = []

    def open_meanwhile(phase: str, done: int, total: int) -> None:
        if phase == "compare" and not openers:
            opener = subprocess.Popen(
                [sys.executable, "-c", program, str(path)],
                stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )  # fmt: skip
            openers.append(opener)
            assert opener.stdout is not None
            assert opener.stdout.readline() == "starting\n"
            # Give it every chance to come in between.
            with pytest.raises(subprocess.TimeoutExpired):
                opener.wait(0.3)

    compaction.compact(str(path), wait_s=0, tell=open_meanwhile)
    said, _ = openers[0].communicate()
    assert openers[0].returncode == 0
    assert int(said) == (path / "data.mdb").stat().st_ino != old_inode
    with casstore.open(path, "relaxed", verify=True) as store:
        assert store.get_blob(casstore.Digest.of_blob(b"written by the one that waited"))
        assert everything(store)[2][1:] == before[2]


@pytest.mark.parametrize("moment", [("compare", 1), ("verify", 0)])
def test_a_write_that_bypasses_the_locks_makes_compact_keep_the_old_file(
    tmp_path: Path, moment: tuple[str, int]
) -> None:
    path = tmp_path / "s"
    fill(path)
    before = (path / "data.mdb").stat().st_ino
    program = (
        "import lmdb, sys\n"
        "env = lmdb.open(sys.argv[1], map_size=1 << 28, max_dbs=40, create=False)\n"
        "with env.begin(write=True) as txn:\n"
        "    txn.put(b'k', b'v', db=env.open_db(b'pins', txn=txn))\n"
    )

    def write_past(phase: str, done: int, total: int) -> None:
        if (phase, done) == moment:
            subprocess.run([sys.executable, "-c", program, str(path)], check=True)

    with pytest.raises(BusyError, match="was written to"):
        compaction.compact(str(path), wait_s=0, tell=write_past)
    assert (path / "data.mdb").stat().st_ino == before
    assert not (path / "compact").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_forked_during_compact_does_not_block_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    go_on, release = os.pipe()
    children: list[int] = []

    def fork(phase: str, done: int, total: int) -> None:
        if phase == "compare" and not children:
            child = os.fork()
            if not child:
                os.close(release)
                os.read(go_on, 1)
                os._exit(0)
            children.append(child)

    compaction.compact(str(path), wait_s=0, tell=fork)
    program = "import casstore, sys; casstore.open(sys.argv[1]).close()"
    try:
        subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=True, timeout=20)
    finally:
        os.close(release)
        os.waitpid(children[0], 0)
        os.close(go_on)


def test_an_unremovable_compact_directory_does_not_block_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path)
    (path / "compact").mkdir()

    def refuse(place: str) -> None:
        raise PermissionError(13, "not yours")

    monkeypatch.setattr("shutil.rmtree", refuse)
    casstore.open(path).close()
    with pytest.raises(StorageError):
        compact(path)
    assert (path / "compact").exists()
    monkeypatch.undo()
    compact(path)


# --- failing ----------------------------------------------------------------------------


def untouched(path: Path) -> Callable[[], bool]:
    """Is the data file still the very same?"""
    inode, content = (path / "data.mdb").stat().st_ino, (path / "data.mdb").read_bytes()
    return lambda: (
        (path / "data.mdb").stat().st_ino == inode
        and (path / "data.mdb").read_bytes() == content
        and not (path / "compact").exists()
    )


def test_a_full_disk_is_a_typed_error_and_the_store_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    same = untouched(path)
    program = (
        "import resource, sys\nfrom casstore.errors import StorageFullError\n"
        "from casstore.maintenance.compact import compact\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
        "try:\n    compact(sys.argv[1])\n"
        "except StorageFullError as exc:\n    print('full')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.stdout == "full\n", done.stderr
    assert same()
    compact(path)


def test_a_damaged_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with casstore.open(path, "relaxed") as store:
        env = engine_of(store)._env
        with env.write_lock, env.begin_write() as txn:
            cursor = txn.cursor(db=env.slabs)
            cursor.first()
            key, value = cursor.item()
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=env.slabs)
    same = untouched(path)
    with pytest.raises(CorruptionError):
        compact(path)
    assert same()


def test_a_damaged_row_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with casstore.open(path, "relaxed") as store:
        env = engine_of(store)._env
        with env.write_lock, env.begin_write() as txn:
            cursor = txn.cursor(db=env.tables["heads"])
            cursor.first()
            key, value = cursor.item()
            txn.put(key, bytes([value[0] ^ 1]) + value[1:], db=env.tables["heads"])
    same = untouched(path)
    with pytest.raises(CorruptionError):
        compact(path)
    assert same()


def test_compact_stops_if_an_object_is_lost_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    fill(path)
    same = untouched(path)
    rewritten = packing.rewritten
    lost: list[bytes] = []

    def lose_one(*arguments: Any) -> list[tuple[bytes, bytes]]:
        found = rewritten(*arguments)
        if found and not lost:
            lost.append(found[0][0])
            return found[1:]
        return found

    monkeypatch.setattr(packing, "rewritten", lose_one)
    with pytest.raises(CorruptionError):
        compact(path)
    assert lost
    assert same()


@pytest.mark.parametrize("table", ["heads", "index"])
def test_compact_stops_if_a_row_is_lost_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    path = tmp_path / "s"
    fill(path)
    same = untouched(path)
    compare = compaction._compare

    def drop_one_first(old: Environment, new: Environment, tell: Any) -> None:
        database = new.index if table == "index" else new.tables[table]
        with new.write_lock, new.begin_write() as txn:
            cursor = txn.cursor(db=database)
            assert cursor.last()
            cursor.delete()
        compare(old, new, tell)

    monkeypatch.setattr(compaction, "_compare", drop_one_first)
    with pytest.raises(CorruptionError, match=f"table {table}"):
        compact(path)
    assert same()


def test_raising_from_progress_stops_compact_and_leaves_the_store_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    before = snapshot(path)
    steps: list[Step] = []
    compact(path, progress=steps.append)
    assert {step.phase for step in steps} >= {"copy", "compare", "verify"}
    assert all(step.done <= (step.total or 0) for step in steps)
    for stop_at in range(0, len(steps), max(1, len(steps) // 5)):
        same = untouched(path)
        left = [stop_at]

        def stop(step: Step, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compact(path, progress=stop)
        assert same()
    assert snapshot(path) == before


def test_the_next_open_removes_the_files_of_a_killed_compact(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    for leave in (lambda: casstore.open(path).close(), lambda: compact(path)):
        (path / "compact" / "locks").mkdir(parents=True)
        (path / "compact" / "data.mdb").write_bytes(b"half of a file")
        # A reader changes nothing.
        casstore.open(path, readonly=True).close()
        assert (path / "compact").exists()
        leave()
        assert not (path / "compact").exists()


def test_unflushed_writes_of_a_killed_process_are_carried_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    program = (
        "import casstore, os, sys\nstore = casstore.open(sys.argv[1], 'relaxed')\n"
        "store.put_many([b'one'])\nstore.put_many([b'two'])\n"
        "store.put_blob(b'not flushed')\nos._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, check=False)
    assert b"not flushed" in (path / "redo.log").read_bytes()
    compact(path)
    assert not (path / "redo.log").exists()
    with casstore.open(path, verify=True) as store:
        assert store.get_blob(casstore.Digest.of_blob(b"not flushed")) == b"not flushed"


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        compact(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError):
        compact(tmp_path, wait_s=-1)
    fill(tmp_path / "s")
    (tmp_path / "s" / "data.mdb").rename(tmp_path / "elsewhere.mdb")
    (tmp_path / "s" / "data.mdb").symlink_to(tmp_path / "elsewhere.mdb")
    with pytest.raises(InvalidInputError, match="link"):
        compact(tmp_path / "s")


def test_an_open_lmdb_environment_holds_the_lock_that_compact_tests(tmp_path: Path) -> None:
    """What tells that plain LMDB has the file open rests on how LMDB locks."""
    env = lmdb.open(str(tmp_path / "e"))
    program = (
        "import fcntl, sys\nwith open(sys.argv[1], 'r+b') as file:\n"
        "    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)"
    )
    place = str(tmp_path / "e" / "lock.mdb")
    tried = [sys.executable, "-c", program, place]
    assert b"BlockingIOError" in subprocess.run(tried, capture_output=True, check=False).stderr
    env.close()
    assert subprocess.run(tried, capture_output=True, check=False).returncode == 0
