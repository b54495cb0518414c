"""Proves the graphs of manifests: the node index must list the nodes of the graph, in order.

The index is not trusted. ``GraphProof`` reads the nodes that it lists and builds the index again
from their ids, parents and digests; the two must be equal.

Manifests are given one after the other, and nodes that they share are read once. The digest of a
spine determines all nodes that it covers, in order: a spine that was proven, as a whole graph or as
the beginning of one, is not proven again. This is for graphs of one branch. A graph of several
branches is read from the first position at which its index differs from the last such graph. Memory
is 100 bytes for every page of sixteen nodes, 56 bytes for each node of the last graph with
branches, and 16 MiB for the filter that finds repeated ids of a long path.

``rebuild_node_index`` builds the index of a graph from its nodes alone, for a store in which parts
of the index are damaged.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from casstore.errors import BundleLimitError, CorruptionError
from casstore.format.canonical import Link
from casstore.format.digest import DIGEST_BYTES, name_piece
from casstore.format.graph import NIL, Manifest, NodeHeader
from casstore.format.node_index import HASH_BYTES, PAGE_NODES, RUN_NODES, SPLIT_LEVEL, Tail, id_hash
from casstore.format.splitting import Emit
from casstore.objects import graph as objects
from casstore.objects.node_index import IndexCache, NodeIndex, common_prefix, empty_index
from casstore.objects.pieces import PieceReader

_READ_BATCH: Final = 256
_NONE: Final = -1
# If fewer than one node in 64 is new, searching for each new id is cheaper than a pass over all.
_FEW: Final = 64
# How many proven spines are remembered.
_MAX_PROVEN: Final = 1_000_000
# The bits of the filter for ids of a long path: a million nodes set one bit in a hundred.
_FILTER_BITS: Final = 1 << 27


class IndexMismatch(CorruptionError):
    """A node index that lists other nodes than the graph has."""


class GraphProof:
    """Proves graphs, one after the other.

    ``max_steps`` bounds how many nodes are read. An untrusted file may have many revisions that
    share no piece of an index, each with all nodes of the file (P7).
    """

    def __init__(self, reader: PieceReader, *, max_steps: int | None = None) -> None:
        self._reader = reader
        self._steps_left = sys.maxsize if max_steps is None else max_steps
        self._cache = IndexCache()
        # The digests of proven spines whose nodes make one path.
        self._straight: set[bytes] = set()
        # The path that was proven last, and its last node.
        self._path = empty_index(reader, self._cache)
        self._path_end: NodeHeader | None = None
        # One bit for each hash of an id of that path; None until enough ids were looked for.
        self._filter: bytearray | None = None
        self._looked_for = 0
        self._reset()

    def _reset(self) -> None:
        self._index = empty_index(self._reader, self._cache)
        # By position.
        self._digests = bytearray()
        self._hashes = bytearray()
        self._seqs = array("q")
        self._depths = array("q")
        self._parents = array("q")
        self._has_child = bytearray()

    def prove(self, digest: bytes, manifest: Manifest) -> None:
        """Prove the graph of a manifest.

        IndexMismatch if the index does not list the nodes of the graph, CorruptionError if nodes
        cannot be read or make no graph.
        """
        index = NodeIndex(self._reader, self._cache, manifest.node_index, manifest.nodes)
        if manifest.tips.data == NIL.data:
            self._prove_path(digest, manifest, index)
            return
        try:
            self._prove_branches(digest, manifest, index)
        except BaseException:
            self._reset()
            raise

    # --- one branch -----------------------------------------------------------------------

    def _prove_path(self, digest: bytes, manifest: Manifest, index: NodeIndex) -> None:
        if self._goes_on(index):
            # Most revisions add a few nodes to the previous one: prove only these.
            start, last = self._path.count, self._path_end
            before = self._path.digests(range(max(0, start - 1), start))
            builder = self._path.builder(name_piece)
        else:
            self._filter, self._looked_for = None, 0
            start = self._proven_pages(index) * PAGE_NODES
            # The node before ``start`` must be the parent of the first node that is proven.
            before = index.digests(range(max(0, start - 1), start))
            last = self._headers(before)[0] if before else None
            builder = index.builder(name_piece, start)
        above = before[0] if before else None
        proven: list[bytes] = []
        for page in range(start // PAGE_NODES, -(-index.count // PAGE_NODES)):
            first = max(start, page * PAGE_NODES)
            positions = range(first, min((page + 1) * PAGE_NODES, index.count))
            digests = index.digests(positions)
            hashes: list[bytes] = []
            for position, name, header in zip(
                positions, digests, self._headers(digests), strict=True
            ):
                if header.parent != above or header.depth != position + 1:
                    raise CorruptionError(
                        f"manifest {digest.hex()} has one branch, and node {name.hex()} is not "
                        f"number {position} of it"
                    )
                hashes.append(id_hash(header.id))
                last, above = header, name
            distances = [min(1, position) for position in positions]
            builder.append(b"".join(hashes), distances, digests)
            if not positions.stop % PAGE_NODES:
                spine = builder.finish().spine
                assert spine is not None
                proven.append(spine)
        self._require_same(digest, manifest, builder.finish())
        if manifest.leaf != above or manifest.leaf_id != (None if last is None else last.id):
            raise CorruptionError(
                f"the leaf of manifest {digest.hex()}, {manifest.leaf_id!r}, is not its last node"
            )
        self._require_next(digest, manifest, -1 if last is None else last.seq)
        self._require_new_ids(index, start)
        self._path, self._path_end = index, last
        if len(self._straight) < _MAX_PROVEN:
            self._straight.update(proven)

    def _goes_on(self, index: NodeIndex) -> bool:
        """Whether a graph begins with the path that was proven last."""
        known, tail = self._path.tail, index.tail
        if known.spine == tail.spine:
            return tail.digests[: len(known.digests)] == known.digests
        if index.count < self._path.count:
            return False
        # The graph may have more complete pages: compare as many as the path has.
        whole = self._path.page_count * PAGE_NODES
        return index.builder(name_piece, whole).finish().spine == known.spine and (
            tuple(index.digests(range(whole, self._path.count))) == known.digests
        )

    def _proven_pages(self, index: NodeIndex) -> int:
        """How many pages, from the first on, were proven as a part of another graph."""
        if index.tail.spine is None or index.tail.spine in self._straight:
            return index.page_count
        low, high = 0, index.page_count
        while self._straight and high - low > 1:
            middle = (low + high) // 2
            spine = index.builder(name_piece, middle * PAGE_NODES).finish().spine
            if spine in self._straight:
                low = middle
            else:
                high = middle
        return low

    def _require_new_ids(self, index: NodeIndex, start: int) -> None:
        """Raise if a node from position ``start`` on has the id of another.

        Looking for one id among a million reads up to 360 KB of the index, so on a long path a
        filter answers first: an id whose bit is not set is new.
        """
        self._looked_for += index.count - start
        is_long = index.count >= RUN_NODES[SPLIT_LEVEL]
        if self._filter is None and is_long and self._looked_for * _FEW >= index.count:
            self._filter = bytearray(_FILTER_BITS // 8)
            start = 0
        hashes = self._hashes_of(index, start)
        if self._filter is not None:
            known = self._filter
            hashes = (hashed for hashed in hashes if _is_set(known, hashed))
        while wanted := list(islice(hashes, _READ_BATCH)):
            for alike in index.candidates(wanted):
                if len(alike) > 1:
                    self._require_distinct_at(index.digests(alike))

    def _hashes_of(self, index: NodeIndex, start: int) -> Iterator[bytes]:
        """The hashes of the ids from position ``start`` on."""
        for first in range(start, index.count, _READ_BATCH):
            hashes = index.hashes(range(first, min(first + _READ_BATCH, index.count)))
            yield from [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]

    # --- several branches -----------------------------------------------------------------

    def _prove_branches(self, digest: bytes, manifest: Manifest, index: NodeIndex) -> None:
        same = common_prefix(self._index, index)
        builder = self._index.builder(name_piece, same)
        self._cut(same)
        for start in range(same, index.count, _READ_BATCH):
            positions = range(start, min(start + _READ_BATCH, index.count))
            digests = index.digests(positions)
            hashes, distances = self._take(index, positions, digests)
            builder.append(hashes, distances, digests)
        self._require_same(digest, manifest, builder.finish())
        self._index = index
        for alike in self._alike(same):
            self._require_distinct_at([self._digest(position) for position in alike])
        self._require_ends(digest, manifest)
        self._require_next(digest, manifest, self._seqs[-1] if self._seqs else -1)

    def _cut(self, count: int) -> None:
        """Forget the nodes of the last graph from position ``count`` on."""
        if count == len(self._parents):
            return
        del self._digests[count * DIGEST_BYTES :]
        del self._hashes[count * HASH_BYTES :]
        for column in (self._seqs, self._depths, self._parents):
            del column[count:]
        self._has_child = bytearray(count)
        for parent in self._parents:
            if parent != _NONE:
                self._has_child[parent] = 1

    def _take(
        self, index: NodeIndex, positions: Sequence[int], digests: Sequence[bytes]
    ) -> tuple[bytes, list[int]]:
        """Check and remember the next nodes; returns their id hashes and distances."""
        hashes: list[bytes] = []
        distances: list[int] = []
        for position, digest, header in zip(
            positions, digests, self._headers(digests), strict=True
        ):
            above = index.parent(position)
            if header.parent != (None if above is None else self._digest(above)):
                raise IndexMismatch(f"the node index gives node {digest.hex()} another parent")
            last = self._seqs[-1] if self._seqs else -1
            depth = 1 if above is None else self._depths[above] + 1
            if header.seq <= last or header.depth != depth:
                raise CorruptionError(
                    f"node {digest.hex()} has number {header.seq}, which must be above {last}, and "
                    f"depth {header.depth}, which must be {depth}"
                )
            if above is not None:
                self._has_child[above] = 1
            self._digests += digest
            self._seqs.append(header.seq)
            self._depths.append(depth)
            self._parents.append(_NONE if above is None else above)
            self._has_child.append(0)
            hashes.append(id_hash(header.id))
            distances.append(0 if above is None else position - above)
        joined = b"".join(hashes)
        self._hashes += joined
        return joined, distances

    def _headers(self, digests: Sequence[bytes]) -> list[NodeHeader]:
        self._steps_left -= len(digests)
        if self._steps_left < 0:
            raise BundleLimitError(
                "the revisions share too few nodes to be proven within the limit: export fewer"
            )
        return objects.read_headers(self._reader, digests)

    @staticmethod
    def _require_same(digest: bytes, manifest: Manifest, rebuilt: Tail) -> None:
        if rebuilt != manifest.node_index:
            raise IndexMismatch(
                f"the node index of manifest {digest.hex()} is not that of its {manifest.nodes} "
                "nodes"
            )

    @staticmethod
    def _require_next(digest: bytes, manifest: Manifest, last_seq: int) -> None:
        if manifest.next_seq != last_seq + 1:
            raise CorruptionError(
                f"manifest {digest.hex()} numbers the next node {manifest.next_seq}, "
                f"the last one is {last_seq}"
            )

    def _require_distinct_at(self, digests: Sequence[bytes]) -> None:
        ids = [header.id for header in self._headers(digests)]
        for at, node_id in enumerate(ids):
            if node_id in ids[:at]:
                raise CorruptionError(f"a graph has two nodes {node_id!r}")

    def _digest(self, position: int) -> bytes:
        return bytes(self._digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES])

    def _alike(self, first: int) -> Iterator[list[int]]:
        """Groups of positions whose ids have one hash: all that have one from ``first`` on."""
        count = len(self._parents)
        if (count - first) * _FEW < count:
            hashes = bytes(self._hashes)
            for position in range(first, count):
                own = hashes[position * HASH_BYTES : (position + 1) * HASH_BYTES]
                alike: list[int] = []
                at = hashes.find(own)
                while at >= 0:
                    if not at % HASH_BYTES:
                        alike.append(at // HASH_BYTES)
                    at = hashes.find(own, at + 1)
                if len(alike) > 1:
                    yield alike
            return
        numbers = array("I", bytes(self._hashes))
        before: int | None = None
        repeated: set[int] = set()
        for number in sorted(numbers):
            if number == before:
                repeated.add(number)
            before = number
        if repeated:
            places: dict[int, list[int]] = {}
            for position, number in enumerate(numbers):
                if number in repeated:
                    places.setdefault(number, []).append(position)
            yield from places.values()

    def _require_ends(self, digest: bytes, manifest: Manifest) -> None:
        """Raise unless the manifest names the end of every branch, by its id."""
        named = ends_of(self._reader, digest, manifest)
        headers = dict(zip(named, self._headers(list(named)), strict=True))
        found = 0
        for name, node_id in named.items():
            if headers[name].id != node_id:
                raise CorruptionError(f"manifest {digest.hex()} calls a node by another id")
            position = self._index.position_of(node_id, name)
            found += not self._has_child[position]
        ends = self._has_child.count(0)
        if found != ends:
            raise CorruptionError(
                f"manifest {digest.hex()} has {ends} branches, and names the ends of {found}"
            )


def ends_of(reader: PieceReader, digest: bytes, manifest: Manifest) -> dict[bytes, str]:
    """The nodes that a manifest names, the leaf and the ends of branches, with their ids."""
    ends: dict[bytes, str] = {}
    if manifest.tips.data != NIL.data:
        tips = objects.load_encoded(reader, [manifest.tips])[0]
        if type(tips) is not dict:
            raise CorruptionError(f"manifest {digest.hex()} has tips that are not a map")
        for node_id, link in tips.items():
            if type(link) is not Link:
                raise CorruptionError(f"manifest {digest.hex()} has a tip that is not a link")
            ends[bytes(link.digest)] = node_id
    leaf, leaf_id = manifest.leaf, manifest.leaf_id
    if leaf is not None and leaf_id is not None and ends.setdefault(leaf, leaf_id) != leaf_id:
        raise CorruptionError(f"manifest {digest.hex()} gives one node two ids")
    return ends


# --- rebuilding an index --------------------------------------------------------------------


def rebuild_node_index(reader: PieceReader, digest: bytes, manifest: Manifest, emit: Emit) -> Tail:
    """Build the node index of a manifest from its nodes alone.

    The nodes are found from the leaf and the ends of branches, parent by parent, with some 250
    bytes of memory for each. ``reader`` must also read the objects that ``emit`` received.
    CorruptionError if a node cannot be read, or if their number is not that of the manifest.
    """
    # In the order of reading. A node's entry in ``parents`` is set when its parent has been read.
    seqs, parents = array("q"), array("q")
    digests, hashes = bytearray(), bytearray()
    seen: set[int] = set()
    for end in ends_of(reader, digest, manifest):
        step: bytes | None = end
        child = _NONE
        while step is not None:
            [header] = objects.read_headers(reader, (step,))
            if child != _NONE:
                parents[child] = header.seq
            if header.seq in seen:
                break
            seen.add(header.seq)
            child = len(seqs)
            seqs.append(header.seq)
            parents.append(_NONE)
            digests += step
            hashes += id_hash(header.id)
            step = header.parent
    if len(seqs) != manifest.nodes:
        raise CorruptionError(
            f"manifest {digest.hex()} has {len(seqs)} nodes that can be reached, and claims "
            f"{manifest.nodes}"
        )
    ordered = array("q", sorted(seqs))
    builder = empty_index(reader, IndexCache()).builder(emit)
    for position, at in enumerate(sorted(range(len(seqs)), key=seqs.__getitem__)):
        above = parents[at]
        far = 0 if above == _NONE else position - bisect_left(ordered, above)
        own = bytes(digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])
        builder.append(bytes(hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]), [far], [own])
    return builder.finish()


def _is_set(known: bytearray, hashed: bytes) -> bool:
    """True if the bit of a hash is set in a filter; sets it."""
    number = int.from_bytes(hashed, "big") % _FILTER_BITS
    at, bit = number >> 3, 1 << (number & 7)
    if known[at] & bit:
        return True
    known[at] |= bit
    return False
