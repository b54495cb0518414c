"""The files of a store, and the file locks by which processes exclude each other.

    data.mdb, lock.mdb   LMDB's data file and lock file
    data.mdb.new         a store being created; renamed when complete
    redo.log             commits that are not in data.mdb yet (see ``log``)
    compact/             a store being compacted, until its file is renamed over data.mdb
    locks/               empty files, locked with flock
    reserve              disk space for deleting (see ``reserve``)
    search.sqlite        the index of ``casstore.search``, derived from the rest

The locks in ``locks/`` are: ``mutex`` (one process at a time creates, checks or opens the store),
``writers`` and ``readers`` (shared, by all processes that have it open), ``log`` (a process
appends to the redo log), ``applier`` (it applies the log), ``collector`` (it collects garbage).

A lock by flock belongs to the open file, not to the process: closing another descriptor elsewhere
in the program does not release it, and the kernel releases it when its process dies. A forked child
has the same open files, so it closes its copies at once (``forks``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from casstore.engine import forks
from casstore.engine.files import FULL_DISK as FULL_DISK
from casstore.engine.files import open_regular, write_at
from casstore.engine.files import storage_error as storage_error
from casstore.engine.files import sync_directory as sync_directory
from casstore.engine.lmdb.log import LOG_FILE, RedoLog
from casstore.engine.lmdb.reserve import RESERVE_FILE
from casstore.errors import (
    BusyError,
    CorruptionError,
    ForeignStoreError,
    InvalidInputError,
    StorageError,
    StoreNotFoundError,
)

DATA_FILE: Final = "data.mdb"
NEW_FILE: Final = "data.mdb.new"
NEW_LOCK_FILE: Final = NEW_FILE + "-lock"
LOCK_FILE: Final = "lock.mdb"
LOCKS: Final = "locks"
_COMPACT: Final = "compact"
#: Derived files, which are removed when the data file is replaced: they may hold erased content.
DERIVED_FILES: Final = ("search.sqlite-journal", "search.sqlite")
_OWN_NAMES: Final = frozenset(
    (
        *DERIVED_FILES,
        DATA_FILE,
        NEW_FILE,
        NEW_LOCK_FILE,
        LOCK_FILE,
        LOCKS,
        LOG_FILE,
        _COMPACT,
        RESERVE_FILE,
    )
)

FILE_MODE: Final = 0o600
#: How many read transactions a store may have at once, of all processes: slots in lock.mdb.
MAX_READERS: Final = 2048
DIRECTORY_MODE: Final = 0o700

# The files in ``locks/`` that processes hold while they have the store open.
_WRITERS: Final = "writers"
_READERS: Final = "readers"
_LOG_LOCK: Final = "log"
_APPLIER_LOCK: Final = "applier"

# Upper bounds of the length of LMDB's lock file: of its header, and of the slot of one reader.
_LOCK_HEADER_BYTES: Final = 4096
_READER_BYTES: Final = 64
# The interval at which a process that waits for a store checks whether it is closed.
_WAIT_PAUSE_S: Final = 0.05


class StoreDirectory:
    """A store's directory: its files, and the locks that this process holds there."""

    def __init__(self, path: str, *, readonly: bool = False) -> None:
        self.path = path
        self._readonly = readonly
        self.data_path = os.path.join(path, DATA_FILE)
        self._held: list[forks.Descriptor] = []
        # True inside ``alone``: then ``exclusive`` must not take the mutex again.
        self._alone = False

    def prepare(self, *, create: bool) -> None:
        """Require a store here; with ``create`` and if nothing is here, create the directory.

        StoreNotFoundError, ForeignStoreError, CorruptionError, InvalidInputError or StorageError if
        that is not possible.
        """
        if os.path.exists(self.data_path):
            self._require_file()
            return
        if os.path.islink(self.data_path):
            # Do not create an empty store here: it would hide that the link to the store is broken.
            raise StorageError(
                f"{self.data_path} is a link to {os.readlink(self.data_path)}, which is not there; "
                "restore that file, or correct the link"
            )
        try:
            strangers = set(os.listdir(self.path)) - _OWN_NAMES
        except FileNotFoundError:
            strangers = set()
        except NotADirectoryError as exc:
            raise InvalidInputError(f"{self.path} is a file; a store is a directory") from exc
        except OSError as exc:
            raise storage_error(f"cannot read {self.path}", exc) from exc
        if strangers:
            raise ForeignStoreError(
                f"{self.path} holds no store and is not empty ({sorted(strangers)[0]!r} is there); "
                "choose an empty directory"
            )
        self._require_not_lost()
        if not create:
            raise StoreNotFoundError(f"no store at {self.path}")
        try:
            os.makedirs(self.path, mode=DIRECTORY_MODE, exist_ok=True)
            sync_directory(os.path.dirname(os.path.abspath(self.path)))
        except OSError as exc:
            raise storage_error(f"cannot create {self.path}", exc) from exc

    def _require_file(self) -> None:
        """Raise StorageError unless the data file can be read, and is a file or a link to one."""
        try:
            os.close(open_regular(self.data_path, follow=True))
        except OSError as exc:
            raise storage_error(f"cannot read {self.data_path}", exc) from exc

    def _require_not_lost(self) -> None:
        """CorruptionError if the directory had a store whose data file is missing.

        Creating a new store would hide the loss. LMDB's lock file shows that there was a store: it
        appears when a complete store is first opened.
        """
        # Look for the lock file first: another process that is creating the store makes it last.
        had_store = os.path.lexists(os.path.join(self.path, LOCK_FILE))
        if had_store and not os.path.lexists(self.data_path):
            raise CorruptionError(
                f"{self.path} held a store, but its {DATA_FILE} is gone; restore it from a backup, "
                "or delete the directory to begin with an empty store"
            )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the store's opening mutex: one process at a time creates, checks or opens."""
        if self._alone:
            yield
            return
        handle = self._lock_handle("mutex")
        try:
            if handle is not None:
                self._flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            if handle is not None:
                handle.unlock()

    @contextmanager
    def alone(self, wait_s: float) -> Iterator[None]:
        """Wait until no process has the store open, and hold the mutex, so that none opens it.

        BusyError if the store is not closed within ``wait_s``. While this waits, the mutex is free,
        because closing the store needs it.
        """
        deadline = time.monotonic() + wait_s
        while (handle := self._lock_alone()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise BusyError(
                    f"{self.path} is open, in this process or another; close it there, or wait"
                )
            # Poll, because a blocking flock has no timeout.
            time.sleep(min(_WAIT_PAUSE_S, left_s))
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            handle.unlock()

    def _lock_alone(self) -> forks.Descriptor | None:
        """The locked mutex; None if a process has the store open, or holds the mutex."""
        handle = self._lock_handle("mutex")
        assert handle is not None  # None is possible only for a read-only directory object
        try:
            self._flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = not self.others_present() and not self._lmdb_is_open()
        except BlockingIOError:
            free = False
        except BaseException:
            handle.unlock()
            raise
        if not free:
            handle.unlock()
            return None
        return handle

    def _lmdb_is_open(self) -> bool:
        """True if a program that does not use our locks has opened the data file with LMDB.

        LMDB locks the first byte of its lock file; this tries to. A lock that this process holds
        would not be noticed, but it holds none: ``others_present`` has shown that.
        """
        try:
            handle = os.open(os.path.join(self.path, LOCK_FILE), os.O_RDWR)
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise storage_error(f"cannot lock {self.path}", exc) from exc
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError):
            return True
        finally:
            os.close(handle)
        return False

    def hold(self) -> None:
        """Hold the lock that shows that this process has the store open, until ``release``.

        Call inside ``exclusive``.
        """
        self._share(_READERS if self._readonly else _WRITERS)

    def writers_present(self) -> bool | None:
        """True if another process has the store open for writing.

        Call inside ``exclusive``, before ``hold``. None if this process has no permission to find
        out.
        """
        return self._others_hold(_WRITERS)

    def others_present(self) -> bool:
        """True if another process has the store open.

        Call inside ``exclusive``, before ``hold``.
        """
        return bool(self._others_hold(_WRITERS) or self._others_hold(_READERS))

    def open_log_lock(self) -> forks.Descriptor | None:
        """A descriptor of the file that a process locks while it appends to the redo log."""
        return self._lock_handle(_LOG_LOCK)

    def open_applier_lock(self) -> forks.Descriptor | None:
        """A descriptor of the file that a process locks while it applies the redo log."""
        return self._lock_handle(_APPLIER_LOCK)

    def open_log(self, max_bytes: int, *, create: bool = False) -> RedoLog | None:
        """The redo log, open, limited to ``max_bytes``; None if the file does not exist."""
        flags = os.O_RDONLY if self._readonly else os.O_RDWR
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        path = os.path.join(self.path, LOG_FILE)
        try:
            created = create and not os.path.lexists(path)
            log = RedoLog(forks.open_file(path, flags, FILE_MODE), path, max_bytes)
            if created:
                sync_directory(self.path)
            return log
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(f"cannot open {path}", exc) from exc

    def remove_log(self) -> None:
        """Remove the log, durably. The tables must say that it is not in use. Raises OSError."""
        path = os.path.join(self.path, LOG_FILE)
        if os.path.lexists(path):
            os.unlink(path)
            sync_directory(self.path)

    def remove_derived(self) -> None:
        """Remove the derived files, which are rebuilt when they are needed. Raises OSError."""
        for name in DERIVED_FILES:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def lock_collector(self) -> forks.Descriptor | None:
        """A descriptor that holds the collector lock; None if another collection holds it."""
        handle = self._lock_handle("collector")
        if handle is None:
            raise StorageError(f"no permission to create or open lock files in {self.path}/{LOCKS}")
        try:
            self._flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            return None
        except BaseException:
            # Ctrl-C may have come after the lock was taken: nothing else would release it.
            handle.unlock()
            raise
        return handle

    def release(self) -> None:
        """Release what ``hold`` has locked."""
        for handle in self._held:
            handle.unlock()
        self._held.clear()

    def _share(self, name: str) -> None:
        handle = self._lock_handle(name)
        if handle is not None:
            self._held.append(handle)
            self._flock(handle, fcntl.LOCK_SH)

    def _others_hold(self, name: str) -> bool | None:
        handle = self._lock_handle(name)
        if handle is None:
            # On a read-only medium no process can be writing.
            return False if os.statvfs(self.path).f_flag & os.ST_RDONLY else None
        try:
            self._flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            handle.unlock()
        return False

    def _flock(self, handle: forks.Descriptor, operation: int) -> None:
        """Lock or unlock; BlockingIOError if ``operation`` must not wait and the lock is held."""
        try:
            fcntl.flock(handle, operation)
        except BlockingIOError:
            raise
        except OSError as exc:
            # For example on a file system without file locks.
            raise storage_error(f"cannot lock {self.path}", exc) from exc

    def _lock_handle(self, name: str) -> forks.Descriptor | None:
        """A descriptor of the lock file ``name``, created if it does not exist.

        None if this is a reader without permission to open or create it, or on a read-only medium:
        there are no writers there, so readers need no locks.
        """
        folder = os.path.join(self.path, LOCKS)
        try:
            with suppress(FileExistsError):
                os.mkdir(folder, mode=DIRECTORY_MODE)
            # O_NOFOLLOW: through a symbolic link, the locks would be in another directory.
            inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                flags = os.O_RDWR | os.O_CREAT
                return forks.open_file(name, flags, FILE_MODE, dir_fd=inside)
            finally:
                os.close(inside)
        except OSError as exc:
            if self._readonly and exc.errno in (errno.EROFS, errno.EACCES):
                return None
            raise storage_error(f"cannot lock {self.path}", exc) from exc

    def reserve_lock_file(self, name: str, readers: int) -> os.stat_result | None:
        """Allocate the disk space of LMDB's lock file before LMDB maps it; returns its identity.

        LMDB lengthens the file without allocating space; on a full disk the first access to such a
        page kills the process. Here a full disk is an error. None for a reader without permission
        to open the file, or on a read-only medium.
        """
        size = _LOCK_HEADER_BYTES + _READER_BYTES * readers
        try:
            handle = open_regular(os.path.join(self.path, name), os.O_RDWR | os.O_CREAT)
        except OSError as exc:
            if self._readonly and exc.errno in (errno.EROFS, errno.EACCES):
                return None
            raise storage_error(f"cannot open {name} of {self.path}", exc) from exc
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            elif os.fstat(handle).st_size < size:
                write_at(handle, bytes(size), 0)
            return os.fstat(handle)
        except OSError as exc:
            raise storage_error(f"no space for {name} of {self.path}", exc) from exc
        finally:
            os.close(handle)

    def open_data(self) -> int:
        """A descriptor of the data file."""
        try:
            return os.open(self.data_path, os.O_RDONLY if self._readonly else os.O_RDWR)
        except OSError as exc:
            raise storage_error(f"cannot open {self.data_path}", exc) from exc

    def open_directory(self) -> forks.Descriptor:
        """A descriptor of the store's directory itself."""
        try:
            return forks.open_directory(self.path)
        except OSError as exc:
            raise storage_error(f"cannot open {self.path}", exc) from exc

    # --- compacting --------------------------------------------------------------------

    @contextmanager
    def compaction_directory(self) -> Iterator[str]:
        """A directory for a store that may replace this one; removed afterwards."""
        path = os.path.join(self.path, _COMPACT)
        try:
            os.mkdir(path, mode=DIRECTORY_MODE)
        except OSError as exc:
            raise storage_error(f"cannot create {path}", exc) from exc
        try:
            yield path
        finally:
            self.remove_leftovers()

    def take_over(self, path: str) -> None:
        """Replace this store's data file with that of the store at ``path``, durably.

        Raises OSError. One rename replaces the file, so a crash leaves the old one or the new one.
        """
        new = os.path.join(path, DATA_FILE)
        self.make_alike(new)
        os.rename(new, self.data_path)
        sync_directory(self.path)

    def make_alike(self, new: str) -> None:
        """Give the file ``new`` the owner and mode of this store's data file, durably.

        Raises OSError.
        """
        old = os.stat(self.data_path)
        handle = os.open(new, os.O_RDWR)
        try:
            made = os.fstat(handle)
            if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
                # Compacting or backing up as another user must not lock the owner out.
                os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove_leftovers(self) -> None:
        """Remove the files of a compaction that did not finish. Hold the mutex."""
        path = os.path.join(self.path, _COMPACT)
        if not os.path.lexists(path):
            return
        import shutil  # not at the top: it would slow down every opening of a store

        try:
            strange = sorted(set(os.listdir(path)) - _OWN_NAMES)
            if strange:
                raise StorageError(
                    f"{os.path.join(path, strange[0])} was not made by `casstore compact`; move "
                    f"it elsewhere, and then remove {path}"
                )
            shutil.rmtree(path)
        except OSError as exc:
            raise storage_error(f"cannot remove {path}", exc) from exc

    def sync_names(self) -> None:
        """Make files created, renamed and removed here stay so after a power loss."""
        try:
            sync_directory(self.path)
        except OSError as exc:
            raise storage_error(f"cannot flush {self.path}", exc) from exc
