"""LMDB's reader table in a forked child: replaced with a private copy.

LMDB records in ``lock.mdb``, which all processes map, which state each read transaction uses, one
slot for each: writers reuse no page that a reader may still see. A read transaction that has ended
keeps its slot as long as its Python object lives, and closing an environment frees the slots of all
such objects. A forked child has copies of its parent's objects, so it would free slots that the
parent's objects still own. Another reader could take such a slot, lose it when the parent's object
is deleted, and then read pages that are being overwritten.

So the child first maps a private copy of the table over the shared one. After that it can close
the environment that it inherited.

The parent imports this module before a fork: a child must not wait for a module that another
thread was importing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Final

from casstore.engine.lmdb.directory import LOCK_FILE

_MAPS: Final = "/proc/self/maps"
_READ_AND_WRITE: Final = 0x1 | 0x2
_PRIVATE_FIXED_ANONYMOUS: Final = 0x02 | 0x10 | 0x20
_SHARED: Final = "s"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


def unshare_readers(directory: str, inode: int) -> bool:
    """Make a store's reader table private to this process; False if that is impossible.

    The mapping of the lock file is recognised by the inode, because the directory may have been
    renamed, and by the path, because some file systems show another inode for a mapping.
    """
    lock_file = os.path.join(os.path.realpath(directory), LOCK_FILE)
    try:
        with open(_MAPS) as maps:
            found = list(_places(maps.read(), lock_file, str(inode)))
    except OSError:
        return False
    return bool(found) and all(_unshare(start, length) for start, length in found)


def _places(maps: str, lock_file: str, inode: str) -> Iterator[tuple[int, int]]:
    """The start and length of each shared mapping of the lock file."""
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[1][3] != _SHARED:
            continue
        path = fields[5].removesuffix(" (deleted)")
        if path == lock_file or (os.path.basename(path) == LOCK_FILE and fields[4] == inode):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            yield start, end - start


def _unshare(start: int, length: int) -> bool:
    content = ctypes.string_at(start, length)
    if _libc.mmap(start, length, _READ_AND_WRITE, _PRIVATE_FIXED_ANONYMOUS, -1, 0) != start:
        return False
    ctypes.memmove(start, content, length)
    return True


def leave_open(handle: object) -> None:
    """Keep an object alive for ever, so that not even the end of the interpreter closes it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
