"""A slab: a run of objects with consecutive ids, stored as one LMDB value.

    key      id of the last object, 8 bytes big-endian
    value    header     28 bytes: layout below, then a checksum of key and directory
             directory  columns: digests, kinds, lengths, child counts, child ids
             payload    gaps of the links, then the objects, raw or one zstd frame

Layout 1 has all columns as they are: quick to write and to read. In layout 2, for slabs that
are packed, all but the digests are one zstd frame behind its length.

Links are not stored as digests. A digest is 32 bytes that no compressor shrinks,
and a list that grows by one item names its other items again; so each link is cut
out of its object, leaving a gap, and comes back from the child's own slab, where
its digest stands once. The child's id, which the collector needs anyway, says
where to look. A read then checks the rebuilt bytes against the object's digest
(P1), which also vouches for every id and gap used on the way.

Everything is little-endian; a column is as wide as its largest number needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from struct import Struct, pack, unpack_from
from typing import Final, NamedTuple

from casstore.engine.compression import CODEC_RAW as CODEC_RAW
from casstore.engine.compression import CODEC_ZSTD as CODEC_ZSTD
from casstore.engine.compression import compress_alone, inflate_alone
from casstore.engine.protocol import MAX_OBJECT_BYTES, NewObject
from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES, plain_hash

LAYOUT: Final = 1
PACKED_LAYOUT: Final = 2

# A kind is at most 126. The high bit says that the object keeps its links as they are.
KEEPS_LINKS: Final = 0x80
# An entry that nothing may find: by the time its slab was written, the same object
# had been stored by somebody else. It keeps its place in the run and its columns.
DEAD: Final = 0x7F

# layout, codec, widths of (lengths, child counts), widths of (child ids, gaps),
# number of objects, dictionary, time of storing in ms
_HEADER: Final = Struct("<BBBBIIQ")
_CHECKSUM_BYTES: Final = 8
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM_BYTES
_CODES: Final = "BHIQ"
# A width is one of four; in a byte that holds two, these bits are never set.
_NO_WIDTH: Final = 0xCC
_COUNT: Final = Struct("<I")
_COUNT_AT: Final = 4

# How many raw bytes and objects a slab collects before the next one starts. A read
# inflates a whole slab, so this trades the size of the store against the cost of
# reading one object from it.
TARGET_RAW_BYTES: Final = 65_536
MAX_OBJECTS: Final = 4096
# The same for slabs that are packed. Large ones compress better, waste less of their last
# page, and are read in long runs; one object from the middle costs a third of a millisecond.
PACKED_RAW_BYTES: Final = 262_144
_MAX_RAW_BYTES: Final = MAX_OBJECT_BYTES + (1 << 20)


ID_BYTES: Final = 8
MAX_ID: Final = (1 << 64) - 1


def slab_key(object_id: int) -> bytes:
    """The key under which a slab ending in ``object_id`` is stored; keys sort like ids."""
    return object_id.to_bytes(ID_BYTES, "big")


def read_id(row: bytes | memoryview) -> int:
    """The id that a row of the index holds."""
    if len(row) != ID_BYTES:
        raise CorruptionError(f"an index row of {len(row)} bytes")
    return int.from_bytes(row, "big")


class Draft(NamedTuple):
    """Objects on their way into one slab, with all the work done that needs no ids."""

    objects: Sequence[NewObject]
    #: With the mark of those that keep their links.
    kinds: list[int]
    lengths: list[int]
    gap_width: int
    codec: int
    dictionary: int
    payload: bytes
    #: What the payload was made of: the gaps, and all bytes behind them.
    gaps: Sequence[int] = ()
    body: bytes = b""


class Uncut(NamedTuple):
    """Objects on their way into one slab that is not compressed: there is no work before ids."""

    objects: Sequence[NewObject]


class Sheet(NamedTuple):
    """The columns of a slab, and what its payload is made of."""

    first_id: int
    stored_at_ms: int
    #: One for each object, or several joined.
    digests: list[bytes]
    kinds: list[int]
    lengths: list[int]
    counts: list[int]
    #: Small where ids are large, and never negative: a child is older.
    distances: list[int]
    gaps: Sequence[int]
    body: bytes

    def seal(self, compress: Callable[[bytes], tuple[int, int, bytes]]) -> tuple[bytes, bytes]:
        """The key and value of the slab, its payload compressed."""
        gap_width = _width(self.gaps)
        return _seal(self, gap_width, *compress(_column(self.gaps, gap_width) + self.body))


def draft(
    objects: Sequence[NewObject], compress: Callable[[bytes], tuple[int, int, bytes]]
) -> Draft:
    """Cut the links out and compress: everything that can be done outside the write lock.

    ``compress`` turns raw bytes into (codec, dictionary, payload).
    """
    kinds: list[int] = []
    parts: list[bytes] = []
    lengths: list[int] = []
    gaps: list[int] = []
    for _, kind, data, children in objects:
        size = len(data)
        if not children:
            parts.append(data)
        elif _cut_links(data, children, parts, gaps):
            size -= DIGEST_BYTES * len(children)
        else:
            parts.append(data)
            kind |= KEEPS_LINKS
        kinds.append(kind)
        lengths.append(size)
    gap_width = _width(gaps)
    body = b"".join(parts)
    raw = _column(gaps, gap_width) + body if gaps else body
    return Draft(objects, kinds, lengths, gap_width, *compress(raw), gaps, body)


def _cut_links(data: bytes, children: Sequence[bytes], parts: list[bytes], gaps: list[int]) -> bool:
    """Add the data without its links to ``parts``, and how far each is from the one before.

    False, and nothing is added, if the links do not all stand in the data in the order
    given; the object then keeps them.
    """
    before = len(gaps)
    cut: list[bytes] = []
    at = 0
    for digest in children:
        found = data.find(digest, at)
        if found < 0:
            del gaps[before:]
            return False
        cut.append(data[at:found])
        gaps.append(found - at)
        at = found + DIGEST_BYTES
    parts += cut
    parts.append(data[at:])
    return True


def lay_raw(
    objects: Sequence[NewObject],
    first_id: int,
    children: Mapping[int, list[int]],
    stored_at_ms: int,
) -> tuple[bytes, bytes, Sheet]:
    """The key and value of a slab that is not compressed, and its columns, in one go.

    What ``draft``, ``lay_out`` and ``seal_draft`` give one after the other.
    """
    kinds: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    distances: list[int] = []
    gaps: list[int] = []
    parts: list[bytes] = []
    for own, (_, kind, data, links) in enumerate(objects, first_id):
        size = len(data)
        if not links:
            parts.append(data)
        else:
            if _cut_links(data, links, parts, gaps):
                size -= DIGEST_BYTES * len(links)
            else:
                parts.append(data)
                kind |= KEEPS_LINKS
        ids = children.get(own)
        if ids is None:
            ids = [own] * len(links)
            kind = DEAD | kind & KEEPS_LINKS
        for child in ids:
            distances.append(own - child)
        kinds.append(kind)
        lengths.append(size)
        counts.append(len(links))
    body = b"".join(parts)
    digests = [item[0] for item in objects]
    sheet = Sheet(first_id, stored_at_ms, digests, kinds, lengths, counts, distances, gaps, body)
    gap_width = _width(gaps)
    key, value = _seal(sheet, gap_width, CODEC_RAW, 0, _column(gaps, gap_width) + body)
    return key, value, sheet


def _width(numbers: Sequence[int]) -> int:
    largest = max(numbers) if numbers else 0
    if largest < 0x100:
        return 0
    if largest < 0x1_0000:
        return 1
    return 2 if largest < 0x1_0000_0000 else 3


def _column(numbers: Sequence[int], width: int) -> bytes:
    # Most columns of most slabs are bytes, and those need no format string.
    return bytes(numbers) if not width else pack(f"<{len(numbers)}{_CODES[width]}", *numbers)


def _read_column(value: bytes | memoryview, at: int, count: int, width: int) -> Sequence[int]:
    if width:
        return unpack_from(f"<{count}{_CODES[width]}", value, at)
    column = bytes(value[at : at + count])
    if len(column) != count:
        raise ValueError("a column runs over the end")
    return column


def encode(
    draft: Draft, first_id: int, children: Mapping[int, list[int]], stored_at_ms: int
) -> tuple[bytes, bytes]:
    """The key and value of a slab whose objects got ids from ``first_id`` on.

    ``children`` are the ids that each object links to, by its own; what is not there is dead.
    """
    return seal_draft(draft, lay_out(draft, first_id, children, stored_at_ms))


def seal_draft(draft: Draft, sheet: Sheet) -> tuple[bytes, bytes]:
    """The key and value of a slab that was laid out, its payload as it was drafted."""
    return _seal(sheet, draft.gap_width, draft.codec, draft.dictionary, draft.payload)


def lay_out(
    draft: Draft, first_id: int, children: Mapping[int, list[int]], stored_at_ms: int
) -> Sheet:
    """The columns of a slab whose objects got ids from ``first_id`` on. See ``encode``."""
    objects, drafted, lengths, _, _, _, _, gaps, body = draft
    # A draft may be used again, if its transaction is interrupted.
    kinds = drafted.copy()
    counts: list[int] = []
    distances: list[int] = []
    for own, item in enumerate(objects, first_id):
        ids = children.get(own)
        if ids is None:
            # It keeps as many columns as it has links, all pointing at itself.
            ids = [own] * len(item.children)
            kinds[own - first_id] = DEAD | kinds[own - first_id] & KEEPS_LINKS
        counts.append(len(ids))
        for child in ids:
            distances.append(own - child)
    digests = [item[0] for item in objects]
    return Sheet(first_id, stored_at_ms, digests, kinds, lengths, counts, distances, gaps, body)


class Columns:
    """Objects of other slabs on their way into one, with consecutive ids."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._kinds: list[int] = []
        self._lengths: list[int] = []
        self._counts: list[int] = []
        self._distances: list[int] = []
        self._gaps: list[int] = []
        self._parts: list[bytes] = []

    def add(self, slab: Slab, position: int, *, alive: bool) -> None:
        """Take the next object; one that is not alive keeps its place and nothing else."""
        self._digests.append(slab.directory.digest(position))
        if not alive:
            self._kinds.append(DEAD)
            self._lengths.append(0)
            self._counts.append(0)
            return
        data = slab.stripped(position)
        distances, gaps = slab.links(position)
        self._kinds.append(slab.directory.kinds[position])
        self._lengths.append(len(data))
        self._counts.append(len(distances))
        self._distances += distances
        self._gaps += gaps
        self._parts.append(data)

    def add_gap(self, count: int) -> None:
        """Leave so many ids out: they belonged to objects that are gone with their slabs."""
        self._digests += [bytes(DIGEST_BYTES)] * count
        self._kinds += [DEAD] * count
        self._lengths += [0] * count
        self._counts += [0] * count

    def encode(
        self,
        first_id: int,
        stored_at_ms: int,
        compress: Callable[[bytes], tuple[int, int, bytes]],
    ) -> tuple[bytes, bytes]:
        """The key and value of the slab."""
        sheet = Sheet(
            first_id, stored_at_ms, self._digests, self._kinds, self._lengths, self._counts,
            self._distances, self._gaps, b"".join(self._parts),
        )  # fmt: skip
        gap_width = _width(self._gaps)
        payload = compress(_column(self._gaps, gap_width) + sheet.body)
        return _seal(sheet, gap_width, *payload, packed=True)


def join(run: Sequence[Sheet]) -> Sheet:
    """Neighbours laid end to end. Every entry stays what it is, the dead ones too."""
    digests: list[bytes] = []
    kinds: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    distances: list[int] = []
    gaps: list[int] = []
    # The youngest counts: nothing may look older than it is to a collector.
    stored_at_ms = 0
    for sheet in run:
        stored_at_ms = max(stored_at_ms, sheet.stored_at_ms)
        digests += sheet.digests
        kinds += sheet.kinds
        lengths += sheet.lengths
        counts += sheet.counts
        distances += sheet.distances
        gaps += sheet.gaps
    body = b"".join([sheet.body for sheet in run])
    return Sheet(
        run[0].first_id, stored_at_ms, digests, kinds, lengths, counts, distances, gaps, body
    )


def _seal(
    sheet: Sheet,
    gap_width: int,
    codec: int,
    dictionary: int,
    payload: bytes,
    *,
    packed: bool = False,
) -> tuple[bytes, bytes]:
    first_id, stored_at_ms, digests, kinds, lengths, counts, distances, _, _ = sheet
    count = len(kinds)
    length_width, count_width, distance_width = _width(lengths), _width(counts), _width(distances)
    columns = [
        bytes(kinds),
        _column(lengths, length_width),
        _column(counts, count_width),
        _column(distances, distance_width),
    ]
    layout = LAYOUT
    if packed:
        joined = b"".join(columns)
        frame = compress_alone(joined)
        if _COUNT.size + len(frame) < len(joined):
            layout = PACKED_LAYOUT
            columns = [_COUNT.pack(len(frame)), frame]
    header = _HEADER.pack(
        layout,
        codec,
        length_width | count_width << 4,
        distance_width | gap_width << 4,
        count,
        dictionary,
        stored_at_ms,
    )
    directory = b"".join(digests + columns)
    key = slab_key(first_id + count - 1)
    checksum = plain_hash(key + header + directory)[:_CHECKSUM_BYTES]
    return key, b"".join((header, checksum, directory, payload))


def is_raw(value: bytes) -> bool:
    """Is the payload of a stored slab uncompressed?"""
    return value[1] == CODEC_RAW


def read_sheet(key: bytes, value: bytes) -> Sheet:
    """The columns and the payload of a slab that is not compressed."""
    directory = read_directory(key, value)
    gaps = sum(directory.gap_counts())
    body_at = directory.payload_at + (gaps << directory.gap_width)
    return Sheet(
        directory.first_id,
        directory.stored_at_ms,
        [directory.digests],
        list(directory.kinds),
        list(directory.lengths),
        list(directory.child_counts),
        list(directory.distances),
        _read_column(value, directory.payload_at, gaps, directory.gap_width),
        value[body_at:],
    )


def split(sheet: Sheet) -> list[Sheet]:
    """A long slab as several of the usual size, each object in one of them."""
    digests = b"".join(sheet.digests)
    parts: list[Sheet] = []
    start = body_at = gap_at = distance_at = 0
    while start < len(sheet.kinds):
        stop = start
        size = gaps = distances = 0
        while stop < len(sheet.kinds) and (
            stop == start or size + sheet.lengths[stop] <= TARGET_RAW_BYTES
        ):
            size += sheet.lengths[stop]
            distances += sheet.counts[stop]
            gaps += 0 if sheet.kinds[stop] & KEEPS_LINKS else sheet.counts[stop]
            stop += 1
        parts.append(
            Sheet(
                sheet.first_id + start,
                sheet.stored_at_ms,
                [digests[start * DIGEST_BYTES : stop * DIGEST_BYTES]],
                sheet.kinds[start:stop],
                sheet.lengths[start:stop],
                sheet.counts[start:stop],
                sheet.distances[distance_at : distance_at + distances],
                sheet.gaps[gap_at : gap_at + gaps],
                sheet.body[body_at : body_at + size],
            )
        )
        start, body_at = stop, body_at + size
        gap_at, distance_at = gap_at + gaps, distance_at + distances
    return parts


def count_of(value: bytes | memoryview) -> int:
    """How many ids a stored slab covers, read without checking the rest."""
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    count: int = _COUNT.unpack_from(value, _COUNT_AT)[0]
    return count


def stored_at_ms(value: bytes | memoryview) -> int:
    """When a stored slab was written, read without checking the rest."""
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    at_ms: int = _HEADER.unpack_from(value)[-1]
    return at_ms


def digest_at(value: bytes | memoryview, position: int) -> bytes:
    """The digest of one object of a stored slab, without decoding the slab.

    Unchecked: the caller rebuilds a parent with it and checks the parent.
    """
    start = HEADER_BYTES + DIGEST_BYTES * position
    digest = bytes(value[start : start + DIGEST_BYTES])
    if len(digest) != DIGEST_BYTES:
        raise CorruptionError("a slab is shorter than its directory")
    return digest


def is_dead_at(value: bytes | memoryview, position: int) -> bool:
    """Is one entry of a stored slab dead? Unchecked, and without decoding the slab."""
    at = HEADER_BYTES + DIGEST_BYTES * count_of(value) + position
    if value[0] == LAYOUT:
        if at >= len(value):
            raise CorruptionError("a slab is shorter than its directory")
        return value[at] & ~KEEPS_LINKS == DEAD
    # Packed, the columns may take less than a byte for each entry. Which ids these are does
    # not matter here.
    directory = read_directory(slab_key(MAX_ID), value, check=False)
    return directory.kinds[position] & ~KEEPS_LINKS == DEAD


class Directory(NamedTuple):
    """What a slab says of its objects."""

    first_id: int
    objects: int
    digests: bytes
    kinds: bytes
    lengths: Sequence[int]
    child_counts: Sequence[int]
    # How far back the children of all objects lie, in one row; child_counts divides it.
    distances: Sequence[int]
    gap_width: int
    codec: int
    dictionary: int
    stored_at_ms: int
    payload_at: int
    # The sum of the lengths.
    size_bytes: int

    def digest(self, position: int) -> bytes:
        """The digest of the object at ``position``."""
        return self.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]

    def gap_counts(self) -> Sequence[int]:
        """How many links were cut out of each object."""
        if self.kinds.isascii():
            # None has the high bit, as mostly.
            return self.child_counts
        return [
            0 if kind & KEEPS_LINKS else number
            for kind, number in zip(self.kinds, self.child_counts, strict=True)
        ]

    def children(self, position: int, start: int) -> tuple[int, ...]:
        """The ids that an object links to; ``start`` is where its distances begin."""
        own = self.first_id + position
        number = self.child_counts[position]
        return tuple([own - far for far in self.distances[start : start + number]])


def read_directory(
    key: bytes | memoryview, value: bytes | memoryview, *, check: bool = True
) -> Directory:
    """Read everything of a slab but its payload.

    ``check`` compares the checksum. A reader of objects may leave that out: what it
    takes from here it proves by the digest of the object. Who follows ids without
    reading objects may not.
    """
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    layout, codec, widths_a, widths_b, count, dictionary, stored_at_ms = _HEADER.unpack_from(value)
    last_id = int.from_bytes(key, "big")
    if (
        layout not in (LAYOUT, PACKED_LAYOUT)
        or codec not in (CODEC_RAW, CODEC_ZSTD)
        or (widths_a | widths_b) & _NO_WIDTH
        or count < 1
    ):
        raise CorruptionError(f"the slab ending in id {last_id} has an unknown layout")
    try:
        kinds_at = HEADER_BYTES + DIGEST_BYTES * count
        digests = bytes(value[HEADER_BYTES:kinds_at])
        columns, payload_at = value, 0
        if layout == PACKED_LAYOUT:
            columns, payload_at = _inflated_columns(value, kinds_at)
            kinds_at = 0
        at = kinds_at + count
        kinds = bytes(columns[kinds_at:at])
        if len(kinds) != count:
            raise ValueError("a column runs over the end")
        width = widths_a & 15
        lengths = _read_column(columns, at, count, width)
        at += count << width
        width = widths_a >> 4
        counts = _read_column(columns, at, count, width)
        at += count << width
        width = widths_b & 15
        links = sum(counts)
        distances = _read_column(columns, at, links, width) if links else b""
        at += links << width
        if layout == PACKED_LAYOUT:
            if at != len(columns):
                raise ValueError("columns that are too long")
            at = payload_at
    except (ValueError, OverflowError, MemoryError, struct.error) as exc:
        raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory") from exc
    size_bytes = sum(lengths)
    if size_bytes > _MAX_RAW_BYTES:
        # The frame may well agree; no slab that was ever written is this long (P7).
        raise CorruptionError(f"the slab ending in id {last_id} claims {size_bytes} bytes")
    if check:
        covered = bytes(key) + bytes(value[: _HEADER.size]) + bytes(value[HEADER_BYTES:at])
        if plain_hash(covered, _CHECKSUM_BYTES) != bytes(value[_HEADER.size : HEADER_BYTES]):
            raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory")
    return Directory(
        last_id - count + 1, count, digests, kinds, lengths, counts, distances, widths_b >> 4,
        codec, dictionary, stored_at_ms, at, size_bytes,
    )  # fmt: skip


def _inflated_columns(value: bytes | memoryview, at: int) -> tuple[bytes, int]:
    """The columns of layout 2 behind the digests, and where they end in the value."""
    start = at + _COUNT.size
    stop = start + _COUNT.unpack_from(value, at)[0]
    if stop > len(value):
        raise ValueError("a frame runs over the end")
    return inflate_alone(bytes(value[start:stop]), _MAX_RAW_BYTES), stop


class Slab:
    """A decoded slab: the directory and the inflated objects."""

    __slots__ = (
        "_child_counts",
        "_child_starts",
        "_distances",
        "_gap_starts",
        "_gaps",
        "_starts",
        "digests",
        "directory",
        "first_id",
        "kinds",
        "last_id",
        "raw",
        "size_bytes",
    )

    def __init__(self, directory: Directory, inflate: Callable[[int], bytes]) -> None:
        """Decode; ``inflate`` gives the payload if it has exactly so many bytes."""
        self.directory = directory
        self.first_id = directory.first_id
        self.last_id = directory.first_id + directory.objects - 1
        # Those of the directory that every object needs, closer at hand.
        self.digests, self.kinds = directory.digests, directory.kinds
        self._distances = directory.distances
        self._child_counts = counts = directory.child_counts
        self._child_starts = self._gap_starts = [0, *accumulate(counts)]
        gap_counts = directory.gap_counts()
        if gap_counts is not counts:
            self._gap_starts = [0, *accumulate(gap_counts)]
        gaps = self._gap_starts[-1]
        self._starts = [*accumulate(directory.lengths, initial=gaps << directory.gap_width)]
        self.raw = inflate(self._starts[-1])
        self._gaps = _read_column(self.raw, 0, gaps, directory.gap_width)
        #: What keeping this slab in memory costs, roughly.
        self.size_bytes = len(self.raw) + (DIGEST_BYTES + 64) * directory.objects + 256

    def kind(self, position: int) -> int:
        """The kind of one object, or DEAD."""
        return self.directory.kinds[position] & ~KEEPS_LINKS

    def children(self, position: int) -> tuple[int, ...]:
        """The ids that one object links to."""
        return self.directory.children(position, self._child_starts[position])

    def links(self, position: int) -> tuple[Sequence[int], Sequence[int]]:
        """How far back the children of one object lie, and the gaps they left in it."""
        start, stop = self._child_starts[position], self._child_starts[position + 1]
        gap_start, gap_stop = self._gap_starts[position], self._gap_starts[position + 1]
        return self.directory.distances[start:stop], self._gaps[gap_start:gap_stop]

    def stripped(self, position: int) -> bytes:
        """One object's bytes as they lie here, without its links."""
        return self.raw[self._starts[position] : self._starts[position + 1]]

    def data(self, position: int, digest_of_id: Callable[[int], bytes]) -> bytes:
        """One object's bytes, its links put back in."""
        number = self._child_counts[position]
        raw = self.raw
        at = self._starts[position]
        end = self._starts[position + 1]
        if not number or self.kinds[position] & KEEPS_LINKS:
            return raw[at:end]
        first_gap = self._gap_starts[position]
        first_link = self._child_starts[position]
        if number == 1:
            # As below; most nodes link to their parent and to nothing else, mostly in the
            # same slab.
            cut = min(at + self._gaps[first_gap], end)
            distance = self._distances[first_link]
            if distance <= position:
                start = (position - distance) * DIGEST_BYTES
                digest = self.digests[start : start + DIGEST_BYTES]
            else:
                digest = digest_of_id(self.first_id + position - distance)
            return b"".join((raw[at:cut], digest, raw[cut:end]))
        own_id = self.first_id + position
        distances = self._distances[first_link : first_link + number]
        parts: list[bytes] = []
        for gap, distance in zip(
            self._gaps[first_gap : first_gap + number], distances, strict=True
        ):
            # Gaps that are damaged may run over the end of the object, not into the next one.
            parts.append(raw[at : min(at + gap, end)])
            parts.append(digest_of_id(own_id - distance))
            at += gap
        parts.append(raw[at:end])
        return b"".join(parts)
