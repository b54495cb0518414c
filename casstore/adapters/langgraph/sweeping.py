"""The thread that removes expired items at intervals, as LangGraph's own stores have it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from langgraph.store.base import TTLConfig

from casstore.engine.forks import Lock
from casstore.errors import InvalidInputError

_DEFAULT_MINUTES: Final = 5.0
_MINUTE_S: Final = 60

_log = logging.getLogger(__name__)


class Sweeper:
    """Calls ``sweep`` at intervals, in a thread, between ``start`` and ``stop``."""

    def __init__(self, sweep: Callable[[], int], ttl: TTLConfig | None) -> None:
        self._sweep = sweep
        self._ttl = ttl
        self._lock = Lock()
        self._running: tuple[threading.Thread, threading.Event, Future[None]] | None = None

    def start(self, minutes: float | None) -> Future[None]:
        """Start the thread, unless it runs or ``ttl`` is None; cancelling the future stops it."""
        if not self._ttl:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        interval = minutes or self._ttl.get("sweep_interval_minutes") or _DEFAULT_MINUTES
        if isinstance(interval, str) or not 0 < interval <= threading.TIMEOUT_MAX / _MINUTE_S:
            raise InvalidInputError(
                f"sweep_interval_minutes must be a number above 0, got {interval!r}"
            )
        with self._lock:
            if self._running is not None and self._running[0].is_alive():
                return self._running[2]
            stopped, future = threading.Event(), Future[None]()
            thread = threading.Thread(
                target=self._run,
                args=(interval * _MINUTE_S, stopped, future),
                name="casstore-ttl-sweeper",
                daemon=True,
            )
            self._running = thread, stopped, future
        future.add_done_callback(lambda _: stopped.set())
        thread.start()
        return future

    def stop(self, timeout_s: float | None) -> bool:
        """End the thread; False if it still runs after ``timeout_s``."""
        with self._lock:
            running = self._running
        if running is None:
            return True
        thread, stopped, _ = running
        stopped.set()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self, interval_s: float, stopped: threading.Event, future: Future[None]) -> None:
        while not stopped.wait(interval_s):
            try:
                swept = self._sweep()
                if swept:
                    _log.info("removed %d expired items", swept)
            except Exception:
                # The store may be busy or unreachable for a while; the next interval tries again.
                _log.exception("expired items could not be removed")
        if not future.done():
            future.set_result(None)
