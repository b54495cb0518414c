"""A store that the server's own tools have moved: dumped, restored, renamed, copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.engine.postgres.engine import PostgresEngine
from casstore.errors import StorageError
from casstore.maintenance import gc
from casstore.maintenance.check import check
from casstore.records.log import NewMessage, SessionLog
from servers.postgres import Server

LONG = "long " * 300


@pytest.fixture
def sql(postgres_server: Server) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        yield connection


def step(store: Store, session: str, *nodes: str) -> None:
    for node in nodes:
        change = Commit(append=[NodeDraft(node, node + LONG)])
        store.session(session).commit(change)


def fill(store: Store) -> None:
    """Objects collected, a session below another, records, a lease."""
    step(store, "gone", *"abcdefgh")
    step(store, "kept", "a", "b")
    store.fork("kept", "fork")
    store.delete_session("gone")
    assert gc.collect(store, grace_ms=0).objects_swept > 8
    log = SessionLog(store)
    log.create("log")
    log.append("log", NewMessage("user", "one"))
    assert store.session("fork").claim_lease("worker", 3_600_000) is not None


def assert_goes_on(store: Store) -> None:
    """What was there is there, and work goes on with it."""
    assert check(store, level="full").sound
    assert [node.id for node in store.session("kept").nodes()] == ["a", "b"]
    step(store, "kept", "c")
    assert SessionLog(store).append("log", NewMessage("user", "two")) == 2
    assert store.session("fork").claim_lease("another", 1000) is None
    store.delete_session("log")
    assert gc.collect(store, grace_ms=0).objects_swept > 0
    assert check(store, level="full").sound


def dump(server: Server, schema: str, place: Path, *words: str) -> str:
    text = server.run("pg_dump", "--dbname", server.conninfo(), f"--schema={schema}", *words)
    place.write_text(text)
    place.parent.chmod(0o755)
    place.chmod(0o644)
    return str(place)


@pytest.fixture
def dumped(
    postgres_server: Server, postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> Iterator[str]:
    """A dump of a store, in a file that the server's user can read."""
    with casstore.open(postgres_url) as store:
        fill(store)
    place = postgres_server.place / f"{schema}.sql"
    yield dump(postgres_server, schema, place)
    place.unlink()


def restore(server: Server, dumped: str, database: str = "postgres") -> None:
    server.run(
        "psql", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1", "--output=/dev/null",
        "--dbname", server.conninfo(dbname=database), "--file", dumped,
    )  # fmt: skip


def test_a_dump_restored_into_another_database_is_a_working_store(
    postgres_server: Server, schema: str, dumped: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute(f"CREATE DATABASE {schema}".encode())
    restore(postgres_server, dumped, schema)
    with casstore.open(postgres_server.url(schema, schema=schema), create=False) as store:
        assert_goes_on(store)
    sql.execute(f"CREATE DATABASE {schema}_copy TEMPLATE {schema}".encode())
    with casstore.open(postgres_server.url(f"{schema}_copy", schema=schema)) as store:
        assert check(store, level="full").sound
        step(store, "kept", "d")


def test_a_dump_restored_into_another_schema_does_not_change_the_store(
    postgres_server: Server, schema: str, dumped: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute(f"ALTER SCHEMA {schema} RENAME TO {schema}_old".encode())
    restore(postgres_server, dumped)
    # They have the same number, and wait for each other; no more than that.
    for place in (schema, f"{schema}_old"):
        with casstore.open(postgres_server.url(schema=place)) as store:
            assert_goes_on(store)


def test_a_client_that_has_the_store_open_during_a_restore_continues_with_the_restored_state(
    postgres_server: Server, postgres_url: str, schema: str, dumped: str,
    sql: psycopg.Connection[Any],
) -> None:  # fmt: skip
    with casstore.open(postgres_url) as before:
        step(before, "kept", "lost")
        assert SessionLog(before).append("log", NewMessage("user", "lost")) == 2
        sql.execute(f"DROP SCHEMA {schema} CASCADE".encode())
        with pytest.raises(StorageError):
            step(before, "kept", "nowhere")
        restore(postgres_server, dumped)
        with casstore.open(postgres_url) as other:
            # As many steps as were lost: a revision alone does not tell them apart.
            step(other, "kept", "another")
            step(before, "kept", "c")
            for store in (before, other):
                ids = [node.id for node in store.session("kept").nodes()]
                assert ids == ["a", "b", "another", "c"]
            assert SessionLog(before).append("log", NewMessage("user", "two")) == 2
            assert gc.collect(before, grace_ms=0).problem is None
            assert check(other, level="full").sound


@pytest.mark.parametrize("is_owner", [True, False], ids=["owner", "another role"])
def test_open_advances_sequences_that_were_restored_behind_their_tables(
    postgres_server: Server, postgres_url: str, schema: str, sql: psycopg.Connection[Any],
    *, is_owner: bool,
) -> None:  # fmt: skip
    """As logical replication brings them. New objects were numbered below what they link to."""
    with casstore.open(postgres_url) as store:
        fill(store)
    sql.execute(f"ALTER SEQUENCE {schema}.object_ids RESTART".encode())
    sql.execute(f"ALTER SEQUENCE {schema}.writes RESTART".encode())
    casstore.open(postgres_url, readonly=True).close()
    if not is_owner:
        sql.execute(
            f"""
            CREATE ROLE {schema} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {schema};
            GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {schema};
            GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO {schema};
            """.encode()
        )
        with pytest.raises(StorageError, match="its owner must open it once"):
            casstore.open(postgres_server.url(user=schema, schema=schema))
    with casstore.open(postgres_url) as store:
        assert isinstance(store.engine, PostgresEngine)
        assert store.engine.commits_since_collection() >= 0
        assert_goes_on(store)
    if not is_owner:
        with casstore.open(postgres_server.url(user=schema, schema=schema)) as store:
            step(store, "kept", "d")
