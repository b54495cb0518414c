"""Reads a part of a large value: one key, one item, one slice.

A ``View`` represents a stored list or map. Accessing an entry reads only the pieces on the path to
it; scalars are returned as plain values, lists and maps as views.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError, PathNotFoundError, PathStep
from casstore.format import canonical, tree
from casstore.format.canonical import ROLE_BYTES, ROLE_TEXT
from casstore.format.digest import Kind
from casstore.objects import blobs
from casstore.objects.pieces import PieceReader
from casstore.objects.values import (
    TREE_KINDS,
    Assembly,
    Outline,
    Tree,
    checked_path,
    decode_child,
    decode_text,
    leaf_data,
    read_value,
    require_leaf,
    require_part,
)

# A container after its first piece is read: a list or dict that may contain Outlines, or a tree.
Node = list[Any] | dict[str, Any] | Tree


def read_piece(data: bytes) -> Any:
    """Decode one piece, with an Outline for each part that is in another object."""
    return canonical.decode(data, Outline)


def read_node(reader: PieceReader, item: StoredObject) -> Any:
    """Decode one object as a place: parts in other objects stay Outlines."""
    if item.kind == Kind.VALUE:
        return read_piece(item.data)
    if item.kind in TREE_KINDS:
        return Tree(item.kind, tree.decode_branch(item.kind, item.data))
    raise CorruptionError(
        f"an object of kind {item.kind} is linked to as a value, or a part of one"
    )


def resolve(reader: PieceReader, place: Any, max_bytes: int) -> Any:
    """Read what an Outline links to: a text, bytes, or a list or map as a place."""
    if type(place) is not Outline:
        return place
    item = reader.follow((place.digest,))[0]
    require_part(place.role, place.digest, item)
    if place.role in (ROLE_TEXT, ROLE_BYTES):
        content = blobs.read_blob(reader, place.digest, item, max_bytes=max_bytes)
        return decode_text(content, place.digest) if place.role == ROLE_TEXT else content
    return read_node(reader, item)


def is_map(node: Node) -> bool:
    """True for a map."""
    return node.kind == Kind.MAP if isinstance(node, Tree) else type(node) is dict


def node_length(node: Node) -> int:
    """The number of entries of a container."""
    return sum(node.root.counts) if isinstance(node, Tree) else len(node)


def iter_leaves(
    reader: PieceReader,
    root: tree.TreeBranch,
    kind: int,
    start: int,
    stop: int,
    spend: Callable[[int], None] = lambda size: None,
) -> Iterator[tuple[int, Any]]:
    """The leaves that hold entries ``start`` to ``stop``, each with the index of its first entry.

    ``spend`` is called with the size of each leaf before it is decoded.
    """
    ahead = _within(root, 0, start, stop)
    last_key: str | None = None
    while ahead:
        level, first, said = ahead.pop()
        item = reader.follow((said.digest,))[0]
        if level > 1:
            ahead += _within(decode_child(kind, level - 1, item, said), first, start, stop)
            continue
        spend(len(item.data))
        leaf = read_piece(leaf_data(kind, item, said))
        require_leaf(kind, leaf, said, last_key)
        last_key = said.key
        yield first, leaf


def _within(
    branch: tree.TreeBranch, first: int, start: int, stop: int
) -> list[tuple[int, int, tree.Child]]:
    """The children that hold entries ``start`` to ``stop``, last first: level, index, child."""
    found: list[tuple[int, int, tree.Child]] = []
    for child in branch.children():
        if first < stop and start < first + child.entries:
            found.append((branch.level, first, child))
        first += child.entries
    return found[::-1]


def find_key(reader: PieceReader, node: Tree, key: str) -> tuple[bool, Any]:
    """Whether a map tree has a key, and its value as a place; reads one piece per level."""
    branch = node.root
    while True:
        at = bisect_left(branch.keys, key)
        if at == len(branch.keys):
            return False, None
        said = branch.child(at)
        item = reader.follow((said.digest,))[0]
        if branch.level == 1:
            leaf = read_piece(leaf_data(Kind.MAP, item, said))
            require_leaf(Kind.MAP, leaf, said)
            return key in leaf, leaf.get(key)
        branch = decode_child(node.kind, branch.level - 1, item, said)


def find_entry(reader: PieceReader, node: Node, step: Any) -> tuple[bool, Any]:
    """Whether a container has an entry, and its value as a place.

    Reads only the pieces on the path to it.
    """
    if is_map(node):
        if type(step) is not str:
            raise InvalidInputError(f"the key of a map must be a str, got {type(step).__name__}")
        if isinstance(node, Tree):
            return find_key(reader, node, step)
        assert type(node) is dict
        return step in node, node.get(step)
    if type(step) is not int:
        raise InvalidInputError(f"the index of a list must be an int, got {type(step).__name__}")
    length = node_length(node)
    at = step + length if step < 0 else step
    if not 0 <= at < length:
        return False, None
    if isinstance(node, Tree):
        for first, leaf in iter_leaves(reader, node.root, node.kind, at, at + 1):
            return True, leaf[at - first]
    assert type(node) is list
    return True, node[at]


class View:
    """A stored list or map, read on demand.

    ``view["key"]``, ``view[3]``, ``view[2:5]``, ``len(view)``, ``key in view`` and iteration work
    as on a list or dict; ``load()`` returns the whole value.

    The examples use ``view``, of a map with a title and a thousand messages.

    >>> view["title"], len(view["messages"])
    ('a long talk', 1000)
    >>> [message["text"] for message in view["messages"][-2:]]
    ['message 998', 'message 999']
    """

    __slots__ = ("_max_bytes", "_node", "_path", "_reader")

    def __init__(
        self, reader: PieceReader, node: Node, max_bytes: int, path: tuple[PathStep, ...] = ()
    ) -> None:
        self._reader = reader
        self._node = node
        self._max_bytes = max_bytes
        self._path = path

    def __repr__(self) -> str:
        kind = "map" if is_map(self._node) else "list"
        return f"<View of a {kind} with {len(self)} entries>"

    def __len__(self) -> int:
        return node_length(self._node)

    @property
    def is_map(self) -> bool:
        """True for a map, False for a list.

        >>> view.is_map, view["messages"].is_map
        (True, False)
        """
        return is_map(self._node)

    @property
    def pieces_read(self) -> int:
        """How many pieces this view and the views made from it have read.

        >>> view["messages"][500]["text"]
        'message 500'
        >>> view.pieces_read < 10  # of more than sixty
        True
        """
        return self._reader.pieces_read

    def __getitem__(self, step: Any) -> Any:
        if type(step) is slice:
            return self._slice(step)
        found, place = find_entry(self._reader, self._node, step)
        if not found:
            raise PathNotFoundError((*self._path, step))
        return self._open(place, step)

    def __contains__(self, key: object) -> bool:
        if not is_map(self._node):
            return any((item.load() if type(item) is View else item) == key for item in self)
        return type(key) is str and find_entry(self._reader, self._node, key)[0]

    def get(self, step: PathStep, default: Any = None) -> Any:
        """The entry at ``step``, or ``default`` if it does not exist.

        >>> view.get("title"), view.get("author", "nobody")
        ('a long talk', 'nobody')
        """
        found, place = find_entry(self._reader, self._node, step)
        return self._open(place, step) if found else default

    def at(self, path: Sequence[PathStep]) -> Any:
        """The entry at the end of a path; PathNotFoundError names the step that fails.

        >>> view.at(["messages", 500, "text"])
        'message 500'
        """
        here: Any = self
        path = checked_path(path)
        for depth, step in enumerate(path):
            if type(here) is not View:
                raise PathNotFoundError((*self._path, *path[: depth + 1]))
            here = here[step]
        return here

    def __iter__(self) -> Iterator[Any]:
        if is_map(self._node):
            return self.keys()
        places = self._item_places(0, len(self))
        return (self._open(place, at) for at, place in enumerate(places))

    def keys(self) -> Iterator[str]:
        """The keys of a map, in order.

        >>> list(view.keys())
        ['messages', 'title']
        """
        for key, _ in self._places():
            yield key

    def items(self) -> Iterator[tuple[str, Any]]:
        """The entries of a map, in key order, each value opened as by ``[]``.

        >>> [(key, type(value).__name__) for key, value in view.items()]
        [('messages', 'View'), ('title', 'str')]
        """
        for key, place in self._places():
            yield key, self._open(place, key)

    def load(self) -> Any:
        """The whole list or map as a plain value.

        >>> view["messages"][3].load()
        {'role': 'user', 'text': 'message 3'}
        """
        return Assembly(self._reader, self._max_bytes).load([self._node])[0]

    def _places(self) -> Iterator[tuple[str, Any]]:
        node = self._node
        if not is_map(node):
            raise InvalidInputError("keys() and items() need a map; this view is a list")
        if isinstance(node, Tree):
            for _, leaf in iter_leaves(self._reader, node.root, node.kind, 0, len(self)):
                yield from leaf.items()
        elif type(node) is dict:
            yield from node.items()

    def _item_places(
        self, start: int, stop: int, spend: Callable[[int], None] = lambda size: None
    ) -> Iterator[Any]:
        node = self._node
        if isinstance(node, Tree):
            root = node.root
            for first, leaf in iter_leaves(self._reader, root, node.kind, start, stop, spend):
                yield from leaf[max(start - first, 0) : stop - first]
        else:
            assert type(node) is list
            yield from node[start:stop]

    def _slice(self, wanted: slice) -> list[Any]:
        if is_map(self._node):
            raise InvalidInputError("a view of a map cannot be sliced")
        if wanted.step not in (None, 1):
            raise InvalidInputError("a slice of a view cannot have a step")
        try:
            start, stop, _ = wanted.indices(len(self))
        except TypeError as exc:
            raise InvalidInputError("the bounds of a slice must be ints") from exc
        assembly = Assembly(self._reader, self._max_bytes)
        places = list(self._item_places(start, max(start, stop), assembly.spend))
        return assembly.load(places)

    def _open(self, place: Any, step: PathStep) -> Any:
        found = resolve(self._reader, place, self._max_bytes)
        if type(found) in (list, dict, Tree):
            return View(self._reader, found, self._max_bytes, (*self._path, step))
        return found


def open_view(reader: PieceReader, digest: bytes, item: StoredObject, max_bytes: int) -> Any:
    """A view of a stored value; the value itself if it is not a list or map."""
    if item.kind != Kind.VALUE and item.kind not in TREE_KINDS:
        return read_value(reader, digest, item, max_bytes=max_bytes)
    node = resolve(reader, read_node(reader, item), max_bytes)
    return View(reader, node, max_bytes) if type(node) in (list, dict, Tree) else node
