"""Opens directories and files below one directory, and never outside it.

Every open starts at the descriptor of the root and goes down one name at a time with O_NOFOLLOW,
so a symbolic link planted anywhere below the root is refused instead of followed. ``Beneath.open``
is the only way in which this package reaches a directory.
"""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from typing import Final

from casstore.engine.files import storage_error
from casstore.errors import BusyError, InvalidInputError, WorkspaceNotFoundError

#: A path below the root: one name for each level, () for the root itself.
Parts = tuple[str, ...]

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The most directories kept open: trees may be deeper than the limit of descriptors of a process.
_KEPT: Final = 64


def shown(parts: Parts) -> str:
    """A path as messages print it."""
    return "/".join(parts) or "."


def printable(path: str) -> str:
    """A path as valid text: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode(errors="backslashreplace")


class Beneath:
    """One directory and what is below it. Use as a context manager."""

    def __init__(self, path: str) -> None:
        """Open the directory; WorkspaceNotFoundError if it does not exist."""
        self.path = os.path.abspath(path)
        try:
            # The caller chose the root, so it may be a symbolic link, which is followed.
            self.root = os.open(self.path, _FLAGS & ~os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise WorkspaceNotFoundError(self.path) from exc
        except OSError as exc:
            raise storage_error(f"cannot open directory {self.path}", exc) from exc
        self._open: OrderedDict[Parts, int] = OrderedDict()

    def __enter__(self) -> Beneath:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        self.forget(())
        if self.root >= 0:
            os.close(self.root)
            self.root = -1

    def lock(self) -> None:
        """Lock the directory until ``close``; BusyError if another restore has locked it."""
        try:
            fcntl.flock(self.root, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise BusyError(
                f"another process restores files into {self.path}; wait until it ends"
            ) from exc
        except OSError as exc:
            raise storage_error(f"cannot lock directory {self.path}", exc) from exc

    def open(self, parts: Parts) -> int:
        """The descriptor of a directory, which the caller must not close; raises OSError."""
        if not parts:
            return self.root
        known = self._open.get(parts)
        if known is not None:
            self._open.move_to_end(parts)
            return known
        depth = len(parts) - 1
        while depth and parts[:depth] not in self._open:
            depth -= 1
        above = self._open[parts[:depth]] if depth else self.root
        for at in range(depth, len(parts)):
            above = os.open(parts[at], _FLAGS, dir_fd=above)
            self._open[parts[: at + 1]] = above
            while len(self._open) > _KEPT:
                os.close(self._open.popitem(last=False)[1])
        return above

    def forget(self, parts: Parts) -> None:
        """Close the descriptors of a directory to be deleted, and of those below it."""
        depth = len(parts)
        for known in [known for known in self._open if known[:depth] == parts]:
            os.close(self._open.pop(known))


def check_root(path: object) -> str:
    """The path of a directory as text; InvalidInputError if it cannot be a path."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidInputError(f"path must be a str or a path, got {path!r:.80}")
    text = os.fsdecode(path)
    if not text or "\0" in text:
        raise InvalidInputError(f"path must name a directory, got {text!r:.80}")
    return text
