"""Reads whole values: fetches their pieces and joins them.

Pieces are fetched level by level, one request for each level, so the number of round trips is the
depth of the tree. Shared pieces let a small store describe a value of any size, so the size of the
result is computed and compared with the budget before anything is built (P7).

A *place* is a value as it occurs in a decoded piece: a plain value, an ``Outline`` (it is in
another object), a ``Tree`` (a list or map in many pieces), or a list or dict of places.
``depth_left`` is how many more levels of lists and maps a value may nest. ``said`` is what a branch
states about one of its children.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError, LimitError, PathStep
from casstore.format import canonical, expansion, tree
from casstore.format.canonical import CONTAINER_BYTES, ROLE_BYTES, ROLE_LINK, ROLE_PART, ROLE_TEXT
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH, MAX_REPEATED_BYTES
from casstore.objects import blobs
from casstore.objects.pieces import PieceReader

TREE_KINDS = (Kind.LIST, Kind.MAP)
BLOB_KINDS = (Kind.BLOB, Kind.ROPE)

_FIRST_BATCH = 16
_FETCH_BATCH = 256
_FETCH_BYTES = 8 << 20


class Outline(NamedTuple):
    """Stands in a decoded piece for a part in another object: the role and digest of the link."""

    role: int
    digest: bytes


class Tree(NamedTuple):
    """A list or map that is stored as a tree: its kind and root."""

    kind: int
    root: tree.TreeBranch


def checked_path(path: Iterable[PathStep]) -> tuple[PathStep, ...]:
    """A path into a value as a tuple; InvalidInputError if it is invalid."""
    if isinstance(path, str | bytes) or not isinstance(path, Iterable):
        raise InvalidInputError(f"a path must be a list of keys and indexes, got {path!r}")
    steps = tuple(path)
    for step in steps:
        if type(step) is not str and type(step) is not int:
            raise InvalidInputError(
                f"a step of a path must be a str (map) or an int (list), got {type(step).__name__}"
            )
    return steps


def read_value(reader: PieceReader, digest: bytes, item: StoredObject, *, max_bytes: int) -> Any:
    """The value whose root object is ``item``."""
    if item.kind != Kind.VALUE and item.kind not in TREE_KINDS:
        raise InvalidInputError(
            f"{digest.hex()} is a {KIND_NAMES.get(item.kind, item.kind)}, not a value"
        )
    assembly = Assembly(reader, max_bytes)
    return assembly.root(digest, item)


class Assembly:
    """The pieces of a value, or of some places in it: fetched level by level, then joined.

    An assembly is used once and has one budget: ``max_bytes`` of encoding, in which a piece counts
    at every place where it occurs; as much memory for lists and maps, but at least
    DEFAULT_MAX_BYTES; and a quarter of that memory for repeated pieces.
    """

    def __init__(self, reader: PieceReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self._fetched = 0
        self._batch = _FIRST_BATCH
        self._built = 0
        self._memory = 0
        self._found: dict[bytes, StoredObject] = {}
        # The value pieces that have parts in other objects.
        self._linking: set[bytes] = set()
        # The cost of a piece at each place, and the pieces of lists and maps that it links to.
        self._costs: dict[bytes, int] = {}
        self._parts: dict[bytes, list[bytes]] = {}
        # Decoded texts. They are immutable, so all places share one.
        self._texts: dict[Outline, str | bytes] = {}

    # --- fetching ---------------------------------------------------------------------

    def root(self, digest: bytes, item: StoredObject) -> Any:
        """The whole value whose root object is ``item``."""
        self._charge([item])
        self._fetch([(digest, item)])
        self._refuse_repetition([digest])
        return self.value(digest, MAX_DEPTH)

    def fetch(self, names: list[bytes]) -> dict[bytes, StoredObject]:
        """Fetch objects within the budget, for a caller that inserts their content itself."""
        return dict(self._follow(names))

    def load(self, places: list[Any]) -> list[Any]:
        """The plain values of places in decoded pieces: Outlines, trees, or plain values."""
        names = [name for place in places for name in outlined(place)]
        self._fetch(self._follow(list(dict.fromkeys(names))))
        self._refuse_repetition([name for name in names if name in self._costs])
        return [self._place(place, MAX_DEPTH) for place in places]

    def _place(self, place: Any, depth_left: int) -> Any:
        kind = type(place)
        if kind is Outline:
            return self._part(place, depth_left)
        if kind is Tree:
            return self._tree(place.kind, place.root, depth_left)
        if kind in (list, dict) and not depth_left:
            raise canonical.refuse_depth()
        if kind is list:
            return [self._place(item, depth_left - 1) for item in place]
        if kind is dict:
            return {key: self._place(item, depth_left - 1) for key, item in place.items()}
        return place

    def _fetch(self, level: list[tuple[bytes, StoredObject]]) -> None:
        """Fetch everything below these pieces, breadth first."""
        while level:
            wanted: dict[bytes, None] = {}
            for name, found in level:
                self._found[name] = found
                for child in self._needs(name, found):
                    if child not in self._found:
                        wanted[child] = None
            level = self._follow(list(wanted))

    def _follow(self, names: list[bytes]) -> list[tuple[bytes, StoredObject]]:
        """Fetch the next level in batches, and check the budget after each."""
        level: list[tuple[bytes, StoredObject]] = []
        start = 0
        while start < len(names):
            batch = names[start : start + self._batch]
            found = self._reader.follow(batch)
            size = self._charge(found)
            level.extend(zip(batch, found, strict=True))
            start += len(batch)
            # An object may have 16 MiB: batches grow only while the earlier ones were small.
            if size > _FETCH_BYTES:
                self._batch = max(1, self._batch // 2)
            elif len(batch) == self._batch:
                self._batch = min(2 * self._batch, _FETCH_BATCH)
        return level

    def _charge(self, fetched: list[StoredObject]) -> int:
        size = sum([len(item.data) for item in fetched])
        self._fetched += size
        if self._fetched > self._max_bytes:
            raise self._too_large()
        return size

    def _needs(self, digest: bytes, item: StoredObject) -> list[bytes]:
        """The digests that must be fetched to build this piece."""
        kind, data = item
        if kind == Kind.VALUE:
            value, links = canonical.inspect(data)
            memory = expansion.memory_bytes(value, len(data))
            self._memory += memory
            if self._memory > self._memory_limit():
                raise LimitError(
                    f"the lists and maps of a value take more than {self._memory_limit():,} bytes "
                    "of memory; read parts of it with view(), or raise max_bytes"
                )
            self._costs[digest] = expansion.part_cost(memory, len(links))
            if not links:
                return []
            needed = [name for role, name in links if role != ROLE_LINK]
            if needed:
                self._linking.add(digest)
                parts = [name for role, name in links if role >= ROLE_PART]
                if parts:
                    self._parts[digest] = parts
            return needed
        if kind in TREE_KINDS:
            digests = tree.decode_branch(kind, data).digests
            self._costs[digest] = expansion.part_cost(len(data), len(digests))
            self._parts[digest] = digests
            return digests
        # The chunks of a rope are fetched when it is read: its size is checked first.
        return []

    def _memory_limit(self) -> int:
        return max(self._max_bytes, DEFAULT_MAX_BYTES)

    def _refuse_repetition(self, roots: list[bytes]) -> None:
        """Raise ExpansionError if repeated pieces take too much, before any is built."""
        if not self._parts or not expansion.has_repetition(roots, self._parts):
            return
        # A link in a list or map may lead to a text by mistake; building the value reports that.
        costs = self._costs
        found = expansion.expand(roots, self._parts, lambda name: costs.get(name, 0))
        limit = self._memory_limit() // (DEFAULT_MAX_BYTES // MAX_REPEATED_BYTES)
        if found.repeated > limit:
            raise expansion.refuse_repetition(
                found.repeated, limit, "read parts of it with view(), or raise max_bytes"
            )

    # --- building ------------------------------------------------------------------------

    def value(self, digest: bytes, depth_left: int) -> Any:
        """The value of a piece, nested at most ``depth_left`` levels deep."""
        item = self._found[digest]
        if item.kind in TREE_KINDS:
            return self._tree(item.kind, tree.decode_branch(item.kind, item.data), depth_left)
        if item.kind != Kind.VALUE:
            raise CorruptionError(
                f"{digest.hex()} is linked to as a part of a value, but is something else"
            )
        self.spend(len(item.data))
        if not canonical.nests_within(item.data, depth_left):
            raise canonical.refuse_depth()
        value = canonical.rebuild(item.data, Outline)
        return self._fill(value, depth_left) if digest in self._linking else value

    def _fill(self, value: Any, depth_left: int) -> Any:
        """Replace the Outlines in a freshly decoded value by their content, in place."""
        kind = type(value)
        if kind is Outline:
            return self._part(value, depth_left)
        if kind is dict or kind is list:
            for place, item in value.items() if kind is dict else enumerate(value):
                kind = type(item)
                if kind is Outline:
                    value[place] = self._part(item, depth_left - 1)
                elif kind is dict or kind is list:
                    self._fill(item, depth_left - 1)
        return value

    def _part(self, outline: Outline, depth_left: int) -> Any:
        role, digest = outline
        require_part(role, digest, self._found[digest])
        if role not in (ROLE_TEXT, ROLE_BYTES):
            return self.value(digest, depth_left)
        left = self._max_bytes - self._built
        known = self._texts.get(outline)
        if known is not None:
            self.spend(blobs.blob_size(digest, self._found[digest]))
            return known
        content = blobs.read_blob(self._reader, digest, self._found[digest], max_bytes=left)
        self.spend(len(content))
        found = decode_text(content, digest) if role == ROLE_TEXT else content
        self._texts[outline] = found
        return found

    def _tree(self, kind: int, root: tree.TreeBranch, depth_left: int) -> Any:
        built: Any = {} if kind == Kind.MAP else []
        # A loop, not recursion: the depth of a tree is untrusted.
        ahead = [(root.level, child) for child in reversed(root.children())]
        last_key: str | None = None
        while ahead:
            level, said = ahead.pop()
            item = self._found[said.digest]
            if level > 1:
                below = decode_child(kind, level - 1, item, said)
                ahead += [(level - 1, child) for child in reversed(below.children())]
                continue
            leaf_data(kind, item, said)
            leaf = self.value(said.digest, depth_left)
            require_leaf(kind, leaf, said, last_key)
            if kind == Kind.MAP:
                built.update(leaf)
                last_key = said.key
            else:
                built.extend(leaf)
        return built

    def spend(self, size: int) -> None:
        """Take ``size`` bytes from the budget; LimitError if it is used up."""
        self._built += size
        if self._built > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> LimitError:
        return LimitError(
            f"the value has more than {self._max_bytes} bytes; read parts of it with view(), "
            "or raise max_bytes"
        )


def measure(reader: PieceReader, roots: Sequence[bytes], max_parts: int) -> expansion.Expansion:
    """Read every distinct part below ``roots`` once; returns the total cost of building them.

    At most ``max_parts`` parts are read; the others count as costing nothing.
    """
    costs: dict[bytes, int] = {}
    below: dict[bytes, list[bytes]] = {}
    ahead = list(dict.fromkeys(roots))
    known = set(ahead)
    while ahead and len(costs) < max_parts:
        names = ahead[-_FIRST_BATCH:]
        del ahead[-_FIRST_BATCH:]
        for name, item in zip(names, reader.follow(names), strict=True):
            costs[name], below[name] = expansion.own_cost(item.kind, item.data)
            new = [part for part in dict.fromkeys(below[name]) if part not in known]
            known.update(new)
            ahead += new
    return expansion.expand(roots, below, lambda name: costs.get(name, 0))


def outlined(place: Any) -> list[bytes]:
    """The digests that must be fetched before this place can be built."""
    kind = type(place)
    if kind is Outline:
        return [place.digest]
    if kind is Tree:
        return list(place.root.digests)
    if kind is list:
        return [name for item in place for name in outlined(item)]
    if kind is dict:
        return [name for item in place.values() for name in outlined(item)]
    return []


def require_part(role: int, digest: bytes, item: StoredObject) -> None:
    """CorruptionError if an object cannot be the target of a link with this role.

    A separate list or map is an object that holds it, never a link to another one: otherwise a
    chain of links could be endless.
    """
    if role in (ROLE_TEXT, ROLE_BYTES):
        sound = item.kind in BLOB_KINDS
    else:
        sound = item.kind in TREE_KINDS or (
            item.kind == Kind.VALUE and item.data[:1] != b"" and item.data[0] in CONTAINER_BYTES
        )
    if not sound:
        raise CorruptionError(f"object {digest.hex()} is not of the kind that the link to it says")


def decode_text(content: bytes, digest: bytes) -> str:
    """The string in a blob of UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise CorruptionError(
            f"blob {digest.hex()} is linked to as a text but is not UTF-8"
        ) from exc


def decode_child(kind: int, level: int, item: StoredObject, said: tree.Child) -> tree.TreeBranch:
    """Decode a branch; CorruptionError unless its kind, level and counts match its parent."""
    if item.kind != kind:
        raise CorruptionError(f"{said.digest.hex()} is not a branch of the tree that links to it")
    branch = tree.decode_branch(kind, item.data)
    if branch.level != level:
        raise CorruptionError(f"branch {said.digest.hex()} is not on the level its parent says")
    last_key = branch.keys[-1] if branch.keys else ""
    if (sum(branch.counts), sum(branch.sizes), last_key) != said[1:]:
        raise CorruptionError(f"branch {said.digest.hex()} is not what its parent says")
    return branch


def leaf_data(kind: int, item: StoredObject, said: tree.Child) -> bytes:
    """The bytes of a leaf; CorruptionError unless it is a list or map of the tree's kind."""
    data = item.data
    if (
        item.kind != Kind.VALUE
        or data[:1] == b""
        or data[0] not in CONTAINER_BYTES
        or canonical.is_map_piece(data) != (kind == Kind.MAP)
    ):
        raise CorruptionError(f"leaf {said.digest.hex()} is not of its tree's kind")
    return data


def require_leaf(
    kind: int, leaf: list[Any] | dict[str, Any], said: tree.Child, after: str | None = None
) -> None:
    """CorruptionError unless a leaf matches its branch and its keys are above ``after``."""
    sound = len(leaf) == said.entries
    if sound and kind == Kind.MAP:
        sound = next(reversed(leaf)) == said.key and (after is None or next(iter(leaf)) > after)
    if not sound:
        raise CorruptionError(f"leaf {said.digest.hex()} is not what its branch says")
