"""Workspaces on every engine: commits, comparisons, restores, maintenance, copies and bundles."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import casstore
from casstore import NodeDraft
from casstore.engine.memory import MemoryEngine
from casstore.errors import RestoreConflictError
from casstore.format.digest import Digest
from casstore.maintenance import erasure, gc
from casstore.maintenance.copy import copy
from casstore.maintenance.export import export_session
from casstore.maintenance.import_ import import_session
from casstore.maintenance.policy import Policy
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import Workspace, diff, find_snapshot, restore, snapshots
from casstore.workspace.tree import File, TreeReader
from tests.workspace.trees import change, contents

SEEDS = 4


@pytest.fixture
def agent(any_store: Store) -> Session:
    return any_store.session("agent")


def stored_files(store: Store, session: Session, at: int | None = None) -> dict[str, Digest]:
    """The blobs of the files of a revision, by path."""
    found = find_snapshot(session, at)
    assert found is not None
    reader = TreeReader(store.engine)
    return {
        "/".join(parts): entry.digest
        for parts, entry in reader.walk(reader.root(found.digest).top)
        if isinstance(entry, File)
    }


def two_revisions(session: Session, files: Path) -> None:
    """Revision 1 has ``old`` and ``kept``, revision 2 has ``new`` and ``kept``."""
    ws = Workspace(files)
    (files / "kept").write_bytes(os.urandom(9_000_000))
    (files / "old").write_bytes(os.urandom(100_000))
    ws.commit(session, append=[NodeDraft("a", "first")])
    (files / "old").unlink()
    (files / "new").write_bytes(os.urandom(100_000))
    ws.commit(session, append=[NodeDraft("b", "second")])


def test_commits_status_diff_restore_and_conflicts(
    agent: Session, files: Path, tmp_path: Path
) -> None:
    ws = Workspace(files, cache=tmp_path / "cache")
    (files / "a").write_text("one\n")
    agent.append("first", workspace=ws, turn="t1")
    assert ws.status(agent) == []
    (files / "a").write_text("two\n")
    assert [(one.kind, one.path) for one in ws.status(agent)] == [("changed", "a")]
    ws.commit(agent, append=[NodeDraft("n", "second")], components={"tool_state": {"cwd": "/"}})
    assert [(one.kind, one.path) for one in diff(agent, 1)] == [("changed", "a")]
    assert [one.path for one in agent.diff(agent, at=1).details["workspace"]] == ["a"]
    assert [one.entry.revision for one in snapshots(agent)] == [2, 1]
    fork = agent.fork("fork", at=1)
    ws.restore(fork)
    assert (files / "a").read_text() == "one\n"
    (files / "a").write_text("unsaved")
    with pytest.raises(RestoreConflictError):
        ws.restore(agent)
    report = ws.restore(agent, force=True)
    assert (files / "a").read_text() == "two\n"
    assert report.saved is not None
    ws.restore_snapshot(agent, report.saved)
    assert (files / "a").read_text() == "unsaved"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_trees_round_trip(agent: Session, seed: int, files: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    ws = Workspace(files, defaults=False)
    states = []
    for _ in range(3):
        change(files, chance, 25)
        ws.commit(agent)
        states.append(contents(files))
    for revision, state in enumerate(states, 1):
        restore(agent, at=revision, into=tmp_path / f"r{revision}", defaults=False)
        assert contents(tmp_path / f"r{revision}") == state


def test_retention_and_gc_keep_the_files_of_kept_revisions_and_free_the_others(
    any_store: Store, agent: Session, files: Path, tmp_path: Path
) -> None:
    two_revisions(agent, files)
    first, second = [stored_files(any_store, agent, at) for at in (1, 2)]
    gc.collect(any_store, grace_ms=0)
    assert first["old"] in any_store
    assert any_store.prune(policy=Policy(last=1)).revisions_removed == 1
    gc.collect(any_store, grace_ms=0)
    assert first["old"] not in any_store
    assert first["kept"] == second["kept"]
    restore(agent, into=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(files)


@pytest.mark.parametrize("to_memory", [True, False])
def test_a_copied_session_restores_byte_for_byte(
    any_store: Store, agent: Session, files: Path, tmp_path: Path, to_memory: bool
) -> None:
    two_revisions(agent, files)
    with Store(MemoryEngine()) if to_memory else casstore.open(tmp_path / "second") as other:
        copy(any_store, other)
        restore(other.session("agent"), into=tmp_path / "again")
        restore(other.session("agent"), at=1, into=tmp_path / "first")
        assert other.check(level="full").sound
    assert contents(tmp_path / "again") == contents(files)
    assert sorted(os.listdir(tmp_path / "first")) == ["kept", "old"]


def test_an_exported_session_is_imported_and_restores_byte_for_byte(
    any_store: Store, agent: Session, files: Path, tmp_path: Path
) -> None:
    two_revisions(agent, files)
    export_session(any_store, "agent", tmp_path / "bundle")
    with casstore.open(tmp_path / "second", "relaxed") as other:
        import_session(other, tmp_path / "bundle")
        copied = other.session("agent")
        restore(copied, into=tmp_path / "again")
        assert contents(tmp_path / "again") == contents(files)
        restore(copied, at=1, into=tmp_path / "again")
        assert sorted(os.listdir(tmp_path / "again")) == ["kept", "old"]
        # And back into the store that it came from, under another name.
        export_session(other, "agent", tmp_path / "back")
    import_session(any_store, tmp_path / "back", name="back")
    assert find_snapshot(any_store.session("back")) == find_snapshot(agent)


def test_erasure_removes_files_including_those_saved_before_a_forced_restore(
    any_store: Store, agent: Session, files: Path
) -> None:
    agent.append("hello")
    agent.add_subjects(["anna"])
    other = any_store.session("other")
    two_revisions(agent, files)
    (files / "new").unlink()
    Workspace(files).commit(other)  # shares "kept" alone
    kept = stored_files(any_store, other)["kept"]
    unsaved = os.urandom(100_000)
    (files / "unsaved").write_bytes(unsaved)
    report = Workspace(files).restore(agent, force=True)
    assert report.saved is not None
    saved = any_store.put_blob(unsaved)
    doomed = {
        *stored_files(any_store, agent, 2).values(), *stored_files(any_store, agent).values(), saved
    } - {kept}  # fmt: skip
    assert len(doomed) == 3
    # A pin of the caller stays, even if its name is like that of the restore's pin.
    any_store.pin("workspace/agent/1-00000000", kept)
    assert report.saved_pin is not None
    pinned = any_store.find_pin(report.saved_pin)
    assert pinned is not None
    assert pinned.session == "agent"
    plan = erasure.plan(any_store, "anna")
    assert [name for name, _ in plan.pins] == [report.saved_pin]
    erasure.execute(any_store, plan)
    gc.collect(any_store, grace_ms=0)
    assert [digest for digest in doomed if digest in any_store] == []
    assert kept in any_store
