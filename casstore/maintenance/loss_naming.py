"""Names the missing parts of a damaged revision: its nodes, payloads and components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from casstore.engine.protocol import StoredObject
from casstore.errors import CasstoreError
from casstore.format.digest import Digest, Kind
from casstore.format.graph import cut_components, decode_manifest, open_node

# The limits of a search for names; the names found within them are enough to act upon.
_MAX_STEPS: Final = 20_000
_MAX_PIECES: Final = 100
_INDEX: Final = "a part of the node index"


class Remains(Protocol):
    """The remaining objects of a damaged store, by their ids in it."""

    def find(self, object_id: int) -> StoredObject | str:
        """An object, or the reason why it is lost."""
        ...

    def digest_of(self, object_id: int) -> bytes:
        """The digest of an object; CorruptionError if it is not known."""
        ...

    def sketch(self, object_id: int) -> StoredObject | None:
        """An unverified object, with placeholders for the digests of its links that are lost."""
        ...

    def stand_in(self, object_id: int) -> bytes:
        """The placeholder for a lost digest in a sketch."""
        ...

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids of the objects that an object links to."""
        ...


class LostPiece(NamedTuple):
    """A part of a revision that is lost."""

    revision: int
    #: ``the manifest``, ``tool_state``, ``node 'n17'``, ``the payload of node 'n17'``,
    #: ``a part of the node index`` …
    name: str
    digest: Digest | None
    why: str


def name_losses(
    found: Remains,
    root: int | None,
    manifest: bytes,
    revision: int,
    has: Callable[[bytes], bool],
) -> list[LostPiece]:
    """The pieces of a revision that are lost, as far as they can be named.

    ``root`` is the id of its manifest, if that is known; ``has`` says whether an object was saved
    with all that it links to.
    """
    if root is None:
        return [LostPiece(revision, "the manifest", Digest(manifest), "it is gone")]
    pieces: list[LostPiece] = []
    ahead: list[tuple[int, str]] = [(root, "the manifest")]
    # The node index has no ids of nodes, so its children come last: by then nodes have been named
    # through their children.
    listed: list[int] = []
    seen = {root}
    steps = 0
    while (ahead or listed) and steps < _MAX_STEPS and len(pieces) < _MAX_PIECES:
        steps += 1
        if not ahead:
            child = listed.pop()
            if child not in seen:
                seen.add(child)
                ahead.append((child, _INDEX))
            continue
        object_id, name = ahead.pop()
        digest = _digest(found, object_id)
        if digest is not None and has(digest):
            continue
        item = found.find(object_id)
        if isinstance(item, str):
            # If its own bytes are there, only objects below it are lost, and are named below.
            item = found.sketch(object_id) or item
        if isinstance(item, str):
            pieces.append(LostPiece(revision, name, digest, item))
        names, other = _names_below(digest, item, name)
        for child in found.children_of(object_id):
            if child in seen:
                continue
            below = _digest(found, child) or found.stand_in(child)
            named = names.get(below, other)
            if named == _INDEX:
                listed.append(child)
            else:
                seen.add(child)
                ahead.append((child, named))
    return pieces


def _digest(found: Remains, object_id: int) -> Digest | None:
    try:
        return Digest(found.digest_of(object_id))
    except CasstoreError:
        return None


def _names_below(
    digest: bytes | None, item: StoredObject | str, name: str
) -> tuple[dict[bytes, str], str]:
    """Names for the children of an object by digest, and the name for any other child."""
    whole = name if name.startswith("a part of ") else f"a part of {name}"
    if isinstance(item, str) or digest is None:
        return {}, whole
    try:
        if item.kind == Kind.MANIFEST:
            return _below_manifest(digest, item.data), whole
        if item.kind == Kind.INDEX:
            return {}, _INDEX
        if item.kind == Kind.NODE:
            opened, links = open_node(digest, item.data)
            header = opened.header
            names = {link: f"the payload of node {header.id!r}" for _, link in links}
            if header.parent is not None:
                names[header.parent] = f"node {header.parent_id!r}"
            return names, whole
    except CasstoreError:
        # It matches its digest but is not valid for its kind; ``check`` reports that.
        pass
    return {}, whole


def _below_manifest(digest: bytes, data: bytes) -> dict[bytes, str]:
    manifest = decode_manifest(digest, data)
    spine, _, _, nodes = manifest.node_index
    names = dict.fromkeys([*nodes, *([] if spine is None else [spine])], _INDEX)
    components = cut_components(manifest.components)
    fields = {"the end of a branch": manifest.tips, **components}
    for name, field in fields.items():
        for link in field.links:
            names[link] = name
    if manifest.leaf is not None:
        names[manifest.leaf] = f"node {manifest.leaf_id!r}"
    return names
