"""The checkpoint of a run that waits is kept by retention and gc, and no longer than it waits."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.engine.protocol import PutRow, Write
from casstore.errors import (
    ConditionFailedError,
    HeadConflictError,
    InvalidInputError,
    RecordConflictError,
    RecordNotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
    TurnConflictError,
)
from casstore.maintenance import gc, retention
from casstore.maintenance.policy import Policy
from casstore.maintenance.retention_plan import Plan
from casstore.records.runs import COMMITTED, TERMINAL, WAITING, Runs, SessionCheckpoint, steps
from casstore.session import keys
from casstore.session.data import Commit, NodeDraft
from casstore.session.session import Session
from casstore.store import Store
from tests.records.one_transaction import contents


def grow(session: Session, *nodes: str, **fields: Any) -> None:
    for node in nodes:
        text = f"what {node} says " * 100
        session.commit(Commit(append=[NodeDraft(node, {"text": text})], **fields))


@pytest.fixture
def session(store: Store) -> Session:
    """A session with four revisions."""
    session = store.session("s")
    grow(session, "a", "b", "c", "d")
    return session


def protected(session: Session) -> list[tuple[int, str]]:
    return [(one.revision, one.by) for one in session.protections()]


def nodes(session: Session, at: int | None) -> list[str]:
    state = session.load(at=at)
    assert state is not None
    return [node.id for node in state.nodes]


def sweep(store: Store) -> list[int]:
    """Keep the newest revision alone and collect the rest; which revisions there are then."""
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    gc.collect(store, grace_ms=0)
    return [entry.revision for entry in store.session("s").history()]


def test_the_checkpoint_of_an_unfinished_run_is_protected_from_retention(
    busy: Runs, store: Store, session: Session
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    assert protected(session) == [(2, "run r")]
    assert sweep(store) == [4, 2]
    assert nodes(session, 2) == ["a", "b"]
    busy.set_state("t", "r", "running")
    assert sweep(store) == [4, 2]
    busy.set_state("t", "r", "completed")
    assert protected(session) == []
    assert busy.get_run("t", "r").checkpoint == SessionCheckpoint("s", 2)
    assert sweep(store) == [4]
    # Who goes back to it now is told, and nothing has changed.
    before = contents(store)
    with pytest.raises(RevisionNotFoundError):
        busy.set_state("t", "r", WAITING)
    assert contents(store) == before


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_every_terminal_state_releases_the_protection(
    busy: Runs, session: Session, state: str
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    busy.set_state("t", "r", state)
    assert protected(session) == []
    busy.set_state("t", "r", "running")
    assert protected(session) == [(2, "run r")]


def test_the_protection_follows_the_checkpoint_of_the_run(busy: Runs, session: Session) -> None:
    busy.create_run("t", "r2", "agent", "graph")
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    busy.set_state("t", "r2", WAITING, checkpoint=SessionCheckpoint("s", 2))
    assert protected(session) == [(2, "run r"), (2, "run r2")]
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 4))
    assert protected(session) == [(2, "run r2"), (4, "run r")]
    busy.set_state("t", "r2", WAITING, checkpoint="elsewhere")
    assert protected(session) == [(4, "run r")]
    busy.set_state("t", "r", WAITING, checkpoint=None)
    assert protected(session) == []


def test_deleting_the_thread_releases_the_protection(
    busy: Runs, store: Store, session: Session
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    session.protect(3, by="somebody else")
    assert busy.delete_thread("t")
    assert protected(session) == [(3, "somebody else")]
    assert sweep(store) == [4, 3]


def test_a_missing_revision_cannot_be_a_checkpoint(
    busy: Runs, store: Store, session: Session
) -> None:
    store.session("gone").commit(Commit(append=[NodeDraft("x", 1)]))
    store.delete_session("gone")
    before = contents(store)
    for name, revision, error in (
        ("none", 1, SessionNotFoundError),
        ("s", 5, RevisionNotFoundError),
        ("s", 0, RevisionNotFoundError),
        ("gone", 1, SessionDeletedError),
    ):
        with pytest.raises(error):
            busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint(name, revision))
    assert contents(store) == before


def test_a_run_can_be_finished_after_its_session_was_deleted(
    busy: Runs, store: Store, session: Session
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    store.delete_session("s")
    assert busy.set_state("t", "r", "failed").state == "failed"
    with pytest.raises(SessionDeletedError):
        busy.set_state("t", "r", "running")
    assert busy.delete_thread("t")


@pytest.mark.leaves_damage
def test_a_protection_that_cannot_be_read_stops_retention(
    busy: Runs, store: Store, session: Session
) -> None:
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    place = keys.protection(keys.session_key("s"), 2, "run r")
    store.engine.write(Write(rows=[PutRow(*place, b"garbage")]))
    (part,) = [one for one in retention.plan(store, policy=Policy(last=1)) if one.session == "s"]
    assert part.removed == ()
    assert part.refused is not None
    assert sweep(store) == [4, 3, 2, 1]


def test_a_plan_made_before_the_run_waited_leaves_its_checkpoint(
    busy: Runs, store: Store, session: Session
) -> None:
    plan = Plan.from_json(list(retention.plan(store, policy=Policy(last=1)).to_json()))
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    retention.execute(store, plan)
    assert [entry.revision for entry in session.history()] == [4, 2]


def test_setting_a_checkpoint_that_retention_removes_concurrently_raises(
    busy: Runs, store: Store, session: Session
) -> None:
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = whole
        assert sweep(store) == [4]
        return whole(change)

    engine.write = write
    with pytest.raises(RevisionNotFoundError):
        busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 2))
    assert busy.get_run("t", "r").checkpoint is None
    assert protected(session) == []


def test_a_checkpoint_at_the_head_is_protected_though_the_head_moves_concurrently(
    busy: Runs, store: Store, session: Session
) -> None:
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = whole
        grow(store.session("s"), "e")
        return whole(change)

    engine.write = write
    busy.set_state("t", "r", WAITING, checkpoint=SessionCheckpoint("s", 4))
    assert protected(session) == [(4, "run r")]
    assert sweep(store) == [5, 4]


@pytest.mark.leaves_damage
def test_renew_protections_restores_lost_protections(
    busy: Runs, store: Store, session: Session
) -> None:
    store.session("gone").commit(Commit(append=[NodeDraft("x", 1)]))
    places = (("ended", 1, "s"), ("waits", 2, "s"), ("homeless", 1, "gone"))
    for run, revision, name in places:
        busy.create_run("t", run, "agent", "graph")
        busy.set_state("t", run, WAITING, checkpoint=SessionCheckpoint(name, revision))
    busy.set_state("t", "ended", "failed")
    busy.set_state("t", "r", WAITING, checkpoint="elsewhere")
    store.delete_session("gone")
    assert session.unprotect("run waits") == 1
    before = busy.get_run("t", "waits")
    assert [run.id for run in busy.renew_protections()] == ["homeless"]
    assert protected(session) == [(2, "run waits")]
    assert busy.get_run("t", "waits") == before
    assert [run.id for run in busy.renew_protections()] == ["homeless"]
    assert sweep(store) == [4, 2]


# --- together with the commit that makes it ------------------------------------------------------


def step(node: str, **fields: Any) -> Commit:
    return Commit(append=[NodeDraft(node, {"n": node})], **fields)


def test_the_revision_that_a_commit_makes_is_the_checkpoint_of_the_same_write(
    busy: Runs, store: Store, session: Session
) -> None:
    done = busy.commit(
        "s", step("e", expected=4), "t",
        steps.SetState("r", WAITING, COMMITTED), steps.RequestApproval("r", "a", "shell"),
    )  # fmt: skip
    assert done.result.revision == 5
    assert done.steps is not None
    run, approval = done.steps
    assert run == busy.get_run("t", "r")
    assert run.checkpoint == approval.checkpoint == SessionCheckpoint("s", 5)
    assert protected(session) == [(5, "run r")]
    grow(session, "f")
    assert sweep(store) == [6, 5]
    first = busy.commit(
        "fresh", step("x", expected=0), "t", steps.SetState("r", WAITING, COMMITTED)
    )
    assert first.result.revision == 1
    assert protected(store.session("fresh")) == [(1, "run r")]
    assert protected(session) == []


def test_a_refused_commit_applies_no_steps_and_refused_steps_prevent_the_commit(
    busy: Runs, store: Store, session: Session
) -> None:
    before = contents(store)
    with pytest.raises(HeadConflictError):
        busy.commit("s", step("e", expected=3), "t", steps.SetState("r", WAITING, COMMITTED))
    with pytest.raises(RecordNotFoundError):
        busy.commit("s", step("e", expected=4), "t", steps.SetState("none", WAITING))
    with pytest.raises(InvalidInputError, match="expected"):
        busy.commit("s", step("e"), "t", steps.SetState("r", WAITING, COMMITTED))
    with pytest.raises(InvalidInputError, match="COMMITTED"):
        busy.set_state("t", "r", WAITING, checkpoint=COMMITTED)
    with pytest.raises(InvalidInputError, match="also"):
        busy.commit("s", step("e", also=Write()), "t", steps.SetState("r", WAITING))
    assert contents(store) == before


def test_the_steps_of_a_repeated_turn_are_applied_once(
    busy: Runs, store: Store, session: Session
) -> None:
    busy.request_approval("t", "r", "a", "shell", checkpoint="one")
    todo = (
        steps.AppendEvent("r", "once"),
        steps.ResolveApproval("r", "a", "approve"),
        steps.AppendMessage("user", "once"),
    )
    first = busy.commit("s", step("e", turn="turn"), "t", *todo)
    before = contents(store)
    again = busy.commit("s", step("e", turn="turn"), "t", *todo)
    assert again.steps is None
    assert again.result.replayed
    assert again.result.revision == first.result.revision == 5
    assert contents(store) == before
    # Refused for another reason, and the turn was never taken: nothing happens.
    with pytest.raises(RecordConflictError):
        busy.commit("s", step("f", turn="other"), "t", steps.ResolveApproval("r", "a", "approve"))
    with pytest.raises(TurnConflictError):
        busy.commit("s", step("g", turn="turn"), "t", steps.AppendMessage("user", "more"))
    assert contents(store) == before


def test_a_thread_that_changes_during_a_commit_is_read_again(
    busy: Runs, store: Store, session: Session
) -> None:
    engine: Any = store.engine
    whole = engine.write
    failures: list[ConditionFailedError] = []

    def write(change: Write) -> Any:
        engine.write = noticing
        busy.append_message("t", "user", "in between")
        return noticing(change)

    def noticing(change: Write) -> Any:
        try:
            return whole(change)
        except ConditionFailedError as exc:
            failures.append(exc)
            raise

    engine.write = write
    busy.commit("s", step("e", expected=4), "t", steps.AppendMessage("user", "with the commit"))
    engine.write = whole
    assert failures
    assert [message.content for message in busy.messages("t")] == ["in between", "with the commit"]
    assert nodes(session, None)[-1] == "e"
