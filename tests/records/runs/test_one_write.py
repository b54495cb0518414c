"""Every operation is one transaction: whichever of its changes fails, nothing has happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.records.runs import COMMITTED, RUNNING, WAITING, Runs, SessionCheckpoint, steps
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import assert_one_transaction


def growth(node: str, **fields: Any) -> Commit:
    return Commit(append=[NodeDraft(node, {"role": "user"})], **fields)


def prepare(store: Store) -> Runs:
    """One of everything."""
    runs = Runs(store)
    session = store.session("s")
    session.commit(growth("a"))
    session.commit(growth("b"))
    runs.create_thread("t", "agent")
    runs.create_run("t", "old", "agent", "graph")
    runs.create_run("t", "r", "agent", "graph")
    runs.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 1))
    runs.request_approval("t", "r", "a", "shell", preview="x" * 1000)
    runs.save_request("t", "r", "input")
    runs.save_intent("t", "r", "payload")
    runs.append_event("t", "r", {"text": "x" * 1000}, sequence=4)
    runs.append_message("t", "user", "hello")
    runs.put_artifact("t", "r", "file", b"content", "bin")
    return runs


OPERATIONS: dict[str, Callable[[Runs], Any]] = {
    "create_thread": lambda runs: runs.create_thread("new", "agent"),
    "create_run": lambda runs: runs.create_run("t", "new", "agent", "graph"),
    "set_state": lambda runs: runs.set_state("t", "r", RUNNING),
    "set_state_of_an_older_run": lambda runs: runs.set_state("t", "old", "failed"),
    "set_state_and_another_revision": lambda runs: runs.set_state(
        "t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2)
    ),
    "set_state_at_the_end": lambda runs: runs.set_state("t", "r", "cancelled"),
    "renew_protection": lambda runs: runs.apply("t", steps.RenewProtection("r")),
    "append_event": lambda runs: runs.append_event("t", "r", "x" * 3000),
    "append_an_earlier_event": lambda runs: runs.append_event("t", "r", 1, sequence=2),
    "append_message": lambda runs: runs.append_message("t", "user", ["x" * 3000], run="r"),
    "request_approval": lambda runs: runs.request_approval("t", "r", "b", "shell"),
    "resolve_approval": lambda runs: runs.resolve_approval("t", "r", "a", "reject"),
    "resolve_approval_with_an_intent": lambda runs: runs.resolve_approval(
        "t", "r", "a", "approve", intent=steps.SaveIntent("r", "x" * 3000)
    ),
    "save_request": lambda runs: runs.save_request("t", "r", "other"),
    "clear_request": lambda runs: runs.clear_request("t", "r"),
    "save_intent": lambda runs: runs.save_intent("t", "r", "other"),
    "begin_attempt": lambda runs: runs.begin_attempt("t", "r"),
    "clear_intent": lambda runs: runs.clear_intent("t", "r"),
    "put_artifact": lambda runs: runs.put_artifact("t", "r", "new", b"x" * 3000, "bin"),
    "replace_an_artifact": lambda runs: runs.put_artifact(
        "t", "r", "file", b"other", "bin", replace=True
    ),
    "delete_thread": lambda runs: runs.delete_thread("t"),
    "many_steps": lambda runs: runs.apply(
        "t",
        steps.CreateRun("new", "agent", "graph"),
        steps.AppendMessage("user", "x" * 3000, "new"),
        steps.SaveRequest("new", "x" * 3000),
        steps.AppendEvent("new", {"type": "started"}),
        steps.SetState("new", WAITING, SessionCheckpoint("s", 2)),
        steps.RequestApproval("new", "b", "shell"),
    ),
    "commit": lambda runs: runs.commit(
        "s",
        growth("c", expected=2),
        "t",
        steps.SetState("r", WAITING, COMMITTED),
        steps.RequestApproval("r", "b", "shell"),
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_one_transaction(name: str, tmp_path: Path, clock: Clock) -> None:
    assert_one_transaction(
        tmp_path / "s", prepare, lambda _, runs: OPERATIONS[name](runs), clock=clock
    )
