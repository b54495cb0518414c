"""A snapshot as values: one map for each directory, and a root that names the top map.

A directory is a map from names to entries; an entry of a directory links to the map of that
directory, an entry of a file to the blob of its content. Equal directories are one value, so a
snapshot shares with every other what did not change, and the depth of a tree has no limit.

    {"format": "workspace/1", "root": <directory>, "files": 2, "bytes": 90, "left_out": {path: why}}
    <directory>      ["d", mode, Link(map)]
    <file>           ["f", mode, size, Link(blob)]
    <symbolic link>  ["l", target]

A snapshot may come from another machine in a bundle. ``decode_*`` accept only names that denote
something inside the directory: UnsafeSnapshotError for "..", a slash and the like.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import Engine
from casstore.errors import CorruptionError, LimitError, UnsafeSnapshotError
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects import values
from casstore.objects.pieces import PieceReader
from casstore.workspace.beneath import Parts, shown

FORMAT: Final = "workspace/1"
#: The name of the component of a checkpoint that links to a snapshot.
COMPONENT: Final = "workspace"
#: The prefix of temporary files; see ``restoring``. No snapshot contains one.
PART: Final = ".casstore-restore-"
#: Set-user-id, set-group-id and sticky bits are neither stored nor restored.
MODE_BITS: Final = 0o777
# The limit for one reader: a few stored maps, linked many times, can describe a tree of any size.
MAX_ENTRIES: Final = 10_000_000
_MAX_NAME_BYTES: Final = 255
_MAX_TARGET_BYTES: Final = 4095


class File(NamedTuple):
    """A regular file."""

    mode: int
    size_bytes: int
    digest: Digest


class Symlink(NamedTuple):
    """A symbolic link; its target is never followed."""

    target: bytes


class Directory(NamedTuple):
    """A directory; ``digest`` names the map of its entries."""

    mode: int
    digest: Digest


Entry = File | Symlink | Directory
Entries = dict[str, Entry]


class SnapshotRoot(NamedTuple):
    """A snapshot, decoded."""

    digest: Digest
    top: Directory
    files: int
    size_bytes: int
    #: Paths that were left out of the snapshot, and why.
    left_out: dict[str, str]


# --- names ------------------------------------------------------------------------------------


def key_of(name: str) -> str:
    """The map key of a file name: the name, or NUL and its bytes if they are not UTF-8."""
    if name.isascii():
        return name
    raw = os.fsencode(name)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        # No name contains NUL, so no other name has this key.
        return "\0" + raw.decode("latin-1")


def name_of(key: str, above: Parts) -> str:
    """The file name of a map key; UnsafeSnapshotError unless it names an entry of a directory."""
    if key[:1] != "\0":
        raw = key.encode()
    else:
        try:
            raw = key[1:].encode("latin-1")
        except UnicodeEncodeError:
            raise _unsafe(above, key, "is not a file name as snapshots encode it") from None
        try:
            raw.decode()
        except UnicodeDecodeError:
            pass
        else:
            raise _unsafe(above, key, "is not a file name as snapshots encode it")
    if raw in (b"", b".", b"..") or b"/" in raw or b"\0" in raw:
        raise _unsafe(above, key, "does not name a file in its directory")
    if len(raw) > _MAX_NAME_BYTES:
        raise _unsafe(above, key, f"is longer than {_MAX_NAME_BYTES} bytes")
    if raw.startswith(PART.encode()):
        raise _unsafe(above, key, "is reserved for files that are being restored")
    return os.fsdecode(raw)


def path_key(parts: Parts) -> str:
    """A path as encoded in ``left_out`` of the root of a snapshot."""
    return "/".join([key_of(name) for name in parts])


def _unsafe(above: Parts, key: str, reason: str) -> UnsafeSnapshotError:
    return UnsafeSnapshotError(f"{shown(above)}/{key}", reason)


# --- encoding ---------------------------------------------------------------------------------


def encode_entry(entry: Entry) -> list[Any]:
    """An entry as stored in the map of its directory."""
    if type(entry) is File:
        return ["f", entry.mode, entry.size_bytes, Link(entry.digest)]
    if type(entry) is Directory:
        return ["d", entry.mode, Link(entry.digest)]
    assert isinstance(entry, Symlink)
    return ["l", entry.target]


def encode_entries(entries: Entries) -> dict[str, Any]:
    """The map of a directory."""
    return {key_of(name): encode_entry(entry) for name, entry in entries.items()}


def encode_root(top: Directory, files: int, size_bytes: int, left_out: dict[str, str]) -> Any:
    """The value that a snapshot's digest names."""
    return {
        "format": FORMAT,
        "root": encode_entry(top),
        "files": files,
        "bytes": size_bytes,
        "left_out": left_out,
    }


def decode_entry(value: Any, above: Parts, key: str) -> Entry:
    """Decode an entry; UnsafeSnapshotError if it is invalid."""
    match value:
        case ["f", int(mode), int(size), Link(digest)] if _is_mode(mode) and size >= 0:
            return File(mode, size, Digest(digest))
        case ["d", int(mode), Link(digest)] if _is_mode(mode):
            return Directory(mode, Digest(digest))
        case ["l", bytes(target)] if 0 < len(target) <= _MAX_TARGET_BYTES and b"\0" not in target:
            return Symlink(target)
    raise _unsafe(above, key, "is not a file, a directory or a symbolic link")


def _is_mode(mode: int) -> bool:
    return 0 <= mode <= MODE_BITS


class TreeReader:
    """Reads the directories of snapshots; LimitError after ``MAX_ENTRIES`` entries in all."""

    def __init__(self, source: Engine | PieceReader) -> None:
        self._reader = source if isinstance(source, PieceReader) else PieceReader(source)
        self._left = MAX_ENTRIES

    def root(self, digest: bytes) -> SnapshotRoot:
        """A snapshot by its digest; UnsafeSnapshotError if the object is invalid."""
        value = self._value(digest)
        match value:
            case {
                "format": str(said),
                "root": list(top),
                "files": int(files),
                "bytes": int(size),
                "left_out": dict(left_out),
            } if said == FORMAT:
                entry = decode_entry(top, (), "")
                if isinstance(entry, Directory) and all(
                    type(why) is str for why in left_out.values()
                ):
                    return SnapshotRoot(Digest(digest), entry, files, size, left_out)
        raise UnsafeSnapshotError(Digest(digest).hex(), "is not a workspace snapshot")

    def entries(self, digest: bytes, above: Parts) -> Entries:
        """The entries of a directory by name, in order of their keys."""
        value = self._value(digest)
        if type(value) is not dict:
            raise UnsafeSnapshotError(shown(above), "is not a directory")
        self._left -= len(value)
        if self._left < 0:
            raise LimitError(
                f"the snapshot has more than {MAX_ENTRIES:,} files and directories; "
                "take snapshots of parts of the directory"
            )
        return {name_of(key, above): decode_entry(item, above, key) for key, item in value.items()}

    def _value(self, digest: bytes) -> Any:
        item = self._reader.find_many((digest,))[0]
        if item is None:
            raise CorruptionError(f"object {digest.hex()} of a snapshot is missing; run check")
        if item.kind in values.BLOB_KINDS:
            raise UnsafeSnapshotError(digest.hex(), "is a blob, not a directory")
        return values.read_value(self._reader, digest, item, max_bytes=DEFAULT_MAX_BYTES)

    def walk(self, top: Directory) -> Iterator[tuple[Parts, Entry]]:
        """Every path below a directory, parents first."""
        ahead: list[tuple[Parts, Entry]] = [((), top)]
        while ahead:
            parts, entry = ahead.pop()
            if parts:
                yield parts, entry
            if isinstance(entry, Directory):
                below = self.entries(entry.digest, parts)
                ahead += [((*parts, name), below[name]) for name in reversed(below)]
