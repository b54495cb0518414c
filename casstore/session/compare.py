"""Compares two checkpoints: nodes added and dropped, components changed.

Two graphs have the same nodes at the same positions up to where their node indexes diverge; that
position is found without reading the nodes before it. The nodes after it are compared by digest;
only those that are missing from one of the graphs are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from casstore.engine.protocol import Engine
from casstore.errors import CasstoreError, InvalidInputError
from casstore.format.digest import Digest
from casstore.format.graph import NIL, Manifest, NodeHeader, link_target
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.printing import count, shortened
from casstore.format.splitting import Encoded
from casstore.objects import diff as value_diff
from casstore.objects import graph as objects
from casstore.objects.diff import Change, Field
from casstore.objects.node_index import IndexCache, NodeIndex, common_prefix
from casstore.objects.pieces import PieceReader
from casstore.session.checkpoint import LEDGER, components_of, ledger_of
from casstore.session.component_formats import Detail, describe_fields
from casstore.session.data import Entry
from casstore.session.state import HiddenNodes, Runtime

if TYPE_CHECKING:
    from casstore.session.session import Session

#: One side of a comparison: a session (its head), a session id with a revision or label, or the
#: digest of a manifest.
Place: TypeAlias = "Session | str | tuple[str, int | str | Entry | None] | bytes"
# How many nodes and changes of each kind are printed.
_SHOWN: Final = 20
# How many nodes are read at once.
_BATCH: Final = 256


class _NodeFields(NamedTuple):
    id: str
    parent: str | None
    seq: int
    depth: int
    digest: Digest


class NodeRef(_NodeFields):
    """A node of a comparison; each access of ``payload`` reads it from the store.

    >>> [node] = store.compare(("s", "start"), "s").added
    >>> node.id, node.parent, node.payload
    ('left', 'ask', {'role': 'assistant', 'text': 'left'})
    """

    _engine: Engine | None = None

    @property
    def payload(self) -> Any:
        """The payload; None if a compared session hides the node.

        >>> hidden = session.tombstone(["left"])
        >>> [node] = store.compare(("s", "start"), "s").added
        >>> node.payload is None
        True
        """
        if self._engine is None:
            return None
        [fields] = objects.iter_fields(PieceReader(self._engine), (self.digest,))
        return fields[-1]

    def __getstate__(self) -> None:
        """Pickle the fields without the engine."""

    def __str__(self) -> str:
        if self._engine is None:
            return f"node {self.id!r} (hidden)"
        try:
            return f"node {self.id!r}: {shortened(self.payload)}"
        except CasstoreError as exc:
            return f"node {self.id!r} ({type(exc).__name__} while reading its payload)"


class Comparison(NamedTuple):
    """What turns one checkpoint into another.

    >>> result = session.append(NodeDraft("why", "why left?"), tool_state={"cwd": "/"})
    >>> found = store.compare(("s", 2), "s")
    >>> [node.id for node in found.added], [(one.path, one.after) for one in found.changes]
    (['why'], [(('tool_state', 'cwd'), '/')])
    >>> print(found)
    1 node added, 0 dropped, 1 change in the components; both continue node 'left'
    + node 'why': 'why left?'
    ~ $.tool_state.cwd: '/repo' → '/'
    """

    old: Digest
    new: Digest
    old_leaf: str | None
    new_leaf: str | None
    #: The deepest node that is on the paths of both leaves; None if they share none.
    ancestor: NodeRef | None
    added: tuple[NodeRef, ...]
    dropped: tuple[NodeRef, ...]
    #: The changes in the components and the usage; each path starts with the component's name.
    changes: tuple[Change, ...]
    #: How many objects were read.
    pieces_read: int
    #: By component, its changes in the terms of its format, such as the files of a workspace;
    #: ``changes`` has the same components as plain values.
    details: dict[str, tuple[Detail, ...]]
    #: By component, why the package of its format could not describe its changes.
    failures: dict[str, str]

    @property
    def equal(self) -> bool:
        """True if both sides have the same manifest: the same graph, components and usage.

        >>> head = store.fork("s", "fork")
        >>> store.compare("s", "fork").equal, store.compare(("s", 1), "fork").equal
        (True, False)
        """
        return self.old == self.new

    def __str__(self) -> str:
        if self.equal:
            return "no differences"
        described = [one for details in self.details.values() for one in details]
        plain = [one for one in self.changes if one.path[0] not in self.details]
        first = (
            f"{count(len(self.added), 'node')} added, {len(self.dropped)} dropped, "
            f"{count(len(plain) + len(described), 'change')} in the components"
        )
        if self.ancestor is not None:
            first += f"; both continue node {self.ancestor.id!r}"
        lines = [first]
        for sign, found in (
            ("-", self.dropped),
            ("+", self.added),
            ("", plain),
            ("", described),
        ):
            lines += [f"{sign} {one}".lstrip() for one in found[:_SHOWN]]
            if len(found) > _SHOWN:
                lines.append(f"{sign} … {len(found) - _SHOWN} more".lstrip())
        lines += [f"! {component}: {why}" for component, why in self.failures.items()]
        return "\n".join(lines)


def compare_places(
    runtime: Runtime, old: Place, new: Place, *, describe: bool = True
) -> Comparison:
    """Compare two sessions, revisions or manifests; see ``Store.compare``."""
    places = [_find(runtime, old), _find(runtime, new)]
    hidden = {digest for _, digests in places for digest in digests}
    (before, _), (after, _) = places
    return compare(runtime.reader(), runtime.index_cache, before, after, hidden, describe=describe)


def _find(runtime: Runtime, place: Place) -> tuple[bytes, HiddenNodes]:
    """The digest of the manifest that a side names, and the nodes that its session hides."""
    if isinstance(place, bytes):
        return place, {}
    if isinstance(place, tuple) and len(place) != 2:
        raise InvalidInputError(
            f"a place must be a session id with a revision or label, got {place!r:.80}"
        )
    named, at = place if isinstance(place, tuple) else (place, None)
    # A Session: its module imports this one.
    session = named if isinstance(named, str) else named.id
    state = runtime.at(session, at)
    current = state if at is None else runtime.get(session)
    return state.head.manifest, runtime.hidden(current.head)


def compare(
    reader: PieceReader,
    cache: IndexCache,
    old: bytes,
    new: bytes,
    hidden: Collection[bytes] = (),
    *,
    describe: bool = True,
) -> Comparison:
    """Compare the checkpoints of two manifests. Nodes that are ``hidden`` have no payload."""
    before = objects.read_manifest(reader, old, named=True)
    after = before if old == new else objects.read_manifest(reader, new, named=True)
    graphs = [
        NodeIndex(reader, cache, manifest.node_index, manifest.nodes)
        for manifest in (before, after)
    ]
    shared = graphs[0].count if old == new else common_prefix(*graphs)
    left, right = [index.digests(range(shared, index.count)) for index in graphs]
    fields = list(_fields(before, after))
    changes = tuple(value_diff.diff_fields(reader, fields, DEFAULT_MAX_BYTES))
    described = describe_fields(reader, fields if describe else ())
    return Comparison(
        Digest(old),
        Digest(new),
        before.leaf_id,
        after.leaf_id,
        _common(reader, (before, after), graphs, shared, hidden),
        _references(reader, right, left, hidden),
        _references(reader, left, right, hidden),
        changes,
        reader.pieces_read,
        *described,
    )


def _by_order(node: NodeRef) -> tuple[int, bytes]:
    return node.seq, node.digest


def _fields(old: Manifest, new: Manifest) -> Iterable[tuple[str, Field, Field]]:
    before, after = components_of(old), components_of(new)
    for name in sorted(before.keys() | after.keys()):
        yield name, _field(before.get(name)), _field(after.get(name))
    yield LEDGER, _present(ledger_of(old)), _present(ledger_of(new))


def _field(component: Encoded | None) -> Field:
    if component is None:
        return None
    return link_target(component) or component


def _present(encoded: Encoded) -> Field:
    return None if encoded.data == NIL.data else encoded


# --- graphs -------------------------------------------------------------------------------


def _references(
    reader: PieceReader, own: Sequence[bytes], others: Sequence[bytes], hidden: Collection[bytes]
) -> tuple[NodeRef, ...]:
    """The nodes that one graph has and the other has not, in insertion order."""
    known = set(others)
    lacking = [digest for digest in own if digest not in known]
    found: list[NodeRef] = []
    for start in range(0, len(lacking), _BATCH):
        batch = lacking[start : start + _BATCH]
        headers = objects.read_headers(reader, batch)
        found += [
            _reference(reader, header, name, hidden)
            for header, name in zip(headers, batch, strict=True)
        ]
    return tuple(sorted(found, key=_by_order))


def _common(
    reader: PieceReader,
    manifests: Sequence[Manifest],
    graphs: Sequence[NodeIndex],
    shared: int,
    hidden: Collection[bytes],
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
    # A fork of a single path (``fork(node=…)``) has the same nodes at other positions: compare
    # digests first.
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
    return _reference(reader, objects.read_headers(reader, [both])[0], both, hidden)


def _reference(
    reader: PieceReader, header: NodeHeader, digest: bytes, hidden: Collection[bytes]
) -> NodeRef:
    node = NodeRef(header.id, header.parent_id, header.seq, header.depth, Digest(digest))
    if digest not in hidden:
        node._engine = reader.engine
    return node
