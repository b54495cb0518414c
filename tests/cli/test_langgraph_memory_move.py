"""What LangGraph's own stores remember moves over by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph.store.postgres import PostgresStore
from langgraph.store.sqlite import SqliteStore
from langgraph.store.sqlite.base import VECTOR_MIGRATIONS

from casstore.adapters.langgraph import CasstoreStore
from casstore.errors import BadItemError, ConflictError
from servers.postgres import Server
from tests.cli.running import counts, run

pytestmark = pytest.mark.filterwarnings("ignore:The default datetime adapter:DeprecationWarning")


@pytest.fixture
def place(tmp_path: Path) -> str:
    run("init", str(tmp_path / "store"))
    return str(tmp_path / "store")


def value(place: str, key: str) -> Any:
    with CasstoreStore.from_path(place) as memory:
        found = memory.get(("users", "ada"), key)
        return None if found is None else found.value


def test_a_database_moves_over_once(tmp_path: Path, place: str) -> None:
    source = str(tmp_path / "memory.sqlite")
    with SqliteStore.from_conn_string(source) as theirs:
        theirs.put(("users", "ada"), "colour", {"likes": "blue"})
        theirs.put(("users", "ada"), "late", {"n": 1}, ttl=5)
        theirs.conn.execute("UPDATE store SET expires_at = '2020-01-01' WHERE key = 'late'")
        theirs.conn.execute(VECTOR_MIGRATIONS[0])
        theirs.conn.execute(
            "INSERT INTO store_vectors VALUES ('users.ada', 'colour', '$', x'00', 0, 0)"
        )
    dry = run("import", "langgraph-items", source, "--dry-run", store=place).out
    assert "would import 2 of 2 items" in dry
    assert value(place, "colour") is None
    told = run("import", "langgraph-items", source, "--json", store=place).json
    assert (told["source"], told["dry_run"], counts(told)) == (source, False, {"items": (2, 2, 0)})
    assert [note["number"] for note in told["notes"]] == [1, 1]
    assert value(place, "colour") == {"likes": "blue"}
    again = run("import", "langgraph-items", source, store=place).out
    assert "imported 0 of 2 items" in again
    assert "note: 1 expired items; sweep_ttl() deletes them" in again
    assert "note: 1 embeddings, left out; CasstoreStore.reindex() embeds the items" in again
    nothing = run("import", "langgraph-items", str(tmp_path / "nowhere"), store=place, ends=4)
    assert nothing.err.startswith("error: ")


def test_an_item_with_other_content_is_replaced_only_with_replace(
    tmp_path: Path, place: str
) -> None:
    source = str(tmp_path / "memory.sqlite")
    with SqliteStore.from_conn_string(source) as theirs:
        theirs.put(("users", "ada"), "colour", {"likes": "blue"})
        run("import", "langgraph-items", source, store=place)
        theirs.put(("users", "ada"), "colour", {"likes": "red"})
    refused = run("import", "langgraph-items", source, store=place, ends=ConflictError.exit_code)
    assert "'colour' of namespace 'users.ada'" in refused.err
    assert "--replace" in refused.err
    assert value(place, "colour") == {"likes": "blue"}
    assert (
        "would update 1"
        in run("import", "langgraph-items", source, "-n", "--replace", store=place).out
    )
    assert value(place, "colour") == {"likes": "blue"}
    assert (
        "imported 0 of 1 items, updated 1"
        in run("import", "langgraph-items", source, "--replace", store=place).out
    )
    assert value(place, "colour") == {"likes": "red"}


def test_an_item_that_cannot_be_kept_is_named(tmp_path: Path, place: str) -> None:
    source = str(tmp_path / "memory.sqlite")
    with SqliteStore.from_conn_string(source) as theirs:
        theirs.put(("users", "ada"), "odd", {"n": 1})
        theirs.conn.execute("UPDATE store SET value = '{\"n\": NaN}'")
    for more in ((), ("-n",)):
        refused = run("import", "langgraph-items", source, *more, store=place,
                      ends=BadItemError.exit_code)  # fmt: skip
        assert "item 'odd' of namespace 'users.ada' cannot be moved: NaN" in refused.err


def test_tables_on_a_server_move_over_once(place: str, postgres_server: Server) -> None:
    source = postgres_server.url("remembering")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE remembering")
    with PostgresStore.from_conn_string(source) as theirs:
        theirs.setup()
        theirs.put(("users", "ada"), "colour", {"likes": "blue"})
    assert (
        "would import 1 of 1 items"
        in run("import", "langgraph-items", source, "-n", store=place).out
    )
    assert value(place, "colour") is None
    told = run("import", "langgraph-items", source, "--json", store=place).json
    assert (counts(told), told["notes"]) == ({"items": (1, 1, 0)}, [])
    assert told["source"] == "postgresql:///remembering"
    assert value(place, "colour") == {"likes": "blue"}
    again = run("import", "langgraph-items", source, "--replace", store=place).out
    assert "imported 0 of 1 items" in again
    assert "postgresql:///remembering" in again
    for wrong, code in (("postgresql://[", 3), (postgres_server.url(), 9)):
        refused = run("import", "langgraph-items", wrong, store=place, ends=code)
        assert refused.err.startswith("error: ")
        assert "--store" not in refused.err
