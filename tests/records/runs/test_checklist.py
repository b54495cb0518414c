"""What a user of agent-harness's runtime persistence relies on, each in a test of its name.

| feature                 | tests |
|---|---|
| Init                    | ``test_init__…`` |
| Schema family, version  | ``test_schema__…`` |
| Times                   | ``test_times__…`` |
| Run lifecycle           | ``test_run_lifecycle__…`` |
| Tri-state checkpoint    | ``test_tri_state_checkpoint__…`` |
| Thread mirror           | ``test_thread_mirror__…``, and ``test_one_write.py`` |
| FK                      | ``test_parents__…`` |
| Events                  | ``test_events__…``, and ``test_processes.py`` |
| Approvals               | ``test_approvals__…``, and ``test_processes.py`` |
| Recovery intent         | ``test_recovery_intent__…``, and ``test_processes.py`` |
| Run request             | ``test_run_request__…`` |
| Messages                | ``test_messages__…`` |
| Protected set           | ``test_protected_set__…``, and ``test_protection.py`` |
| Artifacts               | ``test_artifacts__…`` |
| Delete thread           | ``test_deleting.py`` |
| Listings                | ``test_listings__…``, and ``test_views.py`` |

And its faults, gone:

| fault                                         | test |
|---|---|
| several statements, no transaction            | ``test_one_write.py`` |
| creating again overwrites                     | ``test_thread_mirror__creating_again_…`` |
| an older run becomes the latest               | ``test_thread_mirror__it_shows_…`` |
| an event overwrites another                   | ``test_events__a_repeated_number_…`` |
| approved, then rejected                       | ``test_approvals__are_resolved_once`` |
| ``cancelled`` stays protected                 | ``test_protection.py`` |
| no database, so nothing is protected          | ``test_protected_set__…`` |
| an artifact's path leads out; file before row | ``test_artifacts__…`` |
| a foreign database is adopted, and written to | ``test_schema__…`` |
| deleting stops halfway                        | ``test_deleting.py`` |
| only one workspace                            | ``test_views.py`` |
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import PutRow, Write
from casstore.errors import (
    ApprovalResolvedError,
    CorruptionError,
    DecisionNotAllowedError,
    InvalidInputError,
    InvalidValueError,
    RecordConflictError,
    RecordNotFoundError,
    RecordsSchemaError,
    StorageError,
)
from casstore.format.digest import Digest
from casstore.records.runs import (
    EXPIRED,
    KEEP,
    PENDING,
    RUNNING,
    TERMINAL,
    WAITING,
    Runs,
    SessionCheckpoint,
    steps,
)
from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents


def overwrite(store: Store, table: str, *key: str, value: Any) -> None:
    """Put a row as nothing in casstore would."""
    draft = Draft(store)
    draft.put(Table(store, table, len(key)), key, value)
    draft.commit()


# --- Init ---------------------------------------------------------------------------------------


def test_init__concurrent_first_calls_initialise_once(store: Store) -> None:
    ready = threading.Barrier(8)
    failed: list[BaseException] = []

    def begin(number: int) -> None:
        ready.wait()
        try:
            Runs(store).create_thread(f"t{number}", "agent")
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {thread.id for thread in Runs(store).threads().items} == {f"t{n}" for n in range(8)}


def test_init__a_failed_first_call_can_be_made_again(store: Store) -> None:
    runs = Runs(store)
    engine: Any = store.engine
    whole = engine.write

    def fail(write: Write) -> None:
        raise StorageError("the disk is full")

    engine.write = fail
    with pytest.raises(StorageError):
        runs.create_thread("t", "agent")
    engine.write = whole
    assert runs.find_thread("t") is None
    assert runs.create_thread("t", "agent").id == "t"


def test_init__reading_writes_nothing(store: Store) -> None:
    before = contents(store)
    runs = Runs(store)
    assert runs.find_thread("t") is None
    assert runs.find_run("r") is None
    assert runs.threads().items == []
    assert runs.delete_thread("t") is False
    assert contents(store) == before


# --- Schema family and version ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "version"),
    [("other", 1), ("casstore.runs", 2), ("casstore.runs", None), (None, 1), (7, "x")],
)
def test_schema__a_mismatch_of_family_or_version_is_refused(
    store: Store, family: Any, version: Any
) -> None:
    overwrite(store, "runs.schema", "runs", value=[family, version])
    before = contents(store)
    runs = Runs(store)
    calls: list[Any] = [
        lambda: runs.create_thread("t", "agent"),
        lambda: runs.append_message("t", "user", "hello"),
        lambda: runs.find_thread("t"),
        lambda: runs.find_run("r"),
        runs.threads,
        runs.intents,
        runs.protected_threads,
        lambda: runs.delete_thread("t"),
    ]
    for call in calls:
        with pytest.raises(RecordsSchemaError) as refused:
            call()
        said = str(refused.value)
        assert f"family {family!r}, version {version!r}" in said
        assert "family 'casstore.runs', version 1" in said
        assert getattr(store.engine, "path", "this store") in said
    assert contents(store) == before


@pytest.mark.leaves_damage
def test_schema__existing_rows_without_family_and_version_are_refused(store: Store) -> None:
    overwrite(store, "runs.events", "1", "1", value="of somebody else")
    before = contents(store)
    with pytest.raises(RecordsSchemaError, match="without family and version"):
        Runs(store).create_thread("t", "agent")
    with pytest.raises(RecordsSchemaError):
        Runs(store).find_thread("t")
    assert contents(store) == before


def test_schema__a_concurrent_upgrade_refuses_the_write(busy: Runs, store: Store) -> None:
    engine: Any = store.engine
    whole = engine.write

    def upgraded(write: Write) -> Any:
        engine.write = whole
        overwrite(store, "runs.schema", "runs", value=["casstore.runs", 2])
        return whole(write)

    engine.write = upgraded
    with pytest.raises(RecordsSchemaError):
        busy.append_message("t", "user", "hello")
    assert Table(store, "runs.messages", 2).find("0" * 18 + "1", "0" * 18 + "1") is None


# --- Run lifecycle ------------------------------------------------------------------------------


def test_run_lifecycle__states_are_walked_with_their_times(runs: Runs, clock: Clock) -> None:
    runs.create_thread("t", "agent")
    start = clock.now_ms
    run = runs.create_run("t", "r", "worker", "graph")
    assert (run.agent, run.mode, run.adapter) == ("worker", "graph", "graph")
    assert (run.state, run.previous_state, run.resumable) == (RUNNING, None, False)
    assert run.created_at_ms == run.state_entered_at_ms == run.last_transition_at_ms == start
    before = RUNNING
    for state in (WAITING, "resuming", RUNNING, WAITING, "completed", "completed"):
        clock.move(1000)
        run = runs.set_state("t", "r", state)
        assert (run.state, run.previous_state) == (state, before)
        assert run.state_entered_at_ms == run.last_transition_at_ms == clock.now_ms
        assert run.updated_at_ms == clock.now_ms
        assert run.created_at_ms == start
        assert run.resumable is (state == WAITING)
        assert runs.get_run("t", "r") == run
        before = state


def test_run_lifecycle__the_adapter_may_differ_from_the_mode(busy: Runs) -> None:
    run = busy.create_run("t", "r2", "agent", "graph", adapter="remote")
    assert (run.mode, run.adapter) == ("graph", "remote")
    assert busy.find_run("r2") == run


# --- Times ---------------------------------------------------------------------------------------


def test_times__are_those_that_the_caller_gives(runs: Runs, clock: Clock) -> None:
    """As of a runtime that has written them down before, or replays what it did."""
    day = 86_400_000
    at = [clock.now_ms - day + number for number in range(20)]
    thread = runs.create_thread("t", "agent", at_ms=at[0])
    assert (thread.created_at_ms, thread.updated_at_ms) == (at[0], at[0])
    run = runs.create_run("t", "r", "agent", "loop", at_ms=at[1])
    assert {run.created_at_ms, run.updated_at_ms, run.state_entered_at_ms} == {at[1]}
    assert run.last_transition_at_ms == at[1]
    assert runs.append_message("t", "user", "x", at_ms=at[2]).created_at_ms == at[2]
    assert runs.append_event("t", "r", "x", at_ms=at[3]).created_at_ms == at[3]
    run = runs.set_state("t", "r", WAITING, checkpoint="one", at_ms=at[4])
    assert {run.updated_at_ms, run.state_entered_at_ms, run.last_transition_at_ms} == {at[4]}
    assert run.created_at_ms == at[1]
    assert runs.request_approval("t", "r", "a", "tool", at_ms=at[5]).requested_at_ms == at[5]
    assert runs.request_approval("t", "r", "b", "tool", at_ms=at[5]).requested_at_ms == at[5]
    assert runs.save_request("t", "r", {}, at_ms=at[6]).saved_at_ms == at[6]
    assert runs.save_intent("t", "r", {}, at_ms=at[7]).saved_at_ms == at[7]
    made = runs.put_artifact("t", "r", "x.json", {}, "json", at_ms=at[8])
    assert made.created_at_ms == at[8]
    assert runs.resolve_approval("t", "r", "a", "approve", at_ms=at[9]).resolved_at_ms == at[9]
    assert runs.expire_approval("t", "r", "b", at_ms=at[10]).resolved_at_ms == at[10]
    # They are stored as they were given.
    found = runs.find_thread("t")
    assert found is not None
    assert (found.created_at_ms, found.updated_at_ms) == (at[0], at[4])
    assert runs.get_run("t", "r") == run._replace(events=1, artifacts=1)
    assert [message.created_at_ms for message in runs.messages("t")] == [at[2]]
    assert [event.created_at_ms for event in runs.events("t", "r").items] == [at[3]]
    # What is there already keeps its time, whatever is given with it.
    assert runs.create_thread("t", "agent", at_ms=at[11]).created_at_ms == at[0]
    assert runs.create_run("t", "r", "agent", "loop", at_ms=at[11]).created_at_ms == at[1]
    assert runs.put_artifact("t", "r", "x.json", {}, "json", at_ms=at[11]) == made


def test_times__the_order_of_listings_does_not_depend_on_them(runs: Runs) -> None:
    for number in range(3):
        runs.create_thread(f"t{number}", "agent", at_ms=1000 - number)
        runs.create_run(f"t{number}", f"r{number}", "agent", "loop", at_ms=1000 - number)
        runs.append_message("t0", "user", number, at_ms=1000 - number)
    assert [thread.id for thread in runs.threads().items] == ["t2", "t1", "t0"]
    assert [message.content for message in runs.messages("t0")] == [0, 1, 2]
    runs.set_state("t0", "r0", RUNNING, at_ms=1)
    first = runs.threads().items[0]
    # An earlier time does not set back when the thread changed last.
    assert (first.id, first.updated_at_ms) == ("t0", 1000)


@pytest.mark.parametrize("bad", [-1, 1.5, "2026-01-01", True, 1 << 60])
def test_times__an_invalid_time_is_refused(busy: Runs, store: Store, bad: Any) -> None:
    busy.request_approval("t", "r", "a", "tool", checkpoint="one")
    before = contents(store)
    for call in (
        lambda: busy.create_thread("u", "agent", at_ms=bad),
        lambda: busy.create_run("t", "r2", "agent", "loop", at_ms=bad),
        lambda: busy.set_state("t", "r", RUNNING, at_ms=bad),
        lambda: busy.append_message("t", "user", "x", at_ms=bad),
        lambda: busy.append_event("t", "r", "x", at_ms=bad),
        lambda: busy.request_approval("t", "r", "b", "tool", checkpoint="one", at_ms=bad),
        lambda: busy.resolve_approval("t", "r", "a", "approve", at_ms=bad),
        lambda: busy.expire_approval("t", "r", "a", at_ms=bad),
        lambda: busy.save_request("t", "r", {}, at_ms=bad),
        lambda: busy.save_intent("t", "r", {}, at_ms=bad),
        lambda: busy.put_artifact("t", "r", "x", {}, "json", at_ms=bad),
    ):
        with pytest.raises(InvalidInputError, match="at_ms"):
            call()
    assert contents(store) == before


# --- Tri-state checkpoint -----------------------------------------------------------------------


def test_tri_state_checkpoint__left_out_it_stays_none_clears_it_a_value_sets_it(
    busy: Runs,
) -> None:
    assert busy.set_state("t", "r", WAITING, checkpoint="one").checkpoint == "one"
    assert busy.set_state("t", "r", RUNNING).checkpoint == "one"
    assert busy.set_state("t", "r", RUNNING, checkpoint=KEEP).checkpoint == "one"
    assert busy.set_state("t", "r", RUNNING, checkpoint="two").checkpoint == "two"
    assert busy.set_state("t", "r", WAITING, checkpoint=None).checkpoint is None
    assert busy.set_state("t", "r", WAITING).checkpoint is None
    # An empty reference is none, as there.
    assert busy.set_state("t", "r", WAITING, checkpoint="one").checkpoint == "one"
    assert busy.set_state("t", "r", WAITING, checkpoint="").checkpoint is None
    for bad in (7, SessionCheckpoint("s", -1), SessionCheckpoint("", 1), ("s", 1)):
        with pytest.raises(InvalidInputError):
            busy.set_state("t", "r", WAITING, checkpoint=bad)  # type: ignore[arg-type]
    assert busy.get_run("t", "r").checkpoint is None


# --- Thread mirror ------------------------------------------------------------------------------


def test_thread_mirror__the_thread_shows_the_state_of_its_latest_run(
    busy: Runs, clock: Clock
) -> None:
    clock.move(1)
    busy.set_state("t", "r", WAITING)
    thread = busy.find_thread("t")
    assert thread is not None
    assert (thread.status, thread.latest_run) == (WAITING, "r")
    assert thread.updated_at_ms == clock.now_ms
    busy.create_run("t", "r2", "agent", "graph")
    clock.move(1)
    busy.set_state("t", "r", "failed")
    thread = busy.find_thread("t")
    assert thread is not None
    assert (thread.status, thread.latest_run) == (RUNNING, "r2")
    assert thread.updated_at_ms == clock.now_ms
    busy.set_state("t", "r2", "completed")
    thread = busy.find_thread("t")
    assert thread is not None
    assert (thread.status, thread.latest_run, thread.runs) == ("completed", "r2", 2)


def test_thread_mirror__creating_an_existing_thread_or_run_overwrites_nothing(
    busy: Runs, clock: Clock
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint="one")
    thread, run = busy.find_thread("t"), busy.find_run("r")
    clock.move(1000)
    assert busy.create_thread("t", "agent") == thread
    assert busy.create_run("t", "r", "agent", "graph") == run
    for change in (
        lambda: busy.create_thread("t", "another"),
        lambda: busy.create_thread("t", "agent", workspace="another"),
        lambda: busy.create_run("t", "r", "another", "graph"),
        lambda: busy.create_run("t", "r", "agent", "another"),
    ):
        with pytest.raises(RecordConflictError):
            change()
    assert (busy.find_thread("t"), busy.find_run("r")) == (thread, run)


# --- FK -----------------------------------------------------------------------------------------


def test_parents__a_record_of_a_missing_thread_or_run_is_refused(busy: Runs, store: Store) -> None:
    busy.create_thread("other", "agent")
    busy.create_run("other", "foreign", "agent", "graph")
    busy.request_approval("other", "foreign", "asked", "shell", checkpoint="one")
    before = contents(store)
    for thread, run in (("none", "r"), ("t", "none"), ("t", "foreign"), ("other", "r")):
        orphans: list[steps.Step] = [
            steps.SetState(run, WAITING),
            steps.RenewProtection(run),
            steps.AppendEvent(run, 1),
            steps.AppendMessage("user", "hello", run),
            steps.RequestApproval(run, "a", "shell", "one"),
            steps.ResolveApproval(run, "asked", "approve"),
            steps.SaveRequest(run, 1),
            steps.ClearRequest(run),
            steps.SaveIntent(run, 1),
            steps.BeginAttempt(run),
            steps.ClearIntent(run),
            steps.PutArtifact(run, "x", 1, "json"),
        ]
        for orphan in orphans:
            with pytest.raises(RecordNotFoundError):
                busy.apply(thread, orphan)
    with pytest.raises(RecordNotFoundError):
        busy.create_run("none", "r3", "agent", "graph")
    with pytest.raises(RecordConflictError, match="belongs to thread"):
        busy.create_run("t", "foreign", "agent", "graph")
    with pytest.raises(RecordNotFoundError):
        busy.resolve_approval("t", "r", "asked", "approve")
    assert contents(store) == before


# --- Events -------------------------------------------------------------------------------------


def test_events__numbers_are_unique_and_ordered(busy: Runs, clock: Clock) -> None:
    for sequence in (5, 1, 1000, 2):
        assert busy.append_event("t", "r", {"n": sequence}, sequence=sequence).sequence == sequence
        clock.move(-1000)
    page = busy.events("t", "r")
    assert [event.sequence for event in page.items] == [1, 2, 5, 1000]
    assert [event.event["n"] for event in page.items] == [1, 2, 5, 1000]
    assert busy.append_event("t", "r", "next").sequence == 1001
    assert busy.find_event("t", "r", 5) == page.items[2]
    assert busy.find_event("t", "r", 6) is None
    assert busy.get_run("t", "r").events == 5


def test_events__a_repeated_number_with_equal_content_is_a_no_op_and_else_refused(
    busy: Runs, store: Store, clock: Clock
) -> None:
    first = busy.append_event("t", "r", {"n": 1, "text": "x" * 2000}, sequence=3)
    before = contents(store)
    clock.move(5)
    assert busy.append_event("t", "r", {"text": "x" * 2000, "n": 1}, sequence=3) == first
    for other in ({"n": 2, "text": "x" * 2000}, {"n": 1.0, "text": "x" * 2000}, None):
        with pytest.raises(RecordConflictError, match="other content"):
            busy.append_event("t", "r", other, sequence=3)
    # Also within one write.
    with pytest.raises(RecordConflictError):
        busy.apply("t", steps.AppendEvent("r", 1, 9), steps.AppendEvent("r", 2, 9))
    assert contents(store) == before
    assert busy.apply("t", steps.AppendEvent("r", 1, 9), steps.AppendEvent("r", 1, 9))[1].event == 1
    assert busy.get_run("t", "r").events == 2


def test_events__an_invalid_sequence_or_event_is_refused(busy: Runs, store: Store) -> None:
    before = contents(store)
    for sequence in (-1, 1 << 63, "1", 1.0, True):
        with pytest.raises(InvalidInputError):
            busy.append_event("t", "r", 1, sequence=sequence)  # type: ignore[arg-type]
    for event in (float("nan"), object(), {1: 2}, 1 << 70):
        with pytest.raises(InvalidValueError):
            busy.append_event("t", "r", event)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidValueError):
        busy.append_event("t", "r", deep)
    assert contents(store) == before


# --- Approvals ----------------------------------------------------------------------------------


def test_approvals__a_request_stores_every_field_that_an_operator_needs(
    busy: Runs, clock: Clock
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint="one")
    asked = busy.request_approval(
        "t", "r", "a", "shell", allowed=["approve", "reject"], preview={"cmd": "rm"},
        action="p", tool_call="call", events=[3, {"sequence": 4}],
    )  # fmt: skip
    assert asked == busy.find_approval("a")
    assert (asked.status, asked.decision, asked.resolved_at_ms) == (PENDING, None, None)
    assert (asked.thread, asked.run, asked.action, asked.tool_call) == ("t", "r", "p", "call")
    assert (asked.tool, asked.checkpoint, asked.preview) == ("shell", "one", {"cmd": "rm"})
    assert asked.allowed == ("approve", "reject")
    assert asked.events == (3, {"sequence": 4})
    assert asked.requested_at_ms == clock.now_ms


def test_approvals__need_a_checkpoint_and_decisions(busy: Runs, store: Store) -> None:
    before = contents(store)
    with pytest.raises(InvalidInputError, match="checkpoint"):
        busy.request_approval("t", "r", "a", "shell")
    for allowed in ((), "approve", ["a", "a"], [""], [PENDING], [1]):
        with pytest.raises(InvalidInputError):
            busy.request_approval("t", "r", "a", "shell", checkpoint="one", allowed=allowed)  # type: ignore[arg-type]
    assert contents(store) == before


def test_approvals__an_empty_checkpoint_counts_as_none(busy: Runs) -> None:
    busy.set_state("t", "r", WAITING, checkpoint="one")
    assert busy.request_approval("t", "r", "a", "shell", checkpoint="").checkpoint is None
    assert busy.request_approval("t", "r", "b", "shell", checkpoint=None).checkpoint is None
    assert busy.find_approval("a") == busy.approvals().items[0]
    # Asked again in other words it is the same question; with a checkpoint it is another.
    assert busy.request_approval("t", "r", "a", "shell", checkpoint=None).id == "a"
    with pytest.raises(RecordConflictError):
        busy.request_approval("t", "r", "a", "shell", checkpoint="one")
    assert busy.save_intent("t", "r", {}, checkpoint="").checkpoint is None
    assert busy.resolve_approval("t", "r", "a", "approve").checkpoint is None


def test_approvals__expire_without_a_decision(busy: Runs, store: Store, clock: Clock) -> None:
    for name in ("a", "b"):
        busy.request_approval("t", "r", name, "shell", checkpoint="one", allowed=["approve"])
    clock.move(7)
    expired = busy.expire_approval("t", "r", "a")
    assert (expired.status, expired.decision) == (EXPIRED, None)
    assert expired.resolved_at_ms == clock.now_ms
    assert busy.find_approval("a") == expired
    assert [one.id for one in busy.approvals(status=PENDING).items] == ["b"]
    assert [one.id for one in busy.approvals(status=EXPIRED).items] == ["a"]
    busy.resolve_approval("t", "r", "b", "approve")
    before = contents(store)
    with pytest.raises(ApprovalResolvedError):
        busy.resolve_approval("t", "r", "a", "approve")
    for name in ("a", "b"):
        with pytest.raises(ApprovalResolvedError):
            busy.expire_approval("t", "r", name)
    for run, name in (("r", "nothing"), ("nothing", "a")):
        with pytest.raises(RecordNotFoundError):
            busy.expire_approval("t", run, name)
    assert contents(store) == before


def test_approvals__are_resolved_once(busy: Runs, store: Store, clock: Clock) -> None:
    busy.request_approval("t", "r", "a", "shell", checkpoint="one")
    clock.move(7)
    resolved = busy.resolve_approval("t", "r", "a", "approve")
    assert (resolved.status, resolved.decision) == ("approved", "approve")
    assert resolved.resolved_at_ms == clock.now_ms == resolved.requested_at_ms + 7
    assert busy.find_approval("a") == resolved
    assert list(Table(store, "runs.pending", 1).scan()) == []
    before = contents(store)
    for decision in ("reject", "approve", "anything"):
        with pytest.raises(ApprovalResolvedError) as refused:
            busy.resolve_approval("t", "r", "a", decision)
        assert refused.value.status == "approved"
    assert contents(store) == before


def test_approvals__only_an_allowed_decision_counts(busy: Runs) -> None:
    busy.request_approval("t", "r", "a", "shell", checkpoint="one", allowed=["ok", "reject"])
    for decision in ("approve", "", "OK", PENDING):
        with pytest.raises(DecisionNotAllowedError) as refused:
            busy.resolve_approval("t", "r", "a", decision)
        assert refused.value.allowed == ("ok", "reject")
    found = busy.find_approval("a")
    assert found is not None
    assert found.status == PENDING
    assert busy.resolve_approval("t", "r", "a", "ok").status == "ok"


def test_approvals__a_repeated_request_returns_the_same_approval_or_is_refused(
    busy: Runs, clock: Clock
) -> None:
    asked = busy.request_approval("t", "r", "a", "shell", checkpoint="one", preview=[1])
    clock.move(1)
    assert busy.request_approval("t", "r", "a", "shell", checkpoint="one", preview=[1]) == asked
    resolved = busy.resolve_approval("t", "r", "a", "reject")
    assert busy.request_approval("t", "r", "a", "shell", checkpoint="one", preview=[1]) == resolved
    with pytest.raises(RecordConflictError):
        busy.request_approval("t", "r", "a", "shell", checkpoint="one", preview=[2])
    assert busy.find_approval("a") == resolved


# --- Recovery intent ----------------------------------------------------------------------------


def test_recovery_intent__comes_with_the_decision_or_not_at_all(busy: Runs, store: Store) -> None:
    busy.set_state("t", "r", WAITING, checkpoint="one")
    busy.request_approval("t", "r", "a", "shell")
    intent = steps.SaveIntent("r", {"decision": "approve"})
    with pytest.raises(DecisionNotAllowedError):
        busy.resolve_approval("t", "r", "a", "never", intent=intent)
    assert busy.find_intent("t", "r") is None
    with pytest.raises(InvalidInputError):
        busy.resolve_approval("t", "r", "a", "approve", intent=steps.SaveIntent("r2", 1))
    busy.resolve_approval("t", "r", "a", "approve", intent=intent)
    found = busy.find_intent("t", "r")
    assert found is not None
    assert (found.kind, found.payload, found.attempts) == (
        "approval-decision", {"decision": "approve"}, 0,
    )  # fmt: skip
    assert found.checkpoint == "one"
    with pytest.raises(ApprovalResolvedError):
        busy.resolve_approval("t", "r", "a", "reject", intent=steps.SaveIntent("r", "other"))
    assert busy.find_intent("t", "r") == found


def test_recovery_intent__attempts_are_counted_and_the_intent_can_be_cleared(busy: Runs) -> None:
    with pytest.raises(RecordNotFoundError):
        busy.begin_attempt("t", "r")
    saved = busy.save_intent("t", "r", {"x": 1}, kind="other", checkpoint="one")
    assert busy.begin_attempt("t", "r") == saved._replace(attempts=1)
    assert busy.begin_attempt("t", "r").attempts == 2
    found = busy.find_intent("t", "r")
    assert found == saved._replace(attempts=2)
    assert busy.clear_intent("t", "r") is True
    assert busy.clear_intent("t", "r") is False
    assert busy.find_intent("t", "r") is None
    busy.save_intent("t", "r", 1, attempts=5)
    busy.save_intent("t", "r", 2)
    found = busy.find_intent("t", "r")
    assert found is not None
    assert (found.payload, found.attempts) == (2, 0)
    assert len(busy.intents().items) == 1


def test_recovery_intent__and_request_survive_a_restart(tmp_path: Path) -> None:
    with Store(LmdbEngine(str(tmp_path), durability="relaxed")) as store:
        runs = Runs(store)
        runs.create_thread("t", "agent")
        runs.create_run("t", "r", "agent", "graph")
        runs.set_state("t", "r", WAITING, checkpoint="one")
        runs.save_request("t", "r", {"input": "x"}, invocation={"depth": 1})
        runs.request_approval("t", "r", "a", "shell")
        runs.resolve_approval("t", "r", "a", "approve", intent=steps.SaveIntent("r", "payload"))
        runs.begin_attempt("t", "r")
    with Store(LmdbEngine(str(tmp_path), durability="relaxed")) as store:
        runs = Runs(store)
        (intent,) = runs.intents().items
        assert (intent.run, intent.payload, intent.attempts) == ("r", "payload", 1)
        (request,) = runs.requests().items
        assert (request.input, request.invocation) == ({"input": "x"}, {"depth": 1})
        # Going on, and that it has gone on, is one write as well.
        runs.apply("t", steps.SetState("r", RUNNING), steps.ClearIntent("r"))
        assert runs.intents().items == []


# --- Run request --------------------------------------------------------------------------------


def test_run_request__there_is_one_for_a_run_until_it_is_cleared(busy: Runs, clock: Clock) -> None:
    assert busy.find_request("t", "r") is None
    busy.save_request("t", "r", "first")
    clock.move(1)
    second = busy.save_request("t", "r", {"second": ["x" * 5000]}, invocation=[1])
    assert second.saved_at_ms == clock.now_ms
    assert busy.find_request("t", "r") == second
    assert busy.requests().items == [second]
    assert busy.clear_request("t", "r") is True
    assert busy.clear_request("t", "r") is False
    assert busy.find_request("t", "r") is None
    # Within one write each step sees those before it.
    given = busy.apply(
        "t", steps.SaveRequest("r", 1), steps.ClearRequest("r"), steps.ClearRequest("r")
    )
    assert given[1:] == (True, False)
    assert busy.find_request("t", "r") is None


# --- Messages -----------------------------------------------------------------------------------


def test_messages__the_last_come_oldest_first_and_ties_are_stable(busy: Runs, clock: Clock) -> None:
    assert busy.messages("t") == []
    said = [busy.append_message("t", "user", f"m{n}", run="r") for n in range(15)]
    clock.move(-5000)
    said.append(busy.append_message("t", "assistant", {"parts": ["x" * 3000]}))
    assert [message.number for message in said] == list(range(1, 17))
    assert busy.messages("t") == said[-12:]
    assert busy.messages("t", limit=3) == said[-3:]
    assert busy.messages("t", limit=1000) == said
    assert busy.messages("t", limit=4, before=said[-3].number) == said[-7:-3]
    assert busy.messages("t", before=1) == []
    for limit in (0, 1001, "3", None):
        with pytest.raises(InvalidInputError):
            busy.messages("t", limit=limit)  # type: ignore[arg-type]


# --- Protected set ------------------------------------------------------------------------------


def test_protected_set__has_the_runs_with_a_checkpoint_that_have_not_ended(runs: Runs) -> None:
    states = [RUNNING, WAITING, "resuming", "anything", *sorted(TERMINAL)]
    for number, state in enumerate(states):
        runs.create_thread(f"t{number}", "agent")
        for run, checkpoint in (("with", "one"), ("without", None)):
            runs.create_run(f"t{number}", f"{run} {number}", "agent", "graph")
            runs.set_state(f"t{number}", f"{run} {number}", state, checkpoint=checkpoint)
    assert runs.protected_threads() == {"t0", "t1", "t2", "t3"}
    assert [run.id for run in runs.protected_runs()] == [f"with {n}" for n in range(4)]
    runs.set_state("t0", "with 0", RUNNING, checkpoint=None)
    runs.set_state("t1", "with 1", "cancelled")
    assert runs.protected_threads() == {"t2", "t3"}


def test_protected_set__raises_instead_of_returning_an_empty_set_without_records(
    store: Store,
) -> None:
    runs = Runs(store)
    with pytest.raises(RecordNotFoundError):
        runs.protected_threads()
    runs.create_thread("t", "agent")
    assert runs.protected_threads() == set()


@pytest.mark.leaves_damage
@pytest.mark.parametrize("damage", [None, [], {"state": "completed"}, b"bytes"])
def test_protected_set__an_invalid_run_value_raises_corruption_error(
    busy: Runs, store: Store, damage: Any
) -> None:
    overwrite(store, "runs.runs", "r", value=damage)
    before = contents(store)
    calls: list[Any] = [
        busy.protected_threads,
        lambda: list(busy.protected_runs()),
        lambda: busy.find_run("r"),
        lambda: busy.set_state("t", "r", "completed"),
        busy.runs,
        lambda: busy.thread_runs("t"),
        lambda: busy.delete_thread("t"),
    ]
    for call in calls:
        with pytest.raises(CorruptionError):
            call()
    assert contents(store) == before


@pytest.mark.leaves_damage
def test_protected_set__invalid_row_bytes_raise_corruption_error(busy: Runs, store: Store) -> None:
    key = Table(store, "runs.runs", 1).keys.key(("r",))
    for row in (b"", b"\x07", b"\x00", b"\x00\xff", b"\x00\xc1", b"\x00\x81\xa1"):
        store.engine.write(Write(rows=[PutRow("records", key, row)]))
        with pytest.raises(CorruptionError):
            busy.protected_threads()


# --- Artifacts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../../../../x.json", "..", ".", "", "/etc/passwd", "a/../b", "a/./b", "a//b", "a/", "./a",
        "a\\..\\b", "C:/x", "c:x", "a\0b", "a\nb", "\x7f", "x" * 256, "a/" * 600 + "b", "\ud800", 7,
    ],
)  # fmt: skip
def test_artifacts__a_path_that_leaves_the_directory_is_refused(
    busy: Runs, store: Store, path: Any
) -> None:
    before = contents(store)
    with pytest.raises(InvalidInputError):
        busy.put_artifact("t", "r", path, {}, "json")
    with pytest.raises(InvalidInputError):
        busy.find_artifact("t", "r", path)
    assert contents(store) == before


def test_artifacts__bytes_and_values_round_trip(busy: Runs, store: Store, clock: Clock) -> None:
    contents_of = {
        "report.json": {"lines": ["x" * 600] * 40, "n": [1, 1.5, None]},
        "deep/er/..dots": b"short",
        "long": bytes(range(256)) * 2000,
        "empty": b"",
        "text": "just text " * 100,
        "ünï": None,
    }
    for path, content in contents_of.items():
        made = busy.put_artifact("t", "r", path, content, "kind", artifact=f"id of {path}")
        assert (made.path, made.kind, made.id) == (path, "kind", f"id of {path}")
        assert made.is_blob is isinstance(content, bytes)
        if isinstance(content, bytes):
            assert made.digest == Digest.of_blob(content)
    for path, content in contents_of.items():
        assert busy.read_artifact("t", "r", path) == content
    listed = busy.artifacts("t", "r").items
    assert [made.path for made in listed] == list(contents_of)
    assert busy.find_artifact("t", "r", "long") == listed[2]
    assert busy.find_artifact("t", "r", "none") is None
    with pytest.raises(RecordNotFoundError):
        busy.read_artifact("t", "r", "none")
    thread = busy.find_thread("t")
    assert thread is not None
    assert thread.artifacts == busy.get_run("t", "r").artifacts == len(contents_of)


def test_artifacts__a_row_and_its_content_belong_together(busy: Runs, store: Store) -> None:
    first = busy.put_artifact("t", "r", "a", b"one", "bin")
    before = contents(store)
    assert busy.put_artifact("t", "r", "a", b"one", "bin") == first
    for content, kind in ((b"two", "bin"), (b"one", "json"), ("one", "bin")):
        with pytest.raises(RecordConflictError):
            busy.put_artifact("t", "r", "a", content, kind)
    with pytest.raises(InvalidValueError):
        busy.put_artifact("t", "r", "b", {"bad": object()}, "json")
    assert contents(store) == before
    second = busy.put_artifact("t", "r", "a", b"two", "bin", replace=True)
    assert second.number == first.number
    assert busy.read_artifact("t", "r", "a") == b"two"
    assert busy.artifacts("t", "r").items == [second]
    assert busy.get_run("t", "r").artifacts == 1


# --- Listings: None or an error for what is not there -------------------------------------------


def test_listings__a_missing_entry_is_none_or_an_error(busy: Runs) -> None:
    assert busy.find_thread("none") is None
    assert busy.find_run("none") is None
    assert busy.find_approval("none") is None
    errors: list[Any] = [
        lambda: busy.get_run("t", "none"),
        lambda: busy.get_run("none", "r"),
        lambda: busy.thread_runs("none"),
        lambda: busy.events("t", "none"),
        lambda: busy.find_event("t", "none", 1),
        lambda: busy.messages("none"),
        lambda: busy.artifacts("t", "none"),
        lambda: busy.find_artifact("t", "none", "a"),
        lambda: busy.find_request("t", "none"),
        lambda: busy.find_intent("none", "r"),
        lambda: busy.approvals(thread="none"),
        lambda: busy.approvals(run="none"),
        lambda: busy.approvals(thread="none", run="r"),
    ]
    for call in errors:
        with pytest.raises(RecordNotFoundError):
            call()


@pytest.mark.parametrize("name", ["", "a\0b", "\ud800", "x" * 1025, 7, None])
def test_listings__an_invalid_name_is_refused(busy: Runs, store: Store, name: Any) -> None:
    before = contents(store)
    calls: list[Any] = [
        lambda: busy.create_thread(name, "agent"),
        lambda: busy.create_thread("new", name),
        lambda: busy.create_run("t", name, "agent", "graph"),
        lambda: busy.create_run(name, "new", "agent", "graph"),
        lambda: busy.set_state("t", "r", name),
        lambda: busy.find_thread(name),
        lambda: busy.find_run(name),
        lambda: busy.delete_thread(name),
        lambda: busy.append_message("t", name, "x"),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError):
            call()
    assert contents(store) == before
