"""The rows that the scan found, in a scratch file; of several versions of a row, the newest.

Of several versions on stray pages the greatest value counts: most rows start with a number that
only grows, such as a revision, a fence or a state.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple

import lmdb

from casstore.engine.files import storage_error
from casstore.engine.lmdb.page_scan.trees import NEWEST, SAVED_TABLES
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import Row

_SCRATCH_MAP_BYTES: Final = 1 << 40
_ROWS_A_TRANSACTION: Final = 10_000
_NUMBER_AT_START: Final = 8

# Tables whose rows start with a number that only grows: the greater of two values is the newer.
_ORDERED: Final = frozenset(
    ("attachments", "heads", "history", "leases", "queue", "receipts", "tombstones")
)


class _RowVersion(NamedTuple):
    """A version of a row. ``logged``: from the log, so it replaces the row of the table."""

    table: str
    key: bytes
    rank: int
    #: None: the row was deleted.
    value: bytes | None
    logged: bool = False


class FoundRows:
    """The rows of all tables, in a temporary LMDB file."""

    def __init__(self) -> None:
        try:
            self._path = tempfile.mkdtemp(prefix="casstore-salvage-")
        except OSError as exc:
            raise storage_error("cannot create a temporary directory for the rows", exc) from exc
        self._scratch: lmdb.Environment | None = None
        self._waiting: list[_RowVersion] = []
        try:
            self._scratch = lmdb.open(
                self._path,
                map_size=_SCRATCH_MAP_BYTES,
                max_dbs=len(SAVED_TABLES),
                sync=False,
                lock=False,
            )
            self._tables = {name: self._scratch.open_db(name.encode()) for name in SAVED_TABLES}
        except lmdb.Error as exc:
            self.close()
            raise translate(exc, self._path) from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Delete the scratch file."""
        if self._scratch is not None:
            self._scratch.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def add(self, table: str, key: bytes, rank: int, value: bytes) -> None:
        """Add a version of a row that was found in a table."""
        self._waiting.append(_RowVersion(table, key, rank, value))
        if len(self._waiting) >= _ROWS_A_TRANSACTION:
            self.flush()

    def overwrite(self, table: str, key: bytes, rank: int, value: bytes | None) -> None:
        """Replace or delete a row, as a record of the log does."""
        self._waiting.append(_RowVersion(table, key, rank, value, logged=True))

    def flush(self) -> None:
        """Write the added versions to the scratch file, if they are newer than those in it."""
        assert self._scratch is not None
        try:
            self._flush(self._scratch)
        except lmdb.Error as exc:
            raise translate(exc, self._path) from exc
        self._waiting.clear()

    def _flush(self, scratch: lmdb.Environment) -> None:
        with scratch.begin(write=True) as txn:
            for table, key, rank, value, logged in self._waiting:
                database = self._tables[table]
                known = txn.get(key, db=database)
                over = logged and known is not None and known[0] >= rank
                if value is None:
                    if over:
                        txn.delete(key, db=database)
                    continue
                if (
                    known is not None
                    and not over
                    and (
                        # Only a greater number at the start proves that a row is newer.
                        (
                            known[0] == NEWEST
                            and value[:_NUMBER_AT_START] <= known[1:][:_NUMBER_AT_START]
                        )
                        or (known[0] < rank and table not in _ORDERED)
                        or (rank != NEWEST and known[1:] >= value)
                    )
                ):
                    continue
                txn.put(key, bytes((rank,)) + value, db=database)

    def ranked(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The rows of a table in order, each with its rank."""
        assert self._scratch is not None
        with self._scratch.begin() as txn, txn.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more:
                key, value = cursor.item()
                if stop is not None and key >= stop:
                    return
                yield Row(key, value[1:]), value[0]
                more = cursor.next()
