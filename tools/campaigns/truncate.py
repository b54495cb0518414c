"""Truncates a store's data file: reads return the right bytes or a typed error, never SIGBUS.

LMDB's 0.9 engine dies of SIGBUS when it reads a page past the end of its file, so a plain open must
notice the truncation first. But not every short file is damaged: LMDB does not write pages that a
transaction allocated and freed, so a killed writer may leave a file shorter than its meta page
says. Such a file must open, with everything in it.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from campaigns import specimen
from campaigns.examination import (
    DIED,
    HUNG,
    PLAIN,
    REFUSED,
    RIGHT,
    UNTYPED,
    VERIFY,
    WRONG,
    Examiner,
)
from campaigns.tally import Progress, Report, Tally, silent

_PAGE_BYTES = 4096
# A value of this many pages is added and deleted at the end of a specimen, and its pages are cut
# off.
_FREE_PAGES = 40
_FREE_PAGES_CUT = 30

# Commits until the file is shorter than its meta page says, then exits like a killed process,
# before the engine extends the file. Prints what it stored.
_SHORT_WRITER = """
import os, sys
sys.path[:0] = sys.argv[3:]
import casstore
from casstore.engine.lmdb import environment

def lengthen(handle, needed_bytes):
    if os.fstat(handle).st_size < needed_bytes:
        sys.stdout.flush()
        os._exit(9)

store = casstore.open(sys.argv[1], durability="relaxed", lmdb_version=int(sys.argv[2]))
environment.lengthen = lengthen
env = store.engine._env
for n in range(400):
    print(n, store.put_value({"commit": n}), flush=True)
    # Pages that a transaction takes and gives back are counted in the file's length and
    # never written. No call of the store does that alone; LMDB's page merges do, rarely.
    with env.handle.begin(write=True) as txn:
        for key in range(20):
            txn.put(b"%d" % key, bytes(9_000), db=env.tables["records"])
        for key in range(20):
            txn.delete(b"%d" % key, db=env.tables["records"])
    env.cover()
"""


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    engines: Sequence[int] = specimen.ENGINES,
    progress: Progress = silent,
) -> Report:
    """Try ``count`` lengths per engine: page boundaries first (evenly spaced), then others."""
    rng = random.Random(seed)
    files = {
        engine: specimen.build(scratch / f"specimen-{engine}", seed, lmdb_version=engine)
        for engine in engines
    }
    plan = {engine: _lengths(len(data), count, rng) for engine, data in files.items()}
    total = sum(len(lengths) + _FREE_PAGES_CUT + 1 for lengths in plan.values())
    tally = Tally("truncate", total=total, progress=progress)
    examiner = Examiner(scratch / "worker", seed)
    try:
        for engine, data in files.items():
            for length in plan[engine]:
                _try(tally, examiner, engine, data[:length], len(data))
            _try_free_end(tally, examiner, engine, data)
            _try_killed_writer(tally, engine, scratch / f"short-{engine}")
    finally:
        examiner.close()
    return tally.report()


def _lengths(size: int, count: int, rng: random.Random) -> list[int]:
    boundaries = list(range(_PAGE_BYTES, size, _PAGE_BYTES))
    drawn = boundaries if count >= len(boundaries) else rng.sample(boundaries, count)
    odd = [rng.randrange(1, size) for _ in range(max(4, count // 4))]
    edges = [0, 1, 15, 16, 24, 100, 151, _PAGE_BYTES - 1, _PAGE_BYTES + 1, size - 1]
    return sorted({*drawn, *odd, *edges})


def _try(tally: Tally, examiner: Examiner, engine: int, image: bytes, size: int) -> None:
    for mode in (PLAIN, VERIFY):
        verdict = examiner.examine(image, mode)
        tally.count(f"engine {engine} {mode}: {verdict.label()}")
        if verdict.word in (WRONG, UNTYPED, DIED, HUNG):
            tally.broke(
                f"engine {engine}, {len(image)} of {size} bytes, {mode}",
                f"{verdict.word} {verdict.detail}",
            )
    tally.tried()


def _try_free_end(tally: Tally, examiner: Examiner, engine: int, data: bytes) -> None:
    """Put free pages at the end of a specimen and cut them off: it must open, complete."""
    import lmdb

    place = examiner.scratch / f"free-end-{engine}"
    place.mkdir(parents=True)
    (place / "data.mdb").write_bytes(data)
    # In two transactions, so that its pages are written; none of them is live then.
    env = lmdb.open(str(place), map_size=1 << 30, max_dbs=32)
    records = env.open_db(b"records", create=False)
    with env.begin(write=True) as txn:
        txn.put(b"passing", bytes(_FREE_PAGES * _PAGE_BYTES), db=records)
    with env.begin(write=True) as txn:
        txn.delete(b"passing", db=records)
    env.close()
    grown = (place / "data.mdb").read_bytes()
    shortest = None
    for pages in range(1, _FREE_PAGES_CUT + 1):
        length = len(grown) - pages * _PAGE_BYTES
        verdict = examiner.examine(grown[:length], PLAIN)
        tally.count(f"engine {engine} free end cut: {verdict.label()}")
        tally.tried()
        if verdict.word == RIGHT:
            shortest = length
        elif verdict.word != REFUSED:
            tally.broke(
                f"engine {engine}, free end cut to {length}", f"{verdict.word} {verdict.detail}"
            )
    if shortest is None:
        tally.broke(
            f"engine {engine}, free end cut", "no file without its free last pages was opened"
        )


def _try_killed_writer(tally: Tally, engine: int, place: Path) -> None:
    """Kill a writer between commit and cover; its short file must open with every acked value."""
    roots = [str(Path(__file__).parents[2])]
    argv = [sys.executable, "-c", _SHORT_WRITER, str(place), str(engine), *roots]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    trial = f"engine {engine}, writer killed before cover"
    tally.tried()
    if ended.returncode != 9:
        tally.broke(trial, f"the writer ended with {ended.returncode}: {ended.stderr[-300:]}")
        return
    acks = [line.split() for line in ended.stdout.splitlines()]
    reader = [sys.executable, "-c", _SHORT_READER, str(place), *roots]
    asked = "".join(f"{number} {digest}\n" for number, digest in acks)
    found = subprocess.run(
        reader, input=asked, capture_output=True, text=True, check=False, timeout=120
    )
    tally.count(f"engine {engine} writer killed before cover: {found.stdout.strip() or 'failed'}")
    if found.returncode:
        tally.broke(trial, f"ended with {found.returncode}: {found.stderr[-300:]}")


# The file must be short when this starts; otherwise nothing is proved.
_SHORT_READER = """
import sys
sys.path[:0] = sys.argv[2:]
import casstore
from casstore.engine.lmdb.page_scan import read_extent
extent = read_extent(sys.argv[1] + "/data.mdb")
assert extent.file_bytes < extent.needed_bytes, extent
with casstore.open(sys.argv[1], durability="relaxed") as store:
    for line in sys.stdin:
        number, digest = line.split()
        assert store.get_value(bytes.fromhex(digest)) == {"commit": int(number)}
    store.engine.verify()
    store.put_value({"written": "after"})
print("opened, all there")
"""
