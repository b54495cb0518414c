"""A copy of a store that is in use."""

from __future__ import annotations

from pathlib import Path

import casstore
from casstore.maintenance.backup import backup
from tests.engine.lmdb.test_gc_interleavings import ROOTS
from tests.maintenance.wounds import engine_of, step


def test_a_backup_contains_no_notes_for_the_running_collector(tmp_path: Path) -> None:
    """Notes for a collector who is elsewhere would be taken for an hour, and never be read."""
    with casstore.open(tmp_path / "s", auto_train=False) as store:
        step(store, "s", "a")
        with engine_of(store).collection(ROOTS, grace_ms=0) as collection:
            collection.mark()
            backup(store, tmp_path / "backup")
    with casstore.open(tmp_path / "backup") as copied:
        step(copied, "s", "b")
        env = engine_of(copied)._env
        with env.reading() as txn:
            assert txn.stat(env.collection)["entries"] == 0
