"""Links, pipes and directories that another user planted under names that casstore uses.

Each test plants them, does the work, and looks whether anything behind a link was touched.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.engine.files import PartFile, leftovers, part_directory
from casstore.engine.memory import MemoryEngine
from casstore.engine.postgres.disk_cache import DiskCache
from casstore.engine.protocol import StoredObject
from casstore.errors import CasstoreError, StorageError, TargetExistsError
from casstore.format.digest import Kind, plain_hash
from casstore.maintenance import gc
from casstore.maintenance.backup import backup
from casstore.maintenance.compact import compact
from casstore.maintenance.export import export_session, write_have
from casstore.maintenance.files import whole_file
from casstore.maintenance.salvage import salvage
from casstore.records.lifecycles.key_files import FileKeys

CONTENT = b"of somebody else"
_NOBODY = 65_534


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Path]:
    """A directory of another user, in which nothing may be created, changed or deleted."""
    place = tmp_path / "of somebody else"
    (place / "inner").mkdir(parents=True)
    for name in ("file", "inner/file", "data.mdb", "lock"):
        (place / name).write_bytes(CONTENT)

    def seen() -> dict[str, bytes]:
        return {
            str(path.relative_to(place)): path.read_bytes() if path.is_file() else b""
            for path in place.rglob("*")
        }

    before = seen()
    yield place
    assert seen() == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with casstore.open(tmp_path / "store", auto_train=False) as opened:
        opened.session("s").commit(Commit(append=[NodeDraft("n", "hello")]))
        yield opened


# --- next to a target -----------------------------------------------------------------------------

# Where this and earlier releases build what is not complete yet.
OLD_NAMES = (".casstore-part", ".new", ".tmp", ".part", ".partial")


def plant_beside(target: Path, behind: Path) -> None:
    for ending in OLD_NAMES:
        Path(f"{target}{ending}").symlink_to(behind)


def plant_files_beside(target: Path, behind: Path) -> None:
    for ending in OLD_NAMES:
        Path(f"{target}{ending}").symlink_to(behind / "file")


def test_a_backup_neither_writes_nor_deletes_behind_a_planted_link(
    tmp_path: Path, store: Store, behind: Path
) -> None:
    target = tmp_path / "backup"
    plant_beside(target, behind)
    backup(store, target)
    backup(store, target, replace=True)
    with casstore.open(target, verify=True) as copied:
        assert [node.payload for node in copied.session("s").nodes()] == ["hello"]
    assert all(Path(f"{target}{ending}").is_symlink() for ending in OLD_NAMES)


def test_a_backup_of_a_memory_store_neither_writes_nor_deletes_through_a_planted_link(
    tmp_path: Path, behind: Path
) -> None:
    target = tmp_path / "backup"
    plant_beside(target, behind)
    backup(Store(MemoryEngine()), target)
    with casstore.open(target, verify=True):
        assert leftovers(str(target)) == []


def test_an_export_writes_nothing_through_a_planted_link(
    tmp_path: Path, store: Store, behind: Path
) -> None:
    target = tmp_path / "bundle"
    plant_files_beside(target, behind)
    export_session(store, "s", target)
    export_session(store, "s", target, replace=True)
    write_have(store, tmp_path / "have")
    assert leftovers(str(target)) == []


def test_a_target_that_is_a_link_is_refused_and_replace_replaces_the_link_itself(
    tmp_path: Path, store: Store, behind: Path
) -> None:
    target = tmp_path / "bundle"
    target.symlink_to(behind / "file")
    with pytest.raises(TargetExistsError):
        export_session(store, "s", target)
    with pytest.raises(TargetExistsError):
        write_have(store, target)
    export_session(store, "s", target, replace=True)
    assert not target.is_symlink()
    place = tmp_path / "backup"
    place.symlink_to(behind)
    with pytest.raises(TargetExistsError):
        backup(store, place)


def test_temporary_names_are_unpredictable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name is guessed all the same, whatever has it is left alone."""
    target = str(tmp_path / "target")
    names = set()
    for _ in range(50):
        with part_directory(target) as part:
            names.add(part.path)
            assert os.stat(part.path).st_mode & 0o777 == 0o700
    assert len(names) == 50
    pattern = re.escape(target) + r"\.casstore-part-[0-9a-f]{32}"
    assert all(re.fullmatch(pattern, name) for name in names)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "00" * size)
    guessed = Path(f"{target}.casstore-part-{'00' * 16}")
    for kind in ("directory", "pipe", "link"):
        with ExitStack() as stack:
            plant(kind, guessed, stack)
        with pytest.raises(StorageError, match="exists"), part_directory(target):
            raise AssertionError("nothing can be built there")
        with pytest.raises(FileExistsError):
            PartFile(target)
        assert os.path.lexists(guessed)
        (os.rmdir if kind == "directory" else os.unlink)(guessed)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_put_in_place_of_a_part_is_left_alone(
    tmp_path: Path, behind: Path
) -> None:
    target = tmp_path / "target"
    for end in ("publish", "discard"):
        file = PartFile(str(target))
        file.file.write(b"ours")
        os.rename(file.path, tmp_path / f"moved {end}")
        os.symlink(behind / "file", file.path)
        if end == "publish":
            with pytest.raises(OSError, match="replaced"):
                file.publish(replace=True)
        file.discard()
        assert os.path.islink(file.path)
        os.unlink(file.path)
    with part_directory(str(target)) as part:
        os.rename(part.path, tmp_path / "moved directory")
        os.symlink(behind, part.path)
        with pytest.raises(OSError, match="replaced"):
            part.publish()
    assert os.path.islink(part.path)
    with part_directory(str(target)) as part:
        os.rename(part.path, tmp_path / "moved again")
        os.mkdir(part.path)
        Path(part.path, "file").write_bytes(CONTENT)
    assert Path(part.path, "file").read_bytes() == CONTENT
    assert not os.path.lexists(target)


def test_whole_file_writes_a_file_with_the_longest_possible_name(tmp_path: Path) -> None:
    for name in ("n" * 255, "日" * 85):
        with whole_file(tmp_path / name) as into:
            into.write(b"x")
        assert (tmp_path / name).read_bytes() == b"x"
        assert leftovers(str(tmp_path / name)) == []


def test_a_file_is_published_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    file = tmp_path / "file"
    with whole_file(file) as into:
        into.write(b"one")
    part = PartFile(str(file))
    with pytest.raises(FileExistsError):
        part.publish(replace=False)
    part.discard()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"one"]


# --- in the store ---------------------------------------------------------------------------------


def closed_store(tmp_path: Path, durability: str = "full") -> Path:
    place = tmp_path / "store"
    with casstore.open(place, durability, auto_train=False) as store:
        store.put_value(["hello"])
    return place


def test_a_locks_directory_that_is_a_link_is_refused(tmp_path: Path, behind: Path) -> None:
    place = closed_store(tmp_path)
    for path in sorted((place / "locks").iterdir()):
        path.unlink()
    (place / "locks").rmdir()
    (place / "locks").symlink_to(behind)
    for readonly in (False, True):
        with pytest.raises(StorageError, match="cannot lock"):
            casstore.open(place, readonly=readonly)


@pytest.mark.parametrize("durability", ["full", "relaxed"])
@pytest.mark.parametrize("name", ["mutex", "writers", "readers", "log", "collector"])
def test_a_lock_that_is_a_link_is_refused(
    tmp_path: Path, behind: Path, name: str, durability: str
) -> None:
    place = closed_store(tmp_path)
    (place / "locks" / name).unlink(missing_ok=True)
    (place / "locks" / name).symlink_to(behind / "new")
    # Not every lock is needed by every call; none is made behind the link.
    with suppress(StorageError), casstore.open(place, durability) as store:
        store.put_blob(b"x")
        gc.collect(store)


@pytest.mark.parametrize("name", ["redo.log", "lock.mdb", "data.mdb.new", "reserve", "compact"])
@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_no_call_writes_through_a_store_file_that_is_a_link(
    tmp_path: Path, behind: Path, name: str, durability: str
) -> None:
    place = closed_store(tmp_path, durability)
    (place / name).unlink(missing_ok=True)
    (place / name).symlink_to(behind if name == "compact" else behind / "file")
    with suppress(StorageError), casstore.open(place, durability) as store:
        store.put_blob(b"x")
    with suppress(StorageError):
        compact(place)


def test_creating_a_store_does_not_write_through_a_link(tmp_path: Path, behind: Path) -> None:
    for target in (behind / "file", behind / "nothing there"):
        place = tmp_path / "new store"
        place.mkdir()
        (place / "data.mdb.new").symlink_to(target)
        (place / "data.mdb.new-lock").symlink_to(target)
        with casstore.open(place) as store:
            store.put_blob(b"x")
        assert not (place / "data.mdb").is_symlink()
        with casstore.open(place, verify=True):
            pass
        os.rename(place, tmp_path / target.name)


def test_a_compact_directory_with_foreign_files_is_not_removed(tmp_path: Path) -> None:
    place = closed_store(tmp_path)
    own = place / "compact"
    own.mkdir()
    (own / "data.mdb").write_bytes(b"left by one that was killed")
    with casstore.open(place):
        assert not own.exists()
    own.mkdir()
    (own / "notes.txt").write_bytes(CONTENT)
    with casstore.open(place):
        pass
    with pytest.raises(StorageError, match="compact: File exists"):
        compact(place)
    assert (own / "notes.txt").read_bytes() == CONTENT


# --- pipes and directories ------------------------------------------------------------------------


def plant(kind: str, place: Path, stack: ExitStack) -> None:
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        # A path of a socket is short.
        here = stack.enter_context(socket.socket(socket.AF_UNIX))
        before = os.getcwd()
        os.chdir(place.parent)
        try:
            here.bind(place.name)
        finally:
            os.chdir(before)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.symlink_to(place.parent)


KINDS = ["pipe", "directory", "socket", "device", "link"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["data.mdb", "lock.mdb", "unsynced", "kept", "locks", "locks/mutex"]
)
def test_a_pipe_or_directory_in_place_of_a_store_file_is_a_typed_error(
    tmp_path: Path, name: str, kind: str
) -> None:
    """Opening a pipe would block for ever."""
    place = closed_store(tmp_path, "relaxed")
    (place / "unsynced").write_bytes(b"another boot")
    if name == "locks":
        for path in (place / name).iterdir():
            path.unlink()
        (place / name).rmdir()
    else:
        (place / name).unlink(missing_ok=True)
    with ExitStack() as stack:
        plant(kind, place / name, stack)
        opened = 0
        ways: list[Callable[[], object]] = [
            lambda: casstore.open(place, "relaxed"),
            lambda: casstore.open(place, verify=True),
            lambda: casstore.open(place, readonly=True),
            lambda: compact(place),
            lambda: salvage(place, tmp_path / "saved"),
        ]
        for way in ways:
            with suppress(CasstoreError):
                found = way()
                opened += 1
                if isinstance(found, Store):
                    found.close()
        if name == "data.mdb":
            assert opened == 0


@contextmanager
def as_ordinary_user(place: Path) -> Iterator[None]:
    """Own ``place`` as a user whom file modes bind; they do not bind root."""
    if os.geteuid() != 0:
        yield
        return
    for path in (place, *place.rglob("*")):
        os.chown(path, _NOBODY, _NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_data_file_that_may_not_be_read_is_a_typed_error() -> None:
    # Directories of pytest are closed to other users.
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        place = closed_store(Path(made))
        (place / "data.mdb").chmod(0)
        with as_ordinary_user(place):
            for verify in (False, True):
                with pytest.raises(StorageError, match=r"data\.mdb.*Permission denied"):
                    casstore.open(place, verify=verify)


# --- keys, caches ---------------------------------------------------------------------------------


def test_a_key_that_is_a_link_is_not_overwritten(tmp_path: Path, behind: Path) -> None:
    keys = FileKeys(tmp_path / "keys")
    keys.create("k1")
    (tmp_path / "keys" / "k1.key").unlink()
    (tmp_path / "keys" / "k1.key").symlink_to(behind / "file")
    with pytest.raises(StorageError, match="symbolic link"):
        keys.destroy("k1")
    keys.create("k2")
    (tmp_path / "keys" / "k2.destroyed").symlink_to(behind / "new")
    with pytest.raises(StorageError, match="symbolic link"):
        keys.destroy("k2")
    os.mkfifo(tmp_path / "keys" / "k3.key", 0o600)
    with pytest.raises(StorageError, match="a pipe"):
        keys.get("k3")


def test_a_cache_removes_only_files_that_a_cache_created(tmp_path: Path, behind: Path) -> None:
    root = tmp_path / "cache" / "objects-1" / f"{7:016x}"
    root.mkdir(parents=True, mode=0o700)
    (root / "notes").mkdir()
    (root / "notes" / "file").write_bytes(CONTENT)
    (root / "3-4").symlink_to(behind)
    for name in (".gone-0123456789abcdef", "5-6"):
        (root / name).mkdir()
    cache = DiskCache(str(tmp_path / "cache"), 1 << 23)
    cache.begin(7, 5)
    digest = plain_hash(b"x")
    cache.put([(digest, StoredObject(Kind.BLOB, b"x"))], cache.generation)
    assert cache.find([digest])
    cache.close()
    assert (root / "notes" / "file").read_bytes() == CONTENT
    assert not (root / ".gone-0123456789abcdef").exists()


def test_a_cache_refuses_a_directory_that_another_user_can_write_to(
    tmp_path: Path, behind: Path
) -> None:
    (tmp_path / "cache" / "objects-1").mkdir(parents=True)
    root = tmp_path / "cache" / "objects-1" / f"{7:016x}"
    root.symlink_to(behind)
    cache = DiskCache(str(tmp_path / "cache"), 1 << 23)
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        cache.begin(7, 1)
    root.unlink()
    root.mkdir()
    root.chmod(0o777)
    cache = DiskCache(str(tmp_path / "cache"), 1 << 23)
    with pytest.warns(RuntimeWarning, match="another user"):
        cache.begin(7, 1)
