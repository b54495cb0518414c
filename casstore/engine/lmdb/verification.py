"""Verifies everything stored: objects by their digests, the index, rows and their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.cache import SlabCache
from casstore.engine.lmdb.dictionaries import DictionaryShelf
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.index import find_id
from casstore.engine.lmdb.reader import SlabReader
from casstore.engine.lmdb.rows import SUM_KEY, RowSum, open_row, row_hash
from casstore.errors import CorruptionError
from casstore.format.hashing import check_object

# Slabs read in one transaction, so that none is open long.
_BATCH: Final = 64


def verify_content(env: Environment) -> int:
    """Check all objects and rows; the number of objects, or CorruptionError at the first fault.

    Caches are bypassed: everything is read from the files. The rows of commits that are only in
    the log were checked when they were read from there.
    """
    _verify_rows(env)
    compressor = Compressor(DictionaryShelf(env).load)
    return _verify_objects(env, compressor) + _verify_recent(env, compressor)


def _verify_rows(env: Environment) -> None:
    # One transaction: the sum and the rows must come from the same state.
    with env.reading() as txn:
        total = RowSum()
        for table, database in env.tables.items():
            for key, stored in txn.cursor(db=database):
                name = bytes(key)
                total.add(row_hash(table, name, open_row(table, name, stored)))
        stored_sum = txn.get(SUM_KEY)
        if total.encode() != RowSum(None if stored_sum is None else bytes(stored_sum)).encode():
            raise CorruptionError(
                f"the rows of {env.path} are not those last written: some are older or missing"
            )


def _verify_objects(env: Environment, compressor: Compressor) -> int:
    """Check the objects that the index names; returns their number."""
    cache = SlabCache(0)
    checked = 0
    last_id = 0
    more = True
    while more:
        with env.reading() as txn:
            reader = SlabReader(txn.cursor(db=env.slabs), cache, compressor)
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(last_id + 1))
            for _ in range(_BATCH):
                if not more:
                    break
                above = last_id
                last_id = int.from_bytes(cursor.key(), "big")
                checked += _verify_slab(reader, last_id, above, partial(find_id, env, txn))
                more = cursor.next()
    with env.reading() as txn:
        indexed = txn.stat(env.index)["entries"]
    if indexed != checked:
        raise CorruptionError(f"{env.path} names {indexed} objects but holds {checked}")
    return checked


def _verify_recent(env: Environment, compressor: Compressor) -> int:
    """Check the objects that only the log names; their number, less the names it deletes."""
    with env.snapshot() as (txn, view):
        reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor, view)
        added: dict[bytes, int] = {}
        gone = 0
        for digest, object_id in view.names().items():
            applied = find_id(env, txn, digest)
            if applied == object_id:
                continue
            gone += applied is not None
            if object_id is not None:
                added[digest] = object_id
        proven = sum(
            _verify_slab(reader, int.from_bytes(key, "big"), 0, added.get)
            for key, _ in view.slabs()
        )
    return proven - gone


def _verify_slab(
    reader: SlabReader, last_id: int, above: int, find: Callable[[bytes], int | None]
) -> int:
    """Check the objects of a slab with ids above ``above``: those joined to it since are done."""
    slab = reader.decode_at(last_id)
    checked = 0
    for position in range(slab.directory.objects):
        object_id = slab.directory.first_id + position
        if object_id <= above:
            continue
        digest = slab.directory.digest(position)
        if find(digest) != object_id:
            continue
        if any(child >= object_id for child in slab.children(position)):
            raise CorruptionError(f"object {digest.hex()} is older than one it links to")
        check_object(digest, *reader.object(object_id))
        checked += 1
    return checked
