"""The engine protocol on LMDB.

    index         the first bytes of a digest ‖ id (see ``index``)
    slabs         last id → slab (see ``slab``)
    dictionaries  number → trained zstd dictionary
    meta          family, format, creation time, current dictionary
    journal       the last names and row changes, until they are laid in place (see ``journal``)
    …             one database for each table of rows

A write joins a batch (``group``), which is prepared and run as one transaction (``batches``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine import conditions
from casstore.engine.clock import wall_clock_ms
from casstore.engine.compression import Compressor
from casstore.engine.files import importing
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.batches import READ_BATCH, Batches
from casstore.engine.lmdb.cache import SlabCache
from casstore.engine.lmdb.dictionaries import (
    FIRST_TRIAL_BYTES,
    MIN_GAIN,
    SAMPLE_BYTES,
    SAMPLE_MAX_OBJECT_BYTES,
    TRIAL_GROWTH,
    DictionaryReport,
    DictionaryShelf,
    try_dictionary,
)
from casstore.engine.lmdb.directory import ANY, DURABILITIES, FULL, PROCESS, RELAXED
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.group import CommitQueue
from casstore.engine.lmdb.index import Index
from casstore.engine.lmdb.journal import Journal, Pending, merge
from casstore.engine.lmdb.keeping import Wake
from casstore.engine.lmdb.reader import SlabReader
from casstore.engine.lmdb.reserve import Reserve
from casstore.engine.lmdb.rows import open_row, seek_first, seek_last
from casstore.engine.lmdb.transaction import Job, StaleError
from casstore.engine.lmdb.verification import verify_content
from casstore.engine.protocol import (
    COLD_AGE_MS,
    DeleteRow,
    ObjectInfo,
    Row,
    RowKey,
    StoredObject,
    Watch,
    Write,
    WriteResult,
)
from casstore.errors import (
    BusyError,
    CasstoreError,
    ClosedError,
    CorruptionError,
    InvalidInputError,
    StorageError,
    StorageFullError,
)

if TYPE_CHECKING:
    from casstore.engine.faults import Examination, Fault, Structure, Told
    from casstore.engine.lmdb.background import BackgroundPacker
    from casstore.engine.lmdb.collection import Collection
    from casstore.engine.lmdb.packing import Scope
    from casstore.engine.protocol import (
        EngineSpace,
        HotCopyReport,
        IndexReport,
        PackReport,
        Roots,
    )

DEFAULT_CACHE_BYTES: Final = 32 << 20

# How often a write is prepared anew because a collector removed what it relied on.
_MAX_ATTEMPTS: Final = 16
# Now and then a writer clears the slots of killed readers, which stop pages from being
# reused, and learns of dictionaries that other processes have trained.
_HOUSEKEEPING_COMMITS: Final = 1024
_SYNC_INTERVAL_S: Final = 1.0
# How long commits gather before a state is kept behind them: the most that a power loss undoes,
# but for the time of two flushes.
_GATHER_S: Final = 0.005
# A write this long is prepared by its own thread, beside others. A shorter one is left to
# the leader of its batch: py-lmdb and zstandard give the interpreter away in every call,
# and with many writers each such call is a fight for it that costs more than the work.
_LONG_WRITE_BYTES: Final = 64 << 10


def _reclaims(write: Write) -> bool:
    """Does this write only delete rows and change some? Then it may use the reserved space."""
    return not write.objects and any(isinstance(change, DeleteRow) for change in write.rows)


class LmdbEngine:
    """Objects and rows in one LMDB environment, for many threads and processes."""

    def __init__(
        self,
        path: str,
        *,
        durability: str = FULL,
        readonly: bool = False,
        create: bool = True,
        verify: bool = False,
        map_bytes: int | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        lmdb_version: int | None = None,
        auto_train: bool = True,
        auto_pack: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        if durability not in (*DURABILITIES, ANY):
            raise InvalidInputError(
                f"no durability {durability!r}; there are {', '.join(DURABILITIES)}, and {ANY} for "
                "what others use who have the store open"
            )
        self._clock = clock or wall_clock_ms
        self._env = Environment(
            path,
            durability=durability,
            readonly=readonly,
            create=create,
            verify=verify,
            map_bytes=map_bytes,
            lmdb_version=lmdb_version,
            prove=verify_content,
        )
        self._journal = Journal(self._env)
        self._cache = SlabCache(cache_bytes)
        self._commits = 0
        self._pid = os.getpid()
        self._stop_syncing = False
        self._wake_sync = Wake()
        self._sync_failure: CasstoreError | None = None
        # How much was stored when a dictionary was last tried, and after how much more one is next.
        self._auto_train = auto_train
        self._tried_at_bytes = 0
        self._try_after_bytes = FIRST_TRIAL_BYTES
        self._training: threading.Thread | None = None
        self._shelf = DictionaryShelf(self._env)
        self._compressor = Compressor(self._shelf.load)
        self._batches = Batches(
            self._env, self._journal, self._compressor, self._clock, self._committed
        )
        self._queue: CommitQueue[Job, WriteResult] = CommitQueue(self._batches.run)
        try:
            self._compressor.use(self._shelf.newest())
        except BaseException:
            self._env.close()
            raise
        self._reserve = Reserve(path, self._env.place)
        if not readonly:
            self._reserve.allocate(self._env.file_bytes())
        #: The thread that packs now and then, if this engine was opened with one.
        self.packer: BackgroundPacker | None = None
        if not readonly:
            try:
                self._start_threads(auto_pack=auto_pack)
            except RuntimeError as exc:
                self.close()
                raise StorageError(f"{path} cannot be kept open: {exc}") from exc

    def _start_threads(self, *, auto_pack: bool) -> None:
        """Have done what is to be done behind the writers; RuntimeError if no thread can start."""
        behind = {PROCESS: self._sync_now_and_then, RELAXED: self._keep_behind}
        if self._env.durability in behind:
            threading.Thread(
                target=behind[self._env.durability], name="casstore-sync", daemon=True
            ).start()
        if auto_pack:
            with importing():
                from casstore.engine.lmdb.background import BackgroundPacker

            self.packer = BackgroundPacker(
                lambda progress: self.pack(progress, min_age_ms=COLD_AGE_MS), self._count_slabs
            )

    @property
    def path(self) -> str:
        """The store's directory."""
        return self._env.path

    @property
    def durability(self) -> str:
        """What a returned write survives: ``full``, ``relaxed`` or ``process``."""
        return self._env.durability

    @property
    def readonly(self) -> bool:
        """Does this engine refuse writes?"""
        return self._env.readonly

    # --- reading objects -----------------------------------------------------------------

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        self._env.gate.check()
        conditions.check_digests(digests)
        unique = list(dict.fromkeys(digests))
        _, ids = self._batches.look_up(unique)
        # In the order asked for: what the index seems to know was looked up last.
        return [digest for digest in unique if ids[digest] is None]

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        conditions.check_digests((first, last))
        with self._env.reading() as txn:
            recent = self._journal.at(txn, txn.id()).ids
            found = [name for name, own in recent.items() if own and first <= name <= last]
            laid = Index(self._env, txn).between(first, last)
            found += islice((name for name, _ in laid if name not in recent), limit)
        return sorted(found)[:limit]

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order asked for; None where there is none."""
        self._env.gate.check()
        conditions.check_digests(digests)
        if len(digests) == 1:
            return [self._get_one(digests[0])]
        found: list[StoredObject | None] = []
        for start in range(0, len(digests), READ_BATCH):
            with self._env.reading() as txn:
                reader = self._reader(txn)
                read, read_next = reader.object, reader.next
                recent = self._journal.at(txn, txn.id()).ids
                index = Index(self._env, txn, reader.digest)
                find, has_row = index.find, index.has_row
                for digest in digests[start : start + READ_BATCH]:
                    # As Pending.find_id does; spelled out because every read comes through here.
                    if digest in recent:
                        object_id = recent[digest]
                    else:
                        item = read_next(digest, has_row)
                        if item is not None:
                            found.append(item)
                            continue
                        object_id = find(digest)
                    found.append(None if object_id is None else read(object_id))
        return found

    def _get_one(self, digest: bytes) -> StoredObject | None:
        with self._env.reading() as txn:
            reader = self._reader(txn)
            recent = self._journal.at(txn, txn.id()).ids
            object_id = (
                recent[digest]
                if digest in recent
                else Index(self._env, txn, reader.digest).find(digest)
            )
            return None if object_id is None else reader.object(object_id)

    def _reader(self, txn: lmdb.Transaction[memoryview]) -> SlabReader:
        return SlabReader(txn.cursor(db=self._env.slabs), self._cache, self._compressor)

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """Objects with an id lower than ``before``, highest first; about ``limit`` of them."""
        if limit < 1:
            raise InvalidInputError(f"a limit of {limit}; at least 1")
        infos: list[ObjectInfo] = []
        with self._env.reading() as txn:
            cursor = txn.cursor(db=self._env.slabs)
            pending = self._journal.at(txn, txn.id())
            # The slab that holds the id wanted last is the first that ends at or above it.
            inside = before is not None and before <= slabs.MAX_ID
            more = inside and cursor.set_range(slabs.slab_key(max(before or 0, 0)))
            more = more or cursor.last()
            while more and len(infos) < limit:
                directory = slabs.read_directory(cursor.key(), cursor.value())
                infos.extend(self._live_objects(txn, pending, directory, before))
                more = cursor.prev()
        return infos

    def _live_objects(
        self,
        txn: lmdb.Transaction[memoryview],
        pending: Pending,
        directory: slabs.Directory,
        before: int | None,
    ) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            object_id = directory.first_id + position
            digest = directory.digest(position)
            if not pending.is_named(txn, self._env, digest, object_id):
                continue
            if before is not None and object_id >= before:
                continue
            kind = directory.kinds[position] & ~slabs.KEEPS_LINKS
            links = directory.child_counts[position]
            size_bytes = directory.lengths[position]
            if not directory.kinds[position] & slabs.KEEPS_LINKS:
                size_bytes += links * len(digest)
            children = directory.children(position, child_at)
            infos.append(
                ObjectInfo(object_id, digest, kind, size_bytes, children, directory.stored_at_ms)
            )
        return infos

    # --- reading rows ----------------------------------------------------------------------

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Rows of one moment, in the order asked for; None where there is none."""
        for table, key in keys:
            conditions.check_key(table, key)
        env = self._env
        with env.reading_bytes() as txn:
            find = self._journal.at(txn, txn.id()).find_row
            return [find(txn, env, table, key, likely=True) for table, key in keys]

    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        """At most ``limit`` rows with ``start <= key < stop``, in key order or its reverse."""
        conditions.check_table(table)
        if limit < 1:
            raise InvalidInputError(f"a limit of {limit}; at least 1")
        with self._env.reading() as txn:
            pending = self._journal.at(txn, txn.id())
            stored = self._stored_rows(txn, table, start, stop, reverse=reverse)
            changed = pending.changed_between(table, start, stop, reverse=reverse)
            rows = merge(stored, changed, reverse=reverse) if changed else stored
            return [Row(*row) for row in islice(rows, limit)]

    def _stored_rows(
        self,
        txn: lmdb.Transaction[memoryview],
        table: str,
        start: bytes,
        stop: bytes | None,
        *,
        reverse: bool,
    ) -> Iterator[tuple[bytes, bytes]]:
        cursor = txn.cursor(db=self._env.tables[table])
        more = seek_last(cursor, stop) if reverse else seek_first(cursor, start)
        while more:
            key = bytes(cursor.key())
            if key < start if reverse else stop is not None and key >= stop:
                return
            yield key, open_row(table, key, cursor.value())
            more = cursor.prev() if reverse else cursor.next()

    def now_ms(self) -> int:
        """The engine's clock, in milliseconds since 1970."""
        self._env.gate.check()
        return self._clock()

    # --- writing ------------------------------------------------------------------------------

    def write(self, write: Write) -> WriteResult:
        """Run one write, wholly or not at all; when it returns it is as durable as promised."""
        self._env.gate.check()
        self._env.require_writable()
        if self._sync_failure is not None:
            failure, self._sync_failure = self._sync_failure, None
            raise failure
        job = Job(write, conditions.validate(write))
        if self._reserve.is_released and not _reclaims(write):
            self._reserve.require_free()
        if job.size_bytes >= _LONG_WRITE_BYTES:
            self._batches.prepare([job])
        try:
            return self._submit(job)
        except StorageFullError:
            if not (self._reserve.may_use or _reclaims(write)):
                raise
            with self._reserve.reclaiming():
                self._reserve.release()
                return self._submit(Job(write, job.size_bytes, again=True))

    def _submit(self, job: Job) -> WriteResult:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._queue.submit(job)
            except StaleError:
                job = Job(job.write, job.size_bytes, again=True)
        raise BusyError(f"a collector kept removing what a write to {self.path} relies on")

    def _committed(self) -> None:
        """See to what is due now and then; called after every transaction of ours."""
        self._commits += 1
        if self._env.covered_bytes > self._reserve.enough_for_bytes:
            self._reserve.allocate(self._env.covered_bytes)
        if self._commits % _HOUSEKEEPING_COMMITS == 0:
            self._keep_house()
        untried_bytes = self._batches.drafted_bytes - self._tried_at_bytes
        if self._auto_train and untried_bytes >= self._try_after_bytes:
            self._train_aside()

    def _keep_house(self) -> None:
        try:
            self._env.handle.reader_check()
            self._compressor.use(self._shelf.newest())
        except (lmdb.Error, CasstoreError):
            # The commit before it is done and must not look failed. Slots of killed
            # readers stay for another round, which costs pages, not data; a dictionary
            # that cannot be read is reported by the first read that needs it.
            return

    def _train_aside(self) -> None:
        """Try a dictionary in a thread of its own, rarely: nobody waits for it."""
        self._tried_at_bytes = self._batches.drafted_bytes
        self._try_after_bytes *= TRIAL_GROWTH
        if self._training is None or not self._training.is_alive():
            training = threading.Thread(
                target=self._train_quietly, name="casstore-train", daemon=True
            )
            try:
                training.start()
            except RuntimeError:
                # The system gives no more threads, or the interpreter is about to end. The commit
                # before it is done and must not look failed; nothing is lost without a dictionary.
                return
            self._training = training

    def _train_quietly(self) -> None:
        try:
            if not self.train_dictionary().before_bytes:
                # Too little to learn from so far: most of it was long. Try again soon.
                self._try_after_bytes = FIRST_TRIAL_BYTES
        except CasstoreError:
            # Closed meanwhile, out of space, damaged: nothing is lost without a dictionary,
            # and whoever reads or writes next is told what is wrong.
            return

    def used_bytes(self) -> int:
        """The pages that objects, rows and indexes take; the file is longer by its free ones."""
        env = self._env
        with env.reading() as txn:
            stats = [txn.stat(database) for database in env.databases.values()]
        return sum(
            stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
            for stat in stats
        )

    def watch(self) -> Watch:
        """A watch that tells when anybody, in any process, may have written to the store."""
        with importing():
            from casstore.engine.lmdb.watching import open_watch

        return open_watch(self._env)

    def flush(self) -> None:
        """Make everything acknowledged so far survive a power loss."""
        self._env.flush()

    def _sync_now_and_then(self) -> None:
        while not self._wake_sync.wait(_SYNC_INTERVAL_S):
            try:
                self._env.flush()
            except ClosedError:
                return
            except CasstoreError as exc:
                # Nobody waits for this flush; the next writer is told.
                self._sync_failure = exc

    def _keep_behind(self) -> None:
        """Keep a state soon after every commit, of this process or another: ``relaxed``.

        Of another's, because the reader that stands on the state before keeps its pages from
        being used again.
        """
        keeper = self._env.keeper
        assert keeper is not None
        while not self._stop_syncing:
            keeper.unkept.wait(_SYNC_INTERVAL_S)
            time.sleep(_GATHER_S)
            if self._stop_syncing:
                return
            try:
                keeper.keep()
            except ClosedError:
                return
            except CasstoreError as exc:
                self._sync_failure = exc

    def close(self) -> None:
        """Let go of all resources. Closing twice is allowed; every other call then fails."""
        if os.getpid() != self._pid:
            # A forked child has let go already, and has none of the threads. One of them may
            # have held a lock at that moment, which nobody will ever release here.
            return
        self._stop_syncing = True
        self._wake_sync.set()
        if self._env.keeper is not None:
            self._env.keeper.unkept.set()
        if self.packer is not None:
            self.packer.stop()
        training = self._training
        if training is not None and training is not threading.current_thread():
            training.join()
        self._env.close()
        self._cache.clear()

    # --- packing ----------------------------------------------------------------------------------

    def pack(
        self, progress: Callable[[PackReport], None] | None = None, *, min_age_ms: int = 0
    ) -> PackReport:
        """Join slabs older than ``min_age_ms`` into large ones, in short steps beside writers."""
        with importing():
            from casstore.engine.lmdb.packing import pack

        cold_before_ms = self._clock() - min_age_ms if min_age_ms else None
        with self.reclaiming():
            return pack(
                self._env,
                self._compressor,
                cold_before_ms=cold_before_ms,
                prepare=self._adopt_cold_dictionary,
                progress=progress,
            )

    def reclaiming(self) -> AbstractContextManager[None]:
        """Let this thread use the disk space that is reserved for reclaiming space."""
        return self._reserve.reclaiming()

    def _adopt_cold_dictionary(self, scope: Scope) -> None:
        with importing():
            from casstore.engine.lmdb.cold_dictionary import try_cold_dictionary

        try:
            trial = try_cold_dictionary(self._env, self._compressor, scope.packed_to, scope.newest)
        except CorruptionError:
            # Packing itself meets the damage next, and reports where it is.
            return
        if trial is not None:
            self._compressor.use(self._shelf.add(trial.dictionary), trial.dictionary)

    def _count_slabs(self) -> int:
        with self._env.reading() as txn:
            return txn.stat(self._env.slabs)["entries"]

    # --- measuring --------------------------------------------------------------------------------

    def measure_space(self, progress: Callable[[int, int], None] | None = None) -> EngineSpace:
        """What the file's pages are used for; ``progress`` is told rows done, of how many."""
        with importing():
            from casstore.engine.lmdb.measuring import measure

        return measure(self._env, progress)

    # --- collecting -------------------------------------------------------------------------------

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A collection that keeps what roots reach and what was put within the grace."""
        with importing():
            from casstore.engine.lmdb.collection import Collection

        self._env.gate.check()
        return Collection(self._env, roots, self._clock, grace_ms=grace_ms, dry_run=dry_run)

    def commits_since_collection(self) -> int:
        """How many transactions there were since a collection last came to its end."""
        with self._env.reading() as txn:
            return txn.id() - notes.collected_at(self._env, txn)

    # --- rebuilding -------------------------------------------------------------------------------

    def rebuild_index(self, roots: Roots, *, grace_ms: int = 0) -> IndexReport:
        """Make the index anew from the slabs: what roots reach, and what is younger."""
        with importing():
            from casstore.engine.lmdb.reindexing import rebuild_index

        keep_after_ms = self._clock() + 1 - grace_ms
        return rebuild_index(self._env, roots, keep_after_ms=keep_after_ms)

    def drop_damaged_rows(self, table: str) -> int:
        """Remove rows of a table that cannot be proven, and make the sum over all rows anew."""
        with importing():
            from casstore.engine.lmdb.reindexing import drop_damaged_rows

        conditions.check_table(table)
        return drop_damaged_rows(self._env, table)

    # --- checking ---------------------------------------------------------------------------------

    def check_header(self) -> list[Fault]:
        """Look at what the store says of itself, and that its parts fit together in number."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_header(self._env)

    def check_structure(self) -> Structure:
        """Walk the pages of all tables, as one snapshot has them, without LMDB."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_structure(self._env, self._env.data_path)

    def check_rows(
        self, tables: Sequence[str], told: Told | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Prove every row of these tables; ``whole``: these are all, so the sum over them, too."""
        with importing():
            from casstore.engine.lmdb import examination

        for table in tables:
            conditions.check_table(table)
        return examination.check_rows(self._env, tables, told, whole=whole)

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """Rows from ``start`` on, in order, without those that are damaged."""
        with importing():
            from casstore.engine.lmdb import examination

        conditions.check_table(table)
        return examination.readable_rows(self._env, self._journal, table, start, limit)

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """Objects with an id above ``after``, some slabs at a time, straight from the file."""
        with importing():
            from casstore.engine.lmdb import examination

        compressor = examination.fresh_compressor(self._env)
        return examination.examine(self._env, self._journal, compressor, after, content)

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects, all of one moment; None where there is none."""
        with importing():
            from casstore.engine.lmdb import examination

        conditions.check_digests(digests)
        return examination.find_ids(self._env, self._journal, digests)

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests by which objects are found, all of one moment; None: by none."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.find_names(self._env, self._journal, ids)

    def check_index(self, excused: Callable[[int], bool], told: Told | None = None) -> list[Fault]:
        """Look for names that lead nowhere, but not to ids that are ``excused``."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_index(self._env, self._journal, excused, told)

    def read_mark(self) -> bytes | None:
        """What the last check left behind."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.read_mark(self._env)

    def write_mark(self, mark: bytes) -> None:
        """Leave something for the next check."""
        with importing():
            from casstore.engine.lmdb import examination

        examination.write_mark(self._env, mark)

    # --- copying ----------------------------------------------------------------------------------

    def copy_to(
        self,
        target: str,
        *,
        compact: bool = False,
        replace: bool = False,
        pulse: Callable[[int, int | None], None] | None = None,
    ) -> HotCopyReport:
        """Make ``target`` a store of its own, as of one moment, beside running writers."""
        with importing():
            from casstore.engine.lmdb.hot_copy import copy_store

        self._env.gate.check()
        return copy_store(self._env, target, compact=compact, replace=replace, pulse=pulse)

    # --- verifying --------------------------------------------------------------------------------

    def verify(self) -> int:
        """Recompute every digest and check every row; the number of objects, or CorruptionError."""
        return verify_content(self._env)

    # --- dictionaries ----------------------------------------------------------------------------

    def train_dictionary(self) -> DictionaryReport:
        """Train a dictionary on the store's own content; adopt it if it saves enough.

        New slabs use the newest dictionary; each slab names its own, and none is ever
        removed while a slab may name it. Another process goes on with the one it knows,
        reads both, and learns of the new one after a while.
        """
        self._env.require_writable()
        with self._env.reading() as txn:
            samples = self._reader(txn).sample(SAMPLE_BYTES, SAMPLE_MAX_OBJECT_BYTES)
        trial = try_dictionary(samples, self._compressor.compress)
        if trial is None:
            return DictionaryReport(len(samples), 0, 0, adopted=None)
        adopted = None
        if trial.gain >= MIN_GAIN:
            adopted = self._shelf.add(trial.dictionary)
            self._compressor.use(adopted, trial.dictionary)
        return DictionaryReport(
            len(samples), trial.before_bytes, trial.after_bytes, adopted=adopted
        )
