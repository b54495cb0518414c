"""What a store says of its space, compared with what others say of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import lmdb
import pytest

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write
from casstore.errors import InvalidInputError
from casstore.maintenance.compact import compact
from casstore.maintenance.progress import Step
from casstore.maintenance.space import measure
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from tests.maintenance.wounds import wounding

pytestmark = pytest.mark.usefixtures("slab_a_commit")


def fill(store: Store, turns: int = 150) -> None:
    source = random.Random(5)
    for turn in range(turns):
        for name in ("a", "b", "c", "d"):
            text = " ".join(str(source.randrange(1000)) for _ in range(source.randrange(1, 300)))
            draft = NodeDraft(f"n{turn}", {"role": "user", "content": text})
            store.session(name).commit(Commit(append=[draft]))


def delete_some(store: Store) -> list[bytes]:
    """Objects that lose their names; nothing links to them."""
    source = random.Random(6)
    gone = [store.put_blob(source.randbytes(source.randrange(1, 5000))) for _ in range(50)]
    store.engine.write(Write(deletes=gone))
    return list(gone)


@pytest.mark.parametrize("version", [0, 1])
def test_the_space_report_agrees_with_lmdb_and_the_file_system(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "s"
    with casstore.open(path, "relaxed", lmdb_version=version, auto_train=False) as store:
        fill(store)
        gone = delete_some(store)
        report = measure(store)
        infos = store.engine.scan_objects(limit=1_000_000)
        objects = store.engine.get_many([info.digest for info in infos])
        assert isinstance(store.engine, LmdbEngine)
        tables_bytes = store.engine.used_bytes()
    assert report.file_bytes == os.stat(path / "data.mdb").st_size
    assert report.free_bytes == report.file_bytes - report.used_bytes > 0
    # Plain LMDB counts the same rows, bytes and pages.
    env = lmdb.open(str(path), max_dbs=64, readonly=True)
    # LMDB 1.0 ends names in a zero byte.
    names = [
        name.decode().rstrip("\0") for name in _names(env) if name not in (b"rows_sum", b"log")
    ]
    assert sorted(names) == sorted(table.name for table in report.tables)
    for table in report.tables:
        database = env.open_db(table.name.encode(), create=False)
        with env.begin() as txn:
            rows = list(txn.cursor(db=database))
            stat = txn.stat(database)
        assert table.rows == len(rows)
        assert table.content_bytes == sum(len(key) + len(value) for key, value in rows)
        assert table[3:6] == (stat["branch_pages"], stat["leaf_pages"], stat["overflow_pages"])
    env.close()
    # Two meta pages and the table of tables hold the file together.
    assert report.used_bytes == tables_bytes + 3 * report.page_bytes
    assert report.content_bytes == sum(table.content_bytes for table in report.tables)
    # What the slabs say, against the objects themselves.
    found = report.slabs
    assert found.objects == len(infos)
    assert found.logical_bytes == sum(len(item.data) for item in objects if item is not None)
    assert found.dead_objects == len(gone)
    sizes = dict.fromkeys(gone, 0)
    source = random.Random(6)
    for digest in sizes:
        sizes[digest] = len(source.randbytes(source.randrange(1, 5000)))
    assert found.dead_raw_bytes == sum(sizes.values())
    # They were random bytes, so their share is what they are.
    assert found.dead_stored_bytes == pytest.approx(found.dead_raw_bytes, rel=0.02)
    assert report.live_bytes == report.content_bytes - found.dead_stored_bytes
    assert found.damaged == ()


def _names(env: lmdb.Environment) -> list[bytes]:
    with env.begin() as txn:
        return [bytes(key) for key, _ in txn.cursor()]


@pytest.mark.parametrize("version", [0, 1])
def test_compacting_frees_the_estimated_space(tmp_path: Path, version: int) -> None:
    path = tmp_path / "s"
    with casstore.open(path, "relaxed", lmdb_version=version, auto_train=False) as store:
        fill(store)
        delete_some(store)
        store.pack(min_age_ms=0)
        report = measure(store)
        assert report.reclaimable_by_compact > report.file_bytes / 4
        assert report.slabs.dead_objects == 0
    done = compact(path)
    assert done.file_bytes_after == pytest.approx(report.tidy_file_bytes, abs=6 * 4096, rel=0.02)
    with casstore.open(path, "relaxed") as store:
        after = measure(store)
    assert after.file_bytes == done.file_bytes_after
    assert after.content_bytes == done.content_bytes
    assert after.reclaimable_by_compact <= 6 * 4096
    assert after.fragmentation < report.fragmentation


def test_packing_frees_the_estimated_space(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        fill(store)
        delete_some(store)
        before = measure(store)
        packed = store.pack(min_age_ms=0)
        after = measure(store)
    assert packed.objects_dropped == before.slabs.dead_objects > 0
    assert packed.bytes_before - packed.bytes_after >= before.reclaimable_by_pack > 0
    assert before.slabs.small_slabs > 500
    assert after.slabs.small_slabs <= 1
    assert before.slabs.stored_bytes - after.slabs.stored_bytes == (
        packed.bytes_before - packed.bytes_after
    )
    assert after.reclaimable_by_pack == 0


def test_a_damaged_slab_is_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        fill(store, 10)
        sound = measure(store)
    with wounding(tmp_path / "s") as cut:
        key, value = cut.rows("slabs")[0]
        cut.put("slabs", key, value[:40] + b"\xff" + value[41:])
    with casstore.open(tmp_path / "s", "relaxed") as store:
        report = measure(store)
    assert [damage.last_id for damage in report.slabs.damaged] == [int.from_bytes(key, "big")]
    assert report.slabs.slabs == sound.slabs.slabs
    assert report.slabs.objects < sound.slabs.objects


def test_it_reports_progress_and_an_empty_store_is_small(tmp_path: Path) -> None:
    steps: list[Step] = []
    with casstore.open(tmp_path / "s") as store:
        report = measure(store, progress=steps.append)
        assert report.slabs.slabs == report.slabs.logical_bytes == 0
        assert report.compression == report.reclaimable_by_pack == 0
        assert steps[-1].done == steps[-1].total
        assert steps[-1].unit == "rows"
    with Store(MemoryEngine()) as store, pytest.raises(InvalidInputError):
        measure(store)
