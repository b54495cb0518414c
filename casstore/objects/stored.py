"""Reads a stored value of any size in order, in little memory, for printing.

``Stored.events`` walks a value from the first key to the last and reads each piece when it reaches
it, long texts in parts. ``Stored.beginning`` builds as much of the value as a line of output can
show. Neither holds the whole value, so both work on values that are too large for memory. If shared
parts repeat more often than ``Store.put_value`` allows, ``events`` raises ExpansionError.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError, PathNotFoundError, PathStep
from casstore.format import canonical
from casstore.format.canonical import ROLE_BYTES, ROLE_TEXT
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.expansion import refuse_repetition
from casstore.format.limits import MAX_DEPTH, MAX_REPEATED_BYTES
from casstore.format.splitting import Encoded
from casstore.objects.blobs import BlobReader
from casstore.objects.pieces import BoundedReader, PieceReader
from casstore.objects.values import (
    BLOB_KINDS,
    TREE_KINDS,
    Outline,
    Tree,
    measure,
    outlined,
    require_part,
)
from casstore.objects.view import (
    Node,
    find_entry,
    is_map,
    iter_leaves,
    node_length,
    read_node,
    read_piece,
)

MAP: Final = "map"
LIST: Final = "list"
KEY: Final = "key"
END: Final = "end"
SCALAR: Final = "scalar"
TEXT: Final = "text"
BYTES: Final = "bytes"
PART: Final = "part"

_PART_BYTES: Final = 1 << 16
_FETCH_BATCH: Final = 16
# How many distinct parts are measured at most: each takes about 300 bytes of memory.
_MEASURED_PARTS: Final = 1 << 20
# Longer objects are not kept with their batch, but fetched again when the walk reaches them. Of the
# objects that casstore writes, only maps with long keys are longer.
_KEPT_BYTES: Final = 1 << 16
_BYTES_SHOWN: Final = 32
# The JSON overhead of a value: brackets or quotes, and a comma.
_AROUND: Final = 3
# How many characters of JSON an entry may take in a beginning that has little space left.
_LEAST: Final = 64


class WalkEvent(NamedTuple):
    """One step of the walk through a value.

    ``map`` and ``list`` begin a container and have its number of entries; ``text`` and ``bytes``
    begin a long content and have its length in bytes. The events up to the matching ``end`` belong
    to it. ``key`` has the key of the next value, ``scalar`` a complete value, ``part`` the next
    part of a text or of bytes.
    """

    kind: str
    value: Any = None


_END: Final = WalkEvent(END)


class Stored:
    """A stored value of any size, given as a place of a decoded piece (see ``objects.values``)."""

    __slots__ = ("_place", "_reader", "_walker")

    def __init__(
        self, reader: PieceReader, place: Any, walker: BoundedReader | None = None
    ) -> None:
        """``walker``: shared by values that are printed one after the other."""
        self._reader = reader
        self._place = place
        self._walker = walker

    def events(self) -> Iterator[WalkEvent]:
        """Walk the value in order; ExpansionError if its shared parts repeat too often."""
        return _events(self._walker or make_walker(self._reader, [self._place]), self._place)

    def beginning(self, size: int, text_size: int | None = None) -> Any:
        """The value as a plain value, shortened to about ``size`` characters of JSON.

        ``text_size`` also limits each text, so that the entries after a long text are shown.
        """
        longest = size if text_size is None else text_size
        return _Beginning(self._reader, longest).build(self._place, size, MAX_DEPTH)[0]

    def is_map(self) -> bool:
        """Whether the value is a map."""
        node = self._container()
        return node is not None and is_map(node)

    def entry_count(self) -> int | None:
        """The number of entries of a list or map; None for anything else."""
        node = self._container()
        return None if node is None else node_length(node)

    def entries(self) -> Iterator[tuple[PathStep, Stored]]:
        """The entries of a list or map in order, with their keys or indexes."""
        node = self._container()
        if node is not None:
            for at, (key, place) in enumerate(_entries(self._reader, node)):
                yield at if key is None else key, Stored(self._reader, place)

    def at(self, path: Sequence[PathStep]) -> Stored:
        """The value at the end of a path; PathNotFoundError names the step that fails."""
        here = self
        for depth, step in enumerate(path):
            node = here._container()
            found, place = (False, None) if node is None else find_entry(self._reader, node, step)
            if not found:
                raise PathNotFoundError(path[: depth + 1])
            here = Stored(self._reader, place)
        return here

    def _container(self) -> Node | None:
        """The list or map, its first piece decoded; None for any other value."""
        place = self._place
        if type(place) is Outline and place.role not in (ROLE_TEXT, ROLE_BYTES):
            item = self._reader.follow((place.digest,))[0]
            require_part(place.role, place.digest, item)
            place = read_node(self._reader, item)
        return place if type(place) in (list, dict, Tree) else None

    def whole_text(self, max_characters: int) -> str | None:
        """The value if it is a text of at most ``max_characters``; else None."""
        place = self._place
        if type(place) is not str and not (type(place) is Outline and place.role == ROLE_TEXT):
            return None
        begun: str = self.beginning(max_characters + 1)
        return begun if len(begun) <= max_characters else None


def make_walker(
    reader: PieceReader, places: Sequence[Any], max_bytes: int | None = None
) -> BoundedReader:
    """A reader for walking the values at ``places``, or parts of them.

    It raises ExpansionError if the shared parts of one of them repeat more often than
    ``Store.put_value`` allows.
    """

    def measure_places() -> None:
        for place in places:
            repeated = measure(reader, outlined(place), _MEASURED_PARTS).repeated
            if repeated > MAX_REPEATED_BYTES:
                raise refuse_repetition(
                    repeated, MAX_REPEATED_BYTES, "read parts of it with view()"
                )

    return BoundedReader(reader, measure_places, max_bytes)


def open_stored(reader: PieceReader, digest: bytes, item: StoredObject) -> Stored:
    """The value or blob whose root object is ``item``."""
    if item.kind in BLOB_KINDS:
        return Stored(reader, Outline(ROLE_BYTES, digest))
    if item.kind != Kind.VALUE and item.kind not in TREE_KINDS:
        name = KIND_NAMES.get(item.kind, item.kind)
        raise InvalidInputError(f"{digest.hex()} is a {name}, not a value")
    return Stored(reader, read_node(reader, item))


def stored_field(reader: PieceReader, field: Encoded) -> Stored | None:
    """The value of a field of a manifest; None if it is null."""
    place = read_piece(field.data)
    return None if place is None else Stored(reader, place)


def _events(reader: PieceReader, place: Any) -> Iterator[WalkEvent]:
    # The open containers, innermost last. A stack instead of recursion: with nested generators each
    # event would pass through all levels.
    ahead: list[Iterator[tuple[str | None, Any]]] = [_fetched(reader, [(None, place)])]
    while ahead:
        entry = next(ahead[-1], None)
        if entry is None:
            ahead.pop()
            if ahead:
                yield _END
            continue
        key, place = entry
        if key is not None:
            yield WalkEvent(KEY, key)
        if type(place) is _Fetched:
            outline, item = place
            require_part(outline.role, outline.digest, item)
            if outline.role in (ROLE_TEXT, ROLE_BYTES):
                yield from _content(reader, outline, item)
                continue
            place = read_node(reader, item)
        if type(place) not in (list, dict, Tree):
            yield WalkEvent(SCALAR, place)
            continue
        if len(ahead) > MAX_DEPTH:
            raise canonical.refuse_depth()
        yield WalkEvent(MAP if is_map(place) else LIST, node_length(place))
        ahead.append(_fetched(reader, _entries(reader, place)))


class _Fetched(NamedTuple):
    """A part in another object, with that object."""

    outline: Outline
    item: StoredObject


def _fetched(
    reader: PieceReader, entries: Iterable[tuple[str | None, Any]]
) -> Iterator[tuple[str | None, Any]]:
    """The same entries, with the parts from other objects fetched in batches."""
    entries = iter(entries)
    while batch := list(islice(entries, _FETCH_BATCH)):
        names = list({place.digest: None for _, place in batch if type(place) is Outline})
        found = dict(zip(names, reader.follow(names), strict=True)) if names else {}
        # Nested containers have a batch each, so long objects are fetched again when needed.
        kept = {name: item for name, item in found.items() if len(item.data) <= _KEPT_BYTES}
        del found
        for key, place in batch:
            if type(place) is Outline:
                item = kept.get(place.digest) or reader.follow((place.digest,))[0]
                yield key, _Fetched(place, item)
            else:
                yield key, place


def _entries(reader: PieceReader, place: Any) -> Iterator[tuple[str | None, Any]]:
    """The places in a list or map, in order, with their keys if it is a map."""
    leaves: Iterable[Any] = [place]
    if type(place) is Tree:
        found = iter_leaves(reader, place.root, place.kind, 0, node_length(place))
        leaves = (leaf for _, leaf in found)
    for leaf in leaves:
        if type(leaf) is dict:
            yield from leaf.items()
        else:
            for inner in leaf:
                yield None, inner


def _content(reader: PieceReader, place: Outline, item: StoredObject) -> Iterator[WalkEvent]:
    blob = BlobReader(reader, place.digest, item)
    is_text = place.role == ROLE_TEXT
    decoder = codecs.getincrementaldecoder("utf-8")()
    yield WalkEvent(TEXT if is_text else BYTES, blob.size_bytes)
    part = b"begin"
    while part:
        part = blob.read(_PART_BYTES) or b""
        try:
            shown = decoder.decode(part, final=not part) if is_text else part
        except UnicodeDecodeError as exc:
            raise CorruptionError(
                f"blob {place.digest.hex()} is linked to as a text but is not UTF-8"
            ) from exc
        if shown:
            yield WalkEvent(PART, shown)
    yield _END


class BytesBeginning(bytes):
    """The first bytes of a long content of ``size_bytes`` bytes."""

    size_bytes: int

    def __new__(cls, begin: bytes, size_bytes: int) -> BytesBeginning:
        """Keep enough bytes to distinguish contents."""
        made = super().__new__(cls, begin[:_BYTES_SHOWN])
        made.size_bytes = size_bytes
        return made


class _Beginning:
    """Builds the beginning of a value.

    One entry gets at most half of the remaining length, so that the keys after a long entry are
    shown too.
    """

    def __init__(self, reader: PieceReader, text_size: int) -> None:
        self._reader = reader
        self._text_size = text_size

    def build(self, place: Any, size: int, depth_left: int) -> tuple[Any, int]:
        """About ``size`` characters of a value of at most ``depth_left`` levels; and how many."""
        if type(place) is Outline:
            item = self._reader.follow((place.digest,))[0]
            require_part(place.role, place.digest, item)
            if place.role in (ROLE_TEXT, ROLE_BYTES):
                return self._content(place, item, min(size, self._text_size))
            place = read_node(self._reader, item)
        if type(place) is str:
            cut = place[: min(size, self._text_size)]
            return cut, _AROUND + len(cut)
        if type(place) not in (list, dict, Tree):
            return place, _AROUND
        if not depth_left:
            raise canonical.refuse_depth()
        built: Any = {} if is_map(place) else []
        used = _AROUND
        for key, inner in _entries(self._reader, place):
            if used >= size:
                break
            used += 0 if key is None else len(key)
            value, taken = self.build(inner, max(_LEAST, (size - used) // 2), depth_left - 1)
            used += taken
            if key is None:
                built.append(value)
            else:
                built[key] = value
        return built, used

    def _content(self, place: Outline, item: StoredObject, size: int) -> tuple[Any, int]:
        parts = _content(self._reader, place, item)
        length = next(parts).value
        if place.role == ROLE_BYTES:
            return BytesBeginning(next(parts, _END).value or b"", length), _AROUND
        shown = ""
        for event in parts:
            if event.kind == END or len(shown) >= size:
                break
            shown += event.value[: size - len(shown)]
        return shown, _AROUND + len(shown)
