"""Small slabs are joined by the writer that stored them, and nobody notices but the file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import UNFENCED, Commit, NodeDraft
from casstore.engine.lmdb import journal, tail
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import NewObject, ObjectInfo, PutRow, Write
from casstore.errors import CorruptionError
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.maintenance.check import check
from casstore.store import Store


def engine_of(store: Store) -> LmdbEngine:
    assert isinstance(store.engine, LmdbEngine)
    return store.engine


def open_store(path: Path) -> Store:
    return casstore.open(path, durability="process", auto_train=False)


def sizes(store: Store) -> list[int]:
    """How many objects each slab holds."""
    env = engine_of(store)._env
    with env.reading() as txn:
        return [slabs.count_of(value) for _, value in txn.cursor(db=env.slabs)]


def put(store: Store, content: bytes) -> Digest:
    return store.put_blob(content)


def infos(store: Store) -> list[ObjectInfo]:
    return engine_of(store).scan_objects(limit=1_000_000)


def texts(count: int, size: int = 100) -> list[bytes]:
    rng = random.Random(count)
    return [b"%d " % at + rng.randbytes(size) for at in range(count)]


def test_when_the_journal_is_laid_in_place_one_slab_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SETTLE_CHANGES", 20)
    contents = texts(50)
    with open_store(tmp_path / "s") as store:
        seen: dict[bytes, tuple[Any, ...]] = {}
        for number, content in enumerate(contents, 1):
            put(store, content)
            # Ids, kinds and links stay what they are.
            now = {info.digest: info[:5] for info in infos(store)}
            assert {digest: now[digest] for digest in seen} == seen
            seen = now
            assert sizes(store) == [21] * (number // 21) + [1] * (number % 21)
        assert store.get_many([Digest.of_blob(each) for each in contents]) == contents
        assert engine_of(store).verify() == 50
    with open_store(tmp_path / "s") as store:
        assert store.get_many([Digest.of_blob(each) for each in contents]) == contents
        assert not check(store, level="full").findings


def test_when_there_is_enough_for_a_slab_it_is_joined(tmp_path: Path) -> None:
    contents = texts(40, 5000)
    with open_store(tmp_path / "s") as store:
        for content in contents:
            put(store, content)
        assert sizes(store)[:2] == [14, 14]
        assert store.get_many([Digest.of_blob(each) for each in contents]) == contents
        assert engine_of(store).verify() == 40


def test_long_slabs_stay_by_themselves_and_end_a_run(tmp_path: Path) -> None:
    short, long = texts(6), random.Random(1).randbytes(20_000)
    with open_store(tmp_path / "s") as store:
        for content in (*short[:3], long, *short[3:]):
            put(store, content)
        assert sizes(store) == [3, 1, 1, 1, 1]
        assert engine_of(store).verify() == 7


def test_links_between_them_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SETTLE_CHANGES", 40)
    with open_store(tmp_path / "s") as store:
        session = store.session("s")
        for at in range(60):
            session.commit(Commit(append=[NodeDraft(f"n{at}", {"at": at})], lease=UNFENCED))
        assert len(sizes(store)) < 30
        assert [node.payload for node in session.nodes()] == [{"at": at} for at in range(60)]
        assert len(list(session.nodes(at=7))) == 7
        assert not check(store, level="full").findings
        gc.collect(store, grace_ms=0)
        assert [node.payload for node in session.nodes()] == [{"at": at} for at in range(60)]


@pytest.mark.parametrize("between", ["pack", "collect", "close"])
def test_what_others_have_changed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    contents = texts(8)
    with open_store(tmp_path / "s") as store:
        store.tag("first", put(store, contents[0]))
        for content in contents[1:5]:
            put(store, content)
        if between == "pack":
            store.pack(min_age_ms=0)
        elif between == "collect":
            gc.collect(store, grace_ms=0)
        else:
            store.close()
            store = open_store(tmp_path / "s")
        before = sizes(store)
        monkeypatch.setattr(journal, "SETTLE_CHANGES", 0)
        store.tag("last", put(store, contents[5]))
        assert sizes(store)[: len(before)] == before or between == "close"
        kept = {contents[0], contents[5]} | set(contents[1:5] if between != "collect" else ())
        found = store.get_many([Digest.of_blob(each) for each in kept])
        assert found == list(kept)
        assert engine_of(store).verify() == len(kept)
        assert not check(store, level="full").findings
        store.close()


def test_nothing_looks_older_than_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000]
    engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=lambda: now[0])
    with Store(engine) as store:
        one = put(store, b"one")
        now[0] += 5_000
        two = put(store, b"two")
        assert [info.stored_at_ms for info in infos(store)] == [1_005_000, 1_000_000]
        monkeypatch.setattr(journal, "SETTLE_CHANGES", 0)
        now[0] += 1
        three = put(store, b"three")
        assert sizes(store) == [3]
        assert [info.stored_at_ms for info in infos(store)] == [1_005_001] * 3
        # The last is within the grace, and so the others are; never the other way round.
        gc.collect(store, grace_ms=1_000)
        assert store.missing([one, two, three]) == []


def test_a_refused_write_leaves_no_trace_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, b"one")
        missing = Digest.of_blob(b"missing")
        with pytest.raises(casstore.CasstoreError):
            engine_of(store).write(
                Write(objects=[NewObject(Digest.of_blob(b"x"), 0, b"x", (missing,))])
            )
        put(store, b"two")
        monkeypatch.setattr(journal, "SETTLE_CHANGES", 0)
        engine_of(store).write(Write(rows=[PutRow("heads", b"k", b"v")]))
        assert sizes(store) == [2]
        assert engine_of(store).verify() == 2


def test_what_would_not_inflate_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "s") as store:
        digests = [put(store, b"some text that compresses %d" % at * 20) for at in range(5)]
        compressor = engine_of(store)._compressor
        compress = compressor.compress

        def wrong(raw: bytes) -> tuple[int, int, bytes]:
            return compress(raw if len(raw) < 1000 else bytes(len(raw)))

        monkeypatch.setattr(compressor, "compress", wrong)
        monkeypatch.setattr(journal, "SETTLE_CHANGES", 0)
        with pytest.raises(CorruptionError, match="joined"):
            put(store, b"the last")
        monkeypatch.undo()
        assert engine_of(store).verify() == 5
        assert None not in store.get_many(digests)
        put(store, b"the last")
        assert engine_of(store).verify() == 6


def test_the_memory_for_it_is_bounded(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        for content in texts(300, 3000):
            put(store, content)
            held = engine_of(store)._tail._run
            assert held.raw_bytes == sum(len(each.raw) for each in held.slabs)
            assert held.raw_bytes < slabs.TARGET_RAW_BYTES
            assert all(len(each.raw) <= tail.SMALL_RAW_BYTES for each in held.slabs)
