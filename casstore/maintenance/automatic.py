"""Automatic gc: a thread that collects after every ``every_commits`` commits.

The store counts the commits of all processes. If several processes run a collector, the first one
that finds a collection due runs it, and the others find nothing due.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final, Self

from casstore.engine.protocol import DEFAULT_BATCH, DEFAULT_GRACE_MS, Collecting
from casstore.errors import CasstoreError, ClosedError, ForkedError, InvalidInputError
from casstore.maintenance import gc
from casstore.session.arguments import check_callable, check_count, check_ms, check_positive
from casstore.store import Store, check_store

DEFAULT_EVERY_COMMITS: Final = 10_000
DEFAULT_INTERVAL_S: Final = 5.0


class AutoCollector:
    """Collects in the background while it is open: use it as a context manager.

    >>> from queue import SimpleQueue
    >>> reports = SimpleQueue()
    >>> digest = store.put_blob(b"not referred to")
    >>> often = {"every_commits": 1, "interval_s": 0.01, "grace_ms": 0}
    >>> with AutoCollector(store, **often, on_report=reports.put):
    ...     reports.get(timeout=60).objects_swept  # agents are at work here
    1
    """

    def __init__(
        self,
        store: Store,
        *,
        every_commits: int = DEFAULT_EVERY_COMMITS,
        interval_s: float = DEFAULT_INTERVAL_S,
        grace_ms: int = DEFAULT_GRACE_MS,
        batch: int = DEFAULT_BATCH,
        on_report: Callable[[gc.GcReport], None] | None = None,
    ) -> None:
        """Collect when ``every_commits`` were made since the last collection.

        The thread looks every ``interval_s`` seconds. ``on_report`` is called with each report, in
        that thread.
        """
        check_store(store)
        if not isinstance(store.engine, Collecting):
            raise InvalidInputError("the engine of this store does not support gc")
        check_count(every_commits, "every_commits", least=1)
        check_positive(interval_s, "interval_s", most=threading.TIMEOUT_MAX)
        check_ms(grace_ms, "grace_ms")
        gc.check_batch(batch)
        if on_report is not None:
            check_callable(on_report, "on_report")
        self._store = store
        self._engine: Collecting = store.engine
        self._every_commits = every_commits
        self._interval_s = interval_s
        self._grace_ms = grace_ms
        self._batch = batch
        self._on_report = on_report
        self._stop = threading.Event()
        self._pid = os.getpid()
        #: The report of the last collection; None: there was none yet.
        self.last_report: gc.GcReport | None = None
        #: The error that ended the thread; None: there was none.
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="casstore-gc", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread, also during a collection, and wait until it has ended.

        A forked child only returns: it has no such thread, and the locks may be held forever.
        """
        if os.getpid() != self._pid:
            return
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                if self._engine.commits_since_collection() >= self._every_commits:
                    self._collect()
        except (ClosedError, ForkedError):
            # The store was closed before this collector.
            return
        except BaseException as exc:
            # No caller waits for this thread, so the error is stored for callers to read.
            self.failure = exc
            if not isinstance(exc, CasstoreError):
                raise

    def _collect(self) -> None:
        report = gc.collect(
            self._store, grace_ms=self._grace_ms, batch=self._batch, stop=self._stop.is_set
        )
        self.last_report = report
        if self._on_report is not None:
            self._on_report(report)
