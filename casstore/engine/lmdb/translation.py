"""Translates LMDB's errors to casstore's."""

from __future__ import annotations

import errno
import os
from typing import Final

import lmdb

from casstore.engine.lmdb.directory import FULL_DISK, MAX_READERS
from casstore.errors import (
    AddressSpaceError,
    BusyError,
    CasstoreError,
    ClosedError,
    CorruptionError,
    ReadOnlyError,
    StorageError,
    StorageFullError,
)

# LMDB's errors for a damaged file. BadDbiError is one of them: it says that a database handle does
# not match the file, and as casstore closes no handles, the file must have changed.
_DAMAGE: Final = (
    lmdb.BadDbiError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)

# A disk with less free space than this counts as full: LMDB may write more at once.
_LITTLE_SPACE_BYTES: Final = 1 << 18


def translate(exc: lmdb.Error, path: str) -> CasstoreError:
    """The casstore error for an LMDB one, by what the caller can do about it."""
    if isinstance(exc, lmdb.MapFullError):
        return StorageFullError(f"the map of {path} is full; open it with a larger map_bytes")
    if isinstance(exc, lmdb.ReadersFullError):
        return BusyError(
            f"{path} has {MAX_READERS} read transactions, in all processes, which is the limit; "
            "retry when fewer are open"
        )
    if isinstance(exc, lmdb.ReadonlyError):
        return ReadOnlyError(f"{path} is open read-only")
    if isinstance(exc, _DAMAGE):
        return CorruptionError(f"{path} is damaged: {exc}")
    if exc.code in FULL_DISK or "SHORT_WRITE" in str(exc):
        return StorageFullError(f"no space for {path}: {exc}")
    if exc.code == errno.EIO and _is_full(path):
        # LMDB reports EIO if the disk had space for a part of a write only.
        return StorageFullError(f"no space for {path}: {exc}")
    if exc.code == errno.ENOMEM:
        return AddressSpaceError(
            f"no address space to map {path}: raise this process's limit (ulimit -v), close other "
            "stores, or open it with a smaller map_bytes"
        )
    if "closed" in str(exc):
        return ClosedError(f"{path} was closed")
    return StorageError(f"{path}: {exc}")


def _is_full(path: str) -> bool:
    try:
        space = os.statvfs(path)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _LITTLE_SPACE_BYTES
