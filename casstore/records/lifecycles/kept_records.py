"""Annotated records in collections: learned facts, decisions and other derived data.

A record has a name in its collection and an annotation: always a class and, if the class requires
it, subjects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, NamedTuple

from casstore.records.lifecycles.annotation import Annotation, Note, check_annotation, checked
from casstore.records.lifecycles.notes import Annotating, note_of, put_note
from casstore.records.lifecycles.references import RECORD, Ref, not_found
from casstore.records.lifecycles.removal import delete_record, objection
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import (
    RECORDS,
    CollectionRecordRow,
    LifecycleChange,
    LifecycleTables,
    content,
    read_content,
)
from casstore.session.records import Record

_MISSING: Final = object()


class KeptRecord(NamedTuple):
    """A record as listed, without its content.

    >>> about = Annotation(["learned_context"], subjects=["anna"])
    >>> ref = life.records.put("facts", "city", "Ulm", about)
    >>> [record.ref.name for record in life.records.list("facts")]
    ['city']
    """

    ref: Ref
    written_at_ms: int


class KeptRecords:
    """Values by collection and name, each with its annotation.

    ``Lifecycles(store).records``; the examples use ``life``, which is one.

    >>> about = Annotation(["learned_context"], subjects=["anna"])
    >>> ref = life.records.put("facts", "city", "Ulm", about)
    >>> life.records.get("facts", "city")
    'Ulm'
    """

    def __init__(self, tables: LifecycleTables, subjects: Subjects) -> None:
        self._tables = tables
        self._subjects = subjects

    def put(self, collection: str, name: str, value: Any, annotation: Annotation) -> Ref:
        """Write a record, replacing one of the same name.

        RecordSealedError or RecordHeldError if the existing record is sealed or held;
        RecordNotFoundError if a source does not exist.

        >>> chat = life.users.put("anna", "chat", "I moved to Ulm")
        >>> about = Annotation(["learned_context"], sources=[chat], processors=["crm"])
        >>> life.records.put("facts", "city", "Ulm", about)
        Ref(kind='record', owner='facts', name='city')
        """
        check_annotation(annotation)
        said = checked(annotation, has_subject=bool(annotation.sources), default=None)
        ref = Ref(RECORD, collection, name)
        annotating = Annotating(self._subjects, said)

        def step(change: LifecycleChange) -> None:
            tables = self._tables
            _, noted = annotating.read(change, [tables.payload(ref), tables.note(ref)])
            now_ms, before = tables.store.engine.now_ms(), note_of(noted)
            stays = objection(ref, before, now_ms)
            if stays is not None:
                raise stays.as_error()
            stored = content(change.draft, value)
            row = change.put(tables.records, CollectionRecordRow(collection, name, now_ms, stored))
            annotating.annotate(change, ref, before, row, now_ms)

        self._tables.change(str(ref), step)
        return ref

    def get(self, collection: str, name: str, default: Any = _MISSING) -> Any:
        """A value; if it does not exist, the default, or RecordNotFoundError without one.

        >>> about = Annotation(["learned_context"], subjects=["anna"])
        >>> ref = life.records.put("facts", "city", "Ulm", about)
        >>> life.records.get("facts", "city"), life.records.get("facts", "street", None)
        ('Ulm', None)
        """

        def read() -> Any:
            record = self._tables.records.find(collection, name)
            return (
                _MISSING
                if record is None
                else read_content(self._tables.store, RECORDS.read(record).content)
            )

        found = self._tables.look(read)
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise not_found(Ref(RECORD, collection, name))
        return default

    def list(self, collection: str) -> Iterator[KeptRecord]:
        """The records of a collection, in order of their names.

        >>> about = Annotation(["learned_context"], subjects=["anna"])
        >>> refs = [life.records.put("facts", name, "known", about) for name in ("street", "city")]
        >>> [record.ref.name for record in life.records.list("facts")]
        ['city', 'street']
        """
        records = self._tables.records
        return records.read_each(records.scan_starting("", collection), _listed)

    def delete(self, collection: str, name: str) -> bool:
        """Remove a record; False if it does not exist.

        RecordSealedError or RecordHeldError if it must stay.

        >>> about = Annotation(["learned_context"], subjects=["anna"])
        >>> ref = life.records.put("facts", "city", "Ulm", about)
        >>> life.records.delete("facts", "city"), life.records.delete("facts", "city")
        (True, False)
        """
        return delete_record(self._tables, Ref(RECORD, collection, name), drop_record)


def _listed(record: Record) -> KeptRecord:
    return KeptRecord(Ref(RECORD, *record.key), RECORDS.read(record).at_ms)


def drop_record(change: LifecycleChange, ref: Ref, _row: Record, note: Note | None) -> None:
    """Remove a record that is neither sealed nor held."""
    change.delete(change.tables.payload(ref))
    put_note(change, ref, note, None)


def rewrite_record(
    change: LifecycleChange,
    ref: Ref,
    rewrite: Callable[[Any], Any],
    subject: str,
    sources: Collection[Ref],
) -> bool:
    """Replace the content of a record in a change, and drop a subject and sources from its note.

    The subject is given as its hash. Returns False and changes nothing if the record does not
    exist, is sealed or held, or if ``rewrite`` returns None.
    """
    tables = change.tables
    row, noted = change.read([tables.payload(ref), tables.note(ref)])
    note = note_of(noted)
    if row is None or note is None or objection(ref, note, tables.store.engine.now_ms()):
        return False
    before = RECORDS.read(row)
    value = rewrite(read_content(tables.store, before.content))
    if value is None:
        return False
    change.put(tables.records, before._replace(content=content(change.draft, value)))
    after = note._replace(
        subjects=tuple([one for one in note.subjects if one != subject]),
        sources=tuple([one for one in note.sources if one not in sources]),
    )
    put_note(change, ref, note, after)
    return True
