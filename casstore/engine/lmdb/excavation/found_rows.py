"""Rows that were found, on the disk until they are asked for; of several, the one that counts.

Of rows of old pages the greatest is taken, because most rows start with what counts up in them:
a revision, a fence, a state.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Final, NamedTuple

import lmdb

from casstore.engine.files import storage_error
from casstore.engine.lmdb.excavation.ranks import NEWEST, SAVED_TABLES
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import Row

_SCRATCH_MAP_BYTES: Final = 1 << 40
_ROWS_A_TRANSACTION: Final = 10_000
_NUMBER_AT_START: Final = 8

# Tables whose rows start with what counts up: the greater of two is the newer one.
_COUNTING: Final = frozenset(
    ("attachments", "heads", "history", "leases", "queue", "receipts", "tombstones")
)


class _Taken(NamedTuple):
    """A row that was found. ``on_top``: in the log, and it counts before the table's."""

    table: str
    key: bytes
    rank: int
    #: None: the row is gone.
    value: bytes | None
    on_top: bool = False


class FoundRows:
    """The rows of all tables, in a scratch file of LMDB's."""

    def __init__(self) -> None:
        try:
            self._path = tempfile.mkdtemp(prefix="casstore-salvage-")
        except OSError as exc:
            raise storage_error("no directory for the rows that are found", exc) from exc
        self._scratch: lmdb.Environment | None = None
        self._waiting: list[_Taken] = []
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
        """Drop the scratch file."""
        if self._scratch is not None:
            self._scratch.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def take(self, table: str, key: bytes, rank: int, value: bytes) -> None:
        """Take in a row of a table."""
        self._waiting.append(_Taken(table, key, rank, value))
        if len(self._waiting) >= _ROWS_A_TRANSACTION:
            self.keep()

    def lay(self, table: str, key: bytes, rank: int, value: bytes | None) -> None:
        """Change a row as the log says, which counts before the table."""
        self._waiting.append(_Taken(table, key, rank, value, on_top=True))

    def keep(self) -> None:
        """Compare what was taken in with what is known, and keep what counts."""
        assert self._scratch is not None
        try:
            self._keep(self._scratch)
        except lmdb.Error as exc:
            raise translate(exc, self._path) from exc
        self._waiting.clear()

    def _keep(self, scratch: lmdb.Environment) -> None:
        with scratch.begin(write=True) as txn:
            for table, key, rank, value, on_top in self._waiting:
                database = self._tables[table]
                known = txn.get(key, db=database)
                over = on_top and known is not None and known[0] >= rank
                if value is None:
                    if over:
                        txn.delete(key, db=database)
                    continue
                if (
                    known is not None
                    and not over
                    and (
                        # Only a number that has grown says for sure that a row is newer.
                        (
                            known[0] == NEWEST
                            and value[:_NUMBER_AT_START] <= known[1:][:_NUMBER_AT_START]
                        )
                        or (known[0] < rank and table not in _COUNTING)
                        or (rank != NEWEST and known[1:] >= value)
                    )
                ):
                    continue
                txn.put(key, bytes((rank,)) + value, db=database)

    def ranked(
        self, table: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[Row, int]]:
        """The rows of a table in order, each with where it was found."""
        assert self._scratch is not None
        with self._scratch.begin() as txn, txn.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(start) if start else cursor.first()
            while more:
                key, value = cursor.item()
                if stop is not None and key >= stop:
                    return
                yield Row(key, value[1:]), value[0]
                more = cursor.next()
