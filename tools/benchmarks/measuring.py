"""Takes measurements: both sides in one run, several times, in random order.

Machines are noisy and differ, so a time alone says little. Each claim is a ratio of
two things done by the same process on the same data, alternating, and the middle of
several such pairs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple


class Goal(NamedTuple):
    """A claim: what is compared, the bound, and what was measured."""

    name: str
    measured: float
    relation: str
    target: float
    unit: str
    detail: str = ""

    @property
    def met(self) -> bool:
        """Whether the measurement is within the bound."""
        if self.relation == "<=":
            return self.measured <= self.target
        return self.measured >= self.target


def at_most(name: str, measured: float, target: float, unit: str = "×", detail: str = "") -> Goal:
    """A claim with an upper bound."""
    return Goal(name, measured, "<=", target, unit, detail)


def at_least(name: str, measured: float, target: float, unit: str = "×", detail: str = "") -> Goal:
    """A claim with a lower bound."""
    return Goal(name, measured, ">=", target, unit, detail)


def seconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes, once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _spread(ratios: Sequence[float]) -> str:
    return f"runs gave {min(ratios):.2f} to {max(ratios):.2f}"


class Pair(NamedTuple):
    """Median times of two ways to do the same, and the median of their ratios."""

    ours_s: float
    theirs_s: float
    ratio: float
    #: The ratio of each run.
    ratios: tuple[float, ...]

    @property
    def spread(self) -> str:
        """The lowest and the highest ratio."""
        return _spread(self.ratios)

    @property
    def inverse_spread(self) -> str:
        """The same of theirs against ours."""
        return _spread([1 / ratio for ratio in self.ratios])


class Repeated(NamedTuple):
    """The median of a ratio that each run measures within itself."""

    ratio: float
    spread: str


def repeated(ratio: Callable[[], float], repeats: int) -> Repeated:
    """Measure a ratio several times."""
    ratios = [ratio() for _ in range(repeats)]
    return Repeated(median(ratios), _spread(ratios))


def side_by_side(
    ours: Callable[[], float], theirs: Callable[[], float], repeats: int, seed: int = 1
) -> Pair:
    """Run both alternately, in random order; each returns the seconds that count."""
    order = random.Random(seed)
    pairs: list[tuple[float, float]] = []
    for _ in range(repeats):
        if order.random() < 0.5:
            first = ours()
            pairs.append((first, theirs()))
        else:
            second = theirs()
            pairs.append((ours(), second))
    ratios = tuple(first / second for first, second in pairs)
    return Pair(
        median(pair[0] for pair in pairs),
        median(pair[1] for pair in pairs),
        median(ratios),
        ratios,
    )


_WORDS = (
    "the a of to and in is that it for was on are as with they be at one have this from or had by "
    "file error line test value function return import class module path index query table row "
    "user agent tool call result message session store commit branch node state token model cache "
    "request response server client thread process memory buffer write read open close flush sync "
    "please check why when where which because should could would maybe running failed passed fixed"
).split()


def texts(count: int, size: int, seed: int) -> Iterator[str]:
    """``count`` distinct texts of about ``size`` characters that compress as prose does."""
    source = random.Random(seed)
    for number in range(count):
        words: list[str] = [f"#{number}"]
        length = 0
        while length < size:
            word = source.choice(_WORDS)
            if source.random() < 0.08:
                word = f"{word}_{source.randrange(100_000)}"
            words.append(word)
            length += len(word) + 1
        yield " ".join(words)[:size]


def messages(count: int, size: int = 1550, seed: int = 7) -> list[dict[str, object]]:
    """Distinct messages of an agent's session, about ``size`` + 150 bytes each."""
    source = random.Random(seed)
    return [
        {
            "role": ("user", "assistant")[number % 2],
            "id": f"msg_{source.getrandbits(64):016x}",
            "parent": f"msg_{source.getrandbits(64):016x}",
            "created_at_ms": 1_760_000_000_000 + number * 1000 + source.randrange(900),
            "content": text,
        }
        for number, text in enumerate(texts(count, size, seed))
    ]
