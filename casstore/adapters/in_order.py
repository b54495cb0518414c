"""Runs calls in threads, one at a time, in the order in which they were queued.

Two tasks that write to one conversation may run in different threads, which do not start in order.
So a call is queued before it leaves the event loop, and the first thread to run also executes the
calls queued before its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from casstore.engine.forks import Lock

Result = TypeVar("Result")


class QueuedCall(Generic[Result]):
    """A queued call; ``finish`` it in a thread."""

    def __init__(self, line: InOrder, call: Callable[[], Result]) -> None:
        self._line = line
        self._call = call
        self._done = False
        self._error: BaseException | None = None
        self._result: Result | None = None

    def run(self) -> None:
        """Run the call; called by its queue."""
        try:
            self._result = self._call()
        except BaseException as exc:
            self._error = exc
        self._done = True

    def finish(self) -> Result:
        """Return the result of the call, after running the queued calls up to this one, in order.

        If another thread is running queued calls, waits for it first.
        """
        self._line.advance(self)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, as there was no error

    @property
    def done(self) -> bool:
        """Whether the call has run."""
        return self._done

    def give_up(self) -> None:
        """Remove the call from the queue, unless it has started."""
        self._line.remove(self)


class InOrder:
    """A queue of calls."""

    def __init__(self) -> None:
        self._running = Lock()
        self._changing = Lock()
        self._waiting: deque[QueuedCall[Any]] = deque()

    def take_place(self, call: Callable[[], Result]) -> QueuedCall[Result]:
        """Add a call to the queue. Does not block."""
        place = QueuedCall(self, call)
        with self._changing:
            self._waiting.append(place)
        return place

    def advance(self, until: QueuedCall[Any]) -> None:
        """Run the calls that are still queued up to this one; one thread at a time does so."""
        with self._running:
            while not until.done:
                with self._changing:
                    if not self._waiting:
                        # The call was removed from the queue.
                        return
                    place = self._waiting.popleft()
                place.run()

    def remove(self, place: QueuedCall[Any]) -> None:
        """Remove a call that has not started."""
        with self._changing:
            if place in self._waiting:
                self._waiting.remove(place)
