"""The engine contract and the session runtime on PostgreSQL."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("psycopg")

from casstore.testing import EngineFactory, PersistentEngineContract, Reopen, compare_with_reference
from casstore.testing.session_conformance import PersistentSessionConformance
from tests.engine.postgres.engines import PostgresEngines


class TestPostgres(PostgresEngines, PersistentEngineContract):
    @pytest.mark.parametrize("seed", range(3))
    def test_the_postgres_engine_agrees_with_the_reference_engine(
        self, make_engine: EngineFactory, reopen: Reopen, seed: int
    ) -> None:
        compare_with_reference(make_engine(), seed, 150, reopen=reopen)


class TestPostgresSessions(PostgresEngines, PersistentSessionConformance):
    pass


class TestPlainPostgres(PostgresEngines):
    """Without prepared statements and without a cache."""

    options: ClassVar[dict[str, Any]] = {"cache_bytes": 0, "parameters": {"prepare": "off"}}

    @pytest.mark.parametrize("seed", range(3, 6))
    def test_the_postgres_engine_agrees_with_the_reference_engine(
        self, make_engine: EngineFactory, reopen: Reopen, seed: int
    ) -> None:
        compare_with_reference(make_engine(), seed, 150, reopen=reopen)
