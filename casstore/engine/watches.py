"""Watches: a descriptor that becomes readable when a store may have changed.

What all watches share is here, and the one that needs nothing but a pipe. A watch is
woken from other threads, also when its engine closes, but never closed by them: whoever
waits on a descriptor must not find that its number has come to mean something else.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from casstore.engine.forks import Lock
from casstore.errors import ClosedError, StorageError

# poll takes milliseconds in a C int; nobody can tell this from for ever.
_LONGEST_S: Final = 1_000_000.0
_MANY_BYTES: Final = 64 << 10


class DescriptorWatch(ABC):
    """A watch on ``handle``, which it owns; ``check`` raises when the engine refuses calls.

    A subclass says how to make the descriptor readable, and how to let go of it.
    """

    # Until __init__ is through, there is nothing to close.
    _closed = True

    def __init__(self, handle: int, check: Callable[[], None]) -> None:
        self._handle = handle
        self._check = check
        self._lock = Lock()
        self._closed = False

    def fileno(self) -> int:
        """What to poll, or to hand to an event loop."""
        self._check()
        if self._closed:
            raise ClosedError("this watch was closed")
        return self._handle

    def drain(self) -> None:
        """Take note of all changes so far."""
        handle = self.fileno()
        try:
            while os.read(handle, _MANY_BYTES):
                pass
        except BlockingIOError:
            return

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until something may have changed; False when the time is up before."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        # To poll, a negative time is for ever.
        time_ms = None if timeout_s is None else max(0.0, min(timeout_s, _LONGEST_S)) * 1000
        if not poller.poll(time_ms):
            return False
        self.drain()
        return True

    def wake(self) -> None:
        """Make the descriptor readable; from any thread."""
        with self._lock:
            if not self._closed:
                self._signal()

    def close(self) -> None:
        """Give the descriptors back. Closing twice is allowed."""
        if self._closed:
            return
        with self._lock:
            # Asked again: of two who close it at once, the second must not give back a number
            # that is somebody else's by then.
            if not self._closed:
                self._closed = True
                self._release()

    def __del__(self) -> None:
        self.close()

    @abstractmethod
    def _signal(self) -> None:
        """Make the descriptor readable."""

    def _release(self) -> None:
        os.close(self._handle)


class PipeWatch(DescriptorWatch):
    """A watch that is readable when, and only when, somebody has called ``wake``."""

    def __init__(self, check: Callable[[], None]) -> None:
        try:
            reading, self._writing = os.pipe()
        except OSError as exc:
            raise StorageError(f"no descriptors to watch with: {exc.strerror}") from exc
        os.set_blocking(reading, False)
        os.set_blocking(self._writing, False)
        super().__init__(reading, check)

    def _signal(self) -> None:
        try:
            os.write(self._writing, b"\0")
        except BlockingIOError:
            # Nobody has drained it for long; it could not be more readable.
            return

    def _release(self) -> None:
        super()._release()
        os.close(self._writing)
