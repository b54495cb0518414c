"""Everything stored against its proof: objects and digests, the index, rows and their sum."""

from __future__ import annotations

from typing import Final

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.cache import SlabCache
from casstore.engine.lmdb.dictionaries import DictionaryShelf
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.journal import Pending, count_names, read_pending
from casstore.engine.lmdb.reader import SlabReader
from casstore.engine.lmdb.rows import SUM_KEY, RowSum, open_row, row_hash
from casstore.errors import CorruptionError
from casstore.format.hashing import check_object

# Slabs read in one transaction, so that none is open long.
_BATCH: Final = 64


def verify_content(env: Environment) -> int:
    """Prove all objects and rows; the number of objects, or CorruptionError at the first fault.

    What is cached is not believed: everything comes from the file.
    """
    _verify_rows(env)
    return _verify_objects(env)


def _verify_rows(env: Environment) -> None:
    # One transaction: the sum and the rows must be of the same moment.
    with env.reading() as txn:
        total = RowSum()
        for table, database in env.tables.items():
            for key, stored in txn.cursor(db=database):
                name = bytes(key)
                total.add(row_hash(table, name, open_row(table, name, stored)))
        total.add_number(read_pending(env, txn).total)
        stored_sum = txn.get(SUM_KEY)
        if total.encode() != RowSum(None if stored_sum is None else bytes(stored_sum)).encode():
            raise CorruptionError(
                f"the rows of {env.path} are not those last written: some are older or missing"
            )


def _verify_objects(env: Environment) -> int:
    compressor = Compressor(DictionaryShelf(env).load)
    cache = SlabCache(0)
    checked = 0
    last_id = 0
    more = True
    while more:
        with env.reading() as txn:
            pending = read_pending(env, txn)
            reader = SlabReader(txn.cursor(db=env.slabs), cache, compressor)
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(last_id + 1))
            for _ in range(_BATCH):
                if not more:
                    break
                above = last_id
                last_id = int.from_bytes(cursor.key(), "big")
                checked += _verify_slab(env, txn, pending, reader, last_id, above)
                more = cursor.next()
    with env.reading() as txn:
        indexed = count_names(env, txn, read_pending(env, txn))
    if indexed != checked:
        raise CorruptionError(f"{env.path} names {indexed} objects but holds {checked}")
    return checked


def _verify_slab(
    env: Environment,
    txn: lmdb.Transaction[memoryview],
    pending: Pending,
    reader: SlabReader,
    last_id: int,
    above: int,
) -> int:
    """Prove the objects of a slab with ids above ``above``: what was joined to it since is done."""
    slab = reader.decode_at(last_id)
    checked = 0
    for position in range(slab.directory.objects):
        object_id = slab.directory.first_id + position
        if object_id <= above:
            continue
        digest = slab.directory.digest(position)
        if pending.find_id(txn, env, digest) != object_id:
            continue
        if any(child >= object_id for child in slab.children(position)):
            raise CorruptionError(f"object {digest.hex()} is older than one it links to")
        check_object(digest, *reader.object(object_id))
        checked += 1
    return checked
