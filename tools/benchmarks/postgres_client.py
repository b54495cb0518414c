"""One of several clients that commit at the same time, each a process of its own.

    postgres_client.py (casstore | bare) URL CLIENT COUNT
    postgres_client.py replay URL CLIENT COUNT SESSIONS

Says ``ready``, waits for a line, commits, says ``done``, and waits for another line: whoever
counts what all have taken needs them alive. The last one sends the calls of several sessions, each
over a connection of its own (``replaying``).
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and benchmarks lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from benchmarks.hand_written import HandWritten, written_by
from benchmarks.replaying import Replay
from benchmarks.sessions import Writer, make_turns

# Not measured: connections are made, statements prepared, caches filled.
WARM_UP = 20


def main(argv: list[str]) -> None:
    """Commit when told to."""
    kind, url, client, count, *more = argv
    # Each time other messages: nothing is stored already.
    turns = make_turns(WARM_UP + int(count), seed=int(client))
    if kind == "replay":
        sessions = [
            make_turns(WARM_UP + int(count), seed=int(client) + number)
            for number in range(int(more[0]))
        ]
        replay = Replay(url, sessions)
        # And what a session begins with.
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
