"""Beginning again when somebody else was first, a bounded number of times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from casstore.errors import (
    BusyError,
    ComponentNotFoundError,
    ConditionFailedError,
    CorruptionError,
)

Result = TypeVar("Result")

_MAX_ATTEMPTS: Final = 256
# Whoever loses a few times in a row lets the others go first, for a random while.
_AT_ONCE: Final = 4
_FIRST_WAIT_S: Final = 0.0005
_LONGEST_WAIT_S: Final = 0.02


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


def settled(read: Callable[[], Result]) -> Result:
    """What a reading finds; read once more if a piece was missing.

    A session that was deleted or vacuumed, and collected, between two pieces has none of the
    old ones: from the beginning it is seen as it is now, or the error says that it has gone.
    What is damaged is found to be damaged again.
    """
    try:
        return read()
    except (CorruptionError, ComponentNotFoundError):
        return read()


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
