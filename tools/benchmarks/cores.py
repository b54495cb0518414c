"""Pins a server to one core and its clients to the others, and measures their CPU use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in descendants(int(child)))]


def processor_s(pids: Iterable[int]) -> float:
    """The CPU time of these processes so far, all threads together."""
    taken_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            taken_ns += int((thread / "schedstat").read_text().split()[0])
    return taken_ns / 1e9


@contextmanager
def apart(server: int) -> Iterator[str]:
    """Pin a server to one core, and this process with its children to the others; reports how.

    Where there is only one core, or a system does not let us choose, all share what there is.
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        yield "all share the same cores"
        return
    ours = os.sched_getaffinity(0)
    first, *others = sorted(ours)
    pids = descendants(server)
    for pid in pids:
        os.sched_setaffinity(pid, {first})
    os.sched_setaffinity(0, set(others))
    try:
        yield f"the server on one core, the clients on {len(others)}"
    finally:
        os.sched_setaffinity(0, ours)
        for pid in descendants(server):
            os.sched_setaffinity(pid, ours)
