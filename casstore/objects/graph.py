"""Reads nodes and manifests by digest.

Long parts of a node's cause and payload are in other objects: those of all nodes that are read
together are fetched together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format import canonical
from casstore.format.canonical import ROLE_BYTES, ROLE_LINK, ROLE_TEXT
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.graph import (
    DecodedNode,
    Manifest,
    NodeHeader,
    decode_manifest,
    fill_node,
    open_node,
    open_whole,
)
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.splitting import Encoded
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored
from casstore.objects.values import Assembly, Outline, decode_text, require_part

# How much of a payload, in characters of JSON, is read to recognise a message and its role.
_BEGINNING = 10_000

#: A node, and the links in its cause and payload, as (role, digest).
Opened = tuple[DecodedNode, list[tuple[int, bytes]]]


def read_headers(reader: PieceReader, digests: Sequence[bytes]) -> list[NodeHeader]:
    """The headers of nodes; the other objects that their payloads link to are not read."""
    headers: list[NodeHeader] = []
    for digest, item in zip(digests, reader.follow(digests), strict=True):
        data = _node_data(digest, item)
        fields = open_whole(data)
        if fields is None:
            headers.append(open_node(digest, data, trusted=True)[0].header)
        else:
            headers.append(NodeHeader(*fields[:-2]))
    return headers


def read_outside(reader: PieceReader, digests: Sequence[bytes]) -> set[bytes]:
    """The digests that the causes and payloads of those nodes link to that are stored."""
    return {
        name
        for digest, item in zip(digests, reader.find_many(digests), strict=True)
        if item is not None
        for _, name in open_node(digest, _node_data(digest, item))[1]
    }


def read_nodes(reader: PieceReader, digests: Sequence[bytes]) -> list[DecodedNode]:
    """Nodes with their complete payloads."""
    return [
        DecodedNode(NodeHeader(*fields[:-2]), *fields[-2:])
        for fields in iter_fields(reader, digests)
    ]


def iter_fields(
    reader: PieceReader, digests: Sequence[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[list[Any]]:
    """Nodes in encoded form: the fields of the header, then cause and payload.

    For callers that convert many nodes: all are fetched at once, then decoded one by one.
    """
    found = reader.follow(digests)
    for at, (kind, data) in enumerate(found):
        fields = open_whole(data) if kind == Kind.NODE else None
        if fields is None:
            yield from _open_carefully(reader, digests[at:], found[at:], max_bytes)
            return
        yield fields


def stored_nodes(reader: PieceReader, digests: Sequence[bytes]) -> list[DecodedNode]:
    """Nodes whose causes and payloads are ``Stored``, read piece by piece; null stays None."""
    nodes: list[DecodedNode] = []
    for digest, item in zip(digests, reader.follow(digests), strict=True):
        header, cause, payload = fill_node(
            open_node(digest, _node_data(digest, item), trusted=True)[0], Outline
        )
        fields = [None if place is None else Stored(reader, place) for place in (cause, payload)]
        nodes.append(DecodedNode(header, *fields))
    return nodes


def begun_payloads(reader: PieceReader, digests: Sequence[bytes]) -> list[tuple[str, Any]]:
    """The id of each node and the beginning of its payload, which may be of any size."""
    return [
        (node.header.id, None if node.payload is None else node.payload.beginning(_BEGINNING))
        for node in stored_nodes(reader, digests)
    ]


def _open_carefully(
    reader: PieceReader, digests: Sequence[bytes], found: list[StoredObject], max_bytes: int
) -> list[list[Any]]:
    """The fields of nodes, of which some have parts in other objects."""
    nodes: list[list[Any]] = []
    # The nodes that have parts in other objects, by position.
    outside: dict[int, Opened] = {}
    for digest, item in zip(digests, found, strict=True):
        data = _node_data(digest, item)
        fields = open_whole(data)
        if fields is None:
            node, away = open_node(digest, data, trusted=True)
            fields = [*node.header, node.cause, node.payload]
            if away:
                outside[len(nodes)] = node, away
        nodes.append(fields)
    if outside:
        _fill(reader, nodes, outside, max_bytes)
    return nodes


def _fill(
    reader: PieceReader, nodes: list[list[Any]], outside: dict[int, Opened], max_bytes: int
) -> None:
    """Put the parts from other objects into causes and payloads."""
    # Most parts are texts: fetched together, they only have to be inserted.
    wanted = {
        name: None
        for _, away in outside.values()
        for role, name in away
        if role in (ROLE_TEXT, ROLE_BYTES)
    }
    assembly = Assembly(reader, max_bytes)
    texts = assembly.fetch(list(wanted))

    def resolve(role: int, name: bytes) -> Any:
        item = texts.get(name)
        if item is None or item.kind != Kind.BLOB:
            return Outline(role, name)
        require_part(role, name, item)
        assembly.spend(len(item.data))
        return decode_text(item.data, name) if role == ROLE_TEXT else item.data

    # Other parts are loaded for all nodes together: they share one budget.
    partial: list[int] = []
    for at, (opened, away) in outside.items():
        _, *filled = fill_node(opened, resolve)
        nodes[at][-2:] = filled
        if any(_is_outlined(role, name, texts) for role, name in away):
            partial.append(at)
    if partial:
        loaded = iter(assembly.load([place for at in partial for place in nodes[at][-2:]]))
        for at in partial:
            nodes[at][-2:] = next(loaded), next(loaded)


def _is_outlined(role: int, name: bytes, texts: dict[bytes, StoredObject]) -> bool:
    """True if a part of a payload is still to be loaded: neither a user's link nor in ``texts``."""
    return role != ROLE_LINK and (name not in texts or texts[name].kind != Kind.BLOB)


def _node_data(digest: bytes, item: StoredObject) -> bytes:
    if item.kind != Kind.NODE:
        raise _not_a_node(digest)
    return item.data


def _not_a_node(digest: bytes) -> CorruptionError:
    return CorruptionError(f"{digest.hex()} is linked to as a node, but is something else")


def read_manifest(reader: PieceReader, digest: bytes, *, named: bool = False) -> Manifest:
    """The manifest with this digest.

    ``named``: the digest comes from a caller, so ObjectNotFoundError or InvalidInputError if it is
    not a manifest. Otherwise it comes from a row, and CorruptionError is raised.
    """
    item = reader.get(digest) if named else reader.follow((digest,))[0]
    if item.kind != Kind.MANIFEST:
        name = KIND_NAMES.get(item.kind, item.kind)
        if named:
            raise InvalidInputError(f"{digest.hex()} is a {name}, not a manifest")
        raise CorruptionError(f"{digest.hex()} is referred to as a manifest, but is a {name}")
    return decode_manifest(digest, item.data)


def load_encoded(
    reader: PieceReader, encoded: Sequence[Encoded], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> list[Any]:
    """The complete values of fields of a manifest."""
    return Assembly(reader, max_bytes).load(
        [canonical.decode(field.data, Outline) for field in encoded]
    )
