"""Measures the redo log: flushes per commit, tail latency, several processes, single commits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

import casstore
from benchmarks.measuring import Goal, at_least, at_most, repeated, seconds, side_by_side
from benchmarks.sessions import Writer, make_turns, times
from benchmarks.sqlite_turns import SqliteTurns, Turn, create
from campaigns.strace_log import Call, calls, descriptor, flags
from casstore.session.data import Checkpoint, Commit, NodeDraft

_CLIENT = Path(__file__).parent / "turn_client.py"
_TAIL_TURNS = 2500
_PROCESSES = 4

# --- flushes ------------------------------------------------------------------------------

_FLUSHES = ("fsync", "fdatasync", "msync", "sync_file_range", "syncfs", "sync")
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
_SYNCHRONOUS = frozenset({"O_DSYNC", "O_SYNC"})
_TRACED = (*_FLUSHES, *_WRITES, "openat", "close", "chdir")


def flushes(quick: bool) -> list[Goal]:
    """The number of disk flushes per commit, including closing and background work."""
    if shutil.which("strace") is None:
        print("flushes is skipped: strace is not installed", file=sys.stderr)
        return []
    count = 1000
    with tempfile.TemporaryDirectory() as place:
        trace = Path(place, "trace")
        # Strings are left out, so that no comma in one is taken for syntax.
        command = ["strace", "-f", "-xx", "-s", "0", "-e", "signal=none", "-o", str(trace)]
        command += ["-e", f"trace={','.join(_TRACED)}", "--", sys.executable, str(_CLIENT)]
        subprocess.run(
            [*command, "casstore", os.path.join(place, "store"), "1", str(count)],
            input="go\n", stdout=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        with trace.open(encoding="ascii") as lines:
            found = count_flushes(calls(lines))
    return [
        at_most(
            f"flushes a durable commit, counted with strace over {count:,} commits: `fsync`, "
            "`fdatasync`, and writes with `RWF_DSYNC` or to descriptors opened with `O_DSYNC`",
            sum(found.values()) / count, 1.1, "",
            detail=", ".join(f"{name} {number:,}" for name, number in sorted(found.items())),
        )
    ]  # fmt: skip


def count_flushes(trace: Iterable[Call]) -> dict[str, int]:
    """How often each call flushed, since the traced process changed its directory."""
    synchronous: set[int | None] = set()
    found: dict[str, int] = {}
    for call in trace:
        fields = call.fields()
        kind = ""
        if call.name == "chdir":
            found.clear()
        elif call.name == "openat":
            if flags(fields[2]) & _SYNCHRONOUS:
                synchronous.add(call.value())
        elif call.name == "close":
            synchronous.discard(descriptor(fields[0])[0])
        elif call.name in _FLUSHES:
            kind = call.name
        elif flags(fields[-1]) & {"RWF_DSYNC", "RWF_SYNC"}:
            kind = f"{call.name} with RWF_DSYNC"
        elif descriptor(fields[0])[0] in synchronous:
            kind = f"{call.name} with O_DSYNC"
        if kind:
            found[kind] = found.get(kind, 0) + 1
    return found


# --- tails --------------------------------------------------------------------------------


def tails(quick: bool) -> list[Goal]:
    """How far the slowest commits, and the mean, are from the median."""
    turns = make_turns(_TAIL_TURNS)
    repeats = 3 if quick else 7

    def taken(durability: str) -> list[float]:
        with tempfile.TemporaryDirectory() as place, casstore.open(place, durability) as store:
            return sorted(times(Writer(store.session("s")).commit, turns))

    def slowest() -> float:
        found = taken("full")
        return found[len(found) * 99 // 100] / median(found)

    def mean() -> float:
        found = taken("relaxed")
        return fmean(found) / median(found)

    tail, middle = repeated(slowest, repeats), repeated(mean, repeats)
    return [
        at_most(
            f"the 99th percentile of {_TAIL_TURNS:,} turns at `full`, against their median",
            tail.ratio, 2.5, detail=tail.spread,
        ),
        at_most(
            f"the mean of {_TAIL_TURNS:,} turns at `relaxed`, against their median",
            middle.ratio, 1.15, detail=middle.spread,
        ),
    ]  # fmt: skip


# --- several processes ----------------------------------------------------------------------


def processes(quick: bool) -> list[Goal]:
    """Processes that commit durably to one store, each to a session of its own."""
    each = 150 if quick else 500

    def ours() -> float:
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "store")
            casstore.open(path).close()
            return _together("casstore", path, each)

    def theirs() -> float:
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "db")
            create(path)
            return _together("sqlite", path, each)

    pair = side_by_side(ours, theirs, 3 if quick else 7)
    total = _PROCESSES * each
    return [
        at_least(
            f"{_PROCESSES} processes committing durably to {_PROCESSES} sessions, against SQLite "
            "(WAL, synchronous FULL) doing the same: times the rate",
            1 / pair.ratio, 1.0,
            detail=f"{total / pair.ours_s:,.0f} commits a second, SQLite "
            f"{total / pair.theirs_s:,.0f}; {pair.inverse_spread}",
        )
    ]  # fmt: skip


def _together(kind: str, path: str, each: int) -> float:
    """The time from the start signal until the last process is done."""
    started = [
        subprocess.Popen(
            [sys.executable, str(_CLIENT), kind, path, str(client), str(each)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for client in range(1, _PROCESSES + 1)
    ]  # fmt: skip
    try:
        for process in started:
            _expect(process, "ready")
        began = perf_counter()
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            _expect(process, "done")
        return perf_counter() - began
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said != word:
        raise RuntimeError(f"a process that commits said {said!r}, not {word!r}")


# --- one commit -----------------------------------------------------------------------------


def open_and_close(quick: bool) -> list[Goal]:
    """Opening, one durable commit and closing, as a program does that is started for each turn."""
    count = 30 if quick else 100
    turns = make_turns(2 * count * (9 if quick else 15))
    fresh = iter(turns)
    with tempfile.TemporaryDirectory() as place:
        ours_at, theirs_at = os.path.join(place, "store"), os.path.join(place, "db")
        create(theirs_at)
        numbers = iter(range(len(turns)))

        def ours_once() -> None:
            with casstore.open(ours_at) as store:
                store.session("s").commit(_commit(next(fresh), next(numbers)))

        def theirs_once() -> None:
            database = SqliteTurns(theirs_at, "s")
            database.commit(next(fresh))
            database.close()

        def run(once: Callable[[], None]) -> Callable[[], float]:
            return lambda: median([seconds(once) for _ in range(count)])

        pair = side_by_side(run(ours_once), run(theirs_once), 9 if quick else 15)
    return [
        at_most(
            "opening a store, one durable turn, closing it, against SQLite (WAL, synchronous "
            "FULL) doing the same",
            pair.ratio, 1.5,
            detail=f"{pair.ours_s * 1e3:.2f} ms, SQLite {pair.theirs_s * 1e3:.2f} ms; "
            f"{pair.spread}",
        )
    ]  # fmt: skip


def _commit(turn: Turn, number: int) -> Commit:
    return Commit(
        append=[NodeDraft(message["id"], message) for message in turn],
        checkpoint=Checkpoint(turn_state={"turn_index": number}),
        turn=f"turn-{number}",
    )


ALL: dict[str, Callable[[bool], list[Goal]]] = {
    "flushes": flushes,
    "commit-tails": tails,
    "commit-processes": processes,
    "open-close": open_and_close,
}
