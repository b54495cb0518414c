"""Files of SqliteStore: in use, in the middle of a write, odd, or no such files."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

for needed in ("psycopg", "langgraph.store.postgres", "langgraph.store.sqlite"):
    pytest.importorskip(needed, reason="needs the extra: pip install '.[dev]'")

from langgraph.store.sqlite.aio import AsyncSqliteStore
from langgraph.store.sqlite.base import VECTOR_MIGRATIONS

from casstore.adapters.langgraph import CasstoreStore, import_items
from casstore.adapters.langgraph.item_import import LEFT_OUT
from casstore.errors import (
    BadItemError,
    BusyError,
    ConflictError,
    ForeignSourceError,
    SourceNotFoundError,
    StorageError,
)
from casstore.maintenance.progress import Step
from casstore.store import Store
from tests.adapters.langgraph.memories import SqliteMemory
from tests.adapters.langgraph.test_item_import import contents, refuse_odd, told
from tests.adapters.langgraph.test_threads import records

pytestmark = pytest.mark.filterwarnings("ignore:The default datetime adapter:DeprecationWarning")


@pytest.fixture
def memory(tmp_path: Path) -> SqliteMemory:
    return SqliteMemory(tmp_path / "memory.sqlite")


@pytest.mark.parametrize("dry_run", [True, False])
def test_uncommitted_rows_are_not_read(
    memory: SqliteMemory,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dry_run: bool,
) -> None:
    monkeypatch.setattr("casstore.compat.sqlite_source._PATIENCE_S", 0.01)
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    with closing(sqlite3.connect(memory.path)) as database:
        # More than fits into its cache, so that it writes to the file before the end.
        database.execute("PRAGMA cache_size = 2")
        database.executemany(
            "INSERT INTO store (prefix, key, value) VALUES ('a', ?, ?)",
            [(f"u{n}", '{"text": "' + "x" * 3000 + '"}') for n in range(40)],
        )
        database.execute('UPDATE store SET value = \'{"not": "committed"}\'')
        with pytest.raises(BusyError, match="another process is writing"):
            memory.move(store, dry_run=dry_run)
        # What a writer leaves that is killed here.
        left = tmp_path / "left"
        left.mkdir()
        for name in (memory.path.name, f"{memory.path.name}-journal"):
            shutil.copy(tmp_path / name, left / name)
        database.rollback()
    with pytest.raises(StorageError, match="in the middle of a write"):
        import_items(store, left / memory.path.name, dry_run=dry_run)
    assert records(store) == []
    assert memory.move(store).imported == 1


def test_a_database_in_use_is_read_as_of_one_moment(memory: SqliteMemory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.conn.execute("PRAGMA journal_mode = WAL")
        theirs.put(("a",), "k", {"n": 1})

        def meanwhile(step: Step) -> None:
            theirs.put(("a",), f"late {step.phase}", {"n": 2})
            theirs.put(("a",), "k", {"n": 3})

        assert memory.move(store, progress=meanwhile).part("items").found == 1
    assert contents(store).keys() == {("a.", "k")}


def test_a_database_that_changes_while_it_is_read_is_reported(
    memory: SqliteMemory, store: Store
) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})

        def write(step: Step) -> None:
            if step.phase == "verify":
                theirs.put(("a",), "late", {"n": 2})

        with pytest.raises(ConflictError, match="once more"):
            memory.move(store, progress=write)
    assert memory.move(store).imported == 1


def test_embeddings_stay_behind_and_are_counted(memory: SqliteMemory, store: Store) -> None:
    with memory.open() as theirs:
        theirs.put(("a",), "k", {"n": 1})
    # As the store makes it; to fill it itself it would load a library into SQLite.
    memory.execute(VECTOR_MIGRATIONS[0])
    for field in ("title", "text"):
        memory.execute(
            "INSERT INTO store_vectors (prefix, key, field_name, embedding) "
            "VALUES ('a', 'k', ?, ?)",
            field,
            bytes(8),
        )
    assert memory.move(store, dry_run=True).note(LEFT_OUT).number == 2
    assert memory.move(store).note(LEFT_OUT).number == 2


# What others may have written into the file: column, content, and what is said of it.
ODD: dict[str, tuple[str, Any, str]] = {
    "not a number": ("value", '{"n": NaN}', "NaN is not a JSON number"),
    "infinity": ("value", '{"n": -1e999}', "-1e999 is too large"),
    "half a pair": ("value", '{"n": "\\ud800"}', "surrogates"),
    "half a pair as a name": ("value", '{"\\udc00": 1}', "surrogates"),
    "no JSON": ("value", "{'n': 1}", "Expecting property name"),
    "no text": ("value", b'{"n": "\xff"}', "invalid start byte"),
    "a key that is no Unicode": ("key", "CAST", "invalid"),
    "a key that is no text": ("key", b"odd", "not a text"),
    "no time": ("created_at", "yesterday", "isoformat"),
    "no time at all": ("updated_at", None, "None is not a time"),
    "a time before all": ("updated_at", "0001-01-01 00:00:00+10:00", "outside the range of times"),
    "an end that is none": ("expires_at", 5, "is not a time"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_item_that_cannot_be_stored_is_reported_by_name(
    memory: SqliteMemory, store: Store, odd: str, dry_run: bool
) -> None:
    column, content, reason = ODD[odd]
    if content == "CAST":
        # Half of a surrogate pair, as a text.
        with memory.open() as theirs:
            theirs.put(("a",), "k", {"n": 1})
        memory.execute("UPDATE store SET key = CAST(x'6bEDA080' AS TEXT)")
        with pytest.raises(BadItemError, match=reason) as refused:
            memory.move(store, dry_run=dry_run)
        assert refused.value.key == "k\\xed\\xa0\\x80"
        assert records(store) == []
    else:
        refuse_odd(memory, store, column, content, reason, dry_run=dry_run)


def test_an_import_stops_at_an_invalid_item_and_continues_after_it_is_repaired(
    memory: SqliteMemory, store: Store
) -> None:
    with memory.open() as theirs:
        for n in range(450):
            theirs.put(("a",), f"k{n:03}", {"n": n})
    memory.execute("UPDATE store SET value = '{\"n\": NaN}' WHERE key = 'k420'")
    with pytest.raises(BadItemError, match="'k420' of namespace 'a'"):
        memory.move(store, dry_run=True)
    assert records(store) == []
    with pytest.raises(BadItemError, match="'k420' of namespace 'a'"):
        memory.move(store)
    there = len(contents(store))
    assert there == 256
    memory.execute("UPDATE store SET value = '{\"n\": null}' WHERE key = 'k420'")
    assert memory.move(store).imported == 450 - there


def test_a_file_in_another_encoding_is_read(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "wide.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA encoding = 'UTF-16le'")
        # Settled with what is written first.
        database.execute("CREATE TABLE other (x)")
    memory = SqliteMemory(path)
    assert memory.execute("PRAGMA encoding") == [("UTF-16le",)]
    with memory.open() as theirs:
        theirs.put(("ß", "a"), "schlüssel", {"text": "ä"})
        theirs.put(("ß", "a"), "as text", {"text": "ä"})
        memory.execute("UPDATE store SET value = CAST('{\"text\": \"ü\"}' AS TEXT) WHERE key = ?",
                       "as text")  # fmt: skip
        memory.move(store)
        ours = CasstoreStore(store)
        for key in ("schlüssel", "as text"):
            assert told(ours.get(("ß", "a"), key)) == told(theirs.get(("ß", "a"), key))


def test_the_async_store_of_the_stock_package_writes_the_same_files(
    tmp_path: Path, store: Store
) -> None:
    async def write() -> None:
        async with AsyncSqliteStore.from_conn_string(str(tmp_path / "a.sqlite")) as theirs:
            await theirs.setup()
            await theirs.aput(("a",), "k", {"n": 1}, ttl=5)

    asyncio.run(write())
    assert import_items(store, tmp_path / "a.sqlite").imported == 1
    found = CasstoreStore(store).get(("a",), "k")
    assert found is not None
    assert found.value == {"n": 1}


def test_a_file_of_another_kind_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SourceNotFoundError):
        import_items(store, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "text").write_text("no database " * 500)
    with pytest.raises(ForeignSourceError):
        import_items(store, tmp_path / "text")
    with closing(sqlite3.connect(tmp_path / "other")) as database, database:
        database.execute("CREATE TABLE store (prefix, key)")
    with pytest.raises(ForeignSourceError, match="SqliteStore"):
        import_items(store, tmp_path / "other")
