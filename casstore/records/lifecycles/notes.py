"""Notes of records and their indexes: by subject, and by what a record was derived from.

A note, its rows in the indexes and the record itself change in one write. A record that is
derived from others expects them to be there, and is about whom they are about: were they
removed at that moment, or later without it, erasure would still find it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from casstore.engine.protocol import Condition, RowIs, RowStarts, Write
from casstore.errors import RecordHeldError, RecordSealedError
from casstore.format.hashing import plain_hash
from casstore.records.lifecycles.annotation import Annotation, Hold, Note, Seal, WriteSeal
from casstore.records.lifecycles.references import CHECKPOINT, ROWS, SESSION, USER, Ref, not_found
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import Change, Place, Tables, fields
from casstore.session import keys
from casstore.session import subjects as session_subjects
from casstore.session.heads import head_key
from casstore.session.records import Record
from casstore.session.state import meta_key, tombstone_key

SEALED = "sealed"
HELD = "held"


class Stayed(NamedTuple):
    """A record that something kept from going, and what.

    >>> ref = life.users.put("anna", "tax id", "4711", Annotation(hold=Hold("tax law", 2**42)))
    >>> [(stayed.reason, stayed.basis) for stayed in life.users.erase("anna").stayed]
    [('held', 'tax law')]
    """

    ref: Ref
    #: ``sealed``: somebody must review it; ``held``: until ``until_ms``.
    reason: str
    #: Of the seal or hold.
    basis: str
    #: Of a hold.
    until_ms: int | None
    #: Of a seal.
    action: str | None

    def as_error(self) -> RecordSealedError | RecordHeldError:
        """The error for a change that it does not allow.

        >>> ref = life.users.put("anna", "tax id", "4711", Annotation(hold=Hold("tax law", 2**42)))
        >>> [stayed] = life.users.erase("anna").stayed
        >>> type(stayed.as_error()).__name__
        'RecordHeldError'
        """
        if self.until_ms is None:
            return RecordSealedError(str(self.ref), self.action or "")
        return RecordHeldError(str(self.ref), self.basis, self.until_ms)


class Removal(NamedTuple):
    """What became of a record that was to go."""

    #: Was it there?
    there: bool
    #: What kept it; None: it is gone.
    stays: Stayed | None = None
    #: What was said of it.
    note: Note | None = None


def objection(ref: Ref, note: Note | None, now_ms: int) -> Stayed | None:
    """What stands against changing or removing a record: first its seal, then its hold."""
    if note is None:
        return None
    if note.seal is not None:
        return Stayed(ref, SEALED, note.seal.basis, None, note.seal.action)
    if note.hold is not None and note.hold.until_ms > now_ms:
        return Stayed(ref, HELD, note.hold.basis, note.hold.until_ms, None)
    return None


def note_of(record: Record | None) -> Note | None:
    """The note that a row holds."""
    return None if record is None else Note.from_value(record.value)


def note_now(tables: Tables, record: Record | None) -> Note | None:
    """The note of a row that was read before; as it is now if it was replaced since."""
    if record is None:
        return None
    return next(tables.notes.read_each([record], note_of), None)


def write_seal(seal: Seal, row: bytes, now_ms: int) -> WriteSeal:
    """A seal over a row as it stands: what the row links to is in it by digest."""
    return WriteSeal(now_ms, seal.action, seal.basis, seal.summarization, plain_hash(row).hex())


class Sources:
    """What a record is derived from, read together with its own rows."""

    def __init__(self, tables: Tables, refs: Sequence[Ref]) -> None:
        self._tables = tables
        self._refs = [ref for ref in refs if ref.kind in ROWS]
        self._sessions = [ref for ref in refs if ref.kind == SESSION]

    def places(self) -> list[Place]:
        """What must be read, and still be so when the record is written."""
        found: list[Place] = []
        for ref in self._refs:
            found += [self._tables.payload(ref), self._tables.note(ref)]
        return found

    def sessions(self) -> list[Place]:
        """What must be read beside: its count changes all the time, whose it is hardly ever."""
        return [
            (self._tables.sessions, (ref.owner,)) for ref in self._refs if ref.kind == CHECKPOINT
        ]

    def subjects(
        self, read: Sequence[Record | None], sessions: Sequence[Record | None]
    ) -> set[str]:
        """Whom they are about; RecordNotFoundError if one is not there."""
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
            user = None if session is None else fields(session).get("u")
            found.update([] if user is None else [user])
        return found

    def session_subjects(self, change: Change, subjects: Subjects) -> set[str]:
        """Whom the store's own sessions among them are about, at this moment and at the write.

        RecordNotFoundError if one is not there.
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
    """A note, without its seal, which needs the row."""
    return Note(
        tuple(annotation.classes),
        tuple(sorted(set(subjects))),
        tuple(annotation.sources),
        tuple(annotation.processors),
        now_ms,
        annotation.hold,
    )


def put_note(
    change: Change, tables: Tables, ref: Ref, before: Note | None, after: Note | None
) -> None:
    """Write a note in place of another, and the rows that find the record by it."""
    old, new = _indexed(tables, ref, before), _indexed(tables, ref, after)
    for place in old:
        if place not in new:
            change.delete(place)
    for place in new:
        if place not in old:
            change.put(place, None)
    if after is not None:
        change.put(tables.note(ref), after.to_value())
    elif before is not None:
        change.delete(tables.note(ref))


def _indexed(tables: Tables, ref: Ref, note: Note | None) -> list[Place]:
    if note is None:
        return []
    found: list[Place] = [(tables.subjects, (subject, *ref)) for subject in note.subjects]
    found += [(tables.derived, (*source, *ref)) for source in note.sources]
    return found


def lengthened(before: Hold | None, hold: Hold, now_ms: int) -> bool:
    """Does a hold last at least as long as the one it replaces?"""
    return before is None or before.until_ms <= now_ms or hold.until_ms >= before.until_ms
