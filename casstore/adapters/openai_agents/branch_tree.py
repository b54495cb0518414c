"""Where branches that are lists of rows go apart, found without holding the lists.

A branch that was added is walked along by those that come later: to where they leave it, and from
there along the branch that has left it before them in the same direction. What is
remembered is one place for each branch, however long they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple


class Fork(NamedTuple):
    """Where a branch leaves another: it shares the first ``at`` items with ``base``."""

    #: None: it shares nothing with any.
    base: str | None
    at: int
    #: How many items it has, shared ones included.
    length: int


class BranchTree:
    """The branches of one session. ``rows`` gives those of a branch, as often as it is asked."""

    def __init__(self, rows: Callable[[str], Iterator[int]]) -> None:
        self._rows = rows
        # By what it left, where, and the row it went on with: the branch that did so first.
        self._left: dict[tuple[str | None, int, int], str] = {}

    def add(self, name: str) -> Fork:
        """Put a branch into the tree; where it leaves those that are there."""
        base: str | None = None
        theirs: Iterator[int] = iter(())
        rows, at = self._rows(name), 0
        for row in rows:
            if next(theirs, None) != row:
                other = self._left.setdefault((base, at, row), name)
                if other == name:
                    return Fork(base, at, at + 1 + sum(1 for _ in rows))
                base, theirs = other, islice(self._rows(other), at + 1, None)
            at += 1
        return Fork(base, at, at)
