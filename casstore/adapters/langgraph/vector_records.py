"""The schema of the vectors of long-term memory. All of it is derived from the items.

    lgm.vectors   namespace, bucket, key    generation, created, updated, vectors
    lgm.changes   namespace, bucket         time of the latest change of a vector in it
    lgm.index     "vectors"                 generation, embedder, dimensions, fields

A row of ``lgm.vectors`` holds all vectors of an item, packed: float32, little-endian, one after the
other. It counts only if its generation is that of ``lgm.index`` and its ``updated_us`` that of the
item. A bucket is a part of a namespace, chosen by the hash of the key: a reader that has cached the
vectors of a namespace re-reads the buckets in which something changed. Every time in
``lgm.changes`` is unique (``records.unique_times``), so equal times mean equal content.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from casstore.adapters.langgraph.item_records import ITEMS, ItemRow
from casstore.engine.protocol import MAX_ROW_VALUE_BYTES
from casstore.errors import InvalidInputError
from casstore.format.digest import plain_hash
from casstore.records.schema import Parent, RowTable, Schema
from casstore.session.records import Draft, Record
from casstore.store import Store

#: The bytes of a float32.
FLOAT_BYTES: Final = 4
#: The key of the only row of ``lgm.index``.
INDEX_KEY: Final = "vectors"
_PAGE: Final = 256
_BUCKETS: Final = [f"{number:02}" for number in range(64)]
# Space for the other fields and the key in the row.
_MAX_VECTORS_BYTES: Final = MAX_ROW_VALUE_BYTES - (1 << 16)


class VectorsRow(NamedTuple):
    """The vectors of an item."""

    prefix: str
    bucket: str
    key: str
    generation: str
    created_us: int
    updated_us: int
    vectors: bytes


class ChangeRow(NamedTuple):
    """When a vector in a bucket was last put."""

    prefix: str
    bucket: str
    changed_us: int


class IndexRow(NamedTuple):
    """What the vectors of a store were made with."""

    name: str
    #: Random; vectors of another generation do not count.
    generation: str
    embedder: str
    dims: int
    fields: tuple[str, ...]
    record: Record | None = None

    def is_like(self, other: IndexRow) -> bool:
        """True if vectors of both can be compared with each other."""
        return self[2:5] == other[2:5]

    def __str__(self) -> str:
        return f"embedder {self.embedder!r}, {self.dims} dims, fields {list(self.fields)!r}"


VECTORS: Final = Schema(
    "lgm.vectors",
    VectorsRow,
    3,
    parents=[
        Parent(
            ITEMS,
            lambda row: (row.prefix, row.key),
            lambda row, item: bool(row.updated_us == item.updated_us),
        )
    ],
)
CHANGES: Final = Schema("lgm.changes", ChangeRow, 2)
INDEX: Final = Schema("lgm.index", IndexRow, 1)


class VectorTables:
    """The tables of the vectors in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.vectors = RowTable(store, VECTORS)
        self.changes = RowTable(store, CHANGES)
        self.index = RowTable(store, INDEX)

    def find_index(self) -> IndexRow | None:
        """The description of the index; None if the store has no vectors."""
        return self.index.get(INDEX_KEY)

    def put(self, draft: Draft, item: ItemRow, generation: str, vectors: bytes) -> tuple[str, str]:
        """Write the vectors of an item; returns the bucket, for ``mark``."""
        if len(vectors) > _MAX_VECTORS_BYTES:
            raise InvalidInputError(
                f"item {item.key!r:.80} has {len(vectors):,} bytes of vectors, and at most "
                f"{_MAX_VECTORS_BYTES:,} are possible; index fewer fields"
            )
        place = item.prefix, bucket_of(item.key)
        row = VectorsRow(*place, item.key, generation, item.created_us, item.updated_us, vectors)
        draft.put_inline(self.vectors, VECTORS.key(row), VECTORS.encode(row))
        return place

    def mark(self, draft: Draft, bucket: tuple[str, str], changed_us: int) -> None:
        """Record that a vector of a bucket was put; ``changed_us`` is a time the write reserved."""
        self.changes.put(draft, ChangeRow(*bucket, changed_us))

    def delete(self, draft: Draft, prefix: str, key: str) -> None:
        """Delete the vectors of an item, if it has any.

        A reader that has cached them notices when it reads the item.
        """
        draft.delete(self.vectors, vectors_key(prefix, key))


def vectors_key(prefix: str, key: str) -> tuple[str, str, str]:
    """The key of the vectors of an item."""
    return prefix, bucket_of(key), key


def bucket_of(key: str) -> str:
    """The bucket of an item."""
    return _BUCKETS[plain_hash(key.encode())[0] % len(_BUCKETS)]


def delete_stale_vectors(store: Store) -> int:
    """Delete vectors whose item does not exist or was replaced; returns how many."""
    tables, items = VectorTables(store), RowTable(store, ITEMS)
    records, stale = tables.vectors.scan(), 0
    while page := list(islice(records, _PAGE)):
        found = items.find_many([(record.key[0], record.key[2]) for record in page])
        draft = Draft(store)
        for record, owner in zip(page, found, strict=True):
            item = items.decode_found(owner)
            if item is None or item.updated_us != VECTORS.read(record).updated_us:
                draft.expect(tables.vectors, record.key, record)
                draft.delete(tables.vectors, record.key)
                stale += 1
        draft.commit()
    return stale
