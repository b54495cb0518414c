"""What an engine is: objects by digest, rows by table and key, writes as plain data.

The shape is made for an engine at the far end of a network and costs an embedded
one nothing. A write is handed over whole, conditions and changes together, and
the engine runs it as one transaction; there is no callback that reads, thinks and
writes. Readers ask for many things at once. The engine's clock decides what is
live, so that the clocks of two machines never have to agree.

What only some engines can do is a protocol of its own (``Collecting``, ``Packing``, …), asked for
with ``isinstance``. An engine that wraps another has those methods itself: from Python 3.12 on
``isinstance`` does not ask ``__getattr__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

# --- rows ----------------------------------------------------------------------

# The tables an engine must offer. A row's meaning belongs to the layer that writes it.
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
# A thousand years: more is a mistake, and would not fit in a row.
MAX_STAMP_MS: Final = 1000 * 366 * 86_400_000


class Row(NamedTuple):
    """A key and what stands there."""

    key: bytes
    value: bytes


class RowKey(NamedTuple):
    """The place of one row."""

    table: str
    key: bytes


# --- objects --------------------------------------------------------------------


class NewObject(NamedTuple):
    """An object on its way in.

    ``children`` are the digests it links to, in order of appearance in ``data``,
    each as often as it appears. They must be stored already, or come earlier in
    the same write.
    """

    digest: bytes
    kind: int
    data: bytes
    children: Sequence[bytes]


class StoredObject(NamedTuple):
    """An object as it comes out. The engine does not vouch for ``data``; its reader checks it."""

    kind: int
    data: bytes


class ObjectInfo(NamedTuple):
    """What a collector needs to know of an object, without its bytes.

    Ids count up in order of arrival and are never given twice, so every child's
    id is lower than its parents'. ``children`` repeats and orders like the object's links.
    """

    id: int
    digest: bytes
    kind: int
    size_bytes: int
    children: tuple[int, ...]
    #: Never too early: an engine that keeps neighbours together may say when the last came.
    stored_at_ms: int


# --- conditions -----------------------------------------------------------------


class RowIs(NamedTuple):
    """The row holds exactly this value; None: there is no such row."""

    table: str
    key: bytes
    value: bytes | None


class RowStarts(NamedTuple):
    """The row is there and its value starts with these bytes."""

    table: str
    key: bytes
    prefix: bytes


class RowLive(NamedTuple):
    """The row starts with ``prefix`` and the time at ``offset`` lies in the future.

    A time is eight bytes, big-endian milliseconds. Now is not the future.
    """

    table: str
    key: bytes
    prefix: bytes
    offset: int


class RowLapsed(NamedTuple):
    """The row holds exactly ``value`` and the time at ``offset`` in it has come."""

    table: str
    key: bytes
    value: bytes
    offset: int


class ObjectsExist(NamedTuple):
    """All of these objects are stored."""

    digests: Sequence[bytes]


Condition = RowIs | RowStarts | RowLive | RowLapsed | ObjectsExist


# --- changes --------------------------------------------------------------------


class Stamp(NamedTuple):
    """Where the engine writes its own time, plus ``add_ms``, into a row's value."""

    offset: int
    add_ms: int = 0


class PutRow(NamedTuple):
    """Write a row, whatever stood there before."""

    table: str
    key: bytes
    value: bytes
    stamps: Sequence[Stamp] = ()


class DeleteRow(NamedTuple):
    """Remove a row; it need not be there."""

    table: str
    key: bytes


RowChange = PutRow | DeleteRow


#: What a write waits for: until a power loss cannot undo it, or for nothing.
FULL: Final = "full"
RELAXED: Final = "relaxed"
DURABILITIES: Final = (FULL, RELAXED)


class Write(NamedTuple):
    """One transaction, as data.

    The conditions are tried in order; the first that fails ends the write with
    ``ConditionFailedError`` (``ObjectNotFoundError`` for a missing object) and nothing
    happens. Then objects are stored, rows
    change in the order given, and ``deletes`` disappear from the store. Deleting an
    object that something still links to is the collector's responsibility.

    No other write comes between: what the conditions found is what the changes are made to.

    Whatever is typed as bytes is ``bytes``, which nobody can change, so an engine may keep what
    it is given without a copy. A ``bytearray`` or ``memoryview`` is refused with
    ``InvalidInputError``. Lists are the caller's again when the write returns.
    """

    objects: Sequence[NewObject] = ()
    conditions: Sequence[Condition] = ()
    rows: Sequence[RowChange] = ()
    deletes: Sequence[bytes] = ()
    #: Whether the call waits until a power loss cannot undo it; None: as the engine was opened.
    durable: bool | None = None


class CheckedWrite(Write):
    """A write that is well-formed by the way it was made: an engine need not look again.

    For those who make digests, keys and rows by functions that keep to the limits, and of bytes.
    How long objects are is up to users, and looked at all the same.
    """

    __slots__ = ()


class WriteResult(NamedTuple):
    """What a write did: the engine's time, and how many objects were not there before."""

    now_ms: int
    new_objects: int


class Watch(Protocol):
    """Tells when a store may have changed. For one waiter; not shared by threads.

    Make the watch, then read; wait, then read again: a write that the first read missed
    ends the wait. A watch may also wake when there is nothing new. When its engine closes it
    wakes for good and its calls raise ClosedError; its descriptors live until it is
    closed or collected.
    """

    def fileno(self) -> int:
        """A descriptor for poll or an event loop, readable while there are changes to note.

        Do nothing with it but wait for that, and call ``drain`` before reading the store.
        """
        ...

    def drain(self) -> None:
        """Take note of all changes so far, without blocking."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something may have changed, then drain; False when the time is up.

        Ctrl-C interrupts it.
        """
        ...

    def close(self) -> None:
        """Give the descriptors back. Closing twice is allowed; every other call then fails."""
        ...


class Engine(Protocol):
    """Storage for one store. Safe to call from many threads."""

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        ...

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order asked for; None where there is none."""
        ...

    def write(self, write: Write) -> WriteResult:
        """Run one write, wholly or not at all; when it returns it is as durable as promised.

        Raises ConditionFailedError, ObjectNotFoundError (a child, or one asked for, is missing),
        InvalidInputError (the write itself is malformed) or StorageError.
        """
        ...

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """Rows of one moment, in the order asked for; None where there is none."""
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
        """Objects with an id lower than ``before``, highest first; about ``limit`` of them."""
        ...

    def now_ms(self) -> int:
        """The engine's clock, in milliseconds since 1970."""
        ...

    def watch(self) -> Watch:
        """A watch that wakes after every write from now on, whichever thread or process made it.

        A write that fails may wake it as well.
        """
        ...

    def flush(self) -> None:
        """Make everything acknowledged so far survive a power loss."""
        ...

    def close(self) -> None:
        """Let go of all resources. Closing twice is allowed; every other call then fails."""
        ...


@runtime_checkable
class Listing(Protocol):
    """An engine that can say which digests there are."""

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        ...


# --- care: what an engine may offer beside --------------------------------------------------


class Roots(NamedTuple):
    """What keeps objects alive: rows of these tables.

    ``named`` finds the digests in a row, given its table. It depends on nothing but the row: a
    row keeps its objects until it is removed, whatever the clock says. A row comes to name an
    object only in a write that brings it, asks for it (``ObjectsExist``) or stands on a row that
    names it (``RowIs``): an engine whose removals run beside writers relies on that.
    """

    tables: tuple[str, ...]
    named: Callable[[str, Row], Iterable[bytes]]


class MarkReport(NamedTuple):
    """What marking found: objects, and their bytes before compression, without their links."""

    #: Distinct digests that rows name.
    roots: int
    objects_kept: int
    objects_unreached: int
    bytes_kept: int
    bytes_unreached: int


class SweepReport(NamedTuple):
    """What one step of sweeping did."""

    objects: int
    size_bytes: int
    #: What it gave back at once, as stored: where nothing else was left beside.
    freed_bytes: int
    #: How long it kept writers waiting.
    held_s: float
    #: Was this the last step?
    done: bool


class Collection(Protocol):
    """One collection of a store: a context manager. Mark once, then sweep until it is done.

    Safe beside writers anywhere; stopping it between or within steps is harmless.
    """

    def __enter__(self) -> Self:
        """Begin. BusyError if another collection of the store is going on."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End, wherever it has come to."""
        ...

    def mark(
        self, *, only: bytes | None = None, pulse: Callable[[int], None] | None = None
    ) -> MarkReport:
        """Find out what nobody reaches; blocks nobody. ``pulse`` is told how far it has come.

        ``only`` bounds what will be swept, as ``unreached`` of an earlier collection gave it.
        CorruptionError if anything that is reached is missing or cannot be read.
        """
        ...

    def unreached(self) -> bytes:
        """What marking found, in a form that ``mark`` takes."""
        ...

    def sweep(self, limit: int) -> SweepReport:
        """Remove at most ``limit`` objects in one short transaction.

        CollectionOvertakenError if it cannot tell any more what is reached.
        """
        ...


# What was stored within the last quarter of an hour is left as it is by default: agents at
# work read it back, and more of the same is about to come.
COLD_AGE_MS: Final = 900_000


class DamagedSlab(NamedTuple):
    """Objects that lie together and cannot all be proven: they end in this id; why not."""

    last_id: int
    reason: str


class PackReport(NamedTuple):
    """What packing did: slabs and their stored bytes before and after; objects that lost theirs."""

    slabs_before: int
    slabs_after: int
    bytes_before: int
    bytes_after: int
    objects_dropped: int
    #: Pages that indexes and rows take less, because they were written anew in order.
    pages_saved: int = 0
    #: The longest that writers were kept waiting.
    longest_lock_s: float = 0.0
    #: What was left exactly as it is, because it is damaged.
    damaged: tuple[DamagedSlab, ...] = ()

    def plus(self, other: PackReport) -> PackReport:
        """Both together."""
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


@runtime_checkable
class Collecting(Protocol):
    """An engine that removes what nobody reaches."""

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A collection that keeps what roots reach and what was put within the grace.

        A dry run marks, and sweeps nothing; any number of them may go on at once.
        """
        ...

    def commits_since_collection(self) -> int:
        """How many transactions have changed the store since a collection last came to its end."""
        ...


@runtime_checkable
class Packing(Protocol):
    """An engine that can lay out anew, and smaller, what was written in small steps."""

    def pack(
        self, progress: Callable[[PackReport], None] | None = None, *, min_age_ms: int = 0
    ) -> PackReport:
        """Join what is scattered and older than ``min_age_ms``; drop what lost its name.

        In short steps, beside readers and writers; raising from ``progress`` stops it
        between two steps.
        """
        ...


@runtime_checkable
class Reserving(Protocol):
    """An engine that reserves disk space, so that deleting works when the disk is full."""

    def reclaiming(self) -> AbstractContextManager[None]:
        """Let this thread use the reserved space inside the ``with`` statement."""
        ...


def reclaiming(engine: Engine) -> AbstractContextManager[None]:
    """Use the space that ``engine`` reserves for operations that reclaim space, if it does."""
    return engine.reclaiming() if isinstance(engine, Reserving) else nullcontext()


class TableSpace(NamedTuple):
    """What one table takes."""

    name: str
    rows: int
    #: Keys and values.
    content_bytes: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    #: How many pages it would take if it were written anew, in order.
    tidy_pages: int

    @property
    def pages(self) -> int:
        """All pages of the table."""
        return self.branch_pages + self.leaf_pages + self.overflow_pages


class SlabSpace(NamedTuple):
    """What lies in slabs."""

    slabs: int
    #: Slabs that packing joins with a neighbour if that is small too.
    small_slabs: int
    #: Directories and compressed objects.
    stored_bytes: int
    small_stored_bytes: int
    objects: int
    #: Objects that lost their names and still have bytes.
    dead_objects: int
    #: Before compression, links cut out.
    raw_bytes: int
    dead_raw_bytes: int
    #: The part of the stored bytes that dead objects take: their share of each slab.
    dead_stored_bytes: int
    #: The objects in full, links included, before compression.
    logical_bytes: int
    damaged: tuple[DamagedSlab, ...]


class EngineSpace(NamedTuple):
    """How much space an engine takes, and for what."""

    file_bytes: int
    #: What the file takes on the disk; less if it has holes.
    allocated_bytes: int
    page_bytes: int
    #: Pages of tables, and those that hold the file together.
    used_bytes: int
    tables: tuple[TableSpace, ...]
    slabs: SlabSpace
    dictionaries: int
    dictionary_bytes: int
    #: How long the file would be if everything were written anew as it is, in order.
    tidy_file_bytes: int
    #: The length of the redo log, and the commits that were only there.
    log_bytes: int
    log_commits: int


@runtime_checkable
class Measuring(Protocol):
    """An engine that can say what its space goes to."""

    def measure_space(self, progress: Callable[[int, int], None] | None = None) -> EngineSpace:
        """Read everything but the contents of objects; ``progress`` is told rows done, of all."""
        ...


class IndexReport(NamedTuple):
    """What making the index anew did: objects named now, and compared with before."""

    named: int
    found: int
    dropped: int
    missing: int


@runtime_checkable
class Rebuilding(Protocol):
    """An engine that keeps what can be derived from the rest, and can make it anew."""

    def rebuild_index(self, roots: Roots, *, grace_ms: int = 0) -> IndexReport:
        """Name what roots reach and what is younger than the grace, from the stored objects alone.

        Atomic. CorruptionError, and nothing happens, if what is needed for it is damaged.
        """
        ...

    def sum_rows(self) -> None:
        """Rebuild the sum over all rows from the rows as they are.

        CorruptionError, and nothing happens, if one of them is damaged.
        """
        ...


class HotCopyReport(NamedTuple):
    """A copy of a store that was made while the store was in use."""

    size_bytes: int
    objects: int


@runtime_checkable
class HotCopying(Protocol):
    """An engine that can copy its whole store as of one moment, beside writers."""

    def copy_to(
        self,
        target: str,
        *,
        compact: bool = False,
        replace: bool = False,
        pulse: Callable[[int, int | None], None] | None = None,
    ) -> HotCopyReport:
        """Make ``target`` a store of its own, verified and on the disk, or leave it as it was.

        It holds everything acknowledged before the call. ``compact`` leaves out free space.
        ``pulse`` is told how many bytes were copied, and of how many if that is known; raising
        from it stops the copy. TargetExistsError unless ``replace``.
        """
        ...
