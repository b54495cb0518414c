"""Which parts of two sequences are the same: the runs leave nothing out and claim nothing false."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from casstore.objects.align import DifferingRun, differing_runs

PROFILE = settings(deadline=None, max_examples=200, derandomize=True, database=None)

tokens = st.lists(st.integers(0, 6), max_size=14)


def assert_sound(old: Sequence[Any], new: Sequence[Any]) -> list[DifferingRun]:
    """The runs are ordered, disjoint and not empty, and what lies between them is equal."""
    runs = list(differing_runs(old, new))
    at_old = at_new = 0
    for run in (*runs, DifferingRun(len(old), len(old), len(new), len(new))):
        assert at_old <= run.old_start <= run.old_stop <= len(old)
        assert at_new <= run.new_start <= run.new_stop <= len(new)
        assert old[at_old : run.old_start] == new[at_new : run.new_start]
        at_old, at_new = run.old_stop, run.new_stop
    assert all(run.old_start < run.old_stop or run.new_start < run.new_stop for run in runs)
    return runs


@PROFILE
@given(tokens, tokens)
@example([], [])
@example([], [1])
@example([1], [])
@example([1, 1, 1], [1, 1])
@example([1, 2, 1, 2], [2, 1, 2, 1])
def test_runs_are_ordered_and_disjoint_and_the_rest_is_equal(
    old: list[int], new: list[int]
) -> None:
    runs = assert_sound(old, new)
    assert (runs == []) == (old == new)


@PROFILE
@given(tokens, tokens)
def test_a_run_starts_and_ends_with_a_difference(old: list[int], new: list[int]) -> None:
    for run in differing_runs(old, new):
        left, right = old[run.old_start : run.old_stop], new[run.new_start : run.new_stop]
        if left and right:
            assert left[0] != right[0]
            assert left[-1] != right[-1]


@PROFILE
@given(st.lists(st.integers(), unique=True, max_size=30), st.data())
def test_one_inserted_run_among_unique_tokens_is_found_exactly(
    old: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(old)))
    extra = [f"new {number}" for number in range(data.draw(st.integers(1, 5)))]
    new = [*old[:at], *extra, *old[at:]]
    assert list(differing_runs(old, new)) == [DifferingRun(at, at, at, at + len(extra))]
    assert list(differing_runs(new, old)) == [DifferingRun(at, at + len(extra), at, at)]


def test_a_moved_block_of_unique_tokens_is_two_runs() -> None:
    old = list(range(100))
    new = [*old[:20], *old[30:80], *old[20:30], *old[80:]]
    runs = assert_sound(old, new)
    assert runs == [DifferingRun(20, 30, 20, 20), DifferingRun(80, 80, 70, 80)]


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_common_order_of_unique_tokens_is_kept(seed: int) -> None:
    source = random.Random(seed)
    old = list(range(200))
    new = sorted(source.sample(old, 150))
    kept = 200 - sum(run.old_stop - run.old_start for run in assert_sound(old, new))
    assert kept == 150


class Counted:
    """A token that counts how often it is compared."""

    compared = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return isinstance(other, Counted) and self.name == other.name


@pytest.mark.parametrize("names", [1, 2, 3, 5_000, 10**9])
def test_differing_runs_makes_at_most_12_comparisons_per_token(names: int) -> None:
    source = random.Random(names)
    old = [Counted(source.randrange(names)) for _ in range(5_000)]
    new = [Counted(source.randrange(names)) for _ in range(5_000)]
    Counted.compared = 0
    list(differing_runs(old, new))
    assert Counted.compared <= 12 * 10_000
