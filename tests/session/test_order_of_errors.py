"""The first check that fails is the error, whatever the process that commits happens to know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.errors import CasstoreError, DuplicateNodeError, InvalidInputError, LeaseLostError
from casstore.session.data import Commit, NodeDraft, Usage
from casstore.store import Store

MOST = (1 << 63) - 1
ONE_TOO_MANY = Commit(usage=[Usage("agent", "model", 1)])


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


def full(store: Store) -> None:
    """A session whose ledger can count no more."""
    drafts = [NodeDraft("n", 1), NodeDraft("leaf", 1)]
    usage = [Usage("agent", "model", MOST)]
    store.session("s").commit(Commit(append=drafts, usage=usage))


def a_node_that_is_there(store: Store) -> tuple[Commit, type[CasstoreError]]:
    return ONE_TOO_MANY._replace(append=[NodeDraft("n", 2)]), DuplicateNodeError


def a_lease_that_is_lost(store: Store) -> tuple[Commit, type[CasstoreError]]:
    lease = store.session("s").claim_lease("owner", 1000)
    assert lease is not None
    assert store.session("s").release_lease(lease)
    return ONE_TOO_MANY._replace(lease=lease), LeaseLostError


@pytest.mark.parametrize("before", [a_node_that_is_there, a_lease_that_is_lost])
def test_other_errors_are_raised_before_a_ledger_overflow_with_and_without_a_cached_head(
    engine: MemoryEngine, before: Callable[[Store], tuple[Commit, type[CasstoreError]]]
) -> None:
    store = Store(engine)
    full(store)
    change, told = before(store)
    for one in (store, Store(engine)):
        with pytest.raises(CasstoreError) as raised:
            one.session("s").commit(change)
        assert type(raised.value) is told


def test_the_ledger_overflow_check_uses_the_current_ledger_and_not_the_cached_one(
    engine: MemoryEngine,
) -> None:
    store, other = Store(engine), Store(engine)
    store.session("s").commit(Commit(append=[NodeDraft("first", 1)]))
    full(store)
    with pytest.raises(InvalidInputError):
        store.session("s").commit(ONE_TOO_MANY)
    other.session("s").rewind(1)
    store.session("s").commit(ONE_TOO_MANY)
    assert [entry.total for entry in store.session("s").usage()] == [1]
