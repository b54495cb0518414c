"""The store for asyncio: the same operations, awaited.

Each call runs in a thread of the store's own pool, so the event loop never waits for
a disk, and calls awaited together share a flush (group commit). Waiting for a session's
next commit takes no thread.

    async with casstore.aio.open("store") as store:
        await store.session("agent").append({"role": "user", "text": "hello"})
        head = await store.session("agent").wait(after=3)
"""

from __future__ import annotations

from casstore.aio.session import (
    AsyncAttachments,
    AsyncHeldSession,
    AsyncNodes,
    AsyncQueue,
    AsyncSession,
    AsyncSessionState,
)
from casstore.aio.store import AsyncBlob, AsyncStore, AsyncView, open

__all__ = [
    "AsyncAttachments",
    "AsyncBlob",
    "AsyncHeldSession",
    "AsyncNodes",
    "AsyncQueue",
    "AsyncSession",
    "AsyncSessionState",
    "AsyncStore",
    "AsyncView",
    "open",
]
