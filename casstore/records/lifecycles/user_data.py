"""User data: values by user and name in their own tables, encrypted if a key store is given.

A row in ``life.people`` counts a user's values. It is a condition of an erasure, so no value can be
added during the erasure, and no value remains under a key that is about to be destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.records.lifecycles.annotation import IDENTITY, Annotation, Note, checked
from casstore.records.lifecycles.notes import Annotating, note_of, put_note
from casstore.records.lifecycles.references import USER, Ref
from casstore.records.lifecycles.removal import (
    Emptying,
    Removal,
    Stayed,
    delete_record,
    objection,
    remove_unless_kept,
)
from casstore.records.lifecycles.subjects import Subjects
from casstore.records.lifecycles.tables import (
    USERS,
    LifecycleChange,
    LifecycleTables,
    UserRow,
    UserValueRow,
)
from casstore.records.lifecycles.user_rows import FreshKeys, UserRows, user_of
from casstore.session.arguments import check_count, check_text, list_of
from casstore.session.records import Record

_MISSING: Final = object()


class NewValue(NamedTuple):
    """A value to be written, with its time; the current time by default.

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
    """A value and the time it was written."""

    value: Any
    written_at_ms: int


class UserErasure(NamedTuple):
    """The result of erasing a user's data.

    >>> ref = life.users.put("anna", "language", "en")
    >>> erased = life.users.erase("anna")
    >>> erased.deleted, erased.stayed
    (1, ())
    """

    deleted: int
    stayed: tuple[Stayed, ...]
    #: How many keys were destroyed, and how many wait for a call with the key store.
    keys_destroyed: int
    keys_waiting: int
    #: Third parties that received some of the data.
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

    def __init__(self, tables: LifecycleTables, subjects: Subjects, rows: UserRows) -> None:
        self._tables = tables
        self._subjects = subjects
        self._rows = rows

    # --- reading ------------------------------------------------------------------------

    def ref(self, user: str, name: str) -> Ref:
        """The reference to a value, to name it as a source of derived records.

        >>> life.users.ref("anna", "language") == life.users.put("anna", "language", "en")
        True
        """
        check_text(name, "name")
        return Ref(USER, self._subjects.hash(user), name)

    def get(self, user: str, name: str, default: Any = _MISSING) -> Any:
        """A value; if it does not exist, the default, or RecordNotFoundError without one.

        KeyDestroyedError or KeyMissingError if it is encrypted and cannot be read.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.get("anna", "language"), life.users.get("anna", "city", None)
        ('en', None)
        """

        def read() -> Any:
            row = self._find(user, name)
            return _MISSING if row is None else self._rows.opened(row)

        found = self._tables.look(read)
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise RecordNotFoundError("value", name, "of this user")
        return default

    def find_many(self, places: Sequence[tuple[str, str]]) -> list[FoundValue | None]:
        """Values by user and name, read in one transaction; None where a value does not exist.

        >>> ref = life.users.put("anna", "language", "en")
        >>> found, nothing = life.users.find_many([("anna", "language"), ("anna", "city")])
        >>> found.value, nothing
        ('en', None)
        """
        refs = [self.ref(*_place(place)) for place in list_of(places, "places")]
        rows = [self._tables.payload(ref) for ref in refs]

        def read() -> list[FoundValue | None]:
            values = map(self._tables.users.decode_found, self._subjects.find(rows))
            return [
                None if row is None else FoundValue(self._rows.opened(row), row.at_ms)
                for row in values
            ]

        return self._tables.look(read)

    def names(self, user: str) -> Iterator[str]:
        """The names of a user's values, sorted.

        >>> refs = [life.users.put("anna", name, "known") for name in ("language", "city")]
        >>> list(life.users.names("anna"))
        ['city', 'language']
        """
        self._subjects.check()
        owner = self._subjects.hash(user)
        return (record.key[1] for record in self._tables.users.scan_starting("", owner))

    def written_at_ms(self, user: str, name: str) -> int | None:
        """When a value was written; None if it does not exist.

        >>> [ref] = life.users.put_many([NewValue("anna", "language", "en", at_ms=1_000)])
        >>> life.users.written_at_ms("anna", "language")
        1000
        """

        def read() -> int | None:
            row = self._find(user, name)
            return None if row is None else row.at_ms

        return self._tables.look(read)

    def _find(self, user: str, name: str) -> UserValueRow | None:
        [record] = self._subjects.find([self._tables.payload(self.ref(user, name))])
        return self._tables.users.decode_found(record)

    # --- writing ------------------------------------------------------------------------

    def put(self, user: str, name: str, value: Any, annotation: Annotation | None = None) -> Ref:
        """Write a value, replacing an existing one. Its class is identity by default.

        Without an annotation, the existing note is kept. RecordSealedError or RecordHeldError if
        the existing value is sealed or held.

        >>> refs = [life.users.put("anna", "language", value) for value in ("de", "en")]
        >>> life.users.get("anna", "language")
        'en'
        """
        return self.put_many([NewValue(user, name, value)], annotation)[0]

    def put_many(
        self, items: Sequence[NewValue], annotation: Annotation | None = None
    ) -> list[Ref]:
        """Write values in one transaction; of two with the same user and name, the last is stored.

        >>> values = [NewValue("anna", "city", "Ulm"), NewValue("ben", "city", "Bonn")]
        >>> refs = life.users.put_many(values)
        >>> life.users.get("ben", "city")
        'Bonn'
        """
        said = None
        if annotation is not None:
            said = checked(annotation, has_subject=True, default=IDENTITY)
        given: list[NewValue] = list_of(items, "items")
        for item in given:
            if not isinstance(item, NewValue):
                raise InvalidInputError(
                    f"items must be NewValue objects, got {type(item).__name__}"
                )
            if item.at_ms is not None:
                check_count(item.at_ms, "at_ms")
        refs = [self.ref(item.user, item.name) for item in given]
        latest = dict(zip(refs, given, strict=True))
        putting = _UserDataWriter(self._tables, self._subjects, self._rows, latest, said)
        if latest:
            with putting.fresh:
                self._tables.change("the data of a user", putting.step)
            if putting.doomed:
                self._rows.destroy_here()
        return refs

    def delete(self, user: str, name: str) -> bool:
        """Remove one value; False if it does not exist.

        RecordSealedError or RecordHeldError if it must stay.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.delete("anna", "language"), life.users.delete("anna", "language")
        (True, False)
        """
        ref = self.ref(user, name)
        self._subjects.check()
        removed = delete_record(self._tables, ref, self._drop)
        self._rows.destroy_here()
        return removed

    def remove(self, change: LifecycleChange, ref: Ref, only: bytes | None = None) -> Removal:
        """Remove a value unless it is sealed or held; with ``only``, only if that is its row."""
        return remove_unless_kept(change, ref, self._drop, only)

    def _drop(self, change: LifecycleChange, ref: Ref, row: Record, note: Note | None) -> None:
        people = self._tables.people
        [person] = change.read([(people, (ref.owner,))])
        known = user_of(ref.owner, person)
        drop_value(change, self._rows, ref, row, note, known.key)
        if known.values > 1:
            change.put(people, known._replace(values=known.values - 1))
        else:
            # List the key for destruction with the last value: backups may contain deleted values.
            self._rows.doom(change, known.key)
            change.delete((people, (ref.owner,)))

    # --- erasing ------------------------------------------------------------------------

    def erase(self, user: str) -> UserErasure:
        """Remove all values of a user and destroy the key; held and sealed values stay.

        Each write removes up to 5,000 values. Nothing but user data is changed.

        >>> refs = [life.users.put("anna", name, "known") for name in ("language", "city")]
        >>> life.users.erase("anna").deleted, list(life.users.names("anna"))
        (2, [])
        """
        self._subjects.check()
        return self.erase_hashed(self._subjects.hash(user))

    def erase_hashed(self, user: str) -> UserErasure:
        """As ``erase``, for a caller that has only the hash of the user.

        >>> ref = life.users.put("anna", "language", "en")
        >>> life.users.erase_hashed(ref.owner).deleted
        1
        """
        erasing = _UserDataEraser(self._tables, self._rows, user)
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
        """Destroy keys that are not used any more; returns how many, and how many wait.

        A key waits if this key store does not have it. Every call that removes user data with a key
        store does this at its end. Call it to finish after a crash, or after a removal without the
        key store.

        >>> life.users.destroy_keys()  # nothing was left over
        (0, 0)
        """
        return self._rows.destroy_doomed()


def _place(place: Any) -> tuple[str, str]:
    """Check the user and the name of a value to find."""
    if not isinstance(place, tuple | list) or len(place) != 2:
        raise InvalidInputError(f"each place must be a pair of user and name, got {place!r:.80}")
    user, name = place
    return user, name


def drop_value(
    change: LifecycleChange,
    rows: UserRows,
    ref: Ref,
    row: Record,
    note: Note | None,
    users_key: str | None,
) -> None:
    """Remove a value that is neither sealed nor held; list its own key, if any, for destruction."""
    change.delete(change.tables.payload(ref))
    put_note(change, ref, note, None)
    key = USERS.read(row).key
    if key != users_key:
        rows.doom(change, key)


class _UserDataWriter:
    """Writes values in one transaction."""

    def __init__(
        self,
        tables: LifecycleTables,
        subjects: Subjects,
        rows: UserRows,
        items: dict[Ref, NewValue],
        said: Annotation | None,
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._items = items
        self._is_kept = said is not None and (said.hold is not None or said.seal is not None)
        self._annotating = Annotating(subjects, said, has_subject=True)
        self.fresh = FreshKeys(rows.keys)
        self.doomed = False

    def step(self, change: LifecycleChange) -> None:
        tables, count = self._tables, len(self._items)
        owners = list(dict.fromkeys(ref.owner for ref in self._items))
        places = [
            *[tables.payload(ref) for ref in self._items],
            *[tables.note(ref) for ref in self._items],
            *[(tables.people, (owner,)) for owner in owners],
        ]
        read = self._annotating.read(change, places)
        now_ms = tables.store.engine.now_ms()
        people = {
            owner: user_of(owner, record)
            for owner, record in zip(owners, read[2 * count :], strict=True)
        }
        self.fresh.begin()
        self.doomed = False
        before = dict(people)
        for at, (ref, item) in enumerate(self._items.items()):
            noted = note_of(read[count + at])
            person = people[ref.owner]
            people[ref.owner] = self._put(change, ref, item, read[at], noted, person, now_ms)
        for owner, person in people.items():
            if person != before[owner]:
                change.put(tables.people, person)

    def _put(
        self,
        change: LifecycleChange,
        ref: Ref,
        item: NewValue,
        row: Record | None,
        noted: Note | None,
        person: UserRow,
        now_ms: int,
    ) -> UserRow:
        stays = objection(ref, noted, now_ms)
        if stays is not None:
            raise stays.as_error()
        key = self._rows.key_for(self.fresh, ref, person, stays=self._is_kept)
        at_ms = now_ms if item.at_ms is None else item.at_ms
        after = self._rows.put(change, ref, key, item.value, at_ms)
        self._annotating.annotate(change, ref, noted, after, now_ms, ref.owner)
        if row is not None and (old := USERS.read(row).key) not in (person.key, key):
            self.doomed = self._rows.doom(change, old) or self.doomed
        own_key = person.key if self._is_kept else key or person.key
        return UserRow(ref.owner, person.values + (row is None), own_key)


class _UserDataEraser(Emptying):
    """Removes all values of a user, and lists the key for destruction."""

    def __init__(self, tables: LifecycleTables, rows: UserRows, user: str) -> None:
        super().__init__(tables, (tables.people, (user,)), USER, tables.users)
        self._rows = rows

    def _drop(self, change: LifecycleChange, ref: Ref, row: Record, note: Note | None) -> None:
        users_key = user_of(ref.owner, self._known).key
        drop_value(change, self._rows, ref, row, note, users_key)

    def _leave(self, change: LifecycleChange, owner: Record, gone: int, *, is_last: bool) -> None:
        person = self._tables.people.decode(owner)
        after = person._replace(values=person.values - gone)
        if is_last:
            self._rows.doom(change, after.key)
            after = after._replace(key=None)
        if not after.values:
            change.delete(self._owner)
        elif after != person:
            change.put(self._tables.people, after)
