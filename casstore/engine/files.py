"""What the file system says no to, and what it must be told to remember."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from casstore.errors import (
    BusyError,
    CasstoreError,
    InvalidInputError,
    SourceNotFoundError,
    StorageError,
    StorageFullError,
)

FULL_DISK: Final = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))

#: What something under way is called: its own name and this.
PART_SUFFIX: Final = ".casstore-part"
_DIRECTORY_MODE: Final = 0o700


def storage_error(what: str, exc: OSError) -> StorageError:
    """The error for something that the operating system refused to do."""
    kind = StorageFullError if exc.errno in FULL_DISK else StorageError
    return kind(f"{what}: {exc.strerror}")


def source_error(path: str, exc: OSError) -> CasstoreError:
    """The error for a file that a caller named and that cannot be opened to read."""
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return SourceNotFoundError(f"there is no file {path}")
    if isinstance(exc, IsADirectoryError):
        return InvalidInputError(f"{path} is a directory; name a file")
    return storage_error(f"cannot read {path}", exc)


def write_at(handle: int, content: bytes, offset: int) -> None:
    """Write all of it; raises OSError. The system writes a part if there is room for no more."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(handle, rest, offset)
        rest = rest[written:]
        offset += written


def flush_file(handle: int) -> None:
    """See what a file holds onto the disk, and of what is known about it only what that needs."""
    # macOS has no such call.
    getattr(os, "fdatasync", os.fsync)(handle)


def sync_directory(path: str) -> None:
    """Make names created, changed and removed in a directory survive a power loss."""
    # LMDB never does this: without it a new store may be gone after a power loss,
    # with every acknowledged commit in it.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def part_directory(target: str) -> Iterator[str]:
    """An empty directory beside ``target``, for one process to build something in.

    It is removed at the end, if it is still there under this name, and so is what a killed
    process has left there. BusyError if another process builds the same.
    """
    part = target + PART_SUFFIX
    handle = _claim_directory(part)
    try:
        try:
            for name in os.listdir(part):
                _remove(os.path.join(part, name))
        except OSError as exc:
            raise storage_error(f"cannot clear {part}", exc) from exc
        yield part
    finally:
        if os.path.lexists(part):
            shutil.rmtree(part, ignore_errors=True)
        os.close(handle)


def _claim_directory(path: str) -> int:
    while True:
        try:
            os.makedirs(path, mode=_DIRECTORY_MODE, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # finished by somebody else just now
        except OSError as exc:
            raise storage_error(f"cannot create {path}", exc) from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise BusyError(f"{path} is being written by another process") from None
        except FileNotFoundError:
            pass
        except OSError as exc:
            os.close(handle)
            raise storage_error(f"cannot lock {path}", exc) from exc
        # Whoever held it has just finished: what was opened has another name by now.
        os.close(handle)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
