"""Interrupted compaction: by SIGKILL before each relevant system call, and by power loss.

    compact_workload.py compact DIR     compacts, and acknowledges the end
    compact_workload.py verify

In every case the store opens, has every commit, verifies, accepts writes, and nothing is left of
the attempt. ``kill`` makes strace deliver the signal at the entry of the n-th call of a kind;
``power`` draws crash images from the recorded calls.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns import crash_workload, replay
from campaigns.crash_images import Image
from campaigns.disk_model import Disk
from campaigns.replay import Violation, serve
from campaigns.tally import Progress, Report, Tally, silent
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.page_scan import read_extent
from casstore.engine.protocol import FULL, Write
from casstore.maintenance.compact import compact

COMMITS = 12
# Calls that change the state after a crash. Opening the old store makes only flock and fallocate of
# these, so the attempt begins with mkdir.
_CALLS = (
    "mkdir,rename,?renameat,?renameat2,fsync,fdatasync,pwrite64,writev,pwritev,ftruncate,"
    "fallocate,unlink,unlinkat,rmdir,fchmod,fchown"
)
_VOLATILE = ("lock.mdb", "data.mdb.new-lock")
_PROGRAM = [sys.executable, "-B", str(Path(__file__).resolve())]


def fill(place: Path, version: int) -> None:
    """Commits to be kept, and as many objects that were deleted since."""
    with redirect_stdout(None):
        crash_workload.write(str(place), FULL, COMMITS, version)
    with casstore.open(place) as store:
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        gone = []
        for number in range(40):
            gone.append(store.put_blob(b"%d" % number * 500))
            # In a separate LMDB transaction, whose number identifies the old file.
            engine.apply_log()
        engine.write(Write(deletes=gone))


def check(place: Path, acks: Sequence[str]) -> str:
    """Check the store after an interrupted compaction."""
    # A copy is written in a few transactions.
    new = max(read_extent(str(place / "data.mdb")).transactions) < COMMITS
    answer = crash_workload.check(place, [str(COMMITS)])
    if (place / "compact").exists():
        raise Violation("the next open left something of the attempt behind")
    if acks and not new:
        raise Violation("it was done, and the old file came back")
    return f"{answer}, {'new' if new else 'old'}"


def calls(log: str) -> Iterator[tuple[str, int]]:
    """Each call of a recorded run from the attempt's beginning: (name, index among its kind)."""
    counts: Counter[str] = Counter()
    begun = False
    for line in log.splitlines():
        found = re.match(r"\d+ +(\w+)\(", line)
        if found is None:
            continue
        counts[found[1]] += 1
        begun = begun or bool(re.search(r'mkdir\(".*/compact"', line))
        if begun and "EEXIST" not in line:
            yield found[1], counts[found[1]]


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    engines: Sequence[int] = (0, 1),
    every: int = 1,
    progress: Progress = silent,
) -> Report:
    """Kill at every call (or every n-th), then check ``count`` crash images per engine."""
    tally = Tally("compact", total=count * len(engines), progress=progress)
    kill(tally, scratch, engines=engines, every=every)
    power(tally, scratch, count=count, seed=seed, engines=engines)
    return tally.report()


def kill(tally: Tally, scratch: Path, *, engines: Sequence[int], every: int) -> None:
    """Kill at every n-th call, each time with a fresh copy of one store."""
    for engine in engines:
        origin, place = scratch / f"origin-{engine}", scratch / f"killed-{engine}"
        fill(origin, engine)
        log = scratch / "strace.log"
        shutil.copytree(origin, place)
        command = ["strace", "-f", "-o", str(log), "-e", f"trace={_CALLS}", "-e", "signal=none"]
        argv = [*_PROGRAM, "compact", str(place)]
        subprocess.run([*command, *argv], check=True, stdout=subprocess.DEVNULL)
        moments = list(calls(log.read_text()))
        renames = [at for at, (name, _) in enumerate(moments) if name.startswith("rename")]
        chosen = {*range(0, len(moments), every), renames[-1], renames[-1] + 1}
        for at in sorted(chosen & set(range(len(moments)))):
            name, number = moments[at]
            shutil.rmtree(place)
            shutil.copytree(origin, place)
            inject = ["-e", f"inject={name}:signal=KILL:when={number}"]
            ended = subprocess.run(
                [*command, *inject, *argv], check=False, capture_output=True, text=True
            )
            trial = f"engine {engine}, killed at {name} {number} ({at} of {len(moments)})"
            if ended.stdout:
                tally.broke(trial, "it was not killed, and ended")
            try:
                tally.count(f"killed: {check(place, ())}")
            except Violation as exc:
                tally.broke(trial, str(exc))
            tally.tried()


def power(tally: Tally, scratch: Path, *, count: int, seed: int, engines: Sequence[int]) -> None:
    """Check ``count`` crash images of one compaction on each engine."""
    for engine in engines:
        place = scratch.resolve() / f"power-{engine}"
        place.mkdir()
        recorded = place / "recorded"
        fill(recorded, engine)
        trace = replay.record(
            [*_PROGRAM, "compact", str(recorded)], recorded, place / "strace.log",
            volatile=_VOLATILE,
        )  # fmt: skip
        report = replay.replay(
            trace, [*_PROGRAM, "verify"], place, seed=seed, count=count, strict_entries=True
        )
        # Random images rarely hit the most important moment: the end was acknowledged, and the
        # system goes down before it writes another byte.
        disk = Disk(trace.initial, strict_entries=True)
        for change, event in enumerate(trace.events):
            disk.apply(change, event)
        last = Image(disk.contents(lambda change, place: False), tuple(disk.acknowledged), "")
        last.materialise(place / "last")
        try:
            tally.count(f"acknowledged: {check(place / 'last', last.acknowledged)}")
        except Violation as exc:
            tally.broke(f"engine {engine}, acknowledged", str(exc))
        tally.tried(report.images + 1)
        for note, number in report.notes.items():
            tally.count(f"power loss: {note}", number)
        for failure in report.first_failures:
            tally.broke(f"engine {engine}, {failure.image}", failure.reason)


def _main(argv: Sequence[str]) -> None:
    if argv[0] == "compact":
        compact(argv[1])
        print("ack", flush=True)
    else:
        serve(check)


if __name__ == "__main__":
    _main(sys.argv[1:])
