"""Damaged parts of a node index are rebuilt from the nodes, with the same digests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import NewObject, PutRow, Write
from casstore.errors import CorruptionError
from casstore.format.closure import links_of
from casstore.format.digest import Kind
from casstore.format.node_index import RUN_NODES, SPLIT_LEVEL
from casstore.maintenance.check import check
from casstore.maintenance.graph_proof import GraphProof, IndexMismatch, rebuild_node_index
from casstore.maintenance.salvage import salvage
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.session.data import Commit, NodeDraft
from casstore.session.state import runtime_of
from casstore.store import Store
from tests.maintenance.wounds import flip, open_store, wounding

COUNT = RUN_NODES[2] + RUN_NODES[1] + 40


def branched(store: Store, count: int = COUNT) -> None:
    """A session with branches, and a fork of one path of it, which leaves numbers out."""
    chance = random.Random(4)
    nodes = [
        NodeDraft(f"n{at}", at, **({"parent": f"n{chance.randrange(at)}"} if at % 9 == 8 else {}))
        for at in range(count)
    ]
    store.session("s").commit(Commit(append=nodes))
    store.fork("s", "path", node=f"n{count - 1}", append=[NodeDraft("own", 0)])


@pytest.mark.parametrize("name", ["s", "path"])
def test_an_index_is_rebuilt_from_its_nodes_with_the_same_digests(name: str) -> None:
    store = Store(MemoryEngine())
    branched(store)
    state = runtime_of(store).get(name)
    writer = PieceWriter()
    reader = PendingReader(store.engine, writer)
    tail = rebuild_node_index(reader, state.head.manifest, state.manifest, writer.emit)
    assert tail == state.manifest.node_index
    assert writer.objects
    assert store.missing([item.digest for item in writer.objects]) == []


def test_a_graph_that_lacks_a_node_is_not_rebuilt() -> None:
    store = Store(MemoryEngine())
    branched(store, 40)
    state = runtime_of(store).get("s")
    more = state.manifest._replace(nodes=41)
    with pytest.raises(CorruptionError, match="claims 41"):
        rebuild_node_index(PieceReader(store.engine), state.head.manifest, more, PieceWriter().emit)


def test_the_graph_proof_refuses_an_index_of_other_nodes() -> None:
    store = Store(MemoryEngine())
    branched(store, 40)
    proof = GraphProof(PieceReader(store.engine))
    for name in ("s", "path", "s"):
        state = runtime_of(store).get(name)
        proof.prove(state.head.manifest, state.manifest)
        tail = state.manifest.node_index
        assert tail.hashes
        wrong = tail._replace(hashes=bytes(len(tail.hashes)))
        with pytest.raises(IndexMismatch):
            proof.prove(state.head.manifest, state.manifest._replace(node_index=wrong))
        far = tail._replace(distances=(*tail.distances[:-1], tail.distances[-1] + 1))
        with pytest.raises(CorruptionError):
            proof.prove(state.head.manifest, state.manifest._replace(node_index=far))


@pytest.mark.parametrize("size", [700, 2_000])
def test_the_graph_proof_finds_a_duplicate_id_in_a_long_path(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``size`` nodes a revision: the filter is made when the path is long, and is kept."""
    store = Store(MemoryEngine())
    session = store.session("s")
    count = RUN_NODES[SPLIT_LEVEL] + 2 * size
    for start in range(0, count, size):
        session.append(*[NodeDraft(f"n{at}", None) for at in range(start, start + size)])
    proof = GraphProof(PieceReader(store.engine))

    def prove() -> None:
        for entry in reversed(list(session.history())):
            state = runtime_of(store).at("s", entry)
            proof.prove(state.head.manifest, state.manifest)

    prove()
    with monkeypatch.context() as patch:
        # Otherwise the commit would find that the graph has the id.
        patch.setattr(NodeIndex, "candidates", lambda index, hashes: [[] for _ in hashes])
        session.append(NodeDraft("n5", "another"))
    with pytest.raises(CorruptionError, match="two nodes 'n5'"):
        prove()


@pytest.mark.usefixtures("slab_a_commit")
@pytest.mark.parametrize("lost", ["first", "last", "all"])
def test_salvage_rebuilds_damaged_parts_of_an_index(tmp_path: Path, lost: str) -> None:
    """Nodes, parts of the index and manifests lie in slabs of their own; those of the index go."""
    source = Store(MemoryEngine())
    branched(source)
    path = tmp_path / "s"
    infos = sorted(source.engine.scan_objects(limit=100_000), key=lambda info: info.id)
    parts: list[bytes] = []
    with open_store(path) as store:
        batch: list[NewObject] = []
        for info in infos:
            [item] = source.engine.get_many([info.digest])
            assert item is not None
            own = NewObject(info.digest, item.kind, item.data, links_of(item.kind, item.data))
            if item.kind != Kind.NODE:
                store.engine.write(Write(objects=batch))
                batch = []
                store.engine.write(Write(objects=[own]))
                if item.kind == Kind.INDEX:
                    parts.append(bytes(info.digest))
            else:
                batch.append(own)
        rows = [
            PutRow(table, row.key, row.value)
            for table in ("heads", "history", "sessions")
            for row in source.engine.scan_rows(table)
        ]
        store.engine.write(Write(rows=rows))
        assert check(store, level="full").sound
        before = {
            name: [node.id for node in store.session(name).nodes("full")] for name in ("s", "path")
        }
    chosen = {"first": parts[:1], "last": parts[-1:], "all": parts}[lost]
    with wounding(path) as cut:
        slabs = [value for _, value in cut.rows("slabs")]
    data = (path / "data.mdb").read_bytes()
    for value in slabs:
        if any(name in value[:400] for name in chosen):
            # The end of the payload, wherever in the file a copy of it lies.
            data = data.replace(value[-24:], flip(value[-24:]))
    (path / "data.mdb").write_bytes(data)
    with open_store(path) as store:
        assert not check(store, level="full").sound
    report = salvage(path, tmp_path / "t")
    assert set(report.outcomes("whole")) == {"s", "path"}, report
    with open_store(tmp_path / "t") as store:
        assert check(store, level="full").sound
        for name, ids in before.items():
            assert [node.id for node in store.session(name).nodes("full")] == ids
