"""Lifecycles while other writers interleave with each call."""

from __future__ import annotations

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.maintenance import erasure
from casstore.records.lifecycles import Annotation, Hold, Lifecycles, Ref, Seal
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.sweep import sweep
from casstore.store import Store
from tests.records.interleaving import LONG, OTHER, Operation, assert_unharmed

FACT = Ref("record", "facts", "f")


def about(*names: str) -> Annotation:
    """A note too long for its row."""
    return Annotation(["process"], subjects=[f"{name} {n}" for name in names for n in range(40)])


@pytest.fixture(scope="module")
def filled() -> MemoryEngine:
    """Long values of each kind. Nobody may change it."""
    engine = MemoryEngine()
    life = Lifecycles(Store(engine))
    session = life.create_session("s", user="anna")
    session.working.set("draft", LONG)
    session.checkpoint("begun" + "!" * 1000)
    life.users.put("anna", "chat", LONG)
    life.records.put("facts", "f", LONG, about("anna"))
    return engine


def replace(store: Store) -> None:
    life = Lifecycles(store)
    session = life.restore("s")
    session.delete_checkpoint(1)
    session.checkpoint("begun" + "!" * 1000)
    life.users.put("anna", "chat", OTHER)
    life.records.put("facts", "f", OTHER, about("bert"))


def begin_again(store: Store) -> None:
    remove(store)
    life = Lifecycles(store)
    life.create_session("s", user="bert").checkpoint("another")
    life.users.put("anna", "chat", OTHER)
    life.records.put("facts", "f", OTHER, about("bert"))


def remove(store: Store) -> None:
    life = Lifecycles(store)
    life.delete_session("s")
    life.users.erase("anna")
    life.records.delete("facts", "f")


def newest(store: Store) -> None:
    found = Lifecycles(store).restore("s").find_checkpoint("begun" + "!" * 1000)
    assert found is None or found.info.label == "begun" + "!" * 1000


def erase_subject(store: Store) -> None:
    providers = [LifecycleErasure()]
    plan = erasure.plan(store, "anna 1", providers=providers)
    erasure.execute(store, plan, providers=providers)


OPERATIONS: dict[str, Operation] = {
    "value": lambda store: Lifecycles(store).users.get("anna", "chat", None),
    "values": lambda store: Lifecycles(store).users.find_many([("anna", "chat")]),
    "record": lambda store: Lifecycles(store).records.get("facts", "f", None),
    "records": lambda store: list(Lifecycles(store).records.list("facts")),
    "note": lambda store: Lifecycles(store).find_note(FACT),
    "newest checkpoint": newest,
    "checkpoints": lambda store: list(Lifecycles(store).restore("s").checkpoints()),
    "put a value": lambda store: Lifecycles(store).users.put("anna", "chat", LONG),
    "put a record": lambda store: Lifecycles(store).records.put("facts", "f", 1, about("cleo")),
    "derive": lambda store: Lifecycles(store).records.put(
        "facts", "g", 1, Annotation(["learned_context"], sources=[FACT])
    ),
    "hold": lambda store: Lifecycles(store).hold(FACT, Hold("tax law", 2**42)),
    "seal": lambda store: Lifecycles(store).seal(FACT, Seal("consent", "proof")),
    "delete a record": lambda store: Lifecycles(store).records.delete("facts", "f"),
    "erase a user": lambda store: Lifecycles(store).users.erase("anna"),
    "sweep": lambda store: sweep(Lifecycles(store), {"process": 0, "identity": 0}),
    "erasure": erase_subject,
}
# These need what is removed: they may say that it is gone.
OF_A_CHECKPOINT: dict[str, Operation] = {
    "checkpoint": lambda store: Lifecycles(store).restore("s").get_checkpoint(1),
    "delete a checkpoint": lambda store: Lifecycles(store).restore("s").delete_checkpoint(1),
    "delete a session": lambda store: Lifecycles(store).delete_session("s"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_read_during_replacement_and_gc_returns_the_current_record(
    filled: MemoryEngine, operation: str
) -> None:
    assert_unharmed(filled, OPERATIONS[operation], replace, allowed=())


@pytest.mark.parametrize("meanwhile", [remove, begin_again])
@pytest.mark.parametrize("operation", [*OPERATIONS, *OF_A_CHECKPOINT])
def test_a_read_during_removal_and_gc_reports_a_missing_record_and_not_damage(
    filled: MemoryEngine, operation: str, meanwhile: Operation
) -> None:
    assert_unharmed(filled, {**OPERATIONS, **OF_A_CHECKPOINT}[operation], meanwhile)
