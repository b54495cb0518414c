"""Moving a foreign database: stopped, repeated, dry, in conflict, written to meanwhile."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from casstore.compat.importing import (
    ImportReport,
    PartReport,
    Presence,
    RowPart,
    presence,
)
from casstore.compat.importing import (
    run as run_import,
)
from casstore.compat.sqlite_source import SqliteSource
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    BusyError,
    ConflictError,
    ForeignStoreError,
    StorageError,
    StoreNotFoundError,
)
from casstore.maintenance.progress import Progress, Step
from casstore.session.records import Draft, Table
from casstore.store import Store

ROWS = [(f"k{number}", f"text {number}") for number in range(7)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE notes (name TEXT PRIMARY KEY, content TEXT)")
        database.executemany("INSERT INTO notes VALUES (?, ?)", ROWS)
    return path


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


class Notes(RowPart[tuple[str, str]]):
    name = "notes"

    def __init__(self, source: SqliteSource, store: Store) -> None:
        self._source = source
        self._target = store
        self.table = Table(store, "notes", 1)

    def count(self) -> int:
        return int(next(self._source.ask("SELECT count(*) FROM notes"))[0])

    def pages(self) -> Iterator[Sequence[Any]]:
        rows = list(self._source.ask("SELECT name, content FROM notes ORDER BY name"))
        for start in range(0, len(rows), 2):
            yield rows[start : start + 2]

    def look(self, page: Sequence[Any]) -> Sequence[Presence]:
        found = self.table.find_many([(name,) for name, _ in page])
        for (name, content), record in zip(page, found, strict=True):
            if record is not None and record.value != content:
                raise ConflictError(f"note {name} is there with other content")
        return presence(record is not None for record in found)

    def store(self, rows: Sequence[Any]) -> None:
        draft = Draft(self._target)
        for name, content in rows:
            draft.put(self.table, (name,), content)
        draft.commit()


def run(file: Path, store: Store, **how: Any) -> ImportReport:
    with SqliteSource(file) as source:
        return run_import("notes", source, store, [Notes(source, store)], **how)


def stored(store: Store) -> list[tuple[str, Any]]:
    return [(record.key[0], record.value) for record in Table(store, "notes", 1).scan()]


class Stopped(BaseException):
    pass


def stopping_at(number: int) -> Progress:
    steps: list[Step] = []

    def note(step: Step) -> None:
        steps.append(step)
        if len(steps) == number:
            raise Stopped

    return note


def test_every_row_is_imported_once(file: Path, store: Store) -> None:
    steps: list[Step] = []
    before = file.read_bytes()
    report = run(file, store, progress=steps.append)
    assert report.parts == (PartReport("notes", 7, 7),)
    assert report.source_bytes == len(before)
    assert stored(store) == ROWS
    assert [step.phase for step in steps] == ["copy"] * 4 + ["verify"] * 4
    assert steps[3] == Step("copy", 7, 7, "notes")
    assert run(file, store).imported == 0
    assert file.read_bytes() == before


def test_a_dry_run_writes_nothing_and_reports_what_would_be_imported(
    file: Path, store: Store
) -> None:
    assert run(file, store, dry_run=True).parts == (PartReport("notes", 7, 7),)
    assert stored(store) == []
    with pytest.raises(Stopped):
        run(file, store, progress=stopping_at(1))
    assert run(file, store, dry_run=True).parts == (PartReport("notes", 7, 5),)


def test_rows_of_a_page_that_are_stored_are_not_written_again(file: Path, store: Store) -> None:
    draft = Draft(store)
    draft.put(Table(store, "notes", 1), ("k4",), "text 4")
    draft.commit()
    written: list[str] = []

    class Watched(Notes):
        def store(self, rows: Sequence[Any]) -> None:
            written.extend(name for name, _ in rows)
            super().store(rows)

    with SqliteSource(file) as source:
        report = run_import("notes", source, store, [Watched(source, store)])
    assert report.parts == (PartReport("notes", 7, 6),)
    assert written == ["k0", "k1", "k2", "k3", "k5", "k6"]


@pytest.mark.parametrize("number", range(1, 9))
def test_an_import_stopped_anywhere_continues_from_there(
    file: Path, store: Store, number: int
) -> None:
    with pytest.raises(Stopped):
        run(file, store, progress=stopping_at(number))
    moved = len(stored(store))
    assert moved == min(2 * number, 7)
    assert run(file, store).imported == 7 - moved
    assert stored(store) == ROWS


@pytest.mark.parametrize("dry_run", [False, True])
def test_content_in_the_store_that_differs_ends_the_import(
    file: Path, store: Store, dry_run: bool
) -> None:
    draft = Draft(store)
    draft.put(Table(store, "notes", 1), ("k5",), "mine")
    draft.commit()
    with pytest.raises(ConflictError, match="k5"):
        run(file, store, dry_run=dry_run)
    assert ("k5", "mine") in stored(store)


def test_a_row_deleted_during_verification_is_reported(file: Path, store: Store) -> None:
    def remove(step: Step) -> None:
        if step.phase == "verify" and step.done == 2:
            draft = Draft(store)
            draft.delete(Table(store, "notes", 1), ("k6",))
            draft.commit()

    with pytest.raises(ConflictError):
        run(file, store, progress=remove)


def test_a_file_written_to_during_the_import_raises(file: Path, store: Store) -> None:
    def write(step: Step) -> None:
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("INSERT OR REPLACE INTO notes VALUES ('new', ?)", ("x" * 9000,))

    with pytest.raises((ConflictError, StorageError)):
        run(file, store, progress=write)


def test_a_database_in_use_is_read_with_its_log(file: Path, store: Store) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        with database:
            database.execute("INSERT INTO notes VALUES ('k7', 'text 7')")
        assert run(file, store).imported == 8


def test_uncommitted_rows_are_not_read(
    file: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.sqlite_source._PATIENCE_S", 0.01)
    with closing(sqlite3.connect(file)) as database:
        # More than fits into its cache, so that it writes to the file before the end.
        database.execute("PRAGMA cache_size = 2")
        database.executemany(
            "INSERT INTO notes VALUES (?, ?)", [(f"u{n}", "x" * 3000) for n in range(40)]
        )
        database.execute("UPDATE notes SET content = 'not committed'")
        with pytest.raises(BusyError, match="another process is writing"):
            run(file, store)
        # What a writer leaves that is killed here.
        left = tmp_path / "left"
        left.mkdir()
        for name in (file.name, f"{file.name}-journal"):
            shutil.copy(tmp_path / name, left / name)
        database.rollback()
    before = {each.name: each.read_bytes() for each in left.iterdir()}
    with pytest.raises(StorageError, match="in the middle of a write"):
        run(left / file.name, store)
    assert {each.name: each.read_bytes() for each in left.iterdir()} == before
    assert run(file, store).imported == len(ROWS)


@pytest.mark.parametrize("mode", ["PERSIST", "TRUNCATE"])
def test_an_empty_journal_does_not_prevent_an_import(file: Path, store: Store, mode: str) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(f"PRAGMA journal_mode = {mode}")
        database.execute("INSERT INTO notes VALUES ('k7', 'text 7')")
    assert Path(f"{file}-journal").exists()
    assert run(file, store).imported == 8


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path, file: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        SqliteSource(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no database, but long enough to be looked at" * 100)
    with pytest.raises(ForeignStoreError) as refused:
        SqliteSource(tmp_path / "text")
    # Also while a caller still holds the exception, whose traceback refers to the database.
    assert refused.value
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert str(tmp_path / "text") not in opened
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] + b"\xff" * (len(whole) - len(whole) // 2))
    with pytest.raises((ForeignStoreError, StorageError)), SqliteSource(file) as source:
        list(source.ask("SELECT * FROM notes"))
    with pytest.raises(StorageError), SqliteSource(file) as source:
        list(source.ask("SELECT * FROM no_such_table"))
