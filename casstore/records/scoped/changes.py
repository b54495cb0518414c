"""The rows that change with the values of a scope: its counts, and the index by person.

Every removal of values goes through ``remove_values`` or ``forget``, so the counts stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from casstore.errors import CorruptionError
from casstore.records.schema import Key, RowPlace
from casstore.records.scoped.scope_keys import Context
from casstore.records.scoped.tables import PersonRow, ScopedTables, ScopeRow, ValueRow
from casstore.session.records import Draft, Record, find_records

#: The most values that one write removes.
REMOVED_AT_ONCE: Final = 512
#: Called between two writes with the number of values removed so far.
Progress = Callable[[int], None]


class Erased(NamedTuple):
    """What an erasure removed.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> run = state.begin_run("run-1", context, caller="me/agent")
    >>> state.erase_actor("anna")
    Erased(values=1, runs=1)
    """

    values: int
    runs: int


def known(row: ScopeRow | None, key: str) -> ScopeRow:
    """The row of a scope that has values; CorruptionError if it is missing."""
    if row is None:
        raise CorruptionError(f"scope {key} has values and no row of its own; check the store")
    return row


def changed(
    row: ScopeRow,
    *,
    gone: Sequence[ValueRow] = (),
    come_bytes: int | None = None,
    expires_ms: int | None = None,
) -> ScopeRow:
    """The row of a scope after a change: values that were removed, and one that was put."""
    times = [time for time in (row.soonest_ms, expires_ms) if time is not None]
    return row._replace(
        changes=row.changes + 1,
        keys=row.keys - len(gone) + (come_bytes is not None),
        size_bytes=row.size_bytes - sum([one.charged_bytes for one in gone]) + (come_bytes or 0),
        soonest_ms=min(times, default=None),
    )


def put_scope(tables: ScopedTables, draft: Draft, row: ScopeRow, before: ScopeRow | None) -> None:
    """Add the row of a scope to a draft, or its deletion if the scope has no values left."""
    if row.keys < 0 or (row.keys == 0) != (row.size_bytes == 0):
        raise CorruptionError(
            f"scope {row.scope_key} would count {row.keys} values of {row.size_bytes} bytes: its "
            "counts are wrong; check the store"
        )
    if row.keys:
        tables.scopes.put(draft, row, before)
    else:
        tables.scopes.remove(draft, row)


def put_value(
    tables: ScopedTables,
    draft: Draft,
    scope: str,
    context: Context,
    value: ValueRow,
    before: ValueRow | None = None,
) -> None:
    """Add a value to a draft, and its index rows: by its writer, and the subject of its scope."""
    tables.values.put(draft, value)
    people = set()
    if context.actor is not None and (before is None or before.writer != context.actor):
        people.add(context.actor)
    if before is None and scope == "subject" and context.subject is not None:
        people.add(context.subject)
    for person in sorted(people):
        place = (context.workspace_id, context.bot_id)
        lead = (value.scope_key, value.generation, value.key, value.origin)
        tables.people.put(draft, PersonRow(person[0], person[1], *lead, *place))


def forget(tables: ScopedTables, draft: Draft, value: ValueRow) -> None:
    """Add to a draft the deletion of a value, and of its index row under its last writer."""
    draft.delete(tables.values, value.row_key)
    if value.writer is not None:
        draft.delete(tables.people, (*value.writer, *value.row_key))


def remove_values(
    tables: ScopedTables, draft: Draft, wanted: Sequence[tuple[Key, str | None]]
) -> int:
    """Add to a draft the deletion of values by key; returns how many exist.

    With an origin, a value of that key with another origin stays.
    """
    places = sorted({key[:2] for key, _ in wanted})
    asked: list[RowPlace] = [(tables.scopes, place) for place in places]
    asked += [(tables.values, key) for key, _ in wanted]
    found = find_records(tables.store, asked)
    heads = dict(zip(places, found[: len(places)], strict=True))
    going: dict[Key, list[ValueRow]] = {place: [] for place in places}
    for (key, origin), record in zip(wanted, found[len(places) :], strict=True):
        stored = tables.values.decode_found(record)
        if stored is not None and origin in (None, stored.origin):
            going[key[:2]].append(stored)
    for place, gone in going.items():
        if not gone:
            continue
        record = heads[place]
        draft.expect(tables.scopes, place, record)
        head = known(tables.scopes.decode_found(record), place[0])
        for stored in gone:
            forget(tables, draft, stored)
        put_scope(tables, draft, changed(head, gone=gone), head)
    return sum([len(gone) for gone in going.values()])


class Late(NamedTuple):
    """Values that have expired, and when the next of the others expires."""

    gone: list[ValueRow]
    soonest_ms: int | None


def find_late(
    tables: ScopedTables, values: Iterable[Record], now_ms: int, *, every: bool = False
) -> Late:
    """The values of a scope that have expired: as many as one write removes, or every one."""
    gone: list[ValueRow] = []
    soonest_ms: int | None = None
    for record in values:
        value = tables.values.decode(record)
        if value.expires_ms is None:
            continue
        if not value.is_live(now_ms) and (every or len(gone) < REMOVED_AT_ONCE):
            gone.append(value)
        elif soonest_ms is None or value.expires_ms < soonest_ms:
            soonest_ms = value.expires_ms
    return Late(gone, soonest_ms)
