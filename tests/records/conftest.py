"""A store for every test of records, on each engine that there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.faults import Checking
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.maintenance.check import check
from casstore.store import Store
from tests.engine.postgres.engines import engines


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


def judge(store: Store, *, damaged: bool) -> None:
    """Whatever a test did, rows that say the same thing agree, unless it damaged some of them."""
    assert isinstance(store.engine, Checking)
    report = check(store, level="full")
    assert report.sound is not damaged, report.findings
    if not damaged:
        assert report.counts.keys() <= {"history_gap", "log_gap"}, report.findings


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    if request.param == "postgres":
        schemas = request.getfixturevalue("postgres_schemas")
        with engines(schemas) as make, Store(make(clock=clock)) as store:
            yield store
        return
    engine: Any = MemoryEngine(clock=clock)
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        yield store
        judge(store, damaged=request.node.get_closest_marker("leaves_damage") is not None)
