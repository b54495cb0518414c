"""Removes records unless they are sealed or held: one, or everything that belongs to one owner.

One write removes up to ``AT_ONCE`` rows of an owner: a user's values, or a session's checkpoints.
The owner's row is a condition of the write: a writer that adds a row changes the owner's row, so no
row is added unnoticed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import RecordHeldError, RecordSealedError
from casstore.records.lifecycles.annotation import Note
from casstore.records.lifecycles.notes import note_of
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.tables import LifecycleChange, LifecycleTables
from casstore.records.schema import RowPlace
from casstore.session.records import Record, Table

#: Deletes the rows of a record that is neither sealed nor held, and its note.
Drop = Callable[[LifecycleChange, Ref, Record, Note | None], None]
#: The most rows that one write removes.
AT_ONCE: Final = 5000

SEALED: Final = "sealed"
HELD: Final = "held"


class Stayed(NamedTuple):
    """A record that was not removed, and the seal or hold that prevented it.

    >>> ref = life.users.put("anna", "tax id", "4711", Annotation(hold=Hold("tax law", 2**42)))
    >>> [(stayed.reason, stayed.basis) for stayed in life.users.erase("anna").stayed]
    [('held', 'tax law')]
    """

    ref: Ref
    #: ``sealed``: it needs a review; ``held``: until ``until_ms``.
    reason: str
    #: The basis of the seal or hold.
    basis: str
    #: The end of the hold.
    until_ms: int | None
    #: The action of the seal.
    action: str | None

    def as_error(self) -> RecordSealedError | RecordHeldError:
        """The error that a refused change raises.

        >>> ref = life.users.put("anna", "tax id", "4711", Annotation(hold=Hold("tax law", 2**42)))
        >>> [stayed] = life.users.erase("anna").stayed
        >>> type(stayed.as_error()).__name__
        'RecordHeldError'
        """
        if self.until_ms is None:
            return RecordSealedError(str(self.ref), self.action or "")
        return RecordHeldError(str(self.ref), self.basis, self.until_ms)


class Removal(NamedTuple):
    """The result of removing a record."""

    #: Whether the record existed.
    there: bool
    #: The reason why the record stays; None: it is removed, or did not exist.
    stays: Stayed | None = None
    #: The note of the record.
    note: Note | None = None


def objection(ref: Ref, note: Note | None, now_ms: int) -> Stayed | None:
    """The seal or hold that forbids changing or removing a record; a seal takes precedence."""
    if note is None:
        return None
    if note.seal is not None:
        return Stayed(ref, SEALED, note.seal.basis, None, note.seal.action)
    if note.hold is not None and note.hold.until_ms > now_ms:
        return Stayed(ref, HELD, note.hold.basis, note.hold.until_ms, None)
    return None


def remove_unless_kept(
    change: LifecycleChange, ref: Ref, drop: Drop, only: bytes | None = None
) -> Removal:
    """Remove a record unless it is sealed or held; with ``only``, only if that is its row."""
    tables = change.tables
    row, noted = change.read([tables.payload(ref), tables.note(ref)])
    if row is None or only not in (None, row.row):
        return Removal(there=False)
    note = note_of(noted)
    stays = objection(ref, note, tables.store.engine.now_ms())
    if stays is None:
        drop(change, ref, row, note)
    return Removal(True, stays, note)


def delete_record(tables: LifecycleTables, ref: Ref, drop: Drop) -> bool:
    """Remove a record in one change; False if it does not exist.

    RecordSealedError or RecordHeldError if it must stay.
    """

    def step(change: LifecycleChange) -> bool:
        removal = remove_unless_kept(change, ref, drop)
        if removal.stays is not None:
            raise removal.stays.as_error()
        return removal.there

    return tables.change(str(ref), step)


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
        # The owner's row, as the current attempt has read it.
        self._known: Record | None = None
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
        [known] = change.read([self._owner])
        self._known = known
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
                self._drop(change, ref, row, note)
                self._gone.append(note)
        if known is not None:
            self._leave(change, known, len(self._gone), is_last=self._is_last)

    @abstractmethod
    def _drop(self, change: LifecycleChange, ref: Ref, row: Record, note: Note | None) -> None:
        """Remove one row, its note and its indexes; ``_known`` is the owner's row."""

    @abstractmethod
    def _leave(self, change: LifecycleChange, owner: Record, gone: int, *, is_last: bool) -> None:
        """Update the owner's row after ``gone`` rows were removed."""

    @property
    def _any_stay(self) -> bool:
        return bool(self.stayed or self._staying)
