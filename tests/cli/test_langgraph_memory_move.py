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
from tests.cli.running import run

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
    dry = run("import-langgraph-sqlite-store", source, "--dry-run", store=place).out
    assert "would move 2 items of 2" in dry
    assert value(place, "colour") is None
    told = run("import-langgraph-sqlite-store", source, "--json", store=place).json
    assert (told["file"], told["items"], told["imported"], told["replaced"]) == (source, 2, 2, 0)
    assert (told["dry_run"], told["expired"], told["vectors"]) == (False, 1, 1)
    assert value(place, "colour") == {"likes": "blue"}
    again = run("import-langgraph-sqlite-store", source, store=place).out
    assert "moved 0 items of 2" in again
    assert "not shown 1 item whose time is up" in again
    assert "left behind 1 embedding: there is no vector index" in again
    nothing = run("import-langgraph-sqlite-store", str(tmp_path / "nowhere"), store=place, ends=4)
    assert nothing.err.startswith("error: ")


def test_other_content_is_replaced_only_if_one_says_so(tmp_path: Path, place: str) -> None:
    source = str(tmp_path / "memory.sqlite")
    with SqliteStore.from_conn_string(source) as theirs:
        theirs.put(("users", "ada"), "colour", {"likes": "blue"})
        run("import-langgraph-sqlite-store", source, store=place)
        theirs.put(("users", "ada"), "colour", {"likes": "red"})
    refused = run(
        "import-langgraph-sqlite-store", source, store=place, ends=ConflictError.exit_code
    )
    assert "'colour' of namespace 'users.ada'" in refused.err
    assert "--replace" in refused.err
    assert value(place, "colour") == {"likes": "blue"}
    assert (
        "would replace 1 item"
        in run("import-langgraph-sqlite-store", source, "-n", "--replace", store=place).out
    )
    assert value(place, "colour") == {"likes": "blue"}
    assert (
        "replaced 1 item that the store had otherwise"
        in run("import-langgraph-sqlite-store", source, "--replace", store=place).out
    )
    assert value(place, "colour") == {"likes": "red"}


def test_an_item_that_cannot_be_kept_is_named(tmp_path: Path, place: str) -> None:
    source = str(tmp_path / "memory.sqlite")
    with SqliteStore.from_conn_string(source) as theirs:
        theirs.put(("users", "ada"), "odd", {"n": 1})
        theirs.conn.execute("UPDATE store SET value = '{\"n\": NaN}'")
    for more in ((), ("-n",)):
        refused = run("import-langgraph-sqlite-store", source, *more, store=place,
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
        "would move 1 item of 1"
        in run("import-langgraph-postgres-store", source, "-n", store=place).out
    )
    assert value(place, "colour") is None
    told = run("import-langgraph-postgres-store", source, "--json", store=place).json
    assert (told["items"], told["imported"], told["vectors"]) == (1, 1, 0)
    assert told["source"] == "postgresql:///remembering"
    assert value(place, "colour") == {"likes": "blue"}
    again = run("import-langgraph-postgres-store", source, "--replace", store=place).out
    assert "moved 0 items of 1 from postgresql:///remembering" in again
    for wrong, code in (("memory.sqlite", 3), (postgres_server.url(), 9)):
        refused = run("import-langgraph-postgres-store", wrong, store=place, ends=code)
        assert refused.err.startswith("error: ")
        assert "--store" not in refused.err
