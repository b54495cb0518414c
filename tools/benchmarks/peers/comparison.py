"""Runs every peer through every workload, in shuffled order, several times."""

from __future__ import annotations

import os
import platform
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from benchmarks.measuring import seconds
from benchmarks.peers.bare_lmdb import BareLmdb, BareLmdbLater
from benchmarks.peers.casstore_sessions import Casstore, CasstoreRelaxed
from benchmarks.peers.git_binary import Git
from benchmarks.peers.langgraph_savers import CasstoreSaver, InMemorySaver, SqliteSaver
from benchmarks.peers.openai_session import OpenAiSession
from benchmarks.peers.peer import Peer, does, missing
from benchmarks.peers.power_loop import PowerLoop
from benchmarks.peers.sqlite_wal import SqliteFull, SqliteNormal
from benchmarks.peers.workloads import SCENARIOS, Point, Sizes, figures, long_session

T = TypeVar("T")

# In the order of the table: first those that flush each turn, then the others.
PEERS: tuple[type[Peer], ...] = (
    Casstore,
    BareLmdb,
    SqliteFull,
    CasstoreSaver,
    SqliteSaver,
    OpenAiSession,
    Git,
    CasstoreRelaxed,
    BareLmdbLater,
    SqliteNormal,
    PowerLoop,
    InMemorySaver,
)
_PACKAGES = (
    "lmdb",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "power-loop",
    "openai-agents",
)


class Spread(NamedTuple):
    """Median, lowest and highest of several measurements."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values))


class Column(NamedTuple):
    """The results of one peer. A figure is absent if the peer does not support the operation."""

    name: str
    flush: str
    figures: dict[str, Spread]
    growth: list[Point]


class Results(NamedTuple):
    """The results of all peers; ``skipped`` lists the missing ones with the reasons."""

    repeats: int
    sizes: Sizes
    columns: list[Column]
    skipped: dict[str, str]
    versions: dict[str, str]
    # One small write and its flush, measured between the repeats, to show the state of the disk.
    flush: Spread


def compare(
    sizes: Sizes,
    repeats: int,
    peers: Sequence[type[Peer]] = PEERS,
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Iterator[Results]:
    """Measure ``peers``; yields the results so far after each repeat."""
    skipped = {peer.name: lack for peer in peers if (lack := missing(peer)) is not None}
    for name, lack in skipped.items():
        tell(f"{name} is skipped: {lack} is not installed")
    present = [peer for peer in peers if peer.name not in skipped]
    order = random.Random(1)
    found: dict[str, dict[str, list[float]]] = {peer.name: defaultdict(list) for peer in present}
    grown: dict[str, list[Point]] = {}
    flushes: list[float] = []
    for number in range(repeats):
        flushes += _flushes()
        for scenario in SCENARIOS:
            tell(f"peers, {scenario.__name__}, {number + 1} of {repeats} …")
            for peer in order.sample(present, len(present)):
                for key, value in _alone(peer, scenario, sizes).items():
                    found[peer.name][key].append(value)
        if number == 0:
            # Once only: sizes are deterministic, and each time is already a median of twenty turns.
            tell("peers, long_session …")
            for peer in order.sample(present, len(present)):
                grown[peer.name] = _alone(peer, _growth, sizes)
        _require_all(present, found, sizes)
        columns = [
            Column(
                peer.name,
                peer.flush.value,
                {key: spread(values) for key, values in found[peer.name].items()},
                grown[peer.name],
            )
            for peer in present
        ]
        yield Results(number + 1, sizes, columns, skipped, _versions(), spread(flushes))


def _growth(peer: Peer, place: Path, sizes: Sizes) -> list[Point]:
    return list(long_session(peer, place, sizes))


def _alone(peer: type[Peer], work: Callable[[Peer, Path, Sizes], T], sizes: Sizes) -> T:
    """Run a workload with a new peer in an empty directory."""
    with tempfile.TemporaryDirectory() as place:
        one = peer()
        one.start(Path(place))
        try:
            return work(one, Path(place), sizes)
        finally:
            one.stop()


def _require_all(
    peers: Sequence[type[Peer]], found: dict[str, dict[str, list[float]]], sizes: Sizes
) -> None:
    """A figure may be absent only if the peer does not support its operation."""
    for peer in peers:
        for figure in figures(sizes):
            if does(peer, figure.verb) != (figure.key in found[peer.name]):
                raise RuntimeError(f"{peer.name} and {figure.key}: measured or not by mistake")


def _flushes() -> list[float]:
    with tempfile.NamedTemporaryFile() as file:

        def write() -> None:
            file.write(b"x" * 4096)
            file.flush()
            os.fdatasync(file.fileno())

        return [seconds(write) for _ in range(50)]


def _versions() -> dict[str, str]:
    there = {"Python": platform.python_version(), "SQLite": sqlite3.sqlite_version}
    if missing(Git) is None:
        told = subprocess.run(["git", "--version"], stdout=subprocess.PIPE, text=True, check=True)
        there["git"] = told.stdout.split()[2]
    for name in _PACKAGES:
        try:
            there[name] = version(name)
        except PackageNotFoundError:
            continue
    return there


def to_json(results: Results) -> dict[str, Any]:
    """Plain data, with names for everything."""
    return {
        "repeats": results.repeats,
        "sizes": results.sizes._asdict(),
        "skipped": results.skipped,
        "versions": results.versions,
        "flush": results.flush._asdict(),
        "figures": [figure._asdict() for figure in figures(results.sizes)],
        "peers": [
            {
                "name": column.name,
                "flush": column.flush,
                "figures": {key: value._asdict() for key, value in column.figures.items()},
                "growth": [point._asdict() for point in column.growth],
            }
            for column in results.columns
        ],
    }


def from_json(document: dict[str, Any]) -> Results:
    """The inverse of ``to_json``."""
    return Results(
        document["repeats"],
        Sizes(**document["sizes"]),
        [
            Column(
                peer["name"],
                peer["flush"],
                {key: Spread(**value) for key, value in peer["figures"].items()},
                [Point(**point) for point in peer["growth"]],
            )
            for peer in document["peers"]
        ],
        document["skipped"],
        document["versions"],
        Spread(**document["flush"]),
    )
