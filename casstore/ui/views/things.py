"""The page of one node or object: its content, links in both directions, and what keeps it."""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.cli.payloads import ParsedPayload, read_message
from casstore.errors import CasstoreError, NotFoundError, PathStep
from casstore.format import tree
from casstore.format.canonical import links_in
from casstore.format.digest import Digest, Kind
from casstore.maintenance.keepers import Keeper, find_keepers, remembered
from casstore.maintenance.sharing import newest_first
from casstore.objects import graph
from casstore.objects.stored import Stored, open_stored
from casstore.session.scanning import scan
from casstore.session.state import decode_head
from casstore.ui.views import values
from casstore.ui.views.session import components, state_level
from casstore.ui.views.timeline import begun, node_time
from casstore.ui.views.values import Level, ValueBranch
from casstore.ui.views.viewed import Viewed, kind_name, tags_of

_LINKS: Final = 100
_PARENTS: Final = 50
# A page shows a payload up to the first length; the raw view up to the second.
_SHOWN_CHARACTERS: Final = 60_000
RAW_CHARACTERS: Final = 16 << 20
_BLOB_BYTES: Final = 20_000
_MAX_IMAGE_BYTES: Final = 16 << 20
# In a store with more objects, those that link to an object are not searched for.
_MAX_SEARCHED: Final = 300_000

_IMAGES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


class LinkShown(NamedTuple):
    """An object that links to this one, or that this one links to."""

    digest: str
    kind: str


class NodeFacts(NamedTuple):
    """What a node is, apart from its payload."""

    id: str
    parent: str | None
    parent_digest: str | None
    seq: int
    depth: int
    frame: str | None
    time: str
    cause: str


class Thing(NamedTuple):
    """A node or an object."""

    digest: str
    kind: str
    size_bytes: int
    #: The session in which a node is shown; None: outside all sessions.
    session: str | None
    node: NodeFacts | None
    is_hidden: bool
    message: ParsedPayload | None
    is_cut: bool
    #: Of a value: its entries. Of a blob: its text.
    branches: tuple[ValueBranch, ...]
    entries: int
    text: str
    image: str
    links: tuple[LinkShown, ...]
    links_more: bool
    tags: tuple[str, ...]


class Reached(NamedTuple):
    """The references to an object: links to it, and the rows that keep it."""

    parents: tuple[LinkShown, ...]
    parents_more: bool
    keepers: tuple[Keeper, ...]
    #: True: nothing was searched, because the store has too many objects.
    is_omitted: bool


def find_node(viewed: Viewed, session: str, node: str, at: int | None = None) -> Digest:
    """The digest of a node by its id, hidden or not."""
    place = viewed.place(session, at)
    [found] = place.nodes.find([node])
    if found is None:
        raise NotFoundError(f"session {session!r} has no node {node!r}")
    return Digest(found.digest)


def thing(viewed: Viewed, digest: bytes, session: str | None = None) -> Thing:
    """An object by its digest; a node as it is seen in a session, or outside of all."""
    reader = viewed.reader()
    item = reader.get(digest)
    found = Thing(
        digest=digest.hex(),
        kind=kind_name(item.kind),
        size_bytes=len(item.data),
        session=session,
        node=None,
        is_hidden=False,
        message=None,
        is_cut=False,
        branches=(),
        entries=0,
        text="",
        image="",
        links=(),
        links_more=False,
        tags=tags_of(viewed, digest),
    )
    if item.kind == Kind.NODE:
        is_hidden = digest in hidden_digests(viewed, session)
        [node] = graph.stored_nodes(reader, [digest])
        found = found._replace(node=_facts(node, is_hidden), is_hidden=is_hidden)
        if is_hidden:
            # Its content, and what it links to, stay out of sight.
            return found
        payload = begun(node.payload, _SHOWN_CHARACTERS, _SHOWN_CHARACTERS)
        message = read_message(payload)
        is_cut = sum([len(one.text) for one in message.blocks]) >= _SHOWN_CHARACTERS // 2
        found = found._replace(message=message, is_cut=is_cut)
    elif item.kind == Kind.MANIFEST:
        manifest = graph.read_manifest(reader, digest)
        branches = [
            values.branch(name, value, (name,), deeper=1)
            for name, value in components(viewed, manifest)
        ]
        found = found._replace(branches=tuple(branches), entries=len(branches))
    elif item.kind in (Kind.BLOB, Kind.ROPE):
        found = _blob(viewed, digest, found)
    elif item.kind in (Kind.VALUE, Kind.LIST, Kind.MAP):
        stored = open_stored(reader, digest, item)
        if stored.entry_count() is None:
            found = found._replace(
                text=values.scalar(stored.beginning(_SHOWN_CHARACTERS, _SHOWN_CHARACTERS))
            )
        else:
            level = values.level(stored, (), deeper=1)
            found = found._replace(branches=level.branches, entries=level.total)
    links = _links(item.kind, item.data)
    shown = list(dict.fromkeys(links))[: _LINKS + 1]
    kinds = reader.find_many(shown[:_LINKS])
    return found._replace(
        links=tuple(
            [
                LinkShown(one.hex(), "missing" if stored is None else kind_name(stored.kind))
                for one, stored in zip(shown[:_LINKS], kinds, strict=True)
            ]
        ),
        links_more=len(shown) > _LINKS,
    )


def object_level(viewed: Viewed, digest: bytes, path: Sequence[PathStep], start: int = 0) -> Level:
    """The entries of a checkpoint or value at a path, loaded when the reader expands it."""
    reader = viewed.reader()
    item = reader.get(digest)
    if item.kind == Kind.MANIFEST:
        return state_level(viewed, graph.read_manifest(reader, digest), path, start)
    if item.kind not in (Kind.VALUE, Kind.LIST, Kind.MAP):
        raise NotFoundError(f"a {kind_name(item.kind)} has no entries")
    return values.level(open_stored(reader, digest, item).at(path), tuple(path), start=start)


def _links(kind: int, data: bytes) -> Sequence[bytes]:
    if kind in (Kind.LIST, Kind.MAP):
        return list(tree.decode_branch(kind, data).digests)
    if kind in (Kind.BLOB, Kind.ROPE, Kind.CHUNKS):
        return ()
    try:
        return links_in(data)
    except (CasstoreError, ValueError):
        return ()


def _facts(node: Any, is_hidden: bool) -> NodeFacts:
    header = node.header
    cause = "" if is_hidden or node.cause is None else values.scalar(begun(node.cause, 2000, 2000))
    return NodeFacts(
        header.id, header.parent_id, None if header.parent is None else header.parent.hex(),
        header.seq, header.depth, header.frame, node_time(header.time), cause,
    )  # fmt: skip


def hidden_digests(viewed: Viewed, session: str | None) -> Mapping[bytes, str] | set[bytes]:
    """Nodes that tombstones hide in a session; without one, in any, or that vacuum removed."""
    if session is not None:
        state = viewed.runtime.find(session)
        return {} if state is None else viewed.runtime.hidden(state.head)
    found = remembered(viewed.store)
    for row in scan(viewed.store.engine, "heads", b"", None):
        head = decode_head(row.value)
        if head.hidden is not None:
            found.update(viewed.runtime.hidden(head))
    return found


def _blob(viewed: Viewed, digest: bytes, found: Thing) -> Thing:
    with viewed.store.open_blob(digest) as blob:
        begin = blob.read(_BLOB_BYTES)
        size_bytes = blob.seek(0, 2)
    image = image_type(begin)
    text = ""
    if not image:
        try:
            decoder = codecs.getincrementaldecoder("utf-8")()
            text = decoder.decode(begin, final=len(begin) < _BLOB_BYTES)
        except UnicodeDecodeError:
            text = _hex_dump(begin[:1024])
    return found._replace(
        size_bytes=size_bytes, text=text, image=image, is_cut=size_bytes > _BLOB_BYTES
    )


def _hex_dump(data: bytes) -> str:
    lines = []
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        seen = "".join([chr(one) if 32 <= one < 127 else "·" for one in row])
        lines.append(f"{at:06x}  {row.hex(' '):<47}  {seen}")
    return "\n".join(lines)


def image_type(begin: bytes) -> str:
    """The media type of an image that every browser shows; empty for anything else."""
    for magic, media in _IMAGES:
        if begin.startswith(magic):
            return media
    return "image/webp" if begin[:4] == b"RIFF" and begin[8:12] == b"WEBP" else ""


def reached(viewed: Viewed, digest: bytes) -> Reached:
    """What links to an object and which rows keep it; searches the directory of all objects."""
    return viewed.remembered(("reached", digest), lambda: _reached(viewed, digest), keep_s=2)


def _reached(viewed: Viewed, digest: bytes) -> Reached:
    engine = viewed.store.engine
    newest = engine.scan_objects(limit=1)
    if newest and newest[0].id > _MAX_SEARCHED:
        return Reached((), False, (), True)
    # Two passes, by descending id: the first finds the object's own id. Links are lists of ids, and
    # a parent has a higher id than its children, so the second pass stops at the object itself.
    own = next((info.id for info in newest_first(engine, "find", None) if info.digest == digest), 0)
    found: dict[bytes, int] = {}
    for info in newest_first(engine, "find", None):
        if info.id <= own or len(found) > _PARENTS:
            break
        if own in info.children:
            found[info.digest] = info.kind
    parents = [LinkShown(one.hex(), kind_name(kind)) for one, kind in found.items()][:_PARENTS]
    keepers = [_named(viewed, one) for one in find_keepers(engine, [digest])[:100]]
    return Reached(tuple(parents), len(found) > _PARENTS, tuple(keepers), False)


def _named(viewed: Viewed, keeper: Keeper) -> Keeper:
    """The keeper with its kind as users know it: a pin that never expires is a tag."""
    if keeper.kind == "pin":
        pin = viewed.store.find_pin(keeper.name)
        if pin is not None and pin.expires_at_ms is None:
            return keeper._replace(kind="tag")
    return keeper


def raw_value(viewed: Viewed, digest: bytes, session: str | None = None) -> Any:
    """The payload of a node, or a value, for the raw view; ``Stored``, or None."""
    reader = viewed.reader()
    item = reader.get(digest)
    if item.kind == Kind.NODE:
        if digest in hidden_digests(viewed, session):
            raise NotFoundError("this node is hidden")
        return graph.stored_nodes(reader, [digest])[0].payload
    if item.kind in (Kind.VALUE, Kind.LIST, Kind.MAP):
        return open_stored(reader, digest, item)
    raise NotFoundError(f"a {kind_name(item.kind)} has no JSON")


def image_bytes(
    viewed: Viewed, digest: bytes, path: Sequence[PathStep] = (), session: str | None = None
) -> tuple[str, bytes]:
    """An image: a blob, or base64 text inside a payload. NotFoundError if it is not an image."""
    reader = viewed.reader()
    item = reader.get(digest)
    if item.kind in (Kind.BLOB, Kind.ROPE):
        with viewed.store.open_blob(digest) as blob:
            data = blob.read(_MAX_IMAGE_BYTES + 1)
    else:
        stored = raw_value(viewed, digest, session)
        if not isinstance(stored, Stored):
            raise NotFoundError("there is no image")
        found = stored.at(path).beginning(2 * _MAX_IMAGE_BYTES, 2 * _MAX_IMAGE_BYTES)
        data = decoded_image(found)
    media = image_type(data[:16])
    if not media or len(data) > _MAX_IMAGE_BYTES:
        raise NotFoundError("this is not an image that a browser shows")
    return media, data


def decoded_image(found: Any) -> bytes:
    """The bytes of base64 text or of a ``data:`` address; empty if it is invalid."""
    if isinstance(found, bytes):
        return found
    if not isinstance(found, str):
        return b""
    text = found.partition(",")[2] if found.startswith("data:") else found
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
