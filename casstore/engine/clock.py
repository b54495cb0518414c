"""The time that engines go by, unless they are given another clock."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since 1970, by this machine's clock."""
    return time.time_ns() // 1_000_000
