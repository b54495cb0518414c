"""Reads the items that LangGraph's own stores keep, in SQLite or PostgreSQL."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from casstore.adapters.langgraph.encoding import dump_raw, encode
from casstore.adapters.langgraph.item_records import DOT, ItemRow, lasting_us, time_of
from casstore.adapters.langgraph.vector_index import packed
from casstore.compat import importing
from casstore.compat.importing import Source
from casstore.compat.sqlite_source import SqliteSource, utc_us
from casstore.errors import BadItemError, ForeignSourceError
from casstore.records.json_values import loads
from casstore.store import is_server

if TYPE_CHECKING:
    from casstore.compat.postgres_source import PostgresSource

# The columns that the table of items has in every release.
_COLUMNS: Final = frozenset(("prefix", "key", "value", "created_at", "updated_at"))
_TABLE: Final = "store"
_VECTORS: Final = "store_vectors"


class EmbeddedItem(NamedTuple):
    """An item of the source with its embeddings: packed float32, by the path of their text."""

    item: ItemRow
    embeddings: Mapping[str, bytes]


class ItemQueries(NamedTuple):
    """The queries of every store, in the dialect of its database."""

    count: Any
    #: None if there is no such table.
    count_vectors: Any
    #: The embeddings of the items from one position to another: prefix, key, path, vector, and
    #: whether the vector was made since the item was last put.
    vectors: Any
    #: The rows after one, in order, up to a number of rows and about a number of bytes. Their
    #: first columns are the position that the next page starts after.
    page: Any


class ItemSource(ABC):
    """The items of a store of LangGraph. ``start`` is the position before the first row."""

    def __init__(
        self,
        ask: Callable[[Any, Sequence[Any]], Iterator[tuple[Any, ...]]],
        queries: ItemQueries,
        start: tuple[Any, ...],
    ) -> None:
        self._ask = ask
        self._queries = queries
        self._start = start

    @abstractmethod
    def read(self, row: tuple[Any, ...]) -> ItemRow:
        """The item of a row; BadItemError if it cannot be stored."""

    def count(self) -> int:
        """The number of items."""
        return int(next(self._ask(self._queries.count, ()))[0])

    def count_vectors(self) -> int:
        """The number of embeddings."""
        query = self._queries.count_vectors
        return 0 if query is None else int(next(self._ask(query, ()))[0])

    def pages(self) -> Iterator[list[ItemRow]]:
        """All items in order, in pages of bounded size."""
        for rows in self._rows():
            yield [self.read(row) for row in rows]

    def embedded_pages(self) -> Iterator[list[EmbeddedItem]]:
        """The items that have embeddings, in pages of bounded size.

        An embedding that was made before its item was last put has the empty vector.
        """
        query = self._queries.vectors
        if not self.count_vectors():
            return
        for rows in self._rows():
            found: dict[tuple[str, str], dict[str, bytes]] = {}
            for prefix, key, path, vector, is_current in self._ask(query, self.span(rows)):
                made = found.setdefault((prefix, key), {})
                made[path] = self.vector(vector) if is_current else b""
            yield [
                EmbeddedItem(self.read(row), found[name])
                for row in rows
                if (name := self.name(row)) in found
            ]

    def _rows(self) -> Iterator[list[tuple[Any, ...]]]:
        after = self._start
        while rows := list(
            self._ask(self._queries.page, (*after, importing.PAGE_ROWS, importing.PAGE_BYTES))
        ):
            yield rows
            after = rows[-1][: len(self._start)]

    @abstractmethod
    def name(self, row: tuple[Any, ...]) -> tuple[Any, Any]:
        """The prefix and key of a row, as the query of the embeddings returns them."""

    @abstractmethod
    def span(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """The parameters of the query of the embeddings, for a page."""

    @abstractmethod
    def vector(self, stored: Any) -> bytes:
        """An embedding, packed; empty if it is not a vector of floats."""


@contextmanager
def naming(namespace: str, key: str) -> Iterator[None]:
    """Raise BadItemError with the item's name for a ValueError."""
    try:
        yield
    except RecursionError as exc:
        raise BadItemError(namespace, key, "its value is nested too deeply") from exc
    except ValueError as exc:
        raise BadItemError(namespace, key, str(exc)) from exc


def item_row(
    prefix: str,
    key: str,
    text: str,
    *,
    created_us: int,
    updated_us: int,
    ttl_minutes: float | None,
    expires_us: int | None,
) -> ItemRow:
    """An item from the columns of its row; ValueError if it cannot be stored as it is.

    Labels contain no dots, which every store of LangGraph checks: dots separate the labels.
    """
    value = loads(text)
    if type(value) is not dict:
        raise ValueError(f"its value is a {type(value).__name__}, not a map")
    for time_us in (created_us, updated_us, expires_us):
        if time_us is not None:
            _require_time(time_us)
    if ttl_minutes is not None:
        lasting_us(ttl_minutes)
        ttl_minutes = float(ttl_minutes)
    prefix = prefix + DOT if prefix else ""
    stored = encode(value, dump_raw)
    return ItemRow(prefix, key, stored, created_us, updated_us, ttl_minutes, expires_us)


def _require_time(time_us: int) -> None:
    try:
        time_of(time_us)
    except OverflowError as exc:
        raise ValueError(
            f"{time_us} microseconds since 1970 are outside the range of times"
        ) from exc


@contextmanager
def open_items(source: str | os.PathLike[str]) -> Iterator[tuple[Source, ItemSource]]:
    """Open a file of SqliteStore, or the tables of PostgresStore at a ``postgresql://`` URL."""
    if isinstance(source, str) and is_server(source):
        from casstore.compat.postgres_source import PostgresSource

        with PostgresSource(source, (_TABLE, _VECTORS)) as server:
            yield server, _PostgresStore(server)
    else:
        with SqliteSource(source) as file:
            yield file, _SqliteStore(file)


# --- SQLite -------------------------------------------------------------------------------------

# Texts as bytes, so that an error about one that is not Unicode can name the item.
_SQLITE_PAGE: Final = """
    SELECT at, typeof(prefix), CAST(prefix AS BLOB), typeof(key), CAST(key AS BLOB),
        typeof(value), CAST(value AS BLOB), created_at, updated_at, {ttl}, {expires}
    FROM (
        SELECT *, sum(length(value)) OVER (ORDER BY at) - length(value) AS before
        FROM (SELECT rowid AS at, * FROM store WHERE rowid > ? ORDER BY rowid LIMIT ?)
    ) WHERE before < ? ORDER BY at"""
_SQLITE_VECTORS: Final = """
    SELECT CAST(prefix AS BLOB), CAST(key AS BLOB), field_name, embedding,
        v.updated_at >= store.updated_at
    FROM store JOIN store_vectors AS v USING (prefix, key) WHERE store.rowid BETWEEN ? AND ?"""
_FIRST: Final = -(1 << 63)
_TEXT: Final = "text"


class _SqliteStore(ItemSource):
    """A database of SqliteStore."""

    def __init__(self, source: SqliteSource) -> None:
        columns = source.columns(_TABLE)
        if not columns >= _COLUMNS:
            raise ForeignSourceError(f"{source.path} is not a database of LangGraph's SqliteStore")
        # Older databases lack the columns; their items do not expire.
        page = _SQLITE_PAGE.format(
            ttl="ttl_minutes" if "ttl_minutes" in columns else "NULL",
            expires="expires_at" if "expires_at" in columns else "NULL",
        )
        vectors = f"SELECT count(*) FROM {_VECTORS}" if _VECTORS in source.tables else None
        queries = ItemQueries(f"SELECT count(*) FROM {_TABLE}", vectors, _SQLITE_VECTORS, page)
        super().__init__(source.ask, queries, (_FIRST,))
        self._encoding = source.encoding

    def read(self, row: tuple[Any, ...]) -> ItemRow:
        _, prefix_kind, prefix, key_kind, key, kind, value, created, updated, ttl, expires = row
        names = [each.decode(self._encoding, "backslashreplace") for each in (prefix, key)]
        with naming(*names):
            if (prefix_kind, key_kind) != (_TEXT, _TEXT):
                raise ValueError("its namespace or key is not a text")
            return item_row(
                prefix.decode(self._encoding),
                key.decode(self._encoding),
                # LangGraph writes values as bytes; other programs may write text.
                value.decode(self._encoding if kind == _TEXT else "utf-8"),
                created_us=utc_us(created),
                updated_us=utc_us(updated),
                ttl_minutes=ttl,
                expires_us=None if expires is None else utc_us(expires),
            )

    def name(self, row: tuple[Any, ...]) -> tuple[Any, Any]:
        return row[2], row[4]

    def span(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return rows[0][0], rows[-1][0]

    def vector(self, stored: Any) -> bytes:
        # sqlite-vec stores float32, packed.
        return stored if isinstance(stored, bytes) else b""


# --- PostgreSQL ---------------------------------------------------------------------------------

# Infinity stays a text, so that the error can name the item.
_TIME: Final = b"""CASE WHEN isfinite(%TIME%)
    THEN (extract(epoch FROM %TIME%) * 1000000)::bigint::text ELSE %TIME%::text END"""
# The size of the stored value, which PostgreSQL knows without reading it.
_POSTGRES_PAGE: Final = b"""
    SELECT false, prefix, key, value::text, %CREATED%, %UPDATED%, %TTL%, %EXPIRES%
    FROM (
        SELECT *, sum(pg_column_size(value)) OVER (ORDER BY prefix, key) - pg_column_size(value)
            AS before
        FROM (
            SELECT * FROM store WHERE %s OR (prefix, key) > (%s, %s) ORDER BY prefix, key LIMIT %s
        ) AS page
    ) AS sized WHERE before < %s ORDER BY prefix, key"""

# The collation of the column orders both pages and this range.
_POSTGRES_VECTORS: Final = b"""
    SELECT prefix, key, field_name, embedding::text, v.updated_at >= store.updated_at
    FROM store JOIN store_vectors AS v USING (prefix, key)
    WHERE (prefix, key) BETWEEN (%s, %s) AND (%s, %s)"""


class _PostgresStore(ItemSource):
    """The tables of PostgresStore."""

    def __init__(self, source: PostgresSource) -> None:
        columns = source.columns(_TABLE)
        if not columns >= _COLUMNS:
            raise ForeignSourceError(
                f"{source.name} has no tables of LangGraph's PostgresStore on the search path of "
                "this role; options=-csearch_path%3DNAME in the URL names another schema"
            )
        # Older tables lack the columns; their items do not expire.
        ends = {"ttl_minutes", "expires_at"} <= columns
        page = (
            _POSTGRES_PAGE.replace(b"%CREATED%", _time(b"created_at"))
            .replace(b"%UPDATED%", _time(b"updated_at"))
            .replace(b"%TTL%", b"ttl_minutes" if ends else b"NULL::int")
            .replace(b"%EXPIRES%", _time(b"expires_at") if ends else b"NULL::text")
        )
        vectors = b"SELECT count(*) FROM store_vectors" if source.columns(_VECTORS) else None
        queries = ItemQueries(b"SELECT count(*) FROM store", vectors, _POSTGRES_VECTORS, page)
        super().__init__(source.ask, queries, (True, "", ""))

    def read(self, row: tuple[Any, ...]) -> ItemRow:
        _, prefix, key, value, created, updated, ttl, expires = row
        with naming(prefix, key):
            return item_row(
                prefix,
                key,
                value,
                created_us=_microseconds(created),
                updated_us=_microseconds(updated),
                ttl_minutes=ttl,
                expires_us=None if expires is None else _microseconds(expires),
            )

    def name(self, row: tuple[Any, ...]) -> tuple[Any, Any]:
        return row[1], row[2]

    def span(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return *rows[0][1:3], *rows[-1][1:3]

    def vector(self, stored: Any) -> bytes:
        # The text of a vector or halfvec is a list; that of a bit string is not.
        if not str(stored).startswith("["):
            return b""
        return packed([[float(number) for number in stored[1:-1].split(",")]])


def _time(column: bytes) -> bytes:
    """The expression for a time in microseconds."""
    return _TIME.replace(b"%TIME%", column)


def _microseconds(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError as exc:
        raise ValueError(f"{text!r} is not a time") from exc
