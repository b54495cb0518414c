"""Arrays as PostgreSQL reads them in binary: numbers and byte strings, without a detour by text.

psycopg would look at every item to choose a type for it, and choose another one for small
numbers than for large ones; each choice is a statement of its own to the server. Here the type
is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct, pack
from typing import Any, Final

from psycopg import adapters
from psycopg.adapt import AdaptersMap, Buffer, Dumper
from psycopg.pq import Format

_INT4: Final = 23
_INT8: Final = 20
_BYTEA: Final = 17
_INT4_ARRAY: Final = 1007
_INT8_ARRAY: Final = 1016
_BYTEA_ARRAY: Final = 1001

_EMPTY: Final = Struct("!iiI")
_HEAD: Final = Struct("!iiIii")
_LENGTH: Final = Struct("!i")
_NULL: Final = _LENGTH.pack(-1)


class Ints(list[int]):
    """Numbers of four bytes."""


class Longs(list[int]):
    """Numbers of eight bytes."""


class Blobs(list[bytes | None]):
    """Byte strings; None among them is NULL."""


def _numbers(items: list[int], oid: int, size: int, code: str) -> bytes:
    if not items:
        return _EMPTY.pack(0, 0, oid)
    pairs: list[int] = [size] * (2 * len(items))
    pairs[1::2] = items
    return _HEAD.pack(1, 0, oid, len(items), 1) + pack("!" + f"i{code}" * len(items), *pairs)


def _blobs(items: Iterable[bytes | None], count: int) -> bytes:
    if not count:
        return _EMPTY.pack(0, 0, _BYTEA)
    parts: list[bytes] = [b""]
    has_null = 0
    for item in items:
        if item is None:
            has_null = 1
            parts.append(_NULL)
        else:
            parts.append(_LENGTH.pack(len(item)))
            parts.append(item)
    parts[0] = _HEAD.pack(1, has_null, _BYTEA, count, 1)
    return b"".join(parts)


class _IntsDumper(Dumper):
    format = Format.BINARY
    oid = _INT4_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return _numbers(obj, _INT4, 4, "i")


class _LongsDumper(Dumper):
    format = Format.BINARY
    oid = _INT8_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return _numbers(obj, _INT8, 8, "q")


class _BlobsDumper(Dumper):
    format = Format.BINARY
    oid = _BYTEA_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return _blobs(obj, len(obj))


def adapters_with_arrays() -> AdaptersMap:
    """What psycopg knows, and these arrays."""
    known = AdaptersMap(adapters)
    known.register_dumper(Ints, _IntsDumper)
    known.register_dumper(Longs, _LongsDumper)
    known.register_dumper(Blobs, _BlobsDumper)
    return known
