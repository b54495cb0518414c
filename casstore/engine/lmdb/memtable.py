"""The commits that are in the log and not yet in the tables, in memory.

An ``Entry`` is what one record of the log says: row changes, a slab of new objects, names that
are gone, objects whose grace period restarts. The memtable keeps every version of a row and of
a name with the number of its commit, so that a reader sees one moment while commits go on. It
only ever grows. When its first entries were applied to the tables, a new memtable takes the
place of the old one, which lives as long as somebody reads it.

    body of a record   [time in ms, first id, slab or nothing, [table, key, value or nil, …],
                        digest 32 ‖ id 8 of each name that is gone, ids of objects touched]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.log import Position
from casstore.engine.protocol import TABLES
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.hashing import DIGEST_BYTES

_TABLES: Final = frozenset(TABLES)
_NAME_BYTES: Final = DIGEST_BYTES + slabs.ID_BYTES

#: In the place of the next free id: the table of slabs is damaged.
UNKNOWN_ID: Final = 0

#: A table, a key, and the value; None: the row is deleted.
RowVersion = tuple[str, bytes, bytes | None]
#: A digest, and the id of the object.
Name = tuple[bytes, int]
#: What was changed in a table, by key; None: the row is deleted.
Changed = list[tuple[bytes, bytes | None]]


class Entry(NamedTuple):
    """What one transaction changed."""

    now_ms: int
    #: The id of the first new object; of the next one that will come, if there is none.
    first_id: int
    #: Slabs of the new objects, by key, with consecutive ids.
    slabs: Sequence[tuple[bytes, bytes]]
    #: The new objects' names.
    named: Sequence[Name]
    rows: Sequence[RowVersion]
    unnamed: Sequence[Name]
    touched: Sequence[int]

    @property
    def next_id(self) -> int:
        """The first id behind the new objects."""
        return int.from_bytes(self.slabs[-1][0], "big") + 1 if self.slabs else self.first_id


def encode_entry(entry: Entry) -> bytes:
    """An entry as the body of a record. It has one slab at the most."""
    flat: list[str | bytes | None] = []
    for row in entry.rows:
        flat += row
    unnamed = b"".join([digest + slabs.slab_key(own) for digest, own in entry.unnamed])
    slab = entry.slabs[0][1] if entry.slabs else b""
    return pack_checked([entry.now_ms, entry.first_id, slab, flat, unnamed, list(entry.touched)])


def decode_entry(lsn: int, body: bytes) -> Entry:
    """The body of a record as an entry; CorruptionError if it makes no sense."""
    try:
        now_ms, first_id, slab, flat, unnamed, touched = unpack_checked(body)
        stored: list[tuple[bytes, bytes]] = []
        named: list[Name] = []
        if slab:
            key = slabs.slab_key(first_id + slabs.count_of(slab) - 1)
            directory = slabs.read_directory(key, slab)
            stored.append((key, slab))
            named = [
                (directory.digest(position), first_id + position)
                for position in range(directory.objects)
                # What was stored and deleted within the batch has no name.
                if directory.kinds[position] & ~slabs.KEEPS_LINKS != slabs.DEAD
            ]
        rows = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        for table, key, _ in rows:
            if table not in _TABLES or not isinstance(key, bytes):
                raise ValueError(f"a row of table {table!r}")
        gone = [
            (unnamed[at : at + DIGEST_BYTES], slabs.read_id(unnamed[at + DIGEST_BYTES :][:8]))
            for at in range(0, len(unnamed), _NAME_BYTES)
        ]
    except (TypeError, ValueError, IndexError, OverflowError, InvalidInputError) as exc:
        raise CorruptionError(f"commit {lsn} in the log makes no sense: {exc}") from exc
    return Entry(now_ms, first_id, stored, named, rows, gone, touched)


class Memtable:
    """Entries since ``base``, and what they say of each row and name."""

    __slots__ = (
        "_names", "_offsets", "_rows", "base", "changes", "entries", "last", "next_id",
        "size_bytes",
    )  # fmt: skip

    def __init__(self, base: Position, next_id: int) -> None:
        #: The position behind the last record that the tables hold, and behind the last one here.
        self.base = self.last = base
        #: Each entry with the position behind its record.
        self.entries: list[tuple[Position, Entry]] = []
        #: The id that the next new object gets, or UNKNOWN_ID.
        self.next_id = next_id
        self.changes = self.size_bytes = 0
        # Where the record of each entry begins.
        self._offsets: list[int] = []
        self._rows: dict[tuple[str, bytes], list[tuple[int, bytes | None]]] = {}
        self._names: dict[bytes, list[tuple[int, int | None]]] = {}

    @property
    def oldest_offset(self) -> int | None:
        """Where the record of the first entry begins; None if there is none."""
        return self._offsets[0] if self._offsets else None

    def add(self, offset: int, position: Position, entry: Entry) -> None:
        """Take over an entry, whose record begins at ``offset``; readers see it when ``last``
        says so. Hold the write lock.
        """
        lsn = position.lsn
        rows, names = self._rows, self._names
        # An interrupt may have cut short an attempt to add the same entry.
        while self.entries and self.entries[-1][0].lsn > self.last.lsn:
            self.entries.pop()
        del self._offsets[len(self.entries) :]
        for table, key, value in entry.rows:
            place = table, key
            if place in rows:
                rows[place].append((lsn, value))
            else:
                rows[place] = [(lsn, value)]
        for digest, _ in entry.unnamed:
            names.setdefault(digest, []).append((lsn, None))
        for digest, object_id in entry.named:
            names.setdefault(digest, []).append((lsn, object_id))
        self.entries.append((position, entry))
        self._offsets.append(offset)
        self.changes += len(entry.rows) + len(entry.named) + len(entry.unnamed)
        for _, slab in entry.slabs:
            self.size_bytes += len(slab)
        self.next_id = entry.next_id
        self.last = position

    def after(self, applied: Position) -> Memtable:
        """A memtable without the entries that were applied."""
        rest = Memtable(applied, self.next_id)
        for offset, (position, entry) in zip(self._offsets, self.entries, strict=True):
            if position.lsn > applied.lsn:
                rest.add(offset, position, entry)
        rest.next_id = self.next_id
        return rest

    def view(self) -> View:
        """All that it holds now."""
        return View(self, self.last.lsn)

    # --- for views ----------------------------------------------------------------------------

    def row_versions(self, table: str, key: bytes) -> list[tuple[int, bytes | None]] | None:
        """The versions of a row, oldest first."""
        return self._rows.get((table, key))

    def name_versions(self, digest: bytes) -> list[tuple[int, int | None]] | None:
        """The ids of an object, oldest first."""
        return self._names.get(digest)

    def places(self, table: str) -> list[bytes]:
        """The keys of all changed rows of a table."""
        # In one call, because a commit may add to it meanwhile.
        return [key for name, key in list(self._rows) if name == table]

    def digests(self) -> list[bytes]:
        """The digests of which it says anything."""
        return list(self._names)


class Unchanged:
    """What a view says of a row that the tables alone know."""


UNCHANGED: Final = Unchanged()


class View:
    """A memtable as it was after one commit."""

    __slots__ = ("_memtable", "lsn")

    def __init__(self, memtable: Memtable, lsn: int) -> None:
        self._memtable = memtable
        #: The number of that commit.
        self.lsn = lsn

    def find_row(self, table: str, key: bytes) -> bytes | Unchanged | None:
        """The value of a row, None if it was deleted, UNCHANGED if the tables have it."""
        versions = self._memtable.row_versions(table, key)
        if versions is not None:
            for lsn, value in reversed(versions):
                if lsn <= self.lsn:
                    return value
        return UNCHANGED

    def find_id(self, digest: bytes) -> int | Unchanged | None:
        """The id of an object, None if its name is gone, UNCHANGED if the index knows."""
        versions = self._memtable.name_versions(digest)
        if versions is not None:
            for lsn, object_id in reversed(versions):
                if lsn <= self.lsn:
                    return object_id
        return UNCHANGED

    def changed_between(
        self, table: str, start: bytes, stop: bytes | None, *, reverse: bool
    ) -> Changed:
        """What changed in a part of a table, in the order of keys or its reverse."""
        changed: Changed = []
        for key in self._memtable.places(table):
            if key >= start and (stop is None or key < stop):
                value = self.find_row(table, key)
                if not isinstance(value, Unchanged):
                    changed.append((key, value))
        changed.sort(reverse=reverse)
        return changed

    def names(self) -> Iterator[tuple[bytes, int | None]]:
        """The objects of which it says anything: digest and id, None if the name is gone."""
        for digest in self._memtable.digests():
            object_id = self.find_id(digest)
            if not isinstance(object_id, Unchanged):
                yield digest, object_id

    def slab_of(self, object_id: int) -> tuple[bytes, bytes] | None:
        """The slab that holds an object; None if the tables have it."""
        entries = self._memtable.entries
        if not entries or object_id < entries[0][1].first_id:
            return None
        at = bisect_left(entries, object_id, key=_behind_id)
        for key, value in entries[at][1].slabs if at < len(entries) else ():
            if key >= slabs.slab_key(object_id):
                return key, value
        return None

    def entries(self) -> list[tuple[Position, Entry]]:
        """All commits, each with the position behind its record."""
        return [pair for pair in self._memtable.entries.copy() if pair[0].lsn <= self.lsn]

    def slabs(self) -> Iterator[tuple[bytes, bytes]]:
        """All slabs, by key."""
        for _, entry in self.entries():
            yield from entry.slabs


def _behind_id(numbered: tuple[Position, Entry]) -> int:
    """The last id of an entry, for searching: ids of an entry without objects lie behind it."""
    return numbered[1].next_id - 1


def merge(
    stored: Iterable[tuple[bytes, bytes]], changed: Changed, *, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """Rows of a table with what changed since; both in the order of keys, or its reverse."""
    ahead = iter(changed)
    change = next(ahead, None)
    for key, value in stored:
        while change is not None and (change[0] > key if reverse else change[0] < key):
            if change[1] is not None:
                yield change[0], change[1]
            change = next(ahead, None)
        if change is None or change[0] != key:
            yield key, value
            continue
        if change[1] is not None:
            yield key, change[1]
        change = next(ahead, None)
    while change is not None:
        if change[1] is not None:
            yield change[0], change[1]
        change = next(ahead, None)
