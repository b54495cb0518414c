"""Keys for user data, kept outside the store: what a key store must do, and in which order.

A key is made for one name, once, and a name is never used again: its destruction is final.
Names hold no names of people (``subjects``).
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from casstore.errors import InvalidInputError

#: Of every key.
KEY_BYTES: Final = 32


class KeyStore(Protocol):
    """Where keys are kept: files (``FileKeys``), or a key management service.

    Safe to call from many threads and processes. A key must be safe on the disk when
    ``create`` returns, and beyond recovery when ``destroy`` does; copies of the key store,
    if there are any, must forget it as well.
    """

    def create(self, name: str) -> bytes:
        """Make a key of 32 random bytes under a new name."""
        ...

    def get(self, name: str) -> bytes:
        """The key; KeyDestroyedError if it was destroyed, KeyMissingError if it never was here."""
        ...

    def destroy(self, name: str) -> bool:
        """Destroy a key and remember that it was; repeating it is allowed.

        False, and nothing is remembered, if there never was such a key here: it is another key
        store's, which has yet to destroy it.
        """
        ...


def check_key_store(keys: Any) -> None:
    """Refuse what keeps no keys: the first value would be too late to find out."""
    if not all(callable(getattr(keys, name, None)) for name in ("create", "get", "destroy")):
        raise InvalidInputError(
            f"keys are kept by a key store, as FileKeys(directory), not by {type(keys).__name__}"
        )
