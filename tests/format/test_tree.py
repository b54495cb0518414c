"""Branches: grouping, building in little memory, and one encoding each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.errors import InvalidInputError, NotCanonicalError
from casstore.format import tree
from casstore.format.canonical import encode
from casstore.format.digest import Kind, digest_of, plain_hash
from casstore.format.limits import FANOUT, MAX_ENTRIES, PIECE_MAX_ENTRIES, PIECE_MIN_ENTRIES
from casstore.format.tree import Builder, Child, TreeBranch, decode_branch, encode_branch

PROFILE = settings(deadline=None, max_examples=120, database=None)
KINDS = [Kind.LIST, Kind.MAP, Kind.CHUNKS]

Log = dict[bytes, tuple[int, list[Child]]]


def emitter(kind: int, log: Log) -> Callable[[int, list[Child]], Child]:
    """Stores branches in ``log``, as ``splitting.branch`` does."""

    def emit(level: int, children: list[Child]) -> Child:
        data = encode_branch(kind, level, children)
        digest = digest_of(kind, data)
        log[digest] = (level, list(children))
        return Child(
            digest,
            sum(child.entries for child in children),
            sum(child.size for child in children),
            children[-1].key,
        )

    return emit


def naive(kind: int, children: list[Child], log: Log) -> tuple[int, list[Child]]:
    """The rule as the format document states it: group each level whole, until one is left."""
    emit = emitter(kind, log)
    level = 1
    while True:
        groups: list[list[Child]] = [[]]
        for child in children:
            piece = groups[-1]
            if kind == Kind.MAP:
                hashed = plain_hash(child.key.encode())
                ends = (hashed[level // 2] >> (4 * (level % 2))) & 15 == 0
            else:
                ends = child.digest[0] & 15 == 0
            piece.append(child)
            if len(piece) == 128 or (len(piece) >= 2 and ends):
                groups.append([])
        if not groups[-1]:
            groups.pop()
        if len(groups) == 1:
            return level, groups[0]
        children = [emit(level, piece) for piece in groups]
        level += 1


def child(number: int, digest: bytes, key: str | None = None) -> Child:
    return Child(digest, 1 + number % 7, 3 + number % 11, f"{number:06}" if key is None else key)


def assert_built_alike(kind: int, children: list[Child]) -> tuple[int, list[Child]]:
    built_log: Log = {}
    naive_log: Log = {}
    builder = Builder(kind, emitter(kind, built_log))
    for entry in children:
        builder.add(entry)
    built = builder.finish()
    assert built == naive(kind, children, naive_log)
    assert built_log == naive_log
    for _, piece in (*built_log.values(), built):
        assert 1 <= len(piece) <= PIECE_MAX_ENTRIES
    return built


def random_children(seed: int, count: int, boundary: float) -> list[Child]:
    """Children whose digests end a piece with the given probability."""
    source = random.Random(seed)
    children = []
    for number in range(count):
        digest = bytearray(source.randbytes(32))
        digest[0] = digest[0] & 0xF0 if source.random() < boundary else digest[0] | 1
        children.append(child(number, bytes(digest)))
    return children


@PROFILE
@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**32),
    st.integers(1, 700),
    st.sampled_from([0.0, 1 / 16, 0.5, 0.9, 1.0]),
)
def test_the_builder_groups_children_like_the_reference_rule(
    kind: int, seed: int, count: int, boundary: float
) -> None:
    assert_built_alike(kind, random_children(seed, count, boundary))


@pytest.mark.parametrize(
    "count", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1024, 4097]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("boundary", [0.0, 1.0])
def test_sequences_of_boundaries_and_without_any_are_grouped_by_the_rule(
    kind: int, count: int, boundary: float
) -> None:
    level, root = assert_built_alike(kind, random_children(count, count, boundary))
    # Every level has at most half as many pieces as the one below, rounded up.
    assert level <= max(1, count.bit_length())
    assert len(root) <= PIECE_MAX_ENTRIES


def test_a_piece_has_at_least_two_entries_unless_it_is_the_last() -> None:
    pieces = list(tree.group(range(7), lambda _: True))
    assert pieces == [[0, 1], [2, 3], [4, 5], [6]]
    assert PIECE_MIN_ENTRIES == 2


def test_a_piece_without_a_boundary_ends_at_the_cap() -> None:
    pieces = list(tree.group(range(300), lambda _: False))
    assert [len(piece) for piece in pieces] == [128, 128, 44]


def test_a_boundary_on_the_cap_ends_one_piece_not_two() -> None:
    pieces = list(tree.group(range(130), lambda number: number in (127, 128)))
    assert [len(piece) for piece in pieces] == [128, 2]


def test_an_empty_sequence_makes_no_piece() -> None:
    assert list(tree.group([], lambda _: True)) == []


def test_an_insertion_changes_at_most_three_pieces() -> None:
    numbers = list(range(2_000))

    def ends(number: int) -> bool:
        return plain_hash(str(number).encode(), 1)[0] % 16 == 0

    before = {tuple(piece) for piece in tree.group(numbers, ends)}
    for at in range(0, 2_000, 97):
        changed = [*numbers[:at], 100_000 + at, *numbers[at:]]
        after = {tuple(piece) for piece in tree.group(changed, ends)}
        assert len(after - before) <= 3


# --- boundary rules -------------------------------------------------------------------------


def test_the_first_byte_of_its_hash_decides_whether_a_list_item_is_a_boundary() -> None:
    for number in range(600):
        data = encode(number)
        assert tree.ends_list_leaf(data) == (plain_hash(data)[0] % 16 == 0)
    assert FANOUT == 16


def test_one_hash_nibble_per_level_low_first_decides_whether_a_key_is_a_boundary() -> None:
    for number in range(100):
        digits = plain_hash(f"key{number}".encode()).hex()
        # In hexadecimal the high nibble of a byte comes first.
        nibbles = [digits[at ^ 1] for at in range(64)]
        for level in range(64):
            assert tree.ends_map_piece(f"key{number}", level) == (nibbles[level] == "0")


def test_a_key_has_a_boundary_decision_at_the_highest_level() -> None:
    tree.ends_map_piece("a", tree.MAX_LEVEL)


def test_the_first_byte_of_its_digest_decides_whether_a_child_is_a_boundary() -> None:
    for byte in range(256):
        assert tree.ends_list_branch(bytes((byte,)) + bytes(31)) == (byte % 16 == 0)


# --- one encoding ---------------------------------------------------------------------------


def as_branch(kind: int, level: int, children: list[Child]) -> TreeBranch:
    sizes = [entry.size for entry in children]
    return TreeBranch(
        level,
        [entry.digest for entry in children],
        sizes if kind == Kind.CHUNKS else [entry.entries for entry in children],
        sizes,
        [entry.key for entry in children] if kind == Kind.MAP else [],
    )


@PROFILE
@given(
    st.sampled_from(KINDS),
    st.integers(1, tree.MAX_LEVEL),
    st.lists(
        st.tuples(
            st.binary(min_size=32, max_size=32),
            st.integers(1, MAX_ENTRIES // 128),
            st.integers(1, tree.MAX_TOTAL_BYTES // 128),
            st.text(max_size=6),
        ),
        min_size=1,
        max_size=128,
        unique_by=lambda child: child[3],
    ),
)
def test_a_branch_round_trips(
    kind: int, level: int, rows: list[tuple[bytes, int, int, str]]
) -> None:
    children = [Child(*row) for row in sorted(rows, key=lambda row: row[3].encode())]
    data = encode_branch(kind, level, children)
    assert decode_branch(kind, data) == as_branch(kind, level, children)


def test_the_columns_are_in_the_order_of_the_format() -> None:
    children = [Child(b"\x01" * 32, 2, 30, "k"), Child(b"\x02" * 32, 3, 40, "l")]
    digests = b"\x01" * 32 + b"\x02" * 32
    assert encode_branch(Kind.LIST, 1, children) == encode([1, digests, [2, 3], [30, 40]])
    assert encode_branch(Kind.MAP, 2, children) == encode(
        [2, digests, [2, 3], [30, 40], ["k", "l"]]
    )
    assert encode_branch(Kind.CHUNKS, 3, children) == encode([3, digests, [30, 40]])


def sound(kind: int, count: int = 2) -> list[Any]:
    """The columns of a branch that is accepted; each case below breaks one thing."""
    columns: list[Any] = [1, b"".join(bytes((number,)) * 32 for number in range(count))]
    if kind != Kind.CHUNKS:
        columns.append([1] * count)
    columns.append([5] * count)
    if kind == Kind.MAP:
        columns.append([f"{number:03}" for number in range(count)])
    return columns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 128])
def test_a_sound_branch_is_accepted(kind: int, count: int) -> None:
    assert len(decode_branch(kind, encode(sound(kind, count))).digests) == count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "level", [0, 65, -1, 2**64 - 1, True, False, 1.0, "1", None, [1]], ids=repr
)
def test_a_branch_with_another_level_is_refused(kind: int, level: Any) -> None:
    columns = sound(kind)
    columns[0] = level
    with pytest.raises(NotCanonicalError):
        decode_branch(kind, encode(columns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 129])
def test_a_branch_without_children_or_with_too_many_is_refused(kind: int, count: int) -> None:
    with pytest.raises(NotCanonicalError, match="bytes of digests"):
        decode_branch(kind, encode(sound(kind, count)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "digests", [bytes(63), bytes(65), bytes(32), bytes(96), "x" * 64, None, []]
)
def test_a_branch_with_an_invalid_digest_column_is_refused(kind: int, digests: Any) -> None:
    columns = sound(kind)
    columns[1] = digests
    with pytest.raises(NotCanonicalError):
        decode_branch(kind, encode(columns))


BAD_NUMBERS = [
    [1], [1, 1, 1], [], [0, 1], [1, 0], [1, -1], [True, 1], [1, 1.0], [1, "1"], [1, None], [1, [1]],
    None, 2, "ab", b"ab", {"a": 1, "b": 1},
]  # fmt: skip


@pytest.mark.parametrize("numbers", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "column"),
    [(Kind.LIST, 2), (Kind.LIST, 3), (Kind.MAP, 2), (Kind.MAP, 3), (Kind.CHUNKS, 2)],
)
def test_a_branch_with_other_counts_or_sizes_is_refused(
    kind: int, column: int, numbers: Any
) -> None:
    columns = sound(kind)
    columns[column] = numbers
    with pytest.raises(NotCanonicalError):
        decode_branch(kind, encode(columns))


@pytest.mark.parametrize(
    ("kind", "column", "most"),
    [
        (Kind.LIST, 2, MAX_ENTRIES),
        (Kind.MAP, 2, MAX_ENTRIES),
        (Kind.LIST, 3, 2**63 - 1),
        (Kind.MAP, 3, 2**63 - 1),
        (Kind.CHUNKS, 2, 2**63 - 1),
    ],
)
def test_a_branch_whose_counts_or_sizes_exceed_the_maximum_is_refused(
    kind: int, column: int, most: int
) -> None:
    columns = sound(kind)
    columns[column] = [1, most - 1]
    decode_branch(kind, encode(columns))
    columns[column] = [1, most]
    with pytest.raises(NotCanonicalError):
        decode_branch(kind, encode(columns))


@pytest.mark.parametrize(
    "keys",
    [
        ["a"], ["a", "b", "c"], [], ["b", "a"], ["a", "a"], ["\U00010000", "\uffff"], ["a", b"b"],
        [1, 2], [None, "a"], ["a", True], None, "ab", {"a": 1, "b": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_a_map_branch_with_an_invalid_key_column_is_refused(keys: Any) -> None:
    columns = sound(Kind.MAP)
    columns[4] = keys
    with pytest.raises(NotCanonicalError):
        decode_branch(Kind.MAP, encode(columns))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_an_extra_column_is_refused(kind: int) -> None:
    columns = sound(kind)
    for wrong in (columns[:-1], [*columns, columns[-1]], [*columns, None], []):
        with pytest.raises(NotCanonicalError):
            decode_branch(kind, encode(wrong))


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_of_one_kind_is_not_read_as_another(kind: int) -> None:
    for other in KINDS:
        if other != kind:
            with pytest.raises(NotCanonicalError):
                decode_branch(other, encode(sound(kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, 1, "a", b"a", {}, {"a": 1}], ids=repr)
def test_a_value_that_is_not_a_list_is_not_a_branch(kind: int, value: Any) -> None:
    with pytest.raises(NotCanonicalError, match="not a branch"):
        decode_branch(kind, encode(value))


@pytest.mark.parametrize("kind", KINDS)
def test_a_non_canonical_branch_is_refused(kind: int) -> None:
    data = encode(sound(kind))
    assert data[1] == 1
    padded = data[:1] + b"\xcc\x01" + data[2:]
    for wrong in (
        padded,
        data + b"\x00",
        data[:-1],
        b"\xdc\x00" + bytes((data[0] & 15,)) + data[1:],
    ):
        with pytest.raises(NotCanonicalError):
            decode_branch(kind, wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_byte_of_a_branch_is_refused_or_another_branch(kind: int) -> None:
    data = encode(sound(kind))
    for at in range(len(data)):
        for byte in range(256):
            changed = data[:at] + bytes((byte,)) + data[at + 1 :]
            try:
                branch = decode_branch(kind, changed)
            except InvalidInputError:
                continue
            keys = branch.keys or [""] * len(branch.digests)
            rows = zip(branch.digests, branch.counts, branch.sizes, keys, strict=True)
            assert encode_branch(kind, branch.level, [Child(*row) for row in rows]) == changed
