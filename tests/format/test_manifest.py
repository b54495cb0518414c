"""Manifests as bytes: one canonical encoding, checked completely when it is decoded."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import ROLE_LINK
from casstore.format.digest import Kind, digest_of
from casstore.format.graph import (
    NIL,
    Manifest,
    cut_components,
    decode_manifest,
    encode_components,
    encode_manifest,
    link_target,
    linked,
)
from casstore.format.graph import encode_field as encode_payload
from casstore.format.node_index import Tail
from casstore.format.splitting import Encoded
from casstore.objects.pieces import PieceWriter

NAME = bytes(32)
LEAF = bytes(range(32))
TOOLS = bytes(range(32, 64))
FIRST = bytes(range(64, 96))


def value(given: Any) -> Encoded:
    return encode_payload(given, "value", PieceWriter().emit)


COMPONENTS = {
    "tool_state": linked(TOOLS),
    "config": value({"model": "m"}),
    "turn_state": value({"turn_index": 2}),
    "plugin_revision": value(9),
    "usage": value([["main", "m", 1, 2, 0, 0]]),
}
FULL = Manifest(
    "leaf", 2, 4, LEAF, NIL, Tail(None, bytes(8), (0, 1), (FIRST, LEAF)),
    encode_components(COMPONENTS),
)  # fmt: skip


PAGED = FULL._replace(nodes=16, next_seq=16, node_index=Tail(TOOLS))


def test_the_encoding_of_a_manifest_is_unchanged() -> None:
    data, links = encode_manifest(FULL)
    assert links == [LEAF, FIRST, LEAF, TOOLS]
    assert data.hex() == (
        f"97a46c6561660204c7210100{LEAF.hex()}c0"
        f"94c0c4080000000000000000920001" f"92c7210100{FIRST.hex()}c7210100{LEAF.hex()}"
        "85a6636f6e66696781a56d6f64656ca16d" "af706c7567696e5f7265766973696f6e09"
        f"aa746f6f6c5f7374617465c7210100{TOOLS.hex()}"
        "aa7475726e5f737461746581aa7475726e5f696e64657802"
        "a575736167659196a46d61696ea16d01020000"
    )  # fmt: skip
    assert digest_of(Kind.MANIFEST, data).hex() == (
        "d4a8012bf401cba963215f800662771ebe220dfc9faadfa0aa6bf6f2f1eef3ee"
    )


def test_components_round_trip_by_name() -> None:
    field = decode_manifest(NAME, encode_manifest(FULL)[0]).components
    assert cut_components(field) == COMPONENTS
    assert link_target(COMPONENTS["tool_state"]) == TOOLS
    assert link_target(COMPONENTS["config"]) is None
    assert cut_components(encode_components({})) == {}


@pytest.mark.parametrize(
    "manifest", [Manifest(), FULL, FULL._replace(tips=COMPONENTS["turn_state"]), PAGED]
)
def test_a_manifest_round_trips(manifest: Manifest) -> None:
    assert decode_manifest(NAME, encode_manifest(manifest)[0]) == manifest


def test_a_manifest_links_to_a_long_component_instead_of_holding_it() -> None:
    long = value({f"key {n}": "x" * 30 for n in range(200)})
    assert long.outlined is not None
    data, links = encode_manifest(Manifest(components=encode_components({"config": long})))
    assert links == [long.outlined]
    assert decode_manifest(NAME, data).components.links == links


LINK = msgpack.ExtType(1, bytes((ROLE_LINK,)) + LEAF)
GOOD: list[Any] = [
    "leaf", 1, 1, LINK, None, [None, bytes(4), [0], [LINK]], None,
]  # fmt: skip


def test_the_base_manifest_of_the_damage_cases_is_valid() -> None:
    assert decode_manifest(NAME, msgpack.packb(GOOD)).leaf == LEAF


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        (0, None), (0, 1),
        (1, -1), (1, 2), (1, None), (1, True),
        (2, 0), (2, -1), (2, 1.0),
        (3, None), (3, "leaf"),
        (6, {}), (6, []), (6, 1), (6, {"config": None}), (6, LINK),
        (5, None), (5, []), (5, [None, bytes(4), [0]]), (5, [LINK, bytes(4), [0], [LINK]]),
        (5, [None, bytes(5), [0], [LINK]]), (5, [None, bytes(4), [1], [LINK]]),
        (5, [None, bytes(4), [-1], [LINK]]), (5, [None, bytes(4), [True], [LINK]]),
        (5, [None, bytes(4), [0], []]), (5, [None, bytes(4), [0], [None]]),
        (5, [None, bytes(4), [0], [LEAF]]), (5, [None, "abcd", [0], [LINK]]),
    ],
)  # fmt: skip
def test_an_invalid_manifest_field_is_damage(field: int, broken: Any) -> None:
    fields = list(GOOD)
    fields[field] = broken
    with pytest.raises(CorruptionError, match=NAME.hex()):
        decode_manifest(NAME, msgpack.packb(fields))


@pytest.mark.parametrize("fields", [GOOD[:-1], [*GOOD, None], {}, None, 1])
def test_a_value_without_exactly_the_manifest_fields_is_refused(fields: Any) -> None:
    with pytest.raises(CorruptionError):
        decode_manifest(NAME, msgpack.packb(fields))


def test_every_truncation_is_refused() -> None:
    data = encode_manifest(FULL)[0]
    for length in range(len(data)):
        with pytest.raises((InvalidInputError, CorruptionError)):
            decode_manifest(NAME, data[:length])
