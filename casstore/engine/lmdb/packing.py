"""Packing: small slabs become large ones. No id, digest or index row changes.

Small commits leave small slabs, and a slab costs the same to find and open whatever it
holds. A slab is a run of ids, so neighbours can be joined: their objects are inflated,
laid end to end and compressed together, harder than when they were new. Objects that the
index no longer names keep their place in the run and lose their bytes.

The work is done in steps. A step reads a few slabs and compresses without any lock; then
one short transaction puts the joined slab in their place, if they are still what was read.
Readers see either, whole. Whoever stops between two steps has lost nothing.

Every object is proven before it is written anew. A slab that cannot be proven is reported
and left exactly as it is: rewriting it would turn damage that a backup can mend into
content with a checksum.

A slab stays as it was written until it is cold (``cold_before_ms``): what was committed
last is what a running agent reads next, from small slabs that are cheap to open, and the
slab at the end would be rewritten by every round as long as the session grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.cache import SlabCache
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.index import is_named
from casstore.engine.lmdb.reader import SlabReader
from casstore.engine.lmdb.slab import Slab
from casstore.engine.lmdb.tidying import tidy
from casstore.engine.protocol import DamagedSlab, PackReport
from casstore.errors import CorruptionError, StorageFullError
from casstore.format.hashing import check_object

# A slab with this much in it is left as it is, unless part of it is dead: joining it with
# another would make one that is too large.
SMALL_RAW_BYTES: Final = slabs.PACKED_RAW_BYTES // 2
# On a full disk slabs are joined into smaller ones, down to this size. LMDB stores a slab in
# neighbouring pages, and finds short runs of free ones where it finds no long run.
_LEAST_RAW_BYTES: Final = slabs.PACKED_RAW_BYTES // 16
# One part in so many of a slab must be dead for a slab to be rewritten for that alone.
_MANY_DEAD: Final = 4
# A slab that is not joined is written anew only if it becomes smaller by one part in so many.
_MIN_SAVING: Final = 20
# How many slabs one read transaction may look at.
_MAX_SLABS: Final = 1024
# So many ids in a row that name nothing end a slab: each would cost it the length of a digest.
# Fewer are carried along, or slabs between which others were collected could never be joined.
_LONG_GAP: Final = 64

# Up to which id slabs were packed, in decimal. What lies below is compressed hard already
# and is looked at again only if part of it has died, or a neighbour can be joined to it.
PACKED_TO_KEY: Final = b"packed_to"
_ID_DIGITS: Final = 20

NOTHING: Final = PackReport(0, 0, 0, 0, 0)


class Piece(NamedTuple):
    """A slab as it lies in the file, and the ids in it that the index names."""

    key: bytes
    value: bytes
    directory: slabs.Directory
    live: frozenset[int]
    live_bytes: int
    dead_bytes: int

    @property
    def last_id(self) -> int:
        """The id under which the slab is stored."""
        return self.directory.first_id + self.directory.objects - 1


class Run(NamedTuple):
    """Neighbouring slabs that fit into one, each decoded and proven."""

    pieces: list[Piece]
    decoded: list[Slab]

    @property
    def is_dead(self) -> bool:
        """Is nothing of it named?"""
        return not any(piece.live for piece in self.pieces)

    @property
    def dead_bytes(self) -> int:
        """How much lies in it that nobody can find."""
        return sum([piece.dead_bytes for piece in self.pieces])

    @property
    def dead_objects(self) -> int:
        """How many objects lose their bytes when it is rewritten."""
        return sum([dead_objects(piece) for piece in self.pieces])


class Scope(NamedTuple):
    """Which slabs to look at, and when one alone is worth the work."""

    newest: int
    #: Leave slabs alone that were stored at this time or later.
    cold_before_ms: int | None
    #: Slabs that end above this id have not been compressed hard.
    packed_to: int
    #: One part dead in so many makes a slab worth rewriting; 0: any.
    many_dead: int = _MANY_DEAD
    #: How much one slab is to hold.
    target_bytes: int = slabs.PACKED_RAW_BYTES


class Look(NamedTuple):
    """What was found from an id on: slabs to be rewritten as one, or to be left, or damaged."""

    run: Run | None
    #: Slabs that gain nothing, or are too young.
    left: list[Piece]
    damaged: list[DamagedSlab]
    next_id: int
    #: Was a slab left because it is too young?
    young: bool


def pack(
    env: Environment,
    compressor: Compressor,
    *,
    cold_before_ms: int | None,
    prepare: Callable[[Scope], None],
    progress: Callable[[PackReport], None] | None,
) -> PackReport:
    """Join small slabs, from the oldest to the newest there was at the beginning.

    ``prepare`` is told what will be looked at, before it is.
    """
    env.require_writable()
    env.apply_log()
    scope = scope_of(env, cold_before_ms)
    prepare(scope)
    report = NOTHING
    next_id = 1
    packed_to = None
    while next_id <= scope.newest:
        look = read_run(env, compressor, next_id, scope)
        if packed_to is None and look.young:
            # Times grow with ids, but for clocks that were set back.
            packed_to = look.left[0].directory.first_id - 1
        if look.damaged:
            report = report.plus(NOTHING._replace(damaged=tuple(look.damaged)))
        if look.run is not None:
            new = rewritten(look.run, compressor, scope)
            if new != [(piece.key, piece.value) for piece in look.run.pieces]:
                try:
                    report = report.plus(_replace(env, look.run, new))
                except StorageFullError:
                    if scope.target_bytes <= _LEAST_RAW_BYTES:
                        raise
                    scope = scope._replace(target_bytes=scope.target_bytes // 2)
                    continue
            if progress is not None:
                progress(report)
        next_id = look.next_id
    _note_packed(env, scope, scope.newest if packed_to is None else packed_to)
    tidied = tidy(env)
    report = report.plus(tidied)
    if progress is not None and tidied.pages_saved:
        progress(report)
    return report


def scope_of(env: Environment, cold_before_ms: int | None) -> Scope:
    """Everything there is now."""
    with env.reading() as txn:
        cursor = txn.cursor(db=env.slabs)
        newest = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
        row = txn.get(PACKED_TO_KEY, db=env.meta)
        text = b"0" if row is None else bytes(row)
    if not text.isdigit() or len(text) > _ID_DIGITS:
        raise CorruptionError(f"{env.path} says it is packed up to {text[:40]!r}")
    return Scope(newest, cold_before_ms, int(text))


def read_run(
    env: Environment,
    compressor: Compressor,
    first_id: int,
    scope: Scope,
) -> Look:
    """The next slabs from ``first_id`` on; those that belong together come as a run."""
    pieces: list[Piece] = []
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
                piece = look_at(env, txn, bytes(cursor.key()), bytes(cursor.value()))
            except CorruptionError as exc:
                if not pieces:
                    damaged.append(DamagedSlab(last_id, str(exc)))
                    next_id = last_id + 1
                break
            young = (
                scope.cold_before_ms is not None
                and piece.directory.stored_at_ms >= scope.cold_before_ms
            )
            full = young or piece.live_bytes > SMALL_RAW_BYTES
            # Where slabs were dropped ids are missing, and a slab is a run of ids without a gap.
            missing = piece.directory.first_id - next_id if pieces else 0
            room = (
                raw_bytes + piece.live_bytes <= scope.target_bytes
                and objects + missing + piece.directory.objects <= slabs.MAX_OBJECTS
            )
            if pieces and (full or not room or missing >= _LONG_GAP):
                young = False
                break
            objects += missing
            next_id = last_id + 1
            pieces.append(piece)
            raw_bytes += piece.live_bytes
            objects += piece.directory.objects
            gap = 0 if piece.live else gap + piece.directory.objects
            if full or (raw_bytes and gap >= _LONG_GAP):
                break
            more = cursor.next()
        if not pieces or young or not _is_worth_it(pieces, scope, next_id):
            return Look(None, pieces, damaged, next_id, young)
        decoded: list[Slab] = []
        for piece in pieces:
            try:
                decoded.append(_prove(env, compressor, txn, piece))
            except CorruptionError as exc:
                damaged.append(DamagedSlab(piece.last_id, str(exc)))
                next_id = piece.last_id + 1
                break
    proven = pieces[: len(decoded)]
    if not proven or not _is_worth_it(proven, scope, next_id):
        return Look(None, proven, damaged, next_id, young=False)
    return Look(Run(proven, decoded), [], damaged, next_id, young=False)


def _is_worth_it(pieces: list[Piece], scope: Scope, next_id: int) -> bool:
    if len(pieces) > 1 or pieces[0].last_id > scope.packed_to:
        return True
    live, dead = pieces[0].live_bytes, pieces[0].dead_bytes
    if not pieces[0].live and next_id <= scope.newest:
        return True
    return dead > 0 and dead * scope.many_dead >= live + dead if scope.many_dead else dead > 0


def look_at(
    env: Environment,
    txn: lmdb.Transaction[memoryview],
    key: bytes,
    value: bytes,
) -> Piece:
    """A slab as it lies in the file, its directory checked, and what of it is alive."""
    directory = slabs.read_directory(key, value)
    live: list[int] = []
    live_bytes = 0
    for position in range(directory.objects):
        own = directory.first_id + position
        if is_named(txn, env, None, directory.digest(position), own):
            live.append(own)
            live_bytes += directory.lengths[position]
    dead_bytes = sum(directory.lengths) - live_bytes
    return Piece(key, value, directory, frozenset(live), live_bytes, dead_bytes)


def _prove(
    env: Environment, compressor: Compressor, txn: lmdb.Transaction[memoryview], piece: Piece
) -> Slab:
    """The slab, every object in it that counts checked against its digest."""
    reader = SlabReader(txn.cursor(db=env.slabs), SlabCache(0), compressor)
    slab = reader.decode_at(piece.last_id)
    for object_id in sorted(piece.live):
        digest = slab.directory.digest(object_id - slab.first_id)
        check_object(digest, *reader.object(object_id))
    return slab


def rewritten(run: Run, compressor: Compressor, scope: Scope) -> list[tuple[bytes, bytes]]:
    """What is to stand in the place of a run: one slab, none, or what stands there already."""
    if run.is_dead and run.pieces[-1].last_id < scope.newest:
        return []
    joined = _encode(run, compressor, newest=scope.newest)
    _require_same(run, joined, compressor)
    before = len(run.pieces[0].value)
    alone = len(run.pieces) == 1 and not run.dead_bytes
    if alone and before - len(joined[1]) < before // _MIN_SAVING:
        return [(run.pieces[0].key, run.pieces[0].value)]
    return [joined]


def _encode(run: Run, compressor: Compressor, *, newest: int) -> tuple[bytes, bytes]:
    """The one slab that stands for a run of them, from its first live object to its last.

    The last of the store ends in the newest id, alive or not: ids go on after it.
    """
    columns = slabs.Columns()
    live = [object_id for piece in run.pieces for object_id in piece.live]
    last_id = run.pieces[-1].last_id
    first = min(live, default=last_id)
    last = last_id if last_id >= newest else max(live)
    stored_at_ms = 0
    next_id = run.decoded[0].first_id
    for piece, slab in zip(run.pieces, run.decoded, strict=True):
        # The youngest counts: nothing may look older than it is to a collector.
        stored_at_ms = max(stored_at_ms, slab.directory.stored_at_ms)
        columns.add_gap(len(range(max(first, next_id), min(last + 1, slab.first_id))))
        next_id = slab.last_id + 1
        for position in range(slab.directory.objects):
            object_id = slab.first_id + position
            if first <= object_id <= last:
                columns.add_stored(slab, position, alive=object_id in piece.live)
    return columns.encode(first, stored_at_ms, compressor.compress_hard, packed=True)


def _require_same(run: Run, joined: tuple[bytes, bytes], compressor: Compressor) -> None:
    """Raise unless each live object stands in the new slab under its id, as it was."""
    directory = slabs.read_directory(*joined)
    new = Slab(
        directory,
        lambda raw_bytes: compressor.inflate(
            directory.codec, directory.dictionary, joined[1][directory.payload_at :], raw_bytes
        ),
    )
    for piece, old in zip(run.pieces, run.decoded, strict=True):
        for object_id in piece.live:
            before, after = object_id - old.first_id, object_id - new.first_id
            if not 0 <= after < directory.objects or _entry(old, before) != _entry(new, after):
                # A mistake of ours, or of the memory; what is stored stays as it is.
                raise CorruptionError(f"object {object_id} would not have survived packing")


def _entry(slab: Slab, position: int) -> tuple[object, ...]:
    digest, kind = slab.directory.digest(position), slab.directory.kinds[position]
    distances, gaps = slab.links(position)
    return digest, kind, list(distances), list(gaps), slab.stripped(position)


def dead_objects(piece: Piece) -> int:
    """How many objects of a slab have bytes that nobody can find."""
    first = piece.directory.first_id
    return sum(
        length > 0 and object_id not in piece.live
        for object_id, length in enumerate(piece.directory.lengths, first)
    )


def _replace(env: Environment, run: Run, new: list[tuple[bytes, bytes]]) -> PackReport:
    """Exchange the slabs in one transaction, unless somebody else has changed them."""
    with env.writing() as txn:
        started = time.perf_counter()
        unchanged = all(txn.get(piece.key, db=env.slabs) == piece.value for piece in run.pieces)
        if unchanged:
            for piece in run.pieces:
                txn.delete(piece.key, db=env.slabs)
            for key, value in new:
                txn.put(key, value, db=env.slabs)
        else:
            txn.abort()
    locked_s = time.perf_counter() - started
    if not unchanged:
        return NOTHING
    before = sum([len(piece.value) for piece in run.pieces])
    after = sum([len(value) for _, value in new])
    return PackReport(
        len(run.pieces), len(new), before, after, run.dead_objects, longest_lock_s=locked_s
    )


def _note_packed(env: Environment, scope: Scope, packed_to: int) -> None:
    if packed_to <= scope.packed_to:
        return
    with env.writing() as txn:
        txn.put(PACKED_TO_KEY, str(packed_to).encode(), db=env.meta)
