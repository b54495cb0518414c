"""A node as bytes: one step of a session's graph, linked to the step before it.

    node = [id, seq, depth, users, frame, time, parent_id,
            parent, cause, payload]

A node links to its parent, so the digest of a leaf names its whole path. ``seq`` is the node's
number in insertion order, always above its parent's; ``depth`` the number of nodes on the path
that ends in it, and ``users`` how many of those are messages of the user. So two paths are
compared from their ends, and a session list counts messages without walking the path.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidValueError
from casstore.format.canonical import (
    ROLE_LINK,
    ROLE_TEXT,
    Resolver,
    cut_items,
    fill_links,
    inspect,
    is_link,
    is_plain,
    link_bytes,
    links_in,
    open_trusted,
    pack_checked,
    pack_flat,
    pack_plain,
    scalar_bytes,
    trusted_link,
    unpack_trusted,
)
from casstore.format.limits import MAX_DEPTH, NODE_PAYLOAD_MAX_BYTES
from casstore.format.splitting import Emit, Encoded, encode_split

_FIELDS: Final = 10
_PARENT: Final = 7
_HEADER: Final = b"\x9a"
_NIL: Final = b"\xc0"
_LINK: Final = link_bytes(ROLE_LINK, b"")
NULL: Final = Encoded(_NIL, [])
_TIMES: Final = frozenset((str, int, float))
# The payload is nested one list deep.
PAYLOAD_ROOM: Final = MAX_DEPTH - 1


class NodeHeader(NamedTuple):
    """The part of a node that the next node, a session list and a comparison need."""

    id: str
    seq: int
    depth: int
    users: int
    frame: str | None
    time: str | int | float | None
    parent_id: str | None
    parent: bytes | None


class DecodedNode(NamedTuple):
    """A decoded node; parts stored elsewhere are as the resolver returned them."""

    header: NodeHeader
    cause: Any
    payload: Any


def encode_payload(value: Any, name: str, emit: Emit) -> Encoded:
    """Encode a payload or cause; an error names the path from ``name`` on.

    A short one is not split. A path is read node by node, and a separate object for each text
    would cost more bytes and time than sharing short texts could save.
    """
    if value is None:
        return NULL
    if type(value) is dict:
        flat = pack_flat(value, NODE_PAYLOAD_MAX_BYTES, nested=True)
        if flat is not None:
            return Encoded(flat, [])
    try:
        whole = _encode_whole(value)
        return whole or encode_split(value, PAYLOAD_ROOM, emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def _encode_whole(value: Any) -> Encoded | None:
    """Encode a value without outlining anything; None if it is too long, or cannot be encoded."""
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        whole = pack_plain(
            value, PAYLOAD_ROOM, NODE_PAYLOAD_MAX_BYTES, NODE_PAYLOAD_MAX_BYTES + 1, _name_nothing
        )
        return None if whole is None else Encoded(*whole)
    if (kind is str or kind is bytes) and len(value) <= NODE_PAYLOAD_MAX_BYTES:
        data = scalar_bytes(value)
        return Encoded(data, []) if len(data) <= NODE_PAYLOAD_MAX_BYTES else None
    return None


def _name_nothing(content: bytes) -> bytes:
    raise ValueError("too long to stay whole")


def check_time(time: object) -> None:
    """Refuse an invalid time of a node."""
    if time is None:
        return
    if type(time) not in (str, int, float):
        raise InvalidValueError(
            f"time must be a str, an int, a finite float or None, got {time!r}", ("time",)
        )
    try:
        scalar_bytes(time)
    except InvalidValueError as exc:
        raise InvalidValueError(exc.reason, ("time",)) from exc


def encode_node(header: NodeHeader, cause: Encoded, payload: Encoded) -> tuple[bytes, list[bytes]]:
    """The bytes of a node and the digests it links to, in order."""
    parent = header.parent
    links = cause.links + payload.links
    above = _NIL
    if parent is not None:
        links = [parent, *links]
        above = _LINK + parent
    # The first byte of the seven plain fields is the header of their own list.
    return b"".join((_HEADER, pack_checked(header[:7])[1:], above, cause[0], payload[0])), links


def fill_node(opened: DecodedNode, resolve: Resolver) -> DecodedNode:
    """Replace the links in a decoded node with their content, in place."""
    cause, payload = fill_links(opened.cause, resolve), fill_links(opened.payload, resolve)
    return DecodedNode(opened.header, cause, payload)


def open_node(
    digest: bytes, data: bytes, *, trusted: bool = False
) -> tuple[DecodedNode, list[tuple[int, bytes]]]:
    """Decode a node's bytes; also returns the links in its cause and payload, as (role, digest).

    CorruptionError if they are not a node's bytes. If there are links, the two are only for
    inspection until ``fill_node`` has filled them. ``trusted``: the bytes come from a store and
    their reader has proven them, so the encoding is not checked again.
    """
    fields, links = open_trusted(data) if trusted else inspect(data)
    if type(fields) is not list or len(fields) != _FIELDS:
        raise _not_a_node(digest)
    node_id, seq, depth, users, frame, time, parent_id, above, cause, payload = fields
    parent: bytes | None = None
    if above is not None:
        # No field before it can be a link, so it is the first.
        role, parent = links[0] if links else (ROLE_TEXT, None)
        if role != ROLE_LINK or not is_link(above):
            raise _not_a_node(digest)
    if (
        type(node_id) is not str
        or type(seq) is not int
        or type(depth) is not int
        or type(users) is not int
        or not 0 < depth <= seq + 1
        or not 0 <= users <= depth
        or not (frame is None or type(frame) is str)
        or not (time is None or type(time) in _TIMES)
        or not (parent_id is None or type(parent_id) is str)
        or (parent is None) != (depth == 1)
        or (parent is None) != (parent_id is None)
    ):
        raise _not_a_node(digest)
    header = NodeHeader(node_id, seq, depth, users, frame, time, parent_id, parent)
    return DecodedNode(header, cause, payload), links if parent is None else links[1:]


def open_whole(data: bytes) -> list[Any] | None:
    """The ten fields of a node without outlined parts; for its parent, the digest.

    For bytes that their digest has just proven. None if a part is outlined, or these are not a
    node's bytes: ``open_node``, trusted, then returns the node or raises.
    """
    fields: Any = unpack_trusted(data)
    if type(fields) is not list or len(fields) != _FIELDS:
        return None
    node_id, seq, depth, users, frame, time, parent_id, above, cause, payload = fields
    if above is None:
        fits = depth == 1 and parent_id is None
    else:
        fields[_PARENT] = parent = trusted_link(above)
        fits = parent is not None and depth != 1 and type(parent_id) is str
    if (
        fits
        and type(node_id) is str
        and type(seq) is type(depth) is type(users) is int
        and 0 < depth <= seq + 1
        and 0 <= users <= depth
        and (frame is None or type(frame) is str)
        and (time is None or type(time) in _TIMES)
        and (cause is None or is_plain(cause, PAYLOAD_ROOM))
        and is_plain(payload, PAYLOAD_ROOM)
    ):
        return fields
    return None


def cut_node(data: bytes) -> tuple[Encoded, Encoded]:
    """The encoded cause and payload of a decoded node."""
    cause, payload = cut_items(data)[-2:]
    return Encoded(cause, links_in(cause)), Encoded(payload, links_in(payload))


def _not_a_node(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} is stored as a node but is not a valid one")
