"""The node table as it must be: worked out from heads, manifests and nodes.

The table is derived (see ``session.lineage``). Within a lineage nodes are only appended, so
the newest revision on it has all of its nodes; what a fork shares with a lineage that no
session stands on any more is known from the fork. Where only some nodes of such a lineage
are known, the others leave an empty place in its pages that nothing leads to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from casstore.engine.protocol import Engine, Row, RowKey
from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES
from casstore.format.manifest import Manifest
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader
from casstore.session import keys, lineage
from casstore.session.heads import Base, HeadRow, decode_head
from casstore.session.lineage import Page
from casstore.session.scanning import scan

_BATCH: Final = 256
NO_NODE: Final = bytes(DIGEST_BYTES)


class Standing(NamedTuple):
    """The newest revision that stands on a lineage."""

    session_key: bytes
    row: bytes
    head: HeadRow
    is_head: bool


class Table(NamedTuple):
    """The rows that a lineage must have."""

    lineage: bytes
    #: None: no session stands on it, but forks go on from it.
    standing: Standing | None
    base: Base | None
    #: The nodes' places in insertion order, by the key parts of their ids.
    places: dict[bytes, int]
    pages: list[Page]

    def rows(self) -> list[Row]:
        """The rows, as they are stored."""
        puts = [] if self.base is None else [lineage.put_base(self.lineage, self.base)]
        puts += [lineage.put_place(self.lineage, part, seq) for part, seq in self.places.items()]
        for page in self.pages:
            puts += lineage.put_pages(self.lineage, None, page)[0]
        return [Row(put.key, bytes(put.value)) for put in puts]


class _Segment(NamedTuple):
    lineage: bytes
    start: int
    stop: int


class _Listed(NamedTuple):
    digest: bytes
    part: bytes
    distance: int


class Lineages:
    """All lineages that revisions stand on, and what each must list."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = PieceReader(engine)
        self._standing: dict[bytes, Standing] = {}
        self._manifests: dict[bytes, Manifest] = {}
        # Nodes of lineages that nobody stands on, or not far enough.
        self._shared: dict[bytes, dict[int, _Listed]] = {}
        # By lineage, the nodes that its graph has of others on which somebody stands: the first
        # on each way down, which stands for all below it. (Lineage, number) → digest.
        self._leans_on: dict[bytes, dict[tuple[bytes, int], bytes]] = {}
        #: Rows that could not be read: they are somebody else's finding.
        self.unreadable = 0

    def survey(self, read: Callable[[str], Iterable[Row]] | None = None) -> None:
        """Find the newest revision on each lineage; ``read`` gives the rows of a table."""
        for table in ("history", "heads"):
            rows = scan(self._engine, table, b"", None) if read is None else read(table)
            for row in rows:
                if table == "history" and keys.is_label(row.key):
                    continue
                self.note(row, is_head=table == "heads")

    def note(self, row: Row, *, is_head: bool) -> None:
        """Take a revision into account."""
        try:
            head = decode_head(row.value)
        except CorruptionError:
            self.unreadable += 1
            return
        key = row.key if is_head else row.key[:-8]
        known = self._standing.get(head.lineage)
        if known is None or known.head.revision < head.revision:
            self._standing[head.lineage] = Standing(key, row.value, head, is_head)
            self._manifests.pop(head.lineage, None)

    def names(self) -> list[bytes]:
        """The lineages that revisions stand on."""
        return list(self._standing)

    def standing(self, name: bytes) -> Standing:
        """The newest revision on a lineage."""
        return self._standing[name]

    def table(self, name: bytes) -> Table:
        """What a lineage must list; CorruptionError if its graph cannot be read."""
        standing = self._standing[name]
        head = standing.head
        own: dict[int, _Listed] = {}
        first = lineage.first_own(head.base)
        self._walk(name, own)
        return _table(name, standing, head.base, first, own)

    def is_held(self, name: bytes) -> bool:
        """Do the lineages that this one goes on from still list the nodes that its graph has?

        Of those on which somebody stands; known once ``table`` was called for this one.
        """
        wanted: dict[bytes, dict[int, bytes]] = {}
        for (other, seq), digest in self._leans_on.get(name, {}).items():
            wanted.setdefault(other, {})[seq] = digest
        try:
            return all(
                lineage.read_digests(self._engine, other, list(nodes)) == list(nodes.values())
                for other, nodes in wanted.items()
            )
        except CorruptionError:
            return False

    def shared_tables(self) -> Iterator[Table]:
        """What lineages must list beside, or without, a revision that stands on them.

        Complete once ``table`` was called for every lineage.
        """
        for name, nodes in self._shared.items():
            base = self._base(name)
            standing = self._standing.get(name)
            first = lineage.first_own(base)
            if standing is not None:
                # What the revision has was listed already; these come behind.
                own: dict[int, _Listed] = {}
                try:
                    self._walk(name, own)
                except CorruptionError:
                    # Then what forks know of it is all that is known.
                    own = {}
                nodes = own | nodes
            yield _table(name, standing, base, first, nodes)

    # --- walking ------------------------------------------------------------------------

    def _walk(self, name: bytes, own: dict[int, _Listed]) -> None:
        """Note the nodes of the graph that stands on a lineage, each with its owner."""
        manifest = self._manifest(name)
        if manifest.leaf is None:
            return
        segments = self._segments(name, manifest.next_seq)
        tips = objects.load_spelled(self._reader, (manifest.tips,))[0] or {}
        ahead = list(
            dict.fromkeys([manifest.leaf, *[bytes(link.digest) for link in tips.values()]])
        )
        seen = set(ahead)
        seqs: dict[bytes, int] = {}
        # A node's distance is known when its parent has been read.
        waiting: list[tuple[dict[int, _Listed], int, bytes, bytes, bytes | None]] = []
        while ahead:
            batch, ahead = ahead[:_BATCH], ahead[_BATCH:]
            for digest, header in zip(
                batch, objects.read_headers(self._reader, batch), strict=True
            ):
                seqs[digest] = header.seq
                listed = self._owner(name, segments, header.seq, own)
                if listed is not own:
                    self._lean(name, segments, header.seq, digest)
                if listed is None:
                    continue
                part = keys.part(header.id, "a node id")
                waiting.append((listed, header.seq, digest, part, header.parent))
                if header.parent is not None and header.parent not in seen:
                    seen.add(header.parent)
                    ahead.append(header.parent)
        for listed, seq, digest, part, parent in waiting:
            distance = 0 if parent is None else seq - seqs[parent]
            listed[seq] = _Listed(digest, part, distance)

    def _lean(self, name: bytes, segments: list[_Segment], seq: int, digest: bytes) -> None:
        other = next(one.lineage for one in segments if one.start <= seq < one.stop)
        if other in self._standing:
            self._leans_on.setdefault(name, {})[other, seq] = digest

    def _owner(
        self, name: bytes, segments: list[_Segment], seq: int, own: dict[int, _Listed]
    ) -> dict[int, _Listed] | None:
        """Where a node belongs; None if another walk comes past it anyway."""
        for segment in segments:
            if segment.start <= seq < segment.stop:
                if segment.lineage == name:
                    return own
                if segment.lineage in self._standing:
                    try:
                        if seq < self._manifest(segment.lineage).next_seq:
                            return None
                    except CorruptionError:
                        # Then this walk is the only one.
                        pass
                return self._shared.setdefault(segment.lineage, {})
        raise CorruptionError(f"no lineage holds node number {seq}")

    def _manifest(self, name: bytes) -> Manifest:
        known = self._manifests.get(name)
        if known is None:
            digest = self._standing[name].head.manifest
            known = self._manifests[name] = objects.read_manifest(self._reader, digest)
        return known

    def _segments(self, name: bytes, stop: int) -> list[_Segment]:
        segments: list[_Segment] = []
        base = self._standing[name].head.base
        seen = {name}
        while True:
            start = lineage.first_own(base)
            if start < stop:
                segments.append(_Segment(name, start, stop))
            if base is None:
                return segments
            name, stop = base.lineage, min(base.limit, stop)
            if name in seen:
                raise CorruptionError(f"lineage {name.hex()} goes on from itself")
            seen.add(name)
            base = self._base(name)

    def _base(self, name: bytes) -> Base | None:
        """What a lineage goes on from: as a revision on it says, else as its own row does."""
        standing = self._standing.get(name)
        if standing is not None:
            return standing.head.base
        try:
            row = self._engine.get_rows([RowKey("nodes", keys.lineage_row(name))])[0]
            return None if row is None else lineage.decode_base(row)
        except CorruptionError:
            # Without it, all that is shared is listed under this lineage: that reads the same.
            return None


def _table(
    name: bytes,
    standing: Standing | None,
    base: Base | None,
    first: int,
    nodes: dict[int, _Listed],
) -> Table:
    places = {one.part: seq for seq, one in sorted(nodes.items())}
    if not nodes:
        # A lineage without nodes has no rows, not even a base: nobody goes on from it.
        return Table(name, standing, None, places, [])
    last = max(nodes)
    pages: list[Page] = []
    for number in range(first // lineage.PAGE_NODES, last // lineage.PAGE_NODES + 1):
        low = max(first, number * lineage.PAGE_NODES)
        high = min(last, (number + 1) * lineage.PAGE_NODES - 1)
        listed = [nodes.get(seq) for seq in range(low, high + 1)]
        pages.append(
            Page(
                low,
                [0 if one is None else one.distance for one in listed],
                b"".join([NO_NODE if one is None else one.digest for one in listed]),
            )
        )
    return Table(name, standing, base, places, pages)


def differences(engine: Engine, table: Table) -> list[Row]:
    """The rows of a table that are missing in the store, or say something else there.

    A page may list more than it must: nodes that later revisions had, or that are not known
    here; what is given keeps them.
    """
    wrong: list[Row] = []
    for row in table.rows():
        try:
            stored = engine.get_rows([RowKey("nodes", row.key)])[0]
            if stored is not None and keys.is_lineage_page(row.key):
                row = Row(row.key, _merged(row.value, stored))
            same = stored == row.value
        except CorruptionError:
            same = False
        if not same:
            wrong.append(row)
    return wrong


def _merged(needed: bytes, stored: bytes) -> bytes:
    """A page that lists what it must, and beside it what it lists already."""
    must, has = lineage.decode_page(needed), lineage.decode_page(stored)
    if has.first != must.first:
        return needed
    distances, digests = list(must.distances), must.digests
    for at in range(len(distances)):
        if must.digest(must.first + at) == NO_NODE and at < len(has.distances):
            distances[at] = has.distances[at]
            digests = (
                digests[: at * DIGEST_BYTES]
                + has.digest(has.first + at)
                + digests[(at + 1) * DIGEST_BYTES :]
            )
    behind = len(distances)
    distances += has.distances[behind:]
    digests += has.digests[behind * DIGEST_BYTES :]
    return lineage.encode_page(Page(must.first, distances, digests))
