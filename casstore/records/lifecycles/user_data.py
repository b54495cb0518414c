"""Data of users: in tables of its own, with an erasure of its own, encrypted if there are keys.

A row in ``life.people`` counts a user's values. Who removes all of them expects it to be as
it was, so no new value slips in between, and nothing is ever left under a key that is about
to be destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.records.lifecycles.annotation import IDENTITY, Annotation, Note, checked
from casstore.records.lifecycles.emptying import Emptying
from casstore.records.lifecycles.notes import (
    Removal,
    Sources,
    Stayed,
    made,
    note_of,
    objection,
    put_note,
    write_seal,
)
from casstore.records.lifecycles.references import USER, Ref
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import Change, Place, Tables, fields
from casstore.records.lifecycles.user_rows import FreshKeys, Person, UserRows
from casstore.session.arguments import check_count, check_text, list_of
from casstore.session.records import Record

_MISSING: Final = object()


class NewValue(NamedTuple):
    """A value on its way in; written at this time, or now.

    >>> values = [NewValue("anna", "language", "en"), NewValue("anna", "city", "Ulm")]
    >>> refs = life.users.put_many(values)
    >>> list(life.users.names("anna"))
    ['city', 'language']
    """

    user: str
    name: str
    value: Any
    at_ms: int | None = None


class FoundValue(NamedTuple):
    """A value as it was found, and when it was written."""

    value: Any
    written_at_ms: int


class UserErasure(NamedTuple):
    """What erasing a user's data did.

    >>> ref = life.users.put("anna", "language", "en")
    >>> erased = life.users.erase("anna")
    >>> erased.deleted, erased.stayed
    (1, ())
    """

    deleted: int
    stayed: tuple[Stayed, ...]
    #: Keys that are destroyed now, and those that wait for somebody who has the key store.
    keys_destroyed: int
    keys_waiting: int
    #: Who was given some of it.
    processors: tuple[str, ...]


class UserData:
    """Values by user and name.

    ``Lifecycles(store).users``; the examples use ``life``, which is one.

    >>> ref = life.users.put("anna", "language", "en")
    >>> life.users.get("anna", "language")
    'en'
    >>> life.users.erase("anna").deleted
    1
    """

    def __init__(self, tables: Tables, subjects: Subjects, rows: UserRows) -> None:
        self._tables = tables
        self._subjects = subjects
        self._rows = rows

    # --- reading ------------------------------------------------------------------------

    def ref(self, user: str, name: str) -> Ref:
        """The name of a value, for what is derived from it.

        >>> life.users.ref("anna", "language") == life.users.put("anna", "language", "en")
        True
        """
        check_text(name, "the name of a value")
        return Ref(USER, self._subjects.hash(user), name)

    def get(self, user: str, name: str, default: Any = _MISSING) -> Any:
        """A value; the default, or RecordNotFoundError, if there is none.

        KeyDestroyedError or KeyMissingError if it is encrypted and cannot be read.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.get("anna", "language"), life.users.get("anna", "city", None)
        ('en', None)
        """

        def read() -> Any:
            ref, record = self._find(user, name)
            return _MISSING if record is None else self._rows.opened(ref, fields(record))

        found = self._tables.look(read)
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise RecordNotFoundError("value", name, "of this user")
        return default

    def find_many(self, places: Sequence[tuple[str, str]]) -> list[FoundValue | None]:
        """Values of one moment, by user and name; None where there is none.

        >>> ref = life.users.put("anna", "language", "en")
        >>> found, nothing = life.users.find_many([("anna", "language"), ("anna", "city")])
        >>> found.value, nothing
        ('en', None)
        """
        refs = [self.ref(*_place(place)) for place in list_of(places, "places of values")]
        rows = [self._tables.payload(ref) for ref in refs]

        def read() -> list[FoundValue | None]:
            found = self._tables.find([*rows, *self._subjects.places()])
            self._subjects.require(found[len(rows) :])
            return [
                None
                if record is None
                else FoundValue(self._rows.opened(ref, told := fields(record)), int(told["t"]))
                for ref, record in zip(refs, found, strict=False)
            ]

        return self._tables.look(read)

    def names(self, user: str) -> Iterator[str]:
        """What a user's values are called, in order.

        >>> refs = [life.users.put("anna", name, "known") for name in ("language", "city")]
        >>> list(life.users.names("anna"))
        ['city', 'language']
        """
        self._subjects.check()
        owner = self._subjects.hash(user)
        return (record.key[1] for record in self._tables.users.scan_starting("", owner))

    def written_at_ms(self, user: str, name: str) -> int | None:
        """When a value was written; None if there is none.

        >>> [ref] = life.users.put_many([NewValue("anna", "language", "en", at_ms=1_000)])
        >>> life.users.written_at_ms("anna", "language")
        1000
        """

        def read() -> int | None:
            _, record = self._find(user, name)
            return None if record is None else int(fields(record)["t"])

        return self._tables.look(read)

    def _find(self, user: str, name: str) -> tuple[Ref, Record | None]:
        ref = self.ref(user, name)
        record, *setting = self._tables.find([self._tables.payload(ref), *self._subjects.places()])
        self._subjects.require(setting)
        return ref, record

    # --- writing ------------------------------------------------------------------------

    def put(self, user: str, name: str, value: Any, annotation: Annotation | None = None) -> Ref:
        """Write a value in place of one that is there. Of class identity unless told otherwise.

        Without an annotation, what was said of the value before still counts. RecordSealedError
        or RecordHeldError if the one that is there must stay.

        >>> refs = [life.users.put("anna", "language", value) for value in ("de", "en")]
        >>> life.users.get("anna", "language")
        'en'
        """
        return self.put_many([NewValue(user, name, value)], annotation)[0]

    def put_many(
        self, items: Sequence[NewValue], annotation: Annotation | None = None
    ) -> list[Ref]:
        """Write values, all or none; told twice, the last counts.

        >>> values = [NewValue("anna", "city", "Ulm"), NewValue("ben", "city", "Bonn")]
        >>> refs = life.users.put_many(values)
        >>> life.users.get("ben", "city")
        'Bonn'
        """
        said = None
        if annotation is not None:
            said = checked(annotation, has_subject=True, default=IDENTITY)
        given: list[NewValue] = list_of(items, "values")
        for item in given:
            if not isinstance(item, NewValue):
                raise InvalidInputError(f"a value comes as NewValue, not {type(item).__name__}")
            if item.at_ms is not None:
                check_count(item.at_ms, "a time")
        refs = [self.ref(item.user, item.name) for item in given]
        latest = dict(zip(refs, given, strict=True))
        putting = _Putting(self._tables, self._subjects, self._rows, latest, said)
        if latest:
            with putting.fresh:
                self._tables.change("the data of a user", putting.step)
            if putting.doomed:
                self._rows.destroy_here()
        return refs

    def delete(self, user: str, name: str) -> bool:
        """Remove one value; False if there is none.

        RecordSealedError or RecordHeldError if it must stay.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.delete("anna", "language"), life.users.delete("anna", "language")
        (True, False)
        """
        ref = self.ref(user, name)
        self._subjects.check()

        def step(change: Change) -> bool:
            removal = self.remove(change, ref)
            if removal.stays is not None:
                raise removal.stays.as_error()
            return removal.there

        removed = self._tables.change(str(ref), step)
        self._rows.destroy_here()
        return removed

    def remove(self, change: Change, ref: Ref, only: bytes | None = None) -> Removal:
        """Remove a value in a change, unless something speaks against it; ``only`` this row."""
        tables = self._tables
        counted: Place = (tables.people, (ref.owner,))
        row, noted, person = change.read([tables.payload(ref), tables.note(ref), counted])
        if row is None or only not in (None, row.row):
            return Removal(there=False)
        note = note_of(noted)
        stays = objection(ref, note, tables.store.engine.now_ms())
        if stays is not None:
            return Removal(True, stays, note)
        known = Person.of(person)
        drop_value(change, tables, self._rows, ref, row, note, known.key)
        if known.values > 1:
            change.put(counted, known._replace(values=known.values - 1).to_value())
        else:
            # With the last value the key may go, too: backups may still have what was deleted.
            self._rows.doom(change, known.key)
            change.delete(counted)
        return Removal(True, None, note)

    # --- erasing ------------------------------------------------------------------------

    def erase(self, user: str) -> UserErasure:
        """Remove all values of a user and destroy the key; what is held or sealed stays.

        One write, up to 5,000 values. Nothing but user data is touched.

        >>> refs = [life.users.put("anna", name, "known") for name in ("language", "city")]
        >>> life.users.erase("anna").deleted, list(life.users.names("anna"))
        (2, [])
        """
        self._subjects.check()
        return self.erase_hashed(self._subjects.hash(user))

    def erase_hashed(self, user: str) -> UserErasure:
        """As ``erase``, for one who knows only the hash.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.erase_hashed(ref.owner).deleted
        1
        """
        erasing = _Erasing(self._tables, self._rows, user)
        erasing.run()
        destroyed, waiting = self._rows.destroy_doomed()
        return UserErasure(
            erasing.deleted,
            tuple(erasing.stayed),
            destroyed,
            waiting,
            tuple(sorted(erasing.processors)),
        )

    def destroy_keys(self) -> tuple[int, int]:
        """Destroy keys that nothing needs any more: how many were, and how many could not be.

        Everything that removes user data with keys at hand ends with this; calling it finishes
        what a crash, or a lack of keys, left over.

        >>> life.users.destroy_keys()  # nothing was left over
        (0, 0)
        """
        return self._rows.destroy_doomed()


def _place(place: Any) -> tuple[str, str]:
    """The user and the name of a value that is looked for."""
    if not isinstance(place, tuple | list) or len(place) != 2:
        raise InvalidInputError(f"a value is found by user and name, not by {place!r:.80}")
    user, name = place
    return user, name


def drop_value(
    change: Change,
    tables: Tables,
    rows: UserRows,
    ref: Ref,
    row: Record,
    note: Note | None,
    users_key: str | None,
) -> None:
    """Remove a value that nothing speaks for, and doom its key if that is its own."""
    change.delete(tables.payload(ref))
    put_note(change, tables, ref, note, None)
    key = fields(row).get("k")
    if key != users_key:
        rows.doom(change, key)


class _Putting:
    """Values on their way in, as one write."""

    def __init__(
        self,
        tables: Tables,
        subjects: Subjects,
        rows: UserRows,
        items: dict[Ref, NewValue],
        said: Annotation | None,
    ) -> None:
        self._tables = tables
        self._subjects = subjects
        self._rows = rows
        self._items = items
        self._said = said
        self._sources = Sources(tables, () if said is None else said.sources)
        self.fresh = FreshKeys(rows.keys)
        self.doomed = False

    def step(self, change: Change) -> None:
        tables, count = self._tables, len(self._items)
        owners = list(dict.fromkeys(ref.owner for ref in self._items))
        places = [
            *[tables.payload(ref) for ref in self._items],
            *[tables.note(ref) for ref in self._items],
            *[(tables.people, (owner,)) for owner in owners],
            *self._sources.places(),
            *self._subjects.places(),
        ]
        read = change.read(places, self._sources.sessions())
        now_ms = tables.store.engine.now_ms()
        people = {
            owner: Person.of(record)
            for owner, record in zip(owners, read[2 * count :], strict=False)
        }
        start = 2 * count + len(owners)
        end = start + len(self._sources.places())
        about = self._sources.subjects(read[start:end], read[len(places) :])
        about |= self._sources.session_subjects(change, self._subjects)
        self._subjects.require(read[end : len(places)], change)
        self.fresh.begin()
        self.doomed = False
        before = dict(people)
        for at, (ref, item) in enumerate(self._items.items()):
            people[ref.owner] = self._put(
                change, ref, item, read[at], note_of(read[count + at]), about,
                people[ref.owner], now_ms,
            )  # fmt: skip
        for owner, person in people.items():
            if person != before[owner]:
                change.put((tables.people, (owner,)), person.to_value())

    def _put(
        self,
        change: Change,
        ref: Ref,
        item: NewValue,
        row: Record | None,
        noted: Note | None,
        about: set[str],
        person: Person,
        now_ms: int,
    ) -> Person:
        stays = objection(ref, noted, now_ms)
        if stays is not None:
            raise stays.as_error()
        said = self._said
        is_kept = said is not None and (said.hold is not None or said.seal is not None)
        key = self._rows.key_for(self.fresh, ref, person, stays=is_kept)
        at_ms = now_ms if item.at_ms is None else item.at_ms
        after = self._rows.put(change, ref, key, item.value, at_ms)
        if said is not None:
            named = {self._subjects.hash(subject) for subject in said.subjects}
            note = made(said, about | named | {ref.owner}, now_ms)
            if said.seal is not None:
                note = note._replace(seal=write_seal(said.seal, after, now_ms))
            put_note(change, self._tables, ref, noted, note)
        if row is not None and (old := fields(row).get("k")) not in (person.key, key):
            self.doomed = self._rows.doom(change, old) or self.doomed
        return Person(person.values + (row is None), person.key if is_kept else key or person.key)


class _Erasing(Emptying):
    """All values of a user on their way out, and the key with them."""

    def __init__(self, tables: Tables, rows: UserRows, user: str) -> None:
        super().__init__(tables, (tables.people, (user,)), USER, tables.users)
        self._rows = rows

    def _drop(
        self, change: Change, ref: Ref, row: Record, note: Note | None, owner: Record | None
    ) -> None:
        drop_value(change, self._tables, self._rows, ref, row, note, Person.of(owner).key)

    def _leave(self, change: Change, owner: Record, gone: int, *, is_last: bool) -> None:
        person = Person.of(owner)
        after = person._replace(values=person.values - gone)
        if is_last:
            self._rows.doom(change, after.key)
            after = after._replace(key=None)
        if not after.values:
            change.delete(self._owner)
        elif after != person:
            change.put(self._owner, after.to_value())
