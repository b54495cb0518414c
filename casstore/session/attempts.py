"""Retries of optimistic transactions: the one limit, the one pause and the one error.

A transaction reads rows without a lock, decides, and writes on condition that the rows are
unchanged. If another writer was first, the write fails, and the transaction is repeated:

    @transaction("session {session!r}")
    def remove(engine, session):
        row = ...  # read and decide
        engine.write(...)

``transact`` does the same for a function that is passed to it. An attempt that notices without a
write that another writer was first raises ChangedMeanwhile. ContendedError is raised after
``MAX_ATTEMPTS`` attempts. ``read_again`` repeats a read if gc removed its objects meanwhile; a
transaction does that as well. ``write_unchanged`` writes many changes, and skips those whose rows
another writer has changed. The few loops that handle a failed write in another way use
``Attempts``.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import islice
from typing import Final, ParamSpec, TypeVar

from casstore.engine.protocol import Engine, Write
from casstore.errors import (
    CasstoreError,
    ConditionFailedError,
    ContendedError,
    CorruptionError,
    NotFoundError,
)

Result = TypeVar("Result")
Params = ParamSpec("Params")

#: The most attempts of a transaction. With hundreds of writers of one row, the unluckiest needs
#: dozens; 256 attempts take about two and a half seconds of pauses.
MAX_ATTEMPTS: Final = 256
# This many attempts follow at once; then random pauses spread the writers of one row.
_AT_ONCE: Final = 4
_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_MAX_READS: Final = 16
_WRITTEN_AT_ONCE: Final = 1024


class ChangedMeanwhile(Exception):
    """Raised by an attempt of a transaction: another writer changed what it read, so repeat it."""


class Attempts:
    """The attempts of one transaction on ``what``, with random pauses from the fifth on."""

    __slots__ = ("_begun", "_remedy", "_what")

    def __init__(
        self, what: str | Callable[[], str], remedy: str = "try again when fewer writers change it"
    ) -> None:
        self._what = what
        self._remedy = remedy
        self._begun = 0

    def begin(self) -> None:
        """Begin the next attempt; ContendedError if there were ``MAX_ATTEMPTS``."""
        begun = self._begun
        self._begun = begun + 1
        if begun >= _AT_ONCE:
            if begun >= MAX_ATTEMPTS:
                what = self._what if isinstance(self._what, str) else self._what()
                raise ContendedError(what, begun, self._remedy)
            # The other writer's transaction has ended, so there is nothing to wait for. The pause
            # makes a collision with the next writer less likely. asyncio runs this in a thread.
            doublings = min(begun - _AT_ONCE, 10)
            time.sleep(random.uniform(0, min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)))


def transact(what: str | Callable[[], str], attempt: Callable[[], Result]) -> Result:
    """Repeat ``attempt``, which reads, decides and writes, until no other writer is first.

    It must read nothing after it has written: it is also repeated if gc has removed an object
    that it reads (``read_again``).
    """
    attempts = Attempts(what)
    while True:
        attempts.begin()
        try:
            return read_again(attempt)
        except (ConditionFailedError, ChangedMeanwhile):
            continue


def transaction(what: str) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Make every call of a function a transaction, as by ``transact``.

    ``what`` names its subject in the error, as a format string of the function's parameters:
    ``"session {session!r}"``. Each attempt runs the whole function on the same arguments, so none
    of them may be an iterator.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        named = re.findall(r"{(\w+)", what)
        assert {*named} <= {*names}, f"{function.__name__} has no parameter of {named}"

        @wraps(function)
        def transacted(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            # Called only for an error, so ``inspect``, which is slow to load, is imported here.
            def formatted() -> str:
                from inspect import signature

                given = signature(function).bind(*args, **kwargs)
                given.apply_defaults()
                return what.format_map(given.arguments)

            return transact(formatted, partial(function, *args, **kwargs))

        return transacted

    return decorate


def write_unchanged(engine: Engine, changes: Iterable[Write]) -> Iterator[Write]:
    """Write changes, many in one transaction; yields those whose conditions held.

    The rows of the others were changed or removed by another writer since they were read.
    """
    ahead = iter(changes)
    while waiting := list(islice(ahead, _WRITTEN_AT_ONCE)):
        while waiting:
            try:
                engine.write(
                    Write(
                        objects=[one for change in waiting for one in change.objects],
                        conditions=[one for change in waiting for one in change.conditions],
                        rows=[one for change in waiting for one in change.rows],
                    )
                )
            except ConditionFailedError as exc:
                owners = [at for at, change in enumerate(waiting) for _ in change.conditions]
                del waiting[owners[exc.index]]
            else:
                yield from waiting
                break


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
