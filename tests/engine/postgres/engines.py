"""Engines on PostgreSQL for the shipped suites and for any test that runs on every engine.

Making a store's tables takes the server longer than most tests do, so a schema is emptied and used
again when its test is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from casstore.engine.protocol import Engine
from casstore.testing import EngineFactory, ManualClock, Reopen
from servers.postgres import Server

if TYPE_CHECKING:
    from casstore.engine.postgres.engine import PostgresEngine

_EMPTY = """
    DELETE FROM {s}.objects; DELETE FROM {s}.rows; DELETE FROM {s}.clients;
    DELETE FROM {s}.watchers;
    UPDATE {s}.state SET epoch = 1, collector = NULL, collector_until_ms = 0, mark = NULL,
        writes_collected = (SELECT last_value FROM {s}.writes)
"""


class Schemas:
    """Schemas that tests use one after the other, always empty."""

    def __init__(self, server: Server) -> None:
        import psycopg

        self.server = server
        self._numbers = count(1)
        self._free: list[str] = []
        self._connection = psycopg.connect(server.url(), autocommit=True)

    def take(self) -> str:
        return self._free.pop() if self._free else f"shared_{next(self._numbers)}"

    def give_back(self, schema: str) -> None:
        """Empty a schema of which no engine is open any more."""
        from psycopg import sql

        name = sql.Identifier(schema)
        self._connection.execute(sql.SQL(_EMPTY).format(s=name))
        self._free.append(schema)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="session")
def postgres_schemas(postgres_server: Server) -> Iterator[Schemas]:
    schemas = Schemas(postgres_server)
    yield schemas
    schemas.close()


@contextmanager
def engines(schemas: Schemas, **options: Any) -> Iterator[EngineFactory]:
    """A factory of engines, each on an empty schema; closes what it made."""
    from casstore.engine.postgres.address import parse
    from casstore.engine.postgres.engine import PostgresEngine

    made: list[PostgresEngine] = []
    parameters = options.pop("parameters", {})

    def make(*, clock: Callable[[], int] | None = None) -> Engine:
        url = schemas.server.url(schema=schemas.take(), **parameters)
        made.append(PostgresEngine(parse(url), clock=clock, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    for engine in made:
        schemas.give_back(engine.address.schema)


class PostgresEngines:
    """The fixtures of the shipped suites, on PostgreSQL."""

    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def make_engine(self, postgres_schemas: Schemas) -> Iterator[EngineFactory]:
        with engines(postgres_schemas, **self.options) as make:
            yield make

    @pytest.fixture
    def reopen(self, make_engine: EngineFactory, clock: ManualClock) -> Iterator[Reopen]:
        from casstore.engine.postgres.engine import PostgresEngine

        made: list[PostgresEngine] = []

        def again(engine: Engine) -> Engine:
            assert isinstance(engine, PostgresEngine)
            engine.close()
            clocked = None if engine.clock is None else clock
            made.append(PostgresEngine(engine.address, clock=clocked))
            return made[-1]

        yield again
        for engine in made:
            engine.close()
