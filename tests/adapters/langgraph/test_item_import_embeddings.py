"""Embeddings of LangGraph's own stores are imported if the index would make the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

for needed in ("numpy", "psycopg", "langgraph.store.postgres", "langgraph.store.sqlite"):
    pytest.importorskip(needed, reason="needs the extra: pip install '.[dev]'")

from langgraph.store.sqlite.base import VECTOR_MIGRATIONS

from casstore.adapters.langgraph import CasstoreStore
from casstore.adapters.langgraph.item_import import LEFT_OUT
from casstore.adapters.langgraph.item_records import VectorTables
from casstore.errors import VectorIndexChangedError
from casstore.maintenance.check import check
from casstore.store import Store
from servers.postgres import Server
from tests.adapters.langgraph.memories import Memory, PostgresMemory, SqliteMemory
from tests.adapters.langgraph.test_item_import_postgres import database

pytestmark = pytest.mark.filterwarnings("ignore:The default datetime adapter:DeprecationWarning")

calls: list[int] = []


def counted(texts: Sequence[str]) -> list[list[float]]:
    calls.append(len(texts))
    return [[float(text.count(letter)) for letter in "abc"] for text in texts]


async def awaited(texts: Sequence[str]) -> list[list[float]]:
    await asyncio.sleep(0)
    return counted(texts)


def another(texts: Sequence[str]) -> list[list[float]]:
    return [vector[::-1] for vector in counted(texts)]


def index(embed: Any = counted, *fields: str, dims: int = 3) -> Any:
    chosen = list(fields or ("title", "texts[*]"))
    return {"dims": dims, "embed": embed, "fields": chosen}


@pytest.fixture(params=["sqlite", "postgres"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    """A store with embeddings of three items, one of another field, and one item without."""
    if request.param == "sqlite":
        yield filled(SqliteMemory(tmp_path / "memory.sqlite"))
        return
    server: Server = request.getfixturevalue("postgres_server")
    with database(server, "embedded") as url:
        yield filled(PostgresMemory(url))


def filled(memory: Memory) -> Memory:
    # SqliteStore reads its fields from text_fields.
    config = index() | {"text_fields": index()["fields"]}
    with memory.open(index=config) as theirs:
        if isinstance(memory, SqliteMemory):
            # Its setup loads a library into SQLite, which not every Python can. Puts need none.
            memory.execute(VECTOR_MIGRATIONS[0])
            theirs.is_setup = True
        else:
            theirs.setup()
        theirs.put(("n",), "1", {"title": "aab", "texts": ["c", "b"]})
        theirs.put(("n",), "2", {"title": "bb", "texts": []})
        theirs.put(("n", "o"), "3", {"title": "c"})
        theirs.put(("n",), "other field", {"title": "c", "extra": "a"}, index=["extra"])
        theirs.put(("n",), "none", {"title": "a"}, index=False)
    return memory


def rows(store: Store) -> int:
    return len(list(VectorTables(store).vectors.scan()))


@pytest.mark.parametrize("embed", [counted, awaited])
def test_embeddings_are_imported_and_searched_without_embedding_again(
    memory: Memory, store: Store, embed: Any
) -> None:
    expected = memory.move(store, index=index(embed), dry_run=True)
    assert rows(store) == 0
    report = memory.move(store, index=index(embed))
    # Of "other field" reindex() embeds the title: which fields it was put with is not recorded.
    assert report.part("embeddings").imported == expected.part("embeddings").imported == 3
    assert report.note(LEFT_OUT).number == expected.note(LEFT_OUT).number == 1
    calls.clear()
    ours = CasstoreStore(store, index=index(embed))
    found = asyncio.run(ours.asearch(("n",), query="c", limit=3))
    assert [(item.key, item.score) for item in found] == [("1", 1.0), ("3", 1.0), ("2", 0.0)]
    assert calls == [1]
    assert asyncio.run(ours.areindex()) == 2
    assert check(store, level="full").counts == {}
    again = memory.move(store, index=index(embed))
    assert (again.imported, again.part("embeddings").found) == (0, 3)


@pytest.mark.parametrize(
    "other",
    [index(another), index(counted, "title"), index(lambda texts: [[1.0]] * len(texts), dims=1)],
    ids=["another model", "other fields", "other dims"],
)
def test_embeddings_of_another_index_are_left_out(
    memory: Memory, store: Store, other: dict[str, Any]
) -> None:
    report = memory.move(store, index=other)
    kept = 2 if other["fields"] == ["title"] else 0
    # Item 3 has a title and no other text, so both indexes embed the same; so has item 2.
    assert report.part("embeddings").imported == kept
    assert report.note(LEFT_OUT).number == 7 - 1 - kept
    assert rows(store) == kept
    assert report.part("items").imported == 5


def test_an_embedding_older_than_its_item_is_left_out(memory: Memory, store: Store) -> None:
    memory.execute("UPDATE store_vectors SET updated_at = '2001-01-01' WHERE key = '3'")
    assert memory.move(store, index=index()).part("embeddings").imported == 2


def test_embeddings_are_refused_if_the_store_has_vectors_of_another_index(
    memory: Memory, store: Store
) -> None:
    CasstoreStore(store, index=index(another)).put(("own",), "k", {"title": "a"})
    with pytest.raises(VectorIndexChangedError):
        memory.move(store, index=index())
    assert CasstoreStore(store).search(("n",)) == []


def test_an_item_that_an_import_replaces_loses_its_vectors(memory: Memory, store: Store) -> None:
    CasstoreStore(store, index=index()).put(("n",), "none", {"title": "b"})
    memory.move(store, replace=True)
    assert rows(store) == 0
    assert check(store, level="full").counts == {}
