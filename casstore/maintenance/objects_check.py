"""Checks that an object is in the canonical form of its kind, and extracts its links."""

from __future__ import annotations

from casstore.engine.protocol import Engine, StoredObject
from casstore.errors import CasstoreError, CorruptionError
from casstore.format import canonical, tree
from casstore.format.digest import Kind, check_object
from casstore.format.graph import decode_manifest, encode_manifest, open_node
from casstore.format.node_index import decode_piece, encode_piece
from casstore.objects.blobs import BlobReader
from casstore.objects.pieces import PieceReader

_READ_BYTES = 1 << 20


class Malformed(Exception):
    """An object that matches its digest, but is not valid for its kind."""


def links_of(digest: bytes, item: StoredObject) -> list[bytes]:
    """The links in an object's bytes; Malformed if the bytes are not valid for its kind."""
    try:
        return _links(digest, item.kind, item.data)
    except CasstoreError as exc:
        raise Malformed(str(exc)) from exc


def _links(digest: bytes, kind: int, data: bytes) -> list[bytes]:
    if kind == Kind.BLOB:
        return []
    if kind in (Kind.ROPE, Kind.CHUNKS, Kind.LIST, Kind.MAP):
        body = tree.open_rope(data) if kind == Kind.ROPE else data
        shape = Kind.CHUNKS if kind == Kind.ROPE else kind
        branch = tree.decode_branch(shape, body)
        if tree.encode_branch(shape, branch.level, branch.children()) != body:
            raise CorruptionError(f"branch {digest.hex()} is not in canonical form")
        return branch.digests
    if kind == Kind.MANIFEST:
        manifest = decode_manifest(digest, data)
        encoded, links = encode_manifest(manifest)
        if encoded != data:
            raise CorruptionError(f"manifest {digest.hex()} is not in canonical form")
        return links
    if kind == Kind.INDEX:
        encoded, links = encode_piece(decode_piece(digest, data))
        if encoded != data:
            raise CorruptionError(f"part {digest.hex()} of a node index is not in canonical form")
        return links
    if kind == Kind.NODE:
        opened, links_beside = open_node(digest, data)
        parent = opened.header.parent
        return [*([] if parent is None else [parent]), *[name for _, name in links_beside]]
    # ``inspect`` accepts only the canonical form.
    return [name for _, name in canonical.inspect(data)[1]]


def prove_content(engine: Engine, digest: bytes, item: StoredObject) -> None:
    """Compare an object with its digest, a rope by reading all its content; CorruptionError."""
    check_object(digest, item.kind, item.data)
    if item.kind == Kind.ROPE:
        with BlobReader(PieceReader(engine), digest, item) as content:
            while content.read(_READ_BYTES):
                continue
