"""Packing: joins small slabs into large ones. No id, digest or index row changes.

Small commits leave small slabs, and a slab takes the same time to find and open whatever its size.
A slab holds consecutive ids, so neighbours can be joined: their objects are inflated, concatenated
and compressed together, at a higher level than when they were new. Objects that the index no longer
names (dead ones) keep their id and lose their bytes. Neighbouring slabs that are joined, or one
slab that is rewritten, are a *run* (``SlabRun``).

The work is done in steps. A step reads a few slabs and compresses without any lock; then one
short transaction replaces them with the joined slab, if they are unchanged. Readers see either
state, complete. Stopping between two steps loses nothing.

Every live object is compared with its digest before it is rewritten. A damaged slab is reported and
left unchanged: rewriting it would give the damage, which a backup can repair, a valid checksum.

A slab is packed only when it is cold (stored before ``cold_before_ms``): a running agent reads its
latest commits next, and small slabs are quick to open. Also, while a session grows, every round of
packing would rewrite the last slab.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import is_named
from casstore.engine.lmdb.reader import SlabCache, SlabReader
from casstore.engine.lmdb.slab import Slab
from casstore.engine.lmdb.tidying import tidy
from casstore.engine.protocol import DamagedSlab, PackReport
from casstore.errors import CorruptionError, StorageFullError
from casstore.format.digest import check_object

# A slab with more live bytes than this is not joined with others: the result would be too large.
SMALL_RAW_BYTES: Final = slabs.PACKED_RAW_BYTES // 2
# On a full disk, slabs are joined into shorter ones, down to this length. LMDB stores a slab in
# contiguous pages, and may have short runs of free pages when it has no long run.
_LEAST_RAW_BYTES: Final = slabs.PACKED_RAW_BYTES // 16
# A slab is rewritten for its dead bytes alone if they are at least 1/_MANY_DEAD of it.
_MANY_DEAD: Final = 4
# A slab that is not joined is rewritten only if it becomes smaller by 1/_MIN_SAVING.
_MIN_SAVING: Final = 20
# How many slabs one read transaction may read.
_MAX_SLABS: Final = 1024
# This many consecutive ids without a live object end a run: in the joined slab each of them takes
# the length of a digest. Fewer are included: otherwise slabs that had a collected slab between them
# could never be joined.
_LONG_GAP: Final = 64

# The key in ``meta`` of the id up to which slabs were packed, in decimal. Slabs up to it are
# compressed at the high level already, and are rewritten only if they are partly dead, or joined.
PACKED_TO_KEY: Final = b"packed_to"
_ID_DIGITS: Final = 20

NOTHING: Final = PackReport(0, 0, 0, 0, 0)


class StoredSlab(NamedTuple):
    """A slab as stored, and its live objects: the ids in it that the index names."""

    key: bytes
    value: bytes
    directory: slabs.SlabDirectory
    live: frozenset[int]
    live_bytes: int
    dead_bytes: int

    @property
    def last_id(self) -> int:
        """The id under which the slab is stored."""
        return self.directory.first_id + self.directory.objects - 1


class SlabRun(NamedTuple):
    """Neighbouring slabs to be rewritten as one, decoded, all live objects proven by digest."""

    stored: list[StoredSlab]
    decoded: list[Slab]

    @property
    def is_dead(self) -> bool:
        """True if the run has no live object."""
        return not any(stored.live for stored in self.stored)

    @property
    def dead_bytes(self) -> int:
        """The bytes of the dead objects."""
        return sum([stored.dead_bytes for stored in self.stored])

    @property
    def dead_objects(self) -> int:
        """How many objects lose their bytes when the run is rewritten."""
        return sum([dead_objects(stored) for stored in self.stored])


class PackScope(NamedTuple):
    """Which slabs to read, and when a single slab is worth rewriting."""

    #: The last id of the newest slab to read.
    newest: int
    #: Skip slabs that were stored at this time or later.
    cold_before_ms: int | None
    #: Slabs that end above this id have not been compressed at the high level.
    packed_to: int
    #: A slab is rewritten if at least 1/many_dead of it is dead; 0: if any of it is.
    many_dead: int = _MANY_DEAD
    #: The size to which slabs are joined.
    target_bytes: int = slabs.PACKED_RAW_BYTES


class SlabSelection(NamedTuple):
    """What ``read_run`` decided about the next slabs."""

    #: Slabs to be rewritten as one.
    run: SlabRun | None
    #: Slabs to be left, because they would gain nothing or are too young.
    left: list[StoredSlab]
    damaged: list[DamagedSlab]
    #: The id from which to continue.
    next_id: int
    #: True if a slab was left because it is too young.
    young: bool


def pack(
    env: Environment,
    compressor: Compressor,
    *,
    cold_before_ms: int | None,
    prepare: Callable[[PackScope], None],
    progress: Callable[[PackReport], None] | None,
) -> PackReport:
    """Join small slabs, from the oldest to the one that is the newest now; then tidy tables.

    ``prepare`` is called with the scope before any slab is read.
    """
    env.require_writable()
    env.apply_log()
    scope = scope_of(env, cold_before_ms)
    prepare(scope)
    report = NOTHING
    next_id = 1
    packed_to = None
    while next_id <= scope.newest:
        selection = read_run(env, compressor, next_id, scope)
        if packed_to is None and selection.young:
            # This slab and later ones are too young: times ascend with ids, unless a clock was set
            # back.
            packed_to = selection.left[0].directory.first_id - 1
        if selection.damaged:
            report = report.plus(NOTHING._replace(damaged=tuple(selection.damaged)))
        if selection.run is not None:
            new = rewritten(selection.run, compressor, scope)
            if new != [(stored.key, stored.value) for stored in selection.run.stored]:
                try:
                    report = report.plus(_replace(env, selection.run, new))
                except StorageFullError:
                    if scope.target_bytes <= _LEAST_RAW_BYTES:
                        raise
                    scope = scope._replace(target_bytes=scope.target_bytes // 2)
                    continue
            if progress is not None:
                progress(report)
        next_id = selection.next_id
    _note_packed(env, scope, scope.newest if packed_to is None else packed_to)
    tidied = tidy(env)
    report = report.plus(tidied)
    if progress is not None and tidied.pages_saved:
        progress(report)
    return report


def scope_of(env: Environment, cold_before_ms: int | None) -> PackScope:
    """The scope for all slabs that exist now; or up to ``cold_before_ms``, unless it is None."""
    with env.reading() as txn:
        cursor = txn.cursor(db=env.slabs)
        newest = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
        row = txn.get(PACKED_TO_KEY, db=env.meta)
        text = b"0" if row is None else bytes(row)
    if not text.isdigit() or len(text) > _ID_DIGITS:
        raise CorruptionError(
            f"{env.path} is damaged: the id up to which it is packed is {text[:40]!r}"
        )
    return PackScope(newest, cold_before_ms, int(text))


def read_run(
    env: Environment,
    compressor: Compressor,
    first_id: int,
    scope: PackScope,
) -> SlabSelection:
    """The next slabs from ``first_id`` on: as many as can be joined, if that is worth it."""
    candidates: list[StoredSlab] = []
    damaged: list[DamagedSlab] = []
    raw_bytes = objects = gap = 0
    next_id = first_id
    young = False
    with env.reading() as txn:
        cursor = txn.cursor(db=env.slabs)
        more = cursor.set_range(slabs.slab_key(first_id))
        for _ in range(_MAX_SLABS):
            last_id = int.from_bytes(cursor.key(), "big") if more else 0
            if not more or last_id > scope.newest:
                next_id = scope.newest + 1
                break
            try:
                stored = look_at(env, txn, bytes(cursor.key()), bytes(cursor.value()))
            except CorruptionError as exc:
                if not candidates:
                    damaged.append(DamagedSlab(last_id, str(exc)))
                    next_id = last_id + 1
                break
            young = (
                scope.cold_before_ms is not None
                and stored.directory.stored_at_ms >= scope.cold_before_ms
            )
            full = young or stored.live_bytes > SMALL_RAW_BYTES
            # Dropped slabs leave gaps in the ids, and a slab is a run of ids without a gap.
            missing = stored.directory.first_id - next_id if candidates else 0
            fits = (
                raw_bytes + stored.live_bytes <= scope.target_bytes
                and objects + missing + stored.directory.objects <= slabs.MAX_OBJECTS
            )
            if candidates and (full or not fits or missing >= _LONG_GAP):
                young = False
                break
            objects += missing
            next_id = last_id + 1
            candidates.append(stored)
            raw_bytes += stored.live_bytes
            objects += stored.directory.objects
            gap = 0 if stored.live else gap + stored.directory.objects
            if full or (raw_bytes and gap >= _LONG_GAP):
                break
            more = cursor.next()
        if not candidates or young or not _is_worth_it(candidates, scope, next_id):
            return SlabSelection(None, candidates, damaged, next_id, young)
        decoded: list[Slab] = []
        for stored in candidates:
            try:
                decoded.append(_prove(env, compressor, txn, stored))
            except CorruptionError as exc:
                damaged.append(DamagedSlab(stored.last_id, str(exc)))
                next_id = stored.last_id + 1
                break
    proven = candidates[: len(decoded)]
    if not proven or not _is_worth_it(proven, scope, next_id):
        return SlabSelection(None, proven, damaged, next_id, young=False)
    return SlabSelection(SlabRun(proven, decoded), [], damaged, next_id, young=False)


def _is_worth_it(candidates: list[StoredSlab], scope: PackScope, next_id: int) -> bool:
    if len(candidates) > 1 or candidates[0].last_id > scope.packed_to:
        return True
    live, dead = candidates[0].live_bytes, candidates[0].dead_bytes
    if not candidates[0].live and next_id <= scope.newest:
        return True
    return dead > 0 and dead * scope.many_dead >= live + dead if scope.many_dead else dead > 0


def look_at(
    env: Environment,
    txn: lmdb.Transaction[memoryview],
    key: bytes,
    value: bytes,
) -> StoredSlab:
    """A slab as stored, with its live ids; CorruptionError if its directory is damaged."""
    directory = slabs.read_directory(key, value)
    live: list[int] = []
    live_bytes = 0
    for position in range(directory.objects):
        object_id = directory.first_id + position
        if is_named(txn, env, None, directory.digest(position), object_id):
            live.append(object_id)
            live_bytes += directory.lengths[position]
    dead_bytes = sum(directory.lengths) - live_bytes
    return StoredSlab(key, value, directory, frozenset(live), live_bytes, dead_bytes)


def _prove(
    env: Environment, compressor: Compressor, txn: lmdb.Transaction[memoryview], stored: StoredSlab
) -> Slab:
    """The slab, with every live object checked against its digest."""
    reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor)
    slab = reader.decode_at(stored.last_id)
    for object_id in sorted(stored.live):
        digest = slab.directory.digest(object_id - slab.first_id)
        check_object(digest, *reader.object(object_id))
    return slab


def rewritten(run: SlabRun, compressor: Compressor, scope: PackScope) -> list[tuple[bytes, bytes]]:
    """What replaces a run: one slab; nothing, if it has no live object; or the stored slab itself,
    if rewriting it would save too little.
    """
    if run.is_dead and run.stored[-1].last_id < scope.newest:
        return []
    joined = _encode(run, compressor, newest=scope.newest)
    _require_same(run, joined, compressor)
    before = len(run.stored[0].value)
    alone = len(run.stored) == 1 and not run.dead_bytes
    if alone and before - len(joined[1]) < before // _MIN_SAVING:
        return [(run.stored[0].key, run.stored[0].value)]
    return [joined]


def _encode(run: SlabRun, compressor: Compressor, *, newest: int) -> tuple[bytes, bytes]:
    """The one slab that replaces a run of slabs, from its first live object to its last.

    The last slab of the store ends in the newest id, live or not: new ids follow it.
    """
    columns = slabs.Columns()
    live = [object_id for stored in run.stored for object_id in stored.live]
    last_id = run.stored[-1].last_id
    first = min(live, default=last_id)
    last = last_id if last_id >= newest else max(live)
    stored_at_ms = 0
    next_id = run.decoded[0].first_id
    for stored, slab in zip(run.stored, run.decoded, strict=True):
        # A slab has one time, that of its youngest object: if an object looked older than it is,
        # the collector might remove it within its grace period.
        stored_at_ms = max(stored_at_ms, slab.directory.stored_at_ms)
        columns.add_gap(len(range(max(first, next_id), min(last + 1, slab.first_id))))
        next_id = slab.last_id + 1
        for position in range(slab.directory.objects):
            object_id = slab.first_id + position
            if first <= object_id <= last:
                columns.add_stored(slab, position, alive=object_id in stored.live)
    return columns.encode(first, stored_at_ms, compressor.compress_hard, packed=True)


def _require_same(run: SlabRun, joined: tuple[bytes, bytes], compressor: Compressor) -> None:
    """Raise unless each live object is in the new slab under its id, unchanged."""
    directory = slabs.read_directory(*joined)
    new = Slab(
        directory,
        lambda raw_bytes: compressor.inflate(
            directory.codec, directory.dictionary, joined[1][directory.payload_at :], raw_bytes
        ),
    )
    for stored, old in zip(run.stored, run.decoded, strict=True):
        for object_id in stored.live:
            before, after = object_id - old.first_id, object_id - new.first_id
            if not 0 <= after < directory.objects or _entry(old, before) != _entry(new, after):
                # A bug, or faulty memory. Nothing was written.
                raise CorruptionError(
                    f"object {object_id} was not the same after packing; its slab was left "
                    "unchanged: check the memory of this machine"
                )


def _entry(slab: Slab, position: int) -> tuple[object, ...]:
    digest, kind = slab.directory.digest(position), slab.directory.kinds[position]
    distances, gaps = slab.links(position)
    return digest, kind, list(distances), list(gaps), slab.stripped(position)


def dead_objects(stored: StoredSlab) -> int:
    """How many objects of a slab have bytes but no name."""
    first = stored.directory.first_id
    return sum(
        length > 0 and object_id not in stored.live
        for object_id, length in enumerate(stored.directory.lengths, first)
    )


def _replace(env: Environment, run: SlabRun, new: list[tuple[bytes, bytes]]) -> PackReport:
    """Replace the slabs of a run with ``new`` in one transaction, unless they changed meanwhile."""
    with env.writing() as txn:
        started = time.perf_counter()
        unchanged = all(txn.get(stored.key, db=env.slabs) == stored.value for stored in run.stored)
        if unchanged:
            for stored in run.stored:
                txn.delete(stored.key, db=env.slabs)
            for key, value in new:
                txn.put(key, value, db=env.slabs)
        else:
            txn.abort()
    locked_s = time.perf_counter() - started
    if not unchanged:
        return NOTHING
    before = sum([len(stored.value) for stored in run.stored])
    after = sum([len(value) for _, value in new])
    return PackReport(
        len(run.stored), len(new), before, after, run.dead_objects, longest_lock_s=locked_s
    )


def _note_packed(env: Environment, scope: PackScope, packed_to: int) -> None:
    if packed_to <= scope.packed_to:
        return
    with env.writing() as txn:
        txn.put(PACKED_TO_KEY, str(packed_to).encode(), db=env.meta)
