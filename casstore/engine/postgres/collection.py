"""Garbage collection on the server, concurrently with writers on any number of machines.

Writers continue while objects are removed, so the rules of ``docs/internals/gc.md`` are enforced
differently than on one machine. Each object has an *epoch*: the number of the newest collection
during which a write relied on the object.

1. A write relies on each child of a new object, each object it found stored, and each object in its
  conditions. It first sets the current epoch on these objects, then checks that they exist. No
  collection of that epoch removes an object with the epoch set. If an object is already gone, the
  write stores it again or fails with its digest.
2. A collection starts a new epoch at a moment when no write is running: marking sees all earlier
  writes, and all later writes use the new epoch. It removes only objects that marking found
  unreachable, and decides with the object's row locked: an object that has the epoch by then is
  kept, with everything it links to. A row that comes to refer to an object refers to one that its
  write relies on, or to one that another row refers to at that moment; so by induction no row
  refers to a removed object.
3. Parents are removed before children, by descending id. The objects of one step are all locked
  before any decision. So when the step decides about a child, it is known which of its parents are
  kept.

Marking reads one snapshot, in pages, and blocks no writer. An id is assigned after all children
were found, so a child's id is lower than its parents' ids, also with concurrent writers.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from struct import pack, unpack
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg import IsolationLevel
from psycopg.types.numeric import Int8

from casstore.engine.id_set import IdSet
from casstore.engine.postgres.adapting import ByteStrings, Ints, Longs
from casstore.engine.postgres.connections import Client
from casstore.engine.postgres.request import TABLE_NUMBERS
from casstore.engine.protocol import MarkReport, Roots, Row, SweepReport
from casstore.errors import (
    BusyError,
    CasstoreError,
    CollectionOvertakenError,
    CorruptionError,
    InvalidInputError,
    ReadOnlyError,
)

if TYPE_CHECKING:
    from casstore.engine.postgres.engine import PostgresEngine

# After this time without a renewal, a collector counts as dead, and another may begin.
LEASE_MS: Final = 60_000
_RENEW_S: Final = LEASE_MS / 1000 / 6
# The row of a client in ``clients`` is deleted after this time without a write: by then the client
# does not retry its last write any more.
_CLIENT_MS: Final = 7 * 86_400_000
# How many times at most a collection tries to begin, which needs a moment without a running write.
_MAX_BEGINNINGS: Final = 5
_PAGE: Final = 5000

Progress = Callable[[int], None]


def _ids(encoded: bytes) -> IdSet:
    """The ids that ``unreached`` has encoded."""
    ids = IdSet()
    for number in unpack(f">{len(encoded) // 8}Q", encoded):
        ids.add(number)
    return ids


class PostgresCollection:
    """One garbage collection; a context manager. Call ``mark`` once, then ``sweep`` until done."""

    def __init__(
        self, engine: PostgresEngine, roots: Roots, *, grace_ms: int, dry_run: bool
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._grace_from_ms = engine.now_ms() + 1 - grace_ms
        self._dry_run = dry_run
        self._token = os.urandom(16)
        self._epoch = 0
        self._renewed_s = 0.0
        # The unreachable objects by descending id, and how many of them ``sweep`` has passed.
        self._unreached = array("Q")
        self._swept = 0
        self._marked = False
        self._done = False
        # Unreachable when marked, but needed since: a sweep kept an object that links to them.
        self._spared = IdSet()
        statement = engine.statement
        self._begin = statement("SELECT {s}.begin_collection(%b, %b, %b, %b)")
        self._renew = statement(
            "UPDATE {s}.state SET collector_until_ms = %b + coalesce(%b, {s}.now_ms()) "
            "WHERE collector = %b RETURNING epoch"
        )
        self._end = statement(
            "UPDATE {s}.state SET collector = NULL, writes_collected = CASE WHEN %b "
            "THEN (SELECT last_value FROM {s}.writes) ELSE writes_collected END "
            "WHERE collector = %b RETURNING epoch"
        )
        self._forget = statement(
            "WITH gone AS (DELETE FROM {s}.clients WHERE now_ms < coalesce(%b, {s}.now_ms()) - %b "
            "RETURNING 1) SELECT count(*) FROM gone"
        )
        self._sweep = statement("SELECT * FROM {s}.sweep(%b, %b, %b, %b, %b, %b)")
        self._read_rows = statement("SELECT kind, key, value FROM {s}.rows WHERE kind = ANY(%b)")
        self._find_ids = statement("SELECT digest, id FROM {s}.objects WHERE digest = ANY(%b)")
        self._read_objects = statement(
            "SELECT id, size_bytes, greatest(stored_at_ms, touched_at_ms), epoch, children "
            "FROM {s}.objects ORDER BY id DESC"
        )
        self._find_name = statement("SELECT digest FROM {s}.objects WHERE children @> ARRAY[%b]")

    def __enter__(self) -> Self:
        engine = self._engine
        engine.connections.check()
        if not self._dry_run:
            if engine.readonly:
                raise ReadOnlyError("the store is open read-only")
            self._epoch = self._begun()
            self._renewed_s = monotonic()
        return self

    def _begun(self) -> int:
        """Begin the collection; returns its epoch. BusyError if another one is running."""
        store, given_ms = Int8(self._engine.store_number), self._engine.given_ms()
        asked = (store, self._token, given_ms, Int8(LEASE_MS))
        for attempt in range(_MAX_BEGINNINGS):
            try:
                [[epoch]] = self._engine.connections.fetch(self._begin, asked)
            except BusyError:
                # A long write is running. Waiting for it blocks new writes, so give up soon and
                # retry.
                if attempt == _MAX_BEGINNINGS - 1:
                    raise
                continue
            if epoch is None:
                # A collection is running. It may be this one, begun by a call whose answer was
                # lost: then a second call returns its epoch.
                [[epoch]] = self._engine.connections.fetch(self._begin, asked)
            if epoch is None:
                break
            return int(epoch)
        raise BusyError(
            f"{self._engine.address.place} has a running collection; wait until it has ended"
        )

    def __exit__(self, *_: object) -> None:
        self._unreached = array("Q")
        if not self._dry_run:
            with suppress(CasstoreError):
                # If the server cannot be reached, the collector's lease expires, and old clients
                # are deleted by the next collection.
                self._engine.connections.fetch(self._end, (self._done, self._token))
                self._engine.connections.fetch(
                    self._forget, (self._engine.given_ms(), Int8(_CLIENT_MS))
                )

    # --- marking --------------------------------------------------------------------------

    def mark(self, *, only: bytes | None = None, progress: Progress | None = None) -> MarkReport:
        """Find the unreachable objects.

        ``progress`` is called with the number of objects visited so far. ``only`` is what
        ``unreached`` of an earlier collection returned: ``sweep`` then removes no other objects.
        CorruptionError if a row cannot be read or a reachable object is missing: then nothing may
        be removed.
        """
        with self._engine.connections.alone() as connection:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            with connection.transaction():
                report = self._mark(connection, None if only is None else _ids(only), progress)
        self._marked = True
        self._done = not report.objects_unreached
        return report

    def _mark(
        self, connection: Client, allowed: IdSet | None, progress: Progress | None
    ) -> MarkReport:
        reached = IdSet()
        roots = 0
        for digests in self._named(connection):
            found = dict(connection.execute(self._find_ids, (ByteStrings(digests),), binary=True))
            for digest in digests:
                if digest not in found:
                    raise CorruptionError(f"a row names object {digest.hex()}, which is not stored")
                if found[digest] not in reached:
                    reached.add(found[digest])
                    roots += 1
        unreached = array("Q")
        # Objects outside ``only`` are kept, and so is everything they link to.
        needed = IdSet()
        kept = kept_bytes = left = unreached_bytes = seen = met = 0
        for id_, size_bytes, at_ms, epoch, children in self._pages(connection, self._read_objects):
            seen += 1
            if id_ < 1:
                raise CorruptionError(f"invalid object id {id_}; run check")
            try:
                is_reached = id_ in reached
                met += is_reached
                relied_on = not self._dry_run and epoch >= self._epoch
                if is_reached or relied_on or at_ms >= self._grace_from_ms:
                    if not is_reached:
                        reached.add(id_)
                        met += 1
                    kept += 1
                    kept_bytes += size_bytes
                    for child in children:
                        reached.add(child)
                else:
                    left += 1
                    unreached_bytes += size_bytes
                    if allowed is None or (id_ in allowed and id_ not in needed):
                        unreached.append(id_)
                    else:
                        for child in children:
                            needed.add(child)
            except TypeError as exc:
                # The server accepts any list, also one with NULLs.
                what = f"object id {id_} has an invalid list of children; run check"
                raise CorruptionError(what) from exc
            if not seen % _PAGE:
                self._report(seen, progress)
        self._report(seen, progress)
        if len(reached) != met:
            raise self._missing(connection, reached)
        self._unreached = unreached
        return MarkReport(roots, kept, left, kept_bytes, unreached_bytes)

    def _named(self, connection: Client) -> Iterator[list[bytes]]:
        """The digests that rows refer to, in batches, with repetitions."""
        names = {number: table for table, number in TABLE_NUMBERS.items()}
        wanted = Ints([TABLE_NUMBERS[table] for table in self._roots.tables])
        batch: dict[bytes, None] = {}
        for table, key, value in self._pages(connection, self._read_rows, (wanted,)):
            for digest in self._roots.named(names[table], Row(key, value)):
                batch[bytes(digest)] = None
            if len(batch) >= _PAGE:
                yield list(batch)
                batch.clear()
        if batch:
            yield list(batch)

    @staticmethod
    def _pages(
        connection: Client, query: bytes, parameters: tuple[Any, ...] = ()
    ) -> Iterable[tuple[Any, ...]]:
        """The rows of a long result, a page at a time."""
        with psycopg.ServerCursor(connection, "pages") as cursor:
            cursor.itersize = _PAGE
            cursor.execute(query, parameters, binary=True)
            yield from cursor

    def _report(self, seen: int, progress: Progress | None) -> None:
        """Renew the collector's lease if that is due, and call ``progress``."""
        if not self._dry_run and monotonic() - self._renewed_s > _RENEW_S:
            asked = (Int8(LEASE_MS), self._engine.given_ms(), self._token)
            if not self._engine.connections.fetch(self._renew, asked):
                raise self._overtaken()
            self._renewed_s = monotonic()
        if progress is not None:
            progress(seen)

    def _missing(self, connection: Client, reached: IdSet) -> CorruptionError:
        """The error for a missing object that another one links to."""
        stored = IdSet()
        for id_, *_ in self._pages(connection, self._read_objects):
            stored.add(id_)
        lost = next(id_ for id_ in reached if id_ not in stored)
        row = connection.execute(self._find_name, (Int8(lost),), binary=True).fetchone()
        by = "" if row is None else f", which object {row[0].hex()} links to"
        return CorruptionError(f"object id {lost}{by} is not stored")

    def unreached(self) -> bytes:
        """The ids of the unreachable objects, encoded."""
        self._require_marked()
        return pack(f">{len(self._unreached)}Q", *self._unreached)

    # --- sweeping -------------------------------------------------------------------------

    def sweep(self, limit: int) -> SweepReport:
        """Remove at most ``limit`` objects in one short transaction."""
        if self._dry_run:
            raise InvalidInputError(
                "a dry run cannot sweep; open the collection with dry_run=False"
            )
        self._require_marked()
        batch = self._unreached[self._swept : self._swept + limit]
        report = SweepReport(0, 0, 0, 0.0, done=True)
        if batch:
            spared = Longs([one for one in batch if one in self._spared])
            asked = (
                self._token, self._engine.given_ms(), Int8(LEASE_MS), Int8(self._epoch),
                Longs(batch), spared,
            )  # fmt: skip
            try:
                [answer] = self._engine.connections.fetch(self._sweep, asked)
            except BaseException:
                # The server may have removed objects although the call failed.
                self._engine.forget_all()
                raise
            overtaken, swept, size_bytes, freed_bytes, reached, held_s = answer
            if overtaken:
                raise self._overtaken()
            self._swept += len(batch)
            for child in reached or ():
                self._spared.add(child)
            gone: list[bytes] = swept or []
            if len(gone) < len(batch):
                # Some are gone: perhaps a call whose answer was lost removed them, so their digests
                # are not known. (Others may have been kept.)
                self._engine.forget_all()
            else:
                self._engine.forget(gone)
            report = SweepReport(len(gone), size_bytes, freed_bytes, held_s, done=False)
        self._done = self._swept >= len(self._unreached)
        return report._replace(done=self._done)

    def _require_marked(self) -> None:
        if not self._marked:
            raise InvalidInputError("call mark() before the other methods of a collection")

    def _overtaken(self) -> CollectionOvertakenError:
        return CollectionOvertakenError(
            f"the collector of {self._engine.address.place} did not renew its lease in time, and "
            "another collection has begun; collect again"
        )
