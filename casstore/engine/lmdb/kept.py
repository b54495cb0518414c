"""The state that a power loss leads back to, for writers that do not flush (``relaxed``).

Such a writer leaves its commits to the system's cache, and somebody keeps a state behind it:

    1. take the newest state: its meta pages, and a reader that stands on it
    2. flush the file
    3. write the meta pages into the file ``kept``, and flush that
    4. let go of the reader that stood on the state kept before

LMDB overwrites no page that a reader may still see. So the kept state stays whole on the disk,
whatever the system writes of later ones, and in whatever order. After a power loss both meta pages
are put back, and what came later has not happened.

The file has two places, which are written by turns: one is always whole. Each process that writes
has a reader of its own, on the kept state or an older one, from before its first commit: another
that dies takes only its own away.

    magic 8 ‖ page size 4 ‖ inode 8 ‖ transaction 8 ‖ boot id 64 ‖ BLAKE3 of the first page of the
    tree of tables 32 ‖ BLAKE3 of all the rest 32 ‖ two meta pages
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Final, NamedTuple

from casstore.engine import forks
from casstore.engine.files import flush_file, open_regular, storage_error, write_at
from casstore.errors import StorageError
from casstore.format.hashing import DIGEST_BYTES, plain_hash

KEPT_FILE: Final = "kept"

_MAGIC: Final = b"casskep2"
# Little-endian, as LMDB's own file is wherever this runs.
_HEAD: Final = Struct("<8sIQQ64s32s")
_HEAD_BYTES: Final = _HEAD.size + DIGEST_BYTES
_PLACES: Final = 2
# What LMDB can make pages of. The file is no longer than the longest allow, whatever somebody
# made of it (P7).
_PAGE_SIZES: Final = tuple([1 << shift for shift in range(9, 17)])
_MAX_PAGE_BYTES: Final = _PAGE_SIZES[-1]
_MAX_BYTES: Final = _PLACES * (_HEAD_BYTES + 2 * _MAX_PAGE_BYTES)


class KeptState(NamedTuple):
    """A committed state, as the two meta pages say it."""

    transaction: int
    pages: bytes
    #: Which data file it is of. Who copies a store gives it another.
    inode: int
    #: BLAKE3 of the page that its tree of tables begins with, which no other state has.
    root: bytes


class KeptFile:
    """The file ``kept``, open for writing; whoever wants to write waits for whoever does."""

    def __init__(self, path: str, boot: str, mode: int) -> None:
        """Open, or make, the file; raises StorageError."""
        self._path = path
        self._boot = boot
        # The newest state that is known to be on the disk.
        self._flushed = -1
        try:
            self._handle = forks.open_file(path, os.O_RDWR | os.O_CREAT, mode)
        except OSError as exc:
            raise storage_error(f"cannot open {path}", exc) from exc

    def prepare(
        self, page_bytes: int, is_ours: Callable[[KeptState], bool], *, fresh: bool
    ) -> None:
        """Take the room for all that will ever be kept.

        ``fresh``: forget what is there; so if any of it is not of this data file.
        """
        length = _PLACES * (_HEAD_BYTES + 2 * page_bytes)
        handle = self._handle.fileno()
        try:
            content = _all_of(handle)
            strange = any(
                state is not None and not is_ours(state)
                for state in _read_places(content, self._boot)
            )
            if not fresh and not strange and len(content) == length:
                return
            os.ftruncate(handle, 0)
            # Written, not only reserved: what is kept later needs no room that may have gone.
            write_at(handle, bytes(length), 0)
            os.fsync(handle)
        except OSError as exc:
            raise storage_error(f"no room for {self._path}", exc) from exc

    def keep(self, state: KeptState) -> None:
        """Make a state, which the disk has, the one to return to, unless a later one is."""
        head = _HEAD.pack(
            _MAGIC, len(state.pages) // 2, state.inode, state.transaction, self._boot.encode(),
            state.root,
        )  # fmt: skip
        content = head + plain_hash(head + state.pages) + state.pages
        try:
            while self._flushed < state.transaction:
                with self._locked():
                    newest = self._write(content, state.transaction)
                # Unlocked: a process that is stopped while the disk works keeps nobody waiting.
                flush_file(self._handle.fileno())
                self._flushed = newest
        except OSError as exc:
            raise storage_error(f"cannot write {self._path}", exc) from exc

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = self._handle.fileno()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)

    def _write(self, content: bytes, transaction: int) -> int:
        """Write a place as well as may be; the newest state that there is then, in the cache.

        That of another process may be on the disk or not: who wrote it may have been killed, or
        its flush may have failed, and then the system takes it for written. So it is written
        again, and only when it has been flushed the place of the one before is free.
        """
        handle = self._handle.fileno()
        if os.fstat(handle).st_nlink == 0:
            raise StorageError(f"{self._path} was removed; close the store, and open it again")
        size = len(content)
        present = _all_of(handle)
        if len(present) != _PLACES * size:
            os.ftruncate(handle, _PLACES * size)
            present = present[: _PLACES * size].ljust(_PLACES * size, b"\0")
        known = [
            -1 if found is None else found.transaction
            for found in _read_places(present, self._boot)
        ]
        newest = max(known)
        if newest in (-1, self._flushed):
            # Over the older one: until this is on the disk, the other counts.
            write_at(handle, content, known.index(min(known)) * size)
            return transaction
        at = known.index(newest) * size
        write_at(handle, present[at : at + size], at)
        return newest

    def close(self) -> None:
        """Let go of the file."""
        self._handle.close()


class Found(NamedTuple):
    """What a file ``kept`` holds of one boot."""

    newest: KeptState | None
    #: Is one of its places neither empty nor whole? Torn by the power loss, or damaged.
    doubtful: bool


def read_kept(path: str, boot: str) -> Found:
    """The last state that was kept under this boot; raises StorageError."""
    try:
        with open(open_regular(path), "rb") as source:
            content = source.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Found(None, doubtful=False)
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    places = _read_places(content, boot)
    whole = [found for found in places if found is not None]
    length = len(content) // _PLACES
    doubtful = any(
        found is None and any(content[at * length : (at + 1) * length])
        for at, found in enumerate(places)
    )
    newest = max(whole, key=lambda state: state.transaction, default=None)
    return Found(newest, doubtful=doubtful)


def _all_of(handle: int) -> bytes:
    return os.pread(handle, _MAX_BYTES + 1, 0)


def _read_places(content: bytes, boot: str) -> list[KeptState | None]:
    length = len(content) // _PLACES
    return [_read_place(content[at * length : (at + 1) * length], boot) for at in range(_PLACES)]


def _read_place(content: bytes, boot: str) -> KeptState | None:
    if len(content) < _HEAD_BYTES:
        return None
    magic, page_bytes, inode, transaction, name, root = _HEAD.unpack_from(content)
    head, pages = content[: _HEAD.size], content[_HEAD_BYTES:]
    if (
        magic != _MAGIC
        or page_bytes not in _PAGE_SIZES
        or len(pages) != 2 * page_bytes
        or plain_hash(head + pages) != content[_HEAD.size : _HEAD_BYTES]
        or name.rstrip(b"\0") != boot.encode()
    ):
        return None
    return KeptState(transaction, pages, inode, root)
