"""The canonical encoding: what is accepted, what is refused, where the error points (P4, P7)."""

from __future__ import annotations

import enum
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.errors import InvalidInputError, InvalidValueError, LimitError, NotCanonicalError
from casstore.errors import render_path as encoded_path
from casstore.format import canonical
from casstore.format.canonical import Link, decode, encode, pack_checked
from casstore.format.digest import Digest
from casstore.format.limits import MAX_DEPTH, MAX_ENTRIES, MAX_KEY_BYTES

PROFILE = settings(deadline=None, max_examples=120, database=None)
MANY = settings(deadline=None, max_examples=200, database=None)

SOME_DIGEST = Digest(bytes(range(32)))


def same(left: Any, right: Any) -> bool:
    """Equality that distinguishes 1, 1.0 and True, and -0.0 and 0.0, at every depth."""
    return type(left) is type(right) and repr(left) == repr(right)


def round_trips(value: Any) -> bytes:
    encoded = encode(value)
    assert same(decode(encoded), value)
    return encoded


# --- integers -------------------------------------------------------------------------------

INTEGERS = [
    (0, "00"),
    (1, "01"),
    (127, "7f"),
    (128, "cc80"),
    (255, "ccff"),
    (256, "cd0100"),
    (65_535, "cdffff"),
    (65_536, "ce00010000"),
    (2**32 - 1, "ceffffffff"),
    (2**32, "cf0000000100000000"),
    (2**63 - 1, "cf7fffffffffffffff"),
    (2**63, "cf8000000000000000"),
    (2**64 - 1, "cfffffffffffffffff"),
    (-1, "ff"),
    (-32, "e0"),
    (-33, "d0df"),
    (-128, "d080"),
    (-129, "d1ff7f"),
    (-32_768, "d18000"),
    (-32_769, "d2ffff7fff"),
    (-(2**31), "d280000000"),
    (-(2**31) - 1, "d3ffffffff7fffffff"),
    (-(2**63), "d38000000000000000"),
]


@pytest.mark.parametrize(("number", "spelling"), INTEGERS)
def test_an_integer_takes_its_shortest_form(number: int, spelling: str) -> None:
    assert round_trips(number).hex() == spelling


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**100, -(10**100)])
def test_an_integer_out_of_range_is_refused_with_its_path(number: int) -> None:
    with pytest.raises(InvalidValueError, match="integer is outside") as caught:
        encode({"a": [0, number]})
    assert caught.value.path == ("a", 1)
    assert type(caught.value) is InvalidValueError


@pytest.mark.parametrize(
    "padded",
    [
        "cc00", "cc7f", "cd0000", "cd007f", "cd00ff", "ce00000000", "ce0000ffff",
        "cf0000000000000000", "cf00000000ffffffff",
        "d000", "d07f", "d0ff", "d0e0", "d10000", "d1ff80", "d1ffe0", "d10080", "d17fff",
        "d200000000", "d2ffff8000", "d2ffffffff", "d27fffffff",
        "d30000000000000000", "d3ffffffff80000000", "d3ffffffffffffffff", "d37fffffffffffffff",
    ],
)  # fmt: skip
def test_an_integer_longer_than_its_shortest_form_is_refused(padded: str) -> None:
    with pytest.raises(NotCanonicalError, match="canonical encoding"):
        decode(bytes.fromhex(padded))


# --- floats ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "spelling"),
    [
        (0.0, "cb0000000000000000"),
        (-0.0, "cb8000000000000000"),
        (1.0, "cb3ff0000000000000"),
        (1.5, "cb3ff8000000000000"),
        (5e-324, "cb0000000000000001"),
        (-5e-324, "cb8000000000000001"),
        (2.2250738585072009e-308, "cb000fffffffffffff"),
        (1.7976931348623157e308, "cb7fefffffffffffff"),
        (-1.7976931348623157e308, "cbffefffffffffffff"),
    ],
)
def test_a_float_is_encoded_in_64_bits_without_loss(number: float, spelling: str) -> None:
    assert round_trips(number).hex() == spelling


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinities_are_not_encoded(number: float) -> None:
    with pytest.raises(InvalidValueError, match="no canonical form") as caught:
        encode([{"x": number}])
    assert encoded_path(caught.value.path) == "$[0].x"


@pytest.mark.parametrize(
    "spelling",
    [
        "cb7ff0000000000000",
        "cbfff0000000000000",
        "cb7ff8000000000000",
        "cbfff8000000000000",
        "cb7fffffffffffffff",
        "cb7ff0000000000001",
        "cbfff4000000000000",
    ],
)
@pytest.mark.parametrize("around", ["", "91", "81a161"])
def test_nan_and_infinities_are_not_decoded(spelling: str, around: str) -> None:
    with pytest.raises(InvalidInputError):
        decode(bytes.fromhex(around + spelling))


def test_the_error_for_a_decoded_nan_points_at_it() -> None:
    with pytest.raises(InvalidValueError) as caught:
        decode(bytes.fromhex("81a16192c0cb7ff8000000000000"))
    assert encoded_path(caught.value.path) == "$.a[1]"


@pytest.mark.parametrize("spelling", ["ca00000000", "ca3f800000", "ca7f800000", "ca80000000"])
def test_a_32_bit_float_is_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(spelling))


def test_one_and_one_point_zero_and_true_are_three_values() -> None:
    spellings = {encode(1), encode(1.0), encode(True)}
    assert len(spellings) == 3
    assert [type(decode(spelling)) for spelling in (encode(1), encode(1.0), encode(True))] == [
        int,
        float,
        bool,
    ]


def test_zero_and_minus_zero_and_false_and_none_are_different_values() -> None:
    values: list[Any] = [0, 0.0, -0.0, False, None, "", b"", [], {}]
    assert len({encode(value) for value in values}) == 9


# --- strings and bytes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (0, "a0"),
        (1, "a1"),
        (31, "bf"),
        (32, "d920"),
        (255, "d9ff"),
        (256, "da0100"),
        (65_535, "daffff"),
        (65_536, "db00010000"),
    ],
)
def test_a_string_has_the_shortest_header(size: int, header: str) -> None:
    assert round_trips("x" * size) == bytes.fromhex(header) + b"x" * size


@pytest.mark.parametrize(
    ("size", "header"),
    [
        (0, "c400"),
        (255, "c4ff"),
        (256, "c50100"),
        (65_535, "c5ffff"),
        (65_536, "c600010000"),
    ],
)
def test_bytes_have_the_shortest_header(size: int, header: str) -> None:
    assert round_trips(b"x" * size) == bytes.fromhex(header) + b"x" * size


def test_strings_are_not_normalised() -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    assert encode(composed) != encode(decomposed)
    assert decode(encode(composed)) == composed
    assert decode(encode(decomposed)) == decomposed
    assert len(decode(encode({composed: 1, decomposed: 2}))) == 2


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\U0010ffff", "\uffff", "\x00", "\ufeffbom", "a\x00b"]
)
def test_every_character_except_surrogates_is_stored(text: str) -> None:
    assert round_trips(text)[1:] == text.encode()


@pytest.mark.parametrize("text", ["\ud800", "x\udfff", "abc\udc80", "\ud83d\ude00"])
def test_a_lone_surrogate_is_refused_with_its_path(text: str) -> None:
    with pytest.raises(InvalidValueError, match="lone surrogate") as caught:
        encode({"some key": [text]})
    assert encoded_path(caught.value.path) == "$['some key'][0]"


def test_a_lone_surrogate_in_a_key_is_refused_at_its_map() -> None:
    with pytest.raises(InvalidValueError, match="lone surrogate") as caught:
        encode([{"\ud800": 1}])
    assert caught.value.path == (0,)


@pytest.mark.parametrize(
    "spelling",
    [
        "a1ff",  # never a first byte
        "a180",  # a continuation byte alone
        "a2c080",  # overlong NUL
        "a3eda080",  # an encoded surrogate
        "a4f4908080",  # beyond U+10FFFF
        "a1c3",  # cut short
        "81a1ffc0",  # in a key
    ],
)
def test_invalid_utf8_is_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(spelling))


@pytest.mark.parametrize(
    "spelling",
    [
        "d900", "d90161", "d91f" + "61" * 31, "da000161", "da00ff" + "61" * 255, "db0000000161",
        "db0000ffff" + "61" * 65_535,
        "c500", "c5000161", "c500ff" + "61" * 255, "c60000000161", "c60000ffff" + "61" * 65_535,
    ],
    ids=lambda spelling: spelling[:12],
)  # fmt: skip
def test_a_long_header_for_a_short_string_or_bytes_is_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(spelling))


# --- lists and maps -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "header"),
    [
        (0, "90"),
        (15, "9f"),
        (16, "dc0010"),
        (65_535, "dcffff"),
        (65_536, "dd00010000"),
    ],
)
def test_a_list_has_the_shortest_header(count: int, header: str) -> None:
    assert round_trips([None] * count) == bytes.fromhex(header) + b"\xc0" * count
    assert canonical.list_header(count).hex() == header


@pytest.mark.parametrize(
    ("count", "header"),
    [
        (0, "80"),
        (15, "8f"),
        (16, "de0010"),
        (65_535, "deffff"),
        (65_536, "df00010000"),
    ],
)
def test_a_map_has_the_shortest_header(count: int, header: str) -> None:
    encoded = round_trips({f"{number:05}": None for number in range(count)})
    assert encoded.startswith(bytes.fromhex(header))
    assert len(encoded) == len(header) // 2 + 7 * count
    assert canonical.map_header(count).hex() == header


def test_list_and_map_headers_hold_the_largest_count_and_refuse_more() -> None:
    assert canonical.list_header(MAX_ENTRIES) == b"\xdd\xff\xff\xff\xff"
    assert canonical.map_header(MAX_ENTRIES) == b"\xdf\xff\xff\xff\xff"
    with pytest.raises(LimitError):
        canonical.list_header(MAX_ENTRIES + 1)
    with pytest.raises(LimitError):
        canonical.map_header(MAX_ENTRIES + 1)


@pytest.mark.parametrize(
    "spelling",
    [
        "dc0000", "dc0001c0", "dc000f" + "c0" * 15, "dd00000000", "dd00000001c0",
        "dd0000ffff" + "c0" * 65_535,
        "de0000", "de0001a161c0", "df00000000", "df00000001a161c0",
    ],
    ids=lambda spelling: spelling[:12],
)  # fmt: skip
def test_a_long_header_for_a_short_list_or_map_is_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(spelling))


def test_keys_are_ordered_by_their_utf8_bytes() -> None:
    # UTF-16 order would put the astral key before U+FFFF; length-first order "b" before "aa".
    keys = ["", "a", "aa", "b", "\x7f", "\u0080", "\u00e9", "\u0800", "\uffff", "\U00010000"]
    assert keys == sorted(keys, key=str.encode)
    encoded = encode(dict.fromkeys(reversed(keys), 0))
    assert encoded == encode(dict.fromkeys(keys, 0))
    assert list(decode(encoded)) == keys


def test_equal_maps_have_equal_bytes_whatever_their_insertion_order() -> None:
    assert encode({"b": {"y": 1, "x": 2}, "a": 0}) == encode({"a": 0, "b": {"x": 2, "y": 1}})


@pytest.mark.parametrize(
    "spelling",
    [
        "82a162c0a161c0",  # b, a
        "82a26161c0a161c0",  # aa, a
        "82a161c0a0c0",  # a, the empty key
        "82a4f0908080c0a3efbfbfc0",  # U+10000, U+FFFF
        "9182a162c0a161c0",
        "81a16182a162c0a161c0",
        "83a161c0a163c0a162c0",
    ],
)
def test_unsorted_keys_are_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError, match="sorted by their UTF-8 bytes"):
        decode(bytes.fromhex(spelling))


@pytest.mark.parametrize(
    "spelling",
    [
        "82a161c0a161c0",
        "82a16101a16102",
        "82a0c0a0c0",
        "9182a161c0a161c0",
        "83a161c0a161c0a162c0",
    ],
)
def test_repeated_keys_are_refused(spelling: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(spelling))


@pytest.mark.parametrize(
    "key",
    ["c40161", "c400", "01", "ff", "c0", "c2", "cb3ff0000000000000", "90", "80"],
)
def test_a_key_that_is_not_a_string_is_refused(key: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(f"81{key}c0"))
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(f"9181a16181{key}c0"))


def test_a_bytes_key_after_a_string_key_is_refused() -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex("82a161c0c40162c0"))
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex("82c40161c0c40162c0"))


def test_a_link_as_a_key_is_refused() -> None:
    with pytest.raises(NotCanonicalError):
        decode(b"\x81" + canonical.link_bytes(canonical.ROLE_LINK, SOME_DIGEST) + b"\xc0")


class Named(str):
    """A str that is not quite one."""


@pytest.mark.parametrize("key", [1, 1.5, None, True, b"a", ("a",), Named("a")], ids=repr)
def test_a_map_with_a_key_that_is_not_a_str_is_not_encoded(key: Any) -> None:
    with pytest.raises(InvalidValueError, match="a map key must be a str") as caught:
        encode({"outer": [{key: 1}]})
    assert caught.value.path == ("outer", 0)
    assert type(key).__name__ in caught.value.reason


@pytest.mark.parametrize("key", [1, None, b"a", Named("b")], ids=repr)
def test_the_error_for_mixed_key_types_names_the_invalid_type(key: Any) -> None:
    with pytest.raises(InvalidValueError, match=f"got {type(key).__name__}") as caught:
        encode({"a": 1, key: 2, "c": 3})
    assert caught.value.path == ()


# --- invalid values -------------------------------------------------------------------------


class Colour(enum.IntEnum):
    """An int that is not quite one."""

    RED = 1


class Word(enum.StrEnum):
    """A str that is not quite one."""

    HELLO = "hello"


class Pair(NamedTuple):
    """A tuple that is not quite one."""

    left: int
    right: int


class Number(int):
    """An int that is not quite one."""


class Real(float):
    """A float that is not quite one."""


class Items(list[int]):
    """A list that is not quite one."""


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Word.HELLO,
        Named("a"),
        Number(1),
        Real(1.5),
        Items([1]),
        Pair(1, 2),
        OrderedDict(a=1),
        SOME_DIGEST,
        bytearray(b"a"),
        memoryview(b"a"),
        {1},
        frozenset("a"),
        1j,
        Decimal(1),
        object(),
        ...,
        int,
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_or_another_type_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="cannot be stored") as caught:
        encode({"a": [None, {"b c": value}]})
    assert encoded_path(caught.value.path) == "$.a[1]['b c']"
    assert str(caught.value).endswith("at $.a[1]['b c']")
    assert type(value).__qualname__ in caught.value.reason


def test_bool_is_stored_though_it_is_a_subclass_of_int() -> None:
    assert encode([True, False]).hex() == "92c3c2"
    assert decode(encode([True, False])) == [True, False]


def test_a_tuple_is_stored_as_a_list() -> None:
    assert encode((1, (2, "x"))) == encode([1, [2, "x"]])
    assert same(decode(encode((1, (2,)))), [1, [2]])


def test_none_is_one_byte() -> None:
    assert encode(None) == b"\xc0"


# --- links ----------------------------------------------------------------------------------


def test_a_link_comes_back_as_a_link() -> None:
    link = Link(SOME_DIGEST)
    encoded = encode({"to": [link]})
    assert encoded.hex() == "81a2746f91" + "c7210100" + SOME_DIGEST.hex()
    back = decode(encoded)["to"][0]
    assert type(back) is Link
    assert type(back.digest) is Digest
    assert back == link


def test_a_link_with_a_short_digest_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        encode(Link(b"short"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "role", [canonical.ROLE_TEXT, canonical.ROLE_BYTES, canonical.ROLE_PART, canonical.ROLE_ITEM]
)
def test_an_outlined_part_is_resolved_by_the_caller_or_refused(role: int) -> None:
    if role == canonical.ROLE_ITEM:
        encoded = canonical.item_link_bytes(300, SOME_DIGEST)
    else:
        encoded = canonical.link_bytes(role, SOME_DIGEST)
    data = b"\x92\x01" + encoded
    with pytest.raises(NotCanonicalError, match="stored in another object"):
        decode(data)
    assert decode(data, lambda found, digest: (found, digest)) == [1, (role, SOME_DIGEST)]
    assert canonical.inspect(data)[1] == [(role, SOME_DIGEST)]
    assert canonical.links_in(data) == [SOME_DIGEST]


def test_links_are_listed_in_order_with_repetitions() -> None:
    first, second = Digest(b"\xc7" * 32), Digest(b"\x01" * 32)
    value = {"a": Link(second), "b": [Link(first), Link(second)], "\u00c7": b"\xc7"}
    assert canonical.links_in(encode(value)) == [second, first, second]
    assert canonical.links_in(encode("no link, but \u01c7")) == []


def test_item_size_returns_the_encoded_size_of_inline_and_outlined_items() -> None:
    assert canonical.item_size(canonical.item_link_bytes(511, SOME_DIGEST)) == 511
    assert canonical.item_size(encode("abc")) == 4
    assert canonical.item_size(encode(Link(SOME_DIGEST))) == 36


DIGEST_HEX = SOME_DIGEST.hex()


@pytest.mark.parametrize(
    "spelling",
    [
        "d6ff00000000",  # a timestamp in 32 bits
        "d7ff0000000000000000",  # in 64
        "c70cff000000000000000000000000",  # in 96
        "d6ff7fffffff",
        "c72100" + "00" + DIGEST_HEX,  # type 0
        "c72102" + "00" + DIGEST_HEX,  # type 2
        "c7217f" + "00" + DIGEST_HEX,
        "c72180" + "00" + DIGEST_HEX,  # type -128
        "c721ff" + "00" + DIGEST_HEX,  # type -1, but as long as a link
        "c70001",  # empty
        "d40100",  # a role and no digest
        "d50100ff",
        "d6010011ff00",
        "d70100" + "00" * 7,
        "d80100" + "00" * 15,
        "c72001" + DIGEST_HEX,  # no role
        "c72001" + "00" + DIGEST_HEX[2:],  # a short digest
        "c72201" + "00" + DIGEST_HEX + "00",  # a long digest
        "c72101" + "04" + DIGEST_HEX,  # an item without its size
        "c72301" + "00" + "0100" + DIGEST_HEX,  # a size where none belongs
        "c72301" + "03" + "0100" + DIGEST_HEX,
        "c72101" + "05" + DIGEST_HEX,  # no such role
        "c72101" + "ff" + DIGEST_HEX,
        "c80021" + "01" + "00" + DIGEST_HEX,  # ext16
        "c900000021" + "01" + "00" + DIGEST_HEX,  # ext32
    ],
    ids=lambda spelling: spelling[:12],
)
@pytest.mark.parametrize("around", ["", "92c0", "81a161"])
def test_any_other_extension_is_refused(spelling: str, around: str) -> None:
    with pytest.raises(NotCanonicalError):
        decode(bytes.fromhex(around + spelling), lambda role, digest: None)


# --- depth and size -------------------------------------------------------------------------


def nested(depth: int, inner: Any, *, maps: bool = False) -> Any:
    value = inner
    for _ in range(depth):
        value = {"k": value} if maps else [value]
    return value


@pytest.mark.parametrize("maps", [False, True])
def test_depth_64_is_stored_and_65_refused(maps: bool) -> None:
    assert MAX_DEPTH == 64
    round_trips(nested(MAX_DEPTH, None, maps=maps))
    with pytest.raises(LimitError, match="deeper than 64") as caught:
        encode(nested(MAX_DEPTH + 1, None, maps=maps))
    assert caught.value.path == ("k" if maps else 0,) * MAX_DEPTH


@pytest.mark.parametrize("maps", [False, True])
def test_depth_65_is_not_decoded(maps: bool) -> None:
    level = b"\x81\xa1k" if maps else b"\x91"
    assert same(decode(level * 64 + b"\xc0"), nested(64, None, maps=maps))
    with pytest.raises(LimitError, match="deeper than 64") as caught:
        decode(level * 65 + b"\xc0")
    assert caught.value.path == ("k" if maps else 0,) * 64


@pytest.mark.parametrize("width", [16, 65_536])
@pytest.mark.parametrize("maps", [False, True])
def test_depth_is_counted_through_wide_containers_too(width: int, maps: bool) -> None:
    # Their headers are other bytes than those of short lists and maps; in each, the
    # last entry goes one level down. One is wide, or all are if that is cheap.
    def wrapped(depth: int) -> bytes:
        data = b"\xc0"
        for level in range(depth):
            count = width if width == 16 or not level else 16
            if maps:
                keys = b"".join(encode(f"{number:05}") + b"\xc0" for number in range(count - 1))
                data = canonical.map_header(count) + keys + encode("z") + data
            else:
                data = canonical.list_header(count) + b"\xc0" * (count - 1) + data
        return data

    assert encode(decode(wrapped(64))) == wrapped(64)
    with pytest.raises(LimitError, match="deeper than 64"):
        decode(wrapped(65))


def test_empty_containers_count_as_a_level() -> None:
    round_trips(nested(MAX_DEPTH - 1, []))
    with pytest.raises(LimitError):
        encode(nested(MAX_DEPTH, {}))
    with pytest.raises(LimitError):
        decode(b"\x91" * 64 + b"\x90")
    with pytest.raises(LimitError):
        decode(b"\x91" * 64 + b"\x80")


def test_depth_is_counted_along_one_path_only() -> None:
    round_trips([[[None]] for _ in range(200)])


@pytest.mark.parametrize("depth", [66, 511, 512, 1_023, 1_024, 1_025, 2_000, 1_000_000])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1k", b"\xdc\x00\x01"])
def test_deep_nesting_ends_in_a_typed_error(depth: int, level: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode(level * depth + b"\xc0")
    with pytest.raises(InvalidInputError):
        decode(level * depth)


def test_a_list_that_contains_itself_is_refused() -> None:
    knot: list[Any] = [1]
    knot.append(knot)
    with pytest.raises(LimitError) as caught:
        encode(knot)
    assert caught.value.path == (1,) * MAX_DEPTH


def test_a_map_that_contains_itself_is_refused() -> None:
    knot: dict[str, Any] = {}
    knot["again"] = [knot]
    with pytest.raises(LimitError):
        encode(knot)


def test_a_key_beyond_the_limit_is_refused_at_its_map() -> None:
    round_trips({"k" * (MAX_KEY_BYTES - 5): 1})
    for key in ("k" * (MAX_KEY_BYTES + 1), "\u00e9" * (MAX_KEY_BYTES // 2 + 1)):
        with pytest.raises(LimitError, match="map key") as caught:
            encode({"a": {key: 1}})
        assert caught.value.path == ("a",)


def test_a_key_as_long_as_the_limit_is_stored() -> None:
    round_trips({"k" * MAX_KEY_BYTES: 1})


def test_a_key_beyond_the_limit_is_not_decoded() -> None:
    key = b"\xdb" + (MAX_KEY_BYTES + 1).to_bytes(4, "big") + b"k" * (MAX_KEY_BYTES + 1)
    with pytest.raises(InvalidInputError):
        decode(b"\x81" + key + b"\xc0")


@pytest.mark.parametrize(
    "spelling",
    [
        "ddffffffff", "dfffffffff", "dbffffffff", "c6ffffffff", "c9ffffffff01",
        "dcffff", "deffff", "daffff", "c5ffff", "c8ffff01", "d9ff", "c4ff", "c7ff01",
        "dd10000000", "db7fffffff", "c67fffffff", "ddfffffffec0c0", "9fddffffffff",
        "81a161dfffffffff",
    ],
)  # fmt: skip
def test_a_declared_length_beyond_the_data_allocates_no_memory(spelling: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NotCanonicalError):
            decode(bytes.fromhex(spelling))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_nested_declared_lengths_beyond_the_data_allocate_little_memory() -> None:
    # Each header claims as many items as the whole input has bytes. A decoder that
    # believed all of them would set aside 200 times eight times 100,000 bytes.
    size = 100_000
    data = (b"\xdd" + size.to_bytes(4, "big")) * 200
    data += b"\xc0" * (size - len(data))
    tracemalloc.start()
    try:
        with pytest.raises(NotCanonicalError):
            decode(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 20


# --- whole inputs ---------------------------------------------------------------------------

RICH = {
    "bytes": b"\x00\xff" * 150,
    "digest": Link(SOME_DIGEST),
    "float": [0.5, -0.0],
    "int": [0, -1, 127, 128, 65_536, -(2**63), 2**64 - 1],
    "list": list(range(20)),
    "map": {f"k{number:02}": None for number in range(17)},
    "none": None,
    "text": "\u00e9\U0001f600" * 40,
    "true": True,
}


def test_a_value_cut_short_at_any_byte_is_refused() -> None:
    encoded = encode(RICH)
    for size in range(len(encoded)):
        with pytest.raises(NotCanonicalError):
            decode(encoded[:size])


@pytest.mark.parametrize("tail", ["00", "c0", "80", "c1", "ff"])
def test_trailing_bytes_are_refused(tail: str) -> None:
    values: list[Any] = [None, 1, "a", [], {}, RICH]
    for value in values:
        with pytest.raises(NotCanonicalError):
            decode(encode(value) + bytes.fromhex(tail))


def test_empty_bytes_are_not_a_value() -> None:
    with pytest.raises(NotCanonicalError):
        decode(b"")


def test_the_unused_first_byte_is_refused() -> None:
    for spelling in ("c1", "91c1", "81a161c1", "81c1c0"):
        with pytest.raises(NotCanonicalError):
            decode(bytes.fromhex(spelling))


def test_an_error_of_the_decoder_has_a_message() -> None:
    for data in (b"", b"\xc1", b"\x91" * 2_000, b"\xc0\xc0", b"\xa1"):
        with pytest.raises(NotCanonicalError) as caught:
            decode(data)
        assert "()" not in caught.value.reason


# --- paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "spelling"),
    [
        ((), "$"),
        (("a",), "$.a"),
        ((3,), "$[3]"),
        (("messages", 3, "text"), "$.messages[3].text"),
        (("two words", 0), "$['two words'][0]"),
        (("",), "$['']"),
        (("1a",), "$['1a']"),
        (("it's",), '$["it\'s"]'),
    ],
)
def test_a_path_is_rendered_in_jsonpath_notation(
    path: tuple[str | int, ...], spelling: str
) -> None:
    assert encoded_path(path) == spelling


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (lambda bad: bad, ()),
        (lambda bad: [bad], (0,)),
        (lambda bad: [0, 1, bad, 3], (2,)),
        (lambda bad: (0, (bad,)), (1, 0)),
        (lambda bad: {"z": bad, "a": 1}, ("z",)),
        (lambda bad: {"a": [{}, {"b": {"c": [bad]}}]}, ("a", 1, "b", "c", 0)),
    ],
)
def test_an_error_names_the_whole_path(
    build: Callable[[Any], Any], path: tuple[str | int, ...]
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        encode(build(object()))
    assert caught.value.path == path


def test_a_bad_link_is_refused_with_its_path() -> None:
    for digest in (b"short", "x" * 32, None):
        with pytest.raises(InvalidValueError) as caught:
            encode({"a": [Link(digest)]})  # type: ignore[arg-type]
        assert caught.value.path == ("a", 0)


# --- cutting without decoding ---------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 15, 16, 200])
def test_cut_items_returns_the_encoding_of_each_item(count: int) -> None:
    items: list[Any] = [[number, {"k": "v" * number}] for number in range(count)]
    assert canonical.cut_items(encode(items)) == [encode(item) for item in items]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 200])
def test_cut_map_returns_the_key_and_encoding_of_each_entry(count: int) -> None:
    mapping: dict[str, Any] = {f"{number:03}": [Link(SOME_DIGEST)] * 2 for number in range(count)}
    assert canonical.cut_map(encode(mapping)) == [
        (key, encode(key) + encode(value)) for key, value in mapping.items()
    ]


# --- properties -----------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=40)
    | st.binary(min_size=32, max_size=32).map(lambda raw: Link(Digest(raw)))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20)
    ),
    max_leaves=40,
)


@PROFILE
@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    encoded = encode(value)
    back = decode(encoded)
    assert encode(back) == encoded
    # repr distinguishes 1 and 1.0, and -0.0 and 0.0; keys are in canonical order.
    assert repr(back) == repr(in_key_order(value))


def in_key_order(value: Any) -> Any:
    if type(value) is dict:
        return {key: in_key_order(value[key]) for key in sorted(value, key=str.encode)}
    if type(value) is list:
        return [in_key_order(item) for item in value]
    return value


def refused_or_the_one_spelling(data: bytes) -> None:
    try:
        value = decode(data)
    except InvalidInputError:
        return
    assert encode(value) == data


@MANY
@given(st.binary(max_size=80))
def test_random_bytes_are_refused_or_are_canonical(data: bytes) -> None:
    refused_or_the_one_spelling(data)


# Bytes drawn from where msgpack has its choices find more than uniform ones.
STARTS = st.sampled_from(
    [*range(0x80, 0x83), *range(0x90, 0x93), 0xA0, 0xA1, 0xA2, *range(0xC0, 0xE1), 0xFF, 0, 1, 2]
)


@MANY
@given(st.lists(STARTS, max_size=24).map(bytes))
def test_random_headers_are_refused_or_are_canonical(data: bytes) -> None:
    refused_or_the_one_spelling(data)


@MANY
@given(VALUES, st.data())
def test_a_changed_byte_is_refused_or_gives_a_canonical_encoding(
    value: Any, data: st.DataObject
) -> None:
    encoded = bytearray(encode(value))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] = data.draw(st.integers(0, 255))
    refused_or_the_one_spelling(bytes(encoded))


def test_every_single_byte_change_of_a_rich_value_is_refused_or_canonical() -> None:
    small = {"a": [1, -1, 1.5, None, True, "x", b"y", 300], "b": {"c": Link(SOME_DIGEST)}}
    encoded = encode(small)
    for at in range(len(encoded)):
        for byte in range(256):
            refused_or_the_one_spelling(encoded[:at] + bytes((byte,)) + encoded[at + 1 :])


@PROFILE
@given(st.floats(width=32))
def test_no_32_bit_float_is_decoded(number: float) -> None:
    with pytest.raises(InvalidInputError):
        decode(b"\xca" + struct.pack(">f", number))


class _Text(str):
    """No text that could come back as what it was."""


_SCALARS = st.one_of(
    st.text(max_size=40), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.none()
)
_STRANGE = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(["\ud800", _Text("x"), "é" * 30]),
)


@given(
    st.one_of(
        st.dictionaries(st.text(max_size=3), _SCALARS, max_size=6),
        st.dictionaries(
            st.one_of(st.text(max_size=3), st.integers(), st.binary(max_size=2)),
            st.one_of(_SCALARS, _STRANGE),
            max_size=4,
        ),
    ),
    st.integers(0, 400),
)
def test_pack_flat_agrees_with_the_general_encoder_or_returns_nothing(
    value: dict[Any, Any], max_bytes: int
) -> None:
    found = canonical.pack_flat(value, max_bytes)
    try:
        encoded = canonical.encode(value)
    except InvalidInputError:
        assert found is None
        return
    assert found == (encoded if _is_flat(value) and len(encoded) <= max_bytes else None)


def _is_flat(value: dict[Any, Any]) -> bool:
    return all(type(item) in (str, int, bool, type(None)) for item in value.values())


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.one_of(
            _SCALARS,
            st.dictionaries(st.text(max_size=3), _SCALARS, max_size=4),
            st.dictionaries(
                st.one_of(st.text(max_size=3), st.integers()),
                st.one_of(_SCALARS, _STRANGE, st.just({})),
                max_size=3,
            ),
        ),
        max_size=5,
    ),
    st.integers(0, 400),
)
def test_flat_maps_in_a_map_are_encoded_like_any_others_or_left_to_the_general_encoder(
    value: dict[Any, Any], max_bytes: int
) -> None:
    before = repr(value)
    found = canonical.pack_flat(value, max_bytes, nested=True)
    # What is a user's stays as it is, the order of its keys too.
    assert repr(value) == before
    try:
        encoded = canonical.encode(value)
    except InvalidInputError:
        assert found is None
        return
    inner = [item for item in value.values() if type(item) is dict]
    plain = _is_flat({key: item for key, item in value.items() if type(item) is not dict})
    flat = plain and all(_is_flat(item) for item in inner)
    assert found == (encoded if flat and len(encoded) <= max_bytes else None)


# --- packers ------------------------------------------------------------------------------


def test_packing_during_another_packing_gives_correct_bytes() -> None:
    """As a finaliser might that runs meanwhile, or another thread."""
    inner = [b"inner"] * 50

    class Meddling(dict[str, int]):
        def items(self) -> Any:
            assert pack_checked(inner) == msgpack.packb(inner)
            return super().items()

    # There is a packer that both might take.
    pack_checked(None)
    value = ["before", Meddling(key=1), "behind"]
    assert pack_checked(value) == msgpack.packb(["before", {"key": 1}, "behind"])


def test_a_packer_with_a_large_buffer_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[msgpack.Packer] = []
    monkeypatch.setattr(canonical, "_idle_packers", kept)
    assert pack_checked(b"x" * 100_000)[-1:] == b"x"
    assert kept == []
    pack_checked(b"x")
    [packer] = kept
    pack_checked(["y"])
    assert kept == [packer]


def test_a_packer_that_raised_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[msgpack.Packer] = []
    monkeypatch.setattr(canonical, "_idle_packers", kept)
    with pytest.raises(TypeError):
        pack_checked([1, 2, object()])
    assert kept == []
    assert pack_checked([3]) == b"\x91\x03"
