"""What all tests share: the campaigns of ``tools/`` are importable; stores by a clock of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
# At the end: an installed casstore must not be hidden by the one beside the tests.
sys.path.append(str(Path(__file__).parent.parent))

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.store import Store
from casstore.testing import ManualClock
from tests.postgres.engines import engines, postgres_schemas
from tests.postgres.server import postgres_server, postgres_url, schema

__all__ = ["any_store", "clock", "postgres_schemas", "postgres_server", "postgres_url", "schema"]


@pytest.fixture
def clock() -> ManualClock:
    """The time of ``any_store``."""
    return ManualClock()


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[Store]:
    """A store on one engine, and then on the others."""
    engine: Engine
    if request.param == "postgres":
        with (
            engines(request.getfixturevalue("postgres_schemas")) as make,
            Store(make(clock=clock)) as store,
        ):
            yield store
        return
    if request.param == "memory":
        engine = MemoryEngine(clock=clock)
    else:
        engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=clock)
    with Store(engine) as store:
        yield store
