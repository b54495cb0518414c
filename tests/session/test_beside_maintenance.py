"""Sessions are changed while vacuum, retention and gc take away what they were made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import SessionDeletedError
from casstore.maintenance import check, gc, vacuum
from casstore.session.data import UNFENCED, Commit, NodeDraft
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
