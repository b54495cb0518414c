"""Kills agent runtimes at random moments: every acknowledged call happened exactly once.

One to three workers share a store and a few sessions. Repeatedly one of them is killed and
restarted as a new process, while the others wait for its lease to expire. Then all are killed, and
the store is compared with their journals. The next workers continue with the same store, and first
resolve the calls whose outcome their predecessors did not learn.

The campaign ``care`` adds two maintenance processes that collect, pack and vacuum the store all the
time, and are killed as often.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns import session_examiner, specimen
from campaigns.replay import Verifier
from campaigns.session_journal import path_of
from campaigns.tally import Progress, Report, Tally, silent

DURABILITIES = ("full", "relaxed")
MAX_WORKERS = 3
_WORKER = Path(__file__).with_name("session_workload.py")
_KEEPER = Path(__file__).with_name("care_workload.py")
# The operations of each maintenance process.
KEEPERS = {"k0": "gc,backup", "k1": "pack,vacuum"}
_EXAMINER = Path(__file__).with_name("session_examiner.py")
_START_LIMIT_S = 60.0
# A rare call may not come in this time; then the kill happens anyway.
_PATIENCE_S = 0.5
_TAIL_BYTES = 1000
_VERIFY_EVERY = 3
_CALLS = (*["turn"] * 6, "enqueue", "fork", "rewind", "label", "pack", "lease", "claim", "attach")


class _Strike(NamedTuple):
    """The parameters of one kill, drawn from the seed."""

    victim: int
    # Kill when the victim has written this much into its journal, …
    after_bytes: int
    # … has just begun a call of this kind, if one is given, …
    during: str | None
    # … and this much time has passed since.
    delay_s: float


class _Round(NamedTuple):
    """Kills of single workers; the last one kills all."""

    workers: int
    strikes: list[_Strike]


def _draw(rng: random.Random, left: int) -> _Round:
    workers = rng.randint(1, MAX_WORKERS)
    strikes = [_draw_strike(rng, workers) for _ in range(min(left, rng.randint(1, 4)))]
    return _Round(workers, strikes)


def _draw_strike(rng: random.Random, workers: int) -> _Strike:
    victim, kind = rng.randrange(workers), rng.random()
    if kind < 0.15:
        return _Strike(victim, 1, None, rng.uniform(0, 0.015))
    during = rng.choice(_CALLS) if kind < 0.75 else None
    return _Strike(victim, rng.randrange(500, 16_000), during, rng.uniform(0, 0.003))


class _Group:
    """The workers of one store."""

    def __init__(self, store: Path, durability: str, engine: int, seed: str) -> None:
        self.store = store
        self.durability = durability
        self.engine = engine
        self.journals = store.with_suffix(".journals")
        self.journals.mkdir()
        self.examinations = 0
        self.keepers: Sequence[str] = ()
        self.verify_every = _VERIFY_EVERY
        self._seed = seed
        self._lives: Counter[str] = Counter()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, worker: str) -> None:
        """Start a worker, or restart it."""
        life = self._lives[worker]
        self._lives[worker] += 1
        place = [str(self.store), self.durability, str(self.engine)]
        if worker in KEEPERS:
            seed = f"{self._seed} {worker} {life}"
            command = [sys.executable, str(_KEEPER), *place, KEEPERS[worker], seed]
        else:
            own = [str(self.journals), worker, str(life), self._seed]
            command = [sys.executable, str(_WORKER), *place, *own]
        with (self.journals / f"{worker}.{life:05}.stderr").open("wb") as errors:
            self._running[worker] = subprocess.Popen(command, stderr=errors)

    def wait_for(self, worker: str, strike: _Strike) -> bool:
        """Return at the moment to kill; False if it does not come."""
        journal = path_of(self.journals, worker, self._lives[worker] - 1)
        deadline = time.monotonic() + _START_LIMIT_S
        while not journal.exists() or journal.stat().st_size < strike.after_bytes:
            if time.monotonic() > deadline or self._running[worker].poll() is not None:
                return False
            time.sleep(0.001)
        if strike.during is not None:
            _watch(journal, strike.during)
        moment = time.monotonic() + strike.delay_s
        while time.monotonic() < moment:
            pass  # busy wait: sleeping would take longer than the call
        return True

    def kill(self, worker: str) -> str | None:
        """Kill a worker; returns how it ended, if it had ended by itself."""
        process = self._running.pop(worker)
        process.send_signal(signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            return None
        life = self._lives[worker] - 1
        words = (self.journals / f"{worker}.{life:05}.stderr").read_text(errors="replace").strip()
        return f"{worker} ended with {process.returncode}: {words[-4000:]}"

    def kill_all(self) -> list[str]:
        """Kill all remaining processes, as nearly simultaneously as possible."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
        ends = [self.kill(worker) for worker in list(self._running)]
        return [end for end in ends if end is not None]


def _watch(journal: Path, op: str) -> None:
    """Return when the last line is the beginning of a call of this kind, or on timeout."""
    wanted = f'"op": "{op}"'.encode()
    deadline = time.monotonic() + _PATIENCE_S
    with journal.open("rb", buffering=0) as file:
        while time.monotonic() < deadline:
            file.seek(-min(_TAIL_BYTES, journal.stat().st_size), os.SEEK_END)
            if wanted in file.read().rstrip(b"\n").rpartition(b"\n")[2]:
                return


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    kills_per_store: int = 14,
    keepers: Sequence[str] = (),
    verify_every: int = _VERIFY_EVERY,
    progress: Progress = silent,
) -> Report:
    """Kill ``count`` times; sometimes begin a new store with another durability and engine."""
    rng = random.Random(seed)
    tally = Tally("care" if keepers else "sessions", total=count, progress=progress)
    examiner = Verifier(
        [sys.executable, str(_EXAMINER)], scratch / "examiner.stderr", timeout_s=120
    )
    done = generation = 0
    with examiner:
        while done < count:
            durability = DURABILITIES[generation % len(DURABILITIES)]
            engine = specimen.ENGINES[generation % len(specimen.ENGINES)]
            place = scratch / f"store-{generation}"
            group = _Group(place, durability, engine, f"{seed} {generation}")
            group.keepers, group.verify_every = keepers, verify_every
            done += _use_up(tally, examiner, group, rng, done, min(kills_per_store, count - done))
            generation += 1
    return tally.report()


def _use_up(
    tally: Tally, examiner: Verifier, group: _Group, rng: random.Random, number: int, kills: int
) -> int:
    """Kill the workers of one store repeatedly, until a guarantee is broken; returns how often."""
    tally.count(f"{group.durability}: stores")
    figures: dict[str, int] = {}
    done = 0
    while done < kills:
        plan = _draw(rng, kills - done)
        trial = (
            f"kill {number + done} ({group.store.name}, {group.durability}, "
            f"engine {group.engine}, {plan})"
        )
        _live_and_die(tally, group, plan, trial)
        done += len(plan.strikes)
        found = _examine(tally, examiner, group, trial, last=done == kills)
        if found is None:
            # A broken store stays broken; the same fault would only be found again.
            break
        figures = found
    for name, figure in figures.items():
        tally.count(f"{group.durability}: {name.replace('_', ' ')}", figure)
    return done


def _live_and_die(tally: Tally, group: _Group, plan: _Round, trial: str) -> None:
    workers = [f"w{number}" for number in range(plan.workers)]
    ended: list[str] = []
    try:
        for worker in (*workers, *group.keepers):
            group.start(worker)
        for at, strike in enumerate(plan.strikes):
            worker = workers[strike.victim]
            if not group.wait_for(worker, strike):
                ended.append(f"{worker} did not come to write {strike.after_bytes} bytes")
            if at < len(plan.strikes) - 1:
                ended += filter(None, [group.kill(worker)])
                group.start(worker)
                if group.keepers:
                    keeper = group.keepers[at % len(group.keepers)]
                    ended += filter(None, [group.kill(keeper)])
                    group.start(keeper)
                    tally.count(f"{group.durability}: keepers killed")
            tally.tried()
    finally:
        ended += group.kill_all()
    tally.count(f"{group.durability}: processes killed", plan.workers + len(plan.strikes) - 1)
    tally.count(f"{group.durability}: keepers killed", len(group.keepers))
    for words in ended:
        # A worker that ended by itself met an unexpected error.
        tally.broke(trial, f"worker: {words}")


def _examine(
    tally: Tally, examiner: Verifier, group: _Group, trial: str, *, last: bool
) -> dict[str, int] | None:
    group.examinations += 1
    verify = last or group.examinations % group.verify_every == 0
    mode = session_examiner.VERIFY if verify else session_examiner.PLAIN
    answer = examiner.ask(group.store, [str(group.journals), group.durability, mode])
    if answer.startswith("ok"):
        tally.count(f"{group.durability}: sound ({mode})")
        parts = [part.split("=") for part in answer.split()[1:]]
        return {name: int(number) for name, number in parts}
    tally.broke(trial, answer.removeprefix("violated: ")[:4000])
    return None
