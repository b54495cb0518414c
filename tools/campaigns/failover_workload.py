"""A worker of the ``failover`` campaign: an agent runtime on a server that fails over.

    failover_workload.py URL JOURNALS WORKER LIFE SEED   until killed

It works like the workers of ``sessions``. If the server fails during a call, the outcome of the
call is unknown: the worker begins another life in the same process, and first resolves every call
without an answer.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.session_calls import Calls
from campaigns.session_journal import Journal, path_of, read
from campaigns.session_workload import Worker
from casstore.errors import StorageError

#: The beginning of a line on stderr when a life ended without an answer.
GAVE_UP = "end of life"
_PAUSE_S = 0.02


def live(url: str, journals: Path, name: str, life: int, seed: str) -> None:
    """Work until the server is gone."""
    past = read(journals, name)
    # Opened again in each life, so that the journals count the outages.
    journal = Journal(path_of(journals, name, life), tell_nothing=(StorageError,))
    rng = random.Random(f"{seed} {name} {life}")
    with journal.call("open", {}, lambda: casstore.open(url)) as store:
        Worker(store, Calls(store, journal, name), name, life, rng).live(past)


def main(argv: list[str]) -> None:
    """Work until killed."""
    url, journals, name, life, seed = argv
    number = int(life)
    while True:
        try:
            live(url, Path(journals), name, number, seed)
        except StorageError as exc:
            print(f"{GAVE_UP} {number}: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        number += 1
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
