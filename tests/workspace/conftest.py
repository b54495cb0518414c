"""A store, a session in it, and a directory of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import casstore
from casstore.session.session import Session
from casstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with casstore.open(tmp_path / "store", "relaxed", auto_train=False) as opened:
        yield opened


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("agent")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    place.mkdir()
    return place
