"""The check of lifecycles: counts of users' values, and seals.

The schemas check the rest: every row decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from casstore.format.digest import plain_hash
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, Meaning
from casstore.records.lifecycles.tables import LifecycleTables, NoteRow, UserRow
from casstore.records.schema import RowTable
from casstore.records.schema_check import RowCheck, judges
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


class LifecyclesCheck:
    """Checks the records of the lifecycles."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._store = store
        self._tables = LifecycleTables(store)
        self._facts = facts

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        tables = self._tables
        own = [table for table in vars(tables).values() if isinstance(table, RowTable)]
        checks: dict[Table, RowCheck] = {tables.people: self._user, tables.notes: self._note}
        return judges(self._store, self._facts, own, checks)

    def _user(self, record: Record, row: UserRow) -> None:
        table = self._tables.people
        self._facts.count(
            table.place(*record.key), lambda found: self._look(table.row_of(record.key, found))
        )

    def _look(self, row: UserRow) -> Iterator[Wrong]:
        count = sum(1 for _ in self._tables.users.scan(row.user))
        if count != row.values:
            says = f"user {row.user} counts {row.values} values, and has {count}"
            where = where_is(self._tables.people, [row.user])
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def _note(self, record: Record, row: NoteRow) -> None:
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
