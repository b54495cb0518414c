"""The time to live of items: begun by puts, restarted by reads, and ended by a sweep.

A sweep removes expired items. ``Sweeper`` is the thread that sweeps at intervals, as LangGraph's
own stores have it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from langgraph.store.base import TTLConfig

from casstore.adapters.langgraph.item_records import (
    ITEMS,
    MS_US,
    ItemRow,
    VectorTables,
    items_table,
    lasting_us,
)
from casstore.engine.forks import Lock
from casstore.engine.protocol import Write
from casstore.session.arguments import check_positive
from casstore.session.attempts import write_unchanged
from casstore.session.records import Draft
from casstore.store import Store

_DEFAULT_MINUTES: Final = 5.0
_MINUTE_S: Final = 60

_log = logging.getLogger(__name__)


def begun(item: ItemRow, now_ms: int) -> ItemRow:
    """An item whose time to live, if it has one, begins now."""
    ttl = item.ttl_minutes
    if ttl is None:
        return item
    return item._replace(ttl_minutes=float(ttl), expires_us=now_ms * MS_US + lasting_us(ttl))


def refresh(store: Store, items: Iterable[ItemRow]) -> None:
    """Restart the time to live of items that were read."""
    table, now_ms = items_table(store), store.engine.now_ms()

    def change(draft: Draft, item: ItemRow) -> None:
        table.put(draft, begun(item, now_ms), item)

    timed = [item for item in items if item.ttl_minutes is not None]
    if timed:
        _change_unchanged(store, timed, change)


def sweep(store: Store) -> int:
    """Remove expired items; returns how many."""
    table, vectors = items_table(store), VectorTables(store)

    def remove(draft: Draft, item: ItemRow) -> None:
        table.remove(draft, item)
        vectors.delete(draft, item.prefix, item.key)

    items = map(ITEMS.read, table.scan())
    # Removing needs no values, which may be long.
    late = (item._replace(value=None) for item in items if not item.is_live(store.engine.now_ms()))
    return _change_unchanged(store, late, remove)


def _change_unchanged(
    store: Store, items: Iterable[ItemRow], change: Callable[[Draft, ItemRow], None]
) -> int:
    """Change items that no other writer has changed; returns how many.

    The others were put or read meanwhile, which restarted their time to live.
    """
    table = items_table(store)

    def changed(item: ItemRow) -> Write:
        draft = Draft(store)
        draft.expect(table, (item.prefix, item.key), item.record)
        change(draft, item)
        return draft.as_write()

    return sum(1 for _ in write_unchanged(store.engine, map(changed, items)))


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
        most = threading.TIMEOUT_MAX / _MINUTE_S
        check_positive(interval, "sweep_interval_minutes", most=most)
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
