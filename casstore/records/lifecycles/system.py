"""The three lifecycles as a record system: what they store, its check, records of a subject."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

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
from casstore.records.lifecycles.tables import Tables, fields
from casstore.session.records import Record, Table
from casstore.store import Store


class LifecyclesSystem(RecordSystem):
    """Sessions of agents with their checkpoints, data of users, and collections of records."""

    name = "life"
    version = 1
    title = "Lifecycles"
    tables = (
        "life.checkpoints",
        "life.derived",
        "life.doomed",
        "life.imported",
        "life.labels",
        "life.notes",
        "life.people",
        "life.records",
        "life.sessions",
        "life.settings",
        "life.subjects",
        "life.users",
    )
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Sessions of agents, then collections of records, then users by their hashes."""
        check_limit(limit)
        return list(islice(_entries(Tables(store), after), limit))

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Compare labels, counts of users' values, notes, seals and indexes."""
        return LifecyclesCheck(store, facts).judges()

    def erasure(self) -> LifecycleErasure:
        """Records about the subject, in a store without key store and secret."""
        return LifecycleErasure()


def _entries(tables: Tables, after: str | None) -> Iterator[SystemEntry]:
    # Of each kind: the table whose first texts are the owners, that of what they own, and a title.
    kinds: dict[str, tuple[Table, Table, str]] = {
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
            times = owned.read_each(owned.scan(owner), _written_at_ms)
            yield SystemEntry(entry_id((kind, owner)), title, max(times, default=None), size_bytes)


def _written_at_ms(record: Record) -> int:
    return int(fields(record)["t"])


SYSTEM: Final = LifecyclesSystem()
