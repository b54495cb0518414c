"""Reading a session: its head, its state, single nodes; and waiting for its head to move."""

from __future__ import annotations

from typing import Literal, NamedTuple

from casstore.errors import (
    InvalidInputError,
    NodeNotFoundError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.node_index import id_hash
from casstore.objects import graph as objects
from casstore.objects.node_index import NodePosition
from casstore.session import checkpoint, keys
from casstore.session.arguments import check_count, check_seconds
from casstore.session.attempts import read_again
from casstore.session.data import Checkpoint, Entry, Head, Node, Usage
from casstore.session.heads import public_head
from casstore.session.nodes import (
    FULL,
    PATH,
    Nodes,
    no_nodes,
    open_nodes,
    visible_leaf,
)
from casstore.session.state import Runtime, State
from casstore.session.waiting import until

At = int | str | Entry | None


class SessionState(NamedTuple):
    """A loaded session: what an agent needs to continue.

    ``healed``: the stored leaf is hidden, and ``leaf`` is the latest visible message instead.

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
    # Nodes that the head hides are hidden in earlier revisions, too.
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
        raise InvalidInputError(f"scope must be {PATH!r} or {FULL!r}, got {scope!r}")
    if scope == FULL and leaf is not None:
        raise InvalidInputError(f"leaf={leaf!r:.60} needs scope {PATH!r}: {FULL!r} has every node")


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
    keys.id_bytes(node_id, "node_id")
    head = _find(runtime, session, at)
    if head is None:
        return None
    state = head if at is None else runtime.at(session, at)
    index = runtime.index(state.manifest)
    hidden = runtime.hidden(head.head)
    [possible] = index.candidates([id_hash(node_id)])
    for position in possible:
        place = index.place(position)
        node = None if place.digest in hidden else read_node(runtime, place, node_id)
        if node is not None:
            return node
    return None


def read_node(runtime: Runtime, place: NodePosition, node_id: str) -> Node | None:
    """The node at a place of a node index; None if it has another id."""
    [fields] = objects.iter_fields(runtime.reader(), (place.digest,))
    found_id, seq, depth, _, frame, time, parent_id, _, cause, payload = fields
    if found_id != node_id:
        return None
    name = Digest.known(place.digest)
    return Node(node_id, payload, parent_id, cause, frame, time, seq, depth, name)


def load_usage(runtime: Runtime, session: str, at: At) -> tuple[Usage, ...]:
    """The ledger of a session alone."""
    head = _find(runtime, session, at)
    return () if head is None else read_usage(runtime, runtime.at(session, at))


def read_usage(runtime: Runtime, state: State) -> tuple[Usage, ...]:
    """The ledger of a state, without entries that count nothing."""
    entries = checkpoint.read_usage(runtime.reader(), state.manifest.ledger)
    return tuple([entry for entry in entries if entry.total])


def check_wait(after: int, timeout_s: float | None) -> None:
    """Refuse arguments of ``wait`` that are not a revision and a number of seconds."""
    check_count(after, "after")
    if timeout_s is not None:
        check_seconds(timeout_s, "timeout_s")


def wait(runtime: Runtime, session: str, after: int, timeout_s: float | None) -> Head | None:
    """The head once its revision is above ``after``; None if ``timeout_s`` pass before."""
    check_wait(after, timeout_s)
    return until(runtime, Moved(runtime, session, after), timeout_s)


class Moved:
    """Finds a head above a revision: a ``Look``."""

    due_s: float | None = None

    def __init__(self, runtime: Runtime, session: str, after: int) -> None:
        self._runtime = runtime
        self._session = session
        self._after = after

    def __call__(self) -> Head | None:
        """The head; None if it is not above the revision."""
        head = read_again(lambda: find_head(self._runtime, self._session))
        return head if head is not None and head.revision > self._after else None
