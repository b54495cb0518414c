"""What tests of the engine on PostgreSQL begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.engine.postgres.engines import Schemas, engines

if TYPE_CHECKING:
    from casstore.engine.postgres.engine import PostgresEngine


@pytest.fixture
def engine(postgres_schemas: Schemas) -> Iterator[PostgresEngine]:
    # Here, because without psycopg these tests are skipped, and this file is loaded all the same.
    from casstore.engine.postgres.engine import PostgresEngine

    with engines(postgres_schemas) as make:
        made = make()
        assert isinstance(made, PostgresEngine)
        yield made
