"""The bytes of a bundle: objects and rows of a session in one file with checksums.

    bundle  = magic ‖ block … ‖ trailer
    block   = type (1) ‖ codec (1) ‖ count (4) ‖ raw size (4) ‖ stored size (4) ‖ checksum (8)
              ‖ payload

Numbers are big-endian. The checksum covers the block's offset in the file, its header and its
payload, so a block that was moved or repeated is noticed like one that was changed. Objects are
written without their digests: a reader computes them, and refuses objects that no row leads to and
links to objects that are missing. Only a rope is written with its digest, because that is the
digest of its content (``format.tree``).
``docs/internals/format.md`` is the normative description.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError, LimitError, NotCanonicalError
from casstore.format import canonical
from casstore.format.digest import DIGEST_BYTES, Kind, plain_hash

MAGIC: Final = b"casstore bundle\n"
VERSION: Final = 4
SESSION: Final = "session"

HEADER: Final = 1
OBJECTS: Final = 2
ROWS: Final = 3
TRAILER: Final = 4

# type, codec, count, raw size, stored size
_BLOCK: Final = Struct(">BBIII")
_CHECKSUM_BYTES: Final = 8
BLOCK_HEADER_BYTES: Final = _BLOCK.size + _CHECKSUM_BYTES
_OBJECT: Final = Struct(">BI")
_OFFSET_BYTES: Final = 8

# A writer closes a block at this size.
BLOCK_TARGET_BYTES: Final = 256 << 10
# Enough for one object of the largest size, and its header.
MAX_BLOCK_BYTES: Final = (16 << 20) + 64
# The most lists and maps in a block of rows: 16 MiB could be 16 million empty lists, which take a
# gigabyte when they are decoded.
MAX_ROW_CONTAINERS: Final = 1 << 21
# The header and the trailer are short; a longer one is invalid.
MAX_EDGE_BYTES: Final = 64 << 10


class BlockHeader(NamedTuple):
    """The header of a block."""

    type: int
    codec: int
    entries: int
    raw_bytes: int
    stored_bytes: int
    checksum: bytes


class BundleHeader(NamedTuple):
    """The header of a bundle."""

    version: int
    kind: str
    #: True if objects are omitted that the reader's store is expected to have.
    thin: bool


class Totals(NamedTuple):
    """The trailer of a bundle: the totals to verify."""

    objects: int
    object_bytes: int
    rows: int
    #: BLAKE3 of everything before the trailer.
    digest: bytes


class PackedObject(NamedTuple):
    """An object in a block. ``name`` is its digest; None if the reader computes that."""

    kind: int
    name: bytes | None
    data: bytes
    #: The offset of its header in the inflated block.
    at: int


def checksum(offset: int, fields: bytes, payload: bytes) -> bytes:
    """The checksum of a block at this offset."""
    return plain_hash(offset.to_bytes(_OFFSET_BYTES, "big") + fields + payload, _CHECKSUM_BYTES)


def encode_block(
    offset: int, type_: int, codec: int, count: int, raw_bytes: int, payload: bytes
) -> bytes:
    """Encode a block that starts at ``offset`` of its file."""
    fields = _BLOCK.pack(type_, codec, count, raw_bytes, len(payload))
    return fields + checksum(offset, fields, payload) + payload


def decode_block_header(data: bytes) -> BlockHeader:
    """Decode the header of a block; ValueError if it is invalid."""
    type_, codec, count, raw_bytes, stored_bytes = _BLOCK.unpack_from(data)
    if not HEADER <= type_ <= TRAILER:
        raise ValueError(f"unknown block type {type_}")
    if raw_bytes > MAX_BLOCK_BYTES or stored_bytes > raw_bytes:
        raise ValueError(f"a block of {stored_bytes} bytes claims to inflate to {raw_bytes}")
    return BlockHeader(type_, codec, count, raw_bytes, stored_bytes, data[_BLOCK.size :])


def is_proven(offset: int, head: bytes, payload: bytes) -> bool:
    """True if this is the block that was written at this offset."""
    return checksum(offset, head[: _BLOCK.size], payload) == head[_BLOCK.size :]


def encode_object(kind: int, name: bytes, data: bytes) -> bytes:
    """Encode an object of a block."""
    return _OBJECT.pack(kind, len(data)) + (name if kind == Kind.ROPE else b"") + data


def packed_bytes(kind: int, size_bytes: int) -> int:
    """The bytes that an object of ``size_bytes`` takes in a block, with its header."""
    return _OBJECT.size + (DIGEST_BYTES if kind == Kind.ROPE else 0) + size_bytes


def object_at(raw: bytes, start: int) -> PackedObject:
    """The object that starts here in an inflated block; ValueError if it is truncated."""
    at = start + _OBJECT.size
    if len(raw) < at:
        raise ValueError("a block ends within an object")
    kind, size = _OBJECT.unpack_from(raw, start)
    name: bytes | None = None
    if kind == Kind.ROPE:
        name = raw[at : at + DIGEST_BYTES]
        at += DIGEST_BYTES
    if len(raw) - at < size:
        raise ValueError("a block ends within an object")
    return PackedObject(kind, name, raw[at : at + size], start)


def iter_objects(raw: bytes, count: int) -> Iterator[PackedObject]:
    """Cut an inflated block into its objects; ValueError where it cannot be cut."""
    at = 0
    for _ in range(count):
        item = object_at(raw, at)
        yield item
        at += packed_bytes(item.kind, len(item.data))
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes follow the last object of a block")


def encode_header(header: BundleHeader) -> bytes:
    """Encode the header."""
    return canonical.encode({"format": header.version, "kind": header.kind, "thin": header.thin})


def decode_header(data: bytes) -> BundleHeader:
    """Decode the header; ValueError if it is invalid. The caller checks the version."""
    value = canonical.decode(data)
    # A later version may add fields; its version number must stay readable.
    if type(value) is not dict or type(value.get("format")) is not int:
        raise NotCanonicalError("the header has no version")
    kind, thin = value.get("kind"), value.get("thin")
    if value["format"] == VERSION and (
        type(kind) is not str or type(thin) is not bool or len(value) != 3
    ):
        raise NotCanonicalError("the header is invalid for its version")
    return BundleHeader(value["format"], str(kind), thin is True)


def encode_totals(totals: Totals) -> bytes:
    """Encode the trailer."""
    return canonical.encode(list(totals))


def decode_totals(data: bytes) -> Totals:
    """Decode the trailer; ValueError if it is invalid."""
    value = canonical.decode(data)
    if (
        type(value) is not list
        or len(value) != 4
        or any(type(number) is not int or number < 0 for number in value[:3])
        or type(value[3]) is not bytes
    ):
        raise NotCanonicalError("the trailer is invalid")
    return Totals(*value)


def encode_rows(rows: Sequence[bytes]) -> bytes:
    """The content of a block of rows, from rows that are already encoded."""
    return canonical.list_header(len(rows)) + b"".join(rows)


def decode_rows(raw: bytes, count: int) -> list[list[Any]]:
    """Decode a block of rows; ValueError if it is invalid."""
    if canonical.most_containers(raw) > MAX_ROW_CONTAINERS:
        raise LimitError("a block of rows has too many lists and maps")
    rows = canonical.decode(raw)
    if type(rows) is not list or len(rows) != count:
        raise NotCanonicalError("the number of rows differs from the block header")
    for row in rows:
        if type(row) is not list or not row or type(row[0]) is not str:
            raise InvalidInputError("a row does not begin with the name of its kind")
    return rows
