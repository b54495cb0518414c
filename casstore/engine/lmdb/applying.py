"""Applying the log: writes the changes of its commits to the tables, in one LMDB transaction.

A row that changed a hundred times is written once, and the objects of many small commits are joined
into slabs of full size. LMDB flushes the transaction. It also writes the row ``log``, the *recovery
point*: the last commit that the tables hold, and where in which log the next one is. From then on
the log can reuse the space of the records up to that commit.

    log    in use 1 ‖ log id 8 ‖ LSN 8 ‖ offset 8 ‖ checksum of the last record 16 ‖ checksum 8

The row is in the unnamed database, whose page every transaction writes anyway. If it says that the
log is not in use, the tables hold everything, and a log file that exists is ignored.
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
from casstore.engine.lmdb.memtable import BatchEntry
from casstore.errors import CorruptionError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

#: The key of the recovery point in the unnamed database.
LOG_KEY: Final = b"log"
#: A slab is closed before a commit that would make it longer than this.
JOINED_BYTES: Final = slabs.TARGET_RAW_BYTES


def read_recovery_point(txn: AnyTransaction, path: str) -> RecoveryPoint:
    """The recovery point in the tables that ``txn`` sees."""
    found = txn.get(LOG_KEY)
    recovery_point = None if found is None else decode_recovery_point(bytes(found))
    if recovery_point is None:
        raise CorruptionError(
            f"the row of {path} that says which redo log it needs is missing or damaged; restore a "
            "backup, or salvage the store"
        )
    return recovery_point


def applied_lsn(txn: AnyTransaction, path: str) -> int:
    """The LSN of the last commit that the tables hold."""
    return read_recovery_point(txn, path).applied.lsn


def next_free_id(txn: AnyTransaction, env: Environment) -> int:
    """The id for the next new object, by the tables: one more than the last slab's, or 1.

    The last slab is never removed, so no id is given twice.
    """
    cursor: lmdb.Cursor[bytes] | lmdb.Cursor[memoryview] = txn.cursor(db=env.slabs)
    return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1


def full_slabs(entries: Iterable[BatchEntry], compressor: Compressor) -> list[tuple[bytes, bytes]]:
    """The new objects of these entries as compressed slabs: key and value of each, by key.

    Objects of several commits share a slab.
    """
    stored: list[tuple[bytes, bytes]] = []
    columns = slabs.Columns()
    first_id = next_id = raw_bytes = stored_at_ms = 0

    def add(entry: BatchEntry, start: int, stop: int) -> None:
        """Add some objects of an entry to the present slab."""
        nonlocal stored_at_ms
        if start < stop:
            columns.add_new(
                entry.first_id + start, entry.objects[start:stop], entry.links[start:stop]
            )
            # A slab has one time, that of its youngest object: if an object looked older than it
            # is, the collector might remove it within its grace period.
            stored_at_ms = max(stored_at_ms, entry.now_ms)

    def close() -> None:
        nonlocal columns, stored_at_ms
        if next_id > first_id:
            stored.append(
                columns.encode(first_id, stored_at_ms, lambda raw: _compressed(raw, compressor))
            )
        columns, stored_at_ms = slabs.Columns(), 0

    for entry in entries:
        start = 0
        for at, item in enumerate(entry.objects):
            object_id, size = entry.first_id + at, len(item[2])
            if (
                object_id != next_id
                or raw_bytes + size > slabs.TARGET_RAW_BYTES
                or object_id - first_id >= slabs.MAX_OBJECTS
                # Begin a slab rather than divide a commit: its objects are often read together.
                or (not at and raw_bytes + entry.size_bytes > JOINED_BYTES)
            ):
                add(entry, start, at)
                close()
                start, first_id, raw_bytes = at, object_id, 0
            next_id = object_id + 1
            raw_bytes += size
        add(entry, start, len(entry.objects))
    close()
    return stored


def _compressed(raw: bytes, compressor: Compressor) -> tuple[int, int, bytes]:
    """Compress, and verify by inflating: the log, the other copy of these bytes, is overwritten."""
    codec, dictionary, payload = compressor.compress(raw)
    if compressor.inflate(codec, dictionary, payload, len(raw)) != raw:
        raise CorruptionError(
            "a slab was not the same after compressing and inflating it; nothing was written: "
            "check the memory of this machine"
        )
    return codec, dictionary, payload


def apply_entries(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    entries: Sequence[BatchEntry],
    stored: Sequence[tuple[bytes, bytes]],
    recovery_point: RecoveryPoint,
) -> None:
    """Write the changes of entries and the new recovery point to the tables.

    ``stored`` are the slabs with the new objects of the entries (``full_slabs``).
    """
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
            raise CorruptionError(
                f"{env.path} is damaged: it has a slab with a higher id than new objects have; run "
                "`casstore check`"
            )
        for entry in entries:
            if entry.touched:
                notes.touch(env, txn, entry.touched, entry.now_ms)
    txn.put(LOG_KEY, recovery_point.encode())


def _apply_rows(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    rows: dict[tuple[str, bytes], bytes | None],
) -> None:
    """Write the last version of each row, and update the sum over all rows.

    Each row is written at most once: when LMDB replaces a long value by a shorter one that was
    written in the same transaction, it keeps the longer run of pages, which its own verifier then
    reports as damage.
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
    """Write the names of new objects to the index, and delete those that the entries delete."""
    added: set[bytes] = set()
    for entry in entries:
        for name in entry.unnamed:
            key = index_key(*name)
            if key in added:
                added.discard(key)
            else:
                txn.delete(key, db=env.index)
        added.update([index_key(*name) for name in entry.named()])
    if added:
        keys = [(key, b"") for key in sorted(added)]
        _, number = txn.cursor(env.index).putmulti(keys, overwrite=False)
        if number != len(keys):
            # The writer looked each name up, and it was absent.
            raise CorruptionError(
                f"the index of {env.path} is damaged: it has the id of an object that is only in "
                "the redo log; run `casstore check`"
            )
