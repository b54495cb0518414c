"""The node table of a session, made anew from its manifests and nodes.

The table is derived: which lineage a revision is on, and what that goes on from, follows
from which graph grew out of which. So nobody's word is taken for it. Revisions are added
from the oldest on; each either goes on from the one before, or from one that was seen, or
starts anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import PutRow
from casstore.errors import BundleLimitError, CorruptionError
from casstore.format.canonical import Link
from casstore.format.hashing import DIGEST_BYTES
from casstore.format.manifest import NOTHING, Manifest
from casstore.format.node import NodeHeader
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader
from casstore.session import keys
from casstore.session.heads import Base
from casstore.session.lineage import Page, new_lineage, put_base, put_pages, put_place
from casstore.session.prepared import first_row

# Stands where a number was given to a node that is not in this graph; no path leads there.
_FILLER: Final = bytes(DIGEST_BYTES)
_READ_BATCH: Final = 64
_ROWS_BATCH: Final = 2048


class Lineage:
    """A run of nodes with consecutive numbers from ``first`` on."""

    def __init__(self, below: View | None, base: Base | None, first: int) -> None:
        self.name = new_lineage()
        self.below = below
        self.base = base
        self.first = first
        self.digests: list[bytes] = []
        self.distances: list[int] = []
        self.seqs: dict[bytes, int] = {}
        self.parts: dict[bytes, int] = {}

    @property
    def stop(self) -> int:
        """The number behind the last node."""
        return self.first + len(self.digests)

    def append(self, digest: bytes, node_part: bytes, distance: int) -> None:
        """Take the next node."""
        self.seqs[digest] = self.stop
        self.parts[node_part] = self.stop
        self.digests.append(digest)
        self.distances.append(distance)

    def skip(self) -> None:
        """Leave the next number out."""
        self.digests.append(_FILLER)
        self.distances.append(0)


class View(NamedTuple):
    """The graph of one revision: a lineage up to a number, and all that it goes on from."""

    lineage: Lineage
    stop: int
    nodes: int
    #: The nodes that no other goes on from.
    ends: frozenset[bytes]
    #: For a graph whose table is stored already: what a lineage that goes on from it has as base.
    stored: tuple[Base | None] | None = None

    def successor(self) -> Base | None:
        """The base of a lineage that goes on from here."""
        if self.stored is not None:
            return self.stored[0]
        if self.stop > self.lineage.first:
            return Base(self.lineage.name, self.stop, None)
        return self.lineage.base

    def seq_of(self, digest: bytes) -> int | None:
        """The number of a node of this graph; None if it has no such node."""
        return self._find(lambda lineage: lineage.seqs.get(digest))

    def has_id(self, node_part: bytes) -> bool:
        """Has this graph a node of this id?"""
        return self._find(lambda lineage: lineage.parts.get(node_part)) is not None

    def _find(self, look: Callable[[Lineage], int | None]) -> int | None:
        view: View | None = self
        while view is not None:
            seq = look(view.lineage)
            if seq is not None and seq < view.stop:
                return seq
            view = view.lineage.below
        return None


class NodeTable:
    """Lineages for the revisions of one session.

    ``max_steps`` bounds how many nodes are looked at: revisions that have nothing to do
    with each other may each have all of a file's nodes in their graphs (P7).
    """

    def __init__(self, reader: PieceReader, *, max_steps: int) -> None:
        self._reader = reader
        self._steps_left = max_steps
        self._views: dict[bytes, View] = {}
        self._last: View | None = None
        self._lineages: list[Lineage] = []

    def go_on_from(
        self, digest: bytes, manifest: Manifest, places: Mapping[bytes, int], base: Base | None
    ) -> None:
        """Begin with a graph whose table is stored: its nodes by number, and its successor."""
        lineage = Lineage(None, None, 0)
        headers = self._headers(list(places))
        for (name, seq), header in zip(places.items(), headers, strict=True):
            lineage.seqs[name] = seq
            lineage.parts[keys.part(header.id, "a node id")] = seq
        parents = {header.parent for header in headers}
        ends = frozenset(name for name in places if name not in parents)
        self._last = View(lineage, manifest.next_seq, manifest.nodes, ends, (base,))
        self._views[digest] = self._last

    def add(self, digest: bytes, manifest: Manifest) -> View:
        """The graph of the next revision; CorruptionError if its nodes do not make one."""
        view = self._views.get(digest)
        if view is None:
            view = self._views[digest] = self._grow(digest, manifest)
        self._last = view
        return view

    @staticmethod
    def places(views: Sequence[View]) -> Iterator[tuple[bytes, Base | None]]:
        """The lineages of revisions, oldest first, the last of them the head: names and bases.

        The last revision on a lineage has all of its nodes, as everybody takes for granted. One
        that went back has a lineage of its own, as ``rewind`` gives it. So has a head that
        commits could not go on with.
        """
        reached: dict[bytes, int] = {}
        for at, view in enumerate(views):
            own = view.lineage
            is_head = at == len(views) - 1
            needed = own.stop if is_head else reached.get(own.name, 0)
            if view.stored is not None or view.stop < needed:
                yield new_lineage(), view.successor()
            else:
                reached[own.name] = view.stop
                yield own.name, own.base

    # --- graphs out of graphs ---------------------------------------------------------------

    def _grow(self, digest: bytes, manifest: Manifest) -> View:
        ends = self._ends(digest, manifest)
        before = self._last
        if before is not None:
            fresh = self._collect(digest, ends, before)
            seqs = sorted([header.seq for header in fresh.values()])
            left = before.ends - {header.parent for header in fresh.values()}
            if seqs == list(range(before.stop, manifest.next_seq)) and left <= set(ends):
                return self._continue(digest, manifest, ends, before, fresh)
        return self._start(digest, manifest, ends, self._collect(digest, ends, None))

    def _ends(self, digest: bytes, manifest: Manifest) -> dict[bytes, str]:
        """The nodes that a manifest names, and the ids that it gives them."""
        ends: dict[bytes, str] = {}
        if manifest.tips.data != NOTHING.data:
            tips = objects.load_spelled(self._reader, [manifest.tips])[0]
            if type(tips) is not dict:
                raise CorruptionError(f"manifest {digest.hex()} has tips that are no map")
            for node_id, link in tips.items():
                if type(link) is not Link:
                    raise CorruptionError(f"manifest {digest.hex()} has a tip that is no link")
                ends[bytes(link.digest)] = node_id
        leaf, leaf_id = manifest.leaf, manifest.leaf_id
        if leaf is not None and leaf_id is not None and ends.setdefault(leaf, leaf_id) != leaf_id:
            raise CorruptionError(f"manifest {digest.hex()} gives one node two ids")
        return ends

    def _collect(
        self, digest: bytes, ends: dict[bytes, str], before: View | None
    ) -> dict[bytes, NodeHeader]:
        """The nodes reached from ``ends`` that the graph before has not."""
        fresh: dict[bytes, NodeHeader] = {}
        ahead = list(ends)
        while ahead:
            batch = [
                name
                for name in dict.fromkeys(ahead[-_READ_BATCH:])
                if name not in fresh and (before is None or before.seq_of(name) is None)
            ]
            del ahead[-_READ_BATCH:]
            for name, header in zip(batch, self._headers(batch), strict=True):
                if ends.get(name, header.id) != header.id:
                    raise CorruptionError(f"manifest {digest.hex()} calls a node by another id")
                fresh[name] = header
                if header.parent is not None:
                    ahead.append(header.parent)
        return fresh

    def _headers(self, names: list[bytes]) -> list[NodeHeader]:
        self._steps_left -= len(names)
        if self._steps_left < 0:
            raise BundleLimitError("the revisions of a session share too little to be followed")
        headers: list[NodeHeader] = []
        for start in range(0, len(names), _READ_BATCH):
            headers += objects.read_headers(self._reader, names[start : start + _READ_BATCH])
        return headers

    def _continue(
        self,
        digest: bytes,
        manifest: Manifest,
        ends: dict[bytes, str],
        before: View,
        fresh: dict[bytes, NodeHeader],
    ) -> View:
        lineage = before.lineage
        if fresh and (before.stored is not None or lineage.stop != before.stop):
            # It has gone on another way since; this way needs a lineage of its own.
            lineage = Lineage(before, before.successor(), before.stop)
            self._lineages.append(lineage)
        for name, header in sorted(fresh.items(), key=lambda item: item[1].seq):
            node_part = keys.part(header.id, "a node id")
            if before.has_id(node_part) or node_part in lineage.parts:
                raise CorruptionError(f"manifest {digest.hex()} has two nodes {header.id!r}")
            above = None
            if header.parent is not None:
                known = fresh.get(header.parent)
                above = before.seq_of(header.parent) if known is None else known.seq
            lineage.append(name, node_part, 0 if above is None else header.seq - above)
        parents = {header.parent for header in fresh.values()}
        true_ends = (before.ends - parents) | {name for name in fresh if name not in parents}
        nodes = before.nodes + len(fresh)
        self._require(digest, manifest, nodes, true_ends <= set(ends))
        stored = before.stored if not fresh else None
        return View(lineage, manifest.next_seq, nodes, frozenset(true_ends), stored)

    def _start(
        self,
        digest: bytes,
        manifest: Manifest,
        ends: dict[bytes, str],
        nodes: dict[bytes, NodeHeader],
    ) -> View:
        ordered = sorted(nodes.items(), key=lambda item: item[1].seq)
        seqs = [header.seq for _, header in ordered]
        parents = {header.parent for header in nodes.values()}
        true_ends = frozenset(name for name in nodes if name not in parents)
        dense = seqs[-1] + 1 == manifest.next_seq if seqs else manifest.next_seq == 0
        distinct = len(set(seqs)) == len(seqs)
        self._require(digest, manifest, len(nodes), dense and distinct and true_ends <= set(ends))
        self._require_few_gaps(digest, seqs)
        lineage = self._new(None, None, 0)
        path_end = _end_of_gaps(seqs)
        seen: set[bytes] = set()
        for at, (name, header) in enumerate(ordered):
            node_part = keys.part(header.id, "a node id")
            if node_part in seen:
                raise CorruptionError(f"manifest {digest.hex()} has two nodes {header.id!r}")
            seen.add(node_part)
            while lineage.stop < header.seq:
                lineage.skip()
            distance = 0 if header.parent is None else header.seq - nodes[header.parent].seq
            lineage.append(name, node_part, distance)
            if header.seq == path_end:
                # Numbers are missing below: it was forked off one path of a larger graph.
                if header.depth != at + 1:
                    raise CorruptionError(f"manifest {digest.hex()} lacks nodes of its graph")
                base = Base(lineage.name, header.seq + 1, header.seq)
                below = View(lineage, header.seq + 1, at + 1, frozenset((name,)))
                lineage = self._new(below, base, header.seq + 1)
        return View(lineage, manifest.next_seq, len(nodes), true_ends)

    def _new(self, below: View | None, base: Base | None, first: int) -> Lineage:
        lineage = Lineage(below, base, first)
        self._lineages.append(lineage)
        return lineage

    def _require_few_gaps(self, digest: bytes, seqs: list[int]) -> None:
        """A number is worth a place in the table: no graph may ask for more than it has steps."""
        self._steps_left -= (seqs[-1] + 1 if seqs else 0) - len(seqs)
        if self._steps_left < 0:
            raise BundleLimitError(f"manifest {digest.hex()} leaves out too many nodes")

    @staticmethod
    def _require(digest: bytes, manifest: Manifest, nodes: int, sound: bool) -> None:
        if not sound or manifest.nodes != nodes:
            raise CorruptionError(
                f"manifest {digest.hex()} has {nodes} nodes that can be reached, and claims "
                f"{manifest.nodes}, numbered below {manifest.next_seq}"
            )

    # --- rows ---------------------------------------------------------------------------------

    def first_rows(self) -> list[bytes]:
        """The keys of the first rows of its lineages."""
        return [
            first_row(lineage.name, has_base=lineage.base is not None)
            for lineage in self._lineages
            if lineage.digests
        ]

    def rows(self) -> Iterator[PutRow]:
        """The node table, of each lineage the first row first."""
        for lineage in self._lineages:
            if lineage.digests:
                yield from _rows_of(lineage)


def _end_of_gaps(seqs: list[int]) -> int | None:
    """The first number that is there behind the last one that is missing."""
    for at in range(len(seqs) - 1, -1, -1):
        if seqs[at] != (seqs[at - 1] + 1 if at else 0):
            return seqs[at]
    return None


def _rows_of(lineage: Lineage) -> Iterator[PutRow]:
    if lineage.base is not None:
        yield put_base(lineage.name, lineage.base)
    page: Page | None = None
    for start in range(0, len(lineage.digests), _ROWS_BATCH):
        stop = start + _ROWS_BATCH
        added = Page(
            lineage.first + start,
            lineage.distances[start:stop],
            b"".join(lineage.digests[start:stop]),
        )
        rows, page = put_pages(lineage.name, page, added)
        yield from rows
    for node_part, seq in lineage.parts.items():
        yield put_place(lineage.name, node_part, seq)
