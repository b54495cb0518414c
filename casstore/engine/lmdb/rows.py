"""Rows with a checksum each, and one sum over all rows.

Digests prove objects; rows have no digest, and they decide which objects are reachable. So each
row has a checksum over its table, key and value: a damaged row is never returned as data (P1).
The store also has one sum over all rows: if a crash reverts a page to an older state, each of
its rows is valid, and only the sum shows that they are not the latest.

    stored row  =  value ‖ first 8 bytes of h
    h           =  BLAKE3(length of table, 1 byte ‖ table ‖ length of key, 2 bytes ‖ key ‖ value)
    sum         =  all h added as big-endian numbers, modulo 2^256; in the unnamed database,
                   whose page every transaction writes anyway
"""

from __future__ import annotations

from typing import Final

import lmdb

from casstore.engine.protocol import MAX_ROW_KEY_BYTES, TABLES
from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES, plain_hash

CHECKSUM_BYTES: Final = 8
SUM_KEY: Final = b"rows_sum"
_SUM_RANGE: Final = 1 << (8 * DIGEST_BYTES)


# The input to a row's hash starts with the length of the table's name, and the name; then
# the length of the key.
_TABLE_PREFIXES: Final = {table: bytes((len(table),)) + table.encode() for table in TABLES}
_KEY_LENGTHS: Final = [length.to_bytes(2, "big") for length in range(MAX_ROW_KEY_BYTES + 1)]


def row_hash(table: str, key: bytes, value: bytes) -> bytes:
    """The hash of one row."""
    return plain_hash(b"".join((_TABLE_PREFIXES[table], _KEY_LENGTHS[len(key)], key, value)))


#: The value of a stored row, checked, and the hash of the row.
ProvenRow = tuple[bytes, bytes]


def prove_row(table: str, key: bytes, stored: bytes | memoryview) -> ProvenRow:
    """A stored row, checked."""
    whole = bytes(stored)
    value = whole[:-CHECKSUM_BYTES]
    try:
        length = _KEY_LENGTHS[len(key)]
    except IndexError as exc:
        # LMDB trusts the key length that a page claims.
        raise CorruptionError(f"a row of table {table} has a key of {len(key)} bytes") from exc
    # As ``row_hash`` does; inlined because every lookup of a row comes through here.
    hashed = plain_hash(b"".join((_TABLE_PREFIXES[table], length, key, value)))
    if whole[-CHECKSUM_BYTES:] != hashed[:CHECKSUM_BYTES]:
        # Also if the row is too short to have a checksum.
        raise CorruptionError(f"row {key.hex()} of table {table} is damaged")
    return value, hashed


def open_row(table: str, key: bytes, stored: bytes | memoryview) -> bytes:
    """The value of a stored row, checked."""
    return prove_row(table, key, stored)[0]


#: Two keys between which a table has no row; the defaults are before the first and after the last.
Gap = tuple[bytes, bytes]
_FIRST_KEY: Final = b""
_BEHIND_ALL: Final = b"\xff" * (MAX_ROW_KEY_BYTES + 1)


def find_row(
    cursor: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview], table: str, key: bytes
) -> bytes | Gap:
    """The row under ``key``; if it certainly does not exist, the gap in its place.

    Pass a new cursor. A damaged key misleads a search, but never far: on a leaf to the
    neighbour of the damaged row, on a branch to where the order of keys is broken. So where
    nothing is found, both neighbours must be valid. A used cursor would search its own page
    first instead of descending from the root.
    """
    below, above = _FIRST_KEY, _BEHIND_ALL
    if cursor.set_range(key):
        name, stored = cursor.item()
        if name == key:
            return prove_row(table, key, stored)[0]
        above = bytes(name)
        prove_row(table, above, stored)
        more = cursor.prev()
    else:
        more = cursor.last()
    if more:
        name, stored = cursor.item()
        below = bytes(name)
        prove_row(table, below, stored)
    if not below < key < above:
        raise _out_of_order(table, key)
    return below, above


def likely_row(
    txn: lmdb.Transaction[bytes] | lmdb.Transaction[memoryview],
    database: lmdb._Database,
    table: str,
    key: bytes,
) -> bytes | None:
    """The row under ``key``, which probably exists; None if it certainly does not."""
    stored = txn.get(key, None, database)
    if stored is not None:
        return prove_row(table, key, stored)[0]
    found = find_row(txn.cursor(database), table, key)
    return None if isinstance(found, tuple) else found


def _out_of_order(table: str, key: bytes) -> CorruptionError:
    return CorruptionError(f"the keys of table {table} are out of order around {key.hex()}")


# A bound may be longer than any key (the last key of a page and one byte more), and LMDB refuses
# to seek to it. Its first 511 bytes are sought instead; only a key of exactly those bytes is
# between the two.


def seek_first(cursor: lmdb.Cursor[memoryview], start: bytes) -> bool:
    """Move to the first key that is not below ``start``."""
    found = cursor.set_range(start[:MAX_ROW_KEY_BYTES]) if start else cursor.first()
    return cursor.next() if found and bytes(cursor.key()) < start else found


def seek_last(cursor: lmdb.Cursor[memoryview], stop: bytes | None) -> bool:
    """Move to the last key below ``stop``."""
    if stop is None:
        return cursor.last()
    found = cursor.set_range(stop[:MAX_ROW_KEY_BYTES]) if stop else cursor.first()
    if not found:
        return cursor.last()
    return bytes(cursor.key()) < stop or cursor.prev()


class RowSum:
    """The sum over all rows of a store, updated by each change."""

    __slots__ = ("_total",)

    def __init__(self, stored: bytes | None = None) -> None:
        self._total = 0 if stored is None else int.from_bytes(stored, "big")

    def add(self, hashed: bytes) -> None:
        """Add a row."""
        self._total += int.from_bytes(hashed, "big")

    def subtract(self, hashed: bytes) -> None:
        """Subtract a row."""
        self._total -= int.from_bytes(hashed, "big")

    def equals(self, other: RowSum) -> bool:
        """True if both sums are equal."""
        return self.encode() == other.encode()

    def encode(self) -> bytes:
        """The sum as it is stored."""
        return (self._total % _SUM_RANGE).to_bytes(DIGEST_BYTES, "big")
