"""What tests of adapters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import casstore
from casstore.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with casstore.open(tmp_path / "store", "relaxed") as store:
        yield store
