"""A slab: a run of objects with consecutive ids, stored as one LMDB value.

    key      id of the last object, 8 bytes big-endian
    value    header     28 bytes: layout below, then a checksum of key and directory
             directory  columns: digests, kinds, lengths, child counts, child ids
             payload    gaps of the links, then the objects, raw or one zstd frame

In layout 1 no column is compressed: it is quick to write and to read. In layout 2, for packed
slabs (see ``packing``), all columns but the digests are one zstd frame, with its length before it.

Links are not stored as digests. A digest is 32 bytes that no compressor shrinks, and a list that
grows by one item repeats the links to its other items. So each link is cut out of its object, and
restored from the child's own slab, where its digest is stored once. The child's id, which the
collector needs anyway, leads to that slab. A *gap* is the number of bytes between a link and the
link before it, or the start of the object: it says where to insert the digest. A read then compares
the rebuilt bytes with the object's digest (P1), which also proves every id and gap that was used.

Everything is little-endian. The items of a column have the width that its largest number needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct, pack, unpack_from
from typing import Final, NamedTuple

from casstore.engine.compression import CODEC_RAW as CODEC_RAW
from casstore.engine.compression import CODEC_ZSTD as CODEC_ZSTD
from casstore.engine.compression import compress_alone, inflate_alone
from casstore.engine.protocol import MAX_OBJECT_BYTES, NewObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, plain_hash

LAYOUT: Final = 1
PACKED_LAYOUT: Final = 2

# A kind is at most 126. This bit in the stored kind marks an object whose links were not cut out.
KEEPS_LINKS: Final = 0x80
# In place of the kind of a deleted object, which has no name but keeps its position and id.
DEAD: Final = 0x7F

# layout, codec, widths of (lengths, child counts), widths of (child ids, gaps),
# number of objects, dictionary, time of storing in ms
_HEADER: Final = Struct("<BBBBIIQ")
_CHECKSUM_BYTES: Final = 8
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM_BYTES
_CODES: Final = "BHIQ"
# A width is 0 to 3, an index into _CODES. A byte holds two widths, and these bits are never set.
_NO_WIDTH: Final = 0xCC
_COUNT: Final = Struct("<I")
_COUNT_AT: Final = 4

# How many uncompressed bytes and objects a slab collects before the next one starts. A read
# inflates a whole slab, so this balances the size of the store against the time to read one object.
TARGET_RAW_BYTES: Final = 65_536
MAX_OBJECTS: Final = 4096
# The uncompressed length of a packed slab. Large slabs compress better and waste less of their last
# page. Packed objects are mostly read many at a time; reading a single one takes 0.3 ms.
PACKED_RAW_BYTES: Final = 262_144
_MAX_RAW_BYTES: Final = MAX_OBJECT_BYTES + (1 << 20)

#: Returns codec, dictionary number and payload for uncompressed bytes.
Compress = Callable[[bytes], tuple[int, int, bytes]]

ID_BYTES: Final = 8
MAX_ID: Final = (1 << 64) - 1


def slab_key(object_id: int) -> bytes:
    """The key of a slab whose last id is ``object_id``; keys sort like ids."""
    return object_id.to_bytes(ID_BYTES, "big")


def read_id(row: bytes | memoryview) -> int:
    """The id that is encoded as ``slab_key`` does it."""
    if len(row) != ID_BYTES:
        raise CorruptionError(f"an id has {len(row)} bytes instead of {ID_BYTES}")
    return int.from_bytes(row, "big")


def _cut_links(data: bytes, children: Sequence[bytes], parts: list[bytes], gaps: list[int]) -> bool:
    """Add the data without its links to ``parts``, and the gaps of the links to ``gaps``.

    False, and nothing is added, if the data does not contain all digests of ``children`` in this
    order: then the object is stored with its links.
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


def _width(numbers: Sequence[int]) -> int:
    largest = max(numbers) if numbers else 0
    if largest < 0x100:
        return 0
    if largest < 0x1_0000:
        return 1
    return 2 if largest < 0x1_0000_0000 else 3


def _column(numbers: Sequence[int], width: int) -> bytes:
    # The common case, items of one byte, needs no format string.
    return bytes(numbers) if not width else pack(f"<{len(numbers)}{_CODES[width]}", *numbers)


def _read_column(value: bytes | memoryview, at: int, count: int, width: int) -> Sequence[int]:
    if width:
        return unpack_from(f"<{count}{_CODES[width]}", value, at)
    column = bytes(value[at : at + count])
    if len(column) != count:
        raise ValueError("a column runs over the end")
    return column


class Columns:
    """Collects objects with consecutive ids, column by column, and encodes them as a slab."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._kinds: list[int] = []
        self._lengths: list[int] = []
        self._counts: list[int] = []
        # An object's id minus that of each child: short numbers, and never negative, as the child's
        # id is lower.
        self._distances: list[int] = []
        self._gaps: list[int] = []
        self._parts: list[bytes] = []

    def add_new(
        self,
        first_id: int,
        objects: Sequence[NewObject],
        links: Sequence[Sequence[int] | None],
    ) -> None:
        """Add new objects with ids from ``first_id`` on, and the ids that each links to.

        ``links`` has None for an object that was deleted before the log was applied. It keeps its
        id and its bytes, but its kind becomes DEAD. The ids of its children are unknown, so its own
        id is stored in their place.
        """
        object_id = first_id
        for (digest, kind, data, children), linked in zip(objects, links, strict=True):
            size = len(data)
            if not children:
                self._parts.append(data)
            elif _cut_links(data, children, self._parts, self._gaps):
                size -= DIGEST_BYTES * len(children)
            else:
                self._parts.append(data)
                kind |= KEEPS_LINKS
            if linked is None:
                linked = [object_id] * len(children)
                kind = DEAD | kind & KEEPS_LINKS
            if linked:
                self._distances += [object_id - child for child in linked]
            self._digests.append(digest)
            self._kinds.append(kind)
            self._lengths.append(size)
            self._counts.append(len(linked))
            object_id += 1

    def add_stored(self, slab: Slab, position: int, *, alive: bool) -> None:
        """Add the object at ``position`` of another slab; if it is not alive, only its digest."""
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
        """Add dead objects for ``count`` ids whose slabs were deleted: a slab has no gap in ids."""
        self._digests += [bytes(DIGEST_BYTES)] * count
        self._kinds += [DEAD] * count
        self._lengths += [0] * count
        self._counts += [0] * count

    def encode(
        self, first_id: int, stored_at_ms: int, compress: Compress, *, packed: bool = False
    ) -> tuple[bytes, bytes]:
        """The key and value of the slab; ``packed``: use layout 2 if that is shorter."""
        gap_width = _width(self._gaps)
        codec, dictionary, payload = compress(
            b"".join((_column(self._gaps, gap_width), *self._parts))
        )
        count = len(self._kinds)
        length_width = _width(self._lengths)
        count_width = _width(self._counts)
        distance_width = _width(self._distances)
        columns = [
            bytes(self._kinds),
            _column(self._lengths, length_width),
            _column(self._counts, count_width),
            _column(self._distances, distance_width),
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
        directory = b"".join(self._digests + columns)
        key = slab_key(first_id + count - 1)
        checksum = plain_hash(key + header + directory)[:_CHECKSUM_BYTES]
        return key, b"".join((header, checksum, directory, payload))


def encode(
    objects: Sequence[NewObject],
    links: Sequence[Sequence[int] | None],
    first_id: int,
    stored_at_ms: int,
    compress: Compress,
) -> tuple[bytes, bytes]:
    """The key and value of a slab of new objects with consecutive ids; see ``add_new``."""
    columns = Columns()
    columns.add_new(first_id, objects, links)
    return columns.encode(first_id, stored_at_ms, compress)


def uncompressed(raw: bytes) -> tuple[int, int, bytes]:
    """Compress nothing: codec, dictionary number and payload of a slab for the memtable."""
    return CODEC_RAW, 0, raw


def count_of(value: bytes | memoryview) -> int:
    """How many ids a stored slab covers, read without checking the rest."""
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    count: int = _COUNT.unpack_from(value, _COUNT_AT)[0]
    return count


def stored_at_ms(value: bytes | memoryview) -> int:
    """When the youngest object of a stored slab was put, read without checking the rest."""
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    at_ms: int = _HEADER.unpack_from(value)[-1]
    return at_ms


def digest_at(value: bytes | memoryview, position: int) -> bytes:
    """The digest of one object of a stored slab, without decoding the slab.

    The slab's checksum is not compared. The caller inserts the digest into a parent, and compares
    the parent with its own digest.
    """
    start = HEADER_BYTES + DIGEST_BYTES * position
    digest = bytes(value[start : start + DIGEST_BYTES])
    if len(digest) != DIGEST_BYTES:
        raise CorruptionError("a slab is shorter than its directory")
    return digest


def is_dead_at(value: bytes | memoryview, position: int) -> bool:
    """True if one object of a stored slab is dead. The slab's checksum is not compared."""
    at = HEADER_BYTES + DIGEST_BYTES * count_of(value) + position
    if value[0] == LAYOUT:
        if at >= len(value):
            raise CorruptionError("a slab is shorter than its directory")
        return value[at] & ~KEEPS_LINKS == DEAD
    # In layout 2 the kinds are compressed. The key, which has the ids, does not matter here.
    directory = read_directory(slab_key(MAX_ID), value, check=False)
    return directory.kinds[position] & ~KEEPS_LINKS == DEAD


class SlabDirectory(NamedTuple):
    """The decoded header and directory of a slab. A position counts its objects from 0."""

    first_id: int
    objects: int
    digests: bytes
    kinds: bytes
    lengths: Sequence[int]
    child_counts: Sequence[int]
    # The distances to the children of all objects, in one column; child_counts divides it.
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
            # The common case: no kind has the high bit.
            return self.child_counts
        return [
            0 if kind & KEEPS_LINKS else number
            for kind, number in zip(self.kinds, self.child_counts, strict=True)
        ]

    def children(self, position: int, start: int) -> tuple[int, ...]:
        """The ids that an object links to; ``start``: where they begin in ``distances``."""
        object_id = self.first_id + position
        number = self.child_counts[position]
        return tuple([object_id - far for far in self.distances[start : start + number]])


def read_directory(
    key: bytes | memoryview, value: bytes | memoryview, *, check: bool = True
) -> SlabDirectory:
    """Decode a stored slab without its payload; CorruptionError if that is impossible.

    ``check`` also compares the checksum. Code that follows ids without reading objects must do
    that. A reader of objects need not: the digest of an object proves everything that is taken from
    the directory to rebuild it.
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
                raise ValueError(f"the columns end at {at}, not at {len(columns)}")
            at = payload_at
    except (ValueError, OverflowError, MemoryError, struct.error) as exc:
        raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory") from exc
    size_bytes = sum(lengths)
    if size_bytes > _MAX_RAW_BYTES:
        # Compare with the limit before inflating: a crafted frame may indeed be this long (P7).
        raise CorruptionError(
            f"the slab ending in id {last_id} claims to hold {size_bytes} bytes; the limit is "
            f"{_MAX_RAW_BYTES}"
        )
    if check:
        covered = bytes(key) + bytes(value[: _HEADER.size]) + bytes(value[HEADER_BYTES:at])
        if plain_hash(covered, _CHECKSUM_BYTES) != bytes(value[_HEADER.size : HEADER_BYTES]):
            raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory")
    return SlabDirectory(
        last_id - count + 1, count, digests, kinds, lengths, counts, distances, widths_b >> 4,
        codec, dictionary, stored_at_ms, at, size_bytes,
    )  # fmt: skip


def _inflated_columns(value: bytes | memoryview, at: int) -> tuple[bytes, int]:
    """The columns of a slab of layout 2, decompressed, and the offset behind their frame.

    The frame begins at ``at``.
    """
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

    def __init__(self, directory: SlabDirectory, inflate: Callable[[int], bytes]) -> None:
        """Decode; ``inflate`` returns the payload, given its exact length."""
        self.directory = directory
        self.first_id = directory.first_id
        self.last_id = directory.first_id + directory.objects - 1
        # Copied from the directory for speed: every read of an object uses them.
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
        #: The approximate memory that this slab takes.
        self.size_bytes = len(self.raw) + (DIGEST_BYTES + 64) * directory.objects + 256

    def kind(self, position: int) -> int:
        """The kind of one object, or DEAD."""
        return self.directory.kinds[position] & ~KEEPS_LINKS

    def children(self, position: int) -> tuple[int, ...]:
        """The ids that one object links to."""
        return self.directory.children(position, self._child_starts[position])

    def links(self, position: int) -> tuple[Sequence[int], Sequence[int]]:
        """The distances to the children of one object, and the gaps of their links."""
        start, stop = self._child_starts[position], self._child_starts[position + 1]
        gap_start, gap_stop = self._gap_starts[position], self._gap_starts[position + 1]
        return self.directory.distances[start:stop], self._gaps[gap_start:gap_stop]

    def stripped(self, position: int) -> bytes:
        """One object's bytes as stored, without its links."""
        return self.raw[self._starts[position] : self._starts[position + 1]]

    def data(self, position: int, digest_of_id: Callable[[int], bytes]) -> bytes:
        """One object's bytes, with its links restored."""
        number = self._child_counts[position]
        raw = self.raw
        at = self._starts[position]
        end = self._starts[position + 1]
        if not number or self.kinds[position] & KEEPS_LINKS:
            return raw[at:end]
        first_gap = self._gap_starts[position]
        first_link = self._child_starts[position]
        if number == 1:
            # As below, faster: most nodes link only to their parent, mostly in the same slab.
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
            # ``min``: a damaged gap must not reach into the next object.
            parts.append(raw[at : min(at + gap, end)])
            parts.append(digest_of_id(own_id - distance))
            at += gap
        parts.append(raw[at:end])
        return b"".join(parts)
