"""The engine contract on PostgreSQL, with prepared statements and without, cached and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar

import pytest

pytest.importorskip("psycopg")

from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import Engine
from casstore.testing import EngineFactory, PersistentEngineContract, Reopen, compare_with_reference
from servers.postgres import Server


class PostgresContract(PersistentEngineContract):
    """The whole contract; subclasses say how the engine is opened."""

    options: ClassVar[dict[str, Any]] = {}
    parameters: ClassVar[dict[str, str]] = {}

    @pytest.fixture
    def make_engine(self, postgres_server: Server, schema: str) -> Iterator[EngineFactory]:
        made: list[PostgresEngine] = []
        numbers = count()

        def make(*, clock: Callable[[], int] | None = None) -> Engine:
            url = postgres_server.url(schema=f"{schema}_{next(numbers)}", **self.parameters)
            made.append(PostgresEngine(parse(url), clock=clock, **self.options))
            return made[-1]

        yield make
        for engine in made:
            engine.close()

    @pytest.fixture
    def reopen(self) -> Iterator[Reopen]:
        made: list[PostgresEngine] = []

        def again(engine: Engine) -> Engine:
            assert isinstance(engine, PostgresEngine)
            engine.close()
            made.append(PostgresEngine(engine.address, **self.options))
            return made[-1]

        yield again
        for engine in made:
            engine.close()


class TestPostgres(PostgresContract):
    @pytest.mark.parametrize("seed", range(3))
    def test_it_agrees_with_the_reference_engine(
        self, make_engine: EngineFactory, reopen: Reopen, seed: int
    ) -> None:
        compare_with_reference(make_engine(), seed, 150, reopen=reopen)
