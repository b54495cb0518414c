"""Periodic packing in a background thread, for stores that were opened with ``auto_pack``.

At intervals the thread counts the slabs that are new since its last round, and packs when there are
enough. When the store closes, the thread finishes the current step and begins no other. If a round
fails, the error is passed to ``threading.excepthook``, stored in ``last_error``, and the round is
retried after a pause that doubles. A forked child has no such thread; it must open the store
itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

# Imported before the thread starts. Python holds a lock for each module that is being imported:
# a child forked while a thread holds one would wait for it for ever.
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
    """The packing thread, started at once, and what it has done so far."""

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
        #: The sum of the reports of all rounds.
        self.report = PackReport(0, 0, 0, 0, 0)
        self.last_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="casstore-pack", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; a forked child has no thread to stop."""
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
                # Not raised: that would end the thread, and no caller would get the error.
                self.last_error = exc
                pause_s = min(2 * pause_s, MAX_INTERVAL_S)
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), self._thread)))

    def _go_on(self, report: PackReport) -> None:
        if self._stop.is_set():
            raise _StoppedError
