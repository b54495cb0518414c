"""The index in SQLite: a file in the store's directory, or in memory for other engines.

The file is derived and may be deleted at any time. It is created with the permissions of the
store's files, and a symbolic link in its place is refused. ``opened`` raises DamagedIndexError for
what SQLite cannot read; the caller deletes the file and rebuilds the index.

FTS5 stores the words and not the texts: snippets are made from the store's own objects, with a
table in memory that splits words in the same way.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

from casstore.engine.files import FILE_MODE, open_regular, storage_error
from casstore.errors import BusyError, StorageError, StorageFullError
from casstore.search.tables import NAMES, TABLES, VERSION, read_meta, write_meta
from casstore.search.texts import BEGIN, END, Snippet, Term, unmarked

#: The files that compacting deletes; ``engine.lmdb.directory`` lists the same names.
FILE: Final = "search.sqlite"
JOURNAL: Final = FILE + "-journal"
_WAIT_S: Final = 60.0
_SNIPPET_WORDS: Final = 24
_CACHE_KIB: Final = 65_536
_SPLITTING: Final = 'tokenize="unicode61 remove_diacritics 2"'
_TEXTS: Final = f"CREATE VIRTUAL TABLE texts USING fts5(text, content='', {_SPLITTING})"
_SAMPLES: Final = f"CREATE VIRTUAL TABLE temp.samples USING fts5(text, {_SPLITTING})"
_FORMS: Final = {
    "s": "",
    "i": "",
    "blob": "BLOB",
    "key": "INTEGER",
    "rowless": " WITHOUT ROWID",
}
# Codes of SQLite, without the bits that say more.
_PRIMARY: Final = 0xFF
_BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
# Parts of the messages of operational errors which mean that the file is damaged.
_DAMAGE: Final = ("no such", "vtable", "malformed")


class DamagedIndexError(StorageError):
    """The file of the index cannot be read, or is of another version."""


class SqliteIndex:
    """An index in a SQLite database, for one thread at a time."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        readonly: bool,
        path: str = "",
        made: tuple[int, int] = (0, 0),
    ) -> None:
        """``made`` is the device and inode of the file at ``path``."""
        self.readonly = readonly
        self.path = path
        self._made = made
        self._process = os.getpid()
        self._connection = connection
        self._has_samples = False

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        found: list[tuple[Any, ...]] = self._connection.execute(
            statement.format(**_FORMS), values
        ).fetchall()
        return found

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""
        return self._connection.execute(statement.format(**_FORMS), values).rowcount

    def run_many(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement with each of the values."""
        self._connection.executemany(statement.format(**_FORMS), values)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction; no other one that writes runs at the same time."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def add_texts(self, texts: Sequence[tuple[int, str]]) -> None:
        """Add the words of new docs, whose ids must increase."""
        self._connection.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)

    def matches(
        self, terms: Sequence[Term], where: str, values: Sequence[Any], limit: int, skip: int
    ) -> list[tuple[int, float]]:
        """Ids and scores of the docs with all terms, best first, then newest first."""
        condition = f" AND {where.replace('{id}', 'texts.rowid')}" if where else ""
        return [
            (doc, -rank)
            for doc, rank in self._connection.execute(
                "SELECT rowid, rank FROM texts WHERE texts MATCH ?"
                f"{condition.format(**_FORMS)} ORDER BY rank, rowid DESC LIMIT ? OFFSET ?",
                (_match(terms), *values, limit, skip),
            )
        ]

    def snippets(self, terms: Sequence[Term], texts: Sequence[str]) -> list[Snippet | None]:
        """For each text the part around the terms; None if they do not all occur in it."""
        if not self._has_samples:
            self._connection.execute(_SAMPLES)
            self._has_samples = True
        # One transaction, which is undone: FTS5 writes its tables at the end of each.
        self._connection.execute("BEGIN")
        try:
            self._connection.executemany(
                "INSERT INTO samples (rowid, text) VALUES (?, ?)", enumerate(texts)
            )
            found = dict(
                self._connection.execute(
                    "SELECT rowid, snippet(samples, 0, ?, ?, '…', ?) FROM samples "
                    "WHERE samples MATCH ?",
                    (BEGIN, END, _SNIPPET_WORDS, _match(terms)),
                ).fetchall()
            )
        finally:
            self._connection.execute("ROLLBACK")
        return [unmarked(found[at]) if at in found else None for at in range(len(texts))]

    def size_bytes(self) -> int:
        """The length of the file."""
        [[pages, page_bytes]] = self.rows(
            "SELECT page_count, page_size FROM pragma_page_count(), pragma_page_size()"
        )
        return int(pages * page_bytes)

    def clear(self) -> None:
        """Remove everything."""
        for name in NAMES:
            self._connection.execute(f"DROP TABLE IF EXISTS {name}")
        self.create()

    def create(self) -> None:
        """Create the tables in an empty database."""
        for statement in TABLES:
            self._connection.execute(statement.format(**_FORMS))
        self._connection.execute(_TEXTS)
        write_meta(self, "version", VERSION)

    def require_version(self) -> None:
        """Create the tables of a new file; DamagedIndexError for an index of another version."""
        [[tables]] = self.rows("SELECT count(*) FROM sqlite_master")
        if not tables and not self.readonly:
            with self.writing():
                # Another process may have been first.
                [[tables]] = self.rows("SELECT count(*) FROM sqlite_master")
                if not tables:
                    self.create()
        if read_meta(self, "version") != VERSION:
            raise DamagedIndexError(f"{self.path} is of another version of casstore")

    def is_in_place(self) -> bool:
        """True if the file at the path was not replaced, and this process opened it."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._made and os.getpid() == self._process

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _match(terms: Sequence[Term]) -> str:
    """Terms in the language of FTS5, each quoted: nothing in them is an operator."""
    quoted = ['"' + words.replace('"', '""') + '"' + "*" * prefix for words, prefix in terms]
    return " ".join(quoted)


def in_memory() -> SqliteIndex:
    """An index in the memory of this process."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    index = SqliteIndex(connection, readonly=False)
    index.create()
    return index


def opened(directory: str, *, readonly: bool) -> SqliteIndex | None:
    """The index in a store's directory, created if necessary.

    None if it is opened read-only and does not exist. DamagedIndexError if it cannot be read;
    StorageError for what the file system refuses.
    """
    path = os.path.join(directory, FILE)
    try:
        made = _prepare(path, readonly=readonly)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise storage_error(f"cannot open {path}", exc) from exc
    mode = "ro" if readonly else "rw"
    with translated(path):
        connection = sqlite3.connect(
            f"file:{quote(os.path.abspath(path))}?mode={mode}",
            uri=True,
            timeout=_WAIT_S,
            isolation_level=None,
            # A connection is used by one call at a time, in the thread of that call.
            check_same_thread=False,
        )
        index = SqliteIndex(connection, readonly=readonly, path=path, made=made)
        try:
            # Between ``_prepare`` and ``connect``, another process could have put a link here.
            if not index.is_in_place():
                raise StorageError(f"{path} was replaced while it was opened; try again")
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA temp_store = MEMORY")
            index.require_version()
        except BaseException:
            index.close()
            raise
    return index


def _prepare(path: str, *, readonly: bool) -> tuple[int, int]:
    """Create the file if necessary; returns which file it is. Raises OSError, also for a link."""
    flags = os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT
    handle = open_regular(path, flags, FILE_MODE)
    try:
        found = os.fstat(handle)
        return found.st_dev, found.st_ino
    finally:
        os.close(handle)


def remove(directory: str) -> None:
    """Delete the file; the journal first, which would be applied to the next file."""
    for name in (JOURNAL, FILE):
        path = os.path.join(directory, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as exc:
            raise storage_error(f"cannot delete {path}", exc) from exc


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise SQLite's errors as errors of casstore."""
    try:
        yield
    except sqlite3.Error as exc:
        said = str(exc)
        if isinstance(exc, sqlite3.ProgrammingError | sqlite3.InterfaceError):
            # A mistake in this package.
            raise
        code = getattr(exc, "sqlite_errorcode", 0) & _PRIMARY
        if code in _BUSY:
            raise BusyError(f"{path} is being written by another process; try again") from exc
        if code == sqlite3.SQLITE_FULL:
            raise StorageFullError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}") from exc
        if isinstance(exc, sqlite3.OperationalError) and not any(word in said for word in _DAMAGE):
            raise StorageError(f"cannot use {path}: {said}") from exc
        raise DamagedIndexError(f"{path} cannot be read: {said}") from exc
