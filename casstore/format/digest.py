"""Digests: the BLAKE3-256 of an object's canonical, uncompressed bytes, and the class ``Digest``.

The digest of a blob is plain BLAKE3, so ``b3sum`` of its content prints it. Every other kind is
hashed in derive-key mode with its own context. So a blob whose bytes equal another object has a
different digest; otherwise storing it would replace the object and lose its links. A rope stands
for a long blob and is stored under the digest of that blob (see ``tree``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from casstore.errors import CorruptionError, InvalidInputError

DIGEST_BYTES: Final = 32


def plain_hasher() -> blake3:
    """A plain BLAKE3 hasher, for data that arrives in parts."""
    return blake3()


def plain_hash(data: bytes, length: int = DIGEST_BYTES) -> bytes:
    """Plain BLAKE3: the digest of a blob, and hashes for checksums and for where pieces end."""
    return blake3(data).digest() if length == DIGEST_BYTES else blake3(data).digest(length=length)


class Kind:
    """The kind of an object. The number is stored with it and selects its digest context."""

    BLOB: Final = 0
    ROPE: Final = 1
    CHUNKS: Final = 2
    VALUE: Final = 3
    LIST: Final = 4
    MAP: Final = 5
    NODE: Final = 6
    MANIFEST: Final = 7
    INDEX: Final = 8


KIND_NAMES: Final = {
    Kind.BLOB: "blob",
    Kind.ROPE: "rope",
    Kind.CHUNKS: "chunks",
    Kind.VALUE: "value",
    Kind.LIST: "list",
    Kind.MAP: "map",
    Kind.NODE: "node",
    Kind.MANIFEST: "manifest",
    Kind.INDEX: "index",
}

# One frozen context per kind that carries links. A context is never reused for
# another layout: a changed layout gets a new kind or a new context.
_CONTEXTS: Final = {
    Kind.ROPE: "casstore 2026-11 rope v1",
    Kind.CHUNKS: "casstore 2026-11 chunks v1",
    Kind.VALUE: "casstore 2026-11 value v1",
    Kind.LIST: "casstore 2026-11 list v1",
    Kind.MAP: "casstore 2026-11 map v1",
    Kind.NODE: "casstore 2026-11 node v1",
    Kind.MANIFEST: "casstore 2026-11 manifest v4",
    Kind.INDEX: "casstore 2026-11 index v1",
}

# Contexts of hashes that do not name an object.
TURN_CONTEXT: Final = "casstore 2026-11 turn v1"
SUBJECT_CONTEXT: Final = "casstore 2026-11 subject v1"

#: A hasher for each kind, to be copied: a new one would cost one more compression, of its context.
HASHERS: Final = {kind: blake3(derive_key_context=text) for kind, text in _CONTEXTS.items()}
# A rope is stored under the digest of its content, not of its own bytes.
_HASHERS_OF_CONTENT: Final = {kind: hasher for kind, hasher in HASHERS.items() if kind != Kind.ROPE}


def name_piece(kind: int, data: bytes, _children: list[bytes]) -> bytes:
    """An ``Emit`` (see ``splitting``) that returns the digest of a piece and stores nothing."""
    return digest_of(kind, data)


def digest_of(kind: int, data: bytes) -> bytes:
    """The digest of an object. For the body of a rope: its seal (see ``tree``)."""
    if kind == Kind.BLOB:
        return plain_hash(data)
    hasher = HASHERS[kind].copy()
    hasher.update(data)
    return hasher.digest()


_TURN_HASHER: Final = blake3(derive_key_context=TURN_CONTEXT)


def turn_hash(data: bytes) -> bytes:
    """The hash by which a repeated turn is recognised (see ``session.turns``)."""
    hasher = _TURN_HASHER.copy()
    hasher.update(data)
    return hasher.digest()


def subject_hash(secret: bytes, subject: bytes) -> bytes:
    """The pseudonym of a person in rows: a one-way hash, with a secret that prevents guessing."""
    hasher = blake3(derive_key_context=SUBJECT_CONTEXT)
    hasher.update(len(secret).to_bytes(4, "big") + secret + subject)
    return hasher.digest()


def check_objects(digests: Sequence[bytes], objects: Sequence[tuple[int, bytes] | None]) -> None:
    """``check_object`` for many objects; None is skipped."""
    hashers = _HASHERS_OF_CONTENT
    for digest, item in zip(digests, objects, strict=True):
        if item is None:
            continue
        kind, data = item
        hasher = hashers.get(kind)
        if hasher is not None:
            # As ``digest_of`` does; inlined because everything read comes through here.
            hasher = hasher.copy()
            hasher.update(data)
            if hasher.digest() == digest:
                continue
        check_object(digest, kind, data)


def check_object(digest: bytes, kind: int, data: bytes) -> None:
    """Raise CorruptionError unless ``data`` is what was stored under ``digest`` (P1)."""
    if kind in _HASHERS_OF_CONTENT:
        sound = digest_of(kind, data) == digest
    elif kind == Kind.ROPE:
        # Its digest is that of its content; the seal proves the rope itself.
        body = data[DIGEST_BYTES:]
        sound = digest_of(kind, body) == data[:DIGEST_BYTES]
    else:
        sound = kind == Kind.BLOB and plain_hash(data) == digest
    if not sound:
        raise CorruptionError(
            f"object {digest.hex()} ({KIND_NAMES.get(kind, kind)}) does not match its digest"
        )


class Digest(bytes):
    """The 32 bytes that name an object. Prints as 64 hexadecimal digits; compares as bytes.

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
        """A digest from bytes that are known to be one: they are not checked.

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
            # fromhex skips white space: 64 characters with a space give fewer than 32 bytes.
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
    """Computes the digest of a blob that arrives in parts."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = plain_hasher()

    def update(self, part: bytes) -> None:
        """Add the next part."""
        self._state.update(part)

    def digest(self) -> Digest:
        """The digest of all parts so far."""
        return Digest(self._state.digest())
