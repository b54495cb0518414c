"""Calls that run in a thread while a task awaits them, and iterators that fetch in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import Final, ParamSpec, Protocol, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# How many items an async iterator fetches each time it goes to a thread.
_PAGE: Final = 64


class Run(Protocol):
    """Runs a call in a thread of the store; ClosedError once the store is closed."""

    async def __call__(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """What ``call`` returns."""
        ...


class Submit(Protocol):
    """Begins a call in a thread of the store; ClosedError once the store is closed."""

    def __call__(self, call: Callable[[], Result], /) -> Future[Result]:
        """What ``call`` will return."""
        ...


class _Closable(Protocol):
    def close(self) -> None: ...


Made = TypeVar("Made", bound=_Closable)


def close_unused(making: Future[Made]) -> None:
    """Close what a call has made and nobody has waited for: to be called when it is done."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


async def wait_for(making: Future[Made]) -> None:
    """Wait until a call in a thread is done. Whoever is cancelled leaves it to the others."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[Made]) -> None:
        # Its loop may have ended, with nobody left to wake.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    making.add_done_callback(wake)
    await done.wait()


async def iterate(
    run: Run, make: Callable[[], Iterator[Result]], page: int = _PAGE
) -> AsyncIterator[Result]:
    """Iterate over something that reads from disk, ``page`` items at a time in a thread."""
    source = await run(make)
    while items := await run(lambda: list(islice(source, page))):
        for item in items:
            yield item
