"""The rows of the three lifecycles, and how they change: read, decide, write under conditions.

    life.sessions      session                        when it began, of whom, checkpoints so far
    life.checkpoints   session, number                id, label, time, payload
    life.labels        session, label, number         (nothing: finds the newest of a label)
    life.people        user's hash                    how many values, the key they are under
    life.users         user's hash, name              time, the value or its encryption
    life.records       collection, name               time, value
    life.notes         kind, owner, name              what is said of a record
    life.subjects      hash, kind, owner, name        (nothing: finds what is about somebody)
    life.derived       source, record: three each     (nothing: finds what was derived)
    life.doomed        key                            (nothing: a key that is to be destroyed)
    life.imported      id                             where a checkpoint from elsewhere went
    life.settings      name                           which secret subjects are hashed with

User data has tables of its own, so that nothing which removes it can reach checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from casstore.engine.protocol import RowIs, Write
from casstore.errors import CorruptionError, InvalidInputError, KeyDestroyedError
from casstore.records.lifecycles.references import CHECKPOINT, RECORD, USER, Ref
from casstore.session.attempts import read_again, transact
from casstore.session.records import Draft, Record, Table, find_records
from casstore.store import Store

Place = tuple[Table, tuple[str, ...]]
Result = TypeVar("Result")


class Tables:
    """All tables of one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sessions = Table(store, "life.sessions", 1)
        self.checkpoints = Table(store, "life.checkpoints", 2)
        self.labels = Table(store, "life.labels", 3)
        self.people = Table(store, "life.people", 1)
        self.users = Table(store, "life.users", 2)
        self.records = Table(store, "life.records", 2)
        self.notes = Table(store, "life.notes", 3)
        self.subjects = Table(store, "life.subjects", 4)
        self.derived = Table(store, "life.derived", 6)
        self.doomed = Table(store, "life.doomed", 1)
        self.imported = Table(store, "life.imported", 1)
        self.settings = Table(store, "life.settings", 1)
        self._payloads = {
            CHECKPOINT: self.checkpoints,
            USER: self.users,
            RECORD: self.records,
        }

    def payload(self, ref: Ref) -> Place:
        """Where the content of a record stands."""
        table = self._payloads.get(ref.kind)
        if table is None:
            raise InvalidInputError(f"{ref} is not one record")
        return table, (ref.owner, ref.name)

    def note(self, ref: Ref) -> Place:
        """Where the note of a record stands."""
        return self.notes, tuple(ref)

    def find(self, places: Sequence[Place]) -> list[Record | None]:
        """Rows of one moment, of any tables."""
        return find_records(self.store, places) if places else []

    def change(self, what: str, step: Callable[[Change], Result]) -> Result:
        """Take a step as one write; once more from the start if what it read has changed.

        BusyError if ``what`` kept changing.
        """

        def attempt() -> Result:
            change = Change(self)
            try:
                result = step(change)
            except KeyDestroyedError:
                # Who destroys a key has changed rows before: then another key is in its place.
                change.require_current()
                raise
            change.draft.commit()
            return result

        return transact(what, attempt)

    def look(self, read: Callable[[], Result]) -> Result:
        """What a reading finds, made again if a record that it reads was replaced or removed.

        What the record linked to may have been collected by then, and its key destroyed.
        """
        return read_again(read, (CorruptionError, KeyDestroyedError))


class Change:
    """One write in the making: whatever it reads must still be so when it happens."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.draft = Draft(tables.store)

    def read(self, places: Sequence[Place], beside: Sequence[Place] = ()) -> list[Record | None]:
        """Rows of one moment; each becomes a condition, but for those read ``beside``."""
        found = self._tables.find([*places, *beside])
        for place, record in zip(places, found, strict=False):
            self.draft.expect(*place, record)
        return found

    def require_current(self) -> None:
        """ConditionFailedError unless everything that was read is still so."""
        conditions = [each for each in self.draft.as_write().conditions if type(each) is RowIs]
        self._tables.store.engine.write(Write(conditions=conditions))

    def put(self, place: Place, value: Any) -> bytes:
        """Write a row; as it will be."""
        return self.draft.put(*place, value)

    def delete(self, place: Place) -> None:
        """Remove a row."""
        self.draft.delete(*place)


def fields(record: Record) -> dict[str, Any]:
    """The value of a row that holds fields; CorruptionError if it holds something else."""
    value = record.value
    if type(value) is not dict:
        raise CorruptionError(f"row {record.key!r} is damaged")
    return value
