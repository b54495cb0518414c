"""Every stored object against its digest, every index row against its object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.reader import SlabReader
from casstore.errors import CorruptionError
from casstore.format.digest import check_object

# Slabs read in one transaction, so that none is open long.
_BATCH: Final = 64


def verify_objects(
    env: Environment, make_reader: Callable[[lmdb.Transaction[memoryview]], SlabReader]
) -> int:
    """Recompute all digests; the number of objects, or CorruptionError at the first fault."""
    checked = 0
    last_id = 0
    more = True
    while more:
        with env.reading() as txn:
            reader = make_reader(txn)
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(last_id + 1))
            for _ in range(_BATCH):
                if not more:
                    break
                last_id = int.from_bytes(cursor.key(), "big")
                checked += _verify_slab(env, txn, reader, last_id)
                more = cursor.next()
    with env.reading() as txn:
        indexed = txn.stat(env.index)["entries"]
    if indexed != checked:
        raise CorruptionError(f"{env.path} names {indexed} objects but holds {checked}")
    return checked


def _verify_slab(
    env: Environment, txn: lmdb.Transaction[memoryview], reader: SlabReader, last_id: int
) -> int:
    # Straight from the file, checksum and all: a cached copy would prove nothing.
    slab = reader.decode_at(last_id)
    checked = 0
    for position in range(slab.directory.objects):
        object_id = slab.directory.first_id + position
        digest = slab.directory.digest(position)
        row = txn.get(digest, db=env.index)
        if row is None or int.from_bytes(row, "big") != object_id:
            continue
        if any(child >= object_id for child in slab.children(position)):
            raise CorruptionError(f"object {digest.hex()} is older than one it links to")
        check_object(digest, *reader.object(object_id))
        checked += 1
    return checked
