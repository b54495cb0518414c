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

# LMDB's errors for a damaged file. No database handle is ever closed here: if one does not match
# any more, the file was changed.
_DAMAGE: Final = (
    lmdb.BadDbiError,
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)

# Less than LMDB writes at once.
_LITTLE_ROOM_BYTES: Final = 1 << 18


def translate(exc: lmdb.Error, path: str) -> CasstoreError:
    """The casstore error for an LMDB one, by what the caller can do about it."""
    if isinstance(exc, lmdb.MapFullError):
        return StorageFullError(f"the map of {path} is full; open it with a larger map_bytes")
    if isinstance(exc, lmdb.ReadersFullError):
        return BusyError(f"{path} has {MAX_READERS} readers already")
    if isinstance(exc, lmdb.ReadonlyError):
        return ReadOnlyError(f"{path} is open read-only")
    if isinstance(exc, _DAMAGE):
        return CorruptionError(f"{path} is damaged: {exc}")
    if exc.code in FULL_DISK or "SHORT_WRITE" in str(exc):
        return StorageFullError(f"no space for {path}: {exc}")
    if exc.code == errno.EIO and _is_full(path):
        # LMDB's error if the system wrote a part, and had no space for the rest.
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
        room = os.statvfs(path)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < _LITTLE_ROOM_BYTES
