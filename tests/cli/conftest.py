"""A store to look at, and one to change, for tests of the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.running import fill


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with sessions, branches, forks and names. Nobody may change it."""
    place = tmp_path_factory.mktemp("example") / "store"
    fill(place)
    return str(place)


@pytest.fixture
def own(example: str, tmp_path: Path) -> str:
    """A copy of the example that the test may change."""
    place = tmp_path / "own"
    shutil.copytree(example, place)
    return str(place)
