"""One encoding for each value: msgpack, restricted until equal values give equal bytes (P4).

``encode`` refuses values without a single encoding, naming the path to them; ``decode``
refuses all bytes that ``encode`` would not have written. msgpack itself guarantees neither: it
preserves the key order it is given, accepts repeated keys and padded integers, and reads 32-bit
floats. The profile:

* ``dict`` with ``str`` keys only, in UTF-8 byte order; ``list``; a ``tuple`` is
  stored as a list and comes back as one;
* integers from -2**63 to 2**64 - 1 in their shortest form; floats always in 64
  bits, finite, with -0.0 preserved; ``1``, ``1.0`` and ``True`` are different values;
* ``str`` as it is, not normalised, no lone surrogates; ``bytes``; ``None``;
* a ``Link`` as extension type 1. Nothing else, and no subclass of these: a
  subclass would come back as its base, and the value would not round-trip.

A part of a value is *outlined* if it is stored in another object and a link replaces it; the role
of the link says what kind of part. ``depth_left`` is how many more levels lists and maps may nest.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Final, NamedTuple

import msgpack

from casstore.errors import InvalidInputError, InvalidValueError, LimitError, NotCanonicalError
from casstore.format.digest import DIGEST_BYTES, Digest
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH, MAX_ENTRIES, MAX_KEY_BYTES

# Extension type 1 holds a role byte, for items a size, and a digest. The role says what the link
# replaces in the value; the engine knows the kind of the object that the digest names.
LINK_EXT_TYPE: Final = 1
ROLE_LINK: Final = 0  # a link that the user stored; decodes to Link
ROLE_TEXT: Final = 1  # a str that is stored in a blob
ROLE_BYTES: Final = 2  # bytes that are stored in a blob
ROLE_PART: Final = 3  # a list or map that is stored in a separate object
ROLE_ITEM: Final = 4  # a short list or map, separate only because its list is a tree
LAST_ROLE: Final = ROLE_ITEM
_ITEM_SIZE_BYTES: Final = 2
_LINK_BYTES: Final = 1 + DIGEST_BYTES

# The bytes with which an encoded list or map can begin.
CONTAINER_BYTES: Final = frozenset((*range(0x80, 0xA0), *range(0xDC, 0xE0)))

_LINK_HEADERS: Final = {
    role: bytes((0xC7, 1 + DIGEST_BYTES, LINK_EXT_TYPE, role)) for role in range(ROLE_ITEM)
}
_ITEM_HEADER: Final = bytes((0xC7, 1 + _ITEM_SIZE_BYTES + DIGEST_BYTES, LINK_EXT_TYPE, ROLE_ITEM))

Resolver = Callable[[int, bytes], Any]


class Link(NamedTuple):
    """A link to another object, stored inside a value: while gc keeps the value, it keeps both.

    >>> image = store.put_blob(b"pixels")
    >>> message = store.put_value({"role": "user", "image": Link(image)})
    >>> store.get_blob(store.get_value(message)["image"].digest)
    b'pixels'
    """

    digest: Digest


def link_bytes(role: int, digest: bytes) -> bytes:
    """Encode a link of any role but ``ROLE_ITEM``."""
    return _LINK_HEADERS[role] + digest


def item_link_bytes(size_bytes: int, digest: bytes) -> bytes:
    """Encode the link to an outlined list item, with the size of the item (``item_size``)."""
    return _ITEM_HEADER + size_bytes.to_bytes(_ITEM_SIZE_BYTES, "big") + digest


def item_size(entry: bytes) -> int:
    """The length of a list item's own encoding, also if ``entry`` is only the link to it."""
    if entry.startswith(_ITEM_HEADER):
        start = len(_ITEM_HEADER)
        return int.from_bytes(entry[start : start + _ITEM_SIZE_BYTES], "big")
    return len(entry)


def read_link(code: int, payload: bytes) -> tuple[int, bytes]:
    """The role and digest of a link; NotCanonicalError if the extension is not a link."""
    role = payload[0] if payload else -1
    extra = _ITEM_SIZE_BYTES if role == ROLE_ITEM else 0
    if code != LINK_EXT_TYPE or role > LAST_ROLE or len(payload) != 1 + extra + DIGEST_BYTES:
        raise NotCanonicalError(f"extension type {code} of {len(payload)} bytes is not a link")
    return role, payload[1 + extra :]


def list_header(count: int) -> bytes:
    """Encode the header of a list of ``count`` items."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 65_536:
        return b"\xdc" + count.to_bytes(2, "big")
    if count <= MAX_ENTRIES:
        return b"\xdd" + count.to_bytes(4, "big")
    raise LimitError(f"a list of {count} items (at most {MAX_ENTRIES})")


def map_header(count: int) -> bytes:
    """Encode the header of a map of ``count`` entries."""
    if count < 16:
        return bytes((0x80 | count,))
    if count < 65_536:
        return b"\xde" + count.to_bytes(2, "big")
    if count <= MAX_ENTRIES:
        return b"\xdf" + count.to_bytes(4, "big")
    raise LimitError(f"a map of {count} entries (at most {MAX_ENTRIES})")


_unpackb: Final[Callable[..., Any]] = msgpack.unpackb
# What msgpack raises for invalid bytes. ValueError covers truncation, trailing bytes, bad UTF-8 and
# nesting too deep for msgpack's own stack. RecursionError is not in the list: it depends on how
# deep the caller's stack is, not on the bytes.
_UNPACK_ERRORS: Final = (ValueError, TypeError, msgpack.UnpackException)
_ExtType: Final = msgpack.ExtType
_new_tuple: Final = tuple.__new__
_HOLDERS: Final = frozenset((dict, list, _ExtType))
_CONTAINERS: Final = frozenset((dict, list))
_NO_PLAIN: Final = frozenset((dict, list, slice))
_ROLE_BYTES: Final = {role: bytes((role,)) for role in (ROLE_LINK, ROLE_TEXT, ROLE_BYTES)}


# Packers to be reused: creating one costs more than most packing does. A packer in use is not in
# the list, so neither another thread nor a finaliser can use it.
_idle_packers: Final[list[msgpack.Packer]] = []
# A packer keeps a buffer as long as the longest value that it has packed, so a packer that has
# packed a longer value than this is not reused.
_PACKER_BUFFER_BYTES: Final = 65_536


def pack_checked(value: Any) -> bytes:
    """Encode a value whose types, limits and order of keys the caller has checked: none is here."""
    try:
        packer = _idle_packers.pop()
    except IndexError:
        packer = _Packer(buf_size=_PACKER_BUFFER_BYTES)
    data: bytes = packer.pack(value)
    if len(data) <= _PACKER_BUFFER_BYTES:
        _idle_packers.append(packer)
    return data


_Packer: Final = msgpack.Packer
_pack: Final[Callable[[Any], bytes]] = pack_checked


def unpack_checked(data: bytes) -> Any:
    """Decode what ``pack_checked`` encoded, else NotCanonicalError. The caller checks the types."""
    value = _unpack(data, read_link)
    _require_same(value, data)
    return value


def _require_same(value: Any, data: bytes) -> None:
    try:
        same = _pack(value) == data
    except ValueError as exc:
        # msgpack packs less deeply than it unpacks.
        raise refuse_depth() from exc
    if not same:
        raise NotCanonicalError("not the canonical encoding of its value")


def text_bytes(text: str) -> bytes:
    """The UTF-8 of a text; InvalidValueError if it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as exc:
        raise _refuse_surrogate(exc) from exc


def _refuse_surrogate(exc: UnicodeEncodeError) -> InvalidValueError:
    return InvalidValueError(f"a lone surrogate at character {exc.start} cannot be stored as UTF-8")


def scalar_bytes(value: Any) -> bytes:
    """Encode a value that is not a list or map; InvalidValueError if it cannot be stored.

    A subclass is refused. The types that sessions hold most often are tested first.
    """
    kind = type(value)
    if kind is str:
        try:
            return _pack(value)
        except UnicodeEncodeError as exc:
            raise _refuse_surrogate(exc) from exc
        except ValueError as exc:
            raise LimitError(f"a string of {len(value)} characters is too long") from exc
    if kind is int:
        try:
            return _pack(value)
        except OverflowError as exc:
            raise InvalidValueError("an integer is outside -2**63 … 2**64-1") from exc
    if kind is bool or value is None:
        return _pack(value)
    if kind is float:
        if not isfinite(value):
            raise InvalidValueError(f"{value} has no canonical form; only finite floats have")
        return _pack(value)
    if kind is bytes:
        try:
            return _pack(value)
        except ValueError as exc:
            raise LimitError(f"{len(value)} bytes are too long for one value") from exc
    if kind is Link:
        if not isinstance(value.digest, bytes) or len(value.digest) != DIGEST_BYTES:
            raise InvalidValueError(f"a Link needs a digest, got {value.digest!r}")
        return link_bytes(ROLE_LINK, value.digest)
    raise InvalidValueError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be stored; a value is made of dict, "
        "list, str, bytes, int, float, bool, None and Link (no subclasses)"
    )


class _NotPlainError(Exception):
    """``pack_plain`` cannot encode this value.

    The caller then encodes it part by part, or raises the error that says what is wrong, and where.
    """


def pack_plain(
    value: Any, depth_left: int, max_bytes: int, long_bytes: int, name: Callable[[bytes], bytes]
) -> tuple[bytes, list[bytes]] | None:
    """Encode a list or map of at most ``max_bytes`` in one call, at the speed of C.

    Returns its bytes and the digests it links to, in order. None if it is longer, or cannot
    be encoded: the caller then encodes it part by part, which raises the error and its location.
    Texts and bytes from ``long_bytes`` on are passed to ``name``, which returns their digest, and
    replaced with links.
    """
    walk = _PlainWalk(max_bytes, long_bytes)
    try:
        plain = walk.value(value, depth_left)
        links: list[bytes] = []
        for holder, key, role, content in walk.away:
            digest = content if role == ROLE_LINK else name(content)
            links.append(digest)
            holder[key] = _ExtType(LINK_EXT_TYPE, _ROLE_BYTES[role] + digest)
        data = _pack(plain)
    except (_NotPlainError, TypeError, ValueError, OverflowError):
        return None
    return (data, links) if len(data) <= max_bytes else None


def pack_flat(value: dict[Any, Any], max_bytes: int, *, nested: bool = False) -> bytes | None:
    """Encode a map of texts, integers, booleans and nulls of at most ``max_bytes``.

    Most messages are such maps. ``nested``: its values may be such maps, too. None for any other
    map: the caller then tries ``pack_plain``.
    """
    # A copy is checked and packed, in case another thread changes the value meanwhile.
    plain = value.copy()
    length = 0
    for key, item in plain.items():
        kind = type(item)
        if type(key) is not str:
            return None
        if kind is str:
            length += len(item)
        elif kind is dict and nested:
            # Replaced only in the copy: the keys of the caller's map keep their order.
            inner = _flat_map(item, max_bytes)
            if inner is None:
                return None
            plain[key] = inner
        elif kind is not int and item is not None and kind is not bool:
            return None
    if length > max_bytes:
        return None
    try:
        data = _pack({key: plain[key] for key in sorted(plain)})
    except (ValueError, OverflowError):
        # A lone surrogate, or a number too large.
        return None
    return data if len(data) <= max_bytes else None


def _flat_map(value: dict[Any, Any], max_bytes: int) -> dict[str, Any] | None:
    """A copy of the map with its keys in order; None if it is too long or has other values."""
    value = value.copy()
    length = 0
    for key, item in value.items():
        kind = type(item)
        if type(key) is not str:
            return None
        if kind is str:
            length += len(item)
        elif kind is not int and item is not None and kind is not bool:
            return None
    return {key: value[key] for key in sorted(value)} if length <= max_bytes else None


class _PlainWalk:
    """Copies a value as msgpack packs it: checked, with sorted keys, and without outlined parts.

    Raises _NotPlainError, also as soon as the value is certainly too long.
    """

    __slots__ = ("_left", "_long_bytes", "away")

    def __init__(self, max_bytes: int, long_bytes: int) -> None:
        self._left = max_bytes
        self._long_bytes = long_bytes
        #: The parts that become links: the container, the key or index in it, the role, and the
        #: content, or for a ``Link`` its digest.
        self.away: list[tuple[Any, Any, int, bytes]] = []

    def value(self, value: Any, depth_left: int) -> Any:
        """A list or map in the form that msgpack packs."""
        if not depth_left or len(value) > self._left:
            raise _NotPlainError
        plain: Any
        steps: Any
        # Copied first: another thread may change the value meanwhile.
        if type(value) is dict:
            value = value.copy()
            plain = {}
            steps = sorted(value)
        else:
            value = plain = list(value)
            steps = range(len(value))
        self._left -= len(value)
        for step in steps:
            item = value[step]
            kind = type(item)
            if kind is str:
                length = len(item)
                self._left -= length
                # UTF-8 takes at most four bytes a character: most texts need no measuring.
                if length * 4 >= self._long_bytes:
                    item = self._text(item, length, plain, step)
            elif kind is int or item is None or kind is bool:
                pass
            elif kind is dict or kind is list or kind is tuple:
                item = self.value(item, depth_left - 1)
            elif kind is bytes:
                self._left -= len(item)
                if len(item) >= self._long_bytes:
                    self._leave(item, len(item), ROLE_BYTES, plain, step)
            elif kind is Link:
                self._leave(_link_target(item), 0, ROLE_LINK, plain, step)
            elif kind is not float or not isfinite(item):
                raise _NotPlainError
            if type(plain) is dict:
                if type(step) is not str:
                    raise _NotPlainError
                self._left -= len(step)
            if self._left < 0:
                raise _NotPlainError
            plain[step] = item
        return plain

    def _text(self, text: str, counted: int, holder: Any, step: Any) -> Any:
        data = text.encode()
        if len(data) < self._long_bytes:
            return text
        self._leave(data, counted, ROLE_TEXT, holder, step)
        return None

    def _leave(self, data: bytes, counted: int, role: int, holder: Any, step: Any) -> None:
        self._left += counted - DIGEST_BYTES
        self.away.append((holder, step, role, data))


def _link_target(link: Link) -> bytes:
    digest = link.digest
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise _NotPlainError
    return bytes(digest)


def key_bytes(key: Any) -> bytes:
    """Encode a map key; InvalidValueError if it is not a str, LimitError if it is too long."""
    if type(key) is not str:
        raise InvalidValueError(f"a map key must be a str, got {type(key).__name__}")
    encoded = scalar_bytes(key)
    # The encoding is longer than the text, so only a long one needs measuring.
    if len(encoded) > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
        raise LimitError(f"a map key has {len(key.encode())} bytes; the limit is {MAX_KEY_BYTES}")
    return encoded


def sorted_keys(mapping: dict[Any, Any]) -> list[str]:
    """The keys in canonical order: code point order is UTF-8 byte order."""
    try:
        return sorted(mapping)
    except TypeError as exc:
        strange = next(key for key in mapping if type(key) is not str)
        raise InvalidValueError(f"a map key must be a str, got {type(strange).__name__}") from exc


def refuse_depth() -> LimitError:
    """The error for a value that nests too deeply (or contains itself)."""
    return LimitError(f"lists and maps are nested deeper than {MAX_DEPTH} levels")


def encode(value: Any, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
    """Encode ``value`` in the one way that casstore reads back.

    LimitError if that takes more than ``max_bytes``: a list that holds one list twice, which holds
    another one twice, and so on, would take exponentially many.

    >>> encode({"b": 1, "a": [None, 1.5]}).hex()
    '82a16192c0cb3ff8000000000000a16201'
    """
    return _encode(value, MAX_DEPTH, _ByteBudget(max_bytes))


class _ByteBudget:
    """The number of bytes that an encoding may still take."""

    __slots__ = ("_left", "_limit")

    def __init__(self, limit: int) -> None:
        self._left = self._limit = limit

    def spend(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise LimitError(f"the value takes more than {self._limit:,} bytes")
        return data


def _encode(value: Any, depth_left: int, budget: _ByteBudget) -> bytes:
    kind = type(value)
    step: str | int = 0
    if kind is dict:
        if not depth_left:
            raise refuse_depth()
        # Copied first: another thread may change the value, and the header states the number of
        # entries.
        value = value.copy()
        parts = [budget.spend(map_header(len(value)))]
        keys = sorted_keys(value)
        parts_of_keys = [key_bytes(key) for key in keys]
        try:
            for step, encoded in zip(keys, parts_of_keys, strict=True):
                parts.append(budget.spend(encoded))
                parts.append(_encode(value[step], depth_left - 1, budget))
        except InvalidValueError as exc:
            raise exc.within(step) from exc.__cause__
        return b"".join(parts)
    if kind is list or kind is tuple:
        if not depth_left:
            raise refuse_depth()
        value = list(value)
        parts = [budget.spend(list_header(len(value)))]
        try:
            for step, item in enumerate(value):  # noqa: B007 - the handler below needs it
                parts.append(_encode(item, depth_left - 1, budget))
        except InvalidValueError as exc:
            raise exc.within(step) from exc.__cause__
        return b"".join(parts)
    return budget.spend(scalar_bytes(value))


def _refuse_outline(role: int, digest: bytes) -> Any:
    raise NotCanonicalError(
        f"a part of the value (role {role}) is stored in another object ({digest.hex()})"
    )


def decode(data: bytes, resolve: Resolver = _refuse_outline) -> Any:
    """Decode what ``encode`` wrote; NotCanonicalError for any other bytes.

    ``resolve(role, digest)`` returns the outlined parts; without it, a value that has any is
    refused.
    """
    value, links = inspect(data)
    return rebuild(data, resolve) if links else value


def inspect(data: bytes) -> tuple[Any, list[tuple[int, bytes]]]:
    """Check that ``data`` is canonical; returns its value and its links as (role, digest).

    The value has an ``ExtType`` in place of each link (``is_link``). ``fill_links`` replaces them
    with their content, ``rebuild`` makes a complete value from the bytes.
    """
    links: list[tuple[int, bytes]] = []

    def note_link(code: int, payload: bytes) -> Any:
        if code == LINK_EXT_TYPE and len(payload) == _LINK_BYTES and payload[0] < ROLE_ITEM:
            links.append((payload[0], payload[1:]))
        else:
            links.append(read_link(code, payload))
        # The same as ExtType(code, payload), without its checks: those above suffice.
        return _new_tuple(_ExtType, (code, payload))

    value = _unpack(data, note_link)
    # Re-encoding catches padded integers, 32-bit floats, long headers and repeated
    # keys; the order and type of keys is checked as each map is built.
    _require_same(value, data)
    # ``encode`` refuses too deep nesting, a NaN or infinity and too long a key, but it walks the
    # value, which costs more than unpacking did. A NaN or infinity starts with one of two byte
    # pairs, and a long key needs long data, so nearly all pieces need no walk.
    if not _nests(value, MAX_DEPTH) or len(data) > MAX_KEY_BYTES or _may_hold_strange_float(data):
        encode(_unpack(data, lambda code, payload: None))
    return value, links


def open_trusted(data: bytes) -> tuple[Any, list[tuple[int, bytes]]]:
    """The result of ``inspect`` for bytes just verified against their digest, in half the time.

    The digest proves that these bytes were stored, and every path into a store either encodes
    objects itself or inspects them. So the encoding is not checked again. Harmful input is
    still refused: an extension that is not a link, and nesting that is too deep.
    """
    links: list[tuple[int, bytes]] = []

    def note_link(code: int, payload: bytes) -> Any:
        if code == LINK_EXT_TYPE and len(payload) == _LINK_BYTES and payload[0] < ROLE_ITEM:
            links.append((payload[0], payload[1:]))
        else:
            links.append(read_link(code, payload))
        return _new_tuple(_ExtType, (code, payload))

    try:
        value = _unpackb(data, ext_hook=note_link, timestamp=1)
    except InvalidInputError:
        raise
    except _UNPACK_ERRORS as exc:
        raise _not_msgpack(exc) from exc
    if not _nests(value, MAX_DEPTH):
        raise refuse_depth()
    return value, links


def unpack_trusted(data: bytes) -> Any:
    """Decode bytes that were just verified against their digest; nothing else is checked.

    A link becomes ``slice(extension type, payload)``: ``slice`` takes the two arguments that
    msgpack passes, at the speed of C. See ``is_plain`` and ``trusted_link``.
    """
    try:
        return _unpackb(data, ext_hook=slice, timestamp=1)
    except _UNPACK_ERRORS as exc:
        raise _not_msgpack(exc) from exc


def is_plain(value: Any, depth_left: int) -> bool:
    """True if a value of ``unpack_trusted`` nests at most ``depth_left`` levels and has no link."""
    kind = type(value)
    if kind is dict:
        items = value.values()
    elif kind is list:
        items = value
    else:
        return kind is not slice
    if not depth_left:
        return False
    if _NO_PLAIN.isdisjoint(map(type, items)):
        # Most values end here, at the speed of C.
        return True
    # A loop takes half the time of all() over a generator.
    for item in items:
        if type(item) in _NO_PLAIN and not is_plain(item, depth_left - 1):
            return False
    return True


def trusted_link(value: Any) -> bytes | None:
    """The digest in a part of a value of ``unpack_trusted``, if it is a ``Link``; else None."""
    if type(value) is slice and value.start == LINK_EXT_TYPE:
        payload: bytes = value.stop
        if len(payload) == _LINK_BYTES and payload[0] == ROLE_LINK:
            return payload[1:]
    return None


def _may_hold_strange_float(data: bytes) -> bool:
    """True if a NaN or infinity could start anywhere in these bytes."""
    # One byte is found many times faster than two.
    at = data.find(0xCB)
    while at >= 0:
        if data[at + 1 : at + 2] in (b"\x7f", b"\xff"):
            return True
        at = data.find(0xCB, at + 1)
    return False


def is_link(value: Any) -> bool:
    """True if this part of an inspected value is a link."""
    return type(value) is _ExtType


def fill_links(value: Any, resolve: Resolver) -> Any:
    """Replace every link in an inspected value: by a ``Link``, or by what ``resolve`` returns.

    Lists and maps are changed in place. Returns the value, which may be a link itself.
    """
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(item) in _HOLDERS:
                value[key] = fill_links(item, resolve)
    elif kind is list:
        for at, item in enumerate(value):
            if type(item) in _HOLDERS:
                value[at] = fill_links(item, resolve)
    elif kind is _ExtType:
        payload = value.data
        digest = payload[-DIGEST_BYTES:]
        return Link(Digest(digest)) if payload[0] == ROLE_LINK else resolve(payload[0], digest)
    return value


def rebuild(data: bytes, resolve: Resolver) -> Any:
    """Decode bytes that ``inspect`` has checked; ``resolve`` returns the outlined parts."""

    def supply(code: int, payload: bytes) -> Any:
        role, digest = read_link(code, payload)
        return Link(Digest(digest)) if role == ROLE_LINK else resolve(role, digest)

    # Not ``_unpack``: ``inspect`` has checked the order of keys.
    try:
        return _unpackb(data, ext_hook=supply, timestamp=1)
    except InvalidInputError:
        raise
    except _UNPACK_ERRORS as exc:
        raise _not_msgpack(exc) from exc


def links_in(data: bytes) -> list[bytes]:
    """The digests that canonical bytes link to, in order of appearance."""
    if b"\xc7" not in data:
        return []
    links: list[bytes] = []
    _unpack(data, lambda code, payload: links.append(read_link(code, payload)[1]))
    return links


def link_depths(value: Any) -> list[int]:
    """How many lists and maps enclose each link of an inspected value, in order of appearance."""
    depths: list[int] = []
    _note_depths(value, 0, depths)
    return depths


def _note_depths(value: Any, depth: int, depths: list[int]) -> None:
    kind = type(value)
    if kind is dict:
        for item in value.values():
            _note_depths(item, depth + 1, depths)
    elif kind is list:
        for item in value:
            _note_depths(item, depth + 1, depths)
    elif kind is msgpack.ExtType:
        depths.append(depth)


def nests_within(data: bytes, depth_left: int) -> bool:
    """True if canonical bytes nest at most ``depth_left`` levels."""
    # Each level needs a header, so bytes with few headers need no walk.
    if most_containers(data) <= depth_left:
        return True
    try:
        _encode(_unpack(data, lambda code, payload: None), depth_left, _ByteBudget(len(data)))
    except LimitError:
        return False
    return True


def most_containers(data: bytes) -> int:
    """An upper bound on the number of lists and maps in canonical bytes."""
    return len(data.translate(None, _OTHER_BYTES))


def _nests(value: Any, depth_left: int) -> bool:
    """True if a list or map nests at most ``depth_left`` levels."""
    kind = type(value)
    if kind is not list and kind is not dict:
        return True
    if not depth_left:
        return False
    items = value.values() if kind is dict else value
    if _CONTAINERS.isdisjoint(map(type, items)):
        # Most values end here, at the speed of C.
        return True
    for item in items:
        kind = type(item)
        if (kind is list or kind is dict) and not _nests(item, depth_left - 1):
            return False
    return True


def is_map_piece(data: bytes) -> bool:
    """True if these canonical bytes encode a map."""
    return 0x80 <= data[0] <= 0x8F or data[0] in (0xDE, 0xDF)


def cut_items(data: bytes) -> list[bytes]:
    """The encoded items of a canonical list."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    count = unpacker.read_array_header()
    items: list[bytes] = []
    start = unpacker.tell()
    for _ in range(count):
        unpacker.skip()
        stop = unpacker.tell()
        items.append(data[start:stop])
        start = stop
    return items


def cut_some(data: bytes, most: int) -> list[bytes] | None:
    """The encoded items of a list, or keys and values of a map, from bytes not yet checked.

    None if the bytes are neither, or have more than ``most`` entries. Nothing is decoded.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        if is_map_piece(data):
            count = unpacker.read_map_header()
            steps = 2 * count
        else:
            count = steps = unpacker.read_array_header()
        if count > most:
            return None
        items: list[bytes] = []
        for _ in range(steps):
            start = unpacker.tell()
            unpacker.skip()
            items.append(data[start : unpacker.tell()])
    except (*_UNPACK_ERRORS, OverflowError):
        return None
    return items


def cut_map(data: bytes) -> list[tuple[str, bytes]]:
    """The entries of a canonical map: each key, and key and value together, still encoded."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    count = unpacker.read_map_header()
    entries: list[tuple[str, bytes]] = []
    start = unpacker.tell()
    for _ in range(count):
        key: str = unpacker.unpack()
        unpacker.skip()
        stop = unpacker.tell()
        entries.append((key, data[start:stop]))
        start = stop
    return entries


def _unpack(data: bytes, ext_hook: Callable[[int, bytes], Any]) -> Any:
    try:
        return msgpack.unpackb(
            data,
            object_hook=_checked_map,
            ext_hook=ext_hook,
            strict_map_key=True,
            # msgpack reserves extension -1 and never passes it to ext_hook. Read as a float, it
            # cannot be re-encoded to the same bytes, so it is refused.
            timestamp=1,
        )
    except InvalidInputError:
        raise
    except _UNPACK_ERRORS as exc:
        raise _not_msgpack(exc) from exc


def _not_msgpack(exc: Exception) -> NotCanonicalError:
    return NotCanonicalError(f"not canonical msgpack ({str(exc) or type(exc).__name__})")


def _checked_map(mapping: dict[Any, Any]) -> dict[str, Any]:
    keys = list(mapping)
    # strict_map_key lets bytes through; sorted() refuses a mixture by TypeError.
    if keys and (type(keys[0]) is not str or sorted(keys) != keys):
        raise NotCanonicalError("map keys must be texts, sorted by their UTF-8 bytes")
    return mapping


_OTHER_BYTES: Final = bytes(sorted(set(range(256)) - CONTAINER_BYTES))
