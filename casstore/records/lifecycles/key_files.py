"""Key stores, which keep the keys of user data outside the store: ``KeyStore``, ``FileKeys``.

``FileKeys`` keeps them in a directory, one file for each key:

    NAME.key         the key, as 64 hexadecimal digits and a line end
    NAME.destroyed   empty: there was such a key

Each file is written atomically and is durable before the call returns. The directory must not lie
inside a store, nor be stored with its backups: both together make erased values readable.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from casstore.engine.files import open_regular, path_text, storage_error, sync_directory, write_at
from casstore.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    KeyDestroyedError,
    KeyMissingError,
    StorageError,
)

#: The size of every key.
KEY_BYTES: Final = 32
_KEY: Final = ".key"
_DESTROYED: Final = ".destroyed"
_PART: Final = ".part"
_NAME: Final = re.compile(r"[0-9a-z][0-9a-z.-]{0,127}", re.ASCII)
_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
_OTHERS: Final = 0o077
# Larger than any valid key file.
_MAX_FILE_BYTES: Final = 1024
# A file that every store directory has.
_STORE_FILE: Final = "data.mdb"


class KeyStore(Protocol):
    """Stores keys: in files (``FileKeys``), or in a key management service.

    A name is used for one key only: its destruction is final. Safe to call from many threads and
    processes. A key is durable when ``create`` returns, and cannot be recovered when ``destroy``
    returns, also not from copies of the key store.
    """

    def create(self, name: str) -> bytes:
        """Create a key of 32 random bytes under a new name."""
        ...

    def get(self, name: str) -> bytes:
        """The key; KeyDestroyedError if destroyed, KeyMissingError if it never existed here."""
        ...

    def destroy(self, name: str) -> bool:
        """Destroy a key and record its destruction; repeating it is allowed.

        False, and nothing is recorded, if the key never existed here: another key store has it.
        """
        ...


def check_key_store(keys: Any) -> None:
    """InvalidInputError if ``keys`` is not a key store."""
    if not all(callable(getattr(keys, name, None)) for name in ("create", "get", "destroy")):
        raise InvalidInputError(
            f"keys must be a key store such as FileKeys(directory), got {type(keys).__name__}"
        )


class FileKeys:
    """Keys in files of a directory that only its owner can read.

    The directory is created if it does not exist. StorageError if others may read it,
    InvalidInputError if it lies inside a store.

    >>> life = Lifecycles(store, keys=FileKeys(place / "keys"))
    >>> ref = life.users.put("anna", "address", "Ulm")
    >>> life.users.erase("anna").keys_destroyed  # what backups have of it is unreadable now
    1
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        place = Path(path_text(directory)).absolute()
        try:
            for above in (place.resolve(), *place.resolve().parents):
                if (above / _STORE_FILE).exists():
                    raise InvalidInputError(
                        f"{place} lies inside the store {above}: keys stored with the data protect "
                        "nothing; use a directory elsewhere"
                    )
            place.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            self._require_private(place)
        except OSError as exc:
            raise storage_error(f"cannot use {place} for keys", exc) from exc
        self._directory = place

    def create(self, name: str) -> bytes:
        """Create a key; ConflictError if the name is in use, KeyDestroyedError if it was in use.

        >>> keys = FileKeys(place / "keys")
        >>> keys.create("k1") == keys.get("k1")
        True
        """
        file, gone = self._file(name, _KEY), self._file(name, _DESTROYED)
        key = secrets.token_bytes(KEY_BYTES)
        part = self._directory / f"{secrets.token_hex(8)}{_PART}"
        try:
            if gone.exists():
                raise KeyDestroyedError(name)
            self._write(part, key.hex().encode() + b"\n", os.O_EXCL)
            try:
                # Unlike a rename, link fails if the file exists.
                os.link(part, file)
            finally:
                part.unlink()
            sync_directory(str(self._directory))
        except FileExistsError:
            raise ConflictError(f"there is a key {name} already; names are used once") from None
        except OSError as exc:
            raise storage_error(f"cannot write {file}", exc) from exc
        return key

    def get(self, name: str) -> bytes:
        """The key; KeyDestroyedError if it was destroyed, KeyMissingError if it never existed here.

        >>> keys = FileKeys(place / "keys")
        >>> len(keys.create("k1")), len(keys.get("k1"))
        (32, 32)
        """
        file = self._file(name, _KEY)
        try:
            with open(open_regular(str(file), follow=True), "rb") as opened:
                self._require_private(file, opened.fileno())
                text = opened.read(_MAX_FILE_BYTES)
        except FileNotFoundError:
            if self._file(name, _DESTROYED).exists():
                raise KeyDestroyedError(name) from None
            raise KeyMissingError(name) from None
        except OSError as exc:
            raise storage_error(f"cannot read {file}", exc) from exc
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            # A crash while a key is destroyed leaves this state; the key is lost either way.
            if self._file(name, _DESTROYED).exists():
                raise KeyDestroyedError(name)
            raise CorruptionError(f"{file} holds no key; restore it from a copy")
        return key

    def destroy(self, name: str) -> bool:
        """Mark a key as destroyed, then overwrite and remove it. False if it never existed here.

        A copy-on-write file system may keep the old bytes for a while.

        >>> keys = FileKeys(place / "keys")
        >>> key = keys.create("k1")
        >>> keys.destroy("k1")
        True
        >>> try:
        ...     keys.get("k1")
        ... except casstore.errors.KeyDestroyedError:
        ...     print("gone for good")
        gone for good
        """
        file, gone = self._file(name, _KEY), self._file(name, _DESTROYED)
        try:
            if not (file.exists() or gone.exists()):
                return False
            self._write(gone, b"")
            sync_directory(str(self._directory))
            # Another process may be destroying the same key.
            with suppress(FileNotFoundError):
                # Do not follow a symbolic link: its target would be overwritten.
                with open(open_regular(str(file), os.O_RDWR), "r+b") as opened:
                    opened.write(b"\0" * (2 * KEY_BYTES + 1))
                    opened.flush()
                    os.fsync(opened.fileno())
                file.unlink()
            sync_directory(str(self._directory))
        except OSError as exc:
            raise storage_error(f"cannot destroy {file}", exc) from exc
        return True

    def _file(self, name: str, ending: str) -> Path:
        if type(name) is not str or not _NAME.fullmatch(name):
            raise InvalidInputError(
                "name must have 1 to 128 characters, a-z, 0-9, '.' or '-', and begin with a letter "
                f"or digit, got {name!r}"
            )
        return self._directory / (name + ending)

    def _write(self, path: Path, content: bytes, flags: int = 0) -> None:
        handle = open_regular(str(path), os.O_WRONLY | os.O_CREAT | flags, _FILE_MODE)
        try:
            write_at(handle, content, 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _require_private(self, path: Path, handle: int | None = None) -> None:
        if os.stat(path if handle is None else handle).st_mode & _OTHERS:
            raise StorageError(f"others may read {path}: chmod go-rwx {path}")
