"""Nodes from their digests: many at once, with the long texts that live beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format import canonical
from casstore.format.canonical import ROLE_TEXT, likely_blobs
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.format.manifest import Manifest, decode_manifest, encode_manifest
from casstore.format.node import DecodedNode, NodeHeader, decode_node
from casstore.format.splitting import Emit, Spelled
from casstore.objects.pieces import PieceReader
from casstore.objects.values import Assembly, Outline, decode_text, require_part


def read_headers(reader: PieceReader, digests: Sequence[bytes]) -> list[NodeHeader]:
    """The headers of stored nodes; nothing outside the nodes themselves is read."""
    return [
        decode_node(digest, _node_data(digest, item), Outline).header
        for digest, item in zip(digests, reader.follow(digests), strict=True)
    ]


def read_nodes(
    reader: PieceReader, digests: Sequence[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> list[DecodedNode]:
    """Nodes with their payloads, whole."""
    items = reader.follow(digests)
    # Most of what a payload keeps elsewhere are texts: fetched ahead, they are in place
    # the moment the node is decoded.
    names: dict[bytes, None] = {}
    for item in items:
        for name in likely_blobs(item.data):
            names[name] = None
    wanted = list(names)
    near = {
        name: item
        for name, item in zip(wanted, reader.find_many(wanted), strict=True)
        if item is not None and item.kind == Kind.BLOB
    }
    assembly = Assembly(reader, max_bytes)
    outlined = False

    def resolve(role: int, name: bytes) -> Any:
        nonlocal outlined
        item = near.get(name)
        if item is None:
            outlined = True
            return Outline(role, name)
        require_part(role, name, item)
        assembly.spend(len(item.data))
        return decode_text(item.data, name) if role == ROLE_TEXT else item.data

    nodes: list[DecodedNode] = []
    for digest, item in zip(digests, items, strict=True):
        outlined = False
        node = decode_node(digest, _node_data(digest, item), resolve)
        if outlined:
            cause, payload = assembly.load([node.cause, node.payload])
            node = DecodedNode(node.header, cause, payload)
        nodes.append(node)
    return nodes


def _node_data(digest: bytes, item: StoredObject) -> bytes:
    if item.kind != Kind.NODE:
        raise CorruptionError(f"{digest.hex()} stands for a node, but is none")
    return item.data


def read_manifest(reader: PieceReader, digest: bytes, *, named: bool = False) -> Manifest:
    """The manifest with this digest. ``named`` by a caller it may be missing or something else;
    named by a row, that is damage.
    """
    item = reader.get(digest) if named else reader.follow((digest,))[0]
    if item.kind != Kind.MANIFEST:
        name = KIND_NAMES.get(item.kind, item.kind)
        if named:
            raise InvalidInputError(f"{digest.hex()} is a {name}, not a manifest")
        raise CorruptionError(f"{digest.hex()} stands for a manifest, but is a {name}")
    return decode_manifest(digest, item.data)


def write_manifest(manifest: Manifest, emit: Emit) -> bytes:
    """Hand a manifest over; its digest."""
    return emit(Kind.MANIFEST, *encode_manifest(manifest))


def load_spelled(
    reader: PieceReader, spelled: Sequence[Spelled], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> list[Any]:
    """The values of fields of a manifest, whole."""
    return Assembly(reader, max_bytes).load(
        [canonical.decode(field.data, Outline) for field in spelled]
    )
