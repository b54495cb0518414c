"""Proxies: a synchronous object whose methods run in threads and are awaited.

A proxy names each method of the synchronous class once, with how it is called:

    class AsyncThings(Proxy[Things]):
        put = awaited(Things.put)              # await things.put(…)
        items = iterated(Things.items)         # async for item in things.items(…)
        part = made(Things.part, AsyncPart)    # things.part(…) reads nothing and returns at once
        open = opened(Things.open, AsyncPart)  # await things.open(…) returns a proxy

Parameters, results and docstrings are those of the synchronous method, also for type checkers.
``find`` of ``awaited`` and ``iterated`` is for functions on proxies of more than one argument.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from inspect import signature
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeAlias, TypeVar, overload

from casstore.aio.pool import PAGE, StorePool

Behind = TypeVar("Behind")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
First = TypeVar("First")
Second = TypeVar("Second")
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


#: The threads to run a function in, and the function, bound to synchronous objects.
Found: TypeAlias = tuple[StorePool, Callable[..., Any]]


def _of_proxy(method: Callable[..., Any], proxy: Any) -> Found:
    """The method of the synchronous object, whose class may override it."""
    return proxy._pool, getattr(proxy.sync, method.__name__)


def _bound_count(find: Callable[..., Found]) -> int:
    return len(signature(find).parameters) - 1


@overload
def awaited(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, Parameters], Result],
    find: Callable[[Any, First], Found],
) -> Callable[Concatenate[First, Parameters], Coroutine[Any, Any, Result]]: ...
@overload
def awaited(
    method: Callable[Concatenate[Any, Any, Parameters], Result],
    find: Callable[[Any, First, Second], Found],
) -> Callable[Concatenate[First, Second, Parameters], Coroutine[Any, Any, Result]]: ...
def awaited(method: Callable[..., Any], find: Callable[..., Found] = _of_proxy) -> Any:
    """Run the method in a thread, and await its result.

    ``find`` binds the method to the synchronous objects of its first arguments, which are proxies:
    as many as ``find`` takes. By default one.
    """
    bound = _bound_count(find)

    @wraps(method)
    async def call(*args: Any, **options: Any) -> Any:
        pool, function = find(method, *args[:bound])
        return await pool.run(function, *args[bound:], **options)

    return call


@overload
def iterated(
    method: Callable[Concatenate[Any, Parameters], Iterator[Result]], *, page: int = PAGE
) -> Callable[Concatenate[Any, Parameters], AsyncIterator[Result]]: ...
@overload
def iterated(
    method: Callable[Concatenate[Any, Parameters], Iterator[Result]],
    find: Callable[[Any, First], Found],
    *,
    page: int = PAGE,
) -> Callable[Concatenate[First, Parameters], AsyncIterator[Result]]: ...
def iterated(
    method: Callable[..., Any], find: Callable[..., Found] = _of_proxy, *, page: int = PAGE
) -> Any:
    """Iterate over what the method yields, fetching ``page`` items in each call to a thread."""
    bound = _bound_count(find)

    @wraps(method)
    def call(*args: Any, **options: Any) -> AsyncIterator[Any]:
        pool, function = find(method, *args[:bound])
        return pool.iterate(partial(function, *args[bound:], **options), page)

    return call


def opened(
    method: Callable[Concatenate[Any, Parameters], Result],
    show: Callable[[StorePool, Result], Shown],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Shown]]:
    """Run the method in a thread, and await a proxy for its result, made by ``show``."""

    @wraps(method)
    async def call(proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Shown:
        pool, function = _of_proxy(method, proxy)
        return show(pool, await pool.run(function, *args, **options))

    return call


def made(
    method: Callable[Concatenate[Any, Parameters], Result],
    show: Callable[[StorePool, Result], Shown],
) -> Callable[Concatenate[Any, Parameters], Shown]:
    """Call the method, which reads nothing, at once; returns a proxy made by ``show``."""

    @wraps(method)
    def call(proxy: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Shown:
        pool, function = _of_proxy(method, proxy)
        return show(pool, function(*args, **options))

    return call
