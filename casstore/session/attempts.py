"""Retries of optimistic transactions: the one limit, the one pause and the one error.

A transaction reads rows without a lock, decides, and writes on condition that the rows are
unchanged. If another writer was first, the write fails, and the transaction is repeated:

    attempts = Attempts(f"session {session!r}")
    while True:
        attempts.begin()
        row = ...  # read and decide
        try:
            return engine.write(...)
        except ConditionFailedError:
            continue

``begin`` raises ContendedError after ``MAX_ATTEMPTS`` attempts. ``transact`` is the same loop
around a function. ``read_again`` repeats a read if gc removed its objects meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from casstore.errors import (
    CasstoreError,
    ConditionFailedError,
    ContendedError,
    CorruptionError,
    NotFoundError,
)

Result = TypeVar("Result")

#: The most attempts of a transaction. With hundreds of writers of one row, the unluckiest needs
#: dozens; 256 attempts take about two and a half seconds of pauses.
MAX_ATTEMPTS: Final = 256
# This many attempts follow at once; then random pauses spread the writers of one row.
_AT_ONCE: Final = 4
_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_MAX_READS: Final = 16


class Attempts:
    """The attempts of one transaction on ``what``, with random pauses from the fifth on."""

    __slots__ = ("_begun", "_remedy", "_what")

    def __init__(self, what: str, remedy: str = "try again when fewer writers change it") -> None:
        self._what = what
        self._remedy = remedy
        self._begun = 0

    def begin(self) -> None:
        """Begin the next attempt; ContendedError if there were ``MAX_ATTEMPTS``."""
        begun = self._begun
        self._begun = begun + 1
        if begun >= _AT_ONCE:
            if begun >= MAX_ATTEMPTS:
                raise ContendedError(self._what, begun, self._remedy)
            # The other writer's transaction has ended, so there is nothing to wait for. The pause
            # makes a collision with the next writer less likely. asyncio runs this in a thread.
            doublings = min(begun - _AT_ONCE, 10)
            time.sleep(random.uniform(0, min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)))


def transact(what: str, attempt: Callable[[], Result]) -> Result:
    """Repeat ``attempt``, which reads, decides and writes, until no other writer is first.

    It must read nothing after it has written: it is also repeated if gc has removed an object
    that it reads (``read_again``).
    """
    attempts = Attempts(what)
    while True:
        attempts.begin()
        try:
            return read_again(attempt, (CorruptionError,))
        except ConditionFailedError:
            continue


def read_again(
    read: Callable[[], Result],
    missing: tuple[type[CasstoreError], ...] = (CorruptionError, NotFoundError),
) -> Result:
    """Call ``read``, and repeat it if gc removed objects between two of its reads.

    If a session is deleted, vacuumed or pruned, gc may remove objects that the first read named.
    The repeated call sees the session as it is now, or raises SessionDeletedError. ``missing`` are
    the errors that a missing object causes. The same error twice in a row is raised: then the
    object is damaged or never existed.
    """
    last = ""
    for _ in range(_MAX_READS):
        try:
            return read()
        except missing as exc:
            if repr(exc) == last:
                raise
            last = repr(exc)
    return read()
