"""A graph without its hidden nodes: lineages mirrored, nodes written anew.

A node names its parent by digest, and its place in insertion order. So all that comes
after a hidden node is written anew: with the nearest visible ancestor as its parent,
counted without what is hidden. What comes before stays as it is, and is shared.

Each lineage is mirrored once, however many revisions stand on it: they were prefixes of
it and are prefixes of its mirror. A mirror goes on from

    the old lineage, below the first hidden node      if that is in the lineage itself, and
                                                      the chain is not long already
    the mirror of what the old one goes on from       if that has hidden nodes

A base with a path counts as a lineage of its own, made of the nodes on the path. Mirrors
are new names that no row knows yet: until a head row names one, nobody sees any of it,
and lineages that belong to other sessions stay as they are.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import PutRow, RowKey, StoredObject, Write
from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES, Kind
from casstore.format.node import NodeHeader, cut_node, encode_node, open_node
from casstore.objects import graph as objects
from casstore.objects.pieces import PendingReader, PieceWriter
from casstore.session import keys, lineage, prepared
from casstore.session.heads import Base
from casstore.session.lineage import Chain, Page, Place
from casstore.session.picking import find_first_user
from casstore.session.state import HiddenNodes, Runtime

# How many nodes are read at once, and how much is written at once at the most.
_READ_BATCH: Final = 256
_WRITE_NODES: Final = 1024
_WRITE_BYTES: Final = 4 << 20
_FIND_BATCH: Final = 1024
# With more lineages than this to look into, a mirror takes the place of its lineage and lists
# the nodes before the first hidden one again, instead of going on from it.
_MANY_LINEAGES: Final = 4
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
#: The seq of the ancestor of a node that has none, and the parent of a root.
NONE: Final = -1


class Mirrored(NamedTuple):
    """Where a node of the old graph is in the new one.

    For a hidden one, where its nearest visible ancestor is; ``seq`` is NONE if it has none.
    """

    seq: int
    depth: int
    users: int
    digest: bytes
    #: The first message of the user on the path to it.
    first_user: bytes | None
    #: What the old node itself counted.
    old_users: int


class Mirrors:
    """The mirrors that one session needs to be rid of its hidden nodes."""

    def __init__(self, runtime: Runtime, hidden: HiddenNodes) -> None:
        self.runtime = runtime
        self.hidden = hidden
        self.nodes_written = 0
        self._lines: dict[bytes, Line] = {}
        self._paths: dict[Base, Path] = {}
        self._copies: list[_Copy] = []
        self._hidden_parts = [
            (digest, keys.part(node, "a node id")) for digest, node in hidden.items()
        ]
        self._writer = PieceWriter()
        self._rows: list[PutRow] = []
        self._unchanged: dict[bytes, Mirrored] = {}

    def line(self, name: bytes, base: Base | None) -> Line:
        """The mirror of a lineage, and of all that it goes on from."""
        waiting: dict[bytes, Base | None] = {}
        step = name
        while step not in self._lines:
            if step in waiting:
                raise CorruptionError(f"lineage {step.hex()} goes on from itself")
            waiting[step] = base
            if base is None or base.path is not None:
                break
            step, base = base.lineage, self.base_of(base.lineage)
        for older in reversed(waiting):
            base = waiting[older]
            self._lines[older] = Line(self, older, base, self._below(base))
        return self._lines[name]

    def base_of(self, name: bytes) -> Base | None:
        """What a lineage goes on from that others go on from."""
        row = self.runtime.engine.get_rows([RowKey("nodes", keys.lineage_row(name))])[0]
        return None if row is None else lineage.decode_base(row)

    def _below(self, base: Base | None) -> Part | None:
        if base is None:
            return None
        if base.path is None:
            line = self._lines[base.lineage]
            line.extend(base.limit)
            return Part(line, base.limit)
        path = self._paths.get(base)
        if path is None:
            path = self._paths[base] = Path(self, base, base.path)
        return Part(path, base.limit)

    def hidden_in(self, name: bytes) -> list[int]:
        """The seqs of hidden nodes that a lineage itself holds."""
        seqs: list[int] = []
        for start in range(0, len(self._hidden_parts), _FIND_BATCH):
            batch = self._hidden_parts[start : start + _FIND_BATCH]
            wanted = [RowKey("nodes", keys.lineage_node(name, part)) for _, part in batch]
            rows = self.runtime.engine.get_rows(wanted)
            named = [
                (lineage.read_seq(row), digest)
                for (digest, _), row in zip(batch, rows, strict=True)
                if row is not None
            ]
            listed = lineage.read_digests(self.runtime.engine, name, [seq for seq, _ in named])
            for (seq, digest), own in zip(named, listed, strict=True):
                if own == digest:
                    seqs.append(seq)
        return sorted(seqs)

    def unchanged(self, chain: Chain, place: Place) -> Mirrored:
        """A node that stays as it is."""
        known = self._unchanged.get(place.digest)
        if known is None:
            [header] = self.headers([place.digest])
            _require(place, header)
            first = find_first_user(self.runtime, chain, header)
            known = self._unchanged[place.digest] = Mirrored(
                header.seq, header.depth, header.users, place.digest, first, header.users
            )
        return known

    def headers(self, digests: Sequence[bytes]) -> list[NodeHeader]:
        """Headers of nodes, old ones and those that wait to be written."""
        reader = PendingReader(self.runtime.engine, self._writer)
        return objects.read_headers(reader, digests)

    # --- writing ------------------------------------------------------------------------

    def copy(self, base: Base | None) -> _Copy:
        """A new lineage that goes on from another one's nodes."""
        made = _Copy(self, base)
        self._copies.append(made)
        return made

    def first_rows(self) -> list[bytes]:
        """The first rows of all lineages that were written."""
        return [
            prepared.first_row(one.lineage, has_base=one.base is not None)
            for one in self._copies
            if one.count
        ]

    def put(self, kind: int, data: bytes, links: list[bytes]) -> bytes:
        """Take an object to be written."""
        return self._writer.emit(kind, data, links)

    def put_rows(self, rows: list[PutRow]) -> None:
        """Take rows of the node table to be written, with what was taken before."""
        self._rows += rows
        if len(self._rows) >= _WRITE_NODES or self._writer.size_bytes >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was taken so far. No row that counts knows of it yet."""
        if self._rows or self._writer.objects:
            self.runtime.engine.write(Write(self._writer.objects, rows=self._rows))
        self._writer = PieceWriter()
        self._rows = []


class _Item(NamedTuple):
    """An old node on its way into a mirror."""

    place: Place
    #: The seq and digest of its parent; None: a root.
    parent: Place | None


class _Copy:
    """A new lineage that holds old nodes written anew, in order, without the hidden ones."""

    def __init__(self, mirrors: Mirrors, base: Base | None) -> None:
        self.lineage = lineage.new_lineage()
        self.base = base
        #: How many nodes it holds.
        self.count = 0
        self._mirrors = mirrors
        self._page: Page | None = None
        # For each old node, hidden or not: what ``Mirrored`` says.
        self._seqs = array("q")
        self._depths = array("q")
        self._users = array("q")
        self._old_users = array("q")
        self._digests = bytearray()
        self._first_users: list[bytes | None] = []

    @property
    def first(self) -> int:
        """The seq of its first node."""
        return lineage.first_own(self.base)

    def __len__(self) -> int:
        return len(self._seqs)

    def node(self, at: int) -> Mirrored:
        """What became of the old node that was taken at this place."""
        return Mirrored(
            self._seqs[at],
            self._depths[at],
            self._users[at],
            bytes(self._digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]),
            self._first_users[at],
            self._old_users[at],
        )

    def add(self, items: Sequence[_Item], node: Callable[[int], Mirrored]) -> None:
        """Take more old nodes; ``node`` knows what became of those before them."""
        mirrors = self._mirrors
        reader = mirrors.runtime.reader()
        first = self.first + self.count
        rows: list[PutRow] = []
        distances: list[int] = []
        digests: list[bytes] = []
        if not self.count and self.base is not None:
            rows.append(lineage.put_base(self.lineage, self.base))
        stored = reader.follow([item.place.digest for item in items])
        for item, found in zip(items, stored, strict=True):
            above = None if item.parent is None else node(item.parent.seq)
            header, digest = self._take(item, found, above)
            if header is not None:
                part = keys.part(header.id, "a node id")
                rows.append(lineage.put_place(self.lineage, part, header.seq))
                distances.append(
                    0 if header.parent is None or above is None else header.seq - above.seq
                )
                digests.append(digest)
        if digests:
            added = Page(first, distances, b"".join(digests))
            pages, self._page = lineage.put_pages(self.lineage, self._page, added)
            mirrors.put_rows(rows + pages)

    def _take(
        self, item: _Item, found: StoredObject, above: Mirrored | None
    ) -> tuple[NodeHeader | None, bytes]:
        """Write one node anew; no header if it is hidden."""
        if found.kind != Kind.NODE:
            raise CorruptionError(f"{item.place.digest.hex()} stands for a node, but is none")
        old = open_node(item.place.digest, found.data)[0].header
        _require(item.place, old)
        if old.parent != (None if item.parent is None else item.parent.digest):
            raise _mismatch(item.place)
        parent = None if above is None or above.seq == NONE else above
        if item.place.digest in self._mirrors.hidden:
            self._note(parent or Mirrored(NONE, 0, 0, _NO_DIGEST, None, 0), old.users)
            return None, b""
        is_user = old.users - (0 if above is None else above.old_users)
        parent_id = old.parent_id
        if parent is None:
            parent = Mirrored(NONE, 0, 0, _NO_DIGEST, None, 0)
            parent_id = None
        elif old.parent in self._mirrors.hidden:
            parent_id = self._mirrors.headers([parent.digest])[0].id
        header = NodeHeader(
            old.id,
            self.first + self.count,
            parent.depth + 1,
            parent.users + is_user,
            old.frame,
            old.time,
            parent_id,
            None if parent_id is None else parent.digest,
        )
        digest = self._mirrors.put(Kind.NODE, *encode_node(header, *cut_node(found.data)))
        self._mirrors.nodes_written += digest != item.place.digest
        first_user = parent.first_user or (digest if is_user else None)
        self._note(
            Mirrored(header.seq, header.depth, header.users, digest, first_user, 0), old.users
        )
        self.count += 1
        return header, digest

    def _note(self, became: Mirrored, old_users: int) -> None:
        self._seqs.append(became.seq)
        self._depths.append(became.depth)
        self._users.append(became.users)
        self._old_users.append(old_users)
        self._digests += became.digest
        self._first_users.append(became.first_user)


class Path:
    """The nodes on a path through other lineages, and their mirror."""

    depth: Final = 1

    def __init__(self, mirrors: Mirrors, base: Base, end: int) -> None:
        self._mirrors = mirrors
        self._base = base
        self._chain = chain = Chain(
            mirrors.runtime.engine, base.lineage, mirrors.base_of(base.lineage), base.limit
        )
        self._seqs = seqs = chain.path(end)
        places = list(chain.places(seqs))
        gone = [at for at, place in enumerate(places) if place.digest in mirrors.hidden]
        self._gone = frozenset([seqs[at] for at in gone])
        #: The lowest seq of a hidden node; None: there is none.
        self.first_hidden = seqs[gone[0]] if gone else None
        self._start = gone[0] if gone else len(seqs)
        self._copy: _Copy | None = None
        if not gone:
            return
        shared: Base | None = None
        if self._start:
            last = seqs[self._start - 1]
            owner = next(one for one in chain.segments if one.start <= last < one.stop)
            # If the path has as many nodes as there are numbers, it is everything below.
            shared = Base(owner.lineage, last + 1, None if last == self._start - 1 else last)
        self._copy = mirrors.copy(shared)
        for start in range(self._start, len(seqs), _READ_BATCH):
            items = [
                _Item(places[at], places[at - 1] if at else None)
                for at in range(start, min(start + _READ_BATCH, len(seqs)))
            ]
            self._copy.add(items, self.node)

    def _at(self, seq: int) -> int:
        at = bisect_left(self._seqs, seq)
        if at == len(self._seqs) or self._seqs[at] != seq:
            raise CorruptionError(f"node number {seq} is not on the path that its graph goes on")
        return at

    def hidden_below(self, stop: int) -> int:
        """How many hidden nodes there are below ``stop``."""
        return sum([seq < stop for seq in self._gone])

    def node(self, seq: int) -> Mirrored:
        """Where an old node is in the new graph."""
        at = self._at(seq)
        if self._copy is None or at < self._start:
            return self._mirrors.unchanged(self._chain, self._chain.place(seq))
        return self._copy.node(at - self._start)

    def visible(self, seq: int) -> int:
        """The old seq of this node if it is visible, else of its nearest visible ancestor."""
        at = self._at(seq)
        while at >= 0 and self._seqs[at] in self._gone:
            at -= 1
        return self._seqs[at] if at >= 0 else NONE

    def has_child(self, seq: int, stop: int) -> bool:
        """Has a visible node a child in the new graph, among the nodes below ``stop``?"""
        later = self._seqs[self._at(seq) + 1 :]
        return any(child not in self._gone and child < stop for child in later)

    def base(self, limit: int) -> Base | None:
        """What a lineage goes on from to see all nodes below ``limit``."""
        copy = self._copy
        if copy is None:
            return self._base
        stop = copy.first + len(copy) - len(self._gone)
        return Base(copy.lineage, stop, None) if stop > copy.first else copy.base


class Part(NamedTuple):
    """What a lineage goes on from: the nodes of another one, or of a path, below a limit."""

    source: Line | Path
    limit: int


class Line:
    """A lineage and its mirror."""

    def __init__(
        self, mirrors: Mirrors, name: bytes, base: Base | None, below: Part | None
    ) -> None:
        self.lineage = name
        self.old_base = base
        self.below = below
        #: The seq from which on it holds nodes itself.
        self.first = lineage.first_own(base)
        #: The lowest seq of a hidden node; None: there is none.
        self.first_hidden: int | None = None
        #: How many lineages it takes, itself included; a path counts as one.
        self.depth: int = 1 if below is None else below.source.depth + 1
        self._mirrors = mirrors
        self._stop = self.first
        self._hidden = mirrors.hidden_in(name)
        self._hidden_set = frozenset(self._hidden)
        self._hidden_older = 0
        self._made_chain: Chain | None = None
        self._copy: _Copy | None = None
        # From which old seq on nodes are written anew.
        self._start = self.first
        self._first_children: dict[int, int] = {}
        self._children_until = self.first
        if below is not None:
            self._hidden_older = below.source.hidden_below(below.limit)
        if below is not None and self._hidden_older:
            self.first_hidden = below.source.first_hidden
            self._copy = mirrors.copy(below.source.base(below.limit))
        elif self._hidden:
            self.first_hidden = self._hidden[0]
            shared = base
            if self.first_hidden > self.first and self.depth < _MANY_LINEAGES:
                self._start = self.first_hidden
                shared = Base(name, self._start, None)
            self._copy = mirrors.copy(shared)

    def extend(self, stop: int) -> None:
        """Mirror it up to here, from where it was left off."""
        if stop <= self._stop:
            return
        self._stop = stop
        self._made_chain = None
        copy = self._copy
        if copy is None:
            return
        for start in range(self._start + len(copy), stop, _READ_BATCH):
            copy.add(list(self._items(start, min(start + _READ_BATCH, stop))), self.node)

    @property
    def _chain(self) -> Chain:
        if self._made_chain is None:
            engine = self._mirrors.runtime.engine
            self._made_chain = Chain(engine, self.lineage, self.old_base, self._stop)
        return self._made_chain

    def _items(self, start: int, stop: int) -> Iterator[_Item]:
        for place in self._chain.places(range(start, stop)):
            parent = self._parent(place.seq)
            yield _Item(place, None if parent == NONE else self._chain.place(parent))

    def _parent(self, seq: int) -> int:
        page = self._chain.page(seq)
        distance = page.distances[seq - page.first]
        if not 0 <= distance <= seq:
            raise CorruptionError(f"the node table gives node number {seq} no parent")
        return seq - distance if distance else NONE

    # --- revisions ----------------------------------------------------------------------

    def is_changed(self, stop: int) -> bool:
        """Has the graph of the nodes below ``stop`` a hidden node?"""
        return self.first_hidden is not None and self.first_hidden < stop

    def target(self, stop: int) -> tuple[bytes, Base | None]:
        """The lineage, and its base, of a revision that has the nodes below ``stop``."""
        if self._copy is None or not self.is_changed(stop):
            return self.lineage, self.old_base
        return self._copy.lineage, self._copy.base

    def new_seq(self, stop: int) -> int:
        """The place in insertion order that follows the nodes below ``stop``."""
        if self._copy is None or not self.is_changed(stop):
            return stop
        gone = self.hidden_below(stop) - self.hidden_below(self._start)
        return self._copy.first + stop - self._start - gone

    def base(self, limit: int) -> Base | None:
        """What a lineage goes on from to see all nodes below ``limit``."""
        name, older = self.target(limit)
        stop = self.new_seq(limit)
        # Otherwise nothing is left of the lineage itself: it may not even be stored.
        return Base(name, stop, None) if stop > lineage.first_own(older) else older

    # --- nodes, by their old seqs -----------------------------------------------------------

    def hidden_below(self, stop: int) -> int:
        """How many hidden nodes there are below ``stop``, which is not below its first."""
        return self._hidden_older + bisect_left(self._hidden, stop)

    def hidden_ids(self, start: int, stop: int) -> dict[int, str]:
        """The hidden nodes with ``start <= seq < stop`` that no path holds: seqs and ids."""
        found: dict[int, str] = {}
        holder: Line | Path = self
        while isinstance(holder, Line):
            own = holder._hidden
            for seq in own[bisect_left(own, start) : bisect_left(own, stop)]:
                found[seq] = self._mirrors.hidden[holder._chain.place(seq).digest]
            if holder.below is None or start >= holder.first:
                break
            holder, limit = holder.below
            stop = min(stop, limit)
        return found

    def _holder(self, seq: int) -> Line | Path:
        """What holds this node: the lineage itself or one that it goes on from."""
        holder: Line | Path = self
        while isinstance(holder, Line) and seq < holder.first and holder.below is not None:
            holder = holder.below.source
        return holder

    def node(self, seq: int) -> Mirrored:
        """Where an old node is in the new graph."""
        holder = self._holder(seq)
        return holder.node(seq) if isinstance(holder, Path) else holder._own(seq)

    def _own(self, seq: int) -> Mirrored:
        if self._copy is None or seq < self._start:
            return self._mirrors.unchanged(self._chain, self._chain.place(seq))
        return self._copy.node(seq - self._start)

    def visible(self, seq: int) -> int:
        """The old seq of this node if it is visible, else of its nearest visible ancestor."""
        while seq != NONE:
            holder = self._holder(seq)
            if isinstance(holder, Path):
                return holder.visible(seq)
            if seq not in holder._hidden_set:
                break
            seq = holder._parent(seq)
        return seq

    def has_child(self, seq: int, stop: int) -> bool:
        """Has a visible node a child in the new graph, among the nodes below ``stop``?"""
        holder: Line | Path = self
        while isinstance(holder, Line):
            first = holder._first_child(seq)
            if first is not None and first < stop:
                return True
            if holder.below is None or seq >= holder.first:
                return False
            holder, stop = holder.below
        return holder.has_child(seq, stop)

    def _first_child(self, seq: int) -> int | None:
        """The first visible node of its own that is a child of another in the new graph."""
        for child in range(self._children_until, self._stop):
            if child not in self._hidden_set:
                self._first_children.setdefault(self.visible(self._parent(child)), child)
        self._children_until = self._stop
        return self._first_children.get(seq)


def _require(place: Place, header: NodeHeader) -> None:
    if header.seq != place.seq:
        raise _mismatch(place)


def _mismatch(place: Place) -> CorruptionError:
    return CorruptionError(
        f"the node table does not match node {place.digest.hex()}; check the store"
    )
