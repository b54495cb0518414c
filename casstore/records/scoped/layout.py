"""The rows of scoped state.

    scoped.scopes         scope key, generation        birth, changes, keys, bytes, soonest expiry,
                                                       conversation
    scoped.values         scope key, generation, key   version, origin, times, size, writer,
                                                       context, value
    scoped.conversations  conversation, scope key, generation
    scoped.resets         conversation, number         the resets; "" the latest once more
    scoped.people         type, id, scope key, generation, key
                                                       from a person to what concerns it
    scoped.runs           run                          what a run may do, as it was frozen
    scoped.run_actors     type, id, run                whose runs

Every write to a scope changes its row in ``scoped.scopes`` and expects it to be as it was read:
that alone keeps the counts exact and each decision true. The row goes with the last value, and
its successor has another birth, so a version (birth and number of the change) never comes again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

from casstore.errors import CasstoreError, CorruptionError
from casstore.format.canonical import Link
from casstore.records.scoped.scope_keys import Context
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

LATEST: Final = ""
_BIRTH_BYTES: Final = 6
# Up to this size a value, or a context, stands in its row; the row stays one of short values.
_VALUE_IN_ROW_BYTES: Final = 224
_CONTEXT_IN_ROW_BYTES: Final = 128
# A text of this length leaves any container, so that it would be fetched with the row.
_LONG_BYTES: Final = 512

#: The type and id of an actor.
Writer = tuple[str, str]
Decoded = TypeVar("Decoded")


class Tables:
    """The tables of scoped state in a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.scopes = Table(store, "scoped.scopes", 2)
        self.values = Table(store, "scoped.values", 3)
        self.conversations = Table(store, "scoped.conversations", 3)
        self.resets = Table(store, "scoped.resets", 2)
        self.people = Table(store, "scoped.people", 5)
        self.runs = Table(store, "scoped.runs", 1)
        self.run_actors = Table(store, "scoped.run_actors", 3)


class Spot(NamedTuple):
    """Where the values of one scope are: its key, and the conversation whose resets it heeds."""

    scope: str
    key: str
    conversation: str | None


def number_text(number: int) -> str:
    """A generation as a part of keys: in order."""
    return f"{number:010}"


class Head(NamedTuple):
    """The row of a scope."""

    birth: str
    changes: int
    keys: int
    size_bytes: int
    #: No value expires before; None: none expires.
    soonest_ms: int | None
    #: The conversation that the scope belongs to, if it is one's.
    conversation: str | None

    @property
    def version(self) -> str:
        """What the latest change is called."""
        return f"{self.birth}-{self.changes}"


def new_head(conversation: str | None) -> Head:
    """The row of a scope that nothing was put into yet."""
    return Head(secrets.token_hex(_BIRTH_BYTES), 0, 0, 0, None, conversation)


def decode_head(record: Record) -> Head:
    """The row of a scope."""
    return _decode(record, lambda told: Head(*told))


class Stored(NamedTuple):
    """The row of a value."""

    record: Record
    version: str
    #: The version that it had when it was put first: tells it from others of the same key.
    origin: str
    created_ms: int
    updated_ms: int
    expires_ms: int | None
    size_bytes: int
    #: Who wrote it last.
    writer: Writer | None
    #: Where it was put first; long ones are linked to.
    context: list[str | None] | Link
    #: Long ones are linked to.
    value: Any

    @property
    def key(self) -> str:
        """The key within the scope."""
        return self.record.key[2]

    @property
    def charged_bytes(self) -> int:
        """What it counts for in the quota of its scope."""
        return charged_bytes(self.key, self.size_bytes)

    def is_live(self, now_ms: int) -> bool:
        """Is it still to be seen?"""
        return self.expires_ms is None or self.expires_ms > now_ms


def charged_bytes(key: str, size_bytes: int) -> int:
    """What a value of this key counts for in the quota of its scope."""
    return len(key.encode()) + size_bytes


def decode_value(record: Record) -> Stored:
    """The row of a value, whatever it links to left where it is."""

    def stored(told: Any) -> Stored:
        version, origin, created_ms, updated_ms, expires_ms, size_bytes, writer, *rest = told
        context, value = rest
        return Stored(
            record,
            version,
            origin,
            created_ms,
            updated_ms,
            expires_ms,
            size_bytes,
            None if writer is None else tuple(writer),
            context,
            value,
        )

    return _decode(record, stored)


def value_in_row(draft: Draft, stored: Any, size_bytes: int) -> Any:
    """The value, or a link to it if it is long."""
    if size_bytes >= _LONG_BYTES:
        return draft.keep(stored)
    return draft.keep_long(stored, least_bytes=_VALUE_IN_ROW_BYTES)


def context_in_row(draft: Draft, context: Context) -> Any:
    """The context, or a link to it if it is long."""
    told = list(context)
    if sum([len(one.encode()) for one in told if one is not None]) >= _LONG_BYTES:
        return draft.keep(told)
    return draft.keep_long(told, least_bytes=_CONTEXT_IN_ROW_BYTES)


class Reset(NamedTuple):
    """The row of a reset."""

    number: int
    id: str
    at_ms: int
    note: Any


def decode_reset(record: Record) -> Reset:
    """The row of a reset."""
    return _decode(record, lambda told: Reset(*told))


def latest_number(record: Record | None) -> int:
    """The generation that a conversation is in."""
    return 0 if record is None else decode_reset(record).number


class Person(NamedTuple):
    """The row that leads from a person to a value."""

    origin: str
    workspace_id: str | None
    bot_id: str | None


def decode_person(record: Record) -> Person:
    """The row that leads from a person to a value."""
    return _decode(record, lambda told: Person(*told))


def _decode(record: Record, decode: Callable[[Any], Decoded]) -> Decoded:
    try:
        return decode(record.value)
    except CasstoreError:
        raise
    except (TypeError, ValueError) as exc:
        raise CorruptionError(f"the record {record.key} of scoped state is damaged") from exc
