"""Kill writers in commits that reorganise node indexes: every acknowledged node is found.

A writer commits so many nodes at a time that most commits fill a page, and many make runs of
every level; in between it forks, adopts and rewinds. After each kill the store is opened,
every node that was acknowledged is found by its id and in its place, and the indexes are held
against their nodes.

    index_kill.py write STORE SEED     until killed
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.tally import Progress, Report, Tally, silent
from casstore.format.node_index import RUN_NODES
from casstore.maintenance.check import check
from casstore.session.data import Commit, NodeDraft

_SESSION = "s"
_ROUNDS_PER_STORE = 10
_PATIENCE_S = 5.0
_MOST_NODES = RUN_NODES[3] + RUN_NODES[2]


def run(scratch: Path, *, count: int, seed: int, progress: Progress = silent) -> Report:
    """Kill ``count`` times; now and then begin a new store."""
    chance = random.Random(seed)
    tally = Tally("index", total=count, progress=progress)
    for number in range(count):
        place = scratch / f"store-{number // _ROUNDS_PER_STORE}"
        acks = _kill_once(tally, place, chance, number)
        try:
            _examine(tally, place, acks, "connectivity" if number % 5 else "full")
        except Exception as exc:
            tally.broke(f"kill {number}", repr(exc)[:1000])
        tally.tried()
    return tally.report()


def _kill_once(tally: Tally, place: Path, chance: random.Random, number: int) -> list[int]:
    """Let a writer work and kill it; the numbers of nodes that it acknowledged."""
    program = [sys.executable, str(Path(__file__)), "write", str(place), str(number)]
    strike_after = chance.randrange(1, 30)
    acks: list[int] = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        rest = b""
        while len(acks) < strike_after:
            if not select.select([writer.stdout], [], [], _PATIENCE_S)[0]:
                break  # it has written all that it may
            part = os.read(writer.stdout.fileno(), 1 << 16)
            if not part:
                break
            *lines, rest = (rest + part).split(b"\n")
            acks += [int(json.loads(line)) for line in lines]
        # The moment itself is the experiment; nothing waits for anything here.
        select.select([], [], [], chance.uniform(0, 0.004))
        writer.send_signal(signal.SIGKILL)
        left = writer.stdout.read()
        *lines, _ = (rest + left).split(b"\n")
        acks += [int(json.loads(line)) for line in lines]
        words = writer.stderr.read().decode(errors="replace")
    if writer.returncode != -signal.SIGKILL:
        tally.broke(f"kill {number}", f"the writer ended by itself: {words[-2000:]}")
    tally.count("acknowledged commits", len(acks))
    return acks


def _examine(tally: Tally, place: Path, acks: list[int], level: str) -> None:
    with casstore.open(place) as store:
        session = store.session(_SESSION)
        head = session.head()
        count = 0 if head is None else head.node_count
        if acks and count < acks[-1]:
            raise AssertionError(f"{acks[-1]} nodes were acknowledged, {count} are there")
        for at, place_ in enumerate(session.nodes("full").pages(1000)):
            for offset, node in enumerate(place_):
                if node.id != f"n{1000 * at + offset}":
                    raise AssertionError(f"node {1000 * at + offset} is {node.id}")
        for at in random.Random(count).sample(range(count), min(count, 50)):
            found = session.node(f"n{at}")
            if found is None or found.payload != at:
                raise AssertionError(f"node n{at} is not found, or another")
        if session.node(f"n{count}") is not None:
            raise AssertionError(f"a node n{count} that is not listed")
        report = check(store, level=level)
        if not report.sound:
            raise AssertionError(str(report.findings))
        tally.count("nodes", count)


def write(place: str, seed: int) -> None:
    """Commit until killed; one line for each commit, the number of nodes then."""
    chance = random.Random(seed)
    with casstore.open(place, "relaxed") as store:
        session = store.session(_SESSION)
        head = session.head()
        count = 0 if head is None else head.node_count
        while count < _MOST_NODES:
            # Up to the end of a page or of a run, or one node beyond it.
            size = chance.choice((*RUN_NODES[:2], *RUN_NODES[:3]))
            more = size - count % size + chance.choice((0, 0, 1))
            nodes = [NodeDraft(f"n{at}", at) for at in range(count, count + more)]
            way = chance.random()
            if way < 0.7 or not count:
                session.commit(Commit(append=nodes))
            else:
                twin = f"twin {os.getpid()} {count}"
                store.fork(_SESSION, twin, append=nodes)
                session.adopt(twin)
                store.delete_session(twin)
            count += more
            # One short write to a pipe is whole or absent.
            os.write(1, b"%d\n" % count)
    while True:
        signal.pause()


if __name__ == "__main__":
    write(sys.argv[2], int(sys.argv[3]))
