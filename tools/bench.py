#!/usr/bin/env python3
"""Measure casstore against its claims and print each with its target.

    tools/bench.py                 everything, several minutes
    tools/bench.py --quick         smaller sizes, under two minutes
    tools/bench.py --only streams  one part
    tools/bench.py --json FILE     the figures as JSON too

    tools/bench.py --corpus DIR    real sessions for the parts `growth` and `space`

A corpus is a JSONL file, one entry of a session a line, or a directory of such files;
CASSTORE_CORPUS names one as well. Without one, sessions are made up.

Every claim is a ratio measured within one run on the same data, or a size. Exit 1 if
one is not met. Run it from an environment with casstore installed (``tools/check``
makes one in ``.venv``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from benchmarks import collecting, langgraph, sessions, space, store
from benchmarks.measuring import Goal

PARTS = store.ALL | sessions.ALL | collecting.ALL | space.ALL | langgraph.ALL


def render(number: float, unit: str) -> str:
    """A figure with its unit."""
    if unit in ("bytes", "pieces"):
        return f"{number:,.0f} {unit}"
    return f"{number:.2f}{'' if unit == '×' else ' '}{unit}"


def line(goal: Goal) -> str:
    """One claim as a row of a Markdown table."""
    relation = {"<=": "≤", ">=": "≥"}[goal.relation]
    return (
        f"| {goal.name} | {relation} {render(goal.target, goal.unit)} | "
        f"{render(goal.measured, goal.unit)} | {'yes' if goal.met else '**no**'} | {goal.detail} |"
    )


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repeats")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="this part only")
    parser.add_argument("--corpus", metavar="DIR", help="real sessions, as JSONL")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    if options.corpus:
        if not Path(options.corpus).exists():
            parser.error(f"there is no {options.corpus}")
        os.environ["CASSTORE_CORPUS"] = options.corpus
    goals: list[Goal] = []
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores\n", flush=True)
    print("| claim | target | measured | met | |\n|---|---|---|---|---|", flush=True)
    for name, measure in PARTS.items():
        if options.only and name not in options.only:
            continue
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        for goal in measure(options.quick):
            goals.append(goal)
            print(line(goal), flush=True)
    if options.json:
        document = {
            "schema": "casstore.bench/1",
            "quick": options.quick,
            "goals": [{**goal._asdict(), "met": goal.met} for goal in goals],
        }
        options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
