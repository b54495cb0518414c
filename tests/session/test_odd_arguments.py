"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.errors import InvalidInputError
from casstore.format.digest import Digest
from casstore.session.data import LEAF, Claim, Commit, NodeDraft, Usage
from casstore.store import Store
from tests.refusals import ODD, SURROGATE, CountingEngine, assert_refused

CALLS: dict[str, Callable[[Store], object]] = {
    "the prefix of sessions": lambda store: list(store.sessions(prefix=SURROGATE)),
    "the prefix of pins": lambda store: list(store.pins(prefix=SURROGATE)),
    "a text as time": lambda store: store.session("s").commit(
        Commit(append=[NodeDraft("n", 1, time=SURROGATE)])
    ),
    "a number as time": lambda store: store.session("s").commit(
        Commit(append=[NodeDraft("n", 1, time=1 << 64)])
    ),
    "the source of usage": lambda store: store.session("s").commit(
        Commit(usage=[Usage(SURROGATE, "model", 1)])
    ),
    "the model of usage": lambda store: store.session("s").commit(
        Commit(usage=[Usage("agent", SURROGATE, 1)], turn="turn")
    ),
    "subjects": lambda store: store.create_session("s", subjects=ODD),
    "items": lambda store: store.session("s").queue.enqueue(ODD),
    "a delivery": lambda store: store.session("s").queue.enqueue([1], delivery="soon"),
    "a slot": lambda store: store.session("s").queue.enqueue([1], slot="first"),
    "a merge key": lambda store: store.session("s").queue.enqueue([1], merge_key=ODD),
    "an invalid time": lambda store: store.session("s").queue.enqueue([1], available_at_ms=True),
    "a time before all times": lambda store: store.session("s").queue.enqueue(
        [1], available_at_ms=-1
    ),
    "a time that no row can hold": lambda store: store.session("s").queue.enqueue(
        [1], available_at_ms=1 << 63
    ),
    "a note of a pin": lambda store: store.pin("name", Digest.of_blob(b"a"), ttl_ms=1, note=""),
    "a protector": lambda store: store.session("s").unprotect(ODD),
    "an owner": lambda store: store.session("s").claim_lease("", 1),
    "a time to live": lambda store: store.session("s").claim_lease("worker", -1),
    "node ids": lambda store: store.session("s").tombstone(ODD),
    "where an attachment is": lambda store: store.session("s").attachments.intend("a", uri=ODD),
    "whose an attachment is": lambda store: store.session("s").attachments.put(b"a", owner=""),
    "how old attachments are": lambda store: store.session("s").attachments.uncommitted(
        older_than_ms=-1
    ),
    "attachment ids": lambda store: store.session("s").attachments.commit(ODD),
}


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        yield store


@pytest.mark.parametrize("call", CALLS)
def test_session_calls_refuse_invalid_arguments_and_write_nothing(
    engine: CountingEngine, store: Store, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](store))
    assert list(store.sessions()) == []
    assert store.session("s").queue.batches() == []


def test_enqueue_accepts_the_largest_available_at_ms(store: Store) -> None:
    batch = store.session("s").queue.enqueue([1], available_at_ms=(1 << 63) - 1)
    assert store.session("s").queue.pending() == [batch]


@pytest.mark.parametrize("odd", [{"boundary": "whenever"}, {"limit": -1}, {"limit": True}])
def test_claim_refuses_an_invalid_boundary_or_limit(store: Store, odd: Any) -> None:
    session = store.session("s")
    session.queue.enqueue(["work"])
    lease = session.claim_lease("owner", 60_000)
    assert lease is not None
    with pytest.raises(InvalidInputError):
        session.queue.claim(lease, **odd)
    assert session.queue.pending() == session.queue.batches()


def test_renew_lease_refuses_an_invalid_time_to_live(store: Store) -> None:
    session = store.session("s")
    lease = session.claim_lease("owner", 60_000)
    assert lease is not None
    with pytest.raises(InvalidInputError):
        session.renew_lease(lease, -1)


NO_LEASES: dict[str, Any] = {
    "a text": "lease",
    "a mark that means something else": LEAF,
    "its fields alone": ("s", "owner", bytes(16), 1, 0, 0),
}


@pytest.mark.parametrize("lease", NO_LEASES)
def test_commit_and_rewind_refuse_an_invalid_lease_though_the_head_is_cached(
    store: Store, lease: str
) -> None:
    session = store.session("s")
    session.commit(Commit(append=[NodeDraft("n", 1)]))
    with pytest.raises(InvalidInputError):
        session.commit(Commit(append=[NodeDraft("m", 2)], lease=NO_LEASES[lease]))
    with pytest.raises(InvalidInputError):
        session.rewind(1, lease=NO_LEASES[lease])
    head = session.head()
    assert head is not None
    assert head.revision == 1


BATCHES: dict[str, dict[str, Any]] = {
    "an invalid place": {"seq": None},
    "a place below zero": {"seq": -1},
    "a place longer than its key": {"seq": 1 << 64},
    "an id that cannot be encoded": {"id": SURROGATE},
    "an id that is no text": {"id": []},
}


@pytest.mark.parametrize("odd", BATCHES)
def test_a_claim_with_an_invalid_batch_is_refused(store: Store, odd: str) -> None:
    session = store.session("s")
    lease = session.claim_lease("owner", 60_000)
    assert lease is not None
    session.queue.enqueue(["work"])
    claim = session.queue.claim(lease)
    assert claim is not None
    wrong = claim._replace(batches=(claim.batches[0]._replace(**BATCHES[odd]),))
    for turn in (None, "turn"):
        with pytest.raises(InvalidInputError):
            session.commit(Commit(completes=[wrong], turn=turn, lease=lease))
    with pytest.raises(InvalidInputError):
        session.queue.verify(wrong)
    with pytest.raises(InvalidInputError):
        session.queue.abandon(wrong)
    session.queue.verify(claim)
    assert session.head() is None


@pytest.mark.parametrize("batches", [None, 5, "batches"])
def test_a_commit_with_a_turn_refuses_a_claim_without_a_list_of_batches(
    store: Store, batches: Any
) -> None:
    claim = Claim("claim", "s", 1, batches)
    with pytest.raises(InvalidInputError):
        store.session("s").commit(Commit(completes=[claim], turn="turn"))


@pytest.mark.parametrize("timeout_s", [float("nan"), 10**400, "1"])
def test_wait_refuses_an_invalid_timeout(store: Store, timeout_s: Any) -> None:
    with pytest.raises(InvalidInputError):
        store.session("s").wait(0, timeout_s)
