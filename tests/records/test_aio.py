"""Records for asyncio: the same operations, awaited, and harmless to cancel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, assert_type

import pytest

from casstore import aio
from casstore.aio import AsyncStore
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import ClosedError, RecordNotFoundError, StateRefusedError
from casstore.maintenance.check import check
from casstore.records.aio import (
    AsyncAgentSession,
    AsyncLifecycles,
    AsyncRuns,
    AsyncRunState,
    AsyncScope,
    AsyncScopedState,
    AsyncSessionLog,
)
from casstore.records.lifecycles import AgentCheckpoint, Annotation
from casstore.records.log import LogSession, Message, NewMessage, Tokens
from casstore.records.runs import Page, Run
from casstore.records.scoped import Context, StateEntry, StatePolicy
from casstore.store import Store
from casstore.testing.session_fixtures import contents_of

TIMEOUT_S = 60.0
HERE = Context("runner", conversation_id="talk", actor_id="ann")


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end; a deadlock ends as a failure."""
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def in_memory(engine: MemoryEngine | None = None) -> AsyncStore:
    return AsyncStore(lambda: Store(MemoryEngine() if engine is None else engine))


# --- what it is for ------------------------------------------------------------------------------


def test_an_awaited_session_log_appends_reads_and_folds(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            log = AsyncSessionLog(store, depth_limit=1)
            assert_type(await log.create("s", metadata={"k": 1}), LogSession)
            assert_type(await log.append("s", NewMessage("user", "0")), int)
            numbers = await asyncio.gather(
                *[log.append("s", NewMessage("user", n), tokens=Tokens(1, 1, 2)) for n in range(50)]
            )
            assert sorted(numbers) == list(range(2, 52))
            found = [message async for message in log.messages("s", 1, 200)]
            assert_type(found, list[Message])
            assert [message.number for message in found] == list(range(1, 52))
            assert (await log.totals("s")).total == 2
            await log.fold("s", [1, 2], "note")
            assert [each.id async for each in log.sessions()] == ["s"]
            entries = [entry async for entry in log.export("s")]
            copy = await log.import_session(entries)
            assert await log.active(copy.id) == await log.active("s")
            await log.update("s", model="m")
            assert (await log.get("s")).model == "m"
            calls = [{"id": "c", "name": "tool"}]
            await log.append("s", NewMessage("assistant", tool_calls=calls))
            # In a thread, and not in that of the event loop.
            here = threading.get_ident()
            assert await log.resume("s", lambda call: threading.get_ident() != here) == [54]
            last = await log.message("s", 54)
            assert last is not None
            assert last.content is True

    run(main())


def test_awaited_runs_are_created_and_paged(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            runs = AsyncRuns(store)
            await runs.create_thread("t", "agent")
            await asyncio.gather(*[runs.create_run("t", f"r{n}", "agent", "m") for n in range(9)])
            page = await runs.thread_runs("t", limit=4)
            assert_type(page, Page[Run])
            assert len(page.items) == 4
            await runs.set_state("t", "r3", "waiting", checkpoint="elsewhere")
            assert [one.id async for one in runs.protected_runs()] == ["r3"]
            with pytest.raises(RecordNotFoundError):
                await runs.get_run("t", "unknown")
            assert await runs.delete_thread("t") is True

    run(main())


def test_scoped_state_through_a_run(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            states = AsyncScopedState(store)
            scope = states.scope(HERE, "actor", StatePolicy())
            assert_type(scope, AsyncScope)
            assert_type(await scope.put("k", 1), StateEntry)
            assert scope.key == scope.sync.key
            await states.begin_run("run", HERE, caller="plugin")
            state = await states.run("run", caller="plugin")
            assert_type(state, AsyncRunState)
            found = await state.find("actor", "k")
            assert found is not None
            assert found.value == 1
            assert (await state.scope("actor").usage()).keys == 1
            with pytest.raises(StateRefusedError):
                await states.run("run", caller="somebody else")

    run(main())


def test_awaited_lifecycles_handle_sessions_users_and_records(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            lives = AsyncLifecycles(store, secret=bytes(range(16)))
            async with await lives.create_session("a", user="ann") as session:
                assert_type(session, AsyncAgentSession)
                session.working.set("x", 1)
                made = await session.checkpoint("first")
                found = await session.find_checkpoint("first")
                assert_type(found, AgentCheckpoint | None)
                assert found is not None
                assert found.payload == {"x": 1}
                assert [each.number async for each in session.checkpoints()] == [1]
            assert session.working.names() == []
            await lives.users.put("ann", "town", "Nowhere")
            assert [name async for name in lives.users.names("ann")] == ["town"]
            assert lives.users.ref("ann", "town").name == "town"
            await lives.records.put("facts", "one", 1, Annotation(["process"], sources=[made.ref]))
            assert [one.ref.name async for one in lives.records.list("facts")] == ["one"]
            assert [name async for name in lives.sessions(user="ann")] == ["a"]
            assert (await lives.users.erase("ann")).deleted == 1

    run(main())


# --- cancelled and closed -----------------------------------------------------------------------


class Gate(MemoryEngine):
    """Writes wait, once it is shut, until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()

    def write(self, write: Write) -> WriteResult:
        self.waiting.set()
        self.open.wait()
        return super().write(write)


STEPS: dict[str, Callable[[AsyncStore], Coroutine[Any, Any, object]]] = {
    "log": lambda store: AsyncSessionLog(store).append("s", NewMessage("user", "x")),
    "runs": lambda store: AsyncRuns(store).append_event("t", "r", 1),
    "scoped": lambda store: AsyncScopedState(store).update(HERE, StatePolicy(), "actor", "new", 2),
    "lifecycles": lambda store: AsyncLifecycles(store).users.put("ann", "new", 2),
}


@pytest.mark.parametrize("system", STEPS)
def test_a_call_cancelled_during_its_write_completes_the_write(system: str) -> None:
    async def main() -> None:
        engine = Gate()
        async with in_memory(engine) as store:
            await AsyncSessionLog(store).create("s")
            await AsyncRuns(store).create_thread("t", "agent")
            await AsyncRuns(store).create_run("t", "r", "agent", "m")
            await AsyncScopedState(store).update(HERE, StatePolicy(), "actor", "old", 1)
            await AsyncLifecycles(store).users.put("ann", "old", 1)
            before = contents_of(store.sync)
            engine.open.clear()
            engine.waiting.clear()
            task = asyncio.create_task(STEPS[system](store))
            await asyncio.to_thread(engine.waiting.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert contents_of(store.sync) == before
            engine.open.set()
            # Behind it in the pool, or beside it: it waits for nothing, and takes nothing back.
            await STEPS[system](store)
            assert contents_of(store.sync) != before
            assert check(store.sync, level="full").counts.keys() <= {"history_gap"}

    run(main())


def test_calls_that_are_cancelled_before_they_begin_never_happen() -> None:
    async def main() -> None:
        engine = Gate()
        async with in_memory(engine) as store:
            log = AsyncSessionLog(store)
            await log.create("s")
            engine.open.clear()
            # More than there are threads: some of them have to wait for one.
            tasks = [
                asyncio.create_task(log.append("s", NewMessage("user", n))) for n in range(100)
            ]
            await asyncio.to_thread(engine.waiting.wait)
            for task in tasks[50:]:
                task.cancel()
            await asyncio.wait(tasks[50:])
            engine.open.set()
            done = await asyncio.gather(*tasks[:50])
            assert sorted(done) == list(range(1, 51))
            assert [message.number for message in await log.active("s")] == list(range(1, 51))

    run(main())


def test_breaking_out_of_an_awaited_iteration_leaves_the_log_usable(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            log = AsyncSessionLog(store)
            await log.create("s")
            await log.extend("s", [NewMessage("user", n) for n in range(300)])
            async for message in log.messages("s"):
                if message.number == 70:
                    break
            assert await log.append("s", NewMessage("user", "more")) == 301

    run(main())


def test_an_awaited_record_call_on_a_closed_store_raises_closed_error() -> None:
    async def main() -> None:
        store = in_memory()
        with pytest.raises(ClosedError):
            AsyncSessionLog(store)
        async with store:
            log = AsyncSessionLog(store)
            await log.create("s")
        with pytest.raises(ClosedError):
            await log.append("s", NewMessage("user", "late"))

    run(main())
