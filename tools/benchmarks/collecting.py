"""Measures gc: marking against reading, all of gc against git's, concurrent commits."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import IO, NamedTuple

import casstore
from benchmarks.measuring import Goal, at_least, at_most, side_by_side, texts
from benchmarks.sessions import Writer, make_turns
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import NewObject, Write
from casstore.format.digest import Digest, plain_hash
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.store import Store

# How many leaves one object links to, like files in a directory.
_FAN_OUT = 500
_LEAF_BYTES = 300
_BATCH = 5000
# How often the whole of gc is measured: a single run varies by a tenth.
_COLLECTIONS = 5
_ROOT = Path(__file__).parent.parent.parent


class _Leaf(NamedTuple):
    content: bytes
    live: bool


def _leaves(count: int) -> Iterator[_Leaf]:
    """Short texts, all different; a random half is garbage."""
    source = random.Random(5)
    text = "".join(texts(200, 4000, seed=11)).encode()
    for number in range(count):
        at = source.randrange(len(text) - _LEAF_BYTES)
        yield _Leaf(b"%d %s" % (number, text[at : at + _LEAF_BYTES]), source.random() < 0.5)


def _fill(store: Store, count: int) -> list[Digest]:
    """Store the leaves and their parents; returns the tagged roots of the live half."""
    engine = store.engine
    batch: list[NewObject] = []
    waiting: dict[bool, list[bytes]] = {True: [], False: []}
    above: dict[bool, list[bytes]] = {True: [], False: []}

    def add(content: bytes, children: Sequence[bytes]) -> bytes:
        digest = plain_hash(content)
        batch.append(NewObject(digest, 0, content, children))
        if len(batch) >= _BATCH:
            engine.write(Write(batch))
            batch.clear()
        return digest

    def hold(live: bool, held: list[bytes]) -> bytes:
        digest = add(b"".join(held) + bytes((live,)), list(held))
        held.clear()
        return digest

    for leaf in _leaves(count):
        waiting[leaf.live].append(add(leaf.content, ()))
        if len(waiting[leaf.live]) == _FAN_OUT:
            above[leaf.live].append(hold(leaf.live, waiting[leaf.live]))
    roots: dict[bool, bytes] = {}
    for live in (True, False):
        roots[live] = hold(live, waiting[live] + above[live])
    engine.write(Write(batch))
    store.tag("live", Digest(roots[True]))
    return [Digest(roots[True])]


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not report the memory of a process")


# --- marking ------------------------------------------------------------------------------


def marking(quick: bool) -> list[Goal]:
    """Marking a store, against a loop that reads the rows of the same objects."""
    count = 200_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        # Imports and one-time setup are not part of marking.
        gc.plan(store)
        _fill(store, count)
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        env = engine._env
        peak = 0

        def watch(step: Step) -> None:
            nonlocal peak
            peak = max(peak, _anonymous_bytes())

        def mark() -> float:
            started = process_time()
            report = gc.plan(store, grace_ms=0).report
            assert report.objects_unreached
            return process_time() - started

        def read() -> float:
            started = process_time()
            with env.handle.begin() as txn:
                for table in (env.index, env.slabs):
                    for _ in txn.cursor(db=table):
                        pass
            return process_time() - started

        before = _anonymous_bytes()
        gc.plan(store, grace_ms=0, progress=watch)
        pair = side_by_side(mark, read, 5)
    return [
        at_most(
            f"marking {count:,} objects, against a loop that reads their rows of index and slabs",
            pair.ratio, 1.5,
            detail=f"{pair.ours_s * 1000:.0f} ms, the loop {pair.theirs_s * 1000:.0f} ms",
        ),
        at_most("memory for marking, an object", max(peak - before, 0) / count, 2.0, "B"),
    ]  # fmt: skip


# --- the whole of it ----------------------------------------------------------------------


def whole(quick: bool) -> list[Goal]:
    """Gc of a store where half is garbage, against `git gc --prune=now` of the same."""
    count = 20_000 if quick else 200_000
    if shutil.which("git") is None:
        print("whole-gc is skipped: there is no git", file=sys.stderr)
        return []
    times: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        for number in range(1 if quick else _COLLECTIONS):
            with casstore.open(os.path.join(place, str(number))) as store:
                _fill(store, count)
                started = perf_counter()
                report = gc.collect(store, grace_ms=0, batch=gc.MAX_BATCH)
                swept = perf_counter()
                times.append(swept - started)
                assert report.outcome is gc.Outcome.SWEPT
                if number == 0:
                    store.pack(min_age_ms=0)
                    packing = perf_counter() - swept
        ours = median(times)
        loose = _git_gc(os.path.join(place, "loose"), count, loose=True)
        packed = _git_gc(os.path.join(place, "packed"), count, loose=False)
    return [
        at_least(
            f"gc of {count:,} objects, half of them garbage, against `git gc --prune=now` of the "
            "same, loose as git writes them: times as fast",
            loose / ours, 10.0,
            detail=f"{ours:.2f} s ({min(times):.2f} to {max(times):.2f}), git {loose:.2f} s; with "
            f"pack(), which gives all bytes back, {ours + packing:.2f} s "
            f"({loose / (ours + packing):.1f}×); git where all was in one pack before "
            f"{packed:.2f} s",
        )
    ]  # fmt: skip


def _git_gc(repository: str, count: int, *, loose: bool) -> float:
    """The duration of git's gc with the same leaves as blobs; live ones are files of one commit."""
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "init", "--quiet", repository], check=True, env=quiet)
    limit = 10 * count if loose else 0
    command = ["git", "-c", f"fastimport.unpackLimit={limit}", "fast-import", "--quiet"]
    with subprocess.Popen(command, cwd=repository, stdin=subprocess.PIPE, env=quiet) as importer:
        assert importer.stdin is not None
        _export(importer.stdin, count)
        importer.stdin.close()
        if importer.wait():
            raise RuntimeError("git fast-import failed")
    started = perf_counter()
    subprocess.run(["git", "gc", "--prune=now", "--quiet"], cwd=repository, check=True, env=quiet)
    return perf_counter() - started


def _export(out: IO[bytes], count: int) -> None:
    live: list[int] = []
    for number, leaf in enumerate(_leaves(count), 1):
        out.write(b"blob\nmark :%d\ndata %d\n%s\n" % (number, len(leaf.content), leaf.content))
        if leaf.live:
            live.append(number)
    out.write(b"commit refs/heads/main\ncommitter a <a@b> 1700000000 +0000\ndata 1\nx\n")
    for at, number in enumerate(live):
        out.write(b"M 100644 :%d %d/%d\n" % (number, at // _FAN_OUT, at % _FAN_OUT))
    out.write(b"\n")


# --- concurrent commits -------------------------------------------------------------------

_COLLECTOR = """
import sys, casstore
from casstore.maintenance import gc
with casstore.open(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.readline()
    report = gc.collect(store, grace_ms=0)
    print(report.outcome.value, report.longest_pause_ms, flush=True)
"""


def also(quick: bool) -> list[Goal]:
    """Durable commits while another process collects the store, against commits alone."""
    count = 50_000 if quick else 300_000
    with tempfile.TemporaryDirectory() as place:
        with casstore.open(place, "relaxed") as store:
            _fill(store, count)
        with casstore.open(place) as store:
            writer = Writer(store.session("s"))
            turns = iter(make_turns(20_000))
            alone = [_commit(writer, next(turns)) for _ in range(1000 if quick else 2000)]
            with subprocess.Popen(
                [sys.executable, "-c", _COLLECTOR, place],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
            ) as collector:  # fmt: skip
                assert collector.stdin is not None
                assert collector.stdout is not None
                assert collector.stdout.readline() == "open\n"
                os.set_blocking(collector.stdout.fileno(), False)
                collector.stdin.write("go\n")
                collector.stdin.flush()
                during: list[float] = []
                said = ""
                while not said:
                    during.append(_commit(writer, next(turns)))
                    said = collector.stdout.readline()
            # The expected value if no other process used the processors.
            after = [_commit(writer, next(turns)) for _ in range(1000)]
    outcome, pause_ms = said.rsplit(maxsplit=1)
    assert outcome == gc.Outcome.SWEPT.value, said
    before = sorted(alone + after)
    return [
        at_most(
            f"99 in 100 durable commits, while another process collects {count:,} objects, take "
            "at most, against alone",
            _p99(sorted(during)) / _p99(before), 4.0,
            detail=f"{_p99(sorted(during)) * 1000:.1f} ms, alone {_p99(before) * 1000:.1f} ms; "
            f"the longest {max(during) * 1000:.1f} ms, alone {max(before) * 1000:.1f} ms; "
            f"{len(during):,} commits; the collector held the lock for at most "
            f"{float(pause_ms):.1f} ms",
        )
    ]  # fmt: skip


def _commit(writer: Writer, turn: tuple[dict[str, object], dict[str, object]]) -> float:
    started = perf_counter()
    writer.commit(turn)
    return perf_counter() - started


def _p99(ordered: Sequence[float]) -> float:
    return ordered[len(ordered) * 99 // 100]


ALL = {"marking": marking, "whole-gc": whole, "beside-gc": also}
