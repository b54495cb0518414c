"""Semantic search by pgvector, on a server that has it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

for needed in ("numpy", "psycopg", "langgraph.store.postgres"):
    pytest.importorskip(needed, reason="needs the extra: pip install '.[dev]'")

import psycopg
from langgraph.store.base import PutOp
from langgraph.store.memory import InMemoryStore

import casstore
from casstore.adapters.langgraph import CasstoreStore
from casstore.adapters.langgraph.vector_search import VectorCache, VectorRange
from casstore.engine.protocol import (
    PutRow,
    RowKey,
    VectorChange,
    VectorCopy,
    VectorPart,
    VectorSearching,
    Write,
)
from casstore.maintenance.check import check
from casstore.store import Store
from servers.postgres import Server
from tests.adapters.langgraph.test_item_import_postgres import database

LETTERS = "abcd"


def counted(texts: Sequence[str]) -> list[list[float]]:
    return [[float(text.count(letter)) for letter in LETTERS] for text in texts]


def index(**more: Any) -> Any:
    return {"dims": 4, "embed": counted, "fields": ["text", "more[*]"], **more}


@pytest.fixture
def url(postgres_server: Server) -> Iterator[str]:
    """A database of its own: an extension belongs to all of one."""
    with database(postgres_server, "searched") as made, psycopg.connect(made) as connection:
        offered = "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"
        if connection.execute(offered).fetchone() is None:
            pytest.skip("this server has no pgvector")
        yield made


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with casstore.open(url, "relaxed") as made:
        yield made


def copies(url: str) -> int:
    """How many vectors the server has."""
    with psycopg.connect(url) as connection:
        if connection.execute("SELECT to_regclass('casstore.vectors')").fetchone() == (None,):
            return 0
        [[number]] = connection.execute("SELECT count(*) FROM casstore.vectors").fetchall()
        return int(number)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The namespaces that were searched in this process, and not on the server."""
    find, searched = VectorCache.find, list[str]()

    def noted(self: VectorCache, below: VectorRange) -> Any:
        searched.append(below.prefix)
        return find(self, below)

    monkeypatch.setattr(VectorCache, "find", noted)
    return searched


def scores(found: Sequence[Any]) -> list[tuple[str, float | None]]:
    return [(item.key, item.score) for item in found]


def test_the_server_ranks_and_scores_as_the_store_in_memory(
    local: list[str], store: Store, url: str
) -> None:
    ours, model = CasstoreStore(store, index=index()), InMemoryStore(index=index())
    # Without the extension, the search is in this process.
    ours.put(("x",), "k", {"text": "a"})
    assert scores(ours.search(("x",), query="a")) == [("k", 1.0)]
    assert copies(url) == 0
    ours.delete(("x",), "k")
    ours.setup()
    assert local.pop()
    texts = [LETTERS[n % 4] * (1 + n % 7) + LETTERS[n // 4 % 4] * (n % 3) for n in range(200)]
    texts[17] = "z"
    for each in (ours, model):
        each.batch(
            [
                PutOp(
                    ("x", "y") if n % 3 else ("x",), f"{n}",
                    {"text": f"{text} {n}", "more": [f"d{n}"] * (n % 2), "n": n % 5},
                    index=False if n == 50 else None,
                )
                for n, text in enumerate(texts)
            ]
        )  # fmt: skip
    for namespace in (("x", "y"), ("x",), ()):
        for how in ({}, {"limit": 150}, {"offset": 30}, {"filter": {"n": 2}}, {"limit": 400}):
            asked: Any = {"query": "abbd", **how}
            found, expected = ours.search(namespace, **asked), model.search(namespace, **asked)
            assert [item.score for item in found] == [item.score for item in expected]
            if namespace == ("x", "y"):
                assert scores(found) == scores(expected)
    assert not local
    assert copies(url) == 299
    # The other distances are computed in this process.
    other = CasstoreStore(store, index=index(distance_type="l2"))
    assert len(other.search(("x",), query="abbd")) == 10
    assert local


def test_vector_copies_are_updated_and_deleted_with_their_items(store: Store, url: str) -> None:
    memory = CasstoreStore(store, index=index())
    memory.setup()
    for n, text in enumerate(("aaa", "aab", "bbb")):
        memory.put(("x",), f"{n}", {"text": text})
    assert [key for key, _ in scores(memory.search((), query="a"))] == ["0", "1", "2"]
    with casstore.open(url, "relaxed") as elsewhere:
        another = CasstoreStore(elsewhere, index=index())
        another.put(("x",), "2", {"text": "a"})
        another.put(("x",), "3", {"text": "ab"}, index=["text"])
    assert [key for key, _ in scores(memory.search((), query="a"))] == ["0", "2", "1", "3"]
    # The connection that created the tables and copied the vectors writes as before.
    memory.put(("y",), "k", {"text": "b"})
    memory.delete(("y",), "k")
    assert copies(url) == 4
    # A deletion deletes the copy at once, by whichever way the row goes.
    memory.delete(("x",), "0")
    assert copies(url) == 3
    CasstoreStore(store).put(("x",), "1", {"text": "a"})
    assert copies(url) == 2
    assert scores(memory.search((), query="a", limit=2))[0] == ("2", 1.0)
    assert check(store, level="full").counts == {}
    # Vectors of another index replace them.
    changed = CasstoreStore(store, index=index(fields=["text"]))
    assert changed.reindex() == 3
    assert [item.score is None for item in changed.search((), query="a")] == [False] * 3
    assert copies(url) == 3


def test_a_vector_copy_is_not_replaced_by_an_older_one_or_made_of_a_deleted_row(
    store: Store,
) -> None:
    """Two searches at the same time may have read the same part at different moments."""
    assert isinstance(store.engine, VectorSearching)
    search = store.engine.vector_search(2, install=True)
    assert search is not None
    part, row = VectorPart(b"p", b"0"), RowKey("records", b"key")
    gone = VectorCopy(RowKey("records", b"gone"), b"gone", 0, 1, 2, bytes(8))
    made = VectorCopy(row, b"name", 0, 1, 2, array("f", [0, 1, 1, 1]).tobytes())
    store.engine.write(Write(rows=[PutRow(*row, b"value")]))
    assert search.replace("s", [VectorChange(part, 6, [made])])
    assert search.replace("s", [VectorChange(part, 5, [])])
    assert search.parts("s", b"p", b"q") == {part: 6}
    assert not search.replace("s", [VectorChange(part, 7, [made, gone])])
    assert search.parts("s", b"p", b"q") == {part: 6}
    found = search.nearest("s", b"p", b"q", [1, 1], 5)
    assert [(each.name, round(each.score, 4)) for each in found] == [
        (b"name", 1.0),
        (b"name", 0.7071),
    ]
    assert search.replace("s", [VectorChange(part, 8, [])])
    assert search.nearest("s", b"p", b"q", [1, 1], 5) == []


def test_a_role_without_rights_on_the_copies_searches_in_its_own_process(
    local: list[str], store: Store, url: str
) -> None:
    CasstoreStore(store, index=index()).put(("x",), "k", {"text": "a"})
    grants = """CREATE EXTENSION IF NOT EXISTS vector; CREATE ROLE limited LOGIN;
        GRANT USAGE ON SCHEMA casstore TO limited; GRANT USAGE ON ALL SEQUENCES IN SCHEMA casstore
        TO limited; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA casstore TO limited
        """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(grants)
        try:
            # First there are no tables, and the role may not create them; then it may not use them.
            for number in (0, 1):
                with casstore.open(url.replace("postgres@", "limited@"), "relaxed") as other:
                    limited = CasstoreStore(other, index=index())
                    limited.setup()
                    assert scores(limited.search(("x",), query="a")) == [("k", 1.0)]
                    assert local.pop()
                assert copies(url) == number
                with casstore.open(url, "relaxed") as own:
                    CasstoreStore(own, index=index()).search(("x",), query="a")
            # What it deletes is deleted from the copies all the same.
            with casstore.open(url.replace("postgres@", "limited@"), "relaxed") as other:
                CasstoreStore(other, index=index()).delete(("x",), "k")
            assert copies(url) == 0
        finally:
            connection.execute("DROP OWNED BY limited; DROP ROLE limited")


def test_a_reader_of_a_store_searches_in_its_own_process(
    local: list[str], store: Store, url: str
) -> None:
    memory = CasstoreStore(store, index=index())
    memory.put(("x",), "k", {"text": "a"})
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
    assert store.engine.vector_search(20_000) is None  # type: ignore[attr-defined]
    with casstore.open(url, readonly=True) as reader:
        limited = CasstoreStore(reader, index=index())
        assert scores(limited.search(("x",), query="a")) == [("k", 1.0)]
        assert local
    assert copies(url) == 0
