"""Tasks that wait for a store to change: they share one watch, and take no thread.

The kernel grants a user few watches (128 on most Linux systems). So a store has one for each
event loop, however many tasks wait, and closes it when the last task stops waiting.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from casstore.engine.forks import Lock
from casstore.engine.protocol import Engine, Watch
from casstore.errors import CasstoreError
from casstore.session.waiting import Look, pause_s

Found = TypeVar("Found")


class Submit(Protocol):
    """Begins a call in a thread."""

    def __call__(self, call: Callable[[], Found], /) -> Future[Found]: ...


class _Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=_Closable)


def close_unused(making: Future[Made]) -> None:
    """Callback of a finished call: close what it opened, for which no caller waits any more."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


class ChangeWaiters:
    """The tasks that wait for changes of one engine, on any number of event loops."""

    def __init__(self, submit: Submit, engine: Engine) -> None:
        self._submit = submit
        self._engine = engine
        self._lock = Lock()
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopWaiters] = {}

    async def until(self, look: Look[Found], timeout_s: float | None) -> Found | None:
        """Call ``look`` now and after each change, until its result is not None; return that.

        None after ``timeout_s``. ``look`` runs in a thread, as in ``session.waiting``; waiting
        takes none.
        """
        if timeout_s is not None and timeout_s <= 0:
            return await asyncio.wrap_future(self._submit(look))
        loop = asyncio.get_running_loop()
        with self._lock:
            own = self._by_loop.get(loop)
            if own is None:
                own = self._by_loop[loop] = LoopWaiters(loop, self._submit, self._engine)
        try:
            return await own.until(look, timeout_s)
        finally:
            # No task can begin to wait between these lines: it would run on this loop.
            if own.is_idle:
                with self._lock:
                    self._by_loop.pop(loop, None)

    def wake(self) -> None:
        """Make every waiting task look again. May be called on any thread."""
        with self._lock:
            known = list(self._by_loop.items())
        for loop, own in known:
            try:
                loop.call_soon_threadsafe(own.wake)
            except RuntimeError:
                # The loop is closed, and its tasks will never run.
                continue

    def leave_to_parent(self) -> None:
        """In a forked child: drop the parent's tasks, and the watches that its threads open."""
        for own in self._by_loop.values():
            own.leave_to_parent()
        self._by_loop.clear()


class LoopWaiters:
    """The waiting tasks of one event loop; every method runs on the thread of that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, submit: Submit, engine: Engine) -> None:
        self._loop = loop
        self._submit = submit
        self._engine = engine
        self._waiting: set[asyncio.Event] = set()
        self._making: Future[Watch] | None = None
        #: The descriptor of the watch, while the loop waits for it to become readable.
        self._reading: int | None = None

    @property
    def is_idle(self) -> bool:
        """True if no task waits."""
        return not self._waiting

    async def until(self, look: Look[Found], timeout_s: float | None) -> Found | None:
        """As ``ChangeWaiters.until``."""
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            # Before the first look: the watch reports a change that the look misses.
            await self._watch()
            while True:
                changed.clear()
                found = await asyncio.wrap_future(self._submit(look))
                now = self._loop.time()
                if found is not None or (deadline is not None and now >= deadline):
                    return found
                left_s = math.inf if deadline is None else deadline - now
                wait_s = pause_s(look.due_s, left_s)
                try:
                    async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                        await changed.wait()
                except TimeoutError:
                    continue  # for another look, maybe the last
        finally:
            self._waiting.discard(changed)
            if not self._waiting:
                self._stop()

    def wake(self) -> None:
        """Make every waiting task look again."""
        for changed in self._waiting:
            changed.set()

    def leave_to_parent(self) -> None:
        """In a forked child: as ``ChangeWaiters.leave_to_parent``."""
        self._waiting.clear()
        self._making = self._reading = None

    async def _watch(self) -> None:
        # In a thread: opening a watch may block until other calls leave the engine.
        if self._making is None:
            self._making = self._submit(self._engine.watch)
        # Shielded: all tasks share the watch, and cancelling one must not stop its opening.
        watch = await asyncio.shield(asyncio.wrap_future(self._making))
        if self._reading is None:
            self._reading = watch.fileno()
            self._loop.add_reader(self._reading, self._note, watch)

    def _note(self, watch: Watch) -> None:
        try:
            # Before any task looks: a later change makes the descriptor readable again.
            watch.drain()
        except CasstoreError:
            # The engine is closed, and the descriptor would stay readable. The next look of each
            # task raises ClosedError.
            self._stop_reading()
        self.wake()

    def _stop_reading(self) -> None:
        # By its number: ``fileno`` raises once the engine is closed.
        if self._reading is not None:
            handle, self._reading = self._reading, None
            self._loop.remove_reader(handle)

    def _stop(self) -> None:
        self._stop_reading()
        making, self._making = self._making, None
        if making is not None:
            making.cancel()
            # Closes the watch now, or when the thread that is opening it has done so.
            making.add_done_callback(close_unused)
