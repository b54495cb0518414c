"""Scoped state while other writers interleave with each call."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.errors import RunFrozenError, StateRefusedError
from casstore.maintenance.expiring import expire_rows
from casstore.records.scoped import Context, ScopedState
from casstore.store import Store
from tests.records.interleaving import LONG, OTHER, Operation, assert_unharmed
from tests.records.scoped.contexts import ALL

#: Its ids are so long that rows link to it.
HERE = Context(
    "plugin:me/agent/" + "r" * 600,
    "binding",
    conversation_id="talk" + "c" * 600,
    actor_id="ann",
    subject_id="ticket" + "t" * 600,
)
TALK: dict[str, Any] = {"workspace_id": None, "bot_id": None}


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    """A run, and a long value in each scope. Nobody may change it."""
    engine = MemoryEngine()
    states = ScopedState(Store(engine))
    for scope in ALL.scopes:
        states.scope(HERE, scope, ALL).put("k", LONG)
    states.begin_run("run", HERE, ALL, caller="me")
    return engine


def replace(store: Store) -> None:
    states = ScopedState(store)
    for scope in ALL.scopes:
        states.scope(HERE, scope, ALL).put("k", OTHER)
    states.renew_run("run")


def begin_again(store: Store) -> None:
    states = ScopedState(store)
    for scope in ALL.scopes:
        states.scope(HERE, scope, ALL).delete("k")
    states.end_run("run")
    states.begin_run("run", HERE._replace(thread_id="x" * 600), ALL, caller="me")


def leave(store: Store) -> None:
    ScopedState(store).erase_actor("ann")


OPERATIONS: dict[str, Operation] = {
    "find": lambda store: ScopedState(store).scope(HERE, "actor").find("k"),
    "origin": lambda store: ScopedState(store).scope(HERE, "actor").origin("k"),
    "snapshot": lambda store: ScopedState(store).snapshot(HERE, ALL),
    "put": lambda store: ScopedState(store).scope(HERE, "actor").put("k", 1),
    "delete": lambda store: ScopedState(store).scope(HERE, "actor").delete("k"),
    "find a run": lambda store: ScopedState(store).find_run("run"),
    "renew a run": lambda store: ScopedState(store).renew_run("run"),
    "end a run": lambda store: ScopedState(store).end_run("run"),
    "expire": expire_rows,
    "leave": leave,
    "reset": lambda store: ScopedState(store).reset(
        **TALK, conversation_id=str(HERE.conversation_id), note=LONG
    ),
}
# These may be refused: the run has ended.
OF_A_RUN: dict[str, Operation] = {
    "begin a run": lambda store: ScopedState(store).begin_run("run", HERE, ALL, caller="me"),
    "a run puts": lambda store: ScopedState(store).run("run", caller="me").put("actor", "k", 1),
    "a run looks": lambda store: ScopedState(store).run("run", caller="me").snapshot(),
}


@pytest.mark.parametrize("operation", [*OPERATIONS, *OF_A_RUN])
def test_a_call_during_replacement_and_gc_sees_the_current_value(
    filled: MemoryEngine, operation: str
) -> None:
    assert_unharmed(filled, {**OPERATIONS, **OF_A_RUN}[operation], replace, allowed=())


@pytest.mark.parametrize("meanwhile", [begin_again, leave])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_during_removal_and_gc_reports_a_missing_value_and_not_damage(
    filled: MemoryEngine, operation: str, meanwhile: Operation
) -> None:
    assert_unharmed(filled, OPERATIONS[operation], meanwhile, allowed=())


@pytest.mark.parametrize("meanwhile", [begin_again, leave])
@pytest.mark.parametrize("operation", OF_A_RUN)
def test_a_call_of_a_run_that_ends_meanwhile_is_refused_and_reports_no_damage(
    filled: MemoryEngine, operation: str, meanwhile: Operation
) -> None:
    assert_unharmed(
        filled, OF_A_RUN[operation], meanwhile, allowed=(StateRefusedError, RunFrozenError)
    )
