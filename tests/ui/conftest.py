"""A store to look at, and one to change, for tests of the viewer.

What the viewer needs is imported by the fixtures: where it is not installed, each module of
tests is skipped by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import casstore

if TYPE_CHECKING:
    from casstore.ui.views.viewed import Viewed
    from tests.ui.serving import Running

LONG_TURNS = 10_000


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with everything that the viewer shows. No test may change it."""
    import viewer_store

    place = tmp_path_factory.mktemp("viewed") / "store"
    viewer_store.build(place)
    return place


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of 10,000 turns."""
    import viewer_store

    place = tmp_path_factory.mktemp("long") / "store"
    viewer_store.build_long(place, LONG_TURNS)
    return place


@pytest.fixture(scope="session")
def viewed(example: Path) -> Iterator[Viewed]:
    """The example as the pages read it."""
    from casstore.ui.views.viewed import Viewed

    with casstore.open(example, readonly=True) as store:
        yield Viewed(store)


@pytest.fixture(scope="session")
def running(example: Path) -> Iterator[Running]:
    """A viewer of the example."""
    from tests.ui.serving import serve

    with serve(example) as made:
        yield made


@pytest.fixture
def own(example: Path, tmp_path: Path) -> Path:
    """A copy of the example that the test may change."""
    place = tmp_path / "own"
    shutil.copytree(example, place)
    return place
