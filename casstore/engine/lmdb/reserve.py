"""Disk space reserved for deleting.

LMDB never overwrites a page in use, so even a deletion needs free pages. On a full disk nothing
could be deleted, and no space reclaimed. So a store has a file of allocated blocks, ``reserve``,
and frees the blocks when an operation that reclaims space finds the disk full. Until that operation
ends, this process refuses other writes, which would use them up. Then the reserve is allocated
again, as far as the disk has space.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from casstore.engine.forks import Descriptor
from casstore.engine.lmdb.slab import PACKED_RAW_BYTES
from casstore.errors import StorageFullError

RESERVE_FILE: Final = "reserve"

# The reserve is 1/_SHARE of the data file, because deleting changes pages in proportion to what is
# stored; and _STEP_BYTES, because packing writes a slab before it deletes those that it joins.
_SHARE: Final = 8
_STEP_BYTES: Final = 2 * PACKED_RAW_BYTES
MIN_RESERVE_BYTES: Final = 256 << 10
MAX_RESERVE_BYTES: Final = 8 << 20
_FILE_MODE: Final = 0o600


class Reserve:
    """The reserve of one open store."""

    def __init__(self, path: str, directory: Descriptor) -> None:
        """``directory``: the store's directory, held open; ``path``: its name for messages."""
        self._path = path
        self._directory = directory
        self._wanted_bytes = MIN_RESERVE_BYTES
        #: The reserve is sufficient for a data file up to this length.
        self.enough_for_bytes = 0
        #: The reserve is sufficient for a redo log up to this length.
        self.enough_for_log_bytes = 0
        # The threads inside ``reclaiming``, once for each nested call.
        self._reclaiming: list[int] = []
        #: True while the blocks are freed, and not allocated again yet.
        self.is_released = False

    @property
    def size_bytes(self) -> int:
        """The disk space that the reserve takes now, in bytes."""
        try:
            found = os.stat(RESERVE_FILE, dir_fd=self._directory.fileno(), follow_symlinks=False)
        except OSError:
            return 0
        return found.st_blocks * 512

    def allocate(self, data_bytes: int, log_bytes: int) -> None:
        """Allocate the reserve for files of these lengths, as far as the disk has space.

        It includes the log's length: before anything is deleted from the data file, the log is
        applied. Without a reserve the store works, but may be unable to delete on a full disk.
        """
        wanted = min(data_bytes // 2, data_bytes // _SHARE + _STEP_BYTES, MAX_RESERVE_BYTES)
        self._wanted_bytes = max(wanted, MIN_RESERVE_BYTES) + log_bytes
        self.enough_for_log_bytes = log_bytes
        self.enough_for_bytes = 2 * max(data_bytes, MIN_RESERVE_BYTES)
        if self._free_bytes() < 2 * self._wanted_bytes:
            # The disk is nearly full already: leave the rest to the writers.
            return
        self._allocate(self._wanted_bytes)

    @contextmanager
    def reclaiming(self) -> Iterator[None]:
        """Let this thread use the reserve for an operation that reclaims space."""
        me = threading.get_ident()
        self._reclaiming.append(me)
        try:
            if self._is_low():
                self.release()
            yield
        finally:
            self._reclaiming.remove(me)
            if self.is_released and not self._reclaiming:
                self.is_released = False
                self._allocate(min(self._wanted_bytes, self._free_bytes()))

    @property
    def may_use(self) -> bool:
        """True if this thread is in an operation that reclaims space."""
        return threading.get_ident() in self._reclaiming

    def require_free(self) -> None:
        """StorageFullError if another thread is using the reserve, and this one may not."""
        if self.is_released and not self.may_use and self._is_low():
            raise StorageFullError(
                f"the disk of {self._path} is full, and another thread needs the rest of it to "
                "reclaim space; try again when that has ended"
            )

    def release(self) -> None:
        """Free the reserved blocks, if there are any. Call inside ``reclaiming``."""
        try:
            with self._open() as handle:
                os.ftruncate(handle, 0)
        except OSError:
            # There is no reserve, or this process may not change it.
            return
        self.is_released = True

    def _is_low(self) -> bool:
        return self._free_bytes() < self._wanted_bytes

    def _allocate(self, size_bytes: int) -> None:
        try:
            with self._open(os.O_CREAT) as handle:
                os.posix_fallocate(handle, 0, size_bytes)
        except (OSError, AttributeError):
            # The disk is full, or the file system or the platform cannot allocate blocks.
            return

    @contextmanager
    def _open(self, flags: int = 0) -> Iterator[int]:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(RESERVE_FILE, flags, _FILE_MODE, dir_fd=self._directory.fileno())
        try:
            yield handle
        finally:
            os.close(handle)

    def _free_bytes(self) -> int:
        try:
            free = os.fstatvfs(self._directory.fileno())
        except OSError:
            # The medium does not answer. As on a full disk, nothing is allocated, and the call that
            # fails reports why.
            return 0
        return free.f_bavail * free.f_frsize
