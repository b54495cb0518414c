"""``MessageOrder``: which messages a session shows, and in which order, after folds.

Before the first fold, messages are shown in order of arrival. A note arrives last but is shown
where its fold began. So the order up to the last fold is stored as runs of numbers; later messages
follow in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from casstore.errors import InvalidInputError

Run = tuple[int, int]


class MessageOrder(NamedTuple):
    """The order in which messages are shown: ``runs``, then every number above ``upto``."""

    runs: tuple[Run, ...] = ()
    upto: int = 0

    def shown(self, last: int) -> tuple[Run, ...]:
        """All runs of a session whose last message is ``last``."""
        if last <= self.upto:
            return self.runs
        if self.runs and self.runs[-1][1] == self.upto:
            return (*self.runs[:-1], (self.runs[-1][0], last))
        return (*self.runs, (self.upto + 1, last))

    def shows(self, number: int) -> bool:
        """Whether a message with this number is shown."""
        return number > self.upto or any(first <= number <= last for first, last in self.runs)

    def folded(self, numbers: Iterable[int], note: int) -> MessageOrder:
        """The order after messages are folded into ``note``, the number of the newest message.

        InvalidInputError if one of ``numbers`` is not shown.
        """
        left = set(numbers)
        if not left:
            raise InvalidInputError("messages is empty; a fold needs at least one")
        order: list[int] = []
        placed = False
        for number in _numbers(self.shown(note - 1)):
            if number not in left:
                order.append(number)
                continue
            left.discard(number)
            if not placed:
                order.append(note)
                placed = True
        if left:
            raise InvalidInputError(
                f"message {min(left)} cannot be folded: it does not exist, or is folded already"
            )
        return MessageOrder(tuple(runs_of(order)), note)


def runs_of(numbers: Sequence[int]) -> Iterator[Run]:
    """The numbers in the given order; neighbours that count up are joined to runs."""
    first: int | None = None
    last = 0
    for number in numbers:
        if first is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield first, last
        first = last = number
    if first is not None:
        yield first, last


def _numbers(runs: Sequence[Run]) -> Iterator[int]:
    for first, last in runs:
        yield from range(first, last + 1)
