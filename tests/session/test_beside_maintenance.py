"""Sessions are changed while vacuum, retention and gc take away what they were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    ClaimLostError,
    InvalidInputError,
    RevisionNotFoundError,
    SessionDeletedError,
)
from casstore.maintenance import check, gc, retention, vacuum
from casstore.maintenance.copy import copy
from casstore.maintenance.policy import Policy
from casstore.session import history, keys
from casstore.session.data import Claim, Commit, NodeDraft
from casstore.session.state import runtime_of
from casstore.store import Store
from casstore.testing.session_fixtures import interrupted


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        yield store


def other_handle(store: Store) -> Store:
    """The same store as another process has it: what either remembers is its own."""
    return Store(store.engine, close=lambda: None)


def fill(store: Store, name: str = "s", revisions: int = 4) -> None:
    for step in range(revisions):
        nodes = [NodeDraft(f"n{step}-{at}", {"role": "user", "n": [step, at]}) for at in range(3)]
        store.session(name).commit(Commit(append=nodes))


def before_write(store: Store, happens: Callable[[], object], call: Callable[[], object]) -> None:
    """Call, and let something happen right before it writes."""
    engine: Any = store.engine
    whole = engine.write

    def write(change: Any) -> Any:
        engine.write = whole
        happens()
        return whole(change)

    engine.write = write
    try:
        call()
    finally:
        engine.write = whole


@pytest.mark.parametrize("node", [None, "n0-1"])
def test_a_fork_of_an_earlier_revision_concurrent_with_vacuum(
    store: Store, node: str | None
) -> None:
    fill(store)
    store.session("s").tombstone(["n3-1"])
    also = other_handle(store)
    before_write(
        store,
        lambda: vacuum.vacuum(also, grace_ms=0),
        lambda: store.fork("s", "fork", at=1, node=node),
    )
    fork = store.session("fork")
    assert [one.id for one in fork.nodes()][:2] == ["n0-0", "n0-1"]
    assert [info.meta.session for info in store.sessions()] == ["fork", "s"]
    assert check.check(store, level="full").sound
    assert gc.collect(store, grace_ms=0).problem is None


CHANGES = [
    Commit(leaf="n1-1"),
    Commit(append=[NodeDraft("branch", 1, parent="n1-1")]),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_through_a_stale_handle_follows_the_vacuumed_head(
    store: Store, change: Commit
) -> None:
    fill(store)
    also = other_handle(store)
    also.session("s").tombstone(["n0-1"])
    vacuum.vacuum(also, grace_ms=0)
    assert store.session("s").commit(change).revision == 5
    path = [one.id for one in store.session("s").nodes()]
    assert path[:4] == ["n0-0", "n0-2", "n1-0", "n1-1"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_to_a_deleted_and_collected_session_raises_session_deleted_error(
    store: Store, change: Commit
) -> None:
    fill(store)
    store.delete_session("s")
    gc.collect(store, grace_ms=0)
    with pytest.raises(SessionDeletedError):
        store.session("s").commit(change)


USES: dict[str, Callable[[Store], object]] = {
    "label": lambda store: store.session("s").label("mine", 1),
    "protect": lambda store: store.session("s").protect(1, by="me"),
    "rewind": lambda store: store.session("s").rewind(1),
    "fork": lambda store: store.fork("s", "fork", at=1),
}


@pytest.mark.parametrize("use", USES)
def test_protecting_a_revision_that_retention_removes_concurrently_raises(
    store: Store, use: str
) -> None:
    fill(store, revisions=2)
    plan = retention.plan(store, policy=Policy(last=1))
    late = interrupted(store, before=lambda: retention.execute(store, plan))
    with pytest.raises(RevisionNotFoundError):
        USES[use](late)
    assert [entry.revision for entry in store.session("s").history()] == [2]
    assert store.session("s").protections() == []
    assert history.labels_of(runtime_of(store), keys.session_key("s")) == {}
    assert [info.meta.session for info in store.sessions()] == ["s"]


# --- queued work --------------------------------------------------------------------------------


def copied_in_between(**named: Any) -> tuple[Store, Store]:
    """A store, and a handle on it: right before its next write a copy brings work of that name.

    Both stores have counted as far, so the counter does not tell.
    """
    source, target = Store(MemoryEngine()), Store(MemoryEngine())
    source.session("s").queue.enqueue(["copied"], **named)
    target.session("s").queue.enqueue(["done"], batch_id="done")
    assert target.session("s").queue.cancel("done") is not None
    return target, interrupted(target, before=lambda: copy(source, target))


def test_enqueue_returns_the_batch_that_a_concurrent_copy_stored_under_its_key() -> None:
    target, late = copied_in_between(source_key="key")
    assert late.session("s").queue.enqueue(["late"], source_key="key").items == ("copied",)
    assert len(target.session("s").queue.batches()) == 1


def test_enqueue_refuses_a_batch_id_that_a_concurrent_copy_stored() -> None:
    target, late = copied_in_between(batch_id="batch")
    with pytest.raises(InvalidInputError):
        late.session("s").queue.enqueue(["late"], batch_id="batch")
    assert [batch.items for batch in target.session("s").queue.batches()] == [("copied",)]


def test_claiming_a_batch_that_is_completed_and_collected_raises_claim_lost_error() -> None:
    """Who shares the lease may be that quick: the items are read after the claim is written."""
    store = Store(MemoryEngine())
    session = store.session("s")
    batch = session.queue.enqueue(["work " * 500])
    lease = session.claim_lease("worker", 60_000)
    assert lease is not None

    def complete() -> None:
        claim = Claim("1:1", "s", lease.fencing, (batch._replace(fence=1),))
        session.commit(Commit(completes=[claim], lease=lease))
        gc.collect(store, grace_ms=0)

    with pytest.raises(ClaimLostError):
        interrupted(store, after=complete).session("s").queue.claim(lease)
    assert check.check(store, level="full").sound
