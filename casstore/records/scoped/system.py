"""Scoped state as a record system: scopes, their check, expired values, values of an actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_id, entry_keys
from casstore.records.schema import tables_of
from casstore.records.scoped import expiry
from casstore.records.scoped.check import ScopedCheck
from casstore.records.scoped.erasure import ActorErasure
from casstore.records.scoped.layout import SCHEMAS, ScopedTables
from casstore.store import Store


class ScopedSystem(RecordSystem):
    """Values that a host stores for its runners, by scope."""

    name = "scoped"
    version = 1
    title = "Scoped state"
    tables = tables_of(*SCHEMAS)

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """A page of the scopes, by key and generation."""
        tables = ScopedTables(store)
        found: list[SystemEntry] = []
        for place in entry_keys(tables.scopes, 2, after=after, limit=limit):
            record = tables.scopes.find(*place)
            if record is None:
                continue
            times = tables.values.read_each(
                tables.values.scan(*place), lambda value: tables.values.decode(value).updated_ms
            )
            changed_at_ms = max(times, default=None)
            title = f"{place[0].partition(':')[0]}, {tables.scopes.decode(record).keys} values"
            size_bytes = tables.scopes.size_bytes(*place) + tables.values.size_bytes(*place)
            found.append(SystemEntry(entry_id(place), title, changed_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """The checks of counts, versions, resets, and the index of values by person."""
        return ScopedCheck(store, facts).judges()

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove expired values and runs, and index rows that lead to none; returns how many."""
        return sum(expiry.sweep(store, pulse))

    def erasure(self) -> ActorErasure:
        """Values and runs of the actor whose id is the subject."""
        return ActorErasure()


SYSTEM: Final = ScopedSystem()
