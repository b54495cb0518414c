"""The part of the session suite about queued work: in order, once, under a lease."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.errors import (
    ClaimLostError,
    InvalidInputError,
    LeaseLostError,
    SessionBindingError,
)
from casstore.session.data import Batch, Claim, Commit, Lease
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    at_once,
    batch_ids,
    enqueue,
    hold,
    message,
    nothing_written,
    revision,
    step,
    take,
)


def _complete(session: Session, lease: Lease, *claims: Claim) -> None:
    session.commit(Commit(lease=lease, completes=claims))


def _join(session: Session, *keys: str | None, **fields: Any) -> list[str]:
    """Queue one joinable batch for each merge key; returns their ids."""
    return [enqueue(session, slot="join", merge_key=key, **fields).id for key in keys]


class QueueConformance(SessionFixtures):
    """Work is queued once, claimed in order, and completed by a commit."""

    # --- enqueue --------------------------------------------------------------------------

    def test_enqueue_returns_a_batch_with_the_arguments(
        self, session: Session, clock: ManualClock
    ) -> None:
        later = clock.now_ms + 5
        batch = session.queue.enqueue(
            [{"text": "one"}, b"two", 3],
            source_key="command:stop:1",
            delivery="earliest",
            slot="join",
            merge_key="key",
            available_at_ms=later,
            batch_id="batch-1",
        )
        assert batch._replace(items=list(batch.items)) == Batch(
            id="batch-1",
            session="alpha",
            seq=batch.seq,
            items=[{"text": "one"}, b"two", 3],
            source_key="command:stop:1",
            delivery="earliest",
            slot="join",
            merge_key="key",
            available_at_ms=later,
            enqueued_at_ms=clock.now_ms,
            fence=0,
            held_by=0,
        )
        assert session.queue.batches() == [batch]

    def test_enqueue_refuses_a_batch_without_items(self, store: Store, session: Session) -> None:
        for key in (None, "source"):
            with nothing_written(store), pytest.raises(InvalidInputError, match="items must be"):
                session.queue.enqueue([], source_key=key)
        assert session.queue.batches() == []

    def test_enqueue_by_default_waits_for_the_turn_and_is_exclusive(
        self, session: Session, clock: ManualClock
    ) -> None:
        batch = enqueue(session)
        assert (batch.delivery, batch.slot, batch.merge_key) == ("after_turn", "exclusive", None)
        assert batch.available_at_ms <= clock.now_ms
        assert batch.id

    def test_enqueue_keeps_the_order_and_touches_no_head(self, session: Session) -> None:
        queued = [enqueue(session, str(n)) for n in range(20)]
        assert batch_ids(session.queue.batches()) == batch_ids(queued)
        assert [batch.seq for batch in queued] == sorted({batch.seq for batch in queued})
        assert len(set(batch_ids(queued))) == 20
        assert session.head() is None

    def test_enqueue_idempotency_the_same_key_gives_the_stored_batch(
        self, store: Store, session: Session
    ) -> None:
        first = enqueue(session, "original", source_key="process:1:event:2:wake")
        with nothing_written(store):
            again = session.queue.enqueue(
                ["other"], source_key="process:1:event:2:wake", slot="join", delivery="earliest"
            )
        assert again == first
        assert list(again.items) == [{"text": "original"}]

    def test_enqueue_idempotency_holds_while_the_batch_is_claimed(self, session: Session) -> None:
        first = enqueue(session, "original", source_key="key")
        take(session, hold(session))
        again = enqueue(session, "other", source_key="key")
        assert (again.id, list(again.items)) == (first.id, [{"text": "original"}])
        assert len(session.queue.batches()) == 1

    @pytest.mark.parametrize("end", ["completed", "cancelled"])
    def test_enqueue_idempotency_the_key_is_free_once_the_work_is_done(
        self, session: Session, end: str
    ) -> None:
        first = enqueue(session, source_key="key")
        if end == "completed":
            lease = hold(session)
            _complete(session, lease, take(session, lease))
        else:
            session.queue.cancel(first.id)
        second = enqueue(session, "new", source_key="key")
        assert second.id != first.id
        assert second.seq > first.seq
        assert list(second.items) == [{"text": "new"}]

    def test_enqueue_idempotency_is_for_each_key_and_session(
        self, session: Session, other: Session
    ) -> None:
        keys = ["key", "key2", None, None]
        queued = [enqueue(session, source_key=key).id for key in keys]
        queued.append(enqueue(other, source_key="key").id)
        assert len(set(queued)) == 5
        assert batch_ids(session.queue.batches()) == queued[:4]
        assert batch_ids(other.queue.batches()) == queued[4:]

    def test_enqueue_idempotency_a_batch_queued_three_times_under_one_key_is_claimed_once(
        self, session: Session
    ) -> None:
        for _ in range(3):
            enqueue(session, source_key="wake")
        lease = hold(session)
        take(session, lease)
        assert session.queue.claim(lease) is None

    def test_enqueue_refuses_the_id_of_a_queued_batch(self, session: Session) -> None:
        first = enqueue(session, batch_id="batch")
        with pytest.raises(InvalidInputError):
            enqueue(session, "other work", batch_id="batch")
        assert session.queue.batches() == [first]
        session.queue.cancel("batch")
        assert enqueue(session, "other work", batch_id="batch").seq > first.seq

    def test_enqueue_idempotency_when_many_race_with_one_key(
        self, store: Store, session: Session
    ) -> None:
        answers = at_once(
            store, lambda handle, n: enqueue(handle.session("alpha"), str(n), source_key="key")
        )
        batches = [answer for answer in answers if isinstance(answer, Batch)]
        assert len(batches) == len(answers), answers
        [stored] = session.queue.batches()
        assert {batch.id for batch in batches} == {stored.id}
        assert {str(batch.items) for batch in batches} == {str(stored.items)}

    # --- the next group ---------------------------------------------------------------------

    def test_boundary_gate_at_a_checkpoint_a_first_batch_for_after_the_turn_blocks_the_queue(
        self, session: Session
    ) -> None:
        late = enqueue(session, delivery="after_turn")
        early = enqueue(session, delivery="earliest")
        lease = hold(session)
        assert session.queue.claim(lease, boundary="checkpoint") is None
        assert batch_ids(take(session, lease, boundary="idle").batches) == [late.id]
        # A claimed batch does not block others.
        assert batch_ids(take(session, lease, boundary="checkpoint").batches) == [early.id]

    def test_boundary_gate_ignores_a_batch_that_is_not_available_yet(
        self, session: Session, clock: ManualClock
    ) -> None:
        enqueue(session, available_at_ms=clock.now_ms + 1)
        early = enqueue(session, delivery="earliest")
        claim = take(session, hold(session), boundary="checkpoint")
        assert batch_ids(claim.batches) == [early.id]

    def test_join_and_exclusive_make_groups_of_equal_neighbours(self, session: Session) -> None:
        a1, a2, b, a3 = _join(session, "a", "a", "b", "a")
        lone = enqueue(session, merge_key="a").id
        [a4] = _join(session, "a")
        [early] = _join(session, "a", delivery="earliest")
        lease = hold(session)
        groups = [batch_ids(take(session, lease, limit=10).batches) for _ in range(6)]
        assert groups == [[a1, a2], [b], [a3], [lone], [a4], [early]]
        assert session.queue.claim(lease, limit=10) is None

    def test_join_takes_no_more_than_the_limit(self, session: Session) -> None:
        queued = _join(session, "a", "a", "a", "a")
        lease = hold(session)
        assert session.queue.claim(lease, limit=0) is None
        assert batch_ids(take(session, lease, limit=3).batches) == queued[:3]
        assert batch_ids(take(session, lease, limit=3).batches) == queued[3:]

    def test_join_of_150_batches_is_one_group(self, session: Session) -> None:
        queued = _join(session, *["a"] * 150)
        assert batch_ids(take(session, hold(session), limit=200).batches) == queued

    def test_exclusive_work_is_claimed_one_by_one(self, session: Session) -> None:
        queued = [enqueue(session, merge_key="a").id for _ in range(3)]
        lease = hold(session)
        groups = [batch_ids(take(session, lease, limit=10).batches) for _ in range(3)]
        assert groups == [[batch] for batch in queued]

    def test_fault_03_work_without_a_merge_key_is_never_joined(self, session: Session) -> None:
        queued = _join(session, None, None)
        lease = hold(session)
        groups = [batch_ids(take(session, lease, limit=10).batches) for _ in range(2)]
        assert groups == [[batch] for batch in queued]

    def test_availability_a_batch_is_skipped_until_its_available_at_ms(
        self, session: Session, clock: ManualClock
    ) -> None:
        later = enqueue(session, available_at_ms=clock.now_ms + MINUTE_MS)
        now = enqueue(session, available_at_ms=clock.now_ms)
        lease = hold(session, ttl_ms=10 * MINUTE_MS)
        assert batch_ids(take(session, lease).batches) == [now.id]
        clock.now_ms = later.available_at_ms - 1
        assert session.queue.claim(lease) is None
        clock.now_ms += 1
        assert batch_ids(take(session, lease).batches) == [later.id]

    # --- claims ---------------------------------------------------------------------------

    def test_a_claim_has_its_batches_and_its_owner(self, session: Session) -> None:
        batch = enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        assert (claim.session, claim.fencing) == ("alpha", lease.fencing)
        assert claim.batches == (batch._replace(fence=1, held_by=lease.fencing),)
        assert session.queue.batches() == list(claim.batches)
        session.queue.verify(claim)

    def test_a_claim_needs_a_live_lease_on_the_session(
        self, store: Store, session: Session, other: Session, clock: ManualClock
    ) -> None:
        enqueue(session)
        lease = hold(session)
        for wrong in (lease._replace(token=b"x" * 16), lease._replace(fencing=9)):
            with nothing_written(store), pytest.raises(LeaseLostError):
                session.queue.claim(wrong)
        foreign = hold(other)
        with nothing_written(store), pytest.raises(SessionBindingError):
            session.queue.claim(foreign)
        clock.now_ms = lease.expires_at_ms
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.queue.claim(lease)

    def test_sessions_do_not_see_each_others_queue(self, session: Session, other: Session) -> None:
        mine, theirs = enqueue(session), enqueue(other)
        assert batch_ids(session.queue.batches()) == [mine.id]
        assert batch_ids(take(other, hold(other), limit=10).batches) == [theirs.id]
        assert session.queue.cancel(theirs.id) is None
        assert batch_ids(session.queue.pending()) == [mine.id]

    def test_exactly_one_of_many_racing_claims_gets_a_batch(
        self, store: Store, session: Session
    ) -> None:
        enqueue(session)
        lease = hold(session)
        answers = at_once(store, lambda handle, _: handle.session("alpha").queue.claim(lease))
        [claim] = [answer for answer in answers if isinstance(answer, Claim)]
        assert [answer for answer in answers if isinstance(answer, Exception)] == []
        session.queue.verify(claim)
        assert claim.batches[0].fence == 1

    @pytest.mark.parametrize("end", ["expired", "released", "abandoned"])
    def test_claim_fencing_abandoned_work_is_claimed_again_and_the_old_claim_is_refused(
        self, session: Session, clock: ManualClock, end: str
    ) -> None:
        batch = enqueue(session)
        lease = hold(session)
        old = take(session, lease)
        if end == "expired":
            clock.now_ms = lease.expires_at_ms
        elif end == "released":
            session.release_lease(lease)
        else:
            assert session.queue.abandon(old) == 1
        assert batch_ids(session.queue.pending()) == [batch.id]
        if end != "abandoned":
            lease = hold(session, "successor")
        new = take(session, lease)
        assert new.batches[0].fence == 2
        assert new.batches[0].held_by == lease.fencing
        with pytest.raises(ClaimLostError) as caught:
            session.queue.verify(old)
        assert (caught.value.session, caught.value.batch) == ("alpha", batch.id)
        with pytest.raises(ClaimLostError):
            _complete(session, lease, old)
        assert session.queue.abandon(old) == 0
        session.queue.verify(new)
        _complete(session, lease, new)
        assert session.queue.batches() == []

    def test_claim_fencing_every_call_refuses_a_claim_of_an_expired_lease(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        batch = enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        clock.now_ms = lease.expires_at_ms
        # No other worker has claimed it yet, but this claim has expired.
        with pytest.raises(ClaimLostError):
            session.queue.verify(claim)
        with nothing_written(store), pytest.raises(ClaimLostError):
            step(session, "a", completes=[claim])
        assert batch_ids(session.queue.pending()) == [batch.id]

    def test_abandon_returns_all_batches_to_the_queue_once(
        self, store: Store, session: Session
    ) -> None:
        queued = _join(session, "a", "a")
        claim = take(session, hold(session), limit=2)
        assert session.queue.pending() == []
        assert session.queue.abandon(claim) == 2
        assert batch_ids(session.queue.pending()) == queued
        with nothing_written(store):
            assert session.queue.abandon(claim) == 0
        assert [batch.fence for batch in session.queue.batches()] == [1, 1]

    def test_exact_claim_must_start_at_the_head_of_the_queue(self, session: Session) -> None:
        first, second, third = _join(session, "a", "a", "b")
        lease = hold(session)
        for wrong in ([second], [second, first], [first, third], [third], ["unknown"], []):
            assert session.queue.claim_exactly(lease, wrong) is None, wrong
            assert batch_ids(session.queue.pending()) == [first, second, third]
        claim = session.queue.claim_exactly(lease, [first, second])
        assert claim is not None
        assert batch_ids(claim.batches) == [first, second]
        session.queue.verify(claim)

    def test_exact_claim_may_take_the_beginning_of_a_group(self, session: Session) -> None:
        first, second = _join(session, "a", "a")
        lease = hold(session)
        for batch in (first, second):
            claim = session.queue.claim_exactly(lease, [batch])
            assert claim is not None
            assert batch_ids(claim.batches) == [batch]

    def test_exact_claim_obeys_the_boundary_and_the_lease(self, session: Session) -> None:
        batch = enqueue(session)
        lease = hold(session)
        assert session.queue.claim_exactly(lease, [batch.id], boundary="checkpoint") is None
        with pytest.raises(LeaseLostError):
            session.queue.claim_exactly(lease._replace(token=b"x" * 16), [batch.id])

    # --- cancel, lists and completion -----------------------------------------------------------

    def test_cancel_removes_unclaimed_batches_and_returns_them(self, session: Session) -> None:
        kept, gone = enqueue(session), enqueue(session, "gone")
        assert session.queue.cancel(gone.id) == gone
        assert session.queue.cancel(gone.id) is None
        assert session.queue.cancel("unknown") is None
        assert session.queue.batches() == [kept]

    def test_cancel_leaves_claimed_work_until_it_is_released(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        batches = [enqueue(session), enqueue(session)]
        lease = hold(session)
        claims = [take(session, lease), take(session, lease)]
        with nothing_written(store):
            assert session.queue.cancel(batches[0].id) is None
        session.queue.verify(claims[0])
        session.queue.abandon(claims[0])
        clock.now_ms = lease.expires_at_ms
        assert [session.queue.cancel(batch.id) is None for batch in batches] == [False, False]
        assert session.queue.batches() == []

    def test_pending_list_omits_claimed_batches(self, session: Session, clock: ManualClock) -> None:
        held, waiting = enqueue(session), enqueue(session)
        future = enqueue(session, available_at_ms=clock.now_ms + 10 * MINUTE_MS)
        lease = hold(session)
        take(session, lease)
        every = [held.id, waiting.id, future.id]
        assert batch_ids(session.queue.batches()) == every
        assert batch_ids(session.queue.pending()) == every[1:]
        clock.now_ms = lease.expires_at_ms
        assert batch_ids(session.queue.pending()) == every

    def test_work_is_completed_by_the_commit_and_by_nothing_else(self, session: Session) -> None:
        first, second = enqueue(session), enqueue(session)
        lease = hold(session)
        claims = [take(session, lease), take(session, lease)]
        session.commit(Commit(append=[message("a")], lease=lease))
        assert batch_ids(session.queue.batches()) == [first.id, second.id]
        _complete(session, lease, *claims)
        assert session.queue.batches() == []
        with pytest.raises(ClaimLostError):
            _complete(session, lease, claims[0])
        with pytest.raises(ClaimLostError):
            session.queue.verify(claims[0])
        assert session.queue.abandon(claims[0]) == 0

    def test_fault_01_an_expired_lease_or_claim_cannot_complete_work(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        clock.now_ms = lease.expires_at_ms
        with nothing_written(store):
            with pytest.raises(LeaseLostError):
                _complete(session, lease, claim)
            with pytest.raises(ClaimLostError):
                session.commit(Commit(completes=[claim]))

    def test_fault_02_completion_compares_ids_and_not_their_number(
        self, store: Store, session: Session
    ) -> None:
        mine = enqueue(session)
        waiting = enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        unknown = mine._replace(id="unknown", fence=1, held_by=lease.fencing)
        for wrong in (waiting, unknown, waiting._replace(fence=1, held_by=lease.fencing)):
            with nothing_written(store), pytest.raises(ClaimLostError):
                _complete(session, lease, claim._replace(batches=(wrong,)))
        session.queue.verify(claim)

    def test_fault_11_a_renewed_lease_keeps_its_claims(
        self, session: Session, clock: ManualClock
    ) -> None:
        enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        for _ in range(5):
            clock.now_ms += MINUTE_MS - 1
            lease = session.renew_lease(lease, MINUTE_MS)
            assert session.queue.claim(lease) is None
            assert session.queue.pending() == []
            session.queue.verify(claim)
        _complete(session, lease, claim)
        assert (session.queue.batches(), revision(session)) == ([], 1)
