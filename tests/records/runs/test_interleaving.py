"""Runs while other writers interleave with each call."""

from __future__ import annotations

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.records.runs import WAITING, Runs
from casstore.store import Store
from tests.records.interleaving import LONG, OTHER, Operation, assert_unharmed

#: So long that the rows of threads and runs link to it.
PLANNER = "planner" + "p" * 900


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    """A thread with a run and something of everything. Nobody may change it."""
    engine = MemoryEngine()
    runs = Runs(Store(engine))
    runs.create_thread("t", PLANNER)
    runs.create_run("t", "r", PLANNER, "graph")
    runs.set_state("t", "r", WAITING, checkpoint="one" + "1" * 900)
    runs.request_approval("t", "r", "a", "shell", preview=[LONG])
    runs.append_event("t", "r", {"text": LONG})
    runs.put_artifact("t", "r", "value", LONG, "report")
    runs.put_artifact("t", "r", "blob", LONG.encode(), "report")
    return engine


def replace(store: Store) -> None:
    runs = Runs(store)
    runs.set_state("t", "r", "running", checkpoint="two" + "2" * 900)
    runs.resolve_approval("t", "r", "a", "approve")
    runs.put_artifact("t", "r", "value", OTHER, "report", replace=True)
    runs.put_artifact("t", "r", "blob", OTHER.encode(), "report", replace=True)


def remove(store: Store) -> None:
    Runs(store).delete_thread("t")


def begin_again(store: Store) -> None:
    remove(store)
    runs = Runs(store)
    runs.create_thread("t", PLANNER)
    runs.create_run("t", "r", PLANNER, "graph")
    runs.put_artifact("t", "r", "value", OTHER, "report")


OPERATIONS: dict[str, Operation] = {
    "read a value": lambda store: Runs(store).read_artifact("t", "r", "value"),
    "read a blob": lambda store: Runs(store).read_artifact("t", "r", "blob"),
    "protected": lambda store: Runs(store).protected_threads(),
    "renew": lambda store: Runs(store).renew_protections(),
    "create again": lambda store: Runs(store).create_thread("t", PLANNER),
    "delete": remove,
    "runs": lambda store: Runs(store).runs(),
    "approvals": lambda store: Runs(store).approvals(),
    "set a state": lambda store: Runs(store).set_state("t", "r", "paused"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_during_replacement_and_gc_sees_the_current_records(
    filled: MemoryEngine, operation: str
) -> None:
    assert_unharmed(filled, OPERATIONS[operation], replace, allowed=())


@pytest.mark.parametrize("meanwhile", [remove, begin_again])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_during_removal_and_gc_reports_missing_records_and_not_damage(
    filled: MemoryEngine, operation: str, meanwhile: Operation
) -> None:
    assert_unharmed(filled, OPERATIONS[operation], meanwhile)
