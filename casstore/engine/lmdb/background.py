"""Packing now and then, in a thread of its own, for stores that were opened to do so.

The thread looks once in a while how many slabs have come, and packs what has become cold
when there are enough of them. It ends with the store: a step under way is finished, no other
is begun. A round that fails is reported the way Python reports errors of threads
(``threading.excepthook``), kept in ``last_error``, and tried again after a pause that
doubles. A forked child has no such thread; it opens the store anew.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

# What the thread runs is imported before there is one. Python keeps a lock for each module that
# is being imported: a process that forks while a thread holds one leaves its child waiting for it.
import casstore.engine.lmdb.cold_dictionary
import casstore.engine.lmdb.packing  # noqa: F401
from casstore.engine.protocol import PackReport
from casstore.errors import ClosedError

INTERVAL_S: Final = 30.0
MAX_INTERVAL_S: Final = 3600.0
# Fewer new slabs than this are not worth a round.
MIN_NEW_SLABS: Final = 256


class _StoppedError(Exception):
    """The store is being closed."""


class BackgroundPacker:
    """The thread, and what it has done so far."""

    def __init__(
        self,
        pack: Callable[[Callable[[PackReport], None]], PackReport],
        count_slabs: Callable[[], int],
        *,
        interval_s: float | None = None,
    ) -> None:
        self._pack = pack
        self._count_slabs = count_slabs
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._stop = threading.Event()
        self._pid = os.getpid()
        #: All rounds together.
        self.report = PackReport(0, 0, 0, 0, 0)
        self.last_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="casstore-pack", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; in a forked child there is none."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        left = 0
        pause_s = self._interval_s
        while not self._stop.wait(pause_s):
            try:
                if self._count_slabs() - left < MIN_NEW_SLABS:
                    continue
                self.report = self.report.plus(self._pack(self._go_on))
                left = self._count_slabs()
                self.last_error = None
                pause_s = self._interval_s
            except (_StoppedError, ClosedError):
                return
            except Exception as exc:
                # Nobody waits for this thread, so nobody would be told by raising.
                self.last_error = exc
                pause_s = min(2 * pause_s, MAX_INTERVAL_S)
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def _go_on(self, report: PackReport) -> None:
        if self._stop.is_set():
            raise _StoppedError
