"""Removes everything that belongs to one owner: a user's values, or a session's checkpoints.

One write removes up to ``AT_ONCE`` rows. The owner's row is a condition of the write: a writer that
adds a row changes the owner's row, so no row is added unnoticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import islice
from typing import Final

from casstore.records.lifecycles.annotation import Note
from casstore.records.lifecycles.notes import Stayed, note_of, objection
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.tables import LifecycleChange, LifecycleTables
from casstore.records.schema import RowPlace
from casstore.session.records import Record, Table

#: The most rows that one write removes.
AT_ONCE: Final = 5000


class Emptying(ABC):
    """Removes the rows of one owner."""

    def __init__(self, tables: LifecycleTables, owner: RowPlace, kind: str, table: Table) -> None:
        self._tables = tables
        self._owner = owner
        self._kind = kind
        self._table = table
        self._passed: set[str] = set()
        # What the current attempt of a write removes, and what stays; counted when it is written.
        self._gone: list[Note | None] = []
        self._staying: list[Stayed] = []
        self._is_last = False
        self.deleted = 0
        self.stayed: list[Stayed] = []
        #: Third parties that received some of the removed records.
        self.processors: set[str] = set()

    def run(self) -> None:
        """Remove every row that is neither sealed nor held."""
        while not self._is_last:
            self._tables.change(f"the records of {self._owner[1][0]!r}", self._step)
            self.deleted += len(self._gone)
            self.stayed += self._staying
            self._passed.update(stays.ref.name for stays in self._staying)
            for note in self._gone:
                self.processors.update(() if note is None else note.processors)

    def _step(self, change: LifecycleChange) -> None:
        tables, owner = self._tables, self._owner[1][0]
        known = change.read([self._owner])[0]
        left = (row for row in self._table.scan(owner) if row.key[1] not in self._passed)
        rows = list(islice(left, AT_ONCE + 1))
        self._is_last = len(rows) <= AT_ONCE
        rows = rows[:AT_ONCE]
        refs = [Ref(self._kind, *row.key) for row in rows]
        for ref, row in zip(refs, rows, strict=True):
            change.draft.expect(*tables.payload(ref), row)
        notes = change.read([tables.note(ref) for ref in refs])
        now_ms = tables.store.engine.now_ms()
        self._gone, self._staying = [], []
        for ref, row, noted in zip(refs, rows, notes, strict=True):
            note = note_of(noted)
            stays = objection(ref, note, now_ms)
            if stays is not None:
                self._staying.append(stays)
            else:
                self._drop(change, ref, row, note, known)
                self._gone.append(note)
        if known is not None:
            self._leave(change, known, len(self._gone), is_last=self._is_last)

    @abstractmethod
    def _drop(
        self,
        change: LifecycleChange,
        ref: Ref,
        row: Record,
        note: Note | None,
        owner: Record | None,
    ) -> None:
        """Remove one row, its note and its indexes."""

    @abstractmethod
    def _leave(self, change: LifecycleChange, owner: Record, gone: int, *, is_last: bool) -> None:
        """Update the owner's row after ``gone`` rows were removed."""

    @property
    def _any_stay(self) -> bool:
        return bool(self.stayed or self._staying)
