"""Scoped state as a record system: scopes, their check, expired values, values of an actor.

The check compares the counts of a scope, versions, and the numbers of resets. The schemas check the
rest: every row decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_id, entry_keys
from casstore.records.schema import RowTable, number_text, tables_of
from casstore.records.schema_check import judges
from casstore.records.scoped import expiry
from casstore.records.scoped.erasure import ActorErasure
from casstore.records.scoped.tables import (
    LATEST,
    RESETS,
    SCHEMAS,
    SCOPE_ROWS,
    ResetRow,
    ScopedTables,
    ScopeRow,
    ValueRow,
)
from casstore.session.records import Record
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
            times = [row.updated_ms for row in tables.values.rows(*place)]
            changed_at_ms = max(times, default=None)
            title = f"{place[0].partition(':')[0]}, {tables.scopes.decode(record).keys} values"
            size_bytes = tables.scopes.size_bytes(*place) + tables.values.size_bytes(*place)
            found.append(SystemEntry(entry_id(place), title, changed_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """The checks of counts, versions, resets, and the index of values by person."""
        own = ScopedCheck(store, facts)
        tables = [RowTable(store, schema) for schema in SCHEMAS]
        # ``people`` gets no check of its own: its rows may lead to removed values until expiry.
        return judges(store, facts, tables, {RESETS: own.reset}, {SCOPE_ROWS: own.scope})

    def expire(self, store: Store, progress: Callable[[int], None]) -> int:
        """Remove expired values and runs, and index rows that lead to none; returns how many."""
        return sum(expiry.sweep(store, progress))

    def erasure(self) -> ActorErasure:
        """Values and runs of the actor whose id is the subject."""
        return ActorErasure()


# --- the check ------------------------------------------------------------------------------------


class ScopedCheck:
    """Checks the records of scoped state."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = ScopedTables(store)
        self._facts = facts

    def scope(self, head: ScopeRow) -> Iterator[Wrong]:
        """Compare the counts of a scope, its soonest expiry and its versions with its values."""
        key = SCOPE_ROWS.key(head)
        keys = size_bytes = 0
        soonest_ms: int | None = None
        strange: ValueRow | None = None
        for stored in self._tables.values.rows(*key):
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

    def reset(self, record: Record, reset: ResetRow) -> None:
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


SYSTEM: Final = ScopedSystem()
