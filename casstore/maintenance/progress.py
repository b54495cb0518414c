"""Progress reports of long-running operations, and how to stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """How far a piece of long work has come."""

    #: What is being done, one word: "mark", "sweep", "copy" …
    phase: str
    done: int
    #: None: not known beforehand.
    total: int | None
    #: What is counted: "objects", "bytes", "sessions" …
    unit: str


#: Called now and then, from the thread that works. Raising from it stops the work at the next
#: place where stopping is harmless; the exception comes out of the call.
Progress = Callable[[Step], None]
