"""Sessions are changed while vacuum, retention and gc take away what they were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import RevisionNotFoundError, SessionDeletedError
from casstore.maintenance import check, gc, retention, vacuum
from casstore.maintenance.retention import Policy
from casstore.session.data import UNFENCED, Checkpoint, Commit, NodeDraft
from casstore.store import Store


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="process")
    with Store(engine) as store:
        yield store


def other_handle(store: Store) -> Store:
    """The same store as another process has it: what either remembers is its own."""
    return Store(store.engine, close=lambda: None)


def fill(store: Store, name: str = "s", revisions: int = 4) -> None:
    for step in range(revisions):
        nodes = [NodeDraft(f"n{step}-{at}", {"role": "user", "n": [step, at]}) for at in range(3)]
        store.session(name).commit(Commit(append=nodes, lease=UNFENCED))


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
def test_a_fork_of_an_earlier_revision_beside_vacuum(store: Store, node: str | None) -> None:
    fill(store)
    store.session("s").tombstone(["n3-1"])
    beside = other_handle(store)
    before_write(
        store,
        lambda: vacuum.vacuum(beside, grace_ms=0),
        lambda: store.fork("s", "fork", at=1, node=node),
    )
    fork = store.session("fork")
    assert [one.id for one in fork.nodes()][:2] == ["n0-0", "n0-1"]
    assert [info.meta.session for info in store.sessions()] == ["fork", "s"]
    assert check.check(store, level="full").sound
    assert gc.collect(store, grace_ms=0).problem is None


CHANGES = [
    Commit(leaf="n1-1", lease=UNFENCED),
    Commit(append=[NodeDraft("branch", 1, parent="n1-1")], lease=UNFENCED),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_to_what_another_handle_has_vacuumed(store: Store, change: Commit) -> None:
    fill(store)
    beside = other_handle(store)
    beside.session("s").tombstone(["n0-1"])
    vacuum.vacuum(beside, grace_ms=0)
    assert store.session("s").commit(change).revision == 5
    path = [one.id for one in store.session("s").nodes()]
    assert path[:4] == ["n0-0", "n0-2", "n1-0", "n1-1"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_to_what_was_deleted_and_collected(store: Store, change: Commit) -> None:
    fill(store)
    store.delete_session("s")
    gc.collect(store, grace_ms=0)
    with pytest.raises(SessionDeletedError):
        store.session("s").commit(change)


# --- something goes between any two steps of a call -----------------------------------------

CALLS: dict[str, Callable[[Store], object]] = {
    "head": lambda store: store.session("s").head(),
    "wait": lambda store: store.session("s").wait(after=0, timeout_s=0),
    "load": lambda store: store.session("s").load(),
    "info": lambda store: store.session("s").info(),
    "sessions": lambda store: list(store.sessions()),
    "history": lambda store: list(store.session("s").history()),
    "entry": lambda store: store.session("s").entry(2),
    "label": lambda store: store.session("s").label("here", 2),
    "protect": lambda store: store.session("s").protect(2, by="somebody"),
    "append": lambda store: store.session("s").commit(
        Commit(append=[NodeDraft("new", 1)], lease=UNFENCED)
    ),
    "rewind": lambda store: store.session("s").rewind(2, lease=UNFENCED),
    "tombstone": lambda store: store.session("s").tombstone(["n1-1"]),
    "fork": lambda store: store.fork("s", "fork"),
    "fork of a revision": lambda store: store.fork("s", "fork", at=2),
    "compare": lambda store: store.compare(("s", 2), "s"),
    "digests": lambda store: list(store.session("s").nodes().digests()),
    "batches": lambda store: store.session("s").queue.batches(),
    "pending": lambda store: store.session("s").queue.pending(),
    "cancel": lambda store: store.session("s").queue.cancel("batch"),
    "enqueue": lambda store: store.session("s").queue.enqueue([0], source_key="key"),
}


def vacuumed(store: Store) -> None:
    vacuum.vacuum(store, grace_ms=0)


def deleted(store: Store) -> None:
    store.delete_session("s")
    gc.collect(store, grace_ms=0)


def replaced_and_pruned(store: Store) -> None:
    session = store.session("s")
    anew = Commit(replace=[NodeDraft("anew", 1)], checkpoint=Checkpoint(), lease=UNFENCED)
    session.commit(anew)
    retention.execute(store, retention.plan(store, policy=Policy(last=1, labelled=False)))
    session.queue.cancel("batch")
    vacuum.vacuum(store, grace_ms=0)


class Counting:
    """Stands before an engine and lets something happen before one of its calls."""

    def __init__(self, engine: Any, number: int, happens: Callable[[], None]) -> None:
        self._engine = engine
        self._left = number
        self._happens = happens

    def __getattr__(self, name: str) -> Any:
        if name in ("get_many", "get_rows", "missing", "scan_rows", "write"):
            self._left -= 1
            if self._left == 0:
                self._happens()
        return getattr(self._engine, name)

    @property
    def reached(self) -> bool:
        return self._left <= 0


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("goes", [vacuumed, deleted, replaced_and_pruned])
def test_what_goes_in_the_middle_of_a_call_is_no_damage(
    call: str, goes: Callable[[Store], None]
) -> None:
    for number in range(1, 200):
        engine = MemoryEngine()
        store = Store(engine)
        fill(store)
        session = store.session("s")
        session.tombstone(["n0-1", "n3-2"])
        session.queue.enqueue(["long " * 100], batch_id="batch", source_key="key")
        beside = Counting(engine, number, lambda store=store: goes(store))  # type: ignore[misc]
        try:
            CALLS[call](Store(beside))
        except (SessionDeletedError, RevisionNotFoundError):
            assert goes is not vacuumed
        assert check.check(store, level="full").sound
        if not beside.reached:
            return
    pytest.fail("it makes more calls than were tried")
