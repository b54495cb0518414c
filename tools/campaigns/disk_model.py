"""A model of files and names on a disk that may lose power: what is durable, what may be lost.

A crash may come after any event. The model is that of a page cache over a disk which writes
512-byte sectors whole:

- Each write since the last sync of its file may be there, missing, or torn: some of its sectors
  there and others not. Sectors land independently and in any order, so of several unsynced
  writes to one sector any version may be the one on disk. A version holds all earlier writes to
  that sector, because the cache did when it was written out; it never mixes two in another way.
- A sync makes durable what was finished before it began. A write through O_DSYNC makes durable
  its own sectors, and the size needed to read them; nothing else.
- The size of a file changes independently of its sectors: an unsynced extension may be missing
  (the file is shorter) or there without its data (the file ends in zeros).
- Names change independently of contents and of each other, each change as one step. Syncing the
  directory makes them durable. Syncing a new file also makes the name it was created with
  durable, as journalling file systems do though POSIX does not ask it;
  ``strict_entries`` takes that away.

Not modelled: damage to durable sectors, a disk that lies about its flushes, directories that
vanish (those that hold a file are there), file modes and times.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from campaigns.disk_events import (
    NEVER,
    Ack,
    Allocate,
    Create,
    Event,
    Link,
    Rename,
    Sync,
    SyncDirectory,
    SyncRange,
    Truncate,
    Unlink,
    Write,
)

SECTOR_BYTES = 512

# Besides its sectors, 0 and up, a change has these places that land on their own.
SIZE = -1
ENTRY = -2

# True if this part (a sector, SIZE or ENTRY) of that change (the index of its event) landed.
Landed = Callable[[int, int], bool]


class _Version(NamedTuple):
    """One sector after an unsynced change."""

    change: int
    done: int
    content: bytes


class _Size(NamedTuple):
    """The size of a file after an unsynced change."""

    change: int
    done: int
    size: int


class _File:
    """One file: its durable content, its current content, and the versions in between."""

    def __init__(self, content: bytes = b"") -> None:
        self._durable = bytearray(content)  # whole sectors, so it may reach past the size
        self._durable_size = len(content)
        self._live = bytearray(content)
        self._sectors: dict[int, list[_Version]] = {}
        self._sizes: list[_Size] = []

    def unsynced(self) -> set[int]:
        changes = {size.change for size in self._sizes}
        changes.update(version.change for found in self._sectors.values() for version in found)
        return changes

    def write(self, change: int, event: Write) -> None:
        end = event.offset + len(event.data)
        self._resize(change, event.done, max(end, len(self._live)))
        self._live[event.offset : end] = event.data
        self._add_versions(change, event.done, event.offset, end)

    def truncate(self, change: int, event: Truncate) -> None:
        old = len(self._live)
        self._resize(change, event.done, event.size)
        # Truncated bytes read as zeros if the file grows again.
        self._add_versions(change, event.done, event.size, old)

    def allocate(self, change: int, event: Allocate) -> None:
        self._resize(change, event.done, max(event.offset + event.length, len(self._live)))

    def sync(self, begun: int) -> None:
        for sector in list(self._sectors):
            self._settle(sector, begun)
        covered = _last_covered(self._sizes, begun)
        if covered:
            self._durable_size = self._sizes[covered - 1].size
            del self._sizes[:covered]

    def sync_range(self, event: SyncRange) -> None:
        end = event.offset + event.length
        for sector in _sectors(event.offset, end):
            self._settle(sector, event.begun)
        self._durable_size = max(end, self._durable_size)
        # A smaller size from before this write would truncate it again.
        self._sizes = [size for size in self._sizes if size.size >= end]

    def image(self, landed: Landed) -> bytes:
        content, size = bytearray(self._durable), self._durable_size
        for sector, versions in self._sectors.items():
            for version in reversed(versions):
                if landed(version.change, sector):
                    _put(content, sector, version.content)
                    break
        for resized in reversed(self._sizes):
            if landed(resized.change, SIZE):
                size = resized.size
                break
        _set_size(content, size)
        return bytes(content)

    def _resize(self, change: int, done: int, size: int) -> None:
        if size != len(self._live):
            _set_size(self._live, size)
            self._sizes.append(_Size(change, done, size))

    def _add_versions(self, change: int, done: int, start: int, end: int) -> None:
        for sector in _sectors(start, end):
            at = sector * SECTOR_BYTES
            content = bytes(self._live[at : at + SECTOR_BYTES]).ljust(SECTOR_BYTES, b"\0")
            self._sectors.setdefault(sector, []).append(_Version(change, done, content))

    def _settle(self, sector: int, begun: int) -> None:
        versions = self._sectors.get(sector, [])
        covered = _last_covered(versions, begun)
        if covered:
            _put(self._durable, sector, versions[covered - 1].content)
            del versions[:covered]
        if not versions:
            self._sectors.pop(sector, None)


def _sectors(start: int, end: int) -> range:
    return range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)) if start < end else range(0)


def _last_covered(versions: list[_Version] | list[_Size], begun: int) -> int:
    """Return how many of the versions a sync settles: up to the newest that was finished."""
    for count in range(len(versions), 0, -1):
        if versions[count - 1].done <= begun and versions[count - 1].done != NEVER:
            return count
    return 0


def _put(content: bytearray, sector: int, data: bytes) -> None:
    start = sector * SECTOR_BYTES
    if len(content) < start:
        _set_size(content, start)
    content[start : start + SECTOR_BYTES] = data


def _set_size(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


class _Entries(NamedTuple):
    """One unsynced change of names, landing as a whole: path to file, None for no file."""

    change: int
    done: int
    directory: str
    names: Mapping[str, str | None]
    creates: str | None


class _Names:
    """The directory entries: the durable ones and the changes since."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._durable: dict[str, str | None] = {path: path for path in paths}
        self._changes: list[_Entries] = []

    def unsynced(self) -> set[int]:
        return {entries.change for entries in self._changes}

    def add(self, change: int, event: Create | Link | Rename | Unlink) -> None:
        names: dict[str, str | None]
        if isinstance(event, Rename):
            names, place = {event.source: None, event.target: event.file}, event.target
        elif isinstance(event, Unlink):
            names, place = {event.path: None}, event.path
        else:
            names, place = {event.path: event.file}, event.path
        creates = event.file if isinstance(event, Create) else None
        directory = posixpath.dirname(place) or "."
        self._changes.append(_Entries(change, event.done, directory, names, creates))

    def sync_directory(self, event: SyncDirectory) -> None:
        self._settle(event.begun, lambda entries: entries.directory == event.path)

    def sync_created(self, event: Sync | SyncRange) -> None:
        self._settle(event.begun, lambda entries: entries.creates == event.file)

    def image(self, landed: Landed) -> dict[str, str]:
        names = dict(self._durable)
        for entries in self._changes:
            if landed(entries.change, ENTRY):
                names.update(entries.names)
        return {path: file for path, file in names.items() if file is not None}

    def _settle(self, begun: int, concerned: Callable[[_Entries], bool]) -> None:
        decided: dict[str, str | None] = {}
        kept: list[_Entries] = []
        for entries in reversed(self._changes):
            # An older change of a name is superseded by a newer durable one.
            names = {path: file for path, file in entries.names.items() if path not in decided}
            if concerned(entries) and entries.done <= begun and entries.done != NEVER:
                decided |= names
            elif names:
                kept.append(entries._replace(names=names))
        self._durable |= decided
        self._changes = kept[::-1]


class Disk:
    """All files and names at one moment of the trace, moved forward event by event."""

    def __init__(self, initial: Mapping[str, bytes], *, strict_entries: bool) -> None:
        self._files = {path: _File(content) for path, content in initial.items()}
        self._names = _Names(initial)
        self._strict_entries = strict_entries
        self.acknowledged: list[str] = []

    def apply(self, change: int, event: Event) -> None:
        """Move past an event; ``change`` is its number, by which outcomes are decided."""
        match event:
            case Ack():
                self.acknowledged.append(event.text)
            case Write():
                self._files[event.file].write(change, event)
            case Truncate():
                self._files[event.file].truncate(change, event)
            case Allocate():
                self._files[event.file].allocate(change, event)
            case SyncDirectory():
                self._names.sync_directory(event)
            case Sync() | SyncRange():
                self._sync(event)
            case _:
                if isinstance(event, Create):
                    self._files[event.file] = _File()
                self._names.add(change, event)

    def _sync(self, event: Sync | SyncRange) -> None:
        if isinstance(event, Sync):
            self._files[event.file].sync(event.begun)
        else:
            self._files[event.file].sync_range(event)
        if not self._strict_entries:
            self._names.sync_created(event)

    def unsynced(self) -> list[int]:
        """Return the changes, oldest first, that a crash now may lose at least in part."""
        changes = self._names.unsynced()
        return sorted(changes.union(*(file.unsynced() for file in self._files.values())))

    def contents(self, landed: Landed) -> dict[str, bytes]:
        """Return the files a crash now would leave if just these parts had landed."""
        names = self._names.image(landed)
        return {path: self._files[file].image(landed) for path, file in sorted(names.items())}
