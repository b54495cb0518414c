"""What of a database is not in the store as it was there: counted, and the first of each named."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Found(NamedTuple):
    """Something that is not as it was, to be told."""

    what: str
    number: int
    #: The first that it is about.
    first: str


class Findings:
    """What is to be told, by kind."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, what: str, name: str, number: int = 1) -> None:
        """Tell of one more."""
        self._numbers[what] += number
        self._first.setdefault(what, name)

    def all(self) -> tuple[Found, ...]:
        """All of them, in the order in which they came up."""
        return tuple([Found(what, self._numbers[what], self._first[what]) for what in self._first])
