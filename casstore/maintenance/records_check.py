"""Records and the rows of retention: does what stands twice agree?

Every system of records knows which of its facts stand in more than one row: an index, a count,
a mirror, an order. Each row is handed to the judge of its table, which asks for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from casstore.engine.protocol import Row
from casstore.errors import CasstoreError, CorruptionError, ObjectNotFoundError
from casstore.maintenance.findings import Findings
from casstore.maintenance.lifecycles_check import LifecyclesCheck
from casstore.maintenance.log_check import LogCheck
from casstore.maintenance.record_facts import Facts
from casstore.maintenance.retention_check import RetentionCheck
from casstore.maintenance.rows_check import RowsCheck
from casstore.maintenance.runs_check import RunsCheck
from casstore.maintenance.scoped_check import ScopedCheck
from casstore.session.records import Record, Table, row_links
from casstore.store import Store

_TABLE: Final = "records"

#: What looks at the records of each table.
Judges = Mapping[Table, Callable[[Record], None]]


class RecordsCheck:
    """Has all records and rows of retention judged while rows are gone through.

    ``whole`` reads all messages of logs, to see that each has its number.
    """

    def __init__(self, store: Store, rows: RowsCheck, found: Findings, *, whole: bool) -> None:
        self._engine = store.engine
        self._rows = rows
        self._facts = Facts(rows, found)
        parts: list[Judges] = [
            LogCheck(store, self._facts, whole=whole).judges(),
            RunsCheck(store, self._facts).judges(),
            ScopedCheck(store, self._facts).judges(),
            LifecyclesCheck(store, self._facts).judges(),
        ]
        self._judges = {
            table.keys.start: (table, judge) for part in parts for table, judge in part.items()
        }
        rows.judge_with("retention", RetentionCheck(rows, self._facts).judge)
        rows.judge_with(_TABLE, self._judge)

    def _judge(self, row: Row) -> None:
        links = row_links(row.value)
        if links and self._engine.missing(links):
            for digest in links:
                self._rows.require_object(_TABLE, row, digest)
        table, _, _ = row.key.partition(b"\0")
        known = self._judges.get(table + b"\0")
        if known is None:
            # Somebody's own table; what it means they know.
            return
        record = known[0].record_of(row)
        try:
            known[1](record)
        except ObjectNotFoundError:
            # Told already as something that the row, or an object below it, names.
            return
        except CorruptionError:
            if not links or _is_readable(record):
                raise

    def settle(self) -> None:
        """Judge what is left to judge."""
        self._facts.settle()


def _is_readable(record: Record) -> bool:
    """Can what a record links to be read? If not, that was told of the objects."""
    try:
        _ = record.value
    except CasstoreError:
        return False
    return True
