"""Applying the log: writes the changes of its commits to the tables, in one LMDB transaction.

A row that changed a hundred times is written once, and the objects of many small commits become
slabs of full size. LMDB flushes the transaction. The row ``log`` in it names the last commit that
the tables hold; from then on the log can reuse the space of those records.

    log    in use 1 ‖ log id 8 ‖ LSN 8 ‖ offset 8 ‖ checksum of the last record 16 ‖ checksum 8

The row is in the unnamed database, whose page every transaction writes anyway. While the log is
not in use, the tables hold everything, and a log file that exists is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.log import RecoveryPoint, decode_recovery_point
from casstore.engine.lmdb.lookup import CHECKSUM_BYTES as ROW_CHECKSUM_BYTES
from casstore.engine.lmdb.lookup import (
    SUM_KEY,
    AnyTransaction,
    RowSum,
    index_key,
    prove_row,
    row_hash,
)
from casstore.engine.lmdb.memtable import BatchEntry, Name
from casstore.errors import CorruptionError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

LOG_KEY: Final = b"log"
#: Objects of several commits share a slab of up to this size.
JOINED_BYTES: Final = slabs.TARGET_RAW_BYTES


def read_recovery_point(txn: AnyTransaction, path: str) -> RecoveryPoint:
    """The log position that the tables seen by ``txn`` record."""
    found = txn.get(LOG_KEY)
    state = None if found is None else decode_recovery_point(bytes(found))
    if state is None:
        raise CorruptionError(f"{path} does not say which log it needs, or that row is damaged")
    return state


def applied_lsn(txn: AnyTransaction, path: str) -> int:
    """The LSN of the last commit that the tables hold."""
    return read_recovery_point(txn, path).applied.lsn


def next_free_id(txn: AnyTransaction, env: Environment) -> int:
    """The next id: ids start at 1 and continue after the last slab, which is never removed."""
    cursor: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview] = txn.cursor(db=env.slabs)
    return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1


def full_slabs(entries: Iterable[BatchEntry], compressor: Compressor) -> list[tuple[bytes, bytes]]:
    """The slabs to store for these entries: objects of many commits together, compressed."""
    stored: list[tuple[bytes, bytes]] = []
    columns = slabs.Columns()
    first_id = next_id = raw_bytes = stored_at_ms = 0

    def close() -> None:
        nonlocal columns
        if next_id > first_id:
            stored.append(
                columns.encode(first_id, stored_at_ms, lambda raw: _compressed(raw, compressor))
            )
        columns = slabs.Columns()

    for entry in entries:
        for own, (item, links) in enumerate(
            zip(entry.objects, entry.links, strict=True), entry.first_id
        ):
            size = len(item.data)
            if (
                own != next_id
                or raw_bytes + size > slabs.TARGET_RAW_BYTES
                or own - first_id >= slabs.MAX_OBJECTS
                # Objects of one commit are often read together.
                or (own == entry.first_id and raw_bytes + entry.size_bytes > JOINED_BYTES)
            ):
                close()
                first_id, raw_bytes, stored_at_ms = own, 0, 0
            columns.add_new(own, item, links)
            next_id = own + 1
            raw_bytes += size
            # The time of the youngest: to the collector no object may look older than it is.
            stored_at_ms = max(stored_at_ms, entry.now_ms)
    close()
    return stored


def _compressed(raw: bytes, compressor: Compressor) -> tuple[int, int, bytes]:
    """Compress and verify by inflating: once applied, these commits are dropped from the log."""
    codec, dictionary, payload = compressor.compress(raw)
    if compressor.inflate(codec, dictionary, payload, len(raw)) != raw:
        raise CorruptionError("a slab would not have survived being compressed")
    return codec, dictionary, payload


def apply_entries(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    entries: Sequence[BatchEntry],
    stored: Sequence[tuple[bytes, bytes]],
    state: RecoveryPoint,
) -> None:
    """Write what entries changed into the tables; ``stored`` are their slabs."""
    if entries:
        rows: dict[tuple[str, bytes], bytes | None] = {}
        for table, key, value in chain.from_iterable([entry.rows for entry in entries]):
            rows[table, key] = value
        if rows:
            notes.note_rows(env, txn, rows, entries[-1].now_ms)
            _apply_rows(env, txn, rows)
        _apply_names(env, txn, entries)
        if stored and not all(
            # py-lmdb reports an out-of-order append by returning False.
            txn.put(key, value, append=True, db=env.slabs)
            for key, value in stored
        ):
            raise CorruptionError(f"{env.path}: new slabs are not the last")
        for entry in entries:
            if entry.touched:
                notes.touch(env, txn, entry.touched, entry.now_ms)
    txn.put(LOG_KEY, state.encode())


def _apply_rows(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    rows: dict[tuple[str, bytes], bytes | None],
) -> None:
    """Each row is read once and written once: when LMDB replaces a long value by a shorter
    one within a transaction, it keeps the longer run of pages, which its own verifier then
    calls damage.
    """
    total = RowSum(txn.get(SUM_KEY))
    puts: dict[str, list[tuple[bytes, bytes]]] = {}
    for (table, key), value in rows.items():
        database = env.tables[table]
        stored = txn.get(key, None, database)
        if stored is not None:
            total.subtract(prove_row(table, key, stored)[1])
        if value is not None:
            hashed = row_hash(table, key, value)
            total.add(hashed)
            if table not in puts:
                puts[table] = []
            puts[table].append((key, value + hashed[:ROW_CHECKSUM_BYTES]))
        elif stored is not None:
            txn.delete(key, db=database)
    for table, changed in puts.items():
        # In key order, neighbouring rows share the descent of the tree.
        changed.sort()
        txn.cursor(env.tables[table]).putmulti(changed)
    txn.put(SUM_KEY, total.encode())


def _apply_names(
    env: Environment, txn: lmdb.Transaction[bytes], entries: Sequence[BatchEntry]
) -> None:
    added: set[Name] = set()
    for entry in entries:
        for name in entry.unnamed:
            if name in added:
                added.discard(name)
            else:
                txn.delete(index_key(*name), db=env.index)
        added.update(entry.named())
    if added:
        keys = sorted([(index_key(*name), b"") for name in added])
        _, number = txn.cursor(env.index).putmulti(keys, overwrite=False)
        if number != len(keys):
            # Each name was looked up before it was added, and was absent.
            raise CorruptionError(f"{env.path}: the index names an object of the log already")
