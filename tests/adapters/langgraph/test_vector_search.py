"""Semantic search in the long-term memory: LangGraph's own store in memory is the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("numpy", reason="needs the extra: pip install '.[dev]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from langgraph.store.base import PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from casstore.adapters.langgraph import CasstoreStore, vector_search
from casstore.adapters.langgraph.item_records import VectorTables, items_table
from casstore.adapters.langgraph.vector_search import VectorCache, VectorRange
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError, VectorIndexChangedError
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.session.records import Draft
from casstore.store import Store
from casstore.testing import ManualClock
from tests.faults.children import in_children

LETTERS = "abcd"


def counted(texts: Sequence[str]) -> list[list[float]]:
    """Vectors that float32 holds exactly: how often each letter occurs."""
    return [[float(text.count(letter)) for letter in LETTERS] for text in texts]


def reversed_counts(texts: Sequence[str]) -> list[list[float]]:
    """Another model."""
    return [vector[::-1] for vector in counted(texts)]


async def awaited_counts(texts: Sequence[str]) -> list[list[float]]:
    """The same model behind an asynchronous interface."""
    await asyncio.sleep(0)
    return counted(texts)


def index(embed: Any = counted, *fields: str) -> Any:
    return {"dims": len(LETTERS), "embed": embed, "fields": list(fields or ("text",))}


@pytest.fixture
def memory(store: Store) -> CasstoreStore:
    return CasstoreStore(store, index=index())


def keys(found: Sequence[Any]) -> list[str]:
    return [item.key for item in found]


def rows(store: Store) -> int:
    return len(list(VectorTables(store).vectors.scan()))


# --- against the model ------------------------------------------------------------------------

NAMESPACES = [("x",), ("x", "y"), ("x", "yz"), ("z",)]
WORDS = st.text(LETTERS, min_size=1, max_size=6)
PUTS = st.tuples(
    st.sampled_from(NAMESPACES),
    st.sampled_from("klmno"),
    st.lists(WORDS, min_size=1, max_size=3),
    st.sampled_from([None, False, ["text[*]"], ["other", "text[0]"], ["*"]]),
    st.integers(0, 3),
)
SEARCHES = st.tuples(
    st.sampled_from([(), *NAMESPACES]),
    WORDS,
    st.sampled_from([None, {"n": 1}, {"n": {"$gt": 1}}]),
    st.integers(1, 12),
    st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(puts=st.lists(PUTS, max_size=25), searches=st.lists(SEARCHES, min_size=1, max_size=8))
def test_ranks_and_scores_are_those_of_the_store_in_memory(puts: Any, searches: Any) -> None:
    config = index(counted, "text[*]", "other")
    with Store(MemoryEngine()) as store:
        ours, model = CasstoreStore(store, index=config), InMemoryStore(index=config)
        for at, (namespace, key, texts, fields, n) in enumerate(puts):
            # The model refuses equal texts in one put, so each has a number.
            value = {
                "text": [f"{text} {at}.{i}" for i, text in enumerate(texts)],
                "other": f"abcd {at}",
                "n": n,
            }
            for each in (ours, model):
                # The model keeps vectors of an item's earlier texts; after a delete it has none.
                each.delete(namespace, key)
                if n:
                    each.put(namespace, key, value, index=fields)
        for namespace, query, wanted, limit, offset in searches:
            how: Any = {"query": query, "filter": wanted, "limit": limit, "offset": offset}
            found, expected = ours.search(namespace, **how), model.search(namespace, **how)
            assert [item.score for item in found] == [item.score for item in expected]
            # Across namespaces the model orders equal scores by the first put of the namespace.
            every: Any = {"query": query, "filter": wanted, "limit": 100}
            scores = {(i.namespace, i.key): i.score for i in model.search(namespace, **every)}
            assert all(scores[item.namespace, item.key] == item.score for item in found)
            if namespace in (("x", "y"), ("x", "yz"), ("z",)):
                assert keys(found) == keys(expected)


def test_of_many_vectors_the_nearest_are_found(store: Store) -> None:
    import numpy as np

    source = np.random.default_rng(4)
    vectors = source.standard_normal((3000, 8)).astype(np.float32)
    # Equal vectors have equal scores, in the order in which they were put.
    vectors[100:2900:100] = vectors[7]

    def embed(texts: Sequence[str]) -> list[list[float]]:
        return [[float(each) for each in vectors[int(text)]] for text in texts]

    config: Any = {"dims": 8, "embed": embed, "fields": ["at"]}
    ours, model = CasstoreStore(store, index=config), InMemoryStore(index=config)
    puts = [PutOp(("v",), f"{at}", {"at": at}) for at in range(3000)]
    for each in (ours, model):
        each.batch(puts)
    for query in ("7", "3", "2999"):
        for limit, offset in ((1, 0), (10, 0), (40, 5), (3, 2990), (4000, 0)):
            found = ours.search(("v",), query=query, limit=limit, offset=offset)
            expected = model.search(("v",), query=query, limit=limit, offset=offset)
            assert [item.score for item in found] == pytest.approx(
                [item.score for item in expected], abs=1e-12
            )
            assert len(found) == len(expected)
        assert keys(ours.search(("v",), query="7", limit=4)) == ["7", "100", "200", "300"]


@pytest.mark.parametrize("distance", ["cosine", "l2", "inner_product"])
def test_distances_are_those_of_the_database_stores(store: Store, distance: str) -> None:
    import numpy as np

    source = np.random.default_rng(5)
    # Of very different lengths, so that the three orders differ; one is zero, two are equal.
    vectors = (source.standard_normal((500, 8)) * source.uniform(0.01, 1000, (500, 1))).astype(
        np.float32
    )
    vectors[3], vectors[9] = 0, vectors[8]

    def embed(texts: Sequence[str]) -> list[list[float]]:
        return [[float(each) for each in vectors[int(text)]] for text in texts]

    config: Any = {"dims": 8, "embed": embed, "fields": ["at"], "distance_type": distance}
    memory = CasstoreStore(store, index=config)
    memory.batch([PutOp(("v",), f"{at}", {"at": at}) for at in range(500)])
    wide = vectors.astype(np.float64)
    for query in (8, 40, 499):
        lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(wide[query])
        expected = {
            "cosine": wide @ wide[query] / np.where(lengths, lengths, 1),
            "l2": -np.linalg.norm(wide - wide[query], axis=1),
            "inner_product": wide @ wide[query],
        }[distance]
        found = memory.search(("v",), query=str(query), limit=20)
        best = np.argsort(-expected, kind="stable")[:20]
        assert [item.score for item in found] == pytest.approx(expected[best], rel=1e-9, abs=1e-9)
        assert set(keys(found)) == {f"{at}" for at in best}


def test_embedders_of_any_kind_are_used(store: Store) -> None:
    async def work(embed: Any) -> list[str]:
        memory = CasstoreStore(store, index=index(embed))
        await memory.areindex()
        await memory.aput(("a",), "1", {"text": "aa"})
        await memory.abatch([PutOp(("a",), "2", {"text": "ab"}), PutOp(("a",), "3", {"text": "b"})])
        results: Any = await memory.abatch(
            [SearchOp(("a",), query="a"), SearchOp(("a",), query="b")]
        )
        assert keys(results[1]) == ["3", "2", "1"]
        return keys(await memory.asearch(("a",), query="a"))

    for embed in (counted, awaited_counts):
        assert asyncio.run(work(embed)) == ["1", "2", "3"]
    with pytest.raises(ValueError, match="async"):
        CasstoreStore(store, index=index(awaited_counts)).search(("a",), query="a")


def test_an_invalid_index_configuration_is_refused(store: Store) -> None:
    wrong: Any
    for wrong in ({"dims": 4}, {"embed": counted}, index(counted) | {"dims": 0}, {"dims": "4"}):
        with pytest.raises(InvalidInputError):
            CasstoreStore(store, index=wrong)
    with pytest.raises(InvalidInputError, match="distance_type must be one of cosine, l2"):
        CasstoreStore(store, index=index() | {"distance_type": "hamming"})
    with pytest.raises(InvalidInputError, match="fields"):
        CasstoreStore(store, index=index() | {"fields": "text"})
    for embed in (lambda texts: [[1.0]] * len(texts), lambda texts: []):
        with pytest.raises(InvalidInputError, match="embed must return"):
            CasstoreStore(store, index=index(embed)).put(("a",), "k", {"text": "a"})
    with pytest.raises(InvalidInputError, match="float32"):
        CasstoreStore(store, index=index(lambda texts: [[1e300] * 4 for _ in texts])).put(
            ("a",), "k", {"text": "a"}
        )
    assert CasstoreStore(store).search(()) == []


# --- vectors go with their items ------------------------------------------------------------------


def test_vectors_change_and_go_with_their_item(store: Store, memory: CasstoreStore) -> None:
    for at, text in enumerate(("aaa", "aab", "bbb")):
        memory.put(("a",), f"{at}", {"text": text})
    assert keys(memory.search(("a",), query="a")) == ["0", "1", "2"]
    memory.put(("a",), "2", {"text": "a"})
    memory.delete(("a",), "0")
    found = memory.search(("a",), query="a")
    assert [(item.key, item.score) for item in found] == [
        ("2", 1.0),
        ("1", pytest.approx(0.8944, abs=1e-4)),
    ]
    assert rows(store) == 2
    # A put that indexes nothing leaves no vectors, nor does one by a store without an index.
    memory.put(("a",), "2", {"text": "a"}, index=False)
    CasstoreStore(store).put(("a",), "1", {"text": "b"})
    assert [(item.key, item.score) for item in memory.search((), query="a")] == [
        ("1", None),
        ("2", None),
    ]
    assert rows(store) == 0
    memory.put(("a",), "1", {"text": "b"})
    CasstoreStore(store).delete(("a",), "1")
    assert rows(store) == 0
    assert check(store, level="full").counts == {}


def test_vectors_expire_with_their_item(tmp_path: Path) -> None:
    clock = ManualClock()
    engine = LmdbEngine(str(tmp_path / "timed"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        memory = CasstoreStore(store, index=index(), ttl={"omit_expired": True})
        memory.put(("a",), "short", {"text": "a"}, ttl=1)
        memory.put(("a",), "long", {"text": "ab"}, ttl=3)
        clock.now_ms += 59_000
        # A search restarts the time of what it returns.
        assert keys(memory.search(("a",), query="a", limit=1)) == ["short"]
        clock.now_ms += 59_000
        assert keys(memory.search(("a",), query="a", refresh_ttl=False)) == ["short", "long"]
        clock.now_ms += 2_000
        assert keys(memory.search(("a",), query="a", refresh_ttl=False)) == ["long"]
        assert memory.sweep_ttl() == 1
        assert rows(store) == 1
        assert check(store, level="full").counts == {}


def test_vectors_without_their_item_are_found_by_check(store: Store, memory: CasstoreStore) -> None:
    memory.put(("a",), "k", {"text": "a"})
    assert check(store, level="full").counts == {}
    draft = Draft(store)
    draft.delete(items_table(store), ("a.", "k"))
    draft.commit()
    assert check(store).counts == {"record_index_wrong": 1, "record_orphaned": 1}


def test_a_copy_has_the_vectors_of_the_items_that_it_has(store: Store) -> None:
    CasstoreStore(store, index=index()).put(("a",), "k", {"text": "a"})
    with Store(MemoryEngine()) as target:
        theirs = CasstoreStore(target, index=index(reversed_counts))
        theirs.put(("a",), "k", {"text": "d"})
        theirs.put(("a",), "own", {"text": "a"})
        copy(store, target)
        memory = CasstoreStore(target, index=index())
        # Vectors of the other model do not count.
        found = memory.search(("a",), query="a")
        assert [(item.key, item.score) for item in found] == [("k", 1.0), ("own", None)]
        assert memory.reindex() == 1
        assert [item.score for item in memory.search(("a",), query="a")] == [1.0, 1.0]
        assert check(target, level="full").counts == {}


def test_a_copy_removes_vectors_of_items_that_it_replaces(store: Store) -> None:
    CasstoreStore(store).put(("a",), "k", {"text": "b"})
    with Store(MemoryEngine()) as target:
        memory = CasstoreStore(target, index=index())
        memory.put(("a",), "k", {"text": "a"})
        copy(store, target)
        assert rows(target) == 0
        assert [item.score for item in memory.search(("a",), query="a")] == [None]
        assert check(target, level="full").counts == {}


# --- the cache ----------------------------------------------------------------------------------


def test_changes_of_another_process_are_found(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def write() -> str:
        with CasstoreStore.from_path(path, "relaxed", index=index()) as memory:
            memory.put(("a",), "new", {"text": "d"})
            memory.put(("a",), "2", {"text": "dc"})
            memory.delete(("a",), "1")
        return "done"

    with CasstoreStore.from_path(path, "relaxed", index=index()) as memory:
        memory.batch([PutOp(("a",), f"{at}", {"text": "ab" + "a" * at}) for at in range(200)])
        assert keys(memory.search(("a",), query="d", limit=1)) == ["0"]
        assert in_children(write) == ["done"]
        found = memory.search(("a",), query="d", limit=3)
        assert [(item.key, item.score and item.score > 0) for item in found[:2]] == [
            ("new", True),
            ("2", True),
        ]
        assert "1" not in keys(memory.search(("a",), query="b", limit=300))


def test_many_changes_are_found_one_after_the_other(memory: CasstoreStore) -> None:
    """Also when most rows of the cached matrix are replaced, and when it has none."""
    model = InMemoryStore(index=index())
    assert memory.search(("a",), query="a") == []
    for at in range(120):
        key, text = f"{at * 7 % 50}", "abcd"[at % 4] * (1 + at % 3) + "abcd"[at // 4 % 4] * 2
        for each in (memory, model):
            each.delete(("a",), key)
            if at % 5:
                each.put(("a",), key, {"text": f"{text} {at}"})
        for query in ("ab", "d"):
            found = memory.search(("a",), query=query, limit=60)
            assert [(item.key, item.score) for item in found] == [
                (item.key, item.score) for item in model.search(("a",), query=query, limit=60)
            ]


def test_the_cache_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # 80 bytes are those of one namespace.
    monkeypatch.setattr(vector_search, "VectorCache", partial(VectorCache, size_bytes=100))
    loaded: list[str] = []
    read = VectorRange.read

    def noted(self: VectorRange, records: Any) -> Any:
        loaded.append(self.prefix)
        return read(self, records)

    monkeypatch.setattr(VectorRange, "read", noted)
    memory = CasstoreStore(store, index=index())
    for name in "xyz":
        memory.batch([PutOp((name,), f"{at}", {"text": "a"}) for at in range(5)])
        assert len(memory.search((name,), query="a")) == 5
    for name in "zxz":
        memory.search((name,), query="a")
    assert loaded == ["x.", "y.", "z.", "x.", "z."]


# --- another index ------------------------------------------------------------------------------


def failing(after: int) -> Callable[[Sequence[str]], list[list[float]]]:
    """``reversed_counts``, interrupted after some calls."""
    calls = 0

    def embed(texts: Sequence[str]) -> list[list[float]]:
        nonlocal calls
        calls += 1
        if calls > after:
            raise ConnectionError("the model does not answer")
        return reversed_counts(texts)

    return embed


def test_vectors_of_another_index_are_detected_and_replaced(store: Store) -> None:
    memory = CasstoreStore(store, index=index())
    for at in range(10):
        memory.put(("a",), f"{at}", {"text": "a" * at + "d"}, index=False if at == 9 else None)
    for other in (index(reversed_counts), index(counted, "other"), index() | {"dims": 5}):
        changed = CasstoreStore(store, index=other)
        with pytest.raises(VectorIndexChangedError, match="reindex"):
            changed.put(("a",), "k", {"other": "n"})
    with pytest.raises(VectorIndexChangedError, match="counted"):
        CasstoreStore(store, index=index(reversed_counts)).search(("a",), query="a")
    assert CasstoreStore(store).get(("a",), "k") is None
    changed = CasstoreStore(store, index=index(reversed_counts))
    assert changed.reindex() == 9
    assert [item.score for item in changed.search(("a",), query="d", limit=1)] == [1.0]
    assert changed.reindex() == 0
    assert changed.reindex(rebuild=True) == 9
    assert rows(store) == 9
    with pytest.raises(VectorIndexChangedError):
        memory.search(("a",), query="a")


def test_an_interrupted_reindex_continues(store: Store) -> None:
    plain = CasstoreStore(store)
    plain.batch([PutOp(("a",), f"{at:02}", {"text": "a" * at + "d"}) for at in range(50)])
    embed = failing(3)
    with pytest.raises(ConnectionError):
        CasstoreStore(store, index=index(embed)).reindex(batch=10)
    assert rows(store) == 30
    # The same function by its name, and it answers again.
    memory = CasstoreStore(store, index=index(failing(99)))
    found = memory.search(("a",), query="d", limit=50)
    assert [item.score is None for item in found] == [False] * 30 + [True] * 20
    # Items that are put meanwhile are embedded by the put.
    memory.put(("a",), "45", {"text": "d"})
    assert memory.reindex(batch=10) == 19
    assert all(item.score is not None for item in memory.search(("a",), query="d", limit=50))
    assert check(store, level="full").counts == {}


def test_an_item_that_is_changed_while_it_is_embedded_keeps_its_newer_vectors(store: Store) -> None:
    plain = CasstoreStore(store)
    plain.put(("a",), "k", {"text": "a"})
    memories: list[CasstoreStore] = []

    def embed(texts: Sequence[str]) -> list[list[float]]:
        if texts == ["a"]:
            memories[0].put(("a",), "k", {"text": "b"})
        return counted(texts)

    memory = CasstoreStore(store, index=index(embed))
    memories.append(memory)
    assert memory.reindex() == 0
    assert [item.score for item in memory.search(("a",), query="b")] == [1.0]


def test_the_fields_of_a_put_are_kept_by_reindex(store: Store) -> None:
    memory = CasstoreStore(store, index=index())
    memory.put(("a",), "1", {"text": "a", "title": "b"}, index=["title"])
    memory.put(("a",), "2", {"text": "a", "title": "b"})
    assert memory.reindex(rebuild=True) == 2
    found = memory.search(("a",), query="b")
    assert [(item.key, item.score) for item in found] == [("1", 1.0), ("2", 0.0)]


def test_vectors_work_on_every_engine(any_store: Store) -> None:
    memory = CasstoreStore(any_store, index=index())
    memory.batch([PutOp(("a", f"{at}"), "k", {"text": "ab" * at + "c"}) for at in range(20)])
    found = memory.search(("a",), query="c", limit=2, filter={"text": {"$ne": "c"}})
    assert [item.namespace for item in found] == [("a", "1"), ("a", "2")]
    memory.delete(("a", "1"), "k")
    memory.put(("a", "7"), "k", {"text": "c"})
    assert [item.namespace[1] for item in memory.search(("a",), query="c", limit=2)] == ["0", "7"]
