"""Two checkpoints side by side: nodes that came and went, components that changed.

A digest names everything below it. So two graphs are compared from their ends: from each
end of a branch down to the first node that the other graph has too. Whether it has it, the
node table says; for a manifest without a session, a walk down the other graph that goes
no deeper than the question.

The way down is from a node to the parent it names, and proven so. The node table only foretells
it: which nodes will be asked for, up to the first that both have, so that they are read many
at once and none beside them. Where there is no table, each has to be read before the next is known.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.format.canonical import scalar_bytes
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.manifest import NOTHING, Manifest
from casstore.format.node import NodeHeader
from casstore.format.splitting import Spelled
from casstore.objects import diff as value_diff
from casstore.objects import graph as objects
from casstore.objects.diff import Change, Field
from casstore.objects.pieces import PieceReader
from casstore.session.lineage import Chain

_VALUES: Final = ("turn_state", "frames", "config", "usage")
_LINKS: Final = ("tool_state", "plugin_snapshot", "execution_state")
# How many nodes are read at once.
_BATCH: Final = 256


class NodeRef(NamedTuple):
    """A node, without its payload."""

    id: str
    parent: str | None
    seq: int
    depth: int
    digest: Digest


class Comparison(NamedTuple):
    """What turns one checkpoint into another.

    >>> moved = Checkpoint(tool_state={"cwd": "/"})
    >>> step = Commit(append=[NodeDraft("why", "why left?")], checkpoint=moved, lease=UNFENCED)
    >>> result = session.commit(step)
    >>> found = store.compare(("s", 2), "s")
    >>> [node.id for node in found.added], [(one.path, one.after) for one in found.changes]
    (['why'], [(('tool_state', 'cwd'), '/')])
    """

    old: Digest
    new: Digest
    old_leaf: str | None
    new_leaf: str | None
    #: The deepest node that is on the paths of both leaves; None if they share none.
    ancestor: NodeRef | None
    added: tuple[NodeRef, ...]
    dropped: tuple[NodeRef, ...]
    #: In the components, with paths that start with the component's name.
    changes: tuple[Change, ...]
    #: How many objects were read.
    pieces_read: int

    @property
    def equal(self) -> bool:
        """Are the two checkpoints the same in every respect?

        >>> head = store.fork("s", "fork")
        >>> store.compare("s", "fork").equal, store.compare(("s", 1), "fork").equal
        (True, False)
        """
        return self.old == self.new


class Side(NamedTuple):
    """One of two checkpoints; ``chain`` is the node table of its session, if it has one."""

    digest: bytes
    chain: Chain | None


def compare(reader: PieceReader, old: Side, new: Side) -> Comparison:
    """Compare two checkpoints."""
    headers = _Headers(reader)
    before = _graph(headers, old)
    after = before if old.digest == new.digest else _graph(headers, new)
    ends_before, ends_after = before.ends(after), after.ends(before)
    ancestor = _common(headers, before, after)
    dropped = _lacking(headers, ends_before, before, after)
    added = _lacking(headers, ends_after, after, before)
    fields = _fields(before.manifest, after.manifest)
    changes = tuple(value_diff.diff_fields(reader, fields, DEFAULT_MAX_BYTES))
    return Comparison(
        Digest(old.digest),
        Digest(new.digest),
        before.manifest.leaf_id,
        after.manifest.leaf_id,
        ancestor,
        tuple(sorted(added, key=_by_order)),
        tuple(sorted(dropped, key=_by_order)),
        changes,
        reader.pieces_read,
    )


def _by_order(node: NodeRef) -> tuple[int, bytes]:
    return node.seq, node.digest


def _fields(old: Manifest, new: Manifest) -> Iterable[tuple[str, Field, Field]]:
    for name in _LINKS:
        yield name, getattr(old, name), getattr(new, name)
    for name in ("plugin_revision", "current_frame"):
        yield name, _scalar(getattr(old, name)), _scalar(getattr(new, name))
    for name in _VALUES:
        yield name, _present(getattr(old, name)), _present(getattr(new, name))


def _scalar(value: Any) -> Field:
    return None if value is None else Spelled(scalar_bytes(value), [])


def _present(spelled: Any) -> Field:
    return None if spelled.data == NOTHING.data else spelled


# --- graphs -------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a node stands. A node's digest names its seq and depth, too."""

    digest: bytes
    seq: int
    depth: int


class _Headers:
    """Headers of nodes, each read once."""

    def __init__(self, reader: PieceReader) -> None:
        self.reader = reader
        self._known: dict[bytes, NodeHeader] = {}

    def get(self, digest: bytes, foretold: Iterable[bytes] = ()) -> NodeHeader:
        """One header; if it has to be read, then with those ``foretold`` to be next."""
        if digest not in self._known:
            self.read((digest,), foretold)
        return self._known[digest]

    def read(self, digests: Iterable[bytes], foretold: Iterable[bytes] = ()) -> None:
        """Have these at hand; if some have to be read, then with those ``foretold``."""
        wanted = [digest for digest in digests if digest not in self._known]
        if wanted:
            wanted += islice(foretold, max(0, _BATCH - len(wanted)))
        unknown = [digest for digest in dict.fromkeys(wanted) if digest not in self._known]
        for start in range(0, len(unknown), _BATCH):
            batch = unknown[start : start + _BATCH]
            found = objects.read_headers(self.reader, batch)
            self._known.update(zip(batch, found, strict=True))

    def place(self, digest: bytes) -> _Place:
        """Where a node stands."""
        header = self.get(digest)
        return _Place(digest, header.seq, header.depth)


class _Walked:
    """A graph known by its manifest alone, walked from its ends as deep as it is asked."""

    def __init__(self, headers: _Headers, manifest: Manifest) -> None:
        self.manifest = manifest
        self._headers = headers
        self._ends = _tips(headers.reader, manifest)
        self._seen: set[bytes] = set()
        self._ahead: list[tuple[int, bytes]] | None = None

    def ends(self, other: _Walked) -> set[bytes]:
        """The ends of its branches that are not ends of the other's."""
        return self._ends - other._ends

    def above(self, place: _Place) -> Iterator[_Place]:
        """The nodes above one of its nodes, nearest first."""
        while True:
            parent = self._headers.get(place.digest).parent
            if parent is None:
                return
            place = self._headers.place(parent)
            yield place

    def foretell(self, place: _Place) -> Iterator[_Place]:
        """The same, as far as it is known without reading nodes; proves nothing."""
        return iter(())

    def has(self, place: _Place) -> bool:
        """Is this one of its nodes?"""
        if self._ahead is None:
            self._headers.read(self._ends)
            self._ahead = [(-self._headers.get(end).depth, end) for end in self._ends]
            heapq.heapify(self._ahead)
        while self._ahead and -self._ahead[0][0] >= place.depth:
            level = self._ahead[0][0]
            names: set[bytes] = set()
            while self._ahead and self._ahead[0][0] == level:
                names.add(heapq.heappop(self._ahead)[1])
            self._headers.read(names)
            self._seen |= names
            parents = {self._headers.get(name).parent for name in names}
            for parent in parents:
                if parent is not None:
                    heapq.heappush(self._ahead, (level + 1, parent))
        return place.digest in self._seen


class _Tabled(_Walked):
    """A graph of a session, whose node table answers without a walk."""

    def __init__(self, headers: _Headers, manifest: Manifest, chain: Chain) -> None:
        super().__init__(headers, manifest)
        self._chain = chain
        self._kept: dict[int, frozenset[int]] = {}

    def above(self, place: _Place) -> Iterator[_Place]:
        """The nodes above one of its nodes, nearest first."""
        return self.foretell(place)

    def foretell(self, place: _Place) -> Iterator[_Place]:
        """The same: the table has them all."""
        _, seq, depth = place
        page = self._chain.page(seq)
        while 0 < (distance := page.distances[seq - page.first]) <= seq:
            seq -= distance
            depth -= 1
            if not page.first <= seq < page.stop:
                page = self._chain.page(seq)
            yield _Place(page.digest(seq), seq, depth)

    def has(self, place: _Place) -> bool:
        """Is this one of its nodes?"""
        for segment in self._chain.segments:
            if segment.start <= place.seq < segment.stop:
                if segment.path is not None and place.seq not in self._on_path(segment.path):
                    return False
                return self._chain.page(place.seq).digest(place.seq) == place.digest
        return False

    def _on_path(self, leaf_seq: int) -> frozenset[int]:
        """The nodes that a fork of a path has kept."""
        if leaf_seq not in self._kept:
            self._kept[leaf_seq] = frozenset(self._chain.path(leaf_seq))
        return self._kept[leaf_seq]


def _graph(headers: _Headers, side: Side) -> _Walked:
    manifest = objects.read_manifest(headers.reader, side.digest, named=True)
    if side.chain is None:
        return _Walked(headers, manifest)
    return _Tabled(headers, manifest, side.chain)


def _tips(reader: PieceReader, manifest: Manifest) -> set[bytes]:
    if manifest.tips.data != NOTHING.data:
        tips = objects.load_spelled(reader, (manifest.tips,))[0]
        return {bytes(link.digest) for link in tips.values()}
    return set() if manifest.leaf is None else {manifest.leaf}


def _lacking(
    headers: _Headers, ends: Collection[bytes], graph: _Walked, other: _Walked
) -> list[NodeRef]:
    """The nodes of ``graph``, down from these ends, that the other graph does not have."""
    headers.read(ends)
    foretold = _foretold_lacking([headers.place(end) for end in ends], graph, other)
    lacking: dict[bytes, NodeRef] = {}
    # All branches at once: what is not foretold is read one level after the other.
    level: Collection[bytes] = ends
    while level:
        headers.read(level, foretold)
        parents: dict[bytes, None] = {}
        for digest in level:
            header = headers.get(digest)
            if digest not in lacking and not other.has(_Place(digest, header.seq, header.depth)):
                lacking[digest] = _reference(header, digest)
                if header.parent is not None:
                    parents[header.parent] = None
        level = parents
    return list(lacking.values())


def _foretold_lacking(ends: Iterable[_Place], graph: _Walked, other: _Walked) -> Iterator[bytes]:
    """The nodes that a walk down from these ends will ask for."""
    told: set[bytes] = set()
    for end in ends:
        if other.has(end):
            continue
        for place in graph.foretell(end):
            if place.digest in told:
                break
            told.add(place.digest)
            yield place.digest
            if other.has(place):
                break


def _common(headers: _Headers, old: _Walked, new: _Walked) -> NodeRef | None:
    """The deepest node on the paths of both leaves."""
    if old.manifest.leaf is None or new.manifest.leaf is None:
        return None
    headers.read([old.manifest.leaf, new.manifest.leaf])
    # From the shallower leaf it is never farther than from the deeper one.
    (start, first), (end, second) = sorted(
        [(headers.place(old.manifest.leaf), old), (headers.place(new.manifest.leaf), new)],
        key=lambda side: side[0].depth,
    )
    path = _Path(second, end)
    foretold = _foretold_path(start, first, _Path(second, end))
    digest: bytes | None = start.digest
    while digest is not None:
        header = headers.get(digest, foretold)
        if path.has(_Place(digest, header.seq, header.depth)):
            return _reference(header, digest)
        digest = header.parent
    return None


class _Path:
    """The path to a node of a graph, asked about from the deepest node on."""

    def __init__(self, graph: _Walked, end: _Place) -> None:
        self._at: _Place | None = end
        self._above = graph.above(end)

    def has(self, place: _Place) -> bool:
        """Is this node on it? None that is asked for later may be deeper."""
        while self._at is not None and self._at.depth > place.depth:
            self._at = next(self._above, None)
        return self._at is not None and self._at.digest == place.digest


def _foretold_path(start: _Place, graph: _Walked, path: _Path) -> Iterator[bytes]:
    """The nodes that a walk from here to the first on the other path will ask for."""
    for place in graph.foretell(start):
        yield place.digest
        if path.has(place):
            return


def _reference(header: NodeHeader, digest: bytes) -> NodeRef:
    return NodeRef(header.id, header.parent_id, header.seq, header.depth, Digest(digest))
