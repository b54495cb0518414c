"""What is no store, plan or policy is refused by name, before anything is read or written."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore import Store, maintenance
from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError
from casstore.maintenance import erasure, gc, retention, vacuum
from casstore.maintenance.automatic import AutoCollector
from casstore.maintenance.backup import backup
from casstore.maintenance.condemned import forget_condemned
from casstore.maintenance.copy import copy
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.export import export_session
from casstore.maintenance.import_ import import_session
from casstore.maintenance.retention import Plan, Policy
from casstore.maintenance.verify import BundleLimits, verify_bundle
from casstore.records.lifecycles import Lifecycles
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.sweep import sweep
from casstore.records.scoped import ActorErasure
from casstore.session.data import Commit, NodeDraft
from tests.maintenance.sessions import message, step
from tests.refusals import NAN, NONE, ODD, CountingEngine, assert_refused, odd


def taking_a_store() -> Iterator[Callable[..., Any]]:
    """Every public function of maintenance whose first argument is a store, and what collects."""
    yield AutoCollector
    for module in pkgutil.iter_modules(maintenance.__path__, "casstore.maintenance."):
        for name, item in vars(importlib.import_module(module.name)).items():
            is_public = inspect.isfunction(item) and not name.startswith("_")
            if not is_public or item.__module__ != module.name:
                continue
            first = next(iter(inspect.signature(item).parameters.values()), None)
            if first is not None and first.annotation == "Store":
                yield item


def called(item: Callable[..., Any], store: Any) -> Any:
    """Call with this store, and nothing where more is asked for."""
    needed = [
        one
        for one in inspect.signature(item).parameters.values()
        if one.default is inspect.Parameter.empty
    ]
    named = [one.name for one in needed if one.kind is one.KEYWORD_ONLY]
    return item(store, *[None] * (len(needed) - len(named) - 1), **dict.fromkeys(named))


@pytest.mark.parametrize(
    "item", list(taking_a_store()), ids=lambda item: f"{item.__module__}.{item.__name__}"
)
def test_anything_but_a_store_is_refused_by_name(item: Callable[..., Any]) -> None:
    """A path, which casstore.open takes, ended in AttributeError."""
    for given in ("my-store", Path("my-store"), None, MemoryEngine(), Store):
        with pytest.raises(InvalidInputError, match=r"store must be an open Store"):
            called(item, given)


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        for number in range(3):
            step(store, "s", message(f"n{number}"))
        store.put_blob(b"what nobody names")
        # A vacuum would write something before it comes to collecting.
        store.session("s").tombstone(["n1"])
        store.create_session("of anna", subjects=["anna"])
        result = store.session("of anna").commit(Commit(append=[NodeDraft("n", 1)]))
        store.pin("kept", result.manifest)
        Lifecycles(store).users.put("anna", "language", "en")
        yield store


TEXT: Any = "3600000"
YES: Any = "no"


def lines(store: Store, **changed: Any) -> list[Any]:
    """A plan of retention as it is saved, with something else in it."""
    *head, last = retention.plan(store, policy=Policy(last=1)).to_json()
    return [*head, json.dumps({**json.loads(last), **changed})]


def execute_erasure(store: Store, providers: Any) -> object:
    plan = erasure.plan(store, "anna", providers=[LifecycleErasure()])
    return erasure.execute(store, plan, providers=providers)


CALLS: dict[str, Callable[[Any], object]] = {
    "a grace that is a text": lambda store: vacuum.vacuum(store, grace_ms=TEXT),
    "a grace below nothing": lambda store: vacuum.vacuum(store, grace_ms=-1),
    "a stop of vacuum that is no function": lambda store: vacuum.vacuum(store, stop=ODD),
    "a stop that is no function": lambda store: gc.collect(store, grace_ms=0, stop=ODD),
    "a dry run that is a text": lambda store: gc.collect(store, dry_run=YES),
    "no plan of gc": lambda store: gc.execute(store, ODD),
    "a plan of gc without a report": lambda store: gc.execute(
        store, gc.plan(store)._replace(report=ODD)
    ),
    "a plan of gc with another grace": lambda store: gc.execute(
        store, gc.plan(store, grace_ms=0)._replace(grace_ms=NAN)
    ),
    "a collector without a grace": lambda store: AutoCollector(store, grace_ms=TEXT),
    "a collector of no batch": lambda store: AutoCollector(store, batch=0),
    "a collector that looks at a text": lambda store: AutoCollector(store, interval_s=TEXT),
    "a collector that never looks": lambda store: AutoCollector(store, interval_s=NAN),
    "a collector that tells a number": lambda store: AutoCollector(store, on_report=ODD),
    "no plan of retention": lambda store: retention.execute(store, ODD),
    "a plan of a number": lambda store: Plan.from_json(ODD),
    "a plan of numbers": lambda store: Plan.from_json([ODD]),
    "a line that is a number": lambda store: list(Plan.from_json([*lines(store), ODD])),
    "a revision that is a number": lambda store: retention.execute(
        store, Plan.from_json(lines(store, removed=[1]))
    ),
    "kept what is a text": lambda store: retention.execute(
        store, Plan.from_json(lines(store, kept=["x"]))
    ),
    "an age of receipts that is a flag": lambda store: expire_rows(
        store, receipts_older_than_ms=True
    ),
    "a policy that keeps a flag": lambda store: retention.set_policy(store, Policy(last=True)),
    "a policy of no number": lambda store: retention.set_policy(store, Policy(hourly=NAN)),
    "a policy of no time": lambda store: retention.set_policy(store, Policy(within_ms=1 << 80)),
    "a policy that is a dict": lambda store: retention.set_policy(store, odd({"last": 1})),
    "what was condemned is a number": lambda store: forget_condemned(store, ODD),
    "digests that are a number": lambda store: export_session(store, "s", "file", have=ODD),
    "a history that is a text": lambda store: export_session(store, "s", "file", history=YES),
    "an export that may replace": lambda store: export_session(store, "s", "file", replace=YES),
    "a backup that may replace": lambda store: backup(store, "backup", replace=YES),
    "a mirror that is a text": lambda store: copy(store, Store(MemoryEngine()), mirror=YES),
    "one session to copy": lambda store: copy(store, Store(MemoryEngine()), sessions="s"),
    "sessions to copy that are a number": lambda store: copy(
        store, Store(MemoryEngine()), sessions=ODD
    ),
    "providers that are a number": lambda store: erasure.plan(store, "anna", providers=ODD),
    "one provider": lambda store: erasure.plan(store, "anna", providers=odd(LifecycleErasure())),
    "a provider that is a number": lambda store: erasure.plan(store, "anna", providers=[ODD]),
    "a class of providers": lambda store: erasure.plan(
        store, "anna", providers=[odd(LifecycleErasure)]
    ),
    "two providers of one name": lambda store: erasure.plan(
        store, "anna", providers=[ActorErasure(bot_id="a"), ActorErasure(bot_id="b")]
    ),
    "how many are listed": lambda store: erasure.plan(store, "anna", listed=NONE),
    "whether sharing is looked at": lambda store: erasure.plan(store, "anna", survey=NONE),
    "no plan": lambda store: erasure.execute(store, NONE),
    "providers to carry it out": lambda store: execute_erasure(store, ODD),
    "a provider to carry it out": lambda store: execute_erasure(store, [LifecycleErasure(), ODD]),
    "a key store that is its path": lambda store: LifecycleErasure(keys=odd("keys")),
    "nothing that rewrites": lambda store: LifecycleErasure(rewrite=ODD),
    "an invalid result of find": lambda store: LifecycleErasure().erase(store, "anna", NONE),
    "what stays of none": lambda store: LifecycleErasure().stays(store, NONE),
    "whom to tell of none": lambda store: LifecycleErasure().recipients(store, NONE),
    "sweeping a store": lambda store: sweep(store, {}),
    "invalid ages": lambda store: sweep(Lifecycles(store), NONE),
    "a text that says to sweep": lambda store: sweep(
        Lifecycles(store), {"identity": 0}, dry_run=odd("no")
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_maintenance_calls_refuse_invalid_arguments_before_they_write(
    store: Store,
    engine: CountingEngine,
    call: Callable[[Store], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(engine, lambda: call(store))
    assert store.session("of anna").head() is not None
    assert [pin.name for pin in store.pins()] == ["kept"]
    assert Lifecycles(store).users.get("anna", "language") == "en"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limits", [ODD, BundleLimits(max_rows=NAN), BundleLimits(max_objects=-1)])
def test_invalid_bundle_limits_are_refused(
    store: Store, engine: CountingEngine, tmp_path: Path, limits: BundleLimits
) -> None:
    bundle = tmp_path / "s.bundle"
    export_session(store, "s", bundle)
    assert_refused(engine, lambda: import_session(store, bundle, name="t", limits=limits))
    assert_refused(engine, lambda: verify_bundle(bundle, limits=limits))
