"""Where the campaigns work: in memory if there is such a place, because they flush a lot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """An empty directory, gone afterwards."""
    memory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="casstore-faults-", dir=memory) as place:
        yield Path(place)
