"""The nodes of a revision as a sequence: its length is known, its items are read in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, overload

from casstore.errors import CorruptionError, LimitError, NodeNotFoundError
from casstore.format.digest import Digest
from casstore.objects import graph as objects
from casstore.objects.node_index import NodeIndex, empty_index
from casstore.session.arguments import check_count
from casstore.session.data import Node
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
        # Raises if the revision was deleted.
        self._require_kept = require_kept
        self._positions = positions
        # On a whole path each node's parent is the one before it.
        self._path = path
        # True if seq numbers have no gaps. A fork of one path may have gaps.
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
        before: bytes | None = None
        for start in range(0, len(self._positions), _BATCH):
            positions = self._positions[start : start + _BATCH]
            try:
                page = self._read(positions, before)
            except LimitError:
                # The batch exceeds the size limit of one read; single nodes may not.
                for position in positions:
                    [node] = self._read([position], before)
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
        check_count(size, "size", least=1)
        return self._pages(size)

    def digests(self) -> Iterator[Digest]:
        """The digests alone, from the node index: no node is read.

        >>> list(session.nodes().digests()) == [node.digest for node in session.nodes()]
        True
        """
        try:
            for place in self._index.places(self._positions):
                yield Digest.known(place.digest)
        except CorruptionError:
            self._require_kept()
            raise

    def _pages(self, size: int) -> Iterator[list[Node]]:
        before: bytes | None = None
        for start in range(0, len(self._positions), size):
            rest = start + size < len(self._positions)
            page = self._read(self._positions[start : start + size], before, ahead=rest)
            before = page[-1].digest
            yield page

    def _read(
        self, positions: Sequence[int], before: bytes | None = None, *, ahead: bool = False
    ) -> list[Node]:
        try:
            return self._read_proven(positions, before, ahead=ahead)
        except CorruptionError:
            # If the revision was removed during the iteration, gc may have collected its objects:
            # report the removal instead of damage.
            self._require_kept()
            raise

    def _read_proven(
        self, positions: Sequence[int], before: bytes | None, *, ahead: bool
    ) -> list[Node]:
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
        place = index.find([leaf])[0]
        if place is None:
            raise NodeNotFoundError(session, leaf)
        position, digest = place
    if digest in hidden:
        raise NodeNotFoundError(session, leaf)
    known = state.leaf
    if known is not None and known.header.id == leaf:
        return index.path(known.position, known.header.depth)
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
    places = index.find(list(dict.fromkeys(hidden.values())))
    return frozenset(
        [place.position for place in places if place is not None and place.digest in hidden]
    )
