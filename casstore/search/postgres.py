"""The index on a PostgreSQL server: tables ``search_…`` in the store's schema.

Words are a tsvector with a GIN index. They are split as SQLite's FTS5 splits them, before the
server sees them: everything but letters and digits separates words, and accents do not count. The
first search creates the tables, which needs the right CREATE on the schema.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol, runtime_checkable

from casstore.errors import ReadOnlyError
from casstore.search.tables import NAMES, TABLES, VERSION, read_meta, write_meta
from casstore.search.texts import BEGIN, END, Snippet, Term, unmarked

# How many characters of a text are indexed: a tsvector may take at most one MiB.
_MAX_CHARACTERS: Final = 150_000
_FORBIDDEN: Final = "42501"
_FORMS: Final = {
    "s": "{s}.search_",
    "i": "search_",
    "blob": "bytea",
    "key": "bigint",
    "rowless": "",
}
_TEXTS: Final = (
    "CREATE TABLE {s}texts (id bigint PRIMARY KEY REFERENCES {s}docs (id) ON DELETE CASCADE, "
    "words tsvector NOT NULL)",
    "CREATE INDEX {i}texts_by_word ON {s}texts USING gin (words)",
)
_HEADLINE: Final = (
    f"StartSel={BEGIN}, StopSel={END}, MaxWords=24, MinWords=12, ShortWord=0, HighlightAll=false"
)


@runtime_checkable
class Server(Protocol):
    """The engine of a store on a server, as far as the index needs it."""

    readonly: bool
    #: Where the store is: ``place`` for messages, ``schema``.
    address: Any
    connections: Any

    def statement(self, text: str) -> bytes:
        """A statement with the schema filled in."""
        ...


class _Folding(dict[int, str]):
    """Maps each character to one: a letter without its accent, a digit, or a space for others."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        plain = unicodedata.normalize("NFD", letter)[0]
        found = plain if plain.isalnum() and len(plain) == 1 else " "
        self[code] = found
        return found


_FOLDED: Final = _Folding()


def fold(text: str) -> str:
    """The indexed beginning of a text, with accents removed and separators as spaces.

    Each character becomes one character, so that positions in both are the same.
    """
    return text[:_MAX_CHARACTERS].translate(_FOLDED)


class PostgresIndex:
    """An index in a schema, over one connection."""

    def __init__(self, server: Server, connection: Any) -> None:
        self.readonly = server.readonly
        self._server = server
        self._connection = connection

    def _statement(self, text: str) -> bytes:
        return self._server.statement(text.format(**_FORMS).replace("?", "%s"))

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        found: list[tuple[Any, ...]] = self._connection.execute(
            self._statement(statement), values
        ).fetchall()
        return found

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""
        return int(self._connection.execute(self._statement(statement), values).rowcount)

    def run_many(self, statement: str, values: Iterable[Sequence[Any]]) -> None:
        """Run a statement with each of the values."""
        with self._connection.cursor() as cursor:
            cursor.executemany(self._statement(statement), list(values))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction; no other one that writes runs at the same time."""
        with self._connection.transaction():
            self.run("LOCK TABLE {s}meta IN SHARE ROW EXCLUSIVE MODE")
            yield

    def add_texts(self, texts: Sequence[tuple[int, str]]) -> None:
        """Add the words of new docs."""
        self.run_many(
            "INSERT INTO {s}texts (id, words) VALUES (?, to_tsvector('simple', ?))",
            [(doc, fold(text)) for doc, text in texts],
        )

    def matches(
        self, terms: Sequence[Term], where: str, values: Sequence[Any], limit: int, skip: int
    ) -> list[tuple[int, float]]:
        """Ids and scores of the docs with all terms, best first, then newest first."""
        query, words = _query(terms)
        condition = f" AND {where.replace('{id}', 't.id')}" if where else ""
        found = self.rows(
            f"WITH asked AS (SELECT {query} AS query) "
            "SELECT t.id, ts_rank_cd(t.words, a.query, 1) FROM {s}texts t, asked a "
            f"WHERE t.words @@ a.query{condition} ORDER BY 2 DESC, 1 DESC LIMIT ? OFFSET ?",
            (*words, *values, limit, skip),
        )
        return [(doc, float(rank)) for doc, rank in found]

    def snippets(self, terms: Sequence[Term], texts: Sequence[str]) -> list[Snippet | None]:
        """For each text the part around the terms; None if they do not all occur in it."""
        query, words = _query(terms)
        found: list[Snippet | None] = []
        for text in texts:
            folded = fold(text)
            [[matches, headline]] = self.rows(
                f"WITH asked AS (SELECT {query} AS query), given AS (SELECT ?::text AS text) "
                "SELECT to_tsvector('simple', text) @@ query, "
                "ts_headline('simple', text, query, ?) FROM asked, given",
                (*words, folded, _HEADLINE),
            )
            found.append(_unfolded(text, folded, headline) if matches else None)
        return found

    def size_bytes(self) -> int:
        """The space of the tables and their indexes."""
        parts = [f"pg_total_relation_size('{{s}}{name}'::regclass)" for name in NAMES]
        [[size]] = self.rows(f"SELECT {' + '.join(parts)}")
        return int(size)

    def clear(self) -> None:
        """Remove everything."""
        for name in reversed(NAMES):
            self.run(f"DROP TABLE IF EXISTS {{s}}{name} CASCADE")
        self.create()

    def create(self) -> None:
        """Create the tables."""
        for statement in (*TABLES, *_TEXTS):
            self.run(statement)
        write_meta(self, "version", VERSION)

    def is_there(self) -> bool:
        """True if the tables exist."""
        [[found]] = self.rows("SELECT to_regclass('{s}meta') IS NOT NULL")
        return bool(found)


def _query(terms: Sequence[Term]) -> tuple[str, list[str]]:
    """An expression for the terms, and its values: nothing in a term is an operator."""
    parts: list[str] = []
    values: list[str] = []
    for words, prefix in terms:
        parts.append("to_tsquery('simple', ?)" if prefix else "phraseto_tsquery('simple', ?)")
        folded = fold(words)
        if prefix:
            folded = " <-> ".join([f"'{word}'" for word in folded.split()]) + ":*"
        values.append(folded)
    return " && ".join(parts), values


def _unfolded(text: str, folded: str, headline: str) -> Snippet:
    """The snippet of a text from the headline of its folded form."""
    plain = headline.replace(BEGIN, "").replace(END, "")
    start = folded.find(plain)
    if start < 0:
        return unmarked(headline)
    parts: list[str] = []
    at = start
    for letter in headline:
        if letter in (BEGIN, END):
            parts.append(letter)
        else:
            parts.append(text[at])
            at += 1
    before = "…" if start > 0 else ""
    behind = "…" if at < len(text) else ""
    return unmarked(f"{before}{''.join(parts)}{behind}")


@contextmanager
def opened(server: Server) -> Iterator[PostgresIndex | None]:
    """The index of a store on a server, created if necessary.

    None if the store is open read-only and has no index. ReadOnlyError, which names the right, if
    this role may not create or change it.
    """
    alone: AbstractContextManager[Any] = server.connections.alone()
    with alone as connection:
        index = PostgresIndex(server, connection)
        try:
            if not _is_ready(index):
                yield None
                return
            yield index
        except Exception as exc:
            # psycopg is imported by the engine alone; its errors have this attribute.
            if getattr(exc, "sqlstate", None) != _FORBIDDEN:
                raise
            where = server.address.schema
            raise ReadOnlyError(
                f"{server.address.place}: {str(exc).strip()}; the search index needs CREATE on "
                f"schema {where}, or SELECT, INSERT, UPDATE and DELETE on its tables search_*; "
                f"its owner can GRANT that"
            ) from exc


def _is_ready(index: PostgresIndex) -> bool:
    """Create the tables if necessary; False if they are not there and must not be created."""
    if index.is_there():
        if read_meta(index, "version") != VERSION and not index.readonly:
            with index.writing():
                index.clear()
        return read_meta(index, "version") == VERSION
    if index.readonly:
        return False
    with index._connection.transaction():
        # Two processes may search first at the same time.
        index.run("SELECT pg_advisory_xact_lock(hashtext('casstore search'))")
        if not index.is_there():
            index.create()
    return True
