"""Waiting for a commit by any process.

The kernel reports writes to a file. A commit in the log is visible when its number is written
to the log's first page, so a watch on the log misses nothing. A commit to the tables is
different: LMDB writes its pages, then the meta page, and only then, in memory shared by all
processes, the number of the transaction that readers start from. A reader that the meta page
wakes may read before that, find nothing new, and sleep for ever. So a writer touches the data
file's times after such a commit (``Environment.cover``), and a watch waits for both: for the
touch because it comes last, for the writes because a killed writer may not reach the touch.
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
    """A watch on a store's files, by the best mechanism available."""
    seen = _last_commit(env)
    env.gate.enter()
    try:
        watch: DescriptorWatch
        try:
            watch = _open_native(partial(_files_of, env), env.gate.check)
        except (OSError, ImportError):
            # The system lacks the mechanism, or the user's limit on watches is reached.
            watch = PollingWatch(env, seen)
        # Inside the gate, so that closing the environment finds it.
        env.watches.add(watch)
        return watch
    finally:
        env.gate.leave()


def _files_of(env: Environment) -> list[int]:
    """The descriptors of the files that a commit writes to."""
    log = env.recent.log_number()
    return [env.data_handle] if log is None else [env.data_handle, log]


def _last_commit(env: Environment) -> tuple[int, int]:
    """The transaction and the commit that a reader would see now.

    ``Environment.info`` would read the meta page, which is too early (see above).
    """
    with env.snapshot() as (txn, view):
        return txn.id(), view.lsn


class PollingWatch(PipeWatch):
    """A watch for systems without notifications: a thread polls LMDB."""

    def __init__(self, env: Environment, seen: tuple[int, int]) -> None:
        super().__init__(env.gate.check)
        # A weak reference, or the thread would keep alive what it serves.
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
                # A failed read is a change, too; the waiting caller will get the error itself.
                now = (-1, -1)
            if now != seen:
                seen = now
                watch.wake()
            del watch


if sys.platform == "linux":

    def _open_native(
        find_files: Callable[[], list[int]], check: Callable[[], None]
    ) -> DescriptorWatch:
        # Not at the top: ctypes takes as long to load as casstore does, and few programs watch.
        from casstore.engine.lmdb.inotify import InotifyWatch

        return InotifyWatch(find_files, check)

else:

    class KqueueWatch(DescriptorWatch):
        """A watch by kqueue, for macOS and the BSDs. Not tested on any of them yet."""

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
            # An expired timer is the way to wake a kqueue from the same process.
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
            """Consume all changes so far."""
            self.fileno()
            self._queue.control(None, 16, 0)

        def _signal(self) -> None:
            self._queue.control([self._timer], 0)

        def _release(self) -> None:
            self._queue.close()

    _open_native = KqueueWatch
