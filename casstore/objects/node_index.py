"""Reads and extends the node index of a graph (``format.node_index``).

``NodeIndex`` finds the nodes of one graph by position and by id. ``IndexBuilder`` appends nodes. An
index depends on the sequence of nodes alone, so a rebuilt index has the same digests.
``common_prefix`` finds where two graphs diverge.

The pieces of an index (its spine, runs, buckets and pages) are immutable, so decoded pieces are
cached by digest and shared by all graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

from casstore.errors import CorruptionError
from casstore.format import node_index as layout
from casstore.format.digest import Kind
from casstore.format.node_index import (
    ENTRY_BYTES,
    FANOUT,
    HASH_BYTES,
    NO_PAGES,
    PAGE_NODES,
    RUN_NODES,
    RUN_PAGES,
    SPLIT_LEVEL,
    TOP_LEVEL,
    Bucket,
    IndexPage,
    IndexRun,
    Piece,
    Spine,
    Tail,
    bucket_of,
    decode_piece,
    encode_piece,
    id_hash,
    run_counts,
)
from casstore.format.splitting import Emit
from casstore.objects import graph
from casstore.objects.pieces import PieceReader

# How many bytes of encoded pieces a process caches in decoded form.
_CACHE_BYTES: Final = 16 << 20
# _PAGES_AHEAD: how many pages a walk reads in one request. _KEPT_PAGES: how many pages one
# NodeIndex keeps.
_PAGES_AHEAD: Final = 64
_KEPT_PAGES: Final = 1024


class NodePosition(NamedTuple):
    """The position of a node in insertion order, and its digest."""

    position: int
    digest: bytes


class _Recent(NamedTuple):
    """The id hashes of the nodes in pages and small runs, which begin at position ``first``."""

    first: int
    hashes: bytes


class IndexCache:
    """Decoded pieces by digest, bounded in bytes. Safe to share between threads."""

    def __init__(self) -> None:
        self._bytes = 0
        self._kept: dict[bytes, tuple[Piece, int]] = {}
        #: The joined hashes of the pages and small runs that a spine lists, by the spine's digest.
        self.recent: dict[bytes, _Recent] = {}
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> Piece | None:
        """The piece, if it is cached."""
        known = self._kept.get(digest)
        return None if known is None else known[0]

    def put(self, digest: bytes, piece: Piece, size_bytes: int) -> None:
        """Cache a piece and evict the oldest ones."""
        with self._lock:
            if digest in self._kept:
                return
            self._kept[digest] = piece, size_bytes
            self._bytes += size_bytes
            while self._bytes > _CACHE_BYTES and len(self._kept) > 1:
                oldest = next(iter(self._kept))
                self._bytes -= self._kept.pop(oldest)[1]

    def put_recent(self, spine: bytes, recent: _Recent) -> None:
        """Cache the joined hashes under the digest of their spine, and evict the oldest."""
        with self._lock:
            self.recent[spine] = recent
            while len(self.recent) * RUN_NODES[SPLIT_LEVEL] * HASH_BYTES > _CACHE_BYTES:
                self.recent.pop(next(iter(self.recent)))


class NodeIndex:
    """The nodes of one graph, by position and by id."""

    def __init__(self, reader: PieceReader, cache: IndexCache, tail: Tail, count: int) -> None:
        self._reader = reader
        self._cache = cache
        self.tail = tail
        #: The number of nodes in the graph.
        self.count = count
        self.page_count = count // PAGE_NODES
        self._tail_at = self.page_count * PAGE_NODES
        self._made_spine: Spine | None = None
        self._pages: dict[int, IndexPage] = {}

    def __len__(self) -> int:
        return self.count

    # --- pieces -------------------------------------------------------------------------

    def load(self, digests: Sequence[bytes]) -> list[Piece]:
        """Pieces of the index; those that are not cached are read together."""
        if len(digests) == 1:
            known = self._cache.get(digests[0])
            return self._read(digests) if known is None else [known]
        found = [self._cache.get(digest) for digest in digests]
        lacking = [digest for digest, piece in zip(digests, found, strict=True) if piece is None]
        if not lacking:
            return cast("list[Piece]", found)
        read = iter(self._read(lacking))
        return [next(read) if piece is None else piece for piece in found]

    def _read(self, digests: Sequence[bytes]) -> list[Piece]:
        pieces: list[Piece] = []
        for digest, item in zip(digests, self._reader.follow(digests), strict=True):
            if item.kind != Kind.INDEX:
                raise CorruptionError(
                    f"{digest.hex()} is linked to as a part of a node index, but is something else"
                )
            piece = decode_piece(digest, item.data, trusted=True)
            if len(digests) == 1 or not isinstance(piece, IndexPage):
                # Pages that are read in batches are not cached: a walk reads many, and they would
                # evict all other pieces.
                self._cache.put(digest, piece, len(item.data))
            pieces.append(piece)
        return pieces

    @property
    def spine(self) -> Spine:
        """The spine, which covers all complete pages."""
        if self._made_spine is None:
            if self.tail.spine is None:
                self._made_spine = NO_PAGES
            else:
                [spine] = self.load((self.tail.spine,))
                if not isinstance(spine, Spine) or spine.page_count != self.page_count:
                    raise _misfit(self.tail.spine)
                self._made_spine = spine
        return self._made_spine

    def _runs(self, digests: Sequence[bytes], level: int) -> list[IndexRun]:
        runs = self.load(digests)
        for digest, run in zip(digests, runs, strict=True):
            if type(run) is not IndexRun or run.level != level:
                raise _misfit(digest)
        return cast("list[IndexRun]", runs)

    def run_digests(self, level: int, numbers: Sequence[int]) -> list[bytes]:
        """The digests of complete runs of a level (0: pages) by number, in order."""
        spine = self._made_spine or self.spine
        first = _first_listed(self.page_count, level)
        above = sorted({number // FANOUT for number in numbers if number < first})
        parts: dict[int, tuple[bytes, ...]] = {}
        if above:
            runs = self._runs(self.run_digests(level + 1, above), level + 1)
            parts = {at: run.parts for at, run in zip(above, runs, strict=True)}
        listed = spine.runs[level]
        return [
            listed[number - first] if number >= first else parts[number // FANOUT][number % FANOUT]
            for number in numbers
        ]

    def _page(self, number: int, ahead: int = 0) -> IndexPage:
        """A complete page. If it is not cached, read ``ahead`` pages after it too (< 0: before)."""
        page = self._pages.get(number)
        if page is None:
            low = max(0, number + min(0, ahead))
            high = min(self.page_count, number + max(0, ahead) + 1)
            self._load_pages([one for one in range(low, high) if one not in self._pages])
            page = self._pages[number]
        return page

    def _load_pages(self, numbers: Sequence[int]) -> None:
        if len(self._pages) + len(numbers) > _KEPT_PAGES:
            self._pages.clear()
        digests = self.run_digests(0, numbers)
        if len(numbers) == 1:
            # A single look-up: the page may be needed again, so it is cached.
            pages = self.load(digests)
        else:
            pages = self._read(digests)
        for number, digest, page in zip(numbers, digests, pages, strict=True):
            if not isinstance(page, IndexPage):
                raise _misfit(digest)
            self._pages[number] = page

    # --- by position --------------------------------------------------------------------

    def place(self, position: int) -> NodePosition:
        """The node at a position."""
        if position >= self._tail_at:
            return NodePosition(position, self.tail.digests[position - self._tail_at])
        page = self._page(position // PAGE_NODES)
        return NodePosition(position, page.digests[position % PAGE_NODES])

    def digests(self, positions: Sequence[int], *, ahead: bool = False) -> list[bytes]:
        """The digests of the nodes at these positions.

        ``ahead``: the following positions will be read next, so they are fetched too.
        """
        tail_at, tail, pages = self._tail_at, self.tail.digests, self._pages
        found: list[bytes] = []
        for start in range(0, len(positions), _KEPT_PAGES):
            batch = positions[start : start + _KEPT_PAGES]
            numbers = {position // PAGE_NODES for position in batch if position < tail_at}
            lacking = [number for number in sorted(numbers) if number not in pages]
            if lacking:
                if ahead:
                    behind = range(
                        lacking[-1] + 1, min(lacking[-1] + _PAGES_AHEAD, self.page_count)
                    )
                    numbers.update([number for number in behind if number not in pages])
                    lacking = [number for number in sorted(numbers) if number not in pages]
                if len(pages) + len(lacking) > _KEPT_PAGES:
                    pages.clear()
                    lacking = sorted(numbers)
                self._load_pages(lacking)
            for position in batch:
                if position >= tail_at:
                    found.append(tail[position - tail_at])
                else:
                    found.append(pages[position // PAGE_NODES][1][position % PAGE_NODES])
        return found

    def places(self, positions: Sequence[int] | None = None) -> Iterator[NodePosition]:
        """The nodes at these positions, or all of them, read page by page."""
        wanted = range(self.count) if positions is None else positions
        step = _PAGES_AHEAD * PAGE_NODES
        for start in range(0, len(wanted), step):
            batch = wanted[start : start + step]
            yield from map(NodePosition, batch, self.digests(batch))

    def parent(self, position: int) -> int | None:
        """The position of a node's parent; None if it has none."""
        if position >= self._tail_at:
            far = self.tail.distances[position - self._tail_at]
        else:
            number = position // PAGE_NODES
            far = self._page(number, -_PAGES_AHEAD).distances[position % PAGE_NODES]
        if far > position:
            raise CorruptionError(f"the node index has no valid parent for node number {position}")
        return position - far if far else None

    def up(self, position: int) -> Iterator[int]:
        """The positions from a node to its root."""
        step: int | None = position
        while step is not None:
            yield step
            step = self.parent(step)

    def path(self, position: int, depth: int) -> Sequence[int]:
        """The positions from the root to a node that has ``depth`` nodes on its path."""
        if depth == position + 1:
            # As many nodes as positions: every node so far is on the path.
            return range(depth)
        positions = list(self.up(position))
        if len(positions) != depth:
            raise CorruptionError(
                f"the node index has {len(positions)} nodes on the path to node number "
                f"{position}, whose depth is {depth}"
            )
        positions.reverse()
        return positions

    # --- by id --------------------------------------------------------------------------

    def candidates(self, hashed: Sequence[bytes]) -> list[list[int]]:
        """For each of these hashes, the positions of the nodes whose ids have it.

        Two ids may have the same hash, so the caller compares the ids.
        """
        tail, tail_at = self.tail.hashes, self._tail_at
        found: list[list[int]] = [[] for _ in hashed]
        for matches, one in zip(found, hashed, strict=True):
            if one in tail:
                matches += [tail_at + at for at in _hits(tail, one, HASH_BYTES)]
        if self.tail.spine is not None:
            first, recent = self._cache.recent.get(self.tail.spine) or self._join_recent(
                self.tail.spine
            )
            for matches, one in zip(found, hashed, strict=True):
                if one in recent:
                    matches += [first + at for at in _hits(recent, one, HASH_BYTES)]
            if first:
                self._search_large(hashed, found)
        return found

    def _join_recent(self, name: bytes) -> _Recent:
        """Join the hashes of the nodes in pages and small runs, and cache them."""
        spine = self.spine
        first = sum([len(spine.runs[lvl]) * RUN_NODES[lvl] for lvl in _LARGE])
        small = [
            run.hashes
            for level in range(SPLIT_LEVEL - 1, 0, -1)
            for run in self._runs(spine.runs[level], level)
        ]
        joined = _Recent(first, b"".join((*small, spine.hashes)))
        self._cache.put_recent(name, joined)
        return joined

    def _search_large(self, hashed: Sequence[bytes], found: list[list[int]]) -> None:
        """Search the buckets of large runs for the hashes; adds the positions to ``found``."""
        runs: list[tuple[int, IndexRun]] = []
        start = 0
        for level in _LARGE:
            for run in self._runs(self.spine.runs[level], level):
                runs.append((start, run))
                start += RUN_NODES[level]
        wanted = {(at, bucket_of(one)) for at in range(len(runs)) for one in hashed}
        names = {each: runs[each[0]][1].buckets[each[1]] for each in wanted}
        loaded = dict(zip(names, self.load(list(names.values())), strict=True))
        for matches, one in zip(found, hashed, strict=True):
            for at, (start, run) in enumerate(runs):
                bucket = loaded[at, bucket_of(one)]
                if not isinstance(bucket, Bucket) or len(bucket.parts) != _PARTS[run.level]:
                    raise _misfit(run.buckets[bucket_of(one)])
                for number, part in enumerate(bucket.parts):
                    for hit in _hits(part, one, ENTRY_BYTES):
                        entry = part[hit * ENTRY_BYTES : (hit + 1) * ENTRY_BYTES]
                        offset = int.from_bytes(entry[HASH_BYTES:], "big")
                        matches.append(start + number * RUN_NODES[SPLIT_LEVEL] + offset)

    def find(self, node_ids: Sequence[str]) -> list[NodePosition | None]:
        """The positions of nodes by id; None for an id that the graph does not have."""
        possible = self.candidates([id_hash(node_id) for node_id in node_ids])
        positions = sorted({position for matches in possible for position in matches})
        if not positions:
            return [None] * len(node_ids)
        digests = self.digests(positions)
        headers = graph.read_headers(self._reader, digests)
        ids = {
            position: (header.id, digest)
            for position, header, digest in zip(positions, headers, digests, strict=True)
        }
        found: list[NodePosition | None] = []
        for node_id, matches in zip(node_ids, possible, strict=True):
            right = [position for position in matches if ids[position][0] == node_id]
            found.append(NodePosition(right[0], ids[right[0]][1]) if right else None)
        return found

    def position_of(self, node_id: str, digest: bytes) -> int:
        """The position of a node with a known id and digest; CorruptionError if it is missing."""
        if self.tail.digests and self.tail.digests[-1] == digest:
            # Without a search: callers mostly ask for a leaf, and most leaves are the last node.
            return self.count - 1
        [possible] = self.candidates([id_hash(node_id)])
        for position, found in zip(possible, self.digests(possible), strict=True):
            if found == digest:
                return position
        raise CorruptionError(f"the node index lacks node {digest.hex()}; check the store")

    # --- hashes, and appending ----------------------------------------------------------

    def hashes(self, positions: Sequence[int]) -> bytes:
        """The hashes of the ids of the nodes at these positions."""
        loose_at = self._tail_at - len(self.spine.runs[0]) * PAGE_NODES
        size = RUN_NODES[1]
        numbers = sorted({position // size for position in positions if position < loose_at})
        runs = self._runs(self.run_digests(1, numbers), 1) if numbers else []
        blocks = {number * size: run.hashes for number, run in zip(numbers, runs, strict=True)}
        behind = self.spine.hashes + self.tail.hashes
        parts: list[bytes] = []
        for position in positions:
            start = loose_at if position >= loose_at else position // size * size
            at = (position - start) * HASH_BYTES
            parts.append(blocks.get(start, behind)[at : at + HASH_BYTES])
        return b"".join(parts)

    def extended(
        self, hashes: bytes, distances: Sequence[int], digests: Sequence[bytes], emit: Emit
    ) -> Tail:
        """The index with more nodes; see ``IndexBuilder.append``."""
        tail = self.tail
        if len(tail.digests) + len(digests) < PAGE_NODES:
            return Tail(
                tail.spine,
                tail.hashes + hashes,
                (*tail.distances, *distances),
                (*tail.digests, *digests),
            )
        builder = self.builder(emit)
        builder.append(hashes, distances, digests)
        return builder.finish()

    def builder(self, emit: Emit, count: int | None = None) -> IndexBuilder:
        """A builder that appends to this index, or to the index of its first ``count`` nodes."""
        if count is None or count == self.count:
            # The spine is read only when a page is full.
            return IndexBuilder(self, emit, self.tail, self.page_count, None)
        pages, rest = divmod(count, PAGE_NODES)
        runs: list[tuple[bytes, ...]] = []
        for level, listed in enumerate(run_counts(pages)):
            first = _first_listed(pages, level)
            runs.append(tuple(self.run_digests(level, range(first, first + listed))))
        at = pages * PAGE_NODES
        spine = Spine(self.hashes(range(at - len(runs[0]) * PAGE_NODES, at)), tuple(runs))
        kept = range(at, count)
        tail = Tail(
            None,
            self.hashes(kept),
            tuple([_distance(position, self.parent(position)) for position in kept]),
            tuple(self.digests(kept)),
        )
        assert len(tail.digests) == rest
        return IndexBuilder(self, emit, tail, pages, spine)


# The levels of large runs, whose hashes are split into buckets; in the order of their nodes.
_LARGE: Final = range(TOP_LEVEL, SPLIT_LEVEL - 1, -1)
# By level of a large run: how many parts each of its buckets has.
_PARTS: Final = {level: FANOUT ** (level - SPLIT_LEVEL) for level in _LARGE}


class IndexBuilder:
    """Appends nodes to an index."""

    def __init__(
        self, index: NodeIndex, emit: Emit, tail: Tail, page_count: int, spine: Spine | None
    ) -> None:
        self._index = index
        self._emit = emit
        self._pages = page_count
        self._hashes = tail.hashes
        self._distances = list(tail.distances)
        self._digests = list(tail.digests)
        # The spine: its digest while it is unchanged, else its parts.
        self._spine = tail.spine
        self._loose = b""
        self._runs: list[list[bytes]] | None = None
        if spine is not None:
            self._open(spine)

    @property
    def count(self) -> int:
        """How many nodes the index has."""
        return self._pages * PAGE_NODES + len(self._digests)

    def append(self, hashes: bytes, distances: Sequence[int], digests: Sequence[bytes]) -> None:
        """Append nodes, given the hashes of their ids, distances to their parents, and digests."""
        done, count = 0, len(digests)
        while done < count:
            stop = min(count, done + PAGE_NODES - len(self._digests))
            self._hashes += hashes[done * HASH_BYTES : stop * HASH_BYTES]
            self._distances += distances[done:stop]
            self._digests += digests[done:stop]
            if len(self._digests) == PAGE_NODES:
                self._fill_page()
            done = stop

    def finish(self) -> Tail:
        """The index for a manifest; stores the spine if it is new."""
        if self._runs is not None and self._pages:
            spine = Spine(self._loose, tuple([tuple(level) for level in self._runs]))
            self._spine = self._put(spine)
        return Tail(self._spine, self._hashes, tuple(self._distances), tuple(self._digests))

    def _open(self, spine: Spine) -> None:
        self._loose = spine.hashes
        self._runs = [list(level) for level in spine.runs]

    def _put(self, piece: Piece) -> bytes:
        data, links = encode_piece(piece)
        digest = self._emit(Kind.INDEX, data, links)
        if not isinstance(piece, IndexPage):
            self._index._cache.put(digest, piece, len(data))
        return digest

    def _fill_page(self) -> None:
        if self._runs is None:
            self._open(self._index.spine)
        assert self._runs is not None
        page = IndexPage(tuple(self._distances), tuple(self._digests))
        self._loose += self._hashes
        self._hashes, self._distances, self._digests = b"", [], []
        self._runs[0].append(self._put(page))
        self._pages += 1
        for level in range(1, TOP_LEVEL + 1):
            parts = self._runs[level - 1]
            if len(parts) < FANOUT:
                break
            self._runs[level].append(self._merge(level, parts))
            self._runs[level - 1] = []

    def _merge(self, level: int, parts: Sequence[bytes]) -> bytes:
        """Merge eight runs of the level below, or eight pages, into one run."""
        index = self._index
        if level == 1:
            hashes, self._loose = self._loose, b""
            return self._put(IndexRun(1, hashes, (), tuple(parts)))
        below = index._runs(parts, level - 1)
        if level < SPLIT_LEVEL:
            return self._put(
                IndexRun(level, b"".join([run.hashes for run in below]), (), tuple(parts))
            )
        if level == SPLIT_LEVEL:
            buckets = layout.split_hashes(b"".join([run.hashes for run in below]))
        else:
            names = [name for run in below for name in run.buckets]
            loaded = cast("list[Bucket]", index.load(names))
            buckets = [
                Bucket(tuple([part for one in loaded[at :: layout.BUCKETS] for part in one.parts]))
                for at in range(layout.BUCKETS)
            ]
        made = tuple([self._put(bucket) for bucket in buckets])
        return self._put(IndexRun(level, b"", made, tuple(parts)))


def empty_index(reader: PieceReader, cache: IndexCache) -> NodeIndex:
    """The index of a graph without nodes."""
    return NodeIndex(reader, cache, layout.NO_NODES, 0)


def common_prefix(one: NodeIndex, other: NodeIndex) -> int:
    """The number of leading positions that have the same nodes in both graphs.

    Reads only the pieces that differ, and those above them.
    """
    pages = min(one.page_count, other.page_count)
    at = 0
    if one.tail.spine == other.tail.spine:
        at = pages
    level = TOP_LEVEL
    while at < pages and level >= 0:
        size = RUN_PAGES[level]
        if at % size or at + size > pages:
            level -= 1
            continue
        number = (at // size,)
        if one.run_digests(level, number) == other.run_digests(level, number):
            at += size
            level = TOP_LEVEL if at % RUN_PAGES[TOP_LEVEL] == 0 else level
            while level < TOP_LEVEL and at % RUN_PAGES[level + 1] == 0:
                level += 1
        else:
            level -= 1
    position = at * PAGE_NODES
    stop = min(one.count, other.count, position + PAGE_NODES)
    rest = range(position, stop)
    for ours, theirs in zip(one.digests(rest), other.digests(rest), strict=True):
        if ours != theirs:
            break
        position += 1
    return position


def _first_listed(page_count: int, level: int) -> int:
    """The number of the first run of a level that the spine itself lists."""
    if level == TOP_LEVEL:
        return 0
    whole: int = page_count // RUN_PAGES[level + 1]
    return whole * FANOUT


def _distance(position: int, parent: int | None) -> int:
    return 0 if parent is None else position - parent


def _hits(data: bytes, hashed: bytes, step: int) -> Iterable[int]:
    """The positions of the entries of ``step`` bytes that start with a hash."""
    at = data.find(hashed)
    while at >= 0:
        if not at % step:
            yield at // step
        at = data.find(hashed, at + 1)


def _misfit(digest: bytes) -> CorruptionError:
    return CorruptionError(f"part {digest.hex()} of a node index does not match its parent")
