"""The ``replay`` campaign: a writer, and a checker of the states after a power loss.

    crash_workload.py write DIR --durability full --commits 20    prints its promises
    crash_workload.py verify

Each line that the writer prints promises that all commits up to a number survive:

    full      after every commit
    mixed     after every third commit, which waits for the disk; the others do not
    relaxed   after every fifth commit, when the store was flushed

With any durability, the state after a power loss is a prefix of the commits that includes all
promised ones. The log is kept short, so that it is applied and reused.

Negative controls remove one rule each. The campaign must find violations then; otherwise it could
not find any:

    flush      the log is not flushed
    sync       the tables are not flushed before the log's space is reused
    checksum   recovery accepts every record of the log
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import lmdb

import casstore
from campaigns import replay, specimen
from campaigns.replay import Violation, serve
from campaigns.tally import Progress, Report, Tally, silent
from casstore.engine.lmdb import environment, log, memtable
from casstore.engine.protocol import FULL, RELAXED, PutRow, RowKey, Write
from casstore.errors import CasstoreError

MIXED = "mixed"
DURABILITIES = (FULL, MIXED, RELAXED)
NO_FLUSH, NO_SYNC, NO_CHECKSUM = CONTROLS = ("flush", "sync", "checksum")

# LMDB maps its lock files, so writes to them are not recorded; no crash depends on them.
_VOLATILE = ("lock.mdb", "data.mdb.new-lock", "reserve")
_PROGRAM = [sys.executable, str(Path(__file__).resolve())]
# Images are checked in batches; between them progress is reported, and an interrupt is noticed.
_BATCH_IMAGES = 100
_LATEST = RowKey("heads", b"latest")
# A log that is applied after a few commits, and reused after some more.
_LOG_BYTES = 64 << 10
_APPLY_BYTES = 16 << 10


def item(number: int) -> Any:
    """The content of commit ``number``: in turn a small value, a blob, a long blob, a tree."""
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
    """Commit numbered items, each with its row and the row of the latest; promise some."""
    opened = RELAXED if durability == MIXED else durability
    with casstore.open(path, opened, lmdb_version=engine) as store:
        for number in range(1, commits + 1):
            digest = store.put_many([item(number)])[0]
            rows = [PutRow(*row(number), digest), PutRow(*_LATEST, b"%d" % number)]
            waits = durability == FULL or (durability == MIXED and number % 3 == 0)
            store.engine.write(Write(rows=rows, durable=waits))
            if durability == RELAXED and number % 5 == 0:
                store.flush()
                waits = True
            if waits:
                print(number, flush=True)


def check(directory: Path, promises: Sequence[str]) -> str:
    """Check one crash image: all promises hold, the content is valid, and writing works."""
    try:
        with casstore.open(directory) as store:
            return _check_open(store, int(promises[-1]) if promises else 0)
    except CasstoreError as exc:
        raise Violation(f"{type(exc).__name__}: {exc}") from exc


def _check_open(store: casstore.Store, promised: int) -> str:
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
    if latest < promised:
        raise Violation(f"{promised} commits were promised, {latest} are there")
    specimen.verify(store)
    for number in range(latest + 1, latest + 4):
        digest = store.put_many([item(number)])[0]
        store.engine.write(Write(rows=[PutRow(*row(number), digest)]))
        if store.get_many([digest])[0] != item(number):
            raise Violation("a new commit does not read back")
    return "sound"


def _shorten_log() -> None:
    """Make the log so short that a few commits fill it."""
    _patch(log, "FIRST_LOG_BYTES", _LOG_BYTES)
    _patch(environment, "MAX_LOG_BYTES", 4 * _LOG_BYTES)
    _patch(memtable, "APPLY_BYTES", _APPLY_BYTES)


def _patch(module: ModuleType, name: str, value: object) -> None:
    assert hasattr(module, name)
    setattr(module, name, value)


def _break_rule(rule: str) -> None:
    """Remove a rule: a negative control."""
    if rule == NO_FLUSH:
        _patch(log, "flush_file", lambda number: None)
        _patch(log, "_WRITE_AND_FLUSH", 0)
    elif rule == NO_SYNC:
        synced = lmdb.open

        def unsynced(*arguments: Any, **options: Any) -> Any:
            options |= {"sync": False, "metasync": False}
            return synced(*arguments, **options)

        _patch(lmdb, "open", unsynced)
    elif rule == NO_CHECKSUM:
        _patch(log, "_is_proven", lambda header, body: True)


# --- the campaign ---------------------------------------------------------------------------


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    commits: int = 16,
    engines: Sequence[int] = (0, 1),
    controls: Sequence[str] = CONTROLS,
    progress: Progress = silent,
) -> Report:
    """Check ``count`` crash images of each durability, and fewer of each control.

    They are divided among the engines.
    """
    plans = [(durability, "") for durability in DURABILITIES]
    # Records are torn before they are flushed; with ``full`` that time is short.
    plans += [(RELAXED if rule == NO_CHECKSUM else FULL, rule) for rule in controls]
    share = -(-count // len(engines))
    control_share = min(share, max(_BATCH_IMAGES, share // 20))
    total = share * len(DURABILITIES) + control_share * len(controls)
    tally = Tally("replay", total=total * len(engines), progress=progress)
    broken = dict.fromkeys(controls, 0)
    for engine in engines:
        for durability, rule in plans:
            place = scratch / f"{durability}-{rule or 'whole'}-{engine}"
            label = f"engine {engine} {durability}" + (f" without {rule}" if rule else "")
            without = ["--without", rule] if rule else []
            trace = _record(place, durability, engine, commits, without)
            images = control_share if rule else share
            for start in range(0, images, _BATCH_IMAGES):
                report = replay.replay(
                    trace,
                    [*_PROGRAM, "verify", *without],
                    place,
                    seed=seed + start,
                    count=min(_BATCH_IMAGES, images - start),
                    strict_entries=True,
                )
                _add(tally, label, report, control=bool(rule))
                if rule:
                    broken[rule] += report.failures
    for rule, violations in broken.items():
        if not violations:
            tally.broke(
                f"negative control without {rule}", "no violation: this campaign sees nothing"
            )
    return tally.report()


def _record(
    place: Path, durability: str, engine: int, commits: int, without: Sequence[str]
) -> replay.Trace:
    recorded = place.resolve() / "recorded"
    recorded.mkdir(parents=True)
    return replay.record(
        [*_PROGRAM, "write", str(recorded), "--durability", durability,
         "--commits", str(commits), "--engine", str(engine), *without],
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
    writer.add_argument("--durability", choices=DURABILITIES, default=FULL)
    verifier = commands.add_parser("verify")
    for command in (writer, verifier):
        command.add_argument("--without", choices=CONTROLS)
    given = parser.parse_args(argv)
    _shorten_log()
    if given.without is not None:
        _break_rule(given.without)
    if given.command == "write":
        write(given.directory, given.durability, given.commits, given.engine)
    else:
        serve(check)


if __name__ == "__main__":
    _main(sys.argv[1:])
