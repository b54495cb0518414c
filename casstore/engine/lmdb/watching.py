"""Waiting for a commit by any process: a watch on the data file and the redo log.

The kernel reports writes to a file. A commit in the log becomes visible when its LSN is written
to the log's first page, so a watch on the log misses nothing. A commit to the tables is
different: LMDB writes its pages, then the meta page, and only then, in memory shared by all
processes, the number of the newest transaction, which readers begin with. A reader that is woken
by the meta page may read before that, find nothing new, and sleep for ever. So after such a commit
the writer sets the modification time of the data file (``Environment.cover``). A watch waits for
both: for the change of the time, because it comes last; for the writes, because a writer that is
killed may not get that far.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from casstore.engine.lmdb.environment import Environment
from casstore.engine.watches import DescriptorWatch, PipeWatch
from casstore.errors import CasstoreError

_POLL_INTERVAL_S: Final = 0.05


def open_watch(env: Environment) -> DescriptorWatch:
    """A watch on a store's files: by the kernel's notifications, or else by polling."""
    seen = _last_commit(env)
    env.gate.enter()
    try:
        watch: DescriptorWatch
        try:
            watch = _open_native(partial(_files_of, env), env.gate.check)
        except (OSError, ImportError):
            # The system lacks the mechanism, or the user's limit on watches is reached.
            watch = PollingWatch(env, seen)
        # Inside the gate: closing waits for this thread, and then wakes all watches.
        env.watches.add(watch)
        return watch
    finally:
        env.gate.leave()


def _files_of(env: Environment) -> list[int]:
    """The descriptors of the files that a commit writes to."""
    log = env.recent.log_descriptor()
    return [env.data_handle] if log is None else [env.data_handle, log]


def _last_commit(env: Environment) -> tuple[int, int]:
    """The number of the LMDB transaction and the LSN that a reader would see now.

    LMDB's ``info`` would read the meta page, which is written too early (see above).
    """
    with env.snapshot() as (txn, view):
        return txn.id(), view.lsn


class PollingWatch(PipeWatch):
    """A watch for systems without notifications: a thread of its own polls the store."""

    def __init__(self, env: Environment, seen: tuple[int, int]) -> None:
        """``seen``: what ``_last_commit`` returned before the watch was opened."""
        super().__init__(env.gate.check)
        # The thread has a weak reference: it must end when the watch is garbage-collected.
        threading.Thread(
            target=self._poll,
            args=(weakref.ref(self), env, seen),
            name="casstore-watch",
            daemon=True,
        ).start()

    @staticmethod
    def _poll(
        reference: weakref.ref[PollingWatch], env: Environment, seen: tuple[int, int]
    ) -> None:
        while not env.gate.is_shut:
            time.sleep(_POLL_INTERVAL_S)
            watch = reference()
            if watch is None or watch._closed:
                return
            try:
                now = _last_commit(env)
            except CasstoreError:
                # Wake the caller: its next read will get the error.
                now = (-1, -1)
            if now != seen:
                seen = now
                watch.wake()
            del watch


if sys.platform == "linux":

    def _open_native(
        find_files: Callable[[], list[int]], check: Callable[[], None]
    ) -> DescriptorWatch:
        # Not at the top: it imports ctypes, which takes as long to load as casstore, and few
        # programs watch.
        from casstore.engine.lmdb.inotify import InotifyWatch

        return InotifyWatch(find_files, check)

else:

    class KqueueWatch(DescriptorWatch):
        """A watch by kqueue, for macOS and the BSDs. Not tested there yet."""

        def __init__(self, find_files: Callable[[], list[int]], check: Callable[[], None]) -> None:
            import select

            if not hasattr(select, "kqueue"):
                raise OSError("no kqueue")
            self._queue = select.kqueue()
            changes = select.KQ_NOTE_WRITE | select.KQ_NOTE_EXTEND | select.KQ_NOTE_ATTRIB
            events = [
                select.kevent(
                    number,
                    filter=select.KQ_FILTER_VNODE,
                    flags=select.KQ_EV_ADD | select.KQ_EV_CLEAR,
                    fflags=changes,
                )
                for number in find_files()
            ]
            # A timer that expires at once: with it, the process can wake its own kqueue.
            self._timer = select.kevent(
                1, filter=select.KQ_FILTER_TIMER, flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT
            )
            try:
                self._queue.control(events, 0)
            except OSError:
                self._queue.close()
                raise
            super().__init__(self._queue.fileno(), check)

        def drain(self) -> None:
            """Mark all changes so far as seen."""
            self.fileno()
            self._queue.control(None, 16, 0)

        def _signal(self) -> None:
            self._queue.control([self._timer], 0)

        def _release(self) -> None:
            self._queue.close()

    _open_native = KqueueWatch
