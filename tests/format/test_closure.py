"""The rules between an object and its children: each is broken once and reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from casstore.errors import CorruptionError, LimitError
from casstore.format import canonical, tree
from casstore.format.canonical import (
    ROLE_BYTES,
    ROLE_LINK,
    ROLE_PART,
    ROLE_TEXT,
    item_link_bytes,
    link_bytes,
)
from casstore.format.closure import (
    FREE,
    LIST,
    MAP,
    PLAIN,
    BlobFact,
    ChunksFact,
    Fact,
    ManifestFact,
    NodeFact,
    PieceFact,
    ValueFact,
    examine,
    key_number,
    links_of,
)
from casstore.format.digest import Kind
from casstore.format.graph import (
    NIL,
    Manifest,
    NodeHeader,
    encode_components,
    encode_manifest,
    encode_node,
    linked,
)
from casstore.format.limits import MAX_DEPTH
from casstore.format.node_index import Bucket, IndexPage, IndexRun, Spine, Tail, encode_piece
from casstore.format.splitting import Encoded

OWN = bytes([255]) * 32
ONE, TWO = bytes([1]) * 32, bytes([2]) * 32
TEXT, BYTES = BlobFact(600, is_text=True), BlobFact(600, is_text=False)


def value(shape: int = LIST, **changes: Any) -> ValueFact:
    plain = ValueFact(shape, level=0, entries=3, size=100, length=101, depth=1, key=0)
    return plain._replace(**changes)


def examined(kind: int, data: bytes, facts: Mapping[bytes, Fact | None]) -> Fact:
    """The fact without its cost: see test_expansion."""
    fact = examine(OWN, kind, data, lambda digest: facts[digest])
    if isinstance(fact, BlobFact | ChunksFact | PieceFact):
        return fact
    return fact._replace(cost=FREE)


def wrapped(depth: int, inside: bytes) -> bytes:
    """Lists in lists, and something in the innermost."""
    return canonical.list_header(1) * depth + inside


# --- blobs and ropes -----------------------------------------------------------------------------


def test_the_fact_of_a_blob_is_its_length_and_whether_it_is_valid_utf8() -> None:
    assert examined(Kind.BLOB, "é".encode(), {}) == BlobFact(2, is_text=True)
    assert examined(Kind.BLOB, b"\xff", {}) == BlobFact(1, is_text=False)
    # Whatever it looks like, it links to nothing.
    assert links_of(Kind.BLOB, wrapped(1, link_bytes(ROLE_LINK, ONE))) == []
    with pytest.raises(CorruptionError, match="unknown kind"):
        examined(99, b"", {})


def chunks(level: int, *sizes: int) -> bytes:
    names = (ONE, TWO)
    children = [tree.Child(name, size, size, "") for name, size in zip(names, sizes, strict=False)]
    return tree.encode_branch(Kind.CHUNKS, level, children)


def test_the_pieces_of_a_rope_are_blobs_of_the_recorded_lengths() -> None:
    body = chunks(1, 600, 7)
    other = BlobFact(7, is_text=False)
    assert examined(Kind.CHUNKS, body, {ONE: BYTES, TWO: other}) == ChunksFact(1, 607)
    assert examined(Kind.CHUNKS, body, {ONE: None, TWO: None}) == ChunksFact(1, 607)
    assert examined(Kind.ROPE, tree.seal_rope(body), {ONE: BYTES, TWO: other}) == BlobFact(
        607, is_text=True
    )
    assert links_of(Kind.ROPE, tree.seal_rope(body)) == [ONE, TWO]
    for wrong in (BlobFact(8, is_text=True), ChunksFact(1, 7), value(length=7)):
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(Kind.CHUNKS, body, {ONE: BYTES, TWO: wrong})


def test_a_child_branch_of_a_rope_is_one_level_below_its_parent() -> None:
    body = chunks(3, 600)
    assert examined(Kind.CHUNKS, body, {ONE: ChunksFact(2, 600)}) == ChunksFact(3, 600)
    assert examined(Kind.CHUNKS, body, {ONE: None}) == ChunksFact(3, 600)
    for wrong in (ChunksFact(1, 600), ChunksFact(3, 600), ChunksFact(2, 601), BYTES):
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.CHUNKS, body, {ONE: wrong})


# --- values --------------------------------------------------------------------------------------


def test_the_fact_of_a_value_holds_the_counts_and_sizes_for_its_branch() -> None:
    many = canonical.encode([[1], 2, 3])
    assert examined(Kind.VALUE, many, {}) == ValueFact(LIST, 0, 3, len(many) - 1, len(many), 2, 0)
    pairs = canonical.encode({"a": 1, "b": {}})
    assert examined(Kind.VALUE, pairs, {}) == ValueFact(
        MAP, 0, 2, len(pairs) - 1, len(pairs), 2, key_number("b")
    )
    number = canonical.encode(7)
    assert examined(Kind.VALUE, number, {}) == ValueFact(PLAIN, 0, 1, 1, 1, 0, 0)
    nothing = canonical.encode({})
    assert examined(Kind.VALUE, nothing, {}) == ValueFact(MAP, 0, 0, 0, 1, 1, 0)


@pytest.mark.parametrize(
    ("role", "fits", "misfits"),
    [
        (ROLE_TEXT, [TEXT, None], [BYTES, value(), NodeFact(0, 1, 0, 0)]),
        (ROLE_BYTES, [TEXT, BYTES, None], [value(), ChunksFact(1, 600)]),
        (ROLE_PART, [value(), value(MAP), value(level=2), None], [TEXT, value(PLAIN)]),
        # A user's link may lead to any object.
        (ROLE_LINK, [TEXT, BYTES, value(PLAIN), ManifestFact(), None], []),
    ],
)
def test_the_target_of_a_link_matches_its_role(
    role: int, fits: list[Fact | None], misfits: list[Fact]
) -> None:
    data = wrapped(1, link_bytes(role, ONE))
    assert links_of(Kind.VALUE, data) == [ONE]
    for fact in fits:
        examined(Kind.VALUE, data, {ONE: fact})
    for wrong in misfits:
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.VALUE, data, {ONE: wrong})


def test_the_depth_of_an_outlined_part_counts_from_its_link() -> None:
    data = wrapped(4, link_bytes(ROLE_PART, ONE))
    fact = examined(Kind.VALUE, data, {ONE: value(depth=3)})
    assert isinstance(fact, ValueFact)
    assert fact.depth == 7
    # One that was proven elsewhere adds nothing.
    fact = examined(Kind.VALUE, data, {ONE: None})
    assert isinstance(fact, ValueFact)
    assert fact.depth == 4
    examined(Kind.VALUE, data, {ONE: value(depth=MAX_DEPTH - 4)})
    with pytest.raises(LimitError, match="nests deeper"):
        examined(Kind.VALUE, data, {ONE: value(depth=MAX_DEPTH - 3)})


def items(*parts: bytes) -> bytes:
    return canonical.list_header(len(parts)) + b"".join(parts)


def test_the_size_in_the_link_of_an_outlined_item_is_its_length() -> None:
    left = item_link_bytes(120, ONE)
    data = items(canonical.encode("x"), left, item_link_bytes(130, TWO))
    here = {ONE: value(length=120), TWO: value(length=130)}
    fact = examined(Kind.VALUE, data, here)
    assert isinstance(fact, ValueFact)
    assert (fact.entries, fact.size) == (3, len(canonical.encode("x")) + 120 + 130)
    assert examined(Kind.VALUE, data, {ONE: None, TWO: None}) == fact._replace(depth=1)
    for wrong in (value(length=119), value(length=121), BlobFact(120, is_text=True)):
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.VALUE, data, {**here, ONE: wrong})
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(Kind.VALUE, data, {**here, TWO: wrong._replace(length=131)
                     if isinstance(wrong, ValueFact) else wrong})  # fmt: skip


def test_an_item_link_is_valid_only_in_a_list_object() -> None:
    """Anywhere else nothing would verify the size in the link."""
    stray = item_link_bytes(120, TWO)
    pair = canonical.map_header(1) + canonical.encode("a")
    encoded = Encoded(wrapped(1, stray), [TWO])
    here = {ONE: value(length=120), TWO: value(length=120)}
    for data in (
        stray,
        pair + stray,
        pair + items(stray),
        items(items(stray)),
        items(item_link_bytes(120, ONE), items(stray)),
    ):
        with pytest.raises(CorruptionError, match="item link outside a list"):
            examined(Kind.VALUE, data, here)
    with pytest.raises(CorruptionError, match="item link outside a list"):
        examined(Kind.NODE, node(ROOT, encoded), here)
    with pytest.raises(CorruptionError, match="item link outside a list"):
        examined(
            Kind.MANIFEST,
            manifest(components=encode_components({"config": encoded})),
            {**here, ONE: LEAF},
        )


# --- branches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), [(Kind.LIST, LIST), (Kind.MAP, MAP)])
def test_the_children_of_a_branch_match_its_counts_and_sizes(kind: int, shape: int) -> None:
    children = [tree.Child(ONE, 3, 100, "a"), tree.Child(TWO, 5, 200, "b")]
    data = tree.encode_branch(kind, 2, children)
    keys = (key_number("a"), key_number("b")) if kind == Kind.MAP else (0, 0)
    first = ValueFact(shape, 1, 3, 100, 7, 4, keys[0])
    second = ValueFact(shape, 1, 5, 200, 7, 2, keys[1])
    expected = ValueFact(shape, 2, 8, 300, len(data), 4, keys[1])
    assert links_of(kind, data) == [ONE, TWO]
    assert examined(kind, data, {ONE: first, TWO: second}) == expected
    assert examined(kind, data, {ONE: None, TWO: None}) == expected._replace(depth=0)
    assert examined(kind, data, {ONE: None, TWO: second}) == expected._replace(depth=2)
    for changes in (
        {"shape": MAP if shape == LIST else LIST},
        {"level": 0},
        {"level": 2},
        {"entries": 6},
        {"size": 199},
        {"key": key_number("c")},
    ):
        wrong = second._replace(**changes)  # type: ignore[arg-type]
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(kind, data, {ONE: first, TWO: wrong})
    with pytest.raises(CorruptionError, match=TWO.hex()):
        examined(kind, data, {ONE: first, TWO: TEXT})
    # How long the object itself is, and how deep it nests, no branch says.
    examined(kind, data, {ONE: first, TWO: second._replace(length=1, depth=60)})


# --- nodes and manifests -------------------------------------------------------------------------

ROOT = NodeHeader("a", 0, 1, 1, None, None, None, None)
CHILD = NodeHeader("b", 7, 3, 2, None, None, "a", ONE)
ABOVE = NodeFact(6, 2, 1, key_number("a"))


def node(header: NodeHeader, payload: Encoded = NIL) -> bytes:
    return encode_node(header, NIL, payload)[0]


def test_the_sequence_number_and_depth_of_a_node_follow_those_of_its_parent() -> None:
    assert examined(Kind.NODE, node(ROOT), {}) == NodeFact(0, 1, 1, key_number("a"))
    data = node(CHILD)
    assert links_of(Kind.NODE, data) == [ONE]
    for fits in (ABOVE, None, ABOVE._replace(users=2), ABOVE._replace(seq=0)):
        assert examined(Kind.NODE, data, {ONE: fits}) == NodeFact(7, 3, 2, key_number("b"))
    for wrong in (
        ABOVE._replace(seq=7),
        ABOVE._replace(seq=8),
        ABOVE._replace(depth=3),
        ABOVE._replace(depth=1),
        ABOVE._replace(users=0),
        ABOVE._replace(users=3),
        ABOVE._replace(id=key_number("c")),
        TEXT,
        ManifestFact(),
    ):
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.NODE, data, {ONE: wrong})


def test_the_payload_of_a_node_nests_as_deep_as_any_value() -> None:
    payload = Encoded(wrapped(2, link_bytes(ROLE_PART, TWO)), [TWO])
    data = node(ROOT, payload)
    examined(Kind.NODE, data, {TWO: value(depth=MAX_DEPTH - 2)})
    with pytest.raises(LimitError, match="nests deeper"):
        examined(Kind.NODE, data, {TWO: value(depth=MAX_DEPTH - 1)})
    text = node(ROOT, Encoded(link_bytes(ROLE_TEXT, TWO), [TWO]))
    with pytest.raises(CorruptionError, match=TWO.hex()):
        examined(Kind.NODE, text, {TWO: BYTES})


LEAF = NodeFact(6, 2, 1, key_number("a"))


def manifest(**fields: Any) -> bytes:
    tail = Tail(None, bytes(4), (0,), (ONE,))
    made = Manifest(leaf_id="a", nodes=1, next_seq=7, leaf=ONE, node_index=tail, **fields)
    return encode_manifest(made)[0]


def test_the_leaf_of_a_manifest_is_one_of_its_nodes() -> None:
    data = manifest()
    assert examined(Kind.MANIFEST, encode_manifest(Manifest())[0], {}) == ManifestFact()
    for fits in (LEAF, None):
        assert examined(Kind.MANIFEST, data, {ONE: fits}) == ManifestFact()
    for wrong in (LEAF._replace(seq=7), LEAF._replace(id=key_number("b")), TEXT, value()):
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.MANIFEST, data, {ONE: wrong})


def test_a_component_that_is_a_link_leads_to_a_blob_or_a_value() -> None:
    data = manifest(components=encode_components({"tool_state": linked(TWO)}))
    for fits in (TEXT, BYTES, value(), value(PLAIN), None):
        examined(Kind.MANIFEST, data, {ONE: LEAF, TWO: fits})
    for wrong in (LEAF, ManifestFact(), ChunksFact(1, 5)):
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(Kind.MANIFEST, data, {ONE: LEAF, TWO: wrong})


def test_the_fields_of_a_manifest_nest_as_deep_as_any_value() -> None:
    config = Encoded(wrapped(1, link_bytes(ROLE_PART, TWO)), [TWO])
    data = manifest(components=encode_components({"config": config}))
    examined(Kind.MANIFEST, data, {ONE: LEAF, TWO: value(depth=MAX_DEPTH - 2)})
    with pytest.raises(LimitError, match="nests deeper"):
        examined(Kind.MANIFEST, data, {ONE: LEAF, TWO: value(depth=MAX_DEPTH - 1)})


# --- node indexes ---------------------------------------------------------------------------------

NODE = NodeFact(6, 2, 1, key_number("a"))
PAGE_FACT = PieceFact("page", 0, 1)


def piece(given: IndexPage | IndexRun | Bucket | Spine) -> bytes:
    return encode_piece(given)[0]


def test_an_index_page_links_only_to_nodes() -> None:
    data = piece(IndexPage((0,) + (1,) * 15, (ONE,) * 15 + (TWO,)))
    assert links_of(Kind.INDEX, data) == [ONE] * 15 + [TWO]
    assert examined(Kind.INDEX, data, {ONE: NODE, TWO: None}) == PAGE_FACT
    with pytest.raises(CorruptionError, match=TWO.hex()):
        examined(Kind.INDEX, data, {ONE: NODE, TWO: PAGE_FACT})


def test_an_index_run_links_only_to_pieces_of_the_level_below() -> None:
    first = piece(IndexRun(1, bytes(128 * 4), (), (ONE,) * 8))
    assert examined(Kind.INDEX, first, {ONE: PAGE_FACT}) == PieceFact("run", 1, 8)
    second = piece(IndexRun(2, bytes(1024 * 4), (), (ONE,) * 8))
    assert examined(Kind.INDEX, second, {ONE: PieceFact("run", 1, 8)}).size == 64  # type: ignore[union-attr]
    for wrong in (NODE, PieceFact("run", 1, 8), PieceFact("bucket", 0, 1)):
        with pytest.raises(CorruptionError, match=ONE.hex()):
            examined(Kind.INDEX, first, {ONE: wrong})


def test_a_large_index_run_links_only_to_buckets_of_its_level() -> None:
    for level, parts in ((3, 1), (4, 8)):
        data = piece(IndexRun(level, b"", (TWO,) * 16, (ONE,) * 8))
        below = PieceFact("run", level - 1, 8 ** (level - 1))
        bucket = PieceFact("bucket", 0, parts)
        assert examined(Kind.INDEX, data, {ONE: below, TWO: bucket}) == PieceFact(
            "run", level, 8**level
        )
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(Kind.INDEX, data, {ONE: below, TWO: bucket._replace(size=9 - parts)})


def test_the_spine_of_a_manifest_matches_its_number_of_nodes() -> None:
    spine = piece(Spine(bytes(2 * 16 * 4), ((ONE, ONE), (), (), (), ())))
    found = examined(Kind.INDEX, spine, {ONE: PAGE_FACT})
    assert found == PieceFact("spine", 0, 2)
    made = Manifest(leaf_id="a", nodes=32, next_seq=32, leaf=ONE, node_index=Tail(TWO))
    data = encode_manifest(made)[0]
    examined(Kind.MANIFEST, data, {ONE: NODE, TWO: found})
    for wrong in (PieceFact("spine", 0, 1), PAGE_FACT, NODE):
        with pytest.raises(CorruptionError, match=TWO.hex()):
            examined(Kind.MANIFEST, data, {ONE: NODE, TWO: wrong})
