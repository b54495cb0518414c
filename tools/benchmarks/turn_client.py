"""A process that commits turns durably, alone or concurrently with others.

    turn_client.py (casstore | sqlite) PATH CLIENT COUNT

Prints ``ready``, waits for a line, commits, prints ``done``. It changes to its own directory before
the first measured commit: that system call marks the start in a trace.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from benchmarks.sessions import Writer, make_turns
from benchmarks.sqlite_turns import SqliteTurns

# Not measured: starting the log, reading tables, filling caches.
WARM_UP = 20


def main(argv: list[str]) -> None:
    """Commit on request."""
    kind, path, client, count = argv
    turns = make_turns(WARM_UP + int(count), seed=int(client))
    session = f"s{client}"
    target: SqliteTurns | Writer
    if kind == "sqlite":
        target = database = SqliteTurns(path, session)
        close = database.close
    else:
        store = casstore.open(path)
        target, close = Writer(store.session(session)), store.close
    for turn in turns[:WARM_UP]:
        target.commit(turn)
    print("ready", flush=True)
    sys.stdin.readline()
    os.chdir(os.curdir)
    for turn in turns[WARM_UP:]:
        target.commit(turn)
    print("done", flush=True)
    close()


if __name__ == "__main__":
    main(sys.argv[1:])
