"""Rebuilding: what is derived comes back as it was, and what was collected stays gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DEFAULT_GRACE_MS
from casstore.errors import CorruptionError, InvalidInputError, ReadOnlyError
from casstore.maintenance import gc
from casstore.maintenance.check import check, rebuild
from casstore.session import keys
from casstore.session.state import decode_head
from casstore.store import Store
from casstore.testing import ManualClock
from tests.maintenance.wounds import (
    LONG,
    copy_as_killed,
    everything,
    flip,
    open_store,
    populate,
    step,
    wounding,
)

pytestmark = pytest.mark.usefixtures("slab_a_commit")


def names(store: Store) -> dict[bytes, int]:
    return {bytes(info.digest): info.id for info in store.engine.scan_objects(limit=1_000_000)}


@pytest.mark.parametrize("engine", [0, 1])
def test_rebuild_restores_a_lost_index_exactly(tmp_path: Path, engine: int) -> None:
    path = tmp_path / "s"
    with open_store(path, lmdb_version=engine) as store:
        populate(store)
        before = everything(store), names(store)
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        report = rebuild(store)
        assert report.objects_named == report.objects_found == len(before[1])
        assert report.objects_missing == 0
        assert (everything(store), names(store)) == before
        assert check(store, level="full").counts == {}


def test_rebuild_does_not_change_a_sound_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        populate(store)
        before = everything(store), names(store)
        report = rebuild(store)
        assert report == report._replace(objects_found=0, objects_dropped=0, objects_missing=0)
        assert (everything(store), names(store)) == before


def test_rebuild_does_not_restore_collected_objects(tmp_path: Path) -> None:
    """Their bytes may still lie in slabs that are not packed."""
    path, clock = tmp_path / "s", ManualClock()
    with Store(LmdbEngine(str(path), durability="relaxed", clock=clock)) as store:
        populate(store)
        step(store, "gone", "x", text=LONG)
        node = store.session("gone").nodes()[0].digest
        store.delete_session("gone")
        clock.now_ms += DEFAULT_GRACE_MS + 1
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        # Collected, but not packed: what lies beside others in its slab is still there.
        assert gc.collect(store).objects_swept > 0
        before = everything(store), names(store)
        assert node not in before[1]
    with wounding(path) as cut:
        slabs = b"".join(value for _, value in cut.rows("slabs"))
        assert slabs.count(node)
        cut.drop("index")
    with Store(LmdbEngine(str(path), durability="relaxed", clock=clock)) as store:
        assert rebuild(store).objects_missing == 0
        assert (everything(store), names(store)) == before


def test_rebuild_after_gc_restores_everything_that_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        populate(store)
        store.delete_session("s2")
        gc.collect(store, grace_ms=0)
        step(store, "s1", "late", text=LONG)
        before = everything(store), names(store)
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        rebuild(store, grace_ms=0)
        assert (everything(store), names(store)) == before
        step(store, "path", "on it goes")
        step(store, "fork", "and here")
        assert check(store, level="full").counts == {}


def test_young_objects_that_nothing_reaches_yet_are_kept(tmp_path: Path) -> None:
    path, clock = tmp_path / "s", ManualClock()
    with Store(LmdbEngine(str(path), durability="relaxed", clock=clock)) as store:
        old = store.put_blob(b"old")
        clock.now_ms += 10_000
        young = store.put_value({"text": LONG})
    for grace_ms, expected in ((5_000, [old]), (0, [old, young])):
        with wounding(path) as cut:
            cut.drop("index")
        with Store(LmdbEngine(str(path), durability="relaxed", clock=clock)) as store:
            rebuild(store, grace_ms=grace_ms)
            assert store.missing([old, young]) == expected


def test_an_object_stored_a_second_time_is_found_under_its_second_id(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        first = store.put_blob(LONG.encode())
        store.put_blob(b"something else")
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        assert gc.collect(store, grace_ms=0).objects_swept == 2
        store.tag("kept", store.put_blob(LONG.encode()))
        before = names(store)
        assert before[first] > 2
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        rebuild(store, grace_ms=0)
        assert names(store) == before


def test_rebuild_does_not_restore_a_collected_object_with_a_missing_child(tmp_path: Path) -> None:
    """Its part was stored a second time, under another id than the one that it links to."""
    path = tmp_path / "s"
    with open_store(path) as store:
        value = store.put_value({"text": LONG})
        gc.collect(store, grace_ms=0)
        store.tag("kept", store.put_blob(LONG.encode()))
        before = names(store)
        assert len(before) == 1
        rebuild(store, grace_ms=3_600_000)
        assert names(store) == before
        assert check(store, level="full").counts == {}
        assert value not in store
    # Young things that are whole do come back, and of two the later one.
    with open_store(path) as store:
        again = store.put_value({"text": LONG})
        whole = names(store)
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        assert rebuild(store, grace_ms=3_600_000).objects_found == 2
        assert names(store) == whole
        assert store.get_value(again) == {"text": LONG}


def test_rebuild_indexes_the_copy_of_an_object_that_others_link_to(tmp_path: Path) -> None:
    """A writer that met a damaged index stored again what it did not find there."""
    path = tmp_path / "s"
    with open_store(path) as store:
        value = store.put_value({"text": LONG})
        store.tag("value", value)
        # The newest slab never goes, whether or not anything of it has a name.
        store.tag("other", store.put_blob(b"something else"))
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        text = store.put_blob(LONG.encode())
        store.tag("text", text)
        assert rebuild(store, grace_ms=0).objects_missing == 0
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        engine.pack()
        assert store.get_value(value) == {"text": LONG}
        assert store.get_blob(text) == LONG.encode()
        assert check(store, level="full").counts == {}


def test_rebuild_does_not_index_an_object_whose_bytes_pack_removed(tmp_path: Path) -> None:
    """Packing took them, because the index did not name it any more."""
    path = tmp_path / "s"
    with open_store(path) as store:
        # Between two that are alive it keeps its place.
        first = store.put_blob(b"first")
        store.tag("first", first)
        value = store.put_value({"text": LONG})
        store.tag("value", value)
        [text] = set(names(store)) - {bytes(first), bytes(value)}
    with wounding(path) as cut:
        cut.unname(text)
    with open_store(path) as store:
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        assert engine.pack().objects_dropped == 1
        assert rebuild(store, grace_ms=0).objects_missing == 1
        assert set(names(store)) == {bytes(first), bytes(value)}
        assert text in store.missing([text])


def test_names_and_rows_that_are_in_the_log_alone_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    original = tmp_path / "s"
    with open_store(original) as store:
        populate(store)
    with open_store(original) as store:
        for number in range(5):
            step(store, "s1", f"late {number}", text=LONG)
        before = everything(store), names(store)
        copy_as_killed(store, path)
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        report = rebuild(store)
        assert (report.objects_named, report.objects_missing) == (len(before[1]), 0)
        assert (everything(store), names(store)) == before
        assert check(store, level="full").counts == {}
        step(store, "s1", "more")
    with open_store(path, verify=True) as store:
        assert check(store, level="full").counts == {}


def test_rebuild_keeps_objects_that_only_rows_in_the_log_reach(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        step(store, "s1", "a", text=LONG)
        before = everything(store), names(store)
        report = rebuild(store, grace_ms=0)
        assert (report.objects_named, report.objects_dropped) == (len(before[1]), 0)
        assert (everything(store), names(store)) == before


def test_rebuild_of_a_store_with_a_damaged_row_raises_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        populate(store)
        gc.collect(store, grace_ms=0)
        before = names(store)
    with wounding(path) as cut:
        key = keys.session_key("s1")
        # It names another manifest now, which would let the true one be taken for garbage.
        cut.put("heads", key, flip(cut.get("heads", key), 30))
    with open_store(path) as store:
        with pytest.raises(CorruptionError):
            rebuild(store, grace_ms=0)
        assert names(store) == before


def test_rebuild_counts_objects_that_no_slab_holds(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        populate(store)
    with wounding(path) as cut:
        manifest = decode_head(cut.value("heads", keys.session_key("s1"))).manifest
        for key, value in cut.rows("slabs"):
            if manifest in value[:4000]:
                cut.delete("slabs", key)
                break
    with open_store(path) as store:
        report = rebuild(store)
        assert report.objects_missing >= 1


def test_rebuild_refuses_other_engines_read_only_stores_and_invalid_arguments(
    tmp_path: Path,
) -> None:
    with Store(MemoryEngine()) as store, pytest.raises(InvalidInputError):
        rebuild(store)
    with open_store(tmp_path / "s") as store, pytest.raises(InvalidInputError):
        rebuild(store, grace_ms=-1)
    with open_store(tmp_path / "s", readonly=True) as store, pytest.raises(ReadOnlyError):
        rebuild(store)
