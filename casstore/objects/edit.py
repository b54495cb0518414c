"""Changing a large value by path: one call, one new digest, only the pieces on the way.

Storing the changed value whole would give the same digest (P4); an edit merely gets
there without reading or hashing the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.errors import InvalidInputError, InvalidValueError, PathNotFoundError, PathStep
from casstore.format import splitting
from casstore.format.canonical import refuse_depth
from casstore.format.hashing import Kind
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import Emit, Entry, Spelled
from casstore.objects import splice
from casstore.objects.pieces import PieceReader
from casstore.objects.splice import Container
from casstore.objects.values import TREE_KINDS, checked_path


class Set(NamedTuple):
    """Put ``value`` at ``path``: replace a list item, or add or replace a map entry.

    >>> digest = store.put_value({"steps": ["plan", "write"]})
    >>> store.get_value(store.edit(digest, Set(["steps", 0], "think"), Set(["done"], False)))
    {'done': False, 'steps': ['think', 'write']}
    """

    path: Sequence[PathStep]
    value: Any


class Delete(NamedTuple):
    """Remove what is at ``path``; later list items move up.

    >>> digest = store.put_value({"steps": ["plan", "write"]})
    >>> store.get_value(store.edit(digest, Delete(["steps", 0])))
    {'steps': ['write']}
    """

    path: Sequence[PathStep]


class Insert(NamedTuple):
    """Put ``value`` into a list before the index that ends ``path``.

    >>> digest = store.put_value({"steps": ["plan", "write"]})
    >>> store.get_value(store.edit(digest, Insert(["steps", 1], "ask")))
    {'steps': ['plan', 'ask', 'write']}
    """

    path: Sequence[PathStep]
    value: Any


class Append(NamedTuple):
    """Put ``value`` at the end of the list at ``path``.

    >>> digest = store.put_value({"steps": ["plan", "write"]})
    >>> store.get_value(store.edit(digest, Append(["steps"], "read again")))
    {'steps': ['plan', 'write', 'read again']}
    """

    path: Sequence[PathStep]
    value: Any


Edit = Set | Delete | Insert | Append


def apply_edit(reader: PieceReader, digest: bytes, edit: Edit, emit: Emit) -> bytes:
    """Store the value that ``edit`` makes of the one under ``digest``; returns the new digest."""
    return splitting.root_object(respell(reader, digest, edit, emit), emit)


def respell(reader: PieceReader, digest: bytes, edit: Edit, emit: Emit) -> Spelled:
    """The same, in the form in which a container would hold the changed value."""
    if not isinstance(edit, Edit):
        raise InvalidInputError(
            f"an edit is a Set, Delete, Insert or Append, not {type(edit).__name__}"
        )
    path = checked_path(edit.path)
    root = reader.get(digest)
    if root.kind != Kind.VALUE and root.kind not in TREE_KINDS:
        raise InvalidInputError(f"only a value can be edited, and {digest.hex()} is none")
    if len(path) > MAX_DEPTH:
        raise refuse_depth()
    if not path and isinstance(edit, Set):
        return splitting.spell(edit.value, MAX_DEPTH, emit)
    if not path and not isinstance(edit, Append):
        raise InvalidInputError(f"{type(edit).__name__} needs a path to work on")
    editor = _Editor(reader, edit, path, emit)
    try:
        return editor.change(splice.open_container(reader, root), 0)
    except InvalidValueError as exc:
        raise type(exc)(exc.reason, (*editor.place, *exc.path)) from exc.__cause__


class _Editor:
    """One edit on its way down the path and, with the new pieces, up again."""

    def __init__(
        self, reader: PieceReader, edit: Edit, path: tuple[PathStep, ...], emit: Emit
    ) -> None:
        self._reader = reader
        self._edit = edit
        self._path = path
        self._emit = emit
        #: Where the new value goes, for errors in it.
        self.place = path

    def change(self, container: Container | None, depth: int) -> Spelled:
        """The container at ``path[:depth]``, changed, in the form its parent holds."""
        if container is None:
            raise PathNotFoundError(self._path[: depth + 1])
        if depth == len(self._path):
            return self._append(container, depth)
        step = self._path[depth]
        last = depth + 1 == len(self._path) and not isinstance(self._edit, Append)
        if container.kind == Kind.MAP:
            return self._change_map(container, depth, step, last=last)
        return self._change_list(container, depth, step, last=last)

    def _append(self, container: Container, depth: int) -> Spelled:
        if container.kind != Kind.LIST:
            raise InvalidInputError("only a list can be appended to")
        index = splice.length(container)
        self.place = (*self._path, index)
        new = splitting.list_entry(self._new_value(depth))
        return self._splice(container, index, 0, [new])

    def _change_map(
        self, container: Container, depth: int, step: PathStep, *, last: bool
    ) -> Spelled:
        if type(step) is not str:
            raise InvalidInputError(f"a map is asked by str, not {type(step).__name__}")
        if last and isinstance(self._edit, Insert):
            raise InvalidInputError("only a list can be inserted into; Set adds a map entry")
        index, old = splice.find_key(self._reader, container, step)
        removed = 0 if old is None else 1
        if last and isinstance(self._edit, Set):
            spelled = self._new_value(depth)
            # A key that cannot be stored is named by its map, as when that is stored whole.
            self.place = self._path[:depth]
            entry = splitting.join_map_entry(step, spelled)
            return self._splice(container, index, removed, [entry])
        if old is None:
            raise PathNotFoundError(self._path[: depth + 1])
        if last:
            return self._splice(container, index, 1, [])
        inner = self.change(splice.open_entry(self._reader, old), depth + 1)
        return self._splice(container, index, 1, [splitting.join_map_entry(step, inner)])

    def _change_list(
        self, container: Container, depth: int, step: PathStep, *, last: bool
    ) -> Spelled:
        if type(step) is not int:
            raise InvalidInputError(f"a list is asked by int, not {type(step).__name__}")
        inserts = last and isinstance(self._edit, Insert)
        size = splice.length(container)
        index = step + size if step < 0 else step
        if not 0 <= index < size + inserts:
            raise PathNotFoundError(self._path[: depth + 1])
        if last:
            if isinstance(self._edit, Delete):
                return self._splice(container, index, 1, [])
            new = splitting.list_entry(self._new_value(depth))
            return self._splice(container, index, 0 if inserts else 1, [new])
        entry = splice.find_entry(self._reader, container, index)
        inner = self.change(splice.open_entry(self._reader, entry), depth + 1)
        return self._splice(container, index, 1, [splitting.list_entry(inner)])

    def _new_value(self, depth: int) -> Spelled:
        assert not isinstance(self._edit, Delete)
        # A container at path[:depth] lies depth + 1 levels deep; its entries have the rest.
        return splitting.spell(self._edit.value, MAX_DEPTH - depth - 1, self._emit)

    def _splice(self, container: Container, index: int, removed: int, new: list[Entry]) -> Spelled:
        return splice.splice(self._reader, container, index, removed, new, self._emit)
