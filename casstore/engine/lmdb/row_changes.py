"""The rows of one table within a write transaction: each is read once and written once.

Once: when LMDB replaces a long value by a shorter one within a transaction, it keeps the
longer run of pages, which its own verifier then calls damage.
"""

from __future__ import annotations

import lmdb

from casstore.engine.lmdb.rows import (
    CHECKSUM_BYTES,
    ProvenRow,
    RowSum,
    find_row,
    prove_row,
    row_hash,
)


class RowChanges:
    """What a batch of writes finds in a table, and what it will leave there."""

    __slots__ = ("_changes", "_database", "_found", "_table", "_txn")

    def __init__(self, txn: lmdb.Transaction[bytes], database: lmdb._Database, table: str) -> None:
        self._txn = txn
        self._database = database
        self._table = table
        self._found: dict[bytes, ProvenRow | None] = {}
        # None: the row goes.
        self._changes: dict[bytes, bytes | None] = {}

    def find(self, key: bytes) -> bytes | None:
        """The row as the writes before have left it."""
        if key in self._changes:
            return self._changes[key]
        if key in self._found:
            row = self._found[key]
        else:
            cursor = self._txn.cursor(self._database)
            row = self._found[key] = find_row(cursor, self._table, key)
        return None if row is None else row[0]

    def change(self, key: bytes, value: bytes | None) -> None:
        """Let the row hold ``value`` when the batch is done, or not be there."""
        self._changes[key] = value

    @property
    def has_changed(self) -> bool:
        """Is there anything to write?"""
        return bool(self._changes)

    def write(self, total: RowSum) -> None:
        """Write what has changed, and keep the sum over all rows in step."""
        puts: list[tuple[bytes, bytes]] = []
        for key, value in self._changes.items():
            old = self._found[key] if key in self._found else self._stored(key)
            if old is not None:
                total.subtract(old[1])
            if value is not None:
                hashed = row_hash(self._table, key, value)
                total.add(hashed)
                puts.append((key, value + hashed[:CHECKSUM_BYTES]))
            elif old is not None:
                self._txn.delete(key, db=self._database)
        if puts:
            # In order, neighbours share the way down the tree.
            puts.sort()
            self._txn.cursor(self._database).putmulti(puts)

    def _stored(self, key: bytes) -> ProvenRow | None:
        stored = self._txn.get(key, None, self._database)
        return None if stored is None else prove_row(self._table, key, stored)
