"""The journal: what is not yet laid into its tables is there all the same, for everybody."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from casstore.engine.lmdb import journal, packing
from casstore.engine.lmdb import rows as rows_module
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.journal import Journal, settle_now
from casstore.engine.lmdb.rows import JOURNAL, SUM_KEY, RowSum, row_hash
from casstore.engine.protocol import (
    DeleteRow,
    NewObject,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowKey,
    Write,
)
from casstore.errors import ConditionFailedError, CorruptionError
from casstore.format.canonical import pack_checked
from casstore.format.hashing import Kind, digest_of
from casstore.maintenance import gc
from casstore.maintenance.space import measure
from casstore.store import Store

ROOT = Path(__file__).parent.parent
ENGINES = (0, 1)


@pytest.fixture(params=ENGINES, ids=["lmdb09", "lmdb10"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbEngine]:
    made = LmdbEngine(str(tmp_path / "s"), durability="process", lmdb_version=request.param)
    yield made
    made.close()


def blob(number: int) -> NewObject:
    data = b"blob %d" % number
    return NewObject(digest_of(Kind.BLOB, data), Kind.BLOB, data, ())


def entries(engine: LmdbEngine) -> int:
    with engine._env.reading() as txn:
        number: int = txn.stat(engine._env.journal)["entries"]
        return number


def laid(engine: LmdbEngine, table: str) -> list[bytes]:
    """The keys that the table itself holds."""
    with engine._env.reading() as txn:
        return [bytes(key) for key, _ in txn.cursor(db=engine._env.tables[table])]


def test_a_small_write_is_one_entry_and_no_row(engine: LmdbEngine) -> None:
    engine.write(Write(objects=[blob(1)], rows=[PutRow("heads", b"a", b"1")]))
    assert entries(engine) == 1
    assert laid(engine, "heads") == []
    assert engine.get_rows([RowKey("heads", b"a")]) == [b"1"]
    assert engine.missing([blob(1).digest]) == []
    assert engine.verify() == 1


def test_when_enough_has_gathered_it_is_laid_in_place(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SETTLE_CHANGES", 6)
    for number in range(3):
        engine.write(Write(objects=[blob(number)], rows=[PutRow("heads", b"a", b"%d" % number)]))
    assert (entries(engine), laid(engine, "heads")) == (3, [])
    engine.write(Write(objects=[blob(3)], rows=[PutRow("heads", b"b", b"3")]))
    assert (entries(engine), laid(engine, "heads")) == (0, [b"a", b"b"])
    assert engine.get_rows([RowKey("heads", b"a"), RowKey("heads", b"b")]) == [b"2", b"3"]
    assert engine.verify() == 4


def test_a_long_row_is_laid_in_place_at_once(engine: LmdbEngine) -> None:
    engine.write(Write(rows=[PutRow("heads", b"a", b"1")]))
    engine.write(Write(rows=[PutRow("records", b"long", bytes(9_000))]))
    assert (entries(engine), laid(engine, "heads")) == (0, [b"a"])
    assert laid(engine, "records") == [b"long"]


def test_many_bytes_are_laid_in_place_before_many_changes(engine: LmdbEngine) -> None:
    most = 0
    for number in range(400):
        engine.write(Write(rows=[PutRow("records", b"%d" % (number % 3), bytes(1_900))]))
        most = max(most, entries(engine))
    assert most * 1_900 <= journal.SETTLE_BYTES < 400 * 1_900
    assert engine.verify() == 0


def test_rows_are_read_in_order_wherever_they_lie(engine: LmdbEngine) -> None:
    keys = [b"%02d" % number for number in range(20)]
    engine.write(Write(rows=[PutRow("records", key, b"old") for key in keys[::2]]))
    settle_now(engine._env)
    changes: list[RowChange] = [PutRow("records", key, b"new") for key in keys[1::4]]
    changes += [PutRow("records", keys[4], b"changed"), DeleteRow("records", keys[6])]
    changes += [DeleteRow("records", keys[0]), DeleteRow("records", b"never there")]
    engine.write(Write(rows=changes))
    assert entries(engine) == 1
    wanted = dict.fromkeys(keys[::2], b"old") | dict.fromkeys(keys[1::4], b"new")
    wanted[keys[4]] = b"changed"
    del wanted[keys[6]], wanted[keys[0]]
    rows = [Row(key, wanted[key]) for key in sorted(wanted)]
    assert engine.scan_rows("records") == rows
    assert engine.scan_rows("records", reverse=True) == rows[::-1]
    for limit in range(1, len(rows) + 1):
        assert engine.scan_rows("records", limit=limit) == rows[:limit]
        assert engine.scan_rows("records", limit=limit, reverse=True) == rows[::-1][:limit]
    for start in keys:
        for stop in keys:
            part = [row for row in rows if start <= row.key < stop]
            assert engine.scan_rows("records", start=start, stop=stop) == part
            assert engine.scan_rows("records", start=start, stop=stop, reverse=True) == part[::-1]


def test_an_object_deleted_and_stored_again_is_named_once(engine: LmdbEngine) -> None:
    item = blob(1)
    engine.write(Write(objects=[item]))
    settle_now(engine._env)
    engine.write(Write(deletes=[item.digest]))
    assert engine.missing([item.digest]) == [item.digest]
    engine.write(Write(objects=[item]))
    [found] = engine.get_many([item.digest])
    assert found is not None
    assert found.data == item.data
    assert engine.verify() == 1
    settle_now(engine._env)
    assert engine.verify() == 1
    [info] = engine.scan_objects()
    assert info.id == 2
    engine.write(Write(deletes=[item.digest]))
    settle_now(engine._env)
    assert engine.verify() == 0


@pytest.mark.parametrize("seed", range(4))
def test_who_follows_sees_what_is_there(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Several followers, as other processes are: some look often, some hardly ever."""
    monkeypatch.setattr(journal, "SETTLE_CHANGES", 9)
    rng = random.Random(seed)
    env = engine._env
    followers = [Journal(env) for _ in range(3)]
    rows: dict[bytes, bytes] = {}
    objects: dict[bytes, bool] = {}
    for step in range(250):
        key = b"%d" % rng.randrange(6)
        item = blob(rng.randrange(12))
        change = rng.randrange(5)
        if change == 0:
            engine.write(Write(rows=[DeleteRow("records", key)]))
            rows.pop(key, None)
        elif change == 1 and objects.get(item.digest):
            engine.write(Write(deletes=[item.digest]))
            objects[item.digest] = False
        else:
            rows[key] = b"%d" % step
            engine.write(Write(objects=[item], rows=[PutRow("records", key, rows[key])]))
            objects[item.digest] = True
        for often, follower in zip((1, 3, 40), followers, strict=True):
            if step % often:
                continue
            with env.reading() as txn:
                pending = follower.at(txn, txn.id())
                for number in range(6):
                    name = b"%d" % number
                    assert pending.find_row(txn, env, "records", name) == rows.get(name)
                for digest, stored in objects.items():
                    assert (pending.find_id(txn, env, digest) is not None) == stored
    engine.verify()


def test_a_gap_is_proven_once_and_only_while_the_tables_stay(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [PutRow("records", b"k%d" % number, b"value") for number in range(0, 10, 2)]
    engine.write(Write(rows=rows))
    settle_now(engine._env)
    looked: list[bytes] = []

    def find(cursor: Any, table: str, key: bytes) -> Any:
        looked.append(key)
        return rows_module.find_row(cursor, table, key)

    monkeypatch.setattr(journal, "find_row", find)
    names = [b"a", b"k1", b"k15", b"k1x", b"k3", b"k9", b"z"]
    wanted = [RowKey("records", name) for name in names]
    assert engine.get_rows(wanted) == [None] * len(names)
    assert looked == [b"a", b"k1", b"k3", b"k9"]
    assert engine.get_rows(wanted) == [None] * len(names)
    assert looked == [b"a", b"k1", b"k3", b"k9"]
    # Neighbours are no part of a gap.
    assert engine.get_rows([RowKey("records", b"k2")]) == [b"value"]
    # In the journal, in place, and gone again: each is seen at once.
    engine.write(Write(rows=[PutRow("records", b"k15", b"new")]))
    assert engine.get_rows(wanted) == [None, None, b"new", *[None] * 4]
    settle_now(engine._env)
    assert engine.get_rows(wanted) == [None, None, b"new", *[None] * 4]
    engine.write(Write(rows=[DeleteRow("records", b"k15")]))
    settle_now(engine._env)
    assert engine.get_rows(wanted) == [None] * len(names)


def test_another_process_reads_what_was_not_laid_and_adds_to_it(engine: LmdbEngine) -> None:
    engine.write(Write(objects=[blob(1)], rows=[PutRow("records", b"a", b"1")]))
    other = """
import sys
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.journal import settle_now
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
engine = LmdbEngine(sys.argv[1], durability="process")
assert engine.get_rows([RowKey("records", b"a")]) == [b"1"]
engine.write(Write(conditions=[RowIs("records", b"a", b"1")], rows=[PutRow("records", b"a", b"2")]))
if sys.argv[2] == "settle":
    settle_now(engine._env)
engine.write(Write(rows=[PutRow("records", b"b", b"3")]))
"""
    for how in ("leave", "settle", "leave"):
        argv = [sys.executable, "-c", other, engine.path, how]
        subprocess.run(argv, cwd=ROOT, check=True)
        assert [row.value for row in engine.scan_rows("records")] == [b"2", b"3"]
        with pytest.raises(ConditionFailedError):
            engine.write(Write(conditions=[RowIs("records", b"a", b"1")]))
        engine.write(Write(rows=[PutRow("records", b"a", b"1")]))
    assert engine.verify() == 1


def test_a_reader_of_an_older_state_sees_that_state(engine: LmdbEngine) -> None:
    engine.write(Write(rows=[PutRow("records", b"a", b"1")]))
    env = engine._env
    with env.reading() as txn:
        seen = txn.id()
        for number in range(2, 6):
            env.gate.leave()  # as another thread would
            engine.write(Write(rows=[PutRow("records", b"a", b"%d" % number)]))
            env.gate.enter()
        pending = engine._journal.at(txn, seen)
        assert pending.find_row(txn, env, "records", b"a") == b"1"
    assert engine.get_rows([RowKey("records", b"a")]) == [b"5"]


def test_what_is_stored_while_packing_begins_is_not_taken_for_dead(
    engine: LmdbEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is in the journal alone, and packing looks into the index."""
    engine.write(Write(objects=[blob(1)]))
    engine.write(Write(objects=[blob(2)]))

    def settle_and_store(env: Environment) -> None:
        settle_now(env)
        engine.write(Write(objects=[blob(3)]))
        engine.write(Write(objects=[blob(4)]))

    monkeypatch.setattr(packing, "settle_now", settle_and_store)
    report = engine.pack()
    assert (report.slabs_before, report.slabs_after, report.objects_dropped) == (2, 1, 0)
    assert engine.verify() == 4


def test_a_collection_takes_names_that_only_the_journal_has(engine: LmdbEngine) -> None:
    with Store(engine) as store:
        kept = store.put_blob(b"kept")
        lost = store.put_blob(b"nobody reaches this")
        store.tag("kept", kept)
        assert (entries(engine), laid(engine, "pins")) == (3, [])
        assert gc.collect(store, grace_ms=0, dry_run=True).objects_unreached == 1
        assert entries(engine) == 3
        assert gc.collect(store, grace_ms=0).objects_swept == 1
        assert engine.missing([kept, lost]) == [lost]
        assert engine.verify() == 1
        assert store.put_blob(b"nobody reaches this") == lost
        assert engine.verify() == 2


def test_a_row_that_the_journal_took_away_keeps_nothing(engine: LmdbEngine) -> None:
    with Store(engine) as store:
        kept = store.put_blob(b"kept")
        store.tag("kept", kept)
        settle_now(engine._env)
        assert gc.collect(store, grace_ms=0).objects_swept == 0
        store.unpin("kept")
        assert laid(engine, "pins") != []
        assert gc.collect(store, grace_ms=0).objects_swept == 1
        assert engine.missing([kept]) == [kept]


@pytest.mark.parametrize("settled", [False, True])
def test_a_collection_counts_an_object_that_was_stored_again_once(
    engine: LmdbEngine, settled: bool
) -> None:
    with Store(engine) as store:
        gone, back = store.put_blob(b"gone"), store.put_blob(b"and back")
        settle_now(engine._env)
        engine.write(Write(deletes=[gone, back]))
        store.put_blob(b"and back")
        if settled:
            settle_now(engine._env)
        report = gc.collect(store, grace_ms=0)
        assert (report.objects_kept, report.objects_unreached, report.objects_swept) == (0, 1, 1)
        assert engine.verify() == 0


def test_what_only_the_journal_names_is_not_dead(engine: LmdbEngine) -> None:
    with Store(engine) as store:
        for number in range(5):
            store.put_blob(b"blob %d" % number)
        assert entries(engine) == 5
        found = measure(store).slabs
        assert (found.objects, found.dead_objects) == (5, 0)
        assert store.pack(min_age_ms=0).objects_dropped == 0
        assert engine.verify() == 5


def tamper(path: str, change: str) -> None:
    """Change the last entry of a closed store's journal, the sum with it or not."""
    env = lmdb.open(path, max_dbs=32, map_size=1 << 30)
    database = env.open_db(b"journal", create=False)
    with env.begin(write=True) as txn:
        cursor = txn.cursor(db=database)
        assert cursor.last()
        key, stored = cursor.item()
        if change == "flip a bit":
            txn.put(key, bytes((stored[0] ^ 1,)) + stored[1:], db=database)
        elif change == "lose":
            txn.delete(key, db=database)
        else:
            # Proven, summed, and senseless: no list, or a table that does not exist.
            value = pack_checked(
                [] if change == "no list" else [["no table", b"a", b"b"], b"", b""]
            )
            hashed = row_hash(JOURNAL, key, value)
            txn.put(key, value + hashed[:8], db=database)
            total = RowSum(txn.get(SUM_KEY))
            total.subtract(row_hash(JOURNAL, key, stored[:-8]))
            total.add(hashed)
            txn.put(SUM_KEY, total.encode())
    env.close()


@pytest.mark.parametrize("change", ["flip a bit", "no list", "no such table"])
def test_a_damaged_entry_is_never_read_as_data(tmp_path: Path, change: str) -> None:
    path = str(tmp_path / "s")
    engine = LmdbEngine(path, durability="process")
    engine.write(Write(rows=[PutRow("records", b"a", b"1")]))
    engine.close()
    tamper(path, change)
    engine = LmdbEngine(path, durability="process")
    with pytest.raises(CorruptionError):
        engine.get_rows([RowKey("records", b"a")])
    with pytest.raises(CorruptionError):
        engine.write(Write(rows=[PutRow("records", b"b", b"1")]))
    with pytest.raises(CorruptionError):
        engine.verify()
    engine.close()
    with pytest.raises(CorruptionError):
        LmdbEngine(path, verify=True)


def test_a_lost_entry_is_found_by_the_sum(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    engine = LmdbEngine(path, durability="process")
    for number in range(2):
        engine.write(Write(rows=[PutRow("records", b"a", b"%d" % number)]))
    engine.close()
    tamper(path, "lose")
    with pytest.raises(CorruptionError, match="not those last written"):
        LmdbEngine(path, verify=True)


def test_a_row_whose_key_is_longer_than_any_can_be_is_damaged() -> None:
    """A flipped bit in a page makes a key long, and LMDB hands it out."""
    with pytest.raises(CorruptionError, match="a key of 600 bytes"):
        rows_module.prove_row("heads", bytes(600), b"value and checksum")
