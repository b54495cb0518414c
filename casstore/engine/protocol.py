"""The interface of an engine: objects by digest, rows by table and key, writes as plain data.

The interface suits an engine behind a network and costs an embedded engine nothing. A ``Write``
contains its conditions and its changes, and the engine runs it as one transaction; no callback of
the caller runs inside it. Reads are batched. Expiry is decided by the engine's clock, so the clocks
of two machines never have to agree.

Optional capabilities are separate protocols (``Collecting``, ``Packing``, …); callers test for them
with ``isinstance``. An engine that wraps another must define those methods itself: since Python
3.12 ``isinstance`` does not call ``__getattr__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

from casstore.format.printing import count, size

# --- rows ----------------------------------------------------------------------

# The tables that every engine has. The layer that writes a row defines its meaning.
TABLES: Final = (
    "attachments",
    "heads",
    "history",
    "leases",
    "pins",
    "queue",
    "receipts",
    "records",
    "retention",
    "sessions",
    "tombstones",
)

MAX_ROW_KEY_BYTES: Final = 511
MAX_ROW_VALUE_BYTES: Final = 16 << 20
MAX_OBJECT_BYTES: Final = 16 << 20
MAX_KIND: Final = 126
TIME_BYTES: Final = 8
# The longest duration, and the latest time, that a caller may pass: a thousand years. More is a
# mistake, and without a limit the sum with the present time might not fit into TIME_BYTES.
MAX_STAMP_MS: Final = 1000 * 366 * 86_400_000


class Row(NamedTuple):
    """A key and its value."""

    key: bytes
    value: bytes


class RowKey(NamedTuple):
    """The table of one row, and its key there."""

    table: str
    key: bytes


# --- objects --------------------------------------------------------------------


class NewObject(NamedTuple):
    """An object to be stored.

    ``children`` are the digests that ``data`` links to, in order of appearance, with repetitions.
    Each must be stored already or come earlier in the same write.
    """

    digest: bytes
    kind: int
    data: bytes
    children: Sequence[bytes]


class StoredObject(NamedTuple):
    """A stored object. The engine does not verify ``data`` against the digest; the caller does."""

    kind: int
    data: bytes


class ObjectInfo(NamedTuple):
    """The metadata of an object that a collector needs.

    Ids increase in order of arrival and are never reused, so a child's id is always lower than its
    parents' ids. ``children`` lists the links in order, with repetitions.
    """

    id: int
    digest: bytes
    kind: int
    size_bytes: int
    children: tuple[int, ...]
    #: When the object was put, or later: an engine that stores several objects together may record
    #: one time for all of them.
    stored_at_ms: int


# --- conditions -----------------------------------------------------------------


class RowIs(NamedTuple):
    """The row has exactly this value; None: the row does not exist."""

    table: str
    key: bytes
    value: bytes | None


class RowStarts(NamedTuple):
    """The row exists and its value starts with these bytes."""

    table: str
    key: bytes
    prefix: bytes


class RowLive(NamedTuple):
    """The row's value starts with ``prefix``, and the time at ``offset`` in it is later than now.

    A time is eight bytes: big-endian milliseconds since 1970.
    """

    table: str
    key: bytes
    prefix: bytes
    offset: int


class RowLapsed(NamedTuple):
    """The row has exactly this value, and the time at ``offset`` in it is now or earlier."""

    table: str
    key: bytes
    value: bytes
    offset: int


class ObjectsExist(NamedTuple):
    """All these objects are stored."""

    digests: Sequence[bytes]


Condition = RowIs | RowStarts | RowLive | RowLapsed | ObjectsExist


# --- changes --------------------------------------------------------------------


class Stamp(NamedTuple):
    """The engine writes its time plus ``add_ms`` at this offset of a row's value."""

    offset: int
    add_ms: int = 0


class PutRow(NamedTuple):
    """Insert or replace a row."""

    table: str
    key: bytes
    value: bytes
    stamps: Sequence[Stamp] = ()


class DeleteRow(NamedTuple):
    """Delete a row if it exists."""

    table: str
    key: bytes


RowChange = PutRow | DeleteRow


#: When a write returns: with FULL once it is flushed to the disk; with RELAXED before that, so a
#: power loss may undo it.
FULL: Final = "full"
RELAXED: Final = "relaxed"
DURABILITIES: Final = (FULL, RELAXED)


class Write(NamedTuple):
    """One transaction, as data.

    The conditions are checked in order. The first one that fails ends the write with
    ``ConditionFailedError`` (``ObjectNotFoundError`` for a missing object), and nothing changes.
    Then the objects are stored, the rows change in the order given, and the objects in ``deletes``
    are removed. Only a collector may delete objects: the engine does not check whether something
    links to them.

    The transaction is isolated: no other write runs between the check of the conditions and the
    changes.

    Everything typed as bytes must be ``bytes``. It is immutable, so an engine may store it without
    a copy; ``InvalidInputError`` for a ``bytearray`` or ``memoryview``. The caller may reuse its
    lists when the write returns.
    """

    objects: Sequence[NewObject] = ()
    conditions: Sequence[Condition] = ()
    rows: Sequence[RowChange] = ()
    deletes: Sequence[bytes] = ()
    #: Whether the call returns only when the write is flushed to the disk; None: as the engine was
    #: opened.
    durable: bool | None = None


class CheckedWrite(Write):
    """A write that is well-formed by construction, so the engine skips validation.

    For callers that build digests, keys and rows with functions that observe the limits. The engine
    still checks the lengths of objects: they depend on what users store.
    """

    __slots__ = ()


class WriteResult(NamedTuple):
    """The engine's time of the write, and how many objects were not stored before."""

    now_ms: int
    new_objects: int


class Watch(Protocol):
    """Signals when a store may have changed. For one waiter; do not share it between threads.

    Create the watch, then read; wait, then read again. A write that the first read missed ends the
    wait. Spurious wake-ups are possible. When the engine closes, the watch stays readable and its
    calls raise ClosedError; its descriptors stay open until the watch is closed or
    garbage-collected.
    """

    def fileno(self) -> int:
        """A descriptor for poll or an event loop; readable while there are unseen changes.

        Use it only for polling, and call ``drain`` before reading the store.
        """
        ...

    def drain(self) -> None:
        """Make the descriptor unreadable until the next change; never blocks."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the store may have changed, then drain and return True; False on timeout.

        Ctrl-C interrupts the wait.
        """
        ...

    def close(self) -> None:
        """Close the descriptors. Closing twice is allowed; every other call then fails."""
        ...


class Engine(Protocol):
    """Storage for one store. Safe to call from many threads."""

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        ...

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of ``digests``; None for those that are not stored."""
        ...

    def write(self, write: Write) -> WriteResult:
        """Run one write atomically; returns when it is as durable as ``Write.durable`` says.

        Raises ConditionFailedError, ObjectNotFoundError (a child or a required object is missing),
        InvalidInputError (the write is malformed) or StorageError.
        """
        ...

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """The rows in the order of ``keys``, from one snapshot; None for missing rows."""
        ...

    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        """At most ``limit`` rows with ``start <= key < stop``, in key order or its reverse."""
        ...

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """About ``limit`` objects with ids below ``before``, highest first."""
        ...

    def now_ms(self) -> int:
        """The engine's clock, in milliseconds since 1970."""
        ...

    def watch(self) -> Watch:
        """A watch that wakes after every later write of any thread or process.

        A write that fails may wake it too.
        """
        ...

    def flush(self) -> None:
        """Return once every acknowledged write survives a power loss."""
        ...

    def close(self) -> None:
        """Release all resources. Closing twice is allowed; every other call then fails."""
        ...


# --- optional capabilities ------------------------------------------------------------------


@runtime_checkable
class Listing(Protocol):
    """An engine that can list its digests."""

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        ...


class Roots(NamedTuple):
    """The rows that keep objects alive: all rows of ``tables``, and the digests in each.

    ``named(table, row)`` returns the digests in a row. It must depend on the row alone: a row keeps
    its objects until it is deleted, even if it has expired. A write may add a digest to a row only
    if it also stores the object, requires it (``ObjectsExist``), or requires a row that contains
    the digest (``RowIs``). Engines that sweep concurrently with writers rely on that.
    """

    tables: tuple[str, ...]
    named: Callable[[str, Row], Iterable[bytes]]


class MarkReport(NamedTuple):
    """The result of marking: how many objects are reached and not, and their sizes.

    Sizes are before compression, and do not count the digests of links.
    """

    #: Distinct digests in rows.
    roots: int
    objects_kept: int
    objects_unreached: int
    bytes_kept: int
    bytes_unreached: int


class SweepReport(NamedTuple):
    """The result of one sweep step."""

    objects: int
    size_bytes: int
    #: Stored bytes that the step reclaimed itself, from slabs that became empty.
    freed_bytes: int
    #: How long writers waited for the step.
    held_s: float
    #: True if this was the last step.
    done: bool


class Collection(Protocol):
    """One garbage collection; a context manager. Call ``mark`` once, then ``sweep`` until done.

    Safe concurrently with writers. Stopping between or during steps is harmless.
    """

    def __enter__(self) -> Self:
        """Begin. BusyError if another collection of the store is running."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the collection, finished or not."""
        ...

    def mark(
        self, *, only: bytes | None = None, progress: Callable[[int], None] | None = None
    ) -> MarkReport:
        """Find the unreachable objects without blocking writers.

        ``progress`` is called with the number of objects visited so far. ``only`` is what
        ``unreached`` of an earlier collection returned: ``sweep`` then removes no other objects.
        CorruptionError if a reachable object is missing or cannot be read.
        """
        ...

    def unreached(self) -> bytes:
        """The objects that marking found unreachable, encoded for ``mark(only=…)``."""
        ...

    def sweep(self, limit: int) -> SweepReport:
        """Remove at most ``limit`` objects in one short transaction.

        CollectionOvertakenError if concurrent changes made the marks unusable.
        """
        ...


# Callers of ``pack`` skip objects of the last 15 minutes by default: running agents read them, and
# the next commits will add similar ones.
COLD_AGE_MS: Final = 900_000
#: The default grace period of a collection: an object may be put this long before it is committed.
DEFAULT_GRACE_MS: Final = 3_600_000
#: How many objects a collection removes in one transaction. Writers wait for that transaction: it
#: changes about one page of the index for each object, so it writes about a megabyte.
DEFAULT_BATCH: Final = 256


class DamagedSlab(NamedTuple):
    """A slab that cannot be read completely: its last id, and the reason."""

    last_id: int
    reason: str


class PackReport(NamedTuple):
    """The result of packing: slabs and stored bytes before and after, and objects dropped."""

    slabs_before: int
    slabs_after: int
    bytes_before: int
    bytes_after: int
    objects_dropped: int
    #: Pages saved by rewriting indexes and rows in key order.
    pages_saved: int = 0
    #: The longest time that writers waited.
    longest_lock_s: float = 0.0
    #: Damaged slabs, left unchanged.
    damaged: tuple[DamagedSlab, ...] = ()

    def __str__(self) -> str:
        text = (
            f"packed {count(self.slabs_before, 'slab')} ({size(self.bytes_before)}) into "
            f"{self.slabs_after:,} ({size(self.bytes_after)}), dropped "
            f"{count(self.objects_dropped, 'dead object')}"
        )
        if self.damaged:
            text += f"; left {count(len(self.damaged), 'damaged slab')} unchanged"
        return text

    def plus(self, other: PackReport) -> PackReport:
        """The sum of both reports."""
        return PackReport(
            self.slabs_before + other.slabs_before,
            self.slabs_after + other.slabs_after,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.objects_dropped + other.objects_dropped,
            self.pages_saved + other.pages_saved,
            max(self.longest_lock_s, other.longest_lock_s),
            self.damaged + other.damaged,
        )


class VectorPart(NamedTuple):
    """A part of a path (see ``VectorSearch``). Its vectors are copied together."""

    path: bytes
    part: bytes


class VectorCopy(NamedTuple):
    """The vectors that a row holds, in the form in which they are copied for the search."""

    row: RowKey
    #: What a search returns: it identifies the vectors within their part.
    name: bytes
    #: Of two equally similar names, the one with the lower number comes first.
    created: int
    #: A copy with another version of the name replaces the stored vectors of that name.
    version: int
    dims: int
    #: float32, little-endian, one after the other.
    vectors: bytes


class VectorChange(NamedTuple):
    """All vectors of a part, to replace the copies of it that the engine has."""

    part: VectorPart
    #: Grows with every change of the part's vectors, so the engine can ignore an older change.
    stamp: int
    copies: Sequence[VectorCopy]


class NearVector(NamedTuple):
    """The name of a vector, and its approximate cosine similarity to the query."""

    path: bytes
    part: bytes
    name: bytes
    score: float


class VectorSearch(Protocol):
    """Copies of vectors that the engine can search. All of them are derived from rows.

    A copy belongs to a space (one generation of the vectors, of which only one is in use), to a
    path (the caller's namespace, encoded), and to a part of the path (what the caller copies at a
    time).
    """

    def parts(self, space: str, start: bytes, stop: bytes) -> dict[VectorPart, int]:
        """The stamps of the parts with ``start <= path < stop``."""
        ...

    def replace(self, space: str, changes: Iterable[VectorChange]) -> bool:
        """Replace the copies of parts; False if a row that a change names no longer exists.

        A part that is stored with the stamp of its change, or a higher one, is left unchanged.
        """
        ...

    def keep_only(self, space: str) -> None:
        """Delete the copies of all other spaces."""
        ...

    def nearest(
        self, space: str, start: bytes, stop: bytes, query: Sequence[float], limit: int
    ) -> list[NearVector]:
        """The vectors with ``start <= path < stop`` that are most similar, by cosine."""
        ...


@runtime_checkable
class VectorSearching(Protocol):
    """An engine that may be able to search vectors."""

    def vector_search(self, dims: int, *, install: bool = False) -> VectorSearch | None:
        """The vector search; None if the engine cannot search vectors of ``dims`` dimensions.

        ``install`` sets up what the search needs, where that is possible.
        """
        ...


@runtime_checkable
class Collecting(Protocol):
    """An engine that can remove unreachable objects."""

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A collection that keeps reachable objects and those put within the grace period.

        A dry run marks but never sweeps; several dry runs may be open at once.
        """
        ...

    def commits_since_collection(self) -> int:
        """How many transactions changed the store since the last completed collection."""
        ...


@runtime_checkable
class Packing(Protocol):
    """An engine that can merge small slabs into larger, better compressed ones."""

    def pack(
        self, progress: Callable[[PackReport], None] | None = None, *, min_age_ms: int = 0
    ) -> PackReport:
        """Merge small slabs older than ``min_age_ms``, and drop objects that gc removed.

        Works in short steps, concurrently with readers and writers. An exception from ``progress``
        stops it between two steps.
        """
        ...


@runtime_checkable
class Reserving(Protocol):
    """An engine that reserves disk space, so that deleting works when the disk is full."""

    def reclaiming(self) -> AbstractContextManager[None]:
        """Let this thread use the reserved space inside the ``with`` statement."""
        ...


def reclaiming(engine: Engine) -> AbstractContextManager[None]:
    """Let ``engine`` use its reserved disk space inside the ``with`` statement, if it has any."""
    return engine.reclaiming() if isinstance(engine, Reserving) else nullcontext()


@runtime_checkable
class Versioning(Protocol):
    """An engine that can report whether, and which, rows have changed since an earlier call.

    A derived index uses it, to read only the rows that changed.
    """

    def rows_version(self) -> bytes:
        """An identifier of the present state of all rows; each later change of a row changes it."""
        ...

    def changed_keys(self, table: str, since: bytes) -> list[bytes] | None:
        """The keys of the rows that were written after the version ``since``, or deleted.

        None if the engine may not know all of these keys; the caller then scans the table.
        """
        ...


class TableSpace(NamedTuple):
    """The space that one table takes."""

    name: str
    rows: int
    #: Bytes of keys and values.
    content_bytes: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    #: How many pages the table would take if it were rewritten in key order.
    tidy_pages: int

    @property
    def pages(self) -> int:
        """All pages of the table."""
        return self.branch_pages + self.leaf_pages + self.overflow_pages


class SlabSpace(NamedTuple):
    """The space that slabs take."""

    slabs: int
    #: Slabs that packing would merge with a small neighbour.
    small_slabs: int
    #: The length of all slabs as stored: directories and compressed objects.
    stored_bytes: int
    objects: int
    #: Objects that gc removed and whose bytes are still stored.
    dead_objects: int
    #: The bytes of all objects before compression, without links.
    raw_bytes: int
    #: The same of the dead objects.
    dead_raw_bytes: int
    #: How many of the stored bytes the dead objects take, estimated slab by slab.
    dead_stored_bytes: int
    #: The bytes of the live objects before compression, with their links.
    logical_bytes: int
    damaged: tuple[DamagedSlab, ...]


class EngineSpace(NamedTuple):
    """How much space a store takes, by purpose."""

    file_bytes: int
    #: Allocated bytes on the disk; less than the file's length if it is sparse.
    allocated_bytes: int
    page_bytes: int
    #: Pages of tables and of LMDB's own structures.
    used_bytes: int
    tables: tuple[TableSpace, ...]
    slabs: SlabSpace
    dictionaries: int
    #: The length of the file if all tables were rewritten in key order.
    tidy_file_bytes: int
    #: The length of the redo log.
    log_bytes: int
    #: Commits that are in the log and not in the tables yet.
    log_commits: int


@runtime_checkable
class Measuring(Protocol):
    """An engine that can report its use of space."""

    def measure_space(self, progress: Callable[[int, int], None] | None = None) -> EngineSpace:
        """Measure; object contents are not read. ``progress(rows_done, rows_total)`` is called."""
        ...


class IndexReport(NamedTuple):
    """The result of rebuilding the index of objects."""

    #: Objects in the new index.
    named: int
    #: Objects in the new index that the old one lacked.
    found: int
    #: Objects in the old index that the new one lacks.
    dropped: int
    #: Objects that rows or reachable objects refer to, and that are not stored.
    missing: int


@runtime_checkable
class Rebuilding(Protocol):
    """An engine that can rebuild its derived data."""

    def rebuild_index(self, roots: Roots, *, grace_ms: int = 0) -> IndexReport:
        """Rebuild the index with the objects that are reachable or within the grace period.

        Atomic. CorruptionError, and no change, if data needed for it is damaged.
        """
        ...

    def sum_rows(self) -> None:
        """Recompute the checksum over all rows from the current rows.

        CorruptionError, and no change, if a row is damaged.
        """
        ...


class HotCopyReport(NamedTuple):
    """The size of a copy that was made while the store was in use."""

    size_bytes: int
    objects: int


@runtime_checkable
class HotCopying(Protocol):
    """An engine that can copy a snapshot of its store, concurrently with writers."""

    def copy_to(
        self,
        target: str,
        *,
        compact: bool = False,
        replace: bool = False,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> HotCopyReport:
        """Copy the store to the path ``target``: verified and flushed, or not at all.

        The copy holds every write acknowledged before the call. ``compact`` omits free space.
        ``progress`` receives the bytes copied and, if known, their total; an exception from it
        stops the copy. TargetExistsError if the target exists, unless ``replace``.
        """
        ...
