"""Proxies: a synchronous object whose methods run in threads and are awaited.

A proxy names each method of the synchronous class once, with how it is called:

    class AsyncThings(Proxy[Things]):
        put = awaited(Things.put)              # await things.put(…)
        items = iterated(Things.items)         # async for item in things.items(…)
        part = made(Things.part, AsyncPart)    # things.part(…) reads nothing and returns at once
        open = opened(Things.open, AsyncPart)  # await things.open(…) returns a proxy

Parameters, results and docstrings are those of the synchronous method, also for type checkers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from casstore.aio.pool import PAGE, StorePool

Behind = TypeVar("Behind")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Shown = TypeVar("Shown")


class Proxy(Generic[Behind]):
    """An object whose methods run in the threads of its store.

    A call that is cancelled while it writes is not undone: its thread goes on, and the write
    happens or fails as if the task had not been cancelled.
    """

    def __init__(self, pool: StorePool, behind: Behind) -> None:
        self._pool = pool
        self._behind = behind

    @property
    def sync(self) -> Behind:
        """The synchronous object, for calls from threads."""
        return self._behind


class StoreClient:
    """Base of a class with synchronous and awaited methods on one store.

    The awaited methods run the synchronous ones in threads: ``aput = awaited(put)``. The first
    call opens the store, unless the caller passed an open one. Copies of a client share the store.
    """

    _pool: StorePool

    @property
    def sync(self) -> Self:
        """The object itself: it has the synchronous methods, too."""
        return self

    def close(self) -> None:
        """Close the store after the calls under way; one that the caller opened stays open."""
        self._pool.close_blocking()

    def __enter__(self) -> Self:
        self._pool.open_blocking()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self._pool.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool.close()


def _bound(
    proxy: Any, method: Callable[Concatenate[Any, Parameters], Result]
) -> Callable[Parameters, Result]:
    """The method of the synchronous object, whose class may override it."""
    found: Callable[Parameters, Result] = getattr(proxy.sync, method.__name__)
    return found


def awaited(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]]:
    """Run the method in a thread, and await its result."""

    @wraps(method)
    async def call(proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Result:
        pool: StorePool = proxy._pool
        return await pool.run(_bound(proxy, method), *args, **options)

    return call


def iterated(
    method: Callable[Concatenate[Any, Parameters], Iterator[Result]], *, page: int = PAGE
) -> Callable[Concatenate[Any, Parameters], AsyncIterator[Result]]:
    """Iterate over what the method yields, fetching ``page`` items in each call to a thread."""

    @wraps(method)
    def call(
        proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs
    ) -> AsyncIterator[Result]:
        pool: StorePool = proxy._pool
        return pool.iterate(partial(_bound(proxy, method), *args, **options), page)

    return call


def opened(
    method: Callable[Concatenate[Any, Parameters], Result],
    show: Callable[[StorePool, Result], Shown],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Shown]]:
    """Run the method in a thread, and await a proxy for its result, made by ``show``."""

    @wraps(method)
    async def call(proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Shown:
        pool: StorePool = proxy._pool
        return show(pool, await pool.run(_bound(proxy, method), *args, **options))

    return call


def made(
    method: Callable[Concatenate[Any, Parameters], Result],
    show: Callable[[StorePool, Result], Shown],
) -> Callable[Concatenate[Any, Parameters], Shown]:
    """Call the method, which reads nothing, at once; returns a proxy made by ``show``."""

    @wraps(method)
    def call(proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Shown:
        return show(proxy._pool, _bound(proxy, method)(*args, **options))

    return call
