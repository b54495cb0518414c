"""The shape of a large list, map or blob: leaves in order, branches above them.

A leaf of a list or map is an ordinary value object holding a short list or map;
a leaf of a rope is a chunk, an ordinary blob. A branch names its children in order, with the
number of entries below each and their bytes, so that one item is found, and a size known, by
reading one branch for each level.

Whether a piece ends after an entry depends on the hash of that entry alone (``ends_*``), so an edit
moves only the boundaries next to it (P8). The maximum and minimum number of entries are exceptions:
after one of these, boundaries agree again from the next one that a hash decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from casstore.errors import NotCanonicalError
from casstore.format import canonical
from casstore.format.digest import DIGEST_BYTES, Kind, digest_of, plain_hash
from casstore.format.limits import FANOUT, MAX_ENTRIES, PIECE_MAX_ENTRIES, PIECE_MIN_ENTRIES

Entry = TypeVar("Entry")

# 64 levels of at least two children each hold more entries than any count can express.
MAX_LEVEL: Final = 64

# The longest file that an offset can express.
MAX_TOTAL_BYTES: Final = (1 << 63) - 1


class TreeBranch(NamedTuple):
    """One inner piece. ``level`` 1 is just above the leaves.

    ``counts`` are list items or map entries below each child (for ropes: bytes,
    the same as ``sizes``); ``sizes`` the bytes of their encoding; ``keys`` the
    last key below each child, for maps alone.
    """

    level: int
    digests: list[bytes]
    counts: list[int]
    sizes: list[int]
    keys: list[str]

    def children(self) -> list[Child]:
        """All entries of the branch."""
        keys = self.keys or [""] * len(self.digests)
        return [
            Child(*entry) for entry in zip(self.digests, self.counts, self.sizes, keys, strict=True)
        ]

    def child(self, at: int) -> Child:
        """The entry at this index."""
        key = self.keys[at] if self.keys else ""
        return Child(self.digests[at], self.counts[at], self.sizes[at], key)


class Child(NamedTuple):
    """One entry of a branch that is being built."""

    digest: bytes
    entries: int
    size: int
    key: str


def ends_list_leaf(entry: bytes) -> bool:
    """True if this encoded item ends its piece."""
    return plain_hash(entry, 1)[0] % FANOUT == 0


def ends_map_piece(key: str, level: int) -> bool:
    """True if this key ends its piece at ``level`` (0: a leaf).

    Only the key is used, so a changed value moves no boundary at any level.
    """
    # 32 bytes have a nibble for each of 64 levels; no valid tree has a tenth of that.
    nibble = plain_hash(key.encode())[level // 2 % DIGEST_BYTES] >> (4 * (level % 2))
    return nibble % FANOUT == 0


def ends_list_branch(digest: bytes) -> bool:
    """True if this child ends its branch, in a list or a rope."""
    return digest[0] % FANOUT == 0


def group(entries: Iterable[Entry], ends: Callable[[Entry], bool]) -> Iterator[list[Entry]]:
    """Cut a sequence into pieces; only the last may be shorter than PIECE_MIN_ENTRIES."""
    piece: list[Entry] = []
    for entry in entries:
        piece.append(entry)
        if is_complete(piece, ends):
            yield piece
            piece = []
    if piece:
        yield piece


def is_complete(piece: list[Entry], ends: Callable[[Entry], bool]) -> bool:
    """True if a piece ends here, whatever follows."""
    return len(piece) >= PIECE_MAX_ENTRIES or (len(piece) >= PIECE_MIN_ENTRIES and ends(piece[-1]))


def branch_ends(kind: int, level: int) -> Callable[[Child], bool]:
    """The boundary rule for the children of a branch at ``level``."""
    if kind == Kind.MAP:
        return lambda child: ends_map_piece(child.key, level)
    return lambda child: ends_list_branch(child.digest)


class Builder:
    """Builds the branches over a sequence of leaves as they arrive, with little memory.

    ``emit_branch(level, children)`` stores one branch and returns its entry in the branch
    above. ``finish`` returns the root, unstored: its level and children. ``opened`` are the open
    pieces of a builder that this one continues.
    """

    def __init__(
        self,
        kind: int,
        emit_branch: Callable[[int, list[Child]], Child],
        level: int = 1,
        opened: Iterable[Sequence[Child]] = (),
    ) -> None:
        self._kind = kind
        self._emit = emit_branch
        self._first_level = level
        # One open piece a level, lowest first. A complete piece stays open until its
        # level gets another entry: as long as it is alone there, it is the root.
        self._open: list[list[Child]] = [[*piece] for piece in opened]

    def opened(self) -> list[list[Child]]:
        """A copy of the open piece of each level, lowest first."""
        return [[*piece] for piece in self._open]

    def add(self, child: Child, depth: int = 0) -> None:
        """Add the next leaf, or the next branch of a higher level."""
        if depth == len(self._open):
            self._open.append([])
        level = self._first_level + depth
        piece = self._open[depth]
        if piece and is_complete(piece, branch_ends(self._kind, level)):
            self._open[depth] = []
            self.add(self._emit(level, piece), depth + 1)
        self._open[depth].append(child)

    def finish(self) -> tuple[int, list[Child]]:
        """Store the branches of all levels but the highest; returns the root, unstored."""
        depth = 0
        # Closing a level may open the one above it, so the highest is read each time.
        while depth + 1 < len(self._open):
            self.add(self._emit(self._first_level + depth, self._open[depth]), depth + 1)
            depth += 1
        return self._first_level + depth, self._open[depth]


def encode_branch(kind: int, level: int, children: list[Child]) -> bytes:
    """Encode a branch: as columns, because they pack and unpack at the speed of C."""
    columns: list[Any] = [level, b"".join([child.digest for child in children])]
    if kind in (Kind.LIST, Kind.MAP):
        columns.append([child.entries for child in children])
    columns.append([child.size for child in children])
    if kind == Kind.MAP:
        columns.append([child.key for child in children])
    return canonical.pack_checked(columns)


def decode_branch(kind: int, data: bytes) -> TreeBranch:
    """Decode a branch; NotCanonicalError if the bytes are not the encoding of a valid branch."""
    columns = canonical.unpack_checked(data)
    names = 3 + (kind in (Kind.LIST, Kind.MAP)) + (kind == Kind.MAP)
    if type(columns) is not list or len(columns) != names:
        raise NotCanonicalError("not a branch")
    level, packed = columns[0], columns[1]
    sizes = columns[3] if kind in (Kind.LIST, Kind.MAP) else columns[2]
    counts = columns[2]
    keys = columns[4] if kind == Kind.MAP else []
    if type(level) is not int or not 1 <= level <= MAX_LEVEL or type(packed) is not bytes:
        raise NotCanonicalError("a branch has no level or no children")
    entries, rest = divmod(len(packed), DIGEST_BYTES)
    if rest or not 1 <= entries <= PIECE_MAX_ENTRIES:
        raise NotCanonicalError(
            f"a branch has {len(packed)} bytes of digests, not those of 1 to {PIECE_MAX_ENTRIES} "
            "children"
        )
    for column in (counts, sizes):
        if type(column) is not list or len(column) != entries:
            raise NotCanonicalError("the columns of a branch differ in length")
        if any(type(number) is not int or number < 1 for number in column):
            raise NotCanonicalError("a branch has an empty child")
    # Repeated children can give any total from a few pieces; lengths and offsets must stay valid.
    if sum(sizes) > MAX_TOTAL_BYTES or (kind != Kind.CHUNKS and sum(counts) > MAX_ENTRIES):
        raise NotCanonicalError("the counts of a branch exceed the limit")
    if kind == Kind.MAP and (
        type(keys) is not list
        or len(keys) != entries
        or any(type(key) is not str for key in keys)
        or any(left >= right for left, right in pairwise(keys))
    ):
        raise NotCanonicalError("the keys of a map branch are out of order")
    digests = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
    return TreeBranch(level, digests, counts, sizes, keys)


def seal_rope(body: bytes) -> bytes:
    """Prefix a rope's body with its own hash.

    A rope is found under the digest of its content, so its digest proves it only when all of that
    content has been read. The seal proves the rope itself, before its first chunk is read.
    """
    return digest_of(Kind.ROPE, body) + body


def open_rope(data: bytes) -> bytes:
    """The body of a rope whose seal was checked (``digest.check_object``)."""
    return data[DIGEST_BYTES:]
