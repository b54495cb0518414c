"""Aligns two sequences: finds the runs in which they differ, in O(n log n) on every input (P7).

Equal ends are cut off. The rest is anchored at tokens that occur exactly once on each side, in the
longest common order (patience diff). The runs between the anchors differ. Anchoring at unique
tokens also gives the diff that a reader expects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class DifferingRun(NamedTuple):
    """``new[new_start:new_stop]`` replaces ``old[old_start:old_stop]``."""

    old_start: int
    old_stop: int
    new_start: int
    new_stop: int


def differing_runs(old: Sequence[Hashable], new: Sequence[Hashable]) -> Iterator[DifferingRun]:
    """The runs in which two sequences differ, in order; equal sequences have none."""
    last_old = last_new = 0
    for at_old, at_new in (*_anchors(old, new), (len(old), len(new))):
        yield from _trimmed(old, new, DifferingRun(last_old, at_old, last_new, at_new))
        last_old, last_new = at_old + 1, at_new + 1


def _trimmed(
    old: Sequence[Hashable], new: Sequence[Hashable], run: DifferingRun
) -> Iterator[DifferingRun]:
    """Cut equal tokens off both ends of a run; yields nothing if no token is left."""
    old_start, old_stop, new_start, new_stop = run
    while old_start < old_stop and new_start < new_stop and old[old_start] == new[new_start]:
        old_start += 1
        new_start += 1
    while old_start < old_stop and new_start < new_stop and old[old_stop - 1] == new[new_stop - 1]:
        old_stop -= 1
        new_stop -= 1
    if old_start < old_stop or new_start < new_stop:
        yield DifferingRun(old_start, old_stop, new_start, new_stop)


def _anchors(old: Sequence[Hashable], new: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The (old, new) positions of tokens that occur once on each side, in the longest order."""
    once_old = _unique(old)
    once_new = _unique(new)
    pairs = [(at, once_new[token]) for token, at in once_old.items() if token in once_new]
    # The longest increasing subsequence of the new positions (patience sorting).
    tops: list[int] = []
    pile_pairs: list[int] = []
    before: list[int] = [-1] * len(pairs)
    for index, (_, at_new) in enumerate(pairs):
        pile = bisect_left(tops, at_new)
        if pile:
            before[index] = pile_pairs[pile - 1]
        if pile == len(tops):
            tops.append(at_new)
            pile_pairs.append(index)
        else:
            tops[pile] = at_new
            pile_pairs[pile] = index
    chain: list[tuple[int, int]] = []
    index = pile_pairs[-1] if pile_pairs else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


def _unique(tokens: Sequence[Hashable]) -> dict[Hashable, int]:
    counts = Counter(tokens)
    return {token: at for at, token in enumerate(tokens) if counts[token] == 1}
