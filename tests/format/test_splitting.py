"""Splitting: equal values give equal pieces, thresholds are exact, edits cost little (P4, P8)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.errors import InvalidValueError, LimitError
from casstore.format import canonical, splitting, tree
from casstore.format.canonical import ROLE_BYTES, ROLE_ITEM, ROLE_PART, ROLE_TEXT, Link, encode
from casstore.format.digest import Digest, Kind, check_object, digest_of
from casstore.format.limits import (
    CONTAINER_OUTLINE_MIN_BYTES,
    LIST_ITEM_OUTLINE_MIN_BYTES,
    MAX_DEPTH,
    OUTLINE_MIN_BYTES,
    PIECE_MAX_ENTRIES,
    SINGLE_PIECE_MAX_BYTES,
)

PROFILE = settings(deadline=None, max_examples=40, database=None)


class Sink:
    """A dict in place of a store; refuses a parent before its children."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, tuple[int, bytes, list[bytes]]] = {}

    def emit(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        digest = digest_of(kind, data)
        for child in children:
            assert child in self.pieces, "a parent came before its child"
        if digest in self.pieces:
            assert self.pieces[digest] == (kind, data, children)
        self.pieces[digest] = (kind, data, list(children))
        return digest

    def kinds(self) -> list[int]:
        return [kind for kind, _, _ in self.pieces.values()]


def split(value: Any) -> tuple[bytes, Sink]:
    sink = Sink()
    return splitting.split(value, sink.emit), sink


def join(sink: Sink, digest: bytes) -> Any:
    """A reader of its own, as naive as can be."""
    kind, data, _ = sink.pieces[digest]
    check_object(digest, kind, data)
    if kind == Kind.VALUE:
        return canonical.decode(data, lambda role, part: _supply(sink, role, part))
    assert kind in (Kind.LIST, Kind.MAP)
    branch = tree.decode_branch(kind, data)
    parts = [join(sink, child) for child in branch.digests]
    for part, count in zip(parts, branch.counts, strict=True):
        assert len(part) == count
    if kind == Kind.LIST:
        return [item for part in parts for item in part]
    return {key: item for part in parts for key, item in part.items()}


def _supply(sink: Sink, role: int, digest: bytes) -> Any:
    if role == ROLE_TEXT:
        return sink.pieces[digest][1].decode()
    if role == ROLE_BYTES:
        return sink.pieces[digest][1]
    return join(sink, digest)


def check_tree(sink: Sink, digest: bytes, level: int | None = None) -> tuple[int, int, str]:
    """Check a branch and all below it against the rules; (entries, bytes, last key)."""
    kind, data, _ = sink.pieces[digest]
    branch = tree.decode_branch(kind, data)
    assert level is None or branch.level == level
    assert 1 <= len(branch.digests) <= PIECE_MAX_ENTRIES
    for at, child in enumerate(branch.digests):
        if branch.level > 1:
            assert sink.pieces[child][0] == kind
            count, size, key = check_tree(sink, child, branch.level - 1)
        else:
            count, size, key = check_leaf(sink, child, kind)
        assert branch.counts[at] == count
        assert branch.sizes[at] == size
        if kind == Kind.MAP:
            assert branch.keys[at] == key
    return sum(branch.counts), sum(branch.sizes), branch.keys[-1] if branch.keys else ""


def check_leaf(sink: Sink, digest: bytes, kind: int) -> tuple[int, int, str]:
    leaf_kind, data, _ = sink.pieces[digest]
    assert leaf_kind == Kind.VALUE
    if kind == Kind.MAP:
        entries = canonical.cut_map(data)
        assert 1 <= len(entries) <= PIECE_MAX_ENTRIES
        return len(entries), sum(len(entry) for _, entry in entries), entries[-1][0]
    items = canonical.cut_items(data)
    assert 1 <= len(items) <= PIECE_MAX_ENTRIES
    size = 0
    for item in items:
        _, links = canonical.inspect(item)
        if len(links) == 1 and links[0][0] == ROLE_ITEM and item[0] == 0xC7:
            length = len(sink.pieces[links[0][1]][1])
            # An item leaves from 96 bytes on, and from 512 on it is no item but a part.
            assert LIST_ITEM_OUTLINE_MIN_BYTES <= length < CONTAINER_OUTLINE_MIN_BYTES
            assert canonical.item_size(item) == length
            size += length
        else:
            size += len(item)
            if item[0] in canonical.CONTAINER_BYTES:
                assert len(item) < LIST_ITEM_OUTLINE_MIN_BYTES
    return len(items), size, ""


def check_pieces(sink: Sink) -> None:
    """Every piece: its links are those in its bytes, in order; every tree is sound."""
    for digest, (kind, data, links) in sink.pieces.items():
        check_object(digest, kind, data)
        if kind == Kind.BLOB:
            assert links == []
        elif kind == Kind.VALUE:
            assert links == [name for _, name in canonical.inspect(data)[1]]
        else:
            assert links == tree.decode_branch(kind, data).digests
            check_tree(sink, digest)


# --- equal values, equal pieces -------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.binary(max_size=12)
    | st.integers(500, 700).map(lambda size: "t" * size)
    | st.integers(500, 700).map(lambda size: b"b" * size)
)
SMALL = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner, max_size=6)
    ),
    max_leaves=8,
)
# Long enough to be trees. Repeating is not part of the recursion: repeats of repeats
# would multiply without bound.
WIDE = st.tuples(st.lists(SMALL, min_size=1, max_size=4), st.integers(1, 40)).map(
    lambda pair: pair[0] * pair[1]
) | st.tuples(SMALL, st.integers(1, 80)).map(
    lambda pair: {f"key {number}": pair[0] for number in range(pair[1])}
)
# And trees of trees.
VALUES = (
    SMALL
    | WIDE
    | st.lists(SMALL | WIDE, max_size=4)
    | st.dictionaries(st.text(max_size=6), SMALL | WIDE, max_size=4)
    | st.tuples(WIDE, st.integers(1, 70)).map(lambda pair: [pair[0]] * pair[1])
)


@PROFILE
@given(VALUES, st.randoms(use_true_random=False))
def test_equal_values_have_equal_digests_in_any_insertion_order(
    value: Any, source: random.Random
) -> None:
    digest, sink = split(value)
    other_digest, other_sink = split(shuffled(value, source))
    assert other_digest == digest
    assert other_sink.pieces == sink.pieces


def shuffled(value: Any, source: random.Random) -> Any:
    if type(value) is dict:
        keys = list(value)
        source.shuffle(keys)
        return {key: shuffled(value[key], source) for key in keys}
    if type(value) is list:
        items = [shuffled(item, source) for item in value]
        return tuple(items) if source.random() < 0.3 else items
    return value


@PROFILE
@given(VALUES)
def test_every_piece_is_sound_and_the_pieces_make_the_value(value: Any) -> None:
    digest, sink = split(value)
    check_pieces(sink)
    assert encode(join(sink, digest)) == encode(value)


@PROFILE
@given(VALUES, VALUES)
def test_different_values_have_different_digests(left: Any, right: Any) -> None:
    assert (split(left)[0] == split(right)[0]) == (encode(left) == encode(right))


def test_a_short_value_is_one_piece_of_its_canonical_bytes() -> None:
    for value in (None, 1, 1.5, "text", b"bytes", [], {}, {"a": [1, 2]}, [["x"] * 20]):
        digest, sink = split(value)
        assert list(sink.pieces) == [digest]
        assert sink.pieces[digest] == (Kind.VALUE, encode(value), [])


def test_a_link_is_among_the_links_of_its_piece() -> None:
    target = Digest.of_blob(b"target")
    sink = Sink()
    sink.pieces[target] = (Kind.BLOB, b"target", [])
    digest = splitting.split({"a": [Link(target), 1, Link(target)]}, sink.emit)
    assert sink.pieces[digest][2] == [target, target]
    alone = splitting.split(Link(target), sink.emit)
    assert sink.pieces[alone] == (Kind.VALUE, encode(Link(target)), [target])


# --- strings and bytes ----------------------------------------------------------------------


def outlined(sink: Sink, root: bytes) -> list[int]:
    return [role for role, _ in canonical.inspect(sink.pieces[root][1])[1]]


def text_of(size: int, character: str) -> str:
    """A string of exactly ``size`` UTF-8 bytes, mostly made of ``character``."""
    width = len(character.encode())
    return character * (size // width) + "x" * (size % width)


@pytest.mark.parametrize("character", ["x", "\u00e9", "\u20ac"])
@pytest.mark.parametrize("size", [505, 508, 509, 510, 511, 512, 513, 600])
def test_a_string_is_outlined_from_512_bytes_of_utf8(size: int, character: str) -> None:
    text = text_of(size, character)
    assert len(text.encode()) == size
    digest, sink = split([text])
    if size < 512:
        # As short strings go, this one may still make its list leave; never itself.
        assert Kind.BLOB not in sink.kinds()
    else:
        assert outlined(sink, digest) == [ROLE_TEXT]
        assert sink.pieces[Digest.of_blob(text.encode())] == (Kind.BLOB, text.encode(), [])
    assert join(sink, digest) == [text]


@pytest.mark.parametrize("size", [508, 509, 510, 511, 513, 514, 515, 516, 520])
def test_a_string_of_astral_characters_is_outlined_by_its_utf8_length(size: int) -> None:
    digest, sink = split([text_of(size, "\U0001f600")])
    assert (Kind.BLOB in sink.kinds()) == (size >= 512)
    assert join(sink, digest) == [text_of(size, "\U0001f600")]


def test_a_string_of_128_astral_characters_leaves_like_any_other_of_512_bytes() -> None:
    _, sink = split("\U0001f600" * 128)
    assert Kind.BLOB in sink.kinds()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 70_000])
def test_bytes_are_outlined_from_a_length_of_512(size: int) -> None:
    content = b"\xc7" * size
    digest, sink = split([content])
    if size < 512:
        assert Kind.BLOB not in sink.kinds()
    else:
        assert outlined(sink, digest) == [ROLE_BYTES]
        assert sink.pieces[Digest.of_blob(content)] == (Kind.BLOB, content, [])
    assert join(sink, digest) == [content]


def test_a_string_and_equal_bytes_share_their_blob() -> None:
    digest, sink = split(["z" * 600, b"z" * 600])
    assert sink.kinds().count(Kind.BLOB) == 1
    assert outlined(sink, digest) == [ROLE_TEXT, ROLE_BYTES]


def test_a_long_string_alone_is_a_value_that_links_to_its_blob() -> None:
    digest, sink = split("z" * 600)
    assert sink.kinds() == [Kind.BLOB, Kind.VALUE]
    assert digest != Digest.of_blob(b"z" * 600)
    assert outlined(sink, digest) == [ROLE_TEXT]


def test_an_outlined_string_is_one_blob_of_any_length() -> None:
    _, sink = split("z" * 200_000)
    assert [len(data) for _, data, _ in sink.pieces.values()] == [200_000, 36]


# --- containers -----------------------------------------------------------------------------


def list_of(size: int) -> list[str]:
    """A list whose encoding takes exactly ``size`` bytes (5 or more items of 100, then a rest)."""
    items = ["x" * 98] * ((size - 200) // 100)
    header = 1 if len(items) + 2 < 16 else 3
    rest = size - header - 100 * len(items)
    first = rest // 2
    items += [filler(first), filler(rest - first)]
    assert len(encode(items)) == size
    return items


def filler(size: int) -> str:
    """A string whose encoding takes ``size`` bytes."""
    header = 1 if size <= 32 else 2 if size <= 257 else 3
    text = "y" * (size - header)
    assert len(encode(text)) == size
    return text


def map_of(size: int) -> dict[str, str]:
    """A map whose encoding takes exactly ``size`` bytes."""
    items = {f"k{number:02}": "x" * 98 for number in range((size - 200) // 104)}
    header = 1 if len(items) + 1 < 16 else 3
    items["z"] = filler(size - header - 104 * len(items) - 2)
    assert len(encode(items)) == size
    return items


@pytest.mark.parametrize("make", [list_of, map_of])
@pytest.mark.parametrize("size", [510, 511, 512, 513])
def test_a_container_inside_another_leaves_at_512_bytes(make: Any, size: int) -> None:
    value = make(size)
    digest, sink = split({"inner": value})
    if size < CONTAINER_OUTLINE_MIN_BYTES:
        # The outer map is itself longer than 512 bytes at the end of the range.
        assert sink.kinds() == [Kind.VALUE]
    else:
        assert sink.kinds() == [Kind.VALUE, Kind.VALUE]
        assert outlined(sink, digest) == [ROLE_PART]
        inner = sink.pieces[digest][2][0]
        assert sink.pieces[inner] == (Kind.VALUE, encode(value), [])
        # A value that is a part elsewhere has the same digest on its own.
        assert split(value)[0] == inner
    assert join(sink, digest) == {"inner": value}


@pytest.mark.parametrize(("make", "kind"), [(list_of, Kind.LIST), (map_of, Kind.MAP)])
@pytest.mark.parametrize("size", [2046, 2047, 2048, 2049, 2050])
def test_a_container_becomes_a_tree_above_2048_bytes(make: Any, kind: int, size: int) -> None:
    value = make(size)
    digest, sink = split(value)
    check_pieces(sink)
    if size <= SINGLE_PIECE_MAX_BYTES:
        assert sink.kinds() == [Kind.VALUE]
    else:
        assert sink.pieces[digest][0] == kind
        branch = tree.decode_branch(kind, sink.pieces[digest][1])
        header = 1 if len(value) < 16 else 3
        assert sum(branch.sizes) == size - header
        assert sum(branch.counts) == len(value)
    assert join(sink, digest) == value


@pytest.mark.parametrize(("make", "kind"), [(list_of, Kind.LIST), (map_of, Kind.MAP)])
@pytest.mark.parametrize("size", [511, 512, 2047, 2048, 2049])
def test_a_container_packed_from_entries_equals_the_one_split_from_the_value(
    make: Any, kind: int, size: int
) -> None:
    """Edits work on entries, storing on whole values: both must choose the same boundaries."""
    value = make(size)
    data = encode(value)
    entries = (
        splitting.map_leaf_entries(data) if kind == Kind.MAP else splitting.list_leaf_entries(data)
    )
    sink, other = Sink(), Sink()
    packed = splitting.pack(kind, entries, sink.emit)
    assert packed == splitting.encode_split(value, MAX_DEPTH, other.emit)
    assert sink.pieces == other.pieces
    sizes = sum(entry.size for entry in entries)
    assert splitting.piece_bytes(kind, len(entries), sizes) == size


def test_a_long_string_counts_with_the_size_of_its_link() -> None:
    # 56 links of 36 bytes and a header of three are 2,019 bytes: one piece.
    _, sink = split([f"{number:0600}" for number in range(56)])
    assert Kind.LIST not in sink.kinds()
    _, sink = split([f"{number:0600}" for number in range(57)])
    assert Kind.LIST in sink.kinds()


@pytest.mark.parametrize("size", [94, 95, 96, 97, 511])
@pytest.mark.parametrize("as_map", [False, True])
def test_a_container_in_a_list_tree_leaves_at_96_bytes(size: int, as_map: bool) -> None:
    if as_map:
        item: Any = {"k": filler(size - 3)}
    else:
        item = [filler(size - 1)]
    assert len(encode(item)) == size
    value = [item, *range(3_000)]
    digest, sink = split(value)
    check_pieces(sink)
    first_leaf = sink.pieces[first_of(sink, digest)][1]
    roles = [role for role, _ in canonical.inspect(first_leaf)[1]]
    assert roles == ([ROLE_ITEM] if size >= LIST_ITEM_OUTLINE_MIN_BYTES else [])
    if roles:
        assert canonical.item_size(canonical.cut_items(first_leaf)[0]) == size
    assert join(sink, digest) == value


def first_of(sink: Sink, digest: bytes) -> bytes:
    """The first leaf below a branch."""
    while sink.pieces[digest][0] != Kind.VALUE:
        digest = sink.pieces[digest][2][0]
    return digest


def test_strings_and_bytes_in_a_list_tree_stay_below_512() -> None:
    _, sink = split(["s" * 400, b"b" * 400] * 20)
    assert Kind.BLOB not in sink.kinds()
    assert all(not links or kind == Kind.LIST for kind, _, links in sink.pieces.values())


def test_containers_in_a_map_tree_stay_below_512() -> None:
    value = {f"{number:03}": ["x" * 300] for number in range(100)}
    _, sink = split(value)
    check_pieces(sink)
    leaves = [data for kind, data, _ in sink.pieces.values() if kind == Kind.VALUE]
    assert all(canonical.links_in(data) == [] for data in leaves)


def test_a_map_with_one_enormous_key_is_a_tree_of_one_leaf() -> None:
    value = {"k" * 5_000: 1}
    digest, sink = split(value)
    assert sink.kinds() == [Kind.VALUE, Kind.MAP]
    check_pieces(sink)
    assert join(sink, digest) == value


# --- depth and errors -----------------------------------------------------------------------


def test_depth_64_is_split_and_65_refused() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH):
        value = [value]
    digest, sink = split(value)
    assert join(sink, digest) == value
    with pytest.raises(LimitError) as caught:
        split([value])
    assert caught.value.path == (0,) * MAX_DEPTH


def test_depth_is_refused_also_across_pieces() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH):
        value = {"a": value, "b": "y" * 511}
    digest, sink = split(value)
    assert sink.kinds().count(Kind.VALUE) == MAX_DEPTH
    assert join(sink, digest) == value
    with pytest.raises(LimitError) as caught:
        split({"a": value})
    assert caught.value.path == ("a",) * MAX_DEPTH


def test_a_value_that_contains_itself_is_refused() -> None:
    knot: list[Any] = ["z" * 600]
    knot.append(knot)
    with pytest.raises(LimitError):
        split(knot)


class TooManyPiecesError(Exception):
    """More pieces were handed over than there can be."""


def few(limit: int) -> Any:
    """Takes pieces until there are too many."""
    seen: list[bytes] = []

    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        seen.append(data)
        if len(seen) > limit:
            raise TooManyPiecesError
        return digest_of(kind, data)

    return emit


@pytest.mark.parametrize(
    "around",
    [
        lambda left, right: [left, right],
        lambda left, right: {"left": left, "right": right},
        lambda left, right: [{"it": left}, "between", (right,)],
    ],
    ids=["lists", "maps", "both"],
)
@pytest.mark.parametrize("crossed", [False, True], ids=["twice the same", "crossed"])
def test_a_part_with_many_places_in_a_value_is_encoded_once(around: Any, crossed: bool) -> None:
    """Written out, it would have more parts than anybody can count."""

    def nested(levels: int) -> Any:
        left: Any = [f"item {at}" for at in range(100)]
        right: Any = left[::-1] if crossed else left
        for _ in range(levels):
            above = around(left, right)
            left, right = above, around(right, left) if crossed else above
        return around(left, right)

    splitting.split(nested(9), few(1000))
    with pytest.raises(LimitError, match="shared parts of the value repeat"):
        splitting.split(nested(20), few(1000))


def test_a_part_with_two_places_is_encoded_like_two_equal_parts() -> None:
    part = [f"item {at}" for at in range(300)]
    equal = list(part)
    one: dict[bytes, bytes] = {}
    two: dict[bytes, bytes] = {}

    def into(pieces: dict[bytes, bytes]) -> Any:
        def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
            pieces[digest_of(kind, data)] = data
            return digest_of(kind, data)

        return emit

    shared = {"a": part, "b": [part, {"c": part}], "d": part}
    apart = {"a": part, "b": [equal, {"c": list(part)}], "d": list(part)}
    assert splitting.split(shared, into(one)) == splitting.split(apart, into(two))
    assert one == two


@pytest.mark.parametrize("bad", [object(), 2**64, float("nan"), "\ud800", {1: 2}, "\ud800" * 600])
def test_splitting_refuses_what_encoding_refuses_at_the_same_path(bad: Any) -> None:
    for value in (
        bad,
        [bad],
        {"a": ["z" * 600, {"b": bad}]},
        [*range(3_000), bad],
        {"k": (1, bad)},
    ):
        with pytest.raises(InvalidValueError) as by_encode:
            encode(value)
        with pytest.raises(InvalidValueError) as by_split:
            split(value)
        assert by_split.value.path == by_encode.value.path
        assert by_split.value.reason == by_encode.value.reason
        assert type(by_split.value) is type(by_encode.value)


# --- edits (P8) -----------------------------------------------------------------------------


def cost(before: Sink, after: Any) -> tuple[int, int]:
    """How many pieces, and bytes of them, storing ``after`` adds to ``before``."""
    digest, sink = split(after)
    check_pieces(sink)
    assert encode(join(sink, digest)) == encode(after)
    new = [piece for name, piece in sink.pieces.items() if name not in before.pieces]
    return len(new), sum(len(data) for _, data, _ in new)


def message(number: int) -> dict[str, Any]:
    return {"role": "user", "id": number, "text": f"message {number} " * 8}


LIST_PLACES = [0, 999, 1_500, 1_999]


def test_editing_a_list_of_2000_messages_adds_few_pieces() -> None:
    messages = [message(number) for number in range(2_000)]
    _, before = split(messages)
    assert len(before.pieces) > 2_000
    new = message(-1)
    costs = [cost(before, [*messages, new])]
    for at in LIST_PLACES:
        costs.append(cost(before, [*messages[:at], new, *messages[at:]]))
        costs.append(cost(before, [*messages[:at], new, *messages[at + 1 :]]))
        costs.append(cost(before, [*messages[:at], *messages[at + 1 :]]))
    # The message, a leaf or two, and a branch or two on each of two levels; a leaf or
    # branch holds 16 entries of about 40 bytes. Measured: at most 5 pieces and 4,042
    # bytes, 4.2 and 2,762 on average, of 2,148 pieces and 328 KB.
    assert max(pieces for pieces, _ in costs) <= 8
    assert max(size for _, size in costs) <= 8_000
    assert sum(pieces for pieces, _ in costs) / len(costs) <= 6
    assert sum(size for _, size in costs) / len(costs) <= 4_500


def test_each_message_appended_to_a_list_adds_few_pieces_and_bytes() -> None:
    seen: set[bytes] = set()
    pieces = size_bytes = 0
    for count in range(1, 401):
        _, sink = split([message(number) for number in range(count)])
        for name, (_, data, _) in sink.pieces.items():
            if name not in seen:
                pieces += 1
                size_bytes += len(data)
        seen |= sink.pieces.keys()
    # 400 whole copies would be 13 MB; the messages alone are 66 KB.
    assert pieces / 400 <= 5
    assert size_bytes / 400 <= 2_000


def test_editing_a_map_of_20000_keys_adds_few_pieces() -> None:
    mapping = {f"file {number:05}.txt": number for number in range(20_000)}
    _, before = split(mapping)
    costs = []
    for key in ("file 00000.txt", "file 10007.txt", "a", "file 12345.txu"):
        costs.append(cost(before, {**mapping, key: "changed"}))
        if key in mapping:
            rest = dict(mapping)
            del rest[key]
            costs.append(cost(before, rest))
    # A leaf and a branch on each of three levels; a key that ends pieces may move two
    # each. Measured: at most 5 pieces and 5,910 bytes of 1,211 pieces.
    assert max(pieces for pieces, _ in costs) <= 9
    assert max(size for _, size in costs) <= 12_000
    assert sum(pieces for pieces, _ in costs) / len(costs) <= 6


def test_a_changed_value_in_a_map_moves_no_boundary_at_any_level() -> None:
    mapping = {f"key {number}": number for number in range(5_000)}
    digest, before = split(mapping)
    for key in list(mapping)[::501]:
        pieces, _ = cost(before, {**mapping, key: None})
        changed_digest, after = split({**mapping, key: None})
        assert pieces == levels(before, digest) + 1
        assert levels(after, changed_digest) == levels(before, digest)
        assert len(after.pieces) == len(before.pieces)


# --- adversaries (P7) -----------------------------------------------------------------------


def levels(sink: Sink, digest: bytes) -> int:
    kind, data, _ = sink.pieces[digest]
    return tree.decode_branch(kind, data).level


def test_20000_equal_items_make_a_small_shallow_tree() -> None:
    items: list[Any] = [7, {"k": "v" * 100}]
    for item in items:
        value = [item] * 20_000
        digest, sink = split(value)
        check_pieces(sink)
        # Equal leaves are one piece; 15 levels would be the worst: pairs all the way up.
        assert len(sink.pieces) < 100
        assert levels(sink, digest) <= 15
        assert len(join(sink, digest)) == 20_000


def numbers_that(ends: bool, count: int) -> list[int]:
    found: list[int] = []
    number = 0
    while len(found) < count:
        if tree.ends_list_leaf(encode(number)) == ends:
            found.append(number)
        number += 1
    return found


def test_items_that_are_all_boundaries_are_grouped_in_pairs() -> None:
    value = numbers_that(True, 4_096)
    digest, sink = split(value)
    check_pieces(sink)
    leaves = [data for kind, data, _ in sink.pieces.values() if kind == Kind.VALUE]
    assert {len(canonical.cut_items(data)) for data in leaves} == {2}
    assert levels(sink, digest) <= 12
    assert join(sink, digest) == value


def test_items_that_never_end_a_piece_are_cut_by_the_cap() -> None:
    value = numbers_that(False, 10_000)
    digest, sink = split(value)
    check_pieces(sink)
    leaves = [data for kind, data, _ in sink.pieces.values() if kind == Kind.VALUE]
    assert {len(canonical.cut_items(data)) for data in leaves} == {128, 10_000 % 128}
    assert join(sink, digest) == value


def keys_that(ends: list[bool], count: int) -> list[str]:
    """Keys that end, or do not end, a piece on each of the first levels."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"{number:x}"
        if all(tree.ends_map_piece(key, level) == end for level, end in enumerate(ends)):
            found.append(key)
        number += 1
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_keys_that_all_end_a_piece_still_make_a_tree(depth: int) -> None:
    value = dict.fromkeys(keys_that([True] * depth, 700), 0)
    digest, sink = split(value)
    check_pieces(sink)
    leaves = [data for kind, data, _ in sink.pieces.values() if kind == Kind.VALUE]
    assert {len(canonical.cut_map(data)) for data in leaves} == {2}
    assert levels(sink, digest) <= 10
    assert join(sink, digest) == value


def test_keys_that_never_end_a_piece_still_make_a_tree() -> None:
    value = dict.fromkeys(keys_that([False] * 4, 20_000), 0)
    digest, sink = split(value)
    check_pieces(sink)
    # 157 full leaves under two branches under the root.
    assert levels(sink, digest) == 2
    assert join(sink, digest) == value


def test_an_insertion_shifts_size_limited_pieces_only_up_to_the_next_boundary() -> None:
    # 300 items without a boundary, then ordinary ones: an insertion before all of them
    # shifts the capped pieces and nothing behind the next natural boundary.
    value = [*numbers_that(False, 300), *range(100_000, 103_000)]
    _, before = split(value)
    pieces, _ = cost(before, [999_999_999, *value])
    assert pieces <= 10


def test_the_thresholds_are_those_of_the_format() -> None:
    assert (OUTLINE_MIN_BYTES, CONTAINER_OUTLINE_MIN_BYTES) == (512, 512)
    assert (LIST_ITEM_OUTLINE_MIN_BYTES, SINGLE_PIECE_MAX_BYTES) == (96, 2048)
