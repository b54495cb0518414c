"""Two checkpoints side by side: nodes that came and went, components that changed.

A digest names everything below it. So two graphs are compared from their ends: from each
end of a branch down to the first node that the other graph has too. Whether it has it, the
node table says; for a manifest without a session, a walk down the other graph that goes
no deeper than the question.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
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
from casstore.session import keys
from casstore.session.lineage import Chain
from casstore.session.nodes import path_seqs

_VALUES: Final = ("turn_state", "frames", "config", "usage")
_LINKS: Final = ("tool_state", "plugin_snapshot", "execution_state")


class NodeRef(NamedTuple):
    """A node, without its payload."""

    id: str
    parent: str | None
    seq: int
    depth: int
    digest: Digest


class Comparison(NamedTuple):
    """What turns one checkpoint into another."""

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
        """Are the two checkpoints the same in every respect?"""
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
    dropped = _lacking(headers, ends_before, after)
    added = _lacking(headers, ends_after, before)
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


class _Headers:
    """Headers of nodes, each read once."""

    def __init__(self, reader: PieceReader) -> None:
        self.reader = reader
        self._known: dict[bytes, NodeHeader] = {}

    def get(self, digest: bytes) -> NodeHeader:
        header = self._known.get(digest)
        if header is None:
            header = self._known[digest] = objects.read_headers(self.reader, [digest])[0]
        return header


class _Walked:
    """A graph known by its manifest alone, walked from its ends as deep as it is asked."""

    def __init__(self, headers: _Headers, manifest: Manifest) -> None:
        self.manifest = manifest
        self._headers = headers
        self._ends = _tips(headers.reader, manifest)
        self._seen: set[bytes] = set()
        self._ahead: list[tuple[int, bytes]] | None = None
        self._path: set[bytes] = set()
        self._path_end = manifest.leaf

    def ends(self, other: _Walked) -> set[bytes]:
        """The ends of its branches that are not ends of the other's."""
        return self._ends - other._ends

    def has(self, header: NodeHeader, digest: bytes) -> bool:
        """Is this one of its nodes?"""
        if self._ahead is None:
            self._ahead = [(-self._headers.get(end).depth, end) for end in self._ends]
            heapq.heapify(self._ahead)
        while self._ahead and -self._ahead[0][0] >= header.depth:
            _, name = heapq.heappop(self._ahead)
            parent = self._headers.get(name).parent
            if name not in self._seen:
                self._seen.add(name)
                if parent is not None:
                    heapq.heappush(self._ahead, (-self._headers.get(name).depth + 1, parent))
        return digest in self._seen

    def on_path(self, header: NodeHeader, digest: bytes) -> bool:
        """Is this node on the path of its leaf?"""
        while self._path_end is not None:
            end = self._headers.get(self._path_end)
            if end.depth < header.depth:
                break
            self._path.add(self._path_end)
            self._path_end = end.parent
        return digest in self._path


class _Tabled(_Walked):
    """A graph of a session, whose node table answers without a walk."""

    def __init__(self, headers: _Headers, manifest: Manifest, chain: Chain) -> None:
        super().__init__(headers, manifest)
        self._chain = chain
        self._line: Sequence[int] | frozenset[int] | None = None

    def has(self, header: NodeHeader, digest: bytes) -> bool:
        """Is this one of its nodes?"""
        place = self._chain.find([keys.part(header.id, "a node id")])[0]
        return place is not None and place.digest == digest

    def on_path(self, header: NodeHeader, digest: bytes) -> bool:
        """Is this node on the path of its leaf?"""
        if self.manifest.leaf is None or not self.has(header, digest):
            return False
        if self._line is None:
            seqs = path_seqs(self._chain, self._headers.get(self.manifest.leaf))
            self._line = seqs if isinstance(seqs, range) else frozenset(seqs)
        return header.seq in self._line


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


def _lacking(headers: _Headers, ends: Iterable[bytes], other: _Walked) -> list[NodeRef]:
    """The nodes down from ``ends`` that the other graph does not have."""
    lacking: dict[bytes, NodeRef] = {}
    for end in ends:
        digest: bytes | None = end
        while digest is not None and digest not in lacking:
            header = headers.get(digest)
            if other.has(header, digest):
                break
            lacking[digest] = _reference(header, digest)
            digest = header.parent
    return list(lacking.values())


def _common(headers: _Headers, old: _Walked, new: _Walked) -> NodeRef | None:
    """The deepest node on the paths of both leaves."""
    if old.manifest.leaf is None or new.manifest.leaf is None:
        return None
    # From the shallower leaf it is never farther than from the deeper one.
    first, second = sorted(
        (old, new), key=lambda graph: headers.get(graph.manifest.leaf or b"").depth
    )
    digest = first.manifest.leaf
    while digest is not None:
        header = headers.get(digest)
        if second.on_path(header, digest):
            return _reference(header, digest)
        digest = header.parent
    return None


def _reference(header: NodeHeader, digest: bytes) -> NodeRef:
    return NodeRef(header.id, header.parent_id, header.seq, header.depth, Digest(digest))
