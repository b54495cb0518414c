"""The checks that follow from schemas: rows decode, and agree with their indexes and parents.

``judges`` returns, for each table, the function with which ``maintenance.check`` checks a record. A
record system adds checks and counts of its own, which may read rows of the core as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from casstore.engine.protocol import Row
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Wrong, where_is
from casstore.records.schema import IndexTable, RowTable, Schema, key_texts
from casstore.session.records import Record, Table
from casstore.store import Store

#: A check of a record system: called with each record of a table and its row.
RowCheck = Callable[[Record, Any], None]
#: A count of a record system: compares a row with rows that it reads one after the other.
RowCount = Callable[[Any], Iterable[Wrong]]


def judges(
    store: Store,
    facts: Facts,
    tables: Iterable[RowTable[Any]],
    checks: Mapping[Schema[Any], RowCheck] | None = None,
    counts: Mapping[Schema[Any], RowCount] | None = None,
) -> dict[Table, Callable[[Record], None]]:
    """For each table and each of its indexes, the function that checks a record of it.

    ``checks`` and ``counts`` are the system's own, by schema. What a count finds wrong is reported
    only if its row is the same before and after the count.
    """
    found: dict[Table, Callable[[Record], None]] = {}
    indexes: dict[str, list[tuple[RowTable[Any], IndexTable[Any]]]] = {}
    for table in tables:
        check, count = (checks or {}).get(table.schema), (counts or {}).get(table.schema)
        found[table] = _row_judge(store, facts, table, check, count)
        for index in table.indexes:
            indexes.setdefault(index.index.name, []).append((table, index))
    for leading in indexes.values():
        found[leading[0][1]] = _index_judge(facts, leading)
    return found


def _row_judge(
    store: Store,
    facts: Facts,
    table: RowTable[Any],
    check: RowCheck | None,
    count: RowCount | None,
) -> Callable[[Record], None]:
    parents = [(one, RowTable(store, one.schema)) for one in table.schema.parents]

    def ask_parents(record: Record, row: Any, finds: bool) -> None:
        needed = [
            (one, owners, key_texts(parts))
            for one, owners in parents
            if one.finds is finds and (parts := one.key(row)) is not None
        ]
        if not needed:
            return

        def judge_parents(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row:
                return None
            for (one, owners, key), found in zip(needed, values[1:], strict=True):
                name = f"row {' / '.join(key)!r} of table {owners.schema.name}"
                if found is None:
                    return f"{_title(table, record)} needs {name}, which does not exist"
                if not one.agrees(row, owners.row_of(key, found)):
                    return f"{_title(table, record)} needs {name}, which does not agree with it"
            return None

        places = [table.place(*record.key), *[owners.place(*key) for _, owners, key in needed]]
        code = codes.RECORD_INDEX_WRONG if finds else codes.RECORD_ORPHANED
        facts.ask(code, where_is(table, record.key), places, judge_parents)

    def judge(record: Record) -> None:
        row = table.decode(record)
        indexed = [(index, key) for index in table.indexes for key in index.keys_of(row)]

        def judge_indexes(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row:
                return None
            for (index, key), found in zip(indexed, values[1:], strict=True):
                leads_to = None
                if found is not None:
                    leads_to = index.owner(index.record_of(Row(index.keys.key(key), found)))
                if leads_to is None or (index.index.unique and leads_to != record.key):
                    return f"{_title(table, record)} is not found by index {index.index.name}"
            return None

        if indexed:
            places = [table.place(*record.key), *[one.place(*key) for one, key in indexed]]
            where = where_is(table, record.key)
            facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge_indexes)
        for finds in (False, True):
            ask_parents(record, row, finds)
        if check is not None:
            check(record, row)
        if count is not None:
            facts.count(
                table.place(*record.key), lambda found: count(table.row_of(record.key, found))
            )

    return judge


def _title(table: RowTable[Any], record: Record) -> str:
    return f"row {' / '.join(record.key)!r} of table {table.schema.name}"


def _index_judge(
    facts: Facts, leading: Sequence[tuple[RowTable[Any], IndexTable[Any]]]
) -> Callable[[Record], None]:
    """The function that checks whether an index row leads to a row that has this index key."""

    def judge(record: Record) -> None:
        owners = [
            (table, index, key)
            for table, index in leading
            if (key := index.owner(record)) is not None
        ]
        own = leading[0][1]
        places = [own.place(*record.key), *[table.place(*key) for table, _, key in owners]]

        def judge_owners(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row:
                return None
            for (table, index, key), found in zip(owners, values[1:], strict=True):
                if found is not None and record.key in index.keys_of(table.row_of(key, found)):
                    return None
            name = f"row {' / '.join(record.key)!r} of index {own.index.name}"
            return f"{name} leads to a row that does not exist, or that has another index key"

        facts.ask(codes.RECORD_INDEX_WRONG, where_is(own, record.key), places, judge_owners)

    return judge
