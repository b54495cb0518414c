"""The part of the session suite about leases: one writer at a time, no late writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from casstore.errors import (
    InvalidInputError,
    LeaseHeldError,
    LeaseLostError,
    SessionBindingError,
)
from casstore.session.data import Commit, Lease
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    THREADS,
    SessionFixtures,
    at_once,
    hold,
    message,
    nothing_written,
    path,
    revision,
    step,
)

# Leases with one wrong field.
TAMPERED: dict[str, Callable[[Lease], Lease]] = {
    "owner": lambda lease: lease._replace(owner=lease.owner + "x"),
    "token": lambda lease: lease._replace(token=bytes(byte ^ 1 for byte in lease.token)),
    "empty token": lambda lease: lease._replace(token=b""),
    "newer fencing": lambda lease: lease._replace(fencing=lease.fencing + 1),
    "older fencing": lambda lease: lease._replace(fencing=lease.fencing - 1),
}


class LeaseConformance(SessionFixtures):
    """A lease is exclusive while it is valid, and useless afterwards."""

    # --- exclusivity ----------------------------------------------------------------------

    @pytest.mark.parametrize("owner", ["worker", "successor"])
    def test_lease_exclusivity_a_second_claim_fails_even_for_the_owner(
        self, session: Session, clock: ManualClock, owner: str
    ) -> None:
        hold(session)
        assert session.claim_lease(owner, MINUTE_MS) is None
        clock.now_ms += MINUTE_MS - 1
        assert session.claim_lease(owner, MINUTE_MS) is None
        clock.now_ms += 1
        assert session.claim_lease(owner, MINUTE_MS) is not None

    def test_lease_exclusivity_a_lease_has_its_owner_and_expiry(
        self, session: Session, clock: ManualClock
    ) -> None:
        lease = hold(session, "worker", 1234)
        assert (lease.session, lease.owner) == ("alpha", "worker")
        assert lease.claimed_at_ms == clock.now_ms
        assert lease.expires_at_ms == clock.now_ms + 1234
        assert lease.token

    def test_lease_exclusivity_applies_to_each_session_separately(
        self, session: Session, other: Session
    ) -> None:
        assert hold(session).token != hold(other).token

    def test_lease_exclusivity_exactly_one_of_many_racing_claims_succeeds(
        self, store: Store, session: Session
    ) -> None:
        answers = at_once(
            store, lambda handle, n: handle.session("alpha").claim_lease(f"worker {n}", MINUTE_MS)
        )
        [lease] = [answer for answer in answers if isinstance(answer, Lease)]
        assert answers.count(None) == THREADS - 1
        session.renew_lease(lease, MINUTE_MS)

    # --- fencing --------------------------------------------------------------------------

    def test_fencing_counts_every_lease_and_never_goes_back(
        self, session: Session, clock: ManualClock
    ) -> None:
        seen = [hold(session)]
        session.release_lease(seen[-1])
        seen.append(hold(session, "successor"))
        clock.now_ms += MINUTE_MS
        seen.append(hold(session))
        session.commit(Commit(append=[message("a")], lease=seen[-1], release=True))
        seen.append(hold(session, ttl_ms=1))
        clock.now_ms += 1
        seen.append(hold(session))
        first = seen[0].fencing
        assert first > 0
        assert [lease.fencing for lease in seen] == list(range(first, first + 5))
        assert len({lease.token for lease in seen}) == 5

    def test_an_invalid_lease_duration_is_refused(self, store: Store, session: Session) -> None:
        lease = hold(session)
        for ttl_ms in (0, -1, 1.5, True, None):
            with nothing_written(store):
                with pytest.raises(InvalidInputError, match="ttl_ms"):
                    store.session("other").claim_lease("worker", ttl_ms)  # type: ignore[arg-type]
                with pytest.raises(InvalidInputError, match="ttl_ms"):
                    session.renew_lease(lease, ttl_ms)  # type: ignore[arg-type]
        session.release_lease(session.renew_lease(lease, 1))

    def test_fencing_a_lease_is_over_when_its_time_is_up(
        self, session: Session, clock: ManualClock
    ) -> None:
        lease = hold(session, ttl_ms=1)
        clock.now_ms += 1
        with pytest.raises(LeaseLostError):
            session.renew_lease(lease, MINUTE_MS)
        with pytest.raises(LeaseLostError):
            session.commit(Commit(append=[message("a")], lease=lease))
        assert hold(session, "successor").fencing == lease.fencing + 1

    # --- renewal --------------------------------------------------------------------------

    def test_renew_keeps_all_but_the_expiry(self, session: Session, clock: ManualClock) -> None:
        lease = hold(session)
        clock.now_ms += MINUTE_MS - 1
        renewed = session.renew_lease(lease, 2 * MINUTE_MS)
        assert renewed == lease._replace(expires_at_ms=clock.now_ms + 2 * MINUTE_MS)
        clock.now_ms += 2 * MINUTE_MS - 1
        assert session.claim_lease("successor", MINUTE_MS) is None
        # ``lease`` and ``renewed`` are the same lease, so a commit accepts either.
        session.commit(Commit(append=[message("a")], lease=lease))
        session.commit(Commit(append=[message("b")], lease=renewed))

    def test_renew_needs_the_four_fields_that_identify_a_lease(
        self, session: Session, clock: ManualClock
    ) -> None:
        lease = hold(session)
        known = Lease(lease.session, lease.owner, lease.token, lease.fencing)
        clock.now_ms += 5
        renewed = session.renew_lease(known, MINUTE_MS)
        assert renewed == lease._replace(expires_at_ms=clock.now_ms + MINUTE_MS)
        session.commit(Commit(append=[message("a")], lease=known))
        assert session.release_lease(known)

    def test_renew_may_shorten(self, session: Session, clock: ManualClock) -> None:
        lease = session.renew_lease(hold(session), 10)
        assert lease.expires_at_ms == clock.now_ms + 10
        clock.now_ms += 10
        assert session.claim_lease("successor", MINUTE_MS) is not None

    @pytest.mark.parametrize("field", TAMPERED)
    def test_renew_refuses_whatever_is_not_exactly_the_lease(
        self, store: Store, session: Session, field: str
    ) -> None:
        lease = hold(session)
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.renew_lease(TAMPERED[field](lease), MINUTE_MS)
        session.renew_lease(lease, MINUTE_MS)

    @pytest.mark.parametrize("late_ms", [0, 1, MINUTE_MS])
    def test_renew_refuses_a_lease_whose_time_is_up(
        self, store: Store, session: Session, clock: ManualClock, late_ms: int
    ) -> None:
        lease = hold(session)
        clock.now_ms = lease.expires_at_ms + late_ms
        forged = lease._replace(expires_at_ms=clock.now_ms + MINUTE_MS)
        for expired in (lease, forged):
            with nothing_written(store), pytest.raises(LeaseLostError) as caught:
                session.renew_lease(expired, MINUTE_MS)
            assert caught.value.session == "alpha"

    def test_renew_refuses_a_lease_that_was_released(self, session: Session) -> None:
        lease = hold(session)
        session.release_lease(lease)
        with pytest.raises(LeaseLostError):
            session.renew_lease(lease, MINUTE_MS)
        assert session.claim_lease("successor", MINUTE_MS) is not None

    def test_renew_refuses_a_lease_on_another_session(
        self, session: Session, other: Session
    ) -> None:
        lease = hold(other)
        with pytest.raises(SessionBindingError):
            session.renew_lease(lease, MINUTE_MS)

    # --- release --------------------------------------------------------------------------

    def test_release_frees_the_session_once(self, session: Session) -> None:
        lease = hold(session)
        assert session.release_lease(lease) is True
        assert session.release_lease(lease) is False
        assert session.claim_lease("successor", MINUTE_MS) is not None

    def test_release_never_clears_a_newer_lease(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        old = hold(session)
        clock.now_ms += MINUTE_MS
        newer = hold(session, "worker")
        with nothing_written(store):
            assert session.release_lease(old) is False
        assert session.claim_lease("third", MINUTE_MS) is None
        assert session.release_lease(newer) is True

    @pytest.mark.parametrize("field", TAMPERED)
    def test_release_needs_exactly_the_lease(
        self, store: Store, session: Session, field: str
    ) -> None:
        lease = hold(session)
        with nothing_written(store):
            assert session.release_lease(TAMPERED[field](lease)) is False
        assert session.release_lease(lease) is True

    def test_release_of_what_was_never_held_does_nothing(
        self, store: Store, session: Session, other: Session
    ) -> None:
        lease = hold(other)
        never = lease._replace(session="alpha")
        with nothing_written(store):
            assert session.release_lease(never) is False

    def test_release_with_the_commit(self, session: Session) -> None:
        lease = hold(session)
        session.commit(Commit(append=[message("a")], lease=lease))
        assert session.claim_lease("successor", MINUTE_MS) is None
        session.commit(Commit(append=[message("b")], lease=lease, release=True))
        assert hold(session, "successor").fencing == lease.fencing + 1
        assert session.release_lease(lease) is False

    # --- commits --------------------------------------------------------------------------

    def test_commit_without_a_lease_names_the_owner_that_holds_it(
        self, store: Store, session: Session
    ) -> None:
        lease = hold(session, "worker-7")
        with nothing_written(store), pytest.raises(LeaseHeldError) as caught:
            session.commit(Commit(append=[message("a")]))
        held = caught.value
        assert (held.session, held.owner) == ("alpha", "worker-7")
        assert held.expires_at_ms == lease.expires_at_ms
        assert "session 'alpha' is leased by 'worker-7' until " in str(held)
        session.commit(Commit(append=[message("a")], lease=lease))
        assert path(session) == ["a"]

    def test_commit_needs_lease_that_is_live(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        lease = hold(session)
        clock.now_ms = lease.expires_at_ms - 1
        session.commit(Commit(append=[message("a")], lease=lease))
        clock.now_ms += 1
        forged = lease._replace(expires_at_ms=clock.now_ms + MINUTE_MS)
        for expired in (lease, forged):
            with nothing_written(store), pytest.raises(LeaseLostError):
                session.commit(Commit(append=[message("b")], lease=expired))

    def test_commit_needs_lease_that_is_current(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        old = hold(session)
        clock.now_ms += MINUTE_MS
        newer = hold(session)
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.commit(Commit(append=[message("a")], lease=old))
        session.commit(Commit(append=[message("b")], lease=newer))

    @pytest.mark.parametrize("field", TAMPERED)
    def test_commit_needs_lease_with_every_field_unchanged(
        self, store: Store, session: Session, field: str
    ) -> None:
        lease = hold(session)
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.commit(Commit(append=[message("a")], lease=TAMPERED[field](lease)))
        session.commit(Commit(append=[message("a")], lease=lease))

    def test_commit_needs_lease_that_was_not_released(self, store: Store, session: Session) -> None:
        lease = hold(session)
        session.release_lease(lease)
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.commit(Commit(append=[message("a")], lease=lease))

    def test_commit_needs_no_lease_while_none_is_live(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        step(session, "a")
        lease = hold(session)
        with nothing_written(store), pytest.raises(LeaseHeldError):
            step(session, "b")
        clock.now_ms = lease.expires_at_ms
        step(session, "c")
        lease = hold(session)
        session.release_lease(lease)
        step(session, "d")
        assert path(session) == ["a", "c", "d"]

    def test_commit_needs_lease_for_a_rewind_too(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        step(session, "a")
        step(session, "b")
        old = hold(session)
        clock.now_ms += MINUTE_MS
        newer = hold(session)
        with nothing_written(store), pytest.raises(LeaseHeldError):
            session.rewind(1)
        with nothing_written(store), pytest.raises(LeaseLostError):
            session.rewind(1, lease=old)
        session.rewind(1, lease=newer)
        assert (path(session), revision(session)) == (["a"], 3)
