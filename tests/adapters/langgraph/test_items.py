"""The long-term memory of an application: LangGraph's own store in memory is the model."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langgraph.config import get_store
from langgraph.graph import START, StateGraph
from langgraph.store.base import (
    GetOp,
    InvalidNamespaceError,
    ListNamespacesOp,
    MatchCondition,
    PutOp,
    SearchOp,
)
from langgraph.store.memory import InMemoryStore

import casstore
from casstore.adapters.langgraph import CasstoreSaver, CasstoreStore
from casstore.adapters.langgraph.item_records import items_table
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import (
    ClosedError,
    CorruptionError,
    InvalidInputError,
    NoVectorIndexError,
    UnsafePayloadError,
)
from casstore.maintenance import gc
from casstore.session.records import Draft
from casstore.store import Store
from casstore.testing import ManualClock
from tests.adapters.langgraph.graphs import Plan, on
from tests.adapters.langgraph.test_serializer import Mine
from tests.adapters.langgraph.test_threads import in_between, objects
from tests.faults.children import in_children


@pytest.fixture
def memory(store: Store) -> CasstoreStore:
    return CasstoreStore(store)


def plain(result: Any) -> Any:
    """A result without its times, in an order of its own."""
    if isinstance(result, list):
        return sorted(map(plain, result))
    return (result.namespace, result.key, repr(result.value)) if hasattr(result, "key") else result


LABELS = ("a", "b", "ab", "users", "ß", "x" * 300)
FILTERS: list[Any] = [
    None, {"kind": "note"}, {"n": 3}, {"n": {"$gt": 3}}, {"n": {"$gte": 2, "$lt": 5}},
    {"n": {"$ne": 1}}, {"n": {"$eq": 2}}, {"tags": ["x", "y"]}, {"deep": {"in": {"side": True}}},
    {"missing": None}, {"kind": "none"},
]  # fmt: skip


def test_the_store_agrees_with_the_in_memory_store_of_langgraph(memory: CasstoreStore) -> None:
    model, source = InMemoryStore(), random.Random(5)

    def namespace() -> tuple[str, ...]:
        return tuple(source.choice(LABELS) for _ in range(source.randint(1, 4)))

    for _ in range(300):
        place, key = namespace(), source.choice(("k", "k2", "l" * 400, "ü"))
        value = {
            "kind": source.choice(("note", "fact")),
            "n": source.randint(0, 6),
            "tags": source.choice((["x", "y"], [])),
            "deep": {"in": {"side": source.random() < 0.5}},
            "text": "long " * source.randint(0, 200),
        }
        for each in (memory, model):
            if value["n"] == 0:
                each.delete(place, key)
            else:
                each.put(place, key, value)
        assert plain(memory.get(place, key)) == plain(model.get(place, key))
    assert memory.get(("nobody",), "k") is None
    for wanted in FILTERS:
        for place in (
            (),
            ("a",),
            ("ab", "a"),
            ("x" * 300,),
            ("x" * 300, "x" * 300, "b"),
            ("none",),
        ):
            ours = memory.search(place, filter=wanted, limit=1000)
            assert plain(ours) == plain(model.search(place, filter=wanted, limit=1000))
    # The model goes on listing a namespace whose last item was deleted.
    for emptied in [each for each, items in model._data.items() if not items]:
        del model._data[emptied]
    for depth in (None, 1, 2):
        for prefix in (None, ("a",), ("*", "b")):
            for suffix in (None, ("ß",), ("b", "*")):
                options: Any = {
                    "prefix": prefix,
                    "suffix": suffix,
                    "max_depth": depth,
                    "limit": 999,
                }
                assert memory.list_namespaces(**options) == model.list_namespaces(**options)


def test_search_pages_are_ordered_latest_first(tmp_path: Path) -> None:
    clock = ManualClock()
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        memory = CasstoreStore(store)
        for n in range(30):
            clock.now_ms += 1
            memory.put(("docs",), f"d{n}", {"n": n})
        memory.put(("docs",), "d3", {"n": 3, "again": True})
        clock.now_ms += 1
        found = [memory.search(("docs",), limit=7, offset=at) for at in range(0, 35, 7)]
        keys = [item.key for page in found for item in page]
        # Put within the same millisecond, but later.
        assert keys[:3] == ["d3", "d29", "d28"]
        assert sorted(keys) == sorted(f"d{n}" for n in range(30))
        again = memory.get(("docs",), "d3")
        assert again is not None
        assert again.created_at < again.updated_at
        assert memory.search(("docs",), limit=0) == []


_TTL: Any = {"refresh_on_read": False, "default_ttl": 5, "omit_expired": True}


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[tuple[CasstoreStore, ManualClock, Store]]:
    clock = ManualClock()
    engine = LmdbEngine(str(tmp_path / "timed"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        yield CasstoreStore(store, ttl=_TTL), clock, store


def test_expired_items_are_omitted_if_asked_for_and_then_swept(
    timed: tuple[CasstoreStore, ManualClock, Store],
) -> None:
    memory, clock, store = timed
    memory.put(("a",), "default", {"text": "long " * 500})
    memory.put(("a",), "short", {"n": 1}, ttl=0.5)
    memory.put(("a",), "ever", {"n": 1}, ttl=None)
    clock.now_ms += 31_000
    assert memory.get(("a",), "short") is None
    assert [item.key for item in memory.search(("a",))] == ["ever", "default"]
    # A read restarts the time to live only if asked to.
    assert memory.get(("a",), "default", refresh_ttl=True)
    clock.now_ms += 280_000
    assert memory.get(("a",), "default")
    assert memory.search(("a",), refresh_ttl=True)
    clock.now_ms += 280_000
    assert memory.get(("a",), "default")
    clock.now_ms += 21_000
    assert memory.get(("a",), "default") is None
    assert len(list(items_table(store).scan())) == 3
    assert memory.sweep_ttl() == 2
    assert memory.sweep_ttl() == 0
    assert [item.key for item in memory.search(("a",))] == ["ever"]
    gc.collect(store, grace_ms=0)
    assert objects(store) == 0
    # Put again, it is new.
    memory.put(("a",), "short", {"n": 2}, ttl=1)
    found = memory.get(("a",), "short")
    assert found is not None
    assert found.created_at == found.updated_at


def test_a_namespace_whose_items_have_all_expired_is_not_listed(
    timed: tuple[CasstoreStore, ManualClock, Store],
) -> None:
    """The namespace was listed until the items were swept, and may name a person."""
    memory, clock, _ = timed
    for n in range(40):
        memory.put(("users", "ada"), f"{n:02}", {"n": n}, ttl=1)
        memory.put(("users", "bob"), f"{n:02}", {"n": n}, ttl=1 if n < 39 else None)
    assert memory.list_namespaces() == [("users", "ada"), ("users", "bob")]
    clock.now_ms += 61_000
    assert memory.list_namespaces() == [("users", "bob")]
    assert memory.list_namespaces(suffix=("ada",)) == []
    assert memory.list_namespaces(max_depth=1) == [("users",)]
    assert memory.list_namespaces(limit=1) == [("users", "bob")]


def test_an_item_that_is_put_again_while_others_are_swept_stays(
    timed: tuple[CasstoreStore, ManualClock, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, clock, store = timed
    for n in range(5):
        memory.put(("a",), f"{n}", {"n": n}, ttl=1)
    clock.now_ms += 60_000
    write = store.engine.write

    def late(change: Write) -> WriteResult:
        monkeypatch.setattr(store.engine, "write", write)
        memory.put(("a",), "3", {"n": "new"}, ttl=1)
        return write(change)

    monkeypatch.setattr(store.engine, "write", late)
    assert memory.sweep_ttl() == 4
    assert [item.value for item in memory.search(("a",))] == [{"n": "new"}]


def test_a_batch_is_read_before_it_is_written_and_is_one_write(
    store: Store, memory: CasstoreStore
) -> None:
    memory.put(("a",), "k", {"n": 1})
    ops: Any = [
        PutOp(("a",), "k", {"n": 2}),
        GetOp(("a",), "k"),
        PutOp(("a",), "k", {"n": 3}),
        PutOp(("b",), "gone", {"n": 1}),
        PutOp(("b",), "gone", None),
        SearchOp(("a",)),
        ListNamespacesOp((MatchCondition("prefix", ("a",)),)),
    ]
    results: Any = memory.batch(ops)
    assert [results[0], results[1].value, results[2], results[3], results[4]] == [
        None,
        {"n": 1},
        None,
        None,
        None,
    ]
    assert [item.value for item in results[5]] == [{"n": 1}]
    assert results[6] == [("a",)]
    assert [(item.namespace, item.value) for item in memory.search(())] == [(("a",), {"n": 3})]
    # One that cannot be stored takes the others with it.
    with pytest.raises(UnsafePayloadError):
        memory.batch([PutOp(("a",), "k", {"n": 4}), PutOp(("c",), "k", {"own": Mine(name="x")})])
    assert len(list(items_table(store).scan())) == 1
    allowing = CasstoreStore(store, allowed=[Mine])
    allowing.put(("c",), "k", {"own": Mine(name="x")})
    assert allowing.search(("c",))[0].value == {"own": Mine(name="x")}
    with pytest.raises(UnsafePayloadError):
        memory.get(("c",), "k")


def test_a_query_is_ignored_without_an_index(memory: CasstoreStore) -> None:
    memory.put(("a",), "k", {"n": 1}, index=["n"])
    memory.put(("a",), "l", {"n": 2})
    found = memory.search(("a",), query="something like it")
    assert [(item.key, item.score) for item in found] == [("l", None), ("k", None)]
    assert memory.search(("a",), query="something", filter={"n": 1})[0].key == "k"
    with pytest.raises(NoVectorIndexError, match="embedder"):
        memory.reindex()


def test_invalid_namespaces_filters_and_values_are_refused(memory: CasstoreStore) -> None:
    memory.put(("a",), "k", {"n": 1})
    for namespace in ((), ("a.b",), ("",), ("langgraph",)):
        with pytest.raises(InvalidNamespaceError):
            memory.put(namespace, "k", {})
    with pytest.raises(ValueError, match=r"."):
        memory.batch([PutOp(("a.b",), "k", {})])
    with pytest.raises(InvalidInputError, match=r"\$like"):
        memory.search((), filter={"n": {"$like": 1}})
    with pytest.raises(InvalidInputError, match="limit"):
        memory.search((), limit=-1)
    with pytest.raises(InvalidInputError, match="minutes"):
        memory.put(("a",), "k", {}, ttl=float("nan"))
    with pytest.raises(InvalidInputError, match="an operation must be"):
        memory.batch(["nonsense"])  # type: ignore[list-item]
    assert memory.search((), filter={"n": {"$gt": "text"}}) == []
    assert [item.value for item in memory.search(())] == [{"n": 1}]


def test_no_two_updates_have_the_same_time(any_store: Store) -> None:
    """On a clock that stands still, in two objects, alone and in a batch."""
    memories = [CasstoreStore(any_store), CasstoreStore(any_store)]
    expected: list[str] = []
    for at in range(12):
        memory = memories[at % 2]
        memory.put(("a",), f"{-at}", {"n": at})
        memory.batch([PutOp(("a", f"{at}"), f"{n}", {}) for n in range(25)])
        expected += [f"{-at}", *[f"{n}" for n in range(25)]]
    memory.put(("a",), "-3", {"n": "again"})
    expected.append(expected.pop(3 * 26))
    found = memory.search(("a",), limit=1000)
    assert [item.key for item in found] == expected[::-1]
    assert len({item.updated_at for item in found}) == len(found)
    again = memory.get(("a",), "-3")
    assert again is not None
    assert again.created_at < again.updated_at


def test_no_two_updates_of_processes_have_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "shared"

    def work(name: str) -> str:
        # A clock that stands still: all of them choose the same times.
        engine = LmdbEngine(str(path), durability="relaxed", clock=ManualClock())
        with Store(engine) as store:
            for at in range(50):
                CasstoreStore(store).put(("a", name), f"{at}", {"n": at})
        return "done"

    assert in_children(partial(work, "p"), partial(work, "q")) == ["done", "done"]
    with CasstoreStore.from_path(path, "relaxed") as memory:
        found = memory.search(("a",), limit=1000)
    assert len(found) == len({item.updated_at for item in found}) == 100


def test_writers_at_the_same_moment_lose_nothing(memory: CasstoreStore) -> None:
    gate = threading.Barrier(6)

    def write(n: int) -> None:
        gate.wait()
        for at in range(10):
            memory.batch([PutOp(("shared",), "k", {"by": n}), PutOp(("own", f"{n}"), f"{at}", {})])

    workers = [threading.Thread(target=write, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(memory.search(("own",), limit=100)) == 60
    assert len(memory.search(("shared",))) == 1


def test_an_item_put_concurrently_keeps_its_creation_time(
    timed: tuple[CasstoreStore, ManualClock, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, clock, _ = timed

    def meanwhile() -> None:
        memory.put(("a",), "k", {"n": 1}, ttl=None)
        clock.now_ms += 5

    in_between(monkeypatch, meanwhile)
    memory.put(("a",), "k", {"n": 2}, ttl=None)
    found = memory.get(("a",), "k")
    assert found is not None
    assert found.value == {"n": 2}
    assert found.created_at < found.updated_at


def test_a_graph_remembers_across_threads_in_the_same_store(tmp_path: Path) -> None:
    def remember(state: Plan) -> Any:
        memory = get_store()
        known = memory.search(("names",))
        memory.put(("names",), state["answer"], {"name": state["answer"]})
        return {"log": sorted(item.value["name"] for item in known)}

    builder = StateGraph(Plan)
    builder.add_node("remember", remember)
    builder.add_edge(START, "remember")

    async def work() -> None:
        async with (
            CasstoreSaver.from_path(tmp_path / "s", "relaxed") as saver,
            CasstoreStore.from_path(tmp_path / "s", "relaxed") as memory,
        ):
            graph = builder.compile(checkpointer=saver, store=memory)
            await graph.ainvoke({"log": [], "answer": "Ada"}, on("one"))
            done = await graph.ainvoke({"log": [], "answer": "Bob"}, on("two"))
            assert done["log"] == ["Ada"]
            await memory.aput(("more",), "k", {"n": 1}, ttl=1)
            assert await memory.alist_namespaces() == [("more",), ("names",)]
            assert await memory.asweep_ttl() == 0
            await memory.adelete(("more",), "k")
            assert await memory.aget(("more",), "k") is None

    asyncio.run(work())
    with CasstoreStore.from_path(tmp_path / "s", "relaxed") as memory:
        assert len(memory.search(("names",))) == 2
        with casstore.open(tmp_path / "s", "relaxed") as store:
            gc.collect(store, grace_ms=0)
        assert len(memory.search(("names",))) == 2
    with pytest.raises(ClosedError):
        memory.get(("names",), "Ada")


@pytest.mark.parametrize(
    "content", [{}, [{}, 1], [{}, "1", 1], [{}, 1, [1, 2, 3]], [{}, 1, [1, "2"]]]
)
def test_a_damaged_item_is_reported(store: Store, memory: CasstoreStore, content: Any) -> None:
    draft = Draft(store)
    draft.put(items_table(store), ("a.", "k"), content)
    draft.commit()
    with pytest.raises(CorruptionError, match="is damaged"):
        memory.get(("a",), "k")
