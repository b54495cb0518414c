"""Measures what the file's pages are used for, table by table and slab by slab.

Everything but the contents of objects is read, in short transactions: with concurrent writers
the figures come from several snapshots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from casstore.engine.lmdb import packing
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.creation import DICTIONARIES, META
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.page_arithmetic import PageCount, when_full
from casstore.engine.lmdb.tidying import count_pages
from casstore.engine.protocol import DamagedSlab, EngineSpace, SlabSpace, TableSpace
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES

# Rows and slabs read in one transaction, so that none is open long.
_BATCH_ROWS: Final = 4096
_BATCH_SLABS: Final = 256
_META_PAGES: Final = 2
# Pages that even a new file has: a table of free pages, and the pages of the last commits.
_FREE_LIST_PAGES: Final = 4

_Lengths = tuple[int, int]


def measure(env: Environment, progress: Callable[[int, int], None] | None) -> EngineSpace:
    """Measure; ``progress`` is called with the rows counted so far and their total."""
    with env.snapshot() as (_, view):
        log_commits = len(view.entries())
    if not env.readonly:
        # Commits that are only in the log take no pages of the tables yet, so apply them first.
        env.apply_log()
    databases: dict[str, Any] = env.databases
    with env.reading() as txn:
        stats = {name: txn.stat(database) for name, database in databases.items()}
        file = os.fstat(env.data_handle)
        lmdb_pages = count_pages(env.handle.stat())
    page_bytes: int = stats[META]["psize"]
    total = sum(stat["entries"] for stat in stats.values())
    tables: list[TableSpace] = []
    done = 0
    for name, database in databases.items():
        content = [0]
        tidy = when_full(
            _count(_lengths(env, database), content), page_bytes, env.page_header_bytes
        )
        pages: PageCount = count_pages(stats[name])
        tables.append(
            TableSpace(name, stats[name]["entries"], content[0], *pages, tidy_pages=tidy.total)
        )
        done += stats[name]["entries"]
        if progress is not None:
            progress(done, total)
    fixed = _META_PAGES + lmdb_pages.total
    return EngineSpace(
        file_bytes=file.st_size,
        allocated_bytes=file.st_blocks * 512,
        page_bytes=page_bytes,
        used_bytes=page_bytes * (fixed + sum(table.pages for table in tables)),
        tables=tuple(tables),
        slabs=_measure_slabs(env),
        dictionaries=stats[DICTIONARIES]["entries"],
        tidy_file_bytes=page_bytes
        * (fixed + _FREE_LIST_PAGES + sum(table.tidy_pages for table in tables)),
        log_bytes=env.recent.log_bytes,
        log_commits=log_commits,
    )


def _lengths(env: Environment, database: Any) -> Iterator[_Lengths]:
    """The lengths of the keys and values of a table, in order."""
    above: bytes | None = None
    while True:
        batch: list[_Lengths] = []
        with env.reading() as txn:
            cursor = txn.cursor(db=database)
            more = cursor.first() if above is None else cursor.set_range(above)
            if more and above is not None and bytes(cursor.key()) == above:
                more = cursor.next()
            while more and len(batch) < _BATCH_ROWS:
                key, value = cursor.item()
                batch.append((len(key), len(value)))
                above = bytes(key)
                more = cursor.next()
        yield from batch
        if not more:
            return


def _count(lengths: Iterator[_Lengths], content: list[int]) -> Iterator[_Lengths]:
    for key, value in lengths:
        content[0] += key + value
        yield key, value


def _measure_slabs(env: Environment) -> SlabSpace:
    count = small = stored = objects = dead_objects = 0
    raw = dead_raw = dead_stored = logical = 0
    damaged: list[DamagedSlab] = []
    next_id = 1
    more = True
    while more:
        with env.reading() as txn:
            cursor = txn.cursor(db=env.slabs)
            more = cursor.set_range(slabs.slab_key(next_id))
            for _ in range(_BATCH_SLABS):
                if not more:
                    break
                key, value = bytes(cursor.key()), bytes(cursor.value())
                last_id = int.from_bytes(key, "big")
                next_id = last_id + 1
                count += 1
                stored += len(value)
                more = cursor.next()
                try:
                    slab = packing.look_at(env, txn, key, value)
                except CorruptionError as exc:
                    damaged.append(DamagedSlab(last_id, str(exc)))
                    continue
                objects += len(slab.live)
                raw += slab.live_bytes + slab.dead_bytes
                dead_raw += slab.dead_bytes
                logical += slab.live_bytes + DIGEST_BYTES * _cut_links(slab)
                if slab.dead_bytes:
                    dead_objects += packing.dead_objects(slab)
                    payload = len(value) - slab.directory.payload_at
                    dead_stored += payload * slab.dead_bytes // (slab.live_bytes + slab.dead_bytes)
                if slab.live_bytes <= packing.SMALL_RAW_BYTES:
                    small += 1
    return SlabSpace(
        slabs=count,
        small_slabs=small,
        stored_bytes=stored,
        objects=objects,
        dead_objects=dead_objects,
        raw_bytes=raw,
        dead_raw_bytes=dead_raw,
        dead_stored_bytes=dead_stored,
        logical_bytes=logical,
        damaged=tuple(damaged),
    )


def _cut_links(slab: packing.StoredSlab) -> int:
    """The number of links that were cut out of live objects."""
    first = slab.directory.first_id
    gaps = slab.directory.gap_counts()
    return sum([gaps[object_id - first] for object_id in slab.live])
