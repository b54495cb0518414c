"""Kills the primary of a replicated PostgreSQL under agent runtimes: acknowledged calls survive.

There are three nodes; the primary waits for one of two standbys. Worker processes share a few
sessions. Sometimes an answer is lost: the server did what was requested, but the worker does not
learn it. Then the primary is killed with all its processes while the workers are busy. A standby is
promoted, the workers find it and continue. At the end they are killed, and the store is compared
with their journals.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import casstore
from campaigns import session_examiner
from campaigns.failover_workload import GAVE_UP
from campaigns.replay import Violation
from campaigns.session_journal import path_of, read
from campaigns.tally import Progress, Report, Tally, silent
from casstore.errors import CasstoreError
from servers.postgres import NoPostgres

if TYPE_CHECKING:
    from servers.replication import Cluster

WORKERS = 3
_WORKER = Path(__file__).with_name("failover_workload.py")
_FAILOVERS_PER_STORE = 5
# How much a worker writes into its journal before the next event.
_BYTES = (1_500, 12_000)
_START_LIMIT_S = 120.0
_LOST_ANSWERS = 6
_LOOK_S = 0.002


class _Workers:
    """The workers of one store."""

    def __init__(self, journals: Path, url: str, seed: str) -> None:
        self.journals = journals
        self.journals.mkdir()
        self.url = url
        self._seed = seed
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all workers."""
        for number in range(WORKERS):
            worker = f"w{number}"
            words = [str(self.journals), worker, str(self._lives(worker)), self._seed]
            with (self.journals / f"{worker}.stderr").open("ab") as errors:
                self._running[worker] = subprocess.Popen(
                    [sys.executable, str(_WORKER), self.url, *words], stderr=errors
                )

    def wait_for(self, written: int) -> str | None:
        """Return when all workers have written this much more; returns the fault if they do not."""
        wanted = {worker: self._written(worker) + written for worker in self._running}
        deadline = time.monotonic() + _START_LIMIT_S
        while any(self._written(worker) < size for worker, size in wanted.items()):
            for worker, process in self._running.items():
                if process.poll() is not None:
                    return f"{worker} ended with {process.returncode}: {self._words(worker)}"
            if time.monotonic() > deadline:
                return (
                    f"the workers make no progress: {[self._words(name) for name in self._running]}"
                )
            time.sleep(_LOOK_S)
        return None

    def kill(self) -> None:
        """Kill all workers."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def outages(self) -> int:
        """How often a worker got no answer from the server."""
        return sum(
            line.startswith(GAVE_UP)
            for number in range(WORKERS)
            for line in (self.journals / f"w{number}.stderr").read_text().splitlines()
        )

    def _lives(self, worker: str) -> int:
        return len(list(self.journals.glob(f"{worker}.*.journal")))

    def _written(self, worker: str) -> int:
        lives = range(self._lives(worker))
        return sum(path_of(self.journals, worker, life).stat().st_size for life in lives)

    def _words(self, worker: str) -> str:
        return (self.journals / f"{worker}.stderr").read_text(errors="replace").strip()[-4000:]


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    failovers_per_store: int = _FAILOVERS_PER_STORE,
    progress: Progress = silent,
) -> Report:
    """Kill the primary ``count`` times; sometimes begin a new store."""
    rng = random.Random(seed)
    tally = Tally("failover", total=count, progress=progress)
    pauses_s: list[float] = []
    try:
        from servers.replication import Cluster

        with Cluster() as cluster:
            done = 0
            while done < count:
                kills = min(failovers_per_store, count - done)
                name = f"failover_{done}"
                workers = _Workers(scratch / name, cluster.url(schema=name), f"{seed} {done}")
                pauses_s += _use_up(tally, cluster, workers, rng, name, kills)
                done += kills
    except (NoPostgres, ImportError) as exc:
        tally.note(f"not run to its end: {exc}")
    if pauses_s:
        tally.note(
            f"from the kill until all workers continued: median {median(pauses_s):.1f} s, "
            f"{max(pauses_s):.1f} s at most"
        )
    return tally.report()


def _use_up(
    tally: Tally, cluster: Cluster, workers: _Workers, rng: random.Random, name: str, kills: int
) -> list[float]:
    """Kill the primary repeatedly under the workers of one store, until a guarantee is broken.

    Returns how long it took each time until all workers continued.
    """
    pauses_s: list[float] = []
    figures: Counter[str] | None = None
    for number in range(kills):
        trial = f"{name}, failover {number}"
        try:
            workers.start()
            wrong = _round(tally, cluster, workers, rng, pauses_s)
        finally:
            workers.kill()
        tally.tried()
        if wrong is not None:
            tally.broke(trial, f"worker: {wrong}")
            break
        figures = _examine(tally, cluster, workers, trial, whole=number == kills - 1)
        if figures is None:
            # A broken store stays broken; the same fault would only be found again.
            break
        cluster.replace_lost()
        _wait_for_standbys(cluster)
    tally.count("calls without an answer", workers.outages())
    for label, figure in (figures or {}).items():
        tally.count(label.replace("_", " "), figure)
    return pauses_s


def _round(
    tally: Tally,
    cluster: Cluster,
    workers: _Workers,
    rng: random.Random,
    pauses_s: list[float],
) -> str | None:
    """Lose answers, then the primary; returns a fault of the workers, if there is one."""
    for _ in range(rng.randrange(_LOST_ANSWERS)):
        if wrong := workers.wait_for(rng.randrange(*_BYTES) // 4):
            return wrong
        if cluster.link.lose_next_answer().wait(_START_LIMIT_S):
            tally.count("answers lost on the way")
    if wrong := workers.wait_for(rng.randrange(*_BYTES)):
        return wrong
    time.sleep(rng.uniform(0, 0.02))
    began = time.monotonic()
    cluster.fail_over()
    tally.count("primaries killed")
    # All workers have found the new primary and continue.
    wrong = workers.wait_for(rng.randrange(*_BYTES) // 4)
    pauses_s.append(time.monotonic() - began)
    return wrong


def _wait_for_standbys(cluster: Cluster) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while cluster.standbys_in_step() < 2:
        if time.monotonic() > deadline:
            raise NoPostgres("a new standby does not catch up")
        time.sleep(_LOOK_S)


def _examine(
    tally: Tally, cluster: Cluster, workers: _Workers, trial: str, *, whole: bool
) -> Counter[str] | None:
    try:
        with casstore.open(workers.url) as store:
            figures = session_examiner.examine(store, workers.journals, whole=whole)
    except (CasstoreError, Violation) as exc:
        tally.broke(trial, f"{type(exc).__name__}: {exc}"[:4000])
        return None
    tally.count("sound")
    calls = read(workers.journals)
    return Counter(
        {
            **figures,
            "calls_acknowledged": sum(call.done for call in calls),
            "calls_of_unknown_fate": sum(call.unknown for call in calls),
        }
    )
