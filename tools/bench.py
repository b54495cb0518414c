#!/usr/bin/env python3
"""Measures casstore against its claims, prints each with its target, and compares it with peers.

    tools/bench.py                 everything, several minutes
    tools/bench.py --quick         smaller sizes, ends within two minutes
    tools/bench.py --only streams  one part
    tools/bench.py --engine postgres   the engine on PostgreSQL, on a server started for it
    tools/bench.py --json FILE     the figures as JSON too

    tools/bench.py --corpus DIR    real sessions for the parts `growth`, `space` and `peers`

    tools/bench.py --only peers --write-docs   the comparison, written into docs/
    tools/bench.py --render FILE               the same from the JSON of an earlier run

A corpus is a JSONL file, one entry of a session a line, or a directory of such files;
CASSTORE_CORPUS names one as well. Without one, sessions are made up.

Every claim is a ratio measured within one run on the same data, or a size. Exit 1 if
one is not met. The part `peers` makes no claim: it puts other ways to keep sessions beside
casstore. With --quick, parts that would begin after a minute and a half, as happens on a busy
machine, are left out and named. Run it from an environment with casstore installed (``tools/check``
makes one in ``.venv``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from benchmarks import (
    branching,
    collecting,
    durable,
    langgraph,
    memory,
    postgres,
    search,
    session_log,
    sessions,
    space,
    store,
    viewer,
    workspace,
)
from benchmarks.measuring import Goal
from benchmarks.peers import comparison, page, workloads

# By engine; the first is meant if none is named.
ENGINES: dict[str, dict[str, Callable[[bool], Iterable[Goal]]]] = {
    "lmdb": {
        **store.ALL,
        **sessions.ALL,
        **durable.ALL,
        **branching.ALL,
        **session_log.ALL,
        **collecting.ALL,
        **space.ALL,
        **langgraph.ALL,
        **memory.ALL,
        **workspace.ALL,
        **viewer.ALL,
        **search.ALL,
    },
    "postgres": {**postgres.ALL},
}
PARTS = {name: part for parts in ENGINES.values() for name, part in parts.items()}
PEERS = "peers"
DOCUMENTS = Path(__file__).parent.parent / "docs"

_REPEATS = 3
# A quick run starts no part after this time. The longest parts come last, so that a busy machine
# skips those.
_QUICK_S = 90
_LONGEST = (
    "branching",
    "streams",
    "marking",
    "space",
    "langgraph",
    "langgraph-short",
    "memory",
    "beside-gc",
    "commit-tails",
    "commit-processes",
    "commit-threads",
    "durable-threads",
    "workspace",
    "search",
)


def render(number: float, unit: str) -> str:
    """A figure with its unit."""
    if unit in ("bytes", "pieces"):
        return f"{number:,.0f} {unit}"
    if not unit and 0 < number < 0.1:
        return f"1/{1 / number:,.0f}"
    return f"{number:.2f}{'' if unit in ('×', '') else ' '}{unit}"


def line(goal: Goal) -> str:
    """One claim as a row of a Markdown table."""
    relation = {"<=": "≤", ">=": "≥"}[goal.relation]
    return (
        f"| {goal.name} | {relation} {render(goal.target, goal.unit)} | "
        f"{render(goal.measured, goal.unit)} | {'yes' if goal.met else '**no**'} | {goal.detail} |"
    )


def options_given() -> argparse.Namespace:
    """The parsed and validated command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats")
    parser.add_argument(
        "--only", choices=sorted([*PARTS, PEERS]), action="append", help="this part only"
    )
    parser.add_argument(
        "--engine", choices=list(ENGINES), default="lmdb", help="the parts about this engine"
    )
    parser.add_argument("--corpus", metavar="DIR", help="real sessions, as JSONL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument(
        "--write-docs", action="store_true",
        help="write the comparison with peers into docs/reference/benchmarks.md and docs/img/",
    )  # fmt: skip
    parser.add_argument(
        "--render", type=Path, metavar="FILE",
        help="measure nothing; write the comparison in this JSON into docs/",
    )  # fmt: skip
    options = parser.parse_args()
    if options.corpus:
        if not Path(options.corpus).exists():
            parser.error(f"there is no {options.corpus}")
        os.environ["CASSTORE_CORPUS"] = options.corpus
    if options.write_docs and options.quick:
        parser.error("the page is not for the figures of --quick: leave one of the two out")
    if options.write_docs and options.only and PEERS not in options.only:
        parser.error("--write-docs writes the part peers: give --only peers as well")
    if options.render and not options.render.exists():
        parser.error(f"there is no {options.render}")
    if options.json:
        # Now: the figures take minutes, and would be lost.
        try:
            options.json.open("a").close()
        except OSError as exc:
            parser.error(f"cannot write {options.json}: {exc.strerror}")
    return options


def main() -> int:
    """Run what was asked for."""
    options = options_given()
    if options.render:
        return write_again(options.render)
    document: dict[str, Any] = {
        "schema": "casstore.bench/1",
        "quick": options.quick,
        "goals": [],
        "left_out": [],
    }

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    print(f"Python {platform.python_version()}, {os.cpu_count()} cores\n", flush=True)
    wanted = options.only or [*ENGINES[options.engine], *([PEERS] * (options.engine == "lmdb"))]
    began = monotonic()
    met = True
    if any(name in PARTS for name in wanted):
        print("| claim | target | measured | met | |\n|---|---|---|---|---|", flush=True)
    for name in in_order(wanted, options.quick):
        if options.quick and monotonic() - began > _QUICK_S:
            print(f"{name} is left out: there is no time for it", file=sys.stderr, flush=True)
            document["left_out"].append(name)
            continue
        started = monotonic()
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        if name == PEERS:
            for results in beside_peers(options.quick):
                document["peers"] = comparison.to_json(results)
                save()
            print(f"\n{page.markdown(results)}", flush=True)
            if options.write_docs:
                page.write(results, DOCUMENTS)
        else:
            for goal in PARTS[name](options.quick):
                met = met and goal.met
                document["goals"].append({**goal._asdict(), "met": goal.met})
                print(line(goal), flush=True)
        print(f"{name} took {monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        save()
    return 0 if met else 1


def in_order(wanted: Sequence[str], quick: bool) -> list[str]:
    """The parts to run, one after the other."""
    names = [name for name in [*PARTS, PEERS] if name in wanted]
    return sorted(names, key=lambda name: name in _LONGEST and quick)


def beside_peers(quick: bool) -> Iterator[comparison.Results]:
    """The comparison, after each of its repeats."""
    if quick:
        return comparison.compare(workloads.QUICK, 1)
    return comparison.compare(workloads.FULL, _REPEATS)


def write_again(file: Path) -> int:
    """Write the page from the figures of an earlier run."""
    found = json.loads(file.read_text()).get("peers")
    if found is None:
        print(f"{file} has no comparison: run with --only peers --json", file=sys.stderr)
        return 2
    page.write(comparison.from_json(found), DOCUMENTS)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
