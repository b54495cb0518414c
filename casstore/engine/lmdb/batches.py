"""A batch of writes: looked up, checked and committed as one commit.

A batch holds the log's lock from the first check to the commit, so no lookup can become stale
in between. Slow work happens elsewhere: callers hash objects before the batch, and applying the
log compresses them after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fcntl import LOCK_UN, flock
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine.lmdb import notes
from casstore.engine.lmdb.group import TicketBatch
from casstore.engine.lmdb.index import PREFIX_BYTES, DigestIndex, Proven, index_key
from casstore.engine.lmdb.memtable import Unchanged
from casstore.engine.lmdb.transaction import Job, Transaction
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import WriteResult
from casstore.errors import CasstoreError, StorageError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

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
