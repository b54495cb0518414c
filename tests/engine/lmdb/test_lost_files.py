"""A store whose files are removed or replaced: an error, and nothing acknowledged into nowhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import casstore
from casstore import Store
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CorruptionError, StorageError, StorageFullError, StoreNotFoundError


def remove_the_directory(path: Path) -> None:
    shutil.rmtree(path)


def remove_the_file(path: Path) -> None:
    (path / "data.mdb").unlink()


def replace_the_file(path: Path) -> None:
    shutil.copy(path / "data.mdb", path / "other")
    os.replace(path / "other", path / "data.mdb")


def rename_the_file_and_put_another(path: Path) -> None:
    os.rename(path / "data.mdb", path / "old")
    shutil.copy(path / "old", path / "data.mdb")


@pytest.mark.parametrize(
    "damage",
    [remove_the_directory, remove_the_file, replace_the_file, rename_the_file_and_put_another],
)
def test_writes_raise_after_the_data_file_was_deleted_or_replaced(
    tmp_path: Path, damage: object
) -> None:
    path = tmp_path / "store"
    store = casstore.open(path)
    store.put_blob(b"before")
    assert callable(damage)
    damage(path)
    with pytest.raises(StorageError, match="deleted or replaced while it was open"):
        store.put_blob(b"after")
    with pytest.raises(StorageError, match="deleted or replaced while it was open"):
        store.pack(min_age_ms=0)
    store.close()


def test_a_renamed_store_keeps_working_whatever_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = casstore.open("store")
    os.rename("store", "renamed")
    monkeypatch.chdir("/")
    digest = store.put_blob(b"after")
    store.close()
    with casstore.open(tmp_path / "renamed", create=False) as store:
        assert store.get_blob(digest) == b"after"


@pytest.mark.parametrize("options", [{}, {"create": False}, {"readonly": True}])
def test_a_directory_that_lost_its_data_file_does_not_open_as_an_empty_store(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    path = tmp_path / "store"
    casstore.open(path).close()
    (path / "data.mdb").unlink()
    with pytest.raises(CorruptionError, match=r"its data\.mdb is gone; restore it from a backup"):
        casstore.open(path, **options)  # type: ignore[arg-type]
    assert not (path / "data.mdb").exists()


def test_open_completes_a_directory_in_which_the_creation_of_a_store_was_interrupted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    (path / "locks").mkdir(parents=True)
    (path / "locks" / "mutex").touch()
    (path / "data.mdb.new").write_bytes(b"half")
    with pytest.raises(StoreNotFoundError):
        casstore.open(path, create=False)
    casstore.open(path).close()


# --- the map ---------------------------------------------------------------------------------


def test_hundreds_of_stores_can_be_open_at_once(tmp_path: Path) -> None:
    """With a map of 1 TiB each, the 128th found no address space."""
    casstore.open(tmp_path / "0").close()
    for number in range(1, 200):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    stores: list[Store] = []
    try:
        for number in range(200):
            stores.append(casstore.open(tmp_path / str(number), "relaxed"))
        digests = [store.put_blob(b"%d" % number) for number, store in enumerate(stores)]
        assert [store.get_blob(digest)[:1] for store, digest in zip(stores, digests, strict=True)]
    finally:
        for store in stores:
            store.close()


def test_the_map_grows_with_the_file_while_other_processes_use_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.engine.lmdb.environment.FIRST_MAP_BYTES", 64 << 20)
    path = tmp_path / "store"
    engine = LmdbEngine(str(path), durability="relaxed")
    first = engine._env.map_bytes
    child = os.fork()
    if not child:
        # Another process, whose map begins as small: it finds the file longer than that.
        try:
            other = LmdbEngine(str(path), durability="relaxed")
            (tmp_path / "ready").touch()
            while other.get_rows([RowKey("heads", b"last")]) == [None]:
                pass
            other.write(Write(rows=[PutRow("heads", b"other", b"written")]))
            other.close()
            os._exit(0)
        finally:
            os._exit(1)
    while not (tmp_path / "ready").exists():
        pass
    for number in range(80):
        row = PutRow("records", b"%d" % number, bytes(1_000_000))
        engine.write(Write(rows=[row]))
    engine.write(Write(rows=[PutRow("heads", b"last", b"written")]))
    assert os.waitpid(child, 0)[1] == 0
    assert engine.get_rows([RowKey("heads", b"other")]) == [b"written"]
    engine.apply_log()
    assert engine._env.map_bytes > first
    engine.close()


def test_a_write_beyond_map_bytes_raises_storage_full_error(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "store", map_bytes=1 << 20) as store:
        too_long = [os.urandom(100_000) for _ in range(20)]
        with pytest.raises(StorageFullError, match="map_bytes"):
            store.put_many(too_long)
