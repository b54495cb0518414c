"""Replaces entries of a stored list or map, and reads only the pieces around them.

The result is identical to storing the changed container as a whole (P4). The leaf that changes is
split again; while its last piece does not end where an old leaf ended, the next leaf is included.
Then the branch above is rebuilt with the new children in the same way, up to the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError
from casstore.format import splitting, tree
from casstore.format.canonical import (
    CONTAINER_BYTES,
    ROLE_ITEM,
    ROLE_PART,
    inspect,
    is_map_piece,
    links_in,
)
from casstore.format.digest import Kind
from casstore.format.limits import SINGLE_PIECE_MAX_BYTES
from casstore.format.splitting import Emit, Encoded, EncodedEntry, ListTail
from casstore.objects.pieces import PieceReader
from casstore.objects.values import TREE_KINDS, Tree, decode_child, leaf_data, require_part

Part = TypeVar("Part")


class SinglePiece(NamedTuple):
    """A container in one piece."""

    kind: int
    entries: list[EncodedEntry]


Container = SinglePiece | Tree


def open_container(reader: PieceReader, item: StoredObject) -> Container | None:
    """The list or map in an object; None if it holds neither."""
    if item.kind in TREE_KINDS:
        return Tree(item.kind, tree.decode_branch(item.kind, item.data))
    if item.kind != Kind.VALUE:
        raise CorruptionError(
            f"an object of kind {item.kind} is linked to as a value, or a part of one"
        )
    return _open_encoded(reader, item.data)


def _open_encoded(reader: PieceReader, data: bytes) -> Container | None:
    _, links = inspect(data)
    if data[0] not in CONTAINER_BYTES:
        if len(links) != 1 or links[0][0] not in (ROLE_PART, ROLE_ITEM):
            return None
        role, digest = links[0]
        item = reader.follow((digest,))[0]
        require_part(role, digest, item)
        return open_container(reader, item)
    kind = Kind.MAP if is_map_piece(data) else Kind.LIST
    return SinglePiece(kind, _cut(kind, data))


def _cut(kind: int, data: bytes) -> list[EncodedEntry]:
    """The entries of a validated encoding of a list or map."""
    if kind == Kind.MAP:
        return splitting.map_leaf_entries(data)
    return splitting.list_leaf_entries(data)


def open_entry(reader: PieceReader, entry: EncodedEntry) -> Container | None:
    """The list or map that is the value of an entry; None if it is neither."""
    return _open_encoded(reader, splitting.value_data(entry))


def length(container: Container) -> int:
    """The number of entries of a container."""
    if isinstance(container, SinglePiece):
        return len(container.entries)
    return sum(container.root.counts)


def list_tail(reader: PieceReader, container: Container) -> ListTail:
    """The end of a stored list, to append to it."""
    if isinstance(container, SinglePiece):
        entries = container.entries
        return ListTail(entries, (), len(entries), _sizes(entries))
    count = length(container)
    spine = _Spine.to_index(reader, container, count)
    above = [spine.children(level)[: spine.at(level)] for level in range(1, spine.top + 1)]
    return ListTail(spine.leaf_entries(), above, count, sum(container.root.sizes))


def find_entry(reader: PieceReader, container: Container, index: int) -> EncodedEntry:
    """The entry at an index."""
    if isinstance(container, SinglePiece):
        return container.entries[index]
    spine = _Spine.to_index(reader, container, index)
    return spine.leaf_entries()[spine.offset]


def find_key(
    reader: PieceReader, container: Container, key: str
) -> tuple[int, EncodedEntry | None]:
    """The index of a key in a map, or where it would be inserted; and its entry, if it exists."""
    if isinstance(container, SinglePiece):
        entries, first = container.entries, 0
    else:
        spine = _Spine.to_key(reader, container, key)
        entries, first = spine.leaf_entries(), spine.first
    for at, entry in enumerate(entries):
        if entry.key is not None and entry.key >= key:
            return first + at, entry if entry.key == key else None
    return first + len(entries), None


def splice(
    reader: PieceReader,
    container: Container,
    index: int,
    removed: int,
    new: list[EncodedEntry],
    emit: Emit,
) -> Encoded:
    """Replace ``removed`` (0 or 1) entries at ``index`` by ``new``; returns the new container."""
    if isinstance(container, SinglePiece):
        entries = [*container.entries[:index], *new, *container.entries[index + removed :]]
        return splitting.pack(container.kind, entries, emit)
    spine = _Spine.to_index(reader, container, index)
    old = spine.leaf_entries()
    gone = old[spine.offset : spine.offset + removed]
    size = sum(container.root.sizes) + _sizes(new) - _sizes(gone)
    count = sum(container.root.counts) + len(new) - len(gone)
    if splitting.piece_bytes(container.kind, count, size) <= SINGLE_PIECE_MAX_BYTES:
        entries = _all_entries(reader, container)
        return splitting.pack(
            container.kind, [*entries[:index], *new, *entries[index + removed :]], emit
        )
    if container.kind == Kind.LIST:
        new = [splitting.outline_item(entry, emit) for entry in new]
    changed = [*old[: spine.offset], *new, *old[spine.offset + removed :]]
    return splitting.link_part(_rebuild(spine, changed, emit))


def _sizes(entries: list[EncodedEntry]) -> int:
    return sum([entry.size for entry in entries])


def _all_entries(reader: PieceReader, container: Tree) -> list[EncodedEntry]:
    """Every entry of a tree that is about to become one piece, with separate items inlined."""
    entries: list[EncodedEntry] = []
    spine: _Spine | None = _Spine.to_index(reader, container, 0)
    while spine is not None:
        entries.extend(spine.leaf_entries())
        spine = spine.right(0)
    return [_inlined(reader, entry) for entry in entries]


def _inlined(reader: PieceReader, entry: EncodedEntry) -> EncodedEntry:
    if entry.size == len(entry.data):
        return entry
    item = reader.follow(entry.links)[0]
    if item.kind != Kind.VALUE or len(item.data) != entry.size:
        raise CorruptionError(
            f"list item {entry.links[0].hex()} has another kind or size than its list says"
        )
    return EncodedEntry(item.data, links_in(item.data), len(item.data))


def _rebuild(spine: _Spine, entries: list[EncodedEntry], emit: Emit) -> bytes:
    """Store the tree with ``entries`` in place of the leaf at ``spine``; returns its digest."""
    kind = spine.kind
    start, end = spine, spine
    ends = splitting.leaf_ends(kind)
    pieces = list(tree.group(entries, ends))
    while pieces and not tree.is_complete(pieces[-1], ends):
        following = end.right(0)
        if following is None:
            break
        end = following
        pieces[-1:] = tree.group([*pieces[-1], *end.leaf_entries()], ends)
    children = [splitting.leaf(kind, piece, emit) for piece in pieces]
    for level in range(1, spine.top + 1):
        children, end = _regroup(kind, level, start, end, children)
        groups = list(tree.group(children, tree.branch_ends(kind, level)))
        alone = start.is_leftmost(level) and end.is_rightmost(level)
        if alone and level > 1 and len(children) == 1:
            # This level has no siblings left: the remaining piece below is the root.
            return children[0].digest
        if alone and (len(groups) == 1 or level == spine.top):
            return splitting.grow(kind, children, emit, level)
        children = [splitting.branch(kind, level, piece, emit) for piece in groups]
    raise AssertionError("a root with siblings")


def _regroup(
    kind: int, level: int, start: _Spine, end: _Spine, new: list[tree.Child]
) -> tuple[list[tree.Child], _Spine]:
    """The children of all branches at ``level`` that change, and the last of those branches."""
    ends = tree.branch_ends(kind, level)
    children = [
        *start.children(level)[: start.at(level)],
        *new,
        *end.children(level)[end.at(level) + 1 :],
    ]
    while True:
        tail = _open_tail(children, ends)
        following = end.right(level) if tail else None
        if following is None:
            return children, end
        end = following
        children.extend(end.children(level))


def _open_tail(parts: list[Part], ends: Callable[[Part], bool]) -> bool:
    """True if the last piece of this sequence does not end at a natural boundary."""
    pieces = list(tree.group(parts, ends))
    return bool(pieces) and not tree.is_complete(pieces[-1], ends)


class _Spine:
    """The path from the root to one leaf: at each level a branch and the index of the child."""

    def __init__(
        self, reader: PieceReader, kind: int, steps: dict[int, tuple[tree.TreeBranch, int]]
    ):
        self._reader = reader
        self.kind = kind
        self._steps = steps
        self.top = max(steps)
        #: The index of the leaf's first entry, and the position of the wanted entry in the leaf.
        self.first = 0
        self.offset = 0

    @classmethod
    def to_index(cls, reader: PieceReader, container: Tree, index: int) -> _Spine:
        """The path to the entry at ``index``; to the last leaf if it is past the end."""
        spine = cls._descend(
            reader, container, lambda branch, at, first: first + branch.counts[at] <= index
        )
        spine.offset = index - spine.first
        return spine

    @classmethod
    def to_key(cls, reader: PieceReader, container: Tree, key: str) -> _Spine:
        """The path to the leaf that holds ``key`` or would hold it."""
        return cls._descend(reader, container, lambda branch, at, first: branch.keys[at] < key)

    @classmethod
    def _descend(
        cls,
        reader: PieceReader,
        container: Tree,
        lies_beyond: Callable[[tree.TreeBranch, int, int], bool],
    ) -> _Spine:
        """At each level take the first child that does not end before the target."""
        steps: dict[int, tuple[tree.TreeBranch, int]] = {}
        branch, first = container.root, 0
        while True:
            at = 0
            while at + 1 < len(branch.counts) and lies_beyond(branch, at, first):
                first += branch.counts[at]
                at += 1
            steps[branch.level] = (branch, at)
            if branch.level == 1:
                break
            said = branch.child(at)
            item = reader.follow((said.digest,))[0]
            branch = decode_child(container.kind, branch.level - 1, item, said)
        spine = cls(reader, container.kind, steps)
        spine.first = first
        return spine

    def at(self, level: int) -> int:
        """The index of the child taken at ``level``."""
        return self._steps[level][1]

    def children(self, level: int) -> list[tree.Child]:
        """The children of the branch at ``level``."""
        return self._steps[level][0].children()

    def leaf_entries(self) -> list[EncodedEntry]:
        """The entries of the leaf."""
        branch, at = self._steps[1]
        said = branch.child(at)
        item = self._reader.follow((said.digest,))[0]
        data = leaf_data(self.kind, item, said)
        inspect(data)
        entries = _cut(self.kind, data)
        # The result depends on what the branch says about its leaf, so all of it is verified.
        last_key = (entries[-1].key or "") if entries else ""
        if (len(entries), _sizes(entries), last_key) != said[1:]:
            raise CorruptionError(f"leaf {said.digest.hex()} is not what its branch says")
        return entries

    def right(self, level: int) -> _Spine | None:
        """The path to the next branch at ``level`` (0: the next leaf), or None at the end."""
        for above in range(level + 1, self.top + 1):
            branch, at = self._steps[above]
            if at + 1 < len(branch.digests):
                break
        else:
            return None
        steps = {higher: step for higher, step in self._steps.items() if higher > above}
        steps[above] = (branch, at + 1)
        for below in range(above - 1, 0, -1):
            branch, at = steps[below + 1]
            said = branch.child(at)
            item = self._reader.follow((said.digest,))[0]
            steps[below] = (decode_child(self.kind, below, item, said), 0)
        return _Spine(self._reader, self.kind, steps)

    def is_leftmost(self, level: int) -> bool:
        """True if no branch at ``level`` is left of this path."""
        return all(at == 0 for higher, (_, at) in self._steps.items() if higher > level)

    def is_rightmost(self, level: int) -> bool:
        """True if no branch at ``level`` is right of this path."""
        return all(
            at + 1 == len(branch.digests)
            for higher, (branch, at) in self._steps.items()
            if higher > level
        )
