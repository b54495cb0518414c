"""Caches the listing of a directory, so that unchanged files are not read again.

For each directory the cache has the names in it, what ``lstat`` said of each (mode, size, mtime,
ctime, inode) and the digest of the map that was stored for it. A file whose numbers are the same
is taken to be the same, with git's rule for a racy index: a file that changed so shortly before
the snapshot that a later change could leave the same numbers is never taken from the cache. Its
numbers are stored as zeros, which match no file.

A second file, whose name ends in ``.bases``, has the digests of the snapshots that the directory
may hold (``restoring``). It is a short file of its own because each restore writes it twice.

A cache is a hint. One that is missing, damaged, or of another directory, other rules or another
store costs time and nothing else: the engine refuses a snapshot that links to a missing object.
"""

from __future__ import annotations

import os
import secrets
import struct
from contextlib import suppress
from typing import Any, Final, NamedTuple

from casstore.engine.files import FILE_MODE, open_regular, storage_error
from casstore.engine.forks import Lock
from casstore.errors import CasstoreError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import DIGEST_BYTES, Digest, plain_hash
from casstore.workspace.beneath import Parts
from casstore.workspace.tree import key_of, name_of

# Part of the hash that begins the file: a cache of another version is not read.
_VERSION: Final = b"casstore workspace cache 1\n"
_BASES: Final = ".bases"
#: mode, size, mtime, ctime, inode
STAMP: Final = struct.Struct("=IqqqQ")
NO_STAMP: Final = bytes(STAMP.size)
#: A change less than this before a scan is not trusted: a file system may round times to two
#: seconds, and the kernel's clock is a tick behind.
RACY_NS: Final = 2_000_000_000


class CachedDirectory(NamedTuple):
    """One directory as the last snapshot found it."""

    names: tuple[str, ...]
    #: One STAMP for each name.
    stamps: bytes
    #: Ignored names: a change of one of them does not change the directory.
    ignored: frozenset[str]
    #: Names that are left out, and why.
    left_out: dict[str, str]
    #: ``Rules.id`` of the rules that applied.
    rules: bytes
    #: The map of the directory.
    digest: Digest
    files: int
    size_bytes: int

    def stamp_of(self) -> dict[str, bytes]:
        """The stamp of each name."""
        size = STAMP.size
        return {
            name: self.stamps[at * size : (at + 1) * size] for at, name in enumerate(self.names)
        }


Records = dict[Parts, CachedDirectory]


class Cache:
    """Records of one directory tree, in memory, and in a file if there is a path for one."""

    def __init__(self, path: str | None, root: str) -> None:
        self._path = path
        self._root = root
        self.records: Records = {}
        #: Snapshots whose content the directory may have, file by file.
        self.bases: tuple[Digest, ...] = ()
        self._read = False
        # Held while the files are read, so that another thread waits for the records.
        self._loading = Lock()

    def load(self) -> None:
        """Read both files, once; one that is missing or damaged leaves its part empty."""
        with self._loading:
            if self._read:
                return
            if self._path is not None:
                with suppress(OSError, CasstoreError, ValueError, TypeError):
                    self.records = self._decode(self._load(self._path))
                with suppress(OSError, CasstoreError, ValueError, TypeError):
                    found = self._load(self._path + _BASES)
                    self.bases = tuple([Digest(base) for base in found])
            self._read = True

    def _load(self, path: str) -> list[Any]:
        """The rows in a file; empty if it is damaged or belongs to another directory."""
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read()
        body = data[DIGEST_BYTES:]
        if plain_hash(_VERSION + body) != data[:DIGEST_BYTES]:
            return []
        root, rows = unpack_checked(body)
        return list(rows) if root == os.fsencode(self._root) else []

    def _decode(self, rows: list[Any]) -> Records:
        records = {}
        for path, names, stamps, ignored, left_out, rules, digest, files, size_bytes in rows:
            parts = tuple(os.fsdecode(path).split("/")) if path else ()
            listed = tuple(os.fsdecode(names).split("/")) if names else ()
            records[parts] = CachedDirectory(
                names=listed,
                stamps=stamps,
                ignored=frozenset(os.fsdecode(ignored).split("/") if ignored else ()),
                left_out={name_of(key, parts): why for key, why in left_out.items()},
                rules=rules,
                digest=Digest(digest),
                files=files,
                size_bytes=size_bytes,
            )
        return records

    def store(self, records: Records, bases: tuple[Digest, ...]) -> None:
        """Store the records of a snapshot; StorageError if a file cannot be written."""
        if records != self.records:
            self.records = records
            self._write("", _encode(records))
        if bases != self.bases:
            self.bases = bases
            self._write(_BASES, [bytes(base) for base in bases])

    def _write(self, ending: str, rows: list[Any]) -> None:
        if self._path is None:
            return
        path = self._path + ending
        body = pack_checked([os.fsencode(self._root), rows])
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
            # Not flushed to disk: if a power loss damages the file, its hash shows that, and the
            # next scan reads everything.
            part = f"{path}.{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(part, flags, FILE_MODE), "wb") as file:
                    file.write(plain_hash(_VERSION + body) + body)
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as exc:
            raise storage_error(f"cannot write {path}", exc) from exc

    def own_paths(self) -> frozenset[Parts]:
        """The paths of the cache's files in the directory that they describe, if they are in it."""
        if self._path is None:
            return frozenset()
        inside = self._root.rstrip("/") + "/"
        paths = [os.path.abspath(self._path) + ending for ending in ("", _BASES)]
        return frozenset(
            [tuple(path[len(inside) :].split("/")) for path in paths if path.startswith(inside)]
        )

    def clear(self) -> None:
        """Forget all records; the bases stay."""
        self.records = {}


def _encode(records: Records) -> list[Any]:
    return [
        [
            os.fsencode("/".join(parts)),
            os.fsencode("/".join(record.names)),
            record.stamps,
            os.fsencode("/".join(sorted(record.ignored))),
            {key_of(name): why for name, why in record.left_out.items()},
            record.rules,
            bytes(record.digest),
            record.files,
            record.size_bytes,
        ]
        for parts, record in records.items()
    ]
