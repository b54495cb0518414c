"""Reads another program's SQLite database in one snapshot, and does not change it.

The file is not trusted. Views and virtual tables do not count as tables, because a view may have
endless rows. The size of the file bounds what one query may read, and Ctrl-C ends a query.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from casstore.compat.importing import LeftBehind
from casstore.engine.paths import path_text
from casstore.errors import (
    BusyError,
    CasstoreError,
    ConflictError,
    ForeignSourceError,
    LimitError,
    SourceNotFoundError,
    StorageError,
)

# The low byte says what happened, the rest where.
_PRIMARY: Final = 0xFF
# How long a writer is waited for.
_PATIENCE_S = 5.0
# SQLite calls back after so many instructions of its virtual machine.
_STEP: Final = 1000
# What one query may take: a second, and for each byte of the file many times what reading it,
# sorting it and looking it up take.
_LEAST_STEPS: Final = 50_000
_BYTES_PER_STEP: Final = 16
_LEAST_ROWS: Final = 10_000
# A column may be computed, and as long as SQLite allows.
_MAX_VALUE_BYTES: Final = 1 << 29
_FAILURES: Final = (sqlite3.Error, UnicodeDecodeError)


class SqliteSource:
    """A database opened for reading alone; a context manager.

    Everything is read as of the moment of opening. SourceNotFoundError if there is no file,
    ForeignSourceError if it is no database, BusyError while somebody writes to it, StorageError
    if a writer that died has left changes in it that its journal must undo first.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = Path(path_text(file))
        # How often SQLite may still call back for the query that runs, and what was raised then:
        # SQLite itself only says that it was interrupted.
        self._steps_left = _LEAST_STEPS
        self._raised: BaseException | None = None
        # Unlike the method of a path, it says no of names that are too long.
        if not os.path.isfile(self.path):
            raise SourceNotFoundError(f"there is no file {self.path}")
        self._opened = self._state()
        self._size = self.size_bytes
        # With neither log nor journal nobody is writing, and SQLite need not leave anything beside
        # the file. With either it must look at them: the file alone holds what was not committed.
        mode = "mode=ro" if self._opened is None else "mode=ro&immutable=1"
        try:
            self._database = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}", timeout=_PATIENCE_S, uri=True
            )
            try:
                self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
                self._database.set_progress_handler(self._watching().__next__, _STEP)
                #: The tables that there are.
                self.tables = self._begin()
            except BaseException:
                self._database.close()
                raise
        except _FAILURES as exc:
            self._reraise()
            raise self._refusal(exc) from exc

    def _watching(self) -> Iterator[bool]:
        """Called back while a query runs: True ends it.

        A generator: Python handles signals when it resumes one, where they are caught here. In a
        function it would do so before the function can catch anything, and sqlite3 drops what a
        callback raises.
        """
        while True:
            try:
                yield self._raised is not None or self._steps_left < 0
                self._steps_left -= 1
            except GeneratorExit:
                return
            except BaseException as exc:
                self._raised = exc

    def _reraise(self) -> None:
        """Raise what ended a query: Ctrl-C, or whatever else a signal handler has raised."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _refusal(self, exc: Exception) -> CasstoreError:
        code = getattr(exc, "sqlite_errorcode", 0) & _PRIMARY
        if code == sqlite3.SQLITE_BUSY:
            return BusyError(f"somebody is writing to {self.path}: import it when they are done")
        if code == sqlite3.SQLITE_READONLY:
            return StorageError(
                f"{self.path} was left in the middle of a write, which its journal undoes: open it "
                "once with the program that it belongs to, then import it"
            )
        return ForeignSourceError(f"{self.path} cannot be opened as a SQLite database: {exc}")

    def _begin(self) -> frozenset[str]:
        self._database.execute("PRAGMA query_only = 1")
        # One moment for everything that is read.
        self._database.execute("BEGIN")
        names = self._database.execute(
            # A virtual table has no page.
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        )
        return frozenset(name for (name,) in names)

    def __enter__(self) -> SqliteSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.close()

    @property
    def size_bytes(self) -> int:
        """What the database takes, with its log."""
        return (_size(self.path) or 0) + (_size(f"{self.path}-wal") or 0)

    @property
    def encoding(self) -> str:
        """How texts are spelled in it: what one is as bytes (``CAST(… AS BLOB)``)."""
        return str(next(self.ask("PRAGMA encoding"))[0])

    def ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, as they are read.

        StorageError if the file cannot be read, LimitError if a file of its size cannot hold so
        much: it was made to look endless.
        """
        steps_left = _LEAST_STEPS + self._size // _BYTES_PER_STEP
        rows_left = _LEAST_ROWS + self._size
        cursor: sqlite3.Cursor | None = None
        while True:
            # Queries run in each other, so each has a budget of its own.
            self._steps_left = steps_left
            try:
                # Not from the cursor itself: who stops early would close it, maybe after the
                # database. One at a time: a row may be as long as it likes.
                if cursor is None:
                    cursor = self._database.execute(query, values)
                row = cursor.fetchone()
            except _FAILURES as exc:
                self._reraise()
                if self._steps_left < 0:
                    raise self._endless() from exc
                raise StorageError(f"{self.path} cannot be read: {exc}") from exc
            steps_left = self._steps_left
            if row is None:
                return
            rows_left -= 1
            if rows_left < 0:
                raise self._endless()
            yield row

    def _endless(self) -> LimitError:
        return LimitError(
            f"{self.path} has more rows, or takes more work to read, than a database of "
            f"{self._size:,} bytes can: it is damaged, or made to look endless"
        )

    def columns(self, table: str) -> frozenset[str]:
        """The columns of a table; none if there is no such table, or it is a view."""
        # SQLite takes names in any case for the same.
        if table.lower() not in {name.lower() for name in self.tables}:
            return frozenset()
        return frozenset(
            name for (name,) in self.ask("SELECT name FROM pragma_table_info(?)", (table,))
        )

    def unread(self, table: str, known: Collection[str]) -> Iterator[LeftBehind]:
        """What a table says in columns that nobody here knows, to be told: it stays behind."""
        for name in sorted(self.columns(table) - frozenset(known)):
            spelled = name.replace('"', '""')
            [(number,)] = self.ask(f'SELECT count("{spelled}") FROM {table}')
            if number:
                yield LeftBehind(f"column {name} of {table}", number)

    def require_unchanged(self) -> None:
        """ConflictError if anybody wrote to the file since it was opened."""
        if self._opened is not None and self._opened != self._state():
            raise ConflictError(
                f"{self.path} was written to while it was read; import it once more"
            )

    def _state(self) -> tuple[int, int] | None:
        """Whether anybody wrote shows in this; None if there is a log, which SQLite minds.

        So it does a journal; an empty one is only kept to be used again.
        """
        if _size(f"{self.path}-wal") is not None or _size(f"{self.path}-journal"):
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns


def _size(path: str | os.PathLike[str]) -> int | None:
    """How long a file is; None if there is none, or its name is too long for one."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None
