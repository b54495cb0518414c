"""The check of the table ``records``: what each row links to is stored, and its system agrees.

The check meets rows in the order of their keys, so one system after the other. With the first row
of a system it loads the system, which gives a function for each of its tables (``systems``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from casstore.engine.protocol import Row
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError
from casstore.maintenance import findings as codes
from casstore.maintenance import systems
from casstore.maintenance.consistency import Facts
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.retention_check import RetentionCheck
from casstore.maintenance.rows_check import RowsCheck
from casstore.session.records import Record, Table, row_links
from casstore.store import Store

_TABLE: Final = "records"


class _Checked(NamedTuple):
    """A system whose rows are being checked."""

    name: str | None
    #: By the prefix of the keys of each table.
    judges: dict[bytes, tuple[Table, Callable[[Record], None]]]
    #: The key prefixes of all its tables, also of those that it does not check.
    known: frozenset[bytes]
    #: Why rows of other tables are not checked.
    why: str


class RecordsCheck:
    """Checks records, and rows of retention, while ``RowsCheck`` reads them.

    ``whole``: systems check everything, also what takes reading every object.
    """

    def __init__(self, store: Store, rows: RowsCheck, found: Findings, *, whole: bool) -> None:
        self._store = store
        self._rows = rows
        self._found = found
        self._whole = whole
        self._facts = Facts(rows, found)
        self._system = _Checked("", {}, frozenset(), "")
        #: How many rows were not checked, by table and reason.
        self._unchecked: Counter[tuple[str, str]] = Counter()
        rows.judge_with("retention", RetentionCheck(rows, self._facts).judge)
        rows.judge_with(_TABLE, self._judge)

    def _judge(self, row: Row) -> None:
        links = row_links(row.value)
        if links and self._store.engine.missing(links):
            for digest in links:
                self._rows.require_object(_TABLE, row, digest)
        name = systems.name_of(row.key)
        if name is None:
            return
        if name != self._system.name:
            self._system = self._load(name)
        start = row.key.partition(b"\0")[0] + b"\0"
        known = self._system.judges.get(start)
        if known is not None:
            self._judge_record(known[0].record_of(row), known[1], links)
        elif start not in self._system.known:
            table = start[:-1].decode(errors="backslashreplace")
            self._unchecked[table, self._system.why] += 1

    def _load(self, name: str) -> _Checked:
        system = systems.load(name)
        if isinstance(system, str):
            return _Checked(name, {}, frozenset(), f"system {name!r} is not installed: {system}")
        self._found.add_codes(system.codes)
        judges = system.check(self._store, self._facts, whole=self._whole)
        return _Checked(
            name,
            {table.keys.start: (table, judge) for table, judge in judges.items()},
            frozenset([table.encode() + b"\0" for table in system.tables]),
            f"version {system.version} of system {name!r} has no such table",
        )

    @staticmethod
    def _judge_record(record: Record, judge: Callable[[Record], None], links: list[bytes]) -> None:
        try:
            judge(record)
        except ObjectNotFoundError:
            # Reported already, as a missing object that the row, or an object below it, names.
            return
        except CorruptionError:
            if not links or _is_readable(record):
                raise

    def settle(self) -> None:
        """Judge what is left to judge, and report what was not checked."""
        self._facts.settle()
        for (table, why), rows in self._unchecked.items():
            what = f"{rows} rows of records table {table!r} were not checked: {why}"
            self._found.add(codes.RECORDS_UNCHECKED, what, Where(table=_TABLE))


def _is_readable(record: Record) -> bool:
    """Can what a record links to be read? If not, that was reported with the objects."""
    try:
        _ = record.value
    except CasstoreError:
        return False
    return True
