"""gc on a damaged store: what is reached and cannot be found stops it, and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from casstore.engine.lmdb import slab as slabs
from casstore.errors import CorruptionError
from casstore.format.digest import plain_hash
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.session.data import Checkpoint
from casstore.store import Store
from tests.maintenance.wounds import LONG, open_store, step, wounding

# Long enough to be an object of its own, linked to by the value around it.
INNER = "inner " + LONG


def refused(store: Store, naming: str) -> None:
    """Planning and collecting say no, both with the reason, and nothing goes."""
    before = [item.digest for item in store.engine.scan_objects(limit=100_000)]
    for report in (gc.plan(store, grace_ms=0).report, gc.collect(store, grace_ms=0)):
        assert report.outcome is gc.Outcome.REFUSED
        assert isinstance(report.problem, CorruptionError)
        assert naming in str(report.problem)
        assert not report.objects_swept
    assert [item.digest for item in store.engine.scan_objects(limit=100_000)] == before


def test_gc_refuses_to_run_if_a_reached_object_is_not_in_the_index(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        inner = store.put_blob(INNER.encode())
        step(store, "s", "a", checkpoint=Checkpoint(tool_state={"text": INNER, "n": 1}))
        store.put_blob(b"nobody reaches this")
    with wounding(tmp_path / "s") as cut:
        cut.unname(inner)
    with open_store(tmp_path / "s") as store:
        refused(store, inner.hex())


def test_gc_refuses_to_run_if_a_reached_object_is_in_no_slab(
    tmp_path: Path, slab_a_commit: None
) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_blob(INNER.encode())
        step(store, "s", "a", checkpoint=Checkpoint(tool_state={"text": INNER, "n": 1}))
        store.put_blob(b"nobody reaches this")
    with wounding(tmp_path / "s") as cut:
        key, value = cut.rows("slabs")[0]
        assert slabs.count_of(value) == 1
        cut.delete("slabs", key)
    with open_store(tmp_path / "s") as store:
        refused(store, "no slab holds it")


@pytest.mark.parametrize("far", [0, 200])
def test_gc_refuses_to_run_if_an_object_links_to_itself_or_to_an_id_below_the_first(
    tmp_path: Path, slab_a_commit: None, far: int
) -> None:
    with open_store(tmp_path / "s") as store:
        store.put_blob(INNER.encode())
        outer = store.put_value({"text": INNER, "n": 1})
        store.tag("tag", outer)
    with wounding(tmp_path / "s") as cut:
        for key, value in cut.rows("slabs"):
            found = slabs.read_directory(key, value)
            if found.digests == outer:
                assert len(found.distances) == 1
                links = value[: found.payload_at - 1] + bytes((far,))
                covered = key + links[: slabs.HEADER_BYTES - 8] + links[slabs.HEADER_BYTES :]
                proof = plain_hash(covered, 8)
                sealed = links[: slabs.HEADER_BYTES - 8] + proof + links[slabs.HEADER_BYTES :]
                cut.put("slabs", key, sealed + value[found.payload_at :])
    with open_store(tmp_path / "s") as store:
        refused(store, f"object {outer.hex()} is older than one it links to")


@pytest.mark.parametrize("wound", ["name", "slab"])
def test_gc_stops_if_a_writer_makes_a_damaged_object_reachable(
    tmp_path: Path, slab_a_commit: None, wound: str
) -> None:
    """Nobody reached it when all was marked; the writer's own look ends at what it links to."""
    with open_store(tmp_path / "s") as store:
        inner = store.put_blob(INNER.encode())
        outer = store.put_value({"text": INNER, "n": 1})
        step(store, "s", "a")
        for number in range(30):
            store.put_blob(b"nobody reaches this %d" % number)
    with wounding(tmp_path / "s") as cut:
        if wound == "name":
            cut.unname(inner)
        else:
            cut.delete("slabs", cut.rows("slabs")[0][0])
    with open_store(tmp_path / "s") as store:

        def link(at: Step) -> None:
            if at.phase == "sweep" and at.done == 5:
                link_it = Checkpoint(tool_state=casstore.Link(outer))
                step(store, "s", "b", checkpoint=link_it)

        report = gc.collect(store, grace_ms=0, batch=5, progress=link)
        assert report.outcome is gc.Outcome.FAILED
        assert isinstance(report.problem, CorruptionError)
        assert report.objects_swept == 5
        assert store.missing([outer]) == []
