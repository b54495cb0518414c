"""A chain of forks costs no more round trips than one fork: each call of the engine is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("psycopg")

from casstore.engine.postgres.engine import PostgresEngine
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

DEPTH = 60
NODES = 400


def chain(store: Store, name: str, depth: int) -> str:
    """A session of NODES nodes at the end of a chain of forks."""
    first = [NodeDraft(f"n{at}", at) for at in range(NODES - depth)]
    session = f"{name} 0"
    store.session(session).commit(Commit(append=first))
    for at in range(1, depth + 1):
        store.fork(session, f"{name} {at}", append=[NodeDraft(f"n{NODES - depth + at - 1}", at)])
        session = f"{name} {at}"
    return session


CALLS: dict[str, Callable[[Store, str], object]] = {
    "commit": lambda store, end: store.session(end).commit(Commit(append=[NodeDraft("more", 1)])),
    "node": lambda store, end: store.session(end).node("n7"),
    "path": lambda store, end: list(store.session(end).nodes()),
    "full": lambda store, end: list(store.session(end).nodes("full")),
    "fork": lambda store, end: store.fork(end, f"{end} forked"),
    "fork with nodes": lambda store, end: store.fork(
        end, f"{end} grown", append=[NodeDraft("own", 1)]
    ),
    "rewind": lambda store, end: store.session(end).rewind(store.session(end).entry().revision),
    "compare": lambda store, end: store.compare(end, f"{end} forked"),
    "adopt": lambda store, end: store.session(end).adopt(f"{end} grown"),
}


def test_a_chain_of_forks_costs_no_more_round_trips_than_one(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(engine)
    ends = [chain(store, "deep", DEPTH), chain(store, "flat", 1)]
    trips = 0

    def counted(name: str) -> Callable[..., Any]:
        whole = getattr(PostgresEngine, name)

        def call(self: PostgresEngine, *arguments: Any, **named: Any) -> Any:
            nonlocal trips
            trips += 1
            return whole(self, *arguments, **named)

        return call

    for name in ("get_rows", "get_many", "scan_rows", "write", "missing"):
        monkeypatch.setattr(PostgresEngine, name, counted(name))
    spent: dict[str, list[int]] = {}
    for what, call in CALLS.items():
        for end in ends:
            # By a process that has seen nothing of it yet.
            trips = 0
            call(Store(engine), end)
            spent.setdefault(what, []).append(trips)
    assert {what: deep for what, (deep, _) in spent.items()} == {
        what: flat for what, (_, flat) in spent.items()
    }
    assert max(spent["path"]) <= 10
    assert max(spent["node"]) <= 7
    # One that has seen it reads nothing before it commits.
    store.session(ends[0]).commit(Commit(append=[NodeDraft("a", 1)]))
    trips = 0
    store.session(ends[0]).commit(Commit(append=[NodeDraft("b", 1)]))
    assert trips == 1
