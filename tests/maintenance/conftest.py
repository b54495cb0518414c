"""What the tests of maintenance share: stores on each engine; the modules here are importable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import casstore
from casstore import Store
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.testing import ManualClock
from tests.engine.postgres.engines import Schemas, engines

MakeStore = Callable[[], Store]


@pytest.fixture
def store(any_store: Store) -> Store:
    """A store on each engine. Its time is that of ``clock``."""
    return any_store


@pytest.fixture
def lmdb_store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    """A store in a directory, with the time of ``clock``."""
    with Store(LmdbEngine(str(tmp_path / "l"), durability="relaxed", clock=clock)) as store:
        yield store


@pytest.fixture
def make_memory() -> Iterator[MakeStore]:
    """Stores in memory."""
    made: list[Store] = []

    def make() -> Store:
        made.append(Store(MemoryEngine()))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def make_lmdb(tmp_path: Path) -> Iterator[MakeStore]:
    """Stores in directories of their own."""
    made: list[Store] = []

    def make() -> Store:
        made.append(casstore.open(tmp_path / f"store-{len(made)}", auto_train=False))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def make_postgres(postgres_schemas: Schemas) -> Iterator[MakeStore]:
    """Stores on a server, each in a schema of its own."""
    with engines(postgres_schemas) as make:
        yield lambda: Store(make())


@pytest.fixture(params=["memory", "lmdb"])
def make_store(
    request: pytest.FixtureRequest, make_memory: MakeStore, make_lmdb: MakeStore
) -> MakeStore:
    """Stores of one engine, and then of the other."""
    return make_memory if request.param == "memory" else make_lmdb
