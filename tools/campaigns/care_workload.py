"""A maintenance process that ``care`` kills: it maintains a store in use.

    care_workload.py STORE DURABILITY ENGINE TASKS SEED   until killed

TASKS lists what it runs repeatedly, in random order: gc, pack, vacuum, backup.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from casstore.errors import BusyError, CorruptionError
from casstore.maintenance import backup, gc, vacuum
from casstore.maintenance.check import check

# Long enough for an agent to put an object and commit it.
_GRACE_MS = 1000
# Short, so that a kill is likely to hit a transaction of the sweep.
_BATCH = 16


def _gc(store: casstore.Store) -> None:
    report = gc.collect(store, grace_ms=_GRACE_MS, batch=_BATCH)
    if report.problem is not None and not isinstance(report.problem, BusyError):
        raise report.problem


def _pack(store: casstore.Store) -> None:
    report = store.pack(min_age_ms=0)
    if report.damaged:
        raise CorruptionError(f"packing found damage: {report.damaged[0]}")


def _vacuum(store: casstore.Store) -> None:
    report = vacuum.vacuum(store, grace_ms=_GRACE_MS)
    if report.problem is not None and not isinstance(report.problem, BusyError):
        raise report.problem


def _backup(store: casstore.Store) -> None:
    """Check the last backup, whose writer may have been killed at any moment, and make another."""
    target = Path(f"{sys.argv[1]}.backup")
    if target.exists():
        with casstore.open(target) as copy:
            report = check(copy, level="connectivity")
        if not report.sound:
            raise CorruptionError(f"a backup is damaged: {report.findings}")
        shutil.rmtree(target)
    backup.backup(store, target)


_TASKS: dict[str, Callable[[casstore.Store], None]] = {
    "gc": _gc,
    "pack": _pack,
    "vacuum": _vacuum,
    "backup": _backup,
}


def main() -> None:
    """Work until killed."""
    place, durability, engine, tasks, seed = sys.argv[1:]
    rng = random.Random(seed)
    with casstore.open(place, durability, lmdb_version=int(engine)) as store:
        while True:
            _TASKS[rng.choice(tasks.split(","))](store)
            time.sleep(rng.uniform(0, 0.02))


if __name__ == "__main__":
    main()
