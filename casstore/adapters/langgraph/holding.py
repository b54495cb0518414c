"""A store held for LangGraph: opened when first needed, with threads for async callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final, Self

from casstore.aio.threads import Parameters, Result
from casstore.engine.forks import renew_in_child
from casstore.errors import ClosedError
from casstore.store import Store

# As many as wait at once when a step of a graph ends; concurrent writes share a flush.
_WORKERS: Final = 16


class StoreHolder:
    """Shared by all copies of a saver: LangGraph copies savers, and a store cannot be."""

    def __init__(self, opener: Callable[[], Store], *, owned: bool) -> None:
        self._opener = opener
        self._owned = owned
        self._store: Store | None = None
        self._closed = False
        self._renew()
        renew_in_child(self._renew)

    def _renew(self) -> None:
        # Also in a forked child, which has none of the threads. A store that was not yet opened
        # is opened there when it is needed; one that was says that it is the parent's.
        # The first is held while the store is opened, which may take a while. The second never
        # for long: an event loop asks for it.
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def store(self) -> Store:
        """The store, opened if it is not yet; ClosedError once this is closed."""
        found = self._find_store()
        if found is not None:
            return found
        with self._opening:
            found = self._find_store()
            if found is None:
                found = self._opener()
                with self._lock:
                    self._store = found
            return found

    def _find_store(self) -> Store | None:
        with self._lock:
            self._require_open()
            return self._store

    async def open(self) -> None:
        """Open the store, off the event loop."""
        with self._lock:
            was_open = self._store is not None
        opening = self._submit(lambda: self.store)
        try:
            await asyncio.wrap_future(opening)
        except BaseException:
            if not was_open:
                # Cancelled, the opener runs on in its thread: what it opens must be closed.
                opening.add_done_callback(lambda _: self._let_go())
            raise

    def _let_go(self) -> None:
        """Close the store; it is opened again when it is needed."""
        with self._opening:
            with self._lock:
                store, self._store = self._store, None
            if store is not None and self._owned:
                store.close()

    def close(self) -> None:
        """Wait for calls under way; close the store if it was opened here."""
        with self._opening, self._lock:
            pool, store = self._pool, self._store
            self._pool, self._store, self._closed = None, None, True
        if pool is not None:
            pool.shutdown()
        if store is not None and self._owned:
            store.close()

    async def aclose(self) -> None:
        """As ``close``; nobody else could close what a cancelled close has left open."""
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self.close))

    async def run(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run a call in a thread, so that the event loop never waits for a disk."""
        return await asyncio.wrap_future(self._submit(partial(call, *args, **options)))

    def _submit(self, call: Callable[[], Result]) -> Future[Result]:
        with self._lock:
            self._require_open()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="casstore-langgraph")
            return self._pool.submit(call)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this was closed, and its store with it")


class HoldsStore:
    """What stands on a held store: closed by ``close``, or at the end of ``with``."""

    _holder: StoreHolder

    def close(self) -> None:
        """Let go of the store, and close it if it was opened here."""
        self._holder.close()

    def __enter__(self) -> Self:
        _ = self._holder.store
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._holder.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._holder.aclose()
