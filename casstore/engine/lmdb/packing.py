"""Packing: small slabs become large ones. No id, digest or index row changes.

Small commits leave small slabs, and a slab costs the same to find and open whatever it
holds. A slab is a run of ids, so neighbours can be joined: their objects are inflated,
laid end to end and compressed together, harder than when they were new. Objects that the
index no longer names keep their place in the run and lose their bytes.

The work is done in steps. A step reads a few slabs and compresses without any lock; then
one short transaction puts the joined slab in their place, if they are still what was read.
Readers see either, whole. Whoever stops between two steps has lost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.cache import SlabCache
from casstore.engine.lmdb.compression import Compressor
from casstore.engine.lmdb.environment import Environment, translate
from casstore.engine.lmdb.journal import settle_now
from casstore.engine.lmdb.reader import SlabReader
from casstore.engine.lmdb.slab import Slab
from casstore.engine.protocol import PackReport
from casstore.format.digest import check_object

# A slab with this much in it is left as it is, unless most of it is dead: joining it with
# another would make one that is too large.
_SMALL_RAW_BYTES: Final = slabs.TARGET_RAW_BYTES // 2
# How many slabs one read transaction may look at.
_MAX_SLABS: Final = 1024


NOTHING: Final = PackReport(0, 0, 0, 0, 0)


class _Run(NamedTuple):
    """Neighbouring slabs as they lie in the file, decoded, and the ids that the index names."""

    stored: list[tuple[bytes, bytes]]
    decoded: list[Slab]
    live: set[int]


def pack(
    env: Environment, compressor: Compressor, progress: Callable[[PackReport], None] | None
) -> PackReport:
    """Join small slabs, from the oldest to the newest there was at the beginning."""
    env.require_writable()
    with env.reading() as txn:
        cursor = txn.cursor(db=env.slabs)
        newest = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
    # After that look, not before: everything up to the newest must be named by the index
    # alone. What others store from now on is named by the journal, and is not packed.
    settle_now(env)
    report = NOTHING
    next_id = 1
    while next_id <= newest:
        run, next_id = _read_run(env, compressor, next_id, newest)
        if run is None:
            continue
        if run.live or next_id > newest:
            report = report.plus(_join(env, compressor, run))
        else:
            report = report.plus(_drop(env, run))
        if progress is not None:
            progress(report)
    return report


def _read_run(
    env: Environment, compressor: Compressor, first_id: int, newest: int
) -> tuple[_Run | None, int]:
    """The next slabs to be joined, None if there is nothing to gain; where to go on from."""
    stored: list[tuple[bytes, bytes]] = []
    live: set[int] = set()
    raw_bytes = objects = dead_bytes = 0
    next_id = first_id
    with env.reading() as txn:
        cursor = txn.cursor(db=env.slabs)
        more = cursor.set_range(slabs.slab_key(first_id))
        for _ in range(_MAX_SLABS):
            if not more or int.from_bytes(cursor.key(), "big") > newest:
                next_id = newest + 1
                break
            key, value = bytes(cursor.key()), bytes(cursor.value())
            directory = slabs.read_directory(key, value)
            named = _named(env, txn, directory)
            kept = sum([directory.lengths[at - directory.first_id] for at in named])
            full = kept > _SMALL_RAW_BYTES
            room = (
                raw_bytes + kept <= slabs.TARGET_RAW_BYTES
                and objects + directory.objects <= slabs.MAX_OBJECTS
            )
            if stored and (full or not room):
                break
            next_id = int.from_bytes(key, "big") + 1
            stored.append((key, value))
            live |= named
            raw_bytes += kept
            objects += directory.objects
            dead_bytes += sum(directory.lengths) - kept
            if full:
                break
            more = cursor.next()
        removable = not live and next_id <= newest
        if len(stored) < 2 and dead_bytes <= raw_bytes and not removable:
            return None, next_id
        decoded = _decode(env, compressor, txn, stored, live)
    return _Run(stored, decoded, live), next_id


def _decode(
    env: Environment,
    compressor: Compressor,
    txn: lmdb.Transaction[memoryview],
    stored: list[tuple[bytes, bytes]],
    live: set[int],
) -> list[Slab]:
    """The slabs, every object proven: what is damaged is found here, not written anew."""
    reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor)
    decoded: list[Slab] = []
    for key, _ in stored:
        slab = reader.decode_at(int.from_bytes(key, "big"))
        for position in range(slab.directory.objects):
            if slab.first_id + position in live:
                item = reader.object(slab.first_id + position)
                check_object(slab.directory.digest(position), item.kind, item.data)
        decoded.append(slab)
    return decoded


def _named(
    env: Environment, txn: lmdb.Transaction[memoryview], directory: slabs.Directory
) -> set[int]:
    """The ids of a slab under which the index knows their objects."""
    named: set[int] = set()
    for position in range(directory.objects):
        row = txn.get(directory.digest(position), None, env.index)
        if row is not None and slabs.read_id(row) == directory.first_id + position:
            named.add(directory.first_id + position)
    return named


def _join(env: Environment, compressor: Compressor, run: _Run) -> PackReport:
    """Put one slab in the place of a run of them, if they are still what was read."""
    columns = slabs.Columns()
    stored_at_ms = dropped = 0
    for slab in run.decoded:
        directory = slab.directory
        # The youngest counts: nothing may look older than it is to a collector.
        stored_at_ms = max(stored_at_ms, directory.stored_at_ms)
        for position in range(directory.objects):
            alive = slab.first_id + position in run.live
            dropped += not alive and directory.lengths[position] > 0
            columns.add(slab, position, alive=alive)
    first_id = run.decoded[0].first_id
    key, value = columns.encode(first_id, stored_at_ms, compressor.compress_hard)
    before = sum([len(old) for _, old in run.stored])
    if not _replace(env, run, (key, value)):
        return NOTHING
    return PackReport(len(run.stored), 1, before, len(value), dropped)


def _drop(env: Environment, run: _Run) -> PackReport:
    """Remove slabs of which nothing is alive. Never the newest: ids go on after it."""
    if not _replace(env, run, None):
        return NOTHING
    before = sum([len(old) for _, old in run.stored])
    dropped = sum([slab.directory.objects for slab in run.decoded])
    return PackReport(len(run.stored), 0, before, 0, dropped)


def _replace(env: Environment, run: _Run, new: tuple[bytes, bytes] | None) -> bool:
    """Exchange the slabs in one transaction; False if somebody else has changed them."""
    with env.write_lock:
        env.gate.check()
        try:
            txn = env.begin_write()
            try:
                unchanged = all(txn.get(old, db=env.slabs) == was for old, was in run.stored)
                if unchanged:
                    for old, _ in run.stored:
                        txn.delete(old, db=env.slabs)
                    if new is not None:
                        # Under the key of the last, for that is the last id.
                        txn.put(*new, db=env.slabs)
                    txn.commit()
            finally:
                # After a commit there is nothing left to abort.
                txn.abort()
        except lmdb.Error as exc:
            raise translate(exc, env.path) from exc
        if not unchanged:
            return False
        env.announce()
        env.cover()
    return True
