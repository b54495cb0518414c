"""The nodes of a revision as a sequence: its length is known, its items are read in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, overload

from casstore.errors import CorruptionError, LimitError, NodeNotFoundError
from casstore.format.digest import Digest
from casstore.format.node import NodeHeader
from casstore.objects import graph as objects
from casstore.session import keys
from casstore.session.arguments import check_count
from casstore.session.data import Node
from casstore.session.lineage import Chain
from casstore.session.state import HiddenNodes, Runtime, State
from casstore.session.tombstones import heal_leaf

PATH: Final = "path"
FULL: Final = "full"
_BATCH: Final = 256
_new_tuple: Final = tuple.__new__
_new_bytes: Final = bytes.__new__


class Nodes(Sequence[Node]):
    """Nodes in order, root first. Slices are ``Nodes`` too and read nothing.

    >>> nodes = session.nodes()
    >>> len(nodes), nodes[-1].payload["text"], [node.id for node in nodes[:1]]
    (2, 'left', ['ask'])
    """

    def __init__(
        self,
        runtime: Runtime,
        chain: Chain,
        seqs: Sequence[int],
        *,
        path: bool,
        payloads: bool,
        require_kept: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._chain = chain
        # Raises if the revision has gone.
        self._require_kept = require_kept
        self._seqs = seqs
        # On a whole path each node's parent is the one before it.
        self._path = path
        self._payloads = payloads

    def __len__(self) -> int:
        return len(self._seqs)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: int | slice) -> Node | Nodes:
        if isinstance(at, slice):
            whole = self._path and (at.step is None or at.step == 1)
            return Nodes(
                self._runtime,
                self._chain,
                self._seqs[at],
                path=whole,
                payloads=self._payloads,
                require_kept=self._require_kept,
            )
        return self._read([self._seqs[at]])[0]

    def __iter__(self) -> Iterator[Node]:
        before: bytes | None = None
        for start in range(0, len(self._seqs), _BATCH):
            seqs = self._seqs[start : start + _BATCH]
            try:
                page = self._read(seqs, before)
            except LimitError:
                # Together they take more than one answer may; one by one they need not.
                for seq in seqs:
                    [node] = self._read([seq], before)
                    before = node.digest
                    yield node
                continue
            before = page[-1].digest
            yield from page

    def pages(self, size: int = _BATCH) -> Iterator[list[Node]]:
        """The nodes in lists of ``size``, each read when it is asked for.

        >>> [[node.id for node in page] for page in session.nodes().pages(size=1)]
        [['ask'], ['left']]
        """
        check_count(size, "the size of a page", least=1)
        return self._pages(size)

    def digests(self) -> Iterator[Digest]:
        """The digests alone, from the node table: no node is read, so nothing is proven.

        >>> list(session.nodes().digests()) == [node.digest for node in session.nodes()]
        True
        """
        try:
            for place in self._chain.places(self._seqs):
                yield Digest.known(place.digest)
        except CorruptionError:
            self._require_kept()
            raise

    def _pages(self, size: int) -> Iterator[list[Node]]:
        before: bytes | None = None
        for start in range(0, len(self._seqs), size):
            page = self._read(self._seqs[start : start + size], before)
            before = page[-1].digest
            yield page

    def _read(self, seqs: Sequence[int], before: bytes | None = None) -> list[Node]:
        try:
            return self._read_proven(seqs, before)
        except CorruptionError:
            # Collected while it was iterated over, it is not damaged; it is no longer there.
            self._require_kept()
            raise

    def _read_proven(self, seqs: Sequence[int], before: bytes | None) -> list[Node]:
        digests = self._chain.digests(seqs)
        reader = self._runtime.reader()
        found: Iterable[list[Any]]
        if self._payloads:
            found = objects.iter_fields(reader, digests)
        else:
            found = [[*one, None, None] for one in objects.read_headers(reader, digests)]
        nodes: list[Node] = []
        path = self._path
        for seq, digest, fields in zip(seqs, digests, found, strict=True):
            node_id, own, depth, _, frame, time, parent_id, parent, cause, payload = fields
            if own != seq or (path and before is not None and parent != before):
                raise CorruptionError(
                    f"the node table does not match node {digest.hex()}; check the store"
                )
            before = digest
            nodes.append(
                # As Node(…) and Digest.known do; spelled out because a path is long.
                _new_tuple(
                    Node,
                    (node_id, payload, parent_id, cause, frame, time, seq, depth,
                     _new_bytes(Digest, digest)),
                )
            )  # fmt: skip
        return nodes


def visible_leaf(runtime: Runtime, state: State, hidden: HiddenNodes) -> tuple[str | None, bool]:
    """The leaf as a reader sees it, and whether it had to be healed."""
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
    chain = runtime.chain(state)
    require_kept = partial(runtime.require_kept, session, state)
    seqs: Sequence[int]
    if scope == FULL:
        seqs = chain.seqs()
    elif leaf is None:
        seqs = ()
    else:
        seqs = _path_to(runtime, chain, session, state, leaf, hidden)
    path = scope == PATH
    if hidden:
        gone = hidden_seqs(chain, hidden)
        whole = len(seqs)
        seqs = [seq for seq in seqs if seq not in gone]
        path = path and len(seqs) == whole
    return Nodes(runtime, chain, seqs, path=path, payloads=payloads, require_kept=require_kept)


def _path_to(
    runtime: Runtime,
    chain: Chain,
    session: str,
    state: State,
    leaf: str,
    hidden: HiddenNodes,
) -> Sequence[int]:
    digest = state.manifest.leaf
    if leaf != state.manifest.leaf_id or digest is None:
        place = chain.find([keys.part(leaf, "a node id")])[0]
        if place is None:
            raise NodeNotFoundError(session, leaf)
        digest = place.digest
    if digest in hidden:
        raise NodeNotFoundError(session, leaf)
    header = state.leaf
    if header is None or header.id != leaf:
        header = objects.read_headers(runtime.reader(), [digest])[0]
    return path_seqs(chain, header)


def path_seqs(chain: Chain, leaf: NodeHeader) -> Sequence[int]:
    """The seqs from the root to a node."""
    if leaf.depth == leaf.seq + 1:
        # As many nodes as there are numbers: every node so far is on the path.
        return range(leaf.depth)
    return chain.path(leaf.seq)


def no_nodes(runtime: Runtime) -> Nodes:
    """The nodes of a session in which nothing was committed yet."""
    chain = Chain(runtime.engine, b"", None, 0)
    return Nodes(runtime, chain, (), path=True, payloads=False, require_kept=lambda: None)


def hidden_seqs(chain: Chain, hidden: HiddenNodes) -> frozenset[int]:
    """The numbers of hidden nodes."""
    places = chain.find([keys.part(node, "a node id") for node in set(hidden.values())])
    return frozenset(
        [place.seq for place in places if place is not None and place.digest in hidden]
    )
