"""Lifecycles on each engine, with and without keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.records.lifecycles import FileKeys, Lifecycles
from casstore.store import Store
from tests.postgres.engines import engines
from tests.records.conftest import Clock


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    if request.param == "postgres":
        schemas = request.getfixturevalue("postgres_schemas")
        with engines(schemas) as make, Store(make(clock=clock)) as store:
            yield store
        return
    engine: Engine = MemoryEngine(clock=clock)
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=clock)
    with Store(engine) as store:
        yield store


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    pytest.importorskip("cryptography", reason="needs the extra: pip install 'casstore[sealing]'")
    return FileKeys(tmp_path / "keys")


@pytest.fixture
def life(store: Store) -> Lifecycles:
    return Lifecycles(store)


@pytest.fixture
def locked(store: Store, keys: FileKeys) -> Lifecycles:
    return Lifecycles(store, keys=keys)


@pytest.fixture(params=["clear", "encrypted"])
def either(request: pytest.FixtureRequest, store: Store) -> Lifecycles:
    if request.param == "clear":
        return Lifecycles(store)
    found: Lifecycles = request.getfixturevalue("locked")
    return found
