"""Writes on their way into the file: prepared together, then run as one transaction.

A batch is prepared outside the write lock (which objects are new, cut, compressed), then runs
as one transaction. What was looked up before counts inside it only if nobody has
committed in between; otherwise it is looked up again, because a collector may have removed
an object since. If so, the write is prepared again with that object included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.group import Batch
from casstore.engine.lmdb.index import PREFIX_BYTES, Index, Proven, index_key
from casstore.engine.lmdb.journal import Journal
from casstore.engine.lmdb.tail import Tail
from casstore.engine.lmdb.transaction import Job, Plan, Prepared, Transaction
from casstore.engine.lmdb.translation import translate
from casstore.engine.protocol import NewObject, WriteResult
from casstore.errors import CasstoreError, StorageError
from casstore.format.hashing import Kind

# One read transaction serves at most this many look-ups, so that none is open long:
# LMDB reuses no page that an open reader may still see.
READ_BATCH: Final = 512
_OF_ONE_PLACE: Final = frozenset((Kind.NODE, Kind.MANIFEST))
_NO_IDS: Final[dict[bytes, int | None]] = {}

WriteBatch = Batch[Job, WriteResult]


class Batches:
    """Prepares and runs what a ``CommitQueue`` has gathered."""

    def __init__(
        self,
        env: Environment,
        journal: Journal,
        compressor: Compressor,
        clock: Callable[[], int],
        committed: Callable[[], None],
    ) -> None:
        self._env = env
        self._journal = journal
        self._compressor = compressor
        self._clock = clock
        # Told after every transaction, inside the write lock.
        self._committed = committed
        self._touches = notes.RecentTouches()
        self._proven = Proven()
        self._tail = Tail(compressor)
        #: How long all objects were that were prepared so far.
        self.drafted_bytes = 0

    def look_up(self, unique: list[bytes]) -> tuple[int | None, dict[bytes, int | None]]:
        """What the index says of these digests, and as of which commit; None if of several."""
        commits: set[int] = set()
        ids: dict[bytes, int | None] = {}
        env = self._env
        proven = self._proven.ids
        for start in range(0, len(unique), READ_BATCH):
            likely: list[bytes] = []
            with env.reading_bytes() as txn:
                commit = txn.id()
                commits.add(commit)
                recent = self._journal.at(txn, commit).ids
                names = txn.cursor(db=env.index)
                seek = names.set_range
                for digest in unique[start : start + READ_BATCH]:
                    # Mostly nothing begins like it: every write of something new comes here.
                    if digest in recent:
                        ids[digest] = recent[digest]
                    elif digest in proven and names.set_key(index_key(digest, proven[digest])):
                        ids[digest] = proven[digest]
                    elif not seek(digest[:PREFIX_BYTES]) or (
                        names.key()[:PREFIX_BYTES] != digest[:PREFIX_BYTES]
                    ):
                        ids[digest] = None
                    else:
                        likely.append(digest)
            if likely:
                commits.add(self._compare(likely, ids))
        return commits.pop() if len(commits) == 1 else None, ids

    def _compare(self, likely: list[bytes], ids: dict[bytes, int | None]) -> int:
        """Look up digests that the index seems to know; as of which commit."""
        # In views: slabs may be long, and only a digest of each is wanted.
        with self._env.reading() as txn:
            commit = txn.id()
            recent = self._journal.at(txn, commit).ids
            find = Index(self._env, txn, proven=self._proven).find
            for digest in likely:
                ids[digest] = recent[digest] if digest in recent else find(digest)
            return commit

    def prepare(self, jobs: list[Job]) -> None:
        """Do for these jobs all that needs no write lock: find what is new, cut, compress."""
        wanted: dict[bytes, None] = {}
        for job in jobs:
            for item in job.write.objects:
                wanted[item.digest] = None
                for child in item.children:
                    wanted[child] = None
        commit, ids = self.look_up(list(wanted))
        together: list[NewObject] = []
        found: list[tuple[list[NewObject], list[bytes]]] = []
        taken: dict[bytes, Job] = {}
        for job in jobs:
            new: list[NewObject] = []
            hits: list[bytes] = []
            for item in job.write.objects:
                digest = item.digest
                if ids[digest] is not None:
                    hits.append(digest)
                elif digest not in taken:
                    taken[digest] = job
                    new.append(item)
                elif taken[digest] is not job:
                    # It comes with a job before this one: if that is refused, this one
                    # finds out inside the transaction and comes again.
                    hits.append(digest)
            found.append((new, hits))
            together.extend(new)
        size_bytes = sum([len(item[2]) for item in together])
        plan = Plan(commit, ids, self._draft(together, size_bytes))
        for job, (new, hits) in zip(jobs, found, strict=True):
            job.prepared = Prepared(new, hits, plan)

    def _suppose_new(self, jobs: list[Job]) -> bool:
        """Prepare writes of nodes and manifests without looking whether they are stored.

        They name their place in a session, so they hardly ever are, and the transaction looks
        anyway. False, and nothing has happened, if there are others among them.
        """
        objects: Sequence[NewObject] = jobs[0].write.objects
        if len(jobs) > 1:
            objects = [item for job in jobs for item in job.write.objects]
        digests = {item[0] for item in objects if item[1] in _OF_ONE_PLACE}
        if len(digests) != len(objects):
            return False
        size_bytes = 0
        for job in jobs:
            if job.again:
                return False
            size_bytes += job.size_bytes
        plan = Plan(None, _NO_IDS, self._draft(objects, size_bytes), supposed=True)
        for job in jobs:
            job.prepared = Prepared(job.write.objects, (), plan)
        return True

    def _draft(
        self, objects: Sequence[NewObject], size_bytes: int
    ) -> list[slabs.Draft | slabs.Uncut]:
        """Cut a batch of new objects into slabs and compress each, if that is not to wait."""
        self.drafted_bytes += size_bytes
        if not objects:
            return []
        if self._tail.will_join(size_bytes, len(objects)):
            return [slabs.Uncut(objects)]
        drafts: list[slabs.Draft | slabs.Uncut] = []
        group: list[NewObject] = []
        raw_bytes = 0
        for item in objects:
            length = len(item[2])
            if group and (
                raw_bytes + length > slabs.TARGET_RAW_BYTES or len(group) == slabs.MAX_OBJECTS
            ):
                drafts.append(slabs.draft(group, self._compressor.compress))
                group, raw_bytes = [], 0
            group.append(item)
            raw_bytes += length
        drafts.append(slabs.draft(group, self._compressor.compress))
        return drafts

    def run(self, batch: WriteBatch) -> None:
        """Answer a batch: one transaction for all, or one for each if that fails."""
        env = self._env
        unprepared = [ticket.work for ticket in batch.tickets if ticket.work.prepared is None]
        try:
            if unprepared and not self._suppose_new(unprepared):
                self.prepare(unprepared)
            with env.write_lock:
                env.gate.check()
                self.commit(batch)
        except CasstoreError as exc:
            if batch.answers is not None:
                # The commit is done and must not look failed. If the store is unusable now, the
                # next call finds out.
                return
            if isinstance(exc, StorageError) and len(batch.tickets) > 1:
                # One oversized write must not fail its neighbours.
                for ticket in batch.tickets:
                    ticket.work.prepared = None
                    self.run(WriteBatch([ticket]))
            else:
                batch.answers = [exc] * len(batch.tickets)

    def commit(self, batch: WriteBatch) -> None:
        """Run a batch as one transaction and answer it, or raise without having changed anything.

        An interrupt may come after any call. The transaction is LMDB's own context manager,
        which aborts it in every case but one: the commit has returned. Then the batch is
        answered before the interrupt goes on.
        """
        env = self._env
        try:
            with env.begin_write() as txn:
                commit = txn.id()
                transaction = Transaction(
                    env,
                    txn,
                    self._journal.at(txn, commit - 1),
                    self._clock(),
                    [ticket.work for ticket in batch.tickets],
                    self._touches,
                    self._tail,
                    self._proven,
                )
                answers = [self._apply(transaction, ticket.work) for ticket in batch.tickets]
                if transaction.changed:
                    transaction.finish()
                    try:
                        txn.commit()
                        batch.answers = answers
                    except lmdb.Error:
                        raise
                    except BaseException:
                        # py-lmdb raises nothing else: the commit is done, and this came after it.
                        batch.answers = answers
                        raise
                    finally:
                        if batch.answers is not None:
                            env.announce()
                else:
                    batch.answers = answers
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        if transaction.changed:
            self._journal.note(commit, transaction.pending)
            transaction.committed()
            env.cover()
        self._committed()

    @staticmethod
    def _apply(transaction: Transaction, job: Job) -> WriteResult | CasstoreError:
        try:
            transaction.check(job)
        except CasstoreError as exc:
            # Refused before anything was changed: the others of the batch go on.
            return exc
        return transaction.perform(job)
