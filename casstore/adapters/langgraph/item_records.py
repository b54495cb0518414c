"""The records of long-term memory: items, their times to live, and their vectors.

    lgm.items     namespace, key            value, created, updated, minutes to live, expiry, fields
    lgm.recent    namespace, updated, key   index: the items of a namespace by time
    lgm.times     the times that writes have used (``records.unique_times``)
    lgm.vectors   namespace, bucket, key    generation, created, updated, vectors
    lgm.changes   namespace, bucket         time of the latest change of a vector in it
    lgm.index     "vectors"                 generation, embedder, dimensions, fields

Each label of a namespace is followed by a dot, so the items below a namespace are a range of keys.
Times are microseconds since 1970.

Vectors are derived from the items. A row of ``lgm.vectors`` holds all vectors of an item, packed:
float32, little-endian, one after the other. It counts only if its generation is that of
``lgm.index`` and its ``updated_us`` that of the item. A bucket is a part of a namespace, chosen by
the hash of the key: a reader that has cached the vectors of a namespace re-reads the buckets in
which something changed. Every time in ``lgm.changes`` is unique, so equal times mean equal content.
"""

from __future__ import annotations

import heapq
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import MAX_ROW_VALUE_BYTES, MAX_STAMP_MS
from casstore.errors import ConflictError, InvalidInputError
from casstore.format.digest import plain_hash
from casstore.records.schema import Index, Parent, RowTable, Schema
from casstore.records.unique_times import UniqueTimes
from casstore.session.attempts import transaction
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

#: Separates the labels of a namespace; a label cannot contain it.
DOT: Final = "."
#: Microseconds in a millisecond.
MS_US: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The table of the times that writes have used (``records.unique_times``).
TIMES_TABLE: Final = "lgm.times"
#: The length of a tick. A write reserves whole ticks of times for its items, so these run ahead of
#: the clock only above 100,000 writes a second.
TICK_US: Final = 10
#: The bytes of a float32.
FLOAT_BYTES: Final = 4
#: The key of the only row of ``lgm.index``.
INDEX_KEY: Final = "vectors"
_TICKS_A_MS: Final = MS_US // TICK_US
_MINUTE_MS: Final = 60_000
_PAGE: Final = 256
_BUCKETS: Final = [f"{number:02}" for number in range(64)]
_GENERATION_BYTES: Final = 12
# Space for the other fields and the key in the row.
_MAX_VECTORS_BYTES: Final = MAX_ROW_VALUE_BYTES - (1 << 16)


# --- items ----------------------------------------------------------------------------------------


class ItemRow(NamedTuple):
    """An item, its value in stored form (``encoding``)."""

    #: The labels of the namespace, joined.
    prefix: str
    key: str
    value: Any
    created_us: int
    updated_us: int
    ttl_minutes: float | None = None
    expires_us: int | None = None
    #: The fields to index, as given to ``put``; None: those of the index, (): the item has none.
    fields: tuple[str, ...] | None = None
    record: Record | None = None

    @property
    def namespace(self) -> tuple[str, ...]:
        """Its labels."""
        return labels(self.prefix)

    def is_live(self, now_ms: int) -> bool:
        """True if it has not expired."""
        return self.expires_us is None or self.expires_us > now_ms * MS_US


def _item_key(derived: tuple[str, ...]) -> tuple[str, str]:
    """The key of the item that a row of ``lgm.recent`` or ``lgm.vectors`` belongs to."""
    return derived[0], derived[2]


_RECENT: Final[Index[ItemRow]] = Index(
    "lgm.recent", 3, lambda item: [(item.prefix, item.updated_us, item.key)], owner=_item_key
)
ITEMS: Final = Schema("lgm.items", ItemRow, 2, indexes=[_RECENT])


def items_table(store: Store) -> RowTable[ItemRow]:
    """The items of a store, by namespace and key."""
    return RowTable(store, ITEMS)


def latest_keys(store: Store, prefix: str, page: int) -> Iterator[tuple[str, str]]:
    """The keys of the items in namespaces that start with ``prefix``, latest update first.

    Reads one row of the index for each namespace, and then ``page`` rows at a time as they are
    taken.
    """
    [recent] = items_table(store).indexes

    def from_latest(record: Record) -> Iterator[Record]:
        yield record
        # Items that were imported may have the same time: scan to the end of it.
        namespace, updated, _ = record.key
        until = updated + "\0"
        for each in recent.scan(namespace, before=until, reverse=True, page=page):
            if each.key != record.key:
                yield each

    latest = [from_latest(record) for record in recent.last_of_groups(prefix)]
    merged = heapq.merge(*latest, key=lambda record: record.key[1], reverse=True)
    return (_item_key(record.key) for record in merged)


def joined(namespace: tuple[str, ...]) -> str:
    """A namespace as the first text of a key."""
    return "".join([label + DOT for label in namespace])


def labels(text: str) -> tuple[str, ...]:
    """The namespace that ``joined`` was given."""
    return tuple(text.split(DOT)[:-1])


def lasting_us(ttl_minutes: float) -> int:
    """A time to live in microseconds; InvalidInputError if it is invalid."""
    try:
        lasts_ms = int(ttl_minutes * _MINUTE_MS)
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"ttl must be a number of minutes, got {ttl_minutes!r}") from exc
    if not 0 <= lasts_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"ttl must be from 0 minutes to 1,000 years, got {ttl_minutes!r} minutes"
        )
    return lasts_ms * MS_US


def time_of(stamp_us: int) -> datetime:
    """A time as LangGraph has it."""
    return _EPOCH + timedelta(microseconds=stamp_us)


def now_ticks(now_ms: int) -> int:
    """The time in ticks, by the engine's clock; within a millisecond, by that of this process."""
    within = time.time_ns() // (1000 * TICK_US) % _TICKS_A_MS
    return now_ms * _TICKS_A_MS + within


# --- vectors --------------------------------------------------------------------------------------


class VectorsRow(NamedTuple):
    """The vectors of an item."""

    prefix: str
    bucket: str
    key: str
    generation: str
    created_us: int
    updated_us: int
    vectors: bytes

    def counts_for(self, item: ItemRow, generation: str) -> bool:
        """True if these are the vectors of an item as it is now, and of a generation."""
        return (self.generation, self.updated_us) == (generation, item.updated_us)


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

    def find_many(self, items: Sequence[ItemRow]) -> list[VectorsRow | None]:
        """The vectors of items, also those that do not count."""
        found = self.vectors.find_many([_vectors_key(item.prefix, item.key) for item in items])
        return [self.vectors.decode_found(record) for record in found]

    def put(
        self,
        draft: Draft,
        generation: str,
        vectors: Iterable[tuple[ItemRow, bytes]],
        changed_us: int,
    ) -> int:
        """Add packed vectors of items to a write; returns for how many items.

        Empty vectors delete those of their item. ``changed_us`` is a time that the write reserved.
        """
        buckets: list[tuple[str, str]] = []
        for item, packed in vectors:
            if not packed:
                self.delete(draft, item.prefix, item.key)
                continue
            if len(packed) > _MAX_VECTORS_BYTES:
                raise InvalidInputError(
                    f"item {item.key!r:.80} has {len(packed):,} bytes of vectors, and at most "
                    f"{_MAX_VECTORS_BYTES:,} are possible; index fewer fields"
                )
            key = _vectors_key(item.prefix, item.key)
            row = VectorsRow(*key, generation, item.created_us, item.updated_us, packed)
            draft.put_inline(self.vectors, key, VECTORS.encode(row))
            buckets.append(key[:2])
        for bucket in dict.fromkeys(buckets):
            self.changes.put(draft, ChangeRow(*bucket, changed_us))
        return len(buckets)

    def delete(self, draft: Draft, prefix: str, key: str) -> None:
        """Add to a write the deletion of the vectors of an item, if it has any.

        A reader that has cached them notices when it reads the item.
        """
        draft.delete(self.vectors, _vectors_key(prefix, key))

    def expect_index(self, draft: Draft, found: IndexRow | None) -> None:
        """Make a write fail if the description of the index is not ``found`` any more."""
        draft.expect(self.index, (INDEX_KEY,), None if found is None else found.record)

    def put_index(self, draft: Draft, found: IndexRow | None, description: IndexRow) -> IndexRow:
        """Add to a write a description, with a generation of its own, in place of ``found``."""
        self.expect_index(draft, found)
        made = description._replace(generation=secrets.token_hex(_GENERATION_BYTES))
        self.index.put(draft, made)
        return made

    @transaction("the vector index")
    def describe(self, description: IndexRow, *, rebuild: bool = False) -> str:
        """Store the description of the index; returns the generation of its vectors.

        If another description is stored, or with ``rebuild``, the generation is a new one, so that
        no stored vector counts.
        """
        found = self.find_index()
        if found is not None and found.is_like(description) and not rebuild:
            return found.generation
        draft = Draft(self.store)
        made = self.put_index(draft, found, description)
        draft.commit()
        return made.generation

    @transaction("the vectors of items")
    def put_stored(
        self, times: UniqueTimes, generation: str, vectors: Sequence[tuple[ItemRow, bytes]]
    ) -> int:
        """Write packed vectors of stored items, except items changed since; returns for how many.

        Empty vectors delete those of their item. ConflictError if the store's vectors are of
        another generation. A put of an item writes its vectors in its own transaction.
        """
        table = items_table(self.store)
        keys = [(item.prefix, item.key) for item, _ in vectors]
        draft, now_ms = Draft(self.store), self.store.engine.now_ms()
        moment = times.read(self.store, table, keys, [(self.index, (INDEX_KEY,))])
        described = self.index.decode_found(moment.records[-1])
        if described is None or described.generation != generation:
            raise ConflictError(
                "another process began to reindex with another embedder; stop one of them"
            )
        self.expect_index(draft, described)
        unchanged: list[tuple[ItemRow, bytes]] = []
        for known, (item, packed) in zip(moment.records[:-1], vectors, strict=True):
            # An item that was put meanwhile has its vectors from that write.
            if known is not None and table.decode(known).updated_us == item.updated_us:
                draft.expect(table, known.key, known)
                unchanged.append((item, packed))
        with times.reserve(draft, moment, now_ticks(now_ms)) as first:
            done = self.put(draft, generation, unchanged, first * TICK_US)
            draft.commit()
        return done


def _vectors_key(prefix: str, key: str) -> tuple[str, str, str]:
    return prefix, _BUCKETS[plain_hash(key.encode())[0] % len(_BUCKETS)], key


# --- after a copy ---------------------------------------------------------------------------------


def delete_stale(store: Store) -> int:
    """Delete index rows and vectors of items that do not exist or were replaced.

    Returns how many.
    """
    [recent] = items_table(store).indexes
    vectors = RowTable(store, VECTORS)
    return _delete_stale(
        store, recent, lambda record, item: record.key in recent.keys_of(item)
    ) + _delete_stale(
        store, vectors, lambda record, item: vectors.decode(record).updated_us == item.updated_us
    )


def _delete_stale(
    store: Store, derived: Table, is_current: Callable[[Record, ItemRow], bool]
) -> int:
    items, records, stale = items_table(store), derived.scan(), 0
    while page := list(islice(records, _PAGE)):
        found = items.find_many([_item_key(record.key) for record in page])
        draft = Draft(store)
        for record, owner in zip(page, found, strict=True):
            if owner is None or not is_current(record, items.decode(owner)):
                draft.expect(derived, record.key, record)
                draft.delete(derived, record.key)
                stale += 1
        draft.commit()
    return stale
