"""What a snapshot takes in, what it leaves out and names, and what it refuses."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.errors import (
    InvalidInputError,
    SnapshotNotFoundError,
    UnreadablePathError,
    WorkspaceNotFoundError,
)
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import (
    Snapshot,
    Workspace,
    diff,
    diff_text,
    find_snapshot,
    restore,
    scan,
    snapshots,
)
from tests.workspace.trees import contents

ROOT = Path(__file__).parent.parent.parent


def paths(store: Store, digest: bytes) -> list[str]:
    from casstore.workspace import diff_snapshots

    return [change.path for change in diff_snapshots(store, None, digest)]


def test_links_are_stored_as_links_and_never_followed(
    store: Store, session: Session, files: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("not in the snapshot")
    (files / "directory").symlink_to(outside)
    (files / "file").symlink_to(outside / "secret")
    (files / "loop").symlink_to(".")
    Workspace(files).commit(session)
    snapshot = find_snapshot(session)
    assert snapshot is not None
    assert snapshot.files == 0
    assert paths(store, snapshot.digest) == ["directory", "file", "loop"]
    restore(session, into=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(files)


def after_first_listing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call ``act`` once, when the scan has listed the first directory, which is the root."""
    scandir = os.scandir

    @contextmanager
    def listing(handle: int) -> Iterator[Any]:
        with scandir(handle) as entries:
            yield entries
        monkeypatch.setattr(os, "scandir", scandir)
        act()

    monkeypatch.setattr(os, "scandir", listing)


def test_a_directory_that_becomes_a_link_during_the_scan_is_not_entered(
    store: Store, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "sub").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("outside")

    def swap() -> None:
        (files / "sub").rmdir()
        (files / "sub").symlink_to(outside)

    after_first_listing(monkeypatch, swap)
    snapshot = Workspace(files).snapshot(store)
    assert "sub/secret" not in paths(store, snapshot.digest)


def test_hard_links_become_files_of_equal_content(
    session: Session, files: Path, tmp_path: Path
) -> None:
    (files / "a").write_text("shared")
    os.link(files / "a", files / "b")
    Workspace(files).commit(session)
    restore(session, into=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(files)
    assert (tmp_path / "again" / "a").stat().st_nlink == 1


def test_restoring_over_a_hard_link_leaves_the_other_name_alone(
    session: Session, files: Path, tmp_path: Path
) -> None:
    ws = Workspace(files)
    (files / "a").write_text("old")
    old = ws.commit(session).revision
    os.unlink(files / "a")
    (tmp_path / "elsewhere").write_text("new")
    os.link(tmp_path / "elsewhere", files / "a")
    ws.commit(session)
    ws.restore(session, old)
    assert (files / "a").read_text() == "old"
    assert (tmp_path / "elsewhere").read_text() == "new"


def test_holes_of_sparse_files_are_restored_as_holes(
    session: Session, files: Path, tmp_path: Path
) -> None:
    with open(files / "sparse", "wb") as file:
        file.write(b"begin")
        file.seek(8 << 20)
        file.write(b"end")
    Workspace(files).commit(session)
    restore(session, into=tmp_path / "again")
    assert (tmp_path / "again" / "sparse").read_bytes() == (files / "sparse").read_bytes()
    assert (tmp_path / "again" / "sparse").stat().st_blocks * 512 < 1 << 20


def test_sockets_and_pipes_are_named_and_left_out(
    store: Store, session: Session, files: Path
) -> None:
    os.mkfifo(files / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(files)  # the path of a socket is short
    try:
        listener.bind("socket")
    finally:
        os.chdir(here)
        listener.close()
    (files / "file").write_text("x")
    snapshot = Workspace(files).snapshot(store)
    assert snapshot.left_out == {"pipe": "a FIFO", "socket": "a socket"}
    assert paths(store, snapshot.digest) == ["file"]
    ws = Workspace(files)
    ws.commit(session)
    assert ws.restore(session).deleted == 0
    assert stat.S_ISFIFO((files / "pipe").lstat().st_mode)


def test_a_tree_deeper_than_descriptors_and_recursion_allow_is_taken_and_restored(
    session: Session, files: Path, tmp_path: Path
) -> None:
    depth = 1100
    handle = os.open(files, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
    os.close(handle)
    result = Workspace(files).commit(session)
    assert len(diff(session, result.revision - 1 if result.revision > 1 else 1)) == 0
    report = restore(session, into=tmp_path / "again")
    assert report.created == depth + 1
    for place in (files, tmp_path / "again"):
        subprocess.run(["rm", "-rf", str(place)], check=True)


# --- ignoring ---------------------------------------------------------------------------------


def test_repositories_environments_caches_and_the_store_itself_are_ignored(tmp_path: Path) -> None:
    for name in (".git", ".venv", "node_modules", "sub/__pycache__", ".mypy_cache"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "inside").write_text("x")
    (tmp_path / "sub" / "a.py").write_text("pass")
    with casstore.open(tmp_path / "my-store", "relaxed") as store:
        snapshot = Workspace(tmp_path).snapshot(store)
        assert paths(store, snapshot.digest) == ["sub", "sub/a.py"]
        assert snapshot.ignored == 6


def test_patterns_are_those_of_gitignore_and_the_last_that_matches_decides(
    store: Store, files: Path
) -> None:
    for name in ("a.log", "keep.log", "build/x", "src/build/y", "src/a.py", "node_modules/m"):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text("x")
    ws = Workspace(files, ["*.log", "!keep.log", "/build", "!node_modules/"])
    assert paths(store, ws.snapshot(store).digest) == [
        "keep.log", "node_modules", "node_modules/m", "src", "src/a.py", "src/build", "src/build/y",
    ]  # fmt: skip


def test_gitignore_files_of_the_tree_count_if_asked_for(store: Store, files: Path) -> None:
    (files / "sub").mkdir()
    (files / ".gitignore").write_text("*.tmp\n!\n")
    (files / "sub" / ".gitignore").write_text("!keep.tmp\n/only\n")
    for name in ("a.tmp", "sub/a.tmp", "sub/keep.tmp", "sub/only", "only"):
        (files / name).write_text("x")
    plain = paths(store, Workspace(files).snapshot(store).digest)
    assert "a.tmp" in plain
    ws = Workspace(files, gitignore=True)
    expected = [".gitignore", "only", "sub", "sub/.gitignore", "sub/keep.tmp"]
    assert paths(store, ws.snapshot(store).digest) == expected
    # A change of the rules counts at once, though no other file changed.
    (files / ".gitignore").write_text("")
    assert "a.tmp" in paths(store, ws.snapshot(store).digest)


def test_a_file_above_the_limit_is_left_out_by_name_and_not_deleted(
    session: Session, files: Path
) -> None:
    (files / "large").write_bytes(b"x" * 1001)
    (files / "small").write_bytes(b"x" * 1000)
    ws = Workspace(files, max_file_bytes=1000)
    ws.commit(session)
    snapshot = find_snapshot(session)
    assert snapshot is not None
    assert snapshot.left_out == {"large": "larger than 1000 bytes"}
    (files / "small").unlink()
    ws.restore(session, force=True)
    assert sorted(os.listdir(files)) == ["large", "small"]


@pytest.mark.parametrize("ignore", ["*.log", b"x", 3, [3], ["a\nb"], ["!"]])
def test_invalid_patterns_are_refused(files: Path, ignore: Any) -> None:
    with pytest.raises(InvalidInputError, match="ignore"):
        Workspace(files, ignore)


@pytest.mark.parametrize(
    "options", [{"max_file_bytes": -1}, {"max_file_bytes": "1"}, {"component": ""}]
)
def test_odd_options_are_refused_by_name(files: Path, options: Any) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        Workspace(files, **options)


# --- what changes or cannot be read -------------------------------------------------------------


def test_a_file_that_changes_while_it_is_read_is_read_again(
    store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "log").write_text("one")
    content = scan.StoringSink.content
    calls = []

    def grow(self: scan.StoringSink, handle: int, size_bytes: int) -> Any:
        found = content(self, handle, size_bytes)
        calls.append(size_bytes)
        if len(calls) == 1:
            (files / "log").write_text("one two")
        return found

    monkeypatch.setattr(scan.StoringSink, "content", grow)
    snapshot = Workspace(files).snapshot(store)
    assert calls == [3, 7]
    assert (snapshot.size_bytes, snapshot.unstable) == (7, ())


def test_a_file_that_changes_at_every_read_is_stored_as_read_and_reported(
    store: Store, session: Session, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "log").write_text("x")
    content = scan.StoringSink.content

    def grow(self: scan.StoringSink, handle: int, size_bytes: int) -> Any:
        found = content(self, handle, size_bytes)
        with open(files / "log", "a") as file:
            file.write("x")
        return found

    ws = Workspace(files)
    with monkeypatch.context() as patch:
        patch.setattr(scan.StoringSink, "content", grow)
        snapshot = ws.snapshot(store)
    assert snapshot.unstable == ("log",)
    assert snapshot.size_bytes == scan.READ_ATTEMPTS
    # The next snapshot reads it again.
    assert ws.snapshot(store).size_bytes == scan.READ_ATTEMPTS + 1


def test_files_that_vanish_during_the_scan_are_omitted(
    store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "stays"):
        (files / name).mkdir()
        (files / name / "a").write_text("x")
    (files / "file").write_text("x")

    def vanish() -> None:
        shutil.rmtree(files / "gone")
        (files / "file").unlink()

    after_first_listing(monkeypatch, vanish)
    snapshot = Workspace(files).snapshot(store)
    assert paths(store, snapshot.digest) == ["stays", "stays/a"]


def test_a_directory_that_vanishes_is_an_error_and_no_empty_snapshot(
    store: Store, session: Session, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "a").write_text("x")
    after_first_listing(monkeypatch, lambda: shutil.rmtree(files))
    with pytest.raises(WorkspaceNotFoundError):
        Workspace(files).commit(session)
    assert session.head() is None
    with pytest.raises(WorkspaceNotFoundError):
        Workspace(files).commit(session)


UNPRIVILEGED = """
import os, sys
import casstore
from casstore.errors import UnreadablePathError
from casstore.workspace import Workspace, find_snapshot
place = sys.argv[1]
os.mkdir(place + "/first")
with casstore.open(place + "/first-store") as store:
    Workspace(place + "/first").commit(store.session("s"))  # loads what is loaded when it is used
if os.geteuid() == 0:
    os.setegid(65534)  # permissions do not stop root
    os.seteuid(65534)
os.mkdir(place + "/files")
for name in ("open", "shut", "dir/inside"):
    path = place + "/files/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(name)
os.chmod(place + "/files/" + sys.argv[2], 0)
with casstore.open(place + "/store", "relaxed", auto_train=False) as store:
    session = store.session("s")
    try:
        Workspace(place + "/files").commit(session)
    except UnreadablePathError as exc:
        print("refused", exc.path, session.head())
    Workspace(place + "/files", skip_unreadable=True).commit(session)
    print(find_snapshot(session).left_out)
os.chmod(place + "/files/" + sys.argv[2], 0o700)
"""


@pytest.fixture
def public_place() -> Iterator[str]:
    place = tempfile.mkdtemp(prefix="casstore-workspace-")
    os.chmod(place, 0o777)
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("name", ["shut", "dir"])
def test_an_unreadable_entry_is_refused_or_skipped_by_name(public_place: str, name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, public_place, name],
        capture_output=True, text=True, check=False, cwd=public_place,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert answer.stdout.splitlines() == [
        f"refused {name} None",
        str({name: "unreadable"}),
    ], answer.stderr


def test_an_error_while_reading_is_typed_and_nothing_is_committed(
    session: Session, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "a").write_text("x")

    def fail(self: object, handle: int, size_bytes: int) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(scan.StoringSink, "content", fail)
    with pytest.raises(UnreadablePathError, match="a: Input/output error"):
        Workspace(files).commit(session)
    assert session.head() is None


def test_progress_that_raises_stops_the_snapshot_and_nothing_is_committed(
    session: Session, files: Path
) -> None:
    for name in ("a", "b", "c"):
        (files / name).write_text("four")
    seen = []

    def stop(step: Step) -> None:
        seen.append(step)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Workspace(files).commit(session, progress=stop)
    assert seen == [Step("read", 4, None, "bytes"), Step("read", 8, None, "bytes")]
    assert session.head() is None


# --- with a session ---------------------------------------------------------------------------


def test_conversation_state_and_files_are_one_revision(session: Session, files: Path) -> None:
    ws = Workspace(files)
    (files / "a").write_text("1")
    session.commit(Commit(checkpoint=Checkpoint(tool_state={"cwd": "/"})))
    result = ws.commit(session, append=[NodeDraft("n1", "I wrote a")], turn="t1", label="first")
    assert (result.revision, result.nodes) == (2, ("n1",))
    state = session.load("first")
    assert state is not None
    assert state.checkpoint.tool_state == {"cwd": "/"}
    again = ws.commit(session, append=[NodeDraft("n1", "I wrote a")], turn="t1", label="first")
    assert again.replayed


def test_files_stay_with_a_session_that_commits_without_them(session: Session, files: Path) -> None:
    (files / "a").write_text("1")
    Workspace(files).commit(session)
    session.commit(Commit(append=[NodeDraft("n", "only talk")]))
    found = find_snapshot(session)
    assert found is not None
    assert found.files == 1
    assert [logged.entry.revision for logged in snapshots(session)] == [1]


def test_a_fork_shares_the_files_of_its_source_and_diverges(
    store: Store, session: Session, files: Path
) -> None:
    ws = Workspace(files)
    (files / "a").write_text("1")
    ws.commit(session)
    store.fork("agent", "other")
    other = store.session("other")
    (files / "a").write_text("2")
    ws.commit(other)
    ws.restore(session)
    assert (files / "a").read_text() == "1"
    ws.restore(other)
    assert (files / "a").read_text() == "2"


def test_a_commit_that_another_writer_overtakes_keeps_that_writers_components(
    session: Session, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.append(tool_state=1)
    ws = Workspace(files)
    take = ws.snapshot

    def overtaken(place: Store | Session, **options: Any) -> Snapshot:
        found = take(place, **options)
        session.append(tool_state=2)
        return found

    monkeypatch.setattr(ws, "snapshot", overtaken)
    ws.commit(session)
    assert session.checkpoint(hydrate=True).tool_state == 2
    assert find_snapshot(session) is not None


def test_append_takes_a_workspace_as_a_component(session: Session, files: Path) -> None:
    (files / "a").write_text("1")
    result = session.append("I wrote a", workspace=Workspace(files), tool_state={"cwd": "/"})
    assert result.revision == 1
    found = find_snapshot(session)
    assert found is not None
    assert found.files == 1
    assert session.checkpoint(hydrate=True).tool_state == {"cwd": "/"}


def test_gc_keeps_what_a_session_names_and_removes_other_snapshots(
    store: Store, session: Session, files: Path, tmp_path: Path
) -> None:
    (files / "kept").write_bytes(os.urandom(100_000))
    ws = Workspace(files)
    ws.commit(session)
    (files / "dropped").write_bytes(os.urandom(100_000))
    dropped = ws.snapshot(store).digest
    gc.collect(store, grace_ms=0)
    assert dropped not in store
    restore(session, into=tmp_path / "again")
    assert sorted(os.listdir(tmp_path / "again")) == ["kept"]
    # The cache names objects that are gone: everything is stored again.
    assert ws.snapshot(store).digest == dropped
    assert dropped in store


def test_a_snapshot_with_the_cache_of_another_store_stores_every_object(
    store: Store, files: Path, tmp_path: Path
) -> None:
    (files / "sub").mkdir()
    (files / "sub" / "a").write_text("x")
    old = os.stat(files / "sub" / "a").st_mtime_ns - 10**10
    os.utime(files / "sub" / "a", ns=(old, old))
    first = Workspace(files, cache=tmp_path / "cache").snapshot(store)
    with casstore.open(tmp_path / "second", "relaxed") as second:
        again = Workspace(files, cache=tmp_path / "cache").snapshot(second)
        assert again.digest == first.digest
        assert paths(second, again.digest) == ["sub", "sub/a"]


def test_a_revision_without_files_is_named(session: Session, files: Path) -> None:
    session.commit(Commit(append=[NodeDraft("n", 1)]))
    with pytest.raises(SnapshotNotFoundError, match="'agent' has no component 'workspace'"):
        Workspace(files).restore(session)
    with pytest.raises(SnapshotNotFoundError, match="at 1"):
        Workspace(files).status(session, 1)


def test_a_directory_of_transcripts_is_an_exact_and_deduplicated_archive(
    store: Store, session: Session, files: Path, tmp_path: Path
) -> None:
    ws = Workspace(files, defaults=False, max_file_bytes=None)
    lines = [os.urandom(40).hex() + "\n" for _ in range(3000)]
    for step in range(1, 4):
        for name in ("one.jsonl", "two.jsonl"):
            (files / name).write_text("".join(lines[: step * 1000]))
        ws.commit(session)
    restore(session, into=tmp_path / "again", defaults=False)
    assert contents(tmp_path / "again") == contents(files)
    objects = store.engine.scan_objects(limit=100_000)
    # Two files, three states each, of up to 243 kB: hardly more than one of them is stored.
    assert sum(item.size_bytes for item in objects) < 400_000


# --- differences ------------------------------------------------------------------------------


def test_a_diff_names_added_removed_changed_renamed_and_mode(session: Session, files: Path) -> None:
    ws = Workspace(files)
    for name, text in {"gone": "g", "changed": "old\n", "moved": "m" * 9, "run": "r"}.items():
        (files / name).write_text(text)
    (files / "kind").write_text("a file")
    before = ws.commit(session).revision
    (files / "gone").unlink()
    (files / "changed").write_text("new\n")
    (files / "sub").mkdir()
    (files / "moved").rename(files / "sub" / "moved")
    (files / "run").chmod(0o755)
    (files / "kind").unlink()
    (files / "kind").symlink_to("run")
    (files / "new").write_text("n")
    expected = [
        ("changed", "changed"), ("removed", "gone"), ("changed", "kind"), ("added", "new"),
        ("mode", "run"), ("added", "sub"), ("renamed", "sub/moved"),
    ]  # fmt: skip
    status = ws.status(session)
    assert [(change.kind, change.path) for change in status] == expected
    assert ws.status_text(session, status[0])[-2:] == ["-old", "+new"]
    ws.commit(session)
    found = diff(session, before)
    assert [(change.kind, change.path) for change in found] == expected
    assert found[-1].old_path == "moved"
    assert diff_text(session, found[0])[-2:] == ["-old", "+new"]
    assert ws.status(session) == []


def test_binary_files_are_not_shown_as_text(session: Session, files: Path) -> None:
    ws = Workspace(files)
    (files / "a").write_bytes(b"\0\1")
    before = ws.commit(session).revision
    (files / "a").write_bytes(b"\0\2")
    ws.commit(session)
    [change] = diff(session, before)
    assert diff_text(session, change) == ["binary or long files differ: a/a b/a"]


LOCKED = """
import os, sys
import casstore
from casstore.workspace import Workspace
place = sys.argv[1]
os.mkdir(place + "/first")
with casstore.open(place + "/first-store") as store:
    Workspace(place + "/first").commit(store.session("s"))
    Workspace(place + "/first").restore(store.session("s"))
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
locked = place + "/files/locked"
os.makedirs(locked)
with casstore.open(place + "/store", "relaxed", auto_train=False) as store:
    ws, session = Workspace(place + "/files"), store.session("s")
    for text in ("old", "new"):
        os.chmod(locked, 0o755)
        open(locked + "/a", "w").write(text)
        os.chmod(locked, 0o555)
        ws.commit(session)
    ws.restore(session, 1)
    print(open(locked + "/a").read(), oct(os.stat(locked).st_mode & 0o777))
os.chmod(locked, 0o755)
"""


def test_a_directory_that_its_owner_may_not_write_to_is_restored_and_locked_again(
    public_place: str,
) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", LOCKED, public_place],
        capture_output=True, text=True, check=False, cwd=public_place,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert answer.stdout == "old 0o555\n", answer.stderr
