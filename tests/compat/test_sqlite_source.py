"""A SQLite database of another program may be damaged, or made to keep its reader busy for ever."""

from __future__ import annotations

import random
import signal
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from casstore import Store
from casstore.adapters.jsonl import import_jsonl
from casstore.compat import sqlite_source
from casstore.compat.agent_harness_import import import_agent_harness
from casstore.compat.agent_state_import import import_morrow
from casstore.compat.langbot_import import import_langbot
from casstore.compat.lash_import import import_lash
from casstore.compat.power_loop_import import import_power_loop
from casstore.compat.sqlite_source import SqliteSource
from casstore.engine.memory import MemoryEngine
from casstore.errors import CasstoreError, ForeignSourceError, LimitError, StorageError

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS a FROM c"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "source.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE t (a, b)")
        database.executemany("INSERT INTO t VALUES (?, ?)", [(n, "x" * 40) for n in range(500)])
        database.execute(f"CREATE VIEW v AS {ENDLESS}")
        database.execute("CREATE VIRTUAL TABLE words USING fts5(a)")
    return path


def change(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA writable_schema = 1")
        database.execute(statement, values)


def test_views_and_virtual_tables_do_not_count_as_tables(file: Path) -> None:
    with SqliteSource(file) as source:
        assert "t" in source.tables
        assert not {"v", "words"} & source.tables
        assert source.columns("T") == {"a", "b"}
        assert source.columns("v") == source.columns("words") == frozenset()


@pytest.mark.parametrize(
    "query",
    ["SELECT count(*) FROM v", "SELECT a FROM v", "SELECT a FROM v ORDER BY a DESC LIMIT 1"],
)
def test_a_query_that_never_ends_is_ended(
    file: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr(sqlite_source, "_LEAST_STEPS", 100)
    monkeypatch.setattr(sqlite_source, "_LEAST_ROWS", 100)
    with SqliteSource(file) as source:
        with pytest.raises(LimitError, match="endless"):
            # Another query in between has a budget of its own, and adds nothing to this one's.
            deque((list(source.ask("SELECT 1")) for _ in source.ask(query)), maxlen=0)
        assert len(list(source.ask("SELECT a FROM t"))) == 500


def test_a_sorted_join_over_the_whole_file_stays_within_the_limits(file: Path) -> None:
    with SqliteSource(file) as source:
        joined = "SELECT t.a FROM t JOIN t AS u ON t.rowid = u.rowid ORDER BY u.b, t.a DESC"
        assert len(list(source.ask(joined))) == 500


class Stopped(BaseException):
    """Raised by a signal handler."""


@pytest.mark.parametrize("raised", [KeyboardInterrupt, Stopped])
@pytest.mark.parametrize("query", ["SELECT count(*) FROM v", "SELECT a FROM v"])
def test_a_signal_ends_a_query_that_is_running(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: type[BaseException],
    query: str,
) -> None:
    """SQLite runs in C, where Python handles no signal of its own accord."""
    monkeypatch.setattr(sqlite_source, "_LEAST_STEPS", 1 << 60)
    monkeypatch.setattr(sqlite_source, "_LEAST_ROWS", 1 << 60)

    def handle(number: int, frame: FrameType | None) -> None:
        raise raised

    def interrupted(source: SqliteSource, after_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        deque(source.ask(query), maxlen=0)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with SqliteSource(file) as source:
            # Many times: the signal may arrive at any instruction of the callback.
            for number in range(100):
                with pytest.raises(raised):
                    interrupted(source, 0.002 + number / 1e6)
            assert list(source.ask("SELECT count(*) FROM t")) == [(500,)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_computed_column_above_the_value_limit_is_refused(file: Path) -> None:
    change(file, "ALTER TABLE t ADD COLUMN c AS (zeroblob(900000000))")
    with SqliteSource(file) as source, pytest.raises(StorageError, match="too big"):
        next(source.ask("SELECT c FROM t"))


def test_damage_that_cannot_be_printed_is_a_typed_error(file: Path) -> None:
    """SQLite repeats the damaged text, which is no text, and Python cannot decode the message."""
    change(file, "UPDATE sqlite_master SET sql = CAST(? AS TEXT) WHERE name = 't'", b"CREATE \xff")
    with pytest.raises(ForeignSourceError, match=r"source\.db cannot be opened"):
        SqliteSource(file)


def test_invalid_utf8_is_a_typed_error(file: Path) -> None:
    change(file, "UPDATE t SET b = CAST(? AS TEXT) WHERE a = 3", b"\xff\xfe")
    with SqliteSource(file) as source:
        assert next(source.ask("SELECT b FROM t")) == ("x" * 40,)
        with pytest.raises(StorageError, match="cannot be read"):
            list(source.ask("SELECT b FROM t"))


IMPORTERS: dict[str, Callable[[Store, Path], object]] = {
    "agent-harness": import_agent_harness,
    "agent state": import_morrow,
    "LangBot": import_langbot,
    "lash": import_lash,
    "power-loop": import_power_loop,
    "transcript": lambda store, path: import_jsonl(store, path),
}


def mutations(raw: bytes, number: int) -> Iterator[bytes]:
    rng = random.Random(number)
    for _ in range(number):
        data = bytearray(raw)
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for _ in range(3):
            # The first page says what the tables are.
            data[rng.randrange(100, 4096)] = rng.randrange(128, 256)
        yield bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


@pytest.mark.parametrize("name", IMPORTERS)
def test_an_importer_ends_with_a_typed_error_whatever_it_is_given(
    file: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    odd = [tmp_path / "folder", tmp_path / "nothing", tmp_path / ("n" * 300), Path("/dev/null")]
    for path in odd:
        with pytest.raises(CasstoreError):
            IMPORTERS[name](Store(MemoryEngine()), path)
    if name != "transcript":
        for data in (b"", b"SQLite format 3\0", *mutations(file.read_bytes(), 20)):
            file.write_bytes(data)
            with pytest.raises(CasstoreError):
                IMPORTERS[name](Store(MemoryEngine()), file)
