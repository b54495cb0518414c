"""Disk space reserved for deleting.

LMDB writes changed pages to new places, so even a deletion needs space. On a full disk nothing
could be deleted, and no space be reclaimed. So a store holds a file of allocated blocks,
``reserve``, and frees them when an operation that reclaims space finds the disk full. Until the
operation ends, this process refuses other writes, which would use them up. Then as much as is left
is allocated again.
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

# Deleting changes pages in proportion to what is stored; packing writes a whole slab before it
# deletes those that it joins.
_SHARE: Final = 8
_STEP_BYTES: Final = 2 * PACKED_RAW_BYTES
MIN_RESERVE_BYTES: Final = 256 << 10
MAX_RESERVE_BYTES: Final = 8 << 20
_FILE_MODE: Final = 0o600


class Reserve:
    """The reserve of one open store."""

    def __init__(self, path: str, place: Descriptor) -> None:
        """``place``: the store's directory, held open; ``path``: its name for messages."""
        self._path = path
        self._place = place
        self._wanted_bytes = MIN_RESERVE_BYTES
        #: The reserve is sufficient for a data file of this length,
        self.enough_for_bytes = 0
        #: and for a log of this length.
        self.enough_for_log_bytes = 0
        # The threads that reclaim space, once for each nested call.
        self._reclaiming: list[int] = []
        #: Were the blocks freed, and not yet allocated again?
        self.is_released = False

    @property
    def size_bytes(self) -> int:
        """The blocks that are allocated."""
        try:
            found = os.stat(RESERVE_FILE, dir_fd=self._place.fileno(), follow_symlinks=False)
        except OSError:
            return 0
        return found.st_blocks * 512

    def allocate(self, data_bytes: int, log_bytes: int) -> None:
        """Allocate the reserve for files of these lengths, as far as the disk has space.

        Commits that are only in the log must fit into the data file before anything can be removed
        from it. Without a reserve the store works, but may be unable to delete on a full disk.
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
        """Refuse an ordinary write while another thread needs the reserve."""
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
            # A full disk, a quota, a file system or a platform that cannot allocate.
            return

    @contextmanager
    def _open(self, flags: int = 0) -> Iterator[int]:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(RESERVE_FILE, flags, _FILE_MODE, dir_fd=self._place.fileno())
        try:
            yield handle
        finally:
            os.close(handle)

    def _free_bytes(self) -> int:
        free = os.fstatvfs(self._place.fileno())
        return free.f_bavail * free.f_frsize
