"""Packing: small slabs become large ones, and nobody can tell but by size and speed."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import casstore
from casstore.engine.compression import Compressor
from casstore.engine.lmdb import packing
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.environment import Environment
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PackReport, Write
from casstore.errors import InvalidInputError, ReadOnlyError
from casstore.format.digest import Digest
from casstore.session.data import UNFENCED, Commit, NodeDraft
from casstore.store import Store

ROOT = Path(__file__).parent.parent


def engine_of(store: Store) -> LmdbEngine:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


def stored_slabs(store: Store) -> list[tuple[bytes, bytes]]:
    env = engine_of(store)._env
    with env.reading() as txn:
        return [(bytes(key), bytes(value)) for key, value in txn.cursor(db=env.slabs)]


def grow(store: Store, turns: int, name: str = "s") -> list[str]:
    """A session committed turn by turn; the texts of its nodes."""
    source = random.Random(name)
    texts = [f"{n} " + "word " * source.randrange(1, 600) for n in range(turns)]
    session = store.session(name)
    for n, text in enumerate(texts):
        draft = NodeDraft(f"n{n}", {"role": "user", "content": text, "n": n})
        session.commit(Commit(append=[draft], lease=UNFENCED))
    return texts


def contents(store: Store) -> dict[bytes, tuple[int, bytes]]:
    infos = engine_of(store).scan_objects(limit=1_000_000)
    found = store.engine.get_many([info.digest for info in infos])
    return {
        info.digest: (item.kind, item.data)
        for info, item in zip(infos, found, strict=True)
        if item is not None
    }


def test_everything_reads_back_from_fewer_and_smaller_slabs(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        texts = grow(store, 300)
        before, infos = contents(store), engine_of(store).scan_objects(limit=1_000_000)
        old = stored_slabs(store)
        report = store.pack()
        new = stored_slabs(store)
        assert report.slabs_before - report.slabs_after == len(old) - len(new)
        assert report.bytes_before - report.bytes_after == (
            sum(len(value) for _, value in old) - sum(len(value) for _, value in new)
        )
        assert len(new) < len(old) / 5
        assert report.bytes_after < 0.8 * report.bytes_before
        assert report.objects_dropped == 0
        # What was decoded before is no proof of what is stored now.
        engine_of(store)._cache.clear()
        assert contents(store) == before
        after = engine_of(store).scan_objects(limit=1_000_000)
        assert [info._replace(stored_at_ms=0) for info in after] == [
            info._replace(stored_at_ms=0) for info in infos
        ]
        assert [node.payload["content"] for node in store.session("s").nodes()] == texts
        assert engine_of(store).verify() == len(before)
    with casstore.open(tmp_path / "s", verify=True) as store:
        assert contents(store) == before


def test_a_cached_slab_that_was_joined_since_still_serves(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 50)
        before = contents(store)
        store.pack()
        assert contents(store) == before


def test_packing_again_finds_nothing_to_do(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 300)
        store.pack()
        packed = stored_slabs(store)
        assert store.pack() == packing.NOTHING
        assert stored_slabs(store) == packed


def test_what_comes_later_joins_the_last_small_slab(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 40, "a")
        store.pack()
        grow(store, 40, "b")
        before = contents(store)
        store.pack()
        engine_of(store)._cache.clear()
        assert contents(store) == before
        grow(store, 5, "c")
        assert len(list(store.session("c").nodes())) == 5


def test_an_empty_store_and_a_single_slab_are_left_alone(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        assert store.pack() == packing.NOTHING
        store.put_blob(b"alone")
        assert store.pack() == packing.NOTHING


def test_no_slab_grows_beyond_what_one_may_hold(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        source = random.Random(1)
        for size in (10, 60_000, 20, 30_000, 30, 70_000, 40, 32_768, 32_768, 1, 200_000, 5):
            store.put_blob(source.randbytes(size))
        for n in range(5_000):
            store.put_blob(b"%d" % n)
        before = contents(store)
        store.pack()
        engine_of(store)._cache.clear()
        assert contents(store) == before
        for key, value in stored_slabs(store):
            directory = slabs.read_directory(key, value)
            assert directory.objects <= slabs.MAX_OBJECTS
            if directory.objects > 1:
                assert sum(directory.lengths) <= slabs.TARGET_RAW_BYTES


def test_objects_that_were_deleted_lose_their_bytes_and_keep_their_place(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        kept = [store.put_blob(b"kept %d" % n * 50) for n in range(20)]
        gone = [store.put_blob(b"CANARY %d" % n * 50) for n in range(20)]
        last = store.put_value({"links": [casstore.Link(kept[3])]})
        ids = {info.digest: info.id for info in engine_of(store).scan_objects()}
        store.engine.write(Write(deletes=gone))
        report = store.pack()
        assert report.objects_dropped == 20
        after = {info.digest: info.id for info in engine_of(store).scan_objects()}
        assert after == {digest: ids[digest] for digest in [*kept, last]}
        engine_of(store)._cache.clear()
        assert store.get_value(last) == {"links": [casstore.Link(kept[3])]}
        # Put again, an object is a new one.
        assert store.put_blob(b"CANARY 7" * 50) == gone[7]
        assert store.get_blob(gone[7]) == b"CANARY 7" * 50
        assert engine_of(store).verify() == 22


def test_a_slab_that_is_mostly_dead_is_rewritten_alone(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        source = random.Random(2)
        digests = store.put_many([source.randbytes(1_000) for _ in range(60)])
        store.engine.write(Write(deletes=digests[5:]))
        report = store.pack()
        assert (report.slabs_before, report.slabs_after, report.objects_dropped) == (1, 1, 55)
        assert report.bytes_after < 0.3 * report.bytes_before
        assert len(store.get_many(digests[:5])) == 5


def test_slabs_of_which_nothing_is_alive_go_but_never_the_newest(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        source = random.Random(3)
        gone = [store.put_blob(source.randbytes(5_000)) for _ in range(30)]
        store.engine.write(Write(deletes=gone[:-1]))
        report = store.pack()
        assert report.slabs_after < report.slabs_before
        assert len(stored_slabs(store)) < 4
        ids = {info.id for info in engine_of(store).scan_objects()}
        store.engine.write(Write(deletes=gone[-1:]))
        store.pack()
        assert len(stored_slabs(store)) == 1
        # Ids go on after the last that was given, named or not.
        store.put_blob(b"next")
        assert min(info.id for info in engine_of(store).scan_objects()) > max(ids)
        assert engine_of(store).verify() == 1


def test_nothing_looks_older_than_it_is(tmp_path: Path) -> None:
    now = [1000]
    engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=lambda: now[0])
    with Store(engine) as store:
        store.put_blob(b"old")
        now[0] = 5000
        young = store.put_blob(b"young")
        store.pack()
        times = {info.digest: info.stored_at_ms for info in engine.scan_objects()}
        assert times == {young: 5000, Digest.of_blob(b"old"): 5000}


def test_a_run_that_changed_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 30)
        before = contents(store)
        read = packing._read_run
        others: list[PackReport] = []

        def read_then_somebody_packs(
            env: Environment, compressor: Compressor, first_id: int, newest: int
        ) -> tuple[packing._Run | None, int]:
            found = read(env, compressor, first_id, newest)
            if not others:
                monkeypatch.setattr(packing, "_read_run", read)
                others.append(store.pack())
            return found

        monkeypatch.setattr(packing, "_read_run", read_then_somebody_packs)
        assert store.pack() == packing.NOTHING
        assert others[0].slabs_before > 1
        engine_of(store)._cache.clear()
        assert contents(store) == before


def test_readers_and_writers_go_on_while_it_packs(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process", cache_bytes=1 << 16) as store:
        texts = grow(store, 120)
        stop = threading.Event()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                while not stop.is_set():
                    found = [node.payload["content"] for node in store.session("s").nodes()]
                    assert found[:120] == texts
            except BaseException as exc:
                errors.append(exc)

        def write(number: int) -> None:
            try:
                grow(store, 60, f"w{number}")
            except BaseException as exc:
                errors.append(exc)

        reader = threading.Thread(target=read)
        writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in (reader, *writers):
            thread.start()
        while any(thread.is_alive() for thread in writers):
            store.pack()
        stop.set()
        for thread in (reader, *writers):
            thread.join()
        assert errors == []
        store.pack()
        engine_of(store)._cache.clear()
        assert engine_of(store).verify() == len(contents(store))
        assert len(list(store.session("w1").nodes())) == 60


_PACKER = """
import sys, casstore
with casstore.open(sys.argv[1], "process") as store:
    print("open", flush=True)
    while True:
        store.pack()
        for n in range(20):
            store.put_blob(b"%d %d" % (id(store), n))
"""


def test_a_process_killed_while_it_packs_leaves_a_sound_store(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        texts = grow(store, 200)
    for delay in (0.0, 0.01, 0.03, 0.06):
        packer = subprocess.Popen(
            [sys.executable, "-c", _PACKER, str(tmp_path / "s")],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert packer.stdout is not None
        assert packer.stdout.readline() == "open\n"
        threading.Event().wait(delay)
        packer.kill()
        packer.wait()
        packer.stdout.close()
        with casstore.open(tmp_path / "s", "process", verify=True) as store:
            assert [node.payload["content"] for node in store.session("s").nodes()] == texts


@pytest.mark.parametrize("at", [40, -1, -20], ids=["digest", "payload", "inside the payload"])
def test_a_damaged_slab_is_refused_and_nothing_is_lost(tmp_path: Path, at: int) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 20)
        key, value = stored_slabs(store)[7]
        env = engine_of(store)._env
        broken = bytearray(value)
        broken[at] ^= 1
        with env.write_lock, env.begin_write() as txn:
            txn.put(key, bytes(broken), db=env.slabs)
        old = stored_slabs(store)
        with pytest.raises(casstore.CasstoreError):
            store.pack()
        assert stored_slabs(store) == old


def test_what_cannot_be_packed_says_so(tmp_path: Path) -> None:
    with Store(MemoryEngine()) as store, pytest.raises(InvalidInputError):
        store.pack()
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 3)
    with casstore.open(tmp_path / "s", readonly=True) as store, pytest.raises(ReadOnlyError):
        store.pack()


def test_progress_is_told_step_by_step(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "process") as store:
        grow(store, 300)
        steps: list[PackReport] = []
        report = engine_of(store).pack(steps.append)
        assert len(steps) > 1
        assert steps[-1] == report
        assert [step.slabs_before for step in steps] == sorted(step.slabs_before for step in steps)
