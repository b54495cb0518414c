"""Changes a large value by path, and reads and writes only the pieces on the path.

The result has the same digest as the changed value stored as a whole (P4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from casstore.errors import InvalidInputError, InvalidValueError, PathNotFoundError, PathStep
from casstore.format import splitting
from casstore.format.canonical import refuse_depth
from casstore.format.digest import Kind
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import Emit, Encoded, EncodedEntry
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
    """Delete the entry at ``path``; later list items move up.

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
    """Apply ``edit`` to the value under ``digest`` and store the result; returns its digest."""
    return splitting.root_object(reencode(reader, digest, edit, emit), emit)


def reencode(reader: PieceReader, digest: bytes, edit: Edit, emit: Emit) -> Encoded:
    """Like ``apply_edit``, but returns the result as a list or map that contains it encodes it."""
    if not isinstance(edit, Edit):
        raise InvalidInputError(
            f"an edit must be a Set, Delete, Insert or Append, got {type(edit).__name__}"
        )
    path = checked_path(edit.path)
    root = reader.get(digest)
    if root.kind != Kind.VALUE and root.kind not in TREE_KINDS:
        raise InvalidInputError(f"only a value can be edited; {digest.hex()} is not a value")
    if len(path) > MAX_DEPTH:
        raise refuse_depth()
    if not path and isinstance(edit, Set):
        return splitting.encode_split(edit.value, MAX_DEPTH, emit)
    if not path and not isinstance(edit, Append):
        raise InvalidInputError(f"{type(edit).__name__} needs a path that is not empty")
    editor = _Editor(reader, edit, path, emit)
    try:
        return editor.change(splice.open_container(reader, root), 0)
    except InvalidValueError as exc:
        raise type(exc)(exc.reason, (*editor.place, *exc.path)) from exc.__cause__


class _Editor:
    """One edit: walks down the path, then rebuilds the pieces on the way up."""

    def __init__(
        self, reader: PieceReader, edit: Edit, path: tuple[PathStep, ...], emit: Emit
    ) -> None:
        self._reader = reader
        self._edit = edit
        self._path = path
        self._emit = emit
        #: The path of the new value, for error messages.
        self.place = path

    def change(self, container: Container | None, depth: int) -> Encoded:
        """Change the container at ``path[:depth]``; returns it as its parent encodes it."""
        if container is None:
            raise PathNotFoundError(self._path[: depth + 1])
        if depth == len(self._path):
            return self._append(container, depth)
        step = self._path[depth]
        last = depth + 1 == len(self._path) and not isinstance(self._edit, Append)
        if container.kind == Kind.MAP:
            return self._change_map(container, depth, step, last=last)
        return self._change_list(container, depth, step, last=last)

    def _append(self, container: Container, depth: int) -> Encoded:
        if container.kind != Kind.LIST:
            raise InvalidInputError("Append needs the path of a list, got the path of a map")
        index = splice.length(container)
        self.place = (*self._path, index)
        new = splitting.list_entry(self._new_value(depth))
        return self._splice(container, index, 0, [new])

    def _change_map(
        self, container: Container, depth: int, step: PathStep, *, last: bool
    ) -> Encoded:
        if type(step) is not str:
            raise InvalidInputError(f"the key of a map must be a str, got {type(step).__name__}")
        if last and isinstance(self._edit, Insert):
            raise InvalidInputError("Insert needs an index in a list; to add a map entry, use Set")
        index, old = splice.find_key(self._reader, container, step)
        removed = 0 if old is None else 1
        if last and isinstance(self._edit, Set):
            encoded = self._new_value(depth)
            # The error for an invalid key has the path of its map, as when the map is stored whole.
            self.place = self._path[:depth]
            entry = splitting.join_map_entry(step, encoded)
            return self._splice(container, index, removed, [entry])
        if old is None:
            raise PathNotFoundError(self._path[: depth + 1])
        if last:
            return self._splice(container, index, 1, [])
        inner = self.change(splice.open_entry(self._reader, old), depth + 1)
        return self._splice(container, index, 1, [splitting.join_map_entry(step, inner)])

    def _change_list(
        self, container: Container, depth: int, step: PathStep, *, last: bool
    ) -> Encoded:
        if type(step) is not int:
            raise InvalidInputError(
                f"the index of a list must be an int, got {type(step).__name__}"
            )
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

    def _new_value(self, depth: int) -> Encoded:
        assert not isinstance(self._edit, Delete)
        # A container at path[:depth] is depth + 1 levels deep; its entries have the remaining
        # levels.
        return splitting.encode_split(self._edit.value, MAX_DEPTH - depth - 1, self._emit)

    def _splice(
        self, container: Container, index: int, removed: int, new: list[EncodedEntry]
    ) -> Encoded:
        return splice.splice(self._reader, container, index, removed, new, self._emit)
