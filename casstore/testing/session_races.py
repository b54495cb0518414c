"""The part of the session suite about races: another writer commits between read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import (
    AttachmentStateError,
    CasstoreError,
    ClaimLostError,
    DuplicateNodeError,
    HeadConflictError,
    LeaseHeldError,
    LeaseLostError,
    NameTakenError,
    SessionDeletedError,
    SessionExistsError,
    TurnConflictError,
    UnknownParentError,
)
from casstore.session.data import Commit, Lease, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    batch_ids,
    contents_of,
    enqueue,
    full,
    hold,
    interrupted,
    message,
    nothing_written,
    path,
    revision,
    step,
    take,
)

# What another writer does between the read and the write of a commit that appends ``b`` to ``a``,
# fields of that commit, and the error that it must get.
BETWEEN: dict[
    str, tuple[Callable[[Store, Session], object], dict[str, Any], type[CasstoreError]]
] = {
    "a commit": (lambda _, s: step(s, "other"), {"expected": 1}, HeadConflictError),
    "the same node": (lambda _, s: step(s, "b"), {}, DuplicateNodeError),
    "the same turn": (
        lambda _, s: step(s, "other", turn="turn"),
        {"turn": "turn"},
        TurnConflictError,
    ),
    "a lease": (lambda _, s: hold(s), {}, LeaseHeldError),
    "a hidden parent": (
        lambda _, s: s.tombstone(["a"]),
        {"append": [message("b", parent="a")]},
        UnknownParentError,
    ),
    "a condemned attachment": (
        lambda _, s: s.attachments.condemn("file"),
        {"attachments": ["file"]},
        AttachmentStateError,
    ),
    "the end": (lambda store, _: store.delete_session("alpha"), {}, SessionDeletedError),
}


# Functions that write a row of a session, given the session and a lease on it.
WRITERS: dict[str, Callable[[Session, Lease], object]] = {
    "commit": lambda s, lease: s.commit(Commit(append=[message("b")], lease=lease)),
    "rewind": lambda s, lease: s.rewind(1, lease=lease),
    "tombstone": lambda s, _: s.tombstone(["a"]),
    "rename": lambda s, _: s.rename("another name"),
    "label": lambda s, _: s.label("mark"),
    "unlabel": lambda s, _: s.unlabel("known"),
    "renew_lease": lambda s, lease: s.renew_lease(lease, MINUTE_MS),
    "queue.enqueue": lambda s, _: enqueue(s),
    "queue.claim": lambda s, lease: s.queue.claim(lease),
    "queue.cancel": lambda s, _: s.queue.cancel("batch"),
    "attachments.intend": lambda s, _: s.attachments.intend("new", uri="file:///new"),
    "attachments.put": lambda s, _: s.attachments.put(b"new"),
    "attachments.commit": lambda s, _: s.attachments.commit(["file"]),
    "attachments.condemn": lambda s, _: s.attachments.condemn("file"),
}


class RaceConformance(SessionFixtures):
    """A step is checked against the state at its write, not against the state that was read."""

    @pytest.mark.parametrize("event", BETWEEN)
    def test_atomic_commit_is_refused_after_a_concurrent_change_that_breaks_it(
        self, store: Store, session: Session, event: str
    ) -> None:
        step(session, "a")
        session.attachments.intend("file", uri="file:///file")
        happen, fields, error = BETWEEN[event]
        change = Commit(append=[message("b")])._replace(**fields)
        late = interrupted(store, before=lambda: happen(store, session)).session("alpha")
        with pytest.raises(error):
            late.commit(change)
        # A retry is refused as well, and writes nothing.
        with nothing_written(store), pytest.raises(error):
            session.commit(change)

    def test_atomic_commit_is_refused_when_its_lease_runs_out_on_the_way(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        lease = hold(session)

        def pass_time() -> None:
            clock.now_ms = lease.expires_at_ms

        late = interrupted(store, before=pass_time).session("alpha")
        with nothing_written(store), pytest.raises(LeaseLostError):
            late.commit(Commit(append=[message("a")], lease=lease))

    def test_atomic_commit_is_refused_when_its_work_is_abandoned_meanwhile(
        self, store: Store, session: Session
    ) -> None:
        batch = enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        late = interrupted(store, before=lambda: session.queue.abandon(claim)).session("alpha")
        with pytest.raises(ClaimLostError):
            late.commit(Commit(append=[message("a")], lease=lease, completes=[claim]))
        assert session.head() is None
        assert batch_ids(session.queue.pending()) == [batch.id]

    def test_rewind_is_based_on_a_concurrent_commit(self, store: Store, session: Session) -> None:
        step(session, "a")
        step(session, "b")
        late = interrupted(store, before=lambda: step(session, "c")).session("alpha")
        assert late.rewind(1).revision == 4
        assert path(session) == ["a"]
        assert path(session, 3) == ["a", "b", "c"]

    def test_rewind_is_refused_when_its_lease_runs_out_on_the_way(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        step(session, "a")
        step(session, "b")
        lease = hold(session)

        def pass_time() -> None:
            clock.now_ms = lease.expires_at_ms

        late = interrupted(store, before=pass_time).session("alpha")
        with nothing_written(store), pytest.raises(LeaseLostError):
            late.rewind(1, lease=lease)

    def test_rewind_is_refused_when_another_owner_claims_the_lease_meanwhile(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        step(session, "b")
        late = interrupted(store, before=lambda: hold(session)).session("alpha")
        with pytest.raises(LeaseHeldError):
            late.rewind(1)
        assert path(session) == ["a", "b"]

    def test_factory_the_first_commit_does_not_restore_a_session_deleted_concurrently(
        self, store: Store
    ) -> None:
        store.create_session("alpha")
        late = interrupted(store, before=lambda: store.delete_session("alpha")).session("alpha")
        with pytest.raises(SessionDeletedError):
            step(late, "a")
        assert list(store.sessions()) == []
        assert contents_of(store).rows["heads"] == []

    @pytest.mark.parametrize("writer", WRITERS)
    def test_factory_no_row_is_written_for_a_session_deleted_concurrently(
        self, store: Store, session: Session, writer: str
    ) -> None:
        step(session, "a")
        enqueue(session, batch_id="batch")
        session.attachments.intend("file", digest=store.put_blob(b"file"))
        session.label("known")
        lease = hold(session)
        late = interrupted(store, before=lambda: store.delete_session("alpha")).session("alpha")
        # The holder of a lease may get LeaseLostError first.
        with pytest.raises((SessionDeletedError, LeaseLostError)):
            WRITERS[writer](late, lease)
        rows = contents_of(store).rows
        for table in ("attachments", "heads", "history", "leases", "queue", "receipts", "sessions"):
            assert rows[table] == [], table

    def test_factory_an_id_deleted_in_between_is_not_created_again(self, store: Store) -> None:
        def delete() -> None:
            store.create_session("alpha")
            store.delete_session("alpha")

        with pytest.raises(SessionDeletedError):
            interrupted(store, before=delete).create_session("alpha")
        assert list(store.sessions()) == []

    def test_no_expectation_commit_follows_a_concurrent_commit(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a", usage=[Usage("main", "large", 1)])
        spent = [Usage("main", "large", 1)]
        late = interrupted(store, before=lambda: step(session, "other", usage=spent)).session(
            "alpha"
        )
        assert step(late, "b", usage=spent).revision == 3
        assert path(session) == full(session) == ["a", "other", "b"]
        assert session.usage() == (Usage("main", "large", 3),)

    def test_replay_finds_the_original_committed_concurrently(
        self, store: Store, session: Session
    ) -> None:
        late = interrupted(store, before=lambda: step(session, "a", turn="turn")).session("alpha")
        result = step(late, message("x", "this is a"), turn="turn")
        assert (result.replayed, result.revision, result.nodes) == (True, 1, ("a",))
        assert full(session) == ["a"]

    def test_lease_exclusivity_holds_against_a_concurrent_claim(
        self, store: Store, session: Session
    ) -> None:
        late = interrupted(store, before=lambda: hold(session)).session("alpha")
        assert late.claim_lease("late", MINUTE_MS) is None

    def test_claim_fencing_holds_against_a_concurrent_claim(
        self, store: Store, session: Session
    ) -> None:
        first, second = enqueue(session), enqueue(session)
        lease = hold(session)
        late = interrupted(store, before=lambda: take(session, lease)).session("alpha")
        assert batch_ids(take(late, lease).batches) == [second.id]
        assert first.id not in batch_ids(session.queue.pending())

    def test_cancel_leaves_a_batch_claimed_concurrently(
        self, store: Store, session: Session
    ) -> None:
        batch = enqueue(session)
        lease = hold(session)
        late = interrupted(store, before=lambda: take(session, lease)).session("alpha")
        assert late.queue.cancel(batch.id) is None
        assert batch_ids(session.queue.batches()) == [batch.id]

    def test_enqueue_idempotency_holds_against_a_concurrent_enqueue(
        self, store: Store, session: Session
    ) -> None:
        late = interrupted(
            store, before=lambda: enqueue(session, "first", source_key="key")
        ).session("alpha")
        assert list(enqueue(late, "second", source_key="key").items) == [{"text": "first"}]
        assert len(session.queue.batches()) == 1

    def test_enqueue_returns_the_batch_though_it_is_cancelled_at_once(
        self, store: Store, session: Session
    ) -> None:
        def take_away() -> None:
            [batch] = session.queue.batches()
            assert session.queue.cancel(batch.id) is not None

        batch = enqueue(interrupted(store, after=take_away).session("alpha"), "gone")
        assert list(batch.items) == [{"text": "gone"}]
        assert session.queue.batches() == []

    def test_attachment_wal_intend_returns_the_attachment_though_it_is_forgotten_at_once(
        self, store: Store, session: Session
    ) -> None:
        late = interrupted(store, after=lambda: session.attachments.forget("file")).session("alpha")
        assert late.attachments.intend("file", uri="file:///file").state == "intent"
        assert session.attachments.find("file") is None

    def test_tombstone_hides_the_node_in_a_concurrent_commit(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a", "b")
        late = interrupted(store, before=lambda: step(session, "c")).session("alpha")
        assert late.tombstone(["a"]).hidden == ("a",)
        assert path(session) == ["b", "c"]
        assert revision(session) == 2

    def test_fork_refuses_a_target_created_concurrently(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        late = interrupted(store, before=lambda: step(other, "b"))
        with pytest.raises(SessionExistsError):
            late.fork("alpha", "beta")
        assert path(other) == ["b"]

    def test_pins_do_not_replace_a_tag_set_concurrently(self, store: Store) -> None:
        one, two = store.put_blob(b"one"), store.put_blob(b"two")
        late = interrupted(store, before=lambda: store.tag("name", one))
        with pytest.raises(NameTakenError):
            late.tag("name", two)
        pin = store.find_pin("name")
        assert pin is not None
        assert pin.digest == one

    def test_pins_deleted_twice_concurrently_are_reported_deleted_once(self, store: Store) -> None:
        store.tag("name", store.put_blob(b"one"))
        late = interrupted(store, before=lambda: store.unpin("name"))
        assert late.unpin("name") is False
