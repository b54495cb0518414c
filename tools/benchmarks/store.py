"""Measures the store: batches, growing lists, maps, threads, streams, start-up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import zstandard
from blake3 import blake3

import casstore
from benchmarks.measuring import (
    Goal,
    Pair,
    at_least,
    at_most,
    messages,
    seconds,
    side_by_side,
    texts,
)
from casstore import Append, Set
from casstore.engine.lmdb.engine import LmdbEngine


def used_bytes(store: casstore.Store) -> int:
    """The size of a store, with indexes, without free pages and the redo log."""
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    # Nothing is that old, so this packs nothing; it applies the log, which else has the last bytes.
    store.pack(min_age_ms=1 << 40)
    return engine.used_bytes()


def per_message(pair: Pair, count: int) -> str:
    """Both times, shared among the messages."""
    ours, bare = pair.ours_s * 1e6 / count, pair.theirs_s * 1e6 / count
    return f"{ours:.1f} µs a message, bare {bare:.1f} µs"


def batches(quick: bool) -> list[Goal]:
    """Putting and getting many messages in one call, against the same four packages bare."""
    count = 5_000 if quick else 20_000
    sent = messages(count)
    repeats = 3 if quick else 5
    goals: list[Goal] = []

    def bare_put(place: str) -> float:
        env = lmdb.open(place, map_size=1 << 40)
        compressor = zstandard.ZstdCompressor(level=3)

        def work() -> None:
            with env.begin(write=True) as txn:
                for message in sent:
                    packed = msgpack.packb(message)
                    txn.put(blake3(packed).digest(), compressor.compress(packed))

        taken = seconds(work)
        env.close()
        return taken

    def ours_put(place: str) -> float:
        with casstore.open(place) as store:
            return seconds(lambda: store.put_many([msgpack.packb(m) for m in sent]))

    pair = side_by_side(lambda: in_temporary(ours_put), lambda: in_temporary(bare_put), repeats)
    goals.append(
        at_least(
            f"put {count} messages as blobs in one batch: speed against the bare loop",
            1 / pair.ratio, 0.5,
            detail=per_message(pair, count),
        )
    )  # fmt: skip

    def ours_values(place: str) -> float:
        with casstore.open(place) as store:
            return seconds(lambda: store.put_many(sent))

    pair = side_by_side(lambda: in_temporary(ours_values), lambda: in_temporary(bare_put), repeats)
    goals.append(
        at_least(
            "the same as values (split, shared): speed against the bare loop",
            1 / pair.ratio, 0.5,
            detail=f"{pair.ours_s * 1e6 / count:.1f} µs a message",
        )
    )  # fmt: skip

    with tempfile.TemporaryDirectory() as place:
        names = [blake3(msgpack.packb(message)).digest() for message in sent]
        in_place(os.path.join(place, "bare"), bare_put)
        in_place(os.path.join(place, "ours"), ours_put)

        def bare_get() -> float:
            env = lmdb.open(os.path.join(place, "bare"), map_size=1 << 40)
            inflate = zstandard.ZstdDecompressor().decompress

            def work() -> None:
                with env.begin() as txn:
                    for name in names:
                        packed = inflate(txn.get(name, b""))
                        assert blake3(packed).digest() == name
                        msgpack.unpackb(packed)

            taken = seconds(work)
            env.close()
            return taken

        def ours_get() -> float:
            with casstore.open(os.path.join(place, "ours")) as store:
                return seconds(lambda: [msgpack.unpackb(b) for b in store.get_many(names)])

        pair = side_by_side(ours_get, bare_get, repeats)
        goals.append(
            at_least(
                "get them back: speed against the bare loop (both verify)",
                1 / pair.ratio, 0.5,
                detail=per_message(pair, count),
            )
        )  # fmt: skip
    return goals


def single_puts(quick: bool) -> list[Goal]:
    """One blob a call, durable: against a bare transaction, and against one that does not wait."""
    count = 150 if quick else 500
    sent = [text.encode() for text in texts(count, 1700, 5)]

    def bare(place: str) -> float:
        env = lmdb.open(place, map_size=1 << 40)
        compressor = zstandard.ZstdCompressor(level=3)

        def work() -> None:
            for content in sent:
                name, frame = blake3(content).digest(), compressor.compress(content)
                with env.begin(write=True) as txn:
                    txn.put(name, frame)

        taken = seconds(work)
        env.close()
        return taken

    def ours(durability: str) -> Callable[[str], float]:
        def run(place: str) -> float:
            with casstore.open(place, durability) as store:
                return seconds(lambda: [store.put_blob(content) for content in sent])

        return run

    repeats = 7 if quick else 15
    against = side_by_side(lambda: in_temporary(ours("full")), lambda: in_temporary(bare), repeats)
    share = side_by_side(
        lambda: in_temporary(ours("relaxed")), lambda: in_temporary(ours("full")), repeats
    )
    return [
        at_most(
            "one durable put of 1.7 KB, against a bare transaction of the same bytes",
            against.ratio, 1.7, detail=per_message(against, count),
        ),
        at_most(
            "the same at `relaxed`, which does not wait for the disk, against `full`",
            share.ratio, 0.35,
            detail=f"{share.ours_s * 1e6 / count:.0f} and {share.theirs_s * 1e6 / count:.0f} µs",
        ),
    ]  # fmt: skip


def in_temporary(work: Callable[[str], float]) -> float:
    """Run ``work`` in a directory that disappears."""
    with tempfile.TemporaryDirectory() as place:
        return work(os.path.join(place, "it"))


def in_place(place: str, work: Callable[[str], float]) -> float:
    """Run ``work`` in a directory that stays."""
    return work(place)


def growing_list(quick: bool) -> list[Goal]:
    """A checkpoint after every message of a session kept as one list."""
    sent = messages(600 if quick else 2_070)
    compressor = zstandard.ZstdCompressor(level=3)
    alone = sum(len(compressor.compress(msgpack.packb(message))) for message in sent)
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        empty = used_bytes(store)
        name = store.put_value([])
        for message in sent:
            name = store.edit(name, Append((), message))
        stored = used_bytes(store) - empty
        assert store.get_value(name) == sent
        middle = len(sent) // 2
        before = used_bytes(store)
        replacements = list(texts(64, 1550, 99))
        for text in replacements:
            store.edit(name, Set((middle, "content"), text))
        # Pages come whole, so one replacement says little: take many and share.
        added = (used_bytes(store) - before) / len(replacements)
    return [
        at_most(
            f"a list checkpointed after each of {len(sent)} appends: stored bytes against "
            "the messages compressed alone",
            stored / alone, 3.0, detail=f"{stored:,} bytes, alone {alone:,}",
        ),
        at_most(
            "replacing one message in the middle adds", added, 8192, "bytes",
            detail=f"mean of {len(replacements)}",
        ),
    ]  # fmt: skip


def large_map(quick: bool) -> list[Goal]:
    """One changed key in a large map: bytes, pieces, time."""
    value = {
        f"key-{number:06}": {"n": number, "text": f"value {number}"} for number in range(20_000)
    }
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        old = store.put_value(value)
        before = used_bytes(store)
        changed = [f"key-{number:06}" for number in range(100, 20_000, 311)]
        for key in changed:
            new = store.edit(old, Set((key, "n"), -1))
        added = (used_bytes(store) - before) / len(changed)
        changes = list(store.diff(old, new))
        assert [change.path for change in changes] == [(changed[-1], "n")]
        pieces = changes[0].pieces_read

        def compare_whole() -> float:
            return seconds(lambda: store.get_value(old) == store.get_value(new))

        def compare_pieces() -> float:
            return seconds(lambda: list(store.diff(old, new)))

        pair = side_by_side(compare_pieces, compare_whole, 5 if quick else 15)
    return [
        at_most("one changed key in a map of 20,000 adds", added, 10_240, "bytes",
                detail=f"mean of {len(changed)}"),
        at_most("diff of the two reads", pieces, 16, "pieces"),
        at_least(
            "diff against decoding both and comparing: times faster", 1 / pair.ratio, 50,
            detail=f"{pair.ours_s * 1e6:.0f} µs, whole {pair.theirs_s * 1e3:.1f} ms",
        ),
    ]  # fmt: skip


def durable_threads(quick: bool) -> list[Goal]:
    """Group commit: sixteen threads, each put durable, against one."""
    each = 100 if quick else 200
    blobs = [text.encode() for text in texts(each * 16, 1700, 3)]
    values = messages(each * 16)

    def share(threads: int, items: list[Any]) -> Callable[[str], float]:
        def run(place: str) -> float:
            with casstore.open(place) as store:

                def put(part: list[Any]) -> None:
                    for item in part:
                        store.put_blob(item) if type(item) is bytes else store.put_value(item)

                parts = [items[at * each : (at + 1) * each] for at in range(threads)]
                running = [threading.Thread(target=put, args=(part,)) for part in parts]

                def work() -> None:
                    for thread in running:
                        thread.start()
                    for thread in running:
                        thread.join()

                return seconds(work) / (threads * each)

        return run

    repeats = 7 if quick else 15
    pair = side_by_side(
        lambda: in_temporary(share(1, blobs)), lambda: in_temporary(share(16, blobs)), repeats
    )
    split = side_by_side(
        lambda: in_temporary(share(1, values)), lambda: in_temporary(share(16, values)), repeats
    )
    return [
        at_least(
            "16 threads, each put of 1.7 KB durable, against one: times the throughput",
            pair.ratio, 4,
            detail=f"{1 / pair.theirs_s:,.0f} puts a second, one thread {1 / pair.ours_s:,.0f}; "
            f"as values, which the interpreter must split, {split.ratio:.1f}×",
        )
    ]  # fmt: skip


def start_up(quick: bool) -> list[Goal]:
    """The time of ``import casstore``, against the four packages it depends on."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as cache:
        environment["PYTHONPYCACHEPREFIX"] = cache

        def measure(statement: str) -> float:
            code = (
                f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            )
            answer = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
                check=True, cwd=Path(__file__).parent.parent.parent,
            )  # fmt: skip
            return float(answer.stdout)

        packages = "import blake3, lmdb, msgpack, zstandard"
        opened = "import casstore, casstore.engine.lmdb.sharing"
        for statement in (packages, opened):
            measure(statement)  # the first run writes the byte code
        repeats = 9 if quick else 25
        bare = side_by_side(lambda: measure("import casstore"), lambda: measure(packages), repeats)
        whole = side_by_side(lambda: measure(opened), lambda: measure(packages), repeats)
    return [
        at_most(
            "import casstore, against importing its four storage packages", bare.ratio, 1.5,
            detail=f"{bare.ours_s * 1e3:.1f} ms, packages {bare.theirs_s * 1e3:.1f} ms; with the "
            f"engine that open() loads {whole.ratio:.2f}×",
        )
    ]  # fmt: skip


_STREAM = """
import io, sys, threading
sys.path.insert(0, sys.argv[4])
import casstore
from casstore.format import chunking
from blake3 import blake3

def private_kib():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

class Source(io.RawIOBase):
    "Bytes that do not repeat and need no memory."
    def __init__(self, size):
        self.left, self.block = size, 0
    def readable(self):
        return True
    def readinto(self, buffer):
        size = min(len(buffer), self.left, 1 << 16)
        buffer[:size] = blake3(self.block.to_bytes(8, "big")).digest(length=size)
        self.block += 1
        self.left -= size
        return size

with casstore.open(sys.argv[1], "relaxed") as store:
    store.put_stream(io.BytesIO(bytes(200_000)))  # whatever is loaded once is loaded
    peak, done = 0, threading.Event()
    start = private_kib()
    def watch():
        global peak
        while not done.wait(0.02):
            peak = max(peak, private_kib())
    watcher = threading.Thread(target=watch)
    watcher.start()
    size = int(sys.argv[2])
    name = store.put_stream(io.BufferedReader(Source(size), 1 << 16))
    put_peak, peak = peak, 0
    with store.open_blob(name) as blob:
        total = 0
        while part := blob.read(1 << 20):
            total += len(part)
    assert total == size
    done.set()
    watcher.join()
    print((put_peak - start) / 1024, (peak - start) / 1024)
"""


def streams(quick: bool) -> list[Goal]:
    """Private memory while a long blob goes in and out as a stream."""
    size = (1 << 28) if quick else (1 << 31)
    with tempfile.TemporaryDirectory() as place:
        answer = subprocess.run(
            [sys.executable, "-c", _STREAM, os.path.join(place, "s"), str(size), "",
             str(Path(__file__).parent.parent.parent)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    put, read = map(float, answer.stdout.split())
    return [
        at_most(f"memory while putting {size >> 20} MiB as a stream", put, 100, "MiB"),
        at_most(f"memory while reading {size >> 20} MiB as a stream", read, 100, "MiB"),
    ]


ALL: dict[str, Callable[[bool], list[Goal]]] = {
    "batches": batches,
    "single-puts": single_puts,
    "growing-list": growing_list,
    "large-map": large_map,
    "durable-threads": durable_threads,
    "start-up": start_up,
    "streams": streams,
}
