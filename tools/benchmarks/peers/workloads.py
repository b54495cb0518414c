"""The workloads of the comparison, and the figures they yield.

A workload takes a started peer in an empty directory and returns figures by name. A figure is
absent if the peer does not support the operation. All peers get the same data.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.measuring import seconds, texts
from benchmarks.peers.peer import Message, Peer, Turn, does
from benchmarks.sessions import corpus, make_turns


class Figure(NamedTuple):
    """A row of the table: its key, title, unit and the operation it needs."""

    key: str
    title: str
    unit: str
    verb: str


class Sizes(NamedTuple):
    """The sizes of the workloads."""

    turns: int
    forks: int
    keys: int
    edits: int
    prefix: int
    branches: int
    sessions: int
    long: int
    # A peer that writes its whole state each turn is stopped at this size, and its line ends.
    long_bytes: int
    long_s: float


FULL = Sizes(300, 100, 1000, 50, 50, 1000, 100, 1000, 1 << 30, 25)
QUICK = Sizes(20, 10, 300, 5, 10, 20, 10, 20, 1 << 26, 2)
# Minimal sizes, for tests.
TINY = Sizes(5, 2, 20, 2, 2, 3, 4, 5, 1 << 26, 5)

_SESSION_TURNS = 20
_APART = 5
_LOADS = 3
POINTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def figures(sizes: Sizes) -> list[Figure]:
    """The rows of the table, in order."""
    messages = 2 * sizes.turns
    return [
        Figure("commit", f"turn commit: two messages of 1.7 KB, median of {sizes.turns}",
               "s", "commit"),
        Figure("session_bytes", f"that session of {sizes.turns} turns on disk",
               "bytes", "commit"),
        Figure("load", f"active-path load of its {messages} messages after reopening",
               "s", "path"),
        Figure("edit", f"tool-state edit: one key of {sizes.keys:,}, every state kept",
               "s", "edit"),
        Figure("edit_bytes", "bytes that such an edit adds", "bytes", "edit"),
        Figure("fork", f"fork of that session, mean of {sizes.forks}", "s", "fork"),
        Figure("fork_bytes", "bytes that such a fork adds", "bytes", "fork"),
        Figure("diff", f"diff of two forks that differ in {4 * _APART} messages", "s", "diff"),
        Figure("branch", f"tree search: a branch of {sizes.branches:,}, each a turn longer "
               "than where it began", "s", "branch"),
        Figure("branch_bytes", "bytes that such a branch adds", "bytes", "branch"),
        Figure("bulk", f"bulk load of {sizes.sessions} sessions of {2 * _SESSION_TURNS} "
               "messages, a message", "s", "bulk"),
        Figure("gc", "gc: half of those sessions deleted and their room made usable, in all",
               "s", "collect"),
        Figure("pack", f"pack of the session of {sizes.turns} turns and its forks, in all",
               "s", "pack"),
        Figure("packed_bytes", "what it then takes on disk", "bytes", "pack"),
    ]  # fmt: skip


def conversation(peer: Peer, place: Path, sizes: Sizes) -> dict[str, float]:
    """A session turn by turn; then loaded, forked, compared and packed."""
    kind = type(peer)
    turns: list[Turn] = list(make_turns(sizes.turns + 2 * _APART))
    taken = [seconds(partial(peer.commit, "s", turn)) for turn in turns[: sizes.turns]]
    found: dict[str, float] = {"commit": median(taken), "session_bytes": peer.size_bytes(place)}
    loads = []
    for _ in range(_LOADS):
        peer.reopen(place)
        started = perf_counter()
        loaded = peer.path("s")
        loads.append(perf_counter() - started)
        _require(peer, len(loaded), 2 * sizes.turns)
    found["load"] = median(loads)
    if does(kind, "fork"):
        before = peer.size_bytes(place)
        started = perf_counter()
        for at in range(sizes.forks):
            peer.fork("s", f"f{at}")
        found["fork"] = (perf_counter() - started) / sizes.forks
        found["fork_bytes"] = (peer.size_bytes(place) - before) / sizes.forks
        _require(peer, len(peer.path("f0")), 2 * sizes.turns)
    if does(kind, "diff"):
        for at, turn in enumerate(turns[sizes.turns :]):
            peer.commit(f"f{at % 2}", turn)
        times = []
        for _ in range(_LOADS):
            started = perf_counter()
            different = peer.diff("f0", "f1")
            times.append(perf_counter() - started)
            _require(peer, different, 4 * _APART)
        found["diff"] = median(times)
    if does(kind, "pack"):
        found["pack"] = seconds(peer.pack)
        found["packed_bytes"] = peer.size_bytes(place)
        _require(peer, len(peer.path("s")), 2 * sizes.turns)
    return found


def tool_state(peer: Peer, place: Path, sizes: Sizes) -> dict[str, float]:
    """A state of many keys, of which one changes at a time."""
    if not does(type(peer), "edit"):
        return {}
    source = random.Random(3)
    values = iter(texts(sizes.keys + sizes.edits, 100, seed=5))
    state: dict[str, Any] = {f"tool-{at:05}": next(values) for at in range(sizes.keys)}
    peer.edit("s", state, "tool-00000")
    before = peer.size_bytes(place)
    taken = []
    for _ in range(sizes.edits):
        key = f"tool-{source.randrange(sizes.keys):05}"
        state = state | {key: next(values)}
        started = perf_counter()
        peer.edit("s", state, key)
        taken.append(perf_counter() - started)
    added = (peer.size_bytes(place) - before) / sizes.edits
    return {"edit": median(taken), "edit_bytes": added}


def tree_search(peer: Peer, place: Path, sizes: Sizes) -> dict[str, float]:
    """Branches of branches from a common start, each one turn longer."""
    if not does(type(peer), "branch"):
        return {}
    source = random.Random(4)
    turns: list[Turn] = list(make_turns(sizes.prefix + sizes.branches, seed=8))
    peer.bulk({"b0": turns[: sizes.prefix]})
    before = peer.size_bytes(place)
    started = perf_counter()
    for at, turn in enumerate(turns[sizes.prefix :], 1):
        # Mostly near the start, like a search that drops bad branches.
        peer.branch(f"b{source.randrange(at) // 2}", f"b{at}", turn)
    taken = perf_counter() - started
    added = peer.size_bytes(place) - before
    return {"branch": taken / sizes.branches, "branch_bytes": added / sizes.branches}


def many_sessions(peer: Peer, place: Path, sizes: Sizes) -> dict[str, float]:
    """Sessions loaded in bulk; then half of them are deleted."""
    turns: list[Turn] = list(make_turns(sizes.sessions * _SESSION_TURNS, seed=9))
    given = {
        f"s{at}": turns[at * _SESSION_TURNS : (at + 1) * _SESSION_TURNS]
        for at in range(sizes.sessions)
    }
    taken = seconds(lambda: peer.bulk(given))
    gone = random.Random(5).sample(sorted(given), sizes.sessions // 2)
    found = {
        "bulk": taken / (2 * len(turns)),
        "gc": seconds(lambda: peer.collect(gone)),
    }
    stays = next(name for name in given if name not in gone)
    _require(peer, len(peer.path(stays)), 2 * _SESSION_TURNS)
    return found


SCENARIOS: tuple[Callable[[Peer, Path, Sizes], dict[str, float]], ...] = (
    conversation,
    tool_state,
    tree_search,
    many_sessions,
)


class Point(NamedTuple):
    """A long session after a number of turns: its size, and the time of its last turns."""

    turns: int
    size_bytes: int
    turn_s: float


def long_session(peer: Peer, place: Path, sizes: Sizes) -> Iterator[Point]:
    """Sizes and times of a growing session, up to a limit in ``sizes``."""
    recent: list[float] = []
    began = perf_counter()
    for number, turn in enumerate(_long_turns(sizes.long), 1):
        recent.append(seconds(partial(peer.commit, "s", turn)))
        if number in POINTS:
            size = peer.size_bytes(place)
            yield Point(number, size, median(recent[-20:]))
            if size > sizes.long_bytes:
                return
        # One turn of such a peer may write megabytes; do not wait for the next point.
        if perf_counter() - began > sizes.long_s:
            yield Point(number, peer.size_bytes(place), median(recent[-20:]))
            return


def _long_turns(count: int) -> Sequence[Turn]:
    """From the corpus, if there is one: its longest session, two entries per turn."""
    given = corpus()
    if given is None:
        return make_turns(count)
    entries: list[Message] = [
        {"role": ("user", "assistant")[at % 2], "id": f"entry-{at}", "content": repr(entry)}
        for at, entry in enumerate(given[1])
    ]
    return [entries[at : at + 2] for at in range(0, len(entries) - 1, 2)][:count]


def _require(peer: Peer, found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{peer.name} gave {found} messages instead of {wanted}")
