"""The cache saves reading, and never hides a change."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from casstore.engine.files import open_regular
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import Workspace, cache, scan
from tests.workspace.trees import contents


def age(root: Path) -> None:
    """Let every file be from long ago, as far as a program can: ctime cannot be set."""
    for place, _, names in os.walk(root):
        for name in names:
            os.utime(os.path.join(place, name), ns=(10**18, 10**18), follow_symlinks=False)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust every file at once, as if the scan began long after all changes."""
    monkeypatch.setattr(scan, "RACY_NS", -(10**18))


@pytest.mark.usefixtures("settled")
def test_an_unchanged_tree_is_not_read_again_in_this_process_or_another(
    store: Store, files: Path, tmp_path: Path
) -> None:
    (files / "sub").mkdir()
    for name in ("a", "sub/b", "sub/\udcff"):
        (files / name).write_text(name, errors="surrogateescape")
    (files / "link").symlink_to("a")
    ws = Workspace(files, cache=tmp_path / "cache")
    first = ws.snapshot(store)
    assert first.files_read == 3
    assert ws.snapshot(store)[:3] == first[:3]
    assert ws.snapshot(store).files_read == 0
    again = Workspace(files, cache=tmp_path / "cache").snapshot(store)
    assert again[:3] == first[:3]
    assert again.files_read == 0


@pytest.mark.usefixtures("settled")
def test_only_changed_files_are_read(store: Store, files: Path) -> None:
    for at in range(50):
        (files / f"f{at}").write_text(str(at))
    ws = Workspace(files)
    ws.snapshot(store)
    (files / "f7").write_text("seven")
    os.rename(files / "f8", files / "g8")
    (files / "f9").chmod(0o755)
    snapshot = ws.snapshot(store)
    assert snapshot.files_read == 3
    assert snapshot.digest == Workspace(files).snapshot(store).digest


def test_a_change_with_identical_stat_values_is_seen_if_the_file_was_recent(
    store: Store, session: Session, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose clock ticks so slowly that both writes have one time."""
    pack = cache.STAMP.pack

    class Slow:
        size = cache.STAMP.size

        @staticmethod
        def pack(mode: int, size: int, mtime: int, ctime: int, inode: int) -> bytes:
            return pack(mode, size, mtime // 10**13, ctime // 10**13, inode)

    monkeypatch.setattr(scan, "STAMP", Slow)
    path = files / "a"
    path.write_text("one")
    ws = Workspace(files)
    first = ws.snapshot(store)
    with open(path, "r+") as file:
        file.write("two")
    second = ws.snapshot(store)
    assert second.digest != first.digest
    assert second.digest == Workspace(files).snapshot(store).digest


def test_a_file_with_an_old_mtime_that_changed_just_now_is_read_again(
    store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tool that sets mtime does, on a file system whose clock ticks slowly."""
    pack = cache.STAMP.pack

    class Slow:
        size = cache.STAMP.size

        @staticmethod
        def pack(mode: int, size: int, mtime: int, ctime: int, inode: int) -> bytes:
            return pack(mode, size, mtime, ctime // 10**13, inode)

    monkeypatch.setattr(scan, "STAMP", Slow)
    ws = Workspace(files)
    digests = []
    for content in ("one", "two"):
        with open(files / "a", "w") as file:
            file.write(content)
        age(files)
        digests.append(ws.snapshot(store).digest)
    assert digests[0] != digests[1]


@pytest.mark.usefixtures("settled")
def test_a_change_with_the_same_size_and_mtime_is_seen_by_ctime(store: Store, files: Path) -> None:
    path = files / "a"
    path.write_text("one")
    age(files)
    ws = Workspace(files)
    first = ws.snapshot(store)
    path.write_text("two")
    age(files)
    assert ws.snapshot(store).digest != first.digest


@pytest.mark.usefixtures("settled")
def test_a_replacement_with_the_same_size_and_times_is_seen_by_inode(
    store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = cache.STAMP.pack

    class NoTimes:
        size = cache.STAMP.size

        @staticmethod
        def pack(mode: int, size: int, mtime: int, ctime: int, inode: int) -> bytes:
            return pack(mode, size, 0, 0, inode)

    monkeypatch.setattr(scan, "STAMP", NoTimes)
    (files / "a").write_text("one")
    ws = Workspace(files)
    first = ws.snapshot(store)
    (files / "b").write_text("two")
    os.rename(files / "b", files / "a")
    assert ws.snapshot(store).digest != first.digest


@pytest.mark.usefixtures("settled")
def test_other_ignore_patterns_do_not_use_cached_decisions(
    store: Store, files: Path, tmp_path: Path
) -> None:
    (files / "a.log").write_text("x")
    (files / "b").write_text("x")
    place = tmp_path / "cache"
    assert Workspace(files, ["*.log"], cache=place).snapshot(store).files == 1
    assert Workspace(files, cache=place).snapshot(store).files == 2
    assert Workspace(files, ["*.log"], cache=place).snapshot(store).files == 1


@pytest.mark.usefixtures("settled")
def test_another_size_limit_does_not_use_cached_decisions(
    store: Store, files: Path, tmp_path: Path
) -> None:
    (files / "a").write_text("12345")
    place = tmp_path / "cache"
    assert Workspace(files, max_file_bytes=4, cache=place).snapshot(store).files == 0
    assert Workspace(files, max_file_bytes=5, cache=place).snapshot(store).files == 1
    assert Workspace(files, max_file_bytes=4, cache=place).snapshot(store).files == 0


@pytest.mark.usefixtures("settled")
def test_a_damaged_cache_changes_nothing_wherever_it_is_damaged(
    store: Store, files: Path, tmp_path: Path
) -> None:
    (files / "a").write_text("x")
    place = tmp_path / "cache"
    first = Workspace(files, cache=place).snapshot(store)
    data = place.read_bytes()
    damaged = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for found in [*damaged, data[:-1], data + b"x", b""]:
        place.write_bytes(found)
        assert Workspace(files, cache=place).snapshot(store)[:3] == first[:3]
    (tmp_path / "cache.bases").write_bytes(b"no bases")
    assert Workspace(files, cache=place).snapshot(store)[:3] == first[:3]


class Constant:
    """Stamps that tell no two files apart."""

    size = cache.STAMP.size

    @staticmethod
    def pack(mode: int, size: int, mtime: int, ctime: int, inode: int) -> bytes:
        return cache.STAMP.pack(mode, size, 1, 1, 1)


@pytest.mark.usefixtures("settled")
def test_a_cache_of_another_directory_is_not_used(
    store: Store, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files on two devices may have the same numbers."""
    monkeypatch.setattr(scan, "STAMP", Constant)
    (files / "a").write_text("one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_text("two")
    first = Workspace(files, cache=tmp_path / "cache").snapshot(store)
    assert Workspace(files, cache=tmp_path / "cache").snapshot(store).files_read == 0
    second = Workspace(tmp_path / "other", cache=tmp_path / "cache").snapshot(store)
    assert second.digest != first.digest


@pytest.mark.usefixtures("settled")
def test_a_snapshot_whose_objects_were_collected_is_stored_again(store: Store, files: Path) -> None:
    (files / "sub").mkdir()
    (files / "sub" / "a").write_text("x")
    ws = Workspace(files)
    first = ws.snapshot(store)
    gc.collect(store, grace_ms=0)
    assert first.digest not in store
    again = ws.snapshot(store)
    assert again.digest == first.digest
    assert again.files_read == 1
    assert store.get_value(again.digest)["files"] == 1


@pytest.mark.usefixtures("settled")
def test_status_and_restore_plans_change_neither_store_nor_cache(
    store: Store, session: Session, files: Path, tmp_path: Path
) -> None:
    (files / "a").write_text("x")
    place = tmp_path / "cache"
    ws = Workspace(files, cache=place)
    ws.commit(session)
    (files / "b").write_text("new content")
    before = place.read_bytes(), len(store.engine.scan_objects(limit=10_000)), contents(files)
    assert [change.path for change in ws.status(session)] == ["b"]
    ws.plan_restore(session)
    after = place.read_bytes(), len(store.engine.scan_objects(limit=10_000)), contents(files)
    assert after == before


def test_a_cache_in_the_directory_itself_is_no_part_of_a_snapshot(
    store: Store, session: Session, files: Path
) -> None:
    (files / "a").write_text("x")
    ws = Workspace(files, cache=files / ".cache-of-files")
    first = ws.commit(session)
    assert ws.snapshot(store).files == 1
    assert ws.snapshot(store).digest == ws.snapshot(store).digest
    ws.restore(session, first.revision, force=True)
    assert (files / ".cache-of-files").exists()


@pytest.mark.parametrize("ahead_s", [0, 3600], ids=["at the snapshot's time", "in the future"])
def test_a_file_whose_mtime_is_not_before_the_snapshot_is_read_again(
    store: Store, files: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """As on a file system that does not keep ctime: it is old, and the same after a change."""
    pack = cache.STAMP.pack

    class NoCtime:
        size = cache.STAMP.size

        @staticmethod
        def pack(mode: int, size: int, mtime: int, ctime: int, inode: int) -> bytes:
            return pack(mode, size, mtime, 0, inode)

    monkeypatch.setattr(scan, "STAMP", NoCtime)
    # The snapshot is taken an hour after the real changes, so ctime is old.
    now_ns = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(scan, "time", SimpleNamespace(time_ns=lambda: now_ns))
    mtime_ns = now_ns + ahead_s * 10**9
    path = files / "a"
    ws = Workspace(files)
    digests = []
    for content in ("one", "two"):
        with open(path, "w") as file:
            file.write(content)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        digests.append(ws.snapshot(store).digest)
    assert digests[0] != digests[1]
    # Long after that time the file is trusted.
    now_ns = mtime_ns + 10 * 10**9
    assert [ws.snapshot(store).files_read for _ in range(2)] == [1, 0]


def bases_after(found: cache.Cache) -> tuple[Digest, ...]:
    found.load()
    return found.bases


def test_a_second_thread_waits_until_the_cache_is_read(
    store: Store, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "a").write_text("x")
    Workspace(files, cache=tmp_path / "cache").snapshot(store)
    found = cache.Cache(str(tmp_path / "cache"), str(files))
    began, go_on = threading.Event(), threading.Event()

    def slow(path: str) -> int:
        began.set()
        assert go_on.wait(60)
        return open_regular(path)

    monkeypatch.setattr(cache, "open_regular", slow)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(found.load)
        assert began.wait(60)
        second = threads.submit(lambda: bases_after(found))
        time.sleep(0.05)
        go_on.set()
        first.result()
        assert len(second.result()) == 1
