"""Blobs of lash into their content: proven against their names, inflated within bounds.

A blob is stored as it is, or in an envelope of MessagePack: a descriptor, how it was compressed
(``None`` or ``Zlib``), and the content as bytes or as an array of numbers. Its name is the SHA-256
of the content in hex. lash takes one that is missing or damaged for one that was never there.
"""

from __future__ import annotations

import zlib
from hashlib import sha256
from typing import Any, Final

from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import DamagedSourceError, InvalidInputError
from casstore.format.canonical import unpack_trusted

#: What a blob may have at the most, in the database and unpacked. A checkpoint has a few MiB.
MAX_BLOB_BYTES: Final = 64 << 20

_STORED: Final = "None"
_ZLIB: Final = "Zlib"


class Blobs:
    """The blobs of a database."""

    def __init__(self, source: SqliteSource, max_bytes: int = MAX_BLOB_BYTES) -> None:
        self._source = source
        self._max_bytes = max_bytes
        #: The names of those that were asked for.
        self.seen: set[str] = set()

    def find(self, name: str) -> bytes | None:
        """The content of a blob; None if there is none. DamagedSourceError if it is another."""
        self.seen.add(name)
        asked = "SELECT length(content), typeof(content) FROM blobs WHERE hash = ?"
        for size, kind in self._source.ask(asked, (name,)):
            if kind != "blob":
                raise self.damaged(name, f"it is no blob but {kind}")
            if size > self._max_bytes:
                raise self.damaged(name, f"its {size} bytes are more than {self._max_bytes}")
            [(stored,)] = self._source.ask("SELECT content FROM blobs WHERE hash = ?", (name,))
            return self._opened(name, stored)
        return None

    def get(self, name: str, of: str) -> bytes:
        """The content of a blob that something needs; DamagedSourceError if there is none."""
        content = self.find(name)
        if content is None:
            raise self.damaged(name, f"it is missing, and {of} names it")
        return content

    def value(self, name: str, of: str) -> Any:
        """The value in a blob that something needs: its content is MessagePack."""
        content = self.get(name, of)
        try:
            return unpack_trusted(content)
        except InvalidInputError as exc:
            raise self.damaged(name, f"{of} is to be MessagePack, and is not") from exc

    def damaged(self, name: str, reason: str) -> DamagedSourceError:
        """The error for a blob that cannot be used."""
        return DamagedSourceError(str(self._source.path), f"blob {name}", reason)

    def _opened(self, name: str, stored: bytes) -> bytes:
        if sha256(stored).hexdigest() == name:
            return stored
        try:
            envelope = unpack_trusted(stored)
        except InvalidInputError as exc:
            raise self.damaged(name, "it is in no envelope, and not what its name says") from exc
        if type(envelope) is not dict or not {"compression", "content"} <= envelope.keys():
            raise self.damaged(name, "its envelope has no content")
        content = envelope["content"]
        if type(content) is list:
            try:
                content = bytes(content)
            except (TypeError, ValueError) as exc:
                raise self.damaged(name, "its content is no array of bytes") from exc
        if type(content) is not bytes:
            raise self.damaged(name, "its content is no bytes")
        compression = envelope["compression"]
        if compression == _ZLIB:
            content = self._inflated(name, content)
        elif compression != _STORED:
            raise self.damaged(name, f"{compression!r:.40} is no compression known here")
        found = sha256(content).hexdigest()
        if found != name:
            raise self.damaged(name, f"its content has the SHA-256 {found}")
        return content

    def _inflated(self, name: str, content: bytes) -> bytes:
        inflater = zlib.decompressobj()
        try:
            # A little more than may be: to see that there is more, and not how much.
            inflated = inflater.decompress(content, self._max_bytes + 1)
        except zlib.error as exc:
            raise self.damaged(name, f"it cannot be inflated: {exc}") from exc
        if len(inflated) > self._max_bytes:
            raise self.damaged(name, f"it inflates to more than {self._max_bytes} bytes")
        if not inflater.eof:
            raise self.damaged(name, "it ends in the middle")
        return inflated
