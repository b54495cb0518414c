"""The schema of long-term memory: an item, its times and its time to live.

    lgm.items   namespace, key     value, created, updated, minutes to live, expiry, fields to index
    lgm.recent  namespace, updated, key   index: the items of a namespace by time
    lgm.times   the times that writes have used (``records.unique_times``)

Each label of a namespace is followed by a dot, so the items below a namespace are a range of keys.
Times are microseconds since 1970.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import InvalidInputError
from casstore.records.schema import Index, RowTable, Schema
from casstore.session.records import Draft, Record
from casstore.store import Store

#: Separates the labels of a namespace; a label cannot contain it.
DOT: Final = "."
#: Microseconds in a millisecond.
MS_US: Final = 1000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The table of the times that writes have used (``records.unique_times``).
TIMES_TABLE: Final = "lgm.times"
_MINUTE_MS: Final = 60_000
_PAGE: Final = 256


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


def _item_key(recent: tuple[str, ...]) -> tuple[str, str]:
    return recent[0], recent[2]


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


def delete_stale_recent(store: Store) -> int:
    """Delete index rows whose item does not exist or was replaced; returns how many."""
    items = items_table(store)
    [recent] = items.indexes
    records, stale = recent.scan(), 0
    while page := list(islice(records, _PAGE)):
        found = items.find_many([_item_key(record.key) for record in page])
        draft = Draft(store)
        for record, owner in zip(page, found, strict=True):
            if record.key not in recent.keys_of(items.decode_found(owner)):
                draft.expect(recent, record.key, record)
                draft.delete(recent, record.key)
                stale += 1
        draft.commit()
    return stale


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
    return EPOCH + timedelta(microseconds=stamp_us)
