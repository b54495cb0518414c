"""A cache of the objects of a store on a server, on the local disk, bounded in bytes.

    PATH/objects-1/STORE/EPOCH-NUMBER/      an LMDB store without rows, called a *shelf*
    PATH/objects-1/STORE/lock               locked while a shelf is created or deleted; contains a
                                            random word that changes when objects are deleted

EPOCH is the number of the newest collection when the shelf was created (see ``collection``).

The cache is optional: an object that is absent or fails its check is read from the server. So no
fault of the files reaches a caller; it is reported once, as a warning, and the files are
recreated. Objects never change and are named by their content, so a cached object is always
right. But the store may have deleted it: a process that deletes objects, or notices a new
collection, empties the cache, and every process that uses the same directory notices that.

There are at most two shelves, each of half the limit. When the newer is full, the older is
deleted, with all objects that were not read since the newer began. Whole files are deleted, so
no space has to be reclaimed inside them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from casstore.engine import forks
from casstore.engine.files import write_at
from casstore.engine.lmdb import sharing
from casstore.engine.lmdb.directory import (
    DATA_FILE,
    DIRECTORY_MODE,
    FILE_MODE,
    StoreDirectory,
)
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.log import FIRST_LOG_BYTES, LOG_FILE
from casstore.engine.lmdb.page_scan import verify_structure
from casstore.engine.lmdb.reserve import RESERVE_FILE
from casstore.engine.protocol import NewObject, StoredObject, Write
from casstore.errors import CasstoreError, ClosedError, CorruptionError
from casstore.format.digest import KIND_NAMES, Kind, check_object

#: The smallest limit: an empty shelf takes a quarter of a megabyte.
MIN_LIMIT_BYTES: Final = 4 << 20

# The name of the layout of the files. A new layout gets a new name and so another directory.
_LAYOUT: Final = "objects-1"
_SHELF: Final = re.compile(r"(\d{1,19})-(\d{1,19})")
_GONE: Final = re.compile(r"\.gone-[0-9a-f]{16}")
_LOCK: Final = "lock"
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_OTHERS_WRITE: Final = 0o022
_WORD_BYTES: Final = 16
_SHELVES: Final = 2
# The memory for decoded slabs: little, because the engine above caches objects itself.
_SLAB_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 1 << 20
# Objects longer than this fraction of the limit are not cached: one could push out all others.
_LARGEST_PART: Final = 16
# After this many errors the cache is switched off; before, the files are recreated.
_MAX_TROUBLES: Final = 3


class _Shelf(NamedTuple):
    number: int
    path: str
    engine: LmdbEngine
    #: The inode of the data file: another process may have replaced the file since.
    inode: int

    def size_bytes(self) -> int | None:
        """The length of its files; None if another process has deleted it."""
        try:
            found = os.stat(os.path.join(self.path, DATA_FILE))
        except OSError:
            return None
        if found.st_ino != self.inode:
            return None
        return found.st_size + sum(
            os.stat(path).st_size
            for name in (LOG_FILE, RESERVE_FILE)
            if os.path.exists(path := os.path.join(self.path, name))
        )


class DiskCache:
    """A cache of one store's objects, for all processes of a machine. No call raises."""

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._path = os.path.abspath(path)
        self._limit_bytes = max(limit_bytes, MIN_LIMIT_BYTES)
        self._root = ""
        self._epoch = 0
        # The open shelves, newest first.
        self._shelves: list[_Shelf] = []
        self._highest = 0
        self._generation = 0
        # The word in the lock file when this process last held the lock; None: not yet.
        self._word: bytes | None = None
        self._troubles = 0
        self._is_open = False
        self._renew()
        forks.renew_in_child(self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()
        # The lock file while this process holds the lock, so that no thread takes it twice.
        self._held: forks.Descriptor | None = None

    def begin(self, store: int, epoch: int) -> None:
        """Open the cache of a store, with the objects cached in the epoch ``epoch``."""
        with self._lock:
            self._root = os.path.join(self._path, _LAYOUT, f"{store:016x}")
            self._epoch = epoch
            self._word = None
            self._is_open = True
        with self._alone():
            # Delete shelves of other epochs: also of later ones, which belong to a state that the
            # server has lost, for example because it was restored from a backup.
            for name in self._listed():
                if _SHELF.fullmatch(name) and not name.startswith(f"{epoch}-"):
                    self._throw_away(os.path.join(self._root, name))
            self._refresh()

    @property
    def generation(self) -> int:
        """A number that changes when the store may have deleted objects.

        Get it before reading objects from the server, and pass it to ``put``.
        """
        return self._generation

    def find(self, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        """Those of ``digests`` that are cached, each compared with its digest."""
        found: dict[bytes, StoredObject] = {}
        # Before reading: objects read next may be among those deleted meanwhile.
        generation = self._generation
        for place, shelf in enumerate(self._at_hand()):
            wanted = [digest for digest in digests if digest not in found]
            if not wanted:
                break
            read = self._read(shelf, wanted)
            found.update(read)
            if place and read:
                # Copied to the newer shelf, it survives the older one.
                self.put(read.items(), generation)
        return found

    def put(self, items: Iterable[tuple[bytes, StoredObject]], generation: int) -> None:
        """Cache objects, unless the cache's generation is not ``generation`` any more."""
        batch: list[NewObject] = []
        size_bytes = 0
        for digest, (kind, data) in items:
            # Not a rope (a split string or blob): its digest is that of the whole content, so it
            # cannot be checked by itself.
            if kind == Kind.ROPE or kind not in KIND_NAMES:
                continue
            if len(data) > self._limit_bytes // _LARGEST_PART:
                continue
            batch.append(NewObject(digest, kind, data, ()))
            size_bytes += len(data)
            if size_bytes >= _BATCH_BYTES:
                self._write(batch, generation)
                batch, size_bytes = [], 0
        if batch:
            self._write(batch, generation)

    def pass_on_to(self, epoch: int) -> None:
        """Delete the objects that were cached before the epoch ``epoch``."""
        with self._alone():
            if epoch > self._epoch:
                self._say_gone()
                self._epoch = epoch
                self._refresh()

    def clear(self) -> None:
        """Delete everything."""
        with self._alone():
            self._say_gone()
            self._let_go()
            for name in self._listed():
                if _SHELF.fullmatch(name):
                    self._throw_away(os.path.join(self._root, name))

    def close(self) -> None:
        """Close the files. Their content stays for the next process."""
        with self._alone():
            self._let_go()
            self._is_open = False

    # --- reading and writing ----------------------------------------------------------------

    def _at_hand(self) -> list[_Shelf]:
        shelves = self._shelves
        if all(shelf.size_bytes() is not None for shelf in shelves):
            return shelves
        with self._alone():
            self._refresh()
            return self._shelves

    def _read(self, shelf: _Shelf, digests: Sequence[bytes]) -> dict[bytes, StoredObject]:
        found = {}
        try:
            for digest, item in zip(digests, shelf.engine.get_many(digests), strict=True):
                if item is not None:
                    check_object(digest, item.kind, item.data)
                    found[digest] = item
        except ClosedError:
            # Another thread has changed shelves.
            return {}
        except (CasstoreError, OSError) as exc:
            self._give_up(shelf.path, exc)
            return {}
        return found

    def _write(self, batch: list[NewObject], generation: int) -> None:
        with self._alone():
            shelf = self._newest()
            # Compared last: looking for a shelf may have shown that objects were deleted.
            if shelf is None or generation != self._generation:
                return
            try:
                shelf.engine.write(Write(objects=batch))
            except (CasstoreError, OSError) as exc:
                self._give_up(shelf.path, exc)

    def _newest(self) -> _Shelf | None:
        """The shelf to write to, created if the newest is full or does not exist."""
        if not self._is_open:
            return None
        self._refresh()
        newest = self._shelves[0] if self._shelves else None
        if newest is None or (newest.size_bytes() or 0) >= self._limit_bytes // _SHELVES:
            self._add(self._highest + 1)
            self._refresh()
        return self._shelves[0] if self._shelves else None

    # --- shelves ----------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other threads, and keep other processes from creating or deleting shelves."""
        with self._lock:
            if self._held is not None or not self._is_open:
                yield
                return
            try:
                try:
                    os.makedirs(self._root, mode=DIRECTORY_MODE, exist_ok=True)
                    _require_own(self._root)
                    path = os.path.join(self._root, _LOCK)
                    self._held = forks.open_file(path, _LOCK_FLAGS, FILE_MODE)
                    fcntl.flock(self._held, fcntl.LOCK_EX)
                    self._hear(self._held)
                except OSError as exc:
                    self._give_up(self._root, exc)
                yield
            finally:
                # Also if Ctrl-C came with the lock: all other processes would wait for ever.
                handle, self._held = self._held, None
                if handle is not None:
                    handle.unlock()

    def _hear(self, lock: forks.Descriptor) -> None:
        """Change the generation if another process has changed the word; raises OSError."""
        word = os.pread(lock.fileno(), _WORD_BYTES, 0)
        if self._word is not None and self._word != word:
            self._generation += 1
        self._word = word

    def _say_gone(self) -> None:
        """Change the generation in all processes, by changing the word in the lock file.

        Objects that a process has just read may be among those deleted. It must not cache them, and
        the shelves cannot show that: there may be none yet.
        """
        self._generation += 1
        if self._held is None:
            return
        self._word = secrets.token_bytes(_WORD_BYTES)
        try:
            write_at(self._held.fileno(), self._word, 0)
        except OSError as exc:
            self._give_up(self._root, exc)

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self._root)
        except FileNotFoundError:
            return []
        except OSError as exc:
            self._give_up(self._root, exc)
            return []

    def _refresh(self) -> None:
        """Open the shelves in use and delete the others; other processes do the same."""
        if not self._is_open:
            return
        there: dict[int, list[int]] = {}
        for name in self._listed():
            match = _SHELF.fullmatch(name)
            if match is not None and os.path.exists(os.path.join(self._root, name, DATA_FILE)):
                there.setdefault(int(match[1]), []).append(int(match[2]))
            elif match is not None or _GONE.fullmatch(name):
                # The process that created or deleted it was killed meanwhile.
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)
        if any(epoch > self._epoch for epoch in there):
            # Another process of this machine knows of a later collection.
            self._epoch = max(there)
            self._generation += 1
        numbers = sorted(there.get(self._epoch, ()), reverse=True)
        self._highest = max([self._highest, *numbers])
        wanted = numbers[:_SHELVES]
        paths = [self._shelf_path(self._epoch, number) for number in wanted]
        open_now = {}
        for shelf in self._shelves:
            if shelf.path in paths and shelf.size_bytes() is not None:
                open_now[shelf.path] = shelf
            else:
                self._release(shelf)
        self._shelves = sorted(open_now.values(), reverse=True)
        for epoch, others in there.items():
            for number in others:
                if epoch != self._epoch or number not in wanted:
                    self._throw_away(self._shelf_path(epoch, number))
        for number, path in zip(wanted, paths, strict=True):
            if path not in open_now:
                self._add(number)

    def _add(self, number: int) -> None:
        """Open a shelf, or create it."""
        path = self._shelf_path(self._epoch, number)
        try:
            _require_sound(path)
            engine = sharing.acquire(
                path, durability="relaxed", readonly=False, create=True, verify=False,
                map_bytes=None,
                log_bytes=FIRST_LOG_BYTES, cache_bytes=_SLAB_BYTES, lmdb_version=None,
                auto_train=False, auto_pack=False,
            )  # fmt: skip
            inode = os.stat(os.path.join(path, DATA_FILE)).st_ino
        except (CasstoreError, OSError) as exc:
            self._give_up(path, exc)
            return
        self._highest = max(self._highest, number)
        self._shelves = sorted([*self._shelves, _Shelf(number, path, engine, inode)], reverse=True)

    def _shelf_path(self, epoch: int, number: int) -> str:
        return os.path.join(self._root, f"{epoch}-{number}")

    def _let_go(self) -> None:
        shelves, self._shelves = self._shelves, []
        for shelf in shelves:
            self._release(shelf)

    def _release(self, shelf: _Shelf) -> None:
        try:
            sharing.release(shelf.engine)
        except (CasstoreError, OSError) as exc:
            # If another process has deleted the shelf, closing it could write nothing, and that is
            # not a fault.
            if shelf.size_bytes() is not None:
                self._report(exc)

    def _throw_away(self, path: str) -> None:
        """Remove a shelf at once for all processes by renaming it, then file by file."""
        gone = os.path.join(os.path.dirname(path), f".gone-{secrets.token_hex(8)}")
        try:
            os.rename(path, gone)
        except OSError as exc:
            self._report(exc)
            self._is_open = False
            return
        shutil.rmtree(gone, ignore_errors=True)

    # --- trouble ----------------------------------------------------------------------------

    def _give_up(self, path: str, exc: Exception) -> None:
        """Continue without a shelf that cannot be used; it is recreated when needed."""
        with self._lock:
            used = [shelf for shelf in self._shelves if shelf.path == path]
            self._shelves = [shelf for shelf in self._shelves if shelf.path != path]
            for shelf in used:
                self._release(shelf)
            if used and used[0].size_bytes() is None:
                # Another process deleted it while it was in use here: not a fault.
                return
            self._report(exc)
            self._troubles += 1
            if self._troubles >= _MAX_TROUBLES or not _SHELF.fullmatch(os.path.basename(path)):
                self._is_open = False
                self._let_go()
            if os.path.exists(path) and path != self._root:
                self._highest += 1
                self._throw_away(path)

    def _report(self, exc: Exception) -> None:
        """Warn of the first fault of the files."""
        if not self._troubles:
            warnings.warn(
                f"the cache in {self._path} cannot be used, and the server is asked instead: {exc}",
                RuntimeWarning,
                stacklevel=2,
            )


def _require_own(path: str) -> None:
    """Raise OSError if a directory is a link, or if another user could have put files there."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", path)
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise OSError(errno.EPERM, "another user can write to it", path)


def _require_sound(path: str) -> None:
    """CorruptionError if LMDB must not map a file: a damaged page would kill the process."""
    directory = StoreDirectory(path)
    if not os.path.exists(directory.data_path):
        return
    with directory.exclusive():
        # A process that has it open has verified it.
        if not directory.others_present():
            try:
                verify_structure(directory.data_path)
            except (ValueError, IndexError, KeyError) as exc:
                raise CorruptionError(f"{directory.data_path} cannot be read: {exc}") from exc
