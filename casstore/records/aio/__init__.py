"""Records for asyncio: the same operations, awaited, on an ``AsyncStore`` that is open.

    async with casstore.aio.open("store") as store:
        log = AsyncSessionLog(store)
        await log.append("session", NewMessage("user", "hello"))
        async for message in log.messages("session"):
            ...

Each call is one transaction in a thread of the store. One that is cancelled is done or not as
if nobody had cancelled; its thread goes on.

What is said of a method, its example too, is what is said of the one that it awaits.
"""

from __future__ import annotations

from casstore.records.aio.lifecycles import (
    AsyncAgentSession,
    AsyncKeptRecords,
    AsyncLifecycles,
    AsyncUserData,
)
from casstore.records.aio.log import AsyncSessionLog
from casstore.records.aio.runs import AsyncRuns
from casstore.records.aio.scoped import AsyncRunState, AsyncScope, AsyncScopedState

__all__ = [
    "AsyncAgentSession",
    "AsyncKeptRecords",
    "AsyncLifecycles",
    "AsyncRunState",
    "AsyncRuns",
    "AsyncScope",
    "AsyncScopedState",
    "AsyncSessionLog",
    "AsyncUserData",
]
