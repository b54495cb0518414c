"""Deleting on a full disk: a store reserves the space that it needs for that."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import casstore
from campaigns import diskfull
from casstore import Commit, NodeDraft, Store
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import StorageFullError
from casstore.maintenance import gc, vacuum


@pytest.fixture(params=diskfull.FILE_SYSTEMS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with diskfull.mounted(request.param, tmp_path) as place:
        if place is None:
            pytest.skip(f"this user cannot mount a {request.param}")
        yield place


def say(store: Store, session: str, node: str, rng: random.Random) -> None:
    draft = NodeDraft(node, {"content": rng.randbytes(2000)})
    store.session(session).commit(Commit(append=[draft]))


def fill(store: Store, disk: Path, rng: random.Random) -> int:
    """Commit until the disk is full, and then fill what is left of it with another file."""
    number = 0
    try:
        while True:
            for node in range(10):
                say(store, f"s{number}", f"n{node}", rng)
            number += 1
    except StorageFullError:
        pass
    with suppress(OSError), (disk / "other").open("wb", 0) as other:
        while True:
            other.write(bytes(4096))
    return number


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_sessions_can_be_deleted_collected_vacuumed_and_packed_on_a_full_disk(
    disk: Path, durability: str
) -> None:
    rng = random.Random(1)
    with casstore.open(disk / "store", durability) as store:
        number = fill(store, disk, rng)
        for session in range(0, number, 2):
            assert store.delete_session(f"s{session}")
        assert store.session("s1").tombstone(["n3"]).hidden == ("n3",)
        assert gc.collect(store, grace_ms=0).outcome is gc.Outcome.SWEPT
        assert vacuum.vacuum(store, grace_ms=0).outcome is vacuum.VacuumOutcome.DONE
        store.pack(min_age_ms=0)
        # The file has free pages now, and agents go on although the disk is still full.
        say(store, "s1", "later", rng)
    with casstore.open(disk / "store", verify=True) as store:
        assert [node.id for node in store.session("s1").nodes()] == [
            "n0", "n1", "n2", "n4", "n5", "n6", "n7", "n8", "n9", "later",
        ]  # fmt: skip


def test_other_threads_may_not_write_while_one_uses_the_reserve(disk: Path) -> None:
    errors: list[BaseException] = []

    def write(store: Store) -> None:
        try:
            store.put_blob(b"small")
        except StorageFullError as exc:
            errors.append(exc)

    with casstore.open(disk / "store") as store:
        fill(store, disk, random.Random(1))
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        with engine.reclaiming():
            other = threading.Thread(target=write, args=(store,))
            other.start()
            other.join()
            store.put_blob(b"this thread may")
    assert [str(error).partition(", ")[2] for error in errors] == [
        "and another thread needs the rest of it to reclaim space; try again when that has ended"
    ]


def test_the_reserve_grows_with_the_store_and_is_allocated_again(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        first = os.stat(tmp_path / "store" / "reserve").st_blocks * 512
        for _ in range(40):
            store.put_blob(os.urandom(100_000))
        grown = os.stat(tmp_path / "store" / "reserve").st_size
        assert 0 < first < grown
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        with engine.reclaiming():
            engine._reserve.release()
            assert engine._reserve.size_bytes == 0
        assert os.stat(tmp_path / "store" / "reserve").st_size == grown


def test_a_link_in_the_place_of_the_reserve_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    casstore.open(tmp_path / "store").close()
    (tmp_path / "store" / "reserve").unlink()
    (tmp_path / "store" / "reserve").symlink_to(precious)
    with casstore.open(tmp_path / "store") as store:
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        with engine.reclaiming():
            engine._reserve.release()
    assert precious.read_bytes() == b"precious"
