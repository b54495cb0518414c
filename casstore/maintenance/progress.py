"""Progress reports of long-running operations, and how to stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """How far a long-running operation has come."""

    #: What is being done, one word: "mark", "sweep", "copy" …
    phase: str
    done: int
    #: None: not known beforehand.
    total: int | None
    #: What is counted: "objects", "bytes", "sessions" …
    unit: str


#: Called now and then, in the thread of the operation. An exception that it raises ends the
#: operation at a point where that is safe, and is raised to the caller.
Progress = Callable[[Step], None]
