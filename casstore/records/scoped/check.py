"""The check of scoped state: the counts of a scope, versions, and the numbers of resets.

The schemas check the rest: every row decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.records.schema import RowTable, number_text
from casstore.records.schema_check import RowCheck, judges
from casstore.records.scoped.layout import LATEST, ResetRow, ScopedTables, ScopeRow, ValueRow
from casstore.session.records import Record, Table
from casstore.store import Store


class ScopedCheck:
    """Checks the records of scoped state."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._store = store
        self._tables = ScopedTables(store)
        self._facts = facts

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        tables = self._tables
        # ``people`` gets no check of its own: its rows may lead to removed values until expiry.
        own = [table for table in vars(tables).values() if isinstance(table, RowTable)]
        checks: dict[Table, RowCheck] = {tables.scopes: self._scope, tables.resets: self._reset}
        return judges(self._store, self._facts, own, checks)

    def _scope(self, record: Record, row: ScopeRow) -> None:
        table = self._tables.scopes
        self._facts.count(
            table.place(*record.key),
            lambda found: self._look(record.key, table.row_of(record.key, found)),
        )

    def _look(self, key: tuple[str, ...], head: ScopeRow) -> Iterator[Wrong]:
        keys = size_bytes = 0
        soonest_ms: int | None = None
        strange: ValueRow | None = None
        for record in self._tables.values.scan(*key):
            stored = self._tables.values.decode(record)
            keys += 1
            size_bytes += stored.charged_bytes
            if stored.expires_ms is not None:
                soonest_ms = min(soonest_ms or stored.expires_ms, stored.expires_ms)
            if not _was_given(stored.version, head):
                strange = stored
        where = where_is(self._tables.scopes, key)
        if (keys, size_bytes) != (head.keys, head.size_bytes):
            says = (
                f"scope {key[0]} counts {head.keys} values of {head.size_bytes} bytes, and has "
                f"{keys} of {size_bytes}"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        if soonest_ms is not None and (head.soonest_ms is None or head.soonest_ms > soonest_ms):
            says = (
                f"a value of scope {key[0]} expires at {soonest_ms}, but the scope's row says that "
                f"none expires before {head.soonest_ms}"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        if strange is not None:
            says = (
                f"value {strange.key!r} of scope {key[0]} has version {strange.version}, which "
                f"the scope, now at version {head.version}, has not issued"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def _reset(self, record: Record, reset: ResetRow) -> None:
        """Check that numbers have no gap, and that the latest reset is under LATEST too."""
        table = self._tables.resets
        conversation, number = record.key
        before = number_text(reset.number - 1)
        places = [table.place(*record.key), table.place(conversation, LATEST)]
        if number == LATEST:
            places.append(table.place(conversation, number_text(reset.number)))
        elif reset.number > 1:
            places.append(table.place(conversation, before))

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, latest, *other = values
            if own != record.row:
                return None
            if number != LATEST and number != number_text(reset.number):
                return f"reset {reset.number} of a conversation is stored under {number!r}"
            if latest is None:
                return f"reset {reset.number} of a conversation has no row for the latest reset"
            if number == LATEST:
                return None if other == [own] else "the latest reset of a conversation is lost"
            if table.row_of((conversation, LATEST), latest).number < reset.number:
                return f"reset {reset.number} of a conversation is later than its latest reset"
            return f"reset {reset.number - 1} of a conversation is lost" if None in other else None

        self._facts.ask(codes.RECORD_COUNT_WRONG, where_is(table, record.key), places, judge)


def _was_given(version: str, head: ScopeRow) -> bool:
    """Whether a scope can have issued this version, up to its latest change."""
    birth, _, number = version.rpartition("-")
    return birth == head.birth and 0 < int(number) <= head.changes
