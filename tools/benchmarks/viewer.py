"""The viewer's first page of a long session, compared with that of a short one.

The server is a process of its own, as a user starts it. Only the page is asked for: the browser
adds the style and the script, which are counted in the size.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import viewer_store
from benchmarks.measuring import Goal, at_most, seconds, side_by_side

_TURNS = 10_000
_SHORT_TURNS = 100
_MAX_KB = 300
_MAX_ROWS = 300
_MAX_MEMORY_MIB = 200
_PAGE = "/session?id=long"


@contextmanager
def _served(place: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A client that has been let in, and the process that serves it."""
    command = [sys.executable, "-m", "casstore", "ui", str(place), "--no-browser", "--json"]
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    answer = ""
    while not answer.rstrip().endswith("}"):
        answer += server.stdout.readline()
    address = json.loads(answer)["address"]
    try:
        with httpx.Client(base_url=address.partition("/?")[0], timeout=60) as client:
            client.get(address)
            yield client, server.pid
    finally:
        server.terminate()
        server.communicate(timeout=30)


def viewer(quick: bool) -> Iterable[Goal]:
    """Measure size, rows and time of the first view, and the memory of the server."""
    with tempfile.TemporaryDirectory() as directory:
        long, short = Path(directory, "long"), Path(directory, "short")
        viewer_store.build_long(long, _TURNS)
        viewer_store.build_long(short, _SHORT_TURNS)

        def first(place: Path) -> Callable[[], float]:
            def measure() -> float:
                with _served(place) as (client, _):
                    return seconds(lambda: client.get(_PAGE).raise_for_status())

            return measure

        pair = side_by_side(first(long), first(short), 3 if quick else 7)
        with _served(long) as (client, process):
            again_s = min([seconds(lambda: client.get(_PAGE)) for _ in range(5)])
            page = client.get(_PAGE)
            assets = [client.get(f"/static/{name}") for name in ("style.css", "viewer.js")]
            for path in ("/", "/charts", "/space"):
                client.get(path).raise_for_status()
            sent = sum([len(one.content) for one in (page, *assets)])
            status = Path(f"/proc/{process}/status").read_text()
        [highest_kib] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    turns = f"{_TURNS:,} turns"
    yield at_most(f"viewer: first view of {turns}, sent", sent / 1000, _MAX_KB, "KB")
    rows = page.text.count('<li class="row')
    yield at_most(f"viewer: first view of {turns}, rows", rows, _MAX_ROWS, "rows")
    yield at_most(
        f"viewer: first view of {turns} against {_SHORT_TURNS}", pair.ratio, 1.5,
        detail=f"{1000 * pair.ours_s:.0f} ms, again {1000 * again_s:.0f} ms; {pair.spread}",
    )  # fmt: skip
    yield at_most("viewer: memory of the server", int(highest_kib) / 1024, _MAX_MEMORY_MIB, "MiB")


ALL: dict[str, Callable[[bool], Iterable[Goal]]] = {"viewer": viewer}
