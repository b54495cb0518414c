"""Waits until a change of the store gives the caller what it waits for, for example a lease.

A ``Look`` reads the store once: it returns what the caller waits for, or None. ``until`` repeats it
when the store may have changed, at the time that the look itself has named (``due_s``), and at
least every ``LOOK_S`` seconds. ``aio.changes`` does the same for tasks.
"""

from __future__ import annotations

import time
from typing import Final, Protocol, TypeVar

from casstore.session.state import Runtime

Found = TypeVar("Found", covariant=True)

# Closing a store wakes no watch while another store of this process keeps the engine open, so
# ``until`` looks at least this often.
LOOK_S: Final = 1.0
# The shortest pause if ``due_s`` has passed and the look found nothing: clocks may differ a little.
_LEAST_S: Final = 0.005


class Look(Protocol[Found]):
    """Reads the store once, and may do what the caller waits to do, such as claim a lease."""

    #: In how many seconds another look may succeed without a write, as when a lease expires; None:
    #: never.
    due_s: float | None

    def __call__(self) -> Found | None:
        """What the caller waits for; None if it is not there yet."""
        ...


def until(runtime: Runtime, look: Look[Found], timeout_s: float | None) -> Found | None:
    """What ``look`` returns, now or later; None if ``timeout_s`` pass without it."""
    if timeout_s is not None and timeout_s <= 0:
        return look()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    # Started before the first look, so that the watch reports a write that comes during the look.
    watch = runtime.engine.watch()
    try:
        while True:
            found = look()
            if found is not None:
                return found
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            watch.wait(pause_s(look.due_s, LOOK_S if left is None else min(left, LOOK_S)))
    finally:
        watch.close()


def pause_s(due_s: float | None, longest_s: float) -> float:
    """How long to wait for a change before the next look."""
    return longest_s if due_s is None else min(max(due_s, _LEAST_S), longest_s)
