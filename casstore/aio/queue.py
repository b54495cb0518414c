"""The queue of a session, awaited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.aio.threads import Run
from casstore.session.data import Batch, Claim, Lease
from casstore.session.queue import AFTER_TURN, EXCLUSIVE, IDLE, Queue


class AsyncQueue:
    """A ``Queue`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         await session.queue.enqueue(["fix the test"])
    ...         lease = await session.claim_lease("worker-1", ttl_ms=30_000)
    ...         return (await session.queue.claim(lease)).batches[0].items
    >>> asyncio.run(main())
    ('fix the test',)
    """

    def __init__(self, run: Run, queue: Queue) -> None:
        self._run = run
        self._queue = queue

    async def enqueue(
        self,
        items: Sequence[Any],
        *,
        source_key: str | None = None,
        delivery: str = AFTER_TURN,
        slot: str = EXCLUSIVE,
        merge_key: str | None = None,
        available_at_ms: int | None = None,
        batch_id: str | None = None,
    ) -> Batch:
        """As ``Queue.enqueue``. Cancelled, it may still happen; a source key makes a retry safe."""
        return await self._run(
            self._queue.enqueue,
            items,
            source_key=source_key,
            delivery=delivery,
            slot=slot,
            merge_key=merge_key,
            available_at_ms=available_at_ms,
            batch_id=batch_id,
        )

    async def claim(self, lease: Lease, *, boundary: str = IDLE, limit: int = 1) -> Claim | None:
        """As ``Queue.claim``.

        Cancelled, the batches may be taken all the same; they are free when the lease is.
        """
        return await self._run(self._queue.claim, lease, boundary=boundary, limit=limit)

    async def claim_exactly(
        self, lease: Lease, batch_ids: Sequence[str], *, boundary: str = IDLE
    ) -> Claim | None:
        """As ``Queue.claim_exactly``; cancelled, as ``claim``."""
        return await self._run(self._queue.claim_exactly, lease, batch_ids, boundary=boundary)

    async def verify(self, claim: Claim) -> None:
        """As ``Queue.verify``."""
        await self._run(self._queue.verify, claim)

    async def abandon(self, claim: Claim) -> int:
        """As ``Queue.abandon``."""
        return await self._run(self._queue.abandon, claim)

    async def cancel(self, batch_id: str) -> Batch | None:
        """As ``Queue.cancel``."""
        return await self._run(self._queue.cancel, batch_id)

    async def batches(self) -> list[Batch]:
        """As ``Queue.batches``."""
        return await self._run(self._queue.batches)

    async def pending(self) -> list[Batch]:
        """As ``Queue.pending``."""
        return await self._run(self._queue.pending)
