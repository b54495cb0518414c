"""Paths as text, safe creation of files, and typed errors for what the file system refuses.

A *part* is an incomplete file or directory. ``PartFile`` and ``PartDirectory`` build one under an
unpredictable name in its target's directory, and rename it to the target when it is complete. They
create it exclusively, relative to the opened directory, and follow no link: another user of the
directory may have planted one. A process removes only parts that it created, so a killed process
leaves its part behind; ``leftovers`` lists such parts.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import BinaryIO, Final

from casstore.errors import (
    CasstoreError,
    InvalidInputError,
    SourceNotFoundError,
    StorageError,
    StorageFullError,
)

FULL_DISK: Final = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))

#: The error numbers of renaming a directory to a name that is in use.
TAKEN: Final = frozenset((errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR))

# The error numbers of ``os.link`` on a file system without hard links.
_NO_LINKS: Final = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# In the name of a part, between the beginning of the target's name and the random digits.
_PART: Final = ".casstore-part-"
_TOKEN_BYTES: Final = 16
# How many bytes of the target's name a part's name has: a name may have 255 in all.
_NAME_BYTES: Final = 200
_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_text(path: str | os.PathLike[str]) -> str:
    """The path as text; InvalidInputError if the operating system cannot accept it."""
    try:
        text = os.fspath(path)
    except TypeError as exc:
        raise InvalidInputError(
            f"a path must be a str or a Path, got {type(path).__name__}"
        ) from exc
    if not isinstance(text, str):
        raise InvalidInputError("a path must be text, got bytes; convert it with os.fsdecode")
    try:
        # os.fsdecode represents undecodable bytes as surrogates; other surrogates have no encoding.
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise InvalidInputError(f"{text!r} is not a valid path: {exc.reason}") from exc
    if not text or "\0" in text:
        raise InvalidInputError(
            f"{text!r} is not a valid path: it is empty or contains a NUL character"
        )
    return text


def storage_error(what: str, exc: OSError) -> StorageError:
    """The error ``what: reason`` for an OSError; StorageFullError if the disk is full."""
    kind = StorageFullError if exc.errno in FULL_DISK else StorageError
    # O_NOFOLLOW makes opening a link fail with ELOOP.
    why = "it is a symbolic link" if exc.errno == errno.ELOOP else exc.strerror
    return kind(f"{what}: {why or exc}")


def open_regular(
    path: str,
    flags: int = os.O_RDONLY,
    mode: int = FILE_MODE,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file; OSError for anything else.

    Opening a pipe would block until another process opens its other end. A symbolic link as the
    last component is refused, unless ``follow``.
    """
    link = 0 if follow else os.O_NOFOLLOW
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | link, mode, dir_fd=dir_fd)
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise OSError(
            errno.EINVAL, f"it is {_KINDS.get(kind, 'a special file')}, not a regular file", path
        )
    return handle


def source_error(path: str, exc: OSError) -> CasstoreError:
    """The error for a file that the user named and that cannot be opened for reading."""
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return SourceNotFoundError(f"there is no file {path}")
    if isinstance(exc, IsADirectoryError):
        return InvalidInputError(f"{path} is a directory; name a file")
    return storage_error(f"cannot read {path}", exc)


def write_at(handle: int, content: bytes, offset: int) -> None:
    """Write all of ``content``; raises OSError. (One pwrite may write only a part of it.)"""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(handle, rest, offset)
        rest = rest[written:]
        offset += written


def lengthen(handle: int, size_bytes: int) -> bool:
    """Lengthen a file to ``size_bytes`` if it is shorter; False if that fails.

    posix_fallocate changes no byte that exists, so this is safe while another process writes.
    """
    if os.fstat(handle).st_size >= size_bytes:
        return True
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(handle, size_bytes - 1, 1)
    except OSError:
        return False
    return True


def flush_file(handle: int) -> None:
    """Flush the content of a file, and only the metadata that reading it needs."""
    # macOS has no fdatasync.
    getattr(os, "fdatasync", os.fsync)(handle)


def sync_directory(path: str) -> None:
    """Make files created, renamed and removed in a directory stay so after a power loss.

    LMDB does not flush directories: without this, a power loss may remove a new store's name, and
    with it every acknowledged commit.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Importing:
    """A context that turns an OSError, raised while a module is loaded, into StorageError."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(exc, OSError):
            raise storage_error("a module of casstore cannot be loaded", exc) from exc


_IMPORTING: Final = _Importing()


def importing() -> _Importing:
    """A context for imports in functions: StorageError if the process has no free descriptor."""
    return _IMPORTING


# --- parts ------------------------------------------------------------------------------------


def _part_name(target: str) -> str:
    begin = os.fsencode(target)[:_NAME_BYTES]
    return f"{os.fsdecode(begin)}{_PART}{secrets.token_hex(_TOKEN_BYTES)}"


def leftovers(target: str) -> list[str]:
    """The paths of the parts of ``target`` that processes are building or killed ones have left."""
    directory, name = os.path.split(os.path.abspath(target))
    begin = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    ours = re.compile(re.escape(begin + _PART) + f"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
    try:
        return sorted(
            os.path.join(directory, found)
            for found in os.listdir(directory)
            if ours.fullmatch(found)
        )
    except OSError:
        return []


class _Part:
    """A file or directory under a temporary name, until it is renamed to its target."""

    def __init__(self, target: str) -> None:
        """Open the directory of ``target``; raises OSError."""
        directory, self._target = os.path.split(os.path.abspath(target))
        self._directory = os.open(directory, _DIRECTORY_FLAGS)
        self._name = _part_name(self._target)
        self.path = os.path.join(directory, self._name)
        self._made: os.stat_result | None = None

    def _is_there(self) -> bool:
        """True if the temporary name still belongs to what this process created."""
        try:
            there = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        except OSError:
            return False
        return self._made is not None and os.path.samestat(there, self._made)

    def _require_there(self) -> None:
        if not self._is_there():
            raise OSError(errno.ESTALE, "it was moved or replaced while it was written", self.path)

    def _rename(self) -> None:
        """Rename the part to its target, replacing a file of that name; raises OSError."""
        self._require_there()
        os.rename(self._name, self._target, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.fsync(self._directory)


class PartFile(_Part):
    """A file that appears whole under its name, or not at all. Every call raises OSError."""

    def __init__(self, target: str, mode: int = FILE_MODE) -> None:
        """Create it in the directory of its target."""
        super().__init__(target)
        try:
            handle = os.open(
                self._name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                mode,
                dir_fd=self._directory,
            )
        except BaseException:
            os.close(self._directory)
            raise
        self._made = os.fstat(handle)
        self.file: BinaryIO = os.fdopen(handle, "wb")

    def publish(self, *, replace: bool) -> None:
        """Flush the file and rename it to its target; FileExistsError if that exists, unless
        ``replace``.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        if replace:
            self._rename()
        else:
            self._link()
        self.file.close()
        os.close(self._directory)

    def _link(self) -> None:
        self._require_there()
        there = {"src_dir_fd": self._directory, "dst_dir_fd": self._directory}
        try:
            # Unlike rename, link never replaces a file that was created in the meantime.
            os.link(self._name, self._target, follow_symlinks=False, **there)
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            # This file system has no hard links. Check, then rename: a file that another process
            # creates in between is replaced.
            with suppress(FileNotFoundError):
                os.stat(self._target, dir_fd=self._directory, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, "it exists", self._target) from None
            self._rename()
            return
        os.unlink(self._name, dir_fd=self._directory)
        os.fsync(self._directory)

    def discard(self) -> None:
        """Remove the file, unless its name now belongs to another file. Never raises."""
        with suppress(OSError):
            # Closing raises if data could not be written; the file is deleted anyway.
            self.file.close()
        with suppress(OSError):
            if self._is_there():
                os.unlink(self._name, dir_fd=self._directory)
        with suppress(OSError):
            os.close(self._directory)


class PartDirectory(_Part):
    """An empty directory next to its target, accessible to this process's user alone."""

    def __init__(self, target: str) -> None:
        """Create it and its missing parents; raises OSError."""
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        super().__init__(target)
        try:
            os.mkdir(self._name, DIRECTORY_MODE, dir_fd=self._directory)
            self._made = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        except BaseException:
            os.close(self._directory)
            raise

    def publish(self) -> None:
        """Rename it to its target; OSError if the target exists and is not an empty directory."""
        self._rename()

    def close(self) -> None:
        """Remove the directory, unless it was published or another has its name now."""
        if self._is_there():
            shutil.rmtree(self._name, ignore_errors=True, dir_fd=self._directory)
        os.close(self._directory)


@contextmanager
def part_directory(target: str) -> Iterator[PartDirectory]:
    """An empty directory next to ``target`` to build a store in; removed unless published."""
    try:
        part = PartDirectory(target)
    except OSError as exc:
        raise storage_error(f"cannot create {target}", exc) from exc
    try:
        yield part
    finally:
        part.close()
