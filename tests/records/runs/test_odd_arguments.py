"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.engine.protocol import Write
from casstore.records.runs import COMMITTED, Runs, steps
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from tests.refusals import CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None
STEP = steps.SetState("r", "running", COMMITTED)


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        yield store


@pytest.fixture
def runs(store: Store) -> Runs:
    runs = Runs(store)
    runs.create_thread("t", "agent")
    runs.create_run("t", "r", "agent", "mode")
    runs.set_state("t", "r", "waiting_for_approval", checkpoint="there")
    runs.request_approval("t", "r", "a", "tool")
    runs.put_artifact("t", "r", "report", 1, "text")
    return runs


def _commit(expected: Any) -> Commit:
    return Commit(append=[NodeDraft("n", 1)], expected=expected)


CALLS: dict[str, Callable[[Runs], object]] = {
    "no commit": lambda runs: runs.commit("s", NONE, "t", STEP),
    "a commit that is a dict": lambda runs: runs.commit("s", {}, "t", STEP),  # type: ignore[arg-type]
    "an expected revision that is a text": lambda runs: runs.commit("s", _commit("0"), "t", STEP),
    "an expected revision between two": lambda runs: runs.commit("s", _commit(0.5), "t", STEP),
    "an intent that is a number": lambda runs: runs.resolve_approval(
        "t", "r", "a", "approve", intent=ODD
    ),
    "an intent that is its payload": lambda runs: runs.resolve_approval(
        "t",
        "r",
        "a",
        "approve",
        intent={"answer": 1},  # type: ignore[arg-type]
    ),
    "decisions that are a number": lambda runs: runs.request_approval(
        "t", "r", "b", "tool", allowed=ODD
    ),
    "decisions in no order": lambda runs: runs.request_approval(
        "t",
        "r",
        "b",
        "tool",
        allowed={"yes", "no"},  # type: ignore[arg-type]
    ),
    "decisions that can be read once": lambda runs: runs.request_approval(
        "t",
        "r",
        "b",
        "tool",
        allowed=iter(["yes"]),  # type: ignore[arg-type]
    ),
    "a text that says not to replace": lambda runs: runs.put_artifact(
        "t",
        "r",
        "report",
        2,
        "text",
        replace="no",  # type: ignore[arg-type]
    ),
    "a status of threads": lambda runs: runs.threads(status=ODD),
    "an agent of threads": lambda runs: runs.threads(agent=ODD),
    "a workspace of threads": lambda runs: runs.threads(workspace=ODD),
    "a state of runs": lambda runs: runs.runs(state=ODD),
    "an agent of runs": lambda runs: runs.runs(agent=ODD),
    "a state of a thread's runs": lambda runs: runs.thread_runs("t", state=ODD),
    "a status of approvals": lambda runs: runs.approvals(status=ODD),
}


@pytest.mark.parametrize("call", CALLS)
def test_run_calls_refuse_invalid_arguments(engine: CountingEngine, runs: Runs, call: str) -> None:
    assert_refused(engine, lambda: CALLS[call](runs))
    assert runs.read_artifact("t", "r", "report") == 1


BESIDE: dict[str, Write] = {
    "rows that are none": Write(rows=NONE),
    "a row that is a number": Write(rows=[ODD]),
    "conditions that are a text": Write(conditions="now"),  # type: ignore[arg-type]
    "a condition that is its fields": Write(conditions=[("records", b"key", None)]),  # type: ignore[list-item]
    "objects that are a number": Write(objects=ODD),
    "an object that is bytes": Write(objects=[b"object"]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("also", BESIDE)
def test_invalid_records_are_refused_with_their_commit(
    engine: CountingEngine, store: Store, also: str
) -> None:
    change = Commit(append=[NodeDraft("n", 1)], also=BESIDE[also])
    assert_refused(engine, lambda: store.session("s").commit(change))
