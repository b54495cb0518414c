"""One write, applied inside an open LMDB transaction: check everything, then change.

Nothing is changed before the last check has passed, so a refused write leaves the
transaction as it found it and the next one of the batch can go on.
"""

from __future__ import annotations

from typing import NamedTuple

import lmdb

from casstore.engine import conditions
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.rows import (
    CHECKSUM_BYTES,
    SUM_KEY,
    RowSum,
    open_row,
    require_absent,
    row_hash,
)
from casstore.engine.lmdb.slab import read_id
from casstore.engine.protocol import PutRow, Write, WriteResult
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError


class StaleError(CasstoreError):
    """Something a write counted on as stored has been removed since; prepare it again.

    Never leaves the engine.
    """


class Prepared(NamedTuple):
    """A write with everything done that needs no lock."""

    write: Write
    drafts: list[slabs.Draft]
    # Digests of the write that were stored when it was prepared.
    hits: list[bytes]


class Transaction:
    """Applies prepared writes, one after the other."""

    def __init__(self, env: Environment, txn: lmdb.Transaction[bytes], now_ms: int) -> None:
        self._env = env
        self._txn = txn
        self._now_ms = now_ms
        self._next_id = 0
        # What rows will be when the batch is done; None: gone.
        self._rows: dict[tuple[str, bytes], bytes | None] = {}
        self.changed = False

    def check(self, prepared: Prepared) -> dict[bytes, int]:
        """Raise if this write must be refused; changes nothing.

        Returns the ids of the stored objects that it links to, for ``perform``.
        """
        write = prepared.write
        if write.conditions:
            conditions.require(write.conditions, self._find_row, self._has_object, self._now_ms)
        for digest in prepared.hits:
            # A hit counts only if the row is still there: the collector may have removed
            # the object after this write was prepared (the first rule of collection).
            if not self._has_object(digest):
                raise StaleError(digest.hex())
        return self._find_children(prepared.drafts)

    def perform(self, prepared: Prepared, ids: dict[bytes, int]) -> WriteResult:
        """Make the changes of a write that ``check`` passed.

        An error here leaves the transaction half-changed: the caller must abort it.
        """
        write = prepared.write
        new_objects = sum([self._store(draft, ids) for draft in prepared.drafts])
        self._change_rows(write)
        for digest in write.deletes:
            self._txn.delete(digest, db=self._env.index)
        self.changed = self.changed or bool(prepared.drafts or write.rows or write.deletes)
        return WriteResult(self._now_ms, new_objects)

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        place = (table, key)
        if place in self._rows:
            return self._rows[place]
        database = self._env.tables[table]
        stored = self._txn.get(key, db=database)
        if stored is not None:
            return open_row(table, key, stored)
        with self._txn.cursor(db=database) as cursor:
            require_absent(cursor, table, key)
        return None

    def _has_object(self, digest: bytes) -> bool:
        return self._txn.get(digest, db=self._env.index) is not None

    def _find_children(self, drafts: list[slabs.Draft]) -> dict[bytes, int]:
        """The ids of all children that are stored already; raise if one is nowhere."""
        inside: set[bytes] = set()
        outside: dict[bytes, int] = {}
        for draft in drafts:
            for item in draft.objects:
                for child in item.children:
                    if child in inside or child in outside:
                        continue
                    row = self._txn.get(child, db=self._env.index)
                    if row is None:
                        raise ObjectNotFoundError(child)
                    outside[child] = read_id(row)
                inside.add(item.digest)
        return outside

    def _store(self, draft: slabs.Draft, ids: dict[bytes, int]) -> int:
        """Append one slab. ``ids`` learns the ids of its objects; returns how many are new."""
        txn, index = self._txn, self._env.index
        first_id = self._next_id or self._first_free_id()
        dead: list[bool] = []
        children: list[list[int]] = []
        for object_id, item in enumerate(draft.objects, first_id):
            children.append([ids[child] for child in item.children])
            row = object_id.to_bytes(8, "big")
            is_new = txn.put(item.digest, row, overwrite=False, db=index)
            dead.append(not is_new)
            if not is_new:
                # Stored by somebody else since this write was prepared: theirs counts,
                # because objects may link to it already, and ours stays behind unnamed.
                row = txn.get(item.digest, row, db=index)
            ids[item.digest] = read_id(row)
        key, value = slabs.encode(draft, first_id, dead, children, self._now_ms)
        if not txn.put(key, value, append=True, db=self._env.slabs):
            # py-lmdb reports an out-of-order append by returning False.
            raise CorruptionError(f"{self._env.path}: the slab for id {first_id} is not the last")
        self._next_id = first_id + len(draft.objects)
        return dead.count(False)

    def _first_free_id(self) -> int:
        """Ids start at 1 and go on after the last slab, which is never removed."""
        with self._txn.cursor(db=self._env.slabs) as cursor:
            return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1

    def _change_rows(self, write: Write) -> None:
        for change in write.rows:
            value = None
            if isinstance(change, PutRow):
                value = conditions.stamped(change, self._now_ms)
            self._rows[change.table, change.key] = value

    def finish(self) -> None:
        """Write the rows, each once, and the sum over all of them.

        Once: when LMDB replaces a long value by a shorter one within a transaction, it
        keeps the longer run of pages, which its own verifier then calls damage.
        """
        if not self._rows:
            return
        txn, env = self._txn, self._env
        total = RowSum(txn.get(SUM_KEY, db=env.meta))
        for (table, key), value in self._rows.items():
            database = env.tables[table]
            old = txn.get(key, db=database)
            if old is not None:
                total.subtract(row_hash(table, key, open_row(table, key, old)))
            if value is not None:
                hashed = row_hash(table, key, value)
                total.add(hashed)
                txn.put(key, value + hashed[:CHECKSUM_BYTES], db=database)
            elif old is not None:
                txn.delete(key, db=database)
        txn.put(SUM_KEY, total.encode(), db=env.meta)
