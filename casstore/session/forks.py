"""Forks: a new session from any revision or node of another, sharing all its objects.

The fork's head names the same manifest, so nothing is copied, and the two sessions are independent
afterwards: deleting the source deletes its rows, never objects that the fork reaches.

A fork at a node has only the nodes on the path to it, with a new manifest and a new node index. The
index shares the pieces before the first node that is not on the path and lists the later nodes
again, so the cost is proportional to the number of later nodes. A fork with nodes to append has a
new manifest, too; it is written in one write with these nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

from casstore.engine.protocol import Condition, RowIs, RowKey, Write
from casstore.errors import (
    ConditionFailedError,
    NodeNotFoundError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.format.digest import Kind
from casstore.format.graph import NIL, encode_manifest
from casstore.format.node_index import Tail
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PieceWriter
from casstore.session import graph, keys, marks, subjects
from casstore.session.attempts import transaction
from casstore.session.commit import checked_commit
from casstore.session.data import Commit, Head, Origin
from casstore.session.loading import At, head_of
from casstore.session.state import (
    FORK,
    HeadRow,
    Leaf,
    Runtime,
    State,
    head_key,
    meta_key,
    move_head,
    tombstone_key,
    written_at,
)

# How many nodes of a path are listed at once.
_BATCH: Final = 1024


def fork(
    runtime: Runtime,
    source: str,
    target: str,
    at: At,
    node: str | None,
    about: Sequence[str] | None = None,
    append: Sequence[Any] = (),
) -> Head:
    """Create the session ``target`` from the head or an earlier revision of ``source``.

    Its subjects are those in ``about``, or those of ``source``. Nodes in ``append`` are part of its
    first revision, whose number is then one above the source's.
    """
    subject = None if about is None else subjects.checked(about)
    change = checked_commit(Commit(append=append))
    return _fork(runtime, source, target, at, node, subject, change)


@transaction("session {source!r}")
def _fork(
    runtime: Runtime,
    source: str,
    target: str,
    at: At,
    node: str | None,
    subject: tuple[str, ...] | None,
    change: Commit,
) -> Head:
    key, target_key = keys.session_key(source), keys.session_key(target)
    row, about_row = runtime.rows(source, [keys.subjects(key)])
    if row is None:
        raise SessionNotFoundError(source)
    current = runtime.state_of(key, row)
    state = current if at is None else runtime.at(source, at)
    writer = PieceWriter()
    stands = state._replace(lease=None)
    digest = state.head.manifest
    if node is not None:
        stands = _at_node(runtime, source, current, state, node, writer)
    # The hidden nodes are those of the source's head, whatever revision is shared.
    hidden = current.head.hidden
    if change.append:
        inherits = stands._replace(head=state.head._replace(hidden=hidden))
        stands, hidden = _grown(runtime, inherits, change, writer)
    if stands.manifest is not state.manifest:
        digest = writer.emit(Kind.MANIFEST, *encode_manifest(stands.manifest))
        if stands.manifest.tips.outlined:
            # A long map is changed step by step; drop the pieces of intermediate results.
            writer.keep_reachable(digest)
    head = HeadRow(
        revision=state.head.revision + bool(change.append),
        created_at_ms=0,
        committed_at_ms=0,
        manifest=digest,
        hidden=hidden,
        operation=FORK,
        turn=None,
        rewound_to=None,
        origin=Origin(source, state.head.revision, node),
        adopted=None,
        long_id=target if keys.is_cut(target) else None,
    )
    put, changes = move_head(target_key, None, head)
    conditions: list[Condition] = [
        RowIs(*head_key(target_key), None),
        RowIs(*meta_key(target_key), None),
        RowIs(*tombstone_key(target_key), None),
        # The shared objects must still be reachable when the fork's row is written, and not
        # only from a leftover row of a deleted session.
        RowIs(*_where(key, current, state), state.row),
        RowIs(*tombstone_key(key), None),
    ]
    if state.row != current.row and head.hidden is not None:
        conditions.append(RowIs(*head_key(key), current.row))
    if subject is None:
        conditions.append(RowIs(*keys.subjects(key), about_row))
    taken = subjects.decode(about_row) if subject is None else subject
    if taken:
        changes += subjects.changes(target, target_key, (), taken)
    if state.row != current.row:
        changes.append(marks.put_mark(key, state.head.revision))
    try:
        done = runtime.engine.write(Write(writer.objects, conditions, changes))
    except ConditionFailedError as exc:
        if exc.index < 2:
            raise SessionExistsError(target) from exc
        if exc.index == 2:
            raise SessionDeletedError(target) from exc
        raise
    row, head = written_at(head, put, done.now_ms)
    made = stands._replace(row=row, head=head)
    # Cached for the first commit.
    runtime.remember(target_key, made)
    return head_of(target, made)


def _where(key: bytes, current: State, state: State) -> RowKey:
    if state.row == current.row:
        return head_key(key)
    return RowKey("history", keys.history(key, state.head.revision))


def _at_node(
    runtime: Runtime,
    source: str,
    current: State,
    state: State,
    node: str,
    writer: PieceWriter,
) -> State:
    """The state, without a head, of a fork that has only the path to a node."""
    index = runtime.index(state.manifest)
    hidden = runtime.hidden(current.head)
    listed = index.find([node])[0]
    if listed is None or listed.digest in hidden:
        raise NodeNotFoundError(source, node)
    header = objects.read_headers(runtime.reader(), [listed.digest])[0]
    path = index.path(listed.position, header.depth)
    manifest = state.manifest._replace(
        leaf_id=node,
        leaf=listed.digest,
        nodes=header.depth,
        next_seq=header.seq + 1,
        tips=NIL,
        node_index=_index_of_path(index, path, writer),
    )
    return State(state.row, state.head, manifest, Leaf(header, header.depth - 1))


def _grown(
    runtime: Runtime, state: State, change: Commit, writer: PieceWriter
) -> tuple[State, bytes | None]:
    """The state with nodes appended, and the digest of the map of nodes that it hides."""
    encoded = graph.encode_nodes(change.append, writer)
    grown = graph.change_graph(runtime, state, change, encoded, writer)
    manifest = state.manifest._replace(
        leaf_id=grown.leaf_id,
        nodes=grown.node_count,
        next_seq=grown.next_seq,
        leaf=grown.leaf_digest,
        tips=grown.tips,
        node_index=grown.node_index,
    )
    return state._replace(manifest=manifest, leaf=grown.leaf), grown.hidden


def _index_of_path(index: NodeIndex, path: Sequence[int], writer: PieceWriter) -> Tail:
    """Build the node index of the nodes on a path alone."""
    shared = bisect_left(range(len(path)), True, key=lambda at: path[at] != at)
    builder = index.builder(writer.emit, shared)
    for start in range(shared, len(path), _BATCH):
        batch = path[start : start + _BATCH]
        distances = [min(1, start + at) for at in range(len(batch))]
        builder.append(index.hashes(batch), distances, index.digests(batch))
    return builder.finish()
