"""Collects the asynchronous calls of a tick of the event loop into one batch.

LangGraph's ``AsyncBatchedBaseStore`` does the collecting, and removes duplicates. It belongs to one
event loop, so ``Collectors`` has one for each loop that calls. If a batch fails, each of its
operations is retried by itself: a call fails only for its own operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from langgraph.store.base import Op, Result, TTLConfig
from langgraph.store.base.batch import AsyncBatchedBaseStore

from casstore.engine.forks import Lock

Answer = TypeVar("Answer")
Parameters = ParamSpec("Parameters")
RunBatch = Callable[[Iterable[Op]], Awaitable[list[Result]]]


class _Failed:
    """Stands for the result of an operation that raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Collector(AsyncBatchedBaseStore):
    """Collects the calls on one event loop."""

    supports_ttl = True

    def __init__(self, run: RunBatch, ttl: TTLConfig | None) -> None:
        super().__init__()
        self.ttl_config = ttl
        self._run_batch = run

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        asked = list(ops)
        try:
            return await self._run_batch(asked)
        except Exception:
            if len(asked) == 1:
                raise
            # One operation that is refused must not fail the calls of other tasks. Nothing of the
            # batch was written.
            return [await self._run_alone(op) for op in asked]

    async def _run_alone(self, op: Op) -> Any:
        try:
            [result] = await self._run_batch([op])
        except Exception as exc:
            return _Failed(exc)
        return result


class Collectors:
    """The collectors of a store, by event loop."""

    def __init__(self, run: RunBatch, ttl: TTLConfig | None) -> None:
        self._run = run
        self._ttl = ttl
        self._lock = Lock()
        self._known: dict[asyncio.AbstractEventLoop, _Collector] = {}

    def here(self) -> AsyncBatchedBaseStore:
        """The collector of the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._known.get(loop)
            if found is None:
                # A collector refers to its loop, so closed loops are dropped here.
                for each in [each for each in self._known if each.is_closed()]:
                    del self._known[each]
                found = self._known[loop] = _Collector(self._run, self._ttl)
            return found


def collected(
    method: Callable[Concatenate[AsyncBatchedBaseStore, Parameters], Awaitable[Answer]],
) -> Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Answer]]:
    """The method of a store with ``Collectors``; its calls in one tick become one batch."""

    @wraps(method)
    async def call(store: Any, /, *args: Parameters.args, **options: Parameters.kwargs) -> Answer:
        collectors: Collectors = store._collectors
        result = await method(collectors.here(), *args, **options)
        if isinstance(result, _Failed):
            raise result.error
        return result

    return call
