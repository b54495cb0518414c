"""Waiting for a head to move, whoever moves it.

The watch is made before the head is read: a commit that the reading missed wakes it.
"""

from __future__ import annotations

import time

from casstore.session.data import Head
from casstore.session.loading import find_head
from casstore.session.state import Runtime


def wait(runtime: Runtime, session: str, after: int, timeout_s: float | None) -> Head | None:
    """The head once its revision is above ``after``; None if the time is up before."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    watch = runtime.engine.watch()
    try:
        while True:
            head = find_head(runtime, session)
            if head is not None and head.revision > after:
                return head
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            watch.wait(left)
    finally:
        watch.close()
