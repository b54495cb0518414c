"""Collection on the server, beside writers on any number of machines.

Writers are not kept out while objects go, so the rules of ``docs/gc.md`` are kept in another way
than on one machine. Every object carries an *epoch*, the number of the newest collection that was
told somebody relies on it.

1. A write leaves the epoch on everything it relies on before it looks whether that is there: each
   child of a new object, each object it found stored, each that a condition asks for. What it
   finds afterwards no collection of this epoch takes. What is gone it stores again, or refuses
   by name.
2. A collection begins with a new epoch at a moment when nobody is writing: all writes before are
   there for its marking to see, all after it carry the new epoch. It takes only what was
   unreached then, and judges it with its row locked: whatever has the epoch by now is kept, with
   all it links to. A row that comes to name an object names one that its write relies on, or one
   that another row names at that moment; so by induction nothing is named that is not kept.
3. Parents go before children, by falling id; of what is removed together all is locked before any
   of it is judged. So when a child is judged, it is known of everything that links to it
   whether it is kept.

Marking reads one snapshot, in pages, and blocks nobody. Ids are given after all children
were found, so a child's is lower than its parents', whoever writes at the same time.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from struct import pack, unpack
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from psycopg import IsolationLevel
from psycopg.types.numeric import Int8

from casstore.engine.id_set import IdSet
from casstore.engine.postgres.adapting import Blobs, Ints, Longs
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

# A collector that gives no sign for so long is taken for dead, and another may begin.
LEASE_MS: Final = 60_000
_RENEW_S: Final = LEASE_MS / 1000 / 6
# A client that has not written for so long will not ask any more what became of its last write.
_CLIENT_MS: Final = 7 * 86_400_000
# How often a collection asks for a moment in which nobody writes.
_MAX_BEGINNINGS: Final = 5
_PAGE: Final = 5000

Pulse = Callable[[int], None]


def _ids(spelled: bytes) -> IdSet:
    """The ids that ``unreached`` has spelled."""
    ids = IdSet()
    for number in unpack(f">{len(spelled) // 8}Q", spelled):
        ids.add(number)
    return ids


class PostgresCollection:
    """One collection of a store. Use as a context manager: mark, then sweep until it is done."""

    def __init__(
        self, engine: PostgresEngine, roots: Roots, *, grace_ms: int, dry_run: bool
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._keep_after_ms = engine.now_ms() + 1 - grace_ms
        self._dry_run = dry_run
        self._token = os.urandom(16)
        self._epoch = 0
        self._renewed_s = 0.0
        # What nobody reaches, by falling id, and how far sweeping has come in it.
        self._unreached = array("Q")
        self._swept = 0
        self._marked = False
        self._done = False
        # Reached after all, because something that was relied on links to them.
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
                raise ReadOnlyError("the store was opened for reading only")
            self._epoch = self._begun()
            self._renewed_s = monotonic()
        return self

    def _begun(self) -> int:
        store, given_ms = Int8(self._engine.store_number), self._engine.given_ms()
        asked = (store, self._token, given_ms, Int8(LEASE_MS))
        for attempt in range(_MAX_BEGINNINGS):
            try:
                [[epoch]] = self._engine.connections.fetch(self._begin, asked)
            except BusyError:
                # Somebody's long write; asking stopped others meanwhile, so not for long.
                if attempt == _MAX_BEGINNINGS - 1:
                    raise
                continue
            if epoch is None:
                # Or it is ours: begun by a call whose answer was lost, and which we waited for.
                [[epoch]] = self._engine.connections.fetch(self._begin, asked)
            if epoch is None:
                break
            return int(epoch)
        raise BusyError(f"{self._engine.address.place} is being collected already")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unreached = array("Q")
        if not self._dry_run:
            with suppress(CasstoreError):
                # If the server cannot be told, the lease ends by itself, and clients that are
                # gone are forgotten next time.
                self._engine.connections.fetch(self._end, (self._done, self._token))
                self._engine.connections.fetch(
                    self._forget, (self._engine.given_ms(), Int8(_CLIENT_MS))
                )

    # --- marking --------------------------------------------------------------------------

    def mark(self, *, only: bytes | None = None, pulse: Pulse | None = None) -> MarkReport:
        """Find out what nobody reaches. ``only`` bounds what a sweep may take, by ``unreached``.

        CorruptionError if a row cannot be read, or something that is reached is not there:
        then nothing may be removed.
        """
        with self._engine.connections.alone() as connection:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            with connection.transaction():
                report = self._mark(connection, None if only is None else _ids(only), pulse)
        self._marked = True
        self._done = not report.objects_unreached
        return report

    def _mark(self, connection: Client, allowed: IdSet | None, pulse: Pulse | None) -> MarkReport:
        reached = IdSet()
        roots = 0
        for digests in self._named(connection):
            found = dict(connection.execute(self._find_ids, (Blobs(digests),), binary=True))
            for digest in digests:
                if digest not in found:
                    raise CorruptionError(f"a row names object {digest.hex()}, which is not stored")
                if found[digest] not in reached:
                    reached.add(found[digest])
                    roots += 1
        unreached = array("Q")
        # What is not allowed to go stays, and so must all it links to.
        needed = IdSet()
        kept = kept_bytes = left = unreached_bytes = seen = met = 0
        for id_, size_bytes, at_ms, epoch, children in self._pages(connection, self._read_objects):
            seen += 1
            if id_ < 1:
                raise CorruptionError(f"there is an object number {id_}; run check")
            try:
                is_reached = id_ in reached
                met += is_reached
                relied_on = not self._dry_run and epoch >= self._epoch
                if is_reached or relied_on or at_ms >= self._keep_after_ms:
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
                # The server would keep lists of any form, and what is no number in them.
                what = f"object number {id_} links to what is no object; run check"
                raise CorruptionError(what) from exc
            if not seen % _PAGE:
                self._tell(seen, pulse)
        self._tell(seen, pulse)
        if len(reached) != met:
            raise self._missing(connection, reached)
        self._unreached = unreached
        return MarkReport(roots, kept, left, kept_bytes, unreached_bytes)

    def _named(self, connection: Client) -> Iterator[list[bytes]]:
        """The digests that rows name, many at a time, each as often as it is named."""
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
        """Rows of a long answer, without holding all of it."""
        with psycopg.ServerCursor(connection, "pages") as cursor:
            cursor.itersize = _PAGE
            cursor.execute(query, parameters, binary=True)
            yield from cursor

    def _tell(self, seen: int, pulse: Pulse | None) -> None:
        if not self._dry_run and monotonic() - self._renewed_s > _RENEW_S:
            asked = (Int8(LEASE_MS), self._engine.given_ms(), self._token)
            if not self._engine.connections.fetch(self._renew, asked):
                raise self._overtaken()
            self._renewed_s = monotonic()
        if pulse is not None:
            pulse(seen)

    def _missing(self, connection: Client, reached: IdSet) -> CorruptionError:
        """Name one object that is linked to and not there."""
        stored = IdSet()
        for id_, *_ in self._pages(connection, self._read_objects):
            stored.add(id_)
        lost = next(id_ for id_ in reached if id_ not in stored)
        row = connection.execute(self._find_name, (Int8(lost),), binary=True).fetchone()
        by = "" if row is None else f", which object {row[0].hex()} links to"
        return CorruptionError(f"object number {lost}{by} is not stored")

    def unreached(self) -> bytes:
        """What nobody reaches, by number."""
        self._require_marked()
        return pack(f">{len(self._unreached)}Q", *self._unreached)

    # --- sweeping -------------------------------------------------------------------------

    def sweep(self, limit: int) -> SweepReport:
        """Remove at most ``limit`` objects in one short transaction."""
        if self._dry_run:
            raise InvalidInputError("a dry run sweeps nothing")
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
                # The server may have done it all the same.
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
                # Some may have gone before, in a call whose answer was lost.
                self._engine.forget_all()
            else:
                self._engine.forget(gone)
            report = SweepReport(len(gone), size_bytes, freed_bytes, held_s, done=False)
        self._done = self._swept >= len(self._unreached)
        return report._replace(done=self._done)

    def _require_marked(self) -> None:
        if not self._marked:
            raise InvalidInputError("a collection marks before it goes on")

    def _overtaken(self) -> CollectionOvertakenError:
        return CollectionOvertakenError(
            f"the collector of {self._engine.address.place} was not heard of for too long, and "
            "another has begun; collect again"
        )
