"""The class ``Digest``: 32 bytes that print as hexadecimal digits (see ``hashing``)."""

from __future__ import annotations

from casstore.errors import InvalidInputError
from casstore.format.hashing import DIGEST_BYTES, plain_hash, plain_hasher


class Digest(bytes):
    """A 32-byte name. Prints as 64 hexadecimal digits; compares and hashes as bytes.

    >>> Digest.of_blob(b"").hex()[:12]
    'af1349b9f5f9'
    """

    __slots__ = ()

    def __new__(cls, raw: bytes) -> Digest:
        if not isinstance(raw, bytes | bytearray | memoryview):
            raise InvalidInputError(f"a digest must be bytes, got {type(raw).__name__}")
        if len(raw) != DIGEST_BYTES:
            raise InvalidInputError(f"a digest must have {DIGEST_BYTES} bytes, got {len(raw)}")
        return super().__new__(cls, raw)

    @classmethod
    def known(cls, raw: bytes) -> Digest:
        """A digest that was hashed or looked up as one, and needs no check.

        >>> Digest.known(bytes(32)) == Digest(bytes(32))
        True
        """
        return bytes.__new__(cls, raw)

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """Decode 64 hexadecimal digits; InvalidInputError for anything else.

        >>> digest = Digest.of_blob(b"hello")
        >>> Digest.from_hex(str(digest)) == digest
        True
        """
        try:
            # fromhex skips white space; only 64 digits leave 32 bytes of 64 characters.
            return cls(bytes.fromhex(text) if len(text) == 2 * DIGEST_BYTES else b"")
        except (ValueError, TypeError) as exc:
            raise InvalidInputError(f"not a digest: {text!r} (64 hexadecimal digits)") from exc

    @classmethod
    def of_blob(cls, content: bytes) -> Digest:
        """The digest of a blob with this content.

        >>> Digest.of_blob(b"hello") == store.put_blob(b"hello")
        True
        """
        return bytes.__new__(cls, plain_hash(content))

    def __str__(self) -> str:
        return self.hex()

    def __repr__(self) -> str:
        return f"Digest({self.hex()!r})"


class BlobHasher:
    """The digest of a blob that arrives in parts."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = plain_hasher()

    def update(self, part: bytes) -> None:
        """Add the next part."""
        self._state.update(part)

    def digest(self) -> Digest:
        """The digest of all parts so far."""
        return Digest(self._state.digest())
