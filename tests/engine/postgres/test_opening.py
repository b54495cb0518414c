"""Opening a store on a server: made once, recognised, upgraded, refused."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from psycopg.conninfo import conninfo_to_dict

import casstore
import casstore.aio
from casstore.engine.postgres import schema as schemas
from casstore.engine.postgres.absence import may_pass
from casstore.engine.postgres.address import Address, parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    ForeignStoreError,
    FormatVersionError,
    InvalidInputError,
    ReadOnlyError,
    StorageError,
    StorageUnavailableError,
    StoreNotFoundError,
)
from casstore.maintenance import backup, check, compact, gc, pack, space
from casstore.session.data import Commit, NodeDraft
from casstore.testing.engine_fixtures import find_row, new_blob, put_objects, put_row
from casstore.testing.engine_threads import TIMEOUT_S, start
from servers.postgres import Server

HERE = RowKey("records", b"here")


@pytest.fixture
def sql(postgres_server: Server) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        yield connection


# --- addresses -----------------------------------------------------------------------------------


def test_a_url_is_split_into_casstore_parameters_and_those_for_libpq() -> None:
    url = "postgresql://me:pass%20word@a,b:5433/db?schema=team&sslmode=verify-full&pool=3"
    own = "prepare=off&patience=2.5&cache=%2Fvar%2Fc&cache_mib=64"
    address = parse(f"{url}&{own}&target_session_attrs=read-write")
    assert address == Address(
        "postgresql://me:pass%20word@a,b:5433/db?sslmode=verify-full"
        "&target_session_attrs=read-write",
        "team", 3, False, 2.5, "/var/c", 64,
    )  # fmt: skip
    assert address.place == "postgresql://a,b:5433/db?schema=team"
    assert parse("postgres://h/d") == Address("postgres://h/d")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql:///", "/"),
        ("postgresql:///agents", "/agents"),
        ("postgresql:///?service=agents", "/"),
        ("postgres://h", "h"),
        ("postgresql://[::1],[::2]:5433/d", "[::1],[::2]:5433/d"),
        ("postgresql://h1,[::1]:3/d", "h1,[::1]:3/d"),
        ("postgresql://me:a#b?c+d@h/d", "h/d"),
        ("postgresql://me:a%40%2F@h/d", "h/d"),
        ("postgresql://h/d?password=a+b&application_name=c%2Bd", "h/d"),
        ("postgresql://h/d?sslrootcert=/etc/c++/a%20b.pem", "h/d"),
        ("postgresql://h/%22a%27%20b#c", "h/%22a%27%20b#c"),
        ("postgresql://h/\u0434\u0431", "h/\u0434\u0431"),
    ],
)
def test_libpq_reads_the_remaining_url_like_the_whole_url(url: str, place: str) -> None:
    address = parse(f"{url}{'&' if '=' in url else '?'}schema=team")
    assert conninfo_to_dict(address.conninfo) == conninfo_to_dict(url)
    assert address.schema == "team"
    assert address.place == f"postgresql://{place}?schema=team"


def test_the_cache_directory_in_a_url_may_contain_any_bytes() -> None:
    assert parse("postgresql://h/d?cache=/var/c++/a%20b%ff").cache == "/var/c++/a b\udcff"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/a\0b",
        "postgresql://h/a\nb",
        "postgresql://h/\udcff",
        "postgresql://me:100%@h/d",
        "postgresql://127.0.0.1:1/d?nonsense=1",
        "postgresql://127.0.0.1:1/d?application_name=%ff",
        "postgresql://127.0.0.1:1:x/d",
        "postgresql://127.0.0.1:99999/d",
        "postgresql://h:5,127.0.0.1:x/d",
        "postgresql://[::1]:x/d",
        "postgresql:///d?port=1:x",
        "postgresql:///d?port=5432,0",
    ],
)
def test_an_invalid_url_raises_invalid_input_error(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        casstore.open(url)
    assert "100%" not in str(caught.value)


def test_the_address_may_come_from_a_service_file(
    postgres_server: Server, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{name}={value}" for name, value in conninfo_to_dict(postgres_server.url()).items()]
    services = tmp_path / "services"
    services.write_text("\n".join(["[agents]", *words, ""]))
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    with casstore.open(f"postgresql:///?service=agents&schema={schema}") as store:
        assert store.get_blob(store.put_blob(b"x")) == b"x"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h:5432/d",
        "postgresql://[::1]:5432/d",
        "postgresql://[::1]/d",
        "postgresql://a:1,b:65535/d",
        "postgresql://a:,b/d",
        "postgresql://me:12:x@h/d",
        "postgresql:///d?port=5432,5433",
    ],
)
def test_valid_ports_are_passed_to_libpq_unchanged(url: str) -> None:
    assert parse(url).conninfo == url


@pytest.mark.parametrize(("host", "port"), [(b"127.0.0.1", b"1:x"), (b"\xff", b"1")])
def test_a_connection_error_with_an_invalid_host_or_port_is_not_retried(
    host: bytes, port: bytes
) -> None:
    """The environment may name a port, too."""

    class Tried:
        hostaddr = b""

    Tried.host, Tried.port = host, port  # type: ignore[attr-defined]
    exc = psycopg.OperationalError("connection is bad")
    exc._pgconn = Tried  # type: ignore[assignment]
    assert not may_pass(exc, "")


@pytest.mark.parametrize(
    "words",
    ["schema=", "schema=Team", "schema=a-b", "schema=pg_x", "schema=" + "a" * 64,
     'schema=a"b', "pool=0", "pool=many", "pool=100000", "prepare=perhaps", "patience=-1",
     "patience=nan", "cache=", "cache=a%00b", "cache_mib=0", "cache_mib=much"],
)  # fmt: skip
def test_an_invalid_casstore_parameter_in_a_url_is_refused_by_name(words: str) -> None:
    with pytest.raises(InvalidInputError, match=words.partition("=")[0]):
        parse(f"postgresql://h/d?{words}")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@[::1/db",
        "postgresql://me:secret@[::1]x/db",
        "postgresql://me:sec%00ret@h/db",
        "postgresql://h/db?password=sec%00ret",
        "postgresql://[::1/db?password=secret",
        "postgresql://me:secret@h/db?nonsense=1",
        # The host was forgotten, and the password stands where a port does.
        "postgresql://me:secret/db",
    ],
)
def test_the_error_for_an_invalid_url_contains_no_password(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        casstore.open(url)
    told = "".join(traceback.format_exception(caught.value))
    assert not any(part in told for part in ("secret", "sec%00ret"))


def test_no_message_contains_a_password(postgres_server: Server) -> None:
    url = "postgresql://me:secret@/nowhere?host=" + str(postgres_server.place)
    with pytest.raises(StorageError) as caught:
        casstore.open(url)
    assert "secret" not in str(caught.value)


def test_a_database_of_any_name_and_encoding_holds_a_store(
    postgres_server: Server, sql: psycopg.Connection[Any]
) -> None:
    # In a database of this encoding, clients get text as bytes.
    name = 'odd "name" \u0434\u0431'
    made = psycopg.sql.SQL(
        "CREATE DATABASE {} TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    sql.execute(made.format(psycopg.sql.Identifier(name)))
    for _ in range(2):
        with casstore.open(postgres_server.url(name)) as store:
            assert store.get_blob(store.put_blob(b"x")) == b"x"


def test_options_that_only_apply_to_files_are_refused(postgres_url: str) -> None:
    for options in ({"verify": True}, {"map_bytes": 1 << 30}, {"auto_pack": True}):
        with pytest.raises(InvalidInputError):
            casstore.open(postgres_url, **options)
    with pytest.raises(InvalidInputError):
        casstore.open(postgres_url, durability="none")


# --- making --------------------------------------------------------------------------------------


def test_concurrent_first_opens_create_one_store(postgres_url: str) -> None:
    def open_and_write(number: int) -> int:
        with casstore.open(postgres_url) as store:
            put_row(store.engine, "records", b"%d" % number, b"")
            engine = store.engine
            assert isinstance(engine, PostgresEngine)
            return engine.store_number

    numbers = [each.result(TIMEOUT_S) for each in [
        start(partial(open_and_write, number)) for number in range(8)
    ]]  # fmt: skip
    assert len(set(numbers)) == 1
    with casstore.open(postgres_url, readonly=True) as store:
        assert len(store.engine.scan_rows("records")) == 8


def test_stores_of_one_database_do_not_see_each_other(postgres_server: Server, schema: str) -> None:
    with (
        casstore.open(postgres_server.url(schema=f"{schema}_a")) as one,
        casstore.open(postgres_server.url(schema=f"{schema}_b")) as other,
    ):
        digest = one.put_blob(b"only here")
        put_row(one.engine, *HERE, b"only here")
        assert other.missing([digest]) == [digest]
        assert find_row(other.engine, *HERE) is None


def test_a_missing_store_is_not_created_with_create_false_or_readonly(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(StoreNotFoundError):
            casstore.open(postgres_url, **options)  # type: ignore[arg-type]
    found = sql.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone()
    assert found is None


def test_an_existing_empty_schema_is_used(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    sql.execute(f"CREATE SCHEMA {schema}".encode())
    with casstore.open(postgres_url) as store:
        store.put_blob(b"x")


@pytest.mark.parametrize(
    "other",
    [
        "CREATE TABLE {}.theirs (a int)",
        "CREATE TABLE {}.meta (a int)",
        "CREATE TABLE {}.meta (name text, value text)",
        "CREATE SEQUENCE {}.numbers",
        "CREATE FUNCTION {}.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE TYPE {}.colour AS ENUM ('red')",
    ],
)
def test_a_schema_that_contains_foreign_objects_is_refused_and_unchanged(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any], other: str
) -> None:
    sql.execute(f"CREATE SCHEMA {schema}".encode())
    sql.execute(other.format(schema).encode())
    with pytest.raises(ForeignStoreError):
        casstore.open(postgres_url)
    row = sql.execute("SELECT to_regclass(%s)", (f"{schema}.objects",)).fetchone()
    assert row == (None,)


def test_a_renamed_schema_is_the_same_store_and_changes_no_other(
    postgres_server: Server, schema: str, sql: psycopg.Connection[Any]
) -> None:
    def append(url: str, node: str) -> list[str]:
        with casstore.open(url) as store:
            session = store.session("s")
            session.commit(Commit(append=[NodeDraft(node, node)]))
            return [node.id for node in session.nodes()]

    now, then = postgres_server.url(schema=schema), postgres_server.url(schema=f"{schema}_old")
    assert append(now, "a") == ["a"]
    sql.execute(f"ALTER SCHEMA {schema} RENAME TO {schema}_old".encode())
    assert append(now, "b") == ["b"]
    with pytest.raises(StorageError, match="renamed"):
        casstore.open(then, readonly=True)
    assert append(then, "c") == ["a", "c"]
    with casstore.open(then) as store:
        store.delete_session("s")
        assert gc.collect(store, grace_ms=0).objects_swept > 0
    assert append(now, "d") == ["b", "d"]


def test_a_client_of_a_dropped_store_cannot_write_to_the_recreated_one(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    """They would not wait for each other: of two writes on one condition both succeeded."""
    write = Write(rows=[PutRow("records", b"key", b"value")])
    with casstore.open(postgres_url) as old:
        old.engine.write(write)
        sql.execute(f"DROP SCHEMA {schema} CASCADE".encode())
        with casstore.open(postgres_url) as new:
            with pytest.raises(StorageError, match="another store"):
                old.engine.write(write)
            with pytest.raises(StorageError, match="another store"):
                gc.collect(old, grace_ms=0)
            assert new.engine.get_rows([RowKey("records", b"key")]) == [None]
            new.engine.write(write)
            gc.collect(new, grace_ms=0)
    with casstore.open(postgres_url) as again:
        assert again.engine.get_rows([RowKey("records", b"key")]) == [b"value"]


def test_a_call_ended_by_a_time_limit_reports_the_time_limit(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    casstore.open(postgres_url).close()
    with sql.transaction():
        sql.execute(f"LOCK TABLE {schema}.rows".encode())
        hurried = postgres_url + "&options=-c%20statement_timeout%3D50"
        with (
            casstore.open(hurried) as store,
            pytest.raises(BusyError, match=r"(?s)statement timeout.*allow more"),
        ):
            store.engine.write(Write(rows=[PutRow("records", b"key", b"value")]))


def test_an_error_about_a_port_without_a_listener_says_that_the_port_may_be_wrong() -> None:
    with pytest.raises(StorageUnavailableError, match="if host, port and user are right"):
        casstore.open("postgresql://127.0.0.1:1/nothing?patience=0")


# --- versions ------------------------------------------------------------------------------------


def set_version(sql: psycopg.Connection[Any], schema: str, version: str) -> None:
    query = f"UPDATE {schema}.meta SET value = %s WHERE name = 'version'"
    sql.execute(query.encode(), (version,))


def test_a_store_of_a_newer_version_is_refused_with_the_remedy(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    casstore.open(postgres_url).close()
    set_version(sql, schema, str(schemas.VERSION + 1))
    with pytest.raises(FormatVersionError, match="upgrade casstore"):
        casstore.open(postgres_url)
    set_version(sql, schema, "nonsense")
    with pytest.raises(CorruptionError):
        casstore.open(postgres_url)


def test_an_older_store_is_upgraded_once_by_the_first_client(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(postgres_url) as store:
        kept = store.put_blob(b"kept")
    monkeypatch.setattr(schemas, "VERSION", schemas.VERSION + 1)
    with pytest.raises(FormatVersionError):
        # No way leads there yet, and nothing is changed.
        casstore.open(postgres_url)
    step = ["CREATE TABLE {s}.added (a int)", "INSERT INTO {s}.added VALUES (1)"]
    monkeypatch.setitem(schemas.UPGRADES, schemas.VERSION - 1, step)
    with pytest.raises(FormatVersionError):
        casstore.open(postgres_url, readonly=True)

    def look() -> bytes:
        with casstore.open(postgres_url) as store:
            return store.get_blob(kept)

    for each in [start(look) for _ in range(4)]:
        assert each.result(TIMEOUT_S) == b"kept"
    rows = sql.execute(f"SELECT a FROM {schema}.added".encode()).fetchall()
    assert rows == [(1,)]


KEPT = new_blob(b"kept")


@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_a_store_of_version_1_to_3_is_refused_and_unchanged(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any], version: str
) -> None:
    with casstore.open(postgres_url) as store:
        kept = store.put_blob(b"kept")
    set_version(sql, schema, version)
    for readonly in (True, False):
        with pytest.raises(FormatVersionError):
            casstore.open(postgres_url, readonly=readonly)
    set_version(sql, schema, str(schemas.VERSION))
    with casstore.open(postgres_url) as store:
        assert store.get_blob(kept) == b"kept"


def test_an_upgrade_that_fails_changes_nothing(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    casstore.open(postgres_url).close()
    monkeypatch.setattr(schemas, "VERSION", schemas.VERSION + 1)
    step = ["CREATE TABLE {s}.added (a int)", "SELECT 1 / 0"]
    monkeypatch.setitem(schemas.UPGRADES, schemas.VERSION - 1, step)
    with pytest.raises(StorageError):
        casstore.open(postgres_url)
    row = sql.execute("SELECT to_regclass(%s)", (f"{schema}.added",)).fetchone()
    assert row == (None,)
    monkeypatch.undo()
    casstore.open(postgres_url).close()


# --- what is refused -----------------------------------------------------------------------------


def test_a_store_opened_read_only_refuses_writes_and_collections(postgres_url: str) -> None:
    casstore.open(postgres_url).close()
    with casstore.open(postgres_url, readonly=True) as store:
        with pytest.raises(ReadOnlyError):
            store.put_blob(b"x")
        with pytest.raises(ReadOnlyError):
            gc.collect(store)
        assert store.engine.scan_objects() == []


def test_a_standby_or_a_reader_is_read_only(postgres_url: str) -> None:
    casstore.open(postgres_url).close()
    url = postgres_url + "&options=-c%20default_transaction_read_only%3Don"
    with casstore.open(url) as store:
        assert store.engine.get_rows([HERE]) == [None]
        with pytest.raises(ReadOnlyError):
            store.put_blob(b"x")
        # Watching is reading.
        watch = store.engine.watch()
        with casstore.open(postgres_url) as other:
            other.put_blob(b"y")
        assert watch.wait(TIMEOUT_S)
        watch.close()


def test_an_unreachable_server_raises_storage_unavailable_error() -> None:
    with pytest.raises(StorageUnavailableError):
        casstore.open("postgresql://127.0.0.1:1/nowhere?patience=0")


def test_calls_on_a_store_whose_schema_was_dropped_raise_storage_error(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    with casstore.open(postgres_url) as store:
        sql.execute(f"DROP SCHEMA {schema} CASCADE".encode())
        with pytest.raises(StorageError):
            store.put_blob(b"x")
        with pytest.raises(StorageError):
            store.engine.get_rows([HERE])


def test_operations_that_only_lmdb_supports_are_refused(postgres_url: str, tmp_path: Any) -> None:
    with casstore.open(postgres_url) as store:
        for call in (
            partial(pack.pack, store),
            store.pack,
            store.train_dictionary,
            partial(space.measure, store),
            partial(check.rebuild, store),
        ):
            with pytest.raises(InvalidInputError):
                call()
        with pytest.raises((InvalidInputError, StoreNotFoundError)):
            compact.compact(postgres_url)


def test_a_backup_of_it_is_a_store_in_a_directory(postgres_url: str, tmp_path: Any) -> None:
    with casstore.open(postgres_url) as store:
        digest = store.put_value({"kept": ["long " * 300]})
        store.tag("t", digest)
        backup.backup(store, str(tmp_path / "b"))
    with casstore.open(tmp_path / "b") as copy:
        assert copy.get_value(digest) == {"kept": ["long " * 300]}


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_writes_and_flush_work_with_every_durability(postgres_url: str, durability: str) -> None:
    with casstore.open(postgres_url, durability) as store:
        digest = store.put_blob(b"x")
        store.flush()
        assert store.get_blob(digest) == b"x"


def test_a_full_write_is_synchronous_though_the_server_disables_synchronous_commit(
    postgres_url: str, schema: str, sql: psycopg.Connection[Any]
) -> None:
    # The test's server has synchronous_commit off; a trigger records the setting that a write uses.
    with casstore.open(postgres_url) as store:
        sql.execute(
            f"""
            CREATE TABLE {schema}.seen (setting text);
            CREATE FUNCTION {schema}.look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO {schema}.seen VALUES (current_setting('synchronous_commit'));
                RETURN NULL; END $$;
            CREATE TRIGGER look AFTER INSERT ON {schema}.rows EXECUTE FUNCTION {schema}.look();
        """.encode()
        )
        store.engine.write(Write(rows=[PutRow("records", b"1", b"")]))
    with casstore.open(postgres_url, "relaxed") as store:
        store.engine.write(Write(rows=[PutRow("records", b"2", b"")]))
    # On this machine's disk, and on no standby's.
    with casstore.open(f"{postgres_url}&options=-c%20synchronous_commit%3Dlocal") as store:
        store.engine.write(Write(rows=[PutRow("records", b"3", b"")]))
    seen = sql.execute(f"SELECT setting FROM {schema}.seen".encode()).fetchall()
    assert seen == [("on",), ("off",), ("on",)]


def unflushed_after(
    sql: psycopg.Connection[Any],
    writing: Callable[[int], object],
    acknowledging: Callable[[], object],
) -> int:
    """How often something lay in memory alone when a call said that it lasts."""
    found = 0
    # Now and then the server has written it by itself before.
    for number in range(20):
        writing(number)
        row = sql.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        acknowledging()
        query = "SELECT pg_current_wal_flush_lsn() < %s::pg_lsn"
        if sql.execute(query, row).fetchone() == (True,):
            found += 1
    return found


def test_flush_waits_until_all_earlier_writes_are_durable(
    postgres_url: str, sql: psycopg.Connection[Any]
) -> None:
    with casstore.open(postgres_url, "relaxed") as store:

        def put(number: int) -> None:
            store.put_blob(b"%d" % number)

        assert unflushed_after(sql, put, lambda: None) > 0
        assert unflushed_after(sql, put, store.flush) == 0


def test_a_durable_put_of_a_stored_object_waits_for_the_flush_of_the_first_put(
    postgres_url: str, sql: psycopg.Connection[Any]
) -> None:
    with casstore.open(postgres_url, "relaxed") as hasty, casstore.open(postgres_url) as store:
        latest = b""

        def put(number: int) -> None:
            nonlocal latest
            latest = b"%d" % number
            hasty.put_blob(latest)

        assert unflushed_after(sql, put, lambda: store.put_blob(latest)) == 0


def test_a_call_in_progress_when_the_engine_is_closed_raises_closed_error(
    postgres_url: str,
) -> None:
    engine = PostgresEngine(parse(postgres_url))

    def work() -> None:
        n = 0
        while True:
            n += 1
            put_objects(engine, new_blob(b"%d" % n))

    working = start(work)
    while not engine.scan_objects(limit=1):
        pass
    engine.close()
    with pytest.raises(ClosedError):
        working.result(TIMEOUT_S)


def test_asyncio_callers_wait_for_what_another_engine_writes(postgres_url: str) -> None:
    async def story() -> int:
        async with casstore.aio.open(postgres_url) as store:
            session = store.session("s")
            waiting = asyncio.ensure_future(session.wait(0, timeout_s=TIMEOUT_S))
            with casstore.open(postgres_url) as other:
                commit = Commit(append=[NodeDraft("n", 1)])
                await asyncio.to_thread(other.session("s").commit, commit)
                head = await waiting
            assert head is not None
            return head.revision

    assert asyncio.run(story()) == 1
