"""An LMDB environment (an open data file); almost all transactions begin here.

``Environment`` adds to py-lmdb: a check of the file before it is mapped; creation that is complete
or absent; a gate that keeps threads out of LMDB while the store is closed or the process forks;
typed errors; the commits that are still in the redo log (``recent``). It also enforces LMDB's
rules: one environment for each file and process, no use after a fork, write transactions bound to
their thread, short read transactions.

``snapshot`` is the way to read: the tables, and the commits that they lack. ``reading`` reads the
tables alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakSet

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.files import lengthen
from casstore.engine.forks import Descriptor, Gate
from casstore.engine.lmdb.applying import apply_entries, full_slabs, read_recovery_point
from casstore.engine.lmdb.creation import (
    COLLECTION,
    DATABASES,
    DICTIONARIES,
    INDEX,
    META,
    SLABS,
    TOUCHES,
    create_store,
)
from casstore.engine.lmdb.dictionaries import DictionaryShelf
from casstore.engine.lmdb.directory import (
    DATA_FILE,
    FILE_MODE,
    LOCK_FILE,
    MAX_READERS,
    StoreDirectory,
    storage_error,
)
from casstore.engine.lmdb.log import MAX_LOG_BYTES
from casstore.engine.lmdb.memtable import LoggedEntry, MemtableView
from casstore.engine.lmdb.page_scan import read_extent, verify_structure
from casstore.engine.lmdb.recent import Recent
from casstore.engine.lmdb.translation import translate
from casstore.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    ForkedError,
    ReadOnlyError,
    StorageError,
)
from casstore.format.header import require_header

if TYPE_CHECKING:
    from casstore.engine.watches import DescriptorWatch

# The smallest automatic map. It takes address space, not disk space: a process has 128 TiB of it,
# enough for a thousand open stores.
FIRST_MAP_BYTES: Final = 64 << 30
# An automatic map is at least this many times as long as the file.
_MAP_GROWTH: Final = 4

# How many times at most a process that opens a short file checks whether a writer has lengthened
# it by now.
_COVER_TRIES: Final = 50
# How many times at most a read transaction is restarted because commits came while it began.
_BEGIN_TRIES: Final = 16
# The pause before each of the checks of _COVER_TRIES.
_COVER_PAUSE_S: Final = 0.002
# How many times at most a snapshot is restarted because the log was applied to the tables since.
_SNAPSHOT_TRIES: Final = 64
# A read transaction that took longer than this to begin is checked by ``_require_newest``. Usually
# beginning takes a tenth of this; two commits take more, as each writes to the file at least twice.
# Checking every time would make the shortest reads a fifth slower.
_HELD_UP_S: Final = 5e-6


class Environment:
    """One open LMDB environment and its databases."""

    def __init__(
        self,
        path: str,
        *,
        readonly: bool = False,
        create: bool = True,
        verify: bool = False,
        instead_of_log: Sequence[LoggedEntry] | None = None,
        map_bytes: int | None = None,
        log_bytes: int | None = None,
        lmdb_version: int | None = None,
        prove: Callable[[Environment], object],
        directory: StoreDirectory | None = None,
    ) -> None:
        """Open the store at ``path``.

        ``verify``: first verify the file's structure, and all content by calling ``prove``.
        ``map_bytes`` bounds the data file; None: only the disk does. ``log_bytes`` bounds the log.
        ``instead_of_log``: entries to apply to the tables in place of the redo log, which is then
        marked unused: for a log that is lost or was not copied.
        ``directory``: the store's directory, from a caller that already holds its mutex.
        """
        self.path = path
        self.readonly = readonly
        #: The limit on the length of the data file that the caller has set.
        self.map_limit = map_bytes
        #: The address space that the file is mapped to.
        self.map_bytes = map_bytes or FIRST_MAP_BYTES
        self._lmdb_version = 0 if lmdb_version is None else lmdb_version
        self._directory = directory or StoreDirectory(path, readonly=readonly)
        self.gate = Gate()
        #: Held by the thread of this process that commits.
        self.write_lock = threading.Lock()
        #: Held by the thread of this process that has an LMDB write transaction; taken after
        #: ``write_lock``.
        self.tables_lock = threading.Lock()
        #: The data file is known to be at least this long.
        self.covered_bytes = 0
        #: Compresses slabs with the store's dictionaries, and inflates them.
        self.compressor = Compressor(DictionaryShelf(self).load)
        # The watches to wake when this closes. Weak references: their users own them. Add one only
        # inside the gate.
        self.watches: WeakSet[DescriptorWatch] = WeakSet()

        self._directory.prepare(create=create and not readonly)
        with self._directory.exclusive():
            if not readonly:
                self._tidy_up()
            self._create_if_absent()
            self._check_file(verify=verify)
            writers = self._directory.writers_present()
            try:
                self._directory.hold()
                # No fork before all is in _OPEN: the child could neither close LMDB's handle nor
                # reopen the file.
                with _fork_lock:
                    self._open()
                    self.data_handle = self._directory.open_data()
                    #: The store's directory, held open.
                    self.directory_handle = self._directory.open_directory()
                    #: The commits that are not in the tables yet.
                    self.recent = Recent(self, self._directory, log_bytes or MAX_LOG_BYTES)
                    _OPEN.add(self)
                opened = os.fstat(self.data_handle)
                self._data_identity = opened.st_dev, opened.st_ino
            except BaseException:
                self._directory.release()
                raise
            try:
                if instead_of_log is not None:
                    if writers:
                        raise BusyError(
                            f"{path} is in use; its log can be discarded only when it is closed"
                        )
                    self._replace_log(instead_of_log)
                self.recent.open(writers=writers)
                # Under the mutex, so that no other process opens the store before it is verified.
                if verify:
                    prove(self)
                if not readonly:
                    # Lengthen a file that a killed writer left short, and that was verified just
                    # now: while this process has it open, no other could verify it.
                    self.cover()
            except BaseException:
                with self.write_lock, self.tables_lock:
                    self.gate.shut(ClosedError(f"{self.path} could not be opened"))
                    self._let_go()
                raise

    def _replace_log(self, entries: Sequence[LoggedEntry]) -> None:
        """Apply these entries to the tables, and mark the log unused, in one transaction."""
        self.require_writable()
        try:
            # Later commits get the LSNs of the discarded ones, by which an index knows what is new.
            self._directory.remove_derived()
        except OSError as exc:
            raise storage_error(f"cannot remove the index files of {self.path}", exc) from exc
        with self.tables_lock:
            try:
                with self.begin_write() as txn:
                    recovery_point = read_recovery_point(txn, self.path)
                    todo = [
                        each.entry
                        for each in entries
                        if each.position.lsn > recovery_point.applied.lsn
                    ]
                    stored = full_slabs(todo, self.compressor)
                    if todo:
                        recovery_point = recovery_point._replace(applied=entries[-1].position)
                    apply_entries(self, txn, todo, stored, recovery_point.retired())
            except lmdb.Error as exc:
                raise translate(exc, self.path) from exc

    def _tidy_up(self) -> None:
        """Remove what a killed compaction has left, if that is possible."""
        try:
            self._directory.remove_leftovers()
        except StorageError:
            # The files may belong to another user. They take space, but do not prevent opening the
            # store.
            return

    # --- opening ---------------------------------------------------------------------

    def _create_if_absent(self) -> None:
        if os.path.exists(self._directory.data_path):
            return
        try:
            with _fork_lock:
                create_store(self._directory, self.map_bytes, self._lmdb_version)
        except lmdb.Error as exc:
            raise translate(exc, self.path) from exc

    def _check_file(self, *, verify: bool) -> None:
        """Check the data file before LMDB maps it: its length, or with ``verify`` all pages."""
        path = self._directory.data_path
        if verify:
            if self._directory.others_present():
                raise BusyError(f"{self.path} is in use; its file can be verified only when closed")
            verify_structure(path)
        # Only a writer changes the file, or lengthens a short one.
        written = self._directory.writers_present()
        extent = read_extent(path)
        tries = 0
        while (extent.is_short or not extent.is_in_order) and written and tries < _COVER_TRIES:
            # A writer in another process is between its commit and covering the file, or
            # committed twice while the two meta pages were read.
            time.sleep(_COVER_PAUSE_S)
            extent = read_extent(path)
            tries += 1
        if not extent.is_in_order:
            raise CorruptionError(
                f"{path} has meta pages of transactions {extent.transactions[0]} and "
                f"{extent.transactions[1]}, which do not follow each other: one is damaged"
            )
        # LMDB 1.0, as py-lmdb builds it, raises MDB_BAD_TXN for a page that is newer than the
        # reading transaction (see ``_require_newest``).
        self.refuses_newer = extent.lmdb_version == 1
        self.page_header_bytes = extent.header_bytes
        if extent.is_short:
            if written:
                raise BusyError(
                    f"{path} has {extent.file_bytes} of {extent.needed_bytes} bytes, and cannot be "
                    "verified while another process uses it; close the store there"
                )
            verify_structure(path)

    def _open(self) -> None:
        """Open LMDB, and set ``handle`` and the databases."""
        self._require_first()
        if self.map_limit is None:
            self.map_bytes = self._automatic_map()
        self._lock_file = self._directory.reserve_lock_file(LOCK_FILE, MAX_READERS)
        try:
            handle = lmdb.open(
                # Bytes, because a path need not be valid UTF-8.
                os.fsencode(self.path),
                map_size=self.map_bytes,
                readonly=self.readonly,
                mode=FILE_MODE,
                create=False,
                writemap=False,
                max_readers=MAX_READERS,
                max_dbs=len(DATABASES),
                readahead=False,
            )
        except lmdb.ReadonlyError as exc:
            # py-lmdb raises this if the operating system denies access. Readers need write access
            # to lock.mdb: LMDB records there which pages they use.
            also = "; readers need write access to its lock.mdb" if self.readonly else ""
            raise StorageError(f"no right to open {exc}{also}") from exc
        except lmdb.Error as exc:
            if "already open" in str(exc):
                raise BusyError(f"{self.path} is already open in this process: {exc}") from exc
            raise translate(exc, self.path) from exc
        except OSError as exc:
            raise StorageError(f"cannot open {self.path}: {exc}") from exc
        try:
            self._open_databases(handle)
            if not self.readonly:
                handle.reader_check()
        except BaseException:
            handle.close()
            raise
        self.handle = handle
        self._page_bytes = handle.stat()["psize"]

    def _automatic_map(self) -> int:
        """The map size for the present file: a power of two, at least _MAP_GROWTH times as long."""
        try:
            file_bytes = os.stat(self._directory.data_path).st_size
        except OSError as exc:
            raise storage_error(f"cannot read {self._directory.data_path}", exc) from exc
        map_bytes = FIRST_MAP_BYTES
        while map_bytes < _MAP_GROWTH * file_bytes:
            map_bytes *= 2
        return map_bytes

    def _require_first(self) -> None:
        """BusyError if this process has the store open already, under any path.

        When a process closes any descriptor of a file, the operating system releases all fcntl
        locks of the process on that file. LMDB relies on such locks: if a second environment of the
        store were closed, other processes would take the readers of the first for dead.
        """
        try:
            there = os.stat(os.path.join(self.path, LOCK_FILE))
        except OSError:
            # Without a lock file the store is not open. Any other error is raised by opening it.
            return
        for other in list(_OPEN):
            known = other._lock_file
            if other is not self and known is not None and os.path.samestat(known, there):
                raise BusyError(f"{self.path} is already open in this process, as {other.path}")

    def _open_databases(self, handle: lmdb.Environment) -> None:
        # Not inside a read transaction: a handle that was opened in one stays valid only if LMDB
        # commits the transaction, and py-lmdb resets it instead.
        try:
            try:
                meta = handle.open_db(META.encode(), create=False)
            except lmdb.NotFoundError:
                require_header(lambda key: None, self.path)
                raise
            with handle.begin() as txn:
                require_header(lambda key: txn.get(key, db=meta), self.path)
            databases = {name: handle.open_db(name.encode(), create=False) for name in DATABASES}
        except lmdb.NotFoundError as exc:
            raise CorruptionError(f"{self.path} lacks a table: {exc}") from exc
        except lmdb.Error as exc:
            raise translate(exc, self.path) from exc
        #: All databases by name; ``tables`` are those of rows.
        self.databases = dict(databases)
        self.index = databases.pop(INDEX)
        self.slabs = databases.pop(SLABS)
        self.dictionaries = databases.pop(DICTIONARIES)
        self.meta = databases.pop(META)
        self.collection = databases.pop(COLLECTION)
        self.touches = databases.pop(TOUCHES)
        self.tables = databases

    @property
    def data_path(self) -> str:
        """The path of the data file."""
        return self._directory.data_path

    def file_bytes(self) -> int:
        """The length of the data file."""
        return os.fstat(self.data_handle).st_size

    # --- transactions -------------------------------------------------------------------

    def begin_write(self) -> lmdb.Transaction[bytes]:
        """Begin an LMDB write transaction; the caller holds ``tables_lock``."""
        self.require_present()
        try:
            return self.handle.begin(write=True)
        except (lmdb.PanicError, lmdb.MapResizedError):
            # Panic: an earlier commit could not write its meta page, and LMDB refuses writes until
            # it is reopened; the file holds the last good commit. Resized: another process has made
            # the file longer than the map of this one. Reopening solves both.
            self.reopen()
            return self.handle.begin(write=True)

    def last_transaction(self) -> int:
        """The number of LMDB's last transaction, by the meta pages of the file."""
        return int(self.handle.info()["last_txnid"])

    def finish_killed_commit(self) -> None:
        """Let read transactions see the last transaction of a process that was killed.

        LMDB first writes the meta page of a transaction, and then its number into memory that all
        processes share. If a process is killed in between, read transactions see the transaction
        before, until a write transaction begins and corrects the number. So beginning one, and
        aborting it, is enough.
        """
        try:
            with self.tables_lock:
                self.begin_write().abort()
        except lmdb.Error as exc:
            raise translate(exc, self.path) from exc

    def require_present(self) -> None:
        """StorageError if the open data file was deleted or replaced: writes would be lost."""
        try:
            # Relative to the open directory: the directory may have been renamed, and the process
            # may have changed its working directory.
            there = os.stat(DATA_FILE, dir_fd=self.directory_handle.fileno())
            identity = there.st_dev, there.st_ino
        except OSError:
            identity = None
        if identity != self._data_identity:
            raise StorageError(
                f"{self.data_path} was deleted or replaced while it was open, and nothing more is "
                "written to it; close the store, and open it again when the file is in place"
            )

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """A short write transaction on the tables, in which the whole log is applied first.

        For maintenance: gc, packing, rebuilding. It is committed and flushed at the end, unless the
        caller has aborted it; then nothing changes.
        """
        with self.write_lock:
            self.gate.check()
            try:
                with self.recent.locked():
                    with self.tables_lock:
                        txn = self.begin_write()
                        try:
                            recovery_point = self.recent.apply_into(txn)
                            yield txn
                            changes = not is_over(txn)
                            if changes:
                                txn.commit()
                        finally:
                            # After an error. After a commit this does nothing.
                            txn.abort()
                        if changes:
                            self.cover()
                    if changes:
                        self.recent.replace_memtable(recovery_point, self.recent.memtable.next_id)
            except lmdb.Error as exc:
                raise translate(exc, self.path) from exc

    def apply_log(self) -> None:
        """Apply the whole log to the tables now."""
        with self.snapshot() as (_, view):
            entries = view.entries()
        if entries:
            with self.writing():
                pass

    def retire_log(self) -> None:
        """Apply the log and mark it unused. No other process may write."""
        with self.write_lock, self.recent.locked():
            self.recent.retire_log()

    def reading(self) -> ReadTransaction[memoryview]:
        """A short read transaction on the tables alone, without commits that are only in the log.

        It returns memoryviews, which must not be used after its end.
        """
        return ReadTransaction(self, buffers=True)

    def reading_bytes(self) -> ReadTransaction[bytes]:
        """Like ``reading``, but returns bytes: faster for many small values."""
        return ReadTransaction(self, buffers=False)

    def require_writable(self) -> None:
        """ReadOnlyError if the store is open read-only."""
        if self.readonly:
            raise ReadOnlyError(f"{self.path} is open read-only")

    def snapshot(self) -> TableSnapshot:
        """A short read transaction on the tables, with a view of the commits that they lack."""
        return TableSnapshot(self)

    def lock_collector(self) -> Descriptor:
        """A descriptor that holds the collector lock until it is closed.

        BusyError if another collection holds the lock.
        """
        handle = self._directory.lock_collector()
        if handle is None:
            raise BusyError(f"{self.path} has a running collection; wait until it has ended")
        return handle

    def cover(self) -> None:
        """Wake the watches on the data file, and make it as long as its meta page claims.

        Call after each commit to the tables, holding ``tables_lock``. Never fails the commit.
        """
        try:
            os.utime(self.data_handle)
        except OSError:
            # The commit is done, so its caller must not get an error. Its writes have woken the
            # watches, perhaps a moment too early (see ``watching``).
            pass
        needed_bytes = (self.handle.info()["last_pgno"] + 1) * self._page_bytes
        if (
            self.map_limit is None
            and needed_bytes > self.map_bytes // 2
            and self._automatic_map() > self.map_bytes
        ):
            # With a longer map, before a transaction finds the map full.
            self.reopen()
        # A file never shrinks, so it need not be checked again up to this length. If lengthening
        # fails, the commit is complete all the same: the next process to open the file verifies it.
        if needed_bytes > self.covered_bytes and lengthen(self.data_handle, needed_bytes):
            self.covered_bytes = needed_bytes

    def flush(self) -> bool:
        """Flush all commits so far to the disk; False if they were flushed already."""
        self.gate.enter()
        try:
            return self.recent.flush()
        finally:
            self.gate.leave()

    def reopen(self) -> None:
        """Reopen LMDB after an error that left it unusable; hold ``tables_lock``."""
        self.gate.pause()
        try:
            self.handle.close()
            self._open()
        finally:
            self.gate.resume()

    def close(self) -> None:
        """Wait for transactions to end, and close. The last process applies the whole log first."""
        with self.write_lock:
            if self.gate.is_shut:
                return
            try:
                if not self.readonly:
                    self._settle_or_flush()
            finally:
                with self.tables_lock:
                    self.gate.shut(ClosedError(f"{self.path} is closed"))
                    self._let_go()

    def _settle_or_flush(self) -> None:
        try:
            self._settle()
        except StorageError:
            # For example: the disk is full, or no descriptor is free. The next process that opens
            # the store reads the log, so it is enough to flush the log.
            self.recent.flush()

    def _settle(self) -> None:
        """Apply the log and mark it unused; or flush it, if other processes have the store open."""
        try:
            self.require_present()
        except StorageError:
            # The data file was deleted or replaced, so its log is not needed.
            return
        with self._directory.exclusive():
            # Processes that open the store meanwhile wait for the mutex.
            self._directory.release()
            if self._directory.others_present():
                self.recent.flush()
            else:
                with self.recent.locked():
                    self.recent.retire_log()

    def _let_go(self) -> None:
        """Wake the watches and close all files. Hold both locks, so that no fork comes between."""
        for watch in list(self.watches):
            watch.wake()
        self.handle.close()
        self.recent.close()
        os.close(self.data_handle)
        self.directory_handle.close()
        self._directory.release()
        _OPEN.discard(self)

    # --- fork ------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Keep all threads out of LMDB while the process is copied.

        The child must close its copy of the environment, or py-lmdb will not let it open the store
        again. If it closed the copy with a transaction open, it would release the reader slot or
        the write lock that the parent still uses.
        """
        self.write_lock.acquire()
        self.tables_lock.acquire()
        try:
            self.gate.pause()
        except BaseException:
            self.after_fork_in_parent()
            raise

    def after_fork_in_parent(self) -> None:
        """Resume after the fork."""
        self.gate.resume()
        self.tables_lock.release()
        self.write_lock.release()

    def after_fork_in_child(self) -> None:
        """Close the child's copy of the environment; every later call there raises ForkedError."""
        self.write_lock = threading.Lock()
        self.tables_lock = threading.Lock()
        if self.gate.is_shut:
            # Another thread closed it while the fork waited. Do not close descriptors here: their
            # numbers may belong to other files by now.
            return
        self.gate.shut_in_child(
            ForkedError(
                f"{self.path} was opened before this process was forked; open it again here"
            )
        )
        from casstore.engine.lmdb.inheritance import leave_open, unshare_readers

        if self._lock_file is None or unshare_readers(self.path, self._lock_file.st_ino):
            self.handle.close()
        else:
            # Closing would free reader slots that the parent uses. So the copy stays open, and this
            # child cannot reopen the store.
            leave_open(self.handle)
        os.close(self.data_handle)


Stored = TypeVar("Stored", bytes, memoryview)


def is_over(txn: lmdb.Transaction[bytes]) -> bool:
    """True if this transaction has been committed or aborted."""
    try:
        txn.id()
    except lmdb.Error:
        return True
    return False


class ReadTransaction(Generic[Stored]):
    """``with env.reading() as txn``: a read transaction inside the gate, with typed errors."""

    __slots__ = ("_buffers", "_env", "_txn")

    def __init__(self, env: Environment, *, buffers: bool) -> None:
        self._env = env
        # With ``buffers`` py-lmdb returns memoryviews, else bytes. Any, because its type hints
        # distinguish the two by the literal value.
        self._buffers: Any = buffers
        self._txn: lmdb.Transaction[Stored]

    def __enter__(self) -> lmdb.Transaction[Stored]:
        env = self._env
        env.gate.enter()
        inside = True
        try:
            began_s = perf_counter()
            try:
                self._txn = env.handle.begin(buffers=self._buffers)
            except lmdb.MapResizedError:
                # Another process has made the file longer than the map of this one.
                env.gate.leave()
                inside = False
                with env.tables_lock:
                    env.reopen()
                env.gate.enter()
                inside = True
                self._txn = env.handle.begin(buffers=self._buffers)
            if env.refuses_newer or perf_counter() - began_s > _HELD_UP_S:
                self._require_newest()
        except BaseException as exc:
            if inside:
                env.gate.leave()
            if isinstance(exc, lmdb.Error):
                raise translate(exc, env.path) from exc
            raise
        return self._txn

    def _require_newest(self) -> None:
        """Restart the transaction if commits came while it began.

        LMDB reads the number of the newest transaction, and then the meta page of that number. If
        writers commit twice in between, the meta page holds a newer state, which LMDB then reads
        under the older number; with format 1 (LMDB 1.0) every read fails with MDB_BAD_TXN.
        """
        handle = self._env.handle
        for _ in range(_BEGIN_TRIES):
            if self._env.last_transaction() == self._txn.id():
                return
            self._txn.abort()
            self._txn = handle.begin(buffers=self._buffers)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._txn.abort()
        finally:
            self._env.gate.leave()
        if isinstance(exc, lmdb.Error):
            raise translate(exc, self._env.path) from exc


class TableSnapshot:
    """``with env.snapshot() as (txn, view)``: one state of the store.

    ``txn`` reads the tables, ``view`` the commits after those in the tables.
    """

    __slots__ = ("_env", "_reading")

    def __init__(self, env: Environment) -> None:
        self._env = env

    def __enter__(self) -> tuple[lmdb.Transaction[memoryview], MemtableView]:
        recent = self._env.recent
        for _ in range(_SNAPSHOT_TRIES):
            try:
                memtable = recent.current()
            except ValueError:
                # The log's descriptor is closed, and with it the store.
                self._env.gate.check()
                raise
            self._reading: ReadTransaction[memoryview] = ReadTransaction(self._env, buffers=True)
            txn = self._reading.__enter__()
            try:
                view = recent.view(txn, memtable)
            except BaseException:
                self._reading.__exit__(None, None, None)
                raise
            if view is not None:
                return txn, view
            self._reading.__exit__(None, None, None)
            recent.catch_up()
        raise BusyError(
            f"commits to {self._env.path} come faster than they can be read; retry the read"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reading.__exit__(kind, exc, trace)


# The open environments of this process. A fork keeps all threads out of them.
_OPEN: set[Environment] = set()
# The environments that the current fork has paused.
_forking: list[Environment] = []
# Held during a fork, and while an environment is created or opened.
_fork_lock = threading.Lock()


def _before_fork() -> None:
    _fork_lock.acquire()
    if _OPEN:
        # Imported before the fork: the child uses it, and would wait for ever if another thread was
        # importing it. Not at the top of this module: it imports ctypes, which takes as long to
        # load as casstore, and few programs fork.
        import casstore.engine.lmdb.inheritance  # noqa: F401
    for env in list(_OPEN):
        env.before_fork()
        # One by one: Ctrl-C may end this function early, the fork happens anyway, and afterwards
        # only acquired locks may be released.
        _forking.append(env)


def _after_fork_in_parent() -> None:
    for env in _forking:
        env.after_fork_in_parent()
    _forking.clear()
    _fork_lock.release()


def _after_fork_in_child() -> None:
    for env in _OPEN.union(_forking):
        env.after_fork_in_child()
    _forking.clear()
    _OPEN.clear()
    _fork_lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
