"""The memtable: in memory, the commits that are in the log but not yet applied to the tables.

An *entry* (``BatchEntry``) is what one commit changes, and the content of one log record: new
objects, changed rows, deleted names, objects whose gc grace period restarts. An object's name is
its row in the index, from digest to id (see ``lookup``); an object without a name cannot be found.

The memtable keeps every version of a row with the LSN of its commit, so that a reader sees the
state after one commit (``MemtableView``) while later ones are added. A memtable only grows, except
that ``add`` first removes what an interrupted ``add`` left. Once its oldest entries have been
applied, a new memtable with the remaining entries replaces it; readers that began with the old one
continue to use it.

    body of a record   [time in ms, first id, objects, rows, deleted names, touched]
    objects            flat list, five values per object: digest, kind, bytes, digests of the
                       children concatenated, list of the ids of the children. The list is nil if
                       the same commit deleted the object: it is stored without a name
    rows               flat list, three values per row: table, key, value or nil if deleted
    deleted names      digest 32 ‖ id 8 of each
    touched            ids of the objects whose gc grace period restarts
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.log import Position, RecoveryPoint
from casstore.engine.protocol import TABLES, NewObject
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import pack_checked, unpack_checked
from casstore.format.digest import DIGEST_BYTES

_TABLES: Final = frozenset(TABLES)
_NAME_BYTES: Final = DIGEST_BYTES + slabs.ID_BYTES
_OBJECT_FIELDS: Final = 5
#: The background thread applies the log when this much has gathered.
APPLY_BYTES: Final = 256 << 10
APPLY_CHANGES: Final = 2048
# A memtable with at least this many ``applied_ids`` does not pass them on to the next memtable.
_MAX_APPLIED_IDS: Final = 32_768

#: Used as the next free id if the table of slabs is damaged, so that the id cannot be read.
UNKNOWN_ID: Final = 0

#: A table, a key, and the value; None: the row is deleted.
RowVersion = tuple[str, bytes, bytes | None]
#: A digest, and the id of the object.
Name = tuple[bytes, int]
#: The ids that an object links to; None: the object was deleted in the batch that stored it.
Links = Sequence[int] | None
#: Changed rows of a table, by key; None: the row is deleted.
Changed = list[tuple[bytes, bytes | None]]


class Unchanged:
    """The answer for a row or name that no entry changes: the tables decide about it."""


UNCHANGED: Final = Unchanged()


class BatchEntry:
    """What one commit changes: the writes of a whole batch (see ``batches``)."""

    __slots__ = (
        "_slab", "first_id", "links", "next_id", "now_ms", "objects", "rows", "size_bytes",
        "touched", "unnamed",
    )  # fmt: skip

    def __init__(
        self,
        now_ms: int,
        first_id: int,
        objects: Sequence[NewObject],
        links: Sequence[Links],
        rows: Sequence[RowVersion],
        unnamed: Sequence[Name],
        touched: Sequence[int],
    ) -> None:
        self.now_ms = now_ms
        #: The id of the first new object; without new objects, the next free id.
        self.first_id = first_id
        #: New objects with consecutive ids, and the ids that each links to.
        self.objects = objects
        self.links = links
        #: Changed rows, in the order of the changes.
        self.rows = rows
        #: Names that the commit deletes from the index.
        self.unnamed = unnamed
        #: Ids of stored objects that were put again: their grace period restarts.
        self.touched = touched
        #: The first id after the new objects.
        self.next_id = first_id + len(objects)
        self.size_bytes = sum([len(item[2]) for item in objects])
        self._slab: tuple[bytes, bytes] | None = None

    def named(self) -> list[Name]:
        """The names of the new objects."""
        numbered = enumerate(zip(self.objects, self.links, strict=True), self.first_id)
        return [(item[0], object_id) for object_id, (item, links) in numbered if links is not None]

    def slab(self) -> tuple[bytes, bytes] | None:
        """The new objects as an uncompressed slab, so that a ``SlabReader`` can read them.

        None without new objects.
        """
        if self._slab is None and self.objects:
            self._slab = slabs.encode(
                self.objects, self.links, self.first_id, self.now_ms, slabs.uncompressed
            )
        return self._slab


def encode_entry(entry: BatchEntry) -> bytes:
    """An entry as the body of a log record."""
    objects: list[Any] = []
    for (digest, kind, data, children), links in zip(entry.objects, entry.links, strict=True):
        objects += (digest, kind, data, b"".join(children), links)
    rows: list[Any] = []
    for row in entry.rows:
        rows += row
    unnamed = b"".join([digest + slabs.slab_key(object_id) for digest, object_id in entry.unnamed])
    return pack_checked([entry.now_ms, entry.first_id, objects, rows, unnamed, list(entry.touched)])


def decode_entry(lsn: int, body: bytes) -> BatchEntry:
    """The entry in the body of the log record ``lsn``; CorruptionError if it is invalid."""
    try:
        now_ms, first_id, flat, cells, unnamed, touched = unpack_checked(body)
        objects: list[NewObject] = []
        links: list[Links] = []
        columns = [flat[at::_OBJECT_FIELDS] for at in range(_OBJECT_FIELDS)]
        for digest, kind, data, children, ids in zip(*columns, strict=True):
            digests = _cut(children, DIGEST_BYTES)
            if len(digest) != DIGEST_BYTES or (ids is not None and len(ids) != len(digests)):
                raise ValueError("an object has an invalid digest, or other than one id per child")
            objects.append(NewObject(digest, kind, data, digests))
            links.append(ids)
        rows = list(zip(cells[::3], cells[1::3], cells[2::3], strict=True))
        for table, key, _ in rows:
            if table not in _TABLES or not isinstance(key, bytes):
                raise ValueError(f"a row has an invalid table or key: {table!r}, {key!r}")
        gone = [
            (name[:DIGEST_BYTES], slabs.read_id(name[DIGEST_BYTES:]))
            for name in _cut(unnamed, _NAME_BYTES)
        ]
        return BatchEntry(now_ms, first_id, objects, links, rows, gone, touched)
    except (TypeError, ValueError, IndexError, OverflowError, InvalidInputError) as exc:
        raise CorruptionError(
            f"commit {lsn} in the log is invalid ({exc}); restore a backup, or run `casstore "
            "recover --discard-log` to continue without the commits in the log"
        ) from exc


def _cut(joined: bytes, length: int) -> list[bytes]:
    if len(joined) % length:
        raise ValueError(f"{len(joined)} bytes cannot be divided into items of {length}")
    return [joined[at : at + length] for at in range(0, len(joined), length)]


def _next_id(logged: LoggedEntry) -> int:
    return logged.entry.next_id


class LoggedEntry(NamedTuple):
    """An entry, and where its log record is."""

    #: The position after the record.
    position: Position
    entry: BatchEntry
    #: Where the record begins.
    offset: int


class Memtable:
    """The entries that the tables do not hold, and the versions of each row and name in them."""

    __slots__ = (
        "_keys", "applied_ids", "changes", "deleted", "entries", "ids", "is_due", "last", "next_id",
        "oldest_offset", "recovery_point", "rows", "size_bytes", "transaction",
    )  # fmt: skip

    def __init__(self, recovery_point: RecoveryPoint, next_id: int, transaction: int = -1) -> None:
        #: The recovery point in the tables: which log is in use, and in ``applied`` the position
        #: after the last log record that the tables hold.
        self.recovery_point = recovery_point
        #: The position after the log record of the last entry.
        self.last = recovery_point.applied
        #: The number of the LMDB transaction that ``recovery_point`` was read in; -1 if unknown.
        self.transaction = transaction
        #: The entries, oldest first. Those after ``last`` are what an interrupted ``add`` left.
        self.entries: list[LoggedEntry] = []
        #: The offset in the log of the first entry's record; None without entries.
        self.oldest_offset: int | None = None
        #: The id that the next new object gets, or UNKNOWN_ID.
        self.next_id = next_id
        #: How many rows, objects and names the entries change, and the bytes of their objects.
        self.changes = self.size_bytes = 0
        #: True once the memtable is long enough for the background thread to apply the log.
        self.is_due = False
        #: The versions of each row by table and key: LSN and value, oldest first. None: deleted.
        self.rows: dict[tuple[str, bytes], list[tuple[int, bytes | None]]] = {}
        # By table: the sorted keys of its rows among the first n of ``rows``, and n.
        self._keys: dict[str, tuple[int, list[bytes]]] = {}
        #: The id of each object that an entry stored. Ids are assigned in commit order: a view
        #: contains the objects whose ids are below the view's next free id.
        self.ids: dict[bytes, int] = {}
        #: The versions of each name that an entry deleted, which is rare: LSN and id; None:
        #: deleted. The first version has LSN -1, so that every view finds one.
        self.deleted: dict[bytes, list[tuple[int, int | Unchanged | None]]] = {}
        #: Ids by digest, of objects of entries that were applied, so that writers need not ask the
        #: index. They stay valid: a transaction that deletes names from the index begins a new
        #: memtable.
        self.applied_ids: dict[bytes, int] = {}

    def add(self, offset: int, position: Position, entry: BatchEntry) -> None:
        """Add an entry whose log record begins at ``offset`` and ends at ``position``.

        Readers see it once ``last`` is updated. Only one thread may call this at a time.
        """
        lsn = position.lsn
        rows, ids, deleted = self.rows, self.ids, self.deleted
        # Remove what is left of an attempt to add this entry that an interrupt cut short.
        while self.entries and self.entries[-1].position.lsn > self.last.lsn:
            self.entries.pop()
        for table, key, value in entry.rows:
            row_key = table, key
            if row_key in rows:
                rows[row_key].append((lsn, value))
            else:
                rows[row_key] = [(lsn, value)]
        for digest, _ in entry.unnamed:
            if digest not in deleted:
                deleted[digest] = [(-1, ids.get(digest, UNCHANGED))]
            deleted[digest].append((lsn, None))
        self.entries.append(LoggedEntry(position, entry, offset))
        self.oldest_offset = self.entries[0].offset
        # After ``entries``: a reader that finds an id here reads the object from its entry.
        object_id = entry.first_id
        for item, links in zip(entry.objects, entry.links, strict=True):
            if links is not None:
                ids[item[0]] = object_id
                if item[0] in deleted:
                    deleted[item[0]].append((lsn, object_id))
            object_id += 1
        self.changes += len(entry.rows) + len(entry.objects) + len(entry.unnamed)
        self.size_bytes += entry.size_bytes
        self.is_due = self.changes >= APPLY_CHANGES or self.size_bytes >= APPLY_BYTES
        self.next_id = entry.next_id
        self.last = position

    def after(self, applied: Position) -> Memtable:
        """A new memtable without the entries up to the position ``applied``."""
        rest = Memtable(self.recovery_point._replace(applied=applied), self.next_id)
        if len(self.applied_ids) < _MAX_APPLIED_IDS:
            rest.applied_ids = self.applied_ids
        for position, entry, offset in self.entries:
            if position.lsn > self.last.lsn:
                # Left by an interrupted ``add``. It is published, so it is read from the log again.
                break
            if position.lsn > applied.lsn:
                rest.add(offset, position, entry)
                continue
            for digest, _ in entry.unnamed:
                rest.applied_ids.pop(digest, None)
            rest.applied_ids.update(entry.named())
        return rest

    def view(self) -> MemtableView:
        """A view of all present entries."""
        # ``last`` is read first: if another thread adds an entry in between, the view may contain
        # objects too many, but never too few.
        return MemtableView(self, self.last.lsn, self.next_id)

    # --- look-ups -----------------------------------------------------------------------------

    def newest_id(self, digest: bytes) -> int | Unchanged | None:
        """The id in an object's newest name; None: deleted, UNCHANGED: ask the index."""
        if digest in self.deleted:
            return self.deleted[digest][-1][1]
        return self.ids.get(digest, UNCHANGED)

    def find_entry(self, object_id: int) -> BatchEntry | None:
        """The entry that stored an object; None if the tables have the object."""
        entries = self.entries
        if not entries or object_id < entries[0].entry.first_id:
            return None
        at = bisect_right(entries, object_id, key=_next_id)
        return entries[at].entry if at < len(entries) else None

    def keys(self, table: str) -> Sequence[bytes]:
        """The keys of all rows of a table that entries change, in order."""
        count, keys = self._keys.get(table, (0, []))
        if count != len(self.rows):
            # ``list`` copies the dict in one call: another thread may add a commit to it meanwhile.
            # Rows are only added, and at the end.
            rows = list(self.rows)
            # A new list: another thread may read the old one.
            keys = sorted([*keys, *[key for name, key in rows[count:] if name == table]])
            self._keys[table] = len(rows), keys
        return keys


class MemtableView:
    """The state of a memtable after one commit; entries added later are ignored."""

    __slots__ = ("_next_id", "lsn", "memtable")

    def __init__(self, memtable: Memtable, lsn: int, next_id: int) -> None:
        #: ``find_id`` returns UNCHANGED for a digest that is neither in the ``ids`` nor in the
        #: ``deleted`` of this memtable: a caller may test that first, without a call.
        self.memtable = memtable
        self._next_id = next_id
        #: The LSN of that commit.
        self.lsn = lsn

    def find_row(self, table: str, key: bytes) -> bytes | Unchanged | None:
        """The value of a row; None: deleted, UNCHANGED: ask the tables."""
        versions = self.memtable.rows.get((table, key))
        if versions is not None:
            for lsn, value in reversed(versions):
                if lsn <= self.lsn:
                    return value
        return UNCHANGED

    def find_id(self, digest: bytes) -> int | Unchanged | None:
        """The id in an object's name; None: the name was deleted, UNCHANGED: ask the index."""
        memtable = self.memtable
        found: int | Unchanged | None
        if memtable.deleted and digest in memtable.deleted:
            versions = memtable.deleted[digest]
            found = next(found for at, found in reversed(versions) if at <= self.lsn)
        else:
            found = memtable.ids.get(digest, UNCHANGED)
        # Commits after this view assigned higher ids.
        return UNCHANGED if isinstance(found, int) and found >= self._next_id else found

    def changed_between(
        self, table: str, start: bytes, stop: bytes | None, *, reverse: bool
    ) -> Changed:
        """The changed rows with ``start <= key < stop``, in key order or its reverse."""
        keys = self.memtable.keys(table)
        first = bisect_left(keys, start)
        last = len(keys) if stop is None else bisect_left(keys, stop)
        changed: Changed = []
        for key in keys[first:last]:
            value = self.find_row(table, key)
            if not isinstance(value, Unchanged):
                changed.append((key, value))
        if reverse:
            changed.reverse()
        return changed

    def names(self) -> dict[bytes, int | None]:
        """All names that the entries change: the id by digest; None: the name was deleted."""
        names: dict[bytes, int | None] = {}
        for _, entry, _ in self.entries():
            names.update(dict.fromkeys([digest for digest, _ in entry.unnamed]))
            names.update(entry.named())
        return names

    def object(self, object_id: int) -> NewObject:
        """An object whose id ``find_id`` returned."""
        entry = self.memtable.find_entry(object_id)
        assert entry is not None
        return entry.objects[object_id - entry.first_id]

    def stored_at_ms(self, object_id: int) -> int | None:
        """When an object was stored; None if the tables have it."""
        entry = self.memtable.find_entry(object_id)
        return None if entry is None else entry.now_ms

    def slab_of(self, object_id: int) -> tuple[bytes, bytes] | None:
        """The key and value of the slab with an object; None if the tables have the object."""
        entry = self.memtable.find_entry(object_id)
        return None if entry is None else entry.slab()

    def entries(self) -> list[LoggedEntry]:
        """All entries, oldest first."""
        return [each for each in self.memtable.entries.copy() if each.position.lsn <= self.lsn]

    def slabs(self) -> Iterator[tuple[bytes, bytes]]:
        """The objects of each entry as a slab: key and value, in order of their keys."""
        for _, entry, _ in self.entries():
            slab = entry.slab()
            if slab is not None:
                yield slab


def merge(
    stored: Iterable[tuple[bytes, bytes]], changed: Changed, *, reverse: bool
) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a table with later changes applied; both in key order, or its reverse."""
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
