"""What a commit does to the graph: nodes appended, the graph replaced, the leaf moved.

Appending only creates. A node's parent is in the graph already or in the same commit,
and nothing leads back to itself, so every node can be linked to its parent; within a
commit parents are inserted before their children, otherwise in the order given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import PutRow
from casstore.errors import (
    CycleError,
    DuplicateNodeError,
    InvalidInputError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.format.manifest import FIELD_ROOM, NOTHING, Manifest
from casstore.format.node import (
    NULL,
    NodeHeader,
    check_time,
    encode_node,
    spell_payload,
)
from casstore.format.splitting import Spelled
from casstore.objects import graph as objects
from casstore.objects import keyed
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys, lineage, messages
from casstore.session.data import LAST, LEAF, Commit, Node, NodeDraft
from casstore.session.heads import Base
from casstore.session.lineage import Chain, Page, Place
from casstore.session.picking import find_first_user
from casstore.session.state import HiddenNodes, Runtime, State
from casstore.session.tombstones import heal_leaf, reveal

_DRAFTS: Final = (NodeDraft, Node)


class SpelledNode(NamedTuple):
    """A node of a commit before its place in the graph is known."""

    id: str
    part: bytes
    parent: Any
    frame: str | None
    time: Any
    cause: Spelled
    payload: Spelled
    is_user: bool


class Grown(NamedTuple):
    """The graph after a commit, and the rows that say so."""

    leaf_id: str | None
    leaf_digest: bytes | None
    first_user: bytes | None
    node_count: int
    next_seq: int
    tips: Spelled
    lineage: bytes
    base: Base | None
    hidden: bytes | None
    rows: list[PutRow]
    nodes: tuple[str, ...]
    leaf: NodeHeader | None
    page: Page | None
    older: tuple[bytes, ...] | None


def spell_nodes(drafts: Sequence[NodeDraft | Node], writer: PieceWriter) -> list[SpelledNode]:
    """Check and spell the nodes of a commit: all that does not depend on the graph."""
    spelled: list[SpelledNode] = []
    emit = writer.emit
    for draft in drafts:
        if not isinstance(draft, _DRAFTS):
            raise InvalidInputError(f"a node is a NodeDraft or a Node, not {draft!r:.80}")
        node_id, payload, parent, cause, frame, time = draft[:6]
        part = keys.part(node_id, "a node id")
        if parent is not LEAF and parent is not None:
            keys.id_bytes(parent, "a parent id")
        if frame is not None:
            keys.id_bytes(frame, "a frame id")
        if time is not None:
            check_time(time)
        because = NULL if cause is None else spell_payload(cause, "cause", emit)
        body = spell_payload(payload, "payload", emit)
        is_user = messages.is_user_message(payload)
        spelled.append(SpelledNode(node_id, part, parent, frame, time, because, body, is_user))
    return spelled


def change_graph(
    runtime: Runtime,
    state: State | None,
    change: Commit,
    nodes: list[SpelledNode],
    writer: PieceWriter,
    *,
    fresh: bool = False,
) -> Grown:
    """Apply a commit's nodes and leaf to the graph that ``state`` has.

    ``fresh`` says that somebody else makes sure that the ids of the nodes are new.
    """
    if state is None or change.replace is not None:
        manifest = Manifest() if state is None else state.manifest
        empty = manifest._replace(
            leaf_id=None, nodes=0, next_seq=0, leaf=None, first_user=None, tips=NOTHING
        )
        growth = _Growth(runtime, None, empty, lineage.new_lineage(), None, writer)
        growth.append(nodes, fresh=fresh)
        grown = growth.finish(change)
        if state is None or state.head.hidden is None:
            return grown
        # What was hidden stays hidden in earlier revisions. If the new graph has the very
        # same node, somebody wants it back.
        return grown._replace(hidden=reveal(runtime, state.head, growth.digests(), writer))
    if change.leaf is LAST:
        straight = _grow_straight(runtime, state, nodes, writer, fresh=fresh)
        if straight is not None:
            return straight
    head = state.head
    growth = _Growth(runtime, state, state.manifest, head.lineage, head.base, writer)
    growth.append(nodes, fresh=fresh)
    return growth.finish(change)


def _grow_straight(
    runtime: Runtime, state: State, nodes: list[SpelledNode], writer: PieceWriter, *, fresh: bool
) -> Grown | None:
    """The usual commit in one go: nodes behind the leaf, each the next one's parent.

    None, and nothing has happened, if this is not such a one: the graph has one branch, and
    nothing of it is hidden. What it makes is what ``_Growth`` would make.
    """
    manifest, head, above, page = state.manifest, state.head, state.leaf, state.page
    seq = manifest.next_seq
    base = head.base
    # The first of a fork's own: its lineage has no page yet, and no row says what it goes on from.
    begins = base is not None and seq == base.limit
    if (
        not nodes
        or above is None
        or (page is None and not begins)
        or manifest.tips is not NOTHING
        or head.hidden is not None
        or seq < lineage.first_own(base)
    ):
        return None
    ids = tuple([node[0] for node in nodes])
    if len({above.id, *ids}) <= len(ids) or not _all_follow(nodes):
        return None
    older = state.older
    if not fresh:
        chain = runtime.chain(state)
        if any(chain.find([node.part for node in nodes])):
            return None
        older = _older(chain, head.lineage)
    own, emit = head.lineage, writer.emit
    places = keys.lineage_nodes(own)
    header, digest, first_user = above, manifest.leaf, manifest.first_user
    depth, users = above.depth, above.users
    distances = [seq - above.seq] + [1] * (len(ids) - 1)
    digests: list[bytes] = []
    rows: list[PutRow] = []
    for node_id, part, _, frame, time, cause, payload, is_user in nodes:
        depth += 1
        users += is_user
        header = NodeHeader(node_id, seq, depth, users, frame, time, header.id, digest)
        digest = emit(Kind.NODE, *encode_node(header, cause, payload))
        if is_user and first_user is None:
            first_user = digest
        rows.append(PutRow("nodes", places + part, lineage.encode_seq(seq)))
        digests.append(digest)
        seq += 1
    if begins and base is not None:
        page = None
        rows.append(lineage.put_base(own, base))
    added = Page(manifest.next_seq, distances, b"".join(digests))
    more, page = lineage.put_pages(own, page, added)
    rows += more
    return Grown(
        header.id,
        digest,
        first_user,
        manifest.nodes + len(ids),
        seq,
        NOTHING,
        own,
        base,
        None,
        rows,
        ids,
        header,
        page,
        older,
    )


def _all_follow(nodes: list[SpelledNode]) -> bool:
    """Does each of them go on from the one before, and the first from the leaf?"""
    for node in nodes:  # noqa: SIM110 - half the time of all() over a generator
        if node[2] is not LEAF:
            return False
    return True


def _older(chain: Chain, own: bytes) -> tuple[bytes, ...]:
    """The lineages that ``own`` goes on from."""
    return tuple([part.lineage for part in chain.segments if part.lineage != own])


class _Growth:
    """One commit's work on one graph."""

    def __init__(
        self,
        runtime: Runtime,
        state: State | None,
        manifest: Manifest,
        own: bytes,
        base: Base | None,
        writer: PieceWriter,
    ) -> None:
        self._runtime = runtime
        self._state = state
        self._manifest = manifest
        self._lineage = own
        self._base = base
        self._writer = writer
        self._hidden: HiddenNodes = {} if state is None else runtime.hidden(state.head)
        self._chain: Chain | None = None
        # Nodes of the graph by id that this commit asked for, and those it created.
        self._headers: dict[str, tuple[NodeHeader, bytes]] = {}
        self._created: list[tuple[NodeHeader, bytes, bytes]] = []
        self._created_ids: set[str] = set()

    # --- looking up what is there ---------------------------------------------------------

    def _find(self, node_ids: Sequence[str]) -> list[Place | None]:
        if self._state is None or not node_ids:
            return [None] * len(node_ids)
        if self._chain is None:
            self._chain = self._runtime.chain(self._state)
        return self._chain.find([keys.part(node, "a node id") for node in node_ids])

    def _header(self, node_id: str) -> tuple[NodeHeader, bytes] | None:
        """A visible node that is in the graph or was created by this commit."""
        known = self._headers.get(node_id)
        if known is not None:
            return known
        state, digest = self._state, self._manifest.leaf
        if digest is None or node_id != self._manifest.leaf_id:
            place = self._find([node_id])[0]
            digest = None if place is None else place.digest
        if digest is None or digest in self._hidden:
            return None
        header = None if state is None else state.leaf
        if header is None or header.id != node_id:
            header = objects.read_headers(self._runtime.reader(), [digest])[0]
        return self._keep(header, digest)

    def _keep(self, header: NodeHeader, digest: bytes) -> tuple[NodeHeader, bytes]:
        self._headers[header.id] = header, digest
        return header, digest

    def _current_leaf(self) -> str | None:
        """The leaf as a reader sees it: if it is hidden, the latest visible message."""
        if self._manifest.leaf not in self._hidden or self._state is None:
            return self._manifest.leaf_id
        return heal_leaf(self._runtime, self._state, self._hidden)

    # --- appending ------------------------------------------------------------------------

    def append(self, nodes: list[SpelledNode], *, fresh: bool) -> None:
        """Create these nodes."""
        by_id: dict[str, SpelledNode] = {}
        parents: dict[str, str | None] = {}
        before = self._current_leaf() if nodes and nodes[0].parent is LEAF else None
        in_order = True
        for node in nodes:
            if node.id in by_id:
                raise DuplicateNodeError(node.id, "appears twice in the commit")
            parent = before if node.parent is LEAF else node.parent
            by_id[node.id] = node
            parents[node.id] = parent
            if parent != before and parent is not None:
                in_order = in_order and parent in parents and parent != node.id
            before = node.id
        if fresh and self._manifest.leaf_id in by_id:
            raise DuplicateNodeError(str(self._manifest.leaf_id), "is in the session already")
        if not fresh:
            for node_id, place in zip(by_id, self._find(list(by_id)), strict=True):
                if place is not None:
                    raise DuplicateNodeError(node_id, "is in the session already")
        for node_id in by_id if in_order else _parents_first(parents):
            self._create(by_id[node_id], parents[node_id])

    def _create(self, node: SpelledNode, parent_id: str | None) -> None:
        seq = self._manifest.next_seq + len(self._created)
        depth, users, parent = 1, 0, None
        if parent_id is not None:
            known = self._header(parent_id)
            if known is None:
                raise UnknownParentError(node.id, f"has an unknown parent {parent_id!r}")
            above, parent = known
            depth, users = above.depth + 1, above.users
        header = NodeHeader(
            node.id, seq, depth, users + node.is_user, node.frame, node.time, parent_id, parent
        )
        data, links = encode_node(header, node.cause, node.payload)
        digest = self._writer.emit(Kind.NODE, data, links)
        if digest in self._hidden:
            raise DuplicateNodeError(node.id, "is hidden in this session, this very node")
        self._keep(header, digest)
        self._created.append((header, digest, node.part))
        self._created_ids.add(node.id)

    def digests(self) -> list[bytes]:
        """The digests of the nodes that were created."""
        return [digest for _, digest, _ in self._created]

    # --- the outcome ----------------------------------------------------------------------

    def finish(self, change: Commit) -> Grown:
        """Move the leaf and sum up."""
        created = self._created
        leaf: tuple[NodeHeader, bytes] | None = None
        if change.leaf is not LAST:
            leaf_id = change.leaf
        elif created:
            last = (change.append if change.replace is None else change.replace)[-1]
            leaf_id = last.id
        else:
            leaf_id = self._manifest.leaf_id
        manifest, state = self._manifest, self._state
        if change.leaf is LAST and not created and state is not None:
            # It stays where it is, hidden or not: a commit that says nothing of it heals nothing.
            return self._grown(leaf_id, manifest.leaf, manifest.tips, state.leaf, state.page, [])
        if leaf_id is not None:
            leaf = self._header(leaf_id)
            if leaf is None:
                raise UnknownLeafError(leaf_id, "is to be the leaf, but is not in the session")
        page = None if state is None else state.page
        rows: list[PutRow] = []
        if created:
            rows, page = self._rows(page)
        header, digest = (None, None) if leaf is None else leaf
        return self._grown(leaf_id, digest, self._tips(leaf_id), header, page, rows)

    def _grown(
        self,
        leaf_id: str | None,
        leaf_digest: bytes | None,
        tips: Spelled,
        leaf: NodeHeader | None,
        page: Page | None,
        rows: list[PutRow],
    ) -> Grown:
        created = self._created
        return Grown(
            leaf_id,
            leaf_digest,
            None if leaf_id is None else self._first_user(leaf_id),
            self._manifest.nodes + len(created),
            self._manifest.next_seq + len(created),
            tips,
            self._lineage,
            self._base,
            None if self._state is None else self._state.head.hidden,
            rows,
            tuple([header.id for header, _, _ in created]),
            leaf,
            page,
            self._older(),
        )

    def _older(self) -> tuple[bytes, ...] | None:
        if self._base is None:
            return ()
        if self._chain is not None:
            return _older(self._chain, self._lineage)
        return None if self._state is None else self._state.older

    def _rows(self, page: Page | None) -> tuple[list[PutRow], Page]:
        created = self._created
        first = self._manifest.next_seq
        rows = [lineage.put_place(self._lineage, part, header.seq) for header, _, part in created]
        own_first = lineage.first_own(self._base)
        if first == own_first:
            page = None
            if self._base is not None:
                rows.append(lineage.put_base(self._lineage, self._base))
        elif page is None and first % lineage.PAGE_NODES:
            page = self._read_last_page()
        distances = [
            0 if header.parent_id is None else header.seq - self._headers[header.parent_id][0].seq
            for header, _, _ in created
        ]
        added = Page(first, distances, b"".join([digest for _, digest, _ in created]))
        more, page = lineage.put_pages(self._lineage, page, added)
        return rows + more, page

    def _read_last_page(self) -> Page:
        assert self._state is not None
        chain = self._chain or self._runtime.chain(self._state)
        return chain.page(self._manifest.next_seq - 1)

    def _first_user(self, leaf_id: str) -> bytes | None:
        """The first message of the user on the path of the leaf."""
        first: bytes | None = None
        step: str | None = leaf_id
        created = self._created_ids
        while step is not None and step in created:
            header, digest = self._headers[step]
            above = self._headers[header.parent_id][0] if header.parent_id is not None else None
            if header.users > (0 if above is None else above.users):
                first = digest
            step = header.parent_id
        if step == self._manifest.leaf_id or step is None:
            return (self._manifest.first_user if step is not None else None) or first
        found = self._header(step)
        if found is None or self._state is None or not found[0].users:
            return first
        chain = self._chain or self._runtime.chain(self._state)
        return find_first_user(self._runtime, chain, found[0])

    def _is_straight(self, leaf_id: str | None) -> bool:
        """Does the commit only make the one branch longer, and move the leaf to its end?"""
        end = self._manifest.leaf_id
        for header, _, _ in self._created:
            if header.parent_id != end:
                return False
            end = header.id
        return end == leaf_id

    def _tips(self, leaf_id: str | None) -> Spelled:
        """The ends of all branches, as a map; nil if the leaf is the only one."""
        manifest, created = self._manifest, self._created
        tips = manifest.tips
        if tips is NOTHING and self._is_straight(leaf_id):
            return NOTHING
        parents = {header.parent_id for header, _, _ in created}
        ends = {
            header.id: Link(Digest(digest))
            for header, digest, _ in created
            if header.id not in parents
        }
        was_leaf = manifest.leaf_id
        if tips is NOTHING or tips.data == NOTHING.data:
            # The leaf was the only end, if there was one.
            if was_leaf is not None and was_leaf not in parents and manifest.leaf is not None:
                ends[was_leaf] = Link(Digest(manifest.leaf))
            if set(ends) <= {leaf_id}:
                return NOTHING
            tips = NOTHING
        reader = PendingReader(self._runtime.engine, self._writer)
        if ends:
            gone = [parent for parent in parents if parent is not None and parent not in ends]
            tips = keyed.change_map(reader, tips, ends, gone, FIELD_ROOM, self._writer.emit)
        only = leaf_id is not None and keyed.is_only_key(reader, tips, leaf_id)
        return NOTHING if only else tips


def _parents_first(parents: dict[str, str | None]) -> list[str]:
    """In the order given, but each after its parent; CycleError if that cannot be."""
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
