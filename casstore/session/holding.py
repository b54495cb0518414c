"""Holding the lease of a session for as long as a block runs: ``with session.hold(owner) as held``.

A held session is a session whose commits carry the lease. One thread for each store renews all
held leases after each third of their time to live, so a lease is not lost if one renewal fails. If
it is lost all the same, the next call that needs it raises LeaseLostError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, Unpack

from casstore.engine.forks import renew_in_child
from casstore.errors import (
    CasstoreError,
    ConflictError,
    InvalidInputError,
    LeaseLostError,
    StoreStateError,
)
from casstore.session import leases
from casstore.session.arguments import check_seconds
from casstore.session.data import Claim, Commit, CommitFields, CommitResult, Entry, Lease
from casstore.session.leases import Claiming
from casstore.session.queue import IDLE, Taking
from casstore.session.session import Session
from casstore.session.state import Runtime
from casstore.session.waiting import until

# How many times a lease is renewed within its time to live.
_RENEWALS: Final = 3


class HeldSession(Session):
    """A session and its lease, from ``Session.hold``. Calls that write do so with the lease.

    >>> with session.hold("worker-1") as held:
    ...     result = held.append("go on")
    ...     held.lease.owner
    'worker-1'
    >>> session.append("and on").revision  # the lease is released
    4
    """

    def __init__(
        self, runtime: Runtime, session_id: str, owner: str, ttl_s: float, wait_s: float
    ) -> None:
        super().__init__(runtime, session_id)
        self._claiming: Final = Claiming(runtime, session_id, owner, leases.ttl_ms_of(ttl_s))
        check_seconds(wait_s, "wait_s")
        self._wait_s: Final = wait_s
        self._pause_s: Final = ttl_s / _RENEWALS
        self._lease: Lease | None = None
        self._lost: BaseException | None = None

    # --- the lease --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        lease = until(self._runtime, self._claiming, self._wait_s)
        if lease is None:
            raise self._claiming.held()
        self._begin(lease)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_renewing()
        # If the block raised an error, an error of the release must not replace it.
        with suppress(*([] if exc is None else [CasstoreError])):
            self._end()

    def _begin(self, lease: Lease) -> None:
        """Use a lease that was just claimed, and renew it from now on."""
        if self._lease is not None:
            raise InvalidInputError("a held session is entered once; call hold() for each block")
        self._lease = lease
        self._runtime.renewer().add(self)

    def _stop_renewing(self) -> None:
        """Stop the background renewal, before the lease is released."""
        self._runtime.renewer().remove(self)

    def _end(self) -> None:
        """Release the lease, unless it is lost."""
        lease, lost = self._lease, self._lost
        self._lost = self._lost or LeaseLostError(self.id, "its block has ended")
        if lease is not None and lost is None:
            leases.release(self._runtime, self.id, lease)

    def _renew(self) -> bool:
        """Renew the lease; False if it is lost. Called by the thread of ``Renewer``."""
        assert self._lease is not None
        try:
            self._lease = leases.renew(self._runtime, self.id, self._lease, self._claiming.ttl_ms)
        except (ConflictError, StoreStateError) as exc:
            self._lost = exc
            return False
        except CasstoreError:
            # The store is busy, or the disk is full: the next renewal may succeed.
            return True
        return True

    @property
    def lease(self) -> Lease:
        """The lease as it was last renewed; LeaseLostError if it is lost.

        >>> with session.hold("worker-1") as held:
        ...     held.lease.fencing
        1
        """
        if self._lost is not None:
            if isinstance(self._lost, LeaseLostError):
                raise LeaseLostError(self.id, self._lost.reason) from self._lost
            raise LeaseLostError(self.id, f"it could not be renewed: {self._lost}") from self._lost
        if self._lease is None:
            raise LeaseLostError(self.id, "none is held yet: use 'with session.hold(…) as held'")
        return self._lease

    # --- work -------------------------------------------------------------------------------

    def work(
        self, *, wait_s: float | None = None, boundary: str = IDLE, limit: int = 1
    ) -> Iterator[Claim]:
        """Claim work from the queue, one claim after the other, and wait for more.

        Ends when ``wait_s`` pass without work; None: waits for ever. ``boundary`` and ``limit``
        are those of ``Queue.claim``. Complete each claim with a commit (``completes``). Work that
        is not completed can be claimed again when the lease ends.

        >>> batch = session.queue.enqueue(["fix the test"])
        >>> with session.hold("worker-1") as held:
        ...     for work in held.work(wait_s=0):
        ...         result = held.append("done", completes=[work])
        >>> session.queue.batches()
        []
        """
        taking = self._taking(wait_s, boundary, limit)
        return iter(lambda: until(self._runtime, taking, wait_s), None)

    def _taking(self, wait_s: float | None, boundary: str, limit: int) -> Taking:
        """The ``Look`` that ``work`` repeats; ``aio`` uses it, too."""
        if wait_s is not None:
            check_seconds(wait_s, "wait_s")
        return Taking(self.queue, lambda: self.lease, boundary, limit)

    # --- writing ----------------------------------------------------------------------------

    def commit(
        self, change: Commit | None = None, /, **fields: Unpack[CommitFields]
    ) -> CommitResult:
        """As ``Session.commit``, with the lease.

        >>> with session.hold("worker-1") as held:
        ...     held.commit(append=["go on"], label="next").revision
        3
        """
        if change is None:
            change, fields = Commit(**fields), {}
        if isinstance(change, Commit) and change.lease is None:
            change = change._replace(lease=self.lease)
        result = super().commit(change, **fields)
        if change.release:
            self._lost = LeaseLostError(self.id, "it was released with a commit")
        return result

    def rewind(
        self,
        to: int | str | Entry,
        *,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.rewind``, with the lease.

        >>> with session.hold("worker-1") as held:
        ...     held.rewind("start").leaf
        'ask'
        """
        return super().rewind(to, lease=lease or self.lease, expected=expected, label=label)

    def adopt(
        self,
        other: Session | str,
        *,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.adopt``, with the lease.

        >>> other = session.fork("other", at="start")
        >>> with session.hold("worker-1") as held:
        ...     held.adopt(other).leaf
        'ask'
        """
        return super().adopt(other, lease=lease or self.lease, expected=expected, label=label)


class Renewer:
    """Renews the held leases of one store, in a thread that runs while any lease is held."""

    def __init__(self) -> None:
        renew_in_child(self._leave_to_parent)
        self._leave_to_parent()

    def _leave_to_parent(self) -> None:
        """Begin without leases. A forked child calls it: the parent renews those that it holds."""
        self._changed = threading.Condition()
        self._due_s: dict[HeldSession, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, held: HeldSession) -> None:
        """Renew the lease of a held session from now on."""
        with self._changed:
            self._due_s[held] = time.monotonic() + held._pause_s
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="casstore-leases", daemon=True
                )
                self._thread.start()
            self._changed.notify()

    def remove(self, held: HeldSession) -> None:
        """Stop renewing the lease of a held session."""
        with self._changed:
            self._due_s.pop(held, None)
            self._changed.notify()

    def _run(self) -> None:
        while (held := self._next()) is not None:
            is_held = held._renew()
            with self._changed:
                if held in self._due_s and is_held:
                    self._due_s[held] = time.monotonic() + held._pause_s
                else:
                    self._due_s.pop(held, None)

    def _next(self) -> HeldSession | None:
        """Wait for the next lease that is due; None, and the thread ends, if none is held."""
        with self._changed:
            while self._due_s:
                held = min(self._due_s, key=self._due_s.__getitem__)
                left_s = self._due_s[held] - time.monotonic()
                if left_s <= 0:
                    return held
                self._changed.wait(left_s)
            self._thread = None
            return None
