"""Flips bits of a closed store's data file: reads return the right bytes or a typed error.

Each image is opened twice. With ``verify=True`` the guarantee is absolute: LMDB must never see a
file that can hurt it, so a crash counts as broken, like a wrong byte. Opened plainly, LMDB trusts
its file and may crash on a damaged page, or miss a row; that is counted, and ``verify=True`` must
refuse the same image with a typed error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from campaigns import specimen
from campaigns.examination import (
    DIED,
    HUNG,
    PLAIN,
    REFUSED,
    UNTYPED,
    VERIFY,
    WRONG,
    Examiner,
)
from campaigns.replay import MAX_PARALLEL
from campaigns.tally import Progress, Report, Tally, silent

_PAGE_BYTES = 4096
# A meta page's fields and any page's header.
# Where the number of a transaction stands in a meta page.
_TRANSACTION_AT = {0: 16 + 128, 1: 24 + 128}
_META_BYTES = 152
_HEADER_BYTES = 24


class _Flip(NamedTuple):
    engine: int
    offset: int
    bit: int

    def name(self) -> str:
        return f"engine {self.engine}, byte {self.offset}, bit {self.bit}"

    def apply(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[self.offset] ^= 1 << self.bit
        return bytes(damaged)


def _flips(engine: int, size: int, count: int, rng: random.Random) -> list[_Flip]:
    """``count`` places, no byte twice; all bytes if ``count`` is large enough.

    If only some are drawn, a third is in meta pages and page headers: damage there has the widest
    effect, and they are too few bytes to be hit often by chance.
    """
    if count >= size:
        offsets = list(range(size))
    else:
        metas = [page + at for page in (0, _PAGE_BYTES) for at in range(_META_BYTES)]
        headers = [page + at for page in range(0, size, _PAGE_BYTES) for at in range(_HEADER_BYTES)]
        drawn = {
            *rng.sample(metas, min(len(metas), count // 6)),
            *rng.sample(headers, min(len(headers), count // 6)),
        }
        while len(drawn) < count:
            drawn.add(rng.randrange(size))
        offsets = sorted(drawn)
    return [_Flip(engine, offset, rng.randrange(8)) for offset in offsets]


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    engines: Sequence[int] = specimen.ENGINES,
    parallel: int = MAX_PARALLEL,
    progress: Progress = silent,
) -> Report:
    """Flip ``count`` bits, each in its own image, divided among the engines."""
    rng = random.Random(seed)
    files = {
        engine: specimen.build(scratch / f"specimen-{engine}", seed, lmdb_version=engine)
        for engine in engines
    }
    flips = [
        flip
        for engine, data in files.items()
        for flip in _flips(engine, len(data), -(-count // len(files)), rng)
    ]
    rng.shuffle(flips)
    tally = Tally("bitflip", total=len(flips), progress=progress)
    for engine, data in files.items():
        tally.note(f"engine {engine}: a file of {len(data)} bytes")
    waiting = iter(flips)
    with ThreadPoolExecutor(parallel) as pool:
        workers = [
            pool.submit(_work, tally, files, seed, waiting, scratch / f"worker-{number}")
            for number in range(parallel)
        ]
        try:
            for worker in workers:
                worker.result()
        finally:
            # After an interrupt the pool waits for its threads: leave them nothing to do.
            for _ in waiting:
                continue
    return tally.report()


def _work(
    tally: Tally, files: dict[int, bytes], seed: int, waiting: Iterator[_Flip], scratch: Path
) -> None:
    examiner = Examiner(scratch, seed)
    try:
        # Taking the next item of a list's iterator is atomic.
        for flip in waiting:
            _try(tally, examiner, flip, flip.apply(files[flip.engine]))
            tally.tried()
    finally:
        examiner.close()


def _try(tally: Tally, examiner: Examiner, flip: _Flip, image: bytes) -> None:
    plain = examiner.examine(image, PLAIN)
    verified = examiner.examine(image, VERIFY)
    tally.count(f"engine {flip.engine} {PLAIN}: {plain.label()}")
    tally.count(f"engine {flip.engine} {VERIFY}: {verified.label()}")
    if _hides_a_commit(flip):
        # The one flip that no check can detect; it is counted above.
        return
    # Damage to LMDB's own pages can crash a plain open or hide a row. The verifying open must find
    # both.
    hidden = plain.word == WRONG and plain.detail.startswith("absence")
    if plain.word in (WRONG, UNTYPED) and not hidden:
        tally.broke(f"{flip.name()}, {PLAIN}", f"{plain.word} {plain.detail}")
    if verified.word in (WRONG, UNTYPED, DIED, HUNG):
        tally.broke(f"{flip.name()}, {VERIFY}", f"{verified.word} {verified.detail}")
    if (plain.word in (DIED, HUNG) or hidden) and verified.word != REFUSED:
        tally.broke(
            f"{flip.name()}, {VERIFY}",
            f"{verified.label()}, though plain {plain.word} {plain.detail}",
        )


def _hides_a_commit(flip: _Flip) -> bool:
    """True if this is bit 1 of a transaction number in a meta page, which turns N-2 into N or back.

    The two numbers are then still consecutive, and LMDB opens the state before the last, in which
    nothing is wrong.
    """
    at = _TRANSACTION_AT[flip.engine]
    return flip.bit == 1 and flip.offset in (at, _PAGE_BYTES + at)
