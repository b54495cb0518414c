"""A manifest as bytes: one checkpoint of a session, and links to all its parts.

    manifest = [leaf_id, nodes, next_seq, leaf, tips, index, ledger, components]

``leaf`` is a link or nil. ``tips`` maps the id of each branch's last node to a link; nil if the
leaf is the only end. ``index`` lists all nodes (``format.node_index``); it is derived from them,
and links to each. ``components`` maps names to links or values; nil if there are none. The layer
above gives the names their meaning. A long value is stored in objects of its own. A manifest
names no session and no revision: forks share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidInputError, InvalidValueError
from casstore.format.canonical import (
    ROLE_LINK,
    Link,
    cut_items,
    cut_map,
    inspect,
    is_map_piece,
    link_bytes,
    links_in,
    list_header,
    map_header,
    pack_checked,
    pack_flat,
    rebuild,
    scalar_bytes,
    sorted_keys,
)
from casstore.format.hashing import DIGEST_BYTES
from casstore.format.limits import CONTAINER_OUTLINE_MIN_BYTES, MAX_DEPTH
from casstore.format.node import NULL
from casstore.format.node_index import NO_NODES, Tail, encode_tail, tail_from
from casstore.format.splitting import Emit, Encoded, encode_split

_FIELDS: Final = 8
_HEADER: Final = list_header(_FIELDS)
_INDEX_FIELDS: Final = 4
_NIL: Final = b"\xc0"
_LINK: Final = link_bytes(ROLE_LINK, b"")
_LINK_BYTES: Final = len(_LINK) + DIGEST_BYTES
NOTHING: Final = NULL
# A field is nested one list deep, a component one map deeper.
FIELD_ROOM: Final = MAX_DEPTH - 1
COMPONENT_ROOM: Final = MAX_DEPTH - 2


class Manifest(NamedTuple):
    """One checkpoint. Values stay in their encoded form."""

    leaf_id: str | None = None
    #: The number of nodes in the graph, and the ``seq`` of the next node.
    nodes: int = 0
    next_seq: int = 0
    leaf: bytes | None = None
    tips: Encoded = NOTHING
    node_index: Tail = NO_NODES
    #: The usage of the session's turns.
    ledger: Encoded = NOTHING
    #: See ``encode_components``.
    components: Encoded = NOTHING


def encode_components(components: Mapping[str, Encoded]) -> Encoded:
    """Components as the field of a manifest; each is a link (``linked``) or a value."""
    if not components:
        return NOTHING
    parts = [map_header(len(components))]
    links: list[bytes] = []
    for name in sorted_keys(dict(components)):
        parts += (scalar_bytes(name), components[name].data)
        links += components[name].links
    return Encoded(b"".join(parts), links)


def cut_components(field: Encoded) -> dict[str, Encoded]:
    """The components of a manifest by name."""
    if field.data == _NIL:
        return {}
    found: dict[str, Encoded] = {}
    for name, entry in cut_map(field.data):
        data = entry[len(scalar_bytes(name)) :]
        found[name] = Encoded(data, links_in(data))
    return found


def linked(digest: bytes) -> Encoded:
    """A component that is a value or blob of its own."""
    return Encoded(_LINK + digest, [digest])


def link_target(component: Encoded) -> bytes | None:
    """The digest of a component that is a link; None if it is a value."""
    data = component.data
    return data[len(_LINK) :] if len(data) == _LINK_BYTES and data.startswith(_LINK) else None


def encode_field(value: Any, name: str, emit: Emit, room: int = FIELD_ROOM) -> Encoded:
    """Encode a value of a manifest; an error names the path from ``name`` on.

    Long parts are outlined: the next manifest links to them again.
    """
    if value is None:
        return NOTHING
    if type(value) is dict:
        # The common case, inlined: a short map.
        flat = pack_flat(value, CONTAINER_OUTLINE_MIN_BYTES - 1)
        if flat is not None:
            return Encoded(flat, [])
    try:
        return encode_split(value, room, emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def encode_manifest(manifest: Manifest) -> tuple[bytes, list[bytes]]:
    """The bytes of a manifest and the digests it links to, in order."""
    leaf_id, nodes, next_seq, leaf, tips, node_index, ledger, components = manifest
    index, listed = encode_tail(node_index)
    link = _NIL if leaf is None else _LINK + leaf
    scalars = pack_checked((leaf_id, nodes, next_seq))[1:]
    parts = (_HEADER, scalars, link, tips.data, index, ledger.data, components.data)
    links = [] if leaf is None else [leaf]
    return b"".join(parts), links + tips.links + listed + ledger.links + components.links


def decode_manifest(digest: bytes, data: bytes) -> Manifest:
    """Decode a manifest's bytes; CorruptionError if they are not a manifest's."""
    inspect(data)
    # Only the structure is checked; nothing outside these bytes is read.
    fields = rebuild(data, lambda role, name: None)
    if type(fields) is not list or len(fields) != _FIELDS:
        raise _not_a_manifest(digest)
    leaf_id, nodes, next_seq, leaf, _, index, _, components = fields
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
    tips, ledger, named = (
        NOTHING if items[at] == _NIL else Encoded(items[at], links_in(items[at]))
        for at in (4, 6, 7)
    )
    if named is not NOTHING and not is_map_piece(named.data):
        raise _not_a_manifest(digest)
    if any(component.data == _NIL for component in cut_components(named).values()):
        raise _not_a_manifest(digest)
    return Manifest(
        leaf_id,
        nodes,
        next_seq,
        None if leaf is None else bytes(leaf.digest),
        tips,
        tail,
        ledger,
        named,
    )


def _without_links(field: Any) -> Any:
    """The field of the index with digests in place of its links; False for anything invalid."""
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
