"""Encodes arrays of integers and byte strings in PostgreSQL's binary format.

psycopg would inspect every item to choose a type, and choose a shorter type for small integers than
for large ones. The server would prepare another statement for each combination of types. Here the
type is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, pack, unpack_from
from typing import Final

# The type OIDs of the server.
BOOL: Final = 16
BYTEA: Final = 17
INT8: Final = 20
INT4: Final = 23
BYTEA_ARRAY: Final = 1001
INT4_ARRAY: Final = 1007
INT8_ARRAY: Final = 1016

TRUE: Final = b"\1"
FALSE: Final = b"\0"

_INT: Final = Struct("!i")
_LONG: Final = Struct("!q")
_EMPTY: Final = Struct("!iiI")
_HEAD: Final = Struct("!iiIii")
_LENGTH: Final = Struct("!i")
_NULL: Final = _LENGTH.pack(-1)


def int4(number: int) -> bytes:
    """A four-byte integer."""
    return _INT.pack(number)


def long(number: int) -> bytes:
    """An eight-byte integer."""
    return _LONG.pack(number)


def ints(items: list[int]) -> bytes:
    """An array of four-byte integers."""
    return _numbers(items, INT4, 4, "i")


def longs(items: list[int]) -> bytes:
    """An array of eight-byte integers."""
    return _numbers(items, INT8, 8, "q")


def blobs(items: Sequence[bytes | None]) -> bytes:
    """An array of byte strings; None is NULL."""
    if not items:
        return _EMPTY.pack(0, 0, BYTEA)
    parts: list[bytes] = [b""]
    has_null = 0
    for item in items:
        if item is None:
            has_null = 1
            parts.append(_NULL)
        else:
            parts.append(_LENGTH.pack(len(item)))
            parts.append(item)
    parts[0] = _HEAD.pack(1, has_null, BYTEA, len(items), 1)
    return b"".join(parts)


def read_longs(encoded: bytes) -> list[int]:
    """The items of an array of eight-byte integers without NULLs."""
    # Each item has its length before it; an empty array has only three header words.
    count = (len(encoded) - _HEAD.size) // 12
    return list(unpack_from("!" + "4xq" * count, encoded, _HEAD.size)) if count > 0 else []


def _numbers(items: list[int], oid: int, size: int, code: str) -> bytes:
    if not items:
        return _EMPTY.pack(0, 0, oid)
    pairs: list[int] = [size] * (2 * len(items))
    pairs[1::2] = items
    return _HEAD.pack(1, 0, oid, len(items), 1) + pack("!" + f"i{code}" * len(items), *pairs)
