"""Files and directories that commands of maintenance work on or write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from casstore.engine.files import PartFile, path_text, storage_error
from casstore.errors import InvalidInputError
from casstore.store import is_server, shown_place

# As any file that a program writes for its user; the umask restricts it.
_FILE_MODE: Final = 0o666


def require_directory(place: str | os.PathLike[str], what: str, instead: str) -> str:
    """The path of a directory; InvalidInputError, with what to do instead, for a server's URL."""
    path = path_text(place)
    if is_server(path):
        raise InvalidInputError(
            f"{what} works on the files of a store, but {shown_place(path)} is on a server; "
            f"{instead}"
        )
    return path


@contextmanager
def whole_file(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[BinaryIO]:
    """Write a file that appears when it is complete, or not at all.

    FileExistsError if there is one, unless ``replace``; then the old one stays until the new one is
    complete. StorageError for other errors of the system.
    """
    name = path_text(path)
    try:
        with _opened(name, replace=replace) as into:
            yield into
    except FileExistsError:
        raise
    except OSError as exc:
        raise storage_error(f"cannot write {name}", exc) from exc


@contextmanager
def _opened(name: str, *, replace: bool) -> Iterator[BinaryIO]:
    if not replace and os.path.lexists(name):
        raise FileExistsError(name)
    try:
        old = os.stat(name) if replace else None
    except OSError:
        # The file does not exist. Opening it reports any other error.
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        # A pipe or a device is written to directly: a rename would replace it by a file.
        with open(name, "wb") as into:
            yield into
        return
    # The file that a link leads to is replaced.
    part = PartFile(os.path.realpath(name) if old is not None else name, _FILE_MODE)
    try:
        yield part.file
        if old is not None:
            os.fchmod(part.file.fileno(), stat.S_IMODE(old.st_mode))
        part.publish(replace=replace)
    except BaseException:
        part.discard()
        raise
