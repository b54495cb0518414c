"""Removing what nobody sees any more: values and runs whose time is up, and what led to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from casstore.errors import ConditionFailedError
from casstore.records.scoped.changes import (
    REMOVED_AT_ONCE,
    Place,
    changed,
    find_late,
    forget,
    put_head,
)
from casstore.records.scoped.layout import Tables, decode_head, decode_person, decode_value
from casstore.records.scoped.runs import decode_run
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, Table
from casstore.store import Store


class Swept(NamedTuple):
    """How many were removed."""

    values: int
    runs: int
    #: Records that led from a person to something that is gone.
    leads: int


def sweep(store: Store, pulse: Callable[[int], None]) -> Swept:
    """Remove what has expired, each if it is still as it was found.

    Calls ``pulse`` with the number of records read so far; an exception from it ends the work.
    """
    tables = Tables(store)
    told = _Counting(pulse)
    now_ms = store.engine.now_ms()
    values = 0
    for record in told.through(tables.scopes.scan()):
        soonest_ms = decode_head(record).soonest_ms
        if soonest_ms is not None and soonest_ms <= now_ms:
            values += _sweep_scope(tables, told, (record.key[0], record.key[1]), now_ms)
    known = tables.runs.read_each(
        told.through(tables.runs.scan()), lambda record: (record, decode_run(record).expires_ms)
    )
    late = (record for record, expires_ms in known if expires_ms <= now_ms)
    runs = _remove(tables.runs, late, store)
    leads = _remove(tables.people, _astray(tables, told), store)
    leads += _remove(tables.run_actors, _runless(tables, told), store)
    return Swept(values, runs, leads)


class _Counting:
    """Counts the records read, and reports the number to ``pulse``."""

    def __init__(self, pulse: Callable[[int], None]) -> None:
        self._pulse = pulse
        self._seen = 0

    def through(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, counted as they go by."""
        for record in records:
            self._seen += 1
            self._pulse(self._seen)
            yield record


def _sweep_scope(tables: Tables, told: _Counting, place: Place, now_ms: int) -> int:
    """Remove the values of a scope whose time is up; how many."""
    gone = 0
    attempts = Attempts(f"scope {place[0]}")
    while True:
        attempts.begin()
        while True:
            # First the scope's own row: as long as it is the same, so are its values.
            record = tables.scopes.find(*place)
            if record is None:
                return gone
            head = decode_head(record)
            late = find_late(told.through(tables.values.scan(*place)), now_ms)
            if not late.gone and head.soonest_ms == late.soonest_ms:
                return gone
            draft = Draft(tables.store)
            draft.expect(tables.scopes, place, record)
            for stored in late.gone:
                forget(tables, draft, stored)
            after = changed(head, gone=late.gone)._replace(soonest_ms=late.soonest_ms)
            put_head(tables, draft, place, after)
            try:
                draft.commit()
            except ConditionFailedError:
                break
            gone += len(late.gone)


def _astray(tables: Tables, told: _Counting) -> Iterator[Record]:
    """What leads from a person to a value that is gone, or to another of its key."""
    leads = told.through(tables.people.scan())
    while some := list(islice(leads, REMOVED_AT_ONCE)):
        found = tables.values.find_many([one.key[2:] for one in some])
        for lead, record in zip(some, found, strict=True):
            if record is None or decode_value(record).origin != decode_person(lead).origin:
                yield lead


def _runless(tables: Tables, told: _Counting) -> Iterator[Record]:
    """What leads from an actor to a run that is gone."""
    leads = told.through(tables.run_actors.scan())
    while some := list(islice(leads, REMOVED_AT_ONCE)):
        found = tables.runs.find_many([one.key[2:] for one in some])
        yield from (lead for lead, run in zip(some, found, strict=True) if run is None)


def _remove(table: Table, records: Iterable[Record], store: Store) -> int:
    """Remove records that nobody changes meanwhile; how many."""
    waiting = iter(records)
    removed = 0
    while some := list(islice(waiting, REMOVED_AT_ONCE)):
        while some:
            draft = Draft(store)
            for record in some:
                draft.expect(table, record.key, record)
                draft.delete(table, record.key)
            try:
                draft.commit()
            except ConditionFailedError as exc:
                # Renewed, written again or gone just now: it is not ours any more.
                del some[exc.index]
                continue
            removed += len(some)
            break
    return removed
