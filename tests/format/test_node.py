"""Nodes as bytes: one canonical encoding, checked completely when it is decoded."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casstore.errors import CorruptionError, InvalidInputError, InvalidValueError
from casstore.format.canonical import ROLE_LINK, ROLE_TEXT, Link, Resolver, encode, link_bytes
from casstore.format.digest import Digest, Kind, digest_of
from casstore.format.graph import (
    NIL,
    DecodedNode,
    NodeHeader,
    check_time,
    encode_node,
    encode_payload,
    fill_node,
    open_node,
    open_whole,
)
from casstore.format.limits import MAX_DEPTH
from casstore.objects.pieces import PieceWriter

PARENT = bytes(range(32))
FIRST = bytes(range(32, 64))
NAME = bytes(32)

ROOT = NodeHeader("a", 0, 1, 1, None, None, None, None)
CHILD = NodeHeader("b", 7, 3, 2, "frame", "2026-01-02T03:04:05Z", "a", PARENT)


def encoded(
    header: NodeHeader, payload: Any = None, cause: Any = None
) -> tuple[bytes, list[bytes]]:
    writer = PieceWriter()
    return encode_node(
        header,
        encode_payload(cause, "cause", writer.emit),
        encode_payload(payload, "payload", writer.emit),
    )


def refuse(role: int, digest: bytes) -> Any:
    raise AssertionError(f"nothing was expected to be asked for, but {role} {digest.hex()} was")


def decode(data: bytes, resolve: Resolver = refuse) -> DecodedNode:
    return fill_node(open_node(NAME, data)[0], resolve)


def test_the_encoding_of_a_node_is_unchanged() -> None:
    data, links = encoded(CHILD, {"role": "user", "text": "hello"}, {"turn": 1})
    assert links == [PARENT]
    assert data.hex() == (
        "9aa1620703" "02a56672616d65b4323032362d30312d30325430333a30343a30355aa161"
        f"c7210100{PARENT.hex()}"
        "81a47475726e01" "82a4726f6c65a475736572a474657874a568656c6c6f"
    )  # fmt: skip
    assert digest_of(Kind.NODE, data).hex() == (
        "c323c13cf486b59b236063b2ccee52cf65ebec35598d5e6295ac391cc15dce03"
    )


@pytest.mark.parametrize("header", [ROOT, CHILD])
@pytest.mark.parametrize("payload", [None, 1, "text", [], {"a": [1, {"b": None}]}, b"bytes"])
def test_a_node_round_trips(header: NodeHeader, payload: Any) -> None:
    node = decode(encoded(header, payload, {"why": payload})[0])
    assert node.header == header
    assert (node.payload, node.cause) == (payload, {"why": payload})


@given(
    st.text(min_size=1, max_size=20),
    st.integers(0, 1 << 40),
    st.none()
    | st.text(max_size=5)
    | st.integers(-(1 << 60), 1 << 60)
    | st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_node_header_round_trips(node_id: str, seq: int, time: Any) -> None:
    header = NodeHeader(node_id, seq, 1, 0, None, time, None, None)
    assert decode(encoded(header)[0]).header == header


def test_decoding_a_node_resolves_a_long_text_by_its_digest() -> None:
    text = "long " * 800
    data, links = encoded(ROOT, {"text": text})
    assert len(links) == 1
    asked: list[tuple[int, bytes]] = []

    def resolve(role: int, digest: bytes) -> str:
        asked.append((role, digest))
        return text

    assert decode(data, resolve).payload == {"text": text}
    assert asked == [(ROLE_TEXT, Digest.of_blob(text.encode()))]


def test_a_link_in_a_payload_comes_back_as_a_link() -> None:
    link = Link(Digest(PARENT))
    assert decode(encoded(ROOT, {"at": [link]})[0]).payload == {"at": [link]}


def test_the_error_for_an_invalid_payload_names_its_path() -> None:
    with pytest.raises(InvalidValueError) as caught:
        encoded(ROOT, {"a": [object()]})
    assert caught.value.path == ("payload", "a", 0)


def test_a_payload_may_nest_63_deep_because_it_is_inside_a_list() -> None:
    value: Any = None
    for _ in range(63):
        value = [value]
    assert decode(encoded(ROOT, value)[0]).payload == value
    with pytest.raises(InvalidValueError):
        encoded(ROOT, [value])


@pytest.mark.parametrize(
    "time", [float("nan"), float("inf"), True, b"x", [], {}, object(), "\ud800", 1 << 64]
)
def test_a_time_is_text_or_a_number(time: object) -> None:
    with pytest.raises(InvalidValueError):
        check_time(time)


PARENT_LINK = msgpack.ExtType(1, bytes((ROLE_LINK,)) + PARENT)
GOOD: list[Any] = ["b", 7, 3, 2, None, None, "a", PARENT_LINK, None, None]
TEXT_LINK = msgpack.ExtType(1, bytes((ROLE_TEXT,)) + PARENT)


def test_the_base_node_of_the_damage_cases_is_valid() -> None:
    assert decode(msgpack.packb(GOOD)).header.depth == 3


# A field, and what must not stand in it.
WRONG: list[tuple[int, Any]] = [
    (0, None), (0, 1), (0, b"b"),
    (1, None), (1, -1), (1, 1), (1, True), (1, 7.0),
    (2, 0), (2, 1), (2, 9), (2, True),
    (3, -1), (3, 4), (3, "2"),
    (4, 1), (5, True), (5, []), (5, {}), (5, b""),
    (6, None), (6, 1),
    (7, None), (7, "a"), (7, 1), (7, TEXT_LINK),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_that_breaks_a_rule_is_damage(field: int, value: Any) -> None:
    fields = list(GOOD)
    fields[field] = value
    with pytest.raises(CorruptionError, match=NAME.hex()):
        decode(msgpack.packb(fields))


def test_a_node_of_depth_0_is_damage() -> None:
    """Not even without user messages: a root has depth 1, its descendants more."""
    fields = [*GOOD[:2], 0, 0, *GOOD[4:]]
    with pytest.raises(CorruptionError, match=NAME.hex()):
        decode(msgpack.packb(fields))
    assert open_whole(msgpack.packb(fields)) is None


@pytest.mark.parametrize("fields", [GOOD[:-1], [*GOOD, None], {}, None, 1, "node"])
def test_a_value_without_exactly_the_node_fields_is_refused(fields: Any) -> None:
    with pytest.raises(CorruptionError):
        decode(msgpack.packb(fields))


def test_a_non_canonical_encoding_is_refused() -> None:
    data = msgpack.packb(GOOD)
    padded = data[:3] + b"\xcc\x07" + data[4:]
    assert msgpack.unpackb(padded) == msgpack.unpackb(data)
    with pytest.raises(InvalidInputError):
        decode(padded)
    with pytest.raises(InvalidInputError):
        decode(data + b"\xc0")


def test_every_truncation_is_refused() -> None:
    data = encoded(CHILD, {"role": "user"})[0]
    for length in range(len(data)):
        with pytest.raises((InvalidInputError, CorruptionError)):
            decode(data[:length])


@given(
    st.recursive(
        st.none() | st.integers(-5, 2**40) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_a_node_decodes_alike_from_trusted_and_from_inspected_bytes(payload: Any) -> None:
    link = Link(Digest(FIRST))
    data, _ = encoded(CHILD, {"payload": payload, "link": link}, payload)
    assert open_node(NAME, data, trusted=True) == open_node(NAME, data)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-5, 2**40)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.binary(max_size=8)
        | st.text(max_size=8)
        | st.just(Link(Digest(FIRST))),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    st.sampled_from([ROOT, CHILD]),
)
def test_open_whole_decodes_a_node_without_outlined_parts(payload: Any, header: NodeHeader) -> None:
    for cause in (None, payload):
        data, links = encoded(header, payload, cause)
        node, away = open_node(NAME, data)
        whole = [*header, node.cause, node.payload]
        assert open_whole(data) == (None if away else whole)
        assert len(away) == len(links) - (header.parent is not None)


@pytest.mark.parametrize(
    "data",
    [
        *map(msgpack.packb, (GOOD[:-1], [*GOOD, None], {}, None, 1, "node")),
        *[
            msgpack.packb([*GOOD[:field], value, *GOOD[field + 1 :]])
            for field, value in WRONG
        ],
        *[
            msgpack.packb([*GOOD[:field], strange, *GOOD[field + 1 :]])
            for field in range(10)
            for strange in (
                msgpack.ExtType(1, b"\0" * 32), msgpack.ExtType(1, b"\1" * 33),
                msgpack.ExtType(1, b""), msgpack.ExtType(2, b"\0" * 33), msgpack.Timestamp(1),
            )
        ],
    ],
)  # fmt: skip
def test_open_whole_rejects_values_that_are_not_a_node(data: bytes) -> None:
    try:
        expected = open_node(NAME, data, trusted=True)
    except (CorruptionError, InvalidInputError):
        assert open_whole(data) is None
    else:
        # An extension that msgpack keeps for itself is a number to both.
        (header, cause, payload), away = expected
        assert open_whole(data) == (None if away else [*header, cause, payload])


def test_a_node_that_nests_too_deep_does_not_open_whole() -> None:
    for levels in (MAX_DEPTH - 2, MAX_DEPTH - 1, MAX_DEPTH, 500):
        deep: Any = 1
        for level in range(levels):
            deep = [deep] if level % 2 else {"a": deep}
        for fields in ([*GOOD[:-1], deep], [*GOOD[:-2], deep, None]):
            opened = open_whole(msgpack.packb(fields))
            assert (opened is not None) == (levels < MAX_DEPTH)
    with pytest.raises(InvalidInputError):
        open_whole(msgpack.packb(GOOD)[:-1])


def test_trusted_bytes_may_be_non_canonical_but_not_too_deep_truncated_or_foreign() -> None:
    data = msgpack.packb(GOOD)
    padded = data[:3] + b"\xcc\x07" + data[4:]
    assert open_node(NAME, padded, trusted=True) == open_node(NAME, data)
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    too_deep = msgpack.packb([*GOOD[:-1], deep])
    foreign = msgpack.packb([*GOOD[:-1], msgpack.ExtType(5, b"x")])
    for broken in (too_deep, foreign, data + b"\xc0", data[:-1], data[:5]):
        with pytest.raises(InvalidInputError):
            open_node(NAME, broken, trusted=True)
    with pytest.raises(CorruptionError):
        open_node(NAME, msgpack.packb(GOOD[:-1]), trusted=True)


def test_nil_has_one_encoding() -> None:
    assert NIL.data == b"\xc0"
    assert link_bytes(ROLE_LINK, PARENT).hex() == f"c7210100{PARENT.hex()}"


@pytest.mark.parametrize(
    ("payload", "stays"),
    [
        ("x" * 2045, True), ("x" * 2046, False),
        (b"x" * 2045, True), (b"x" * 2046, False),
        ({"text": "x" * 2039}, True), ({"text": "x" * 2040}, False),
        ({"text": "é" * 1019}, True), ({"text": "é" * 1020}, False),
        ([{"a": "x" * 1000}, "y" * 1000], True), ([["x" * 600] * 4], False),
    ],
)  # fmt: skip
def test_a_payload_of_2048_bytes_stays_whole_and_a_longer_one_does_not(
    payload: Any, stays: bool
) -> None:
    writer = PieceWriter()
    data, links = encode_payload(payload, "payload", writer.emit)[:2]
    assert (len(encode(payload)) <= 2048) is stays
    assert (data == encode(payload)) is stays
    assert bool(links) is not stays
    assert bool(writer.objects) is not stays


def test_links_in_a_short_payload_are_links_of_the_node() -> None:
    first, second = Link(Digest(PARENT)), Link(Digest(FIRST))
    payload = {"b": [second, "x" * 700], "a": first}
    data, links = encoded(ROOT, payload)
    assert links == [PARENT, FIRST]
    assert decode(data).payload == payload
