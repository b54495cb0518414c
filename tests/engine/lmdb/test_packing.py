"""Packing: small slabs are merged into large ones; only size and speed change."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import casstore
from casstore.engine.compression import Compressor
from casstore.engine.lmdb import cold_dictionary, packing, tidying
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.environment import Environment
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import NewObject, PackReport, Write
from casstore.errors import CorruptionError, InvalidInputError, ReadOnlyError
from casstore.format.digest import Digest
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

pytestmark = pytest.mark.usefixtures("slab_a_commit")

ROOT = Path(__file__).parents[3]


def engine_of(store: Store) -> LmdbEngine:
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


def stored_slabs(store: Store) -> list[tuple[bytes, bytes]]:
    env = engine_of(store)._env
    env.apply_log()
    with env.reading() as txn:
        return [(bytes(key), bytes(value)) for key, value in txn.cursor(db=env.slabs)]


def grow(store: Store, turns: int, name: str = "s") -> list[str]:
    """A session committed turn by turn; the texts of its nodes."""
    source = random.Random(name)
    texts = [f"{n} " + "word " * source.randrange(1, 600) for n in range(turns)]
    session = store.session(name)
    for n, text in enumerate(texts):
        draft = NodeDraft(f"n{n}", {"role": "user", "content": text, "n": n})
        session.commit(Commit(append=[draft]))
    return texts


def contents(store: Store) -> dict[bytes, tuple[int, bytes]]:
    infos = engine_of(store).scan_objects(limit=1_000_000)
    found = store.engine.get_many([info.digest for info in infos])
    return {
        info.digest: (item.kind, item.data)
        for info, item in zip(infos, found, strict=True)
        if item is not None
    }


def test_all_objects_read_back_after_packing_from_fewer_and_smaller_slabs(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        texts = grow(store, 300)
        before, infos = contents(store), engine_of(store).scan_objects(limit=1_000_000)
        old = stored_slabs(store)
        report = store.pack(min_age_ms=0)
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


def test_reads_stay_correct_after_a_cached_slab_was_joined(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 50)
        before = contents(store)
        store.pack(min_age_ms=0)
        assert contents(store) == before


def test_packing_again_finds_nothing_to_do(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 300)
        store.pack(min_age_ms=0)
        packed = stored_slabs(store)
        assert store.pack(min_age_ms=0) == packing.NOTHING
        assert stored_slabs(store) == packed


def test_later_objects_join_the_last_small_slab(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 40, "a")
        store.pack(min_age_ms=0)
        grow(store, 40, "b")
        before = contents(store)
        store.pack(min_age_ms=0)
        engine_of(store)._cache.clear()
        assert contents(store) == before
        grow(store, 5, "c")
        assert len(list(store.session("c").nodes())) == 5


def test_an_empty_store_and_a_single_slab_are_left_alone(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        assert store.pack(min_age_ms=0) == packing.NOTHING
        store.put_blob(b"alone")
        assert store.pack(min_age_ms=0) == packing.NOTHING


def test_no_packed_slab_exceeds_the_size_limits(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        source = random.Random(1)
        for size in (10, 240_000, 20, 120_000, 30, 280_000, 40, 131_072, 131_072, 1, 800_000, 5):
            store.put_blob(source.randbytes(size))
        for n in range(5_000):
            store.put_blob(b"%d" % n)
        before = contents(store)
        store.pack(min_age_ms=0)
        engine_of(store)._cache.clear()
        assert contents(store) == before
        for key, value in stored_slabs(store):
            directory = slabs.read_directory(key, value)
            assert directory.objects <= slabs.MAX_OBJECTS
            if directory.objects > 1:
                assert sum(directory.lengths) <= slabs.PACKED_RAW_BYTES


def test_packing_drops_the_bytes_of_deleted_objects_and_keeps_all_other_ids(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        kept = [store.put_blob(b"kept %d" % n * 50) for n in range(20)]
        gone = [store.put_blob(b"CANARY %d" % n * 50) for n in range(20)]
        last = store.put_value({"links": [casstore.Link(kept[3])]})
        ids = {info.digest: info.id for info in engine_of(store).scan_objects()}
        store.engine.write(Write(deletes=gone))
        report = store.pack(min_age_ms=0)
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
    with casstore.open(tmp_path / "s", "relaxed") as store:
        source = random.Random(2)
        digests = store.put_many([source.randbytes(1_000) for _ in range(60)])
        store.engine.write(Write(deletes=digests[5:]))
        report = store.pack(min_age_ms=0)
        assert (report.slabs_before, report.slabs_after, report.objects_dropped) == (1, 1, 55)
        assert report.bytes_after < 0.3 * report.bytes_before
        assert len(store.get_many(digests[:5])) == 5


def test_slabs_without_live_objects_are_deleted_except_the_newest(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        source = random.Random(3)
        gone = [store.put_blob(source.randbytes(5_000)) for _ in range(30)]
        store.engine.write(Write(deletes=gone[:-1]))
        report = store.pack(min_age_ms=0)
        assert report.slabs_after < report.slabs_before
        assert len(stored_slabs(store)) < 4
        ids = {info.id for info in engine_of(store).scan_objects()}
        store.engine.write(Write(deletes=gone[-1:]))
        store.pack(min_age_ms=0)
        assert len(stored_slabs(store)) == 1
        # Ids go on after the last that was given, named or not.
        store.put_blob(b"next")
        assert min(info.id for info in engine_of(store).scan_objects()) > max(ids)
        assert engine_of(store).verify() == 1


def test_the_newest_id_is_kept_though_its_object_is_dead(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        blobs = store.put_many([b"%d" % n * 100 for n in range(10)])
        store.engine.write(Write(deletes=[blobs[0], *blobs[7:]]))
        assert store.pack(min_age_ms=0).objects_dropped == 4
        assert [info.id for info in engine_of(store).scan_objects()] == [7, 6, 5, 4, 3, 2]
        store.put_blob(b"next")
        assert max(info.id for info in engine_of(store).scan_objects()) == 11
        assert engine_of(store).verify() == 7


def test_slabs_with_a_long_gap_between_them_are_not_joined(tmp_path: Path) -> None:
    """Packing twice after much was collected moved objects to other ids, out of reach."""
    with casstore.open(tmp_path / "s", "relaxed") as store:
        kept = [store.put_blob(b"first")]
        gone = [store.put_blob(b"%d" % n) for n in range(2_500)]
        kept += [store.put_blob(b"last %d" % n) for n in range(3)]
        store.engine.write(Write(deletes=gone))
        for _ in range(3):
            store.pack(min_age_ms=0)
            engine_of(store)._cache.clear()
            assert len(store.get_many(kept)) == 4
            assert engine_of(store).verify() == 4
        # The dead keep no place at either end.
        directories = [slabs.read_directory(*stored) for stored in stored_slabs(store)]
        assert sum(directory.objects for directory in directories) < 100


def test_slabs_are_joined_across_a_few_missing_ids(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        kept, gone = [], []
        for n in range(100):
            kept.append(store.put_blob(b"kept %d " % n * 20))
            gone.append(store.put_blob(b"gone %d " % n * 20))
        ids = {info.digest: info.id for info in engine_of(store).scan_objects()}
        store.engine.write(Write(deletes=gone))
        env = engine_of(store)._env
        # As a collector does with slabs of which nothing is alive, but the newest.
        with env.write_lock, env.begin_write() as txn:
            for digest in gone[:-1]:
                txn.delete(slabs.slab_key(ids[digest]), db=env.slabs)
        store.pack(min_age_ms=0)
        assert len(stored_slabs(store)) == 1
        assert store.pack(min_age_ms=0) == packing.NOTHING
        engine_of(store)._cache.clear()
        assert {info.digest: info.id for info in engine_of(store).scan_objects()} == {
            digest: ids[digest] for digest in kept
        }
        assert len(store.get_many(kept)) == 100
        assert engine_of(store).verify() == 100
        store.put_blob(b"next")
        assert max(info.id for info in engine_of(store).scan_objects()) == 201


def test_a_packed_slab_that_fails_verification_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 20)
        before = stored_slabs(store)
        encode = slabs.Columns.encode
        monkeypatch.setattr(
            slabs.Columns,
            "encode",
            lambda self, first_id, *more, **how: encode(self, first_id + 1, *more, **how),
        )
        with pytest.raises(CorruptionError, match="check the memory of this machine"):
            store.pack(min_age_ms=0)
        assert stored_slabs(store) == before


def test_recent_slabs_are_left_unchanged(tmp_path: Path) -> None:
    now = [1_000_000]
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=lambda: now[0])
    with Store(engine) as store:
        for _ in range(30):
            now[0] += 1_000
            store.put_blob(b"%d" % now[0])
        before = stored_slabs(store)
        assert store.pack() == packing.NOTHING
        assert stored_slabs(store) == before
        # Of thirty seconds the last ten are too young.
        report = store.pack(min_age_ms=10_000)
        assert (report.slabs_before, report.slabs_after) == (19, 1)
        assert stored_slabs(store)[1:] == before[19:]
        assert store.pack(min_age_ms=10_000) == packing.NOTHING
        # Later they are not.
        now[0] += 3_600_000
        assert store.pack().slabs_before == 12
        assert len(stored_slabs(store)) == 1
        assert engine.verify() == 30
        for wrong in (-1, 1.5, "1", True):
            with pytest.raises(InvalidInputError):
                store.pack(min_age_ms=wrong)  # type: ignore[arg-type]


def test_a_large_slab_is_compressed_harder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(4)
    words = [source.randbytes(3).hex() for _ in range(3_000)]
    with casstore.open(tmp_path / "s", "relaxed", auto_train=False) as store:
        blobs = [
            " ".join(source.choice(words) for _ in range(30_000)).encode()[:200_000]
            for _ in range(3)
        ]
        engine = engine_of(store)
        engine.write(Write(objects=[NewObject(Digest.of_blob(b), 0, b, ()) for b in blobs]))
        before = stored_slabs(store)
        assert len(before) == 3
        report = store.pack(min_age_ms=0)
        assert (report.slabs_before, report.slabs_after) == (3, 3)
        assert report.bytes_after < 0.95 * report.bytes_before
        # It is not even tried again.
        monkeypatch.setattr(packing, "rewritten", lambda *arguments: pytest.fail("tried again"))
        assert store.pack(min_age_ms=0) == packing.NOTHING
        assert store.get_many([Digest.of_blob(blob) for blob in blobs]) == blobs


def test_half_empty_tables_are_rewritten(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for n in range(40):
            grow(store, 25, f"s{n % 8}-{n}")
        env = engine_of(store)._env
        tables = {**env.tables, "index": env.index}

        def rows() -> dict[str, list[tuple[bytes, bytes]]]:
            with env.reading() as txn:
                return {
                    name: [(bytes(key), bytes(value)) for key, value in txn.cursor(db=database)]
                    for name, database in tables.items()
                }

        def leaves() -> int:
            with env.reading() as txn:
                return sum(txn.stat(database)["leaf_pages"] for database in tables.values())

        engine_of(store).apply_log()
        before, pages = rows(), leaves()
        report = store.pack(min_age_ms=0)
        assert rows() == before
        assert report.pages_saved > 0.2 * pages
        assert 0 <= report.pages_saved - (pages - leaves()) < 10
        assert store.pack(min_age_ms=0) == packing.NOTHING
        grow(store, 20, "later")
        assert engine_of(store).verify() > 0


def test_a_table_above_the_size_limit_is_not_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tidying, "MAX_TABLE_BYTES", 4096)
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for n in range(20):
            grow(store, 25, f"s{n}")
        assert store.pack(min_age_ms=0).pages_saved == 0


def test_packing_trains_a_dictionary_if_it_saves_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(5)
    words = [source.randbytes(12).hex() for _ in range(4_000)]

    def text() -> bytes:
        return " ".join(source.choice(words) for _ in range(80)).encode()

    with casstore.open(tmp_path / "s", "relaxed", auto_train=False) as store:
        store.put_many([text() for _ in range(3_000)])
        copy = [bytes(digest) for digest in store.put_many([text() for _ in range(500)])]
        shelf = engine_of(store)._shelf
        assert shelf.newest() == 0
        # By default there is too little to pack.
        monkeypatch.setattr(packing, "_note_packed", lambda *arguments: None)
        store.pack(min_age_ms=0)
        assert shelf.newest() == 0
        plain = sum(len(value) for _, value in stored_slabs(store))
        monkeypatch.setattr(cold_dictionary, "MIN_RAW_BYTES", 1 << 20)
        monkeypatch.setattr(cold_dictionary, "PLACES", 8)
        store.pack(min_age_ms=0)
        assert shelf.newest() == 1
        saved = plain - sum(len(value) for _, value in stored_slabs(store))
        assert saved > 2 * len(shelf.load(1))
        engine_of(store)._cache.clear()
        assert len(store.get_many(copy)) == 500
        assert engine_of(store).verify() == 3_500


@pytest.mark.parametrize(("texts", "min_gain"), [(900, 0.03), (1_800, 0.9)])
def test_packing_discards_a_dictionary_that_saves_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, min_gain: float
) -> None:
    monkeypatch.setattr(cold_dictionary, "MIN_RAW_BYTES", 1 << 20)
    monkeypatch.setattr(cold_dictionary, "MIN_GAIN", min_gain)
    monkeypatch.setattr(cold_dictionary, "PLACES", 8)
    source = random.Random(6)
    words = [source.randbytes(12).hex() for _ in range(4_000)]
    with casstore.open(tmp_path / "s", "relaxed", auto_train=False) as store:
        store.put_many(
            [" ".join(source.choice(words) for _ in range(80)).encode() for _ in range(texts)]
        )
        store.pack(min_age_ms=0)
        assert engine_of(store)._shelf.newest() == 0


def test_a_joined_slab_has_the_newest_storage_time_of_its_objects(tmp_path: Path) -> None:
    now = [1000]
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=lambda: now[0])
    with Store(engine) as store:
        store.put_blob(b"old")
        now[0] = 5000
        young = store.put_blob(b"young")
        store.pack(min_age_ms=0)
        times = {info.digest: info.stored_at_ms for info in engine.scan_objects()}
        assert times == {young: 5000, Digest.of_blob(b"old"): 5000}


def test_packing_skips_a_run_of_slabs_that_another_packer_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 30)
        before = contents(store)
        read = packing.read_run
        others: list[PackReport] = []

        def read_then_somebody_packs(
            env: Environment, compressor: Compressor, first_id: int, scope: packing.PackScope
        ) -> packing.SlabSelection:
            found = read(env, compressor, first_id, scope)
            if not others:
                monkeypatch.setattr(packing, "read_run", read)
                others.append(engine_of(store).pack())
            return found

        monkeypatch.setattr(packing, "read_run", read_then_somebody_packs)
        assert store.pack(min_age_ms=0) == packing.NOTHING
        assert others[0].slabs_before > 1
        engine_of(store)._cache.clear()
        assert contents(store) == before


def test_readers_and_writers_continue_during_packing(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed", cache_bytes=1 << 16) as store:
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
            store.pack(min_age_ms=0)
        stop.set()
        for thread in (reader, *writers):
            thread.join()
        assert errors == []
        store.pack(min_age_ms=0)
        engine_of(store)._cache.clear()
        assert engine_of(store).verify() == len(contents(store))
        assert len(list(store.session("w1").nodes())) == 60


_PACKER = """
import sys, casstore
with casstore.open(sys.argv[1], "relaxed") as store:
    print("open", flush=True)
    while True:
        store.pack(min_age_ms=0)
        for n in range(20):
            store.put_blob(b"%d %d" % (id(store), n))
"""


def test_a_process_killed_while_it_packs_leaves_a_sound_store(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
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
        with casstore.open(tmp_path / "s", "relaxed", verify=True) as store:
            assert [node.payload["content"] for node in store.session("s").nodes()] == texts


def break_slab(store: Store, number: int, at: int) -> int:
    """Flip a bit of a slab; the id it ends in."""
    key, value = stored_slabs(store)[number]
    env = engine_of(store)._env
    broken = bytearray(value)
    broken[at] ^= 1
    with env.write_lock, env.begin_write() as txn:
        txn.put(key, bytes(broken), db=env.slabs)
    return int.from_bytes(key, "big")


@pytest.mark.parametrize("at", [40, -1, -20], ids=["digest", "payload", "inside the payload"])
def test_a_damaged_slab_is_reported_and_left_and_the_rest_is_packed(
    tmp_path: Path, at: int
) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 40)
        last_id = break_slab(store, 17, at)
        before = dict(stored_slabs(store))
        report = store.pack(min_age_ms=0)
        assert last_id in [damage.last_id for damage in report.damaged]
        assert all(damage.reason for damage in report.damaged)
        after = dict(stored_slabs(store))
        for damage in report.damaged:
            key = slabs.slab_key(damage.last_id)
            assert after[key] == before[key]
        # On both sides of it the others were joined.
        assert len(after) < 10
        assert report.slabs_before - report.slabs_after == len(before) - len(after)
        again = store.pack(min_age_ms=0)
        assert again == packing.NOTHING._replace(damaged=again.damaged)
        assert last_id in [damage.last_id for damage in again.damaged]
        assert dict(stored_slabs(store)) == after


def test_pack_refuses_a_memory_engine_and_a_read_only_store(tmp_path: Path) -> None:
    with Store(MemoryEngine()) as store, pytest.raises(InvalidInputError):
        store.pack(min_age_ms=0)
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 3)
    with casstore.open(tmp_path / "s", readonly=True) as store, pytest.raises(ReadOnlyError):
        store.pack(min_age_ms=0)


def test_progress_is_reported_step_by_step(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        grow(store, 300)
        steps: list[PackReport] = []
        report = engine_of(store).pack(steps.append)
        assert len(steps) > 1
        assert steps[-1] == report
        assert [step.slabs_before for step in steps] == sorted(step.slabs_before for step in steps)
