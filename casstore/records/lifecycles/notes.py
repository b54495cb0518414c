"""Notes of records and their indexes: by subject and by source.

A note, its index rows and the record itself change in one write. The sources of a derived record
are conditions of its write, and their subjects become its subjects: erasure finds the record even
if its sources are removed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from casstore.engine.protocol import Condition, RowIs, RowStarts, Write
from casstore.errors import RecordHeldError, RecordSealedError
from casstore.format.digest import plain_hash
from casstore.records.lifecycles.annotation import Annotation, Hold, Note, Seal, WriteSeal
from casstore.records.lifecycles.references import CHECKPOINT, ROWS, SESSION, USER, Ref, not_found
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import (
    NOTES,
    SESSIONS,
    LifecycleChange,
    LifecycleTables,
    NoteRow,
)
from casstore.records.schema import RowPlace
from casstore.session import keys
from casstore.session import subjects as session_subjects
from casstore.session.records import Record
from casstore.session.state import head_key, meta_key, tombstone_key

#: Deletes the rows of a record that is neither sealed nor held, and its note.
Drop = Callable[[LifecycleChange, LifecycleTables, Ref, Record, Note | None], None]

SEALED = "sealed"
HELD = "held"


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


def note_of(record: Record | None) -> Note | None:
    """Decode the note in a row."""
    return None if record is None else NOTES.read(record).note


def note_now(tables: LifecycleTables, record: Record | None) -> Note | None:
    """The note of a row that was read earlier, reread if it was replaced since."""
    if record is None:
        return None
    return next(tables.notes.read_each([record], note_of), None)


def write_seal(seal: Seal, row: bytes, now_ms: int) -> WriteSeal:
    """A seal over the current row; the row contains linked values by their digest."""
    return WriteSeal(now_ms, seal.action, seal.basis, seal.summarization, plain_hash(row).hex())


class Sources:
    """The sources of a record, read together with its own rows."""

    def __init__(self, tables: LifecycleTables, refs: Sequence[Ref]) -> None:
        self._tables = tables
        self._refs = [ref for ref in refs if ref.kind in ROWS]
        self._sessions = [ref for ref in refs if ref.kind == SESSION]

    def places(self) -> list[RowPlace]:
        """Rows that must be unchanged when the record is written."""
        found: list[RowPlace] = []
        for ref in self._refs:
            found += [self._tables.payload(ref), self._tables.note(ref)]
        return found

    def sessions(self) -> list[RowPlace]:
        """The sessions of source checkpoints: read for their users, but no conditions.

        Every new checkpoint of a session changes its row.
        """
        return [
            (self._tables.sessions, (ref.owner,)) for ref in self._refs if ref.kind == CHECKPOINT
        ]

    def subjects(
        self, read: Sequence[Record | None], sessions: Sequence[Record | None]
    ) -> set[str]:
        """The subjects of the sources; RecordNotFoundError if a source does not exist."""
        found: set[str] = set()
        for at, ref in enumerate(self._refs):
            payload, note = read[2 * at : 2 * at + 2]
            if payload is None:
                raise not_found(ref)
            if (known := note_of(note)) is not None:
                found.update(known.subjects)
            if ref.kind == USER:
                found.add(ref.owner)
        for session in sessions:
            user = None if session is None else SESSIONS.read(session).user
            found.update([] if user is None else [user])
        return found

    def session_subjects(self, change: LifecycleChange, subjects: Subjects) -> set[str]:
        """The hashed subjects of the sources that are sessions of the store.

        Makes it a condition of the write that they are unchanged. RecordNotFoundError if a session
        does not exist.
        """
        found: set[str] = set()
        for ref in self._sessions:
            key = keys.session_key(ref.owner)
            places = [tombstone_key(key), head_key(key), meta_key(key), keys.subjects(key)]
            deleted, head, meta, about = self._tables.store.engine.get_rows(places)
            there = head_key(key) if head is not None else meta_key(key)
            if deleted is not None or (head is None and meta is None):
                raise not_found(ref)
            conditions: list[Condition] = [
                RowStarts(*there, b""),
                RowIs(*keys.subjects(key), about),
            ]
            change.draft.also(Write(conditions=conditions))
            found.update([subjects.hash(name) for name in session_subjects.decode(about)])
        return found


def made(annotation: Annotation, subjects: Iterable[str], now_ms: int) -> Note:
    """The note of an annotation, except the seal: that needs the hash of the stored row."""
    return Note(
        tuple(annotation.classes),
        tuple(sorted(set(subjects))),
        tuple(annotation.sources),
        tuple(annotation.processors),
        now_ms,
        annotation.hold,
    )


def put_note(
    change: LifecycleChange,
    tables: LifecycleTables,
    ref: Ref,
    before: Note | None,
    after: Note | None,
) -> None:
    """Replace the note ``before`` by ``after`` and update its indexes; either may be None."""
    old = None if before is None else NoteRow(ref, before)
    if after is not None:
        change.put(tables.notes, NoteRow(ref, after), old)
    elif old is not None:
        change.remove(tables.notes, old)


def remove_unless_kept(
    change: LifecycleChange,
    tables: LifecycleTables,
    ref: Ref,
    drop: Drop,
    only: bytes | None = None,
) -> Removal:
    """Remove a record unless it is sealed or held; with ``only``, only if that is its row."""
    row, noted = change.read([tables.payload(ref), tables.note(ref)])
    if row is None or only not in (None, row.row):
        return Removal(there=False)
    note = note_of(noted)
    stays = objection(ref, note, tables.store.engine.now_ms())
    if stays is None:
        drop(change, tables, ref, row, note)
    return Removal(True, stays, note)


def delete_in_one_change(
    tables: LifecycleTables, ref: Ref, remove: Callable[[LifecycleChange], Removal]
) -> bool:
    """Remove a record in one change; False if it does not exist.

    RecordSealedError or RecordHeldError if it must stay.
    """

    def step(change: LifecycleChange) -> bool:
        removal = remove(change)
        if removal.stays is not None:
            raise removal.stays.as_error()
        return removal.there

    return tables.change(str(ref), step)


def lengthened(before: Hold | None, hold: Hold, now_ms: int) -> bool:
    """Does a hold last at least as long as the one it replaces?"""
    return before is None or before.until_ms <= now_ms or hold.until_ms >= before.until_ms
