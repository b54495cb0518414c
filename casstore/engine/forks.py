"""What a fork leaves behind in a child, put in order: descriptors, locks, modules half imported.

A child has one thread, the one that forked, and a copy of everything else: of the locks that other
threads held just then, which nobody will ever release, and of their descriptors. A lock on a file
belongs to all copies of a descriptor, so a child that keeps one keeps everybody else waiting, and
itself first if it opens the same store.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import ref

from casstore.engine.files import open_regular

_PACKAGE: Final = __name__.partition(".")[0]

# Held while a descriptor comes or goes, so that a fork finds all of them.
_changing = threading.Lock()
_descriptors: set[Descriptor] = set()
_renewals: set[_Renewal] = set()


class _Renewal(ref[Any]):
    """A method of an object, and no reason for the object to stay.

    Python's own WeakMethod does the same, but complains on stderr if the object goes when the
    interpreter itself is being taken down.
    """

    __slots__ = ("method",)

    method: Callable[[Any], None]

    # Each stands for itself, also once its object is gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Descriptor:
    """A descriptor that no forked child keeps."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        """For those who hold ``_changing``; others call ``open_file`` or ``open_pipe``."""
        self._number: int | None = number
        _descriptors.add(self)

    def fileno(self) -> int:
        """Its number; ValueError if it is closed, or was the parent's."""
        if self._number is None:
            raise ValueError("this descriptor is closed")
        return self._number

    def unlock(self) -> None:
        """Close it; a lock that it holds goes, though a program just being started has a copy."""
        with _changing:
            if self._number is not None:
                # Closing it gives the lock back as well, unless somebody has a copy.
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
    """Open a file, and nothing else that has its name (``files.open_regular``); raises OSError."""
    with _changing:
        return Descriptor(open_regular(path, flags, mode, dir_fd=dir_fd))


def open_directory(path: str) -> Descriptor:
    """Open a directory; raises OSError."""
    with _changing:
        return Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def open_pipe() -> tuple[Descriptor, Descriptor]:
    """The two ends of a pipe, for reading and for writing; raises OSError."""
    with _changing:
        reading, writing = os.pipe()
        return Descriptor(reading), Descriptor(writing)


class Lock:
    """A lock that a forked child finds free, whoever held it."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._renew()
        renew_in_child(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    # The lock's own, and no functions around them: between taking the lock and returning from such
    # a function, or between calling the other one and giving the lock back, Ctrl-C would leave it
    # held for ever.
    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__


def renew_in_child(renew: Callable[[], None]) -> None:
    """Have a method called in every forked child, as long as its object lives.

    It makes new locks, because those that there are may be held for ever.
    """
    bound: Any = renew
    reference = _Renewal(bound.__self__, _renewals.discard)
    reference.method = bound.__func__
    _renewals.add(reference)


def _finish_imports() -> None:
    """Wait until no other thread is in the midst of importing a module of ours.

    Python keeps a lock for each module that is being imported. A child that wants a module that
    was half imported would wait for ever.
    """
    # There is no public way to ask. Without this one, nobody waits.
    locks: dict[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})
    waited: set[str] = set()
    while names := {name for name in list(locks) if name.partition(".")[0] == _PACKAGE} - waited:
        waited |= names
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                # The thread that wanted it is told.
                continue


def _before_fork() -> None:
    try:
        _finish_imports()
    finally:
        # Whatever an import may raise is told by Python, and the fork goes on.
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
