"""One of several client processes that commit at the same time.

    postgres_client.py (casstore | bare) URL CLIENT COUNT
    postgres_client.py replay URL CLIENT COUNT SESSIONS

Prints ``ready``, waits for a line, commits, prints ``done``, and waits for another line: the parent
measures the CPU time of the clients while they are alive. ``replay`` sends the calls of several
sessions, each over its own connection (``replaying``).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from benchmarks.hand_written import HandWritten, written_by
from benchmarks.replaying import Replay
from benchmarks.sessions import Writer, make_turns

# Not measured: connecting, preparing statements, filling caches.
WARM_UP = 20


def main(argv: list[str]) -> None:
    """Commit on request."""
    kind, url, client, count, *more = argv
    # Different messages each time: none is stored already.
    turns = make_turns(WARM_UP + int(count), seed=int(client))
    if kind == "replay":
        sessions = [
            make_turns(WARM_UP + int(count), seed=int(client) + number)
            for number in range(int(more[0]))
        ]
        replay = Replay(url, sessions)
        # Also the first commit of a session.
        replay.begin(WARM_UP + 2)
        _wait("ready")
        replay.run()
        _wait("done")
        replay.close()
    elif kind == "bare":
        bare = HandWritten(url)
        items = written_by(turns, f"s{client}")
        for item in items[:WARM_UP]:
            bare.commit(item)
        _wait("ready")
        for item in items[WARM_UP:]:
            bare.commit(item)
        _wait("done")
        bare.close()
    else:
        with casstore.open(url) as store:
            writer = Writer(store.session(f"s{client}"))
            for turn in turns[:WARM_UP]:
                writer.commit(turn)
            _wait("ready")
            for turn in turns[WARM_UP:]:
                writer.commit(turn)
            _wait("done")


def _wait(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
