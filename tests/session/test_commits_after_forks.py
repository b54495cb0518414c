"""The first commit after a fork or a rewind reads no row before it is made.

It must write what a process writes that knows nothing of the session and reads it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, RowKey
from casstore.errors import DuplicateNodeError
from casstore.format.digest import Kind
from casstore.format.node_index import PAGE_NODES
from casstore.session.data import Commit, NodeDraft
from casstore.store import Store

NOW_MS = 1_760_000_000_000


class CountingEngine(MemoryEngine):
    """A memory engine whose clock stands still, and that counts how often it is asked for rows."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: NOW_MS)
        self.asked = 0
        #: What somebody else does, once, behind our next reading.
        self.meanwhile: Callable[[], object] | None = None

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Count, and answer."""
        self.asked += 1
        rows = super().get_rows(keys)
        if self.meanwhile is not None:
            then, self.meanwhile = self.meanwhile, None
            then()
        return rows


def said(*names: str) -> Commit:
    return Commit(append=[NodeDraft(name, {"said": name}) for name in names])


def grown(store: Store, count: int) -> None:
    """A session of two commits."""
    store.session("s").commit(said(*[f"n{at}" for at in range(count - 1)]))
    store.session("s").commit(said(f"n{count - 1}"))


def whole(store: Store) -> str:
    grown(store, 5)
    store.fork("s", "f")
    return "f"


def whole_at_the_end_of_a_page(store: Store) -> str:
    grown(store, PAGE_NODES)
    store.fork("s", "f")
    return "f"


def of_a_revision(store: Store) -> str:
    grown(store, 5)
    store.fork("s", "f", at=1)
    return "f"


def of_a_node(store: Store) -> str:
    grown(store, 5)
    store.fork("s", "f", node="n2")
    return "f"


def of_a_fork_that_nobody_used(store: Store) -> str:
    grown(store, 5)
    store.fork("s", "between")
    store.fork("between", "f")
    return "f"


def of_a_node_below_another_fork(store: Store) -> str:
    grown(store, 5)
    store.fork("s", "between")
    store.session("between").commit(said("b0", "b1"))
    store.fork("between", "f", node="n3")
    return "f"


def of_forks(store: Store) -> str:
    grown(store, 5)
    before = "s"
    for at in range(6):
        name = "f" if at == 5 else f"f{at}"
        store.fork(before, name)
        if name != "f":
            store.session(name).commit(said(f"own {at}"))
        before = name
    return "f"


def of_a_branch(store: Store) -> str:
    grown(store, 5)
    aside = NodeDraft("aside", {"said": "aside"}, parent="n1")
    store.session("s").commit(Commit(append=[aside]))
    store.fork("s", "f", node="aside")
    return "f"


def gone_back(store: Store) -> str:
    grown(store, 5)
    store.session("s").rewind(1)
    return "s"


def gone_back_to_where_it_stands(store: Store) -> str:
    grown(store, 5)
    store.session("s").rewind(2)
    return "s"


def gone_back_on_a_fork(store: Store) -> str:
    whole(store)
    fork = store.session("f")
    fork.commit(said("f0"))
    fork.commit(said("f1"))
    fork.rewind(3)
    return "f"


FORKS = [
    whole,
    whole_at_the_end_of_a_page,
    of_a_revision,
    of_a_node,
    of_a_fork_that_nobody_used,
    of_a_node_below_another_fork,
    of_forks,
    of_a_branch,
]
ALL = [*FORKS, gone_back, gone_back_to_where_it_stands, gone_back_on_a_fork]


def contents(engine: MemoryEngine) -> tuple[Any, Any]:
    rows = {
        (table, row.key): row.value
        # A mark for plans of retention is random.
        for table in set(TABLES) - {"retention"}
        for row in engine.scan_rows(table, limit=10_000)
    }
    return rows, [(info.digest, info.kind, info.children) for info in engine.scan_objects()]


def forgotten(store: Store) -> Store:
    """The same store, by somebody who has seen nothing of it yet."""
    return Store(store.engine)


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_a_commit_with_a_cached_head_writes_the_same_as_one_without(
    make: Callable[[Store], str],
) -> None:
    found = []
    for known in (True, False):
        engine = CountingEngine()
        store = Store(engine)
        name = make(store)
        writer = store if known else forgotten(store)
        engine.asked = 0
        writer.session(name).commit(said("x0", "x1", "x2"))
        assert (engine.asked == 0) == known
        # And the next one, which goes on from what the first has left.
        writer.session(name).commit(said("x3"))
        assert [node.id for node in forgotten(store).session(name).nodes()][-4:] == [
            "x0", "x1", "x2", "x3",
        ]  # fmt: skip
        found.append(contents(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", FORKS, ids=lambda make: make.__name__)
def test_a_fork_refuses_ids_of_nodes_that_it_shares_with_its_source(
    make: Callable[[Store], str],
) -> None:
    store = Store(CountingEngine())
    make(store)
    with pytest.raises(DuplicateNodeError):
        store.session("f").commit(said("n0"))
    # What the source has said since is the source's own.
    store.session("s").commit(said("later"))
    assert store.session("f").commit(said("later")).nodes == ("later",)


def test_a_fork_of_a_node_accepts_ids_of_nodes_outside_its_path() -> None:
    store = Store(CountingEngine())
    of_a_branch(store)
    assert store.session("f").commit(said("n4")).nodes == ("n4",)


def test_ids_of_nodes_that_a_rewind_left_behind_can_be_appended_again() -> None:
    store = Store(CountingEngine())
    gone_back(store)
    with pytest.raises(DuplicateNodeError):
        store.session("s").commit(said("n0"))
    assert store.session("s").commit(said("n4")).nodes == ("n4",)


def test_a_fork_reads_the_rows_of_its_source_once() -> None:
    engine = CountingEngine()
    store = Store(engine)
    grown(store, 5)
    engine.asked = 0
    store.fork("s", "f")
    assert engine.asked == 1


def test_a_commit_reads_a_fork_again_after_another_handle_has_committed_to_it() -> None:
    store = Store(CountingEngine())
    whole(store)
    forgotten(store).session("f").commit(said("theirs"))
    store.session("f").commit(said("ours"))
    assert [node.id for node in store.session("f").nodes()][-2:] == ["theirs", "ours"]


@pytest.mark.parametrize("known", [True, False], ids=["tried at once", "read first"])
def test_objects_of_a_failed_commit_attempt_are_not_written(known: bool) -> None:
    engine = CountingEngine()
    store = Store(engine)
    whole(store)
    theirs, writer = forgotten(store).session("f"), store if known else forgotten(store)
    if known:
        theirs.commit(said("theirs"))
    else:
        engine.meanwhile = lambda: theirs.commit(said("theirs"))
    writer.session("f").commit(said("ours"))
    nodes = [node.digest for node in store.session("f").nodes()]
    stored = [info.digest for info in engine.scan_objects() if info.kind == Kind.NODE]
    assert sorted(stored) == sorted(nodes)
