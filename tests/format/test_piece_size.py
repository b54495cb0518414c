"""No object is decoded that takes far more memory than those that splitting makes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import NewObject, Write
from casstore.errors import NotCanonicalError
from casstore.format import closure, splitting
from casstore.format.canonical import encode, list_header, map_header
from casstore.format.digest import Kind, digest_of
from casstore.format.graph import (
    Manifest,
    NodeHeader,
    encode_components,
    encode_field,
    encode_manifest,
    encode_node,
    encode_payload,
)
from casstore.format.limits import MAX_KEY_BYTES, PIECE_MAX_ENTRIES
from casstore.format.piece_size import MAX_LIST_BYTES, check_piece_size
from casstore.format.splitting import Encoded
from casstore.format.tree import Child, encode_branch
from casstore.objects.pieces import PieceReader

EMPTY_LISTS = 1 << 20


def empty_lists(count: int = EMPTY_LISTS) -> bytes:
    return list_header(count) + b"\x90" * count


def node(payload: bytes, node_id: str = "n") -> bytes:
    header = NodeHeader(node_id, 0, 1, 0, None, None, None, None)
    return encode_node(header, Encoded(b"\xc0", []), Encoded(payload, []))[0]


OVERFULL = {
    "a list": (Kind.VALUE, empty_lists()),
    "a map of lists": (Kind.VALUE, map_header(1) + encode("k") + empty_lists()),
    "a map with keys that are lists": (Kind.VALUE, map_header(1) + empty_lists() + b"\xc0"),
    "a map of too many": (
        Kind.VALUE,
        encode({f"{number:09}": None for number in range(20_000)}),
    ),
    "a payload": (Kind.NODE, node(empty_lists())),
    "an id": (Kind.NODE, b"\x9a" + empty_lists() + b"\xc0" * 9),
    "a node of too many fields": (Kind.NODE, empty_lists()),
    "a manifest": (
        Kind.MANIFEST,
        encode_manifest(Manifest(tips=Encoded(empty_lists(), [])))[0],
    ),
    "a branch of a list": (Kind.LIST, empty_lists()),
    "a branch of a map": (Kind.MAP, b"\x95" + b"\xc0" * 4 + empty_lists()),
    "counts of a branch": (Kind.MAP, b"\x95\x01\xc4\x00" + empty_lists() + b"\x90\x90"),
    "chunks": (Kind.CHUNKS, empty_lists()),
    "no msgpack": (Kind.VALUE, b"\x81\xa1" + b"\xc1" * 100_000),
}


@pytest.mark.parametrize("kind_and_data", OVERFULL.values(), ids=OVERFULL)
def test_an_object_full_of_small_containers_is_refused_before_it_is_decoded(
    kind_and_data: tuple[int, bytes],
) -> None:
    kind, data = kind_and_data
    digest = digest_of(kind, data)
    engine = MemoryEngine()
    engine.write(Write(objects=[NewObject(digest, kind, data, ())]))

    def examine() -> object:
        return closure.examine(digest, kind, data, lambda below: None)

    for read in (examine, lambda: PieceReader(engine).get(digest)):
        tracemalloc.start()
        try:
            with pytest.raises(NotCanonicalError, match="not split into pieces"):
                read()
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def longest_values() -> list[Any]:
    entry = "x" * 511
    inner = ["x" * 126] * 3
    return [
        [entry] * 5_000,
        [[entry[:500]] for _ in range(3_000)],
        [inner] * 3_000,
        {f"{number}" + "k" * (MAX_KEY_BYTES - 9): inner for number in range(300)},
        {f"{number}" + "日" * 20_000: entry for number in range(300)},
        b"x" * 511,
        entry,
    ]


@pytest.mark.parametrize("value", longest_values(), ids=range(7))
def test_the_size_check_accepts_the_longest_pieces_that_splitting_makes(value: Any) -> None:
    longest = 0

    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        nonlocal longest
        check_piece_size(kind, data)
        if kind == Kind.LIST or (kind == Kind.VALUE and type(value) is not dict):
            longest = max(longest, len(data))
        return digest_of(kind, data)

    splitting.split(value, emit)
    assert longest <= MAX_LIST_BYTES


def test_a_list_leaf_of_the_longest_entries_just_fits_the_limit() -> None:
    leaf = encode(["x" * 511] * PIECE_MAX_ENTRIES)
    assert len(leaf) <= MAX_LIST_BYTES < len(leaf) + 512


def test_the_size_check_accepts_nodes_and_manifests_with_long_texts() -> None:
    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        return digest_of(kind, data)

    for payload in ("x" * 2_000, ["y"] * 1_000, ["z" * 600] * 1_000):
        encoded = encode_payload(payload, "payload", emit)
        check_piece_size(Kind.NODE, node(encoded.data, "i" * 100_000))
    field = encode_field(["y"] * 500, "turn_state", emit)
    frame = encode_field("f" * 100_000, "current_frame", emit)
    components = encode_components({"current_frame": frame, "turn_state": field})
    manifest = Manifest(components=components)
    check_piece_size(Kind.MANIFEST, encode_manifest(manifest)[0])


def test_a_branch_over_the_longest_keys_passes() -> None:
    keys = [f"{number:03}" + "k" * (MAX_KEY_BYTES - 3) for number in range(PIECE_MAX_ENTRIES)]
    children = [Child(bytes(32), 1 << 31, 1 << 62, key) for key in keys]
    check_piece_size(Kind.MAP, encode_branch(Kind.MAP, 1, children))
