"""Cleans up descriptors, locks and half-finished imports in a forked child; keeps threads out.

A child has one thread, the one that forked, and a copy of everything else. A lock that another
thread held stays locked in the child for ever. A file lock belongs to all copies of its descriptor,
so a child that keeps the descriptor keeps the lock, and blocks every process that opens the store,
itself included.

Closing a store, reopening it and forking the process all need a moment in which no thread is
inside a transaction (``Gate``). Entering must be cheap, so it takes no lock: a thread registers
itself and then checks whether the gate is open. A thread that shuts the gate does the reverse:
it shuts the gate and then checks for registered threads. So one of the two always sees the
other.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import ref

from casstore.engine.files import open_regular
from casstore.errors import CasstoreError

_PACKAGE: Final = __name__.partition(".")[0]

# Held while a descriptor is opened or closed, so that a fork sees a complete list.
_changing = threading.Lock()
_descriptors: set[Descriptor] = set()
_renewals: set[_Renewal] = set()


class _Renewal(ref[Any]):
    """A weak reference to a method.

    ``weakref.WeakMethod`` does the same, but prints to stderr if its object is destroyed while the
    interpreter shuts down.
    """

    __slots__ = ("method",)

    method: Callable[[Any], None]

    # Compared by identity: equality must not depend on the object, which may be gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Descriptor:
    """A file descriptor that is closed in forked children."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        """The caller holds ``_changing``; others call ``open_file`` or ``open_pipe``."""
        self._number: int | None = number
        _descriptors.add(self)

    def fileno(self) -> int:
        """Its number; ValueError if it is closed, or was closed by a fork."""
        if self._number is None:
            raise ValueError("this descriptor is closed")
        return self._number

    def unlock(self) -> None:
        """Unlock and close it; also frees the lock if a subprocess being started has a copy."""
        with _changing:
            if self._number is not None:
                # Closing alone releases the lock only if no other process has a copy of the
                # descriptor.
                with suppress(OSError):
                    fcntl.flock(self._number, fcntl.LOCK_UN)
                self._close()

    def close(self) -> None:
        """Close it. Closing twice is allowed."""
        with _changing:
            self._close()

    def _close(self) -> None:
        number, self._number = self._number, None
        _descriptors.discard(self)
        if number is not None:
            os.close(number)


def open_file(path: str, flags: int, mode: int, *, dir_fd: int | None = None) -> Descriptor:
    """Open a regular file (see ``files.open_regular``); raises OSError."""
    with _changing:
        return Descriptor(open_regular(path, flags, mode, dir_fd=dir_fd))


def open_directory(path: str) -> Descriptor:
    """Open a directory; raises OSError."""
    with _changing:
        return Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def open_pipe() -> tuple[Descriptor, Descriptor]:
    """The read end and the write end of a pipe; raises OSError."""
    with _changing:
        reading, writing = os.pipe()
        return Descriptor(reading), Descriptor(writing)


class Lock:
    """A lock that is free in a forked child, even if another thread of the parent held it."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._renew()
        renew_in_child(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    # The C methods of the lock themselves, not Python functions around them: Ctrl-C between taking
    # the lock and returning from such a function would leave it locked for ever.
    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__


def renew_in_child(renew: Callable[[], None]) -> None:
    """Call a method in every forked child, as long as its object lives.

    The method replaces the object's locks, because another thread of the parent may have held them.
    """
    bound: Any = renew
    reference = _Renewal(bound.__self__, _renewals.discard)
    reference.method = bound.__func__
    _renewals.add(reference)


def _finish_imports() -> None:
    """Wait until no other thread is importing a module of casstore.

    Python holds a lock for each module that is being imported. A child that imports a module that
    was half imported would wait for ever.
    """
    # There is no public API for this. If the private one is missing, do not wait.
    locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    waited: set[str] = set()
    while names := {name for name in list(locks) if name.partition(".")[0] == _PACKAGE} - waited:
        waited |= names
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                # The importing thread gets the error.
                continue


def _before_fork() -> None:
    try:
        _finish_imports()
    finally:
        # Python reports the exception of an import on stderr; the fork proceeds.
        _changing.acquire()


def _after_fork_in_parent() -> None:
    _changing.release()


def _after_fork_in_child() -> None:
    global _changing
    _changing = threading.Lock()
    for descriptor in list(_descriptors):
        descriptor._close()
    for reference in list(_renewals):
        owner = reference()
        if owner is not None:
            reference.method(owner)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)


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
