"""Imports the items of LangGraph's own stores, for CasstoreStore.

Every item keeps its namespace, key, value, times and expiry; with ``index`` also its embeddings,
if the index embeds the same texts to the same vectors (``embedding_import``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from langgraph.store.base import IndexConfig

from casstore.adapters.langgraph.embedding_import import LEFT_OUT, Embeddings
from casstore.adapters.langgraph.encoding import pack_form
from casstore.adapters.langgraph.item_records import (
    MS_US,
    ItemRow,
    VectorTables,
    items_table,
    lasting_us,
)
from casstore.adapters.langgraph.item_sources import FoundItem, ItemSource, naming, open_items
from casstore.adapters.langgraph.vector_index import VectorIndex
from casstore.compat.importing import ImportNote, ImportReport, Part, Presence, RowPart, run
from casstore.errors import ConditionFailedError, ConflictError, ItemConflictError
from casstore.maintenance.progress import Progress
from casstore.session.arguments import check_flag
from casstore.session.records import Draft, Record
from casstore.store import Store, check_store

EXPIRED: Final = "expired items; sweep_ttl() deletes them, and omit_expired hides them until then"


def import_items(
    store: Store,
    source: str | os.PathLike[str],
    *,
    index: IndexConfig | None = None,
    replace: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the items of SqliteStore or PostgresStore, for CasstoreStore.

    ``source`` is the database file, or the store's connection string as a ``postgresql://`` URL.
    It is read in one snapshot, also while the store is in use. ForeignSourceError if the source
    has other tables; BadItemError if an item cannot be stored as it is; ItemConflictError if the
    store holds an item with other content, unless ``replace``. Notes count expired items, and
    embeddings that are left out.

    With the ``index`` of the source, as ``CasstoreStore`` will have it, embeddings are imported:
    those of the items whose fields and dims are the same. The embedder is called with a few texts
    first. If it returns other vectors than the source has, all embeddings are left out.
    VectorIndexChangedError if the store has vectors of another index.

    >>> from langgraph.store.sqlite import SqliteStore
    >>> with SqliteStore.from_conn_string(str(place / "memory.sqlite")) as memory:
    ...     memory.setup()
    ...     memory.put(("users", "ada"), "colour", {"likes": "blue"})
    >>> import_items(store, place / "memory.sqlite").imported
    1
    """
    check_store(store)
    check_flag(replace, "replace")
    vectors = None if index is None else VectorIndex(index)
    if vectors is not None:
        vectors.require(VectorTables(store).find_index())
    with open_items(source) as (database, items):
        parts: list[Part] = [_Items(items, store, replace=replace)]
        notes: list[ImportNote] = []
        if vectors is not None:
            parts.append(Embeddings(items, store, vectors))
        elif left_out := items.count_vectors():
            notes.append(ImportNote(LEFT_OUT, left_out))
        return run(
            "langgraph-items", database, store, parts,
            notes=notes, dry_run=dry_run, progress=progress,
        )  # fmt: skip


class _Items(RowPart[FoundItem]):
    """The items of a source."""

    name = "items"

    def __init__(self, source: ItemSource, store: Store, *, replace: bool) -> None:
        self._expired = 0
        self._source = source
        self._store = store
        self._replace = replace
        self._table = items_table(store)
        # The records of the page that was looked at last.
        self._known: dict[tuple[str, ...], Record | None] = {}

    def count(self) -> int:
        return self._source.count()

    def pages(self) -> Iterator[Sequence[FoundItem]]:
        self._expired = 0
        for page in self._source.pages():
            now_ms = self._store.engine.now_ms()
            self._expired += sum(not item.content.is_live(now_ms) for item in page)
            yield page

    def notes(self) -> Sequence[ImportNote]:
        return [ImportNote(EXPIRED, self._expired)] if self._expired else []

    def look(self, page: Sequence[FoundItem]) -> list[Presence]:
        places: list[tuple[str, ...]] = []
        for item in page:
            with naming(item.namespace, item.key):
                # Raises if the key is too long.
                self._table.place(*item.place)
            places.append(item.place)
        found = self._table.find_many(places)
        self._known = dict(zip(places, found, strict=True))
        return [
            Presence.MISSING if record is None else self._compared(item, self._table.decode(record))
            for item, record in zip(page, found, strict=True)
        ]

    def _compared(self, item: FoundItem, known: ItemRow) -> Presence:
        theirs, ours = item.content, known
        difference = _difference(theirs, ours)
        if difference is None:
            if theirs.expires_us == ours.expires_us:
                return Presence.EQUAL
            later = _later(theirs, ours, self._store.engine.now_ms() * MS_US)
            if later is not None:
                return Presence.EQUAL if later is ours else Presence.OUTDATED
            difference = "expiry"
        if not self._replace:
            raise ItemConflictError(item.namespace, item.key, difference)
        return Presence.OUTDATED

    def store(self, rows: Sequence[FoundItem]) -> None:
        draft, vectors = Draft(self._store), VectorTables(self._store)
        for item in rows:
            known = self._known[item.place]
            draft.expect(self._table, item.place, known)
            before = self._table.decode_found(known)
            self._table.put(draft, item.content, before)
            if before is not None and before.updated_us != item.content.updated_us:
                vectors.delete(draft, *item.place)
        try:
            draft.commit()
        except ConditionFailedError as exc:
            raise ConflictError(
                "another process changed items during the import; import once more"
            ) from exc


def _difference(theirs: ItemRow, ours: ItemRow) -> str | None:
    """The field in which two items differ, apart from their expiry; None if in none."""
    if pack_form(theirs.value) != pack_form(ours.value):
        return "value"
    if theirs.created_us != ours.created_us:
        return "created_at"
    if theirs.updated_us != ours.updated_us:
        return "updated_at"
    return None if theirs.ttl_minutes == ours.ttl_minutes else "time to live"


def _later(theirs: ItemRow, ours: ItemRow, now_us: int) -> ItemRow | None:
    """Which of two items, equal apart from their expiry, was read later; None: neither.

    Reading an item restarts its time to live. That changes no content, so it is not a conflict, and
    the later expiry counts.
    """
    if theirs.ttl_minutes is None or theirs.expires_us is None or ours.expires_us is None:
        return None
    if theirs.expires_us > ours.expires_us:
        return theirs
    return ours if ours.expires_us <= now_us + lasting_us(theirs.ttl_minutes) else None
