"""A store in a directory, with the parts of its index file that tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import casstore
from casstore.store import Store


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of ``store``."""
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    """An empty store in a directory."""
    with casstore.open(place, "relaxed", auto_train=False) as opened:
        yield opened
