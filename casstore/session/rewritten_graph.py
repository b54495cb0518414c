"""A graph without its hidden nodes: the nodes after the first hidden one are rewritten.

A node holds the digest of its parent and its position in insertion order. So every node after a
hidden one is rewritten, with the nearest visible ancestor as its parent and counts without the
hidden nodes. The nodes before it are shared with the old graph, as are their index pieces.

``follow`` is called with the graphs of a session's revisions, in order. It starts where a graph
diverges from the previous one, so nodes that revisions share are read and written once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, Kind
from casstore.format.graph import Manifest, NodeHeader, cut_node, encode_node, open_node
from casstore.format.node_index import NO_NODES, Tail, id_hash
from casstore.objects import graph as objects
from casstore.objects.node_index import IndexBuilder, NodeIndex, common_prefix, empty_index
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session.state import HiddenNodes, Runtime

# How many nodes are read at once, and how many bytes are written at once.
_READ_BATCH: Final = 256
_WRITE_BYTES: Final = 4 << 20
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
#: The position when there is no node: the parent of a root.
NONE: Final = -1


class Became(NamedTuple):
    """Where an old node is in the new graph.

    For a hidden one, where its nearest visible ancestor is; ``position`` is NONE if it has none.
    """

    position: int
    depth: int
    users: int
    digest: bytes
    #: ``users`` of the old node itself.
    old_users: int


_NOTHING: Final = Became(NONE, 0, 0, _NO_DIGEST, 0)


class RewrittenGraph:
    """The graphs of a session's revisions without its hidden nodes, one after the other."""

    def __init__(self, runtime: Runtime, hidden: HiddenNodes) -> None:
        self._runtime = runtime
        self._hidden = hidden
        self.writer = PieceWriter()
        self.reader = PendingReader(runtime.engine, self.writer)
        self._old = empty_index(self.reader, runtime.index_cache)
        self._new = self._old
        #: The digests of rewritten nodes.
        self.rewritten: set[bytes] = set()
        self._unchanged: dict[bytes, Became] = {}
        # Old nodes before this position are before the first hidden node: the new graph has them
        # unchanged.
        self._shared = 0
        # The old positions of hidden nodes; then, for each old node from ``_shared`` on, the fields
        # of its ``Became``.
        self._gone: list[int] = []
        self._positions = array("q")
        self._depths = array("q")
        self._users = array("q")
        self._old_users = array("q")
        self._digests = bytearray()
        # For each of these, the ``seq`` of the last new node up to it.
        self._seqs = array("q")
        # From a parent's new position (NONE: of roots) to its first child, among the new nodes from
        # ``_shared`` on.
        self._first_child: dict[int, int] = {}
        self._shared_parents: tuple[int, frozenset[int | None]] = (0, frozenset())

    # --- following graphs ---------------------------------------------------------------

    def follow(self, manifest: Manifest) -> bool:
        """Rewrite the graph of the next revision; returns True if it has a hidden node."""
        old = NodeIndex(self.reader, self._runtime.index_cache, manifest.node_index, manifest.nodes)
        same = common_prefix(self._old, old)
        builder = self._cut(old, same)
        self._old = old
        for start in range(same, old.count, _READ_BATCH):
            batch = range(start, min(start + _READ_BATCH, old.count))
            digests = old.digests(batch)
            if not self._gone and self._hidden.keys().isdisjoint(digests):
                self._shared = batch.stop
                continue
            if builder is None:
                first = next(at for at, one in enumerate(digests) if one in self._hidden)
                self._shared = batch.start + first
                builder = old.builder(self.writer.emit, self._shared)
                batch, digests = batch[first:], digests[first:]
            self._take(batch, digests, builder)
        if builder is None:
            self._new = old
        else:
            tail = builder.finish()
            self._new = NodeIndex(self.reader, self._runtime.index_cache, tail, builder.count)
        if self.writer.size_bytes >= _WRITE_BYTES:
            self.writer.flush(self._runtime.engine)
        return bool(self._gone)

    def _cut(self, old: NodeIndex, count: int) -> IndexBuilder | None:
        """Forget all old nodes after the first ``count``; returns a builder of the new index.

        The builder continues after the remaining nodes. None if none of these is hidden: then the
        old index is used.
        """
        kept = self.new_position(count)
        del self._gone[bisect_left(self._gone, count) :]
        if not self._gone:
            self._shared = min(self._shared, count)
        left = max(0, count - self._shared)
        for column in (self._positions, self._depths, self._users, self._old_users, self._seqs):
            del column[left:]
        del self._digests[left * DIGEST_BYTES :]
        self._first_child = {
            parent: child for parent, child in self._first_child.items() if child < kept
        }
        return self._new.builder(self.writer.emit, kept) if self._gone else None

    def _take(
        self, positions: Sequence[int], digests: Sequence[bytes], builder: IndexBuilder
    ) -> None:
        stored = self.reader.follow(digests)
        hashes: list[bytes] = []
        distances: list[int] = []
        made: list[bytes] = []
        for position, digest, found in zip(positions, digests, stored, strict=True):
            above = self._old.parent(position)
            parent = None if above is None else self.node(above)
            header, new = self._write(position, digest, found, above, parent)
            if header is None:
                continue
            under = NONE if header.parent is None or parent is None else parent.position
            new_position = self._positions[-1]
            hashes.append(id_hash(header.id))
            distances.append(0 if under == NONE else new_position - under)
            made.append(new)
            self._first_child.setdefault(under, new_position)
        builder.append(b"".join(hashes), distances, made)

    def _write(
        self,
        position: int,
        digest: bytes,
        found: StoredObject,
        above: int | None,
        parent: Became | None,
    ) -> tuple[NodeHeader | None, bytes]:
        """Rewrite one node; no header if it is hidden."""
        if found.kind != Kind.NODE:
            raise CorruptionError(f"object {digest.hex()} is listed as a node, but is not a node")
        old = open_node(digest, found.data)[0].header
        if old.parent != (None if above is None else self._old.place(above).digest):
            raise CorruptionError(
                f"the node index does not match node {digest.hex()}; check the store"
            )
        near = _NOTHING if parent is None or parent.position == NONE else parent
        last_seq = self._last_seq()
        if digest in self._hidden:
            self._gone.append(position)
            self._note(near, old.users, last_seq)
            return None, b""
        is_user = old.users - (0 if parent is None else parent.old_users)
        parent_id = old.parent_id
        if near.position == NONE:
            parent_id = None
        elif old.parent in self._hidden:
            parent_id = objects.read_headers(self.reader, [near.digest])[0].id
        header = NodeHeader(
            id=old.id,
            seq=last_seq + 1,
            depth=near.depth + 1,
            users=near.users + is_user,
            frame=old.frame,
            time=old.time,
            parent_id=parent_id,
            parent=None if parent_id is None else near.digest,
        )
        new = self.writer.emit(Kind.NODE, *encode_node(header, *cut_node(found.data)))
        if new != digest:
            self.rewritten.add(new)
        new_position = position - len(self._gone)
        self._note(Became(new_position, header.depth, header.users, new, 0), old.users, header.seq)
        return header, new

    def _last_seq(self) -> int:
        if self._seqs:
            return self._seqs[-1]
        if not self._shared:
            return -1
        return objects.read_headers(self.reader, [self._old.place(self._shared - 1).digest])[0].seq

    def _note(self, became: Became, old_users: int, last_seq: int) -> None:
        self._positions.append(became.position)
        self._depths.append(became.depth)
        self._users.append(became.users)
        self._old_users.append(old_users)
        self._digests += became.digest
        self._seqs.append(last_seq)

    # --- the new graph --------------------------------------------------------------------

    @property
    def old(self) -> NodeIndex:
        """The nodes of the graph that was followed last."""
        return self._old

    @property
    def tail(self) -> Tail:
        """The index of the new graph."""
        return self._new.tail if self._new.count else NO_NODES

    @property
    def count(self) -> int:
        """How many nodes the new graph has."""
        return self._new.count

    @property
    def next_seq(self) -> int:
        """The number of the next node of the new graph."""
        return self._last_seq() + 1

    def new_position(self, position: int) -> int:
        """The position in the new graph: the number of visible nodes before an old position."""
        return position - bisect_left(self._gone, position)

    def hidden_between(self, start: int, stop: int) -> dict[int, str]:
        """The hidden nodes at these old positions, with their ids."""
        gone = self._gone[bisect_left(self._gone, start) : bisect_left(self._gone, stop)]
        return {
            position: self._hidden[digest]
            for position, digest in zip(gone, self._old.digests(gone), strict=True)
        }

    def node(self, position: int) -> Became:
        """Where an old node is in the new graph."""
        at = position - self._shared
        if at < 0:
            return self._same(position)
        return Became(
            self._positions[at],
            self._depths[at],
            self._users[at],
            bytes(self._digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]),
            self._old_users[at],
        )

    def _same(self, position: int) -> Became:
        """Where a node before the first hidden one is: at the same position, unchanged."""
        digest = self._old.place(position).digest
        known = self._unchanged.get(digest)
        if known is None:
            [header] = objects.read_headers(self.reader, [digest])
            known = self._unchanged[digest] = Became(
                position, header.depth, header.users, digest, header.users
            )
        # A revision that was adopted may have the same node at another position.
        return known if known.position == position else known._replace(position=position)

    def has_child(self, position: int) -> bool:
        """True if the node at a new position has a child in the new graph."""
        if position in self._first_child:
            return True
        if position >= self._shared:
            return False
        known, parents = self._shared_parents
        if known != self._shared:
            parents = frozenset(self._old.parent(one) for one in range(self._shared))
            self._shared_parents = self._shared, parents
        return position in parents
