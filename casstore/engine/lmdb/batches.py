"""Group commit: writes of several threads are queued, checked one by one, and committed together.

A *ticket* is one write in the queue, with the thread that waits for it (the writer). A *batch* is
the tickets that are committed together. An *entry* is what a batch changes: new objects, rows,
deleted names (``memtable.BatchEntry``).

**Queueing** (``CommitQueue``). Writers that wait at the same time share one commit and one flush.
The first of them is the *leader*: it runs all queued tickets as one batch. Writers that arrive
meanwhile queue up and sleep. When the batch is done, the leader wakes its members, and the first
writer that is still waiting, which leads the next batch. No other thread takes part, so a single
writer pays nothing for the queue.

An interrupt (Ctrl-C) may hit the leader anywhere. Three rules keep the other writers safe:

1. One assignment, to ``TicketBatch.answers``, answers a whole batch. No batch is half-answered.
2. The right to lead is a lock that is taken only by a ``with`` statement, so an interrupt cannot
   leave it held: Python handles signals after calls, and there is none between taking the lock and
   entering the statement.
3. A sleeping writer wakes at intervals, in case an interrupted leader did not wake it.

**Checking** (``BatchBuilder``). Every write is checked as a whole before any of its changes is
added to the entry. So a refused write changes nothing, and the others of the batch are unaffected.
A write sees the changes of the writes before it in the batch.

**Committing** (``Batches``). The leader holds the log's file lock from the first check to the
commit, so no other process can make a look-up stale in between. ``Recent.commit`` appends the entry
to the redo log and to the memtable (the commits of the log in memory), or writes a long one
straight to the tables. Slow work happens elsewhere: callers hash objects before the batch, and
applying the log later compresses them into slabs (several objects stored as one value).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import LOCK_UN, flock
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import lmdb

from casstore.engine import conditions
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import next_free_id
from casstore.engine.lmdb.environment import ReadTransaction
from casstore.engine.lmdb.lookup import DigestIndex, Proven, find_row
from casstore.engine.lmdb.memtable import (
    UNCHANGED,
    BatchEntry,
    Links,
    Memtable,
    Name,
    RowVersion,
    Unchanged,
)
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import NewObject, PutRow, Write, WriteResult
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError, StorageError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment


Work = TypeVar("Work")
Result = TypeVar("Result")

# The most tickets in a batch, so that no writer waits for the work of thousands.
MAX_BATCH: Final = 64
# The interval at which a sleeping writer checks whether the leader was interrupted.
_RECHECK_S: Final = 0.05


class Ticket(Generic[Work, Result]):
    """The work of one writer, in the queue or in a batch."""

    __slots__ = ("abandoned", "batch", "position", "wake", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        #: The last batch that this ticket was put into, and its position there.
        self.batch: TicketBatch[Work, Result] = _NO_BATCH
        self.position = 0
        #: The writer was interrupted and has left; no further batch should run its work.
        self.abandoned = False
        #: A writer that does not lead sleeps by acquiring this lock, which is held from the start;
        #: to wake it is to release the lock. None: the writer leads without sleeping first.
        self.wake: threading.Lock | None = None


class TicketBatch(Generic[Work, Result]):
    """Tickets that run together; assigning ``answers`` answers all of them at once."""

    __slots__ = ("answers", "tickets")

    def __init__(self, tickets: Sequence[Ticket[Work, Result]]) -> None:
        self.tickets = tickets
        #: One result or error for each ticket, in their order; None: the batch has not run yet.
        self.answers: Sequence[Result | CasstoreError] | None = None
        for position, ticket in enumerate(tickets):
            # ``position`` first: a thread that sees the ticket's batch uses its position there.
            ticket.position = position
            ticket.batch = self


# Stands for the batch of tickets that were not put into one yet. It is never answered.
_NO_BATCH: Final[TicketBatch[Any, Any]] = TicketBatch(())


class CommitQueue(Generic[Work, Result]):
    """Runs tickets in batches; ``submit`` is the entry point.

    ``run``, given to the constructor, assigns the answers of its batch, or raises. If it raises,
    every ticket without an answer has changed nothing: the leader gets the error, and the next
    leader runs those tickets again.
    """

    def __init__(self, run: Callable[[TicketBatch[Work, Result]], None]) -> None:
        self._run = run
        self._lead = threading.Lock()
        # Guards the queue. Tickets leave it only once they are answered or abandoned, so an
        # interrupted leader loses none.
        self._lock = threading.Lock()
        self._waiting: list[Ticket[Work, Result]] = []

    def submit(self, work: Work) -> Result:
        """Run ``work`` in some batch; return its own result or raise its own error."""
        ticket: Ticket[Work, Result] = Ticket(work)
        try:
            with self._lock:
                # Sleep if another writer leads, or a writer that is queued already is about to. If
                # this writer waited for the lead instead, no answer could wake it.
                if self._waiting or self._lead.locked():
                    ticket.wake = threading.Lock()
                    ticket.wake.acquire()
                self._waiting.append(ticket)
            if ticket.wake is not None:
                self._follow(ticket, ticket.wake)
            if ticket.batch.answers is None:
                with self._lead:
                    while ticket.batch.answers is None:
                        with self._lock:
                            unfinished = [
                                each
                                for each in self._waiting
                                if each.batch.answers is None and not each.abandoned
                            ]
                            batch = TicketBatch(unfinished[:MAX_BATCH])
                        self._run(batch)
                        if batch.answers is not None:
                            # Tickets and batch refer to each other. Without this, the objects of a
                            # write would stay in memory until Python's cyclic garbage collector
                            # runs.
                            batch.tickets = ()
                self._pass_on()
        except BaseException:
            # Nothing is called before this assignment: a second interrupt could come after a call.
            ticket.abandoned = True
            self._pass_on()
            raise
        answers = ticket.batch.answers
        assert answers is not None
        answer = answers[ticket.position]
        if isinstance(answer, CasstoreError):
            raise answer
        return answer

    def _follow(self, ticket: Ticket[Work, Result], wake: threading.Lock) -> None:
        """Sleep until this ticket is answered, or its writer should lead."""
        while not wake.acquire(timeout=_RECHECK_S):
            if ticket.batch.answers is not None or not self._lead.locked():
                return

    def _pass_on(self) -> None:
        """Drop answered and abandoned tickets from the queue; wake the next leader and the answered
        writers.
        """
        with self._lock:
            waiting: list[Ticket[Work, Result]] = []
            wakes: list[Ticket[Work, Result]] = []
            for ticket in self._waiting:
                if ticket.batch.answers is None and not ticket.abandoned:
                    waiting.append(ticket)
                elif ticket.wake:
                    wakes.append(ticket)
            self._waiting = waiting
            if waiting and waiting[0].wake:
                wakes.insert(0, waiting[0])
        # Outside the lock, which the woken writers need at once.
        for ticket in wakes:
            assert ticket.wake is not None
            with suppress(RuntimeError):  # another thread has woken it
                ticket.wake.release()


class Job(NamedTuple):
    """The work of a ticket: a validated write."""

    write: Write
    #: True if the write must be flushed to the disk before it is answered.
    durable: bool


class _Sorted(NamedTuple):
    """The objects of one write: those that are new, and the digests of those that are stored."""

    new: list[NewObject]
    #: The ids that each new object links to.
    links: list[Links]
    #: The ids that the new objects get.
    ids: dict[bytes, int]
    hits: list[bytes]


class BatchBuilder:
    """Checks the writes of a batch one after the other, and collects their changes in an entry.

    ``txn`` and ``memtable`` together are the store's present state. The caller holds the log's file
    lock, so no other writer changes it.
    """

    def __init__(
        self,
        env: Environment,
        txn: lmdb.Transaction[bytes],
        memtable: Memtable,
        now_ms: int,
        touches: notes.RecentTouches,
        proven: Proven,
    ) -> None:
        self._env = env
        self._txn = txn
        self._now_ms = now_ms
        self._touches = touches
        self._memtable = memtable
        self._proven = proven
        self._index: DigestIndex | None = None
        self._first_id = memtable.next_id or next_free_id(txn, env)
        # The rows that the batch changes; None: deleted.
        self._rows: dict[tuple[str, bytes], bytes | None] = {}
        # The ids of digests, looked up or given to new objects; None: not stored, or deleted.
        self._ids: dict[bytes, int | None] = {}
        # The new objects, which get consecutive ids, and the ids that each links to.
        self._objects: list[NewObject] = []
        self._links: list[Links] = []
        # True if a write of the batch deletes objects.
        self._deletes = False
        # The names to delete from the index.
        self._unnamed: list[Name] = []
        # The ids of objects whose grace period restarts; a dict, to keep their order.
        self._touched: dict[int, None] = {}

    def run(self, job: Job) -> WriteResult | CasstoreError:
        """Check a write and add its changes; or change nothing and return the error."""
        write = job.write
        try:
            if write.conditions:
                conditions.require(write.conditions, self._find_row, self._has_object, self._now_ms)
            new, links, ids, hits = self._sort_objects(write.objects)
            # All that can fail comes first: looking up what to delete, and what to touch.
            if write.deletes:
                self._look_up(write.deletes)
            # A write with rows may make its objects reachable; one without rows has only their
            # grace period to protect them.
            touched = self._to_touch(write, hits) if hits and not write.rows else ()
        except CasstoreError as exc:
            # Nothing was added yet, so the other writes of the batch are unaffected.
            return exc
        self._objects += new
        self._links += links
        self._ids.update(ids)
        for change in write.rows:
            if isinstance(change, PutRow):
                value = conditions.stamped(change, self._now_ms) if change.stamps else change.value
                self._rows[change.table, change.key] = value
            else:
                self._rows[change.table, change.key] = None
        for digest in write.deletes:
            self._deletes = True
            self._unname(digest)
        self._touched.update(dict.fromkeys(touched))
        return WriteResult(self._now_ms, len(new))

    def entry(self) -> BatchEntry | None:
        """All changes of the batch; None if it changes nothing."""
        if not (self._objects or self._rows or self._unnamed or self._touched):
            return None
        ids, links = self._ids, self._links
        if self._deletes:
            # An object that was stored and deleted within the batch keeps its id and bytes, but has
            # no name: None in place of its links says so (``memtable.Links``).
            for position, item in enumerate(self._objects):
                if ids[item.digest] != self._first_id + position:
                    links[position] = None
        rows: list[RowVersion] = [(*row_key, value) for row_key, value in self._rows.items()]
        return BatchEntry(
            self._now_ms, self._first_id, self._objects, links, rows, self._unnamed,
            list(self._touched),
        )  # fmt: skip

    # --- looking up ---------------------------------------------------------------------------

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        row_key = table, key
        if row_key in self._rows:
            return self._rows[row_key]
        versions = self._memtable.rows.get(row_key)
        if versions is not None:
            return versions[-1][1]
        stored = find_row(self._txn.cursor(self._env.tables[table]), table, key)
        return None if isinstance(stored, tuple) else stored

    def _has_object(self, digest: bytes) -> bool:
        return self._look_up((digest,))[digest] is not None

    def _look_up(self, digests: Sequence[bytes]) -> dict[bytes, int | None]:
        """All known ids by digest, those of ``digests`` included; None: not stored, or deleted."""
        ids, memtable = self._ids, self._memtable
        in_index: list[bytes] = []
        for digest in digests:
            if digest in ids:
                continue
            found: int | Unchanged | None = memtable.ids.get(digest, UNCHANGED)
            if digest in memtable.deleted:
                found = memtable.newest_id(digest)
            if isinstance(found, Unchanged):
                found = memtable.applied_ids.get(digest)
                if found is None:
                    in_index.append(digest)
                    continue
            ids[digest] = found
        if in_index:
            if self._index is None:
                self._index = DigestIndex(self._env, self._txn)
            ids.update(zip(in_index, self._index.find_many(in_index, self._proven), strict=True))
        return ids

    def _sort_objects(self, objects: Sequence[NewObject]) -> _Sorted:
        """Look up the objects of a write and what they link to.

        ObjectNotFoundError if a child is neither stored nor earlier in ``objects``.
        """
        next_id = self._first_id + len(self._objects)
        own_ids: dict[bytes, int] = {}
        new: list[NewObject] = []
        new_links: list[Links] = []
        hits: list[bytes] = []
        if not objects:
            return _Sorted(new, new_links, own_ids, hits)
        ids = self._look_up([item[0] for item in objects])
        # Only of new objects: what a stored one links to is stored.
        links_to = [item[3] for item in objects if item[3] and ids[item[0]] is None]
        if links_to:
            ids = self._look_up([child for children in links_to for child in children])
        for item in objects:
            digest = item[0]
            if digest in own_ids or ids[digest] is not None:
                hits.append(digest)
                continue
            links: list[int] = []
            for child in item[3]:
                child_id = own_ids[child] if child in own_ids else ids[child]
                if child_id is None:
                    raise ObjectNotFoundError(child)
                links.append(child_id)
            own_ids[digest] = next_id + len(new)
            new.append(item)
            new_links.append(links)
        return _Sorted(new, new_links, own_ids, hits)

    # --- changing -----------------------------------------------------------------------------

    def _unname(self, digest: bytes) -> None:
        """Delete an object's name, so that it can no longer be found."""
        object_id = self._look_up((digest,))[digest]
        if object_id is None:
            return
        self._ids[digest] = None
        if object_id < self._first_id:
            self._unnamed.append((digest, object_id))

    def _to_touch(self, write: Write, hits: Sequence[bytes]) -> list[int]:
        """The ids of objects whose grace period restarts, because ``write`` puts them again.

        ``hits`` are the digests of ``write`` that are stored already.
        """
        # Not of objects that another object of this write links to: they live as long as that one.
        linked = {child for item in write.objects for child in item.children}
        return [
            object_id
            for digest in hits
            if digest not in linked
            # None: it is stored twice in this write, and new.
            and (object_id := self._ids.get(digest)) is not None
            and object_id < self._first_id
            and not self._touches.is_young(object_id, self._now_ms, self._stored_at_ms)
        ]

    def _stored_at_ms(self, object_id: int) -> int:
        """When an object was stored, in milliseconds since 1970."""
        stored_at_ms = self._memtable.view().stored_at_ms(object_id)
        if stored_at_ms is not None:
            return stored_at_ms
        cursor = self._txn.cursor(self._env.slabs)
        if not cursor.set_range(slabs.slab_key(object_id)):
            raise CorruptionError(f"no slab of {self._env.path} holds object {object_id}")
        return slabs.stored_at_ms(cursor.value())


# One read transaction serves at most this many look-ups, so that none is open long: LMDB does not
# reuse freed pages that an open read transaction may still read.
READ_BATCH: Final = 512

WriteBatch = TicketBatch[Job, WriteResult]
Answers = Sequence[WriteResult | CasstoreError]


class Batches:
    """Runs the batches of a ``CommitQueue``: ``run`` is its callback."""

    def __init__(
        self, env: Environment, clock: Callable[[], int], committed: Callable[[bool], None]
    ) -> None:
        self._env = env
        self._clock = clock
        # Called after every batch, inside the write lock; True: a write of the batch is durable.
        self._committed = committed
        self._touches = notes.RecentTouches()
        self._proven = Proven()

    def missing(self, unique: list[bytes]) -> list[bytes]:
        """Those of the digests ``unique`` that are not stored, in order."""
        env = self._env
        absent: list[bytes] = []
        for start in range(0, len(unique), READ_BATCH):
            part = unique[start : start + READ_BATCH]
            with env.snapshot() as (txn, view):
                found = {digest: view.find_id(digest) for digest in part}
                rest = [digest for digest, known in found.items() if isinstance(known, Unchanged)]
                index = DigestIndex(env, txn)
                found.update(zip(rest, index.find_many(rest, self._proven), strict=True))
            absent += [digest for digest in part if found[digest] is None]
        return absent

    def run(self, batch: WriteBatch) -> None:
        """Answer a batch: with one commit for all its tickets or, if that fails, one for each."""
        try:
            with self._env.write_lock:
                self._env.gate.check()
                self.commit(batch)
        except CasstoreError as exc:
            if batch.answers is not None:
                # The batch is committed, so its writers must not get this error. If the store is
                # unusable now, the next call raises it again.
                return
            if isinstance(exc, StorageError) and len(batch.tickets) > 1:
                # A write that is too large must not fail the other writes of the batch.
                for ticket in batch.tickets:
                    alone = WriteBatch([ticket])
                    self.run(alone)
                    alone.tickets = ()
            else:
                batch.answers = [exc] * len(batch.tickets)

    def commit(self, batch: WriteBatch) -> None:
        """Run a batch as one commit and answer it, or raise without having changed anything."""
        env = self._env
        recent = env.recent
        assert recent.lock is not None
        lock = recent.lock.fileno()
        durable = any(ticket.work.durable for ticket in batch.tickets)
        try:
            try:
                recent.acquire(lock)
                # Before the read transaction begins: an entry that is applied in between is in the
                # memtable as well as in the tables. The other way round it could be in neither.
                memtable = recent.memtable
                with ReadTransaction(env, buffers=False) as txn:
                    builder = BatchBuilder(
                        env, txn, memtable, self._clock(), self._touches, self._proven
                    )
                    answers = [builder.run(ticket.work) for ticket in batch.tickets]
                entry = builder.entry()
                if entry is not None:
                    env.require_present()
                    recent.commit(entry, batch, answers, durable=durable)
                elif durable:
                    # The answers may rely on earlier commits, of any process, that are not flushed
                    # yet: an object that is stored already, a row that a condition requires.
                    recent.flush()
                batch.answers = answers
            finally:
                # The system call itself: an interrupt in a Python function around it could leave
                # the lock held.
                flock(lock, LOCK_UN)
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        finally:
            if batch.answers is not None:
                # Also after an interrupt: the other writers of the batch have their answers.
                self._committed(durable)
        if entry is not None:
            for object_id in entry.touched:
                self._touches.remember(object_id, entry.now_ms)
