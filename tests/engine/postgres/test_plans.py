"""What the server may do with our functions: never compile them anew at every call, and no more
work for a write than there is in it.

Where sequential scans are off a plan may seem to cost a great deal, and a server with ``jit`` then
compiles it, at each call. On PostgreSQL 15 a commit took 250 ms like that, instead of 8.
"""

from __future__ import annotations

import re

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore.engine.postgres import request
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import Condition, ObjectsExist, PutRow, RowIs, RowStarts, Write
from casstore.testing.engine_fixtures import new_blob
from servers.postgres import Server


def test_functions_that_disable_sequential_scans_also_disable_jit(
    postgres_server: Server, postgres_url: str, schema: str
) -> None:
    casstore.open(postgres_url).close()
    with psycopg.connect(postgres_server.url()) as connection:
        found = connection.execute(
            "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = %s::regnamespace",
            (schema,),
        ).fetchall()
    forbidding = {
        name: set(config) for name, config in found if "enable_seqscan=off" in (config or ())
    }
    assert {"write", "sweep"} <= set(forbidding)
    assert all("jit=off" in config for config in forbidding.values())


def test_no_sql_function_subscripts_an_array_inside_a_record(engine: PostgresEngine) -> None:
    """The server goes through it from its beginning each time: many conditions took the square
    of their time. An array that is a variable is taken apart once.
    """
    with engine.connections.alone() as connection:
        found = connection.execute(
            "SELECT proname, proargnames, prosrc FROM pg_proc "
            "WHERE pronamespace = %s::regnamespace",
            (engine.address.schema,),
        ).fetchall()
    bodies = {name: (arguments or [], body) for name, arguments, body in found}
    assert {"write", "sweep"} <= set(bodies)
    for name, (arguments, body) in bodies.items():
        held = re.findall(r"\b(\w+)\.\w+\s*\[", body)
        assert held == [], f"{name} of {arguments} reaches into {held}"


@pytest.mark.parametrize("number", [10, 1000])
def test_a_write_reads_each_condition_row_once(engine: PostgresEngine, number: int) -> None:
    blobs = [new_blob(b"%d" % at) for at in range(number)]
    rows = [PutRow("records", b"%d" % at, b"value %d" % at) for at in range(2 * number)]
    engine.write(Write(objects=blobs, rows=rows))
    conditions: list[Condition] = [RowIs(*row[:3]) for row in rows[:number]]
    conditions += [RowStarts(*row[:2], b"value") for row in rows[number:]]
    conditions.append(ObjectsExist([blob.digest for blob in blobs]))
    write = Write(conditions=conditions, rows=[PutRow("records", b"new", b"")])
    made = request.prepare(write, engine.store_number, engine._compressor)
    with engine.connections.alone() as connection:
        connection.execute("BEGIN")
        parameters = made.encoded(connection.client, 1, None, lasting=True)
        assert request.read_answer(connection.call(engine.write_call, parameters)).failed is None
        read = {
            table: (one_by_one, by_key)
            for table, one_by_one, by_key in connection.execute(
                "SELECT relname, seq_tup_read, idx_tup_fetch FROM pg_stat_xact_user_tables "
                "WHERE schemaname = %s",
                (engine.address.schema,),
            )
        }
        connection.execute("ROLLBACK")
    assert read["rows"] == (0, 2 * number)
    assert read["objects"] == (0, number)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_with_a_generic_plan_reads_no_row_beyond_its_stop_key(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """A server makes one plan for all parameters once it has seen a few, or if it is told to."""
    rows = [PutRow("records", b"%04d" % at, b"") for at in range(1000)]
    engine.write(Write(rows=rows))
    with engine.connections.alone() as connection:
        connection.execute("SET plan_cache_mode = force_generic_plan")
        # With so few rows it would read all of them.
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET enable_bitmapscan = off")
        connection.execute("BEGIN")
        connection.prepare_threshold = 0
        monkeypatch.setattr(engine.connections, "run", lambda work: work(connection))
        found = engine.scan_rows("records", start=b"0500", stop=b"0503", reverse=reverse)
        assert len(found) == 3
        read = connection.execute(
            "SELECT idx_tup_fetch FROM pg_stat_xact_user_tables "
            "WHERE schemaname = %s AND relname = 'rows'",
            (engine.address.schema,),
        ).fetchone()
        connection.execute("ROLLBACK")
    assert read == (3,)
