"""Sends changes of a store to open pages as server-sent events; all pages share one watch."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

from starlette.concurrency import run_in_threadpool

from casstore.engine.protocol import Watch
from casstore.errors import CasstoreError, ClosedError
from casstore.session import keys, leases
from casstore.session.state import decode_head, head_key
from casstore.ui.views import catalogue
from casstore.ui.views.viewed import Viewed

MAX_LISTENERS: Final = 64
# Changes within this time are sent as one event: to pages of a session, and to overviews.
_GATHER_S: Final = 0.15
_GATHER_ALL_S: Final = 0.5
# An overview is not read again before this multiple of the time that reading it took.
_RESTS: Final = 4
# Read at least this often, and send a comment: a process that dies may commit without waking the
# watch, and proxies close connections that are silent.
_LOOK_S: Final = 15.0


class Changes:
    """Notifies pages that the store has changed."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed
        self._watch: Watch | None = None
        self._changed = asyncio.Event()
        self._listeners = 0
        self._is_closed = False

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._is_closed = True
        self._changed.set()
        self._stop()

    def _start(self) -> None:
        if self._watch is None:
            self._watch = self._viewed.store.engine.watch()
            asyncio.get_running_loop().add_reader(self._watch.fileno(), self._note)

    def _stop(self) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None

    def _note(self) -> None:
        try:
            if self._watch is not None:
                self._watch.drain()
        except ClosedError:
            self._stop()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stream(self, session: str | None) -> AsyncIterator[str]:
        """The events for a page of a session, or for an overview (None), until the page closes."""
        if self._listeners >= MAX_LISTENERS or self._is_closed:
            yield "retry: 60000\n\n"
            return
        self._listeners += 1
        try:
            self._start()
            look = self._overview if session is None else self._session(session)
            gather_s = _GATHER_S if session is not None else _GATHER_ALL_S
            waiting = self._changed
            known = await run_in_threadpool(look)
            yield _event("hello", known.data)
            while not self._is_closed:
                try:
                    await asyncio.wait_for(waiting.wait(), _LOOK_S)
                    await asyncio.sleep(max(gather_s, _RESTS * known.took_s))
                except TimeoutError:
                    yield ": still here\n\n"
                if self._is_closed:
                    return
                # Before the look: a change during it sets this event, so the next look sees it.
                waiting = self._changed
                now = await run_in_threadpool(look)
                if known.data and not now.data:
                    yield _event("gone", {})
                    return
                if now.state != known.state:
                    yield _event("change", now.data)
                known = now
        except CasstoreError:
            yield _event("gone", {})
        finally:
            self._listeners -= 1
            if not self._listeners and not self._is_closed:
                self._stop()

    def _session(self, session: str) -> Callable[[], _Seen]:
        """A function that reads the rows that change with a commit, the lease or the queue."""
        engine = self._viewed.store.engine
        key = keys.session_key(session)
        places = [head_key(key), leases.lease_key(key), keys.queue_counter(key)]

        def look() -> _Seen:
            rows = list(engine.get_rows(places))
            data = {} if rows[0] is None else {"revision": decode_head(rows[0]).revision}
            return _Seen(rows, data)

        return look

    def _overview(self) -> _Seen:
        began = time.monotonic()
        found = catalogue.version(self._viewed, since=began)
        return _Seen(found, {"version": found}, time.monotonic() - began)


class _Seen(NamedTuple):
    """One look: what the next look is compared with, the data of the event, the time taken."""

    state: Any
    data: dict[str, Any]
    took_s: float = 0


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
