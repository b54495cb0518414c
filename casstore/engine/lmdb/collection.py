"""Collection: what no row reaches loses its name, in one transaction.

LMDB has one writer at a time. A transaction that marks from the rows and takes the names
of everything unmarked away sees every commit before it, and every commit after it looks
up again what it relies on; nothing can come in between (P6). The price is that writers
wait while it runs; readers do not.

Marking is one descending pass: a child's id is always lower than its parent's. An object
without a name is gone for everybody; its bytes go when its slab is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment, translate
from casstore.engine.lmdb.journal import settle
from casstore.engine.lmdb.rows import open_row
from casstore.engine.protocol import CollectReport, FindRoots, Row
from casstore.errors import CorruptionError


class _Marks(NamedTuple):
    report: CollectReport
    swept: list[bytes]


def collect(
    env: Environment, find_roots: FindRoots, *, keep_after_ms: int, dry_run: bool
) -> CollectReport:
    """Take the names of all unreachable objects stored before ``keep_after_ms`` away.

    CorruptionError, and nothing happens, if a row or a directory is damaged, or names an
    object that is not there.
    """
    env.require_writable()
    with env.write_lock:
        env.gate.check()
        try:
            txn = env.begin_write()
            try:
                # From here on the tables and the index alone say what there is.
                settle(env, txn)
                marks = _mark(env, txn, find_roots, keep_after_ms)
                if marks.swept and not dry_run:
                    # Parents first: their ids are higher, and they were met first.
                    for digest in marks.swept:
                        txn.delete(digest, db=env.index)
                    txn.commit()
            finally:
                # After a commit there is nothing left to abort.
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        env.announce()
        env.cover()
    return marks.report


def _mark(
    env: Environment, txn: lmdb.Transaction[bytes], find_roots: FindRoots, keep_after_ms: int
) -> _Marks:
    def scan(table: str) -> Iterator[Row]:
        for key, stored in txn.cursor(db=env.tables[table]):
            yield Row(key, open_row(table, key, stored))

    roots = set(find_roots(scan))
    unseen = set(roots)
    cursor = txn.cursor(db=env.slabs)
    more = cursor.last()
    marked = bytearray(int.from_bytes(cursor.key(), "big") // 8 + 1) if more else bytearray()
    swept: list[bytes] = []
    kept = kept_bytes = swept_bytes = 0
    while more:
        directory = slabs.read_directory(*cursor.item())
        young = directory.stored_at_ms >= keep_after_ms
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            object_id = directory.first_id + position
            digest = directory.digest(position)
            row = txn.get(digest, db=env.index)
            if row is None or slabs.read_id(row) != object_id:
                continue
            unseen.discard(digest)
            size_bytes = directory.lengths[position]
            if not (young or digest in roots or marked[object_id >> 3] >> (object_id & 7) & 1):
                swept.append(digest)
                swept_bytes += size_bytes
                continue
            kept += 1
            kept_bytes += size_bytes
            for child in directory.children(position, child_at):
                if not 0 < child < object_id:
                    raise CorruptionError(f"object {digest.hex()} is older than one it links to")
                marked[child >> 3] |= 1 << (child & 7)
        more = cursor.prev()
    if unseen:
        raise CorruptionError(
            f"a row of {env.path} names object {min(unseen).hex()}, which is not stored; "
            "nothing was collected"
        )
    report = CollectReport(len(roots), kept, len(swept), kept_bytes, swept_bytes)
    return _Marks(report, swept)
