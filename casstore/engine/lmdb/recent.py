"""Recent commits: the redo log, the memtable and the tables of a store together (``Recent``).

A commit is a record in the log (``log``) and an entry in memory (``memtable``). Readers combine the
tables, as one LMDB transaction sees them, with the entries that are newer. A background thread
applies the entries to the tables (``applying``); so does a commit that finds the log full.

Two locks order the processes that write to a store. A process that appends to the log holds the
file lock ``locks/log``; a process that changes tables holds LMDB's write lock. Applying the log
needs only the second, so commits continue meanwhile. A transaction that removes anything from
the tables needs both, the file lock first. A third, the applier lock, lets one process at a time
compress the entries.

The log's first page, which all processes map, holds the LSN of the last commit that readers may see
(the published LSN). While a log is in use, the LSN up to which the tables will hold commits is
written there before they change (the applying LSN). A reader whose tables hold commits that its
memtable lacks catches up and begins again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from typing import TYPE_CHECKING, Final

import lmdb

from casstore.engine.files import storage_error
from casstore.engine.lmdb.applying import (
    apply_entries,
    full_slabs,
    next_free_id,
    read_recovery_point,
)
from casstore.engine.lmdb.dictionaries import SHORT_SLAB_BYTES
from casstore.engine.lmdb.directory import StoreDirectory
from casstore.engine.lmdb.log import (
    APPLYING,
    ID_BYTES,
    LOG_FILE,
    PUBLISHED,
    LogRecord,
    Position,
    RecoveryPoint,
    RedoLog,
    first_position,
)
from casstore.engine.lmdb.memtable import (
    APPLY_CHANGES,
    UNKNOWN_ID,
    BatchEntry,
    LoggedEntry,
    Memtable,
    MemtableView,
    decode_entry,
    encode_entry,
)
from casstore.engine.lmdb.translation import translate
from casstore.errors import CorruptionError, StorageError

if TYPE_CHECKING:
    from casstore.engine.lmdb.batches import Answers, WriteBatch
    from casstore.engine.lmdb.environment import Environment
    from casstore.engine.lmdb.lookup import AnyTransaction

#: An entry longer than this goes straight into the tables: LMDB flushes it as quickly.
MAX_LOGGED_BYTES: Final = 1 << 20
# Direct commits of a process, straight into the tables, before the one that begins a log: a process
# that writes once should not have to begin and retire one. The commit that begins a log is direct
# too: the third commit is the first in the log.
_DIRECT_COMMITS: Final = 1
# With a map bounded by the caller, a commit goes into the log only while the map has free space for
# this many times the log's length: when the log is applied, each changed row changes branch pages
# too.
_MAP_SHARE: Final = 4
# How many times at most ``catch_up`` reads the tables because the log was overwritten meanwhile.
_CATCH_UP_TRIES: Final = 64


class Recent:
    """The log and the memtable of one open store."""

    def __init__(self, env: Environment, directory: StoreDirectory, log_bytes: int) -> None:
        """``log_bytes``: the limit on the length of the log."""
        self._env = env
        self._directory = directory
        self._max_log_bytes = log_bytes
        #: The file lock ``locks/log``, which processes hold while they append to the log; None: a
        #: reader without permission to open it.
        self.lock = directory.open_log_lock()
        self._applier_lock = directory.open_applier_lock()
        self._log: RedoLog | None = None
        #: The commits that this process knows and that may not be in the tables, with the recovery
        #: point that they follow. Replaced by one assignment, because an interrupt may come between
        #: any two.
        self.memtable: Memtable
        # Held to change the memtable: a reader that catches up and a writer may both add to it.
        self._memtable_lock = threading.Lock()
        # The number of the LMDB transaction in which the log was last seen to be unused.
        self._unused_at = -1
        # How many commits of this process began no log, as none was in use.
        self._direct_commits = 0
        # The log's generation when this process opened the store read-only after a crash.
        self._crashed = b""
        #: How many records were read from the log of a store that was not closed.
        self.recovered = 0
        #: The bytes of the short slabs that this process has stored (see ``dictionaries``).
        self.short_slab_bytes = 0

    def log_descriptor(self) -> int | None:
        """The descriptor of the log; None if it does not exist yet."""
        if self._log is None:
            self._log = self._directory.open_log(self._max_log_bytes)
        return None if self._log is None else self._log.fileno()

    @property
    def log_bytes(self) -> int:
        """The length of the log, as far as this process knows."""
        return 0 if self._log is None else self._log.size_bytes

    def open(self, *, writers: bool | None) -> None:
        """Read the log, if one is in use.

        ``writers``: True if another process has the store open for writing; if none has, a crash
        left the log, and it is recovered. None: this process has no permission to find out.
        """
        self._load_first_memtable()
        if not self._env.readonly:
            self._log = self._directory.open_log(self._max_log_bytes, create=True)
        if self.memtable.recovery_point.in_use:
            self._require_log()
            if writers is None:
                raise StorageError(
                    f"no permission to lock {self._env.path}, which is open for writing or was not "
                    "closed; grant readers write access to the files in its directory locks/"
                )
            if writers:
                self.catch_up()
            else:
                self._recover()

    def _load_first_memtable(self) -> None:
        """Begin the first memtable, after the recovery point in the tables."""
        with self._env.reading_bytes() as txn:
            self._load_memtable(txn)

    def _load_memtable(self, txn: AnyTransaction) -> None:
        """Begin an empty memtable after the recovery point that ``txn`` sees."""
        recovery_point = read_recovery_point(txn, self._env.path)
        try:
            next_id = next_free_id(txn, self._env)
        except lmdb.CorruptedError:
            # Writes report the damage. Reads and checks of the rest must stay possible.
            next_id = UNKNOWN_ID
        self.memtable = Memtable(recovery_point, next_id, txn.id())

    def _require_log(self) -> RedoLog:
        """The log that the recovery point names; CorruptionError if the file is not that log."""
        if self._log is None:
            self._log = self._directory.open_log(self._max_log_bytes)
        log = self._log
        if log is not None:
            if log.id == self.memtable.recovery_point.log_id:
                return log
            try:
                log.read_header()
            except OSError as exc:
                raise storage_error(f"cannot read {log.path}", exc) from exc
        path = os.path.join(self._env.path, LOG_FILE)
        if log is None or not log.id:
            raise CorruptionError(
                f"{path} is missing or damaged, and may hold the last commits of a store that "
                "was not closed; put it back, or run `casstore recover --discard-log` to continue "
                "without them"
            )
        if log.id != self.memtable.recovery_point.log_id:
            raise CorruptionError(
                f"{path} is the log of another store, or of an earlier state of this one; put "
                "the right one back, or run `casstore recover --discard-log` to continue without "
                "the commits that it may hold"
            )
        return log

    def _recover(self) -> None:
        """Read the log of a store that was not closed, up to its end."""
        log = self._require_log()
        if log.lsns[APPLYING] < self.memtable.recovery_point.applied.lsn:
            raise CorruptionError(
                f"{log.path} is older than the tables; put the newer one back, or run `casstore "
                "recover --discard-log` to continue without the commits that it may hold"
            )
        while (record := log.read_next(self.memtable.last)) is not None:
            self._add(record)
            self.recovered += 1
        log.require_end(self.memtable.last)
        if self._env.readonly:
            # The numbers in the log's first page may be lower than what was read just now. Ignore
            # them until a writer opens the store, which changes the generation.
            self._crashed = log.generation
        else:
            log.share(self.memtable.last.lsn, self.memtable.recovery_point.applied.lsn)

    def close(self) -> None:
        """Release the files."""
        if self._log is not None:
            self._log.close()
        for lock in (self.lock, self._applier_lock):
            if lock is not None:
                lock.close()

    # --- reading ------------------------------------------------------------------------------

    def current(self) -> Memtable:
        """The memtable with all commits that any process has published by now."""
        log = self._log
        if (
            log is not None
            and self.memtable.recovery_point.in_use
            and log.lsns[PUBLISHED] > self.memtable.last.lsn
            and self._is_live(log)
        ):
            self.catch_up()
        return self.memtable

    def _is_live(self, log: RedoLog) -> bool:
        """True if the numbers in the log's first page are valid.

        After a crash they are invalid until a writer has opened the store.
        """
        return not self._crashed or log.generation != self._crashed

    def view(self, txn: AnyTransaction, memtable: Memtable) -> MemtableView | None:
        """The entries to read over the tables that ``txn`` sees.

        None if these tables hold commits that ``memtable`` lacks. ``memtable`` is what ``current``
        returned before ``txn`` began.
        """
        last = memtable.last.lsn
        if self.memtable.recovery_point.in_use:
            log = self._log
            assert log is not None
            if (
                # A transaction that writes later commits to the tables was announced. Only the
                # tables show whether it was committed before ``txn`` began.
                log.lsns[APPLYING] > last
                and read_recovery_point(txn, self._env.path).applied.lsn > last
            ):
                return None
        elif txn.id() != self._unused_at:
            recovery_point = read_recovery_point(txn, self._env.path)
            # Later commits than these entries: the store is being closed, which applied the log.
            if recovery_point.in_use or (memtable.entries and recovery_point.applied.lsn > last):
                return None
            self._unused_at = txn.id()
        # ``last`` was read first: if another thread has added an entry since, the view may contain
        # objects too many, but never too few.
        return MemtableView(memtable, last, memtable.next_id)

    def catch_up(self) -> None:
        """Read the commits of other processes from the redo log, or from the tables if the log was
        overwritten or not used.
        """
        with self._memtable_lock:
            log = self._log
            if (
                log is not None
                and log.id == self.memtable.recovery_point.log_id
                and self._read_log(log)
                # Higher if a commit without a log record went straight into the tables.
                and log.lsns[APPLYING] <= self.memtable.last.lsn
            ):
                return
            for _ in range(_CATCH_UP_TRIES):
                with self._env.reading_bytes() as txn:
                    recovery_point = read_recovery_point(txn, self._env.path)
                    if (
                        recovery_point.applied.lsn > self.memtable.last.lsn
                        or not self.memtable.recovery_point.in_use
                    ):
                        self._load_memtable(txn)
                if not self.memtable.recovery_point.in_use:
                    return
                if self._read_log(self._require_log()):
                    return
        raise CorruptionError(
            f"commit {self.memtable.last.lsn + 1} of {self._env.path} is neither in its redo log "
            "nor in its tables; run `casstore check`"
        )

    def _read_log(self, log: RedoLog) -> bool:
        """Add the published records of the log to the memtable; False if they were overwritten."""
        published_lsn = log.lsns[PUBLISHED]
        while self.memtable.last.lsn < published_lsn:
            record = log.read_next(self.memtable.last)
            if record is None:
                return False
            self._add(record)
        return True

    def _add(self, record: LogRecord) -> None:
        entry = decode_entry(record.position.lsn, record.body)
        self.memtable.add(record.offset, record.position, entry)

    # --- writing ------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file lock of the log; the caller holds the environment's ``write_lock``.

        Inside, the memtable has all commits, and no other process commits.
        """
        assert self.lock is not None
        lock = self.lock.fileno()
        try:
            self.acquire(lock)
            yield
        finally:
            # The system call itself: an interrupt in a Python function around it could leave the
            # lock held.
            flock(lock, LOCK_UN)

    def acquire(self, lock: int) -> None:
        """Take the log's file lock, and read what other processes have committed and applied.

        ``lock`` is its file descriptor. Call inside ``try``, and release the lock in ``finally``:
        an interrupt may come after the lock was taken.
        """
        # Read most of the commits of other processes now: no process waits for the lock meanwhile.
        self.current()
        try:
            flock(lock, LOCK_EX)
        except OSError as exc:
            raise storage_error(f"cannot lock {self._env.path}", exc) from exc
        memtable = self.memtable
        if not memtable.recovery_point.in_use:
            # No log is in use: every commit is an LMDB transaction, so their numbers say whether
            # there was another one.
            with self._env.reading_bytes() as txn:
                seen = txn.id()
            if seen != self._env.last_transaction():
                self._env.finish_killed_commit()
            elif seen == memtable.transaction:
                return
            self.catch_up()
            return
        log = self._log
        if log is None or log.id != memtable.recovery_point.log_id:
            log = self._require_log()
        published_lsn, _, applying_lsn = log.lsns
        # The applying LSN as well: a commit straight into the tables writes it before it changes
        # them, and publishes its own LSN afterwards. A process may be killed in between.
        if published_lsn > memtable.last.lsn or applying_lsn > memtable.last.lsn:
            self.catch_up()
            if applying_lsn > self.memtable.last.lsn:
                # The process that wrote the applying LSN has failed or was killed: it held the lock
                # that this process holds now. Its transaction may be complete, but hidden.
                self._env.finish_killed_commit()
                self.catch_up()
        elif (
            memtable.changes > 2 * APPLY_CHANGES
            and applying_lsn > memtable.recovery_point.applied.lsn
        ):
            # The memtable has become long, and another process has begun to apply entries of it.
            with self._env.reading_bytes() as txn:
                applied = read_recovery_point(txn, self._env.path).applied
            self._forget(applied)

    def _forget(self, applied: Position) -> None:
        """Drop the entries up to this position: the tables hold them."""
        with self._memtable_lock:
            if self.memtable.recovery_point.applied.lsn < applied.lsn <= self.memtable.last.lsn:
                self.memtable = self.memtable.after(applied)

    def commit(
        self, entry: BatchEntry, batch: WriteBatch, answers: Answers, *, durable: bool
    ) -> None:
        """Commit an entry and assign ``answers`` to its batch. Hold the log's file lock.

        If this raises before the batch is answered, nothing was committed. Once the log record is
        published, or LMDB's transaction committed, the batch is answered, even if an interrupt
        (which may come after any call) makes this raise.
        """
        log = self._log
        if (
            log is None
            or not self.memtable.recovery_point.in_use
            or entry.size_bytes > MAX_LOGGED_BYTES
            or (
                self._env.map_limit is not None
                and self._env.covered_bytes + _MAP_SHARE * log.size_bytes > self._env.map_limit
            )
            or len(body := encode_entry(entry)) > MAX_LOGGED_BYTES
        ):
            self._commit_directly(entry, batch, answers)
            return
        memtable = self.memtable
        offset = log.find_space(memtable.last, memtable.oldest_offset, len(body))
        if offset is None:
            self.apply()
            memtable = self.memtable
            offset = log.find_space(memtable.last, memtable.oldest_offset, len(body))
            if offset is None:
                self._commit_directly(entry, batch, answers)
                return
        end = memtable.last
        position = log.append(end, offset, body, flush=durable)
        publication = log.publication(position.lsn, flushed=durable)
        try:
            os.pwrite(*publication)
            batch.answers = answers
        except OSError as exc:
            log.cancel(offset, exc)
            raise storage_error(f"cannot write {log.path}", exc) from exc
        except BaseException:
            # An interrupt after the call: the record is published.
            batch.answers = answers
            raise
        with self._memtable_lock:
            # A thread that caught up may have read the entry from the log by now.
            if self.memtable.last.lsn == end.lsn:
                self.memtable.add(offset, position, entry)

    def _commit_directly(self, entry: BatchEntry, batch: WriteBatch, answers: Answers) -> None:
        """Apply the log to the tables, and in the same transaction ``entry``, without a log record.

        Answers the batch as ``commit`` does.
        """
        memtable = self.memtable
        lsn = memtable.last.lsn + 1
        recovery_point = self.memtable.recovery_point
        if recovery_point.in_use:
            recovery_point = recovery_point._replace(applied=memtable.last._replace(lsn=lsn))
        elif self._direct_commits < _DIRECT_COMMITS:
            self._direct_commits += 1
            recovery_point = recovery_point._replace(
                applied=first_position(lsn, recovery_point.log_id)
            )
        else:
            recovery_point = self._begin_log(lsn)
        with self._env.tables_lock:
            with self._env.begin_write() as txn:
                self._apply_into(txn, recovery_point, entry)
                try:
                    txn.commit()
                    batch.answers = answers
                except lmdb.Error:
                    raise
                except BaseException:
                    # py-lmdb raises only lmdb.Error: this is an interrupt after the commit.
                    batch.answers = answers
                    raise
            self._env.cover()
        self.replace_memtable(recovery_point, entry.next_id)

    def _begin_log(self, lsn: int) -> RecoveryPoint:
        """Begin a log file, and return the recovery point that puts it in use, to be committed."""
        assert self._log is not None
        log_id = os.urandom(ID_BYTES)
        return RecoveryPoint(True, log_id, self._log.begin(log_id, lsn))

    def flush(self) -> bool:
        """Flush all published commits to the disk; False if they were flushed already."""
        log = self._log
        return (
            log is not None
            and self.memtable.recovery_point.in_use
            and log.flush(log.lsns[PUBLISHED])
        )

    # --- applying -----------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply the whole log to the tables. Hold the log's file lock."""
        if self.memtable.entries:
            self._apply_all(self.memtable.recovery_point._replace(applied=self.memtable.last))

    def retire_log(self) -> None:
        """Apply the whole log, and mark it unused. Hold the log's file lock."""
        if self.memtable.recovery_point.in_use:
            self._apply_all(
                self.memtable.recovery_point._replace(applied=self.memtable.last).retired()
            )

    def _apply_all(self, recovery_point: RecoveryPoint) -> None:
        """Apply the whole log in a transaction of its own, which writes ``recovery_point``."""
        try:
            with self._env.tables_lock:
                with self._env.begin_write() as txn:
                    self._apply_into(txn, recovery_point)
                self._env.cover()
        except lmdb.Error as exc:
            raise translate(exc, self._env.path) from exc
        self.replace_memtable(recovery_point, self.memtable.next_id)

    def apply_concurrently(self) -> bool:
        """Apply the log, up to its end at the time of the call, while other commits are made.

        Returns False if there is nothing to apply, or another process is applying the log. The
        log's file lock is not needed: applying only adds to the tables, and commits do not see the
        transaction before it ends. The applier lock is held, so that no second process compresses
        the same entries.
        """
        assert self._applier_lock is not None
        lock = self._applier_lock.fileno()
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise storage_error(f"cannot lock {self._env.path}", exc) from exc
        try:
            return self._apply_concurrently()
        finally:
            flock(lock, LOCK_UN)

    def drop_applied(self) -> None:
        """Drop entries of the memtable that another process has applied."""
        memtable = self.current()
        if memtable.entries:
            with self._env.reading_bytes() as txn:
                applied = read_recovery_point(txn, self._env.path).applied
            self._forget(applied)

    def _apply_concurrently(self) -> bool:
        self.drop_applied()
        entries = self.memtable.view().entries()
        if not entries or not self.memtable.recovery_point.in_use:
            return False
        last = entries[-1].position
        recovery_point = self.memtable.recovery_point._replace(applied=last)
        # Compress before LMDB's write lock is taken, so that no process waits for it.
        stored = full_slabs([each.entry for each in entries], self._env.compressor)
        try:
            with self._env.tables_lock:
                self._env.gate.check()
                with self._env.begin_write() as txn:
                    applied = read_recovery_point(txn, self._env.path).applied
                    if applied.lsn >= last.lsn:
                        # Another process has applied these entries, and perhaps later ones.
                        txn.abort()
                    else:
                        self._write_entries(txn, recovery_point, entries, stored)
                self._env.cover()
        except lmdb.Error as exc:
            raise translate(exc, self._env.path) from exc
        self._forget(last)
        return True

    def apply_into(self, txn: lmdb.Transaction[bytes]) -> RecoveryPoint:
        """Apply the whole log within a transaction that changes tables. Hold the log's file lock.

        If the log is in use, the transaction gets an LSN of its own. It may remove objects that are
        in the memtables of other processes; the higher LSN shows them that their memtables are out
        of date. After the commit, call ``replace_memtable`` with the recovery point that this
        returns.
        """
        recovery_point = self.memtable.recovery_point
        if recovery_point.in_use:
            last = self.memtable.last
            recovery_point = recovery_point._replace(applied=last._replace(lsn=last.lsn + 1))
            self._apply_into(txn, recovery_point)
        return recovery_point

    def _apply_into(
        self,
        txn: lmdb.Transaction[bytes],
        recovery_point: RecoveryPoint,
        entry: BatchEntry | None = None,
    ) -> None:
        entries = self.memtable.view().entries()
        if entry is not None:
            # It has no log record, so its offset is never used.
            entries.append(LoggedEntry(recovery_point.applied, entry, -1))
        stored = full_slabs([each.entry for each in entries], self._env.compressor)
        self._write_entries(txn, recovery_point, entries, stored)

    def _write_entries(
        self,
        txn: lmdb.Transaction[bytes],
        recovery_point: RecoveryPoint,
        entries: Sequence[LoggedEntry],
        stored: Sequence[tuple[bytes, bytes]],
    ) -> None:
        """Write those entries that the tables do not hold yet; ``stored`` are the slabs of all."""
        env = self._env
        applied = read_recovery_point(txn, env.path).applied
        if applied.lsn > self.memtable.last.lsn:
            raise StorageError(
                f"{env.path} holds commits that this process has not read, and nothing was "
                "written; close the store, and open it again"
            )
        todo = [entry for position, entry, _ in entries if position.lsn > applied.lsn]
        if len(todo) < len(entries):
            # Another process has applied some of them meanwhile.
            stored = full_slabs(todo, env.compressor)
        if self.memtable.recovery_point.in_use:
            self._require_log().note_applying(recovery_point.applied.lsn)
        apply_entries(env, txn, todo, stored, recovery_point)
        lengths = [len(value) for _, value in stored]
        self.short_slab_bytes += sum([each for each in lengths if each < SHORT_SLAB_BYTES])

    def replace_memtable(self, recovery_point: RecoveryPoint, next_id: int) -> None:
        """Replace the memtable by an empty one, after a transaction that applied the whole log.

        Not while holding ``tables_lock``: a reader may wait for that with the memtable's lock held.
        """
        with self._memtable_lock:
            self.memtable = Memtable(recovery_point, next_id)
        log = self._log
        if (
            recovery_point.in_use
            and log is not None
            and log.lsns[PUBLISHED] < recovery_point.applied.lsn
        ):
            try:
                os.pwrite(*log.publication(recovery_point.applied.lsn, flushed=True))
            except OSError:
                # The commit is done, so its caller must not get an error. Other processes find it
                # in the tables, by the applying LSN.
                return
