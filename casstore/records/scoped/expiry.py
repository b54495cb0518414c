"""Expiry of scoped state: removes expired values and runs, and index rows that lead to none.

A **lead** is an index row from a person to a value, or from an actor to a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, starmap
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.records.schema import Key, RowTable
from casstore.records.scoped.changes import (
    REMOVED_AT_ONCE,
    changed,
    find_late,
    forget,
    put_scope,
)
from casstore.records.scoped.tables import ScopedTables
from casstore.session.attempts import transact, write_unchanged
from casstore.session.records import Draft, Record, Table
from casstore.store import Store


class Swept(NamedTuple):
    """How many values, runs and leads were removed."""

    values: int
    runs: int
    #: Leads whose value or run was gone already.
    leads: int


def sweep(store: Store, progress: Callable[[int], None]) -> Swept:
    """Remove values and runs that have expired, unless another writer changes them meanwhile.

    Calls ``progress`` with the number of records read so far; an exception from it ends the work.
    """
    tables = ScopedTables(store)
    counting = _RecordCounter(progress)
    now_ms = store.engine.now_ms()
    values = 0
    for record in counting.through(tables.scopes.scan()):
        soonest_ms = tables.scopes.decode(record).soonest_ms
        if soonest_ms is not None and soonest_ms <= now_ms:
            values += _sweep_scope(tables, counting, record.key, now_ms)
    known = tables.runs.read_each(
        counting.through(tables.runs.scan()), lambda record: (record, tables.runs.decode(record))
    )
    late = ((record, run) for record, run in known if run.expires_ms <= now_ms)
    runs = _remove(tables.runs, late, store)
    leads = _remove(tables.people, _astray(tables, counting), store)
    leads += _remove(tables.run_actors, _runless(tables, counting), store)
    return Swept(values, runs, leads)


class _RecordCounter:
    """Counts the records read, and reports the number to ``progress``."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._seen = 0

    def through(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, counted as they go by."""
        for record in records:
            self._seen += 1
            self._progress(self._seen)
            yield record


def _sweep_scope(tables: ScopedTables, counting: _RecordCounter, place: Key, now_ms: int) -> int:
    """Remove the values of a scope that have expired; returns how many."""

    def attempt() -> int | None:
        """Remove one batch; returns how many, or None if the scope needs no change."""
        # Read the scope's row before its values: every write to a value changes the row, so the
        # condition on it covers the values.
        record = tables.scopes.find(*place)
        if record is None:
            return None
        head = tables.scopes.decode(record)
        late = find_late(tables, counting.through(tables.values.scan(*place)), now_ms)
        if not late.gone and head.soonest_ms == late.soonest_ms:
            return None
        draft = Draft(tables.store)
        draft.expect(tables.scopes, place, record)
        for stored in late.gone:
            forget(tables, draft, stored)
        after = changed(head, gone=late.gone)._replace(soonest_ms=late.soonest_ms)
        put_scope(tables, draft, after, head)
        draft.commit()
        return len(late.gone)

    gone = 0
    while (count := transact(f"scope {place[0]}", attempt)) is not None:
        gone += count
    return gone


def _astray(tables: ScopedTables, counting: _RecordCounter) -> Iterator[tuple[Record, None]]:
    """Leads to a value that is gone, or that a later value of the same key has replaced."""
    leads = counting.through(tables.people.scan())
    while some := list(islice(leads, REMOVED_AT_ONCE)):
        found = tables.values.find_many([one.key[2:] for one in some])
        for lead, record in zip(some, found, strict=True):
            value = tables.values.decode_found(record)
            if value is None or value.origin != tables.people.decode(lead).origin:
                yield lead, None


def _runless(tables: ScopedTables, counting: _RecordCounter) -> Iterator[tuple[Record, None]]:
    """Leads to a run that is gone: copying a store can leave such rows."""
    leads = counting.through(tables.run_actors.scan())
    while some := list(islice(leads, REMOVED_AT_ONCE)):
        found = tables.runs.find_many([one.key[2:] for one in some])
        yield from ((lead, None) for lead, run in zip(some, found, strict=True) if run is None)


def _remove(table: Table, found: Iterable[tuple[Record, Any]], store: Store) -> int:
    """Delete records and their index rows, unless another writer changes them; returns how many."""

    def removal(record: Record, row: Any) -> Write:
        draft = Draft(store)
        draft.expect(table, record.key, record)
        if row is not None and isinstance(table, RowTable):
            table.remove(draft, row)
        else:
            draft.delete(table, record.key)
        return draft.as_write()

    return sum(1 for _ in write_unchanged(store.engine, starmap(removal, found)))
