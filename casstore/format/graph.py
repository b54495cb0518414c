"""Nodes and manifests as bytes: the messages of a session's graph, and the object of a revision.

    node     = [id, seq, depth, users, frame, time, parent_id, parent, cause, payload]

A node links to its parent, so the digest of a leaf names its whole path. ``seq`` is the node's
number in insertion order, always above its parent's; ``depth`` the number of nodes on the path
that ends in it. Depths let a comparison walk two paths back from their leaves. The caller sets the
other fields, and the format does not interpret them; ``users`` is a count to which each node adds
0 or 1. Sessions count the messages of the user, so a session list need not walk the path.

    manifest = [leaf_id, nodes, next_seq, leaf, tips, index, components]

``leaf`` is a link or nil. ``tips`` maps the id of each branch's last node to a link; nil if the
leaf is the only end. ``index`` lists all nodes (``format.node_index``); it is derived from them,
and links to each. ``components`` maps names to links or values; nil if there are none;
``session.checkpoint`` gives the names their meaning. Long parts of them are stored in objects of
their own. A manifest names no session and no revision: forks share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidInputError, InvalidValueError
from casstore.format.canonical import (
    ROLE_LINK,
    ROLE_TEXT,
    Link,
    Resolver,
    cut_items,
    cut_map,
    fill_links,
    inspect,
    is_link,
    is_map_piece,
    is_plain,
    link_bytes,
    links_in,
    list_header,
    map_header,
    open_trusted,
    pack_checked,
    pack_flat,
    pack_plain,
    rebuild,
    scalar_bytes,
    sorted_keys,
    trusted_link,
    unpack_trusted,
)
from casstore.format.digest import DIGEST_BYTES
from casstore.format.limits import CONTAINER_OUTLINE_MIN_BYTES, MAX_DEPTH, NODE_PAYLOAD_MAX_BYTES
from casstore.format.node_index import NO_NODES, Tail, encode_tail, tail_from
from casstore.format.splitting import Emit, Encoded, encode_split

_NODE_FIELDS: Final = 10
_PARENT: Final = 7
_NODE_HEADER: Final = b"\x9a"
_NIL_BYTES: Final = b"\xc0"
_LINK: Final = link_bytes(ROLE_LINK, b"")
#: An encoded None: an absent field, and the ``tips`` of a graph with one branch.
NIL: Final = Encoded(_NIL_BYTES, [])
_TIMES: Final = frozenset((str, int, float))
# The levels that a payload may nest: it is inside the list of the node's fields.
PAYLOAD_DEPTH: Final = MAX_DEPTH - 1


class NodeHeader(NamedTuple):
    """The part of a node that the next node, a session list and a comparison need.

    The fields are the first of a node's, in the same order.
    """

    id: str
    seq: int
    depth: int
    users: int
    frame: str | None
    time: str | int | float | None
    parent_id: str | None
    parent: bytes | None


class DecodedNode(NamedTuple):
    """A decoded node. Links to outlined parts are in place of the parts until ``fill_node``."""

    header: NodeHeader
    cause: Any
    payload: Any


def encode_payload(value: Any, name: str, emit: Emit) -> Encoded:
    """Encode a payload or cause; an error names the path from ``name`` on.

    Up to NODE_PAYLOAD_MAX_BYTES it is not split. A path is read node by node, and a separate object
    for each text would cost more bytes and time than sharing short texts could save.
    """
    if value is None:
        return NIL
    if type(value) is dict:
        flat = pack_flat(value, NODE_PAYLOAD_MAX_BYTES, nested=True)
        if flat is not None:
            return Encoded(flat, [])
    try:
        return _encode_whole(value) or encode_split(value, PAYLOAD_DEPTH, emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def _encode_whole(value: Any) -> Encoded | None:
    """Encode a value without outlining anything; None: encode it with ``encode_split``.

    None if the value is too long, or cannot be encoded: ``encode_split`` then raises the error.
    """
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        whole = pack_plain(
            value, PAYLOAD_DEPTH, NODE_PAYLOAD_MAX_BYTES, NODE_PAYLOAD_MAX_BYTES + 1, _refuse_blob
        )
        return None if whole is None else Encoded(*whole)
    if (kind is str or kind is bytes) and len(value) <= NODE_PAYLOAD_MAX_BYTES:
        data = scalar_bytes(value)
        return Encoded(data, []) if len(data) <= NODE_PAYLOAD_MAX_BYTES else None
    return None


def _refuse_blob(content: bytes) -> bytes:
    # ``pack_plain`` turns this error into None: the value is too long.
    raise ValueError("a payload that is not split has no blobs")


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
    above = _NIL_BYTES
    if parent is not None:
        links = [parent, *links]
        above = _LINK + parent
    # Without the first byte, the header of a list of seven: the fields join the list of ten.
    return b"".join(
        (_NODE_HEADER, pack_checked(header[:7])[1:], above, cause[0], payload[0])
    ), links


def fill_node(opened: DecodedNode, resolve: Resolver) -> DecodedNode:
    """Replace the links in a decoded node with their content, in place."""
    cause, payload = fill_links(opened.cause, resolve), fill_links(opened.payload, resolve)
    return DecodedNode(opened.header, cause, payload)


def open_node(
    digest: bytes, data: bytes, *, trusted: bool = False
) -> tuple[DecodedNode, list[tuple[int, bytes]]]:
    """Decode a node's bytes; also returns the links in its cause and payload, as (role, digest).

    CorruptionError if they are not a node's bytes. ``trusted``: the bytes come from a store and
    were verified against their digest, so the encoding is not checked again.
    """
    fields, links = open_trusted(data) if trusted else inspect(data)
    if type(fields) is not list or len(fields) != _NODE_FIELDS:
        raise _not_a_node(digest)
    node_id, seq, depth, users, frame, time, parent_id, above, cause, payload = fields
    parent: bytes | None = None
    if above is not None:
        # No field before the parent can be a link, so the first link is the parent's.
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
    """The ten fields of a node that has no outlined parts; the parent is a digest.

    The bytes must have been verified against their digest. None if a part is outlined, or these
    are not a node's bytes: ``open_node(…, trusted=True)`` then returns the node or raises.
    """
    fields: Any = unpack_trusted(data)
    if type(fields) is not list or len(fields) != _NODE_FIELDS:
        return None
    # The same rules as in ``open_node``, and repeated here: a call for each node of a path would
    # make reading it slower.
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
        and (cause is None or is_plain(cause, PAYLOAD_DEPTH))
        and is_plain(payload, PAYLOAD_DEPTH)
    ):
        return fields
    return None


def cut_node(data: bytes) -> tuple[Encoded, Encoded]:
    """The encoded cause and payload of a decoded node."""
    cause, payload = cut_items(data)[-2:]
    return Encoded(cause, links_in(cause)), Encoded(payload, links_in(payload))


def _not_a_node(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} is stored as a node but is not a valid one")


_MANIFEST_FIELDS: Final = 7
_MANIFEST_HEADER: Final = list_header(_MANIFEST_FIELDS)
_INDEX_FIELDS: Final = 4
_LINK_BYTES: Final = len(_LINK) + DIGEST_BYTES
# The levels that a field may nest: it is inside the manifest's list, a component one map deeper.
FIELD_DEPTH: Final = MAX_DEPTH - 1
COMPONENT_DEPTH: Final = MAX_DEPTH - 2


class Manifest(NamedTuple):
    """The fields of a manifest. Values stay encoded."""

    leaf_id: str | None = None
    #: The number of nodes in the graph, and the ``seq`` of the next node.
    nodes: int = 0
    next_seq: int = 0
    leaf: bytes | None = None
    tips: Encoded = NIL
    node_index: Tail = NO_NODES
    #: See ``encode_components``.
    components: Encoded = NIL


def encode_components(components: Mapping[str, Encoded]) -> Encoded:
    """Components as the field of a manifest; each is a link (``linked``) or a value."""
    if not components:
        return NIL
    parts = [map_header(len(components))]
    links: list[bytes] = []
    for name in sorted_keys(dict(components)):
        parts += (scalar_bytes(name), components[name].data)
        links += components[name].links
    return Encoded(b"".join(parts), links)


def cut_components(field: Encoded) -> dict[str, Encoded]:
    """The components of a manifest by name."""
    if field.data == _NIL_BYTES:
        return {}
    found: dict[str, Encoded] = {}
    for name, entry in cut_map(field.data):
        data = entry[len(scalar_bytes(name)) :]
        found[name] = Encoded(data, links_in(data))
    return found


def linked(digest: bytes) -> Encoded:
    """A component that is a link to a stored value or blob."""
    return Encoded(_LINK + digest, [digest])


def link_target(component: Encoded) -> bytes | None:
    """The digest of a component that is a link; None if it is a value."""
    data = component.data
    return data[len(_LINK) :] if len(data) == _LINK_BYTES and data.startswith(_LINK) else None


def encode_field(value: Any, name: str, emit: Emit, depth_left: int = FIELD_DEPTH) -> Encoded:
    """Encode a value of a manifest; an error names the path from ``name`` on.

    Long parts are outlined, so that the next manifest links to those that did not change.
    """
    if value is None:
        return NIL
    if type(value) is dict:
        # The common case, inlined: a short map.
        flat = pack_flat(value, CONTAINER_OUTLINE_MIN_BYTES - 1)
        if flat is not None:
            return Encoded(flat, [])
    try:
        return encode_split(value, depth_left, emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def encode_manifest(manifest: Manifest) -> tuple[bytes, list[bytes]]:
    """The bytes of a manifest and the digests it links to, in order."""
    leaf, tips, components = manifest.leaf, manifest.tips, manifest.components
    index, listed = encode_tail(manifest.node_index)
    link = _NIL_BYTES if leaf is None else _LINK + leaf
    scalars = pack_checked((manifest.leaf_id, manifest.nodes, manifest.next_seq))[1:]
    parts = (_MANIFEST_HEADER, scalars, link, tips.data, index, components.data)
    links = [] if leaf is None else [leaf]
    return b"".join(parts), links + tips.links + listed + components.links


def decode_manifest(digest: bytes, data: bytes) -> Manifest:
    """Decode a manifest's bytes; CorruptionError if they are not a manifest's."""
    inspect(data)
    # Outlined parts become None: only the structure is checked, and no other object is read.
    fields = rebuild(data, lambda role, name: None)
    if type(fields) is not list or len(fields) != _MANIFEST_FIELDS:
        raise _not_a_manifest(digest)
    leaf_id, nodes, next_seq, leaf, _, index, components = fields
    if (
        not (leaf_id is None or type(leaf_id) is str)
        or type(nodes) is not int
        or type(next_seq) is not int
        or not 0 <= nodes <= next_seq
        or not (leaf is None or type(leaf) is Link)
        or (leaf_id is None) != (leaf is None)
        or not (components is None or (type(components) is dict and components))
    ):
        raise _not_a_manifest(digest)
    try:
        tail = tail_from(_without_links(index), nodes)
    except InvalidInputError as exc:
        raise _not_a_manifest(digest) from exc
    items = cut_items(data)
    tips, named = (
        NIL if items[at] == _NIL_BYTES else Encoded(items[at], links_in(items[at])) for at in (4, 6)
    )
    if named is not NIL and not is_map_piece(named.data):
        raise _not_a_manifest(digest)
    if any(component.data == _NIL_BYTES for component in cut_components(named).values()):
        raise _not_a_manifest(digest)
    return Manifest(
        leaf_id=leaf_id,
        nodes=nodes,
        next_seq=next_seq,
        leaf=None if leaf is None else bytes(leaf.digest),
        tips=tips,
        node_index=tail,
        components=named,
    )


def _without_links(field: Any) -> Any:
    """The field of the index with digests in place of its links.

    False replaces a value that should be a link, and a field that is not a list of four is returned
    as it is: ``tail_from`` refuses both.
    """
    if type(field) is not list or len(field) != _INDEX_FIELDS:
        return field
    spine, hashes, distances, links = field
    if type(links) is list:
        links = [_digest_in(link) for link in links]
    return [None if spine is None else _digest_in(spine), hashes, distances, links]


def _digest_in(link: Any) -> Any:
    return bytes(link.digest) if type(link) is Link else False


def _not_a_manifest(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} is stored as a manifest but is not a valid one")
