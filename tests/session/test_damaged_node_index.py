"""A node index that is damaged gives the right nodes or a CorruptionError, never others."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import casstore
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, Write
from casstore.errors import CorruptionError
from casstore.format.digest import Kind
from casstore.format.graph import encode_manifest
from casstore.format.node_index import (
    RUN_NODES,
    IndexPage,
    IndexRun,
    Spine,
    bucket_of,
    decode_piece,
    encode_piece,
    id_hash,
)
from casstore.maintenance import findings as codes
from casstore.maintenance.check import check
from casstore.objects.pieces import PieceWriter
from casstore.session import keys
from casstore.session.data import Commit, NodeDraft
from casstore.session.session import Session
from casstore.session.state import encode_head, head_key, runtime_of
from casstore.store import Store
from casstore.testing.engine_fixtures import find_object
from casstore.testing.inspection import replace_object

# One large run, a run of each smaller level, a page, and a tail.
COUNT = RUN_NODES[3] + RUN_NODES[2] + RUN_NODES[1] + RUN_NODES[0] + 5
FIRST = "n0"


def nodes(count: int) -> list[NodeDraft]:
    return [NodeDraft(f"n{at}", at) for at in range(count)]


@pytest.fixture(scope="module")
def written() -> MemoryEngine:
    engine = MemoryEngine()
    Store(engine).session("s").commit(Commit(append=nodes(COUNT)))
    return engine


def pieces(engine: MemoryEngine) -> dict[str, list[bytes]]:
    """The digests of all parts of the index, by what they are."""
    found: dict[str, list[bytes]] = {}
    for info in engine.scan_objects():
        if info.kind == Kind.INDEX:
            [item] = engine.get_many([info.digest])
            assert item is not None
            piece = decode_piece(info.digest, item.data)
            name = type(piece).__name__ + (str(piece.level) if isinstance(piece, IndexRun) else "")
            found.setdefault(name, []).append(info.digest)
    return found


def ask(session: Session) -> list[object]:
    return [
        session.node(FIRST),
        session.node(f"n{COUNT - 30}"),
        session.node("absent"),
        [node.id for node in session.nodes()][::7],
        [node.id for node in session.nodes("full")][::7],
        [node.id for node in session.nodes(leaf="n100")],
    ]


SHAPES = ["IndexPage", "IndexRun1", "IndexRun2", "IndexRun3", "Bucket", "Spine"]


def test_the_test_index_has_a_piece_of_every_shape(written: MemoryEngine) -> None:
    assert sorted(pieces(written)) == sorted(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_flipped_bit_gives_the_right_nodes_or_an_error(written: MemoryEngine, shape: str) -> None:
    chance = random.Random(shape)
    right = ask(Store(written).session("s"))
    names = pieces(written)[shape]
    hit = 0
    chosen = {names[0], names[-1], chance.choice(names)}
    if shape == "Bucket":
        runtime = runtime_of(Store(written))
        index = runtime.index(runtime.get("s").manifest)
        [run] = index.load(index.spine.runs[3])
        assert isinstance(run, IndexRun)
        chosen = {run.buckets[bucket_of(id_hash(FIRST))]}
    for digest in chosen:
        stored = find_object(written, digest)
        assert stored is not None
        data = bytearray(stored.data)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        replace_object(written, digest, bytes(data))
        try:
            for at, expected in enumerate(right):
                session = Store(written).session("s")
                try:
                    assert ask(session)[at] == expected
                except CorruptionError:
                    hit += 1
        finally:
            replace_object(written, digest, stored.data)
    assert hit, "no answer has needed the part that was damaged"
    assert ask(Store(written).session("s")) == right


LIES: dict[str, Callable[[IndexPage], IndexPage]] = {
    "two nodes in each other's place": lambda page: page._replace(
        digests=(page.digests[1], page.digests[0], *page.digests[2:])
    ),
    "one node twice": lambda page: page._replace(digests=(page.digests[1], *page.digests[1:])),
    "another parent": lambda page: page._replace(distances=(0, 1, 2, *page.distances[3:])),
}


@pytest.mark.parametrize("why", LIES)
def test_check_finds_a_node_index_with_wrong_content_and_correct_digests(
    tmp_path: Path, why: str
) -> None:
    """Not damage, which digests show, but an index of which all digests are right."""
    with casstore.open(tmp_path / "s") as store:
        session = store.session("s")
        session.commit(Commit(append=nodes(40)))
        ids = [node.id for node in session.nodes()]
        assert check(store).sound
        lie(store, LIES[why])
        for scope in ("path", "full"):
            try:
                assert [node.id for node in session.nodes(scope)] == ids
            except CorruptionError:
                continue
        report = check(store)
        assert {*report.counts} & {codes.NODE_INDEX_WRONG, codes.GRAPH_WRONG}
        assert not report.sound


def lie(store: Store, change: Callable[[IndexPage], IndexPage]) -> None:
    """Write the head of session s again, with another first page in its node index."""
    state = runtime_of(store).get("s")
    index = runtime_of(store).index(state.manifest)
    spine = index.spine
    [page] = index.load(spine.runs[0][:1])
    assert isinstance(page, IndexPage)
    writer = PieceWriter()
    first = writer.emit(Kind.INDEX, *encode_piece(change(page)))
    other = Spine(spine.hashes, ((first, *spine.runs[0][1:]), *spine.runs[1:]))
    name = writer.emit(Kind.INDEX, *encode_piece(other))
    tail = state.manifest.node_index._replace(spine=name)
    digest = writer.emit(Kind.MANIFEST, *encode_manifest(state.manifest._replace(node_index=tail)))
    row = encode_head(state.head._replace(manifest=digest))
    place = head_key(keys.session_key("s"))
    store.engine.write(Write(writer.objects, rows=[PutRow(*place, row)]))
