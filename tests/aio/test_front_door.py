"""The calls that most programs need, awaited: as in ``tests/session/test_front_door.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from casstore import Set, Store, aio
from casstore.aio import AsyncSession, AsyncStore
from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError, LeaseHeldError, LeaseLostError
from casstore.testing import ManualClock

TIMEOUT_S = 60
MINUTE_MS = 60_000


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


async def payloads(session: AsyncSession) -> list[Any]:
    return [node.payload async for node in await session.nodes()]


def test_the_front_door_example_works_with_the_awaited_api(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "my-store", "relaxed") as store:
            agent = store.session("agent")
            await agent.append({"role": "user", "content": "hello"})
            await agent.append("reply", tool_state={"files": {"a.py": "old"}}, turn="t1")
            await agent.edit("tool_state", Set(["files", "a.py"], "new"))
            other = await agent.fork("other", at=1)
            await other.append("another way")
            said = await store.run(str, await agent.diff(other))
            assert said.startswith("1 node added, 1 dropped, ")
            await agent.adopt(other)
            found = await agent.find_turn("t1")
            assert found is not None
            await agent.queue.enqueue(["a question"])
            async with agent.hold("worker-1") as held:
                async for work in held.work(wait_s=0):
                    await held.append(work.batches[0].items[0], completes=[work])
            await store.gc()
            assert (await payloads(agent))[1:] == ["another way", "a question"]
            assert (await store.check(level="full")).sound
            assert (await store.prune()).sessions_deleted == 0
            assert (await store.vacuum()).sessions == ()

    run(main())


def test_many_tasks_wait_for_work_without_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            ready = asyncio.Semaphore(0)

            async def serve(name: str) -> Any:
                session = store.session(name)
                async with session.hold("worker") as held:
                    ready.release()
                    async for work in held.work(wait_s=TIMEOUT_S):
                        await held.append(work.batches[0].items[0], completes=[work])
                        break
                return await payloads(session)

            # More than the pool has threads.
            names = [f"s{n}" for n in range(40)]
            serving = [asyncio.create_task(serve(name)) for name in names]
            for _ in names:
                await ready.acquire()
            for name in names:
                await store.session(name).queue.enqueue([name])
            assert await asyncio.gather(*serving) == [[name] for name in names]

    run(main())


def test_a_held_lease_is_refused_by_name_and_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            agent = store.session("agent")
            async with agent.hold("worker-1"):
                with pytest.raises(LeaseHeldError, match="worker-1"):
                    await agent.append("no")
                with pytest.raises(LeaseHeldError, match="worker-1"):
                    await agent.claim_lease("worker-2", MINUTE_MS, wait_s=0)
                with pytest.raises(LeaseHeldError, match="worker-1"):
                    await agent.hold("worker-2").__aenter__()
                assert await agent.claim_lease("worker-2", MINUTE_MS) is None
                waiting = asyncio.create_task(
                    agent.claim_lease("worker-2", MINUTE_MS, wait_s=TIMEOUT_S)
                )
                await asyncio.sleep(0.01)
            lease = await waiting
            assert lease is not None
            assert lease.owner == "worker-2"

    run(main())


def test_a_lost_lease_and_an_ended_block_are_reported(tmp_path: Path) -> None:
    async def main() -> None:
        clock = ManualClock()
        store = await AsyncStore(lambda: Store(MemoryEngine(clock=clock))).start()
        agent = store.session("agent")
        async with agent.hold("worker-1") as held:
            await held.append("one")
            assert held.lease.owner == "worker-1"
            clock.now_ms += 10 * MINUTE_MS
            assert await agent.claim_lease("worker-2", MINUTE_MS) is not None
            with pytest.raises(LeaseLostError, match="worker-2"):
                await held.append("two")
            with pytest.raises(LeaseLostError, match="worker-2"):
                await anext(held.work(wait_s=TIMEOUT_S))
        with pytest.raises(LeaseLostError, match="block has ended"):
            await held.append("three")
        await store.close()

    run(main())


def test_a_cancelled_worker_releases_its_lease_and_its_work(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            agent = store.session("agent")
            await agent.queue.enqueue(["one"])
            claimed = asyncio.Event()

            async def serve() -> None:
                async with agent.hold("worker-1") as held:
                    async for _ in held.work():
                        claimed.set()

            serving = asyncio.create_task(serve())
            await claimed.wait()
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            async with agent.hold("worker-2", wait_s=TIMEOUT_S) as held:
                work = await anext(held.work(wait_s=TIMEOUT_S))
                assert work.batches[0].items == ("one",)

    run(main())


def test_invalid_arguments_are_refused_before_anything_is_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            agent = store.session("agent")
            with pytest.raises(InvalidInputError, match="ttl_s must be a positive number, got -1"):
                agent.hold("worker", ttl_s=-1)
            with pytest.raises(InvalidInputError, match="wait_s"):
                await agent.claim_lease("worker", 5, wait_s="1")  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="did you mean 'turn'"):
                await agent.append("one", turns="t")

    run(main())
