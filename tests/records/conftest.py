"""A store for every test of records, on each engine that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.store import Store
from tests.postgres.engines import engines


class Clock:
    """The engine's clock, moved by hand."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms

    def move(self, ms: int) -> None:
        self.now_ms += ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    if request.param == "postgres":
        schemas = request.getfixturevalue("postgres_schemas")
        with engines(schemas) as make, Store(make(clock=clock)) as store:
            yield store
        return
    engine: Any = MemoryEngine(clock=clock)
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=clock)
    with Store(engine) as store:
        yield store
