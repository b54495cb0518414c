"""An item of long-term memory as a record: where it stands, what it holds, how long it lives.

    key     labels of the namespace, each followed by a dot ‖ key of the item
    value   [value, created, updated]
            [value, created, updated, minutes to live, end]   either of the two may be None

So the items below a namespace are a range of keys. A time is a number of milliseconds since 1970;
one that came from elsewhere and is finer is [milliseconds, microseconds beyond]. In here all
are microseconds.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import MAX_STAMP_MS
from casstore.errors import CorruptionError, InvalidInputError
from casstore.session.records import Record, Table
from casstore.store import Store

#: Stands between the labels of a namespace, and in none.
DOT: Final = "."
#: Microseconds in a millisecond.
MS_US: Final = 1000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: Which times are taken (``records.unique_times``).
TIMES_TABLE: Final = "lgm.times"
_TABLE: Final = "lgm.items"
_MINUTE_MS: Final = 60_000


class ItemContent(NamedTuple):
    """What an item is under its name, its value in stored form (``encoding``)."""

    value: Any
    created_us: int
    updated_us: int
    ttl_minutes: float | None = None
    expires_us: int | None = None

    def is_live(self, now_ms: int) -> bool:
        """Is its time not up?"""
        return self.expires_us is None or self.expires_us > now_ms * MS_US

    def packed(self) -> list[Any]:
        """As its record holds it."""
        content = [self.value, _stamp(self.created_us), _stamp(self.updated_us)]
        if self.ttl_minutes is not None or self.expires_us is not None:
            ends = None if self.expires_us is None else _stamp(self.expires_us)
            content += [self.ttl_minutes, ends]
        return content


class StoredItem(NamedTuple):
    """An item and the record that holds it."""

    record: Record
    content: ItemContent

    @property
    def namespace(self) -> tuple[str, ...]:
        """Its labels."""
        return labels(self.record.key[0])

    def is_live(self, now_ms: int) -> bool:
        """Is its time not up?"""
        return self.content.is_live(now_ms)


def items_table(store: Store) -> Table:
    """The items of a store, by namespace and key."""
    return Table(store, _TABLE, 2)


def joined(namespace: tuple[str, ...]) -> str:
    """A namespace as the first text of a key."""
    return "".join([label + DOT for label in namespace])


def labels(text: str) -> tuple[str, ...]:
    """The namespace that ``joined`` was given."""
    return tuple(text.split(DOT)[:-1])


def stored_item(record: Record) -> StoredItem:
    """The item in a record."""
    content = record.value
    if type(content) is not list or len(content) not in (3, 5):
        raise CorruptionError(f"item {record.key} is damaged")
    value, created, updated, ttl, expires = content if len(content) == 5 else [*content, None, None]
    return StoredItem(
        record,
        ItemContent(
            value,
            _microseconds(record, created),
            _microseconds(record, updated),
            ttl,
            None if expires is None else _microseconds(record, expires),
        ),
    )


def lasting_us(ttl_minutes: float) -> int:
    """How long a time to live is; InvalidInputError if it is none."""
    try:
        lasts_ms = int(ttl_minutes * _MINUTE_MS)
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"a time to live in minutes, not {ttl_minutes!r}") from exc
    if not 0 <= lasts_ms <= MAX_STAMP_MS:
        raise InvalidInputError(
            f"a time to live from 0 minutes to 1,000 years, not {ttl_minutes!r} minutes"
        )
    return lasts_ms * MS_US


def time_of(stamp_us: int) -> datetime:
    """A time as LangGraph has it."""
    return EPOCH + timedelta(microseconds=stamp_us)


def _stamp(time_us: int) -> int | list[int]:
    whole, rest = divmod(time_us, MS_US)
    return [whole, rest] if rest else whole


def _microseconds(record: Record, stamp: Any) -> int:
    if type(stamp) is int:
        return stamp * MS_US
    if type(stamp) is list and len(stamp) == 2 and all(type(part) is int for part in stamp):
        return int(stamp[0] * MS_US + stamp[1])
    raise CorruptionError(f"item {record.key} is damaged")
