"""What all tests share: the campaigns of ``tools/`` are importable; stores by a clock of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

from casstore.engine.lmdb import tail
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.store import Store
from casstore.testing import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """The time of ``any_store``."""
    return ManualClock()


@pytest.fixture
def slab_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers do not join what they store: for tests that want many small slabs."""
    monkeypatch.setattr(tail, "SMALL_BODY_BYTES", -1)


@pytest.fixture(params=["memory", "lmdb"])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[Store]:
    """A store on one engine, and then on the other."""
    engine: Engine
    if request.param == "memory":
        engine = MemoryEngine(clock=clock)
    else:
        engine = LmdbEngine(str(tmp_path / "s"), durability="process", clock=clock)
    with Store(engine) as store:
        yield store
