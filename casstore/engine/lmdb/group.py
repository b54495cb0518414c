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
from typing import Any, Final, Generic, TypeVar

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
        self.batch: TicketBatch[Work, Result] = _NO_BATCH
        self.place = 0
        #: The writer was interrupted and has left; no further batch should run its work.
        self.abandoned = False
        #: A follower sleeps by acquiring this lock, which is held from the start.
        self.wake: threading.Lock | None = None


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


# The batch of tickets that were in none yet. It is never answered.
_NO_BATCH: Final[TicketBatch[Any, Any]] = TicketBatch(())


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
                # Even if the lead is free, an earlier writer of the queue is about to take it. A
                # writer that waited for the lead too would sleep through its answer.
                if self._waiting or self._lead.locked():
                    ticket.wake = threading.Lock()
                    ticket.wake.acquire()
                self._waiting.append(ticket)
            if ticket.wake is not None:
                self._follow(ticket, ticket.wake)
            if ticket.batch.answers is None:
                with self._lead:
                    self._lead_until_answered(ticket)
                self._pass_on()
        except BaseException:
            # No call before the assignment: a second interrupt could come with it.
            ticket.abandoned = True
            self._pass_on()
            raise
        answers = ticket.batch.answers
        assert answers is not None
        answer = answers[ticket.place]
        if isinstance(answer, CasstoreError):
            raise answer
        return answer

    def _follow(self, ticket: Ticket[Work, Result], wake: threading.Lock) -> None:
        """Sleep until this ticket is answered, or has to lead."""
        while not wake.acquire(timeout=_RECHECK_S):
            if ticket.batch.answers is not None or not self._lead.locked():
                return

    def _lead_until_answered(self, ticket: Ticket[Work, Result]) -> None:
        while ticket.batch.answers is None:
            with self._lock:
                unfinished = [
                    each
                    for each in self._waiting
                    if each.batch.answers is None and not each.abandoned
                ]
                batch = TicketBatch(unfinished[:MAX_BATCH])
            self._run(batch)

    def _pass_on(self) -> None:
        """Wake the writer that leads next, then those that were answered."""
        with self._lock:
            waiting: list[Ticket[Work, Result]] = []
            wakes: list[Ticket[Work, Result]] = []
            for ticket in self._waiting:
                if ticket.batch.answers is None and not ticket.abandoned:
                    waiting.append(ticket)
                elif ticket.wake:
                    wakes.append(ticket)
            self._waiting = waiting
            if waiting and waiting[0].wake:
                wakes.insert(0, waiting[0])
        # Outside the lock, which the woken writers need at once.
        for ticket in wakes:
            assert ticket.wake is not None
            with suppress(RuntimeError):  # another thread has woken it
                ticket.wake.release()
