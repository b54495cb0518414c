"""Which nodes a session has, by insertion order and by id: a table derived from manifests.

A lineage is a run of appends. Forking, rewinding and replacing start a new one that goes
on from another's nodes below a limit, so that no fork copies a row; a node's place is
looked for in the session's own lineage first and then in those it goes on from.

    lineage ‖ 0          → the base: [lineage, limit, path]
    lineage ‖ 1 ‖ page   → 32 nodes in order: [first seq, distances to parents, digests]
    lineage ‖ 2 ‖ id     → seq

A node's digest stands in its page alone, found by seq. Nothing here is trusted: a node read
through it must have the seq, and the parent, that the table says.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.protocol import Engine, PutRow, RowKey
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import pack_checked, unpack_checked, unpack_trusted
from casstore.format.hashing import DIGEST_BYTES
from casstore.session import keys
from casstore.session.heads import LINEAGE_BYTES, Base, HeadRow

PAGE_NODES: Final = 32
# How many pages one request reads when it walks.
_PAGES_AHEAD: Final = 64
_MAX_SEQ_BYTES: Final = 8
# The types of distances: there is one at least.
_NUMBERS: Final = {int}


class Place(NamedTuple):
    """Where a node stands in insertion order, and its name."""

    seq: int
    digest: bytes


class Page(NamedTuple):
    """Consecutive nodes of one lineage."""

    first: int
    #: How far back in insertion order the parent is; 0: there is none.
    distances: list[int]
    digests: bytes

    @property
    def stop(self) -> int:
        """The seq behind the last node."""
        return self.first + len(self.distances)

    def below(self, limit: int) -> Page:
        """The part of the page that is not above ``limit``: the lineage may have gone on."""
        if self.stop <= limit:
            return self
        kept = max(0, limit - self.first)
        return Page(self.first, self.distances[:kept], self.digests[: kept * DIGEST_BYTES])

    def digest(self, seq: int) -> bytes:
        """The digest of a node of this page."""
        at = (seq - self.first) * DIGEST_BYTES
        return self.digests[at : at + DIGEST_BYTES]


class Segment(NamedTuple):
    """The part of a graph that one lineage holds: seqs from ``start`` to below ``stop``.

    With ``path``, only nodes on the path that ends in the node with this seq count, here
    and in all segments below.
    """

    lineage: bytes
    start: int
    stop: int
    path: int | None


def new_lineage() -> bytes:
    """A name for a lineage that nobody else will give."""
    return secrets.token_bytes(LINEAGE_BYTES)


def first_own(base: Base | None) -> int:
    """The seq from which on a lineage holds nodes itself."""
    return 0 if base is None else base.limit


def successor(row: HeadRow, next_seq: int) -> Base | None:
    """The base of a lineage that goes on from a whole revision."""
    if next_seq > first_own(row.base):
        return Base(row.lineage, next_seq, None)
    return row.base  # nothing was appended to its own lineage, which may not even be stored


def encode_page(page: Page) -> bytes:
    """Spell a page."""
    return pack_checked(page)


def decode_page(data: bytes, *, spelling: bool = True) -> Page:
    """Read a page of the node table; CorruptionError if it is none.

    Whoever reads a node through it, and compares the two, may leave out the ``spelling``.
    """
    try:
        page = Page(*(unpack_checked if spelling else unpack_trusted)(data))
        first, distances, digests = page
        if (
            type(first) is not int
            or type(digests) is not bytes
            or type(distances) is not list
            or set(map(type, distances)) != _NUMBERS
            or len(digests) != DIGEST_BYTES * len(distances)
        ):
            raise ValueError("not the columns of a page")
    except (TypeError, ValueError) as exc:
        raise CorruptionError("a page of the node table is damaged") from exc
    return page


def put_base(lineage: bytes, base: Base) -> PutRow:
    """The row that says what a lineage goes on from."""
    return PutRow("nodes", keys.lineage_row(lineage), pack_checked(list(base)))


def put_place(lineage: bytes, node_part: bytes, seq: int) -> PutRow:
    """The row that finds a node by its id."""
    return PutRow("nodes", keys.lineage_node(lineage, node_part), encode_seq(seq))


def encode_seq(seq: int) -> bytes:
    """Spell a node's place in insertion order, as the row found by its id holds it."""
    return seq.to_bytes((seq.bit_length() + 7) >> 3 or 1, "big")


def put_pages(lineage: bytes, last: Page | None, added: Page) -> tuple[list[PutRow], Page]:
    """The rows that list ``added`` after ``last``; and the page that then is the last."""
    number = added.first // PAGE_NODES
    if last is not None and last.first // PAGE_NODES == number == (added.stop - 1) // PAGE_NODES:
        # They have room on the page, as most have.
        page = Page(last.first, last.distances + added.distances, last.digests + added.digests)
        return [PutRow("nodes", keys.lineage_page(lineage, number), pack_checked(page))], page
    return _put_pages(lineage, last, added)


def _put_pages(lineage: bytes, last: Page | None, added: Page) -> tuple[list[PutRow], Page]:
    rows: list[PutRow] = []
    page = last
    done = 0
    while done < len(added.distances):
        seq = added.first + done
        number = seq // PAGE_NODES
        room = (number + 1) * PAGE_NODES - seq
        distances = added.distances[done : done + room]
        digests = added.digests[done * DIGEST_BYTES : (done + room) * DIGEST_BYTES]
        if page is not None and page.first // PAGE_NODES == number:
            page = Page(page.first, page.distances + distances, page.digests + digests)
        else:
            page = Page(seq, distances, digests)
        rows.append(PutRow("nodes", keys.lineage_page(lineage, number), encode_page(page)))
        done += len(distances)
    assert page is not None
    return rows, page


def read_seq(row: bytes) -> int:
    """A node's place in insertion order, from the row found by its id."""
    if not 0 < len(row) <= _MAX_SEQ_BYTES or (len(row) > 1 and not row[0]):
        raise CorruptionError("a row of the node table is damaged")
    return int.from_bytes(row, "big")


def read_digests(engine: Engine, lineage: bytes, seqs: Sequence[int]) -> list[bytes | None]:
    """The digests of nodes that a lineage itself holds; None where its pages list none."""
    numbers = list({seq // PAGE_NODES: None for seq in seqs})
    wanted = [RowKey("nodes", keys.lineage_page(lineage, number)) for number in numbers]
    pages = {
        number: decode_page(row)
        for number, row in zip(numbers, engine.get_rows(wanted) if wanted else [], strict=True)
        if row is not None
    }
    found: list[bytes | None] = []
    for seq in seqs:
        page = pages.get(seq // PAGE_NODES)
        listed = page is not None and page.first <= seq < page.stop
        found.append(page.digest(seq) if page is not None and listed else None)
    return found


def find_digest(engine: Engine, lineage: bytes, seq: int) -> bytes | None:
    """The digest of one node that a lineage itself holds; None if its pages do not list it."""
    [row] = engine.get_rows((RowKey("nodes", keys.lineage_page(lineage, seq // PAGE_NODES)),))
    if row is None:
        return None
    page = decode_page(row, spelling=False)
    return page.digest(seq) if page.first <= seq < page.stop else None


class Chain:
    """The nodes of one revision: its own lineage and those it goes on from."""

    def __init__(self, engine: Engine, own: bytes, base: Base | None, next_seq: int) -> None:
        self._engine = engine
        self._pages: dict[bytes, Page] = {}
        self._paths: dict[int, list[int]] = {}
        self._path_sets: dict[int, frozenset[int]] = {}
        self.next_seq = next_seq
        self.segments = self._segments(own, base, next_seq)

    def _segments(self, lineage: bytes, base: Base | None, stop: int) -> list[Segment]:
        """Newest first; every lineage that holds at least one of the nodes."""
        segments: list[Segment] = []
        path: int | None = None
        seen = {lineage}
        while True:
            start = first_own(base)
            if start < stop:
                segments.append(Segment(lineage, start, stop, path))
            if base is None:
                return segments
            lineage, stop = base.lineage, min(base.limit, stop)
            if path is None:
                # The newest path decides: older ones only let through what lies on it.
                path = base.path
            if lineage in seen:
                raise CorruptionError(f"lineage {lineage.hex()} goes on from itself")
            seen.add(lineage)
            found = self._engine.get_rows([RowKey("nodes", keys.lineage_row(lineage))])[0]
            base = None if found is None else decode_base(found)

    # --- by id --------------------------------------------------------------------------

    def find(self, node_ids: Sequence[bytes]) -> list[Place | None]:
        """The places of nodes by the key parts of their ids; None where there is none."""
        wanted = [
            RowKey("nodes", keys.lineage_node(segment.lineage, node))
            for node in node_ids
            for segment in self.segments
        ]
        rows = iter(self._engine.get_rows(wanted))
        seqs: list[int | None] = []
        for _ in node_ids:
            seq: int | None = None
            for segment in self.segments:
                row = next(rows)
                if seq is None and row is not None:
                    found = read_seq(row)
                    if segment.start <= found < segment.stop and self._visible(found, segment):
                        seq = found
            seqs.append(seq)
        return self._places_of(seqs)

    def _places_of(self, seqs: list[int | None]) -> list[Place | None]:
        """The nodes with these seqs; each page is read once, and none beside them."""
        digests: dict[int, bytes] = {}
        for segment in self.segments:
            own = [seq for seq in seqs if seq is not None and segment.start <= seq < segment.stop]
            if not own:
                continue
            listed = read_digests(self._engine, segment.lineage, own)
            for seq, digest in zip(own, listed, strict=True):
                if digest is not None:
                    digests[seq] = digest
        places: list[Place | None] = []
        for wanted in seqs:
            if wanted is not None and wanted not in digests:
                raise CorruptionError(f"the node table has no node number {wanted}")
            places.append(None if wanted is None else Place(wanted, digests[wanted]))
        return places

    def _visible(self, seq: int, segment: Segment) -> bool:
        return segment.path is None or seq in self._on_path(segment.path)

    def _on_path(self, leaf_seq: int) -> frozenset[int]:
        known = self._path_sets.get(leaf_seq)
        if known is None:
            known = self._path_sets[leaf_seq] = frozenset(self.path(leaf_seq))
        return known

    # --- by order -----------------------------------------------------------------------

    def page(self, seq: int) -> Page:
        """The page that holds the node with this seq."""
        segment = next((one for one in self.segments if one.start <= seq < one.stop), None)
        if segment is None:
            raise CorruptionError(f"no lineage holds node number {seq}")
        number = seq // PAGE_NODES
        page = self._pages.get(keys.lineage_page(segment.lineage, number))
        if page is None:
            # Walks go backwards and lists forwards: the pages on both sides come along.
            low = max(number - _PAGES_AHEAD // 2, segment.start // PAGE_NODES)
            start = keys.lineage_page(segment.lineage, low)
            stop = keys.lineage_page(segment.lineage, (segment.stop - 1) // PAGE_NODES + 1)
            for row in self._engine.scan_rows("nodes", start=start, stop=stop, limit=_PAGES_AHEAD):
                self._pages[row.key] = decode_page(row.value).below(segment.stop)
            page = self._pages.get(keys.lineage_page(segment.lineage, number))
        if page is None or not page.first <= seq < page.stop:
            raise CorruptionError(f"the node table has no node number {seq}")
        return page

    def place(self, seq: int) -> Place:
        """The node with this seq."""
        return Place(seq, self.page(seq).digest(seq))

    def path(self, leaf_seq: int) -> list[int]:
        """The seqs from the root to this node."""
        known = self._paths.get(leaf_seq)
        if known is not None:
            return known
        seqs: list[int] = []
        seq = leaf_seq
        page = self.page(seq)
        while True:
            seqs.append(seq)
            if not page.first <= seq < page.stop:
                page = self.page(seq)
            distance = page.distances[seq - page.first]
            if not 0 <= distance <= seq:
                raise CorruptionError(f"the node table gives node number {seq} no parent")
            if not distance:
                break
            seq -= distance
        seqs.reverse()
        self._paths[leaf_seq] = seqs
        return seqs

    def seqs(self) -> Sequence[int]:
        """The seqs of all nodes, in insertion order."""
        parts: list[Sequence[int]] = []
        for segment in self.segments:
            if segment.path is not None:
                parts.append(self.path(segment.path))
                break
            parts.append(range(segment.start, segment.stop))
        if len(parts) == 1:
            return parts[0]
        return [seq for part in reversed(parts) for seq in part]

    def places(self, seqs: Sequence[int]) -> Iterator[Place]:
        """The nodes with these seqs, one after the other."""
        page: Page | None = None
        for seq in seqs:
            if page is None or not page.first <= seq < page.stop:
                page = self.page(seq)
            yield Place(seq, page.digest(seq))

    def digests(self, seqs: Sequence[int]) -> list[bytes]:
        """The digests of the nodes with these seqs, quickly."""
        found: list[bytes] = []
        first = stop = 0
        joined = b""
        for seq in seqs:
            if not first <= seq < stop:
                page = self.page(seq)
                first, stop, joined = page.first, page.stop, page.digests
            at = (seq - first) * DIGEST_BYTES
            found.append(joined[at : at + DIGEST_BYTES])
        return found


def decode_base(data: bytes) -> Base:
    """Read what a lineage goes on from; CorruptionError if that cannot be."""
    try:
        lineage, limit, path = unpack_checked(data)
    except (TypeError, ValueError, InvalidInputError) as exc:
        raise CorruptionError("a lineage's base is damaged") from exc
    return Base(lineage, limit, path)
