"""A batch of writes, applied inside an open LMDB transaction: check each, then change.

Nothing is changed by a write before its last check has passed, so a refused one leaves
the transaction as it found it and the next of the batch can go on. The new objects of
a batch share slabs, which are written last; those of a refused write stay behind in
them, unnamed, until the slab is rewritten. Names and rows go to the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import lmdb

from casstore.engine import conditions
from casstore.engine.lmdb import journal, notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.index import Index, Proven
from casstore.engine.lmdb.journal import Changes, Name, Pending
from casstore.engine.lmdb.tail import Fresh, Tail
from casstore.engine.protocol import NewObject, PutRow, Write, WriteResult
from casstore.errors import CasstoreError, ObjectNotFoundError


class StaleError(CasstoreError):
    """Something a write counted on as stored has been removed since; prepare it again.

    Never leaves the engine.
    """


class Plan(NamedTuple):
    """What was prepared without the lock, for all jobs that were prepared together.

    ``ids``: what the index said of their objects and of all that these link to, None where
    it said nothing. ``commit``: the last transaction whose work that shows, None if it is
    not of one moment. ``drafts``: the slabs of their new objects. ``supposed``: nobody has
    looked; the objects are all taken to be new, and none may turn out to be stored.
    """

    commit: int | None
    ids: dict[bytes, int | None]
    drafts: list[slabs.Draft | slabs.Uncut]
    supposed: bool = False


class Prepared(NamedTuple):
    """One write, prepared: its new objects, the digests of those that were stored, and the plan."""

    new: Sequence[NewObject]
    hits: Sequence[bytes]
    plan: Plan


class Job:
    """A write on its way.

    ``prepared`` is assigned in one step, so that an interrupted leader leaves it whole or None.
    ``again``: an earlier preparation was stale. ``named`` and ``links`` belong to one transaction:
    the ids that its objects get, and by id those of the objects that they link to.
    """

    __slots__ = ("again", "links", "named", "prepared", "size_bytes", "write")

    def __init__(self, write: Write, size_bytes: int = 0, *, again: bool = False) -> None:
        self.write = write
        #: The bytes of its objects.
        self.size_bytes = size_bytes
        self.again = again
        self.prepared: Prepared | None = None
        self.named: dict[bytes, int]
        self.links: dict[int, list[int]]

    def require_prepared(self) -> Prepared:
        """What was prepared; a job without that never reaches a transaction."""
        assert self.prepared is not None
        return self.prepared


#: The ids that the new objects of a plan will have, by digest.
_Places = dict[bytes, int]
# How many names of the index a process keeps from one transaction to the next.
_MAX_OWN_IDS: Final = 4096


class Transaction:
    """Applies prepared writes, one after the other."""

    def __init__(
        self,
        env: Environment,
        txn: lmdb.Transaction[bytes],
        pending: Pending,
        now_ms: int,
        jobs: Sequence[Job],
        recent: notes.RecentTouches,
        tail: Tail,
        proven: Proven,
    ) -> None:
        self._env = env
        self._txn = txn
        #: What the journal holds; after ``finish``, with the work of this transaction.
        self.pending = pending
        self._now_ms = now_ms
        # What the index says of a digest, as far as anybody asked, with all changes so far.
        self._ids: dict[bytes, int | None] = {}
        # What is new in the index, and what is gone.
        self._named: dict[bytes, int] = {}
        self._unnamed: list[Name] = []
        # Rows as this batch leaves them.
        self._rows: Changes = {}
        # A row as it was before this batch.
        self._find_stored = partial(pending.find_row, txn, env)
        self._next_id = pending.next_id or self._first_free_id()
        # The slabs of this transaction, each with its first id.
        self._slabs: list[tuple[slabs.Draft | slabs.Uncut, int]] = []
        # The ids that each new object links to, by its own id, once it is named.
        self._children: dict[int, list[int]] = {}
        self._places: dict[int, _Places] = {}
        self._recent = recent
        self._tail = tail
        self._index = Index(env, txn, proven=proven)
        # Objects that were put again, with nothing that names them.
        self._touched: dict[int, None] = {}
        self.changed = False
        self._begin(jobs)

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Take over what was prepared, once for all jobs that were prepared together."""
        # A look-up made before the lock counts only if nobody has committed since: then
        # this transaction sees the very same state.
        next_id = self._next_id
        for job in jobs:
            plan = job.require_prepared().plan
            if id(plan) in self._places:
                continue
            if plan.commit is not None and plan.commit == self._txn.id() - 1:
                self._ids.update(plan.ids)
            places = self._places[id(plan)] = {}
            for draft in plan.drafts:
                self._slabs.append((draft, next_id))
                for item in draft.objects:
                    places[item[0]] = next_id
                    next_id += 1

    def check(self, job: Job) -> None:
        """Raise if this write must be refused; changes nothing."""
        write = job.write
        if write.conditions:
            find = self._find_row if self._rows else self._find_stored
            conditions.require(write.conditions, find, self._has_object, self._now_ms)
        new, hits, plan = job.require_prepared()
        for digest in hits:
            # A hit counts only if the row is still there: the collector may have removed
            # the object after this write was prepared (the first rule of collection).
            if self._find_id(digest) is None:
                raise StaleError(digest.hex())
        if new:
            self._link(job, new, plan)

    def perform(self, job: Job) -> WriteResult:
        """Make the changes of a write that ``check`` passed.

        An error here leaves the transaction half-changed: the caller must abort it.
        """
        write = job.write
        new, hits, _ = job.require_prepared()
        new_objects = 0
        if new:
            named = job.named
            new_objects = len(named)
            self._ids.update(named)
            self._named.update(named)
            self._children.update(job.links)
        rows = self._rows
        for change in write.rows:
            if isinstance(change, PutRow):
                table, key, value, stamps = change
                rows[table, key] = conditions.stamped(change, self._now_ms) if stamps else value
            else:
                table, key = change
                rows[table, key] = None
        if write.deletes:
            for digest in write.deletes:
                self._unname(digest)
        if hits and not write.rows:
            self._touch(write, hits)
        # A delete of what is not there leaves nothing to write, and LMDB counts no transaction
        # that writes nothing: the journal's state must not be kept under its number.
        self.changed = self.changed or bool(
            new_objects or write.rows or self._unnamed or self._touched
        )
        return WriteResult(self._now_ms, new_objects)

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        """The row as the writes before have left it."""
        if (table, key) in self._rows:
            return self._rows[table, key]
        return self._find_stored(table, key)

    def _has_object(self, digest: bytes) -> bool:
        return self._find_id(digest) is not None

    def _find_id(self, digest: bytes) -> int | None:
        if digest in self._ids:
            return self._ids[digest]
        pending = self.pending
        object_id: int | None
        if digest in pending.ids:
            object_id = pending.ids[digest]
        elif digest in pending.own_ids:
            object_id = pending.own_ids[digest]
        else:
            object_id = self._index.find(digest)
            if object_id is not None:
                if len(pending.own_ids) >= _MAX_OWN_IDS:
                    pending.own_ids.clear()
                pending.own_ids[digest] = object_id
        self._ids[digest] = object_id
        return object_id

    def _link(self, job: Job, objects: Sequence[NewObject], plan: Plan) -> None:
        """Find out which ids these objects get, and which those have that they link to.

        Raise if a child is neither stored nor one of the objects before it.
        """
        places, supposed = self._places[id(plan)], plan.supposed
        ids, find = self._ids, self._find_id
        named: dict[bytes, int] = {}
        links: dict[int, list[int]] = {}
        for digest, _, _, children in objects:
            own = places[digest]
            below: list[int] = []
            for child in children:
                if child in named:
                    below.append(named[child])
                    continue
                child_id = ids[child] if child in ids else find(child)
                if child_id is None:
                    raise ObjectNotFoundError(child)
                if child_id >= own:
                    # Stored just now, by a job that was prepared apart. A child must be
                    # older than its parent, so the parent must find a new place.
                    raise StaleError(child.hex())
                below.append(child_id)
            if find(digest) is None:
                named[digest] = own
                links[own] = below
            elif supposed:
                # Nobody has looked whether all of it must be stored; the next time somebody will.
                raise StaleError(digest.hex())
            # Else somebody has stored it since this write was prepared. Theirs counts, because
            # objects may link to it already; ours stays behind unnamed.
        job.named, job.links = named, links

    def _touch(self, write: Write, hits: Sequence[bytes]) -> None:
        """Make what was put again as young as what is new: no row says yet that it counts."""
        # What another object of this write links to lives as long as that does.
        linked = {child for item in write.objects for child in item.children}
        for digest in hits:
            object_id = self._ids[digest]
            if (
                digest not in linked
                and object_id is not None
                and object_id < self._next_id
                and not self._recent.is_young(self._env, self._txn, object_id, self._now_ms)
            ):
                self._touched[object_id] = None

    def _unname(self, digest: bytes) -> None:
        object_id = self._find_id(digest)
        self._ids[digest] = None
        if self._named.pop(digest, None) is None and object_id is not None:
            self._unnamed.append((digest, object_id))

    def _first_free_id(self) -> int:
        """Ids start at 1 and go on after the last slab, which is never removed."""
        with self._txn.cursor(db=self._env.slabs) as cursor:
            return int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 1

    def finish(self) -> None:
        """Write what the batch amounts to: its slabs, their names, and its rows."""
        if self._rows:
            # Wherever they are laid: a collector asks by table and key.
            notes.note_rows(self._env, self._txn, self._puts(), self._now_ms)
        before = self.pending
        if self._rows or self._named or self._unnamed:
            self.pending = journal.append(
                self._env, self._txn, before, self._rows, self._named, self._unnamed
            )
        # A commit that lays the journal in place should not have to join slabs as well.
        self._write_slabs(before, busy=not self.pending.last)
        if self._touched:
            notes.touch(self._env, self._txn, self._touched, self._now_ms)

    def committed(self) -> None:
        """Remember what was touched, now that it is."""
        for object_id in self._touched:
            self._recent.remember(object_id, self._now_ms)

    def _puts(self) -> Iterator[tuple[str, bytes]]:
        """The places of the rows that come or change."""
        for place, value in self._rows.items():
            if value is not None:
                yield place

    def _write_slabs(self, before: Pending, *, busy: bool) -> None:
        """``before``: what the journal held when the transaction began."""
        children = self._children
        new: list[Fresh] = []
        next_id = self._next_id
        for draft, first_id in self._slabs:
            stop = first_id + len(draft.objects)
            if first_id not in children and children.keys().isdisjoint(range(first_id, stop)):
                continue  # all of its writes were refused
            if isinstance(draft, slabs.Uncut):
                new.append(Fresh(*slabs.lay_raw(draft.objects, first_id, children, self._now_ms)))
            else:
                sheet = slabs.lay_out(draft, first_id, children, self._now_ms)
                new.append(Fresh(*slabs.seal_draft(draft, sheet), sheet))
            next_id = stop
        self._tail.store(self._env, self._txn, new, busy=busy)
        if new:
            if self.pending is before:
                # What was named here was taken away again: nothing came into the journal.
                self.pending = before.copy()
            self.pending.next_id = next_id
