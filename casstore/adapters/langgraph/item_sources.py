"""Reads the items that LangGraph's own stores keep, in SQLite or PostgreSQL."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

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


ItemColumns = TypeVar("ItemColumns", bound=tuple[Any, ...])


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


class ItemSource(ABC, Generic[ItemColumns]):
    """The items of a store of LangGraph.

    ``start`` is the position before the first row, ``columns`` names the columns of a page.
    """

    def __init__(
        self,
        ask: Callable[[Any, Sequence[Any]], Iterator[tuple[Any, ...]]],
        queries: ItemQueries,
        start: tuple[Any, ...],
        columns: Callable[..., ItemColumns],
    ) -> None:
        self._ask = ask
        self._queries = queries
        self._start = start
        self._columns = columns

    @abstractmethod
    def read(self, row: ItemColumns) -> ItemRow:
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

    def _rows(self) -> Iterator[list[ItemColumns]]:
        after = self._start
        limits = importing.PAGE_ROWS, importing.PAGE_BYTES
        while rows := list(
            starmap(self._columns, self._ask(self._queries.page, (*after, *limits)))
        ):
            yield rows
            after = rows[-1][: len(self._start)]

    @abstractmethod
    def name(self, row: ItemColumns) -> tuple[Any, Any]:
        """The prefix and key of a row, as the query of the embeddings returns them."""

    @abstractmethod
    def span(self, rows: Sequence[ItemColumns]) -> tuple[Any, ...]:
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
    return ItemRow(
        prefix=prefix,
        key=key,
        value=stored,
        created_us=created_us,
        updated_us=updated_us,
        ttl_minutes=ttl_minutes,
        expires_us=expires_us,
    )


def _require_time(time_us: int) -> None:
    try:
        time_of(time_us)
    except OverflowError as exc:
        raise ValueError(
            f"{time_us} microseconds since 1970 are outside the range of times"
        ) from exc


@contextmanager
def open_items(source: str | os.PathLike[str]) -> Iterator[tuple[Source, ItemSource[Any]]]:
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


class _SqliteItem(NamedTuple):
    """The columns of an item in SQLite, with the types that SQLite reports for three of them."""

    position: int
    prefix_type: str
    prefix: bytes
    key_type: str
    key: bytes
    value_type: str
    value: bytes
    created_at: Any
    updated_at: Any
    ttl_minutes: Any
    expires_at: Any


class _SqliteStore(ItemSource[_SqliteItem]):
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
        super().__init__(source.ask, queries, (_FIRST,), _SqliteItem)
        self._encoding = source.encoding

    def read(self, row: _SqliteItem) -> ItemRow:
        names = [each.decode(self._encoding, "backslashreplace") for each in (row.prefix, row.key)]
        with naming(*names):
            if (row.prefix_type, row.key_type) != (_TEXT, _TEXT):
                raise ValueError("its namespace or key is not a text")
            return item_row(
                row.prefix.decode(self._encoding),
                row.key.decode(self._encoding),
                # LangGraph writes values as bytes; other programs may write text.
                row.value.decode(self._encoding if row.value_type == _TEXT else "utf-8"),
                created_us=utc_us(row.created_at),
                updated_us=utc_us(row.updated_at),
                ttl_minutes=row.ttl_minutes,
                expires_us=None if row.expires_at is None else utc_us(row.expires_at),
            )

    def name(self, row: _SqliteItem) -> tuple[Any, Any]:
        return row.prefix, row.key

    def span(self, rows: Sequence[_SqliteItem]) -> tuple[Any, ...]:
        return rows[0].position, rows[-1].position

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


class _PostgresItem(NamedTuple):
    """The columns of an item in PostgreSQL; the first three are the position of the next page."""

    is_start: bool
    prefix: str
    key: str
    value: str
    created_at: str | None
    updated_at: str | None
    ttl_minutes: int | None
    expires_at: str | None


class _PostgresStore(ItemSource[_PostgresItem]):
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
        super().__init__(source.ask, queries, (True, "", ""), _PostgresItem)

    def read(self, row: _PostgresItem) -> ItemRow:
        with naming(row.prefix, row.key):
            return item_row(
                row.prefix,
                row.key,
                row.value,
                created_us=_microseconds(row.created_at),
                updated_us=_microseconds(row.updated_at),
                ttl_minutes=row.ttl_minutes,
                expires_us=None if row.expires_at is None else _microseconds(row.expires_at),
            )

    def name(self, row: _PostgresItem) -> tuple[Any, Any]:
        return row.prefix, row.key

    def span(self, rows: Sequence[_PostgresItem]) -> tuple[Any, ...]:
        return *self.name(rows[0]), *self.name(rows[-1])

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
