"""Compares two values, reading only the pieces that differ.

Equal digests mean equal values, so shared pieces are skipped unread, also if they moved. Maps are
walked side by side in key order. Lists are aligned piece by piece, from the root down, so an
insertion at the front does not make all later items look changed. Where shared pieces repeat so
often that walking them would take too long, a container is reported as changed as a whole (P7).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import StoredObject
from casstore.errors import ExpansionError, PathStep, render_path
from casstore.format import canonical, tree
from casstore.format.canonical import (
    ROLE_BYTES,
    ROLE_ITEM,
    ROLE_TEXT,
    cut_items,
    cut_map,
)
from casstore.format.digest import Kind
from casstore.format.limits import MAX_DEPTH
from casstore.format.printing import LONGEST, shortened
from casstore.format.splitting import Encoded
from casstore.objects.align import differing_runs
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored, make_walker
from casstore.objects.values import (
    BLOB_KINDS,
    Assembly,
    Outline,
    Tree,
    decode_child,
    leaf_data,
    require_leaf,
    require_part,
)
from casstore.objects.view import Node, is_map, iter_leaves, read_node, read_piece

ADDED: Final = "added"
REMOVED: Final = "removed"
CHANGED: Final = "changed"
_SIGNS: Final = {ADDED: "+", REMOVED: "-", CHANGED: "~"}

Path = tuple[PathStep, ...]
_ABSENT: Final = object()


class Change:
    """One difference. ``before`` and ``after`` are read on access.

    ``path`` leads to it in the newer value, or in the older one if it was removed; ``old_path``
    leads to it in the older value, or is None if it was added. They differ where list items moved.

    >>> old, new = store.put_value({"cwd": "/repo"}), store.put_value({"cwd": "/tmp"})
    >>> [change] = store.diff(old, new)
    >>> change.op, change.path, change.before, change.after
    ('changed', ('cwd',), '/repo', '/tmp')
    >>> print(change)
    ~ $.cwd: '/repo' → '/tmp'
    """

    __slots__ = ("_after", "_before", "_walk", "old_path", "op", "path")

    def __init__(
        self, walk: _Walk, old_path: Path, new_path: Path, before: Any, after: Any
    ) -> None:
        self._walk = walk
        self._before = before
        self._after = after
        self.op = ADDED if before is _ABSENT else REMOVED if after is _ABSENT else CHANGED
        self.path = old_path if after is _ABSENT else new_path
        self.old_path = None if before is _ABSENT else old_path

    @property
    def before(self) -> Any:
        """The older value at ``old_path``; None if it was added.

        >>> [change] = store.diff(store.put_value(["a", "b"]), store.put_value(["a"]))
        >>> change.before, change.after
        ('b', None)
        """
        return self._load(self._before)

    def __str__(self) -> str:
        sides = [self.stored_before(), self.stored_after()]
        text = [shortened(side.beginning(LONGEST)) for side in sides if side is not None]
        return f"{_SIGNS[self.op]} {render_path(self.path)}: {' → '.join(text)}"

    @property
    def after(self) -> Any:
        """The newer value at ``path``; None if it was removed.

        >>> [change] = store.diff(store.put_value(["a"]), store.put_value(["a", "b"]))
        >>> change.before, change.after
        (None, 'b')
        """
        return self._load(self._after)

    def stored_before(self) -> Stored | None:
        """The older value as a ``Stored``, read piece by piece; None if it was added.

        >>> [change] = store.diff(store.put_value(["a", "b"]), store.put_value(["a"]))
        >>> change.stored_before().beginning(80), change.stored_after() is None
        ('b', True)
        """
        return self._stored(self._before)

    def stored_after(self) -> Stored | None:
        """The newer value as a ``Stored``, read piece by piece; None if it was removed.

        >>> [change] = store.diff(store.put_value(["a"]), store.put_value(["a", "b" * 10_000]))
        >>> change.stored_after().beginning(8)
        'bbbbbbbb'
        """
        return self._stored(self._after)

    def _stored(self, place: Any) -> Stored | None:
        if place is _ABSENT:
            return None
        return Stored(self._walk.unbounded, place, self._walk.printing)

    @property
    def pieces_read(self) -> int:
        """How many pieces the comparison has read so far.

        >>> old = store.put_value([{"step": step} for step in range(10_000)])
        >>> [change] = store.diff(old, store.edit(old, Set([5_000, "step"], "another")))
        >>> change.pieces_read < 20  # of more than six hundred
        True
        """
        return self._walk.reader.pieces_read

    def _load(self, place: Any) -> Any:
        if place is _ABSENT:
            return None
        return Assembly(self._walk.reader, self._walk.max_bytes).load([place])[0]

    def __repr__(self) -> str:
        return f"<Change {self.op} at {self.path}>"


def diff_objects(
    reader: PieceReader,
    old: tuple[bytes, StoredObject],
    new: tuple[bytes, StoredObject],
    max_bytes: int,
) -> Iterator[Change]:
    """The changes that turn one stored object into another."""
    if old[0] == new[0]:
        return
    before, after = _root_place(reader, *old), _root_place(reader, *new)
    walk = _Walk(reader, [before, after], max_bytes)
    if (old[1].kind in BLOB_KINDS) != (new[1].kind in BLOB_KINDS):
        # A blob and a value with the same bytes are different.
        yield Change(walk, (), (), before, after)
    else:
        yield from walk.places(before, after, (), ())


# One field of an object that is compared field by field: the digest of a separate object, a value
# encoded inside its owner, or None if the field does not exist.
Field = bytes | Encoded | None


def diff_fields(
    reader: PieceReader, fields: Iterable[tuple[str, Field, Field]], max_bytes: int
) -> Iterator[Change]:
    """The changes between two sets of named fields; each path starts with the field's name."""
    pairs = [
        (name, _field_place(reader, old), _field_place(reader, new))
        for name, old, new in fields
        if old != new
    ]
    walk = _Walk(reader, [place for _, *sides in pairs for place in sides], max_bytes)
    for name, before, after in pairs:
        if before is _ABSENT or after is _ABSENT:
            yield Change(walk, (name,), (name,), before, after)
        else:
            yield from walk.places(before, after, (name,), (name,))


def _field_place(reader: PieceReader, field: Field) -> Any:
    if field is None:
        return _ABSENT
    if isinstance(field, Encoded):
        return read_piece(field.data)
    return _root_place(reader, field, reader.follow((field,))[0])


def _root_place(reader: PieceReader, digest: bytes, item: StoredObject) -> Any:
    if item.kind in BLOB_KINDS:
        return Outline(ROLE_BYTES, digest)
    return read_node(reader, item)


class _ListItem(NamedTuple):
    """A list item: bytes that equal items have in common, and the item as a place."""

    data: bytes
    place: Any


class _Walk:
    """Walks two values side by side, each given as a place (``objects.values`` defines it)."""

    def __init__(self, reader: PieceReader, roots: Sequence[Any], max_bytes: int) -> None:
        self.unbounded = reader
        self.reader = make_walker(reader, roots, max_bytes)
        self.max_bytes = max_bytes
        #: Bounds what printing the changes rereads: one reader for all of them, since each of many
        #: changes may be in a part that repeats.
        self.printing = make_walker(reader, roots)

    def places(self, old: Any, new: Any, old_path: Path, new_path: Path) -> Iterator[Change]:
        """The changes between two places."""
        if type(old) is Outline and old == new:
            return
        if len(old_path) > MAX_DEPTH:
            raise canonical.refuse_depth()
        try:
            old_node, new_node = self._container(old), self._container(new)
            if old_node is None or new_node is None or is_map(old_node) != is_map(new_node):
                if not _same_scalar(old, new):
                    yield self._change(old_path, new_path, old, new)
                return
            walk = self._maps if is_map(old_node) else self._lists
            yield from walk(old_node, new_node, old_path, new_path)
        except ExpansionError:
            # Shared parts differ at more places than can be listed: report the container as a
            # whole.
            yield self._change(old_path, new_path, old, new)

    def _change(self, old_path: Path, new_path: Path, old: Any, new: Any) -> Change:
        return Change(self, old_path, new_path, old, new)

    def _container(self, place: Any) -> Node | None:
        """The list or map at a place, its first piece decoded; None for any other value."""
        if type(place) is Outline and place.role not in (ROLE_TEXT, ROLE_BYTES):
            item = self.reader.follow((place.digest,))[0]
            require_part(place.role, place.digest, item)
            place = read_node(self.reader, item)
        return place if type(place) in (list, dict, Tree) else None

    # --- maps ---------------------------------------------------------------------------

    def _maps(self, old: Node, new: Node, old_path: Path, new_path: Path) -> Iterator[Change]:
        left, right = _MapCursor(self.reader, old), _MapCursor(self.reader, new)
        while True:
            left.skip_shared(right)
            mine, theirs = left.head, right.head
            if mine is None or theirs is None:
                break
            if type(mine) is _MapEntry and type(theirs) is _MapEntry:
                if mine.key == theirs.key:
                    yield from self.places(
                        mine.opened(),
                        theirs.opened(),
                        (*old_path, mine.key),
                        (*new_path, theirs.key),
                    )
                    left.advance()
                    right.advance()
                elif mine.key < theirs.key:
                    yield self._change((*old_path, mine.key), new_path, mine.opened(), _ABSENT)
                    left.advance()
                else:
                    yield self._change(old_path, (*new_path, theirs.key), _ABSENT, theirs.opened())
                    right.advance()
                continue
            # Descend in the taller tree, or in both, until both are at the same level.
            my_level = mine.level if type(mine) is _Subtree else 0
            their_level = theirs.level if type(theirs) is _Subtree else 0
            if my_level >= their_level:
                left.open()
            if their_level >= my_level:
                right.open()
        for entry in left.rest():
            yield self._change((*old_path, entry.key), new_path, entry.opened(), _ABSENT)
        for entry in right.rest():
            yield self._change(old_path, (*new_path, entry.key), _ABSENT, entry.opened())

    # --- lists ---------------------------------------------------------------------------

    def _lists(self, old: Node, new: Node, old_path: Path, new_path: Path) -> Iterator[Change]:
        if isinstance(old, Tree) and isinstance(new, Tree):
            old_level, old_parts = self._lower(old.root, new.root.level)
            new_level, new_parts = self._lower(new.root, old_level)
            assert old_level == new_level
            yield from self._parts(old_level, old_parts, new_parts, (old_path, 0), (new_path, 0))
            return
        old_items, new_items = self._all_items(old), self._all_items(new)
        yield from self._items(old_items, new_items, (old_path, 0), (new_path, 0))

    def _lower(self, root: tree.TreeBranch, level: int) -> tuple[int, list[tree.Child]]:
        """A level and the children of its branches: ``level``, or the root's if that is lower."""
        at, parts = root.level, root.children()
        while at > level:
            at -= 1
            parts = self._below(at, parts)
        return at, parts

    def _parts(
        self,
        level: int,
        old: list[tree.Child],
        new: list[tree.Child],
        old_at: tuple[Path, int],
        new_at: tuple[Path, int],
    ) -> Iterator[Change]:
        """Compare two sequences of pieces of one level; open only those that differ."""
        # A loop, not recursion: the depth of a tree is untrusted.
        ahead = [_differing_parts(level, old, new, old_at, new_at)]
        while ahead:
            found = next(ahead[-1], None)
            if found is None:
                ahead.pop()
                continue
            level, old_run, new_run, old_at, new_at = found
            if level == 1:
                old_items, new_items = self._leaf_items(old_run), self._leaf_items(new_run)
                yield from self._items(old_items, new_items, old_at, new_at)
            else:
                below = self._below(level - 1, old_run), self._below(level - 1, new_run)
                ahead.append(_differing_parts(level - 1, *below, old_at, new_at))

    def _below(self, level: int, parts: list[tree.Child]) -> list[tree.Child]:
        """The children of ``parts``, which are branches at this level."""
        items = self.reader.follow([part.digest for part in parts])
        return [
            child
            for part, item in zip(parts, items, strict=True)
            for child in decode_child(Kind.LIST, level, item, part).children()
        ]

    def _leaf_items(self, leaves: list[tree.Child]) -> list[_ListItem]:
        items: list[_ListItem] = []
        found = self.reader.follow([leaf.digest for leaf in leaves])
        for said, item in zip(leaves, found, strict=True):
            places = read_piece(leaf_data(Kind.LIST, item, said))
            require_leaf(Kind.LIST, places, said)
            items.extend(
                _ListItem(*pair) for pair in zip(cut_items(item.data), places, strict=True)
            )
        return items

    def _all_items(self, node: Node) -> list[_ListItem]:
        """All items of a list, for a comparison in which at least one list is a single piece."""
        if isinstance(node, Tree):
            leaves = iter_leaves(self.reader, node.root, node.kind, 0, sum(node.root.counts))
            places = [place for _, leaf in leaves for place in leaf]
        else:
            places = list(node)
        # If the other list is a tree, an item may be a separate object on one side and its equal be
        # inside its list on the other: read the separate items, so that all compare by content.
        outside = [place for place in places if _is_item(place)]
        found = iter(self.reader.follow([place.digest for place in outside]))
        places = [
            read_node(self.reader, next(found)) if _is_item(place) else place for place in places
        ]
        return [_ListItem(_token(place), place) for place in places]

    def _items(
        self,
        old: list[_ListItem],
        new: list[_ListItem],
        old_at: tuple[Path, int],
        new_at: tuple[Path, int],
    ) -> Iterator[Change]:
        """Compare the items of differing runs in pairs; the rest of a run was removed or added."""
        (old_path, old_first), (new_path, new_first) = old_at, new_at
        for run in differing_runs([item.data for item in old], [item.data for item in new]):
            paired = min(run.old_stop - run.old_start, run.new_stop - run.new_start)
            for step in range(paired):
                at_old, at_new = run.old_start + step, run.new_start + step
                yield from self.places(
                    old[at_old].place,
                    new[at_new].place,
                    (*old_path, old_first + at_old),
                    (*new_path, new_first + at_new),
                )
            for at in range(run.old_start + paired, run.old_stop):
                path = (*old_path, old_first + at)
                yield self._change(path, new_path, old[at].place, _ABSENT)
            for at in range(run.new_start + paired, run.new_stop):
                path = (*new_path, new_first + at)
                yield self._change(old_path, path, _ABSENT, new[at].place)


def _differing_parts(
    level: int,
    old: list[tree.Child],
    new: list[tree.Child],
    old_at: tuple[Path, int],
    new_at: tuple[Path, int],
) -> Iterator[tuple[int, list[tree.Child], list[tree.Child], tuple[Path, int], tuple[Path, int]]]:
    """The runs in which two sequences of pieces differ: level, both runs, and the start of each."""
    (old_path, old_first), (new_path, new_first) = old_at, new_at
    old_starts, new_starts = _starts(old, old_first), _starts(new, new_first)
    for run in differing_runs([part.digest for part in old], [part.digest for part in new]):
        yield (
            level,
            old[run.old_start : run.old_stop],
            new[run.new_start : run.new_stop],
            (old_path, old_starts[run.old_start]),
            (new_path, new_starts[run.new_start]),
        )


def _starts(parts: list[tree.Child], first: int) -> list[int]:
    """The index of each part's first entry, and of the end."""
    starts = [first]
    for part in parts:
        starts.append(starts[-1] + part.entries)
    return starts


def _is_item(place: Any) -> bool:
    return type(place) is Outline and place.role == ROLE_ITEM


def _token(place: Any) -> bytes:
    """Bytes that are equal if and only if two places have equal values."""
    if type(place) is Outline:
        return canonical.link_bytes(place.role, place.digest)
    if type(place) is list:
        return canonical.list_header(len(place)) + b"".join([_token(item) for item in place])
    if type(place) is dict:
        return canonical.map_header(len(place)) + b"".join(
            [canonical.scalar_bytes(key) + _token(item) for key, item in place.items()]
        )
    return canonical.scalar_bytes(place)


def _same_scalar(old: Any, new: Any) -> bool:
    """True if both are the same scalar; 1, 1.0 and True are different. False for lists and maps."""
    if type(old) is not type(new) or type(old) in (list, dict, Tree):
        return False
    if type(old) is Outline:
        return bool(old == new)
    return canonical.scalar_bytes(old) == canonical.scalar_bytes(new)


class _Subtree(NamedTuple):
    """A part of a map that was not read. ``level`` 1: ``said`` names a leaf; above, a branch."""

    level: int
    said: tree.Child


class _MapEntry(NamedTuple):
    """An entry of a map: encoded in ``data``, or, if that is None, decoded in ``place``."""

    key: str
    data: bytes | None
    place: Any

    def opened(self) -> Any:
        """The place of the entry's value."""
        if self.data is None:
            return self.place
        return read_piece(self.data[len(canonical.key_bytes(self.key)) :])


class _MapCursor:
    """Walks a map in key order and skips the parts that both maps share, unread."""

    def __init__(self, reader: PieceReader, node: Node) -> None:
        self._reader = reader
        # The parts yet to visit, a list for each opened piece, innermost last. Each list is
        # reversed: its last item is next.
        self._rows: list[list[_Subtree | _MapEntry]] = []
        if isinstance(node, Tree):
            self._push_branch(node.root)
        elif type(node) is dict:
            self._rows.append(
                [_MapEntry(key, None, place) for key, place in reversed(node.items())]
            )
        self._settle()

    @property
    def head(self) -> _Subtree | _MapEntry | None:
        """The next part, or None at the end."""
        return self._rows[-1][-1] if self._rows else None

    def advance(self) -> None:
        """Skip the head."""
        self._rows[-1].pop()
        self._settle()

    def skip_shared(self, other: _MapCursor) -> None:
        """Skip subtrees and encoded entries that are next on both sides and equal."""
        while self._rows and other._rows:
            mine, theirs = self._rows[-1], other._rows[-1]
            while mine and theirs and mine[-1] == theirs[-1]:
                if type(mine[-1]) is _MapEntry and mine[-1].data is None:
                    # These entries are decoded, and in Python 1 == True: do not skip them. The
                    # caller compares them exactly.
                    return
                mine.pop()
                theirs.pop()
            if mine and theirs:
                return
            self._settle()
            other._settle()

    def open(self) -> None:
        """Replace the subtree at the head by its content."""
        subtree = self._rows[-1].pop()
        assert type(subtree) is _Subtree
        level, said = subtree
        item = self._reader.follow((said.digest,))[0]
        if level == 1:
            data = leaf_data(Kind.MAP, item, said)
            require_leaf(Kind.MAP, canonical.inspect(data)[0], said)
            self._rows.append(
                [_MapEntry(key, entry, None) for key, entry in reversed(cut_map(data))]
            )
        else:
            self._push_branch(decode_child(Kind.MAP, level - 1, item, said))
        self._settle()

    def rest(self) -> Iterator[_MapEntry]:
        """All remaining entries."""
        while (head := self.head) is not None:
            if type(head) is _MapEntry:
                yield head
                self.advance()
            else:
                self.open()

    def _push_branch(self, branch: tree.TreeBranch) -> None:
        self._rows.append([_Subtree(branch.level, said) for said in reversed(branch.children())])

    def _settle(self) -> None:
        while self._rows and not self._rows[-1]:
            self._rows.pop()
