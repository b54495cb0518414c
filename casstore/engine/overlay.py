"""An engine that buffers writes in memory on top of another engine, which it only reads.

A dry run executes the steps of the real run on an overlay, so each step sees the changes of the
steps before it. Nothing reaches the engine below. Objects written to an overlay have no ids, so
``scan_objects`` does not list them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from casstore.engine.conditions import require, stamped, validate
from casstore.engine.protocol import (
    TABLES,
    Collecting,
    Collection,
    Engine,
    NewObject,
    ObjectInfo,
    PutRow,
    Roots,
    Row,
    RowKey,
    StoredObject,
    Watch,
    Write,
    WriteResult,
)
from casstore.errors import InvalidInputError, ObjectNotFoundError

_PAGE: Final = 256


class OverlayEngine:
    """Applies the writes made here to what it reads from ``base``. For one thread."""

    def __init__(self, base: Engine) -> None:
        self._base = base
        self._objects: dict[bytes, NewObject] = {}
        # The rows written here; None: deleted here.
        self._rows: dict[str, dict[bytes, bytes | None]] = {table: {} for table in TABLES}
        # The keys of ``_rows``, sorted.
        self._keys: dict[str, list[bytes]] = {table: [] for table in TABLES}

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        return [one for one in self._base.missing(digests) if one not in self._objects]

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of ``digests``; None for those that are not stored."""
        found = self._base.get_many(digests)
        for at, digest in enumerate(digests):
            new = self._objects.get(digest)
            if found[at] is None and new is not None:
                found[at] = StoredObject(new.kind, new.data)
        return found

    def write(self, write: Write) -> WriteResult:
        """Run one write in memory. InvalidInputError if it deletes objects."""
        validate(write)
        if write.deletes:
            raise InvalidInputError("an overlay cannot delete objects")
        now_ms = self._base.now_ms()
        require(write.conditions, self._find_row, self._has_object, now_ms)
        given = {item.digest: item for item in reversed(write.objects)}
        arriving = {digest: given[digest] for digest in self.missing(list(given))}
        children = {child for item in arriving.values() for child in item.children}
        lost = self.missing([child for child in children if child not in arriving])
        if lost:
            raise ObjectNotFoundError(lost[0])
        self._objects.update(arriving)
        for change in write.rows:
            value = stamped(change, now_ms) if isinstance(change, PutRow) else None
            if change.key not in self._rows[change.table]:
                insort(self._keys[change.table], change.key)
            self._rows[change.table][change.key] = value
        return WriteResult(now_ms, len(arriving))

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """The rows in the order of ``keys``; None for those that do not exist."""
        found = self._base.get_rows(keys)
        return [
            self._rows[table].get(key, value)
            for (table, key), value in zip(keys, found, strict=True)
        ]

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
        if not self._rows[table]:
            return self._base.scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse)
        below = self._below(table, start, stop, min(limit, _PAGE), reverse=reverse)
        return list(islice(self._merged(table, below, start, stop, reverse=reverse), limit))

    def _below(
        self, table: str, start: bytes, stop: bytes | None, size: int, *, reverse: bool
    ) -> Iterator[Row]:
        """The rows of this range in the engine below, one by one, read ``size`` at a time."""
        while True:
            page = self._base.scan_rows(table, start=start, stop=stop, limit=size, reverse=reverse)
            yield from page
            if len(page) < size:
                return
            if reverse:
                stop = page[-1].key
            else:
                start = page[-1].key + b"\0"

    def _merged(
        self, table: str, below: Iterator[Row], start: bytes, stop: bytes | None, *, reverse: bool
    ) -> Iterator[Row]:
        """The rows below merged with the changes of this table, in key order."""
        ordered = self._keys[table]
        end = len(ordered) if stop is None else bisect_left(ordered, stop)
        places = range(bisect_left(ordered, start), end)
        # Not a slice: reading a few rows must not copy all changed keys.
        ahead = (ordered[at] for at in (reversed(places) if reverse else places))
        key = next(ahead, None)
        for row in below:
            while key is not None and (key > row.key if reverse else key < row.key):
                yield from self._changed_row(table, key)
                key = next(ahead, None)
            if key != row.key:
                yield row
                continue
            yield from self._changed_row(table, key)
            key = next(ahead, None)
        while key is not None:
            yield from self._changed_row(table, key)
            key = next(ahead, None)

    def _changed_row(self, table: str, key: bytes) -> Iterator[Row]:
        value = self._rows[table][key]
        if value is not None:
            yield Row(key, value)

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """The objects of the engine below."""
        return self._base.scan_objects(before=before, limit=limit)

    def now_ms(self) -> int:
        """The clock of the engine below."""
        return self._base.now_ms()

    def watch(self) -> Watch:
        """A watch of the engine below."""
        return self._base.watch()

    def flush(self) -> None:
        """Do nothing: what is written here is never stored."""

    def close(self) -> None:
        """Do nothing: the engine below belongs to the caller."""

    # --- collecting -----------------------------------------------------------------------

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A dry run of a collection of the engine below, as if it had the rows of this overlay."""
        if not dry_run or not isinstance(self._base, Collecting):
            raise InvalidInputError("an overlay can only open a collection with dry_run=True")
        return self._base.collection(self._seen_from_below(roots), grace_ms=grace_ms, dry_run=True)

    def commits_since_collection(self) -> int:
        """The count of the engine below."""
        return self._base.commits_since_collection() if isinstance(self._base, Collecting) else 0

    def _seen_from_below(self, roots: Roots) -> Roots:
        """Adapt ``roots`` to the engine below, which lacks the rows and objects written here.

        Marking reads the rows of the engine below. For a row that is changed here, ``named``
        returns nothing. For one arbitrary row it returns all digests below that the changed rows
        and the new objects refer to.
        """
        named = self._of_base(
            digest
            for table in roots.tables
            for key, value in self._rows[table].items()
            if value is not None
            for digest in roots.named(table, Row(key, value))
        )
        carrier = next(
            (
                (table, row.key)
                for table in roots.tables
                for row in self._base.scan_rows(table, limit=1)
            ),
            None,
        )

        def of_row(table: str, row: Row) -> Iterator[bytes]:
            if (table, row.key) == carrier:
                yield from named
            if row.key not in self._rows[table]:
                yield from roots.named(table, row)

        return Roots(roots.tables, of_row)

    def _of_base(self, digests: Iterable[bytes]) -> set[bytes]:
        """The digests below among ``digests``, and those that new objects among them lead to."""
        seen = set(digests)
        left = list(seen)
        while left:
            new = self._objects.get(left.pop())
            if new is not None:
                fresh = set(new.children) - seen
                seen |= fresh
                left += fresh
        return seen - self._objects.keys()

    # --- looking up -------------------------------------------------------------------------

    def _find_row(self, table: str, key: bytes) -> bytes | None:
        return self.get_rows([RowKey(table, key)])[0]

    def _has_object(self, digest: bytes) -> bool:
        return not self.missing([digest])
