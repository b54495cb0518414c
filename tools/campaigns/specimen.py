"""A small store of known content, the same for the same seed, for campaigns to damage.

It has something of everything: blobs of one and of many chunks, small values, lists
and maps that became trees, rows in several tables, and, because it was written in
several commits with rows replaced and removed in between, pages that are free. Some of its
slabs were packed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import casstore
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, RowKey, Write
from casstore.format.digest import Digest

ENGINES = (0, 1)
TABLES = ("heads", "history", "pins", "records")
_ROWS = 48
_BATCHES = 4
_PACKED_AFTER = 1


class Contents(NamedTuple):
    """The complete content of a valid specimen."""

    items: Mapping[Digest, Any]
    rows: Mapping[RowKey, bytes]


def _batches(seed: int) -> list[list[Any]]:
    rng = random.Random(seed)
    items: list[Any] = [{"role": "user", "n": n, "text": f"hello {n}"} for n in range(120)]
    items += [rng.randbytes(rng.randrange(1, 900)) for _ in range(24)]
    items += [f"word {rng.randrange(99)} " * rng.randrange(10, 200) for _ in range(24)]
    items += [[f"entry {n} {rng.random()}" for n in range(size)] for size in (3, 150, 300)]
    items += [{f"key {n}": rng.random() for n in range(size)} for size in (3, 100, 200)]
    items += [rng.randbytes(70_000), b"log line %d\n" * 9_000, None, "", b"", [], {}, -1, 0.5]
    rng.shuffle(items)
    return [items[start::_BATCHES] for start in range(_BATCHES)]


def _row(table: str, number: int, version: int) -> PutRow:
    key = b"%s/%04d" % (table.encode(), number)
    return PutRow(table, key, b"%s version %d " % (key, version) * (1 + number % 7))


def _row_changes() -> list[list[PutRow | DeleteRow]]:
    """One list per batch. The first rows are replaced in every batch, the last removed at the end.

    A large row that comes and goes leaves a run of free pages.
    """
    changes: list[list[PutRow | DeleteRow]] = []
    for version in range(_BATCHES):
        numbers = range(_ROWS) if not version else range(_ROWS // 3)
        changes.append([_row(table, number, version) for table in TABLES for number in numbers])
    changes[1].append(PutRow("records", b"large", bytes(range(256)) * 80))
    changes[-1].append(DeleteRow("records", b"large"))
    changes[-1] += [
        DeleteRow(table, _row(table, number, 0).key)
        for table in TABLES
        for number in range(_ROWS - 8, _ROWS)
    ]
    return changes


def contents(seed: int) -> Contents:
    """The content of a specimen of this seed, according to the reference engine."""
    store = casstore.Store(MemoryEngine())
    items: dict[Digest, Any] = {}
    for batch in _batches(seed):
        items.update(zip(store.put_many(batch), batch, strict=True))
    rows: dict[RowKey, bytes] = {}
    for changes in _row_changes():
        for change in changes:
            place = RowKey(change.table, change.key)
            if isinstance(change, PutRow):
                rows[place] = change.value
            else:
                rows.pop(place, None)
    store.close()
    return Contents(items, rows)


def build(path: Path, seed: int, *, lmdb_version: int) -> bytes:
    """Make a specimen at ``path``, close it, and return the bytes of its data file."""
    with casstore.open(path, lmdb_version=lmdb_version) as store:
        for number, (batch, rows) in enumerate(zip(_batches(seed), _row_changes(), strict=True)):
            store.put_many(batch)
            store.engine.write(Write(rows=rows))
            if number == _PACKED_AFTER:
                # Slabs of both layouts: those that were packed, and what came later.
                store.pack(min_age_ms=0)
    return (path / "data.mdb").read_bytes()


def verify(store: casstore.Store) -> int:
    """Let the engine check all it holds: the number of objects, or CorruptionError."""
    engine = store.engine
    assert isinstance(engine, LmdbEngine), "only an engine with files has anything to check"
    return engine.verify()
