"""LMDB, opened with care: the one module that begins transactions.

What it adds to py-lmdb: a file that is checked before it is mapped; creation that
is complete or absent; a gate that closes for ``close`` and for ``fork``; typed
errors; three durabilities. LMDB's own rules are kept here so that nobody above has
to know them: one environment per file and process, never used after a fork, write
transactions bound to their thread, read transactions short.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from weakref import WeakSet

import lmdb

from casstore.engine.forks import Descriptor
from casstore.engine.lmdb import guard
from casstore.engine.lmdb.creation import (
    COLLECTION,
    DATABASES,
    DICTIONARIES,
    INDEX,
    JOURNAL,
    META,
    SLABS,
    TOUCHES,
    create_store,
)
from casstore.engine.lmdb.directory import (
    DATA_FILE,
    FILE_MODE,
    FULL,
    LOCK_FILE,
    MAX_READERS,
    PROCESS,
    RELAXED,
    StoreDirectory,
    storage_error,
)
from casstore.engine.lmdb.gate import Gate
from casstore.engine.lmdb.keeping import Keeper, return_to_kept
from casstore.engine.lmdb.translation import translate
from casstore.errors import (
    BusyError,
    CasstoreError,
    ClosedError,
    CorruptionError,
    ForkedError,
    ReadOnlyError,
    StorageError,
)
from casstore.format.header import require_header

if TYPE_CHECKING:
    from casstore.engine.watches import DescriptorWatch

# Address space, not disk. A process has 128 TiB of it, and may open a thousand stores.
FIRST_MAP_BYTES: Final = 64 << 30
# An automatic map has space for the file to become this many times as long.
_MAP_GROWTH: Final = 4

# How long an opener waits for a short file to be covered by its writer.
_COVER_TRIES: Final = 50
# How often a read begins anew because commits came in between.
_BEGIN_TRIES: Final = 16
_COVER_PAUSE_S: Final = 0.002
# Beginning to read takes less, mostly a tenth of it, and two commits take more: each writes to
# the file twice at the least. Asking every time would make the shortest reads a fifth longer.
_HELD_UP_S: Final = 5e-6


class Environment:
    """One open LMDB environment and its databases."""

    def __init__(
        self,
        path: str,
        *,
        durability: str = FULL,
        readonly: bool = False,
        create: bool = True,
        verify: bool = False,
        map_bytes: int | None = None,
        lmdb_version: int | None = None,
        prove: Callable[[Environment], object],
        directory: StoreDirectory | None = None,
    ) -> None:
        """Open; ``prove`` verifies all content, and is called if that was asked for or is due.

        ``map_bytes`` bounds the file; None: as long as the disk allows. ``directory``: the
        store's own, by a caller that holds its mutex already.
        """
        self.path = path
        self.durability = durability
        self.readonly = readonly
        self._map_limit = map_bytes
        #: The address space that the file is mapped to.
        self.map_bytes = map_bytes or FIRST_MAP_BYTES
        self._lmdb_version = 0 if lmdb_version is None else lmdb_version
        self._directory = directory or StoreDirectory(path, readonly=readonly)
        self.gate = Gate()
        self.write_lock = threading.Lock()
        #: The length that the file is known to have.
        self.covered_bytes = 0
        #: Who keeps a state behind the writers, if they do not flush (``relaxed``).
        self.keeper: Keeper | None = None
        # To be woken when this closes; they belong to those who wait. Add inside the gate.
        self.watches: WeakSet[DescriptorWatch] = WeakSet()

        self._directory.prepare(create=create and not readonly)
        with self._directory.exclusive():
            if not readonly:
                self._tidy_up()
            self._create_if_absent()
            return_to_kept(self._directory, readonly=readonly)
            self._check_file(verify=verify)
            suspect = self._is_suspect()
            try:
                held = self._directory.hold(None if readonly else durability)
                self.durability = held or FULL
                # A child would inherit what it cannot find and close, and LMDB opens nothing twice.
                with _fork_lock:
                    self._open()
                    self.data_handle = self._directory.open_data()
                    #: The store's directory, held open.
                    self.place = self._directory.open_place()
                    _OPEN.add(self)
                opened = os.fstat(self.data_handle)
                self._data_identity = opened.st_dev, opened.st_ino
            except BaseException:
                self._directory.release()
                raise
            try:
                # Still under the mutex: whoever opens meanwhile waits for the proof.
                if verify or suspect:
                    prove(self)
                self._note_durability()
                if not readonly:
                    # What a killed writer left short was verified just now. Others who open it
                    # could not do that beside this one, which may not commit for long.
                    self.cover()
            except BaseException:
                with self.write_lock:
                    self.gate.shut(ClosedError(f"{self.path} could not be opened"))
                    self._let_go()
                raise

    def _tidy_up(self) -> None:
        try:
            self._directory.remove_leftovers()
        except StorageError:
            # It may be somebody else's, who was killed while compacting. It takes room, and is
            # no reason to keep the store shut.
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
        path = self._directory.data_path
        if verify:
            if self._directory.others_present():
                raise BusyError(f"{self.path} is in use; its file can be verified only when closed")
            guard.verify_structure(path)
        # Who only reads it changes nothing, and covers nothing either.
        written = self._directory.writers_present()
        extent = guard.read_extent(path)
        tries = 0
        while (extent.is_short or not extent.is_in_order) and written and tries < _COVER_TRIES:
            # A writer in another process is between its commit and covering the file, or
            # committed twice while the two meta pages were read.
            time.sleep(_COVER_PAUSE_S)
            extent = guard.read_extent(path)
            tries += 1
        if not extent.is_in_order:
            raise CorruptionError(
                f"{path} has meta pages of transactions {extent.transactions[0]} and "
                f"{extent.transactions[1]}, which do not follow each other: one is damaged"
            )
        # LMDB 1.0 as py-lmdb builds it refuses pages that are newer than the transaction.
        self.refuses_newer = extent.lmdb_version == 1
        self.page_header_bytes = extent.header_bytes
        if extent.is_short:
            if written:
                raise BusyError(
                    f"{path} has {extent.file_bytes} of {extent.needed_bytes} bytes, and another "
                    "process uses it; close that one, so that it can be verified"
                )
            guard.verify_structure(path)

    def _is_suspect(self) -> bool:
        """Did the machine go down with writes unflushed? Then the file proves itself first."""
        if self._directory.ended_boot() is None:
            return False
        if self._directory.is_lost:
            self._directory.drop_cache()
        guard.verify_structure(self._directory.data_path)
        return True

    def _note_durability(self) -> None:
        """Leave the marker if this process will write without a flush; else make it needless."""
        if self.readonly:
            return
        if self.durability == RELAXED:
            self.keeper = Keeper(self, self._directory, self._page_bytes)
            self._directory.mark_unsynced()
        elif self.durability == PROCESS:
            # Its pages are written over from now on.
            self._directory.forget_kept()
            self._directory.mark_unsynced()
        elif not self._directory.is_clear:
            # A writer without flushes was killed. The system's cache still holds what it
            # wrote; once that is on the disk there is nothing left to mark.
            self.flush()
            self._directory.clear_unsynced()

    def _open(self) -> None:
        self._require_first()
        if self._map_limit is None:
            self.map_bytes = self._automatic_map()
        self._lock_file = self._directory.reserve_lock_file(LOCK_FILE, MAX_READERS)
        try:
            handle = lmdb.open(
                # A path of the operating system may be no text in any encoding.
                os.fsencode(self.path),
                map_size=self.map_bytes,
                readonly=self.readonly,
                metasync=self.durability == FULL,
                sync=self.durability == FULL,
                mode=FILE_MODE,
                create=False,
                writemap=False,
                max_readers=MAX_READERS,
                max_dbs=len(DATABASES),
                readahead=False,
            )
        except lmdb.ReadonlyError as exc:
            # What LMDB makes of a refusal by the operating system.
            # Who reads writes down there which pages must stay: not a thing one expects.
            also = "; who reads must be able to write to its lock.mdb" if self.readonly else ""
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
        """Address space for the file as it is now, and for what may come."""
        try:
            file_bytes = os.stat(self._directory.data_path).st_size
        except OSError as exc:
            raise storage_error(f"cannot read {self._directory.data_path}", exc) from exc
        map_bytes = FIRST_MAP_BYTES
        while map_bytes < _MAP_GROWTH * file_bytes:
            map_bytes *= 2
        return map_bytes

    def _require_first(self) -> None:
        """Raise if this process has the store open already, under whatever name.

        The system drops all locks that a process has on a file when it closes any descriptor of
        it, and LMDB relies on such locks: others would take the readers here for dead.
        """
        try:
            there = os.stat(os.path.join(self.path, LOCK_FILE))
        except OSError:
            # Nobody can have it open, or whoever opens it next says why not.
            return
        for other in list(_OPEN):
            known = other._lock_file
            if other is not self and known is not None and os.path.samestat(known, there):
                raise BusyError(f"{self.path} is already open in this process, as {other.path}")

    def _open_databases(self, handle: lmdb.Environment) -> None:
        # Without a transaction of ours: py-lmdb resets a read transaction where LMDB
        # would have to commit it for the handle to stay valid.
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
        #: All of them by name, whatever they are for.
        self.databases = dict(databases)
        self.index = databases.pop(INDEX)
        self.slabs = databases.pop(SLABS)
        self.dictionaries = databases.pop(DICTIONARIES)
        self.meta = databases.pop(META)
        self.collection = databases.pop(COLLECTION)
        self.touches = databases.pop(TOUCHES)
        self.journal = databases.pop(JOURNAL)
        self.tables = databases

    @property
    def data_path(self) -> str:
        """The file that holds everything."""
        return self._directory.data_path

    def file_bytes(self) -> int:
        """The length of the data file."""
        return os.fstat(self.data_handle).st_size

    # --- transactions -------------------------------------------------------------------

    def begin_write(self) -> lmdb.Transaction[bytes]:
        """Begin the process's one write transaction; hold ``write_lock``."""
        self._require_flushed()
        self._require_present()
        try:
            return self.handle.begin(write=True)
        except (lmdb.PanicError, lmdb.MapResizedError):
            # Panic: an earlier commit could not write its meta page, and LMDB takes no more
            # writes until it is opened again. The file holds the last good commit. Resized:
            # another process has made the file longer than the map of this one.
            self.reopen()
            return self.handle.begin(write=True)

    def _require_present(self) -> None:
        """Raise if the open file is no longer the store's: what is written there would be lost."""
        try:
            # By the open directory, which may have been renamed, and the process may have
            # changed its own.
            there = os.stat(DATA_FILE, dir_fd=self.place.fileno())
            present = (there.st_dev, there.st_ino) == self._data_identity
        except FileNotFoundError:
            present = False
        except OSError as exc:
            raise storage_error(f"cannot find {self.data_path}", exc) from exc
        if not present:
            raise StorageError(
                f"{self.data_path} was deleted or replaced while it was open, and nothing more is "
                "written to it; close the store, and open it again when the file is in place"
            )

    @contextmanager
    def writing(self) -> Iterator[lmdb.Transaction[bytes]]:
        """One short write transaction beside the writers' queue: for those who care for a store.

        Committed at the end; aborted inside, it leaves everything as it was.
        """
        with self.write_lock:
            self.gate.check()
            try:
                txn = self.begin_write()
                try:
                    yield txn
                    changes = not is_over(txn)
                    if changes:
                        txn.commit()
                finally:
                    # After a commit there is nothing left to abort.
                    txn.abort()
            except lmdb.Error as exc:
                raise translate(exc, self.path) from exc
            if changes:
                self.announce()
                self.cover()

    def reading(self) -> Reading[memoryview]:
        """A short read transaction; nothing may leave it as a view."""
        return Reading(self, buffers=True)

    def reading_bytes(self) -> Reading[bytes]:
        """One that gives bytes: quicker, if there are many and they are small."""
        return Reading(self, buffers=False)

    def require_writable(self) -> None:
        """Raise unless this environment takes writes."""
        if self.readonly:
            raise ReadOnlyError(f"{self.path} is open read-only")
        self._require_flushed()

    def _require_flushed(self) -> None:
        if self.keeper is not None:
            self.keeper.require_flushed()

    def lock_collector(self) -> Descriptor:
        """A descriptor that holds the right to collect; closing it gives that back."""
        handle = self._directory.lock_collector()
        if handle is None:
            raise BusyError(f"{self.path} is being collected already")
        return handle

    def cover(self) -> None:
        """After a commit: see that the file is as long as its meta page says."""
        needed_bytes = (self.handle.info()["last_pgno"] + 1) * self._page_bytes
        if (
            self._map_limit is None
            and needed_bytes > self.map_bytes // 2
            and self._automatic_map() > self.map_bytes
        ):
            # Early, so that no transaction finds the map full.
            self.reopen()
        # A file never gets shorter, so what was long enough once need not be asked for again.
        if needed_bytes > self.covered_bytes and guard.cover(self.data_handle, needed_bytes):
            self.covered_bytes = needed_bytes

    def announce(self) -> None:
        """After a commit: wake those who watch the file, here and in other processes."""
        try:
            os.utime(self.data_handle)
        except OSError:
            # The commit is done and must not look failed. Its writes have woken them too, if
            # perhaps a moment early (see ``watching``).
            pass
        if self.keeper is not None:
            self.keeper.unkept.set()

    def flush(self) -> None:
        """Make everything committed so far survive a power loss."""
        self.gate.check()
        if self.keeper is not None:
            self.keeper.keep()
            return
        self.gate.enter()
        try:
            self._sync()
        finally:
            self.gate.leave()

    def _sync(self) -> None:
        try:
            self.handle.sync(True)
        except lmdb.Error as exc:
            if self.durability == PROCESS:
                # The next flush says nothing of the pages that this one lost.
                self._directory.mark_lost()
            raise translate(exc, self.path) from exc

    def reopen(self) -> None:
        """Open LMDB anew, after an error that left its environment unusable."""
        self.gate.pause()
        try:
            if self.keeper is None:
                self.handle.close()
                self._open()
            else:
                self._reopen_kept(self.keeper)
        finally:
            self.gate.resume()

    def _reopen_kept(self, keeper: Keeper) -> None:
        try:
            keeper.step_down()
            self.handle.close()
            self._open()
            keeper.stand_again()
        except BaseException as exc:
            # Whatever it was, Ctrl-C too.
            keeper.fall(exc)
            if isinstance(exc, CasstoreError):
                keeper.require_flushed()
            raise

    def close(self) -> None:
        """Wait for transactions to end, flush what is pending, and let go of the files."""
        with self.write_lock:
            if self.gate.is_shut:
                return
            self.gate.shut(ClosedError(f"{self.path} is closed"))
            unflushed = self.durability != FULL and not self.readonly
            here = unflushed and self._directory.holds(self.data_handle)
            try:
                if self.keeper is not None:
                    self.keeper.keep_last()
                elif unflushed:
                    self._sync()
            except lmdb.Error as exc:
                raise translate(exc, self.path) from exc
            finally:
                self._let_go()
            # In a directory that was moved the marker stays, for whoever opens the store there.
            if here:
                with self._directory.exclusive():
                    if not self._directory.others_present() and not self._directory.is_lost:
                        # One who was killed may have written since our own flush.
                        self._directory.flush_data()
                        self._directory.clear_unsynced()

    def _let_go(self) -> None:
        """Close everything; hold ``write_lock``, so that no fork comes in between."""
        for watch in list(self.watches):
            watch.wake()
        if self.keeper is not None:
            self.keeper.step_down()
        self.handle.close()
        if self.keeper is not None:
            self.keeper.close()
        os.close(self.data_handle)
        self.place.close()
        self._directory.release()
        _OPEN.discard(self)

    # --- fork ------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Let no thread be inside LMDB while the process is copied.

        The child must close its copy of the environment, or py-lmdb will not let it
        open the store again; and closing with a transaction open would hand the
        parent's reader slot or write lock to others.
        """
        self.write_lock.acquire()
        try:
            self.gate.pause()
        except BaseException:
            self.after_fork_in_parent()
            raise

    def after_fork_in_parent(self) -> None:
        """Go on."""
        self.gate.resume()
        self.write_lock.release()

    def after_fork_in_child(self) -> None:
        """Drop the copy; from here on every use is refused by name."""
        self.write_lock = threading.Lock()
        if self.gate.is_shut:
            # Closed while the fork waited. The number of its file may be another's by now.
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
            # The parent's readers before all. This process cannot open the store a second time.
            leave_open(self.handle)
        os.close(self.data_handle)


Stored = TypeVar("Stored", bytes, memoryview)


def is_over(txn: lmdb.Transaction[bytes]) -> bool:
    """Has this transaction been committed or aborted?"""
    try:
        txn.id()
    except lmdb.Error:
        return True
    return False


class Reading(Generic[Stored]):
    """``with env.reading() as txn``: enters the gate, begins, ends, and translates errors."""

    __slots__ = ("_buffers", "_env", "_txn")

    def __init__(self, env: Environment, *, buffers: bool) -> None:
        self._env = env
        self._buffers = buffers
        self._txn: lmdb.Transaction[Stored]

    def __enter__(self) -> lmdb.Transaction[Stored]:
        env = self._env
        env.gate.enter()
        try:
            began_s = perf_counter()
            try:
                self._txn = self._begin()
            except lmdb.MapResizedError:
                # Another process has made the file longer than the map of this one.
                env.gate.leave()
                with env.write_lock:
                    env.reopen()
                env.gate.enter()
                self._txn = self._begin()
            if env.refuses_newer or perf_counter() - began_s > _HELD_UP_S:
                self._require_newest()
        except lmdb.Error as exc:
            env.gate.leave()
            raise translate(exc, env.path) from exc
        except BaseException:
            env.gate.leave()
            raise
        return self._txn

    def _begin(self) -> lmdb.Transaction[Stored]:
        # What ``buffers`` says at run time, ``Stored`` says to the type checker.
        begin: Callable[..., lmdb.Transaction[Stored]] = self._env.handle.begin
        return begin(buffers=self._buffers)

    def _require_newest(self) -> None:
        """Begin again if commits came while the transaction began.

        LMDB takes the number of the newest transaction and then reads its meta page. Held up
        in between while others commit twice, it finds newer roots there under the older
        number; with format 1 every read then fails with MDB_BAD_TXN, with format 0 the journal
        of the older state (``Journal.at``) would be read with the tables of the newer one.
        """
        handle = self._env.handle
        for _ in range(_BEGIN_TRIES):
            if handle.info()["last_txnid"] == self._txn.id():
                return
            self._txn.abort()
            self._txn = self._begin()

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


# Environments that a fork must quiesce: all that were opened and not closed.
_OPEN: set[Environment] = set()
# Those that were, just now.
_forking: list[Environment] = []
_fork_lock = threading.Lock()


def _before_fork() -> None:
    _fork_lock.acquire()
    if _OPEN:
        # For the child, which must not wait for whoever imports it just now. Not at the top of
        # this module: ctypes takes as long to load as casstore does, and few programs fork.
        import casstore.engine.lmdb.inheritance  # noqa: F401
    for env in list(_OPEN):
        env.before_fork()
        # One by one: Ctrl-C does not stop a fork, and what was not acquired must not be released.
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
