"""The threads that run the calls of an asyncio store, and the store itself, opened in one of them.

``StorePool`` is shared by everything that awaits calls on one store. It opens the store off the
event loop, runs calls in a pool of threads, and closes the store after the calls under way.

A call that is cancelled before a thread takes it never runs. A call that a thread has begun runs
to its end, whatever happens to the task that awaits it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final, ParamSpec, TypeVar

from casstore.aio.changes import ChangeWaiters, close_unused
from casstore.engine.forks import Lock, renew_in_child
from casstore.errors import ClosedError, ForkedError
from casstore.store import Store

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The most calls that run at once: this many writers fill a batch of the group commit well.
_THREADS: Final = 32
# How many items an async iterator fetches in each call to a thread.
PAGE: Final = 64


class _Opening:
    """A store that a thread is opening, and the number of callers that wait for it."""

    __slots__ = ("executor", "future", "waiting")

    def __init__(self, executor: ThreadPoolExecutor, opener: Callable[[], Store]) -> None:
        self.executor = executor
        self.future = executor.submit(opener)
        self.waiting = 0

    def give_up(self) -> None:
        """Close the store as soon as it is open: the opener cannot be stopped."""
        self.future.add_done_callback(close_unused)
        self.executor.shutdown(wait=False)


class StorePool:
    """A store and the threads that run calls on it, for any number of event loops.

    ``open`` opens the store. With ``on_demand``, the first call opens it, and a pool that was
    closed cannot be opened again.
    """

    def __init__(self, opener: Callable[[], Store], *, on_demand: bool = False) -> None:
        self._opener = opener
        self._on_demand = on_demand
        self._is_borrowed = False
        self._is_finished = False
        self._is_inherited = False
        # Protects the four fields below: event loops may run in several threads.
        self._lock = Lock()
        self._store: Store | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._changes: ChangeWaiters | None = None
        self._opening: _Opening | None = None
        renew_in_child(self._leave_to_parent)

    @classmethod
    def borrowing(cls, store: Store) -> StorePool:
        """A pool for a store that the caller has opened, and closes."""
        made = cls(lambda: store, on_demand=True)
        made._is_borrowed = True
        made._take(store)
        return made

    def _leave_to_parent(self) -> None:
        """In a forked child: drop the threads and the waiting tasks, which are the parent's."""
        if self._changes is not None:
            self._changes.leave_to_parent()
        if self._is_borrowed:
            # A store that cannot be used in a child raises ForkedError itself.
            self._executor = None
        elif self._store is not None or self._opening is not None:
            self._executor = self._changes = self._opening = None
            self._is_inherited = True

    # --- opening and closing --------------------------------------------------------------

    async def open(self) -> None:
        """Open the store in a thread. Concurrent callers wait for the same opening.

        If all of them are cancelled, the store is closed as soon as it is open.
        """
        opening = self._join()
        if opening is None:
            return
        try:
            await _wait_for(opening.future)
            store = opening.future.result()
        except BaseException:
            self._leave(opening)
            raise
        self._finish(opening, store)

    def open_blocking(self) -> Store:
        """As ``open``, for a caller that is not on an event loop."""
        opening = self._join()
        if opening is not None:
            try:
                store = opening.future.result()
            except BaseException:
                self._leave(opening)
                raise
            self._finish(opening, store)
        return self._opened()

    def _join(self) -> _Opening | None:
        """Join the opening under way, or begin one; None if the store is open.

        The caller waits for it, and then calls ``_finish`` or ``_leave``.
        """
        with self._lock:
            self._check()
            if self._store is not None:
                return None
            if self._opening is None:
                self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="casstore")
                self._opening = _Opening(self._executor, self._opener)
            self._opening.waiting += 1
            return self._opening

    def _leave(self, opening: _Opening) -> None:
        """End the wait of one caller for an opening; the last caller gives the opening up."""
        with self._lock:
            opening.waiting -= 1
            is_last = opening.waiting == 0 and self._opening is opening
            if is_last:
                self._opening = self._executor = None
        if is_last:
            opening.give_up()

    def _finish(self, opening: _Opening, store: Store) -> None:
        with self._lock:
            if self._opening is opening:
                self._opening = None
                self._take(store)
            elif self._store is not store:
                # ``close`` was called before the store was open.
                raise _not_open()

    def _take(self, store: Store) -> None:
        self._store = store
        self._changes = ChangeWaiters(self.submit, store.engine)

    async def close(self) -> None:
        """Close the store in a thread, after the calls under way.

        A task that waits for a change of the store gets ClosedError. Cancelling this call does
        not stop the close.
        """
        shut = self._detach()
        # Shielded: after ``_detach``, only ``shut`` can still close the store.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, shut))

    def close_blocking(self) -> None:
        """As ``close``, for a caller that is not on an event loop."""
        self._detach()()

    def _detach(self) -> Callable[[], None]:
        """Refuse calls from now on; returns the rest of the close, which may block."""
        with self._lock:
            opening, executor, store = self._opening, self._executor, self._store
            changes = None if self._is_inherited else self._changes
            self._opening = self._executor = self._store = self._changes = None
            self._is_inherited = False
            self._is_finished = self._on_demand
        if opening is not None:
            opening.give_up()
        if changes is not None:
            # Other stores of this process may share the engine; closing this one wakes no task.
            changes.wake()

        def shut() -> None:
            if executor is not None:
                executor.shutdown()
            if store is not None and not self._is_borrowed:
                store.close()

        return shut

    # --- calls ----------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store; ClosedError if it is not open, unless it is opened on demand."""
        store = self._store
        if store is not None and not self._is_inherited:
            # If another thread closes it from here on, the store itself raises ClosedError.
            return store
        return self.open_blocking() if self._on_demand else self._opened()

    @property
    def changes(self) -> ChangeWaiters:
        """The tasks that wait for a change of the store; ClosedError if it is not open."""
        with self._lock:
            self._check()
            changes = self._changes
        if changes is None:
            raise _not_open()
        return changes

    def submit(self, call: Callable[[], Result], /) -> Future[Result]:
        """Begin a call in a thread; ClosedError if the store is not open, even on demand."""
        with self._lock:
            self._check()
            if self._store is None:
                raise _not_open()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="casstore")
            return self._executor.submit(call)

    async def run(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run a call in a thread and return its result; ClosedError if the store is not open."""
        if self._on_demand:
            await self.open()
        return await asyncio.wrap_future(self.submit(partial(call, *args, **options)))

    async def iterate(
        self, make: Callable[[], Iterator[Result]], page: int = PAGE
    ) -> AsyncIterator[Result]:
        """Iterate over what ``make`` returns, fetching ``page`` items in each call to a thread."""
        source = await self.run(make)
        while items := await self.run(lambda: list(islice(source, page))):
            for item in items:
                yield item

    def _opened(self) -> Store:
        with self._lock:
            self._check()
            store = self._store
        if store is None:
            raise _not_open()
        return store

    def _check(self) -> None:
        if self._is_inherited:
            raise ForkedError(
                "this store was opened before this process was forked; open it again here"
            )
        if self._is_finished:
            raise ClosedError("the store was closed; open it again, or make a new adapter")


def _not_open() -> ClosedError:
    return ClosedError("this store is not open; use 'async with'")


async def _wait_for(making: Future[Store]) -> None:
    """Wait until a call in a thread is done. Cancelling the caller does not cancel the call."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[Store]) -> None:
        # The loop may have been closed meanwhile; then no task waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    making.add_done_callback(wake)
    await done.wait()
