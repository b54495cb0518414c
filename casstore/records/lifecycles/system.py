"""The three lifecycles as a record system: what they store, its check, records of a subject.

The check compares the counts of users' values, and seals. The schemas check the rest: every row
decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

from casstore.format.digest import plain_hash
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, Meaning
from casstore.maintenance.systems import RecordSystem, SystemEntry, check_limit, entry_id, entry_key
from casstore.records.lifecycles.erasure import LifecycleErasure
from casstore.records.lifecycles.tables import (
    NOTES,
    PEOPLE,
    SCHEMAS,
    LifecycleTables,
    NoteRow,
    UserRow,
)
from casstore.records.schema import RowTable, tables_of
from casstore.records.schema_check import judges
from casstore.session.records import Record, Table
from casstore.store import Store

SEAL_BROKEN: Final = "seal_broken"

#: Findings that only this check reports.
CODES: Final = {
    SEAL_BROKEN: Meaning(
        ERROR, "a record has changed since it was sealed",
        "find out which program changed it without casstore; a backup may have the sealed record",
    ),
}  # fmt: skip


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
        own = LifecyclesCheck(store, facts)
        tables = [RowTable(store, schema) for schema in SCHEMAS]
        return judges(store, facts, tables, {NOTES: own.note}, {PEOPLE: own.user})

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
            changed_at_ms = max([row.at_ms for row in owned.rows(owner)], default=None)
            yield SystemEntry(entry_id((kind, owner)), title, changed_at_ms, size_bytes)


# --- the check ------------------------------------------------------------------------------------


class LifecyclesCheck:
    """Checks the records of the lifecycles."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = LifecycleTables(store)
        self._facts = facts

    def user(self, row: UserRow) -> Iterator[Wrong]:
        """Compare the count of a user's values with the values."""
        count = sum(1 for _ in self._tables.users.scan(row.user))
        if count != row.values:
            says = f"user {row.user} counts {row.values} values, and has {count}"
            where = where_is(self._tables.people, [row.user])
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def note(self, record: Record, row: NoteRow) -> None:
        """Compare a sealed record with the hash in its seal."""
        ref, seal = row.ref, row.note.seal
        if seal is None:
            return
        table, key = self._tables.payload(ref)
        places = [self._tables.notes.place(*record.key), table.place(*key)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, sealed = values
            if own != record.row or sealed is None or plain_hash(sealed).hex() == seal.hash:
                return None
            return f"{ref} has changed since it was sealed for {seal.action!r}"

        self._facts.ask(SEAL_BROKEN, where_is(self._tables.notes, record.key), places, judge)


SYSTEM: Final = LifecyclesSystem()
