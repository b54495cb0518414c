"""A commit written by hand with psycopg: the same bytes, in one statement.

The objects that a turn makes a store write are hashed, compressed and inserted, and its rows
written over those that are there; no conditions, no links, no receipts to look at, nothing shared.
That is the least that a server can be asked to do for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import psycopg
import zstandard
from blake3 import blake3

from benchmarks.sessions import Writer
from benchmarks.sqlite_turns import Turn
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, Write, WriteResult
from casstore.store import Store

_TABLES = """
    CREATE SCHEMA IF NOT EXISTS bare;
    CREATE TABLE IF NOT EXISTS bare.objects (
        digest bytea PRIMARY KEY, content bytea NOT NULL
    );
    ALTER TABLE bare.objects ALTER COLUMN content SET STORAGE EXTERNAL;
    CREATE TABLE IF NOT EXISTS bare.rows (
        kind text, key bytea, value bytea NOT NULL, PRIMARY KEY (kind, key)
    );
"""
_COMMIT = """
    WITH stored AS (
        INSERT INTO bare.objects SELECT * FROM unnest(%b::bytea[], %b::bytea[])
            ON CONFLICT DO NOTHING
    )
    INSERT INTO bare.rows SELECT * FROM unnest(%b::text[], %b::bytea[], %b::bytea[])
        ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value
"""


class Written(NamedTuple):
    """The data of one commit: the bytes of its objects, and its rows."""

    objects: list[bytes]
    rows: list[tuple[str, bytes, bytes]]


class _Recorder(MemoryEngine):
    """A memory engine that records what each write stores."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Written] = []

    def write(self, write: Write) -> WriteResult:
        """Run the write and note its bytes."""
        rows = {(row.table, row.key): row.value for row in write.rows if isinstance(row, PutRow)}
        self.written.append(
            Written(
                [item.data for item in write.objects],
                [(*place, value) for place, value in rows.items()],
            )
        )
        return super().write(write)


def written_by(turns: Sequence[Turn], session: str) -> list[Written]:
    """The data that committing these turns to a session writes."""
    engine = _Recorder()
    writer = Writer(Store(engine).session(session))
    engine.written.clear()
    for turn in turns:
        writer.commit(turn)
    return engine.written


class HandWritten:
    """A connection that commits this way."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._compress = zstandard.ZstdCompressor(level=3).compress

    def create(self) -> None:
        """Create the tables if they do not exist."""
        self._connection.execute(_TABLES)

    def empty(self) -> None:
        """Reset."""
        self._connection.execute("TRUNCATE bare.objects, bare.rows")

    def commit(self, written: Written) -> None:
        """One statement, one round trip."""
        digests = [blake3(data).digest() for data in written.objects]
        contents = [self._compress(data) for data in written.objects]
        columns: list[list[Any]] = [list(column) for column in zip(*written.rows, strict=True)]
        self._connection.execute(_COMMIT, (digests, contents, *columns))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
