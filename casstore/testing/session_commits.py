"""The part of the session suite about commits: binding, checks, atomicity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import (
    AttachmentNotFoundError,
    AttachmentStateError,
    CasstoreError,
    ClaimLostError,
    ComponentNotFoundError,
    CycleError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    InvalidValueError,
    LeaseHeldError,
    LeaseLostError,
    SessionBindingError,
    TurnConflictError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.format.canonical import Link
from casstore.session.data import Checkpoint, Claim, Commit, CommitResult, Lease, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ABSENT, ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    THREADS,
    SessionFixtures,
    at_once,
    enqueue,
    full,
    hold,
    load,
    message,
    nothing_written,
    path,
    revision,
    step,
    take,
)


def _prepare_everything(session: Session) -> Commit:
    """A session at revision 1, and a commit that uses every feature of a commit."""
    step(session, "a", usage=[Usage("main", "large", 10, 5)], turn="taken")
    lease = hold(session)
    enqueue(session)
    session.attachments.intend("picture", uri="file:///picture")
    session.attachments.intend("refused", uri="file:///refused")
    session.attachments.condemn("refused")
    return Commit(
        append=[message("b")],
        checkpoint=Checkpoint(turn_state={"turn_index": 1}, tool_state={"tools": ["saw"]}),
        expected=1,
        lease=lease,
        release=True,
        turn="turn-1",
        label="after turn 1",
        usage=[Usage("main", "large", 1, 2)],
        completes=[take(session, lease)],
        attachments=["picture"],
    )


def _foreign_lease(change: Commit) -> Lease:
    assert isinstance(change.lease, Lease)
    return change.lease._replace(token=bytes(len(change.lease.token)))


def _lost_claim(change: Commit) -> Claim:
    [claim] = change.completes
    [batch] = claim.batches
    return claim._replace(batches=(batch._replace(fence=batch.fence + 1),))


# Faults of a commit: how to produce one, and the error that it raises.
SPOILT: dict[str, tuple[Callable[[Commit], dict[str, Any]], type[CasstoreError]]] = {
    "it is for another session": (lambda _: {"session": "beta"}, SessionBindingError),
    "its turn was committed": (lambda _: {"turn": "taken"}, TurnConflictError),
    "it has no lease": (lambda _: {"lease": None, "release": False}, LeaseHeldError),
    "it has a foreign lease": (lambda c: {"lease": _foreign_lease(c)}, LeaseLostError),
    "it expects no head": (lambda _: {"expected": 0}, HeadConflictError),
    "it expects a later head": (lambda _: {"expected": 2}, HeadConflictError),
    "it completes lost work": (lambda c: {"completes": [_lost_claim(c)]}, ClaimLostError),
    "an attachment is unknown": (
        lambda _: {"attachments": ["picture", "unknown"]},
        AttachmentNotFoundError,
    ),
    "an attachment is condemned": (
        lambda _: {"attachments": ["picture", "refused"]},
        AttachmentStateError,
    ),
    "a node is there": (lambda _: {"append": [message("b"), message("a")]}, DuplicateNodeError),
    "a node is twice in it": (
        lambda _: {"append": [message("b"), message("b")]},
        DuplicateNodeError,
    ),
    "a parent is unknown": (
        lambda _: {"append": [message("b"), message("c", parent="unknown")]},
        UnknownParentError,
    ),
    "its leaf is unknown": (lambda _: {"leaf": "unknown"}, UnknownLeafError),
    "its nodes go in a circle": (
        lambda _: {"append": [message("b", parent="c"), message("c", parent="b")]},
        CycleError,
    ),
    "a component is missing": (
        lambda _: {"checkpoint": Checkpoint(tool_state=Link(ABSENT))},
        ComponentNotFoundError,
    ),
    "a payload cannot be stored": (
        lambda _: {"append": [message("b")._replace(payload=object())]},
        InvalidValueError,
    ),
    "a component cannot be stored": (
        lambda _: {"checkpoint": Checkpoint(tool_state=object())},
        InvalidValueError,
    ),
    "it uses less than nothing": (
        lambda _: {"usage": [Usage("main", "large", -1)]},
        InvalidInputError,
    ),
    "it appends and replaces": (lambda _: {"replace": [message("r")]}, InvalidInputError),
}


class CommitConformance(SessionFixtures):
    """A commit happens completely, or not at all with an error."""

    # --- binding ------------------------------------------------------------------

    def test_binding_a_commit_may_name_the_session_it_is_for(self, session: Session) -> None:
        step(session, "a", session="alpha")
        assert path(session) == ["a"]

    def test_binding_a_commit_for_another_session_is_refused_with_both_ids(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        with nothing_written(store), pytest.raises(SessionBindingError) as caught:
            step(session, "b", session="beta")
        assert (caught.value.bound, caught.value.attempted) == ("alpha", "beta")

    def test_binding_a_lease_on_another_session_is_refused_with_both_ids(
        self, store: Store, session: Session, other: Session
    ) -> None:
        lease = hold(other)
        with nothing_written(store), pytest.raises(SessionBindingError) as caught:
            session.commit(Commit(append=[message("a")], lease=lease))
        assert (caught.value.bound, caught.value.attempted) == ("alpha", "beta")

    def test_binding_claimed_work_of_another_session_cannot_be_completed(
        self, store: Store, session: Session, other: Session
    ) -> None:
        enqueue(other)
        claim = take(other, hold(other))
        with nothing_written(store), pytest.raises(SessionBindingError) as caught:
            step(session, "a", completes=[claim])
        assert (caught.value.bound, caught.value.attempted) == ("alpha", "beta")

    def test_binding_sessions_of_one_store_know_nothing_of_each_other(
        self, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", usage=[Usage("main", "large", 1)])
        step(other, "a", message("c", parent=None))
        assert (path(session), path(other)) == (["a", "b"], ["c"])
        assert other.usage() == ()
        with pytest.raises(UnknownParentError):
            step(other, message("d", parent="b"))

    # --- all or nothing -------------------------------------------------------------

    def test_atomic_commit_does_all_of_it_at_once(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        change = _prepare_everything(session)
        clock.now_ms += 5
        result = session.commit(change)
        assert result == CommitResult(2, result.manifest, "b", ("b",), replayed=False)
        state = load(session)
        assert state.head == session.head()
        assert (state.head.revision, state.head.manifest) == (2, result.manifest)
        assert (state.head.leaf, state.head.node_count) == ("b", 2)
        assert (state.head.turn, state.head.committed_at_ms) == ("turn-1", clock.now_ms)
        assert state.checkpoint.tool_state == {"tools": ["saw"]}
        assert session.usage() == (Usage("main", "large", 11, 7),)
        assert session.queue.batches() == []
        picture = session.attachments.find("picture")
        assert picture is not None
        assert (picture.state, picture.committed_at_ms) == ("committed", clock.now_ms)
        assert session.entry("after turn 1").revision == 2
        assert session.claim_lease("next", MINUTE_MS) is not None
        assert result.manifest in store

    @pytest.mark.parametrize("fault", SPOILT)
    def test_atomic_commit_that_fails_leaves_everything_as_it_was(
        self, store: Store, session: Session, fault: str
    ) -> None:
        change = _prepare_everything(session)
        spoil, error = SPOILT[fault]
        with nothing_written(store), pytest.raises(error):
            session.commit(change._replace(**spoil(change)))
        # Nothing left behind prevents the corrected commit.
        assert session.commit(change).revision == 2

    def test_atomic_commit_with_a_stale_completion_makes_no_head_and_keeps_the_work(
        self, session: Session, clock: ManualClock
    ) -> None:
        batch = enqueue(session)
        claim = take(session, hold(session))
        clock.now_ms += MINUTE_MS
        lease = hold(session, "successor")
        with pytest.raises(ClaimLostError) as caught:
            session.commit(Commit(append=[message("a")], lease=lease, completes=[claim]))
        assert caught.value.batch == batch.id
        assert session.head() is None
        assert [kept.id for kept in session.queue.batches()] == [batch.id]
        session.renew_lease(lease, MINUTE_MS)

    def test_atomic_commit_reports_the_first_check_that_fails(self, session: Session) -> None:
        good = _prepare_everything(session)
        missing = Checkpoint(tool_state=Link(ABSENT))
        change = good._replace(
            append=[message("a")],
            checkpoint=missing._replace(turn_state=object()),
            expected=0,
            lease=None,
            release=False,
            turn="taken",
            completes=[_lost_claim(good)],
            attachments=["unknown"],
        )
        # Each error in order, and the correction that gets past it.
        ladder: list[tuple[type[CasstoreError], dict[str, Any]]] = [
            (InvalidValueError, {"checkpoint": missing, "session": "beta"}),
            (SessionBindingError, {"session": good.session}),
            (TurnConflictError, {"turn": good.turn}),
            (LeaseHeldError, {"lease": good.lease, "release": True}),
            (HeadConflictError, {"expected": good.expected}),
            (ClaimLostError, {"completes": good.completes}),
            (AttachmentNotFoundError, {"attachments": good.attachments}),
            (DuplicateNodeError, {"append": good.append}),
            (ComponentNotFoundError, {"checkpoint": good.checkpoint}),
        ]
        for error, mended in ladder:
            with pytest.raises(error):
                session.commit(change)
            change = change._replace(**mended)
        assert session.commit(change).revision == 2

    def test_atomic_commit_of_nothing_is_a_revision_too(
        self, session: Session, clock: ManualClock
    ) -> None:
        assert session.head() is None
        assert session.load() is None
        assert step(session).revision == 1
        head = session.head()
        assert head is not None
        assert (head.leaf, head.node_count, head.turn, head.origin) == (None, 0, None, None)
        assert (head.created_at_ms, head.committed_at_ms) == (clock.now_ms, clock.now_ms)
        assert path(session) == full(session) == []

    # --- compare and swap -------------------------------------------------------------

    def test_head_cas_an_absent_head_is_revision_0_and_each_commit_adds_one(
        self, session: Session
    ) -> None:
        for expected in range(4):
            assert step(session, f"n{expected}", expected=expected).revision == expected + 1
        assert revision(session) == 4

    @pytest.mark.parametrize("expected", [0, 1, 3])
    def test_head_cas_another_revision_is_refused_with_both_numbers(
        self, store: Store, session: Session, expected: int
    ) -> None:
        step(session, "a")
        step(session, "b")
        with nothing_written(store), pytest.raises(HeadConflictError) as caught:
            step(session, "c", expected=expected)
        error = caught.value
        assert (error.session, error.expected, error.actual) == ("alpha", expected, 2)

    def test_head_cas_a_session_without_head_is_refused_as_revision_0(
        self, session: Session
    ) -> None:
        with pytest.raises(HeadConflictError) as caught:
            step(session, "a", expected=1)
        assert (caught.value.expected, caught.value.actual) == (1, 0)

    def test_head_cas_one_of_many_that_race_for_revision_1_wins(
        self, store: Store, session: Session
    ) -> None:
        answers = at_once(
            store, lambda handle, n: step(handle.session("alpha"), f"n{n}", expected=0)
        )
        won = [answer for answer in answers if isinstance(answer, CommitResult)]
        lost = [answer for answer in answers if type(answer) is HeadConflictError]
        assert (len(won), len(lost)) == (1, THREADS - 1)
        assert won[0].revision == revision(session) == 1
        assert full(session) == list(won[0].nodes)

    def test_no_expectation_commit_follows_whatever_is_there(self, session: Session) -> None:
        assert step(session, "a", expected=None).revision == 1
        assert step(session, "b", expected=None).revision == 2
        assert path(session) == ["a", "b"]

    def test_no_expectation_commit_is_checked_for_everything_else(self, session: Session) -> None:
        step(session, "a")
        lease = hold(session)
        with pytest.raises(LeaseHeldError):
            session.commit(Commit(append=[message("b")]))
        session.release_lease(lease)
        with pytest.raises(DuplicateNodeError):
            step(session, "a")
        assert revision(session) == 1

    def test_no_expectation_commits_that_race_all_succeed(
        self, store: Store, session: Session
    ) -> None:
        spent = Usage("main", "large", 1)

        def work(handle: Store, number: int) -> list[int]:
            return [
                step(handle.session("alpha"), f"{number}.{n}", usage=[spent]).revision
                for n in range(5)
            ]

        answers = at_once(store, work)
        revisions: list[int] = []
        for answer in answers:
            assert isinstance(answer, list), answer
            revisions += answer
        total = THREADS * 5
        assert sorted(revisions) == list(range(1, total + 1))
        assert len(path(session)) == len(set(full(session))) == total
        assert session.usage() == (Usage("main", "large", total),)
