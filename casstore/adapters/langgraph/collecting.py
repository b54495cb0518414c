"""Collects the asynchronous calls of a tick of the event loop into one batch.

LangGraph's ``AsyncBatchedBaseStore`` does the collecting, and removes duplicates. It belongs to one
event loop, so ``Collectors`` has one for each loop that calls. If a batch fails, each of its
operations is retried by itself: a call fails only for its own operation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from langgraph.store.base import BaseStore, Op, Result, TTLConfig
from langgraph.store.base.batch import AsyncBatchedBaseStore

from casstore.engine.forks import Lock

Answer = TypeVar("Answer")
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

    def here(self) -> BaseStore:
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


async def answered(call: Awaitable[Answer]) -> Answer:
    """The result of a collected call; raises what its operation raised."""
    result = await call
    if isinstance(result, _Failed):
        raise result.error
    return result
