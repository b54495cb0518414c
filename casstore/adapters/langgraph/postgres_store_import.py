"""The tables of LangGraph's PostgresStore, to move over from."""

from __future__ import annotations

from typing import Any, Final

from casstore.adapters.langgraph.moving_items import (
    ITEM_COLUMNS,
    FoundItem,
    ItemQueries,
    ItemSource,
    ItemsReport,
    found_item,
    move_items,
    naming,
)
from casstore.compat.postgres_source import PostgresSource
from casstore.errors import ForeignSourceError
from casstore.maintenance.progress import Progress
from casstore.store import Store, check_store

_TABLE: Final = "store"
_VECTORS: Final = "store_vectors"
# Infinity stays a text, and is refused with its name.
_TIME: Final = b"""CASE WHEN isfinite(%TIME%)
    THEN (extract(epoch FROM %TIME%) * 1000000)::bigint::text ELSE %TIME%::text END"""
# The size is that in the table, which need not be read for it.
_PAGE: Final = b"""
    SELECT false, prefix, key, value::text, %CREATED%, %UPDATED%, %TTL%, %EXPIRES%
    FROM (
        SELECT *, sum(pg_column_size(value)) OVER (ORDER BY prefix, key) - pg_column_size(value)
            AS before
        FROM (
            SELECT * FROM store WHERE %s OR (prefix, key) > (%s, %s) ORDER BY prefix, key LIMIT %s
        ) AS page
    ) AS sized WHERE before < %s ORDER BY prefix, key"""


def import_postgres_store(
    store: Store,
    url: str,
    *,
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ItemsReport:
    """Move the items of a PostgresStore over, for CasstoreStore, and compare all of them.

    ``url`` is the store's connection string, as a URL. Everything is read in one transaction that
    can only read, as of one moment, also while the store is in use. Raising from ``progress``
    stops; the next call goes on from there. ItemConflictError if the store has an item of the same
    name with other content, unless ``replace``; BadItemError if one cannot be kept as it is. A
    ``dry_run`` finds the same, and writes nothing.
    """
    check_store(store)
    with PostgresSource(url) as source:
        found = _PostgresStore(source)
        return move_items(found, store, replace=replace, dry_run=dry_run, progress=progress)


class _PostgresStore(ItemSource):
    """Reads the tables of PostgresStore."""

    def __init__(self, source: PostgresSource) -> None:
        columns = source.columns(_TABLE)
        if not columns >= ITEM_COLUMNS:
            raise ForeignSourceError(
                f"{source.place} has no tables of LangGraph's PostgresStore, where this role looks "
                "for them; options=-csearch_path%3DNAME in the URL names another schema"
            )
        # Tables from before the columns have nothing that ends.
        ends = {"ttl_minutes", "expires_at"} <= columns
        page = (
            _PAGE.replace(b"%CREATED%", _time(b"created_at"))
            .replace(b"%UPDATED%", _time(b"updated_at"))
            .replace(b"%TTL%", b"ttl_minutes" if ends else b"NULL::int")
            .replace(b"%EXPIRES%", _time(b"expires_at") if ends else b"NULL::text")
        )
        vectors = b"SELECT count(*) FROM store_vectors" if source.columns(_VECTORS) else None
        queries = ItemQueries(b"SELECT count(*) FROM store", vectors, page)
        super().__init__(source.ask, queries, (True, "", ""))
        self._source = source

    def read(self, row: tuple[Any, ...]) -> FoundItem:
        _, prefix, key, value, created, updated, ttl, expires = row
        with naming(prefix, key):
            return found_item(
                prefix,
                key,
                value,
                created_us=_microseconds(created),
                updated_us=_microseconds(updated),
                ttl_minutes=ttl,
                expires_us=None if expires is None else _microseconds(expires),
            )

    def require_unchanged(self) -> None:
        """All of it was read in one transaction."""

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes(_TABLE, _VECTORS)


def _time(column: bytes) -> bytes:
    """What gives a time in microseconds."""
    return _TIME.replace(b"%TIME%", column)


def _microseconds(text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError as exc:
        raise ValueError(f"{text!r} is no time") from exc
