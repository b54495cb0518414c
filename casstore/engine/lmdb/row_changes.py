"""Rows within a write transaction: each is read once and written once.

Once: when LMDB replaces a long value by a shorter one within a transaction, it keeps the
longer run of pages, which its own verifier then calls damage.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    """What a batch of writes finds in the tables, and what it will leave there."""

    __slots__ = ("_changes", "_found", "_tables", "_txn")

    def __init__(self, txn: lmdb.Transaction[bytes], tables: Mapping[str, lmdb._Database]) -> None:
        self._txn = txn
        self._tables = tables
        self._found: dict[tuple[str, bytes], ProvenRow | None] = {}
        # None: the row goes.
        self._changes: dict[tuple[str, bytes], bytes | None] = {}

    def __bool__(self) -> bool:
        """Is there anything to write?"""
        return bool(self._changes)

    def find(self, table: str, key: bytes) -> bytes | None:
        """The row as the writes before have left it."""
        place = (table, key)
        if place in self._changes:
            return self._changes[place]
        if place in self._found:
            row = self._found[place]
        else:
            row = find_row(self._txn.cursor(self._tables[table]), table, key)
            self._found[place] = row
        return None if row is None else row[0]

    def change(self, table: str, key: bytes, value: bytes | None) -> None:
        """Let the row hold ``value`` when the batch is done, or not be there."""
        self._changes[table, key] = value

    def puts(self) -> list[tuple[str, bytes]]:
        """The places of the rows that come or change."""
        return [place for place, value in self._changes.items() if value is not None]

    def write(self, total: RowSum) -> None:
        """Write what has changed, and keep the sum over all rows in step."""
        txn = self._txn
        puts: dict[str, list[tuple[bytes, bytes]]] = {}
        for place, value in self._changes.items():
            table, key = place
            old = self._found[place] if place in self._found else self._stored(table, key)
            if old is not None:
                total.subtract(old[1])
            if value is not None:
                hashed = row_hash(table, key, value)
                total.add(hashed)
                row = (key, value + hashed[:CHECKSUM_BYTES])
                if table in puts:
                    puts[table].append(row)
                else:
                    puts[table] = [row]
            elif old is not None:
                txn.delete(key, db=self._tables[table])
        for table, rows in puts.items():
            # In order, neighbours share the way down the tree.
            rows.sort()
            txn.cursor(self._tables[table]).putmulti(rows)

    def _stored(self, table: str, key: bytes) -> ProvenRow | None:
        stored = self._txn.get(key, None, self._tables[table])
        return None if stored is None else prove_row(table, key, stored)
