"""The node index as bytes: which nodes a graph has, by position and by the hash of their ids.

Nodes are numbered by insertion order: the first has position 0. A manifest holds the newest
nodes itself (the *tail*, at most 15 of them) and links to one *spine* that covers the others:

    index  = [spine link or nil, id hashes, distances, node links]     the field of a manifest
    spine  = [6, id hashes of its pages, [run links] for level 4, 3, 2, 1, [page links]]
    page   = [0, distances, node links]                                16 nodes
    run    = [level, id hashes, part links]                            level 1 and 2
           | [level, bucket links, part links]                         level 3 and 4
    bucket = [5, entries]  |  [5, entries, … eight times]              of a level 3, a level 4 run

A full tail becomes a page; eight pages become a run of level 1, eight runs of a level one of the
next, up to level 4. So node links and distances are stored once, in pages, and the shape of
the index follows from the number of nodes alone. A distance is how many positions before a
node its parent is; 0: it has none.

A hash is the first four bytes of the BLAKE3 of an id. It is a hint: the reader checks that the
node at that position has the id. Spines and runs of level 1 and 2 hold the hashes in order.
A run of level 3 splits its 8,192 hashes by their first four bits into 16 buckets of
entries (hash, position within the run as two bytes); a bucket of level 4 holds those of
its eight parts. So a lookup reads one bucket of each large run and never all of its hashes.

The index is a function of the sequence of nodes: ids, distances and digests (P4). Every
decoder refuses what no encoder writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import (
    ROLE_LINK,
    inspect,
    is_link,
    link_bytes,
    list_header,
    pack_checked,
    trusted_link,
    unpack_trusted,
)
from casstore.format.digest import DIGEST_BYTES, plain_hash

PAGE_NODES: Final = 16
FANOUT: Final = 8
HASH_BYTES: Final = 4
#: The level of the largest runs, and the first whose hashes are split into buckets.
TOP_LEVEL: Final = 4
SPLIT_LEVEL: Final = 3
BUCKETS: Final = 16
_OFFSET_BYTES: Final = 2
ENTRY_BYTES: Final = HASH_BYTES + _OFFSET_BYTES
_BUCKET_TAG: Final = 5
_SPINE_TAG: Final = 6
_PAGE_TAG: Final = 0

#: How many nodes a run of each level covers; level 0 is a page.
RUN_NODES: Final = tuple(PAGE_NODES * FANOUT**level for level in range(TOP_LEVEL + 1))
#: How many pages a run of each level covers.
RUN_PAGES: Final = tuple(FANOUT**level for level in range(TOP_LEVEL + 1))

_NIL: Final = b"\xc0"
_SHORT_LISTS: Final = [list_header(count) for count in range(PAGE_NODES + 1)]
_LINK: Final = link_bytes(ROLE_LINK, b"")
_PAGE_HEAD: Final = list_header(3) + bytes((_PAGE_TAG,))
_SPINE_HEAD: Final = list_header(3 + TOP_LEVEL) + bytes((_SPINE_TAG,))
_TAIL_FIELDS: Final = 4


class Tail(NamedTuple):
    """The index as a manifest holds it: the spine, and the nodes after its last page."""

    spine: bytes | None = None
    hashes: bytes = b""
    distances: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()


class IndexPage(NamedTuple):
    """Sixteen consecutive nodes."""

    distances: tuple[int, ...]
    digests: tuple[bytes, ...]


class IndexRun(NamedTuple):
    """Eight runs of the level below, or pages. It has either hashes or buckets."""

    level: int
    hashes: bytes
    buckets: tuple[bytes, ...]
    parts: tuple[bytes, ...]


class Bucket(NamedTuple):
    """Hashes of a large run that start with the same four bits, with their positions."""

    parts: tuple[bytes, ...]


class Spine(NamedTuple):
    """All whole pages of a graph: its runs by level, level 0 (pages) first."""

    #: The hashes of the pages of level 0.
    hashes: bytes
    runs: tuple[tuple[bytes, ...], ...]

    @property
    def page_count(self) -> int:
        """How many pages it covers."""
        return sum([len(runs) * RUN_PAGES[level] for level, runs in enumerate(self.runs)])


#: An object of the kind INDEX, decoded.
Piece = IndexPage | IndexRun | Bucket | Spine

NO_NODES: Final = Tail()
NO_PAGES: Final = Spine(b"", ((),) * (TOP_LEVEL + 1))


def hash_of(id_bytes: bytes) -> bytes:
    """The hash of a node's id, given the id's UTF-8."""
    return plain_hash(id_bytes)[:HASH_BYTES]


def id_hash(node_id: str) -> bytes:
    """The hash of a node's id."""
    return hash_of(node_id.encode())


def run_counts(page_count: int) -> list[int]:
    """How many runs of each level cover ``page_count`` pages, level 0 (pages) first."""
    counts = [page_count // pages % FANOUT for pages in RUN_PAGES]
    counts[TOP_LEVEL] = page_count // RUN_PAGES[TOP_LEVEL]
    return counts


def bucket_of(hashed: bytes) -> int:
    """The number of the bucket that a hash belongs to."""
    return hashed[0] >> 4


# --- encoding ---------------------------------------------------------------------------------


def _links(digests: tuple[bytes, ...] | list[bytes]) -> bytes:
    if not digests:
        return _SHORT_LISTS[0]
    count = len(digests)
    head = _SHORT_LISTS[count] if count <= PAGE_NODES else list_header(count)
    return head + _LINK + _LINK.join(digests)


def encode_tail(tail: Tail) -> tuple[bytes, list[bytes]]:
    """The field of a manifest, and the digests it links to, in order."""
    spine, hashes, distances, digests = tail
    if spine is None:
        if not digests:
            return _NIL, []
        head, links = _NIL, list(digests)
    else:
        head, links = _LINK + spine, [spine, *digests]
    listed = _SHORT_LISTS[len(digests)] + b"".join([_LINK + digest for digest in digests])
    return b"".join((b"\x94", head, pack_checked(hashes), pack_checked(distances), listed)), links


def encode_piece(piece: Piece) -> tuple[bytes, list[bytes]]:
    """The bytes of an object of the index, and the digests it links to, in order."""
    if isinstance(piece, IndexPage):
        data = b"".join((_PAGE_HEAD, pack_checked(piece.distances), _links(piece.digests)))
        return data, list(piece.digests)
    if isinstance(piece, IndexRun):
        head = list_header(3) + bytes((piece.level,))
        if piece.level < SPLIT_LEVEL:
            return head + pack_checked(piece.hashes) + _links(piece.parts), list(piece.parts)
        links = [*piece.buckets, *piece.parts]
        return head + _links(piece.buckets) + _links(piece.parts), links
    if isinstance(piece, Bucket):
        head = list_header(1 + len(piece.parts)) + bytes((_BUCKET_TAG,))
        return head + b"".join([pack_checked(part) for part in piece.parts]), []
    runs = piece.runs[::-1]
    data = b"".join((_SPINE_HEAD, pack_checked(piece.hashes), *[_links(level) for level in runs]))
    return data, [digest for level in runs for digest in level]


def split_hashes(hashes: bytes) -> list[Bucket]:
    """Split the hashes of a run of ``SPLIT_LEVEL`` into its buckets."""
    entries: list[list[bytes]] = [[] for _ in range(BUCKETS)]
    for at in range(0, len(hashes), HASH_BYTES):
        offset = (at // HASH_BYTES).to_bytes(_OFFSET_BYTES, "big")
        entries[hashes[at] >> 4].append(hashes[at : at + HASH_BYTES] + offset)
    return [Bucket((b"".join(of_bucket),)) for of_bucket in entries]


# --- decoding ---------------------------------------------------------------------------------


def tail_from(fields: Any, node_count: int) -> Tail:
    """Decode the index field of a manifest; InvalidInputError if it is invalid.

    ``fields`` is unpacked, with digests in place of its links.
    """
    pages, rest = divmod(node_count, PAGE_NODES)
    if fields is None:
        if node_count:
            raise InvalidInputError("a graph with nodes has no node index")
        return NO_NODES
    if type(fields) is not list or len(fields) != _TAIL_FIELDS or not node_count:
        raise InvalidInputError("the node index is not a list of four fields")
    spine, hashes, distances, links = fields
    if (
        (type(spine) is not bytes if pages else spine is not None)
        or type(hashes) is not bytes
        or len(hashes) != rest * HASH_BYTES
        or not _are_distances(distances, rest)
        or not _are_digests(links, rest)
        or any(far > pages * PAGE_NODES + at for at, far in enumerate(distances))
    ):
        raise InvalidInputError(f"the node index does not fit a graph of {node_count} nodes")
    return Tail(spine, hashes, tuple(distances), tuple(links))


def decode_piece(digest: bytes, data: bytes, *, trusted: bool = False) -> Piece:
    """Decode an object of the index; CorruptionError if it is invalid.

    ``trusted``: the bytes were verified against their digest, and their encoding was checked when
    they were stored.
    """
    try:
        if trusted:
            piece = _piece(_lists(unpack_trusted(data), trusted_link))
        else:
            piece = _piece(_lists(inspect(data)[0], _plain_link))
            if isinstance(piece, Bucket) and not _are_entries(piece.parts):
                piece = None
    except InvalidInputError as exc:
        raise _not_a_piece(digest) from exc
    if piece is None:
        raise _not_a_piece(digest)
    return piece


def _plain_link(value: Any) -> bytes | None:
    """The digest of an inspected link of the plain role; None for everything else."""
    if is_link(value) and value.data[0] == ROLE_LINK:
        return bytes(value.data[1:])
    return None


def _lists(value: Any, digest_in: Callable[[Any], bytes | None]) -> list[Any]:
    """The fields of an object, with digests where its lists have links."""
    if type(value) is not list:
        return []
    return [
        [each if type(each) is int else digest_in(each) for each in item]
        if type(item) is list
        else item
        for item in value
    ]


def _piece(fields: list[Any]) -> Piece | None:
    match fields:
        case [int(tag), list(distances), list(links)] if tag == _PAGE_TAG:
            if _are_distances(distances, PAGE_NODES) and _are_digests(links, PAGE_NODES):
                return IndexPage(tuple(distances), tuple(links))
        case [int(level), bytes(hashes), list(parts)] if 0 < level < SPLIT_LEVEL:
            if len(hashes) == RUN_NODES[level] * HASH_BYTES and _are_digests(parts, FANOUT):
                return IndexRun(level, hashes, (), tuple(parts))
        case [int(level), list(buckets), list(parts)] if SPLIT_LEVEL <= level <= TOP_LEVEL:
            if _are_digests(buckets, BUCKETS) and _are_digests(parts, FANOUT):
                return IndexRun(level, b"", tuple(buckets), tuple(parts))
        case [int(tag), *parts] if tag == _BUCKET_TAG and len(parts) in (1, FANOUT):
            if all(type(part) is bytes and not len(part) % ENTRY_BYTES for part in parts):
                return Bucket(tuple(parts))
        case [int(tag), bytes(hashes), *levels] if tag == _SPINE_TAG:
            return _spine(hashes, levels[::-1])
    return None


def _spine(hashes: bytes, levels: list[Any]) -> Spine | None:
    if len(levels) != TOP_LEVEL + 1 or any(type(level) is not list for level in levels):
        return None
    if any(
        not _are_digests(level, len(level)) or (len(level) >= FANOUT and at < TOP_LEVEL)
        for at, level in enumerate(levels)
    ):
        return None
    if not any(levels) or len(hashes) != len(levels[0]) * PAGE_NODES * HASH_BYTES:
        return None
    return Spine(hashes, tuple([tuple(level) for level in levels]))


def _are_digests(items: Any, count: int) -> bool:
    return (
        type(items) is list
        and len(items) == count
        and all(type(each) is bytes and len(each) == DIGEST_BYTES for each in items)
    )


def _are_distances(items: Any, count: int) -> bool:
    return (
        type(items) is list
        and len(items) == count
        and all(type(each) is int and each >= 0 for each in items)
    )


def _are_entries(parts: tuple[bytes, ...]) -> bool:
    """True if these entries belong to one bucket and each part is in order of position."""
    first: int | None = None
    for part in parts:
        last = -1
        for at in range(0, len(part), ENTRY_BYTES):
            offset = int.from_bytes(part[at + HASH_BYTES : at + ENTRY_BYTES], "big")
            number = part[at] >> 4
            first = number if first is None else first
            if offset <= last or offset >= RUN_NODES[SPLIT_LEVEL] or number != first:
                return False
            last = offset
    return True


def _not_a_piece(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} is not a valid part of a node index")
