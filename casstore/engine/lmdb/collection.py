"""Collection: deletes the names of unreachable objects, in small steps, concurrently with writers.

Three rules make it safe, whatever writers in any process do at the same time (P6):

1. A commit checks inside its own transaction that everything it relies on is still there:
   each child of a new object, each object it found stored (``transaction``).
2. Every transaction that removes anything first catches up: with objects stored, rows
   written and objects put again since the marking (``marking``, ``notes``). If rows were
   not noted all the time, it removes nothing more.
3. Parents go before children, by falling id. So whatever is left at any moment is whole:
   no object that is named links to one that is not.

An object without a name is deleted for every reader; packing its slab reclaims its bytes.
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
from casstore.engine.lmdb.marking import Candidates, Marks, Pulse
from casstore.engine.protocol import MarkReport, Roots, SweepReport
from casstore.errors import CollectionOvertakenError, InvalidInputError

# How often a collector renews its announcement while it marks.
_REFRESH_S: Final = notes.OPEN_MS / 1000 / 20
# How often a step may fail to catch up within its limit, while writers wait.
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
        self._keep_after_ms = clock() + 1 - grace_ms
        self._dry_run = dry_run
        self._token = os.urandom(notes.TOKEN_BYTES)
        self._marks: Marks | None = None
        self._below = self._drop_below = 0
        # Does every object in the slabs have a name?
        self._clean = False
        # Is there nothing left to sweep?
        self._done = False
        self._lock: Descriptor | None = None
        self._refreshed_s = 0.0
        # The longest time for which the last step made writers wait.
        self._held_s = 0.0

    def __enter__(self) -> Self:
        if not self._dry_run:
            self._env.require_writable()
            self._lock = self._env.lock_collector()
            try:
                # Before anything is read: from here on writers note the rows that they write.
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
        notes.end(self._env, txn)
        if self._done:
            notes.note_collected(
                self._env, txn, read_recovery_point(txn, self._env.path).applied.lsn
            )
        if self._clean:
            notes.note_leftovers(self._env, txn, there=False)

    # --- marking --------------------------------------------------------------------------

    def mark(self, *, only: bytes | None = None, pulse: Pulse | None = None) -> MarkReport:
        """Find the unreachable objects. ``only``: sweep only those that ``unreached`` returned.

        CorruptionError if a row or a directory is damaged, or names an object that is not
        there: then nothing may be removed.
        """
        view = None
        if not self._env.readonly:
            self._env.apply_log()
        else:
            # A dry run on a read-only store: the log is read, and not applied.
            with self._env.snapshot() as (_, view):
                pass
        self._marks = Marks(self._env, self._roots, self._keep_after_ms, view)
        self._below = self._drop_below = self._marks.last_id + 1

        def keep_announced(done: int) -> None:
            if not self._dry_run and monotonic() - self._refreshed_s > _REFRESH_S:
                self._announce(first=False)
            if pulse is not None:
                pulse(done)

        report = self._marks.mark(keep_announced)
        self._clean = self._marks.is_clean
        self._done = not report.objects_unreached
        if only is not None:
            self._marks.restrict(only)
        return report

    def unreached(self) -> bytes:
        """The ids of the unreachable objects."""
        return self._marked().unreached()

    def _marked(self) -> Marks:
        if self._marks is None:
            raise InvalidInputError("call mark() before the other methods of a collection")
        return self._marks

    # --- sweeping -------------------------------------------------------------------------

    def sweep(self, limit: int) -> SweepReport:
        """Delete the names of at most ``limit`` objects, in one short transaction."""
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
        # All names are deleted. Slabs without any name are deleted now, the others when packed.
        keys, self._drop_below = marks.dead_slabs(self._drop_below)
        freed = self._drop(marks, keys) if keys else 0
        self._done = self._drop_below <= 1
        return SweepReport(0, 0, freed, self._held_s, done=self._done)

    def _drop(self, marks: Marks, keys: list[bytes]) -> int:
        freed = 0

        def drop(txn: lmdb.Transaction[bytes]) -> None:
            nonlocal freed
            for key in keys:
                value = txn.get(key, db=self._env.slabs)
                # Packing may have joined it with other slabs since.
                if value is not None and marks.is_dead(slabs.read_directory(key, value)):
                    freed += len(value)
                    txn.delete(key, db=self._env.slabs)

        self._change(drop)
        return freed

    def _remove(self, marks: Marks, candidates: Candidates, limit: int) -> tuple[int, int]:
        for _ in range(_MAX_CATCH_UPS):
            # Most of it without the lock, so that writers wait only for the rest. Not from the log:
            # the transaction below applies it, and would find all of it new every time.
            self._env.apply_log()
            with self._env.reading() as reading:
                marks.catch_up(reading)
            removed: list[int] = []

            def remove(txn: lmdb.Transaction[bytes], removed: list[int] = removed) -> bool:
                if not notes.is_announced(self._env, txn, self._token):
                    raise CollectionOvertakenError(
                        f"rows of {self._env.path} were written unnoticed; collect again"
                    )
                if not marks.catch_up(txn, limit):
                    return False
                doomed = [
                    (digest, object_id)
                    for object_id, digest in zip(candidates.ids, candidates.digests, strict=True)
                    if not marks.is_reached(object_id)
                ]
                # One transaction deletes all, so any order is safe; key order is the fastest.
                for digest, object_id in sorted(doomed):
                    if txn.delete(index_key(digest, object_id), db=self._env.index):
                        removed.append(object_id)
                notes.note_leftovers(self._env, txn, there=True)
                notes.forget_touches(self._env, txn, self._keep_after_ms, limit)
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
            f"writers of {self._env.path} left the collector behind; collect again"
        )

    # --- transactions ------------------------------------------------------------------------

    def _announce(self, *, first: bool) -> None:
        def announce(txn: lmdb.Transaction[bytes]) -> None:
            if not first and not notes.is_announced(self._env, txn, self._token):
                raise CollectionOvertakenError(
                    f"rows of {self._env.path} were written unnoticed; collect again"
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
