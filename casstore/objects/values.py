"""Values whole: split on the way in, put together on the way out.

Reading goes one level at a time: all pieces of a level are fetched in one request,
so that an engine far away is asked as often as the tree is deep. What may come out
is bounded before it is built: shared pieces let a small store describe a value of
any size, and only a budget tells a large value from a bomb (P7).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError, LimitError
from casstore.format import canonical, tree
from casstore.format.canonical import CONTAINER_BYTES, ROLE_BYTES, ROLE_LINK, ROLE_TEXT
from casstore.format.hashing import KIND_NAMES, Kind
from casstore.format.limits import MAX_DEPTH
from casstore.objects import blobs
from casstore.objects.pieces import PieceReader

TREE_KINDS = (Kind.LIST, Kind.MAP)
BLOB_KINDS = (Kind.BLOB, Kind.ROPE)

_FETCH_BATCH = 256


class Outline(NamedTuple):
    """A place in a decoded piece whose content lives elsewhere."""

    role: int
    digest: bytes


class Tree(NamedTuple):
    """A list or map that is a tree: its kind and root."""

    kind: int
    root: tree.Branch


def read_value(reader: PieceReader, digest: bytes, item: StoredObject, *, max_bytes: int) -> Any:
    """The value whose root object has been fetched."""
    if item.kind != Kind.VALUE and item.kind not in TREE_KINDS:
        raise InvalidInputError(
            f"{digest.hex()} is a {KIND_NAMES.get(item.kind, item.kind)}, not a value"
        )
    assembly = Assembly(reader, max_bytes)
    return assembly.root(digest, item)


class Assembly:
    """The pieces of a value, or of some places in it: fetched level by level, then joined.

    One budget covers everything that comes out of one assembly.
    """

    def __init__(self, reader: PieceReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._fetched = 0
        self._built = 0
        self._found: dict[bytes, StoredObject] = {}
        # Of each value piece: how deep the links that must be followed lie in it.
        self._depths: dict[bytes, list[int]] = {}

    # --- fetching ---------------------------------------------------------------------

    def root(self, digest: bytes, item: StoredObject) -> Any:
        """The whole value whose root object has been fetched."""
        self._charge([item])
        self._fetch([(digest, item)])
        return self.value(digest, MAX_DEPTH)

    def load(self, places: list[Any]) -> list[Any]:
        """The plain values of places in decoded pieces: Outlines, trees, or plain already."""
        names = dict.fromkeys(name for place in places for name in _outlined(place))
        self._fetch(self._follow(list(names)))
        return [self._place(place, MAX_DEPTH) for place in places]

    def _place(self, place: Any, room: int) -> Any:
        kind = type(place)
        if kind is Outline:
            return self._part(place.role, place.digest, room)
        if kind is Tree:
            return self._tree(place.kind, place.root, room)
        if kind in (list, dict) and not room:
            raise canonical.refuse_depth()
        if kind is list:
            return [self._place(item, room - 1) for item in place]
        if kind is dict:
            return {key: self._place(item, room - 1) for key, item in place.items()}
        return place

    def _fetch(self, level: list[tuple[bytes, StoredObject]]) -> None:
        """Take these pieces and fetch everything below them, breadth first."""
        while level:
            wanted: dict[bytes, None] = {}
            for name, found in level:
                self._found[name] = found
                for child in self._needs(name, found):
                    if child not in self._found:
                        wanted[child] = None
            level = self._follow(list(wanted))

    def _follow(self, names: list[bytes]) -> list[tuple[bytes, StoredObject]]:
        """Fetch the next level, in batches, so that the budget is asked before all is read."""
        level: list[tuple[bytes, StoredObject]] = []
        for start in range(0, len(names), _FETCH_BATCH):
            batch = names[start : start + _FETCH_BATCH]
            found = self._reader.follow(batch)
            self._charge(found)
            level.extend(zip(batch, found, strict=True))
        return level

    def _charge(self, fetched: list[StoredObject]) -> None:
        self._fetched += sum([len(item.data) for item in fetched])
        if self._fetched > self._max_bytes:
            raise self._too_large()

    def _needs(self, digest: bytes, item: StoredObject) -> list[bytes]:
        """What must be fetched to build this piece."""
        if item.kind == Kind.VALUE:
            value, links = canonical.inspect(item.data)
            self._depths[digest] = [
                depth
                for depth, (role, _) in zip(canonical.link_depths(value), links, strict=True)
                if role != ROLE_LINK
            ]
            return [name for role, name in links if role != ROLE_LINK]
        if item.kind in TREE_KINDS:
            return tree.decode_branch(item.kind, item.data).digests
        if item.kind == Kind.ROPE:
            # Chunks are fetched when the rope is read: its size is checked first.
            return []
        return []

    # --- building ------------------------------------------------------------------------

    def value(self, digest: bytes, room: int) -> Any:
        """The value of a piece, nested at most ``room`` levels deep."""
        item = self._found[digest]
        if item.kind in TREE_KINDS:
            return self._tree(item.kind, tree.decode_branch(item.kind, item.data), room)
        if item.kind != Kind.VALUE:
            raise CorruptionError(f"{digest.hex()} stands for a part of a value, but is none")
        self.spend(len(item.data))
        if not canonical.nests_within(item.data, room):
            raise canonical.refuse_depth()
        # Links are resolved in order of appearance, so their depths come along.
        depths = iter(self._depths[digest])
        return canonical.rebuild(
            item.data, lambda role, name: self._part(role, name, room - next(depths))
        )

    def _part(self, role: int, digest: bytes, room: int) -> Any:
        require_part(role, digest, self._found[digest])
        if role not in (ROLE_TEXT, ROLE_BYTES):
            return self.value(digest, room)
        left = self._max_bytes - self._built
        content = blobs.read_blob(self._reader, digest, self._found[digest], max_bytes=left)
        self.spend(len(content))
        return decode_text(content, digest) if role == ROLE_TEXT else content

    def _tree(self, kind: int, root: tree.Branch, room: int) -> Any:
        built: Any = {} if kind == Kind.MAP else []
        self._grow(built, kind, root, room)
        return built

    def _grow(self, built: Any, kind: int, branch: tree.Branch, room: int) -> None:
        for digest, count in zip(branch.digests, branch.counts, strict=True):
            if branch.level > 1:
                below = decode_child(kind, branch.level - 1, self._found[digest])
                self._grow(built, kind, below, room)
                continue
            leaf = self.value(digest, room)
            if type(leaf) in (list, dict) and len(leaf) != count:
                raise CorruptionError(f"leaf {digest.hex()} is not what its branch says")
            if kind == Kind.MAP and type(leaf) is dict:
                built.update(leaf)
            elif kind == Kind.LIST and type(leaf) is list:
                built.extend(leaf)
            else:
                raise CorruptionError(f"leaf {digest.hex()} is not of its tree's kind")

    def spend(self, size: int) -> None:
        """Take ``size`` bytes from the budget; LimitError if it is used up."""
        self._built += size
        if self._built > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> LimitError:
        return LimitError(f"a value of more than {self._max_bytes} bytes; view() reads it in parts")


def _outlined(place: Any) -> list[bytes]:
    """The digests that must be fetched before this place can be built."""
    kind = type(place)
    if kind is Outline:
        return [place.digest]
    if kind is Tree:
        return list(place.root.digests)
    if kind is list:
        return [name for item in place for name in _outlined(item)]
    if kind is dict:
        return [name for item in place.values() for name in _outlined(item)]
    return []


def require_part(role: int, digest: bytes, item: StoredObject) -> None:
    """Raise unless an object is what a link of this role may stand for.

    A list or map that left is an object holding one, never a link to another: else a
    chain of links could go on for ever.
    """
    if role in (ROLE_TEXT, ROLE_BYTES):
        sound = item.kind in BLOB_KINDS
    else:
        sound = item.kind in TREE_KINDS or (
            item.kind == Kind.VALUE and item.data[:1] != b"" and item.data[0] in CONTAINER_BYTES
        )
    if not sound:
        raise CorruptionError(f"{digest.hex()} is not the part of a value that it stands for")


def decode_text(content: bytes, digest: bytes) -> str:
    """The string whose UTF-8 a blob holds."""
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise CorruptionError(f"blob {digest.hex()} stands for a text but is not UTF-8") from exc


def decode_child(kind: int, level: int, item: StoredObject) -> tree.Branch:
    """A branch as its parent promised it: of this kind and level."""
    if item.kind != kind:
        raise CorruptionError("a tree links to a branch of another kind")
    branch = tree.decode_branch(kind, item.data)
    if branch.level != level:
        raise CorruptionError("a branch is not on the level its parent says")
    return branch
