"""A worker of ``failover``: an agent runtime's life on a server that goes away now and then.

    failover_workload.py URL JOURNALS WORKER LIFE SEED   until killed

It lives as the workers of ``sessions`` do. When the server is gone in the middle of a call, nobody
knows what became of the call: the worker begins another life, in the same process, and asks first
after everything that it was not told.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and campaigns lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.session_calls import Calls
from campaigns.session_journal import Journal, path_of, read
from campaigns.session_workload import Worker
from casstore.errors import StorageError

#: What a line of stderr begins with when a life ended without an answer.
GAVE_UP = "end of life"
_PAUSE_S = 0.02


def live(url: str, journals: Path, name: str, life: int, seed: str) -> None:
    """Live one life: until the server is gone."""
    past = read(journals, name)
    # Made anew by each life, so that journals count the outages that a worker saw.
    journal = Journal(path_of(journals, name, life), tell_nothing=(StorageError,))
    rng = random.Random(f"{seed} {name} {life}")
    with journal.call("open", {}, lambda: casstore.open(url)) as store:
        Worker(store, Calls(store, journal, name), name, life, rng).live(past)


def main(argv: list[str]) -> None:
    """Live until killed."""
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
