"""A keeper that ``care`` kills: it collects, packs and vacuums a store that agents work on.

    care_workload.py STORE DURABILITY ENGINE TASKS SEED   until killed

TASKS names what it does, again and again, in random order: gc, pack, vacuum.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and campaigns lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from casstore.errors import BusyError, CorruptionError
from casstore.maintenance import gc, vacuum

# Long enough for an agent to put something and commit it.
_GRACE_MS = 1000
# Short, so that a transaction of the sweep is likely to be struck.
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


_TASKS: dict[str, Callable[[casstore.Store], None]] = {
    "gc": _gc,
    "pack": _pack,
    "vacuum": _vacuum,
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
