"""One of several clients that commit at the same time, each a process of its own.

    postgres_client.py (casstore | bare) URL CLIENT COUNT

Says ``ready``, waits for a line, commits, and says ``done``.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and benchmarks lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from benchmarks.hand_written import HandWritten, written_by
from benchmarks.sessions import Writer, make_turns

# Not measured: connections are made, statements prepared, caches filled.
WARM_UP = 20


def main(argv: list[str]) -> None:
    """Commit when told to."""
    kind, url, client, count = argv
    # Each time other messages: nothing is stored already.
    turns = make_turns(WARM_UP + int(count), seed=int(client))
    if kind == "bare":
        bare = HandWritten(url)
        items = written_by(turns, f"s{client}")
        for item in items[:WARM_UP]:
            bare.commit(item)
        _wait()
        for item in items[WARM_UP:]:
            bare.commit(item)
        print("done", flush=True)
        bare.close()
        return
    with casstore.open(url) as store:
        writer = Writer(store.session(f"s{client}"))
        for turn in turns[:WARM_UP]:
            writer.commit(turn)
        _wait()
        for turn in turns[WARM_UP:]:
            writer.commit(turn)
        print("done", flush=True)


def _wait() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
