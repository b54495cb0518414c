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
def either_keys(request: pytest.FixtureRequest) -> FileKeys | None:
    """The keys of ``either``."""
    if request.param == "clear":
        return None
    found: FileKeys = request.getfixturevalue("keys")
    return found


@pytest.fixture
def either(store: Store, either_keys: FileKeys | None) -> Lifecycles:
    return Lifecycles(store, keys=either_keys)
