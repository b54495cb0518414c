"""What the server may do with our functions: never compile them anew at every call.

Where sequential scans are off a plan may seem to cost a great deal, and a server with ``jit`` then
compiles it, at each call. On PostgreSQL 15 a commit took 250 ms like that, instead of 8.
"""

from __future__ import annotations

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from servers.postgres import Server


def test_functions_that_forbid_scans_forbid_compiling(
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
