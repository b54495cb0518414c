"""Watches: a descriptor that becomes readable when a store may have changed.

``DescriptorWatch`` is the base class, ``PipeWatch`` the implementation with a pipe. Any thread may
wake a watch; the engine wakes all of its watches when it closes. But only the owner of a watch
closes it: otherwise the owner could poll a descriptor number that was closed and reused for another
file.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from casstore.engine.forks import Lock
from casstore.errors import ClosedError, StorageError

# poll takes milliseconds as a C int: 24 days, in effect no timeout.
_LONGEST_S: Final = 1_000_000.0
_MANY_BYTES: Final = 64 << 10


class DescriptorWatch(ABC):
    """A watch that owns the descriptor ``handle``; ``check`` raises if the engine is closed.

    A subclass implements ``_signal``, and ``_release`` if it has more to close.
    """

    # For ``__del__`` after a failed ``__init__``: nothing to close.
    _closed = True

    def __init__(self, handle: int, check: Callable[[], None]) -> None:
        self._handle = handle
        self._check = check
        self._lock = Lock()
        self._closed = False

    def fileno(self) -> int:
        """The descriptor to poll or to give to an event loop."""
        self._check()
        if self._closed:
            raise ClosedError("this watch was closed")
        return self._handle

    def drain(self) -> None:
        """Read all wake-ups, so that the descriptor is unreadable until the next change."""
        handle = self.fileno()
        try:
            while os.read(handle, _MANY_BYTES):
                pass
        except BlockingIOError:
            return

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the store may have changed, then drain and return True; False on timeout."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        # poll would wait without limit for a negative time.
        time_ms = None if timeout_s is None else max(0.0, min(timeout_s, _LONGEST_S)) * 1000
        if not poller.poll(time_ms):
            return False
        self.drain()
        return True

    def wake(self) -> None:
        """Make the descriptor readable; callable from any thread."""
        with self._lock:
            if not self._closed:
                self._signal()

    def close(self) -> None:
        """Close the descriptors. Closing twice is allowed."""
        if self._closed:
            return
        with self._lock:
            # Checked again under the lock: if two threads close it at once, the second must not
            # close a number that was reused.
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
    """A watch that becomes readable only by ``wake``."""

    def __init__(self, check: Callable[[], None]) -> None:
        """``check`` raises if the engine is closed. StorageError if no pipe can be opened."""
        try:
            reading, self._writing = os.pipe()
        except OSError as exc:
            raise StorageError(f"cannot open a pipe for a watch: {exc.strerror}") from exc
        os.set_blocking(reading, False)
        os.set_blocking(self._writing, False)
        super().__init__(reading, check)

    def _signal(self) -> None:
        try:
            os.write(self._writing, b"\0")
        except BlockingIOError:
            # The pipe is full of undrained wake-ups, so it is readable already.
            return

    def _release(self) -> None:
        super()._release()
        os.close(self._writing)
