"""Progress reports of long-running operations, and how to stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple


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

# ``now_and_then`` reports after each of this number of items.
REPORT_EVERY: Final = 1024


class Phase:
    """One phase of an operation: called with its counts, it reports a step.

    >>> steps = []
    >>> report = Phase(steps.append, "copy", "bytes")
    >>> report(10, 20)
    >>> steps
    [Step(phase='copy', done=10, total=20, unit='bytes')]
    """

    __slots__ = ("_name", "_progress", "_unit")

    def __init__(self, progress: Progress | None, name: str, unit: str) -> None:
        self._progress = progress
        self._name = name
        self._unit = unit

    def __call__(self, done: int, total: int | None = None) -> None:
        """Report how much is done, and of how much."""
        if self._progress is not None:
            self._progress(Step(self._name, done, total, self._unit))

    def now_and_then(self, done: int) -> None:
        """Report how much is done, unless it is too early for the next report."""
        if not done % REPORT_EVERY:
            self(done)
