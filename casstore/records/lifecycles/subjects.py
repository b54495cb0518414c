"""Whom records are about: names become one-way hashes before they reach a row.

Without a secret anybody who has the store and guesses a name can see whether it is right; with
a secret kept elsewhere they cannot. The store remembers which secret it was begun with, so
that nobody is overlooked because the wrong one was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from casstore.errors import InvalidInputError, SubjectSecretError
from casstore.format.hashing import subject_hash
from casstore.records.lifecycles.tables import Change, Place, Tables
from casstore.session import keys
from casstore.session.records import Record

_SETTING: Final = ("subjects",)
_MIN_SECRET_BYTES: Final = 16
_MAX_SECRET_BYTES: Final = 4096


class Subjects:
    """The hashes of one store, made with one secret."""

    def __init__(self, tables: Tables, secret: bytes | None) -> None:
        if secret is not None and not (
            type(secret) is bytes and _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES
        ):
            raise InvalidInputError(f"a secret has at least {_MIN_SECRET_BYTES} random bytes")
        self._tables = tables
        self._secret = secret or b""
        # No subject has an empty name, so this is nobody's hash.
        self._mark = subject_hash(self._secret, b"").hex()
        self._known = False

    def hash(self, subject: str) -> str:
        """What stands for a subject in this store."""
        return subject_hash(self._secret, keys.id_bytes(subject, "a subject")).hex()

    def places(self) -> list[Place]:
        """What must be read before a hash is relied on, together with other rows."""
        return [] if self._known else [(self._tables.settings, _SETTING)]

    def require(self, read: Sequence[Record | None], change: Change | None = None) -> None:
        """Accept what was read of ``places``; with a change, write it down if it is new.

        SubjectSecretError if the store was begun with another secret.
        """
        for record in read:
            if record is not None:
                if record.value != self._mark:
                    raise SubjectSecretError
                self._known = True
            elif change is not None:
                change.put((self._tables.settings, _SETTING), self._mark)

    def check(self) -> None:
        """SubjectSecretError if the store was begun with another secret."""
        self.require(self._tables.find(self.places()))
