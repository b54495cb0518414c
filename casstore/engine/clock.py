"""The default clock of engines."""

from __future__ import annotations

import time


def wall_clock_ms() -> int:
    """Milliseconds since 1970 by the clock of this machine."""
    return time.time_ns() // 1_000_000
