"""Copies of vectors in tables of the server, for the extension pgvector to search.

The rows of a store hold vectors as bytes, which the server cannot compare. If the database has the
extension, whose name is ``vector``, copies are stored in two more tables of the store's schema
(``engine.protocol`` defines the terms):

    vectors        space, path, part, name, number, row, created, version → embedding
    vector_parts   space, path, part → the stamp of the part when it was copied

The caller compares stamps, and replaces the parts that have changed (``VectorCopies.replace``). A
copy has a foreign key to the row that it was made from, so whatever deletes the row also deletes
the copy.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.types.numeric import Int8

from casstore.engine.postgres.connections import Client, Connections
from casstore.engine.postgres.request import TABLE_NUMBERS
from casstore.engine.protocol import NearVector, VectorChange, VectorCopy, VectorPart

#: The most dimensions that a value of pgvector's type can have.
MAX_DIMS: Final = 16_000
_FLOAT_BYTES: Final = 4

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {s}.vector_parts (
    space text NOT NULL, path bytea NOT NULL, part bytea NOT NULL, stamp bigint NOT NULL,
    PRIMARY KEY (space, path, part)
);
CREATE TABLE IF NOT EXISTS {s}.vectors (
    space text NOT NULL, path bytea NOT NULL, part bytea NOT NULL, name bytea NOT NULL,
    number integer NOT NULL, kind smallint NOT NULL, key bytea NOT NULL,
    created bigint NOT NULL, version bigint NOT NULL, embedding {x}.vector NOT NULL,
    FOREIGN KEY (kind, key) REFERENCES {s}.rows (kind, key) ON DELETE CASCADE
);
-- A search reads all vectors: in the rows, and not one by one from the table for long values.
ALTER TABLE {s}.vectors ALTER embedding SET STORAGE MAIN;
CREATE INDEX IF NOT EXISTS vectors_of_part ON {s}.vectors (space, path, part);
CREATE INDEX IF NOT EXISTS vectors_of_row ON {s}.vectors (kind, key);
"""
_COPY: Final = (
    "COPY {s}.vectors (space, path, part, name, number, kind, key, created, version, embedding) "
    "FROM STDIN (FORMAT BINARY)"
)
_COPY_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END: Final = struct.pack("!h", -1)
# The cosine distance to a vector of zeros is NaN. 1 instead says that the vector is not similar.
_NEAREST: Final = """
SELECT path, part, name, 1 - distance FROM (
    SELECT path, part, name, created,
        coalesce(nullif(embedding OPERATOR({x}.<=>) %s::{x}.vector, 'NaN'), 1) AS distance
    FROM {s}.vectors WHERE space = %s AND path >= %s AND path < %s
) AS compared ORDER BY distance, created LIMIT %s
"""


class VectorCopies:
    """The copies of one store; see ``engine.protocol.VectorSearch``."""

    def __init__(self, connections: Connections, schema: str, extension_schema: str) -> None:
        self._connections = connections
        self._names = {"s": sql.Identifier(schema), "x": sql.Identifier(extension_schema)}

    def _statement(self, text: str) -> bytes:
        """``text`` is a constant of this module: no user input becomes SQL."""
        return sql.SQL(text).format(**self._names).as_bytes(None)

    def create(self) -> bool:
        """Create the tables if they do not exist; False if the role may not create or use them."""
        names = [
            self._statement(f"{{s}}.{table}").decode() for table in ("vectors", "vector_parts")
        ]

        def may_write(connection: Client) -> bool | None:
            [found] = connection.execute(
                "SELECT bool_and(has_table_privilege(to_regclass(name), right_)), "
                "bool_or(to_regclass(name) IS NULL) "
                "FROM unnest(%s::text[]) AS name, "
                "unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS right_",
                (names,),
            ).fetchall()
            may, is_missing = found
            return None if is_missing else bool(may)

        def make(connection: Client) -> bool:
            found = may_write(connection)
            if found is not None:
                return found
            try:
                with connection.transaction():
                    # Two clients that create the tables at once would collide.
                    connection.execute(self._statement("LOCK {s}.meta IN EXCLUSIVE MODE"))
                    connection.execute(self._statement(_CREATE))
            except psycopg.errors.InsufficientPrivilege:
                return False
            return True

        return self._connections.run_alone(make)

    def parts(self, space: str, start: bytes, stop: bytes) -> dict[VectorPart, int]:
        """The stamps of the parts with ``start <= path < stop``."""
        found = self._connections.fetch(
            self._statement(
                "SELECT path, part, stamp FROM {s}.vector_parts "
                "WHERE space = %s AND path >= %s AND path < %s"
            ),
            (space, start, stop),
        )
        return {VectorPart(path, part): stamp for path, part, stamp in found}

    def replace(self, space: str, changes: Iterable[VectorChange]) -> bool:
        """Replace the copies of parts; False if a row that a change names no longer exists.

        A part that is stored with the stamp of its change, or a higher one, is left unchanged. In
        the others, only copies whose version differs are written. Each part is one transaction.
        """
        # Not a connection of the pool: psycopg discards the prepared statements of a connection
        # when a transaction is rolled back, among them those that the pool's clients rely on.
        with self._connections.alone() as connection:
            done = [self._replaced(connection, space, change) for change in changes]
        return all(done)

    def _replaced(self, connection: Client, space: str, change: VectorChange) -> bool:
        here = space, change.part.path, change.part.part
        try:
            with connection.transaction():
                # Locks the part.
                is_later = connection.execute(
                    self._statement(
                        "INSERT INTO {s}.vector_parts AS known VALUES (%s, %s, %s, %s) "
                        "ON CONFLICT (space, path, part) DO UPDATE SET stamp = excluded.stamp "
                        "WHERE known.stamp < excluded.stamp RETURNING true"
                    ),
                    (*here, change.stamp),
                ).fetchone()
                if is_later is not None:
                    self._write(connection, here, change.copies)
        except psycopg.errors.ForeignKeyViolation:
            return False
        return True

    def _write(
        self, connection: Client, here: tuple[str, bytes, bytes], copies: Sequence[VectorCopy]
    ) -> None:
        wanted = {(copy.name, copy.version): copy for copy in copies}
        known = connection.execute(
            self._statement(
                "SELECT DISTINCT name, version FROM {s}.vectors "
                "WHERE space = %s AND path = %s AND part = %s"
            ),
            here,
            binary=True,
        ).fetchall()
        stale = {name for name, version in known if (name, version) not in wanted}
        if stale:
            connection.execute(
                self._statement(
                    "DELETE FROM {s}.vectors "
                    "WHERE space = %s AND path = %s AND part = %s AND name = ANY(%s)"
                ),
                (*here, list(stale)),
            )
        kept = {(name, version) for name, version in known if name not in stale}
        new = [copy for pair, copy in wanted.items() if pair not in kept]
        if new:
            with connection.cursor().copy(self._statement(_COPY)) as stream:
                stream.write(_COPY_HEADER)
                for copy in new:
                    stream.write(_copied(here, copy))
                stream.write(_COPY_END)

    def keep_only(self, space: str) -> None:
        """Delete the copies of all other spaces."""
        for table in ("vectors", "vector_parts"):
            self._connections.run(
                partial(
                    _execute, self._statement(f"DELETE FROM {{s}}.{table} WHERE space <> %s"), space
                )
            )

    def nearest(
        self, space: str, start: bytes, stop: bytes, query: Sequence[float], limit: int
    ) -> list[NearVector]:
        """The vectors with ``start <= path < stop`` that are most similar, by cosine."""
        text = "[" + ",".join([repr(float(number)) for number in query]) + "]"
        found = self._connections.fetch(
            self._statement(_NEAREST), (text, space, start, stop, Int8(limit))
        )
        return [NearVector(*row) for row in found]


def find_copies(
    connections: Connections, schema: str, *, install: bool = False
) -> VectorCopies | None:
    """The vector search of a store; creates its tables if they do not exist.

    None if the database lacks the extension, or the role may not use the tables. ``install`` first
    adds the extension to the database, if the server offers it and the role may.
    """

    def look(connection: Client) -> Any:
        if install:
            _install(connection)
        return connection.execute(
            "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace "
            "WHERE extname = 'vector'"
        ).fetchone()

    found = connections.run_alone(look)
    if found is None:
        return None
    copies = VectorCopies(connections, schema, found[0])
    return copies if copies.create() else None


def _execute(statement: bytes, value: str, connection: Client) -> None:
    connection.execute(statement, (value,))


def _install(connection: Client) -> None:
    offered = connection.execute(
        "SELECT 1 FROM pg_available_extensions WHERE name = 'vector' AND installed_version IS NULL"
    ).fetchone()
    if offered is None:
        return
    try:
        with connection.transaction():
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName):
        # Not an error: the client can search by itself, without the extension.
        return


def _copied(here: tuple[str, bytes, bytes], copy: VectorCopy) -> bytes:
    """The vectors of a row in the binary format of COPY."""
    space, path, part = here
    floats = array("f", copy.vectors)
    if sys.byteorder == "little":
        floats.byteswap()
    content = floats.tobytes()
    step = copy.dims * _FLOAT_BYTES
    made = []
    for number, at in enumerate(range(0, len(content), step)):
        fields = (
            space.encode(),
            path,
            part,
            copy.name,
            struct.pack("!i", number),
            struct.pack("!h", TABLE_NUMBERS[copy.row.table]),
            copy.row.key,
            struct.pack("!q", copy.created),
            struct.pack("!q", copy.version),
            # The binary format of pgvector: dimensions, two unused bytes, floats.
            struct.pack("!hh", copy.dims, 0) + content[at : at + step],
        )
        made.append(struct.pack("!h", len(fields)))
        made += [struct.pack("!i", len(field)) + field for field in fields]
    return b"".join(made)
