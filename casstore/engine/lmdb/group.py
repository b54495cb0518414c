"""Group commit: writers that wait at the same time share one transaction and one flush.

The first writer to arrive leads: it runs everything queued so far as one batch.
Writers that arrive meanwhile queue up; when the batch is done, the leader wakes its
members with their own results and hands the lead to the first of those still
waiting, who lingers a moment until those just answered are back. Nobody but the writers
themselves does any work, so a single writer pays nothing for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from casstore.errors import CasstoreError

Work = TypeVar("Work")
Result = TypeVar("Result")

# A batch is bounded so that no writer waits for the work of thousands.
MAX_BATCH = 64
# How long a leader waits at the most for the others to gather: a few flushes.
LINGER_S = 0.001


class Ticket(Generic[Work, Result]):
    """One writer's place in the queue. The leader fills in ``result`` or ``error``."""

    __slots__ = ("_wake", "error", "result", "wakes", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.result: Result | None = None
        self.error: CasstoreError | None = None
        # Only who follows ever sleeps.
        self._wake: threading.Lock | None = None
        #: Those whom this writer has to wake, once it has led.
        self.wakes: Sequence[Ticket[Work, Result]] = ()

    @property
    def done(self) -> bool:
        """Has a leader answered this writer?"""
        return self.result is not None or self.error is not None

    def follow(self) -> None:
        """Be ready to sleep; call before anybody can wake this writer."""
        # Held from the start: acquiring it again is how a follower sleeps.
        self._wake = threading.Lock()
        self._wake.acquire()

    def sleep(self) -> None:
        """Wait for an answer, or for the lead."""
        assert self._wake is not None
        self._wake.acquire()

    def wake(self) -> None:
        """Let the writer look: it is answered, or it leads. Waking twice is harmless."""
        if self._wake is not None and self._wake.locked():
            self._wake.release()


class CommitQueue(Generic[Work, Result]):
    """Runs tickets in batches.

    ``run`` answers every ticket of its batch, or raises having answered and changed
    nothing; a batch then stays queued.
    """

    def __init__(self, run: Callable[[list[Ticket[Work, Result]]], None]) -> None:
        self._run = run
        self._lock = threading.Lock()
        # Tickets leave the queue only once they are answered or given up, so an
        # interrupted leader loses nobody's.
        self._waiting: deque[Ticket[Work, Result]] = deque()
        self._leader: Ticket[Work, Result] | None = None
        # How many writers were about when the last batch ended: those it answered, and
        # those who waited.
        self._crowd = 1
        self._lingers = False
        # Held but for the moment in which the crowd is complete: cheaper than an Event.
        self._gathered = threading.Lock()
        self._gathered.acquire()

    def submit(self, work: Work) -> Result:
        """Run ``work`` in some batch; return its own result or raise its own error."""
        ticket: Ticket[Work, Result] = Ticket(work)
        try:
            with self._lock:
                self._waiting.append(ticket)
                if self._leader is None:
                    self._leader = ticket
                else:
                    ticket.follow()
                    if self._lingers and len(self._waiting) >= self._crowd:
                        self._lingers = False
                        if self._gathered.locked():  # an interrupted leader may have left it open
                            self._gathered.release()
            if self._leader is not ticket:
                ticket.sleep()
            if ticket.result is None and ticket.error is None:
                self._lead()
            if self._leader is ticket:
                self._retire(ticket)
        except BaseException:
            # Interrupted (Ctrl-C), asleep, leading or about to end: the queue goes on without us.
            self._retire(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
        assert ticket.result is not None
        return ticket.result

    def _lead(self) -> None:
        with self._lock:
            self._lingers = lingers = len(self._waiting) < self._crowd
            batch = self._batch()
        if lingers:
            self._linger()
            with self._lock:
                batch = self._batch()
        self._run(batch)

    def _batch(self) -> list[Ticket[Work, Result]]:
        return [ticket for ticket in islice(self._waiting, MAX_BATCH) if not ticket.done]

    def _linger(self) -> None:
        """Wait a moment for writers who were just answered and will be back.

        Without it writers fall into two halves that take turns, and each flush serves
        one half. A lone writer never waits.
        """
        if self._gathered.acquire(timeout=LINGER_S):
            return
        with self._lock:
            if not self._lingers:
                # They came just now: take back what the last of them released.
                self._gathered.acquire(blocking=False)
            # They have other things to do.
            self._lingers = False
            self._crowd = len(self._waiting)

    def _retire(self, ticket: Ticket[Work, Result]) -> None:
        """Take ``ticket`` out; if it led, wake those it answered and pass the lead on.

        Interrupted, it can be done again. Between attributes that are set in a row, with no call,
        Python does not interrupt.
        """
        with self._lock:
            waiting = self._waiting
            if self._leader is not ticket:
                if ticket in waiting:
                    waiting.remove(ticket)
            elif len(waiting) == 1 and waiting[0] is ticket:
                # Nobody else is about.
                waiting.clear()
                self._leader, self._crowd = None, 1
                return
            else:
                answered: list[Ticket[Work, Result]] = []
                left: deque[Ticket[Work, Result]] = deque()
                for other in waiting:
                    (answered if other.done or other is ticket else left).append(other)
                leader = left[0] if left else None
                crowd = min(len(left) + len(answered), MAX_BATCH)
                wakes = answered if leader is None else [leader, *answered]
                ticket.wakes = wakes
                self._waiting, self._leader, self._crowd = left, leader, crowd
        # Outside the lock, which the woken will want at once; the next leader first.
        for other in ticket.wakes:
            other.wake()
