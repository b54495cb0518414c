"""The tables of the index, which SQLite and PostgreSQL share, and what a database offers.

    segments   a run of nodes: positions from ``start`` up to ``stop`` of every graph that has them.
               Positions before ``start`` are those of ``parent`` (0: none)
    docs       one row for each text: a node, a component, or a part of a record system's entry
    texts      the words of each text, by the id of its doc: FTS5, or a tsvector with a GIN index
    states     a manifest that heads name, as a segment and the number of nodes
    parts      the components of a state, by name
    sessions   which state each session is in
    entries    entries of record systems, with what they looked like when they were indexed
    places     the texts of an entry, by position
    meta       the version of the index, the version of the rows that it was updated to, counters

A node's doc has the id ``segment << 32 | position``: nodes that follow each other have consecutive
ids, and sessions that share nodes share a segment. A thousand forks of a session are a thousand
rows of ``sessions`` and nothing else. Other docs have ids below 2**32.

In a statement, ``{s}`` is the prefix of the names of tables and ``{i}`` that of indexes, ``{blob}``
is the type of bytes, ``{key}`` that of an id, and ``{rowless}`` an option of SQLite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from casstore.search.texts import Snippet, Term

#: An index of another version is rebuilt.
VERSION: Final = b"1"
#: Ids from here on are those of nodes' docs.
NODES: Final = 1 << 32
#: How many bytes of a node's digest its doc has. They are compared; no query searches for them.
SHORT: Final = 16
#: A range of ids of docs: (lowest, highest).
Span = tuple[int, int]

TABLES: Final = (
    "CREATE TABLE {s}meta (name text PRIMARY KEY, value {blob} NOT NULL)",
    """CREATE TABLE {s}segments (
        id bigint PRIMARY KEY, parent bigint NOT NULL, start bigint NOT NULL,
        stop bigint NOT NULL, closed smallint NOT NULL, first {blob} NOT NULL
    )""",
    "CREATE INDEX {i}segments_by_place ON {s}segments (parent, start, first)",
    """CREATE TABLE {s}docs (
        id {key} PRIMARY KEY, digest {blob} NOT NULL, at_ms bigint, kind text
    )""",
    "CREATE UNIQUE INDEX {i}docs_by_content ON {s}docs (digest, kind) WHERE id < 4294967296",
    """CREATE TABLE {s}states (
        id {key} PRIMARY KEY, manifest {blob} NOT NULL, segment bigint NOT NULL,
        nodes bigint NOT NULL
    )""",
    "CREATE UNIQUE INDEX {i}states_by_manifest ON {s}states (manifest)",
    "CREATE INDEX {i}states_by_segment ON {s}states (segment)",
    """CREATE TABLE {s}parts (
        doc bigint NOT NULL, state bigint NOT NULL, name text NOT NULL,
        PRIMARY KEY (state, name)
    ){rowless}""",
    "CREATE INDEX {i}parts_by_doc ON {s}parts (doc)",
    """CREATE TABLE {s}sessions (
        key {blob} PRIMARY KEY, state bigint NOT NULL
    ){rowless}""",
    "CREATE INDEX {i}sessions_by_state ON {s}sessions (state)",
    """CREATE TABLE {s}entries (
        id {key} PRIMARY KEY, system text NOT NULL, entry text NOT NULL, signature {blob} NOT NULL
    )""",
    "CREATE UNIQUE INDEX {i}entries_by_name ON {s}entries (system, entry)",
    """CREATE TABLE {s}places (
        entry bigint NOT NULL, position text NOT NULL, doc bigint NOT NULL,
        PRIMARY KEY (entry, position)
    ){rowless}""",
    "CREATE INDEX {i}places_by_doc ON {s}places (doc)",
)
NAMES: Final = (
    "meta",
    "segments",
    "docs",
    "texts",
    "states",
    "parts",
    "sessions",
    "entries",
    "places",
)


class Database(Protocol):
    """The index of one store, open for one call. Statements have ``{s}`` and ``?`` in them."""

    #: True if the store is open read-only: a search then does not update the index.
    readonly: bool

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        ...

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""
        ...

    def run_many(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement with each of the values."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """A transaction; no other one that writes runs at the same time."""
        ...

    def add_texts(self, texts: Sequence[tuple[int, str]]) -> None:
        """Add the words of new docs, whose ids must increase."""
        ...

    def matches(
        self, terms: Sequence[Term], where: str, values: Sequence[Any], limit: int, skip: int
    ) -> list[tuple[int, float]]:
        """Ids and scores of the docs with all terms, best first, then newest first.

        ``where`` is an SQL condition on ``{id}``, or "" for none.
        """
        ...

    def snippets(self, terms: Sequence[Term], texts: Sequence[str]) -> list[Snippet | None]:
        """For each text the part around the terms; None if they do not all occur in it."""
        ...

    def size_bytes(self) -> int:
        """The size of the index."""
        ...

    def clear(self) -> None:
        """Remove everything; the index is then as if it were new."""
        ...


def read_meta(db: Database, name: str) -> bytes | None:
    """A value of ``meta``; None if it is not there."""
    rows = db.rows("SELECT value FROM {s}meta WHERE name = ?", (name,))
    return bytes(rows[0][0]) if rows else None


def write_meta(db: Database, name: str, value: bytes | None) -> None:
    """Set a value of ``meta``; None removes it."""
    if value is None:
        db.run("DELETE FROM {s}meta WHERE name = ?", (name,))
    else:
        db.run(
            "INSERT INTO {s}meta (name, value) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )


def next_id(db: Database, table: str) -> int:
    """An id that no row of the table had before."""
    last = int(read_meta(db, f"last {table}") or b"0") + 1
    write_meta(db, f"last {table}", b"%d" % last)
    return last


def listed(count: int) -> str:
    """``count`` placeholders, for ``IN (…)``."""
    return ", ".join("?" * count)
