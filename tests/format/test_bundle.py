"""What a bundle is made of, read alone: claims that cannot be are refused before they are used."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.errors import InvalidInputError, NotCanonicalError
from casstore.format import bundle, canonical
from casstore.format.digest import Kind

NAME = bytes(range(32))


@pytest.mark.parametrize("kind", [Kind.BLOB, Kind.ROPE])
def test_an_object_that_is_cut_off_anywhere_is_refused(kind: int) -> None:
    first = bundle.encode_object(Kind.BLOB, NAME, b"first")
    encoded = bundle.encode_object(kind, NAME, b"second")
    assert len(encoded) == bundle.packed_bytes(kind, len(b"second"))
    whole = first + encoded
    name = NAME if kind == Kind.ROPE else None
    expected = bundle.PackedObject(kind, name, b"second", len(first))
    assert bundle.object_at(whole, len(first)) == expected
    for end in range(len(first), len(whole)):
        with pytest.raises(ValueError, match="ends within an object"):
            bundle.object_at(whole[:end], len(first))
        with pytest.raises(ValueError, match="block"):
            list(bundle.iter_objects(whole[:end], 2))
    with pytest.raises(ValueError, match="follow the last object"):
        list(bundle.iter_objects(whole, 1))


def test_a_header_has_its_version_and_the_fields_of_that_version() -> None:
    header = bundle.BundleHeader(bundle.VERSION, "sessions", thin=True)
    assert bundle.decode_header(bundle.encode_header(header)) == header
    later = {"format": bundle.VERSION + 1, "anything": [1]}
    assert bundle.decode_header(canonical.encode(later)).version == bundle.VERSION + 1
    right = {"format": bundle.VERSION, "kind": "sessions", "thin": False}
    wrong: list[Any] = [
        [1],
        {"kind": "sessions", "thin": False},
        {**right, "format": "1"},
        {**right, "kind": 1},
        {**right, "kind": None},
        {**right, "thin": 0},
        {**right, "more": 1},
        {"format": bundle.VERSION, "kind": "sessions"},
    ]
    for value in wrong:
        with pytest.raises(NotCanonicalError):
            bundle.decode_header(canonical.encode(value))


def test_rows_are_lists_that_begin_with_a_name() -> None:
    rows = [["head", 1], ["pin"]]
    block = bundle.encode_rows([canonical.encode(row) for row in rows])
    assert bundle.decode_rows(block, 2) == rows
    for count in (1, 3):
        with pytest.raises(NotCanonicalError):
            bundle.decode_rows(block, count)
    with pytest.raises(NotCanonicalError):
        bundle.decode_rows(canonical.encode({"a": 1}), 1)
    for row in ([], [1, "head"], [None], "head", {"head": 1}, 7, None):
        with pytest.raises(InvalidInputError, match="name of its kind"):
            bundle.decode_rows(canonical.encode([["head"], row]), 2)


def test_a_trailer_is_three_numbers_and_a_digest() -> None:
    totals = bundle.decode_totals(canonical.encode([1, 2, 0, NAME]))
    assert bundle.decode_totals(bundle.encode_totals(totals)) == totals
    wrong: list[Any] = [
        {"a": 1},
        [1, 2, 3],
        [1, 2, 3, NAME, 4],
        [-1, 2, 3, NAME],
        [1, 2, -3, NAME],
        [1, 2.0, 3, NAME],
        [True, 2, 3, NAME],
        [1, 2, 3, "digest"],
    ]
    for value in wrong:
        with pytest.raises(NotCanonicalError):
            bundle.decode_totals(canonical.encode(value))


def test_a_block_header_with_an_invalid_type_or_length_is_refused() -> None:
    block = bundle.encode_block(40, bundle.ROWS, 0, 3, 10, b"0123456789")
    head, payload = block[: bundle.BLOCK_HEADER_BYTES], block[bundle.BLOCK_HEADER_BYTES :]
    read = bundle.decode_block_header(head)
    assert read[:5] == (bundle.ROWS, 0, 3, 10, 10)
    assert bundle.is_proven(40, head, payload)
    assert not bundle.is_proven(41, head, payload)
    assert not bundle.is_proven(40, head, payload[:-1])
    limit = bundle.MAX_BLOCK_BYTES
    for type_, raw_bytes, sound in (
        (bundle.HEADER, 10, True),
        (bundle.TRAILER, limit, True),
        (bundle.HEADER - 1, 10, False),
        (bundle.TRAILER + 1, 10, False),
        (bundle.ROWS, limit + 1, False),
        (bundle.ROWS, 9, False),
    ):
        claimed = bundle.encode_block(0, type_, 0, 3, raw_bytes, b"0123456789")
        if sound:
            bundle.decode_block_header(claimed[: bundle.BLOCK_HEADER_BYTES])
        else:
            with pytest.raises(ValueError, match="block"):
                bundle.decode_block_header(claimed[: bundle.BLOCK_HEADER_BYTES])
