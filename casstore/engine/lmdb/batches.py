"""Batches of writes: gathered from waiting writers, checked, and committed as one entry.

**Gathering** (``CommitQueue``). Writers that wait at the same time share one commit and one flush.
The first writer to arrive leads: it runs everything queued so far as one batch. Writers that
arrive meanwhile queue up and sleep. When the batch is done, the leader wakes its members, and
the first writer that is still waiting, which leads the next batch. The writers do all the work
themselves, so a single writer pays nothing for the queue.

An interrupt (Ctrl-C) may hit the leader anywhere. Three rules keep the other writers safe:

1. One assignment, ``TicketBatch.answers``, answers a whole batch. A batch is never half-answered.
2. The lead is a lock that is only ever taken by a ``with`` statement, so an interrupt cannot
   leave it held. Python handles signals after calls, not between them and the next operation.
3. A sleeping writer wakes at intervals. An interrupted leader may not have woken it.

**Checking** (``Transaction``). Every write is checked as a whole before any of it counts, so a
refused write changes nothing, and the next of the batch continues. A write sees the changes of the
writes before it in the batch. The result is one entry, for the log or straight for the tables.

**Committing** (``Batches``). A batch holds the log's lock from the first check to the commit, so no
lookup can become stale in between. Slow work happens elsewhere: callers hash objects before the
batch, and applying the log compresses them after it.
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
from casstore.engine.lmdb.lookup import PREFIX_BYTES, DigestIndex, Proven, find_row, index_key
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

# A batch is bounded so that no writer waits for the work of thousands.
MAX_BATCH: Final = 64
# How often a sleeping writer checks whether its leader was interrupted.
_RECHECK_S: Final = 0.05


class Ticket(Generic[Work, Result]):
    """One writer's place in the queue."""

    __slots__ = ("abandoned", "batch", "place", "wake", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        #: The batch that ran, or runs, this ticket last, and its place there.
        self.batch: TicketBatch[Work, Result] = _NO_BATCH
        self.place = 0
        #: The writer was interrupted and has left; no further batch should run its work.
        self.abandoned = False
        #: A follower sleeps by acquiring this lock, which is held from the start.
        self.wake: threading.Lock | None = None


class TicketBatch(Generic[Work, Result]):
    """Tickets that run together; assigning ``answers`` answers all of them at once."""

    __slots__ = ("answers", "tickets")

    def __init__(self, tickets: Sequence[Ticket[Work, Result]]) -> None:
        self.tickets = tickets
        #: One result or error for each ticket, in their order.
        self.answers: Sequence[Result | CasstoreError] | None = None
        for place, ticket in enumerate(tickets):
            # ``place`` first: a thread that sees the batch must see the ticket's place in it.
            ticket.place = place
            ticket.batch = self


# The batch of tickets that were in none yet. It is never answered.
_NO_BATCH: Final[TicketBatch[Any, Any]] = TicketBatch(())


class CommitQueue(Generic[Work, Result]):
    """Runs tickets in batches.

    ``run`` assigns the answers of its batch, or raises. If it raises without having assigned
    them, it has changed nothing, and the next leader runs the other tickets of the batch.
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
                # Even if the lead is free, an earlier writer of the queue is about to take it. A
                # writer that waited for the lead too would sleep through its answer.
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
                self._pass_on()
        except BaseException:
            # No call before the assignment: a second interrupt could come with it.
            ticket.abandoned = True
            self._pass_on()
            raise
        answers = ticket.batch.answers
        assert answers is not None
        answer = answers[ticket.place]
        if isinstance(answer, CasstoreError):
            raise answer
        return answer

    def _follow(self, ticket: Ticket[Work, Result], wake: threading.Lock) -> None:
        """Sleep until this ticket is answered, or has to lead."""
        while not wake.acquire(timeout=_RECHECK_S):
            if ticket.batch.answers is not None or not self._lead.locked():
                return

    def _pass_on(self) -> None:
        """Wake the writer that leads next, then those that were answered."""
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
        found: int | Unchanged | None = memtable.ids.get(digest, UNCHANGED)
        if digest in memtable.deleted:
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


# One read transaction serves at most this many look-ups, so that none is open long:
# LMDB reuses no page that an open reader may still see.
READ_BATCH: Final = 512

WriteBatch = TicketBatch[Job, WriteResult]
Answers = Sequence[WriteResult | CasstoreError]


class Batches:
    """Runs what a ``CommitQueue`` has gathered."""

    def __init__(
        self, env: Environment, clock: Callable[[], int], committed: Callable[[bool], None]
    ) -> None:
        self._env = env
        self._clock = clock
        # Called after every commit, inside the write lock.
        self._committed = committed
        self._touches = notes.RecentTouches()
        self._proven = Proven()
        #: The bytes of all objects that were stored so far.
        self.stored_bytes = 0

    def missing(self, unique: list[bytes]) -> list[bytes]:
        """Those of these digests that are not stored, in order."""
        env = self._env
        proven = self._proven.ids
        absent: list[bytes] = []
        for start in range(0, len(unique), READ_BATCH):
            with env.snapshot() as (txn, view):
                index = DigestIndex(env, txn, proven=self._proven)
                names = txn.cursor(db=env.index)
                for digest in unique[start : start + READ_BATCH]:
                    found = view.find_id(digest)
                    if isinstance(found, Unchanged):
                        known = proven.get(digest)
                        if known is not None and names.set_key(index_key(digest, known)):
                            continue
                        # The common case: a new object, and no digest in the index has its prefix.
                        if names.set_range(digest[:PREFIX_BYTES]) and (
                            names.key()[:PREFIX_BYTES] == digest[:PREFIX_BYTES]
                        ):
                            found = index.find(digest)
                        else:
                            found = None
                    if found is None:
                        absent.append(digest)
        return absent

    def run(self, batch: WriteBatch) -> None:
        """Answer a batch: one commit for all, or one for each if that fails."""
        try:
            with self._env.write_lock:
                self._env.gate.check()
                self.commit(batch)
        except CasstoreError as exc:
            if batch.answers is not None:
                # The commit is done and must not look failed. If the store is unusable now, the
                # next call finds out.
                return
            if isinstance(exc, StorageError) and len(batch.tickets) > 1:
                # A write that is too large must not fail the other writes of the batch.
                for ticket in batch.tickets:
                    self.run(WriteBatch([ticket]))
            else:
                batch.answers = [exc] * len(batch.tickets)

    def commit(self, batch: WriteBatch) -> None:
        """Run a batch as one commit and answer it, or raise without having changed anything."""
        env = self._env
        recent = env.recent
        lock = recent.lock_number
        try:
            try:
                recent.acquire(lock)
                # Before the tables are read: an entry that is applied meanwhile is in one of both.
                memtable = recent.memtable
                with env.reading_bytes() as txn:
                    transaction = Transaction(
                        env, txn, memtable, self._clock(), self._touches, self._proven
                    )
                    answers = [transaction.run(ticket.work) for ticket in batch.tickets]
                entry = transaction.entry()
                durable = any(ticket.work.durable for ticket in batch.tickets)
                if entry is not None:
                    env.require_present()
                    recent.commit(entry, batch, answers, durable=durable)
                elif durable:
                    # The answers may rely on commits that were not flushed, of any process.
                    recent.flush()
                batch.answers = answers
            finally:
                # A direct system call: an interrupt could hit a Python function around it.
                flock(lock, LOCK_UN)
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        if entry is not None:
            for object_id in entry.touched:
                self._touches.remember(object_id, entry.now_ms)
            self.stored_bytes += sum([ticket.work.size_bytes for ticket in batch.tickets])
        self._committed(durable)
