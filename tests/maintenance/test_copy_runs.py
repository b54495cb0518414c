"""Runs in a store that another is copied into again and again: as they are, not as they were."""

from __future__ import annotations

from typing import Any

from casstore import Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.records.runs import WAITING, Runs, steps, system


class Disturbed(MemoryEngine):
    """An engine in which something happens before the next write that removes rows."""

    happen: Any = None

    def write(self, write: Write) -> WriteResult:
        """Write, after what happens."""
        if self.happen is not None and any(len(row) == 2 for row in write.rows):
            happen, self.happen = self.happen, None
            happen()
        return super().write(write)


def begin(runs: Runs) -> None:
    runs.create_thread("t", "planner")
    runs.create_thread("quiet", "planner")
    runs.apply(
        "t",
        steps.CreateRun("r", "planner", "loop"),
        steps.SaveRequest("r", {"text": "hello"}),
        steps.SetState("r", WAITING, checkpoint="checkpoints/1"),
        steps.RequestApproval("r", "a", "shell"),
        steps.SaveIntent("r", {"decision": "?"}),
    )


def go_on(runs: Runs) -> None:
    runs.resolve_approval("t", "r", "a", "approve")
    runs.apply(
        "t",
        steps.SetState("r", "running"),
        steps.ClearIntent("r"),
        steps.ClearRequest("r"),
        steps.CreateRun("second", "planner", "loop"),
        steps.SaveRequest("second", {"text": "more"}),
    )


def seen(runs: Runs) -> dict[str, Any]:
    """All that an operator sees."""
    return {
        "threads": runs.threads().items,
        "runs": runs.runs().items,
        "pending": runs.approvals(status="pending").items,
        "approvals": runs.approvals().items,
        "requests": runs.requests().items,
        "intents": runs.intents().items,
    }


def test_a_second_copy_makes_changed_runs_equal_to_those_of_the_source() -> None:
    source, target = Store(MemoryEngine()), Store(MemoryEngine())
    begin(Runs(source))
    copy(source, target)
    go_on(Runs(source))
    report = copy(source, target)
    # Two places of the thread and of its run, the approval, the request, the intent.
    assert report.rows_removed == 5
    assert seen(Runs(target)) == seen(Runs(source))
    assert not check(target).findings
    assert copy(source, target).rows_removed == 0


def test_a_copy_keeps_threads_that_only_the_target_has() -> None:
    source, target = Store(MemoryEngine()), Store(MemoryEngine())
    own = Runs(target)
    begin(own)
    own.create_thread("own", "another")
    before = seen(own)
    assert copy(source, target).rows_removed == 0
    assert seen(own) == before


def test_a_copy_keeps_the_request_of_a_run_that_the_target_has_changed() -> None:
    source, target = Store(MemoryEngine()), Store(MemoryEngine())
    begin(Runs(source))
    copy(source, target)
    Runs(source).apply("t", steps.ClearRequest("r"))
    own = Runs(target)
    # Somebody goes on with it there, and the row of the run is another one from then on.
    own.set_state("t", "r", "running")
    assert [item.run for item in own.requests().items] == ["r"]
    system.tidy(source, target)
    assert [item.run for item in own.requests().items] == ["r"]


def test_a_request_saved_in_the_target_during_a_copy_stays() -> None:
    engine = Disturbed()
    source, target = Store(MemoryEngine()), Store(engine)
    begin(Runs(source))
    copy(source, target)
    Runs(source).apply("t", steps.ClearRequest("r"))
    engine.happen = lambda: Runs(target).apply("t", steps.SaveRequest("r", {"text": "anew"}))
    copy(source, target)
    assert engine.happen is None
    assert [item.input for item in Runs(target).requests().items] == [{"text": "anew"}]
