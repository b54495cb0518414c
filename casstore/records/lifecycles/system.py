"""The three lifecycles as a record system: what they store, its check, records of a subject."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import (
    RecordSystem,
    SystemEntry,
    check_limit,
    entry_id,
    entry_key,
)
from casstore.records.lifecycles.check import CODES, LifecyclesCheck
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.tables import SCHEMAS, LifecycleTables
from casstore.records.schema import RowTable, tables_of
from casstore.session.records import Table
from casstore.store import Store


class LifecyclesSystem(RecordSystem):
    """Sessions of agents with their checkpoints, data of users, and collections of records."""

    name = "life"
    version = 1
    title = "Lifecycles"
    tables = tables_of(*SCHEMAS)
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """A page of sessions of agents, then collections of records, then users by their hashes."""
        check_limit(limit)
        return list(islice(_entries(LifecycleTables(store), after), limit))

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """The checks of labels, counts of users' values, notes, seals and indexes."""
        return LifecyclesCheck(store, facts).judges()

    def erasure(self) -> LifecycleErasure:
        """The erasure provider, for a store without key store and secret."""
        return LifecycleErasure()


def _entries(tables: LifecycleTables, after: str | None) -> Iterator[SystemEntry]:
    # For each kind: the table of owners, the table of an owner's rows, and a title.
    kinds: dict[str, tuple[Table, RowTable[Any], str]] = {
        "agent": (tables.sessions, tables.checkpoints, "an agent's session"),
        "collection": (tables.records, tables.records, "a collection of records"),
        "user": (tables.people, tables.users, "data of a user"),
    }
    reached = None if after is None else entry_key(after, 2)
    for kind, (owners, owned, title) in kinds.items():
        if reached is not None and kind < reached[0]:
            continue
        behind = (reached[1],) if reached is not None and kind == reached[0] else None
        for (owner,) in owners.groups(1, after=behind):
            size_bytes = owned.size_bytes(owner)
            if owners is not owned:
                size_bytes += owners.size_bytes(owner)
            rows = owned.read_each(owned.scan(owner), owned.decode)
            changed_at_ms = max([row.at_ms for row in rows], default=None)
            yield SystemEntry(entry_id((kind, owner)), title, changed_at_ms, size_bytes)


SYSTEM: Final = LifecyclesSystem()
