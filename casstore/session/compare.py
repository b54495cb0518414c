"""Two checkpoints side by side: nodes that came and went, components that changed.

Two graphs have the same nodes at the same positions up to where their node indexes part, and the
indexes show that place without reading what lies before it. The nodes behind it are held
against each other by digest; only those that one of the graphs lacks are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.manifest import NOTHING, Manifest, cut_components, link_target
from casstore.format.node import NodeHeader
from casstore.format.splitting import Spelled
from casstore.objects import diff as value_diff
from casstore.objects import graph as objects
from casstore.objects.diff import Change, Field
from casstore.objects.node_index import IndexCache, NodeIndex, common_prefix
from casstore.objects.pieces import PieceReader

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


def compare(reader: PieceReader, cache: IndexCache, old: bytes, new: bytes) -> Comparison:
    """Compare the checkpoints of two manifests."""
    before = objects.read_manifest(reader, old, named=True)
    after = before if old == new else objects.read_manifest(reader, new, named=True)
    graphs = [
        NodeIndex(reader, cache, manifest.node_index, manifest.nodes)
        for manifest in (before, after)
    ]
    shared = graphs[0].count if old == new else common_prefix(*graphs)
    left, right = [index.digests(range(shared, index.count)) for index in graphs]
    fields = _fields(before, after)
    changes = tuple(value_diff.diff_fields(reader, fields, DEFAULT_MAX_BYTES))
    return Comparison(
        Digest(old),
        Digest(new),
        before.leaf_id,
        after.leaf_id,
        _common(reader, (before, after), graphs, shared),
        _references(reader, right, left),
        _references(reader, left, right),
        changes,
        reader.pieces_read,
    )


def _by_order(node: NodeRef) -> tuple[int, bytes]:
    return node.seq, node.digest


def _fields(old: Manifest, new: Manifest) -> Iterable[tuple[str, Field, Field]]:
    before, after = [cut_components(manifest.components) for manifest in (old, new)]
    for name in sorted(before.keys() | after.keys()):
        yield name, _field(before.get(name)), _field(after.get(name))
    yield "usage", _present(old.ledger), _present(new.ledger)


def _field(component: Spelled | None) -> Field:
    if component is None:
        return None
    return link_target(component) or component


def _present(spelled: Spelled) -> Field:
    return None if spelled.data == NOTHING.data else spelled


# --- graphs -------------------------------------------------------------------------------


def _references(
    reader: PieceReader, own: Sequence[bytes], others: Sequence[bytes]
) -> tuple[NodeRef, ...]:
    """The nodes that one graph has and the other has not, in insertion order."""
    known = set(others)
    lacking = [digest for digest in own if digest not in known]
    found: list[NodeRef] = []
    for start in range(0, len(lacking), _BATCH):
        batch = lacking[start : start + _BATCH]
        headers = objects.read_headers(reader, batch)
        found += [_reference(header, name) for header, name in zip(headers, batch, strict=True)]
    return tuple(sorted(found, key=_by_order))


def _common(
    reader: PieceReader,
    manifests: Sequence[Manifest],
    graphs: Sequence[NodeIndex],
    shared: int,
) -> NodeRef | None:
    """The deepest node on the paths of both leaves."""
    steps: list[int | None] = []
    apart: list[dict[bytes, None]] = []
    for manifest, index in zip(manifests, graphs, strict=True):
        if manifest.leaf is None or manifest.leaf_id is None:
            return None
        step: int | None = index.position_of(manifest.leaf_id, manifest.leaf)
        beyond: list[int] = []
        while step is not None and step >= shared:
            beyond.append(step)
            step = index.parent(step)
        steps.append(step)
        apart.append(dict.fromkeys(index.digests(beyond)))
    # A fork of one path has the same nodes at other positions.
    both = next((digest for digest in apart[0] if digest in apart[1]), None)
    if both is None:
        one, other = steps
        while one is not None and other is not None and one != other:
            if one > other:
                one = graphs[0].parent(one)
            else:
                other = graphs[0].parent(other)
        if one is None or other is None:
            return None
        both = graphs[0].place(one).digest
    return _reference(objects.read_headers(reader, [both])[0], both)


def _reference(header: NodeHeader, digest: bytes) -> NodeRef:
    return NodeRef(header.id, header.parent_id, header.seq, header.depth, Digest(digest))
