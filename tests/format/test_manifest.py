"""Manifests as bytes: one spelling, all of it checked on the way back."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import ROLE_LINK
from casstore.format.hashing import Kind, digest_of
from casstore.format.manifest import NOTHING, Manifest, decode_manifest, encode_manifest
from casstore.format.manifest import spell_field as spell_payload
from casstore.format.node_index import Tail
from casstore.format.splitting import Spelled
from casstore.objects.pieces import PieceWriter

NAME = bytes(32)
LEAF = bytes(range(32))
TOOLS = bytes(range(32, 64))
FIRST = bytes(range(64, 96))


def value(given: Any) -> Spelled:
    return spell_payload(given, "value", PieceWriter().emit)


FULL = Manifest(
    "leaf", 2, 4, 9, "frame", LEAF, FIRST, TOOLS, None, TOOLS,
    value({"turn_index": 2}), value([{"frame_id": "frame"}]), value({"model": "m"}),
    value([["main", "m", 1, 2, 0, 0]]), NOTHING, Tail(None, bytes(8), (0, 1), (FIRST, LEAF)),
)  # fmt: skip


PAGED = FULL._replace(nodes=16, next_seq=16, node_index=Tail(TOOLS))


def test_a_manifest_is_spelled_as_it_always_was() -> None:
    data, links = encode_manifest(FULL)
    assert links == [LEAF, FIRST, TOOLS, TOOLS, FIRST, LEAF]
    assert data.hex() == (
        "dc0010a46c656166020409a56672616d65"
        f"c7210100{LEAF.hex()}c7210100{FIRST.hex()}c7210100{TOOLS.hex()}c0c7210100{TOOLS.hex()}"
        "81aa7475726e5f696e64657802" "9181a86672616d655f6964a56672616d65" "81a56d6f64656ca16d"
        "9196a46d61696ea16d01020000" "c0"
        f"94c0c4080000000000000000920001" f"92c7210100{FIRST.hex()}c7210100{LEAF.hex()}"
    )  # fmt: skip
    assert digest_of(Kind.MANIFEST, data).hex() == (
        "5f36f13662f17dc5927f3fab7834aa8feb07d4740c4f032bb50a16cb086de610"
    )


@pytest.mark.parametrize("manifest", [Manifest(), FULL, FULL._replace(tips=FULL.config), PAGED])
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert decode_manifest(NAME, encode_manifest(manifest)[0]) == manifest


def test_a_long_value_stays_where_it_is() -> None:
    long = value({f"key {n}": "x" * 30 for n in range(200)})
    assert long.outlined is not None
    data, links = encode_manifest(Manifest(config=long))
    assert links == [long.outlined]
    assert decode_manifest(NAME, data).config.links == links


LINK = msgpack.ExtType(1, bytes((ROLE_LINK,)) + LEAF)
GOOD: list[Any] = [
    "leaf", 1, 1, None, None, LINK, *[None] * 9, [None, bytes(4), [0], [LINK]],
]  # fmt: skip


def test_the_fields_that_are_broken_below_are_sound_unbroken() -> None:
    assert decode_manifest(NAME, msgpack.packb(GOOD)).leaf == LEAF


@pytest.mark.parametrize(
    ("field", "broken"),
    [
        (0, None), (0, 1),
        (1, -1), (1, 2), (1, None), (1, True),
        (2, 0), (2, -1), (2, 1.0),
        (3, "1"), (3, 1.5), (4, 1),
        (5, None), (5, "leaf"), (6, "first"), (7, "tools"), (8, 1), (9, []),
        (15, None), (15, []), (15, [None, bytes(4), [0]]), (15, [LINK, bytes(4), [0], [LINK]]),
        (15, [None, bytes(5), [0], [LINK]]), (15, [None, bytes(4), [1], [LINK]]),
        (15, [None, bytes(4), [-1], [LINK]]), (15, [None, bytes(4), [True], [LINK]]),
        (15, [None, bytes(4), [0], []]), (15, [None, bytes(4), [0], [None]]),
        (15, [None, bytes(4), [0], [LEAF]]), (15, [None, "abcd", [0], [LINK]]),
    ],
)  # fmt: skip
def test_a_field_that_breaks_a_rule_is_damage(field: int, broken: Any) -> None:
    fields = list(GOOD)
    fields[field] = broken
    with pytest.raises(CorruptionError, match=NAME.hex()):
        decode_manifest(NAME, msgpack.packb(fields))


def test_without_a_leaf_there_is_no_first_message_on_its_path() -> None:
    fields = [None, *GOOD[1:5], None, LINK, *GOOD[7:]]
    with pytest.raises(CorruptionError):
        decode_manifest(NAME, msgpack.packb(fields))


@pytest.mark.parametrize("fields", [GOOD[:-1], [*GOOD, None], {}, None, 1])
def test_anything_else_is_no_manifest(fields: Any) -> None:
    with pytest.raises(CorruptionError):
        decode_manifest(NAME, msgpack.packb(fields))


def test_every_truncation_is_refused() -> None:
    data = encode_manifest(FULL)[0]
    for length in range(len(data)):
        with pytest.raises((InvalidInputError, CorruptionError)):
            decode_manifest(NAME, data[:length])
