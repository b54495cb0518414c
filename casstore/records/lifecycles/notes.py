"""Notes of records and their indexes: by subject and by source.

A note, its index rows and the record itself change in one write. The sources of a derived record
are conditions of its write, and their subjects become its subjects: erasure finds the record even
if its sources are removed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from casstore.engine.protocol import Condition, RowIs, RowStarts, Write
from casstore.format.digest import plain_hash
from casstore.records.lifecycles.annotation import (
    Annotation,
    Note,
    Seal,
    WriteSeal,
    checked,
)
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


class Annotating:
    """Writes the notes of records that have one annotation, or none.

    ``has_subject``: the records have a subject in any case, so the store needs its secret's mark.
    """

    def __init__(
        self, subjects: Subjects, said: Annotation | None, *, has_subject: bool = False
    ) -> None:
        self._subjects = subjects
        self._said = said
        sources = () if said is None else said.sources
        self._refs = [ref for ref in sources if ref.kind in ROWS]
        self._sessions = [ref for ref in sources if ref.kind == SESSION]
        self._has_subject = has_subject
        # The subjects of the sources, as the current attempt of the write has read them.
        self._about: set[str] = set()

    def read(self, change: LifecycleChange, places: Sequence[RowPlace]) -> list[Record | None]:
        """Read the rows of records and of the sources in one transaction; all are conditions.

        Returns those of the records. RecordNotFoundError if a source does not exist.
        """
        if self._said is None and not self._has_subject:
            return change.read(places)
        tables = change.tables
        wanted = list(places)
        for ref in self._refs:
            wanted += [tables.payload(ref), tables.note(ref)]
        # Every new checkpoint of a session changes its row, so it is read for its user, but is no
        # condition.
        owners: list[RowPlace] = [
            (tables.sessions, (ref.owner,)) for ref in self._refs if ref.kind == CHECKPOINT
        ]
        rows = iter(self._subjects.read(change, wanted, owners))
        found = list(islice(rows, len(places)))
        self._about = set()
        for ref in self._refs:
            payload, note = next(rows), note_of(next(rows))
            if payload is None:
                raise not_found(ref)
            if note is not None:
                self._about.update(note.subjects)
            if ref.kind == USER:
                self._about.add(ref.owner)
        for session in rows:
            user = None if session is None else SESSIONS.read(session).user
            self._about.update([] if user is None else [user])
        for ref in self._sessions:
            self._about |= self._session_subjects(change, ref)
        return found

    def _session_subjects(self, change: LifecycleChange, ref: Ref) -> set[str]:
        """The hashed subjects of a source that is a session of the store.

        Makes it a condition of the write that they are unchanged. RecordNotFoundError if the
        session does not exist.
        """
        key = keys.session_key(ref.owner)
        places = [tombstone_key(key), head_key(key), meta_key(key), keys.subjects(key)]
        deleted, head, meta, about = change.tables.store.engine.get_rows(places)
        there = head_key(key) if head is not None else meta_key(key)
        if deleted is not None or (head is None and meta is None):
            raise not_found(ref)
        conditions: list[Condition] = [RowStarts(*there, b""), RowIs(*keys.subjects(key), about)]
        change.draft.also(Write(conditions=conditions))
        return {self._subjects.hash(name) for name in session_subjects.decode(about)}

    def annotate(
        self,
        change: LifecycleChange,
        ref: Ref,
        before: Note | None,
        row: bytes,
        now_ms: int,
        owner: str | None = None,
    ) -> None:
        """Replace the note of a record whose new row is ``row``; no change without annotation.

        Its subjects are those of the annotation, those of the sources, and the user who owns it.
        """
        said = self._said
        if said is None:
            return
        about = self._about | {self._subjects.hash(subject) for subject in said.subjects}
        about |= set() if owner is None else {owner}
        # Check again whether the classes need subjects: the sources may have none.
        checked(said, has_subject=bool(about), default=None)
        note = Note(
            classes=tuple(said.classes),
            subjects=tuple(sorted(about)),
            sources=tuple(said.sources),
            processors=tuple(said.processors),
            derived_at_ms=now_ms,
            hold=said.hold,
            seal=None if said.seal is None else write_seal(said.seal, row, now_ms),
        )
        put_note(change, ref, before, note)


def put_note(change: LifecycleChange, ref: Ref, before: Note | None, after: Note | None) -> None:
    """Replace the note ``before`` by ``after`` and update its indexes; either may be None."""
    notes = change.tables.notes
    old = None if before is None else NoteRow(ref, before)
    if after is not None:
        change.put(notes, NoteRow(ref, after), old)
    elif old is not None:
        change.remove(notes, old)
