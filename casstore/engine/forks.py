"""Makes a fork safe for parent and child; and a gate that keeps threads out of transactions.

**Forks.** A forked child has one thread, the one that called fork, and a copy of everything else in
memory. Three things would block it, or other processes:

- A lock that another thread of the parent held stays locked in the child for ever. The child
  replaces its locks (``Lock``, ``renew_in_child``).
- A file lock belongs to all copies of its descriptor. A child that kept the descriptor would keep
  the lock, and block every process that opens the store, itself included. The child closes its
  copies (``Descriptor``).
- A module that another thread of the parent was importing stays half imported in the child. The
  fork waits until all imports of casstore's modules have ended.

**The gate** (``Gate``). Closing a store, reopening it and forking the process need a moment in
which no thread is inside a transaction. Every transaction enters the gate of its store, so entering
must be cheap and takes no lock: a thread registers itself and then checks whether the gate is open.
A thread that shuts the gate does the reverse: it shuts the gate and then checks for registered
threads. So one of the two always sees the other.
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

# Held while a descriptor is opened or closed, and during a fork: so the child's copy of
# ``_descriptors`` lists exactly the open ones.
_changing = threading.Lock()
_descriptors: set[Descriptor] = set()
# The methods that a forked child calls.
_renewals: set[_Renewal] = set()


class _Renewal(ref[Any]):
    """A weak reference to a method.

    ``weakref.WeakMethod`` does the same, but prints to stderr if its object is destroyed while the
    interpreter shuts down.
    """

    __slots__ = ("method",)

    method: Callable[[Any], None]

    # Compared by identity: the set that holds these must find them after their object is destroyed.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Descriptor:
    """A file descriptor that is closed in forked children."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        """Hold ``_changing``. Other modules call ``open_file`` and the functions after it."""
        self._number: int | None = number
        _descriptors.add(self)

    def fileno(self) -> int:
        """Its number; ValueError if it was closed, by ``close`` or in a forked child."""
        if self._number is None:
            raise ValueError("this descriptor is closed")
        return self._number

    def unlock(self) -> None:
        """Release the file lock, and close the descriptor. Closing twice is allowed."""
        with _changing:
            if self._number is not None:
                # Closing alone would release the lock only when no other process has a copy of the
                # descriptor; a subprocess that is just being started has one.
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

    ``renew`` replaces the object's locks: another thread of the parent may have held them.
    """
    bound: Any = renew
    reference = _Renewal(bound.__self__, _renewals.discard)
    reference.method = bound.__func__
    _renewals.add(reference)


def _finish_imports() -> None:
    """Wait until no other thread is importing a module of casstore.

    Python holds a lock for each module that is being imported. In a child forked meanwhile that
    lock stays held, so the child would wait for ever when it imports the module.
    """
    # The locks of these modules have no public API. If the private one is missing, do not wait.
    locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    waited: set[str] = set()
    while names := {name for name in list(locks) if name.partition(".")[0] == _PACKAGE} - waited:
        waited |= names
        for name in names:
            try:
                # Waits for the thread that is importing the module.
                importlib.import_module(name)
            except ImportError:
                # The importing thread gets the error.
                continue


def _before_fork() -> None:
    try:
        _finish_imports()
    finally:
        # Whatever the import raised: Python prints it to stderr and forks anyway, and then releases
        # this lock.
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
    """Registers the threads inside transactions; can be shut, temporarily or permanently."""

    def __init__(self) -> None:
        # Setting and deleting a key of a dict are atomic.
        self._inside: dict[int, bool] = {}
        self._refusal: CasstoreError | None = None
        self._paused = False

    def enter(self) -> None:
        """Register this thread as inside; wait while the gate is paused.

        Raises the error given to ``shut`` if the gate is shut. A thread must leave before it enters
        again.
        """
        me = threading.get_ident()
        while True:
            self._inside[me] = True
            if self._refusal is None and not self._paused:
                return
            del self._inside[me]
            self.check()
            # Poll: pauses are rare and short, and an interrupt could leave a Condition locked.
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
        """Raise the error given to ``shut`` if the gate is shut permanently."""
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

    @property
    def is_awaited(self) -> bool:
        """True while ``shut`` or ``pause`` wait for the threads inside: long-running readers should
        leave.
        """
        return self._paused or self._refusal is not None

    @property
    def is_shut(self) -> bool:
        """True if the gate is shut permanently."""
        return self._refusal is not None

    def shut(self, refusal: CasstoreError) -> None:
        """Make ``enter`` raise ``refusal`` from now on, and wait until no thread is inside."""
        self._refusal = refusal
        self._drain()

    def pause(self) -> None:
        """Make ``enter`` wait until ``resume``, and wait until no thread is inside."""
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
        # Drop this thread's own registration, or the loop would wait for it. The thread is not
        # inside, but an interrupt after its last ``enter`` may have skipped ``leave``.
        self._inside.pop(threading.get_ident(), None)
        while self._inside:
            # Transactions are short and this is rare, so polling costs less than a lock in every
            # transaction would.
            time.sleep(_DRAIN_PAUSE_S)
