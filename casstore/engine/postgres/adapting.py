"""What psycopg is told of our arrays, for statements that it sends by itself."""

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
    """Numbers of four bytes."""


class Longs(list[int]):
    """Numbers of eight bytes."""


class Blobs(list[bytes | None]):
    """Byte strings; None among them is NULL."""


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


class _BlobsDumper(Dumper):
    format = Format.BINARY
    oid = BYTEA_ARRAY

    def dump(self, obj: Any) -> Buffer:
        return blobs(obj)


def adapters_with_arrays() -> AdaptersMap:
    """What psycopg knows, and these arrays."""
    known = AdaptersMap(adapters)
    known.register_dumper(Ints, _IntsDumper)
    known.register_dumper(Longs, _LongsDumper)
    known.register_dumper(Blobs, _BlobsDumper)
    return known
