"""Generated node ids: sortable by time, unique across sessions, forks and processes.

    id = milliseconds since 1970 (48 bits) ‖ random (64 bits), in 23 digits of base 32

The digits sort as the numbers do. Ids that one process generates are in order, also within a
millisecond and if the clock goes back.
"""

from __future__ import annotations

import secrets
import time
from typing import Final

from casstore.engine.forks import Lock

# Crockford's digits: no letter looks like another digit.
_DIGITS: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_LENGTH: Final = 23
_RANDOM_BITS: Final = 64
# Added to the last id for the next one in the same millisecond. Random, so that a forked child,
# which has a copy of the last id, does not generate the ids of its parent.
_STEP_BITS: Final = 48

_lock = Lock()
_last = 0


def new_node_id() -> str:
    """An id that no other node has."""
    global _last
    now_ms = time.time_ns() // 1_000_000
    number = now_ms << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    with _lock:
        if number <= _last:
            number = _last + 1 + secrets.randbits(_STEP_BITS)
        _last = number
    return "".join([_DIGITS[number >> shift & 31] for shift in _SHIFTS])


_SHIFTS: Final = range(5 * (_LENGTH - 1), -1, -5)
