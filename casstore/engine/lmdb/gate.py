"""Who is inside LMDB right now, and may anybody enter?

Closing an environment, opening it anew and forking the process all need a moment in
which no thread is inside a transaction. Entering must cost next to nothing, so it
takes no lock: a thread announces itself and then looks whether the gate is open;
whoever shuts the gate does it the other way round, so one of the two always sees
the other.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from casstore.errors import CasstoreError

_DRAIN_PAUSE_S: Final = 0.0001


class Gate:
    """Lets threads in and out, and can be shut for a while or for good."""

    def __init__(self) -> None:
        # Setting and deleting a key of a dict are atomic.
        self._inside: dict[int, bool] = {}
        self._refusal: CasstoreError | None = None
        self._paused = False

    def enter(self) -> None:
        """Count this thread as inside, or raise if the gate is shut for good.

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
        """Count this thread out."""
        del self._inside[threading.get_ident()]

    @property
    def is_inside(self) -> bool:
        """Is this thread inside?"""
        return threading.get_ident() in self._inside

    def check(self) -> None:
        """Raise if the gate is shut for good."""
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

    @property
    def is_awaited(self) -> bool:
        """Does somebody wait for all to be out? Then who stays long inside should leave."""
        return self._paused or self._refusal is not None

    @property
    def is_shut(self) -> bool:
        """Is the gate shut for good?"""
        return self._refusal is not None

    def shut(self, refusal: CasstoreError) -> None:
        """Refuse everybody from now on, with this error, and wait until all are out."""
        self._refusal = refusal
        self._drain()

    def pause(self) -> None:
        """Let nobody in until ``resume``, and wait until all are out."""
        self._paused = True
        self._drain()

    def resume(self) -> None:
        """Let those in who wait."""
        self._paused = False

    def shut_in_child(self, refusal: CasstoreError) -> None:
        """Refuse everybody in a forked child, where nobody else is left."""
        self._refusal = refusal
        self._inside.clear()
        self._paused = False

    def _drain(self) -> None:
        # The caller is outside by definition; an interruption between its last entering
        # and leaving may have left its mark behind.
        self._inside.pop(threading.get_ident(), None)
        while self._inside:
            # Transactions are short and this is rare, so waiting costs less than a lock
            # in every transaction would.
            time.sleep(_DRAIN_PAUSE_S)
