"""The schemas of the three lifecycles, and the transactions that change their rows.

    life.sessions      session                        when it began, checkpoints so far, user
    life.checkpoints   session, number                id, label, time, content
    life.labels        session, label, number         index of checkpoints by label
    life.people        user's hash                    how many values, the key that encrypts them
    life.users         user's hash, name              time, the value or its encryption
    life.records       collection, name               time, value
    life.notes         kind, owner, name              the note of a record
    life.subjects      hash, kind, owner, name        index of notes and sessions by subject
    life.derived       source, record: three each     index of notes by source
    life.doomed        key                            a key that is to be destroyed
    life.imported      id                             the checkpoint that was imported as this id
    life.settings      name                           the mark of the secret that hashes subjects

User data has tables of its own, so that removing it cannot reach checkpoints.

A row contains a short value itself, and a link to a long one (``content``), so that rows can be
listed, counted and removed without reading the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.engine.protocol import RowIs, Write
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    KeyDestroyedError,
    ObjectNotFoundError,
)
from casstore.format.canonical import Link
from casstore.format.limits import OUTLINE_MIN_BYTES
from casstore.records.lifecycles.annotation import Note
from casstore.records.lifecycles.references import AGENT, CHECKPOINT, RECORD, USER, Ref
from casstore.records.schema import Index, Key, Parent, R, RowPlace, RowTable, Schema
from casstore.session.attempts import read_again, transact
from casstore.session.records import Draft, Record, find_records
from casstore.store import Store

#: The stored form of a value: a list that has the value as its only item, or a link to the value.
Content = list[Any] | Link
Result = TypeVar("Result")
#: The name of the setting that holds the mark of the secret.
SUBJECTS_SETTING: Final = "subjects"


class SettingRow(NamedTuple):
    """A setting of the store."""

    name: str
    value: Any


class AgentSessionRow(NamedTuple):
    """A session of an agent."""

    session: str
    started_at_ms: int
    #: The number of checkpoints created so far, including removed ones.
    made: int
    #: The hash of the session's user.
    user: str | None = None


class AgentCheckpointRow(NamedTuple):
    """A checkpoint of a session."""

    session: str
    number: int
    id: str
    label: str
    at_ms: int
    content: list[Any] | Link


class UserRow(NamedTuple):
    """A user: the number of values, and the key of those that are neither held nor sealed."""

    user: str
    values: int = 0
    key: str | None = None


class UserValueRow(NamedTuple):
    """A value of a user; encrypted if it has a key."""

    user: str
    name: str
    at_ms: int
    content: list[Any] | Link
    key: str | None = None


class CollectionRecordRow(NamedTuple):
    """A record of a collection."""

    collection: str
    name: str
    at_ms: int
    content: list[Any] | Link


class NoteRow(NamedTuple):
    """The note of a record."""

    ref: Ref
    note: Note


class DoomedRow(NamedTuple):
    """A key that is to be destroyed."""

    key: str


class ImportedRow(NamedTuple):
    """The checkpoint that was imported under an id."""

    id: str
    ref: Ref


def _secret(row: Any) -> Key | None:
    has_subjects = row.user is not None if type(row) is AgentSessionRow else row.note.subjects
    return (SUBJECTS_SETTING,) if has_subjects else None


def _payload_key(kind: str) -> Callable[[NoteRow], Key | None]:
    return lambda row: row.ref[1:] if row.ref.kind == kind else None


SETTINGS: Final = Schema("life.settings", SettingRow, 1)
SESSIONS: Final[Schema[AgentSessionRow]] = Schema(
    "life.sessions",
    AgentSessionRow,
    1,
    indexes=[
        Index(
            "life.subjects",
            4,
            lambda row: [] if row.user is None else [(row.user, *Ref(AGENT, row.session))],
            owner=lambda key: key[2:3] if key[1] == AGENT else None,
        )
    ],
    parents=[Parent(SETTINGS, _secret)],
)
CHECKPOINTS: Final = Schema(
    "life.checkpoints",
    AgentCheckpointRow,
    2,
    indexes=[
        Index(
            "life.labels",
            3,
            lambda row: [(row.session, row.label, row.number)],
            owner=lambda key: (key[0], key[2]),
        )
    ],
    parents=[
        Parent(
            SESSIONS,
            lambda row: (row.session,),
            lambda row, session: bool(row.number <= session.made),
        )
    ],
)
PEOPLE: Final = Schema("life.people", UserRow, 1)
USERS: Final = Schema(
    "life.users", UserValueRow, 2, parents=[Parent(PEOPLE, lambda row: (row.user,))]
)
RECORDS: Final = Schema("life.records", CollectionRecordRow, 2)
NOTES: Final[Schema[NoteRow]] = Schema(
    "life.notes",
    NoteRow,
    3,
    indexes=[
        Index(
            "life.subjects",
            4,
            lambda row: [(subject, *row.ref) for subject in row.note.subjects],
            owner=lambda key: None if key[1] == AGENT else key[1:],
        ),
        Index(
            "life.derived",
            6,
            lambda row: [(*source, *row.ref) for source in row.note.sources],
            ends_with_key=True,
        ),
    ],
    parents=[
        Parent(CHECKPOINTS, _payload_key(CHECKPOINT)),
        Parent(USERS, _payload_key(USER)),
        Parent(RECORDS, _payload_key(RECORD)),
        Parent(SETTINGS, _secret),
    ],
)
DOOMED: Final = Schema("life.doomed", DoomedRow, 1)
IMPORTED: Final = Schema("life.imported", ImportedRow, 1)
SCHEMAS: Final = (
    SETTINGS, SESSIONS, CHECKPOINTS, PEOPLE, USERS, RECORDS, NOTES, DOOMED, IMPORTED,
)  # fmt: skip


class LifecycleTables:
    """The tables of the lifecycles in one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.settings = RowTable(store, SETTINGS)
        self.sessions = RowTable(store, SESSIONS)
        self.checkpoints = RowTable(store, CHECKPOINTS)
        [self.labels] = self.checkpoints.indexes
        self.people = RowTable(store, PEOPLE)
        self.users = RowTable(store, USERS)
        self.records = RowTable(store, RECORDS)
        self.notes = RowTable(store, NOTES)
        [self.subjects, self.derived] = self.notes.indexes
        self.doomed = RowTable(store, DOOMED)
        self.imported = RowTable(store, IMPORTED)
        self._payloads: dict[str, RowTable[Any]] = {
            CHECKPOINT: self.checkpoints,
            USER: self.users,
            RECORD: self.records,
        }

    def payload(self, ref: Ref) -> RowPlace:
        """The table and key of the row with the content of a record."""
        table = self._payloads.get(ref.kind)
        if table is None:
            raise InvalidInputError(
                f"ref must name one checkpoint, one value of a user or one record, got {ref}"
            )
        return table, (ref.owner, ref.name)

    def written_at_ms(self, kind: str, record: Record) -> int:
        """When a checkpoint, value or record was written."""
        return int(self._payloads[kind].decode(record).at_ms)

    def note(self, ref: Ref) -> RowPlace:
        """The table and key of a record's note: the row with its annotation."""
        return self.notes, tuple(ref)

    def find(self, places: Sequence[RowPlace]) -> list[Record | None]:
        """Rows of any tables, read in one transaction."""
        return find_records(self.store, places) if places else []

    def change(self, what: str, step: Callable[[LifecycleChange], Result]) -> Result:
        """Run a step as one transaction; retry if a row that it read has changed.

        BusyError if the rows of ``what`` keep changing.
        """

        def attempt() -> Result:
            change = LifecycleChange(self)
            try:
                result = step(change)
            except KeyDestroyedError:
                # Another writer that destroys a key removes the rows under it first. If it has,
                # retry on the current rows; if the rows are the same, the error is final.
                change.require_current()
                raise
            change.draft.commit()
            return result

        return transact(what, attempt)

    def look(self, read: Callable[[], Result]) -> Result:
        """The result of ``read``, repeated if a record was replaced or removed meanwhile.

        The objects of the record may have been collected by then, and its key destroyed.
        """
        return read_again(read, (CorruptionError, KeyDestroyedError))


class LifecycleChange:
    """One write; every row that it reads is a condition."""

    def __init__(self, tables: LifecycleTables) -> None:
        self.tables = tables
        self.draft = Draft(tables.store)

    def read(
        self, places: Sequence[RowPlace], unconditional: Sequence[RowPlace] = ()
    ) -> list[Record | None]:
        """Read rows in one transaction; each is a condition, except those in ``unconditional``."""
        found = self.tables.find([*places, *unconditional])
        for place, record in zip(places, found, strict=False):
            self.draft.expect(*place, record)
        return found

    def require_current(self) -> None:
        """ConditionFailedError if a row that was read has changed."""
        conditions = [each for each in self.draft.as_write().conditions if type(each) is RowIs]
        self.tables.store.engine.write(Write(conditions=conditions))

    def put(self, table: RowTable[R], row: R, before: R | None = None) -> bytes:
        """Write a row and its indexes, replacing ``before``; returns the bytes as stored."""
        return table.put(self.draft, row, before)

    def remove(self, table: RowTable[R], row: R) -> None:
        """Delete a row and its indexes."""
        table.remove(self.draft, row)

    def delete(self, place: RowPlace) -> None:
        """Delete a row that has no index."""
        self.draft.delete(*place)


# --- values in rows -------------------------------------------------------------------------------


def content(draft: Draft, value: Any) -> Content:
    """The stored form of a value in a row; its objects are added to the draft."""
    if type(value) in (str, bytes):
        stored = value if len(value) < OUTLINE_MIN_BYTES // 4 else draft.keep(value)
    else:
        stored = draft.keep_apart(value)
    return stored if type(stored) is Link and type(value) is not Link else [value]


def read_content(store: Store, stored: Content) -> Any:
    """The value that was passed to ``content``."""
    if type(stored) is Link:
        try:
            return store.get_value(stored.digest)
        except ObjectNotFoundError as exc:
            raise CorruptionError(f"the content of a record is not in the store: {exc}") from exc
    if len(stored) != 1:
        raise CorruptionError("the content of a record is damaged; check the store")
    return stored[0]
