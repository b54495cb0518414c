"""Lifecycles on each engine, with and without keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from casstore.records.lifecycles import FileKeys, Lifecycles
from casstore.store import Store


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    pytest.importorskip("cryptography", reason="needs the extra: pip install '.[sealing]'")
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
