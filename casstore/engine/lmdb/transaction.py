"""A batch of writes, checked against one state of the store and turned into one entry.

Every write is checked as a whole before any of it counts, so a refused write changes nothing,
and the next of the batch continues. A write sees the changes of the writes before it in the
batch. Nothing is stored here: the entry goes to the log, or straight into the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import lmdb

from casstore.engine import conditions
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import next_free_id
from casstore.engine.lmdb.index import DigestIndex, Proven
from casstore.engine.lmdb.memtable import (
    UNCHANGED,
    BatchEntry,
    Links,
    Memtable,
    Name,
    RowVersion,
    Unchanged,
)
from casstore.engine.lmdb.rows import find_row
from casstore.engine.protocol import NewObject, PutRow, Write, WriteResult
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment


class Job(NamedTuple):
    """A write in the queue."""

    write: Write
    #: The bytes of its objects.
    size_bytes: int
    #: The caller waits for the disk.
    durable: bool


class Transaction:
    """Checks writes one after the other, and collects what they change.

    ``txn`` and ``memtable`` are one state, which no other writer changes meanwhile.
    """

    def __init__(
        self,
        env: Environment,
        txn: lmdb.Transaction[bytes],
        memtable: Memtable,
        now_ms: int,
        recent: notes.RecentTouches,
        proven: Proven,
    ) -> None:
        self._env = env
        self._txn = txn
        self._now_ms = now_ms
        self._recent = recent
        self._memtable = memtable
        self._proven = proven
        self._index: DigestIndex | None = None
        self._first_id = memtable.next_id or next_free_id(txn, env)
        # The changes of this batch. A deleted row or name is None.
        self._rows: dict[tuple[str, bytes], bytes | None] = {}
        self._ids: dict[bytes, int | None] = {}
        self._objects: list[NewObject] = []
        self._links: list[Links] = []
        self._deletes = False
        self._unnamed: list[Name] = []
        self._touched: dict[int, None] = {}

    def run(self, job: Job) -> WriteResult | CasstoreError:
        """Check a write and add its changes, or return the error that refuses it."""
        write = job.write
        try:
            if write.conditions:
                conditions.require(write.conditions, self._find_row, self._has_object, self._now_ms)
            new, hits = self._sort_objects(write.objects) if write.objects else ((), ())
        except CasstoreError as exc:
            # Refused before anything was changed: the others of the batch continue.
            return exc
        for item, links in new:
            own = self._first_id + len(self._objects)
            self._objects.append(item)
            self._links.append(links)
            self._ids[item.digest] = own
        for change in write.rows:
            if isinstance(change, PutRow):
                value = conditions.stamped(change, self._now_ms) if change.stamps else change.value
                self._rows[change.table, change.key] = value
            else:
                self._rows[change.table, change.key] = None
        for digest in write.deletes:
            self._deletes = True
            self._unname(digest)
        if hits and not write.rows:
            self._touch(write, hits)
        return WriteResult(self._now_ms, len(new))

    def entry(self) -> BatchEntry | None:
        """All changes of the batch; None if it changes nothing."""
        if not (self._objects or self._rows or self._unnamed or self._touched):
            return None
        ids, links = self._ids, self._links
        if self._deletes:
            # An object that was stored and deleted within the batch has no name.
            for position, item in enumerate(self._objects):
                if ids[item.digest] != self._first_id + position:
                    links[position] = None
        rows: list[RowVersion] = [(*place, value) for place, value in self._rows.items()]
        return BatchEntry(
            self._now_ms, self._first_id, self._objects, links, rows, self._unnamed,
            list(self._touched),
        )  # fmt: skip

    # --- looking up ---------------------------------------------------------------------------

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        place = table, key
        if place in self._rows:
            return self._rows[place]
        found = self._memtable.newest_row(place)
        if not isinstance(found, Unchanged):
            return found
        stored = find_row(self._txn.cursor(self._env.tables[table]), table, key)
        return None if isinstance(stored, tuple) else stored

    def _has_object(self, digest: bytes) -> bool:
        return self._find_id(digest) is not None

    def _find_id(self, digest: bytes) -> int | None:
        ids = self._ids
        if digest in ids:
            return ids[digest]
        memtable = self._memtable
        found: int | Unchanged | None = UNCHANGED
        if digest in memtable.ids or digest in memtable.deleted:
            found = memtable.newest_id(digest)
        if isinstance(found, Unchanged):
            found = memtable.applied_ids.get(digest)
            if found is None:
                if self._index is None:
                    self._index = DigestIndex(self._env, self._txn, proven=self._proven)
                found = self._index.find(digest)
        ids[digest] = found
        return found

    def _sort_objects(
        self, objects: Sequence[NewObject]
    ) -> tuple[list[tuple[NewObject, list[int]]], list[bytes]]:
        """The objects that are new, each with the ids that it links to, and the other digests.

        ObjectNotFoundError if a child is neither stored nor one of the objects before.
        """
        find = self._find_id
        next_id = self._first_id + len(self._objects)
        own_ids: dict[bytes, int] = {}
        new: list[tuple[NewObject, list[int]]] = []
        hits: list[bytes] = []
        for item in objects:
            digest = item[0]
            if digest in own_ids or find(digest) is not None:
                hits.append(digest)
                continue
            links: list[int] = []
            for child in item[3]:
                child_id = own_ids[child] if child in own_ids else find(child)
                if child_id is None:
                    raise ObjectNotFoundError(child)
                links.append(child_id)
            own_ids[digest] = next_id + len(new)
            new.append((item, links))
        return new, hits

    # --- changing -----------------------------------------------------------------------------

    def _unname(self, digest: bytes) -> None:
        object_id = self._find_id(digest)
        if object_id is None:
            return
        self._ids[digest] = None
        if object_id < self._first_id:
            self._unnamed.append((digest, object_id))

    def _touch(self, write: Write, hits: Sequence[bytes]) -> None:
        """Restart the grace period of objects that were put again and that no row names yet."""
        # An object that another object of this write links to lives as long as that one.
        linked = {child for item in write.objects for child in item.children}
        for digest in hits:
            object_id = self._ids[digest]
            if (
                digest not in linked
                and object_id is not None
                and object_id < self._first_id
                and not self._recent.is_young(object_id, self._now_ms, self._stored_at_ms)
            ):
                self._touched[object_id] = None

    def _stored_at_ms(self, object_id: int) -> int:
        recent = self._memtable.view().stored_at_ms(object_id)
        if recent is not None:
            return recent
        cursor = self._txn.cursor(self._env.slabs)
        if not cursor.set_range(slabs.slab_key(object_id)):
            raise CorruptionError(f"no slab of {self._env.path} holds object {object_id}")
        return slabs.stored_at_ms(cursor.value())
