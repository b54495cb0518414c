"""List types that psycopg passes to the server as arrays of a fixed type (see ``arrays``).

For statements whose parameters psycopg encodes; ``request`` encodes those of a write itself.
"""

from __future__ import annotations

from typing import Any

from psycopg import adapters
from psycopg.adapt import AdaptersMap, Buffer, Dumper
from psycopg.pq import Format

from casstore.engine.postgres.arrays import (
    BYTEA_ARRAY,
    INT4_ARRAY,
    INT8_ARRAY,
    blobs,
    ints,
    longs,
)


class Ints(list[int]):
    """An array of four-byte integers."""


class Longs(list[int]):
    """An array of eight-byte integers."""


class ByteStrings(list[bytes | None]):
    """An array of byte strings; None is NULL."""


class _IntsDumper(Dumper):
    format = Format.BINARY
    oid = INT4_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return ints(obj)


class _LongsDumper(Dumper):
    format = Format.BINARY
    oid = INT8_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return longs(obj)


class _ByteStringsDumper(Dumper):
    format = Format.BINARY
    oid = BYTEA_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return blobs(obj)


def adapters_with_arrays() -> AdaptersMap:
    """The adapters of psycopg, extended by the types above."""
    known = AdaptersMap(adapters)
    known.register_dumper(Ints, _IntsDumper)
    known.register_dumper(Longs, _LongsDumper)
    known.register_dumper(ByteStrings, _ByteStringsDumper)
    return known
