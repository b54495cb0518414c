"""Small slabs are joined by the writer that stored them, and nobody notices but the file."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import UNFENCED, Commit, NodeDraft
from casstore.engine.lmdb import journal, notes, tail, transaction
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


def new_blob(content: bytes) -> NewObject:
    return NewObject(Digest.of_blob(content), 0, content, ())


def infos(store: Store) -> list[ObjectInfo]:
    return engine_of(store).scan_objects(limit=1_000_000)


def texts(count: int, size: int = 100) -> list[bytes]:
    rng = random.Random(count)
    return [b"%d " % at + rng.randbytes(size) for at in range(count)]


def test_when_there_are_many_one_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MANY_SLABS", 21)
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


def test_a_commit_that_lays_the_journal_does_not_join_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MANY_SLABS", 4)
    monkeypatch.setattr(journal, "SETTLE_CHANGES", 3)
    with open_store(tmp_path / "s") as store:
        for number, content in enumerate(texts(6), 1):
            put(store, content)
            if number == 4:
                assert sizes(store) == [1, 1, 1, 1]
        assert sizes(store) == [5, 1]
        assert engine_of(store).verify() == 6


def test_links_between_them_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MANY_SLABS", 8)
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
        monkeypatch.setattr(tail, "MANY_SLABS", 2)
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
        monkeypatch.setattr(tail, "MANY_SLABS", 3)
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
        monkeypatch.setattr(tail, "MANY_SLABS", 2)
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
        monkeypatch.setattr(tail, "MANY_SLABS", 2)
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
            held = [len(each.sheet.body) for each in engine_of(store)._batches._tail.run]
            assert sum(held) < slabs.TARGET_RAW_BYTES + tail.SMALL_BODY_BYTES
            assert len(held) <= tail.MANY_SLABS + 1
            assert all(size <= tail.SMALL_BODY_BYTES for size in held)


def test_what_another_process_stores_in_between_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    other = (
        "import sys, casstore\n"
        "with casstore.open(sys.argv[1], durability='process') as store:\n"
        "    store.put_blob(b'theirs')\n"
    )
    with open_store(path) as store:
        mine = [put(store, content) for content in texts(3)]
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        mine += [put(store, content) for content in texts(2, 50)]
        assert sizes(store) == [3, 1, 1, 1]
        monkeypatch.setattr(tail, "MANY_SLABS", 2)
        mine.append(put(store, b"one more"))
        assert sizes(store) == [3, 1, 3]
        assert None not in store.get_many([*mine, Digest.of_blob(b"theirs")])
        assert engine_of(store).verify() == 7


def test_slabs_are_joined_only_if_their_ids_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab has a run of ids: over those of another writer it would give its own to others."""
    path = tmp_path / "s"
    other = (
        "import sys, casstore\n"
        "with casstore.open(sys.argv[1], durability='process') as store:\n"
        "    store.put_many([b'theirs', b'and theirs'])\n"
    )
    monkeypatch.setattr(tail, "MANY_SLABS", 3)
    with open_store(path) as store:
        mine = [put(store, content) for content in texts(2)]
        subprocess.run([sys.executable, "-c", other, str(path)], check=True)
        before = {info.digest: info.id for info in infos(store)}
        mine += [put(store, content) for content in texts(4, 50)]
        # In memory and from the file: everything is where its id says.
        assert {info.digest: info.id for info in infos(store)}.items() >= before.items()
        assert store.get_many(mine) == [*texts(2), *texts(4, 50)]
        assert not check(store, level="full").findings
    with open_store(path) as store:
        assert store.get_many(mine) == [*texts(2), *texts(4, 50)]
        assert store.get_blob(Digest.of_blob(b"and theirs")) == b"and theirs"
        assert engine_of(store).verify() == 8


def test_a_transaction_that_was_not_committed_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "s") as store:
        put(store, b"one")
        with monkeypatch.context() as patch:

            def interrupt(*arguments: object) -> None:
                raise KeyboardInterrupt

            # The last thing that a transaction does, when its slabs are written.
            patch.setattr(notes, "touch", interrupt)
            patch.setattr(
                transaction.Transaction, "_touch", lambda self, *_: self._touched.update({1: None})
            )
            with pytest.raises(KeyboardInterrupt):
                engine_of(store).write(Write(objects=[new_blob(b"one"), new_blob(b"never")]))
        monkeypatch.setattr(tail, "MANY_SLABS", 2)
        put(store, b"two")
        put(store, b"three")
        assert store.missing([Digest.of_blob(b"never")]) == [Digest.of_blob(b"never")]
        assert engine_of(store).verify() == 3
        assert not check(store, level="full").findings


def test_a_slab_that_was_interrupted_and_written_again_at_once_is_joined_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still, so the slab is the same to the byte; its ids are there once."""

    class Interrupted(list[tail.Fresh]):
        def append(self, slab: tail.Fresh) -> None:
            super().append(slab)
            raise KeyboardInterrupt

    monkeypatch.setattr(tail, "MANY_SLABS", 3)
    engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=lambda: 1_000_000)
    with Store(engine) as store:
        contents = texts(8)
        put(store, contents[0])
        run = engine._batches._tail.run
        engine._batches._tail.run = Interrupted(run)
        with pytest.raises(KeyboardInterrupt):
            put(store, contents[1])
        engine._batches._tail.run = list(engine._batches._tail.run)
        digests = [put(store, content) for content in contents]
        assert store.get_many(digests) == contents
        assert engine.verify() == len(contents)
        assert not check(store, level="full").findings


def codecs(store: Store) -> list[int]:
    """How each slab is compressed."""
    env = engine_of(store)._env
    with env.reading() as txn:
        return [slabs.read_directory(key, value).codec for key, value in txn.cursor(db=env.slabs)]


def test_what_will_be_joined_is_compressed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MANY_SLABS", 6)
    contents = [b"a text that compresses %d " % at * 40 for at in range(8)]
    with open_store(tmp_path / "s") as store:
        digests = [put(store, content) for content in contents[:5]]
        # It is not known yet that there will be enough of them.
        assert codecs(store) == [slabs.CODEC_ZSTD] * 5
        digests += [put(store, content) for content in contents[5:]]
        assert codecs(store) == [slabs.CODEC_ZSTD, slabs.CODEC_RAW, slabs.CODEC_RAW]
        assert store.get_many(digests) == contents
        assert engine_of(store).verify() == 8
        store.pack(min_age_ms=0)
        assert codecs(store) == [slabs.CODEC_ZSTD]
        assert store.get_many(digests) == contents


def test_where_others_write_in_between_every_slab_is_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "MANY_SLABS", 2)
    path = tmp_path / "s"
    other = (
        "import sys, casstore\n"
        "with casstore.open(sys.argv[1], durability='process') as store:\n"
        "    for line in sys.stdin:\n"
        "        store.put_blob(b'theirs ' * 40 + line.encode())\n"
        "        print(flush=True)\n"
    )
    with open_store(path) as store:
        put(store, b"joined " * 40), put(store, b"at first " * 40)
        process = subprocess.Popen(
            [sys.executable, "-c", other, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        for at in range(5):
            put(store, b"mine, which compresses as well %d " % at * 20)
            process.stdin.write(f"{at}\n")
            process.stdin.flush()
            process.stdout.readline()
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()
        # The first two of ours are stored before it is known that they do not follow each other.
        compressed, raw = slabs.CODEC_ZSTD, slabs.CODEC_RAW
        assert codecs(store) == [compressed, raw, compressed, raw, *[compressed] * 7]
        assert engine_of(store).verify() == 12


@pytest.mark.parametrize("seed", range(40))
def test_a_slab_laid_in_one_go_is_the_one_laid_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    objects: list[NewObject] = []
    children: dict[int, list[int]] = {}
    first_id = rng.choice([1, 1000, 1 << 33])
    for own in range(first_id, first_id + rng.randrange(1, 9)):
        links = [rng.randbytes(32) for _ in range(rng.choice([0, 1, 1, 3]))]
        parts = [rng.randbytes(rng.choice([0, 5, 300, 70_000])) for _ in range(len(links) + 1)]
        data = parts[0] + b"".join(link + part for link, part in zip(links, parts[1:], strict=True))
        if rng.random() < 0.2:
            # Its links do not stand in it, so it keeps what it has.
            data = rng.randbytes(100)
        objects.append(NewObject(rng.randbytes(32), rng.randrange(8), data, links))
        if rng.random() < 0.8:
            children[own] = [rng.randrange(max(1, own - 300), own + 1) for _ in links]
    draft = slabs.draft(objects, lambda raw: (slabs.CODEC_RAW, 0, raw))
    sheet = slabs.lay_out(draft, first_id, children, 5)
    expected = (*slabs.seal_draft(draft, sheet), sheet)
    assert slabs.lay_raw(objects, first_id, children, 5) == expected
