"""A restore plans first, loses no change, leaves the directory never, and can be repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Checkpoint, Commit, Link
from casstore.errors import (
    BusyError,
    CorruptionError,
    LimitError,
    RestoreConflictError,
    StorageError,
    StorageFullError,
    UnsafeSnapshotError,
)
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import Workspace, restore, restoring, tree
from casstore.workspace.beneath import Beneath
from tests.workspace.trees import contents


@pytest.fixture
def ws(files: Path) -> Workspace:
    return Workspace(files)


def two_states(session: Session, ws: Workspace, files: Path) -> tuple[int, int]:
    """Commit ``a`` and ``b``, then another ``a``, no ``b`` and a new ``c``."""
    (files / "a").write_text("old a")
    (files / "b").write_text("old b")
    first = ws.commit(session).revision
    (files / "a").write_text("new a")
    (files / "b").unlink()
    (files / "c").write_text("new c")
    return first, ws.commit(session).revision


def test_a_restore_plan_lists_the_changes_and_makes_none(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    before = contents(files)
    plan = ws.plan_restore(session, first)
    assert (plan.created, plan.changed, plan.deleted) == (("b",), ("a",), ("c",))
    assert (plan.conflicts, plan.untracked) == ((), ())
    assert contents(files) == before


def test_a_file_that_changed_since_the_last_snapshot_is_never_overwritten_without_force(
    store: Store, session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    (files / "a").write_text("unsaved work")
    before = contents(files)
    with pytest.raises(RestoreConflictError, match="a: changed since the last snapshot") as raised:
        ws.restore(session, first)
    assert raised.value.conflicts == (("a", "changed since the last snapshot"),)
    assert contents(files) == before
    report = ws.restore(session, first, force=True)
    assert (files / "a").read_text() == "old a"
    assert report.saved is not None
    assert report.saved_pin is not None
    # The pin keeps it, whatever else is collected.
    gc.collect(store, grace_ms=0)
    ws.restore_snapshot(session, report.saved)
    assert contents(files) == before


def test_a_changed_file_that_a_restore_would_delete_is_a_conflict(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    (files / "c").write_text("unsaved work")
    with pytest.raises(RestoreConflictError, match="c: changed"):
        ws.restore(session, first)
    assert (files / "a").read_text() == "new a"


def test_a_changed_mode_is_a_change(session: Session, ws: Workspace, files: Path) -> None:
    first, _ = two_states(session, ws, files)
    (files / "a").chmod(0o755)
    with pytest.raises(RestoreConflictError, match="a: changed"):
        ws.restore(session, first)


def test_an_untracked_file_stays_unless_forced_and_is_saved_before_its_removal(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    (files / "untracked").write_text("mine")
    assert ws.plan_restore(session, first).untracked == ("untracked",)
    ws.restore(session, first)
    assert (files / "untracked").read_text() == "mine"
    report = ws.restore(session, first, force=True)
    assert not (files / "untracked").exists()
    assert report.saved is not None
    ws.restore_snapshot(session, report.saved)
    assert (files / "untracked").read_text() == "mine"


def test_a_file_that_no_snapshot_has_is_a_conflict_where_the_target_has_one(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    (files / "b").write_text("another b")
    with pytest.raises(RestoreConflictError, match="b: changed"):
        ws.restore(session, first)
    assert (files / "b").read_text() == "another b"


def test_restoring_one_earlier_revision_after_another_is_no_conflict(
    session: Session, ws: Workspace, files: Path, tmp_path: Path
) -> None:
    first, second = two_states(session, ws, files)
    (files / "a").write_text("third a")
    third = ws.commit(session).revision
    for revision in (first, second, first, third, second):
        ws.restore(session, revision)
        assert not ws.plan_restore(session, revision).steps


def test_ignored_files_are_left_alone(session: Session, files: Path) -> None:
    ws = Workspace(files, ["*.secret"])
    first, _ = two_states(session, ws, files)
    (files / "k.secret").write_text("key")
    ws.restore(session, first, force=True)
    assert (files / "k.secret").read_text() == "key"


def test_an_ignored_file_in_the_way_is_a_conflict_and_is_saved_before_it_is_overwritten(
    session: Session, files: Path
) -> None:
    (files / "config").write_text("stored")
    first = Workspace(files).commit(session).revision
    (files / "config").write_text("local")
    ws = Workspace(files, ["config"])
    with pytest.raises(RestoreConflictError, match="config"):
        ws.restore(session, first)
    report = ws.restore(session, first, force=True)
    assert (files / "config").read_text() == "stored"
    assert report.saved is not None
    Workspace(files).restore_snapshot(session, report.saved)
    assert (files / "config").read_text() == "local"


def test_a_directory_with_ignored_files_is_never_replaced(session: Session, files: Path) -> None:
    ws = Workspace(files, ["*.secret"])
    (files / "d").write_text("a file")
    first = ws.commit(session).revision
    (files / "d").unlink()
    (files / "d").mkdir()
    (files / "d" / "k.secret").write_text("key")
    ws.commit(session)
    for force in (False, True):
        with pytest.raises(RestoreConflictError, match="which no snapshot has"):
            ws.restore(session, first, force=force)
    assert (files / "d" / "k.secret").read_text() == "key"
    # Of a directory that should only go, the ignored file and its directories stay.
    (files / "d" / "tracked").write_text("x")
    (files / "e").mkdir()
    second = ws.commit(session).revision
    (files / "d" / "tracked").unlink()
    ws.commit(session)
    ws.restore(session, second)
    assert (files / "d" / "k.secret").read_text() == "key"


def test_a_pipe_in_the_way_is_a_conflict_that_force_does_not_solve(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    os.mkfifo(files / "b")
    with pytest.raises(RestoreConflictError, match="b: neither"):
        ws.restore(session, first, force=True)


def test_files_directories_and_links_replace_each_other(
    session: Session, ws: Workspace, files: Path
) -> None:
    (files / "a").write_text("file")
    (files / "b").mkdir()
    (files / "b" / "c").write_text("inside")
    (files / "d").symlink_to("b")
    first, before = ws.commit(session).revision, contents(files)
    (files / "a").unlink()
    (files / "a").mkdir()
    (files / "a" / "x").write_text("x")
    (files / "b" / "c").unlink()
    (files / "b").rmdir()
    (files / "b").symlink_to("/etc")
    (files / "d").unlink()
    (files / "d").write_text("file")
    second, after = ws.commit(session).revision, contents(files)
    ws.restore(session, first)
    assert contents(files) == before
    ws.restore(session, second)
    assert contents(files) == after


def test_directories_that_may_not_be_written_to_are_restored(
    session: Session, ws: Workspace, files: Path, tmp_path: Path
) -> None:
    (files / "locked").mkdir()
    (files / "locked" / "a").write_text("x")
    (files / "locked").chmod(0o555)
    ws.commit(session)
    restore(session, into=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(files)


# --- nothing outside the directory ----------------------------------------------------------------


def commit_tree(store: Store, session: Session, entries: dict[str, Any]) -> int:
    """Commit a snapshot as another program could have made it."""
    top = store.put_value(entries)
    value = {
        "format": tree.FORMAT,
        "root": ["d", 0o755, Link(top)],
        "files": 1,
        "bytes": 1,
        "left_out": {},
    }
    link = Link(store.put_value(value))
    others = {"workspace": link}
    return session.commit(Commit(checkpoint=Checkpoint(others=others))).revision


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "../up", "/absolute", "a/b", "nul\0inside", "\0plain", "\0\u20ac", "\0..",
     "n" * 256, tree.PART + "x"],
)  # fmt: skip
def test_names_that_point_outside_the_directory_are_refused_and_nothing_is_restored(
    store: Store, session: Session, tmp_path: Path, name: str
) -> None:
    blob = store.put_blob(b"planted")
    good = ["f", 0o644, 7, Link(blob)]
    commit_tree(store, session, {"a-good-one": good, name: good})
    inner = store.put_value({name: good})
    for entries in ({"a-good-one": good, name: good}, {"d": ["d", 0o755, Link(inner)]}):
        commit_tree(store, session, entries)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UnsafeSnapshotError):
            restore(session, into=tmp_path / "again" / "deep")
        left = [path for path in tmp_path.rglob("*") if path not in before]
        assert {path.name for path in left} <= {"again", "deep", "data.mdb", "redo.log"}


@pytest.mark.parametrize(
    "entry",
    [None, [], ["x"], ["f", 0o644, 7], ["f", 0o4755, 7, Link(Digest.of_blob(b"planted"))],
     ["f", 0o644, -1, Link(Digest.of_blob(b"planted"))], ["f", 0o644, 7, "link"],
     ["d", -1, Link(Digest.of_blob(b"planted"))], ["l", "text"], ["l", b""], ["l", b"a\0b"],
     ["l", b"x" * 4096], ["d", 0o755, Link(Digest.of_blob(b"planted"))]],
)  # fmt: skip
def test_invalid_entries_are_refused(
    store: Store, session: Session, tmp_path: Path, entry: Any
) -> None:
    store.put_blob(b"planted")
    commit_tree(store, session, {"a": entry})
    with pytest.raises(UnsafeSnapshotError):
        restore(session, into=tmp_path / "again")
    assert not (tmp_path / "again" / "a").exists()


def test_an_object_that_is_not_a_snapshot_is_refused(
    store: Store, session: Session, files: Path
) -> None:
    ws = Workspace(files)
    for value in ({"format": "other"}, [1], {}, {"format": tree.FORMAT}):
        with pytest.raises(UnsafeSnapshotError):
            ws.restore_snapshot(session, store.put_value(value))
    with pytest.raises(UnsafeSnapshotError):
        ws.restore_snapshot(session, store.put_blob(b"x"))


def test_a_recorded_size_that_differs_from_the_blob_is_damage(
    store: Store, session: Session, tmp_path: Path
) -> None:
    commit_tree(store, session, {"a": ["f", 0o644, 6, Link(store.put_blob(b"planted"))]})
    with pytest.raises(CorruptionError, match="7 bytes"):
        restore(session, into=tmp_path / "again")
    assert os.listdir(tmp_path / "again") == []


def test_a_few_maps_that_describe_a_huge_tree_are_refused(
    store: Store, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MAX_ENTRIES", 1000)
    below = store.put_value({})
    for _ in range(40):
        below = store.put_value({name: ["d", 0o755, Link(below)] for name in "ab"})
    commit_tree(store, session, {"a": ["d", 0o755, Link(below)]})
    with pytest.raises(LimitError, match="1,000"):
        restore(session, into=tmp_path / "again")
    assert os.listdir(tmp_path / "again") == []


def test_a_link_in_the_directory_is_replaced_and_not_written_through(
    session: Session, ws: Workspace, files: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("outside")
    (files / "d").mkdir()
    (files / "d" / "a").write_text("inside")
    (files / "f").write_text("inside")
    first = ws.commit(session).revision
    (files / "d" / "a").unlink()
    (files / "d").rmdir()
    (files / "d").symlink_to(outside)
    (files / "f").unlink()
    (files / "f").symlink_to(outside / "a")
    with pytest.raises(RestoreConflictError):
        ws.restore(session, first)
    ws.restore(session, first, force=True)
    assert (outside / "a").read_text() == "outside"
    assert os.listdir(outside) == ["a"]
    assert (files / "d" / "a").read_text() == "inside"
    assert not (files / "f").is_symlink()


def test_a_directory_that_becomes_a_link_after_the_plan_is_not_written_through(
    session: Session, ws: Workspace, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (files / "d").mkdir()
    (files / "d" / "a").write_text("old")
    first = ws.commit(session).revision
    (files / "d" / "a").write_text("new")
    ws.commit(session)

    def swap(beneath: Beneath, *rest: Any, **options: Any) -> Any:
        (files / "d").rename(tmp_path / "moved")
        (files / "d").symlink_to(outside)
        return execute(beneath, *rest, **options)

    execute = restoring.execute
    monkeypatch.setattr(restoring, "execute", swap)
    with pytest.raises(StorageError):
        ws.restore(session, first)
    assert os.listdir(outside) == []


def test_a_snapshot_is_never_restored_over_the_store_that_has_it(
    store: Store, session: Session, tmp_path: Path
) -> None:
    """The directory was stored when the store was elsewhere."""
    blob = store.put_blob(b"planted")
    inner = store.put_value({"data.mdb": ["f", 0o644, 7, Link(blob)]})
    commit_tree(store, session, {"store": ["d", 0o755, Link(inner)]})
    for force in (False, True):
        with pytest.raises(RestoreConflictError, match="the store itself"):
            restore(session, into=tmp_path, force=force)
    assert (tmp_path / "store" / "data.mdb").read_bytes() != b"planted"


# --- while it runs ----------------------------------------------------------------------------


def during(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> None:
    """Do something between the plan and its execution."""
    execute = restoring.execute

    def late(*rest: Any, **options: Any) -> Any:
        work()
        return execute(*rest, **options)

    monkeypatch.setattr(restoring, "execute", late)


def test_a_change_between_the_plan_and_the_write_is_not_lost(
    session: Session, ws: Workspace, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = two_states(session, ws, files)
    for name in ("a", "b", "c"):
        with monkeypatch.context() as patch:
            during(patch, lambda name=name: (files / name).write_text("late"))  # type: ignore[misc]
            with pytest.raises(RestoreConflictError, match=f"{name}: changed while"):
                ws.restore(session, first)
        assert (files / name).read_text() == "late"
        ws.restore(session, first, force=True)
        ws.restore(session)
    assert not [name for name in os.listdir(files) if name.startswith(tree.PART)]


def test_two_restores_into_one_directory_exclude_each_other(
    session: Session, ws: Workspace, files: Path
) -> None:
    first, _ = two_states(session, ws, files)
    with Beneath(str(files)) as other:
        other.lock()
        with pytest.raises(BusyError, match="another process"):
            ws.restore(session, first)
    ws.restore(session, first)


class _Killed(BaseException):
    """As if the process ended here."""


class _Calls:
    """The module ``os``, which ends the process instead of changing a file at one call."""

    CHANGING = ("open", "rename", "unlink", "mkdir", "rmdir", "fchmod", "symlink", "ftruncate")

    def __init__(self, left: list[int]) -> None:
        self._left = left

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*rest: Any, **options: Any) -> Any:
            if self._left[0] == 0:
                raise _Killed
            self._left[0] -= 1
            return real(*rest, **options)

        return call


def test_interrupted_at_any_call_each_file_is_old_or_new_and_a_second_run_finishes(
    store: Store, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 0
    while True:
        files, cache = tmp_path / f"files-{at}", tmp_path / f"cache-{at}"
        files.mkdir()
        ws = Workspace(files, cache=cache)
        first, _ = two_states(session, ws, files)
        (files / "d").mkdir()
        (files / "d" / "x").symlink_to("y")
        third = ws.commit(session).revision
        new = contents(files)
        ws.restore(session, first)
        old = contents(files)
        left = [at]

        with monkeypatch.context() as patch, suppress(_Killed):
            patch.setattr("casstore.workspace.restoring.os", _Calls(left))
            ws.restore(session, third)
        there = contents(files)
        for path, found in there.items():
            if not path.split(b"/")[-1].startswith(tree.PART.encode()):
                allowed = [old.get(path), new.get(path)]
                assert found in allowed or found[0] == "directory", (at, path)
        # Another process finishes it, or goes back, without force.
        again = Workspace(files, cache=cache)
        again.restore(session, third if at % 2 else first)
        assert contents(files) == (new if at % 2 else old), at
        if left[0] > 0:
            break
        at += 1
    assert at > 8


def test_files_placed_by_a_killed_restore_are_no_conflict_for_another_restore(
    session: Session, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    revisions = []
    for text in ("first", "second", "third"):
        for name in "abc":
            (files / name).write_text(text)
        revisions.append(Workspace(files, cache=cache).commit(session).revision)
    first, second, _ = revisions
    left = [5]
    with monkeypatch.context() as patch, suppress(_Killed):
        patch.setattr("casstore.workspace.restoring.os", _Calls(left))
        Workspace(files, cache=cache).restore(session, second)
    assert left == [0]
    assert {(files / name).read_text() for name in "abc"} == {"second", "third"}
    Workspace(files, cache=cache).restore(session, first)
    assert {(files / name).read_text() for name in "abc"} == {"first"}
    assert sorted(os.listdir(files)) == ["a", "b", "c"]


def test_a_full_disk_is_a_typed_error_and_a_second_run_finishes(
    session: Session, ws: Workspace, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = two_states(session, ws, files)

    def full(handle: int, content: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageFullError, match="restore again to finish"):
            ws.restore(session, first)
    assert (files / "a").read_text() == "new a"
    assert not [name for name in os.listdir(files) if name.startswith(tree.PART)]
    ws.restore(session, first)
    assert (files / "a").read_text() == "old a"


@pytest.mark.parametrize("trusts", [False, True], ids=["read again", "from the cache"])
def test_the_part_that_a_killed_restore_leaves_is_not_in_a_snapshot_and_is_removed_by_the_next(
    session: Session, ws: Workspace, files: Path, trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if trusts:
        monkeypatch.setattr("casstore.workspace.scan.RACY_NS", -(10**18))
    (files / "a").write_text("x")
    part = files / (tree.PART + "0" * 32)
    part.write_text("half of a")
    ws.commit(session)
    assert ws.plan_restore(session).is_empty
    ws.restore(session)
    assert os.listdir(files) == ["a"]


def test_a_full_disk_of_the_store_leaves_no_revision(tmp_path: Path, files: Path) -> None:
    (files / "large").write_bytes(os.urandom(3 << 20))
    (files / "small").write_bytes(b"x")
    with casstore.open(tmp_path / "store", map_bytes=2 << 20, auto_train=False) as store:
        session = store.session("agent")
        with pytest.raises(StorageFullError):
            Workspace(files).commit(session)
        assert session.head() is None
        (files / "large").unlink()
        assert Workspace(files).commit(session).revision == 1


def test_a_cache_that_cannot_be_written_is_a_typed_error(
    session: Session, files: Path, tmp_path: Path
) -> None:
    (tmp_path / "blocked").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        Workspace(files, cache=tmp_path / "blocked" / "cache").commit(session)
