"""The newest slabs, joined while this process still has them in memory.

A small commit leaves a small slab: a header, a frame with nothing to learn from, and the rest
of a page. A writer remembers the run of small slabs that it has stored last; when there is
enough for one of full size, or the journal is laid in place anyway, the transaction that comes
next stores the run as one slab. Nothing is read or inflated for it, and no id changes: a run
of ids is a slab. What others have stored in between, or changed, is left to packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import lmdb

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.environment import Environment
from casstore.errors import CorruptionError

# Longer ones gain little by being joined, and would be compressed twice for it.
SMALL_RAW_BYTES: Final = 8 << 10
_MANY_OBJECTS: Final = slabs.MAX_OBJECTS // 2


class Fresh(NamedTuple):
    """A slab as this process wrote it, and what its payload was before it was compressed."""

    key: bytes
    value: bytes
    raw: bytes
    first_id: int
    objects: int


class Run(NamedTuple):
    """Small slabs of consecutive ids, each stored by itself."""

    slabs: list[Fresh]
    raw_bytes: int = 0
    objects: int = 0

    def plus(self, slab: Fresh) -> Run:
        """The run with the slab behind it."""
        return Run([*self.slabs, slab], self.raw_bytes + len(slab.raw), self.objects + slab.objects)

    def goes_on_with(self, slab: Fresh) -> bool:
        """Do the slab's ids come next?"""
        last = self.slabs[-1]
        return slab.first_id == last.first_id + last.objects

    @property
    def is_full(self) -> bool:
        """Is it as long as a slab should be?"""
        return self.raw_bytes >= slabs.TARGET_RAW_BYTES or self.objects >= _MANY_OBJECTS


class Tail:
    """The run of small slabs that this process has stored last, and nobody since."""

    __slots__ = ("_compressor", "_run")

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._run = Run([])

    def store(
        self, env: Environment, txn: lmdb.Transaction[bytes], new: Sequence[Fresh], *, join: bool
    ) -> Run:
        """Write new slabs behind all others; the run that they leave, for ``note``.

        ``join``: now is the time, even if there could be more.
        """
        run = self._run
        for slab in new:
            small = len(slab.raw) <= SMALL_RAW_BYTES and slab.objects < _MANY_OBJECTS
            if run.slabs and not (small and run.goes_on_with(slab)):
                run = self._close(env, txn, run)
            if not txn.put(slab.key, slab.value, append=True, db=env.slabs):
                # py-lmdb reports an out-of-order append by returning False.
                raise CorruptionError(f"{env.path}: slab {slab.key.hex()} is not the last")
            if small:
                run = run.plus(slab)
            if run.is_full:
                run = self._close(env, txn, run)
        return self._close(env, txn, run) if join else run

    def note(self, run: Run) -> None:
        """The transaction that left this run was committed."""
        self._run = run

    def _close(self, env: Environment, txn: lmdb.Transaction[bytes], run: Run) -> Run:
        """Store a run as one slab, if that can be; the empty run that follows."""
        # Others may have packed or collected some of them since.
        if len(run.slabs) > 1 and all(
            txn.get(slab.key, None, env.slabs) == slab.value for slab in run.slabs
        ):
            key, value = slabs.join(
                [(slabs.read_directory(slab.key, slab.value), slab.raw) for slab in run.slabs],
                self._compress,
            )
            for slab in run.slabs:
                txn.delete(slab.key, db=env.slabs)
            # Not always at the end: others may have stored something since.
            txn.put(key, value, db=env.slabs)
        return Run([])

    def _compress(self, raw: bytes) -> tuple[int, int, bytes]:
        """As the compressor does, and proven: what was acknowledged is written anew here."""
        codec, dictionary, payload = self._compressor.compress(raw)
        if self._compressor.inflate(codec, dictionary, payload, len(raw)) != raw:
            raise CorruptionError("a slab would not have survived being joined")
        return codec, dictionary, payload
