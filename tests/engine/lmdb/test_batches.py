"""Writes that share a transaction act as if they had run one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.batches import BatchBuilder, Job, Ticket, WriteBatch
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import (
    DeleteRow,
    NewObject,
    ObjectsExist,
    PutRow,
    RowIs,
    RowStarts,
    Write,
    WriteResult,
)
from casstore.errors import (
    CasstoreError,
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
)
from casstore.format.digest import Digest, Kind
from casstore.store import Store
from casstore.testing.engine_fixtures import (
    all_objects,
    all_rows,
    assert_reads_back,
    find_row,
    new_blob,
    new_object,
    new_parent,
)


@pytest.fixture(params=[0, 1], ids=["lmdb09", "lmdb10"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbEngine]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", lmdb_version=request.param)
    yield engine
    assert engine.verify() == len(all_objects(engine))
    engine.close()


def run(engine: LmdbEngine, writes: list[Write]) -> list[WriteResult | CasstoreError]:
    """Run writes as one commit, in this order."""
    batch = WriteBatch([Ticket(Job(write, durable=False)) for write in writes])
    engine._batches.commit(batch)
    assert batch.answers is not None
    return list(batch.answers)


def together(engine: LmdbEngine, *writes: Write) -> list[WriteResult | CasstoreError]:
    """Run writes as one commit."""
    return run(engine, [*writes])


def test_a_node_that_is_stored_already_is_not_stored_once_more(engine: LmdbEngine) -> None:
    """Nodes are taken to be new without looking; the transaction finds out."""
    nodes = [new_object(data, kind=Kind.NODE) for data in (b"1", b"2", b"3", b"4")]
    assert engine.write(Write(objects=nodes[:2])).new_objects == 2
    marker = PutRow("heads", b"key", b"value")
    assert engine.write(Write(objects=nodes[1:3], rows=[marker])).new_objects == 1
    assert engine.write(Write(objects=[nodes[3], nodes[3]])).new_objects == 1
    assert_reads_back(engine, *nodes)
    space = engine.measure_space().slabs
    assert (space.objects, space.dead_objects) == (4, 0)


def test_a_node_that_was_collected_is_stored_again(engine: LmdbEngine) -> None:
    node = new_object(b"node", kind=Kind.NODE)
    engine.write(Write(objects=[node]))
    engine.write(Write(deletes=[node.digest]))
    assert engine.write(Write(objects=[node])).new_objects == 1
    assert_reads_back(engine, node)


def test_a_node_is_refused_whose_child_is_missing(engine: LmdbEngine) -> None:
    missing = new_object(b"missing", kind=Kind.NODE)
    node = new_object(missing.digest, [missing.digest], kind=Kind.NODE)
    with pytest.raises(ObjectNotFoundError):
        engine.write(Write(objects=[node]))
    assert engine.write(Write(objects=[missing, node])).new_objects == 2


def stored_anew(answers: list[WriteResult | CasstoreError]) -> list[int | type[CasstoreError]]:
    return [
        answer.new_objects if isinstance(answer, WriteResult) else type(answer)
        for answer in answers
    ]


def test_an_object_in_two_writes_of_a_batch_is_stored_once(engine: LmdbEngine) -> None:
    child = new_blob(b"a child")
    first, second = new_parent(child), new_parent(child, child)
    answers = together(
        engine, Write(objects=[child, first, child]), Write(objects=[child, second, second])
    )
    assert stored_anew(answers) == [2, 1]
    assert_reads_back(engine, child, first, second)
    assert len(all_objects(engine)) == 3


def test_an_object_of_a_refused_write_is_stored_by_the_next_that_has_it(
    engine: LmdbEngine,
) -> None:
    blob = new_blob(b"of both")
    refused = Write(objects=[blob], conditions=[RowIs("heads", b"key", b"other")])
    answers = together(engine, refused, Write(objects=[blob]), Write(objects=[new_blob(b"own")]))
    assert stored_anew(answers) == [ConditionFailedError, 1, 1]
    assert_reads_back(engine, blob)
    assert engine.measure_space().slabs.dead_objects == 0


def test_a_row_changed_by_several_writes_of_a_batch_has_the_value_of_the_last(
    engine: LmdbEngine,
) -> None:
    put, gone = PutRow("heads", b"key", b"long " * 2000), DeleteRow("heads", b"key")
    answers = together(
        engine,
        Write(rows=[put, PutRow("heads", b"other", b"1")]),
        Write(conditions=[RowIs("heads", b"key", put.value)], rows=[gone]),
        Write(conditions=[RowIs("heads", b"key", None)], rows=[PutRow("heads", b"key", b"short")]),
        Write(conditions=[RowStarts("heads", b"key", b"sh")], rows=[DeleteRow("heads", b"other")]),
        Write(conditions=[RowIs("heads", b"other", b"1")], rows=[gone]),
    )
    assert stored_anew(answers) == [0, 0, 0, 0, ConditionFailedError]
    assert find_row(engine, "heads", b"key") == b"short"
    assert find_row(engine, "heads", b"other") is None
    assert stored_anew(together(engine, Write(rows=[put]), Write(rows=[gone]))) == [0, 0]
    assert all_rows(engine, "heads") == []


def test_an_object_stored_and_deleted_within_a_batch_is_gone(engine: LmdbEngine) -> None:
    old, new = new_blob(b"old"), new_blob(b"new")
    engine.write(Write(objects=[old]))
    gone = Write(deletes=[old.digest, new.digest])
    exists = Write(conditions=[ObjectsExist([new.digest])])
    answers = together(engine, Write(objects=[new]), exists, gone, Write(objects=[old]))
    assert stored_anew(answers) == [1, 0, 0, 1]
    assert engine.missing([old.digest, new.digest]) == [new.digest]
    assert engine.write(Write(objects=[new, old])).new_objects == 1
    assert_reads_back(engine, old, new)


def test_an_object_deleted_and_stored_again_within_a_batch_is_there(engine: LmdbEngine) -> None:
    blob = new_blob(b"back again")
    put, gone = Write(objects=[blob]), Write(deletes=[blob.digest])
    assert stored_anew(together(engine, put, gone, put)) == [1, 0, 1]
    assert_reads_back(engine, blob)
    assert len(all_objects(engine)) == 1


def test_long_writes_that_share_objects_are_all_answered(engine: LmdbEngine) -> None:
    """Each thread prepares its own long write, and all of them draft the same chunks."""
    for round_ in range(5):
        shared = random.Random(round_).randbytes(300_000)
        contents = [shared + bytes([number]) * 9000 for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            names = list(pool.map(Store(engine).put_blob, contents))
        assert names == [Digest.of_blob(content) for content in contents]
        assert [Store(engine).get_blob(name) for name in names] == contents


def test_an_interrupted_batch_runs_again_with_the_same_results(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted leader leaves its batch to the next."""
    blob = new_blob(b"twice")
    write = Write(objects=[blob, new_parent(blob)], rows=[PutRow("heads", b"key", blob.digest)])
    refused = Write(objects=[new_blob(b"late")], conditions=[RowIs("heads", b"other", b"there")])
    entry = BatchBuilder.entry

    def interrupted(builder: BatchBuilder) -> None:
        entry(builder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchBuilder, "entry", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, [write, refused])
    assert all_objects(engine) == []
    engine.write(Write(rows=[PutRow("heads", b"other", b"there")]))
    assert stored_anew(run(engine, [write, refused])) == [2, 1]
    assert_reads_back(engine, *write.objects, *refused.objects)
    assert find_row(engine, "heads", b"key") == blob.digest


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_agree_with_the_reference_run_in_the_same_order(
    engine: LmdbEngine, seed: int
) -> None:
    rng = random.Random(seed)
    reference = MemoryEngine()
    pool: list[NewObject] = []
    for number in range(30):
        children = rng.sample(pool, min(len(pool), rng.choice([0, 0, 1, 3])))
        pool.append(new_parent(*children) if children else new_blob(b"%d" % number))
    keys = (b"a", b"b", b"c")

    def write() -> Write:
        start = rng.randrange(len(pool))
        value = rng.choice([None, b"x", b"y" * 5000])
        place = ("heads", rng.choice(keys))
        return Write(
            objects=pool[start : start + rng.choice([0, 1, 3, 10])],
            conditions=[RowIs(*place, value)] * rng.choice([0, 0, 1]),
            rows=[
                DeleteRow("heads", key)
                if rng.random() < 0.5
                else PutRow("heads", key, rng.choice([b"x", b""]))
                for key in rng.choices(keys, k=rng.choice([0, 1, 3]))
            ],
            # Only what nothing links to, as a collector would.
            deletes=[pool[-1].digest] * rng.choice([0, 0, 0, 1]),
        )

    for _ in range(25):
        writes = [write() for _ in range(rng.choice([1, 1, 4, 12]))]
        if rng.random() < 0.2:
            engine.apply_log()
        for one, answer in zip(writes, run(engine, writes), strict=True):
            try:
                expected: Any = reference.write(one).new_objects
            except CasstoreError as exc:
                expected = type(exc)
            assert stored_anew([answer]) == [expected], seed
        assert all_rows(engine, "heads") == all_rows(reference, "heads")
        assert {info.digest for info in all_objects(engine)} == {
            info.digest for info in all_objects(reference)
        }


def test_damage_that_one_write_meets_does_not_fail_the_others_of_its_batch(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is met before the write has added anything to the commit."""
    again, fresh, other = new_blob(b"again"), new_blob(b"fresh"), new_blob(b"other")
    engine.write(Write(objects=[again]))

    def damaged(builder: BatchBuilder, object_id: int) -> int:
        raise CorruptionError("no slab holds it")

    monkeypatch.setattr(BatchBuilder, "_stored_at_ms", damaged)
    answers = together(engine, Write(objects=[again, fresh]), Write(objects=[other]))
    assert [type(answer) for answer in answers] == [CorruptionError, WriteResult]
    assert engine.missing([fresh.digest, other.digest]) == [fresh.digest]
