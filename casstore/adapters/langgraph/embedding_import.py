"""Imports the embeddings of LangGraph's own stores, where the embedder is the same.

Those stores record neither the embedder nor the fields. So an item keeps its embeddings if they
are for exactly the texts that the index would embed, have its dims, and are as new as the item;
and all are left out if the embedder returns other vectors for the first of those texts.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import sqrt
from typing import Final, NamedTuple

from casstore.adapters.langgraph.encoding import decode, load_raw
from casstore.adapters.langgraph.item_records import FLOAT_BYTES, TIMES_TABLE, ItemRow, VectorTables
from casstore.adapters.langgraph.item_sources import EmbeddedItem, ItemSource
from casstore.adapters.langgraph.vector_index import VectorIndex, packed
from casstore.compat.importing import ImportNote, Presence, RowPart, presence
from casstore.records.unique_times import UniqueTimes
from casstore.store import Store

LEFT_OUT: Final = "embeddings, left out; CasstoreStore.reindex() embeds the items"
# Texts that are embedded to compare the embedder with the source.
_SAMPLE: Final = 3
# Half precision, and models that answer a little differently each time, stay above it.
_LEAST_COSINE: Final = 0.999


class _Kept(NamedTuple):
    """An item with the texts that the index embeds, and their vectors from the source."""

    item: ItemRow
    texts: Sequence[str]
    vectors: Sequence[bytes]


class Embeddings(RowPart[_Kept]):
    """The embeddings of a source."""

    name = "embeddings"

    def __init__(self, source: ItemSource, store: Store, index: VectorIndex) -> None:
        self._source = source
        self._store = store
        self._tables = VectorTables(store)
        self._times = UniqueTimes(TIMES_TABLE)
        self._kept_vectors = 0
        self._index = index
        self._is_model = self._compare_model()

    def count(self) -> int:
        """The number of items whose vectors are kept."""
        return sum(map(len, self.pages()))

    def pages(self) -> Iterator[Sequence[_Kept]]:
        """The items whose vectors are kept."""
        self._kept_vectors = 0
        for page in self._kept() if self._is_model else ():
            self._kept_vectors += sum([len(each.vectors) for each in page])
            yield page

    def notes(self) -> Sequence[ImportNote]:
        """The number of vectors that are left out."""
        left = self._source.count_vectors() - self._kept_vectors
        return [ImportNote(LEFT_OUT, left)] if left else []

    def look(self, page: Sequence[_Kept]) -> list[Presence]:
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

    def store(self, rows: Sequence[_Kept]) -> None:
        """Write the vectors of these items."""
        generation = self._tables.describe(self._index.description)
        vectors = [(each.item, b"".join(each.vectors)) for each in rows]
        self._tables.put_stored(self._times, generation, vectors)

    def _kept(self) -> Iterator[list[_Kept]]:
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


def _matched(found: EmbeddedItem, index: VectorIndex) -> _Kept | None:
    """An item whose embeddings are for the texts that an index embeds; None if they are not."""
    item = found.item.content
    named = index.named_texts(decode(item.value, load_raw))
    vectors = [found.embeddings.get(name, b"") for name, _ in named]
    if len(found.embeddings) != len(named) or any(
        len(each) != index.dims * FLOAT_BYTES for each in vectors
    ):
        return None
    return _Kept(item, [text for _, text in named], vectors)


def _cosine(mine: bytes, theirs: bytes) -> float:
    a, b = array("f", mine), array("f", theirs)
    lengths = sqrt(sum([x * x for x in a])) * sqrt(sum([x * x for x in b]))
    product = sum([x * y for x, y in zip(a, b, strict=True)])
    # Two vectors of zeros are equal.
    return product / lengths if lengths else float(mine == theirs)
