"""Reading a session: its head, its state, single nodes, and what a picker shows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from casstore.engine.protocol import RowKey
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    NodeNotFoundError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.objects import graph as objects
from casstore.session import checkpoint, keys, lineage
from casstore.session.data import Checkpoint, Entry, Head, Node, Usage
from casstore.session.heads import public_head
from casstore.session.lineage import Place
from casstore.session.nodes import (
    FULL,
    PATH,
    Nodes,
    no_nodes,
    open_nodes,
    visible_leaf,
)
from casstore.session.state import Runtime, State

At = int | str | Entry | None


class SessionState(NamedTuple):
    """A session as it is loaded: what an agent needs to go on.

    ``healed`` says that the stored leaf is hidden and ``leaf`` is the latest visible message.

    >>> state = session.load()
    >>> [node.payload["text"] for node in state.nodes], state.checkpoint.tool_state
    (['which way?', 'left'], {'cwd': '/repo'})
    """

    head: Head
    checkpoint: Checkpoint
    usage: tuple[Usage, ...]
    nodes: Nodes
    leaf: str | None
    healed: bool


def head_of(session: str, state: State) -> Head:
    """A state's head, as callers see it."""
    return public_head(session, state.head, state.manifest.leaf_id, state.manifest.nodes)


def find_head(runtime: Runtime, session: str) -> Head | None:
    """The head of a session."""
    state = runtime.find(session)
    return None if state is None else head_of(session, state)


def load(
    runtime: Runtime,
    session: str,
    at: At,
    scope: Literal["path", "full"],
    leaf: str | None,
    *,
    hydrate: bool,
) -> SessionState | None:
    """A session, now or earlier; None if nothing was committed yet."""
    _check_scope(scope, leaf)
    head = _find(runtime, session, at)
    if head is None:
        return None
    state = head if at is None else runtime.at(session, at)
    # What is hidden now is hidden in earlier revisions too.
    hidden = runtime.hidden(head.head)
    seen, healed = (leaf, False) if leaf is not None else visible_leaf(runtime, state, hidden)
    nodes = open_nodes(runtime, session, state, hidden, scope, seen)
    reader = runtime.reader()
    return SessionState(
        head_of(session, state),
        checkpoint.read_checkpoint(reader, state.manifest, hydrate=hydrate),
        read_usage(runtime, state),
        nodes,
        seen,
        healed,
    )


def _check_scope(scope: str, leaf: str | None) -> None:
    if scope not in (PATH, FULL):
        raise InvalidInputError(f"a scope is {PATH} or {FULL}, not {scope!r}")
    if scope == FULL and leaf is not None:
        raise InvalidInputError("the full graph has no leaf to ask for; only a path has")


def _find(runtime: Runtime, session: str, at: At) -> State | None:
    """The head of a session; a session without any has no earlier revision either."""
    head = runtime.find(session)
    if head is None and at is not None:
        raise SessionNotFoundError(session)
    return head


def load_nodes(
    runtime: Runtime,
    session: str,
    at: At,
    scope: Literal["path", "full"],
    leaf: str | None,
    *,
    payloads: bool,
) -> Nodes:
    """The nodes of a session alone."""
    _check_scope(scope, leaf)
    head = _find(runtime, session, at)
    if head is None:
        if leaf is not None:
            raise NodeNotFoundError(session, leaf)
        return no_nodes(runtime)
    state = head if at is None else runtime.at(session, at)
    hidden = runtime.hidden(head.head)
    seen = leaf if leaf is not None else visible_leaf(runtime, state, hidden)[0]
    return open_nodes(runtime, session, state, hidden, scope, seen, payloads=payloads)


def find_node(runtime: Runtime, session: str, node_id: str, at: At) -> Node | None:
    """One node by its id."""
    part = keys.part(node_id, "a node id")
    known = runtime.recall(keys.session_key(session))
    if at is None and known is not None and known.head.base is None:
        # Where the session stood last, it has one lineage, and the row is asked for together
        # with the head; if that is still the same, it is the answer.
        wanted = RowKey("nodes", keys.lineage_node(known.head.lineage, part))
        row, found = runtime.rows(session, [wanted])
        if row == known.row:
            return _shown(runtime, known, _place_of(runtime, known, found), node_id)
    head = _find(runtime, session, at)
    if head is None:
        return None
    state = head if at is None else runtime.at(session, at)
    return _shown(runtime, head, runtime.chain(state).find([part])[0], node_id)


def _place_of(runtime: Runtime, state: State, row: bytes | None) -> Place | None:
    """The place that a row, found by a node's id, leads to in a state of one lineage."""
    if row is None:
        return None
    seq = lineage.read_seq(row)
    digest: bytes | None = None
    if seq < state.manifest.next_seq:
        digest = lineage.find_digest(runtime.engine, state.head.lineage, seq)
    if digest is None:
        raise CorruptionError(f"the node table has no node number {seq}")
    return Place(seq, digest)


def _shown(runtime: Runtime, head: State, place: Place | None, node_id: str) -> Node | None:
    """The node at a place, unless there is none, or it is hidden."""
    if place is None or place.digest in runtime.hidden(head.head):
        return None
    return read_node(runtime, place, node_id)


def read_node(runtime: Runtime, place: Place, node_id: str) -> Node:
    """The node at a place of the node table."""
    seq, digest = place
    [fields] = objects.iter_fields(runtime.reader(), (digest,))
    found_id, found_seq, depth, _, frame, time, parent_id, _, cause, payload = fields
    if found_id != node_id or found_seq != seq:
        raise CorruptionError(f"the node table does not match node {digest.hex()}; check the store")
    name = Digest.known(digest)
    return Node(node_id, payload, parent_id, cause, frame, time, seq, depth, name)


def load_usage(runtime: Runtime, session: str, at: At) -> tuple[Usage, ...]:
    """The ledger of a session alone."""
    head = _find(runtime, session, at)
    return () if head is None else read_usage(runtime, runtime.at(session, at))


def read_usage(runtime: Runtime, state: State) -> tuple[Usage, ...]:
    """The ledger of a state, without entries that count nothing."""
    entries = checkpoint.read_usage(runtime.reader(), state.manifest.usage)
    return tuple([entry for entry in entries if entry.total])
