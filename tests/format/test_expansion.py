"""What a value expands to is computed from its distinct parts, without building it."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.errors import ExpansionError
from casstore.format import expansion, splitting
from casstore.format.canonical import ROLE_PART, ROLE_TEXT, encode, link_bytes
from casstore.format.digest import Kind, digest_of
from casstore.format.limits import MAX_REPEATED_BYTES
from casstore.format.tree import Child, encode_branch

PROFILE = settings(deadline=None, max_examples=80, derandomize=True, database=None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=30,
)  # fmt: skip


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


@st.composite
def graphs(draws: Any) -> dict[bytes, list[bytes]]:
    """Parts by number, each with places for parts of a lower number."""
    size = draws(st.integers(1, 9))
    return {
        name(number): [name(below) for below in draws(st.lists(st.integers(0, number - 1)))]
        for number in range(1, size + 1)
    }


@PROFILE
@given(graphs())
def test_expand_counts_a_part_once_for_each_of_its_occurrences(
    below: dict[bytes, list[bytes]],
) -> None:
    def cost(part: bytes) -> int:
        return 7 + 100 * part[-1] % 97

    def written_out(part: bytes) -> list[bytes]:
        return [part, *[inner for child in below.get(part, ()) for inner in written_out(child)]]

    roots = list(below)[-2:] * 2
    parts = [part for root in roots for part in written_out(root)]
    found = expansion.expand(roots, below, cost)
    assert found.everywhere == sum(map(cost, parts))
    assert found.once == sum(map(cost, set(parts)))
    reached = {part: below[part] for part in set(parts) if part in below}
    assert expansion.has_repetition(roots, reached) == (len(parts) > len(set(parts)))
    one = roots[:1]
    parts = written_out(one[0])
    reached = {part: below[part] for part in set(parts) if part in below}
    assert expansion.has_repetition(one, reached) == (len(parts) > len(set(parts)))


def test_a_chain_of_parts_longer_than_any_recursion_is_measured() -> None:
    below = {name(number): [name(number - 1)] * 2 for number in range(1, 20_000)}
    assert expansion.expand([name(19_999)], below, lambda part: 1).everywhere == 2**20_000 - 1


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(8_000)],
        [{} for _ in range(8_000)],
        [{"a": None} for _ in range(4_000)],
        [float(number) for number in range(8_000)],
        list(range(100_000, 108_000)),
        [0] * 8_000,
        [f"word {number}" for number in range(8_000)],
        {f"key {number}": number for number in range(4_000)},
        [["日本語", [1, 2.5], {"role": "user"}] for _ in range(1_000)],
    ],
    ids=range(9),
)
def test_the_estimate_is_close_to_the_memory_that_a_decoded_value_takes(value: Any) -> None:
    data = encode(value)
    estimate = expansion.memory_bytes(value, len(data))
    del value
    gc.collect()
    # Threads of other tests may allocate meanwhile, which only adds.
    taken = min(_memory_taken(data) for _ in range(3))
    assert taken / 2 < estimate < taken * 4


def _memory_taken(data: bytes) -> int:
    tracemalloc.start()
    try:
        kept = msgpack.unpackb(data)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept is not None
    return taken


@PROFILE
@given(VALUES)
def test_the_cost_of_a_value_never_exceeds_most_cost_of_its_size(value: Any) -> None:
    data = encode(value)
    assert expansion.own_cost(Kind.VALUE, data)[0] <= expansion.most_cost(len(data))


def test_the_cost_of_an_object_full_of_links_never_exceeds_most_cost_of_its_size() -> None:
    links = b"\x9f" + link_bytes(ROLE_PART, bytes(32)) * 15
    cost, parts = expansion.own_cost(Kind.VALUE, links)
    assert parts == [bytes(32)] * 15
    assert cost <= expansion.most_cost(len(links))
    branch = encode_branch(Kind.LIST, 1, [Child(bytes(32), 1, 1, "")] * 128)
    cost, parts = expansion.own_cost(Kind.LIST, branch)
    assert parts == [bytes(32)] * 128
    assert cost <= expansion.most_cost(len(branch))
    text = link_bytes(ROLE_TEXT, bytes(32))
    assert expansion.own_cost(Kind.VALUE, text)[1] == []
    assert expansion.own_cost(Kind.BLOB, b"x" * 100) == (0, [])


# --- putting -------------------------------------------------------------------------------------


def doubled(levels: int) -> Any:
    value: Any = {"core": "x" * 500}
    for _ in range(levels):
        value = {"left": value, "right": value, "text": "y" * 450}
    return value


def pieces_of(value: Any) -> dict[bytes, tuple[int, bytes]]:
    found: dict[bytes, tuple[int, bytes]] = {}

    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        found[digest_of(kind, data)] = kind, data
        return digest_of(kind, data)

    splitting.split(value, emit)
    return found


def test_splitting_refuses_a_value_whose_shared_parts_repeat_beyond_the_limit() -> None:
    with pytest.raises(ExpansionError, match=f"{MAX_REPEATED_BYTES:,}.*Link"):
        pieces_of(doubled(17))
    # One level less is accepted, and takes more than a third of what is allowed.
    pieces = pieces_of(doubled(16))
    below = {name: expansion.own_cost(*piece)[1] for name, piece in pieces.items()}
    root = next(reversed(pieces))
    found = expansion.expand([root], below, lambda name: expansion.own_cost(*pieces[name])[0])
    assert MAX_REPEATED_BYTES // 3 < found.repeated <= MAX_REPEATED_BYTES
    with pytest.raises(ExpansionError):
        pieces_of(doubled(50))


def test_equal_parts_count_as_shared_though_they_are_distinct_python_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces are shared by content, so reading cannot tell the two apart."""
    monkeypatch.setattr(splitting, "MAX_REPEATED_BYTES", 1 << 20)

    def rows(count: int) -> list[Any]:
        return [{"a": [1] * 120, "text": "x" * 80} for _ in range(count)]

    pieces_of(rows(200))
    with pytest.raises(ExpansionError):
        pieces_of(rows(1_000))
    pieces_of([{**row, "number": number} for number, row in enumerate(rows(1_000))])


def test_repeating_one_long_text_does_not_count_as_expansion() -> None:
    text = "x" * 100_000
    pieces_of([{"text": text, "number": number} for number in range(5_000)])
