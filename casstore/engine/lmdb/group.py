"""Group commit: writers that wait at the same time share one transaction and one flush.

The first writer to arrive leads: it runs everything queued so far as one batch. Writers that
arrive meanwhile queue up and sleep. When the batch is done, the leader wakes its members, and
the first writer that is still waiting, which leads the next batch. The writers do all the work
themselves, so a single writer pays nothing for the queue.

An interrupt (Ctrl-C) may hit the leader anywhere. Three rules keep the other writers safe:

1. One assignment, ``TicketBatch.answers``, answers a whole batch. A batch is never half-answered.
2. The lead is a lock that is only ever taken by a ``with`` statement, so an interrupt cannot
   leave it held. Python handles signals after calls, not between them and the next operation.
3. A sleeping writer wakes at intervals. An interrupted leader may not have woken it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from casstore.errors import CasstoreError

Work = TypeVar("Work")
Result = TypeVar("Result")

# A batch is bounded so that no writer waits for the work of thousands.
MAX_BATCH: Final = 64
# How often a sleeping writer checks whether its leader was interrupted.
_RECHECK_S: Final = 0.05


class Ticket(Generic[Work, Result]):
    """One writer's place in the queue."""

    __slots__ = ("abandoned", "batch", "place", "wake", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        #: The batch that ran, or runs, this ticket last, and its place there.
        self.batch: TicketBatch[Work, Result] | None = None
        self.place = 0
        #: The writer was interrupted and has left; no further batch should run its work.
        self.abandoned = False
        #: A follower sleeps by acquiring this lock, which is held from the start.
        self.wake: threading.Lock | None = None

    @property
    def answer(self) -> Result | CasstoreError | None:
        """The result or the error of this writer; None until its batch is answered."""
        batch = self.batch
        if batch is None or batch.answers is None:
            return None
        return batch.answers[self.place]

    @property
    def finished(self) -> bool:
        """True if nothing is left to run for this ticket."""
        return self.abandoned or self.answer is not None


class TicketBatch(Generic[Work, Result]):
    """Tickets that run together; assigning ``answers`` answers all of them at once."""

    __slots__ = ("answers", "tickets")

    def __init__(self, tickets: Sequence[Ticket[Work, Result]]) -> None:
        self.tickets = tickets
        #: One result or error for each ticket, in their order.
        self.answers: Sequence[Result | CasstoreError] | None = None
        for place, ticket in enumerate(tickets):
            # ``place`` first: a thread that sees the batch must see the ticket's place in it.
            ticket.place = place
            ticket.batch = self


class CommitQueue(Generic[Work, Result]):
    """Runs tickets in batches.

    ``run`` assigns the answers of its batch, or raises. If it raises without having assigned
    them, it has changed nothing, and the next leader runs the other tickets of the batch.
    """

    def __init__(self, run: Callable[[TicketBatch[Work, Result]], None]) -> None:
        self._run = run
        self._lead = threading.Lock()
        # Guards the queue. Tickets leave it only once they are answered or abandoned, so an
        # interrupted leader loses none.
        self._lock = threading.Lock()
        self._waiting: list[Ticket[Work, Result]] = []

    def submit(self, work: Work) -> Result:
        """Run ``work`` in some batch; return its own result or raise its own error."""
        ticket: Ticket[Work, Result] = Ticket(work)
        try:
            with self._lock:
                if self._lead.locked():
                    ticket.wake = threading.Lock()
                    ticket.wake.acquire()
                self._waiting.append(ticket)
            if ticket.wake is not None:
                self._follow(ticket, ticket.wake)
            if ticket.answer is None:
                with self._lead:
                    self._lead_until_answered(ticket)
                self._pass_on()
        except BaseException:
            # No call before the assignment: a second interrupt could come with it.
            ticket.abandoned = True
            self._pass_on()
            raise
        answer = ticket.answer
        if isinstance(answer, CasstoreError):
            raise answer
        assert answer is not None
        return answer

    def _follow(self, ticket: Ticket[Work, Result], wake: threading.Lock) -> None:
        """Sleep until this ticket is answered, or has to lead."""
        while not wake.acquire(timeout=_RECHECK_S):
            if ticket.answer is not None or not self._lead.locked():
                return

    def _lead_until_answered(self, ticket: Ticket[Work, Result]) -> None:
        while ticket.answer is None:
            with self._lock:
                unfinished = [other for other in self._waiting if not other.finished]
                batch = TicketBatch(unfinished[:MAX_BATCH])
            self._run(batch)

    def _pass_on(self) -> None:
        """Wake the writer that leads next, then those that were answered."""
        with self._lock:
            waiting = [ticket for ticket in self._waiting if not ticket.finished]
            wakes = [ticket for ticket in self._waiting if ticket.wake and ticket.finished]
            self._waiting = waiting
            if waiting and waiting[0].wake:
                wakes.insert(0, waiting[0])
        # Outside the lock, which the woken writers need at once.
        for ticket in wakes:
            assert ticket.wake is not None
            with suppress(RuntimeError):  # another thread has woken it
                ticket.wake.release()
