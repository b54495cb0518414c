"""Beginning again when somebody else was first, a bounded number of times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from casstore.errors import (
    BusyError,
    CasstoreError,
    ConditionFailedError,
    CorruptionError,
    NotFoundError,
)

Result = TypeVar("Result")

_MAX_ATTEMPTS: Final = 256
# Whoever loses a few times in a row lets the others go first, for a random while.
_AT_ONCE: Final = 4
_FIRST_WAIT_S: Final = 0.0005
_LONGEST_WAIT_S: Final = 0.02
_MAX_READINGS: Final = 16


def attempts(what: str) -> Iterator[int]:
    """Count attempts, with pauses in between; BusyError after the last."""
    wait_s = _FIRST_WAIT_S
    for number in range(_MAX_ATTEMPTS):
        if number >= _AT_ONCE:
            # Who was first may be another process, or across a network, and is done by now:
            # there is nothing to wait for but that fewer meet. For asyncio this is in a thread.
            time.sleep(random.uniform(0, wait_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        yield number
    raise BusyError(f"{what} kept changing; try again when fewer write to it")


def settled(
    attempt: Callable[[], Result],
    missed: tuple[type[CasstoreError], ...] = (CorruptionError, NotFoundError),
) -> Result:
    """What an attempt gives; made again if something that it needs is missing.

    A session that was deleted, vacuumed or pruned, and collected, between two readings has none
    of the old pieces: from the beginning it is seen as it is now, or the error says that it has
    gone. What is damaged, or was never there, is missed again, and then it is told. Nothing may
    be read after a write: an attempt that fails has written nothing. ``missed`` are the errors
    that speak of something missing.
    """
    told = ""
    for _ in range(_MAX_READINGS):
        try:
            return attempt()
        except missed as exc:
            if repr(exc) == told:
                raise
            told = repr(exc)
    return attempt()


def until_written(what: str, attempt: Callable[[], Result]) -> Result:
    """What an attempt gives that reads, decides and writes under the condition of what it read.

    It is made again as long as somebody else was first; BusyError if that does not end.
    """
    for _ in attempts(what):
        try:
            return attempt()
        except ConditionFailedError:
            continue
    raise AssertionError("attempts raises at its end")
