"""Reading a session: its head, its state, and its nodes; and waiting for its head to move.

The nodes of a revision are a sequence (``Nodes``): the node index gives its length, and nodes are
read in pages as the caller iterates. Nodes that the session hides now are left out of earlier
revisions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, overload

from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    LimitError,
    NodeNotFoundError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.node_index import id_hash
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex, NodePosition, empty_index
from casstore.session import checkpoint, keys
from casstore.session.arguments import check_count, check_seconds
from casstore.session.attempts import read_again
from casstore.session.data import Checkpoint, Entry, Head, Node, Usage
from casstore.session.state import HiddenNodes, Runtime, State, public_head
from casstore.session.tombstones import heal_leaf
from casstore.session.waiting import until

PATH: Final = "path"
FULL: Final = "full"
_BATCH: Final = 256
_new_tuple: Final = tuple.__new__
_new_bytes: Final = bytes.__new__

#: The head (None), or an earlier revision by number, label or entry.
At = int | str | Entry | None


class Nodes(Sequence[Node]):
    """Nodes in order, root first. Slices are ``Nodes`` too and read nothing.

    >>> nodes = session.nodes()
    >>> len(nodes), nodes[-1].payload["text"], [node.id for node in nodes[:1]]
    (2, 'left', ['ask'])
    """

    def __init__(
        self,
        runtime: Runtime,
        index: NodeIndex,
        positions: Sequence[int],
        *,
        path: bool,
        dense: bool,
        payloads: bool,
        require_kept: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._index = index
        # Raises if the revision was removed or rewritten.
        self._require_kept = require_kept
        self._positions = positions
        # True on a path without gaps: the parent of each node must be the node before it.
        self._path = path
        # True if the ``seq`` of each node must be its position. In a fork of one path it may be
        # higher.
        self._dense = dense
        self._payloads = payloads

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: int | slice) -> Node | Nodes:
        if isinstance(at, slice):
            whole = self._path and (at.step is None or at.step == 1)
            return Nodes(
                self._runtime,
                self._index,
                self._positions[at],
                path=whole,
                dense=self._dense,
                payloads=self._payloads,
                require_kept=self._require_kept,
            )
        return self._read([self._positions[at]])[0]

    def __iter__(self) -> Iterator[Node]:
        for page in self._pages(_BATCH, divide=True):
            yield from page

    def pages(self, size: int = _BATCH) -> Iterator[list[Node]]:
        """The nodes in lists of ``size``; the iterator reads a list when it reaches it.

        >>> [[node.id for node in page] for page in session.nodes().pages(size=1)]
        [['ask'], ['left']]
        """
        check_count(size, "size", least=1)
        return self._pages(size)

    def digests(self) -> Iterator[Digest]:
        """The digests alone, from the node index: no node is read.

        >>> list(session.nodes().digests()) == [node.digest for node in session.nodes()]
        True
        """
        try:
            for listed in self._index.places(self._positions):
                yield Digest.known(listed.digest)
        except CorruptionError:
            self._require_kept()
            raise

    def _pages(self, size: int, *, divide: bool = False) -> Iterator[list[Node]]:
        """``divide``: read the nodes of a page one by one if it exceeds the limit of one read."""
        before: bytes | None = None
        for start in range(0, len(self._positions), size):
            positions = self._positions[start : start + size]
            rest = start + size < len(self._positions)
            try:
                page = self._read(positions, before, ahead=rest)
            except LimitError:
                if not divide:
                    raise
                for position in positions:
                    page = self._read([position], before)
                    before = page[-1].digest
                    yield page
                continue
            before = page[-1].digest
            yield page

    def _read(
        self, positions: Sequence[int], before: bytes | None = None, *, ahead: bool = False
    ) -> list[Node]:
        try:
            return self._read_checked(positions, before, ahead=ahead)
        except CorruptionError:
            # If the revision was removed during the iteration, gc may have collected its objects:
            # report the removal instead of damage.
            self._require_kept()
            raise

    def _read_checked(
        self, positions: Sequence[int], before: bytes | None, *, ahead: bool
    ) -> list[Node]:
        """Read nodes; CorruptionError if their order or parents differ from the node index."""
        digests = self._index.digests(positions, ahead=ahead)
        reader = self._runtime.reader()
        found: Iterable[list[Any]]
        if self._payloads:
            found = objects.iter_fields(reader, digests)
        else:
            found = [[*one, None, None] for one in objects.read_headers(reader, digests)]
        nodes: list[Node] = []
        path, dense = self._path, self._dense
        for position, digest, fields in zip(positions, digests, found, strict=True):
            node_id, seq, depth, _, frame, time, parent_id, parent, cause, payload = fields
            if (seq != position and (dense or seq < position)) or (
                path and before is not None and parent != before
            ):
                raise CorruptionError(
                    f"the node index does not match node {digest.hex()}; check the store"
                )
            before = digest
            nodes.append(
                # What Node(…) and Digest.known do, inlined for speed: paths are long.
                _new_tuple(
                    Node,
                    (node_id, payload, parent_id, cause, frame, time, seq, depth,
                     _new_bytes(Digest, digest)),
                )
            )  # fmt: skip
        return nodes


def visible_leaf(runtime: Runtime, state: State, hidden: HiddenNodes) -> tuple[str | None, bool]:
    """The leaf as a reader sees it; True if it is not the stored one, which is hidden (healed)."""
    if state.manifest.leaf not in hidden:
        return state.manifest.leaf_id, False
    return heal_leaf(runtime, state, hidden), True


def open_nodes(
    runtime: Runtime,
    session: str,
    state: State,
    hidden: HiddenNodes,
    scope: Literal["path", "full"],
    leaf: str | None,
    *,
    payloads: bool = True,
) -> Nodes:
    """The nodes of a revision, all of them or those on the path to ``leaf``."""
    index = runtime.index(state.manifest)
    require_kept = partial(runtime.require_kept, session, state)
    positions: Sequence[int]
    if scope == FULL:
        positions = range(index.count)
    elif leaf is None:
        positions = ()
    else:
        positions = _path_to(runtime, index, session, state, leaf, hidden)
    path = scope == PATH
    if hidden:
        gone = hidden_positions(index, hidden)
        whole = len(positions)
        positions = [position for position in positions if position not in gone]
        path = path and len(positions) == whole
    dense = state.manifest.next_seq == index.count
    return Nodes(
        runtime,
        index,
        positions,
        path=path,
        dense=dense,
        payloads=payloads,
        require_kept=require_kept,
    )


def _path_to(
    runtime: Runtime,
    index: NodeIndex,
    session: str,
    state: State,
    leaf: str,
    hidden: HiddenNodes,
) -> Sequence[int]:
    digest = state.manifest.leaf
    position: int | None = None
    if leaf != state.manifest.leaf_id or digest is None:
        listed = index.find([leaf])[0]
        if listed is None:
            raise NodeNotFoundError(session, leaf)
        position, digest = listed
    if digest in hidden:
        raise NodeNotFoundError(session, leaf)
    if state.leaf is not None and state.leaf.header.id == leaf:
        # The stored leaf, whose header is cached.
        return index.path(state.leaf.position, state.leaf.header.depth)
    header = objects.read_headers(runtime.reader(), [digest])[0]
    if header.depth == index.count:
        # The graph has one branch, and this is its end.
        return range(index.count)
    if position is None:
        position = index.position_of(leaf, digest)
    return index.path(position, header.depth)


def no_nodes(runtime: Runtime) -> Nodes:
    """The nodes of a session in which nothing was committed yet."""
    index = empty_index(runtime.reader(), runtime.index_cache)
    return Nodes(
        runtime, index, (), path=True, dense=True, payloads=False, require_kept=lambda: None
    )


def hidden_positions(index: NodeIndex, hidden: HiddenNodes) -> frozenset[int]:
    """The positions of hidden nodes."""
    found = index.find(list(dict.fromkeys(hidden.values())))
    return frozenset(
        [listed.position for listed in found if listed is not None and listed.digest in hidden]
    )


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
    """The head of a session as callers see it; None if nothing was committed yet."""
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
    found = _head_and_state(runtime, session, at)
    if found is None:
        return None
    head, state = found
    # Nodes that the head hides are hidden in earlier revisions, too.
    hidden = runtime.hidden(head.head)
    seen, healed = (leaf, False) if leaf is not None else visible_leaf(runtime, state, hidden)
    nodes = open_nodes(runtime, session, state, hidden, scope, seen)
    reader = runtime.reader()
    return SessionState(
        head=head_of(session, state),
        checkpoint=checkpoint.read_checkpoint(reader, state.manifest, hydrate=hydrate),
        usage=read_usage(runtime, state),
        nodes=nodes,
        leaf=seen,
        healed=healed,
    )


def _check_scope(scope: str, leaf: str | None) -> None:
    if scope not in (PATH, FULL):
        raise InvalidInputError(f"scope must be {PATH!r} or {FULL!r}, got {scope!r}")
    if scope == FULL and leaf is not None:
        raise InvalidInputError(f"leaf={leaf!r:.60} needs scope {PATH!r}: {FULL!r} has every node")


def _head_and_state(runtime: Runtime, session: str, at: At) -> tuple[State, State] | None:
    """The head of a session, and its state at a revision; None if nothing was committed yet.

    SessionNotFoundError if there is no head and ``at`` asks for a revision.
    """
    head = runtime.find(session)
    if head is None:
        if at is not None:
            raise SessionNotFoundError(session)
        return None
    return head, head if at is None else runtime.earlier(session, head, at)


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
    found = _head_and_state(runtime, session, at)
    if found is None:
        if leaf is not None:
            raise NodeNotFoundError(session, leaf)
        return no_nodes(runtime)
    head, state = found
    hidden = runtime.hidden(head.head)
    seen = leaf if leaf is not None else visible_leaf(runtime, state, hidden)[0]
    return open_nodes(runtime, session, state, hidden, scope, seen, payloads=payloads)


def find_node(runtime: Runtime, session: str, node_id: str, at: At) -> Node | None:
    """One node by its id; None if the revision does not have it, or it is hidden."""
    keys.id_bytes(node_id, "node_id")
    found = _head_and_state(runtime, session, at)
    if found is None:
        return None
    head, state = found
    index = runtime.index(state.manifest)
    hidden = runtime.hidden(head.head)
    [possible] = index.candidates([id_hash(node_id)])
    for position in possible:
        listed = index.place(position)
        node = None if listed.digest in hidden else read_node(runtime, listed, node_id)
        if node is not None:
            return node
    return None


def read_node(runtime: Runtime, listed: NodePosition, node_id: str) -> Node | None:
    """Read the node at a position of the index; None if it has another id (hashes can collide)."""
    [fields] = objects.iter_fields(runtime.reader(), (listed.digest,))
    found_id, seq, depth, _, frame, time, parent_id, _, cause, payload = fields
    if found_id != node_id:
        return None
    return Node(
        id=node_id,
        payload=payload,
        parent=parent_id,
        cause=cause,
        frame=frame,
        time=time,
        seq=seq,
        depth=depth,
        digest=Digest.known(listed.digest),
    )


def load_usage(runtime: Runtime, session: str, at: At) -> tuple[Usage, ...]:
    """The ledger of a session alone."""
    found = _head_and_state(runtime, session, at)
    return () if found is None else read_usage(runtime, found[1])


def read_usage(runtime: Runtime, state: State) -> tuple[Usage, ...]:
    """The ledger of a state, without entries that have no tokens."""
    entries = checkpoint.read_usage(runtime.reader(), checkpoint.ledger_of(state.manifest))
    return tuple([entry for entry in entries if entry.total])


def check_wait(after: int, timeout_s: float | None) -> None:
    """InvalidInputError unless these are a revision and a number of seconds."""
    check_count(after, "after")
    if timeout_s is not None:
        check_seconds(timeout_s, "timeout_s")


def wait(runtime: Runtime, session: str, after: int, timeout_s: float | None) -> Head | None:
    """The head once its revision is above ``after``; None if ``timeout_s`` pass before."""
    check_wait(after, timeout_s)
    return until(runtime, Moved(runtime, session, after), timeout_s)


class Moved:
    """Finds a head above a revision: a ``Look`` (``waiting``)."""

    due_s: float | None = None

    def __init__(self, runtime: Runtime, session: str, after: int) -> None:
        self._runtime = runtime
        self._session = session
        self._after = after

    def __call__(self) -> Head | None:
        """The head; None if it is not above the revision."""
        head = read_again(lambda: find_head(self._runtime, self._session))
        return head if head is not None and head.revision > self._after else None
