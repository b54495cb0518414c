"""Every operation on scoped state is one transaction: whichever change fails, nothing happened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from casstore.records.scoped import Quota, ScopedState, StatePolicy
from casstore.records.scoped.expiry import sweep
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import assert_one_transaction
from tests.records.scoped.contexts import ALL, HERE, TALK

BOB = HERE._replace(actor_id="bob", subject_type="user", subject_id="ann")
LONG = ["x" * 3000]
CLOCK = Clock()
TIGHT = StatePolicy(quotas={"actor": Quota(max_keys=3)})


def filled(store: Store) -> ScopedState:
    """Some of everything: long and short values, several writers, a reset, a run."""
    states = ScopedState(store)
    for scope in ("conversation", "actor", "subject", "runner"):
        states.scope(HERE, scope, ALL).put("k", LONG)
        states.scope(BOB, scope, ALL).put("b", 1)
    states.reset(**TALK)
    states.scope(HERE, "conversation").put("k", 2)
    states.scope(BOB, "conversation").put("k", 3)
    states.begin_run("r", HERE, ALL, caller="me")
    return states


def full(store: Store) -> ScopedState:
    """A scope at its quota, of which a part has expired."""
    states = ScopedState(store)
    for key in ("a", "b"):
        states.scope(HERE, "actor", TIGHT).put(key, 1, ttl_ms=5)
    states.scope(HERE, "actor", TIGHT).put("c", 1)
    CLOCK.move(5)
    return states


def full_store(store: Store) -> Store:
    """A store with the scope of ``full``."""
    full(store)
    return store


# What each operation needs, and the operation.
OPERATIONS: dict[str, tuple[Callable[[Store], Any], Callable[[Any], Any]]] = {
    "first put": (ScopedState, lambda s: s.scope(HERE, "conversation").put("k", LONG)),
    "put": (filled, lambda s: s.scope(HERE, "conversation").put("k", LONG)),
    "put of a subject": (filled, lambda s: s.scope(BOB, "subject", ALL).put("new", 1)),
    "put by another": (filled, lambda s: s.scope(BOB, "runner", ALL).put("k", LONG)),
    "put that makes room": (full, lambda s: s.scope(HERE, "actor", TIGHT).put("d", 1)),
    "update": (filled, lambda s: s.update(HERE, ALL, "actor", "k", {"a": 1})),
    "swap": (filled, lambda s: s.scope(HERE, "actor").swap("new", 1, expected=None)),
    "delete": (filled, lambda s: s.scope(HERE, "conversation").delete("k")),
    "delete of the last": (filled, lambda s: s.scope(BOB, "actor").delete("b")),
    "delete of a subject": (filled, lambda s: s.scope(BOB, "subject", ALL).delete("b")),
    "begin a run": (filled, lambda s: s.begin_run("r2", HERE, ALL, caller="me")),
    "renew a run": (filled, lambda s: s.renew_run("r", ttl_ms=5)),
    "end a run": (filled, lambda s: s.end_run("r")),
    "put of a run": (filled, lambda s: s.run("r", caller="me").put("actor", "k", 2)),
    "delete of a run": (filled, lambda s: s.run("r", caller="me").delete("actor", "k")),
    "reset": (filled, lambda s: s.reset(**TALK, note=LONG)),
    "drop history": (
        filled,
        lambda s: s.drop_history(**TALK),
    ),
    "erase an actor": (filled, lambda s: s.erase_actor("ann")),
    "sweep": (full_store, lambda store: sweep(store, lambda seen: None)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_transaction(name: str, tmp_path: Path) -> None:
    prepare, operate = OPERATIONS[name]
    assert_one_transaction(tmp_path / "s", prepare, lambda _, states: operate(states), clock=CLOCK)


def test_an_operation_reads_once_and_writes_once(store: Store) -> None:
    states = filled(store)
    engine: Any = store.engine
    asked: list[str] = []
    for name in ("get_rows", "scan_rows", "get_many", "write"):

        def counted(whole: Any, name: str, *given: Any, **named: Any) -> Any:
            asked.append(name)
            return whole(*given, **named)

        setattr(engine, name, partial(counted, getattr(engine, name), name))
    scope = states.scope(HERE, "actor")
    nobody = HERE._replace(actor_id="new")
    actors = StatePolicy(scopes=("actor",))
    costs: list[tuple[Callable[[], Any], list[str]]] = [
        (lambda: scope.put("k", 1), ["get_rows", "write"]),
        (lambda: scope.find("k"), ["get_rows"]),
        (lambda: scope.find("nothing"), ["get_rows"]),
        (lambda: scope.put("k", LONG), ["get_rows", "write"]),
        (lambda: scope.delete("k"), ["get_rows", "write"]),
        (lambda: scope.delete("k"), ["get_rows"]),
        (lambda: states.update(HERE, ALL, "runner", "k", 1), ["get_rows", "write"]),
        (
            lambda: states.snapshot(nobody, actors),
            ["get_rows"],
        ),
        (lambda: states.reset(**TALK), ["get_rows", "write"]),
    ]
    for call, cost in costs:
        asked.clear()
        call()
        assert asked == cost
