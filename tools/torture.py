#!/usr/bin/env python3
"""Runs fault campaigns against casstore and reports broken guarantees."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

# Run as a program, with any Python that has casstore's dependencies.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from campaigns.tally import Progress, Report

_EPILOG = """\
campaigns, and what --count counts:
{campaigns}

examples:
  tools/torture.py kill --count 200            200 kills, about a minute
  tools/torture.py sessions --count 200        200 kills of agent runtimes, minutes
  tools/torture.py bitflip --count 1000000     every byte of the file, hours
  tools/torture.py all --seed 7 --json         everything at its usual size

Exit codes: 0 every promise was kept, 1 one was broken, 2 usage, 130 interrupted.
The same seed makes the same damage, so a finding can be repeated.
"""


class Campaign(Protocol):
    """The signature of every campaign's ``run``."""

    def __call__(self, scratch: Path, *, count: int, seed: int, progress: Progress) -> Report: ...


class _Entry(NamedTuple):
    module: str
    usual_count: int
    counts: str


CAMPAIGNS = {
    "bitflip": _Entry("bitflip", 2000, "flipped bits, each opened plainly and verified"),
    "truncate": _Entry("truncate", 1000, "lengths per engine"),
    "kill": _Entry("kill", 200, "kills"),
    "sessions": _Entry("session_kill", 200, "kills of agent runtimes that share sessions"),
    "index": _Entry("index_kill", 500, "kills in commits that reorganise node indexes"),
    "branching": _Entry("branching", 20, "stores taken through random forks and adoptions"),
    "care": _Entry("care", 200, "kills of agents and of concurrent maintenance processes"),
    "interrupts": _Entry(
        "interrupts", 5000, "interrupts of a main thread while other threads write"
    ),
    "replay": _Entry("crash_workload", 1000, "crash images per durability (needs strace)"),
    "compact": _Entry(
        "compact_workload", 500, "crash images per engine, and a kill at every call (strace)"
    ),
    "diskfull": _Entry("diskfull", 6, "failures for each way of running out of space"),
    "salvage": _Entry("salvage", 40, "stores with one page in a hundred overwritten"),
    "failover": _Entry("failover", 20, "primaries of a replicated PostgreSQL killed under agents"),
    "workspace": _Entry("workspace_kill", 500, "kills of agents that commit and restore files"),
    "frames": _Entry("frames", 1000, "bytes at which a valid slab is truncated, and all cases"),
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = "\n".join(
        f"  {name:<10} {entry.counts} (usually {entry.usual_count})"
        for name, entry in CAMPAIGNS.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EPILOG.format(campaigns=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("campaign", choices=(*CAMPAIGNS, "all"))
    parser.add_argument(
        "--count", type=_positive, help="how much to do (default: the usual number)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="the seed of the random damage (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--scratch",
        type=Path,
        help="the directory to work in (default: a new one, in memory if possible)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the scratch directory behind")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


class _Meter:
    """Progress lines on stderr, at most one a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next_s = time.monotonic() + 1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._next_s or done == total:
            self._next_s = now + 1
            print(f"{self._name}: {done} of {total}", file=sys.stderr, flush=True)


def _run(name: str, given: argparse.Namespace, scratch: Path) -> Report:
    entry = CAMPAIGNS[name]
    run: Campaign = importlib.import_module(f"campaigns.{entry.module}").run
    place = scratch / name
    place.mkdir(parents=True)
    count = given.count or entry.usual_count
    return run(place, count=count, seed=given.seed, progress=_Meter(name))


def _table(reports: Sequence[Report]) -> str:
    lines: list[str] = []
    for report in reports:
        verdict = "kept" if report.kept() else f"{report.broken_count} BROKEN"
        lines.append(f"{report.campaign}: {report.trials} trials, promises {verdict}")
        lines += [f"  {number:>9}  {label}" for label, number in sorted(report.counts.items())]
        lines += [f"  note: {note}" for note in report.notes]
        lines += [f"  broken: {finding.trial}: {finding.what}" for finding in report.findings]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaigns; returns the exit code."""
    given = _parse(argv)
    memory = Path("/dev/shm")
    scratch = given.scratch or Path(
        tempfile.mkdtemp(prefix="casstore-torture-", dir=memory if memory.is_dir() else None)
    )
    names = list(CAMPAIGNS) if given.campaign == "all" else [given.campaign]
    reports: list[Report] = []
    interrupted = False
    try:
        for name in names:
            reports.append(_run(name, given, scratch))
    except KeyboardInterrupt:
        # Print the finished reports.
        interrupted = True
        print(f"interrupted during {names[len(reports)]}", file=sys.stderr)
    finally:
        if given.keep:
            print(f"the scratch directory is {scratch}", file=sys.stderr)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    if given.json:
        document = {
            "schema": "casstore.torture/1",
            "seed": given.seed,
            "interrupted": interrupted,
            "reports": [report.as_json() for report in reports],
        }
        print(json.dumps(document, indent=2))
    elif reports:
        print(_table(reports))
    if interrupted:
        return 130
    return 0 if all(report.kept() for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
