"""A database of LangGraph's SqliteStore, to move over from."""

from __future__ import annotations

import os
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
from casstore.compat.sqlite_source import SqliteSource
from casstore.compat.times import utc_us
from casstore.errors import ForeignSourceError
from casstore.maintenance.progress import Progress
from casstore.store import Store, check_store

_TABLE: Final = "store"
_VECTORS: Final = "store_vectors"
# Texts as bytes: such as are no Unicode shall be told with their names.
_PAGE: Final = """
    SELECT at, typeof(prefix), CAST(prefix AS BLOB), typeof(key), CAST(key AS BLOB),
        typeof(value), CAST(value AS BLOB), created_at, updated_at, {ttl}, {expires}
    FROM (
        SELECT *, sum(length(value)) OVER (ORDER BY at) - length(value) AS before
        FROM (SELECT rowid AS at, * FROM store WHERE rowid > ? ORDER BY rowid LIMIT ?)
    ) WHERE before < ? ORDER BY at"""
_FIRST: Final = -(1 << 63)
_TEXT: Final = "text"


def import_sqlite_store(
    store: Store,
    file: str | os.PathLike[str],
    *,
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ItemsReport:
    """Move the items of a SqliteStore's database over, for CasstoreStore, and compare all of them.

    The file is opened read-only and is as it was afterwards. Raising from ``progress`` stops; the
    next call goes on from there. ItemConflictError if the store has an item of the same name
    with other content, unless ``replace``; BadItemError if one cannot be kept as it is. A
    ``dry_run`` finds the same, and writes nothing.

    >>> from langgraph.store.sqlite import SqliteStore
    >>> with SqliteStore.from_conn_string(str(place / "memory.sqlite")) as memory:
    ...     memory.setup()
    ...     memory.put(("users", "ada"), "colour", {"likes": "blue"})
    >>> import_sqlite_store(store, place / "memory.sqlite").imported
    1
    """
    check_store(store)
    with SqliteSource(file) as source:
        found = _SqliteStore(source)
        return move_items(found, store, replace=replace, dry_run=dry_run, progress=progress)


class _SqliteStore(ItemSource):
    """Reads a database of SqliteStore."""

    def __init__(self, source: SqliteSource) -> None:
        columns = source.columns(_TABLE)
        if not columns >= ITEM_COLUMNS:
            raise ForeignSourceError(f"{source.path} is no database of LangGraph's SqliteStore")
        # Databases from before the columns have nothing that ends.
        page = _PAGE.format(
            ttl="ttl_minutes" if "ttl_minutes" in columns else "NULL",
            expires="expires_at" if "expires_at" in columns else "NULL",
        )
        vectors = f"SELECT count(*) FROM {_VECTORS}" if _VECTORS in source.tables else None
        queries = ItemQueries(f"SELECT count(*) FROM {_TABLE}", vectors, page)
        super().__init__(source.ask, queries, (_FIRST,))
        self._source = source
        self._encoding = source.encoding

    def read(self, row: tuple[Any, ...]) -> FoundItem:
        _, prefix_kind, prefix, key_kind, key, kind, value, created, updated, ttl, expires = row
        names = [each.decode(self._encoding, "backslashreplace") for each in (prefix, key)]
        with naming(*names):
            if (prefix_kind, key_kind) != (_TEXT, _TEXT):
                raise ValueError("its name is no text")
            return found_item(
                prefix.decode(self._encoding),
                key.decode(self._encoding),
                # LangGraph writes values as bytes; others may have as text.
                value.decode(self._encoding if kind == _TEXT else "utf-8"),
                created_us=utc_us(created),
                updated_us=utc_us(updated),
                ttl_minutes=ttl,
                expires_us=None if expires is None else utc_us(expires),
            )

    def require_unchanged(self) -> None:
        self._source.require_unchanged()

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes
