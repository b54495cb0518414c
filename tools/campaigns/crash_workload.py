"""Power loss: a store that is written and checked for ``replay`` to crash in between.

    crash_workload.py write DIR --durability full --commits 20    prints an ack per commit
    crash_workload.py verify --durability full [--boot same|other]

What each durability promises after a power loss:

    full      nothing acknowledged is lost
    relaxed   the last commits may be lost; what is there is whole, and in order. Under another
              boot id the store returns to the last state that was kept
    process   the disk may hold anything. The marker that the store leaves says so: under
              another boot id the store proves itself whole or refuses with a typed error

``relaxed`` and ``process`` under the *same* boot id are the negative controls: there the marker is
believed to be this boot's, nothing is undone or checked, and the campaign must find violations, or
it would find none anywhere.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a program its own folder is the import path; casstore and campaigns lie above.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns import replay, specimen
from campaigns.replay import Violation, serve
from campaigns.tally import Progress, Report, Tally, silent
from casstore.engine.lmdb import directory as store_directory
from casstore.engine.lmdb import keeping
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CasstoreError, CorruptionError

FULL, RELAXED, PROCESS = "full", "relaxed", "process"
SAME_BOOT, OTHER_BOOT = "same", "other"

# LMDB maps its lock files, so their writes leave no trace; no crash depends on them.
_VOLATILE = ("lock.mdb", "data.mdb.new-lock")
_PROGRAM = [sys.executable, str(Path(__file__).resolve())]
# Images are checked in batches, between which there is progress to tell and time to stop.
_BATCH_IMAGES = 100
_LATEST = RowKey("heads", b"latest")


def item(number: int) -> Any:
    """What commit ``number`` stores: by turns a small value, a blob, a long blob, a tree."""
    rng = random.Random(number)
    return [
        {"commit": number, "text": "some text " * rng.randrange(50)},
        rng.randbytes(rng.randrange(1, 3000)),
        rng.randbytes(70_000),
        [f"entry {entry} of {number}" for entry in range(200)],
    ][number % 4]


def row(number: int) -> RowKey:
    """The row that commit ``number`` writes."""
    return RowKey("history", b"%08d" % number)


def write(path: str, durability: str, commits: int, engine: int) -> None:
    """Commit numbered items, each with its row and the row of the latest; ack each."""
    with casstore.open(path, durability, lmdb_version=engine) as store:
        for number in range(1, commits + 1):
            digest = store.put_many([item(number)])[0]
            store.engine.write(
                Write(rows=[PutRow(*row(number), digest), PutRow(*_LATEST, b"%d" % number)])
            )
            print(f"ack {number}", flush=True)


def check(directory: Path, acks: Sequence[str], durability: str) -> str:
    """Judge one crash image: what is promised is there, what is there is whole, it goes on."""
    try:
        with casstore.open(directory, durability) as store:
            return _check_open(store, acks, durability)
    except CorruptionError as exc:
        if durability == PROCESS:
            return "refused"
        raise Violation(f"{type(exc).__name__}: {exc}") from exc
    except CasstoreError as exc:
        raise Violation(f"{type(exc).__name__}: {exc}") from exc


def _check_open(store: casstore.Store, acks: Sequence[str], durability: str) -> str:
    latest = int(store.engine.get_rows([_LATEST])[0] or b"0")
    rows = store.engine.scan_rows("history", limit=100_000)
    if [found.key for found in rows] != [row(number).key for number in range(1, latest + 1)]:
        raise Violation(f"{len(rows)} rows of history where the latest commit is {latest}")
    for number, found in enumerate(rows, 1):
        try:
            stored = store.get_many([found.value])[0]
        except CasstoreError as exc:
            raise Violation(f"commit {number} cannot be read: {exc}") from exc
        if stored != item(number):
            raise Violation(f"commit {number} holds something else")
    if durability == FULL and latest < len(acks):
        raise Violation(f"{len(acks)} commits were acknowledged, {latest} are there")
    specimen.verify(store)
    for number in range(latest + 1, latest + 4):
        digest = store.put_many([item(number)])[0]
        store.engine.write(Write(rows=[PutRow(*row(number), digest)]))
        if store.get_many([digest])[0] != item(number):
            raise Violation("a new commit does not read back")
    return "sound, commits lost" if latest < len(acks) else "sound"


# --- the campaign ---------------------------------------------------------------------------


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    commits: int = 16,
    engines: Sequence[int] = (0, 1),
    progress: Progress = silent,
) -> Report:
    """Check ``count`` crash images of each durability, divided among the engines."""
    plans = [
        (FULL, SAME_BOOT), (RELAXED, OTHER_BOOT), (RELAXED, SAME_BOOT),
        (PROCESS, OTHER_BOOT), (PROCESS, SAME_BOOT),
    ]  # fmt: skip
    share = -(-count // len(engines))
    tally = Tally("replay", total=share * len(plans) * len(engines), progress=progress)
    controls = {RELAXED: 0, PROCESS: 0}
    for engine in engines:
        for durability, boot in plans:
            place = scratch / f"{durability}-{boot}-{engine}"
            label = f"engine {engine} {durability}, {boot} boot"
            trace = _record(place, durability, engine, commits)
            for start in range(0, share, _BATCH_IMAGES):
                report = replay.replay(
                    trace,
                    [*_PROGRAM, "verify", "--durability", durability, "--boot", boot],
                    place,
                    seed=seed + start,
                    count=min(_BATCH_IMAGES, share - start),
                    strict_entries=True,
                )
                control = durability in controls and boot == SAME_BOOT
                _add(tally, label, report, control=control)
                if control:
                    controls[durability] += report.failures
    for durability, violations in controls.items():
        if not violations:
            tally.broke(
                f"negative control at {durability}",
                "no violation without a flush: this campaign sees nothing",
            )
    return tally.report()


def _record(place: Path, durability: str, engine: int, commits: int) -> replay.Trace:
    recorded = place.resolve() / "recorded"
    recorded.mkdir(parents=True)
    return replay.record(
        [*_PROGRAM, "write", str(recorded), "--durability", durability,
         "--commits", str(commits), "--engine", str(engine)],
        recorded,
        place / "strace.log",
        volatile=_VOLATILE,
    )  # fmt: skip


def _add(tally: Tally, label: str, report: replay.Report, *, control: bool) -> None:
    tally.tried(report.images)
    tally.count(f"{label}: images", report.images)
    for note, number in report.notes.items():
        tally.count(f"{label}: {note}", number)
    if control:
        tally.count(f"{label}: violations (the negative control)", report.failures)
        return
    tally.count(f"{label}: violations", report.failures)
    for failure in report.first_failures:
        tally.broke(f"{label}, {failure.image}", failure.reason)
    if not report.images or not report.acknowledged:
        tally.broke(label, "nothing was checked")


def _main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("directory")
    writer.add_argument("--commits", type=int, default=16)
    writer.add_argument("--engine", type=int, default=0)
    verifier = commands.add_parser("verify")
    verifier.add_argument("--boot", choices=(SAME_BOOT, OTHER_BOOT), default=SAME_BOOT)
    for command in (writer, verifier):
        command.add_argument("--durability", choices=(FULL, RELAXED, PROCESS), default=FULL)
    given = parser.parse_args(argv)
    # An image is a copy, and must be taken for the file that was there when the power went.
    keeping.inode_of = lambda handle: 1
    if given.command == "write":
        write(given.directory, given.durability, given.commits, given.engine)
        return
    if given.boot == OTHER_BOOT:
        store_directory.boot_id = lambda: "another boot"
    serve(lambda place, acks: check(place, acks, given.durability))


if __name__ == "__main__":
    _main(sys.argv[1:])
