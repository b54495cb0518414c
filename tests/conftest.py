"""What all tests share: the campaigns of ``tools/`` are importable; stores by a clock of ours."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
# At the end: an installed casstore must not be hidden by the one beside the tests.
sys.path.append(str(Path(__file__).parent.parent))

from casstore.engine.lmdb import applying
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine
from casstore.store import Store
from casstore.testing import ManualClock
from tests.engine.postgres.engines import engines, postgres_schemas
from tests.engine.postgres.server import postgres_server, postgres_url, schema
from tests.refusals import CountingEngine

__all__ = ["any_store", "clock", "postgres_schemas", "postgres_server", "postgres_url", "schema"]


# How many of the tests that run on every engine run on PostgreSQL as well, one in so many: each
# begins with connections that the server has yet to make. CASSTORE_EVERY_ENGINE=1 runs them all.
_POSTGRES_SHARE = 32
EVERY = "CASSTORE_EVERY_ENGINE"
_ENGINE = re.compile(r"[\[-]postgres\b(?!:)")
# Seconds each, and what they are about is tried by shorter ones.
_LONG_ON_POSTGRES = (
    "long_chain",
    "during_repeated_vacuums",
    "agree_with_the_model",
    "concurrent_change_of_the_session_survives_vacuum",
)


# Where the files of tests are: in memory, if the system has such a place. Most tests open and close
# stores, which waits for the disk; what a disk may lose is tried by ``campaigns.replay``.
_MEMORY = Path("/dev/shm")
_TEMPROOT = "PYTEST_DEBUG_TEMPROOT"


def _prefer_memory() -> None:
    if _TEMPROOT not in os.environ and os.access(_MEMORY, os.W_OK):
        free = os.statvfs(_MEMORY)
        if free.f_bavail * free.f_frsize > 4 << 30:
            os.environ[_TEMPROOT] = str(_MEMORY)


def pytest_configure(config: pytest.Config) -> None:
    """Hear signals, in the tests and in the processes that they start.

    What a process ignores, all that it starts ignore, too: under nohup, or in the background of a
    script, tests that interrupt a process would wait for ever. What it handles is back at its
    default in a process that it starts.
    """
    _prefer_memory()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # The run itself goes on when its terminal closes: that is what nohup is for.
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most of what others try on PostgreSQL; its own tests are all there."""
    if os.environ.get(EVERY):
        return
    left_out = [item for item in items if _is_on_postgres_too(item) and not _is_chosen(item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def _is_on_postgres_too(item: pytest.Item) -> bool:
    name = item.nodeid.rpartition("::")[2]
    # A parameter of this name, and not a URL, which begins like it.
    return "TestPostgresSessions" in item.nodeid or _ENGINE.search(name) is not None


def _is_chosen(name: str) -> bool:
    is_long = any(word in name for word in _LONG_ON_POSTGRES)
    # By the name, so that it is the same ones on every machine.
    return not is_long and crc32(name.encode()) % _POSTGRES_SHARE == 0


@pytest.fixture
def clock() -> ManualClock:
    """The time of ``any_store``."""
    return ManualClock()


@pytest.fixture
def engine() -> CountingEngine:
    """Counts what is written: for tests of calls that are refused."""
    return CountingEngine()


@pytest.fixture
def slab_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit becomes a slab of its own: for tests that want many small slabs."""
    monkeypatch.setattr(applying, "JOINED_BYTES", -1)


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[Store]:
    """A store on one engine, and then on the others."""
    engine: Engine
    if request.param == "postgres":
        with (
            engines(request.getfixturevalue("postgres_schemas")) as make,
            Store(make(clock=clock)) as store,
        ):
            yield store
        return
    if request.param == "memory":
        engine = MemoryEngine(clock=clock)
    else:
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", clock=clock)
    with Store(engine) as store:
        yield store
