"""Kills writers at random moments: acknowledged writes survive, no write is half done.

SIGKILL loses nothing with any durability, because written bytes are in the system's cache. One or
two writer processes with several threads work on one store until they are killed. Then the store is
opened and everything acknowledged is read back, and the next writers continue with it. Half of the
kills happen while the store is opened or created. After half of them, up to three more processes
are killed while they recover the store.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns import specimen
from campaigns.replay import Verifier
from campaigns.tally import Progress, Report, Tally, silent

DURABILITIES = ("full", "relaxed")
_PROGRAM = Path(__file__).with_name("kill_workload.py")
_START_LIMIT_S = 60.0


class _Store(NamedTuple):
    """The store of several rounds, and how all of them open it."""

    path: Path
    durability: str
    engine: int


class _Round(NamedTuple):
    """The parameters of one kill, drawn from the seed."""

    writers: int
    threads: int
    # Kill this long after the first writer begins to open the store, or …
    after_opening_s: float | None
    # … after this many acknowledgements.
    after_acks: int
    # Then kill processes that recover the store, each after this time.
    recoveries_s: tuple[float, ...]


def _draw(rng: random.Random) -> _Round:
    opening = rng.uniform(0, 0.012) if rng.random() < 0.5 else None
    recoveries = rng.choice((0, 0, 0, 1, 2, 3))
    return _Round(
        rng.choice((1, 2)),
        rng.choice((1, 2, 4)),
        opening,
        rng.randrange(1, 500),
        tuple([rng.uniform(0, 0.012) for _ in range(recoveries)]),
    )


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    rounds_per_store: int = 8,
    progress: Progress = silent,
) -> Report:
    """Kill ``count`` times; sometimes begin a new store with another durability and engine."""
    rng = random.Random(seed)
    tally = Tally("kill", total=count, progress=progress)
    checker = Verifier(
        [sys.executable, str(_PROGRAM), "check"], scratch / "checker.stderr", timeout_s=60
    )
    with checker:
        for number in range(count):
            generation, turn = divmod(number, rounds_per_store)
            durability = DURABILITIES[generation % len(DURABILITIES)]
            engine = specimen.ENGINES[generation // len(DURABILITIES) % len(specimen.ENGINES)]
            store = _Store(scratch / f"store-{generation}", durability, engine)
            if turn == 0:
                tally.count(f"{durability}: stores")
            _kill_once(tally, checker, store, number, _draw(rng))
    return tally.report()


def _kill_once(tally: Tally, checker: Verifier, store: _Store, number: int, plan: _Round) -> None:
    durability = store.durability
    log = store.path.with_suffix(".acks")
    log.touch()
    names = [f"{number}-{writer}" for writer in range(plan.writers)]
    writers = _kill(store, names, plan, log)
    for turn, after_s in enumerate(plan.recoveries_s):
        one = plan._replace(after_opening_s=after_s)
        writers += _kill(store, [f"{number}-again-{turn}"], one, log)
    acks = sum(_drain(writer, log) for writer in writers)
    trial = f"kill {number} ({durability}, engine {store.engine}, {plan})"
    for writer in writers:
        assert writer.stderr is not None
        words = writer.stderr.read().decode(errors="replace").strip()
        writer.stderr.close()
        if writer.wait() != -signal.SIGKILL:
            # A writer that ended by itself met an unexpected error.
            tally.broke(trial, f"a writer ended with {writer.returncode}: {words[:4000]}")
    answer = checker.ask(store.path, [str(log), durability])
    moment = "opening" if plan.after_opening_s is not None else "writing"
    tally.count(f"{durability}: killed while {moment}", plan.writers)
    tally.count(f"{durability}: killed while recovering", len(plan.recoveries_s))
    tally.count(f"{durability}: acknowledged", acks)
    if answer.startswith("ok"):
        tally.count(f"{durability}: {answer.removeprefix('ok ')}")
    else:
        tally.broke(trial, answer)
    tally.tried()


def _kill(
    store: _Store, names: Sequence[str], plan: _Round, log: Path
) -> list[subprocess.Popen[bytes]]:
    """Start writers and kill them as planned."""
    writers = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), "write", str(store.path), store.durability,
             str(store.engine), name, str(plan.threads)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name in names
    ]  # fmt: skip
    try:
        _wait_for_moment(writers, plan, log)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
    return writers


def _wait_for_moment(writers: Sequence[subprocess.Popen[bytes]], plan: _Round, log: Path) -> None:
    """Return at the planned moment; lines that arrive before go to the log."""
    pipes = [writer.stdout for writer in writers if writer.stdout is not None]
    deadline = time.monotonic() + _START_LIMIT_S
    seen = 0
    while time.monotonic() < deadline:
        ready, _, _ = select.select(pipes, [], [], 1.0)
        for pipe in ready:
            # select does not see bytes in a Python buffer, so read unbuffered.
            part = os.read(pipe.fileno(), 1 << 16)
            if not part:
                return
            seen += _record(part, log, pipe.fileno())
            if plan.after_opening_s is not None and b"opening" in part:
                # The random moment is the experiment; nothing is synchronised here.
                select.select([], [], [], plan.after_opening_s)
                return
        if plan.after_opening_s is None and seen >= plan.after_acks:
            return


def _drain(writer: subprocess.Popen[bytes], log: Path) -> int:
    """Log what a killed writer had printed; returns the number of its acknowledgements."""
    assert writer.stdout is not None
    while part := os.read(writer.stdout.fileno(), 1 << 16):
        _record(part, log, writer.stdout.fileno())
    acks = _halves.pop(writer.stdout.fileno(), (b"", 0))[1]
    writer.stdout.close()
    return acks


# By pipe: the beginning of an incomplete line, and the number of complete lines.
_halves: dict[int, tuple[bytes, int]] = {}


def _record(part: bytes, log: Path, pipe: int) -> int:
    half, count = _halves.get(pipe, (b"", 0))
    *lines, half = (half + part).split(b"\n")
    acks = [line for line in lines if line.startswith(b"{")]
    for line in acks:
        json.loads(line)
    with log.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in acks))
    _halves[pipe] = half, count + len(acks)
    return len(acks)
