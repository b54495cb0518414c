"""The node index against a plain list: by position, by id, extended, cut, compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError
from casstore.format.digest import Kind, digest_of, plain_hash
from casstore.format.node_index import (
    NO_NODES,
    RUN_NODES,
    Tail,
    decode_piece,
    encode_piece,
    id_hash,
    run_counts,
)
from casstore.objects import node_index
from casstore.objects.node_index import IndexCache, NodeIndex, common_prefix
from casstore.objects.pieces import PieceReader

_NO_ENGINE: Any = None


class Shelf(PieceReader):
    """Objects in a dict: what an index is written to and read from."""

    def __init__(self) -> None:
        super().__init__(_NO_ENGINE)
        self.objects: dict[bytes, StoredObject] = {}
        self.written = 0

    def emit(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        """Keep an object."""
        digest = digest_of(kind, data)
        self.objects[digest] = StoredObject(kind, data)
        self.written += 1
        return digest

    def find_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """Give the objects, and count them."""
        self.pieces_read += len(digests)
        return [self.objects.get(digest) for digest in digests]


class Graph:
    """A graph with made-up digests: what the index must say of it."""

    def __init__(self, count: int, seed: int = 0, branchy: bool = True) -> None:
        chance = random.Random(seed)
        self.ids = [f"{seed}-{at}" for at in range(count)]
        self.digests = [plain_hash(node_id.encode()) for node_id in self.ids]
        self.distances = [
            0 if not at else chance.randint(1, min(at, 40)) if branchy else 1 for at in range(count)
        ]

    def extend(self, builder: node_index.IndexBuilder, stop: int) -> None:
        """Append the nodes that are missing up to a position."""
        start = builder.count
        hashes = b"".join([id_hash(node_id) for node_id in self.ids[start:stop]])
        builder.append(hashes, self.distances[start:stop], self.digests[start:stop])


def _index(shelf: Shelf, tail: Tail, count: int) -> NodeIndex:
    return NodeIndex(shelf, IndexCache(), tail, count)


def _built(shelf: Shelf, graph: Graph, count: int, steps: Sequence[int] = ()) -> NodeIndex:
    """The index of the first nodes of a graph, built in steps, reopened between them."""
    index = _index(shelf, NO_NODES, 0)
    for stop in (*sorted(steps), count):
        builder = index.builder(shelf.emit)
        graph.extend(builder, stop)
        index = _index(shelf, builder.finish(), stop)
    return index


def _edges() -> list[int]:
    """Sizes around which the shape changes."""
    near = [size * times + off for size in RUN_NODES[:4] for times in (1, 2, 7, 8)
            for off in (-1, 0, 1)]  # fmt: skip
    return sorted({size for size in near if size <= 8 * RUN_NODES[2] + 1})


def test_the_index_of_the_same_nodes_is_identical_whatever_the_append_batches() -> None:
    graph = Graph(RUN_NODES[2] * 2 + 40)
    chance = random.Random(1)
    for count in [size for size in _edges() if size <= len(graph.ids)]:
        shelf = Shelf()
        steps = chance.sample(range(count), min(count, 9))
        assert _built(shelf, graph, count, steps).tail == _built(Shelf(), graph, count).tail


def test_every_node_is_found_by_position_and_by_id() -> None:
    shelf, graph = Shelf(), Graph(3 * RUN_NODES[2] + 300)
    for count in (0, 1, 15, 16, 17, 127, 128, 129, 1023, 1024, len(graph.ids)):
        index = _built(shelf, graph, count)
        assert index.digests(range(count)) == graph.digests[:count]
        found = index.candidates([id_hash(one) for one in graph.ids])
        assert all(at in found[at] for at in range(count))
        assert not any(at >= count for own in found for at in own)


def test_the_index_returns_the_path_of_every_node() -> None:
    shelf, graph = Shelf(), Graph(700)
    index = _built(shelf, graph, 700)
    for at in range(0, 700, 13):
        path = [at]
        while graph.distances[path[-1]]:
            path.append(path[-1] - graph.distances[path[-1]])
        assert list(index.path(at, len(path))) == path[::-1]


def test_a_long_index_finds_nodes_in_the_buckets_of_its_large_runs() -> None:
    shelf, graph = Shelf(), Graph(RUN_NODES[4] + RUN_NODES[3] + RUN_NODES[2] + 21, branchy=False)
    count = len(graph.ids)
    index = _built(shelf, graph, count, steps=[RUN_NODES[3] - 1, RUN_NODES[4] - 1])
    assert [len(level) for level in index.spine.runs] == run_counts(count // 16) == [1, 0, 1, 1, 1]
    for at in random.Random(2).sample(range(count), 300):
        assert at in index.candidates([id_hash(graph.ids[at])])[0]
        assert index.digests([at]) == [graph.digests[at]]
    read = shelf.pieces_read
    index = _index(shelf, index.tail, count)
    index.candidates([id_hash("absent")])
    assert shelf.pieces_read - read <= 6, "the spine, its runs, and one bucket of each large one"
    assert index.tail == _built(Shelf(), graph, count).tail


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_index_truncated_at_any_position_equals_the_index_of_the_nodes_before_it(
    data: st.DataObject,
) -> None:
    graph = Graph(1400)
    shelf = Shelf()
    count = data.draw(st.integers(0, 1400))
    cut = data.draw(st.integers(0, count))
    whole = _built(shelf, graph, count)
    builder = whole.builder(shelf.emit, cut)
    assert builder.finish() == _built(Shelf(), graph, cut).tail
    graph.extend(builder, count)
    assert builder.finish() == whole.tail


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_two_indexes_share_the_positions_before_the_first_that_differs(data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, 1300))
    graph, other = Graph(1400), Graph(1400, seed=5)
    for column in ("ids", "digests", "distances"):
        getattr(other, column)[:shared] = getattr(graph, column)[:shared]
    shelf = Shelf()
    one = _built(shelf, graph, data.draw(st.integers(0, 1400)))
    two = _built(shelf, other, data.draw(st.integers(0, 1400)))
    assert common_prefix(one, two) == min(shared, one.count, two.count)


def test_finding_where_two_long_indexes_diverge_reads_only_the_differing_parts() -> None:
    graph, other = Graph(20_000), Graph(20_000)
    other.digests[17_000:] = [plain_hash(b"x" + one) for one in other.digests[17_000:]]
    shelf = Shelf()
    one, two = _built(shelf, graph, 20_000), _built(shelf, other, 20_000)
    read = shelf.pieces_read
    fresh = [_index(shelf, index.tail, 20_000) for index in (one, two)]
    assert common_prefix(*fresh) == 17_000
    assert shelf.pieces_read - read < 20


def test_appending_reads_and_writes_little_whatever_the_length() -> None:
    shelf, graph = Shelf(), Graph(RUN_NODES[3], branchy=False)
    index = _built(shelf, graph, RUN_NODES[3] - 200)
    cache = IndexCache()
    most = 0
    for count in range(index.count, RUN_NODES[3] - 1):
        before = shelf.written
        index = NodeIndex(shelf, cache, index.tail, count)
        builder = index.builder(shelf.emit)
        graph.extend(builder, count + 1)
        index = NodeIndex(shelf, cache, builder.finish(), count + 1)
        most = max(most, shelf.written - before)
    assert most <= 4, "a page, a run for each level that is full, and the spine"


def test_a_damaged_index_piece_is_refused_or_reencodes_to_its_own_bytes() -> None:
    shelf, graph = Shelf(), Graph(RUN_NODES[3] + RUN_NODES[1] + 40)
    _built(shelf, graph, len(graph.ids))
    chance = random.Random(3)
    kinds = set()
    for digest, item in shelf.objects.items():
        piece = decode_piece(digest, item.data)
        if type(piece) in kinds and chance.random() < 0.98:
            continue
        kinds.add(type(piece))
        assert encode_piece(piece)[0] == item.data
        for _ in range(30):
            data = bytearray(item.data)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            try:
                found = decode_piece(digest, bytes(data))
            except CorruptionError:
                continue
            assert encode_piece(found)[0] == bytes(data), "only canonical bytes are read"
    assert len(kinds) == 4


@pytest.mark.parametrize("cut", [0, 1, -1])
def test_truncated_index_pieces_are_refused(cut: int) -> None:
    shelf, graph = Shelf(), Graph(RUN_NODES[1])
    index = _built(shelf, graph, RUN_NODES[1])
    assert index.tail.spine is not None
    [run] = list(index.spine.runs[1])
    data = shelf.objects[run].data
    with pytest.raises(CorruptionError, match="not a valid part of a node index"):
        decode_piece(run, data[:cut] if cut else b"")


def test_a_spine_that_does_not_match_the_node_count_is_damage() -> None:
    shelf, graph = Shelf(), Graph(64)
    tail = _built(shelf, graph, 32).tail
    with pytest.raises(CorruptionError, match="does not match its parent"):
        _index(shelf, tail, 48).digests([0])


def test_an_object_of_another_kind_in_place_of_an_index_piece_is_damage() -> None:
    shelf = Shelf()
    blob = shelf.emit(Kind.VALUE, b"\xc0", [])
    with pytest.raises(CorruptionError, match="linked to as a part of a node index"):
        _index(shelf, Tail(blob), 16).digests([0])
