"""gc by itself: a thread that collects every so many commits, for as long as it is asked to.

Commits are counted by the store, whichever process makes them, so it does not matter who
collects: of several processes that ask for it, one does, and the others find nothing due.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from casstore.engine.protocol import Collecting
from casstore.errors import CasstoreError, ClosedError, ForkedError, InvalidInputError
from casstore.maintenance import gc
from casstore.session.arguments import check_callable, check_seconds
from casstore.store import Store, check_store

DEFAULT_EVERY_COMMITS: Final = 10_000
DEFAULT_INTERVAL_S: Final = 5.0


class AutoCollector:
    """Collects in the background while it is open: use it as a context manager.

    >>> from queue import SimpleQueue
    >>> reports = SimpleQueue()
    >>> digest = store.put_blob(b"nobody refers to this")
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
        grace_ms: int = gc.DEFAULT_GRACE_MS,
        batch: int = gc.DEFAULT_BATCH,
        on_report: Callable[[gc.GcReport], None] | None = None,
    ) -> None:
        """Collect when at least ``every_commits`` were made, looked at every ``interval_s``.

        ``on_report`` is given each report, in the collecting thread.
        """
        check_store(store)
        if not isinstance(store.engine, Collecting):
            raise InvalidInputError("the engine of this store does not collect")
        if type(every_commits) is not int or every_commits < 1:
            raise InvalidInputError(f"every 1 or more commits, not {every_commits!r}")
        check_seconds(interval_s, "an interval")
        gc.check_grace(grace_ms)
        gc.check_batch(batch)
        if on_report is not None:
            check_callable(on_report, "what is given each report")
        if not 0 < interval_s < threading.TIMEOUT_MAX:
            raise InvalidInputError(f"an interval of some seconds, not {interval_s!r}")
        self._store = store
        self._engine: Collecting = store.engine
        self._every_commits = every_commits
        self._interval_s = interval_s
        self._grace_ms = grace_ms
        self._batch = batch
        self._on_report = on_report
        self._stop = threading.Event()
        self._pid = os.getpid()
        #: What the last collection did; None: there was none yet.
        self.last_report: gc.GcReport | None = None
        #: What ended the thread before its time; None: nothing did.
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="casstore-gc", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop, in the middle of a collection if need be, and wait until it has.

        In a forked child there is no such thread, and its locks may be held for ever.
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
            # The store was closed before this was: there is nothing left to do.
            return
        except BaseException as exc:
            # Nobody waits for this thread; whoever asks finds out.
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
