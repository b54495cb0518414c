"""A batch of writes, applied inside an open LMDB transaction: check each, then change.

Nothing is changed by a write before its last check has passed, so a refused one leaves
the transaction as it found it and the next of the batch can go on. The new objects of
a batch share slabs, which are written last; those of a refused write stay behind in
them, unnamed, until the slab is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from casstore.engine.protocol import NewObject, PutRow, Write, WriteResult
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError


class StaleError(CasstoreError):
    """Something a write counted on as stored has been removed since; prepare it again.

    Never leaves the engine.
    """


class Job:
    """A write on its way, and what was prepared of it without the lock.

    ``new`` are its objects that were not stored then, None until prepared; ``hits`` the
    digests that were; ``drafts`` the slabs that hold the new objects, shared by all jobs
    prepared together.
    """

    __slots__ = ("drafts", "hits", "new", "write")

    def __init__(self, write: Write) -> None:
        self.write = write
        self.new: list[NewObject] | None = None
        self.hits: list[bytes] = []
        self.drafts: list[slabs.Draft] = []


class _Slot:
    """A slab of this transaction: its ids are given, its objects named one by one."""

    __slots__ = ("children", "dead", "draft", "first_id")

    def __init__(self, draft: slabs.Draft, first_id: int) -> None:
        self.draft = draft
        self.first_id = first_id
        self.dead = [True] * len(draft.objects)
        # An unnamed object keeps as many columns as it has links, all pointing at itself.
        self.children = [
            [object_id] * len(item.children)
            for object_id, item in enumerate(draft.objects, first_id)
        ]


class Transaction:
    """Applies prepared writes, one after the other."""

    def __init__(
        self,
        env: Environment,
        txn: lmdb.Transaction[bytes],
        now_ms: int,
        drafts: Sequence[slabs.Draft],
    ) -> None:
        self._env = env
        self._txn = txn
        self._now_ms = now_ms
        self._slots: list[_Slot] = []
        self._places: dict[bytes, tuple[_Slot, int]] = {}
        next_id = self._first_free_id() if drafts else 0
        for draft in drafts:
            slot = _Slot(draft, next_id)
            self._slots.append(slot)
            for position, item in enumerate(draft.objects):
                self._places[item.digest] = (slot, position)
            next_id += len(draft.objects)
        # What rows will be when the batch is done; None: gone.
        self._rows: dict[tuple[str, bytes], bytes | None] = {}
        self.changed = False

    def check(self, job: Job) -> dict[bytes, int]:
        """Raise if this write must be refused; changes nothing.

        Returns the ids of the stored objects that it links to, for ``perform``.
        """
        write = job.write
        if write.conditions:
            conditions.require(write.conditions, self._find_row, self._has_object, self._now_ms)
        for digest in job.hits:
            # A hit counts only if the row is still there: the collector may have removed
            # the object after this write was prepared (the first rule of collection).
            if not self._has_object(digest):
                raise StaleError(digest.hex())
        return self._find_children(job.new or ())

    def perform(self, job: Job, ids: dict[bytes, int]) -> WriteResult:
        """Make the changes of a write that ``check`` passed.

        An error here leaves the transaction half-changed: the caller must abort it.
        """
        write = job.write
        new_objects = sum([self._name(item, ids) for item in job.new or ()])
        for change in write.rows:
            value = None
            if isinstance(change, PutRow):
                value = conditions.stamped(change, self._now_ms)
            self._rows[change.table, change.key] = value
        for digest in write.deletes:
            self._txn.delete(digest, db=self._env.index)
        self.changed = self.changed or bool(new_objects or write.rows or write.deletes)
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

    def _find_children(self, objects: Sequence[NewObject]) -> dict[bytes, int]:
        """The ids of all children that are stored already; raise if one is nowhere."""
        inside: set[bytes] = set()
        outside: dict[bytes, int] = {}
        for item in objects:
            for child in item.children:
                if child in inside or child in outside:
                    continue
                row = self._txn.get(child, db=self._env.index)
                if row is None:
                    raise ObjectNotFoundError(child)
                outside[child] = read_id(row)
            inside.add(item.digest)
        return outside

    def _name(self, item: NewObject, ids: dict[bytes, int]) -> bool:
        """Enter one object into the index. ``ids`` learns its id; False if it was there."""
        slot, position = self._places[item.digest]
        row = (slot.first_id + position).to_bytes(8, "big")
        index = self._env.index
        if self._txn.put(item.digest, row, overwrite=False, db=index):
            slot.dead[position] = False
            slot.children[position] = [ids[child] for child in item.children]
            ids[item.digest] = slot.first_id + position
            return True
        # Stored by somebody else since this write was prepared: theirs counts, because
        # objects may link to it already, and ours stays behind unnamed.
        ids[item.digest] = read_id(self._txn.get(item.digest, row, db=index))
        return False

    def _first_free_id(self) -> int:
        """Ids start at 1 and go on after the last slab, which is never removed."""
        with self._txn.cursor(db=self._env.slabs) as cursor:
            return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1

    def finish(self) -> None:
        """Write what the batch amounts to: its slabs and its rows."""
        self._write_slabs()
        self._write_rows()

    def _write_slabs(self) -> None:
        for slot in self._slots:
            if all(slot.dead):
                continue
            key, value = slabs.encode(
                slot.draft, slot.first_id, slot.dead, slot.children, self._now_ms
            )
            if not self._txn.put(key, value, append=True, db=self._env.slabs):
                # py-lmdb reports an out-of-order append by returning False.
                raise CorruptionError(f"{self._env.path}: slab {key.hex()} is not the last")

    def _write_rows(self) -> None:
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
