"""Measures branching: forks of forks, node indexes, adoption, tree search.

A chain is a session that was forked repeatedly, with a commit of one node on each fork. Every claim
compares the end of a long chain with the end of a chain of one fork. On PostgreSQL the same calls
are counted in round trips (``tests/engine/postgres/test_branching_round_trips.py``).
"""

from __future__ import annotations

import sqlite3
import tempfile
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path

import lmdb
import zstandard
from blake3 import blake3

import casstore
from benchmarks import space
from benchmarks.measuring import Goal, at_most, messages, seconds, side_by_side
from benchmarks.store import used_bytes
from casstore import Commit, NodeDraft
from casstore.engine.protocol import NewObject, PutRow, Write
from casstore.format.canonical import encode
from casstore.format.closure import links_of
from casstore.format.digest import Kind, digest_of
from casstore.format.graph import decode_manifest, encode_manifest
from casstore.format.node_index import NO_NODES
from casstore.store import Store

_CALLS = 100


def _step(name: str, size: int = 300) -> NodeDraft:
    return NodeDraft(name, {"role": "user", "text": f"{name} " * (size // (len(name) + 1))})


def _chain(store: Store, name: str, depth: int, *, nodes: int) -> str:
    """A session of ``nodes`` nodes at the end of ``depth`` forks, each with one own node."""
    first = [_step(f"{name}{at}") for at in range(nodes - depth)]
    session = f"{name} 0"
    store.session(session).commit(Commit(append=first))
    for at in range(1, depth + 1):
        store.fork(session, f"{name} {at}")
        session = f"{name} {at}"
        own = [_step(f"{name}{nodes - depth + at - 1}")]
        store.session(session).commit(Commit(append=own))
    return session


def depth(quick: bool) -> list[Goal]:
    """Calls at the end of a long chain of forks, against a chain of one with as many nodes."""
    forks, repeats = (300, 7) if quick else (1000, 15)
    nodes = forks + 100
    names = count()
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        ends = [_chain(store, "d", forks, nodes=nodes), _chain(store, "s", 1, nodes=nodes)]

        def compare(what: str, target: float, work: Callable[[str], object], unit: int) -> None:
            pair = side_by_side(
                lambda: seconds(lambda: work(ends[0])), lambda: seconds(lambda: work(ends[1])),
                repeats,
            )  # fmt: skip
            detail = f"{1e6 * pair.ours_s / unit:.1f} µs, {1e6 * pair.theirs_s / unit:.1f} µs"
            goals.append(
                at_most(
                    f"{what}: {forks:,} forks deep against one", pair.ratio, target, "×", detail
                )
            )

        def commit(session: str) -> None:
            for _ in range(_CALLS):
                draft = _step(f"x{next(names)}")
                store.session(session).commit(Commit(append=[draft]))

        def by_id(session: str) -> None:
            for at in range(0, nodes, nodes // _CALLS):
                if store.session(session).node(f"{session[0]}{at}") is None:
                    raise RuntimeError("a node is lost")

        def path(session: str) -> None:
            for _ in range(3):
                list(store.session(session).nodes())

        def fork(session: str) -> None:
            for _ in range(_CALLS):
                store.fork(session, f"fork {next(names)}")

        def first_commit(session: str) -> None:
            for _ in range(_CALLS):
                target = f"fork {next(names)}"
                store.fork(session, target)
                store.session(target).commit(Commit(append=[_step("own")]))

        compare("a commit of one node", 1.5, commit, _CALLS)
        compare("one node by id", 3, by_id, _CALLS)
        compare("loading the path, a node", 1.5, path, 3 * nodes)
        compare("a fork", 1.5, fork, _CALLS)
        compare("a fork and its first commit", 1.5, first_commit, _CALLS)
        goals.append(_compared(store, "d", forks))
    return goals


def _compared(store: Store, name: str, forks: int) -> Goal:
    found = store.compare(f"{name} 1", f"{name} {forks}")
    differ = len(found.added) + len(found.dropped)
    return at_most(
        "comparing both ends of the chain: objects read, a node that differs",
        found.pieces_read / differ, 1.25, "×",
        f"{found.pieces_read:,} objects for {differ:,} nodes",
    )  # fmt: skip


# --- space ------------------------------------------------------------------------------------


def index_space(quick: bool) -> list[Goal]:
    """The size of the node index per node after packing, as a difference."""
    sessions, length = (6, 150) if quick else (20, 400)
    goals: list[Goal] = []
    for what, target, each in (
        ("sessions imported in one revision", 30, length),
        ("a revision for every node, all kept", 60, 1),
    ):
        taken = _index_bytes(sessions, length, each)
        goals.append(
            at_most(
                f"the node index a node, ids are UUIDs, packed: {what}",
                taken / (sessions * length), target, "bytes",
                f"{taken:,.0f} bytes for {sessions * length:,} nodes",
            )
        )  # fmt: skip
    return goals


def _index_bytes(sessions: int, length: int, each: int) -> float:
    """The bytes of the index: its pieces, and the index fields of manifests, as stored in slabs.

    The stored size of an object is its share of its packed slab, by length.
    """
    made = messages(sessions * length, size=400)
    with tempfile.TemporaryDirectory() as place, casstore.open(place, "relaxed") as store:
        for number in range(sessions):
            session = store.session(f"s{number}")
            own = made[number * length : (number + 1) * length]
            drafts = [NodeDraft(str(uuid.UUID(int=hash(str(one["id"])) % (1 << 128))), one)
                      for one in own]  # fmt: skip
            for at in range(0, length, each):
                session.commit(Commit(append=drafts[at : at + each]))
        store.pack(min_age_ms=0)
        whole = used_bytes(store)
        nodes_only = _without_index(Path(place) / "plain", store)
    return whole - nodes_only


def _without_index(place: Path, store: Store) -> float:
    """A store with the same objects, except that manifests have no index."""
    heads = {
        (table, row.key): row.value
        for table in ("heads", "history")
        for row in store.engine.scan_rows(table, limit=1_000_000)
    }
    with casstore.open(place, "relaxed") as plain:
        renamed: dict[bytes, bytes] = {}
        batch: list[NewObject] = []
        # In the order of storing: children before their parents.
        for info in sorted(store.engine.scan_objects(limit=10_000_000), key=lambda one: one.id):
            [item] = store.engine.get_many([info.digest])
            assert item is not None
            if item.kind == Kind.INDEX:
                continue
            data, digest = item.data, bytes(info.digest)
            if item.kind == Kind.MANIFEST:
                manifest = decode_manifest(digest, data)
                bare = manifest._replace(nodes=0, node_index=NO_NODES)
                data = encode_manifest(bare)[0]
                digest = digest_of(Kind.MANIFEST, data)
                renamed[bytes(info.digest)] = digest
            batch.append(NewObject(digest, item.kind, data, links_of(item.kind, data)))
            if len(batch) == 256:
                plain.engine.write(Write(objects=batch))
                batch = []
        plain.engine.write(Write(objects=batch))
        for (table, key), value in heads.items():
            named = renamed.get(value[24:56])
            if named is not None:
                moved = value[:24] + named + value[56:]
                plain.engine.write(Write(rows=[PutRow(table, key, moved)]))
        plain.pack(min_age_ms=0)
        return used_bytes(plain)


def real_sessions(quick: bool) -> list[Goal]:
    """Real sessions, every checkpoint kept, packed, against git's best pack."""
    goal = space.against_git(quick)[0]
    return [goal._replace(target=0.85)]


# --- tree search ----------------------------------------------------------------------------------


def tree_search(quick: bool) -> list[Goal]:
    """Branches of one session, each a turn longer, durable, against rows in SQLite."""
    branches = 100 if quick else 1000
    trunk = [_step(f"t{at}") for at in range(50)]
    turns = [[_step(f"b{at} {part}", 600) for part in range(2)] for at in range(branches)]
    rows = [[encode(node.payload) for node in turn] for turn in turns]

    def ours() -> float:
        with tempfile.TemporaryDirectory() as place, casstore.open(place) as store:
            store.session("trunk").commit(Commit(append=trunk))

            def work() -> None:
                for at, turn in enumerate(turns):
                    store.fork("trunk", f"b{at}", append=turn)

            return seconds(work)

    def theirs() -> float:
        with tempfile.TemporaryDirectory() as place:
            base = sqlite3.connect(f"{place}/db")
            base.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
                "CREATE TABLE sessions (id TEXT PRIMARY KEY, parent TEXT, at INTEGER);"
                "CREATE TABLE nodes (session TEXT, seq INTEGER, id TEXT, body BLOB,"
                " PRIMARY KEY (session, seq));"
            )

            def work() -> None:
                for at, turn in enumerate(rows):
                    with base:
                        base.execute("INSERT INTO sessions VALUES (?, 'trunk', 50)", (f"b{at}",))
                        base.executemany(
                            "INSERT INTO nodes VALUES (?, ?, ?, ?)",
                            [(f"b{at}", 50 + n, f"b{at} {n}", body) for n, body in enumerate(turn)],
                        )

            taken = seconds(work)
            base.close()
            return taken

    pair = side_by_side(ours, theirs, 3 if quick else 5)
    return [
        at_most(
            f"tree search: {branches:,} branches of one session, each a turn longer, a branch, "
            "durable, against rows in SQLite",
            pair.ratio, 2, "×",
            f"{1e6 * pair.ours_s / branches:.0f} µs, {1e6 * pair.theirs_s / branches:.0f} µs",
        )
    ]  # fmt: skip


def hundred_nodes(quick: bool) -> list[Goal]:
    """One commit of 100 nodes against a bare loop that hashes, compresses and puts them."""
    repeats = 20 if quick else 60
    numbers = count()
    packer = zstandard.ZstdCompressor(level=3)
    with tempfile.TemporaryDirectory() as place, casstore.open(f"{place}/a", "relaxed") as store:
        bare = lmdb.open(f"{place}/b", map_size=1 << 30, sync=False)

        def ours() -> float:
            number = next(numbers)
            drafts = [_step(f"{number} {at}", 600) for at in range(100)]
            session = store.session(f"s{number}")
            return seconds(lambda: session.commit(Commit(append=drafts)))

        def theirs() -> float:
            number = next(numbers)
            bodies = [_step(f"{number} {at}", 600).payload for at in range(100)]

            def work() -> None:
                with bare.begin(write=True) as txn:
                    for body in bodies:
                        data = encode(body)
                        txn.put(blake3(data).digest(), packer.compress(data))

            return seconds(work)

        pair = side_by_side(ours, theirs, repeats)
        bare.close()
    return [
        at_most(
            "one commit of 100 nodes against a bare loop that hashes, compresses and puts them",
            pair.ratio, 2.5, "×",
            f"{1e6 * pair.ours_s / 100:.1f} µs a node, {1e6 * pair.theirs_s / 100:.1f} µs",
        )
    ]  # fmt: skip


def branching(quick: bool) -> list[Goal]:
    """All measurements."""
    parts = (depth, index_space, tree_search, hundred_nodes, real_sessions)
    return [goal for part in parts for goal in part(quick)]


ALL: dict[str, Callable[[bool], list[Goal]]] = {"branching": branching}
