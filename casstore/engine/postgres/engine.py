"""The engine on PostgreSQL: most calls are one statement and one round trip.

The SQL of a write is in ``tables``; this module sends it and reads the result. Times are the
server's, unless a test passes a clock. The *epoch* is the number of the newest collection
(see ``collection``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

import psycopg
from psycopg.pq import Format
from psycopg.pq.abc import PGresult
from psycopg.types.numeric import Int8

from casstore.engine.compression import Compressor
from casstore.engine.conditions import check_digests, check_key, check_table, validate
from casstore.engine.postgres import request, schema
from casstore.engine.postgres.adapting import ByteStrings, Ints
from casstore.engine.postgres.address import Address
from casstore.engine.postgres.cache import ObjectCache, SpareObjects
from casstore.engine.postgres.collection import PostgresCollection
from casstore.engine.postgres.connections import Call, Client, Connections, has_collided
from casstore.engine.postgres.examination import Examining
from casstore.engine.postgres.request import TABLE_NUMBERS
from casstore.engine.postgres.vectors import MAX_DIMS, VectorCopies, find_copies
from casstore.engine.postgres.watching import Watching
from casstore.engine.protocol import (
    MAX_OBJECT_BYTES,
    Collection,
    ObjectInfo,
    Roots,
    Row,
    RowKey,
    StoredObject,
    VectorSearch,
    Watch,
    Write,
    WriteResult,
)
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    ReadOnlyError,
)

_DEFAULT_CACHE_BYTES: Final = 32 << 20
# How long after the server's last answer its time is computed from that answer.
_HEARD_LATELY_S: Final = 1.0
# The limit on rows that is passed to the server as eight bytes.
_MOST: Final = (1 << 63) - 1


def _no_dictionary(number: int) -> bytes:
    raise CorruptionError(
        f"an object needs dictionary {number}, but stores on a server have no dictionaries"
    )


class PostgresEngine(Examining):
    """The engine of one store in one schema of a database. Safe to call from many threads."""

    def __init__(
        self,
        address: Address,
        *,
        durability: str = "full",
        readonly: bool = False,
        create: bool = True,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
        spare: SpareObjects | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.address = address
        self.readonly = readonly
        self.clock = clock
        self.connections = Connections(address)

        def look(connection: Client) -> tuple[schema.Identity, int]:
            identity = schema.ready(
                connection, address.place, address.schema, create=create, readonly=readonly
            )
            return identity, self._read_epoch(connection)

        identity, self._epoch = self.connections.run_alone(look)
        self.store_number = identity.store
        self.cache = ObjectCache(cache_bytes)
        self._lasting = durability == "full"
        self._compressor = Compressor(_no_dictionary)
        self._spare = spare
        if spare is not None:
            spare.begin(identity.store, self._epoch)
        # The server's time in its last answer, and the local monotonic time when it arrived.
        self._heard = (0, float("-inf"))
        self._vectors: VectorCopies | None = None
        self._has_looked_for_vectors = False
        self._encode()
        self._watching = Watching(self)
        self.connections.open()

    def _encode(self) -> None:
        types = request.PARAMETER_TYPES
        places = ", ".join([f"${place}" for place in range(1, len(types) + 1)])
        #: The statement for a write; ``request`` encodes its parameters.
        self.write_call = Call(
            b"write",
            self.statement(f"SELECT * FROM {{s}}.write({places})"),
            types,
            [Format.BINARY] * len(types),
        )
        self._missing = self.statement("SELECT * FROM {s}.find_digests(%b)")
        self._get_many = self.statement("SELECT * FROM {s}.find_objects(%b)")
        self._get_rows = self.statement("SELECT * FROM {s}.find_rows(%b, %b)")
        # Two statements, with and without an upper bound: the generic plan for an optional bound
        # ignores the bound and reads all rows after it.
        self._scan_rows = {
            (reverse, ends): self.statement(
                "SELECT key, value FROM {s}.rows WHERE kind = %b AND key >= %b"
                + (" AND key < %b" if ends else "")
                + f" ORDER BY {'kind DESC, key DESC' if reverse else 'kind, key'} LIMIT %b"
            )
            for reverse in (False, True)
            for ends in (False, True)
        }
        self._scan_objects = self.statement(
            "SELECT id, digest, kind, size_bytes, children, stored_at_ms FROM {s}.objects "
            "WHERE id < %b ORDER BY id DESC LIMIT %b"
        )
        self._digests = self.statement(
            "SELECT digest FROM {s}.objects WHERE digest BETWEEN %b AND %b ORDER BY digest LIMIT %b"
        )
        self._since = self.statement(
            "SELECT CASE WHEN w.is_called THEN w.last_value - s.writes_collected ELSE 0 END "
            "FROM {s}.writes w, {s}.state s"
        )
        self._seen = self.statement("SELECT pg_current_snapshot()::text")
        self._now = self.statement("SELECT {s}.now_ms()")
        self._flush = self.statement(
            "SELECT set_config('synchronous_commit', 'on', true), {flushing}"
        )

    def _read_epoch(self, connection: Client) -> int:
        row = connection.execute(self.statement("SELECT epoch FROM {s}.state")).fetchone()
        # A missing row is damage, which ``check`` on this store must be able to report.
        return 0 if row is None else int(row[0])

    def statement(self, text: str) -> bytes:
        """A statement of this package, with this store's schema filled in."""
        return schema.encoded(text, self.address.schema)

    # --- objects ----------------------------------------------------------------------------

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of ``digests`` that are not stored, in order, each once."""
        check_digests(digests)
        self.connections.check()
        wanted = dict.fromkeys(digests)
        if not wanted:
            return []
        found = {row[0] for row in self.connections.fetch(self._missing, (ByteStrings(wanted),))}
        return [digest for digest in wanted if digest not in found]

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of ``digests``; None for those that are not stored."""
        check_digests(digests)
        self.connections.check()
        found = self.cache.find(digests)
        wanted = [digest for digest in dict.fromkeys(digests) if digest not in found]
        spare = self._spare
        if wanted and spare is not None:
            generation = self.cache.generation
            kept = spare.find(wanted)
            if kept:
                self.cache.put(kept.items(), generation)
                found.update(kept)
                wanted = [digest for digest in wanted if digest not in kept]
        if wanted:
            generation = self.cache.generation
            spare_generation = 0 if spare is None else spare.generation
            read = {
                digest: StoredObject(kind, self._inflated(digest, codec, size_bytes, content))
                for digest, kind, codec, size_bytes, content in self.connections.fetch(
                    self._get_many, (ByteStrings(wanted),)
                )
            }
            self.cache.put(read.items(), generation)
            if spare is not None:
                spare.put(read.items(), spare_generation)
            found.update(read)
        return [found.get(digest) for digest in digests]

    def _inflated(self, digest: bytes, codec: int, size_bytes: int, content: bytes) -> bytes:
        # Compared with the limit first: a writer of the database could put the same huge size into
        # the row and the frame (P7).
        if not 0 <= size_bytes <= MAX_OBJECT_BYTES:
            raise CorruptionError(
                f"the row of object {digest.hex()} says that it has {size_bytes} bytes; the limit "
                f"is {MAX_OBJECT_BYTES}"
            )
        return self._compressor.inflate(codec, 0, content, size_bytes)

    def scan_objects(self, *, before: int | None = None, limit: int = 1000) -> list[ObjectInfo]:
        """At most ``limit`` objects with ids below ``before``, highest first."""
        _check_limit(limit)
        below = _MOST if before is None else max(0, min(before, _MOST))
        found = self.connections.fetch(self._scan_objects, (Int8(below), _number(limit)))
        return [
            ObjectInfo(id_, digest, kind, size_bytes, tuple(children), stored_at_ms)
            for id_, digest, kind, size_bytes, children, stored_at_ms in found
        ]

    def digests(self, first: bytes, last: bytes, *, limit: int) -> list[bytes]:
        """At most ``limit`` digests of stored objects from ``first`` to ``last``, in order."""
        check_digests((first, last))
        found = self.connections.fetch(self._digests, (first, last, _number(limit)))
        return [row[0] for row in found]

    # --- writes -----------------------------------------------------------------------------

    def write(self, write: Write) -> WriteResult:
        """Run one write atomically.

        Raises InvalidInputError, ConditionFailedError or ObjectNotFoundError; the whole write is
        checked for the first, then for the second, then for the third. StorageUnavailableError if
        no answer of the server arrives: then it is unknown whether the write happened.
        """
        self.connections.check()
        validate(write)
        if self.readonly:
            raise ReadOnlyError("the store is open read-only")
        lasting = self._lasting if write.durable is None else write.durable
        made = request.prepare(write, self.store_number, self._compressor)
        generation = self.cache.generation
        parameters: list[bytes | None] | None = None
        counted_by: Client | None = None

        def ask(connection: Client) -> PGresult:
            nonlocal parameters, counted_by
            if parameters is None:
                # A retry over another connection has the same number, so the server runs the write
                # once.
                counted_by = connection
                connection.number += 1
                given_ms = None if self.clock is None else self.clock()
                parameters = made.encoded(
                    connection.client, connection.number, given_ms, lasting=lasting
                )
            try:
                return connection.call(self.write_call, parameters)
            except psycopg.Error as exc:
                if connection is counted_by and has_collided(exc):
                    # The server reports that the write did not happen, so the retry gets a new
                    # number. With the old one the server could take it for done: another thread may
                    # write over this connection with a higher number before the retry.
                    parameters = None
                raise

        try:
            answer = request.read_answer(self.connections.run(ask))
        except BaseException:
            # The server may have run the write although the call failed.
            if write.deletes:
                self.forget_all()
            raise
        if answer.epoch is not None:
            # Not for a repeated write, which returns the time of its first attempt.
            self._heard = (answer.now_ms, monotonic())
        if answer.missing is not None:
            raise ObjectNotFoundError(answer.missing)
        if answer.failed is not None:
            raise ConditionFailedError(
                answer.failed, write.conditions[answer.failed], answer.actual
            )
        self._note(answer.epoch)
        if write.deletes:
            self.forget(write.deletes)
        elif answer.new_objects and answer.epoch is not None:
            self._keep(write, made.digests, answer.stored, generation)
        if answer.watched:
            self._watching.notify()
        return WriteResult(answer.now_ms, answer.new_objects)

    def _keep(
        self, write: Write, digests: list[bytes], stored: list[int] | None, generation: int
    ) -> None:
        """Cache the objects of a write: the next step probably reads them."""
        arrived = set(digests)
        if stored is not None:
            arrived = {digest for digest, number in zip(digests, stored, strict=True) if number}
        items = []
        for item in write.objects:
            if item.digest in arrived:
                arrived.remove(item.digest)
                items.append((item.digest, StoredObject(item.kind, bytes(item.data))))
        self.cache.put(items, generation)

    def _note(self, epoch: int | None) -> None:
        """Clear the caches if the epoch shows that another process has begun a collection."""
        if epoch is not None and epoch != self._epoch:
            self.cache.clear()
            if self._spare is not None:
                self._spare.pass_on_to(epoch)
            self._epoch = epoch

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove objects that the store has deleted from the caches."""
        self.cache.remove(digests)
        if self._spare is not None and digests:
            # Clear the whole disk cache: erased bytes must not stay in a file.
            self._spare.clear()

    def forget_all(self) -> None:
        """Clear the caches: objects may have been deleted, and it is not known which."""
        self.cache.clear()
        if self._spare is not None:
            self._spare.clear()

    # --- rows -------------------------------------------------------------------------------

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        """The rows in the order of ``keys``, from one snapshot; None for missing rows."""
        self.connections.check()
        for table, key in keys:
            check_key(table, key)
        wanted = dict.fromkeys([(TABLE_NUMBERS[table], bytes(key)) for table, key in keys])
        if not wanted:
            return []
        tables = Ints([table for table, _ in wanted])
        names = ByteStrings([key for _, key in wanted])
        found = {
            (table, key): value
            for table, key, value in self.connections.fetch(self._get_rows, (tables, names))
        }
        return [found.get((TABLE_NUMBERS[table], key)) for table, key in keys]

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
        self.connections.check()
        check_table(table)
        _check_limit(limit)
        end = () if stop is None else (bytes(stop),)
        found = self.connections.fetch(
            self._scan_rows[bool(reverse), stop is not None],
            (Int8(TABLE_NUMBERS[table]), bytes(start), *end, _number(limit)),
        )
        return [Row(*row) for row in found]

    def rows_version(self) -> bytes:
        """An identifier of the present state: the transactions that a reader sees now.

        Any later commit changes it.
        """
        [[seen]] = self.connections.fetch(self._seen)
        return f"{self.store_number} {seen}".encode()

    def changed_keys(self, table: str, since: bytes) -> list[bytes] | None:
        """Return None: the server does not record the keys of changed rows."""
        check_table(table)
        return None

    # --- collecting -------------------------------------------------------------------------

    def collection(self, roots: Roots, *, grace_ms: int, dry_run: bool = False) -> Collection:
        """A collection that keeps reachable objects and those put within the grace period."""
        self.connections.check()
        return PostgresCollection(self, roots, grace_ms=grace_ms, dry_run=dry_run)

    def commits_since_collection(self) -> int:
        """How many writes changed the store since the last completed collection."""
        self.connections.check()
        found = self.connections.fetch(self._since)
        if not found:
            raise CorruptionError(
                f"{self.address.place} has no valid row in the table state; run check"
            )
        return int(found[0][0])

    # --- vectors ----------------------------------------------------------------------------

    def vector_search(self, dims: int, *, install: bool = False) -> VectorSearch | None:
        """The vector search by pgvector; None if the database has no extension ``vector``.

        Also None if the store is read-only or ``dims`` is too high. ``install`` adds the extension,
        if the server offers it and the role may. The result of the first call is reused until the
        engine is closed, unless ``install``.
        """
        self.connections.check()
        if self.readonly or dims > MAX_DIMS:
            return None
        if install or not self._has_looked_for_vectors:
            self._vectors = find_copies(self.connections, self.address.schema, install=install)
            self._has_looked_for_vectors = True
        return self._vectors

    # --- time, watching, ending -------------------------------------------------------------

    def given_ms(self) -> Int8 | None:
        """The time to pass to statements: of the clock that a test gave; None: the server's."""
        return None if self.clock is None else Int8(self.clock())

    def now_ms(self) -> int:
        """The server's clock, in milliseconds since 1970."""
        self.connections.check()
        if self.clock is not None:
            return self.clock()
        heard_ms, heard_s = self._heard
        elapsed_s = monotonic() - heard_s
        if elapsed_s < _HEARD_LATELY_S:
            # The server's last answer is recent: add the time that has passed since.
            return heard_ms + int(elapsed_s * 1000)
        [[now_ms]] = self.connections.fetch(self._now)
        self._heard = (int(now_ms), monotonic())
        return int(now_ms)

    def watch(self) -> Watch:
        """A watch that wakes after every later write of any process."""
        self.connections.check()
        return self._watching.watch()

    def flush(self) -> None:
        """Return once every acknowledged write survives a power loss."""
        self.connections.check()
        if not self._lasting and not self.readonly:
            # The commit of this transaction flushes everything that was committed before it.
            self.connections.fetch(self._flush)

    def close(self) -> None:
        """Close the connections. Closing twice is allowed; every other call then fails."""
        self.connections.close()
        self._watching.close()
        self.cache.clear()
        if self._spare is not None:
            self._spare.close()


def _check_limit(limit: int) -> None:
    # The caller could not distinguish an empty page from the end of the scan.
    if limit < 1:
        raise InvalidInputError(f"limit must be at least 1, got {limit}")


def _number(limit: int) -> Int8:
    return Int8(min(limit, _MOST))
