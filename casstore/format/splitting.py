"""Splits a value into shared pieces: long strings become blobs, long lists and maps trees.

A piece is one object. A part of a value that becomes an object of its own is *outlined*: a link
replaces it. ``depth_left`` is how many more levels the lists and maps of a part may nest.

Equal values give equal pieces on every platform, so each piece is stored once, whichever client
stores it; a changed value shares all pieces the change did not touch. ``split`` passes every
piece to ``emit`` with its direct links, children before parents, and returns the digest that
names the whole value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from casstore.errors import InvalidValueError
from casstore.format import expansion, tree
from casstore.format.canonical import (
    CONTAINER_BYTES,
    ROLE_BYTES,
    ROLE_PART,
    ROLE_TEXT,
    Link,
    cut_items,
    cut_map,
    item_link_bytes,
    item_size,
    key_bytes,
    link_bytes,
    links_in,
    list_header,
    map_header,
    pack_flat,
    pack_plain,
    refuse_depth,
    scalar_bytes,
    sorted_keys,
    text_bytes,
)
from casstore.format.digest import Kind
from casstore.format.limits import (
    CONTAINER_OUTLINE_MIN_BYTES,
    LIST_ITEM_OUTLINE_MIN_BYTES,
    MAX_DEPTH,
    MAX_REPEATED_BYTES,
    OUTLINE_MIN_BYTES,
    SINGLE_PIECE_MAX_BYTES,
)

# emit(kind, data, children) stores one piece and returns its digest. Blobs of any length are
# passed whole; the blob layer cuts long ones.
Emit = Callable[[int, bytes, list[bytes]], bytes]

# UTF-8 takes at most four bytes a character: a string with fewer characters than this is short.
_SURELY_SHORT = OUTLINE_MIN_BYTES // 4


class EncodedEntry(NamedTuple):
    """One encoded list item or map entry, with the digests it links to.

    ``data`` of a map entry is key and value together; ``key`` is None in lists.
    ``size`` is the length of the entry's own encoding, also if ``data`` is only a link
    to it (``outline_item``): sizes decide whether a list is a tree, so they must not
    depend on that.
    """

    data: bytes
    links: list[bytes]
    size: int
    key: str | None = None


class Encoded(NamedTuple):
    """A value in the form in which its container holds it: short bytes, or a link."""

    data: bytes
    links: list[bytes]
    # The object that ``data`` links to, if the value is an outlined container.
    outlined: bytes | None = None


def split(value: Any, emit: Emit) -> bytes:
    """Store ``value`` piece by piece; the digest returned names all of it."""
    return root_object(encode_split(value, MAX_DEPTH, emit), emit)


def root_object(encoded: Encoded, emit: Emit) -> bytes:
    """Store an inline value as one object; an outlined value has its object already.

    Returns the digest of that object.
    """
    if encoded.outlined is not None:
        return encoded.outlined
    return emit(Kind.VALUE, encoded.data, encoded.links)


#: The long lists and maps of a value that are encoded already, with their encodings, by id() and
#: ``depth_left``.
_Known = dict[tuple[int, int], tuple[Any, Encoded]]


class ExpansionGuard:
    """Passes the pieces of one value to ``emit``, and limits their expanded size."""

    __slots__ = ("_below", "_data", "_emit")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._data: dict[bytes, tuple[int, bytes]] = {}
        self._below: dict[bytes, list[bytes]] = {}

    def emit(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        """Pass a piece on, and remember it for ``require_bounded``."""
        digest = self._emit(kind, data, children)
        if kind != Kind.BLOB:
            self._data[digest] = kind, data
            if children:
                self._below[digest] = children
        return digest

    def require_bounded(self, links: list[bytes]) -> None:
        """Raise ExpansionError if shared parts of the value repeat to more than a reader builds.

        ``links`` are the digests that the encoded value links to.
        """
        if not self._data:
            return
        # Children that are not in ``_data`` are blobs or link targets: a reader does not expand
        # them.
        data = self._data
        below = {
            name: [child for child in children if child in data]
            for name, children in self._below.items()
        }
        roots = [name for name in links if name in data]
        if not expansion.has_repetition(roots, below):
            return
        most = expansion.expand(roots, below, lambda name: expansion.most_cost(len(data[name][1])))
        if most.repeated <= MAX_REPEATED_BYTES:
            return
        found = expansion.expand(roots, below, lambda name: expansion.own_cost(*data[name])[0])
        if found.repeated > MAX_REPEATED_BYTES:
            raise expansion.refuse_repetition(
                found.repeated, MAX_REPEATED_BYTES, "store a part that repeats once, and Link to it"
            )


def encode_split(value: Any, depth_left: int, emit: Emit, known: _Known | None = None) -> Encoded:
    """Encode one value as its container holds it, outlining long parts.

    ``known`` has the encodings of parts of the same value. ExpansionError if the shared parts of
    the value, decoded at each of their occurrences, take more memory than a reader allows.
    """
    kind = type(value)
    if kind is str:
        if len(value) >= _SURELY_SHORT:
            content = text_bytes(value)
            if len(content) >= OUTLINE_MIN_BYTES:
                digest = emit(Kind.BLOB, content, [])
                return Encoded(link_bytes(ROLE_TEXT, digest), [digest])
        return Encoded(scalar_bytes(value), [])
    if kind is dict or kind is list or kind is tuple:
        short = _encode_short(value, depth_left, emit)
        if short is not None:
            return short
        if known is not None:
            return _encode_long(value, depth_left, emit, known)
        guard = ExpansionGuard(emit)
        encoded = _encode_long(value, depth_left, guard.emit, {})
        guard.require_bounded(encoded.links)
        return encoded
    if kind is bytes and len(value) >= OUTLINE_MIN_BYTES:
        digest = emit(Kind.BLOB, value, [])
        return Encoded(link_bytes(ROLE_BYTES, digest), [digest])
    data = scalar_bytes(value)
    return Encoded(data, [bytes(value.digest)] if kind is Link else [])


def _encode_short(value: Any, depth_left: int, emit: Emit) -> Encoded | None:
    """Encode a list or map that is short enough to stay in its container; None if it is not.

    The lists and maps in it are short, too, so it is encoded in one call.
    """
    if depth_left and type(value) is dict:
        # A map this short cannot hold a text long enough to become a blob of its own.
        flat = pack_flat(value, CONTAINER_OUTLINE_MIN_BYTES - 1)
        if flat is not None:
            return Encoded(flat, [])
    short = pack_plain(
        value,
        depth_left,
        CONTAINER_OUTLINE_MIN_BYTES - 1,
        OUTLINE_MIN_BYTES,
        lambda content: emit(Kind.BLOB, content, []),
    )
    return None if short is None else Encoded(*short)


def _encode_long(value: Any, depth_left: int, emit: Emit, known: _Known) -> Encoded:
    """Encode a list or map that is not short, or look it up in ``known``."""
    key = id(value), depth_left
    if key in known:
        return known[key][1]
    if type(value) is dict:
        encoded = _encode_map(value, depth_left, emit, known)
    else:
        encoded = _encode_list(value, depth_left, emit, known)
    # Without this, a list that holds one list twice, which holds another one twice, and so on,
    # would take exponential time. ``known`` holds the value, too: while it exists, no other value
    # has its id().
    known[key] = value, encoded
    return encoded


def _encode_list(
    items: list[Any] | tuple[Any, ...], depth_left: int, emit: Emit, known: _Known
) -> Encoded:
    if not depth_left:
        raise refuse_depth()
    parts: list[bytes] = []
    links: list[list[bytes]] = []
    try:
        # Copied first: another thread may change the list meanwhile.
        for item in list(items):
            encoded = encode_split(item, depth_left - 1, emit, known)
            parts.append(encoded.data)
            links.append(encoded.links)
    except InvalidValueError as exc:
        raise exc.within(len(parts)) from exc.__cause__
    data = list_header(len(parts)) + b"".join(parts)
    if len(data) <= SINGLE_PIECE_MAX_BYTES:
        return _one_piece(data, [digest for each in links for digest in each], emit)
    sizes = map(len, parts)
    return pack_list([EncodedEntry(*each) for each in zip(parts, links, sizes, strict=True)], emit)


def _encode_map(mapping: dict[str, Any], depth_left: int, emit: Emit, known: _Known) -> Encoded:
    if not depth_left:
        raise refuse_depth()
    mapping = mapping.copy()
    keys = sorted_keys(mapping)
    parts: list[bytes] = []
    links: list[list[bytes]] = []
    for key in keys:
        encoded_key = key_bytes(key)
        try:
            encoded = encode_split(mapping[key], depth_left - 1, emit, known)
        except InvalidValueError as exc:
            raise exc.within(key) from exc.__cause__
        parts.append(encoded_key + encoded.data)
        links.append(encoded.links)
    data = map_header(len(parts)) + b"".join(parts)
    if len(data) <= SINGLE_PIECE_MAX_BYTES:
        return _one_piece(data, [digest for each in links for digest in each], emit)
    sizes = map(len, parts)
    return pack_map(
        [EncodedEntry(*each) for each in zip(parts, links, sizes, keys, strict=True)], emit
    )


def list_entry(encoded: Encoded) -> EncodedEntry:
    """An item as an entry of its list."""
    return EncodedEntry(encoded.data, encoded.links, len(encoded.data))


def join_map_entry(key: str, encoded: Encoded) -> EncodedEntry:
    """A key and its value as an entry of their map."""
    data = key_bytes(key) + encoded.data
    return EncodedEntry(data, encoded.links, len(data), key)


def value_data(entry: EncodedEntry) -> bytes:
    """The encoded value of an entry, without the key that a map's entry starts with."""
    return entry.data if entry.key is None else entry.data[len(key_bytes(entry.key)) :]


def list_leaf_entries(data: bytes) -> list[EncodedEntry]:
    """Cut the encoded list of a leaf into its entries."""
    return [EncodedEntry(item, links_in(item), item_size(item)) for item in cut_items(data)]


def map_leaf_entries(data: bytes) -> list[EncodedEntry]:
    """Cut the encoded map of a leaf into its entries."""
    return [
        EncodedEntry(item, links_in(item[len(key_bytes(key)) :]), len(item), key)
        for key, item in cut_map(data)
    ]


def pack(kind: int, entries: list[EncodedEntry], emit: Emit) -> Encoded:
    """Encode a list or map from its entries."""
    return pack_map(entries, emit) if kind == Kind.MAP else pack_list(entries, emit)


def piece_bytes(kind: int, count: int, entry_bytes: int) -> int:
    """The length of a container with this many entries in one piece."""
    header = map_header(count) if kind == Kind.MAP else list_header(count)
    return len(header) + entry_bytes


def pack_list(entries: list[EncodedEntry], emit: Emit) -> Encoded:
    """Encode a list from its entries: inline if it is short, else as one object or a tree."""
    return ListTail().append(entries, emit)[0]


class ListTail(NamedTuple):
    """The end of a list: the part of its encoding that changes if entries are appended.

    Appending encodes a list exactly as encoding all of it at once does (P4).
    """

    #: The entries of the last leaf; of a list in one piece, all entries.
    entries: Sequence[EncodedEntry] = ()
    #: Per level, lowest first: the complete children to the left of the path to the last leaf.
    above: Sequence[Sequence[tree.Child]] = ()
    length: int = 0
    size: int = 0

    def append(self, new: Sequence[EncodedEntry], emit: Emit) -> tuple[Encoded, ListTail]:
        """Store the list with these entries appended; returns its encoding and its end."""
        length, size = self.length + len(new), self.size + sum([entry.size for entry in new])
        header = list_header(length)
        if len(header) + size <= SINGLE_PIECE_MAX_BYTES:
            entries = [*self.entries, *new]
            data = header + b"".join([entry.data for entry in entries])
            encoded = _one_piece(data, _all_links(entries), emit)
            return encoded, ListTail(entries, (), length, size)
        piece = [*self.entries]
        if not self.above:
            # A list in one piece becomes a tree.
            piece, new = [], [*piece, *new]
        builder = tree.Builder(
            Kind.LIST, lambda at, children: branch(Kind.LIST, at, children, emit), opened=self.above
        )
        for entry in new:
            if piece and tree.is_complete(piece, _ends_list):
                builder.add(leaf(Kind.LIST, piece, emit))
                piece = []
            piece.append(outline_item(entry, emit))
        # [[]], one open, empty level: () would mean a list in one piece.
        tail = ListTail(piece, builder.opened() or [[]], length, size)
        builder.add(leaf(Kind.LIST, piece, emit))
        return link_part(branch(Kind.LIST, *builder.finish(), emit).digest), tail


def outline_item(entry: EncodedEntry, emit: Emit) -> EncodedEntry:
    """Outline a list or map inside a list tree, unless it is tiny.

    A session grows at the end of a list, and each append stores the last leaf again: links to
    the items before cost a few bytes there, their text hundreds.
    """
    if len(entry.data) < LIST_ITEM_OUTLINE_MIN_BYTES or entry.data[0] not in CONTAINER_BYTES:
        return entry
    digest = emit(Kind.VALUE, entry.data, entry.links)
    return EncodedEntry(item_link_bytes(len(entry.data), digest), [digest], entry.size)


def pack_map(entries: list[EncodedEntry], emit: Emit) -> Encoded:
    """Encode a map from its sorted entries: inline if short, else as one object or a tree."""
    data = map_header(len(entries)) + b"".join([entry.data for entry in entries])
    if len(data) <= SINGLE_PIECE_MAX_BYTES:
        return _one_piece(data, _all_links(entries), emit)
    leaves = [leaf(Kind.MAP, piece, emit) for piece in tree.group(entries, _ends_map)]
    return link_part(grow(Kind.MAP, leaves, emit))


def _ends_list(entry: EncodedEntry) -> bool:
    return tree.ends_list_leaf(entry.data)


def _ends_map(entry: EncodedEntry) -> bool:
    return tree.ends_map_piece(entry.key or "", 0)


def leaf_ends(kind: int) -> Callable[[EncodedEntry], bool]:
    """The boundary rule for the leaves of a list or map."""
    return _ends_map if kind == Kind.MAP else _ends_list


def _all_links(entries: list[EncodedEntry]) -> list[bytes]:
    return [digest for entry in entries for digest in entry.links]


def _one_piece(data: bytes, links: list[bytes], emit: Emit) -> Encoded:
    if len(data) < CONTAINER_OUTLINE_MIN_BYTES:
        return Encoded(data, links)
    return link_part(emit(Kind.VALUE, data, links))


def link_part(digest: bytes) -> Encoded:
    """Encode a container that is an object of its own."""
    return Encoded(link_bytes(ROLE_PART, digest), [digest], digest)


def leaf(kind: int, entries: list[EncodedEntry], emit: Emit) -> tree.Child:
    """Store one leaf of a tree: a value object holding a short list or map."""
    header = map_header(len(entries)) if kind == Kind.MAP else list_header(len(entries))
    body = b"".join([entry.data for entry in entries])
    digest = emit(Kind.VALUE, header + body, _all_links(entries))
    return tree.Child(digest, len(entries), sum([e.size for e in entries]), entries[-1].key or "")


def grow(kind: int, children: list[tree.Child], emit: Emit, level: int = 1) -> bytes:
    """Store branches over ``children`` until one is left: the root.

    A root always is a branch, so that its kind distinguishes a tree from a single piece.
    """
    builder = tree.Builder(kind, lambda at, piece: branch(kind, at, piece, emit), level)
    for child in children:
        builder.add(child)
    top, root = builder.finish()
    return branch(kind, top, root, emit).digest


def branch(kind: int, level: int, children: list[tree.Child], emit: Emit) -> tree.Child:
    """Store one branch and return its entry in the branch above."""
    data = tree.encode_branch(kind, level, children)
    digest = emit(kind, data, [child.digest for child in children])
    return tree.Child(
        digest,
        sum([child.entries for child in children]),
        sum([child.size for child in children]),
        children[-1].key,
    )
