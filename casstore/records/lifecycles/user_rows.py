"""The rows of user data, and the keys that encrypt them.

A user has one key for values that may be removed at any time. A held or sealed value has its own
key, so that the user's key can always be destroyed. The transaction that removes rows lists their
keys in ``life.doomed``; the keys are destroyed afterwards. After a crash in between, the next call
that removes user data continues with the list.
"""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any, Final

from casstore.errors import (
    BusyError,
    ConflictError,
    InvalidInputError,
    KeyMissingError,
    NotFoundError,
)
from casstore.records.lifecycles.key_files import KeyStore
from casstore.records.lifecycles.references import Ref
from casstore.records.lifecycles.tables import (
    PEOPLE,
    DoomedRow,
    LifecycleChange,
    LifecycleTables,
    UserRow,
    UserValueRow,
    content,
    read_content,
)
from casstore.session.records import Record

_RANDOM_BYTES: Final = 16
# Errors that guarantee that nothing was written.
_REFUSALS: Final = (InvalidInputError, NotFoundError, ConflictError, BusyError)


def user_of(user: str, record: Record | None) -> UserRow:
    """The row of a user; one with no values if there is no record."""
    return UserRow(user) if record is None else PEOPLE.read(record)


class FreshKeys:
    """New keys for one write, which may be retried.

    Unused keys are destroyed after the write has succeeded or was refused. After any other error
    the write may have succeeded, so the keys stay; an unused key does no harm. A context manager
    around the write.
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
        """Start another attempt."""
        self._used.clear()

    def take(self, user: str, purpose: str) -> str | None:
        """The name of a new key of a user, the same for a purpose in each attempt of the write.

        None without a key store.
        """
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
    """The user data of one store, with its key store."""

    def __init__(self, tables: LifecycleTables, keys: KeyStore | None) -> None:
        self._tables = tables
        self.keys = keys

    def opened(self, row: UserValueRow) -> Any:
        """The value of a row, decrypted; KeyMissingError or KeyDestroyedError without its key."""
        held = read_content(self._tables.store, row.content)
        if row.key is None:
            return held
        if self.keys is None:
            raise KeyMissingError(row.key)
        from casstore.records.lifecycles import encryption

        bound = encryption.BoundTo(row.key, row.user, row.name)
        return encryption.open_sealed(self.keys, bound, held)

    def put(
        self, change: LifecycleChange, ref: Ref, key: str | None, value: Any, at_ms: int
    ) -> bytes:
        """Write a value, encrypted if ``key`` is given; returns the row as stored."""
        used = None
        if key is not None and self.keys is not None:
            from casstore.records.lifecycles import encryption

            used = key
            value = encryption.seal(self.keys, encryption.BoundTo(key, ref.owner, ref.name), value)
        row = UserValueRow(ref.owner, ref.name, at_ms, content(change.draft, value), used)
        return change.put(self._tables.users, row)

    def key_for(self, fresh: FreshKeys, ref: Ref, person: UserRow, *, stays: bool) -> str | None:
        """The key for a value: its own if it ``stays`` (held or sealed), else the user's.

        None without a key store; KeyMissingError if the user has a key then.
        """
        if self.keys is None:
            if person.key is not None:
                raise KeyMissingError(person.key)
            return None
        if stays:
            return fresh.take(ref.owner, f"own {ref.to_text()}")
        return person.key or fresh.take(ref.owner, f"of {ref.owner}")

    def doom(self, change: LifecycleChange, key: str | None) -> bool:
        """List a key for destruction after the change is written; False if ``key`` is None."""
        if key is None:
            return False
        change.put(self._tables.doomed, DoomedRow(key))
        return True

    def destroy_here(self) -> None:
        """Destroy the listed keys if there is a key store."""
        # Without a key store no listed key can be destroyed, so the list is not read.
        if self.keys is not None:
            self.destroy_doomed()

    def destroy_doomed(self) -> tuple[int, int]:
        """Destroy the listed keys; returns how many, and how many are not in this key store."""
        destroyed = waiting = 0
        for record in self._tables.doomed.scan():
            name = record.key[0]
            if self.keys is None or not self.keys.destroy(name):
                waiting += 1
                continue

            def forget(change: LifecycleChange, name: str = name) -> None:
                change.delete((self._tables.doomed, (name,)))

            self._tables.change("the list of keys", forget)
            destroyed += 1
        return destroyed, waiting
