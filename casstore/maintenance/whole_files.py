"""Files that are there whole or not at all, for answers and lists that are read later."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from casstore.engine.files import storage_error
from casstore.engine.paths import path_text


@contextmanager
def whole_file(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[BinaryIO]:
    """Write a file that does not stay if the writing fails.

    Raises FileExistsError if one is there, unless it may be replaced; then it is what it was
    until the new one is complete. StorageError says what else the system refused.
    """
    name = path_text(path)
    try:
        old = os.stat(name) if replace else None
    except OSError:
        # Not there: nothing is replaced. What else stands in the way is told when it is opened.
        old = None
    # A pipe or a device is written to as it is; a link leads to the file that is replaced.
    as_it_is = old is not None and not stat.S_ISREG(old.st_mode)
    target = os.path.realpath(name) if old is not None and not as_it_is else name
    written = target
    if replace and not as_it_is:
        written = os.path.join(os.path.dirname(target), f".casstore-{secrets.token_hex(8)}")
    created = False
    try:
        with open(written, "wb" if as_it_is else "xb") as into:
            created = not as_it_is
            yield into
        if written != target:
            if old is not None:
                os.chmod(written, stat.S_IMODE(old.st_mode))
            os.replace(written, target)
    except BaseException as exc:
        if created:
            with suppress(FileNotFoundError):
                os.unlink(written)
        if isinstance(exc, OSError) and not isinstance(exc, FileExistsError):
            raise storage_error(f"cannot write {name}", exc) from exc
        raise
