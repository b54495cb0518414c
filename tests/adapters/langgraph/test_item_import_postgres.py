"""Tables of PostgresStore: in use, with an index, odd, or no such tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

for needed in ("psycopg", "langgraph.store.postgres", "langgraph.store.sqlite"):
    pytest.importorskip(needed, reason="needs the extra: pip install '.[dev]'")

import psycopg

from casstore.adapters.langgraph import CasstoreStore, import_items
from casstore.adapters.langgraph.item_import import LEFT_OUT
from casstore.errors import ForeignSourceError, StorageUnavailableError
from casstore.maintenance.progress import Step
from casstore.store import Store
from servers.postgres import Server
from tests.adapters.langgraph.memories import PostgresMemory
from tests.adapters.langgraph.test_item_import import contents, refuse_odd, told


@contextmanager
def database(server: Server, name: str) -> Iterator[str]:
    """A database of its own: an extension belongs to all of one."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield server.url(name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def memory(postgres_server: Server, schema: str) -> PostgresMemory:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}".encode())
    return PostgresMemory(f"{postgres_server.url()}&options=-csearch_path%3D{schema}")


def test_tables_in_use_are_read_as_of_one_moment(memory: PostgresMemory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})

        def meanwhile(step: Step) -> None:
            theirs.put(("a",), "late", {"n": 2})
            theirs.put(("a",), "k", {"n": 3})

        assert memory.move(store, progress=meanwhile).part("items").found == 1
    assert contents(store).keys() == {("a.", "k")}


def test_uncommitted_rows_are_not_read(memory: PostgresMemory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    with psycopg.connect(memory.url) as connection:
        connection.execute('UPDATE store SET value = \'{"not": "committed"}\'')
        connection.execute("INSERT INTO store VALUES ('a', 'new', '{}')")
        assert memory.move(store).part("items").found == 1
        connection.rollback()
    found = CasstoreStore(store).get(("a",), "k")
    assert found is not None
    assert found.value == {"n": 1}


def test_embeddings_stay_behind_and_are_counted(postgres_server: Server, store: Store) -> None:
    def embed(texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 1.0] for text in texts]

    index: Any = {"dims": 2, "embed": embed, "fields": ["title", "text"]}
    with database(postgres_server, "with_vectors") as url:
        memory = PostgresMemory(url)
        with memory.open(index=index) as theirs:
            try:
                theirs.setup()
            except psycopg.errors.FeatureNotSupported:
                pytest.skip("this server has no pgvector")
            theirs.put(("a",), "k", {"title": "one", "text": "two"})
            theirs.put(("a",), "l", {"title": "three"}, index=False)
        assert memory.move(store, dry_run=True).note(LEFT_OUT).number == 2
        report = memory.move(store)
        assert (report.imported, report.note(LEFT_OUT).number) == (2, 2)


def test_times_are_kept_to_the_microsecond(memory: PostgresMemory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
        memory.execute(
            "UPDATE store SET created_at = '1969-12-31 23:59:59.999999+00', "
            "updated_at = '2026-03-01 12:00:00.123457+02'"
        )
        memory.move(store)
        ours = CasstoreStore(store)
        want = theirs.get(("a",), "k")
        assert told(ours.get(("a",), "k")) == told(want)
        ours.put(("a",), "k", {"n": 2}, ttl=1)
        ours.get(("a",), "k")
        again = ours.get(("a",), "k")
        assert again is not None
        assert again.created_at == want.created_at
        assert again.updated_at > want.updated_at


@pytest.mark.parametrize("column", ["created_at", "updated_at", "expires_at"])
def test_an_invalid_time_is_reported_by_name(
    memory: PostgresMemory, store: Store, column: str
) -> None:
    refuse_odd(memory, store, column, "infinity", "'infinity' is not a time", dry_run=True)
    refuse_odd(memory, store, column, "20000-01-01", "outside the range of times", dry_run=False)
    if column != "expires_at":
        refuse_odd(memory, store, column, None, "None is not a time", dry_run=False)


def test_content_that_cannot_be_imported_is_refused_by_name(
    store: Store, postgres_server: Server
) -> None:
    with pytest.raises(ForeignSourceError, match="search_path"):
        import_items(store, postgres_server.url())
    with pytest.raises(StorageUnavailableError) as away:
        import_items(store, "postgresql://me:secret@localhost:1/x")
    assert "secret" not in str(away.value)
