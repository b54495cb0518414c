"""Random trees and random edits come back byte for byte, modes and links included."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

import casstore
from casstore.workspace import Workspace, restore
from tests.workspace.trees import change, contents


@pytest.mark.parametrize("seed", range(12))
def test_random_trees_and_random_edits_round_trip(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    files = tmp_path / "files"
    files.mkdir()
    with casstore.open(tmp_path / "store", "relaxed", auto_train=False) as store:
        session = store.session("agent")
        ws = Workspace(files, cache=tmp_path / "cache" if seed % 2 else None)
        seen = []
        for _ in range(5):
            change(files, chance, chance.randrange(1, 25))
            result = ws.commit(session)
            seen.append((result.revision, contents(files)))
        # Every revision, in any order, in the directory itself and in an empty one.
        chance.shuffle(seen)
        for revision, expected in seen:
            ws.restore(session, revision)
            assert contents(files) == expected
            assert ws.plan_restore(session, revision).is_empty
            shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
            restore(session, at=revision, into=tmp_path / "scratch")
            assert contents(tmp_path / "scratch") == expected
        # And over changes that no snapshot has, if that is forced; those are saved first.
        change(files, chance, 30)
        changed = contents(files)
        report = ws.restore(session, seen[0][0], force=True)
        assert contents(files) == seen[0][1]
        if report.saved is not None:
            ws.restore_snapshot(session, report.saved)
            assert contents(files) == changed


def test_a_snapshot_is_the_same_whether_or_not_a_cache_is_used(tmp_path: Path) -> None:
    chance = random.Random(99)
    files = tmp_path / "files"
    files.mkdir()
    with casstore.open(tmp_path / "store", "relaxed", auto_train=False) as store:
        ws = Workspace(files)
        for _ in range(10):
            change(files, chance, 8)
            assert ws.snapshot(store).digest == Workspace(files).snapshot(store).digest
