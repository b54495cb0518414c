"""What the tests of retention, expiry and erasure run on: a store on each engine, and a clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.store import Store
from casstore.testing import ManualClock


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


@pytest.fixture
def lmdb_store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with Store(LmdbEngine(str(tmp_path / "l"), durability="relaxed", clock=clock)) as store:
        yield store
