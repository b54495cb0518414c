"""The engine protocol on LMDB, in these databases (tables) of one LMDB file:

    index         the first bytes of a digest ‖ id (see ``lookup``)
    slabs         last id → slab (see ``slab``)
    dictionaries  number → trained zstd dictionary
    meta          family, format, creation time, current dictionary
    collection    notes of writers for the garbage collector (see ``notes``)
    touches       objects that were put again (see ``notes``)
    …             one database for each table of rows

A write joins a batch, which is checked as a whole (``batches``) and appended to the redo log
(``recent``, ``log``). A background thread applies the log to the tables (``applying``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from itertools import islice
from math import inf
from struct import Struct
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine import conditions
from casstore.engine.conditions import wall_clock_ms
from casstore.engine.files import importing
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import applied_lsn
from casstore.engine.lmdb.batches import READ_BATCH, Batches, CommitQueue, Job
from casstore.engine.lmdb.dictionaries import (
    MIN_GAIN,
    SAMPLE_BYTES,
    SAMPLE_MAX_OBJECT_BYTES,
    DictionaryReport,
    DictionaryShelf,
    TrainingSchedule,
    try_dictionary,
)
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import (
    DigestIndex,
    is_named,
    likely_row,
    open_row,
    seek_first,
    seek_last,
)
from casstore.engine.lmdb.memtable import MemtableView, Unchanged, merge
from casstore.engine.lmdb.reader import SlabCache, SlabReader
from casstore.engine.lmdb.reserve import Reserve
from casstore.engine.lmdb.verification import verify_content
from casstore.engine.lmdb.worker import GATHER_S, Task
from casstore.engine.protocol import (
    COLD_AGE_MS,
    FULL,
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
    CasstoreError,
    CorruptionError,
    InvalidInputError,
    StorageError,
    StorageFullError,
)

if TYPE_CHECKING:
    from casstore.engine.faults import Examination, Fault, Progress, Structure
    from casstore.engine.lmdb.background import BackgroundPacker
    from casstore.engine.lmdb.collection import LmdbCollection
    from casstore.engine.lmdb.packing import PackScope
    from casstore.engine.protocol import (
        EngineSpace,
        HotCopyReport,
        IndexReport,
        PackReport,
        Roots,
    )

DEFAULT_CACHE_BYTES: Final = 32 << 20

# After this many commits a writer clears the reader slots of killed processes, which keep pages
# from being reused, and loads dictionaries that other processes have trained.
_HOUSEKEEPING_COMMITS: Final = 1024
# After this time without a commit, the log is applied.
_IDLE_S: Final = 10.0
# A version of the rows: device, inode, LSN.
_VERSION: Final = Struct(">QQQ")


def _reclaims(write: Write) -> bool:
    """True if this write deletes rows and stores no objects: it may use the reserved disk space."""
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
        discard_log: bool = False,
        map_bytes: int | None = None,
        log_bytes: int | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        lmdb_version: int | None = None,
        auto_train: bool = True,
        auto_pack: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.durability = durability
        self._clock = clock or wall_clock_ms
        self._env = Environment(
            path,
            readonly=readonly,
            create=create,
            verify=verify,
            instead_of_log=() if discard_log else None,
            map_bytes=map_bytes,
            log_bytes=log_bytes,
            lmdb_version=lmdb_version,
            prove=verify_content,
        )
        self._cache = SlabCache(cache_bytes)
        self._commits = 0
        self._committed_at_s = 0.0
        self._pid = os.getpid()
        self._training = TrainingSchedule(self.train_dictionary) if auto_train else None
        self._shelf = DictionaryShelf(self._env)
        self._compressor = self._env.compressor
        self._batches = Batches(self._env, self._clock, self._committed)
        self._queue: CommitQueue[Job, WriteResult] = CommitQueue(self._batches.run)
        self._reserve = Reserve(path, self._env.directory_handle)
        #: The packing thread, if this engine was opened with one.
        self.packer: BackgroundPacker | None = None
        self._behind = None if readonly else Task(self._work_behind)
        try:
            self._compressor.use(self._shelf.newest())
            if not readonly:
                self._reserve.allocate(self._env.file_bytes(), self._env.recent.log_bytes)
                if auto_pack:
                    self._start_packer()
        except BaseException as exc:
            self.close()
            if isinstance(exc, RuntimeError):
                raise StorageError(f"{path} cannot be kept open: {exc}") from exc
            raise

    def _start_packer(self) -> None:
        with importing():
            from casstore.engine.lmdb.background import BackgroundPacker

        self.packer = BackgroundPacker(
            lambda progress: self.pack(progress, min_age_ms=COLD_AGE_MS), self._count_slabs
        )

    def with_durability(self, durability: str) -> LmdbEngine:
        """The same engine with another default durability. Closing either closes both."""
        if durability == self.durability:
            return self
        same = copy(self)
        same.durability = durability
        return same

    def shares_files_with(self, other: LmdbEngine) -> bool:
        """True if both are the same engine, perhaps with different default durabilities."""
        return self._env is other._env

    @property
    def path(self) -> str:
        """The store's directory."""
        return self._env.path

    @property
    def readonly(self) -> bool:
        """True if this engine refuses writes."""
        return self._env.readonly

    # --- reading objects -----------------------------------------------------------------

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        self._env.gate.check()
        conditions.check_digests(digests)
        return self._batches.missing(list(dict.fromkeys(digests)))

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        conditions.check_digests((first, last))
        with self._env.snapshot() as (txn, view):
            recent = view.names()
            found = [name for name, known in recent.items() if known and first <= name <= last]
            applied = DigestIndex(self._env, txn).between(first, last)
            found += islice((name for name, _ in applied if name not in recent), limit)
        return sorted(found)[:limit]

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of ``digests``; None for those that are not stored."""
        self._env.gate.check()
        conditions.check_digests(digests)
        found: list[StoredObject | None] = []
        for start in range(0, len(digests), READ_BATCH):
            with self._env.snapshot() as (txn, view):
                reader = self._reader(txn)
                read, read_next = reader.object, reader.next
                added, deleted = view.memtable.ids, view.memtable.deleted
                index = DigestIndex(self._env, txn, reader.digest)
                find, has_row = index.find, index.has_row
                for digest in digests[start : start + READ_BATCH]:
                    if digest in added or digest in deleted:
                        object_id = view.find_id(digest)
                        if object_id is None:
                            found.append(None)
                            continue
                        if not isinstance(object_id, Unchanged):
                            recent = view.object(object_id)
                            found.append(StoredObject(recent.kind, recent.data))
                            continue
                    item = read_next(digest, has_row)
                    if item is None and (applied_id := find(digest)) is not None:
                        item = read(applied_id)
                    found.append(item)
        return found

    def _reader(self, txn: lmdb.Transaction[memoryview]) -> SlabReader:
        return SlabReader(txn.cursor(db=self._env.slabs), self._cache, self._compressor)

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """Objects with an id lower than ``before``, highest first; about ``limit`` of them."""
        if limit < 1:
            raise InvalidInputError(f"limit must be at least 1, got {limit}")
        infos: list[ObjectInfo] = []
        with self._env.snapshot() as (txn, view):
            recent = list(view.slabs())
            while recent and len(infos) < limit:
                key, value = recent.pop()
                infos.extend(self._live_objects(txn, view, key, value, before))
                # The tables may hold these objects as well: read only lower ids from there.
                first_id = slabs.read_directory(key, value).first_id
                before = first_id if before is None else min(before, first_id)
            cursor = txn.cursor(db=self._env.slabs)
            # The first slab that ends at or above ``before`` holds the highest id wanted.
            inside = before is not None and before <= slabs.MAX_ID
            more = inside and cursor.set_range(slabs.slab_key(max(before or 0, 0)))
            more = more or cursor.last()
            while more and len(infos) < limit:
                infos.extend(self._live_objects(txn, view, *cursor.item(), before))
                more = cursor.prev()
        return infos

    def _live_objects(
        self,
        txn: lmdb.Transaction[memoryview],
        view: MemtableView,
        key: bytes | memoryview,
        value: bytes | memoryview,
        before: int | None,
    ) -> list[ObjectInfo]:
        directory = slabs.read_directory(key, value)
        infos: list[ObjectInfo] = []
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            object_id = directory.first_id + position
            digest = directory.digest(position)
            if before is not None and object_id >= before:
                continue
            if not is_named(txn, self._env, view, digest, object_id):
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
        """The rows in the order of ``keys``, from one snapshot; None for missing rows."""
        for table, key in keys:
            conditions.check_key(table, key)
        env = self._env
        rows: list[bytes | None] = []
        with env.snapshot() as (txn, view):
            for table, key in keys:
                value = view.find_row(table, key)
                if isinstance(value, Unchanged):
                    value = likely_row(txn, env.tables[table], table, key)
                rows.append(value)
        return rows

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
            raise InvalidInputError(f"limit must be at least 1, got {limit}")
        with self._env.snapshot() as (txn, view):
            stored = self._stored_rows(txn, table, start, stop, reverse=reverse)
            changed = view.changed_between(table, start, stop, reverse=reverse)
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
        """Run one write atomically; returns when it is as durable as ``Write.durable`` says."""
        env = self._env
        env.gate.check()
        if env.readonly:
            env.require_writable()
        durable = self.durability == FULL if write.durable is None else write.durable
        conditions.validate(write)
        job = Job(write, durable=durable)
        if self._reserve.is_released and not _reclaims(write):
            self._reserve.require_free()
        try:
            return self._queue.submit(job)
        except StorageFullError:
            if not (self._reserve.may_use or _reclaims(write)):
                raise
            with self._reserve.reclaiming():
                self._reserve.release()
                return self._queue.submit(job)

    def _committed(self, durable: bool) -> None:
        """Run or start periodic work that is due; called after every batch of this engine."""
        self._commits += 1
        self._committed_at_s = time.monotonic()
        data_bytes, log_bytes = self._env.covered_bytes, self._env.recent.log_bytes
        if (
            data_bytes > self._reserve.enough_for_bytes
            or log_bytes > self._reserve.enough_for_log_bytes
        ):
            self._reserve.allocate(data_bytes, log_bytes)
        if self._commits % _HOUSEKEEPING_COMMITS == 0:
            self._keep_house()
        behind = self._behind
        recent = self._env.recent
        if (
            behind is not None
            and recent.memtable.entries
            and (not durable or behind.at_s == inf or recent.memtable.is_due)
        ):
            behind.wake()
        training = self._training
        if training is not None and recent.short_slab_bytes >= training.due_bytes:
            training.start(recent.short_slab_bytes)

    def _keep_house(self) -> None:
        """Clear the reader slots of killed processes; load the newest dictionary."""
        try:
            self._env.handle.reader_check()
            self._compressor.use(self._shelf.newest())
        except (lmdb.Error, CasstoreError):
            # The commit is done, so its caller must not get an error. Slots that were not cleared
            # cost pages, not data, until the next time; a dictionary that cannot be read raises an
            # error in the first read that needs it.
            return

    def used_bytes(self) -> int:
        """The bytes of the pages in use; the file also has free pages."""
        env = self._env
        with env.reading() as txn:
            stats = [txn.stat(database) for database in env.databases.values()]
        return sum(
            stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"])
            for stat in stats
        )

    def watch(self) -> Watch:
        """A watch that wakes when any process may have written to the store."""
        with importing():
            from casstore.engine.lmdb.watching import open_watch

        return open_watch(self._env)

    def flush(self) -> None:
        """Return once every acknowledged write survives a power loss."""
        self._env.require_writable()
        self._env.flush()

    def _work_behind(self) -> float:
        """Flush the log, and apply it if that is due; returns the seconds until the next call.

        The background thread calls this.
        """
        recent = self._env.recent
        unflushed = self._env.flush()
        idle_s = time.monotonic() - self._committed_at_s
        if recent.memtable.is_due:
            # Another process may have applied the log; then it is no longer due.
            recent.drop_applied()
        if recent.memtable.is_due or idle_s >= _IDLE_S:
            recent.apply_concurrently()
        if unflushed:
            # More ``relaxed`` commits are likely to follow, and should not have to wake the thread.
            return GATHER_S
        return _IDLE_S if recent.memtable.entries else inf

    def apply_log(self) -> None:
        """Apply the log to the tables now."""
        self._env.require_writable()
        self._env.apply_log()

    def close(self) -> None:
        """Release all resources. Closing twice is allowed; every other call then fails."""
        if os.getpid() != self._pid:
            # A forked child has released its copies already, and has none of the threads. A lock
            # below may have been held during the fork; here no thread would release it.
            return
        if self._behind is not None:
            self._behind.stop()
        if self.packer is not None:
            self.packer.stop()
        if self._training is not None:
            self._training.join()
        self._env.close()
        self._cache.clear()

    # --- packing ----------------------------------------------------------------------------------

    def pack(
        self, progress: Callable[[PackReport], None] | None = None, *, min_age_ms: int = 0
    ) -> PackReport:
        """Join small slabs older than ``min_age_ms``, and drop objects that gc removed.

        Works in short steps, concurrently with readers and writers.
        """
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
        """Let this thread use the reserved disk space inside the ``with`` statement."""
        return self._reserve.reclaiming()

    def _adopt_cold_dictionary(self, scope: PackScope) -> None:
        """Train a dictionary for packing, and use it from now on if it saves enough."""
        with importing():
            from casstore.engine.lmdb.cold_dictionary import try_cold_dictionary

        try:
            trial = try_cold_dictionary(self._env, self._compressor, scope.packed_to, scope.newest)
        except CorruptionError:
            # Packing, which comes next, reads the same slab and reports its location.
            return
        if trial is not None:
            self._compressor.use(self._shelf.add(trial.dictionary), trial.dictionary)

    def _count_slabs(self) -> int:
        with self._env.reading() as txn:
            return txn.stat(self._env.slabs)["entries"]

    # --- measuring --------------------------------------------------------------------------------

    def measure_space(self, progress: Callable[[int, int], None] | None = None) -> EngineSpace:
        """Measure; object contents are not read. ``progress(rows_done, rows_total)`` is called."""
        with importing():
            from casstore.engine.lmdb.measuring import measure

        return measure(self._env, progress)

    # --- collecting -------------------------------------------------------------------------------

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> LmdbCollection:
        """A collection that keeps reachable objects and those put within the grace period."""
        with importing():
            from casstore.engine.lmdb.collection import LmdbCollection

        self._env.gate.check()
        return LmdbCollection(self._env, roots, self._clock, grace_ms=grace_ms, dry_run=dry_run)

    def commits_since_collection(self) -> int:
        """How many commits there were since the last completed collection."""
        with self._env.snapshot() as (txn, view):
            return view.lsn - notes.collected_at(self._env, txn)

    # --- rebuilding -------------------------------------------------------------------------------

    def rebuild_index(self, roots: Roots, *, grace_ms: int = 0) -> IndexReport:
        """Rebuild the index with the objects that are reachable or within the grace period."""
        with importing():
            from casstore.engine.lmdb.reindexing import rebuild_index

        grace_from_ms = self._clock() + 1 - grace_ms
        return rebuild_index(self._env, roots, grace_from_ms=grace_from_ms)

    def sum_rows(self) -> None:
        """Recompute the checksum over all rows from the current rows."""
        with importing():
            from casstore.engine.lmdb.reindexing import sum_rows

        sum_rows(self._env)

    # --- checking ---------------------------------------------------------------------------------

    def check_header(self) -> list[Fault]:
        """Check the store header, and that the numbers in it match the content."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_header(self._env)

    def check_structure(self) -> Structure:
        """Walk the pages of all tables, in one snapshot, without LMDB."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_structure(self._env, self._env.data_path)

    def check_rows(
        self, tables: Sequence[str], progress: Progress | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Check every row of these tables; ``whole``: they are all tables, so check the checksum
        over all rows, too.
        """
        with importing():
            from casstore.engine.lmdb import examination

        for table in tables:
            conditions.check_table(table)
        return examination.check_rows(self._env, tables, progress, whole=whole)

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """At most ``limit`` rows from the key ``start`` on, in order; damaged rows are left out."""
        with importing():
            from casstore.engine.lmdb import examination

        conditions.check_table(table)
        return examination.readable_rows(self._env, table, start, limit)

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """Examine the objects of the next few slabs, with ids above ``after``, without any cache.

        ``content(id)`` returns whether to read the object's bytes and compare them with its digest;
        None: of no object.
        """
        with importing():
            from casstore.engine.lmdb import examination

        compressor = examination.fresh_compressor(self._env)
        return examination.examine(self._env, compressor, after, content)

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects, from one snapshot; None for digests that are not stored."""
        with importing():
            from casstore.engine.lmdb import examination

        conditions.check_digests(digests)
        return examination.find_ids(self._env, digests)

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests of objects, from one snapshot; None for ids that the index does not have."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.find_names(self._env, ids)

    def check_index(
        self, excused: Callable[[int], bool], progress: Progress | None = None
    ) -> list[Fault]:
        """Find index rows that lead to no object, except for ids for which ``excused`` is true."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.check_index(self._env, excused, progress)

    def read_mark(self) -> bytes | None:
        """What the last check passed to ``write_mark``; None if there was none."""
        with importing():
            from casstore.engine.lmdb import examination

        return examination.read_mark(self._env)

    def write_mark(self, mark: bytes) -> None:
        """Save bytes for the next check."""
        with importing():
            from casstore.engine.lmdb import examination

        examination.write_mark(self._env, mark)

    # --- versions of the rows ---------------------------------------------------------------------

    def rows_version(self) -> bytes:
        """An identifier of the present state of all rows: the data file, and the last LSN.

        Every write that changes a row gets a new LSN.
        """
        with self._env.snapshot() as (txn, view):
            lsn = max(view.lsn, applied_lsn(txn, self._env.path))
        if not self._env.readonly:
            # After a power loss, later commits would get the LSNs of those that were not flushed.
            self._env.flush()
        return self._version(lsn)

    def _version(self, lsn: int) -> bytes:
        file = os.fstat(self._env.data_handle)
        return _VERSION.pack(file.st_dev, file.st_ino, lsn)

    def changed_keys(self, table: str, since: bytes) -> list[bytes] | None:
        """The keys of the rows that were written after the version ``since``, or deleted.

        They are in the log's entries since then. None if some of those have been applied.
        """
        conditions.check_table(table)
        if len(since) != _VERSION.size:
            return None
        lsn = _VERSION.unpack(since)[2]
        with self._env.snapshot() as (txn, view):
            if since != self._version(lsn) or applied_lsn(txn, self._env.path) > lsn:
                return None
            return [
                key
                for position, entry, _ in view.entries()
                if position.lsn > lsn
                for name, key, _ in entry.rows
                if name == table
            ]

    # --- copying ----------------------------------------------------------------------------------

    def copy_to(
        self,
        target: str,
        *,
        compact: bool = False,
        replace: bool = False,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> HotCopyReport:
        """Copy one snapshot of the store to ``target``, concurrently with writers."""
        with importing():
            from casstore.engine.lmdb.hot_copy import copy_store

        self._env.gate.check()
        return copy_store(self._env, target, compact=compact, replace=replace, progress=progress)

    # --- verifying --------------------------------------------------------------------------------

    def verify(self) -> int:
        """Check every object and every row; returns the number of objects, or CorruptionError."""
        return verify_content(self._env)

    # --- dictionaries ----------------------------------------------------------------------------

    def train_dictionary(self) -> DictionaryReport:
        """Train a dictionary on the store's own content; adopt it if it saves enough.

        New slabs use the newest dictionary. Each slab names the dictionary it was compressed with,
        and no dictionary is removed while a slab may name it. Other processes compress with the
        dictionary that they know until they load the new one (``_keep_house``).
        """
        self._env.require_writable()
        self._env.apply_log()
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
