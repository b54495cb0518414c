"""Checks that each object agrees with the objects it links to: their kinds, sizes, counts, keys.

Reading a value, a rope or a path checks that, too. ``examine`` does it without building anything:
children come first, each leaves a few numbers (its *fact*), and a parent is compared with the
facts of its children. So a whole file of objects is checked in one pass, in memory that does not
grow with the values they would build (P7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, LimitError
from casstore.format import canonical, expansion, node_index, tree
from casstore.format.canonical import ROLE_BYTES, ROLE_ITEM, ROLE_LINK, ROLE_TEXT
from casstore.format.digest import Kind
from casstore.format.graph import cut_components, decode_manifest, link_target, open_node
from casstore.format.limits import MAX_DEPTH
from casstore.format.piece_size import check_piece_size

# The type of a value: a list, a map, or anything else.
PLAIN: Final = 0
LIST: Final = 1
MAP: Final = 2
#: No cost (``format.expansion``): the default of a fact.
FREE: Final = expansion.Expansion(0, 0)
_ITEM_LINK_BYTES: Final = len(canonical.item_link_bytes(0, bytes(32)))


class BlobFact(NamedTuple):
    """A blob: its length, and whether it may be UTF-8. For a rope, that is not known: True."""

    size: int
    is_text: bool


class ChunksFact(NamedTuple):
    """An inner branch of a rope."""

    level: int
    size: int


class ValueFact(NamedTuple):
    """A value in one piece, a leaf, or a branch (``level`` from 1 on) of a tree."""

    shape: int
    level: int
    #: List items or map entries below, and their bytes as branches count them.
    entries: int
    size: int
    #: The bytes of the object itself.
    length: int
    #: How deep lists and maps nest in it, including all outlined parts.
    depth: int
    #: ``key_number`` of the last key of a map; else 0.
    key: int
    #: The cost of decoding it: with all occurrences of its parts, and without its parts.
    cost: expansion.Expansion = FREE


class NodeFact(NamedTuple):
    """A node of a graph."""

    seq: int
    depth: int
    users: int
    #: ``key_number`` of the id.
    id: int
    cost: expansion.Expansion = FREE


class PieceFact(NamedTuple):
    """A part of a node index: ``size`` is the pages it covers, for a bucket its number of parts."""

    shape: str
    level: int
    size: int


class ManifestFact(NamedTuple):
    """A manifest. No parent is compared with more than its kind."""

    cost: expansion.Expansion = FREE


Fact = BlobFact | ChunksFact | ValueFact | NodeFact | PieceFact | ManifestFact
#: Returns the fact of a child by its digest; None if the child is in a store, which has checked it,
#: and is not read here. Raises if the child is missing.
Known = Callable[[bytes], Fact | None]


def links_of(kind: int, data: bytes) -> list[bytes]:
    """The digests that a verified object links to, in order, each as often as it appears."""
    if kind == Kind.BLOB:
        return []
    if kind == Kind.ROPE:
        return tree.decode_branch(Kind.CHUNKS, tree.open_rope(data)).digests
    if kind in (Kind.CHUNKS, Kind.LIST, Kind.MAP):
        return tree.decode_branch(kind, data).digests
    return canonical.links_in(data)


def examine(digest: bytes, kind: int, data: bytes, known: Known) -> Fact:
    """Compare an object with its children; returns its fact. ``digest`` has verified the bytes.

    Raises CorruptionError, NotCanonicalError or LimitError. Whether a rope is stored under the
    digest of its content can be checked only with the content: see ``objects.blobs``.
    """
    if kind == Kind.BLOB:
        return BlobFact(len(data), _is_text(data))
    check_piece_size(kind, data)
    if kind == Kind.ROPE:
        body = _chunks(digest, tree.open_rope(data), known)
        return BlobFact(body.size, is_text=True)
    if kind == Kind.CHUNKS:
        return _chunks(digest, data, known)
    if kind == Kind.VALUE:
        return _value(digest, data, known)
    if kind in (Kind.LIST, Kind.MAP):
        return _branch(digest, kind, data, known)
    if kind == Kind.NODE:
        return _node(digest, data, known)
    if kind == Kind.INDEX:
        return _piece(digest, data, known)
    if kind == Kind.MANIFEST:
        return _manifest(digest, data, known)
    raise CorruptionError(f"object {digest.hex()} has an unknown kind ({kind})")


def key_number(key: str) -> int:
    """A number that represents a key or an id within this process."""
    return hash(key)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _chunks(digest: bytes, body: bytes, known: Known) -> ChunksFact:
    branch = tree.decode_branch(Kind.CHUNKS, body)
    for child, size in zip(branch.digests, branch.sizes, strict=True):
        fact = known(child)
        if branch.level == 1:
            fits = fact is None or (isinstance(fact, BlobFact) and fact.size == size)
        else:
            fits = fact is None or fact == ChunksFact(branch.level - 1, size)
        if not fits:
            raise _misfit(digest, child)
    return ChunksFact(branch.level, sum(branch.sizes))


def _value(digest: bytes, data: bytes, known: Known) -> ValueFact:
    value, links = canonical.inspect(data)
    shape, entries, size, key = PLAIN, 1, len(data), 0
    if type(value) is list:
        shape, entries = LIST, len(value)
        size = len(data) - len(canonical.list_header(entries))
        size += _check_items(digest, data, links, known)
    elif type(value) is dict:
        shape, entries = MAP, len(value)
        size = len(data) - len(canonical.map_header(entries))
        key = key_number(next(reversed(value))) if value else 0
    if shape != LIST:
        _refuse_items(digest, links)
    depth, cost = _inside(digest, value, links, known, len(data), outer=0)
    return ValueFact(shape, 0, entries, size, len(data), depth, key, cost)


def _check_items(digest: bytes, data: bytes, links: list[tuple[int, bytes]], known: Known) -> int:
    """Check the outlined items of a list; how many bytes longer they are than their links."""
    left = [name for role, name in links if role == ROLE_ITEM]
    if not left:
        return 0
    names = iter(left)
    longer = 0
    for item in canonical.cut_items(data):
        size = canonical.item_size(item)
        if size != len(item) or _is_item_link(item):
            name = next(names, None)
            fact = None if name is None else known(name)
            if name is None or not (
                fact is None or (isinstance(fact, ValueFact) and fact.length == size)
            ):
                raise _misfit(digest, name or digest)
            longer += size - _ITEM_LINK_BYTES
    if next(names, None) is not None:
        raise _stray_item(digest)
    return longer


def _refuse_items(digest: bytes, links: list[tuple[int, bytes]]) -> None:
    """Raise CorruptionError if an item link is among the links: only lists have outlined items."""
    if any(role == ROLE_ITEM for role, _ in links):
        raise _stray_item(digest)


def _is_item_link(item: bytes) -> bool:
    return len(item) == _ITEM_LINK_BYTES and item[:4] == canonical.item_link_bytes(0, bytes(32))[:4]


def _inside(
    digest: bytes,
    value: Any,
    links: list[tuple[int, bytes]],
    known: Known,
    size: int,
    *,
    outer: int,
) -> tuple[int, expansion.Expansion]:
    """Check the targets of the links of an inspected value of ``size`` bytes.

    Returns how deep it nests and what it costs, including the targets. ``outer`` is how many
    levels belong to the node or manifest around the value, and do not count.
    """
    deepest = _nesting(value) - outer
    own = cost = expansion.part_cost(expansion.memory_bytes(value, size), len(links))
    if not links:
        return deepest, expansion.Expansion(cost, own)
    for at, (role, name) in zip(canonical.link_depths(value), links, strict=True):
        fact = known(name)
        if fact is None or role == ROLE_LINK:
            continue
        if role in (ROLE_TEXT, ROLE_BYTES):
            if not isinstance(fact, BlobFact) or (role == ROLE_TEXT and not fact.is_text):
                raise _misfit(digest, name)
            continue
        if not isinstance(fact, ValueFact) or (fact.level == 0 and fact.shape == PLAIN):
            raise _misfit(digest, name)
        deepest = max(deepest, at - outer + fact.depth)
        cost += fact.cost.everywhere
    if deepest > MAX_DEPTH:
        raise LimitError(f"object {digest.hex()} nests deeper than {MAX_DEPTH} levels")
    return deepest, expansion.Expansion(cost, own)


def _nesting(value: Any) -> int:
    # Inspecting has refused what nests deeper than MAX_DEPTH.
    if type(value) is dict:
        return 1 + max([_nesting(item) for item in value.values()], default=0)
    if type(value) is list:
        return 1 + max([_nesting(item) for item in value], default=0)
    return 0


def _branch(digest: bytes, kind: int, data: bytes, known: Known) -> ValueFact:
    branch = tree.decode_branch(kind, data)
    shape = MAP if kind == Kind.MAP else LIST
    depth = 0
    own = cost = expansion.part_cost(len(data), len(branch.digests))
    for child in branch.children():
        fact = known(child.digest)
        if fact is None:
            continue
        key = key_number(child.key) if kind == Kind.MAP else 0
        said = (shape, branch.level - 1, child.entries, child.size, key)
        if not isinstance(fact, ValueFact) or (
            (fact.shape, fact.level, fact.entries, fact.size, fact.key) != said
        ):
            raise _misfit(digest, child.digest)
        depth = max(depth, fact.depth)
        cost += fact.cost.everywhere
    return ValueFact(
        shape,
        branch.level,
        sum(branch.counts),
        sum(branch.sizes),
        len(data),
        depth,
        key_number(branch.keys[-1]) if kind == Kind.MAP else 0,
        expansion.Expansion(cost, own),
    )


def _node(digest: bytes, data: bytes, known: Known) -> NodeFact:
    header = open_node(digest, data)[0].header
    if header.parent is not None and header.parent_id is not None:
        above = known(header.parent)
        if above is not None and not (
            isinstance(above, NodeFact)
            and above.id == key_number(header.parent_id)
            and above.depth + 1 == header.depth
            and above.seq < header.seq
            and above.users <= header.users <= above.users + 1
        ):
            raise _misfit(digest, header.parent)
    value, links = canonical.inspect(data)
    _refuse_items(digest, links)
    _, cost = _inside(digest, value, links, known, len(data), outer=1)
    return NodeFact(header.seq, header.depth, header.users, key_number(header.id), cost)


_PAGE: Final = "page"
_RUN: Final = "run"
_BUCKET: Final = "bucket"
_SPINE: Final = "spine"


def _piece(digest: bytes, data: bytes, known: Known) -> PieceFact:
    piece = node_index.decode_piece(digest, data)
    if isinstance(piece, node_index.IndexPage):
        for child in piece.digests:
            if not isinstance(known(child), NodeFact | None):
                raise _misfit(digest, child)
        return PieceFact(_PAGE, 0, 1)
    if isinstance(piece, node_index.Bucket):
        return PieceFact(_BUCKET, 0, len(piece.parts))
    if isinstance(piece, node_index.IndexRun):
        parts = node_index.FANOUT ** (piece.level - node_index.SPLIT_LEVEL)
        for child in piece.buckets:
            _require_fact(digest, child, known, PieceFact(_BUCKET, 0, int(parts)))
        for child in piece.parts:
            _require_fact(digest, child, known, _run_fact(piece.level - 1))
        return _run_fact(piece.level)
    for level, runs in enumerate(piece.runs):
        for child in runs:
            _require_fact(digest, child, known, _run_fact(level))
    return PieceFact(_SPINE, 0, piece.page_count)


def _run_fact(level: int) -> PieceFact:
    return PieceFact(_RUN if level else _PAGE, level, node_index.RUN_PAGES[level])


def _require_fact(digest: bytes, child: bytes, known: Known, wanted: Fact) -> None:
    if known(child) not in (None, wanted):
        raise _misfit(digest, child)


def _manifest(digest: bytes, data: bytes, known: Known) -> ManifestFact:
    manifest = decode_manifest(digest, data)
    if manifest.leaf is not None and manifest.leaf_id is not None:
        leaf = known(manifest.leaf)
        if leaf is not None and not (
            isinstance(leaf, NodeFact)
            and leaf.id == key_number(manifest.leaf_id)
            and leaf.seq < manifest.next_seq
        ):
            raise _misfit(digest, manifest.leaf)
    spine, _, _, newest = manifest.node_index
    if spine is not None:
        pages = manifest.nodes // node_index.PAGE_NODES
        _require_fact(digest, spine, known, PieceFact(_SPINE, 0, pages))
    for name in newest:
        if not isinstance(known(name), NodeFact | None):
            raise _misfit(digest, name)
    for component in cut_components(manifest.components).values():
        target = link_target(component)
        if target is not None and not isinstance(known(target), BlobFact | ValueFact | None):
            raise _misfit(digest, target)
    value, links = canonical.inspect(data)
    _refuse_items(digest, links)
    _, cost = _inside(digest, value, links, known, len(data), outer=1)
    return ManifestFact(cost)


def _stray_item(digest: bytes) -> CorruptionError:
    return CorruptionError(f"object {digest.hex()} has an item link outside a list")


def _misfit(digest: bytes, child: bytes) -> CorruptionError:
    return CorruptionError(
        f"object {digest.hex()} links to {child.hex()}, which does not match the link"
    )
