"""Comparing asks an engine for many nodes at once, and for none that both graphs have.

On a server each call of the engine is a round trip, so the calls are what is counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.format.node_index import PAGE_NODES
from casstore.session.compare import Comparison
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

# Some pages of nodes.
LONG = 1500
#: Reading LONG nodes one by one takes more calls than this by far.
FEW = 40


class Counted(MemoryEngine):
    """An engine that counts how often it was asked for something."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


def _counted(name: str) -> Callable[..., Any]:
    whole = getattr(MemoryEngine, name)

    def call(self: Counted, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return whole(self, *arguments, **named)

    return call


for _name in ("get_rows", "scan_rows", "get_many"):
    setattr(Counted, _name, _counted(_name))


@pytest.fixture
def engine() -> Counted:
    return Counted()


@pytest.fixture
def store(engine: Counted) -> Store:
    return Store(engine)


def grow(store: Store, session: str, name: str, count: int = LONG, **where: Any) -> None:
    nodes = [
        NodeDraft(f"{name}{at}", {"role": "user", "text": name, "n": at}) for at in range(count)
    ]
    if where:
        nodes[0] = nodes[0]._replace(**where)
    store.session(session).commit(Commit(append=nodes))


def compared(store: Store, old: Any, new: Any) -> tuple[Comparison, int]:
    """What differs, and how many calls of the engine it took."""
    engine = store.engine
    assert isinstance(engine, Counted)
    before = engine.calls
    return store.compare(old, new), engine.calls - before


def indexed(nodes: int) -> int:
    """How many pieces of two indexes list so many nodes at the end, and lead to them."""
    return nodes // PAGE_NODES + 2 * 12


def test_differing_nodes_are_read_in_batches(store: Store) -> None:
    grow(store, "old", "a")
    grow(store, "new", "b")
    found, calls = compared(store, "old", "new")
    assert [node.id for node in found.dropped] == [f"a{at}" for at in range(LONG)]
    assert [node.id for node in found.added] == [f"b{at}" for at in range(LONG)]
    assert found.ancestor is None
    assert calls < FEW


def test_nodes_that_both_have_are_not_read(store: Store) -> None:
    grow(store, "old", "a")
    store.fork("old", "new")
    grow(store, "old", "b", 700)
    grow(store, "new", "c", 300)
    found, calls = compared(store, "old", "new")
    assert (len(found.dropped), len(found.added)) == (700, 300)
    assert found.ancestor is not None
    assert found.ancestor.id == f"a{LONG - 1}"
    # Two manifests, what differs, the one node in which they meet, and what of the index differs.
    assert found.pieces_read <= 2 + 700 + 300 + 1 + indexed(700 + 300)
    assert calls < FEW


def test_short_branches_are_read_together(store: Store) -> None:
    grow(store, "old", "a", 10)
    store.fork("old", "new")
    for at in range(200):
        grow(store, "new", f"branch {at} ", 5, parent=f"a{at % 10}")
    found, calls = compared(store, "old", "new")
    assert len(found.added) == 1000
    assert found.dropped == ()
    # Of the 200 ends one is the leaf; what the branches grow from is read, ten nodes.
    assert found.pieces_read - 1000 < 30 + indexed(1000)
    assert calls < FEW


def test_a_trunk_that_many_branches_share_is_read_once(store: Store) -> None:
    grow(store, "old", "x", 1)
    grow(store, "new", "a")
    for at in range(0, LONG, 15):
        grow(store, "new", f"branch {at} ", 3, parent=f"a{at}")
    found, calls = compared(store, "old", "new")
    assert len(found.added) == LONG + 100 * 3
    # Told again for each branch, the trunk would take half as many calls more.
    assert calls < 25


def test_comparing_reads_no_node_above_a_branch_tip_that_both_graphs_have(store: Store) -> None:
    grow(store, "old", "a", 3)
    for at in range(20):
        grow(store, "old", f"branch {at} ", 3, parent="a2")
    store.fork("old", "new")
    for at in range(20):
        grow(store, "new", f"on {at} ", 1, parent=f"branch {at} 2")
    grow(store, "old", "b", 300, parent="a2")
    found, _ = compared(store, "old", "new")
    assert (len(found.dropped), len(found.added)) == (300, 20)
    # Manifests and tips, what differs, where the branches meet and the way between the leaves.
    assert found.pieces_read <= 300 + 20 + 20 + 10 + indexed(320)


def test_the_path_to_the_common_ancestor_is_read_in_pages(store: Store) -> None:
    grow(store, "s", "a", 3)
    grow(store, "s", "b", LONG)
    grow(store, "s", "c", LONG + 100, parent="a1")
    store.session("s").commit(Commit(leaf=f"b{LONG - 1}"))
    found, calls = compared(store, ("s", 3), ("s", 4))
    assert (found.added, found.dropped) == ((), ())
    assert found.ancestor is not None
    assert found.ancestor.id == "a1"
    assert calls < FEW


def test_a_comparison_with_a_manifest_digest_reads_the_session_in_pages(store: Store) -> None:
    grow(store, "s", "a", 5)
    manifest = store.session("s").head().manifest  # type: ignore[union-attr]
    grow(store, "s", "b")
    for old, new in ((manifest, "s"), ("s", manifest)):
        found, calls = compared(store, old, new)
        assert len(found.added) + len(found.dropped) == LONG
        assert found.ancestor is not None
        assert found.ancestor.id == "a4"
        assert found.pieces_read <= 2 + LONG + 1 + indexed(LONG)
        assert calls < FEW


def test_comparing_two_manifests_walks_all_branches_together(store: Store) -> None:
    grow(store, "s", "a", 2)
    for at in range(300):
        grow(store, "s", f"branch {at} ", 4, parent="a1")
    grow(store, "other", "x", 2)
    manifests = [store.session(name).head().manifest for name in ("s", "other")]  # type: ignore[union-attr]
    for old, new in (manifests, manifests[::-1]):
        found, calls = compared(store, old, new)
        assert {len(found.dropped), len(found.added)} == {2 + 300 * 4, 2}
        assert calls < FEW


def test_a_fork_of_a_node_has_only_the_nodes_on_the_path_to_it(store: Store) -> None:
    grow(store, "s", "a", 100)
    grow(store, "s", "b", 50, parent="a49")
    store.fork("s", "path", node="b49")
    found, _ = compared(store, "s", "path")
    assert [node.id for node in found.dropped] == [f"a{at}" for at in range(50, 100)]
    assert found.added == ()
    back, _ = compared(store, "path", "s")
    assert back.added == found.dropped
