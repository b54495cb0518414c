"""Interrupt the main thread at random moments while other threads write.

A signal handler that raises, as Ctrl-C does, hits the main thread while it commits, appends to a
session log, puts blobs and changes records; so it often leads a batch that holds other threads'
writes. What the other threads were told must be true: each acknowledged write is stored once.
Of the main thread's own calls, an acknowledged one is stored once and an interrupted one at
most once. Nothing but the interrupt is raised, and no descriptor stays behind.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.tally import Progress, Report, Tally, silent
from casstore import Commit, NodeDraft, Usage
from casstore.maintenance import check
from casstore.records.log import NewMessage, SessionLog, Tokens

DURABILITIES = ("full", "relaxed")
_INTERRUPTS_PER_CHILD = 2_500
_MAX_PAUSE_S = 0.002


class Worker:
    """One thread's calls, and what it knows about the outcome of each."""

    def __init__(self, store: casstore.Store, name: str) -> None:
        self._store = store
        self._log = SessionLog(store)
        self.name = name
        self.log_id = self._log.create(f"{name}-log").id
        #: By kind: the numbers whose call returned, and those whose call was interrupted.
        self.done: dict[str, list[int]] = {"append": [], "commit": [], "put": []}
        self.unknown: dict[str, list[int]] = {kind: [] for kind in self.done}
        self.number = 0

    def call(self, kind: str) -> None:
        """Make the next call of a kind. Its number is unknown until the call returns."""
        number = self.number = self.number + 1
        self.unknown[kind].append(number)
        _CALLS[kind](self, number)
        # Interrupted between the two, the number is in both lists.
        self.done[kind].append(number)
        self.unknown[kind].pop()

    def append(self, number: int) -> None:
        """Append a message to the session log, with one token of usage."""
        message = NewMessage("user", f"{self.name} {number}", round=number)
        self._log.append(self.log_id, message, tokens=Tokens(total=1))

    def commit(self, number: int) -> None:
        """Append a node to a session, and add one token of usage."""
        node = NodeDraft(f"{self.name}-{number}", {"text": f"{self.name} {number}"})
        used = Usage("agent", "model", input=1)
        self._store.session(self.name).commit(Commit(append=[node], usage=[used]))

    def put(self, number: int) -> None:
        """Put a blob and pin it."""
        digest = self._store.put_blob(f"{self.name} blob {number}".encode())
        self._store.pin(f"{self.name} {number}", digest)

    def stored(self) -> dict[str, Counter[int]]:
        """How often each number is stored, by kind; raises if the usage does not fit."""
        messages = [
            str(message.content) for message in self._log.messages(self.log_id, 1, 1_000_000)
        ]
        session = self._store.session(self.name)
        nodes = [node.id for node in session.nodes()]
        for counted, used in (
            (len(messages), self._log.totals(self.log_id).total),
            (len(nodes), session.usage()[0].total),
        ):
            assert counted == used, f"{self.name}: {counted} messages, but a usage of {used}"
        pins = [pin.name for pin in self._store.pins() if pin.name.startswith(f"{self.name} ")]
        return {
            "append": Counter(int(text.split()[-1]) for text in messages),
            "commit": Counter(int(name.rpartition("-")[2]) for name in nodes),
            "put": Counter(int(name.split()[-1]) for name in pins),
        }

    def broken(self) -> list[str]:
        """The differences between the results of this thread's calls and the stored content."""
        found: list[str] = []
        for kind, stored in self.stored().items():
            done, unknown = set(self.done[kind]), set(self.unknown[kind])
            found += [f"{self.name}: {kind} {n} was lost" for n in sorted(done - set(stored))]
            found += [
                f"{self.name}: {kind} {n} is stored {times} times"
                for n, times in sorted(stored.items())
                if times > 1 or n not in done | unknown
            ]
        return found


_CALLS: dict[str, Callable[[Worker, int], None]] = {
    "append": Worker.append,
    "commit": Worker.commit,
    "put": Worker.put,
}


def child(path: str, durability: str, count: int, seed: int) -> dict[str, object]:
    """Interrupt this process's main thread ``count`` times; returns the results."""
    rng = random.Random(seed)
    # Python discards an interrupt that hits a callback of its garbage collector.
    gc.disable()
    store = casstore.open(path, durability)
    workers = [Worker(store, name) for name in ("main", "second", "third")]
    stop = threading.Event()
    errors: list[str] = []
    came, armed = 0, False

    def work(worker: Worker, choice: random.Random) -> None:
        try:
            while not stop.is_set():
                worker.call(choice.choice(("append", "commit", "put")))
        except BaseException:
            errors.append(traceback.format_exc())

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if stop.is_set():
            # It came as the timer was stopped, and must not start it again.
            return
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, _MAX_PAUSE_S))
        if armed:
            came += 1
            raise KeyboardInterrupt

    for worker in workers:
        for kind in _CALLS:
            worker.call(kind)
    threads = [
        threading.Thread(target=work, args=(worker, random.Random(f"{seed} {worker.name}")))
        for worker in workers[1:]
    ]
    for thread in threads:
        thread.start()
    before = len(os.listdir("/proc/self/fd"))
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _MAX_PAUSE_S)
    while came < count and not errors:
        kind = rng.choice(("append", "commit", "put"))
        try:
            armed = True
            workers[0].call(kind)
            armed = False
        except KeyboardInterrupt:
            armed = False
        except BaseException:
            armed = False
            errors.append(traceback.format_exc())
        if came % 256 == 0:
            gc.collect()
    stop.set()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for thread in threads:
        thread.join()
    gc.enable()
    gc.collect()
    leaked = len(os.listdir("/proc/self/fd")) - before
    if leaked > 0:
        errors.append(f"{leaked} descriptors leaked")
    for worker in workers:
        try:
            errors += worker.broken()
        except AssertionError as exc:
            errors.append(str(exc))
    report = check.check(store, level="full")
    if not report.sound:
        errors.append(f"check: {report}")
    store.close()
    acknowledged = sum(len(numbers) for worker in workers for numbers in worker.done.values())
    return {"interrupts": came, "acknowledged": acknowledged, "errors": errors}


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    durabilities: Sequence[str] = DURABILITIES,
    progress: Progress = silent,
) -> Report:
    """Interrupt ``count`` times, in processes that each have their own store."""
    tally = Tally("interrupts", total=count, progress=progress)
    left, number = count, 0
    while left > 0:
        durability = durabilities[number % len(durabilities)]
        wanted = min(left, _INTERRUPTS_PER_CHILD)
        argv = [str(scratch / f"store-{number}"), durability, str(wanted), str(seed + number)]
        ended = subprocess.run(
            [sys.executable, __file__, *argv], capture_output=True, text=True, check=False
        )
        trial = f"child {number} ({durability}, seed {seed + number})"
        if ended.returncode or not ended.stdout:
            tally.broke(trial, f"the process ended with {ended.returncode}: {ended.stderr[-4000:]}")
        else:
            answer = json.loads(ended.stdout)
            tally.count(f"{durability}: acknowledged writes", answer["acknowledged"])
            for error in answer["errors"]:
                tally.broke(trial, error)
        tally.tried(wanted)
        left, number = left - wanted, number + 1
    return tally.report()


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
