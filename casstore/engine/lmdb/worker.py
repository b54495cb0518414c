"""The background thread of a process: flushes and applies the redo logs of all open stores.

There is one thread for all stores, started by the first commit that goes into a log. No promise to
a caller depends on it: a commit that finds the log full applies it itself, and what a killed
process leaves in a log is read when the store is next opened. Commits wake the thread only when it
has something to do.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Final

from casstore.errors import CasstoreError

# How long after a commit the thread runs: it flushes the commits of that time together. A power
# loss undoes at most the ``relaxed`` commits of this time and of the flush before.
GATHER_S: Final = 0.005
# After a failure the thread retries, each time after twice the pause, up to this one.
_MAX_RETRY_S: Final = 60.0


class Wake:
    """An event for one waiting thread, cleared by ``wait``.

    Not ``threading.Event``: that runs Python code while it holds a lock, and an interrupt in it
    would leave the lock held for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or the next one that waits."""
        try:
            self._lock.release()
        except RuntimeError:
            # Not locked: it is already set.
            return

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set, or the time is up; then clear it."""
        self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))


class Task:
    """The background work of one store. ``work`` returns the seconds until its next call."""

    def __init__(self, work: Callable[[], float]) -> None:
        self._work = work
        self._added = False
        self._asked = False
        self._retry_s = GATHER_S
        #: When the thread next runs the work, in seconds of the monotonic clock.
        self.at_s = inf

    def wake(self) -> None:
        """Have the thread run the work within GATHER_S; it is not woken if it will run then anyway.

        Waking the thread takes a commit time.
        """
        if not self._added:
            try:
                _worker.add(self)
            except RuntimeError:
                # The system has no more threads, or the interpreter is about to end.
                return
            self._added = True
        if not self._asked and self.at_s > time.monotonic() + GATHER_S:
            self._asked = True
            _worker.wake.set()

    def stop(self) -> None:
        """Remove the task, and wait until the thread does not run it any more."""
        _worker.remove(self)

    def run(self) -> None:
        """Run the work if it is due. Called by the thread."""
        if self._asked:
            self._asked = False
            self.at_s = min(self.at_s, time.monotonic() + GATHER_S)
        if self.at_s > time.monotonic():
            return
        # A commit that comes while this runs may be too late for it: it must ask again.
        self.at_s = inf
        try:
            pause_s = self._work()
            self._retry_s = GATHER_S
        except Exception as exc:
            # Not raised: the thread serves other stores too. A commit that finds the log full
            # applies it itself, and raises what then fails.
            self._retry_s = pause_s = min(2 * self._retry_s, _MAX_RETRY_S)
            if not isinstance(exc, CasstoreError):
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))
        self.at_s = time.monotonic() + pause_s


class _Worker:
    """The thread and its tasks."""

    def __init__(self) -> None:
        self.wake = Wake()
        self._tasks: list[Task] = []
        self._lock = threading.Lock()
        # Held while tasks are run.
        self._running = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, task: Task) -> None:
        """Add a task, and start the thread if it is not running.

        Safe to call again after an interrupt or an error.
        """
        with self._lock:
            if task not in self._tasks:
                self._tasks.append(task)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="casstore", daemon=True)
                self._thread.start()

    def remove(self, task: Task) -> None:
        """Remove a task, and wait until the thread does not run it any more."""
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)
        if threading.current_thread() is not self._thread:
            with self._running:
                pass
        self.wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                tasks = self._tasks.copy()
                if not tasks:
                    self._thread = None
                    return
            for task in tasks:
                with self._running:
                    if task in self._tasks:
                        task.run()
            self.wake.wait(max(0.0, min(task.at_s for task in tasks) - time.monotonic()))


_worker = _Worker()


def _forget() -> None:
    """Reset in a forked child: it has no such thread, and its copies of the stores are closed."""
    global _worker
    _worker = _Worker()


os.register_at_fork(after_in_child=_forget)
