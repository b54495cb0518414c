"""Runs on each engine, with a thread and a run in it."""

from __future__ import annotations

import pytest

from casstore.records.runs import Runs
from casstore.store import Store


@pytest.fixture
def runs(store: Store) -> Runs:
    """The runs of a store that has none."""
    return Runs(store)


@pytest.fixture
def busy(runs: Runs) -> Runs:
    """Runs with a thread ``t`` and its run ``r``."""
    runs.create_thread("t", "agent")
    runs.create_run("t", "r", "agent", "graph")
    return runs
