"""Hashes of subjects: names are replaced by one-way hashes before they are stored.

Without a secret, a reader of the store can test whether a guessed name is a subject; with a secret
kept elsewhere this is impossible. The store has a **mark** of its secret, the hash of the empty
name, so that a wrong secret raises an error instead of finding nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from casstore.errors import InvalidInputError, SubjectSecretError
from casstore.format.digest import subject_hash
from casstore.records.lifecycles.tables import (
    SUBJECTS_SETTING,
    LifecycleChange,
    LifecycleTables,
    SettingRow,
)
from casstore.records.schema import RowPlace
from casstore.session import keys
from casstore.session.records import Record

_MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 4096


class Subjects:
    """Hashes the subjects of one store with one secret."""

    def __init__(self, tables: LifecycleTables, secret: bytes | None) -> None:
        if secret is not None and not (
            type(secret) is bytes and _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES
        ):
            raise InvalidInputError(
                f"secret must be {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES} random bytes, or None"
            )
        self._tables = tables
        self._secret = secret or b""
        # No subject has an empty name, so this hash cannot be that of a subject.
        self._mark = subject_hash(self._secret, b"").hex()
        self._known = False

    def hash(self, subject: str) -> str:
        """The hash of a subject in this store."""
        return subject_hash(self._secret, keys.id_bytes(subject, "a subject")).hex()

    def check(self) -> None:
        """SubjectSecretError if the store uses another secret."""
        self.find([])

    def find(self, places: Sequence[RowPlace]) -> list[Record | None]:
        """Read rows in one transaction; SubjectSecretError if the store uses another secret."""
        found = self._tables.find([*places, *self._unchecked()])
        self._require(found[len(places) :], None)
        return found[: len(places)]

    def read(
        self,
        change: LifecycleChange,
        places: Sequence[RowPlace],
        unconditional: Sequence[RowPlace] = (),
    ) -> list[Record | None]:
        """As ``LifecycleChange.read``; SubjectSecretError if the store uses another secret.

        If the store has no mark yet, the change puts it.
        """
        mark = self._unchecked()
        found = change.read([*places, *mark], unconditional)
        start, end = len(places), len(places) + len(mark)
        self._require(found[start:end], change)
        return found[:start] + found[end:]

    def _unchecked(self) -> list[RowPlace]:
        """The row of the store's mark; empty if it was checked before."""
        return [] if self._known else [(self._tables.settings, (SUBJECTS_SETTING,))]

    def _require(self, marks: Sequence[Record | None], change: LifecycleChange | None) -> None:
        for record in marks:
            if record is not None:
                if self._tables.settings.decode(record).value != self._mark:
                    raise SubjectSecretError
                self._known = True
            elif change is not None:
                change.put(self._tables.settings, SettingRow(SUBJECTS_SETTING, self._mark))
