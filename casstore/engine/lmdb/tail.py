"""The newest slabs, joined while this process still has them in memory.

A small commit leaves a small slab: a header, a frame with nothing to learn from, and the rest
of a page. A writer remembers the run of small slabs that it has stored last; when there is
enough for one of full size, the transaction that comes next stores the run as one slab. Nothing
is read or inflated for it, and no id changes: a run of ids is a slab. What others have stored
in between, or changed, is left to packing.
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
SMALL_BODY_BYTES: Final = 16 << 10
# So many, however short they are: the one commit that joins them should not wait long.
MANY_SLABS: Final = 64
_MANY_OBJECTS: Final = slabs.MAX_OBJECTS // 2


class Fresh(NamedTuple):
    """A slab as this process wrote it, and what it was made of."""

    key: bytes
    value: bytes
    sheet: slabs.Sheet


class Tail:
    """The run of small slabs that this process has stored last, and nobody since.

    It is not told whether a transaction was committed: before a run is joined, every slab of
    it is compared with what is stored.
    """

    __slots__ = ("_body_bytes", "_compressor", "_follows", "_joins", "_next_id", "_objects", "run")

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        #: Small slabs of consecutive ids.
        self.run: list[Fresh] = []
        self._body_bytes = self._objects = self._next_id = 0
        # Did the last small slab follow the one before it, and was a run joined before? Then the
        # next one will be joined, too: this process is one that goes on writing.
        self._follows = self._joins = False

    def will_join(self, size_bytes: int, objects: int) -> bool:
        """Will a slab of this size be joined soon, and need not be compressed before?

        Where others write in between, runs do not grow, and who writes little ends before there
        is enough to join: then every slab is compressed at once.
        """
        return (
            self._follows
            and self._joins
            and size_bytes <= SMALL_BODY_BYTES
            and objects < _MANY_OBJECTS
        )

    def store(
        self, env: Environment, txn: lmdb.Transaction[bytes], new: Sequence[Fresh], *, busy: bool
    ) -> None:
        """Write new slabs behind all others, and join them with those before if it is time.

        ``busy``: the transaction has enough to do, so a run waits for the next one.
        """
        for slab in new:
            key, value, sheet = slab
            body_bytes, objects = len(sheet.body), len(sheet.kinds)
            small = body_bytes <= SMALL_BODY_BYTES and objects < _MANY_OBJECTS
            self._follows = small and sheet.first_id == self._next_id
            if self.run and not self._follows:
                self._close(env, txn)
            if not txn.put(key, value, append=True, db=env.slabs):
                # py-lmdb reports an out-of-order append by returning False.
                raise CorruptionError(f"{env.path}: slab {key.hex()} is not the last")
            if small:
                self.run.append(slab)
                self._body_bytes += body_bytes
                self._objects += objects
                self._next_id = sheet.first_id + objects
        if not busy and (
            len(self.run) >= MANY_SLABS
            or self._body_bytes >= slabs.TARGET_RAW_BYTES
            or self._objects >= _MANY_OBJECTS
        ):
            self._close(env, txn)

    def _close(self, env: Environment, txn: lmdb.Transaction[bytes]) -> None:
        """Store the run as one slab, if that can be; the next begins a run of its own."""
        run, self.run = self.run, []
        self._body_bytes = self._objects = 0
        if len(run) < 2:
            return
        next_id = run[0].sheet.first_id
        for key, stored, sheet in run:
            # Others may have packed or collected some of them since, or they never were committed;
            # one that was interrupted, and written again in the same millisecond, is there twice.
            if sheet.first_id != next_id or txn.get(key, None, env.slabs) != stored:
                return
            next_id += len(sheet.kinds)
        key, value = slabs.join([slab.sheet for slab in run]).seal(self._compress)
        for slab in run:
            txn.delete(slab.key, db=env.slabs)
        # Not always at the end: others may have stored something since.
        txn.put(key, value, db=env.slabs)
        self._joins = True

    def _compress(self, raw: bytes) -> tuple[int, int, bytes]:
        """As the compressor does, and proven: what was acknowledged is written anew here."""
        codec, dictionary, payload = self._compressor.compress(raw)
        if self._compressor.inflate(codec, dictionary, payload, len(raw)) != raw:
            raise CorruptionError("a slab would not have survived being joined")
        return codec, dictionary, payload
