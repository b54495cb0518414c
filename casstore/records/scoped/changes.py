"""What every change to the values of a scope does to its other rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from casstore.errors import CorruptionError
from casstore.records.scoped.layout import Head, Stored, Tables, decode_value
from casstore.records.scoped.scope_keys import Context
from casstore.session.records import Draft, Record

#: How many values one write removes at the most.
REMOVED_AT_ONCE: Final = 512

#: The key of a scope and the generation.
Place = tuple[str, str]


def known(head: Head | None, key: str) -> Head:
    """The row of a scope that has values."""
    if head is None:
        raise CorruptionError(f"scope {key} has values and no row of its own; check the store")
    return head


def changed(
    head: Head,
    *,
    gone: Sequence[Stored] = (),
    come_bytes: int | None = None,
    expires_ms: int | None = None,
) -> Head:
    """The row of a scope after a change: values that went, and one that came."""
    times = [time for time in (head.soonest_ms, expires_ms) if time is not None]
    return head._replace(
        changes=head.changes + 1,
        keys=head.keys - len(gone) + (come_bytes is not None),
        size_bytes=head.size_bytes - sum([one.charged_bytes for one in gone]) + (come_bytes or 0),
        soonest_ms=min(times, default=None),
    )


def put_head(
    tables: Tables, draft: Draft, place: Place, head: Head, *, first: bool = False
) -> None:
    """Write the row of a scope; it goes with the last value."""
    if head.keys < 0 or (head.keys == 0) != (head.size_bytes == 0):
        raise CorruptionError(f"scope {place[0]} has lost count of its values; check the store")
    if not head.keys:
        draft.delete(tables.scopes, place)
        if head.conversation is not None:
            draft.delete(tables.conversations, (head.conversation, *place))
        return
    draft.put(tables.scopes, place, list(head))
    if first and head.conversation is not None:
        draft.put(tables.conversations, (head.conversation, *place), None)


def put_leads(
    tables: Tables,
    draft: Draft,
    scope: str,
    context: Context,
    key: tuple[str, str, str],
    origin: str,
    before: Stored | None = None,
) -> None:
    """Lead to a value from who writes it, and from whom its scope is about."""
    people = set()
    if context.actor is not None and (before is None or before.writer != context.actor):
        people.add(context.actor)
    if before is None and scope == "subject" and context.subject is not None:
        people.add(context.subject)
    for person in sorted(people):
        draft.put(tables.people, (*person, *key), [origin, context.workspace_id, context.bot_id])


def forget(tables: Tables, draft: Draft, stored: Stored) -> None:
    """Remove a value, and what leads to it from its last writer."""
    draft.delete(tables.values, stored.record.key)
    if stored.writer is not None:
        draft.delete(tables.people, (*stored.writer, *stored.record.key))


class Late(NamedTuple):
    """Values whose time is up, as many as were asked for; when the others' is."""

    gone: list[Stored]
    soonest_ms: int | None


def find_late(values: Iterable[Record], now_ms: int, *, every: bool = False) -> Late:
    """Those of a scope's values whose time is up: as many as one write removes, or every one."""
    gone: list[Stored] = []
    soonest_ms: int | None = None
    for record in values:
        stored = decode_value(record)
        if stored.expires_ms is None:
            continue
        if not stored.is_live(now_ms) and (every or len(gone) < REMOVED_AT_ONCE):
            gone.append(stored)
        elif soonest_ms is None or stored.expires_ms < soonest_ms:
            soonest_ms = stored.expires_ms
    return Late(gone, soonest_ms)
