"""A slab: a run of objects with consecutive ids, stored as one LMDB value.

    key      id of the last object, 8 bytes big-endian
    value    header     28 bytes: layout below, then a checksum of key and directory
             directory  columns: digests, kinds, lengths, child counts, child ids
             payload    gaps of the links, then the objects, raw or one zstd frame

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
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct, pack, unpack_from
from typing import Final, NamedTuple

from casstore.engine.protocol import MAX_OBJECT_BYTES, NewObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, plain_hash

LAYOUT: Final = 1

CODEC_RAW: Final = 0
CODEC_ZSTD: Final = 1

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

# How many raw bytes and objects a slab collects before the next one starts. A read
# inflates a whole slab, so this trades the size of the store against the cost of
# reading one object from it.
TARGET_RAW_BYTES: Final = 65_536
MAX_OBJECTS: Final = 4096
_MAX_RAW_BYTES: Final = MAX_OBJECT_BYTES + (1 << 20)


MAX_ID: Final = (1 << 64) - 1


def slab_key(object_id: int) -> bytes:
    """The key under which a slab ending in ``object_id`` is stored; keys sort like ids."""
    return object_id.to_bytes(8, "big")


def read_id(row: bytes | memoryview) -> int:
    """The id that a row of the index holds."""
    if len(row) != 8:
        raise CorruptionError(f"an index row of {len(row)} bytes")
    return int.from_bytes(row, "big")


class Draft(NamedTuple):
    """Objects on their way into one slab, with all the work done that needs no ids."""

    objects: list[NewObject]
    stripped: list[bool]
    lengths: list[int]
    gap_width: int
    codec: int
    dictionary: int
    payload: bytes


def draft(objects: list[NewObject], compress: Callable[[bytes], tuple[int, int, bytes]]) -> Draft:
    """Cut the links out and compress: everything that can be done outside the write lock.

    ``compress`` turns raw bytes into (codec, dictionary, payload).
    """
    stripped: list[bool] = []
    parts: list[bytes] = []
    lengths: list[int] = []
    gaps: list[int] = []
    for item in objects:
        cut = _cut_links(item.data, item.children) if item.children else (item.data, [])
        stripped.append(cut is not None)
        if cut is None:
            parts.append(item.data)
            lengths.append(len(item.data))
            continue
        rest, own_gaps = cut
        parts.append(rest)
        lengths.append(len(rest))
        gaps.extend(own_gaps)
    gap_width = _width(gaps)
    raw = _column(gaps, gap_width) + b"".join(parts)
    codec, dictionary, payload = compress(raw)
    return Draft(objects, stripped, lengths, gap_width, codec, dictionary, payload)


def _cut_links(data: bytes, children: Sequence[bytes]) -> tuple[bytes, list[int]] | None:
    """The data without its links, and the distance of each from the one before.

    None if the links do not all stand in the data in the order given; the object
    then keeps them.
    """
    kept: list[bytes] = []
    gaps: list[int] = []
    at = 0
    for digest in children:
        found = data.find(digest, at)
        if found < 0:
            return None
        kept.append(data[at:found])
        gaps.append(found - at)
        at = found + DIGEST_BYTES
    kept.append(data[at:])
    return b"".join(kept), gaps


def _width(numbers: Sequence[int]) -> int:
    largest = max(numbers, default=0)
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
    draft: Draft, first_id: int, dead: Sequence[bool], children: list[list[int]], stored_at_ms: int
) -> tuple[bytes, bytes]:
    """The key and value of a slab whose objects got ids from ``first_id`` on.

    ``children`` are the ids that each object links to.
    """
    count = len(draft.objects)
    kinds = bytes(
        [
            (DEAD if gone else item.kind) | (0 if cut else KEEPS_LINKS)
            for item, cut, gone in zip(draft.objects, draft.stripped, dead, strict=True)
        ]
    )
    counts = [len(ids) for ids in children]
    # Distances are small where ids are large, and never negative (a child is older).
    distances = [first_id + at - child for at, ids in enumerate(children) for child in ids]
    widths = _width(draft.lengths), _width(counts), _width(distances), draft.gap_width
    header = _HEADER.pack(
        LAYOUT,
        draft.codec,
        widths[0] | widths[1] << 4,
        widths[2] | widths[3] << 4,
        count,
        draft.dictionary,
        stored_at_ms,
    )
    directory = b"".join(
        [
            b"".join([item.digest for item in draft.objects]),
            kinds,
            _column(draft.lengths, widths[0]),
            _column(counts, widths[1]),
            _column(distances, widths[2]),
        ]
    )
    key = slab_key(first_id + count - 1)
    checksum = plain_hash(key + header + directory, _CHECKSUM_BYTES)
    return key, b"".join((header, checksum, directory, draft.payload))


def count_of(value: bytes | memoryview) -> int:
    """How many ids a stored slab covers, read without checking the rest."""
    if len(value) < HEADER_BYTES:
        raise CorruptionError(f"a slab of {len(value)} bytes is shorter than its header")
    count: int = _HEADER.unpack_from(value)[4]
    return count


def digest_at(value: bytes | memoryview, position: int) -> bytes:
    """The digest of one object of a stored slab, without decoding the slab.

    Unchecked: the caller rebuilds a parent with it and checks the parent.
    """
    start = HEADER_BYTES + DIGEST_BYTES * position
    digest = bytes(value[start : start + DIGEST_BYTES])
    if len(digest) != DIGEST_BYTES:
        raise CorruptionError("a slab is shorter than its directory")
    return digest


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

    def digest(self, position: int) -> bytes:
        """The digest of the object at ``position``."""
        return self.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES]

    def gap_counts(self) -> Sequence[int]:
        """How many links were cut out of each object."""
        if max(self.kinds) < KEEPS_LINKS:
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
    count = count_of(value)
    layout, codec, widths_a, widths_b, _, dictionary, stored_at_ms = _HEADER.unpack_from(value)
    last_id = int.from_bytes(key, "big")
    widths = widths_a & 15, widths_a >> 4, widths_b & 15, widths_b >> 4
    if layout != LAYOUT or codec not in (CODEC_RAW, CODEC_ZSTD) or max(widths) > 3 or count < 1:
        raise CorruptionError(f"the slab ending in id {last_id} has an unknown layout")
    try:
        at = HEADER_BYTES
        digests = bytes(value[at : at + DIGEST_BYTES * count])
        at += DIGEST_BYTES * count
        kinds = bytes(_read_column(value, at, count, 0))
        at += count
        lengths = _read_column(value, at, count, widths[0])
        at += count << widths[0]
        counts = _read_column(value, at, count, widths[1])
        at += count << widths[1]
        links = sum(counts)
        distances = _read_column(value, at, links, widths[2])
        at += links << widths[2]
    except (ValueError, OverflowError, MemoryError, struct.error) as exc:
        raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory") from exc
    if sum(lengths) > _MAX_RAW_BYTES:
        # The frame may well agree; no slab that was ever written is this long (P7).
        raise CorruptionError(f"the slab ending in id {last_id} claims {sum(lengths)} bytes")
    if check:
        covered = bytes(key) + bytes(value[: _HEADER.size]) + bytes(value[HEADER_BYTES:at])
        if plain_hash(covered, _CHECKSUM_BYTES) != bytes(value[_HEADER.size : HEADER_BYTES]):
            raise CorruptionError(f"the slab ending in id {last_id} has a damaged directory")
    return Directory(
        last_id - count + 1, count, digests, kinds, lengths, counts, distances, widths[3],
        codec, dictionary, stored_at_ms, at,
    )  # fmt: skip


class Slab:
    """A decoded slab: the directory and the inflated objects."""

    __slots__ = ("_child_starts", "_gap_starts", "_gaps", "_starts", "directory", "raw")

    def __init__(self, directory: Directory, inflate: Callable[[int], bytes]) -> None:
        """Decode; ``inflate`` gives the payload if it has exactly so many bytes."""
        self.directory = directory
        counts = directory.child_counts
        gap_counts = directory.gap_counts()
        gaps = sum(gap_counts)
        self.raw = inflate((gaps << directory.gap_width) + sum(directory.lengths))
        self._starts = [*accumulate(directory.lengths, initial=gaps << directory.gap_width)]
        self._child_starts = [0, *accumulate(counts)]
        self._gap_starts = (
            self._child_starts if gap_counts is counts else [0, *accumulate(gap_counts)]
        )
        self._gaps = _read_column(self.raw, 0, gaps, directory.gap_width)

    @property
    def size_bytes(self) -> int:
        """What keeping this slab in memory costs, roughly."""
        return len(self.raw) + len(self.directory.digests) + 64 * self.directory.objects + 256

    def kind(self, position: int) -> int:
        """The kind of one object, or DEAD."""
        return self.directory.kinds[position] & ~KEEPS_LINKS

    def children(self, position: int) -> tuple[int, ...]:
        """The ids that one object links to."""
        return self.directory.children(position, self._child_starts[position])

    def stripped(self, position: int) -> bytes:
        """One object's bytes as they lie here, without its links."""
        start = self._starts[position]
        return self.raw[start : start + self.directory.lengths[position]]

    def data(self, position: int, digest_of_id: Callable[[int], bytes]) -> bytes:
        """One object's bytes, its links put back in."""
        data = self.stripped(position)
        number = self.directory.child_counts[position]
        if not number or self.directory.kinds[position] & KEEPS_LINKS:
            return data
        gap_start = self._gap_starts[position]
        parts: list[bytes] = []
        at = 0
        for gap, child in zip(
            self._gaps[gap_start : gap_start + number], self.children(position), strict=True
        ):
            parts.append(data[at : at + gap])
            parts.append(digest_of_id(child))
            at += gap
        parts.append(data[at:])
        return b"".join(parts)
