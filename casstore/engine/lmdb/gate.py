"""The gate: counts the threads that are inside LMDB, and can keep threads out.

Closing an environment, reopening it and forking the process all need a moment in which no
thread is inside a transaction. Entering must be cheap, so it takes no lock: a thread registers
itself and then checks whether the gate is open. A thread that shuts the gate does the reverse:
it shuts the gate and then checks for registered threads. So one of the two always sees the
other.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from casstore.errors import CasstoreError

_DRAIN_PAUSE_S: Final = 0.0001


class Gate:
    """Counts threads in and out, and can be shut temporarily or permanently."""

    def __init__(self) -> None:
        # Setting and deleting a key of a dict are atomic.
        self._inside: dict[int, bool] = {}
        self._refusal: CasstoreError | None = None
        self._paused = False

    def enter(self) -> None:
        """Register this thread as inside, or raise if the gate is shut permanently.

        A thread must leave before it enters again.
        """
        me = threading.get_ident()
        while True:
            self._inside[me] = True
            if self._refusal is None and not self._paused:
                return
            del self._inside[me]
            self.check()
            # Rare and short. A Condition would be left locked by an interrupt.
            while self._paused:
                time.sleep(_DRAIN_PAUSE_S)

    def leave(self) -> None:
        """Unregister this thread."""
        del self._inside[threading.get_ident()]

    @property
    def is_inside(self) -> bool:
        """True if this thread is inside."""
        return threading.get_ident() in self._inside

    def check(self) -> None:
        """Raise if the gate is shut permanently."""
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

    @property
    def is_awaited(self) -> bool:
        """True while ``close`` or a fork waits; long-running readers should then leave."""
        return self._paused or self._refusal is not None

    @property
    def is_shut(self) -> bool:
        """True if the gate is shut permanently."""
        return self._refusal is not None

    def shut(self, refusal: CasstoreError) -> None:
        """Refuse all threads from now on, with this error, and wait until none is inside."""
        self._refusal = refusal
        self._drain()

    def pause(self) -> None:
        """Keep threads waiting until ``resume``, and wait until none is inside."""
        self._paused = True
        self._drain()

    def resume(self) -> None:
        """Let the waiting threads enter."""
        self._paused = False

    def shut_in_child(self, refusal: CasstoreError) -> None:
        """Refuse all calls in a forked child, which has no other threads."""
        self._refusal = refusal
        self._inside.clear()
        self._paused = False

    def _drain(self) -> None:
        # The caller is never inside here; an interrupt between its last ``enter`` and ``leave``
        # may have left it registered.
        self._inside.pop(threading.get_ident(), None)
        while self._inside:
            # Transactions are short and this is rare, so polling costs less than a lock in every
            # transaction would.
            time.sleep(_DRAIN_PAUSE_S)
