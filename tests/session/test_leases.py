"""Leases beside others who move their row, and leases that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import RowKey, Write, WriteResult
from casstore.errors import InvalidInputError, LeaseLostError
from casstore.session.data import Commit, Lease
from casstore.session.session import Session
from casstore.store import Store

NOW_MS = 1_760_000_000_000


class InterruptedEngine(MemoryEngine):
    """A memory engine before whose next write somebody else does something, once."""

    def __init__(self) -> None:
        self.now = NOW_MS
        super().__init__(clock=lambda: self.now)
        self.meanwhile: Callable[[], object] | None = None
        self.second_read: Callable[[], object] | None = None
        self.reads = 0

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Let the other do it before the second read, and read."""
        self.reads += 1
        if self.second_read is not None and self.reads == 2:
            then, self.second_read = self.second_read, None
            then()
        return super().get_rows(keys)

    def write(self, write: Write) -> WriteResult:
        """Let the other do it, and write."""
        if self.meanwhile is not None:
            then, self.meanwhile = self.meanwhile, None
            then()
        return super().write(write)


@pytest.fixture
def engine() -> InterruptedEngine:
    return InterruptedEngine()


@pytest.fixture
def session(engine: InterruptedEngine) -> Session:
    return Store(engine).session("s")


def claimed(session: Session, owner: str, ttl_ms: int) -> Lease:
    lease = session.claim_lease(owner, ttl_ms)
    assert lease is not None
    return lease


def test_a_claim_succeeds_while_the_expired_lease_is_released_concurrently(
    engine: InterruptedEngine, session: Session
) -> None:
    # Whoever is told None leaves the work to the holder, and here there is none.
    slow = claimed(session, "slow", 10)
    engine.now += 10
    engine.meanwhile = lambda: session.release_lease(slow)
    lease = claimed(session, "next", 10)
    assert (lease.owner, lease.fencing) == ("next", 2)
    assert session.commit(Commit(lease=lease)).revision == 1


def test_a_claim_succeeds_after_a_concurrent_claim_and_release(
    engine: InterruptedEngine, session: Session
) -> None:
    engine.meanwhile = lambda: session.release_lease(claimed(session, "nobody for long", 1))
    assert claimed(session, "next", 10).fencing == 2


@pytest.mark.parametrize(
    "move",
    [
        lambda session, lease: session.rewind(1, lease=lease, expected=1),
        lambda session, lease: session.adopt("other", lease=lease, expected=1),
    ],
    ids=["rewind", "adopt"],
)
def test_rewind_and_adopt_under_a_lease_that_expires_concurrently_raise_a_lease_error(
    engine: InterruptedEngine, session: Session, move: Callable[[Session, Lease], object]
) -> None:
    """The next owner has committed: that the head moved is not why the call is refused."""
    session.append("one")
    session.fork("other")
    slow = claimed(session, "slow", 10)

    def end_and_commit() -> None:
        engine.now += 10
        session.append("two", lease=claimed(session, "next", 10))

    engine.second_read, engine.reads = end_and_commit, 0
    with pytest.raises(LeaseLostError):
        move(session, slow)


def test_a_claim_that_loses_a_race_for_the_lease_returns_none(
    engine: InterruptedEngine, session: Session
) -> None:
    engine.meanwhile = lambda: session.claim_lease("first", 10)
    assert session.claim_lease("second", 10) is None


def test_a_lease_claimed_by_a_clock_before_1970_can_be_renewed_and_released(
    engine: InterruptedEngine, session: Session
) -> None:
    engine.now = -5
    lease = session.renew_lease(claimed(session, "owner", 10), 20)
    assert (lease.claimed_at_ms, lease.expires_at_ms) == (0, 15)
    assert session.commit(Commit(lease=lease, release=True)).revision == 1


ODD: dict[str, dict[str, Any]] = {
    "an owner that cannot be spelled": {"owner": "a\ud800"},
    "an owner that is no text": {"owner": 5},
    "a token that is no bytes": {"token": "token"},
    "a counter below zero": {"fencing": -1},
    "a time that is a text": {"claimed_at_ms": "now"},
    "a time below zero": {"claimed_at_ms": -1},
    "a time longer than its place": {"claimed_at_ms": 1 << 64},
}

USES: dict[str, Callable[[Session, Lease], object]] = {
    "committing": lambda session, lease: session.commit(Commit(lease=lease)),
    "releasing with a commit": lambda session, lease: session.commit(
        Commit(lease=lease, release=True)
    ),
    "going back": lambda session, lease: session.rewind(1, lease=lease),
    "renewing": lambda session, lease: session.renew_lease(lease, 10),
    "releasing": lambda session, lease: session.release_lease(lease),
    "taking work": lambda session, lease: session.queue.claim(lease),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("odd", ODD)
def test_every_call_that_takes_a_lease_refuses_an_invalid_lease(
    session: Session, odd: str, use: str
) -> None:
    session.commit(Commit())
    lease = claimed(session, "owner", 10)
    session.queue.enqueue(["work"])
    with pytest.raises(InvalidInputError):
        USES[use](session, lease._replace(**ODD[odd]))
    assert session.claim_lease("other", 10) is None
    head = session.head()
    assert head is not None
    assert head.revision == 1
    assert len(session.queue.pending()) == 1
