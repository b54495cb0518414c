"""Reads another program's SQLite database in one snapshot, and does not change it.

The file is not trusted. Views and virtual tables do not count as tables, because a view may have
endless rows. The size of the file bounds what one query may read, and Ctrl-C ends a query.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from casstore.compat.importing import ImportNote
from casstore.engine.files import path_text
from casstore.errors import (
    BusyError,
    CasstoreError,
    ConflictError,
    ForeignSourceError,
    LimitError,
    SourceNotFoundError,
    StorageError,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# The low byte of an error code is the error, the rest its cause.
_PRIMARY: Final = 0xFF
# How long opening waits for a writer.
_PATIENCE_S = 5.0
# SQLite calls back after this many instructions of its virtual machine.
_STEP: Final = 1000
# The budget of one query: a second, and for each byte of the file many times the work of reading,
# sorting and finding it.
_LEAST_STEPS: Final = 50_000
_BYTES_PER_STEP: Final = 16
_LEAST_ROWS: Final = 10_000
# A generated column may be as long as SQLite allows.
_MAX_VALUE_BYTES: Final = 1 << 29
_FAILURES: Final = (sqlite3.Error, UnicodeDecodeError)


class SqliteSource:
    """A database opened read-only, in one snapshot; a context manager.

    SourceNotFoundError if there is no file, ForeignSourceError if it is not a database, BusyError
    while another process writes to it, StorageError if a killed writer left changes that its
    journal must undo first.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.path = Path(path_text(file))
        # The callbacks left to the running query, and the exception that a callback raised: SQLite
        # itself only reports an interruption.
        self._steps_left = _LEAST_STEPS
        self._raised: BaseException | None = None
        # Unlike Path.is_file, this returns False for a name that is too long.
        if not os.path.isfile(self.path):
            raise SourceNotFoundError(f"there is no file {self.path}")
        self._opened = self._state()
        self._size = self.size_bytes
        # Without a log and a journal no process is writing, and SQLite need not create files next
        # to the database. With either, SQLite must read it: the file alone may hold uncommitted
        # changes.
        mode = "mode=ro" if self._opened is None else "mode=ro&immutable=1"
        try:
            self._database = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?{mode}", timeout=_PATIENCE_S, uri=True
            )
            try:
                self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
                self._database.set_progress_handler(self._watching().__next__, _STEP)
                #: The names of the tables, without views and virtual tables.
                self.tables = self._begin()
            except BaseException:
                self._database.close()
                raise
        except _FAILURES as exc:
            self._reraise()
            raise self._refusal(exc) from exc

    def _watching(self) -> Iterator[bool]:
        """The callback while a query runs: True ends the query.

        A generator, because Python handles signals when it resumes one, inside its ``try``. In a
        function it would do so before the first statement, and sqlite3 drops what a callback
        raises.
        """
        while True:
            try:
                # The inner loop, because Python also handles signals where a loop begins again.
                while True:
                    yield self._raised is not None or self._steps_left < 0
                    self._steps_left -= 1
            except GeneratorExit:
                return
            except BaseException as exc:
                self._raised = exc

    def _reraise(self) -> None:
        """Raise the exception that ended a query: KeyboardInterrupt, or a signal handler's."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _refusal(self, exc: Exception) -> CasstoreError:
        code = getattr(exc, "sqlite_errorcode", 0) & _PRIMARY
        if code == sqlite3.SQLITE_BUSY:
            return BusyError(
                f"another process is writing to {self.path}; import it when that has ended"
            )
        if code == sqlite3.SQLITE_READONLY:
            return StorageError(
                f"{self.path} was left in the middle of a write, which its journal undoes; open it "
                "once with the program that wrote it, then import it"
            )
        return ForeignSourceError(f"{self.path} cannot be opened as a SQLite database: {exc}")

    def _begin(self) -> frozenset[str]:
        self._database.execute("PRAGMA query_only = 1")
        # One snapshot for all queries.
        self._database.execute("BEGIN")
        names = self._database.execute(
            # A virtual table has no page.
            "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        )
        return frozenset(name for (name,) in names)

    def __enter__(self) -> SqliteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        """The size of the database and its log."""
        return (_size(self.path) or 0) + (_size(f"{self.path}-wal") or 0)

    @property
    def encoding(self) -> str:
        """The encoding of its texts, which ``CAST(… AS BLOB)`` returns."""
        [(encoding,)] = self.ask("PRAGMA encoding")
        return str(encoding)

    def ask(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, as they are read.

        StorageError if the file cannot be read, LimitError if the query returns or reads more than
        a file of this size can hold.
        """
        steps_left = _LEAST_STEPS + self._size // _BYTES_PER_STEP
        rows_left = _LEAST_ROWS + self._size
        cursor: sqlite3.Cursor | None = None
        while True:
            # Another query may run between two rows of this one; each counts its own steps.
            self._steps_left = steps_left
            try:
                # Not ``yield from cursor``: a caller that stops early would close the cursor,
                # perhaps after the database. One row at a time, because rows may be long.
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

    def first(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first row of a query; None if it has no rows."""
        return next(self.ask(query, values), None)

    def number(self, query: str, values: Sequence[Any] = ()) -> int:
        """The number that a query returns; 0 for NULL."""
        [(number,)] = self.ask(query, values)
        return int(number or 0)

    def _endless(self) -> LimitError:
        return LimitError(
            f"{self.path} has more rows, or takes more work to read, than a database of "
            f"{self._size:,} bytes can; it is damaged, or made to look endless"
        )

    def columns(self, table: str) -> frozenset[str]:
        """The columns of a table; none if there is no such table, or it is a view."""
        # SQLite ignores the case of names.
        if table.lower() not in {name.lower() for name in self.tables}:
            return frozenset()
        return frozenset(
            name for (name,) in self.ask("SELECT name FROM pragma_table_info(?)", (table,))
        )

    def unread(self, table: str, known: Collection[str]) -> Iterator[ImportNote]:
        """Notes about columns that the importer does not know: their values are left out."""
        for name in sorted(self.columns(table) - frozenset(known)):
            quoted = name.replace('"', '""')
            number = self.number(f'SELECT count("{quoted}") FROM {table}')
            if number:
                yield ImportNote(
                    f"values of the unknown column {name} of {table}, left out", number
                )

    def require_unchanged(self) -> None:
        """Raise ConflictError if another process wrote to the file since it was opened."""
        if self._opened is not None and self._opened != self._state():
            raise ConflictError(
                f"another process wrote to {self.path} while it was read; import it once more"
            )

    def _state(self) -> tuple[int, int] | None:
        """Size and time, which a write changes; None if SQLite itself keeps the snapshot.

        It does so with a log, and with a journal that is not empty: an empty one is only kept for
        the next transaction.
        """
        if _size(f"{self.path}-wal") is not None or _size(f"{self.path}-journal"):
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns


def _size(path: str | os.PathLike[str]) -> int | None:
    """The length of a file; None if it does not exist, or its name is too long."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def utc_us(text: Any) -> int:
    """Microseconds since 1970 of a time in ISO 8601, as SQLite and Python write it.

    Without a zone it is UTC, as SQLite's own clock is. ValueError if it is not a time.
    """
    if type(text) is not str:
        raise ValueError(f"{text!r} is not a time")
    time = datetime.fromisoformat(text)
    time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return (time - _EPOCH) // timedelta(microseconds=1)


def utc_ms(text: Any) -> int:
    """Milliseconds since 1970 of a time as for ``utc_us``; ValueError also if it is earlier."""
    try:
        time_ms = utc_us(text) // 1000
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a time") from exc
    if time_ms < 0:
        raise ValueError(f"{text!r} is before 1970")
    return time_ms
