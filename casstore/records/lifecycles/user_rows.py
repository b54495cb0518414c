"""The rows of user data, and the keys that they are under.

A user has one key for what may go at any time. A value that is held or sealed has a key of
its own, so that the user's can be destroyed whatever stays. Keys are destroyed after the
rows are gone, by a list that is written together with their removal: a crash in between
leaves the list, and the next call that removes something goes on with it.
"""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any, Final, NamedTuple

from casstore.errors import (
    BusyError,
    ConflictError,
    InvalidInputError,
    KeyMissingError,
    NotFoundError,
)
from casstore.records.lifecycles.contents import content, read_content
from casstore.records.lifecycles.keys import KeyStore
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.tables import Change, Tables, fields
from casstore.session.records import Record

_RANDOM_BYTES: Final = 16
# After these nothing was written.
_REFUSALS: Final = (InvalidInputError, NotFoundError, ConflictError, BusyError)


class Person(NamedTuple):
    """The row of a user: how many values there are, and the key for those that may go."""

    values: int
    key: str | None

    @staticmethod
    def of(record: Record | None) -> Person:
        """As a row says; nothing if there is none."""
        if record is None:
            return Person(0, None)
        told = fields(record)
        return Person(told["n"], told.get("k"))

    def to_value(self) -> dict[str, Any]:
        """As the row holds it."""
        return {"n": self.values} if self.key is None else {"n": self.values, "k": self.key}


class FreshKeys:
    """Keys made for one write, which may have to be tried several times.

    Those that it did not need in the end are destroyed, but only once it has happened, or was
    refused: after any other error it may have happened all the same, and a key too many does
    no harm. A context manager around the write.
    """

    def __init__(self, keys: KeyStore | None) -> None:
        self._keys = keys
        self._made: dict[str, str] = {}
        self._used: set[str] = set()

    def __enter__(self) -> FreshKeys:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(exc, _REFUSALS):
            self._used.clear()
        elif exc is not None:
            return
        self._destroy_unused()

    def begin(self) -> None:
        """Another try begins."""
        self._used.clear()

    def take(self, user: str, purpose: str) -> str | None:
        """The name of a new key of a user; None if nothing is encrypted here."""
        if self._keys is None:
            return None
        if purpose not in self._made:
            name = f"{user}.{secrets.token_hex(_RANDOM_BYTES)}"
            self._keys.create(name)
            self._made[purpose] = name
        self._used.add(purpose)
        return self._made[purpose]

    def _destroy_unused(self) -> None:
        for purpose, name in self._made.items():
            if purpose not in self._used and self._keys is not None:
                self._keys.destroy(name)


class UserRows:
    """User data of one store, with the keys that were given."""

    def __init__(self, tables: Tables, keys: KeyStore | None) -> None:
        self._tables = tables
        self.keys = keys

    def opened(self, ref: Ref, told: dict[str, Any]) -> Any:
        """The value of a row. KeyMissingError, KeyDestroyedError if there is no key for it."""
        held = read_content(self._tables.store, told)
        key = told.get("k")
        if key is None:
            return held
        if self.keys is None:
            raise KeyMissingError(key)
        from casstore.records.lifecycles import encryption

        place = encryption.Place(key, ref.owner, ref.name)
        return encryption.open_sealed(self.keys, place, held)

    def put(self, change: Change, ref: Ref, key: str | None, value: Any, at_ms: int) -> bytes:
        """Write a value, under a key if there is one; the row as it will be."""
        told: dict[str, Any] = {"t": at_ms}
        if key is not None and self.keys is not None:
            from casstore.records.lifecycles import encryption

            told["k"] = key
            value = encryption.seal(self.keys, encryption.Place(key, ref.owner, ref.name), value)
        return change.put(self._tables.payload(ref), {**told, **content(change.draft, value)})

    def key_for(self, fresh: FreshKeys, ref: Ref, person: Person, *, stays: bool) -> str | None:
        """Under which key a value goes. KeyMissingError instead of in clear beside encrypted."""
        if self.keys is None:
            if person.key is not None:
                raise KeyMissingError(person.key)
            return None
        if stays:
            return fresh.take(ref.owner, f"own {ref.to_text()}")
        return person.key or fresh.take(ref.owner, f"of {ref.owner}")

    def doom(self, change: Change, key: str | None) -> bool:
        """Let a key be destroyed once the change has happened; False if there is none."""
        if key is None:
            return False
        change.put((self._tables.doomed, (key,)), None)
        return True

    def destroy_here(self) -> None:
        """Destroy what is listed, if anything can be."""
        # Who has no keys would read the whole list, which grows until somebody comes who has.
        if self.keys is not None:
            self.destroy_doomed()

    def destroy_doomed(self) -> tuple[int, int]:
        """Destroy what is listed: how many keys, and how many wait for the store that has them."""
        destroyed = waiting = 0
        for record in self._tables.doomed.scan():
            name = record.key[0]
            if self.keys is None or not self.keys.destroy(name):
                waiting += 1
                continue

            def forget(change: Change, name: str = name) -> None:
                change.delete((self._tables.doomed, (name,)))

            self._tables.change("the list of keys", forget)
            destroyed += 1
        return destroyed, waiting
