"""Calls that run in threads, one at a time, in the order in which they were asked for.

Two tasks that write to one conversation may each go to a thread of their own, and threads are not
started in order. So a call takes its place while the event loop is still at it, and whichever
thread comes first does what stands before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from casstore.engine.forks import Lock

Result = TypeVar("Result")


class Place(Generic[Result]):
    """A call in the line: ``finish`` it in a thread."""

    def __init__(self, line: InOrder, call: Callable[[], Result]) -> None:
        self._line = line
        self._call = call
        self._done = False
        self._error: BaseException | None = None
        self._result: Result | None = None

    def run(self) -> None:
        """Make the call; its line does so."""
        try:
            self._result = self._call()
        except BaseException as exc:
            self._error = exc
        self._done = True

    def finish(self) -> Result:
        """Wait until what stands before is done and then this; what the call returns."""
        self._line.advance(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, as there was no error

    @property
    def done(self) -> bool:
        """Was the call made?"""
        return self._done

    def give_up(self) -> None:
        """Leave the line, unless the call was begun."""
        self._line.remove(self)


class InOrder:
    """A line of calls."""

    def __init__(self) -> None:
        self._running = Lock()
        self._changing = Lock()
        self._waiting: deque[Place[Any]] = deque()

    def take_place(self, call: Callable[[], Result]) -> Place[Result]:
        """Put a call at the end of the line. Blocks nobody."""
        place = Place(self, call)
        with self._changing:
            self._waiting.append(place)
        return place

    def advance(self, until: Place[Any]) -> None:
        """Make the calls up to this one."""
        with self._running:
            while not until.done:
                with self._changing:
                    if not self._waiting:
                        # It had left the line.
                        return
                    place = self._waiting.popleft()
                place.run()

    def remove(self, place: Place[Any]) -> None:
        """Take a call out of the line that was not begun."""
        with self._changing:
            if place in self._waiting:
                self._waiting.remove(place)
