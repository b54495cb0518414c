"""What the file system says no to, and what it must be told to remember."""

from __future__ import annotations

import errno
import os
from typing import Final

from casstore.errors import StorageError, StorageFullError

FULL_DISK: Final = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))


def storage_error(what: str, exc: OSError) -> StorageError:
    """The error for something that the operating system refused to do."""
    kind = StorageFullError if exc.errno in FULL_DISK else StorageError
    return kind(f"{what}: {exc.strerror}")


def sync_directory(path: str) -> None:
    """Make names created, changed and removed in a directory survive a power loss."""
    # LMDB never does this: without it a new store may be gone after a power loss,
    # with every acknowledged commit in it.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
