"""Imports the items of LangGraph's own stores, for CasstoreStore, and their embeddings.

Every item keeps its namespace, key, value, times and expiry; with ``index`` also its embeddings.
Those stores record neither the embedder nor the fields. So an item keeps its embeddings if they
are for exactly the texts that the index would embed, have its dims, and are as new as the item;
and all are left out if the embedder returns other vectors for the first of those texts.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import sqrt
from typing import Any, Final, NamedTuple

from langgraph.store.base import IndexConfig

from casstore.adapters.langgraph.encoding import decode, load_raw, pack_form
from casstore.adapters.langgraph.item_records import (
    DOT,
    FLOAT_BYTES,
    MS_US,
    TIMES_TABLE,
    ItemRow,
    VectorTables,
    items_table,
    lasting_us,
)
from casstore.adapters.langgraph.item_sources import EmbeddedItem, ItemSource, naming, open_items
from casstore.adapters.langgraph.vector_index import VectorIndex, packed
from casstore.compat.importing import (
    ImportNote,
    ImportReport,
    Part,
    Presence,
    RowPart,
    presence,
    run,
)
from casstore.errors import ConditionFailedError, ConflictError, ItemConflictError
from casstore.maintenance.progress import Progress
from casstore.records.unique_times import UniqueTimes
from casstore.session.arguments import check_flag
from casstore.session.records import Draft, Record
from casstore.store import Store, check_store

EXPIRED: Final = "expired items; sweep_ttl() deletes them, and omit_expired hides them until then"
LEFT_OUT: Final = "embeddings, left out; CasstoreStore.reindex() embeds the items"
# Texts that are embedded to compare the embedder with the source.
_SAMPLE: Final = 3
# Half precision, and models that answer a little differently each time, stay above it.
_LEAST_COSINE: Final = 0.999


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
        parts: list[Part] = [_ItemPart(items, store, replace=replace)]
        notes: list[ImportNote] = []
        if vectors is not None:
            parts.append(_EmbeddingPart(items, store, vectors))
        elif left_out := items.count_vectors():
            notes.append(ImportNote(LEFT_OUT, left_out))
        return run(
            "langgraph-items", database, store, parts,
            notes=notes, dry_run=dry_run, progress=progress,
        )  # fmt: skip


# --- items ----------------------------------------------------------------------------------------


class _ItemPart(RowPart[ItemRow]):
    """The items of a source."""

    name = "items"

    def __init__(self, source: ItemSource[Any], store: Store, *, replace: bool) -> None:
        self._expired = 0
        self._source = source
        self._store = store
        self._replace = replace
        self._table = items_table(store)
        # The records of the page that was looked at last.
        self._known: dict[tuple[str, ...], Record | None] = {}

    def count(self) -> int:
        return self._source.count()

    def pages(self) -> Iterator[Sequence[ItemRow]]:
        self._expired = 0
        for page in self._source.pages():
            now_ms = self._store.engine.now_ms()
            self._expired += sum(not item.is_live(now_ms) for item in page)
            yield page

    def notes(self) -> Sequence[ImportNote]:
        return [ImportNote(EXPIRED, self._expired)] if self._expired else []

    def look(self, page: Sequence[ItemRow]) -> list[Presence]:
        places = [(item.prefix, item.key) for item in page]
        for item, place in zip(page, places, strict=True):
            with naming(DOT.join(item.namespace), item.key):
                # Raises if the key is too long.
                self._table.place(*place)
        found = self._table.find_many(places)
        self._known = dict(zip(places, found, strict=True))
        return [
            Presence.MISSING if record is None else self._compared(item, self._table.decode(record))
            for item, record in zip(page, found, strict=True)
        ]

    def _compared(self, theirs: ItemRow, ours: ItemRow) -> Presence:
        difference = _difference(theirs, ours)
        if difference is None:
            if theirs.expires_us == ours.expires_us:
                return Presence.EQUAL
            later = _later(theirs, ours, self._store.engine.now_ms() * MS_US)
            if later is not None:
                return Presence.EQUAL if later is ours else Presence.OUTDATED
            difference = "expiry"
        if not self._replace:
            raise ItemConflictError(DOT.join(theirs.namespace), theirs.key, difference)
        return Presence.OUTDATED

    def store(self, rows: Sequence[ItemRow]) -> None:
        draft, vectors = Draft(self._store), VectorTables(self._store)
        for item in rows:
            place = item.prefix, item.key
            known = self._known[place]
            draft.expect(self._table, place, known)
            before = self._table.decode_found(known)
            self._table.put(draft, item, before)
            if before is not None and before.updated_us != item.updated_us:
                vectors.delete(draft, *place)
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


# --- embeddings -----------------------------------------------------------------------------------


class _EmbeddedTexts(NamedTuple):
    """An item with the texts that the index embeds, and their vectors from the source."""

    item: ItemRow
    texts: Sequence[str]
    vectors: Sequence[bytes]


class _EmbeddingPart(RowPart[_EmbeddedTexts]):
    """The embeddings of a source."""

    name = "embeddings"

    def __init__(self, source: ItemSource[Any], store: Store, index: VectorIndex) -> None:
        self._source = source
        self._tables = VectorTables(store)
        self._times = UniqueTimes(TIMES_TABLE)
        self._kept_vectors = 0
        self._index = index
        self._is_model = self._compare_model()

    def count(self) -> int:
        return sum(map(len, self.pages()))

    def pages(self) -> Iterator[Sequence[_EmbeddedTexts]]:
        self._kept_vectors = 0
        for page in self._kept() if self._is_model else ():
            self._kept_vectors += sum([len(each.vectors) for each in page])
            yield page

    def notes(self) -> Sequence[ImportNote]:
        left = self._source.count_vectors() - self._kept_vectors
        return [ImportNote(LEFT_OUT, left)] if left else []

    def look(self, page: Sequence[_EmbeddedTexts]) -> list[Presence]:
        """Whether the store has vectors of this index for each item."""
        described = self._tables.find_index()
        if described is None:
            return [Presence.MISSING] * len(page)
        rows = self._tables.find_many([each.item for each in page])
        # Not compared by content: all vectors of this generation are of the same embedder.
        return presence(
            row is not None and row.counts_for(each.item, described.generation)
            for each, row in zip(page, rows, strict=True)
        )

    def store(self, rows: Sequence[_EmbeddedTexts]) -> None:
        generation = self._tables.describe(self._index.description)
        vectors = [(each.item, b"".join(each.vectors)) for each in rows]
        self._tables.put_stored(self._times, generation, vectors)

    def _kept(self) -> Iterator[list[_EmbeddedTexts]]:
        for page in self._source.embedded_pages():
            matched = [_matched(each, self._index) for each in page]
            yield [each for each in matched if each is not None]

    def _compare_model(self) -> bool:
        """True if the embedder returns the vectors of the source for a few of its texts."""
        kept = (each for page in self._kept() for each in page)
        sample: Mapping[str, bytes] = dict(
            islice((pair for each in kept for pair in zip(*each[1:], strict=True)), _SAMPLE)
        )
        if not sample:
            return False
        # In a thread: an embedder may be asynchronous, and this thread may run an event loop.
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(asyncio.run, self._index.aembed([*sample])).result()
        return all(
            _cosine(packed([made[text]]), theirs) >= _LEAST_COSINE
            for text, theirs in sample.items()
        )


def _matched(found: EmbeddedItem, index: VectorIndex) -> _EmbeddedTexts | None:
    """An item whose embeddings are for the texts that an index embeds; None if they are not."""
    named = index.named_texts(decode(found.item.value, load_raw))
    vectors = [found.embeddings.get(name, b"") for name, _ in named]
    if len(found.embeddings) != len(named) or any(
        len(each) != index.dims * FLOAT_BYTES for each in vectors
    ):
        return None
    return _EmbeddedTexts(found.item, [text for _, text in named], vectors)


def _cosine(mine: bytes, theirs: bytes) -> float:
    a, b = array("f", mine), array("f", theirs)
    lengths = sqrt(sum([x * x for x in a])) * sqrt(sum([x * x for x in b]))
    product = sum([x * y for x, y in zip(a, b, strict=True)])
    # Two vectors of zeros are equal.
    return product / lengths if lengths else float(mine == theirs)
