"""Somebody else's SQLite database, to read from: as it is at one moment, and left as it was."""

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
    SourceNotFoundError,
    StorageError,
)

# The low byte says what happened, the rest where.
_PRIMARY: Final = 0xFF
# How long a writer is waited for.
_PATIENCE_S = 5.0


class SqliteSource:
    """A database opened for reading alone; a context manager.

    Everything is read as of the moment of opening. SourceNotFoundError if there is no file,
    ForeignSourceError if it is no database, BusyError while somebody writes to it, StorageError
    if a writer that died has left changes in it that its journal must undo first.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = Path(path_text(file))
        # Unlike the method of a path, it says no of names that are too long.
        if not os.path.isfile(self.path):
            raise SourceNotFoundError(f"there is no file {self.path}")
        self._opened = self._state()
        # With neither log nor journal nobody is writing, and SQLite need not leave anything beside
        # the file. With either it must look at them: the file alone holds what was not committed.
        mode = "mode=ro" if self._opened is None else "mode=ro&immutable=1"
        try:
            self._database = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}", timeout=_PATIENCE_S, uri=True
            )
            try:
                #: The tables that there are.
                self.tables = self._begin()
            except BaseException:
                self._database.close()
                raise
        except sqlite3.DatabaseError as exc:
            raise self._refusal(exc) from exc

    def _refusal(self, exc: sqlite3.DatabaseError) -> CasstoreError:
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
        names = self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
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
        files = (self.path, Path(f"{self.path}-wal"))
        return sum(each.stat().st_size for each in files if each.exists())

    @property
    def encoding(self) -> str:
        """How texts are spelled in it: what one is as bytes (``CAST(… AS BLOB)``)."""
        return str(next(self.ask("PRAGMA encoding"))[0])

    def ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, as they are read. StorageError if the file cannot be read."""
        try:
            # Not from the cursor itself: who stops early would close it, maybe after the database.
            # One at a time: a row may be as long as it likes.
            cursor = self._database.execute(query, values)
            while (row := cursor.fetchone()) is not None:
                yield row
        except sqlite3.DatabaseError as exc:
            raise StorageError(f"{self.path} cannot be read: {exc}") from exc

    def columns(self, table: str) -> frozenset[str]:
        """The columns of a table; none if there is no such table."""
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
        journal = Path(f"{self.path}-journal")
        if not self.path.is_file() or Path(f"{self.path}-wal").exists():
            return None
        if journal.exists() and journal.stat().st_size:
            return None
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns
