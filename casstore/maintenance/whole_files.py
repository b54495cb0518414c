"""Files that are there whole or not at all, for answers and lists that are read later."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from casstore.engine.files import PartFile, storage_error
from casstore.engine.paths import path_text

# As any file that a program writes for its user: less what the user's mask takes off.
_FILE_MODE: Final = 0o666


@contextmanager
def whole_file(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[BinaryIO]:
    """Write a file that does not stay if the writing fails.

    Raises FileExistsError if one is there, unless it may be replaced; then it is what it was
    until the new one is complete. StorageError says what else the system refused.
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
        # Not there: nothing is replaced. What else stands in the way is told when it is opened.
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        # A pipe or a device is written to as it is.
        with open(name, "wb") as into:
            yield into
        return
    # A link leads to the file that is replaced.
    part = PartFile(os.path.realpath(name) if old is not None else name, _FILE_MODE)
    try:
        yield part.file
        if old is not None:
            os.fchmod(part.file.fileno(), stat.S_IMODE(old.st_mode))
        part.publish(replace=replace)
    except BaseException:
        part.discard()
        raise
