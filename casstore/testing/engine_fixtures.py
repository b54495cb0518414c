"""Fixtures and helpers of the engine suites: engine under test, manual clock, sample objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import pytest

from casstore.engine.protocol import (
    TIME_BYTES,
    Engine,
    NewObject,
    ObjectInfo,
    PutRow,
    Row,
    RowKey,
    StoredObject,
    Write,
)
from casstore.format.digest import KIND_NAMES, Digest, Kind, digest_of

# A digest that no object in any suite has.
ABSENT = Digest.of_blob(b"an object that is never stored")


class EngineFactory(Protocol):
    """Returns a new, empty engine at each call."""

    def __call__(self, *, clock: Callable[[], int] | None = None) -> Engine: ...


class Reopen(Protocol):
    """Closes an engine and reopens its store, as another process would."""

    def __call__(self, engine: Engine) -> Engine: ...


class ManualClock:
    """A clock that advances only when it is set."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class EngineFixtures:
    """The fixtures of all engine suites. A subclass overrides ``make_engine``."""

    @pytest.fixture
    def make_engine(self) -> Iterator[EngineFactory]:
        """The factory to test with; closes every engine it made."""
        raise NotImplementedError(f"{type(self).__name__} must override the fixture make_engine")

    @pytest.fixture
    def engine(self, make_engine: EngineFactory) -> Engine:
        """One empty engine with its own clock."""
        return make_engine()

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The clock of ``clocked``."""
        return ManualClock()

    @pytest.fixture
    def clocked(self, make_engine: EngineFactory, clock: ManualClock) -> Engine:
        """One empty engine that uses ``clock``."""
        return make_engine(clock=clock)


# --- making ---------------------------------------------------------------------


def new_object(
    data: bytes, children: Sequence[bytes] = (), *, kind: int = Kind.VALUE, digest: bytes = b""
) -> NewObject:
    """An object with its correct digest, or with ``digest``: engines do not verify digests."""
    if not digest:
        known = kind in KIND_NAMES
        digest = digest_of(kind, data) if known else Digest.of_blob(bytes([kind]) + data)
    return NewObject(digest, kind, data, children)


def new_blob(data: bytes) -> NewObject:
    """A blob."""
    return new_object(data, kind=Kind.BLOB)


def new_parent(*children: NewObject) -> NewObject:
    """An object whose data contains the digests of its children."""
    digests = [child.digest for child in children]
    return new_object(b"parent of " + b", ".join(digests), digests)


def time_bytes(time_ms: int) -> bytes:
    """A time as rows store it, for conditions on times."""
    return time_ms.to_bytes(TIME_BYTES, "big")


# --- asking ---------------------------------------------------------------------


def put_objects(engine: Engine, *objects: NewObject) -> int:
    """Store objects in one write; returns how many were new."""
    return engine.write(Write(objects=objects)).new_objects


def put_row(engine: Engine, table: str, key: bytes, value: bytes) -> None:
    """Write one row."""
    engine.write(Write(rows=[PutRow(table, key, value)]))


def find_row(engine: Engine, table: str, key: bytes) -> bytes | None:
    """Read one row."""
    [value] = engine.get_rows([RowKey(table, key)])
    return value


def find_object(engine: Engine, digest: bytes) -> StoredObject | None:
    """Read one object."""
    [found] = engine.get_many([digest])
    return found


def all_objects(engine: Engine, *, limit: int = 1000) -> list[ObjectInfo]:
    """Every object, highest id first, read in pages of about ``limit``."""
    infos: list[ObjectInfo] = []
    before: int | None = None
    while page := engine.scan_objects(before=before, limit=limit):
        infos += page
        assert before is None or page[-1].id < before, "the scan does not advance"
        before = page[-1].id
    return infos


def all_rows(engine: Engine, table: str, *, limit: int = 1000) -> list[Row]:
    """Every row of a table in key order, read in pages of ``limit``."""
    rows: list[Row] = []
    start = b""
    while page := engine.scan_rows(table, start=start, limit=limit):
        rows += page
        assert page[0].key >= start, "the scan does not advance"
        start = page[-1].key + b"\x00"
    return rows


def info_of(engine: Engine, digest: bytes) -> ObjectInfo:
    """The metadata that a scan returns for one stored object."""
    [info] = [info for info in all_objects(engine) if info.digest == digest]
    return info


def assert_reads_back(engine: Engine, *objects: NewObject) -> None:
    """Each object is stored, with its kind and exact bytes (P1)."""
    digests = [item.digest for item in objects]
    assert engine.missing(digests) == []
    for item, found in zip(objects, engine.get_many(digests), strict=True):
        assert found is not None
        # Compared outside the assert, so that a failure report does not contain megabytes.
        same = found.data == item.data
        assert same, (
            f"{len(found.data)} bytes were read, not the {len(item.data)} bytes that were stored"
        )
        assert found.kind == item.kind
        assert type(found.data) is bytes
