"""Verifies everything stored: objects by their digests, the index, rows and their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Final

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import DictionaryShelf
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import SUM_KEY, AnyTransaction, RowSum, find_id, open_row, row_hash
from casstore.engine.lmdb.memtable import MemtableView
from casstore.engine.lmdb.reader import SlabCache, SlabReader
from casstore.errors import CorruptionError
from casstore.format.digest import check_object

# Slabs read in one transaction, so that none is open long.
_BATCH: Final = 64


def verify_content(env: Environment) -> int:
    """Check all objects and rows; returns the number of objects.

    CorruptionError at the first fault. Caches are bypassed: everything is read from the files. The
    rows of commits that are only in the log were checked when the log was read. The log may be
    applied meanwhile.
    """
    _verify_rows(env)
    compressor = Compressor(DictionaryShelf(env).load)
    # The log before the tables: an object that is applied in between is seen in the tables, too,
    # and not missed.
    _verify_recent(env, compressor)
    if not _verify_objects(env, compressor, slabs_in_a_transaction=_BATCH):
        # The tables changed between the transactions: repeat in one, which sees a single state.
        _verify_objects(env, compressor, slabs_in_a_transaction=None)
    with env.snapshot() as (txn, view):
        added, deleted = _recent_names(env, txn, view)
        return int(txn.stat(env.index)["entries"]) + len(added) - deleted


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


def _verify_objects(
    env: Environment, compressor: Compressor, *, slabs_in_a_transaction: int | None
) -> bool:
    """Check the objects that the index names, and that slabs hold all of them.

    Returns False if slabs hold another number of objects than the index names, and several
    transactions were used: the tables may have changed between them.
    """
    cache = SlabCache(0)
    checked = 0
    last_id = 0
    transactions = set()
    more = True
    while more:
        with env.reading() as txn:
            transactions.add(txn.id())
            reader = SlabReader(txn.cursor(db=env.slabs), cache, compressor)
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(last_id + 1))
            for number in count():
                if not more or number == slabs_in_a_transaction:
                    break
                above = last_id
                last_id = int.from_bytes(cursor.key(), "big")
                checked += _verify_slab(reader, last_id, above, partial(find_id, env, txn))
                more = cursor.next()
            indexed = txn.stat(env.index)["entries"]
    if indexed == checked:
        return True
    if len(transactions) > 1:
        return False
    raise CorruptionError(f"{env.path} names {indexed} objects but holds {checked}")


def _verify_recent(env: Environment, compressor: Compressor) -> None:
    """Check the objects whose names are only in the log."""
    with env.snapshot() as (txn, view):
        reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor, view)
        added, _ = _recent_names(env, txn, view)
        for key, _ in view.slabs():
            _verify_slab(reader, int.from_bytes(key, "big"), 0, added.get)


def _recent_names(
    env: Environment, txn: AnyTransaction, view: MemtableView
) -> tuple[dict[bytes, int], int]:
    """The names that the log will add to the index, with their ids; how many it will delete."""
    added: dict[bytes, int] = {}
    deleted = 0
    for digest, object_id in view.names().items():
        applied = find_id(env, txn, digest)
        if applied == object_id:
            continue
        deleted += applied is not None
        if object_id is not None:
            added[digest] = object_id
    return added, deleted


def _verify_slab(
    reader: SlabReader, last_id: int, above: int, find: Callable[[bytes], int | None]
) -> int:
    """Check the named objects of a slab with ids above ``above``; returns their number.

    ``above`` is the last id checked so far: packing may have joined checked slabs to this one.
    """
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
