"""What a commit does to the graph: it appends nodes, replaces the graph or moves the leaf.

Appending never changes existing nodes. A node's parent is in the graph or in the same commit, and
cycles are refused, so every node can name its parent by digest. A commit inserts its nodes in the
order given, but parents before their children.

A node that is given without an id gets one that is sortable by time, and unique across sessions,
forks and processes:

    id = milliseconds since 1970 (48 bits) ‖ random (64 bits), in 23 digits of base 32

The digits sort as the numbers do. Ids that one process generates are in order, also within a
millisecond and if the clock goes back.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.forks import Lock
from casstore.errors import (
    CycleError,
    DuplicateNodeError,
    InvalidInputError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest, Kind
from casstore.format.graph import (
    FIELD_DEPTH,
    NIL,
    Manifest,
    NodeHeader,
    check_time,
    encode_node,
    encode_payload,
)
from casstore.format.node_index import Tail, hash_of
from casstore.format.splitting import Encoded
from casstore.objects import graph as objects
from casstore.objects import keyed
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys, messages
from casstore.session.data import LAST, LEAF, Commit, Node, NodeDraft
from casstore.session.state import HiddenNodes, Leaf, Runtime, State
from casstore.session.tombstones import heal_leaf, reveal

# Crockford's digits: no letter looks like another digit.
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH: Final = 23
_RANDOM_BITS: Final = 64
# The random bits that are added to the last id for the next one in the same millisecond. Random, so
# that a forked process, which has a copy of the last id, does not generate its parent's ids.
_STEP_BITS: Final = 48

_lock = Lock()
_last = 0


def new_node_id() -> str:
    """An id that no other node has."""
    global _last
    now_ms = time.time_ns() // 1_000_000
    number = now_ms << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    with _lock:
        if number <= _last:
            number = _last + 1 + secrets.randbits(_STEP_BITS)
        _last = number
    return "".join([_DIGITS[number >> shift & 31] for shift in _SHIFTS])


_SHIFTS: Final = range(5 * (_LENGTH - 1), -1, -5)


_DRAFTS: Final = (NodeDraft, Node)


class _GeneratedDraft(NodeDraft):
    """A draft with a generated id. No graph has that id yet, so it is not looked up."""

    __slots__ = ()


class EncodedNode(NamedTuple):
    """A node of a commit before its position in the graph is known."""

    id: str
    #: The hash of its id.
    hash: bytes
    parent: Any
    frame: str | None
    time: Any
    cause: Encoded
    payload: Encoded
    is_user: bool
    #: True if the graph may have a node with this id: the id was not generated.
    may_exist: bool


class Grown(NamedTuple):
    """The graph after a commit."""

    #: The leaf; None: no leaf.
    leaf_id: str | None
    leaf_digest: bytes | None
    node_count: int
    next_seq: int
    tips: Encoded
    node_index: Tail
    hidden: bytes | None
    #: The ids of the nodes that were created.
    nodes: tuple[str, ...]
    #: The header and position of the leaf. None without a leaf, and if the commit neither appends
    #: nor moves the leaf and the state on which it is based has not read them.
    leaf: Leaf | None


class _KnownNode(NamedTuple):
    """A node that a commit builds on, or has created."""

    header: NodeHeader
    digest: bytes
    position: int


def as_drafts(items: Sequence[Any]) -> list[NodeDraft | Node]:
    """The nodes of a commit: a value that is not a node becomes the payload of a new draft."""
    return [
        item if isinstance(item, _DRAFTS) else _GeneratedDraft(new_node_id(), item)
        for item in items
    ]


def with_parent(items: Sequence[Any], parent: str | None) -> list[NodeDraft | Node]:
    """The nodes of a commit, with ``parent`` as the parent of the first.

    InvalidInputError if there is no node, or the first has a parent of its own.
    """
    drafts = as_drafts(items)
    if not drafts or drafts[0].parent is not LEAF:
        raise InvalidInputError(
            f"parent={parent!r:.40} needs a first node without a parent of its own, got "
            f"{drafts[:1]!r:.80}"
        )
    return [drafts[0]._replace(parent=parent), *drafts[1:]]


def encode_nodes(drafts: Sequence[NodeDraft | Node], writer: PieceWriter) -> list[EncodedNode]:
    """Check and encode the nodes of a commit; what depends on the graph is left to ``_Growth``."""
    encoded: list[EncodedNode] = []
    emit = writer.emit
    for draft in drafts:
        hashed = hash_of(keys.id_bytes(draft.id, "a node id"))
        if draft.parent is not LEAF and draft.parent is not None:
            keys.id_bytes(draft.parent, "a parent id")
        if draft.frame is not None:
            keys.id_bytes(draft.frame, "a frame id")
        if draft.time is not None:
            check_time(draft.time)
        cause = NIL if draft.cause is None else encode_payload(draft.cause, "cause", emit)
        encoded.append(
            EncodedNode(
                id=draft.id,
                hash=hashed,
                parent=draft.parent,
                frame=draft.frame,
                time=draft.time,
                cause=cause,
                payload=encode_payload(draft.payload, "payload", emit),
                is_user=messages.is_user_message(draft.payload),
                may_exist=type(draft) is not _GeneratedDraft,
            )
        )
    return encoded


def change_graph(
    runtime: Runtime,
    state: State | None,
    change: Commit,
    nodes: list[EncodedNode],
    writer: PieceWriter,
) -> Grown:
    """Apply a commit's nodes and leaf to the graph of ``state`` (None: no commit yet)."""
    if state is not None and change.replace is None:
        growth = _Growth(runtime, state, state.manifest, writer)
        growth.append(nodes)
        return growth.finish(change)
    growth = _Growth(runtime, None, Manifest(), writer)
    growth.append(nodes)
    grown = growth.finish(change)
    if state is None or state.head.hidden is None:
        return grown
    # Hidden nodes stay hidden in earlier revisions. A hidden node that the new graph contains
    # becomes visible: the caller has passed it explicitly.
    digests = [made.digest for made in growth.created]
    return grown._replace(hidden=reveal(runtime, state.head, digests, writer))


class _Growth:
    """Applies one commit to one graph: finds parents, creates nodes, moves the leaf."""

    def __init__(
        self, runtime: Runtime, state: State | None, manifest: Manifest, writer: PieceWriter
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._manifest = manifest
        self._writer = writer
        self._hidden: HiddenNodes = {}
        if state is not None and state.head.hidden is not None:
            self._hidden = runtime.hidden(state.head)
        self._index: NodeIndex = runtime.index(manifest)
        # By id: the nodes that this commit has created, and those of the graph that it has found.
        self._known: dict[str, _KnownNode] = {}
        #: The nodes that this commit has created, in order.
        self.created: list[_KnownNode] = []
        self._hashes: list[bytes] = []

    # --- looking up nodes -----------------------------------------------------------------

    def _find(self, node_id: str) -> _KnownNode | None:
        """Find a visible node of the graph that is not in ``_known``, and add it there."""
        manifest = self._manifest
        if node_id == manifest.leaf_id and manifest.leaf is not None:
            state = self._state
            if state is not None and state.leaf is not None:
                known = _KnownNode(state.leaf.header, manifest.leaf, state.leaf.position)
            else:
                [header] = objects.read_headers(self._runtime.reader(), [manifest.leaf])
                position = self._index.position_of(node_id, manifest.leaf)
                known = _KnownNode(header, manifest.leaf, position)
        else:
            listed = self._index.find([node_id])[0]
            if listed is None:
                return None
            [header] = objects.read_headers(self._runtime.reader(), [listed.digest])
            known = _KnownNode(header, listed.digest, listed.position)
        if known.digest in self._hidden:
            return None
        self._known[node_id] = known
        return known

    # --- appending ------------------------------------------------------------------------

    def append(self, nodes: list[EncodedNode]) -> None:
        """Create the nodes of a commit, parents first."""
        if not nodes:
            return
        by_id: dict[str, EncodedNode] = {}
        parents: dict[str, str | None] = {}
        before: str | None = None
        if nodes[0].parent is LEAF:
            # The leaf as a reader sees it: if it is hidden, the latest visible message.
            before = self._manifest.leaf_id
            if self._state is not None and self._manifest.leaf in self._hidden:
                before = heal_leaf(self._runtime, self._state, self._hidden)
        in_order = True
        for node in nodes:
            node_id, parent = node.id, node.parent
            if node_id in by_id:
                raise DuplicateNodeError(node_id, "appears twice in the commit")
            if parent is LEAF:
                parent = before
            elif parent != before and parent is not None:
                in_order = in_order and parent in parents
            by_id[node_id] = node
            parents[node_id] = parent
            before = node_id
        self._require_new(nodes)
        for node_id in parents if in_order else _parents_first(parents):
            self._create(by_id[node_id], parents[node_id])

    def _require_new(self, nodes: list[EncodedNode]) -> None:
        """DuplicateNodeError if the graph has a node with one of these ids."""
        given = [node for node in nodes if node.may_exist] if self._index.count else []
        if not given or not any(self._index.candidates([node.hash for node in given])):
            return
        ids = [node.id for node in given]
        for node_id, listed in zip(ids, self._index.find(ids), strict=True):
            if listed is not None:
                raise DuplicateNodeError(node_id, "is in the session already")

    def _create(self, node: EncodedNode, parent_id: str | None) -> None:
        added = len(self.created)
        depth, users, parent = 1, 0, None
        if parent_id is not None:
            known = self._known.get(parent_id) or self._find(parent_id)
            if known is None:
                raise UnknownParentError(node.id, f"has an unknown parent {parent_id!r}")
            parent, above = known.digest, known.header
            depth, users = above.depth + 1, above.users
        header = NodeHeader(
            id=node.id,
            seq=self._manifest.next_seq + added,
            depth=depth,
            users=users + node.is_user,
            frame=node.frame,
            time=node.time,
            parent_id=parent_id,
            parent=parent,
        )
        digest = self._writer.emit(Kind.NODE, *encode_node(header, node.cause, node.payload))
        if digest in self._hidden:
            raise DuplicateNodeError(node.id, "is hidden in this session, with the same content")
        made = _KnownNode(header, digest, self._manifest.nodes + added)
        self._known[node.id] = made
        self.created.append(made)
        self._hashes.append(node.hash)

    # --- the result -----------------------------------------------------------------------

    def finish(self, change: Commit) -> Grown:
        """Move the leaf as ``change`` asks; returns the graph after the commit."""
        created, manifest, state = self.created, self._manifest, self._state
        if change.leaf is not LAST:
            leaf_id = change.leaf
        elif created:
            leaf_id = (change.append if change.replace is None else change.replace)[-1].id
        elif state is not None:
            # The commit neither appends nor moves the leaf, so it stays as stored, hidden or not.
            return Grown(
                leaf_id=manifest.leaf_id,
                leaf_digest=manifest.leaf,
                node_count=manifest.nodes,
                next_seq=manifest.next_seq,
                tips=manifest.tips,
                node_index=manifest.node_index,
                hidden=state.head.hidden,
                nodes=(),
                leaf=state.leaf,
            )
        else:
            leaf_id = None
        leaf = None if leaf_id is None else self._known.get(leaf_id) or self._find(leaf_id)
        if leaf is None and leaf_id is not None:
            raise UnknownLeafError(leaf_id, "is to be the leaf, but is not in the session")
        node_index = manifest.node_index
        if created:
            known = self._known
            distances = [
                0
                if made.header.parent_id is None
                else made.position - known[made.header.parent_id].position
                for made in created
            ]
            node_index = self._index.extended(
                b"".join(self._hashes),
                distances,
                [made.digest for made in created],
                self._writer.emit,
            )
        return Grown(
            leaf_id=leaf_id,
            leaf_digest=None if leaf is None else leaf.digest,
            node_count=manifest.nodes + len(created),
            next_seq=manifest.next_seq + len(created),
            tips=self._tips(leaf_id),
            node_index=node_index,
            hidden=None if state is None else state.head.hidden,
            nodes=tuple([made.header.id for made in created]),
            leaf=None if leaf is None else Leaf(leaf.header, leaf.position),
        )

    def _tips(self, leaf_id: str | None) -> Encoded:
        """The last node of each branch, by id; nil while the leaf ends the only branch.

        A created node ends a branch unless it has a created child, and its parent no longer ends
        one. A commit that only moves the leaf changes no branch: if the graph has a single one, its
        last node is listed from then on, because it is no longer the leaf.
        """
        manifest, created = self._manifest, self.created
        tips = manifest.tips
        is_single = tips.data == NIL.data
        if is_single:
            end = manifest.leaf_id
            for made in created:
                if made.header.parent_id != end:
                    break
                end = made.header.id
            else:
                if end == leaf_id:
                    # The commit only extends the single branch.
                    return NIL
        parents = {made.header.parent_id for made in created}
        ends = {
            made.header.id: Link(Digest(made.digest))
            for made in created
            if made.header.id not in parents
        }
        was_leaf = manifest.leaf_id
        if is_single:
            # The leaf was the last node of the only branch, if there was one.
            if was_leaf is not None and was_leaf not in parents and manifest.leaf is not None:
                ends[was_leaf] = Link(Digest(manifest.leaf))
            if set(ends) <= {leaf_id}:
                return NIL
        reader = PendingReader(self._runtime.engine, self._writer)
        if ends:
            gone = [parent for parent in parents if parent is not None and parent not in ends]
            tips = keyed.change_map(reader, tips, ends, gone, FIELD_DEPTH, self._writer.emit)
        only = leaf_id is not None and keyed.is_only_key(reader, tips, leaf_id)
        return NIL if only else tips


def _parents_first(parents: dict[str, str | None]) -> list[str]:
    """The ids in the order given, but each after its parent; CycleError if there is a cycle."""
    ordered: dict[str, None] = {}
    for node_id in parents:
        waiting: dict[str, None] = {}
        step: str | None = node_id
        while step is not None and step in parents and step not in ordered:
            if step in waiting:
                raise CycleError(step, "is its own ancestor")
            waiting[step] = None
            step = parents[step]
        ordered.update(dict.fromkeys(reversed(waiting)))
    return list(ordered)
