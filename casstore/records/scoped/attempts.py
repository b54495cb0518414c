"""Beginning again when somebody else was quicker, not for ever."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Final

from casstore.errors import BusyError

_MAX_ATTEMPTS: Final = 256
# So often at once; then waiting a little lets the others finish first.
_AT_ONCE: Final = 4
_LONGEST_WAIT_S: Final = 0.004


def attempts(what: str) -> Iterator[int]:
    """Count attempts; BusyError after the last."""
    for number in range(_MAX_ATTEMPTS):
        if number >= _AT_ONCE:
            time.sleep(random.uniform(0, _LONGEST_WAIT_S))
        yield number
    raise BusyError(f"{what} kept changing; try again when fewer write to it")
