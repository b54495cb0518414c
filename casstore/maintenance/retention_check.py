"""Checks the rows of the table ``retention``, and that what they refer to exists."""

from __future__ import annotations

from collections.abc import Sequence

from casstore.engine.protocol import Row, RowKey
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts
from casstore.maintenance.findings import Where
from casstore.maintenance.policy import decode_policy
from casstore.maintenance.rows_check import RowsCheck
from casstore.session import expiry, keys, marks, protection, subjects
from casstore.session.state import decode_head

_TABLE = "retention"


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
        name = self._rows.name_of(key)
        protected = protection.decode(name, row.key, row.value)
        places = [
            RowKey(_TABLE, row.key),
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

        where = Where(name, protected.revision, None, _TABLE, row.key)
        self._facts.ask(codes.PROTECTION_DANGLING, where, places, judge)

    def _subjects(self, row: Row, key: bytes) -> None:
        name = self._rows.name_of(key)
        about = subjects.decode(row.value)
        places = [RowKey(_TABLE, row.key), *[keys.subject_session(one, key) for one in about]]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != row.value or None not in values:
                return None
            lost = about[values.index(None) - 1]
            return f"session {name!r} is about {lost!r}, but the index of subjects lacks it there"

        self._facts.ask(codes.SUBJECTS_WRONG, Where(name, table=_TABLE, key=row.key), places, judge)

    def _index(self, row: Row, key: bytes) -> None:
        name = row.value.decode()
        places = [RowKey(_TABLE, row.key), keys.subjects(key)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != row.value:
                return None
            about = subjects.decode(values[1])
            if any(keys.subject_session(one, key).key == row.key for one in about):
                return None
            return f"the index of subjects has session {name!r} under a subject that it lacks"

        self._facts.ask(codes.SUBJECTS_WRONG, Where(name, table=_TABLE, key=row.key), places, judge)
