"""Collection: deletes the names of unreachable objects, in small steps, concurrently with writers.

An object's name is its row in the index (see ``lookup``). Without it no reader finds the object;
packing its slab later reclaims its bytes. Three rules make this safe, whatever writers in any
process do at the same time (P6):

1. A commit checks inside its own transaction that every object it relies on is still stored: each
   child of a new object, and each of its own objects that it found stored (``batches``).
2. Every transaction that removes names first marks from the objects that were stored, rows that
   were written and objects that were put again since the marking: it catches up (``marking``,
   ``notes``). If there was a time in which writers did not note rows, nothing more is removed.
3. Parents are removed before children, by descending id. So at any moment no object that has a
   name links to one that has none.

Objects that were put within the grace period count as reached: those since ``_grace_from_ms``
(``marking``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Final, Self

import lmdb

from casstore.engine.forks import Descriptor
from casstore.engine.lmdb import notes
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.applying import read_recovery_point
from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.lookup import index_key
from casstore.engine.lmdb.marking import Candidates, Marks, Progress
from casstore.engine.protocol import MarkReport, Roots, SweepReport
from casstore.errors import CollectionOvertakenError, InvalidInputError

# The interval at which a collector renews its announcement while it marks.
_REFRESH_S: Final = notes.OPEN_MS / 1000 / 20
# How many times at most a step tries to catch up with the writers.
_MAX_CATCH_UPS: Final = 64


class LmdbCollection:
    """One collection of a store. Use as a context manager: mark, then sweep until it is done."""

    def __init__(
        self,
        env: Environment,
        roots: Roots,
        clock: Callable[[], int],
        *,
        grace_ms: int,
        dry_run: bool,
    ) -> None:
        self._env = env
        self._roots = roots
        self._clock = clock
        self._grace_from_ms = clock() + 1 - grace_ms
        self._dry_run = dry_run
        self._token = os.urandom(notes.TOKEN_BYTES)
        self._marks: Marks | None = None
        # Sweeping goes by descending id, first names, then slabs: only ids below are left to do.
        self._below = self._drop_below = 0
        # True if every object in the slabs has a name.
        self._clean = False
        # True if nothing is left to sweep.
        self._done = False
        self._lock: Descriptor | None = None
        # When the announcement was renewed.
        self._refreshed_s = 0.0
        # The longest time for which the last step made writers wait.
        self._held_s = 0.0

    def __enter__(self) -> Self:
        if not self._dry_run:
            self._env.require_writable()
            self._lock = self._env.lock_collector()
            try:
                # Before anything is read, so that writers note all rows that they write since then.
                self._announce(first=True)
            except BaseException:
                self._lock.unlock()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._marks is not None:
            self._marks.close()
            self._marks = None
        if self._lock is not None:
            try:
                if not self._env.gate.is_shut:
                    self._change(self._end)
            finally:
                self._lock.unlock()
                self._lock = None

    def _end(self, txn: lmdb.Transaction[bytes]) -> None:
        """Withdraw the announcement, and record the result for the next collection."""
        notes.end(self._env, txn)
        if self._done:
            notes.note_collected(
                self._env, txn, read_recovery_point(txn, self._env.path).applied.lsn
            )
        if self._clean:
            notes.note_leftovers(self._env, txn, there=False)

    # --- marking --------------------------------------------------------------------------

    def mark(self, *, only: bytes | None = None, progress: Progress | None = None) -> MarkReport:
        """Find the unreachable objects.

        ``progress`` is called with the number of ids visited so far. ``only`` is what ``unreached``
        of an earlier collection returned: ``sweep`` then removes no other objects. CorruptionError
        if a row or a slab's directory is damaged, or refers to an object that is not stored: then
        nothing may be removed.
        """
        view = None
        if not self._env.readonly:
            self._env.apply_log()
        else:
            # A dry run on a read-only store: the log cannot be applied, so its entries are read.
            with self._env.snapshot() as (_, view):
                pass
        self._marks = Marks(self._env, self._roots, self._grace_from_ms, view)
        self._below = self._drop_below = self._marks.last_id + 1

        def keep_announced(done: int) -> None:
            if not self._dry_run and monotonic() - self._refreshed_s > _REFRESH_S:
                self._announce(first=False)
            if progress is not None:
                progress(done)

        report = self._marks.mark(keep_announced)
        self._clean = self._marks.is_clean
        self._done = not report.objects_unreached
        if only is not None:
            self._marks.restrict(only)
        return report

    def unreached(self) -> bytes:
        """The ids of the unreachable objects, encoded for ``mark(only=…)``."""
        return self._marked().unreached()

    def _marked(self) -> Marks:
        if self._marks is None:
            raise InvalidInputError("call mark() before the other methods of a collection")
        return self._marks

    # --- sweeping -------------------------------------------------------------------------

    def sweep(self, limit: int) -> SweepReport:
        """Delete the names of at most ``limit`` objects, or some slabs without names.

        One short transaction. CollectionOvertakenError if writers changed rows unnoticed or faster
        than this can follow.
        """
        if self._dry_run:
            raise InvalidInputError(
                "a dry run cannot sweep; open the collection with dry_run=False"
            )
        marks = self._marked()
        self._held_s = 0.0
        if self._below > 1:
            candidates = marks.candidates(self._below, limit)
            swept = size_bytes = 0
            if candidates.ids:
                swept, size_bytes = self._remove(marks, candidates, limit)
            self._below = candidates.down_to
            return SweepReport(swept, size_bytes, 0, self._held_s, done=False)
        # All names are deleted. Delete the slabs that have no named object left; packing drops the
        # dead objects of the others.
        keys, self._drop_below = marks.dead_slabs(self._drop_below)
        freed = self._drop(marks, keys) if keys else 0
        self._done = self._drop_below <= 1
        return SweepReport(0, 0, freed, self._held_s, done=self._done)

    def _drop(self, marks: Marks, keys: list[bytes]) -> int:
        """Delete the slabs with these keys in one transaction; returns their bytes."""
        freed = 0

        def drop(txn: lmdb.Transaction[bytes]) -> None:
            nonlocal freed
            for key in keys:
                value = txn.get(key, db=self._env.slabs)
                # Checked again: packing may have joined the slab with others since.
                if value is not None and marks.is_dead(slabs.read_directory(key, value)):
                    freed += len(value)
                    txn.delete(key, db=self._env.slabs)

        self._change(drop)
        return freed

    def _remove(self, marks: Marks, candidates: Candidates, limit: int) -> tuple[int, int]:
        """Delete the names of the candidates that are still unreached; their number and bytes."""
        for _ in range(_MAX_CATCH_UPS):
            # Catch up with most of the changes before the transaction, so that writers wait only
            # for the rest. Apply the log first: catching up reads only the tables.
            self._env.apply_log()
            with self._env.reading() as reading:
                marks.catch_up(reading)
            removed: list[int] = []

            def remove(txn: lmdb.Transaction[bytes], removed: list[int] = removed) -> bool:
                if not notes.is_announced(self._env, txn, self._token):
                    raise CollectionOvertakenError(
                        f"this collection of {self._env.path} was suspended for too long, so rows "
                        "may have been written unnoticed; collect again"
                    )
                if not marks.catch_up(txn, limit):
                    return False
                doomed = [
                    (digest, object_id)
                    for object_id, digest in zip(candidates.ids, candidates.digests, strict=True)
                    if not marks.is_reached(object_id)
                ]
                # In key order, which is the fastest. Any order is safe within one transaction.
                for digest, object_id in sorted(doomed):
                    if txn.delete(index_key(digest, object_id), db=self._env.index):
                        removed.append(object_id)
                notes.note_leftovers(self._env, txn, there=True)
                notes.forget_touches(self._env, txn, self._grace_from_ms, limit)
                notes.announce(self._env, txn, self._token, self._clock(), first=False)
                return True

            if self._change(remove):
                self._clean = False
                gone = set(removed)
                marks.forget(gone)
                sizes = sum(
                    size
                    for object_id, size in zip(candidates.ids, candidates.sizes_bytes, strict=True)
                    if object_id in gone
                )
                return len(gone), sizes
        raise CollectionOvertakenError(
            f"{self._env.path} is changed faster than the collection can follow; collect again"
        )

    # --- transactions ------------------------------------------------------------------------

    def _announce(self, *, first: bool) -> None:
        """Begin or renew the announcement, which makes writers note the rows that they write."""

        def announce(txn: lmdb.Transaction[bytes]) -> None:
            if not first and not notes.is_announced(self._env, txn, self._token):
                raise CollectionOvertakenError(
                    f"this collection of {self._env.path} was suspended for too long, so rows "
                    "may have been written unnoticed; collect again"
                )
            notes.announce(self._env, txn, self._token, self._clock(), first=first)

        self._change(announce)
        self._refreshed_s = monotonic()

    def _change(self, work: Callable[[lmdb.Transaction[bytes]], bool | None]) -> bool:
        """Run one short write transaction; ``work`` returns False to abort it."""
        with self._env.writing() as txn:
            started = perf_counter()
            done = work(txn) is not False
            if not done:
                txn.abort()
        self._held_s = max(self._held_s, perf_counter() - started)
        return done
