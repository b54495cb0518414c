"""The checks of ``records`` and ``retention``, the tables whose rows must agree with other rows.

``RowsCheck`` requires what a record links to; here the system of the record says whether it is in
order. The check meets rows in the order of their keys, so one system after the other. With the
first row of a system it loads the system, which gives a function for each of its tables
(``systems``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import Row, RowKey
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError
from casstore.maintenance import findings as codes
from casstore.maintenance import systems
from casstore.maintenance.consistency import Facts
from casstore.maintenance.findings import Findings, Where
from casstore.maintenance.policy import decode_policy
from casstore.maintenance.rows_check import RowsCheck, name_of
from casstore.session import expiry, keys, marks, protection, subjects
from casstore.session.records import Record, Table, row_links
from casstore.session.state import decode_head
from casstore.store import Store

_TABLE: Final = "records"
_RETENTION: Final = "retention"


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
        rows.judge_with(_RETENTION, RetentionCheck(rows, self._facts).judge)
        rows.judge_with(_TABLE, self._judge)

    def _judge(self, row: Row) -> None:
        name = systems.name_of(row.key)
        if name is None:
            return
        if name != self._system.name:
            self._system = self._load(name)
        start = row.key.partition(b"\0")[0] + b"\0"
        known = self._system.judges.get(start)
        if known is not None:
            self._judge_record(row, *known)
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
    def _judge_record(row: Row, table: Table, judge: Callable[[Record], None]) -> None:
        record = table.record_of(row)
        try:
            judge(record)
        except ObjectNotFoundError:
            # Reported already, as a missing object that the row, or an object below it, names.
            return
        except CorruptionError:
            if not row_links(row.value) or _is_readable(record):
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


# --- the table retention --------------------------------------------------------------------------


class RetentionCheck:
    """Checks the rows of the table ``retention``."""

    def __init__(self, rows: RowsCheck, facts: Facts) -> None:
        self._rows = rows
        self._facts = facts

    def judge(self, row: Row) -> None:
        """Check one row; CasstoreError or ValueError if it is not valid."""
        key = keys.retention_session(row.key)
        if key is None:
            if row.key == keys.policy(None).key:
                decode_policy(row.value)
            elif row.key != keys.sign().key:
                marks.marked_at_ms(row.value)
        elif row.key == keys.policy(key).key:
            decode_policy(row.value)
        elif row.key == keys.expiry(key).key:
            expiry.decode(row.value)
        elif row.key == keys.subjects(key).key:
            self._subjects(row, key)
        elif row.key.startswith(keys.protections(key)):
            self._protection(row, key)
        elif row.key.startswith(keys.marks(key)):
            marks.marked_at_ms(row.value)
        elif row.key == keys.unfinished(key).key:
            row.value.decode()
        else:
            self._index(row, key)

    def _protection(self, row: Row, key: bytes) -> None:
        name = name_of(key)
        protected = protection.decode(name, row.key, row.value)
        places = [
            RowKey(_RETENTION, row.key),
            RowKey("heads", key),
            RowKey("history", keys.history(key, protected.revision)),
            RowKey("tombstones", key),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, head, revision, deleted = values
            # If the session was deleted, the deletion removes this row, too.
            if own != row.value or revision is not None or deleted is not None:
                return None
            if head is not None and decode_head(head).revision == protected.revision:
                return None
            return (
                f"{protected.by!r} protects revision {protected.revision} of session {name!r}, "
                "which is not there"
            )

        where = Where(name, protected.revision, None, _RETENTION, row.key)
        self._facts.ask(codes.PROTECTION_DANGLING, where, places, judge)

    def _subjects(self, row: Row, key: bytes) -> None:
        name = name_of(key)
        about = subjects.decode(row.value)
        places = [RowKey(_RETENTION, row.key), *[keys.subject_session(one, key) for one in about]]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != row.value or None not in values:
                return None
            lost = about[values.index(None) - 1]
            return f"session {name!r} is about {lost!r}, but the index of subjects lacks it there"

        where = Where(name, table=_RETENTION, key=row.key)
        self._facts.ask(codes.SUBJECTS_WRONG, where, places, judge)

    def _index(self, row: Row, key: bytes) -> None:
        name = row.value.decode()
        places = [RowKey(_RETENTION, row.key), keys.subjects(key)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != row.value:
                return None
            about = subjects.decode(values[1])
            if any(keys.subject_session(one, key).key == row.key for one in about):
                return None
            return f"the index of subjects has session {name!r} under a subject that it lacks"

        where = Where(name, table=_RETENTION, key=row.key)
        self._facts.ask(codes.SUBJECTS_WRONG, where, places, judge)
