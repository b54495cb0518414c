"""Arguments that cannot be: refused with an error of the store, before anything goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.maintenance import erasure
from casstore.records.lifecycles import Lifecycles
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.sweep import sweep
from casstore.records.scoped import ActorErasure
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store
from tests.refusals import CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        store.create_session("s", subjects=["anna"])
        result = store.session("s").commit(Commit(append=[NodeDraft("n", 1)]))
        store.pin("kept", result.manifest)
        Lifecycles(store).users.put("anna", "language", "en")
        yield store


def _execute(store: Store, providers: Any) -> object:
    plan = erasure.plan(store, "anna", providers=[LifecycleErasure()])
    return erasure.execute(store, plan, providers=providers)


CALLS: dict[str, Callable[[Store], object]] = {
    "providers that are a number": lambda store: erasure.plan(store, "anna", providers=ODD),
    "one provider": lambda store: erasure.plan(store, "anna", providers=LifecycleErasure()),  # type: ignore[arg-type]
    "a provider that is a number": lambda store: erasure.plan(store, "anna", providers=[ODD]),
    "a class of providers": lambda store: erasure.plan(
        store,
        "anna",
        providers=[LifecycleErasure],  # type: ignore[list-item]
    ),
    "two providers of one name": lambda store: erasure.plan(
        store, "anna", providers=[ActorErasure(bot_id="a"), ActorErasure(bot_id="b")]
    ),
    "how many are listed": lambda store: erasure.plan(store, "anna", listed=NONE),
    "whether sharing is looked at": lambda store: erasure.plan(store, "anna", survey=NONE),
    "no plan": lambda store: erasure.execute(store, NONE),
    "providers to carry it out": lambda store: _execute(store, ODD),
    "a provider to carry it out": lambda store: _execute(store, [LifecycleErasure(), ODD]),
    "a key store that is its path": lambda store: LifecycleErasure(keys="keys"),  # type: ignore[arg-type]
    "nothing that rewrites": lambda store: LifecycleErasure(rewrite=ODD),
    "what was found is none": lambda store: LifecycleErasure().erase(store, "anna", NONE),
    "what stays of none": lambda store: LifecycleErasure().stays(store, NONE),
    "whom to tell of none": lambda store: LifecycleErasure().recipients(store, NONE),
    "sweeping a store": lambda store: sweep(store, {}),  # type: ignore[arg-type]
    "ages that are none": lambda store: sweep(Lifecycles(store), NONE),
    "a text that says to sweep": lambda store: sweep(
        Lifecycles(store),
        {"identity": 0},
        dry_run="no",  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_erasure_calls_refuse_invalid_arguments_and_remove_nothing(
    engine: CountingEngine, store: Store, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](store))
    assert store.session("s").head() is not None
    assert [pin.name for pin in store.pins()] == ["kept"]
    assert Lifecycles(store).users.get("anna", "language") == "en"
