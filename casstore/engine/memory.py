"""The reference engine: dicts behind one lock, which define the meaning of the protocol.

It favours obvious code over speed, and nothing survives the process. The contract and model suites
in ``casstore.testing`` compare the other engines with this one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from struct import pack, unpack
from typing import NamedTuple, Self
from weakref import WeakSet

from casstore.engine.conditions import (
    check_digests,
    check_key,
    check_table,
    require,
    stamped,
    validate,
    wall_clock_ms,
)
from casstore.engine.faults import Examination, Examined, Fault, Progress, Structure
from casstore.engine.protocol import (
    TABLES,
    Collection,
    MarkReport,
    NewObject,
    ObjectInfo,
    PutRow,
    Roots,
    Row,
    RowKey,
    StoredObject,
    SweepReport,
    Watch,
    Write,
    WriteResult,
)
from casstore.engine.watches import PipeWatch
from casstore.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    ForkedError,
    InvalidInputError,
    ObjectNotFoundError,
)


class _Held(NamedTuple):
    info: ObjectInfo
    data: bytes


class MemoryEngine:
    """An engine in memory; closing it discards everything.

    ``clock`` returns milliseconds since 1970; the default is the wall clock.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock if clock is not None else wall_clock_ms
        self._lock = threading.Lock()
        self._closed = False
        self._next_id = 1
        # A dict iterates in insertion order, which is the order of ids.
        self._objects: dict[bytes, _Held] = {}
        self._rows: dict[str, dict[bytes, bytes]] = {table: {} for table in TABLES}
        # When a stored object was last put again, by digest.
        self._touched_ms: dict[bytes, int] = {}
        self._collecting = False
        self._commits_since_collection = 0
        # What the last check saved.
        self._mark: bytes | None = None
        # Weak references: a watch belongs to its waiter.
        self._watches: WeakSet[PipeWatch] = WeakSet()
        _engines.add(self)

    def before_fork(self) -> None:
        """Take the lock, so that the child's copy of the dicts is consistent."""
        self._lock.acquire()

    def after_fork(self) -> None:
        """Release the lock."""
        self._lock.release()

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        check_digests(digests)
        with self._lock:
            self._require_open()
            return [digest for digest in dict.fromkeys(digests) if digest not in self._objects]

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        check_digests((first, last))
        with self._lock:
            self._require_open()
            return sorted([one for one in self._objects if first <= one <= last])[:limit]

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of ``digests``; None for those that are not stored."""
        check_digests(digests)
        with self._lock:
            self._require_open()
            found = [self._objects.get(digest) for digest in digests]
        return [StoredObject(held.info.kind, held.data) if held else None for held in found]

    def write(self, write: Write) -> WriteResult:
        """Run one write atomically.

        Raises InvalidInputError, ConditionFailedError or ObjectNotFoundError; the whole write is
        checked for the first, then for the second, then for the third.
        """
        with self._lock:
            self._require_open()
            # The reference engine validates even a CheckedWrite.
            validate(Write(*write))
            now_ms = self._clock()
            require(write.conditions, self._find_row, self._objects.__contains__, now_ms)
            arriving = self._number(write.objects, now_ms)
            if not write.rows:
                # A put without a row restarts the grace period of objects that are stored already:
                # the row that will refer to them is written later.
                for item in write.objects:
                    if item.digest in self._objects:
                        self._touched_ms[item.digest] = now_ms
            values = [
                bytes(stamped(change, now_ms)) if isinstance(change, PutRow) else None
                for change in write.rows
            ]

            # All checks have passed: from here on nothing can fail (P5).
            self._objects.update(arriving)
            self._next_id += len(arriving)
            for change, value in zip(write.rows, values, strict=True):
                if value is None:
                    self._rows[change.table].pop(change.key, None)
                else:
                    self._rows[change.table][bytes(change.key)] = value
            for digest in write.deletes:
                self._objects.pop(digest, None)
            if arriving or write.rows or write.deletes:
                self._commits_since_collection += 1
                self._wake_watches()
            return WriteResult(now_ms, len(arriving))

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """The rows in the order of ``keys``, from one snapshot; None for missing rows."""
        with self._lock:
            self._require_open()
            for table, key in keys:
                check_key(table, key)
            return [self._find_row(table, key) for table, key in keys]

    def scan_rows(
        self,
        table: str,
        *,
        start: bytes = b"",
        stop: bytes | None = None,
        limit: int = 1000,
        reverse: bool = False,
    ) -> list[Row]:
        """At most ``limit`` rows with ``start <= key < stop``, in key order or its reverse.

        The bounds need not be valid keys: they may be empty or longer than any key.
        """
        with self._lock:
            self._require_open()
            check_table(table)
            _check_limit(limit)
            rows = [
                Row(key, value)
                for key, value in self._rows[table].items()
                if start <= key and (stop is None or key < stop)
            ]
        return sorted(rows, reverse=reverse)[:limit]

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """Objects with an id lower than ``before``, highest first; at most ``limit`` of them."""
        with self._lock:
            self._require_open()
            _check_limit(limit)
            newest_first = reversed(self._objects.values())
            infos = [held.info for held in newest_first if before is None or held.info.id < before]
        return infos[:limit]

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A collection that keeps reachable objects and those put within the grace period."""
        with self._lock:
            self._require_open()
        return _MemoryCollection(self, roots, grace_ms=grace_ms, dry_run=dry_run)

    def commits_since_collection(self) -> int:
        """How many writes changed the store since the last completed collection."""
        with self._lock:
            self._require_open()
            return self._commits_since_collection

    # --- checking: there is little that can be wrong here ------------------------------------

    def check_header(self) -> list[Fault]:
        """Return no faults: there is no header."""
        return []

    def check_structure(self) -> Structure:
        """Return no faults: Python dicts have no layout to check."""
        return Structure([], frozenset())

    def check_rows(
        self, tables: Sequence[str], progress: Progress | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Return no faults: rows in memory have no checksums."""
        return []

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """At most ``limit`` rows from the key ``start`` on, in order."""
        return self.scan_rows(table, start=start, limit=limit)

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """All objects with an id above ``after``."""
        with self._lock:
            self._require_open()
            held = [one for one in self._objects.values() if one.info.id > after]
            names = {one.info.id: digest for digest, one in self._objects.items()}
        objects: list[Examined] = []
        for info, data in held:
            one = Examined(info.id, info.digest, info.kind, info.children, named=True)
            if content is not None and content(info.id):
                links = tuple([names.get(child, b"") for child in info.children])
                one = one._replace(item=StoredObject(info.kind, data), links=links)
            objects.append(one)
        return Examination(objects, [], None)

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects; None for digests that are not stored."""
        check_digests(digests)
        with self._lock:
            self._require_open()
            found = [self._objects.get(digest) for digest in digests]
        return [None if held is None else held.info.id for held in found]

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests of objects; None for ids that are not stored."""
        with self._lock:
            self._require_open()
            names = {held.info.id: digest for digest, held in self._objects.items()}
        return [names.get(object_id) for object_id in ids]

    def check_index(
        self, excused: Callable[[int], bool], progress: Progress | None = None
    ) -> list[Fault]:
        """Return no faults: the dict of objects is its own index."""
        return []

    def read_mark(self) -> bytes | None:
        """What the last check passed to ``write_mark``; None if there was none."""
        return self._mark

    def write_mark(self, mark: bytes) -> None:
        """Save bytes for the next check."""
        self._mark = mark

    def now_ms(self) -> int:
        """The engine's clock, in milliseconds since 1970."""
        with self._lock:
            self._require_open()
            return self._clock()

    def watch(self) -> Watch:
        """A watch that wakes after writes in this process."""
        maker = os.getpid()

        def check() -> None:
            self._require_open()
            if os.getpid() != maker:
                # The pipe is shared with the parent: draining it here would consume the parent's
                # wake-ups.
                raise ForkedError("this watch was made before this process was forked")

        with self._lock:
            self._require_open()
            watch = PipeWatch(check)
            self._watches.add(watch)
            return watch

    def flush(self) -> None:
        """Do nothing: memory does not survive a power loss."""
        with self._lock:
            self._require_open()

    def close(self) -> None:
        """Discard everything. Closing twice is allowed; every other call then fails."""
        with self._lock:
            self._closed = True
            self._objects = {}
            self._rows = {}
            self._wake_watches()

    def _number(self, objects: Sequence[NewObject], now_ms: int) -> dict[bytes, _Held]:
        """Assign ids to the objects that are not stored yet, without storing them.

        A stored object is never replaced (P2). ObjectNotFoundError for a child that is neither
        stored nor earlier in ``objects``.
        """
        arriving: dict[bytes, _Held] = {}
        for item in objects:
            if item.digest in self._objects or item.digest in arriving:
                continue
            children: list[int] = []
            for child in item.children:
                held = self._objects.get(child) or arriving.get(child)
                if held is None:
                    raise ObjectNotFoundError(child)
                children.append(held.info.id)
            info = ObjectInfo(
                id=self._next_id + len(arriving),
                digest=bytes(item.digest),
                kind=item.kind,
                size_bytes=len(item.data),
                children=tuple(children),
                stored_at_ms=now_ms,
            )
            arriving[info.digest] = _Held(info, bytes(item.data))
        return arriving

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        return self._rows[table].get(key)

    def _wake_watches(self) -> None:
        for watch in list(self._watches):
            watch.wake()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine was closed")


class _MemoryCollection:
    """A collection that marks again in every sweep, under the lock: slow, but obviously correct."""

    def __init__(self, engine: MemoryEngine, roots: Roots, *, grace_ms: int, dry_run: bool) -> None:
        self._engine = engine
        self._roots = roots
        self._grace_from_ms = engine.now_ms() + 1 - grace_ms
        self._dry_run = dry_run
        self._only: set[int] | None = None

    def __enter__(self) -> Self:
        if not self._dry_run:
            with self._engine._lock:
                if self._engine._collecting:
                    raise BusyError("another collection of this store is running")
                self._engine._collecting = True
        return self

    def __exit__(self, *_: object) -> None:
        if not self._dry_run:
            self._engine._collecting = False

    def mark(
        self, *, only: bytes | None = None, progress: Callable[[int], None] | None = None
    ) -> MarkReport:
        """Find the unreachable objects."""
        if only is not None:
            numbers = unpack(f">{len(only) // 8}Q", only)
            self._only = set(numbers)
        with self._engine._lock:
            roots, kept, unreached = self._split()
            if not unreached and not self._dry_run:
                self._engine._commits_since_collection = 0
        if progress is not None:
            progress(len(kept) + len(unreached))
        return MarkReport(roots, len(kept), len(unreached), _sum(kept), _sum(unreached))

    def unreached(self) -> bytes:
        """The ids of the unreachable objects, encoded."""
        with self._engine._lock:
            _, _, unreached = self._split()
        return pack(f">{len(unreached)}Q", *[held.info.id for held in unreached])

    def sweep(self, limit: int) -> SweepReport:
        """Remove the newest ``limit`` unreachable objects."""
        if self._dry_run:
            raise InvalidInputError(
                "a dry run cannot sweep; open the collection with dry_run=False"
            )
        with self._engine._lock:
            _, _, doomed = self._split(self._only)
            if len(doomed) <= limit:
                self._engine._commits_since_collection = 0
            for held in doomed[:limit]:
                del self._engine._objects[held.info.digest]
                self._engine._touched_ms.pop(held.info.digest, None)
        gone = _sum(doomed[:limit])
        return SweepReport(len(doomed[:limit]), gone, gone, 0.0, done=len(doomed) <= limit)

    def _split(self, only: set[int] | None = None) -> tuple[int, list[_Held], list[_Held]]:
        """The number of digests in rows; the objects to keep and the others, newest first each.

        Kept are reachable objects, those within the grace period, those outside ``only``, and all
        that these link to.
        """
        engine = self._engine
        engine._require_open()
        named: set[bytes] = set()
        for table in self._roots.tables:
            for key, value in engine._rows[table].items():
                named.update(self._roots.named(table, Row(key, value)))
        reached: set[int] = set()
        for digest in named:
            if digest not in engine._objects:
                raise CorruptionError(f"a row names object {digest.hex()}, which is not stored")
            reached.add(engine._objects[digest].info.id)
        kept: list[_Held] = []
        unreached: list[_Held] = []
        for digest, held in reversed(engine._objects.items()):
            at_ms = max(held.info.stored_at_ms, engine._touched_ms.get(digest, 0))
            spared = only is not None and held.info.id not in only
            if held.info.id in reached or at_ms >= self._grace_from_ms or spared:
                kept.append(held)
                reached.update(held.info.children)
            else:
                unreached.append(held)
        return len(named), kept, unreached


def _sum(objects: Sequence[_Held]) -> int:
    return sum([held.info.size_bytes for held in objects])


def _check_limit(limit: int) -> None:
    # The caller could not distinguish an empty page from the end of the scan.
    if limit < 1:
        raise InvalidInputError(f"limit must be at least 1, got {limit}")


_engines: WeakSet[MemoryEngine] = WeakSet()
_forking: list[MemoryEngine] = []


def _before_fork() -> None:
    for engine in list(_engines):
        engine.before_fork()
        _forking.append(engine)


def _after_fork() -> None:
    while _forking:
        _forking.pop().after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
