"""A manifest as bytes: one checkpoint of a session, everything it is made of.

    manifest = [leaf_id, nodes, next_seq, plugin_revision, current_frame,
                leaf, first_user, tool_state, plugin_snapshot, execution_state,
                turn_state, frames, config, usage, tips, index]

The five in the second line are links or nil; the next five are values, encoded as any
value is, so that a long one lives in objects of its own. ``tips`` maps the id of
each branch's last node to a link; nil where the leaf is the only one. ``index`` lists all
nodes (``format.node_index``); it follows from them, and links to each. A manifest names
no session and no revision: forks share it. ``first_user`` is the first message of the
user on the path of the leaf, for a picker.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidInputError, InvalidValueError
from casstore.format.canonical import (
    ROLE_LINK,
    Link,
    cut_items,
    inspect,
    link_bytes,
    links_in,
    list_header,
    pack_checked,
    pack_flat,
    rebuild,
)
from casstore.format.limits import CONTAINER_OUTLINE_MIN_BYTES, MAX_DEPTH
from casstore.format.node import NULL
from casstore.format.node_index import NO_NODES, Tail, encode_tail, tail_from
from casstore.format.splitting import Emit, Spelled, spell

_FIELDS: Final = 16
_HEADER: Final = list_header(_FIELDS)
_INDEX: Final = 15
_INDEX_FIELDS: Final = 4
_NIL: Final = b"\xc0"
_LINK: Final = link_bytes(ROLE_LINK, b"")
NOTHING: Final = NULL
# A field stands one list deep.
FIELD_ROOM: Final = MAX_DEPTH - 1
COMPONENTS: Final = ("tool_state", "plugin_snapshot", "execution_state")


class Manifest(NamedTuple):
    """One checkpoint. Values stay in the form in which they are stored."""

    leaf_id: str | None = None
    #: How many nodes the graph has, and the place in insertion order of the next.
    nodes: int = 0
    next_seq: int = 0
    plugin_revision: int | None = None
    current_frame: str | None = None
    leaf: bytes | None = None
    first_user: bytes | None = None
    tool_state: bytes | None = None
    plugin_snapshot: bytes | None = None
    execution_state: bytes | None = None
    turn_state: Spelled = NOTHING
    frames: Spelled = NOTHING
    config: Spelled = NOTHING
    usage: Spelled = NOTHING
    tips: Spelled = NOTHING
    node_index: Tail = NO_NODES


def spell_field(value: Any, name: str, emit: Emit) -> Spelled:
    """Spell a value of a manifest; a refusal names the place from ``name`` on.

    What is long leaves: the next manifest links to it again.
    """
    if value is None:
        return NOTHING
    if type(value) is dict:
        # As ``spell`` does for a short map, which most are.
        flat = pack_flat(value, CONTAINER_OUTLINE_MIN_BYTES - 1)
        if flat is not None:
            return Spelled(flat, [])
    try:
        return spell(value, FIELD_ROOM, emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def encode_manifest(manifest: Manifest) -> tuple[bytes, list[bytes]]:
    """The bytes of a manifest and the digests it links to, in order."""
    links: list[bytes] = []
    parts = [_HEADER, pack_checked(manifest[:5])[1:]]
    for digest in manifest[5:10]:
        if digest is None:
            parts.append(_NIL)
        else:
            parts += (_LINK, digest)
            links.append(digest)
    for spelled in manifest[10:_INDEX]:
        if spelled is NOTHING:
            parts.append(_NIL)
        else:
            parts.append(spelled.data)
            links += spelled.links
    index, listed = encode_tail(manifest.node_index)
    parts.append(index)
    return b"".join(parts), links + listed


def decode_manifest(digest: bytes, data: bytes) -> Manifest:
    """Take a manifest's bytes apart; CorruptionError if they are not a manifest's."""
    inspect(data)
    # Only the shape is of interest; nothing outside these bytes is asked for.
    fields = rebuild(data, lambda role, name: None)
    if type(fields) is not list or len(fields) != _FIELDS:
        raise _not_a_manifest(digest)
    leaf_id, nodes, next_seq, plugin_revision, current_frame = fields[:5]
    if (
        not (leaf_id is None or type(leaf_id) is str)
        or type(nodes) is not int
        or type(next_seq) is not int
        or not 0 <= nodes <= next_seq
        or not (plugin_revision is None or type(plugin_revision) is int)
        or not (current_frame is None or type(current_frame) is str)
        or any(not (link is None or type(link) is Link) for link in fields[5:10])
        or (leaf_id is None) != (fields[5] is None)
        or (fields[5] is None and fields[6] is not None)
    ):
        raise _not_a_manifest(digest)
    try:
        index = tail_from(_without_links(fields[_INDEX]), nodes)
    except InvalidInputError as exc:
        raise _not_a_manifest(digest) from exc
    spelled: list[Any] = [
        NOTHING if item == _NIL else Spelled(item, links_in(item))
        for item in cut_items(data)[10:_INDEX]
    ]
    names: list[Any] = [None if link is None else bytes(link.digest) for link in fields[5:10]]
    return Manifest._make([*fields[:5], *names, *spelled, index])


def _without_links(field: Any) -> Any:
    """The field of the index with digests in place of its links, and False for what is none."""
    if type(field) is not list or len(field) != _INDEX_FIELDS:
        return field
    spine, hashes, distances, links = field
    if type(links) is list:
        links = [_digest_in(link) for link in links]
    return [None if spine is None else _digest_in(spine), hashes, distances, links]


def _digest_in(link: Any) -> Any:
    return bytes(link.digest) if type(link) is Link else False


def _not_a_manifest(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} is stored as a manifest but is none")
