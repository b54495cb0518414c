"""Measures the claims about the session runtime: commits, growth, forks, reads, comparisons."""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lmdb
import msgpack
import zstandard
from blake3 import blake3

import casstore
from benchmarks.measuring import Goal, at_least, at_most, messages, seconds, side_by_side
from benchmarks.sqlite_turns import SqliteTurns, Turn, create
from benchmarks.store import used_bytes
from casstore.engine.lmdb.batches import CommitQueue, TicketBatch
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import NewObject, Write, WriteResult
from casstore.session.data import Checkpoint, Commit, Lease, NodeDraft
from casstore.session.session import Session
from casstore.store import Store

_LEASE_MS = 3_600_000
_TOOL_STATE = {"tools": {name: {"enabled": True} for name in ("read", "write", "bash", "edit")}}


def make_turns(count: int, seed: int = 7) -> list[Turn]:
    """``count`` turns of two messages of about 1.7 KB."""
    sent = messages(2 * count, seed=seed)
    return list(zip(sent[::2], sent[1::2], strict=True))


class Writer:
    """A runtime that commits turns to one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        lease = session.claim_lease("benchmark", _LEASE_MS)
        assert lease is not None
        self.lease: Lease = lease
        first = Checkpoint(turn_state={"turn_index": 0}, tool_state=_TOOL_STATE)
        self.revision = session.commit(Commit(lease=lease, checkpoint=first)).revision
        self.tool_state = session.checkpoint().tool_state
        self.turns = 0

    def commit(self, turn: Turn) -> None:
        """Two messages, the tool state unchanged, lease and stamp checked."""
        self.turns += 1
        self.revision = self.session.commit(
            Commit(
                append=[NodeDraft(message["id"], message) for message in turn],
                checkpoint=Checkpoint(
                    turn_state={"turn_index": self.turns}, tool_state=self.tool_state
                ),
                expected=self.revision,
                lease=self.lease,
                turn=f"turn-{self.turns}",
            )
        ).revision


class Recorder(MemoryEngine):
    """A memory engine that records the objects of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[list[NewObject]] = []

    def write(self, write: Write) -> WriteResult:
        """Run the write and record its objects."""
        self.written.append(list(write.objects))
        return super().write(write)


def _objects_of(turns: Sequence[Turn]) -> list[list[bytes]]:
    """The bytes of the objects that a store writes for each of these turns."""
    engine = Recorder()
    writer = Writer(Store(engine).session("s"))
    engine.written.clear()
    for turn in turns:
        writer.commit(turn)
    return [[item.data for item in objects] for objects in engine.written]


# --- commits ------------------------------------------------------------------------------


def commits(quick: bool) -> list[Goal]:
    """A committed turn against a bare transaction that writes the same objects."""
    count = 150 if quick else 400
    turns = make_turns(count)
    objects = _objects_of(turns)
    packed = [[msgpack.packb(message) for message in turn] for turn in turns]
    repeats = 5 if quick else 9
    return [
        _commits_at("full", 0.85, turns, objects, packed, repeats),
        _against_sqlite(turns, repeats),
        _commits_at("relaxed", 1.3, turns, objects, packed, repeats),
    ]


def _turns_at(durability: str, turns: list[Turn]) -> float:
    with tempfile.TemporaryDirectory() as place, casstore.open(place, durability) as store:
        return median(times(Writer(store.session("s")).commit, turns))


def _against_sqlite(turns: list[Turn], repeats: int) -> Goal:
    def theirs() -> float:
        with tempfile.TemporaryDirectory() as place:
            path = os.path.join(place, "db")
            create(path)
            database = SqliteTurns(path, "s")
            taken = median(times(database.commit, turns))
            database.close()
            return taken

    pair = side_by_side(lambda: _turns_at("full", turns), theirs, repeats)
    return at_most(
        "a commit of two messages of 1.7 KB at `full`, against SQLite (WAL, synchronous FULL) "
        "with a row a message and a row for the head",
        pair.ratio, 1.4,
        detail=f"{pair.ours_s * 1e6:.0f} µs, SQLite {pair.theirs_s * 1e6:.0f} µs; {pair.spread}",
    )  # fmt: skip


def _commits_at(
    durability: str,
    target: float,
    turns: list[Turn],
    objects: list[list[bytes]],
    packed: list[list[bytes]],
    repeats: int,
) -> Goal:
    def ours() -> float:
        return _turns_at(durability, turns)

    def bare(rows: list[list[bytes]]) -> float:
        with tempfile.TemporaryDirectory() as place:
            return bare_commits(place, rows, durability)

    pair = side_by_side(ours, lambda: bare(objects), repeats)
    alone = side_by_side(ours, lambda: bare(packed), 3)
    return at_most(
        f"a commit of two messages of 1.7 KB at `{durability}`, against a bare transaction that "
        "hashes, compresses and writes the same objects and a head row",
        pair.ratio, target,
        detail=f"{pair.ours_s * 1e6:.0f} µs, bare {pair.theirs_s * 1e6:.0f} µs; "
        f"{pair.spread}; against the two messages alone {alone.ratio:.2f}×",
    )  # fmt: skip


def times(work: Callable[[Any], object], items: Sequence[Any]) -> list[float]:
    """The duration of ``work`` for each item."""
    taken: list[float] = []
    for item in items:
        started = perf_counter()
        work(item)
        taken.append(perf_counter() - started)
    return taken


def bare_commits(place: str, rows: list[list[bytes]], durability: str) -> float:
    """The median duration of a bare transaction that writes one of ``rows`` and a head."""
    env = lmdb.open(
        place,
        map_size=1 << 40,
        max_dbs=2,
        metasync=durability == "full",
    )
    objects, heads = env.open_db(b"objects"), env.open_db(b"heads")
    compress = zstandard.ZstdCompressor(level=3).compress

    def commit(contents: list[bytes]) -> None:
        with env.begin(write=True) as txn:
            for content in contents:
                digest = blake3(content).digest()
                txn.put(digest, compress(content), db=objects)
            txn.put(b"s", digest, db=heads)

    taken = median(times(commit, rows))
    env.close()
    return taken


# --- many threads ---------------------------------------------------------------------------


def threads(quick: bool) -> list[Goal]:
    """16 threads, each with its own session, every commit durable."""
    number = 16
    each = 60 if quick else 150
    work = [make_turns(each, seed=100 + at) for at in range(number)]

    def ours(workers: int) -> float:
        with tempfile.TemporaryDirectory() as place, casstore.open(place) as store:
            writers = [Writer(store.session(f"s{at}")) for at in range(workers)]
            return _together([partial(_commit_all, writers[at], work[at]) for at in range(workers)])

    def sqlite() -> float:
        with tempfile.TemporaryDirectory() as place:
            return _sqlite_threads(os.path.join(place, "db"), work)

    finished = [_finished(turns) for turns in work]

    def limit(workers: int) -> float:
        with tempfile.TemporaryDirectory() as place:
            return _finished_threads(place, finished[:workers])

    repeats = 3 if quick else 5
    one = side_by_side(lambda: ours(number), lambda: ours(1), repeats)
    other = side_by_side(lambda: ours(number), sqlite, repeats)
    disk = side_by_side(lambda: limit(number), lambda: limit(1), repeats)
    rate, single = number * each / one.ours_s, each / one.theirs_s
    return [
        at_least(
            "16 threads committing durably to 16 sessions, against one: times the rate",
            number / one.ratio, 4,
            detail=f"{rate:,.0f} commits a second, one thread {single:,.0f}. With nothing left "
            "to do but to write the bytes of each commit, which are finished before, sixteen reach "
            f"{number / disk.ratio:.1f} times one",
        ),
        at_least(
            "the same against SQLite (WAL, synchronous FULL) writing the same turns from 16 "
            "threads: times the rate",
            1 / other.ratio, 1.7,
            detail=f"SQLite {number * each / other.theirs_s:,.0f} commits a second; "
            f"{other.inverse_spread}",
        ),
    ]  # fmt: skip


def _finished(turns: Sequence[Turn]) -> list[bytes]:
    """What a store writes for each of these turns, compressed, as one value."""
    compress = zstandard.ZstdCompressor(level=3).compress
    return [compress(b"".join(objects)) for objects in _objects_of(turns)]


def _finished_threads(place: str, work: Sequence[Sequence[bytes]]) -> float:
    """Threads that share transactions like a store's, and put one value and a head each."""
    env = lmdb.open(place, map_size=1 << 40, max_dbs=2)
    slabs, heads = env.open_db(b"slabs"), env.open_db(b"heads")
    numbers = iter(range(1, 1 << 30))

    def run(batch: TicketBatch[tuple[int, bytes], int]) -> None:
        answers: list[int] = []
        with env.begin(write=True) as txn:
            for ticket in batch.tickets:
                session, value = ticket.work
                number = next(numbers)
                txn.put(number.to_bytes(8, "big"), value, append=True, db=slabs)
                txn.put(session.to_bytes(2, "big"), value[:80], db=heads)
                answers.append(number)
        batch.answers = answers

    queue = CommitQueue(run)

    def write(at: int) -> None:
        for value in work[at]:
            queue.submit((at, value))

    taken = _together([partial(write, at) for at in range(len(work))])
    env.close()
    return taken


def _commit_all(writer: Writer, turns: Sequence[Turn]) -> None:
    for turn in turns:
        writer.commit(turn)


def _together(jobs: Sequence[Callable[[], object]]) -> float:
    barrier = threading.Barrier(len(jobs) + 1)

    def run(job: Callable[[], object]) -> None:
        barrier.wait()
        job()

    workers = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = perf_counter()
    for worker in workers:
        worker.join()
    return perf_counter() - started


def _sqlite_threads(path: str, work: Sequence[Sequence[Turn]]) -> float:
    create(path)

    def write(at: int) -> None:
        database = SqliteTurns(path, f"s{at}")
        for turn in work[at]:
            database.commit(turn)
        database.close()

    return _together([partial(write, at) for at in range(len(work))])


# --- growth -----------------------------------------------------------------------------


def corpus() -> tuple[str, list[Any], int] | None:
    """The entries of the JSONL file that CASSTORE_CORPUS names, and the file's size.

    Of a directory the file with the most lines: one long session.
    """
    given = os.environ.get("CASSTORE_CORPUS")
    if not given:
        return None
    files = sorted(Path(given).glob("*.jsonl")) if Path(given).is_dir() else [Path(given)]
    path = max(files, key=lambda file: file.read_bytes().count(b"\n"))
    text = path.read_text()
    return path.name, [json.loads(line) for line in text.splitlines()], len(text.encode())


def growth(quick: bool) -> list[Goal]:
    """A checkpoint after every entry of a session, all of them kept."""
    given = corpus()
    if given is None:
        made: list[Any] = messages(500 if quick else 1003)
        size = sum(len(json.dumps(message)) + 1 for message in made)
        given = "a made-up session (set CASSTORE_CORPUS to a JSONL file for a real one)", made, size
    name, entries, size = given
    once, twice = _grown(entries), _grown([*entries, *_altered(entries)])
    return [
        at_most(
            f"a checkpoint after each of {len(entries)} entries of {name}, all kept: "
            "used bytes against the file",
            once / size, 0.7,
            detail=f"{once:,} bytes, file {size:,}",
        ),
        at_most("twice the session: times the bytes", twice / once, 2.1, detail=f"{twice:,} bytes"),
    ]  # fmt: skip


def _grown(entries: Sequence[Any]) -> int:
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        session = store.session("s")
        for at, entry in enumerate(entries):
            session.commit(
                Commit(
                    append=[NodeDraft(f"entry-{at:06}", entry)],
                    checkpoint=Checkpoint(turn_state={"turn_index": at}),
                )
            )
        return used_bytes(store)


def _altered(value: Any) -> Any:
    """A session of the same structure with other words, so that nothing is shared."""
    if isinstance(value, str):
        return value[::-1]
    if isinstance(value, list):
        return [_altered(item) for item in value]
    if isinstance(value, dict):
        return {key: _altered(item) for key, item in value.items()}
    return value


# --- forks ------------------------------------------------------------------------------


def _session_of(store: Store, name: str, nodes: int) -> Session:
    """A session with this many nodes, committed in long runs."""
    session = store.session(name)
    for start in range(0, nodes, 1000):
        session.commit(
            Commit(
                append=[
                    NodeDraft(f"{name}-{at}", {"role": "user", "content": f"message {at}"})
                    for at in range(start, min(start + 1000, nodes))
                ],
            )
        )
    return session


def forks(quick: bool) -> list[Goal]:
    """A fork, of a short session and of a long one, against an empty durable commit."""
    long = 10_000 if quick else 100_000
    count = 60 if quick else 200
    with tempfile.TemporaryDirectory() as place, casstore.open(place) as store:
        _session_of(store, "short", 100)
        _session_of(store, "long", long)
        empty = store.session("empty")
        lease = empty.claim_lease("benchmark", _LEASE_MS)
        numbers = iter(range(1 << 30))

        def fork(source: str) -> Callable[[], float]:
            return lambda: median(
                times(lambda _: store.fork(source, f"fork-{next(numbers):06}"), range(count))
            )

        def commit() -> float:
            change = Commit(lease=lease)
            return median(times(lambda _: empty.commit(change), range(count)))

        fork("short")(), fork("long")(), commit()
        repeats = 5 if quick else 9
        against_short = side_by_side(fork("long"), fork("short"), repeats)
        against_commit = side_by_side(fork("long"), commit, repeats)
        before = used_bytes(store)
        made = 400
        for _ in range(made):
            store.fork("long", f"fork-{next(numbers):06}")
        cost = (used_bytes(store) - before) / made
    return [
        at_most(
            f"forking a session of {long} nodes, against one of 100: times as long",
            against_short.ratio, 1.2,
            detail=f"{against_short.ours_s * 1e6:.0f} µs, {against_short.theirs_s * 1e6:.0f} µs",
        ),
        at_most(
            "a durable fork, against an empty durable commit",
            against_commit.ratio, 1.3,
            detail=f"{against_commit.ours_s * 1e6:.0f} µs, {against_commit.theirs_s * 1e6:.0f} µs",
        ),
        at_most(f"a fork of {long} nodes adds", cost, 1024, "bytes", detail=f"mean of {made}"),
    ]  # fmt: skip


# --- reading ----------------------------------------------------------------------------


def reading(quick: bool) -> list[Goal]:
    """The active path of a long session, and single nodes, against bare loops."""
    count = 2_000 if quick else 10_000
    turns = make_turns(count // 2)
    with tempfile.TemporaryDirectory() as place:
        ours_at, bare_at = os.path.join(place, "ours"), os.path.join(place, "bare")
        with casstore.open(ours_at, "relaxed") as store:
            writer = Writer(store.session("s"))
            for turn in turns:
                writer.commit(turn)
        ids = [message["id"] for turn in turns for message in turn]
        _bare_nodes(bare_at, ids, [message for turn in turns for message in turn])

        def ours() -> float:
            with casstore.open(ours_at) as store:
                session = store.session("s")
                return seconds(lambda: _require(len(list(session.nodes())), count))

        def bare() -> float:
            env = lmdb.open(bare_at, map_size=1 << 40, readonly=True)
            taken = seconds(lambda: _require(len(_bare_path(env, ids[-1])), count))
            env.close()
            return taken

        repeats = 5 if quick else 9
        path = side_by_side(ours, bare, repeats)
        with casstore.open(ours_at) as store:
            store.pack(min_age_ms=0)
        packed = side_by_side(ours, bare, repeats)
    goals = [
        at_most(
            f"the active path of {count} nodes, {when}, against a bare loop that fetches, inflates "
            "and decodes the same nodes",
            pair.ratio, 2,
            detail=f"{pair.ours_s * 1e6 / count:.1f} µs a node, bare "
            f"{pair.theirs_s * 1e6 / count:.1f} µs",
        )
        for when, pair in (("as committed, two at a time", path), ("after pack()", packed))
    ]  # fmt: skip
    return goals + _single_nodes(quick)


def _require(found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"{found} nodes, not {expected}")


def _bare_nodes(place: str, ids: Sequence[str], payloads: Sequence[Any]) -> None:
    env = lmdb.open(place, map_size=1 << 40)
    compress = zstandard.ZstdCompressor(level=3).compress
    with env.begin(write=True) as txn:
        parent = None
        for node_id, payload in zip(ids, payloads, strict=True):
            packed = msgpack.packb({"id": node_id, "parent": parent, "payload": payload})
            txn.put(node_id.encode(), compress(packed))
            parent = node_id
    env.close()


def _bare_path(env: lmdb.Environment, leaf: str) -> list[Any]:
    inflate = zstandard.ZstdDecompressor().decompress
    nodes: list[Any] = []
    step: str | None = leaf
    with env.begin() as txn:
        while step is not None:
            node = msgpack.unpackb(inflate(txn.get(step.encode(), b"")))
            nodes.append(node)
            step = node["parent"]
    nodes.reverse()
    return nodes


def _single_nodes(quick: bool) -> list[Goal]:
    total = 10_000 if quick else 100_000
    asked = 500
    order = random.Random(5)
    sent: list[dict[str, Any]] = list(messages(total, size=300))
    ids: list[str] = [message["id"] for message in sent]
    with tempfile.TemporaryDirectory() as place:
        ours_at, bare_at = os.path.join(place, "ours"), os.path.join(place, "bare")
        with casstore.open(ours_at, "relaxed") as store:
            session = store.session("s")
            lease = session.claim_lease("benchmark", _LEASE_MS)
            for start in range(0, total, 2):
                drafts = [NodeDraft(message["id"], message) for message in sent[start : start + 2]]
                session.commit(Commit(append=drafts, lease=lease))
        _bare_nodes(bare_at, ids, sent)

        def ours() -> float:
            with casstore.open(ours_at) as store:
                session = store.session("s")
                session.node(ids[0])
                wanted = order.sample(ids, asked)
                return seconds(lambda: [session.node(node_id) for node_id in wanted])

        def bare() -> float:
            env = lmdb.open(bare_at, map_size=1 << 40, readonly=True)
            inflate = zstandard.ZstdDecompressor().decompress
            wanted = order.sample(ids, asked)

            def get(node_id: str) -> Any:
                with env.begin() as txn:
                    return msgpack.unpackb(inflate(txn.get(node_id.encode(), b"")))

            taken = seconds(lambda: [get(node_id) for node_id in wanted])
            env.close()
            return taken

        pair = side_by_side(ours, bare, 5 if quick else 9)
    return [
        at_most(
            f"one node by id from {total}, against a bare get with inflating and decoding",
            pair.ratio, 5,
            detail=f"{pair.ours_s * 1e6 / asked:.1f} µs, bare {pair.theirs_s * 1e6 / asked:.1f} µs",
        )
    ]  # fmt: skip


# --- comparing --------------------------------------------------------------------------


def comparing(quick: bool) -> list[Goal]:
    """Two forks of a long session that differ in ten nodes."""
    long = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        _session_of(store, "long", long)
        for name in ("left", "right"):
            store.fork("long", name)
            for at in range(5):
                store.session(name).commit(Commit(append=[NodeDraft(f"{name} {at}", {"n": at})]))
        found = store.compare("left", "right")
        _require(len(found.added) + len(found.dropped), 10)
    return [
        at_most(
            f"comparing two forks of {long} nodes that differ in ten reads",
            found.pieces_read, 60, "pieces",
        )
    ]  # fmt: skip


ALL: dict[str, Callable[[bool], list[Goal]]] = {
    "commits": commits,
    "commit-threads": threads,
    "growth": growth,
    "forks": forks,
    "reading": reading,
    "comparing": comparing,
}
