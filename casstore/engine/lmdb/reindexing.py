"""Rebuilds the index from the slabs, and the sum over all rows from the rows.

A slab may still hold objects that gc removed, until it is packed. Only the index distinguishes them
from live objects, so without the index reachability decides, as it did for gc. If a digest is in
several slabs, the highest id is the live one: an object is stored again only after gc removed it.
There is one exception: if a row of the index was lost, a writer has stored a live object again.
Then the lower id is needed, because reachable objects link to it, by id. So ids that objects link
to come first.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from casstore.engine.id_set import IdSet
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import (
    SUM_KEY,
    DigestIndex,
    RowSum,
    index_key,
    is_named,
    open_row,
    prove_row,
)
from casstore.engine.protocol import IndexReport, Roots, Row
from casstore.errors import CorruptionError


def rebuild_index(env: Environment, roots: Roots, *, grace_from_ms: int) -> IndexReport:
    """Name all objects that roots reach, and complete ones stored since ``grace_from_ms``."""
    env.require_writable()
    # A running collection relies on the names that it has seen.
    lock = env.lock_collector()
    try:
        with env.writing() as txn:
            return _rebuild(env, txn, roots, grace_from_ms)
    finally:
        lock.unlock()


def _rebuild(
    env: Environment,
    txn: lmdb.Transaction[bytes],
    roots: Roots,
    grace_from_ms: int,
) -> IndexReport:
    wanted: set[bytes] = set()
    for table in roots.tables:
        for row in _rows(env, txn, table):
            wanted.update(roots.named(table, row))
    before = txn.stat(env.index)["entries"]
    found = _FoundObjects()
    # Descending: parents come before children, and of equal digests the live one first.
    for directory in _directories(env, txn, reverse=True):
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            if _is_dead(directory, position):
                continue
            object_id = directory.first_id + position
            found.held.add(object_id)
            digest = directory.digest(position)
            if is_named(txn, env, None, digest, object_id):
                found.known.add(object_id)
            if digest in wanted:
                wanted.discard(digest)
                found.reached.add(object_id)
            if object_id in found.reached:
                for child in directory.children(position, child_at):
                    if not 0 < child < object_id:
                        raise CorruptionError(
                            f"object {digest.hex()} is older than one it links to"
                        )
                    found.reached.add(child)
                    found.linked.add(child)
            elif directory.stored_at_ms >= grace_from_ms:
                found.young.add(object_id)
    named = _name(env, txn, found)
    # Objects that were collected and not packed yet have no name again.
    notes.note_leftovers(env, txn, there=True)
    missing = len(wanted) + sum([object_id not in named for object_id in found.linked])
    new = sum([object_id not in found.known for object_id in named])
    return IndexReport(len(named), new, before - (len(named) - new), missing)


class _FoundObjects:
    """The objects found in all slabs."""

    def __init__(self) -> None:
        self.held = IdSet()
        #: Named by the old index.
        self.known = IdSet()
        self.reached = IdSet()
        #: Linked to by a reached object, by id; not only referred to by a row, by digest.
        self.linked = IdSet()
        self.young = IdSet()


def _rows(env: Environment, txn: lmdb.Transaction[bytes], table: str) -> Iterator[Row]:
    for key, value in txn.cursor(db=env.tables[table]):
        yield Row(key, open_row(table, key, value))


def _is_dead(directory: slabs.SlabDirectory, position: int) -> bool:
    return directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD


def _directories(
    env: Environment, txn: lmdb.Transaction[bytes], *, reverse: bool
) -> Iterator[slabs.SlabDirectory]:
    cursor = txn.cursor(db=env.slabs)
    for key, value in cursor.iterprev() if reverse else cursor.iternext():
        yield slabs.read_directory(key, value)


def _name(env: Environment, txn: lmdb.Transaction[bytes], found: _FoundObjects) -> IdSet:
    """Write the index, each digest once; returns the ids that have a name now.

    Ids that objects link to come first, then those that rows refer to, then young ones.
    """
    txn.drop(env.index, delete=False)
    index = DigestIndex(env, txn)
    named = IdSet()
    for wanted in (found.linked, found.reached, found.young):
        # Descending: of two equal digests the higher id stays.
        for directory in _directories(env, txn, reverse=True):
            for position in range(directory.objects - 1, -1, -1):
                object_id = directory.first_id + position
                if object_id in wanted and object_id in found.held and object_id not in named:
                    digest = directory.digest(position)
                    if index.find(digest) is None:
                        txn.put(index_key(digest, object_id), b"", db=env.index)
                        named.add(object_id)
    # Remove the names of young objects that link to an object without a name (P3). Ascending:
    # children come first, so it is known by then which of them have names.
    for directory in _directories(env, txn, reverse=False):
        child_at = 0
        for position in range(directory.objects):
            object_id = directory.first_id + position
            children = directory.children(position, child_at)
            child_at += directory.child_counts[position]
            young = object_id in named and object_id not in found.reached
            if young and not all(child in named for child in children):
                txn.delete(index_key(directory.digest(position), object_id), db=env.index)
                named.discard(object_id)
    return named


def sum_rows(env: Environment) -> None:
    """Rebuild the sum over all rows from the stored rows."""
    env.require_writable()
    with env.writing() as txn:
        total = RowSum()
        for table, database in env.tables.items():
            for key, stored in txn.cursor(db=database):
                total.add(prove_row(table, key, stored)[1])
        if RowSum(txn.get(SUM_KEY)).encode() != total.encode():
            txn.put(SUM_KEY, total.encode())
