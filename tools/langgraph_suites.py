#!/usr/bin/env python3
"""Run the store tests of LangGraph's repository with ``CasstoreStore`` in place of their stores.

    git clone https://github.com/langchain-ai/langgraph
    pip install pytest-asyncio pytest-mock pytest-retry
    tools/langgraph_suites.py langgraph

The tests run unchanged: a pytest plugin, this same file, replaces ``InMemoryStore``,
``SqliteStore``, ``PostgresStore`` and their asynchronous versions before the tests import them. The
tests in ``EXCLUDED`` are left out; each has its reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

if __name__ == "__main__":
    from checkout import use_checkout

    use_checkout()

# The address that the tests of langgraph-checkpoint-postgres connect to.
_SERVER_PORT: Final = 5441
# The engine under CasstoreStore, and the directory for the stores of the tests; set for pytest.
_ENGINE: Final = "CASSTORE_SUITES_ENGINE"
_SCRATCH: Final = "CASSTORE_SUITES_SCRATCH"
ENGINES: Final = ("lmdb", "postgres")


class Suite(NamedTuple):
    """The store tests of one package of LangGraph's repository."""

    directory: str
    files: tuple[str, ...]


class Excluded(NamedTuple):
    """Tests that cannot pass with another store than the one they were written for."""

    package: str
    test: str
    reason: str


SUITES: Final = {
    "checkpoint": Suite("libs/checkpoint", ("tests/test_store.py",)),
    "sqlite": Suite(
        "libs/checkpoint-sqlite",
        ("tests/test_store.py", "tests/test_async_store.py", "tests/test_ttl.py"),
    ),
    "postgres": Suite(
        "libs/checkpoint-postgres", ("tests/test_store.py", "tests/test_async_store.py")
    ),
}

_BY_SQL: Final = "changes rows of PostgresStore's table by SQL"
_MIGRATIONS: Final = "reads the migrations of the other store; CasstoreStore has none"
_LOOP: Final = (
    "expects the synchronous methods to refuse to run on an event loop; CasstoreStore allows it, "
    "as InMemoryStore does"
)
EXCLUDED: Final = (
    Excluded(
        "sqlite",
        "tests/test_store.py::test_vector_store_initialization",
        "looks for tables of SqliteStore",
    ),
    Excluded(
        "sqlite",
        "tests/test_store.py::test_sql_injection_vulnerability",
        "expects an error for a filter key that is SQL; here it is a key that no item has, as in "
        "InMemoryStore",
    ),
    Excluded("sqlite", "tests/test_store.py::test_nonnull_migrations", _MIGRATIONS),
    Excluded("sqlite", "tests/test_async_store.py::test_no_running_loop", _LOOP),
    Excluded(
        "sqlite",
        "tests/test_ttl.py::test_ttl_override_default",
        "relies on SqliteStore not refreshing on reading unless refresh_on_read is given; "
        "LangGraph documents True as its default",
    ),
    Excluded("postgres", "tests/test_store.py::test_nonnull_migrations", _MIGRATIONS),
    Excluded("postgres", "tests/test_store.py::test_omit_expired", _BY_SQL),
    Excluded("postgres", "tests/test_async_store.py::test_omit_expired", _BY_SQL),
    Excluded("postgres", "tests/test_async_store.py::test_no_running_loop", _LOOP),
    Excluded(
        "postgres",
        "tests/test_async_store.py::test_abatch_uses_single_pool_checkout",
        "counts connections of PostgresStore's pool",
    ),
)


# --- the plugin ---------------------------------------------------------------------------------


def _address(conn_string: str) -> str:
    """Where the store for a test's connection string is: the same for the same string."""
    scratch = Path(os.environ[_SCRATCH])
    if conn_string == ":memory:":
        return tempfile.mkdtemp(dir=scratch)
    if "://" not in conn_string:
        return str(scratch / Path(conn_string).name)
    if os.environ[_ENGINE] == "postgres":
        return conn_string
    database = conn_string.rpartition("/")[2].partition("?")[0]
    return str(scratch / database)


# The one statement that fixtures run after ``setup``; all other uses of a cursor are excluded.
_DROP: Final = "DROP TABLE IF EXISTS store_migrations"


class _Cursor:
    """Accepts ``_DROP``, which means nothing here."""

    def execute(self, statement: str) -> None:
        assert statement == _DROP, statement


class _AsyncCursor(_Cursor):
    async def execute(self, statement: str) -> None:  # type: ignore[override]
        super().execute(statement)


def _substitutes() -> dict[str, type]:
    """The classes that the tests get in place of LangGraph's stores, by name."""
    from langgraph.store.base import IndexConfig, TTLConfig

    import casstore
    from casstore.adapters.langgraph import CasstoreStore

    class InMemory(CasstoreStore):
        def __init__(self, *, index: IndexConfig | None = None) -> None:
            super().__init__(casstore.open(_address(":memory:")), index=index)

    class Sync(CasstoreStore):
        MIGRATIONS: Sequence[str] = ()

        @classmethod
        def from_conn_string(  # type: ignore[override]
            cls,
            conn_string: str,
            *,
            index: Any = None,
            ttl: TTLConfig | None = None,
            pipeline: bool = False,
            pool_config: Any = None,
        ) -> Any:
            if index is not None and "text_fields" in index:
                # SqliteStore reads this name; LangGraph documents ``fields``.
                index = {**index, "fields": index["text_fields"]}
                del index["text_fields"]
            return cls.from_path(_address(conn_string), ttl=ttl, index=index)

        @contextmanager
        def _cursor(self) -> Iterator[_Cursor]:
            yield _Cursor()

    class Async:
        """A ``Sync`` whose methods that LangGraph has as coroutines are coroutines."""

        def __init__(self, store: Any) -> None:
            self._store = store
            self.MIGRATIONS: Sequence[str] = ()

        @classmethod
        def from_conn_string(cls, conn_string: str, **options: Any) -> Async:
            return cls(Sync.from_conn_string(conn_string, **options))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def __aenter__(self) -> Async:
            await self._store.__aenter__()
            return self

        async def __aexit__(self, *raised: Any) -> None:
            await self._store.__aexit__(*raised)

        async def setup(self) -> None:
            await self._store.asetup()

        async def start_ttl_sweeper(self, minutes: float | None = None) -> Any:
            return await self._store.astart_ttl_sweeper(minutes)

        async def stop_ttl_sweeper(self, timeout: float | None = None) -> Any:
            return await self._store.astop_ttl_sweeper(timeout)

        async def sweep_ttl(self) -> Any:
            return await self._store.asweep_ttl()

        @asynccontextmanager
        async def _cursor(self) -> AsyncIterator[_Cursor]:
            yield _AsyncCursor()

    return {
        "InMemoryStore": InMemory,
        "SqliteStore": Sync,
        "AsyncSqliteStore": Async,
        "PostgresStore": Sync,
        "AsyncPostgresStore": Async,
    }


def pytest_configure() -> None:
    """Replace the stores in every module that the tests import them from."""
    import langgraph.store.memory
    import langgraph.store.postgres
    import langgraph.store.sqlite
    import langgraph.store.sqlite.aio

    made = _substitutes()
    for module in (
        langgraph.store.memory,
        langgraph.store.sqlite,
        langgraph.store.sqlite.aio,
        langgraph.store.postgres,
    ):
        for name, substitute in made.items():
            if hasattr(module, name):
                setattr(module, name, substitute)


# --- the command --------------------------------------------------------------------------------


def _run_suite(name: str, checkout: Path, engine: str, more: Sequence[str]) -> int:
    """Run one suite in a pytest of its own; returns its exit code."""
    suite = SUITES[name]
    excluded = [one for one in EXCLUDED if one.package == name]
    print(f"== langgraph-{suite.directory.removeprefix('libs/')} on {engine}", flush=True)
    for one in excluded:
        print(f"   not run: {one.test}: {one.reason}", flush=True)
    with tempfile.TemporaryDirectory(prefix="casstore-suites-") as scratch:
        ended = subprocess.run(
            [
                # -P: the checkout has packages named as the installed ones.
                sys.executable, "-P", "-m", "pytest", "-q", "-p", "langgraph_suites",
                "-o", "addopts=", "-o", "asyncio_mode=auto",
                "-o", "asyncio_default_fixture_loop_scope=function",
                *(f"--deselect={one.test}" for one in excluded), *suite.files, *more,
            ],
            cwd=checkout / suite.directory,
            env={
                **os.environ,
                _ENGINE: engine,
                _SCRATCH: scratch,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            },
            check=False,
        )  # fmt: skip
    return ended.returncode


def _missing() -> list[str]:
    """The packages that the tests need and this Python lacks."""
    needed = {"pytest_asyncio": "pytest-asyncio", "pytest_mock": "pytest-mock",
              "pytest_retry": "pytest-retry"}  # fmt: skip
    return [package for module, package in needed.items() if find_spec(module) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suites that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of LangGraph's repository")
    parser.add_argument(
        "--suite", action="append", choices=SUITES, help="run only this one (default: all)"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="lmdb",
        help="of the stores in the suite postgres (default: lmdb)",
    )
    given, more = parser.parse_known_args(argv)
    wanted = given.suite or list(SUITES)
    if not (given.checkout / SUITES[wanted[0]].directory).is_dir():
        parser.error(f"{given.checkout} has no {SUITES[wanted[0]].directory}: not LangGraph's")
    if lacking := _missing():
        parser.error(f"the tests need {', '.join(lacking)}; try: pip install {' '.join(lacking)}")
    with ExitStack() as servers:
        if "postgres" in wanted or given.engine == "postgres":
            from servers.postgres import Server

            server = Server(tcp=True)
            server.port = _SERVER_PORT
            servers.enter_context(server)
        codes = [_run_suite(name, given.checkout, given.engine, more) for name in wanted]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
