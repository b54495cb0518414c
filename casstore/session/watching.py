"""Waiting for a head to move, whoever moves it.

The watch is made before the head is read: a commit that the reading missed wakes it.
"""

from __future__ import annotations

import time
from typing import Final

from casstore.session.arguments import check_count, check_seconds
from casstore.session.attempts import settled
from casstore.session.data import Head
from casstore.session.loading import find_head
from casstore.session.state import Runtime

_LOOK_UP_S: Final = 1.0


def check(after: int, timeout_s: float | None) -> None:
    """Refuse a revision that cannot be, and a time that never comes."""
    check_count(after, "a revision")
    if timeout_s is not None:
        check_seconds(timeout_s, "a time to wait")


def wait(runtime: Runtime, session: str, after: int, timeout_s: float | None) -> Head | None:
    """The head once its revision is above ``after``; None if the time is up before."""
    check(after, timeout_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    watch = runtime.engine.watch()
    try:
        while True:
            head = settled(lambda: find_head(runtime, session))
            if head is not None and head.revision > after:
                return head
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            # A store may be closed while others in this process keep its engine open, and
            # then nothing wakes the watch: look up now and then.
            watch.wait(_LOOK_UP_S if left is None else min(left, _LOOK_UP_S))
    finally:
        watch.close()
