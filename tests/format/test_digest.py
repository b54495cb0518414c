"""Names: official BLAKE3 vectors, one context per kind, and objects checked against names."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.errors import CorruptionError, InvalidInputError
from casstore.format import tree
from casstore.format.canonical import encode
from casstore.format.digest import (
    DIGEST_BYTES,
    KIND_NAMES,
    BlobHasher,
    Digest,
    Kind,
    check_object,
    digest_of,
    plain_hash,
)

PROFILE = settings(deadline=None, max_examples=100, database=None)

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
ABC = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"


@pytest.mark.parametrize(("content", "name"), [(b"", EMPTY), (b"abc", ABC)])
def test_a_blob_has_the_name_that_b3sum_prints(content: bytes, name: str) -> None:
    assert Digest.of_blob(content).hex() == name
    assert digest_of(Kind.BLOB, content).hex() == name
    assert plain_hash(content).hex() == name


def test_a_short_hash_is_a_prefix_of_the_full_hash() -> None:
    assert plain_hash(b"abc", 1) == bytes.fromhex(ABC)[:1]
    assert plain_hash(b"abc", 8) == bytes.fromhex(ABC)[:8]


@pytest.mark.parametrize("size", [0, 1, 31, 33, 64])
def test_a_digest_has_32_bytes(size: int) -> None:
    assert len(Digest(bytes(DIGEST_BYTES))) == DIGEST_BYTES == 32
    with pytest.raises(InvalidInputError, match=f"got {size}"):
        Digest(bytes(size))


def test_a_digest_prints_as_hexadecimal() -> None:
    digest = Digest.from_hex(EMPTY)
    assert str(digest) == EMPTY
    assert f"{digest}" == EMPTY
    assert repr(digest) == f"Digest('{EMPTY}')"


def test_a_digest_compares_and_hashes_as_its_bytes() -> None:
    raw = bytes(range(32))
    digest = Digest(raw)
    assert digest == raw
    assert hash(digest) == hash(raw)
    assert {raw: 1}[digest] == 1
    assert digest == Digest(raw)
    assert digest != Digest(bytes(32))
    assert Digest(bytes(32)) < digest


def test_a_digest_accepts_no_new_attributes() -> None:
    with pytest.raises(AttributeError):
        Digest(bytes(32)).extra = 1  # type: ignore[attr-defined]


def test_hexadecimal_is_read_in_both_cases() -> None:
    assert Digest.from_hex(ABC) == Digest.from_hex(ABC.upper()) == Digest(bytes.fromhex(ABC))


@pytest.mark.parametrize(
    "text",
    ["", "af", EMPTY[:-1], EMPTY[:-2], EMPTY + "00", "g" * 64, "0x" + EMPTY[2:], EMPTY + "0"],
)
def test_anything_but_64_hexadecimal_digits_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInputError, match="not a digest") as caught:
        Digest.from_hex(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", [" " + EMPTY, EMPTY + "\n", EMPTY[:2] + " " + EMPTY[2:]])
def test_white_space_is_not_a_hexadecimal_digit(text: str) -> None:
    with pytest.raises(InvalidInputError):
        Digest.from_hex(text)


@PROFILE
@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_a_blob_hashed_in_parts_has_the_digest_of_its_whole_content(parts: list[bytes]) -> None:
    hasher = BlobHasher()
    for part in parts:
        hasher.update(part)
    assert hasher.digest() == Digest.of_blob(b"".join(parts))
    assert type(hasher.digest()) is Digest


KINDS = sorted(KIND_NAMES)


def test_the_numbers_of_the_kinds_are_frozen() -> None:
    names = ["blob", "rope", "chunks", "value", "list", "map", "node", "manifest", "index"]
    assert dict(enumerate(names)) == KIND_NAMES
    assert [getattr(Kind, name.upper()) for name in names] == list(range(9))


@pytest.mark.parametrize(("left", "right"), list(combinations(KINDS, 2)))
@pytest.mark.parametrize("data", [b"", b"\xc0", b"abc", bytes(2000)], ids=len)
def test_the_same_bytes_have_a_different_digest_in_every_kind(
    left: int, right: int, data: bytes
) -> None:
    assert digest_of(left, data) != digest_of(right, data)


def test_the_bytes_of_a_value_stored_as_a_blob_have_a_different_digest() -> None:
    data = encode({"some": ["value"]})
    assert digest_of(Kind.VALUE, data) != Digest.of_blob(data)


def test_hashing_one_object_does_not_affect_the_next_digest() -> None:
    first = digest_of(Kind.VALUE, b"a")
    digest_of(Kind.VALUE, b"b")
    assert digest_of(Kind.VALUE, b"a") == first


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != Kind.ROPE])
def test_check_object_accepts_an_object_only_with_its_own_digest_and_kind(kind: int) -> None:
    data = b"some bytes"
    digest = digest_of(kind, data)
    check_object(digest, kind, data)
    with pytest.raises(CorruptionError, match=digest.hex()):
        check_object(digest, kind, data + b"\x00")
    with pytest.raises(CorruptionError, match=digest.hex()):
        check_object(digest, kind, b"")
    for other in KINDS:
        if other != kind:
            with pytest.raises(CorruptionError):
                check_object(digest, other, data)


def test_check_object_verifies_a_rope_by_its_seal() -> None:
    body = tree.encode_branch(
        Kind.CHUNKS,
        1,
        [tree.Child(Digest.of_blob(b"x"), 1, 1, ""), tree.Child(bytes(32), 2, 2, "")],
    )
    sealed = tree.seal_rope(body)
    name = Digest.of_blob(b"whatever its chunks hold")
    assert sealed == digest_of(Kind.ROPE, body) + body
    assert tree.open_rope(sealed) == body
    check_object(name, Kind.ROPE, sealed)
    for at in range(len(sealed)):
        damaged = bytearray(sealed)
        damaged[at] ^= 1
        with pytest.raises(CorruptionError, match=r"\(rope\)"):
            check_object(name, Kind.ROPE, bytes(damaged))


@pytest.mark.parametrize("size", [0, 1, 31, 32])
def test_a_rope_shorter_than_its_seal_is_refused(size: int) -> None:
    with pytest.raises(CorruptionError):
        check_object(bytes(32), Kind.ROPE, bytes(size))


@pytest.mark.parametrize("kind", [9, 99, 126, 127, -1])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(CorruptionError, match=f"\\({kind}\\)"):
        check_object(plain_hash(b"x"), kind, b"x")
