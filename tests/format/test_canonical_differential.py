"""A second encoder, written by other people in another language, gives the same bytes (P4)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.format.canonical import LINK_EXT_TYPE, ROLE_LINK, Link, decode, encode
from casstore.format.digest import Digest

PROFILE = settings(deadline=None, max_examples=100, database=None)

_ORACLE = msgspec.msgpack.Encoder(order="deterministic")


def foreign(value: Any) -> Any:
    """The value in the other encoder's terms: links become its extension type."""
    if type(value) is Link:
        return msgspec.msgpack.Ext(LINK_EXT_TYPE, bytes((ROLE_LINK,)) + value.digest)
    if type(value) is list:
        return [foreign(item) for item in value]
    if type(value) is dict:
        return {key: foreign(item) for key, item in value.items()}
    return value


def native(value: Any) -> Any:
    """The way back."""
    if type(value) is msgspec.msgpack.Ext:
        assert value.code == LINK_EXT_TYPE
        body = bytes(value.data)
        assert body[0] == ROLE_LINK
        return Link(Digest(body[1:]))
    if type(value) is list:
        return [native(item) for item in value]
    if type(value) is dict:
        return {key: native(item) for key, item in value.items()}
    return value


BOUNDARIES = st.sampled_from(
    [sign * (2**bits) + off for bits in (5, 7, 8, 15, 16, 31, 32, 63) for sign in (1, -1)
     for off in (-1, 0, 1) if -(2**63) <= sign * (2**bits) + off < 2**64]
)  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | BOUNDARIES
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.binary(min_size=32, max_size=32).map(lambda raw: Link(Digest(raw)))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=18) | st.dictionaries(st.text(max_size=5), inner, max_size=18)
    ),
    max_leaves=30,
)


@PROFILE
@given(VALUES)
def test_both_encoders_give_the_same_bytes(value: Any) -> None:
    assert _ORACLE.encode(foreign(value)) == encode(value)


@PROFILE
@given(VALUES)
def test_each_encoder_reads_the_output_of_the_other(value: Any) -> None:
    ours = decode(_ORACLE.encode(foreign(value)))
    theirs = native(msgspec.msgpack.decode(encode(value)))
    # Both now have their keys in canonical order, so repr compares types and signs too.
    assert repr(ours) == repr(theirs)
    assert ours == value


@pytest.mark.parametrize(
    "value",
    [
        "x" * 31, "x" * 32, "x" * 255, "x" * 256, "x" * 65_535, "x" * 65_536,
        b"x" * 255, b"x" * 256, b"x" * 65_535, b"x" * 65_536,
        [0] * 15, [0] * 16, [0] * 65_535, [0] * 65_536,
        {f"{n:x}": n for n in range(15)}, {f"{n:x}": n for n in range(16)},
        {f"{n:x}": n for n in range(65_535)}, {f"{n:x}": n for n in range(65_536)},
        {"\uffff": 1, "\U00010000": 2, "\u00e9": 3, "e\u0301": 4, "": 5, "\x00": 6},
        5e-324, -0.0, 1.7976931348623157e308,
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_both_encoders_agree_at_every_boundary_between_header_sizes(value: Any) -> None:
    encoded = encode(value)
    assert _ORACLE.encode(value) == encoded
    assert msgspec.msgpack.decode(encoded) == decode(encoded) == value
