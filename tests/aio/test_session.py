"""Sessions for asyncio: the same operations, awaited; waiting takes no thread and ends at once."""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

import casstore
from casstore import Checkpoint, Commit, Head, Node, NodeDraft, Store, Usage, aio
from casstore.aio import AsyncNodes, AsyncSession, AsyncSessionState, AsyncStore
from casstore.engine.lmdb import watching
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Watch, Write, WriteResult
from casstore.errors import (
    ClosedError,
    HeadConflictError,
    InvalidInputError,
    NodeNotFoundError,
    SessionDeletedError,
    StorageError,
)
from casstore.session.session import SessionState
from casstore.testing.inspection import has_waiting_tasks, waiting_tasks
from tests.aio.test_store import TIMEOUT_S, Gate, first_answer, methods, run

ROOT = Path(__file__).parent.parent.parent
MINUTE_MS = 60_000
WAITERS = 100
# How many calls of one store run at once.
THREADS = 32

Item = TypeVar("Item")


async def collected(items: AsyncIterator[Item]) -> list[Item]:
    return [item async for item in items]


def ids(nodes: Iterable[Node]) -> list[str]:
    return [node.id for node in nodes]


def step(*nodes: str, **fields: Any) -> Commit:
    drafts = [NodeDraft(node, {"role": "user", "text": f"this is {node}"}) for node in nodes]
    return Commit(append=drafts, **fields)


def revision(head: Head | None) -> int:
    assert head is not None
    return head.revision


def test_a_loaded_session_has_the_same_fields() -> None:
    assert AsyncSessionState._fields == SessionState._fields


# --- a session's life -------------------------------------------------------------------------


def test_every_session_call_works_awaited(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            meta = await store.create_session("alpha", name="First", model="m", extra={"k": 1})
            session = store.session("alpha")
            assert (session.id, repr(session)) == ("alpha", "AsyncSession('alpha')")
            assert await session.meta() == meta
            assert await session.head() is None
            assert await session.load() is None
            assert len(await session.nodes()) == 0
            assert await collected(session.history()) == []

            lease = await session.claim_lease("worker", MINUTE_MS)
            assert lease is not None
            assert await session.claim_lease("other", MINUTE_MS) is None
            lease = await session.renew_lease(lease, MINUTE_MS)
            await step_with_queue_and_attachment(session, lease)
            assert await session.release_lease(lease)
            assert not await session.release_lease(lease)

            await read_everything(session)
            await move_and_label(session)
            await fork_and_compare(store, session)
            await keep(store, (await session.entry()).manifest)
            await let_it_stay(store, session)

            infos = await collected(store.sessions())
            assert [info.meta.session for info in infos] == ["alpha", "beta"]
            assert await store.delete_session("alpha")
            assert not await store.delete_session("alpha")
            with pytest.raises(SessionDeletedError):
                await session.head()

    run(main())


async def let_it_stay(store: AsyncStore, session: AsyncSession) -> None:
    assert await session.add_subjects(["anna", "berta"]) == ("anna", "berta")
    assert await session.remove_subjects(["berta"]) == ("anna",) == await session.subjects()
    await store.create_session("about", subjects=["anna"], ttl_ms=MINUTE_MS)
    assert await collected(store.sessions_about("anna")) == ["about", session.id]
    assert await store.session("about").expires_at_ms() is not None
    assert await session.expires_at_ms() is None
    assert await session.expire_in(MINUTE_MS) == await session.expires_at_ms()
    await store.fork(session.id, "fork about nobody", subjects=[])
    assert await store.session("fork about nobody").subjects() == ()
    protection = await session.protect(by="run", ttl_ms=MINUTE_MS)
    assert await session.protections() == [protection]
    assert await session.unprotect("run") == 1
    assert await store.delete_session("about")
    assert await store.delete_session("fork about nobody")


async def step_with_queue_and_attachment(session: AsyncSession, lease: casstore.Lease) -> None:
    queue, attachments = session.queue, session.attachments
    first = await queue.enqueue([{"n": 1}], source_key="key", batch_id="one")
    assert await queue.enqueue([{"n": 2}], source_key="key") == first
    second = await queue.enqueue([{"n": 3}], slot="join", merge_key="m", batch_id="two")
    assert await queue.batches() == await queue.pending() == [first, second]
    lost = await queue.claim(lease)
    assert lost is not None
    assert await queue.abandon(lost) == 1
    assert await queue.claim_exactly(lease, ["two"]) is None
    claim = await queue.claim_exactly(lease, ["one"])
    assert claim is not None
    await queue.verify(claim)
    assert await queue.cancel("two") == second

    kept = await attachments.put(b"content", owner="me")
    stray = await attachments.intend("stray", uri="file:///stray")
    early = await attachments.intend("early", uri="file:///early")
    assert [one.state for one in await attachments.commit(["early"])] == ["committed"]
    assert await attachments.find("stray") == stray
    orphans = await attachments.uncommitted(older_than_ms=early.intent_at_ms)
    assert {one.id for one in orphans} == {kept.id, "stray"}
    assert (await attachments.condemn("stray")).state == "condemned"
    assert await attachments.forget("stray")

    change = Commit(
        append=[NodeDraft("a", {"role": "user", "text": "hello"}), NodeDraft("b", [1, 2])],
        checkpoint=Checkpoint(turn_state={"t": 1}, tool_state={"tool": list(range(50))}),
        expected=0,
        lease=lease,
        turn="turn",
        usage=[Usage("source", "model", 10, 5)],
        completes=[claim],
        attachments=[kept.id],
    )
    done = await session.commit(change)
    assert (done.revision, done.nodes, done.replayed) == (1, ("a", "b"), False)
    assert await session.commit(change) == done._replace(replayed=True)
    assert await queue.batches() == []
    committed = await attachments.list(state="committed")
    assert {one.id for one in committed} == {kept.id, "early"}


async def read_everything(session: AsyncSession) -> None:
    state = await session.load()
    assert state is not None
    assert (state.head.revision, state.leaf, state.healed) == (1, "b", False)
    assert state.checkpoint.tool_state == {"tool": list(range(50))}
    assert state.usage == await session.usage() == (Usage("source", "model", 10, 5),)
    assert ids(await state.nodes.load()) == ["a", "b"]
    assert (await session.checkpoint(hydrate=True)) == state.checkpoint
    assert type((await session.checkpoint()).tool_state) is casstore.Link
    node = await session.node("a")
    assert node == await state.nodes.at(0)
    assert await session.node("absent") is None
    with pytest.raises(NodeNotFoundError):
        await session.nodes(leaf="absent")
    assert (await session.info()).first_user_message == "hello"


async def move_and_label(session: AsyncSession) -> None:
    assert (await session.label("start")).labels == ("start",)
    assert (await session.commit(step("c"))).revision == 2
    assert (await session.entry("start")).revision == 1
    done = await session.rewind("start", expected=2, label="back")
    assert done.revision == 3
    assert [entry.revision async for entry in session.history()] == [3, 2, 1]
    assert [entry.operation async for entry in session.history(limit=1)] == ["rewind"]
    assert [entry.revision async for entry in session.history(before=3)] == [2, 1]
    assert await session.unlabel("back")
    assert not await session.unlabel("back")


async def fork_and_compare(store: AsyncStore, session: AsyncSession) -> None:
    assert (await store.fork("alpha", "beta", at="start")).session == "beta"
    beta = store.session("beta")
    assert (await store.compare(session, beta)).equal
    await beta.commit(step("d"))
    compared = await store.compare(("alpha", 1), beta)
    assert [node.id for node in compared.added] == ["d"]
    await store.fork("beta", "gamma", append=[NodeDraft("e", "e")])
    assert (await beta.adopt(store.session("gamma"), expected=2)).leaf == "e"
    assert (await beta.adopt("gamma", label="again")).revision == 4
    await beta.rewind(2)
    assert await store.delete_session("gamma")
    assert (await beta.tombstone(["d", "?"])).hidden == ("d",)
    # The leaf is hidden, so the latest message takes its place.
    assert ids(await (await beta.nodes()).load()) == ["a"]


async def keep(store: AsyncStore, digest: casstore.Digest) -> None:
    tag = await store.tag("tag", digest, note="why")
    pin = await store.pin("pin", digest, ttl_ms=MINUTE_MS)
    assert await store.find_pin("tag") == tag
    assert await collected(store.pins()) == [pin, tag]
    assert await collected(store.pins(prefix="t")) == [tag]
    assert await store.unpin("pin")
    assert await store.find_pin("pin") is None


# --- reading in pages -------------------------------------------------------------------------


def test_nodes_are_read_in_pages_and_by_index(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            session = store.session("alpha")
            names = [f"n{n}" for n in range(700)]
            await session.commit(step(*names))
            nodes = await session.nodes()
            assert len(nodes) == 700
            assert [node.id async for node in nodes] == names
            assert ids(await nodes.load()) == names
            assert [len(page) async for page in nodes.pages()] == [256, 256, 188]
            pages = await collected(nodes.pages(300))
            assert [ids(page) for page in pages] == [names[:300], names[300:600], names[600:]]
            assert (await nodes.at(-1)).id == "n699"
            with pytest.raises(IndexError):
                await nodes.at(700)
            tail = nodes[-5:]
            assert isinstance(tail, AsyncNodes)
            assert len(tail) == 5
            assert [node.id async for node in tail[1:3]] == ["n696", "n697"]
            assert ids(await nodes[::100].load()) == names[::100]
            assert [node async for node in nodes[700:]] == []
            async for node in nodes:
                assert node.id == "n0"
                break
            bare = await session.nodes("full", payloads=False)
            assert (await bare.at(0)).payload is None

    run(main())


def test_indexing_or_iterating_awaited_nodes_raises_type_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            await store.session("alpha").commit(step("a"))
            nodes: Any = await store.session("alpha").nodes()
            with pytest.raises(TypeError, match="await"):
                nodes[0]
            with pytest.raises(TypeError, match="await"):
                list(nodes)

    run(main())


def test_slicing_reads_nothing_and_pages_are_read_when_asked_for() -> None:
    class Counting(MemoryEngine):
        """Counts the objects that are read."""

        read = 0

        def get_many(self, digests: Any) -> Any:
            self.read += len(digests)
            return super().get_many(digests)

    async def main() -> None:
        engine = Counting()
        async with AsyncStore(lambda: Store(engine)) as store:
            session = store.session("alpha")
            await session.commit(step(*[f"n{n}" for n in range(500)]))
            nodes = await session.nodes()
            engine.read = 0
            part = nodes[100:400]
            pages = part.pages(10)
            assert engine.read == 0
            assert len(await anext(pages)) == 10
            assert 0 < engine.read < 100

    run(main())


def test_history_and_sessions_are_iterated_in_full(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            session = store.session("s000")
            for n in range(300):
                await session.commit(step(f"n{n}", expected=n))
            entries = await collected(session.history())
            assert [entry.revision for entry in entries] == list(range(300, 0, -1))
            names = [f"s{n:03}" for n in range(300)]
            await asyncio.gather(*[store.create_session(name) for name in names])
            found = await collected(store.sessions())
            assert [info.meta.session for info in found] == names
            found = await collected(store.sessions(after="s100", limit=70, prefix="s"))
            assert [info.meta.session for info in found] == names[101:171]
            with pytest.raises(InvalidInputError):
                await anext(store.sessions(limit=-1))
            with pytest.raises(InvalidInputError):
                await anext(session.history(limit=-1))

    run(main())


# --- writing together -------------------------------------------------------------------------


def test_many_tasks_commit_to_many_sessions(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:

            async def work(session: AsyncSession) -> None:
                for n in range(20):
                    await session.commit(step(f"n{n}", expected=n))

            sessions = [store.session(f"s{n}") for n in range(16)]
            await asyncio.gather(*map(work, sessions))
            for session in sessions:
                assert revision(await session.head()) == 20
                assert ids(await (await session.nodes()).load()) == [f"n{n}" for n in range(20)]

    run(main())


def test_of_tasks_that_expect_the_same_revision_one_wins(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            for expected in range(10):
                results = await asyncio.gather(
                    *[
                        store.session("alpha").commit(
                            step(f"{expected}-{task}", expected=expected),
                        )
                        for task in range(16)
                    ],
                    return_exceptions=True,
                )
                won = [one for one in results if not isinstance(one, BaseException)]
                lost = [one for one in results if isinstance(one, HeadConflictError)]
                assert len(won) == 1
                assert len(lost) == 15
                head = await store.session("alpha").head()
                assert head is not None
                assert (head.revision, head.node_count) == (expected + 1, expected + 1)
                assert head.manifest == won[0].manifest

    run(main())


def test_a_cancelled_commit_may_happen_and_its_turn_makes_the_retry_safe() -> None:
    async def main() -> None:
        gate = Gate()
        async with AsyncStore(lambda: Store(gate)) as store:
            session = store.session("alpha")
            change = step("a", turn="turn")
            task = asyncio.create_task(session.commit(change))
            await asyncio.to_thread(gate.arrived.acquire, timeout=TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open.set()
            # Whether the thread is through by now or not, the turn is committed once.
            assert (await session.commit(change)).revision == 1
            again = await session.commit(change)
            assert (again.revision, again.replayed) == (1, True)

    run(main())


# --- waiting ----------------------------------------------------------------------------------


async def asleep(store: AsyncStore, count: int = 1) -> None:
    """Return when so many tasks wait, all of which have looked, and nothing would wake them."""
    while (
        (waiting := waiting_tasks(store)) is None
        or waiting.number != count
        or not waiting.are_asleep
        or waiting.descriptor is None
        or select.select([waiting.descriptor], [], [], 0)[0]
    ):
        await asyncio.sleep(0.001)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def waiters(store: AsyncStore, count: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that wait for the session to get past revision 1, asleep.

    When all have ended, the descriptors they needed are given back.
    """
    # A second commit opens the log.
    await store.session("other").commit(step("first"))
    await store.session("alpha").commit(step("first"))
    before = open_descriptors()
    tasks = [asyncio.create_task(store.session("alpha").wait(1)) for _ in range(count)]
    await asleep(store, count)
    assert open_descriptors() > before
    waiting = waiting_tasks(store)
    assert waiting is not None
    assert waiting.descriptor is not None
    yield tasks
    await asyncio.wait(tasks)
    assert open_descriptors() <= before
    assert not has_waiting_tasks(store)
    loop = asyncio.get_running_loop()
    assert not loop.remove_reader(waiting.descriptor), "the event loop still knew it"


Opener = Callable[[], AsyncStore]


@pytest.fixture(params=["native", "polling", "memory"])
def opener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Opener:
    """A store on every kind of watch."""
    if request.param == "memory":
        return lambda: AsyncStore(lambda: Store(MemoryEngine()))
    if request.param == "polling":

        def refuse(*_: object) -> Watch:
            raise OSError("none left")

        monkeypatch.setattr(watching, "_open_native", refuse)
        monkeypatch.setattr(watching, "_POLL_INTERVAL_S", 0.001)
    return lambda: aio.open(tmp_path / "s", "relaxed")


def test_wait_returns_at_once_if_the_head_is_already_later(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store:
            session = store.session("alpha")
            await session.commit(step("a"))
            for timeout_s in (None, 0, -1, 1e9, float("inf")):
                assert revision(await session.wait(0, timeout_s)) == 1
            assert not has_waiting_tasks(store)

    run(main())


def test_a_commit_wakes_every_waiter(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 3) as tasks:
            # Of another session: they look, and go on waiting.
            await store.session("beta").commit(step("a"))
            await asleep(store, 3)
            await store.session("alpha").commit(step("b"))
            assert [revision(head) for head in await asyncio.gather(*tasks)] == [2, 2, 2]

    run(main())


def test_the_first_commit_of_a_session_can_be_waited_for(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store:
            task = asyncio.create_task(store.session("alpha").wait(0))
            await asleep(store)
            await store.session("alpha").commit(step("a"))
            assert revision(await task) == 1

    run(main())


def test_a_follower_misses_no_revision(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store:

            async def follow(session: AsyncSession) -> None:
                seen = 0
                while seen < 200:
                    seen = revision(await session.wait(seen))

            following = [asyncio.create_task(follow(store.session("alpha"))) for _ in range(5)]
            for n in range(200):
                await store.session("alpha").commit(step(f"n{n}"))
            await asyncio.gather(*following)
            assert not has_waiting_tasks(store)

    run(main())


COMMIT = """
import sys
sys.path.insert(0, sys.argv[1])
import casstore
with casstore.open(sys.argv[2], "relaxed") as store:
    session = store.session("alpha")
    draft = casstore.NodeDraft("from outside", 1)
    session.commit(casstore.Commit(append=[draft]))
"""


def test_a_commit_of_another_process_wakes_every_waiter(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store, waiters(store, 2) as tasks:
            command = [sys.executable, "-c", COMMIT, str(ROOT), str(tmp_path / "s")]
            await asyncio.to_thread(subprocess.run, command, check=True, timeout=TIMEOUT_S)
            heads = await asyncio.gather(*tasks)
            assert [(head.revision, head.leaf) for head in heads] == [(2, "from outside")] * 2

    run(main())


@pytest.mark.parametrize("timeout_s", [-1, 0, 0.01])
def test_a_wait_ends_when_its_time_is_up(opener: Opener, timeout_s: float) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 1) as tasks:
            session = store.session("alpha")
            assert await session.wait(1, timeout_s) is None
            assert await store.session("beta").wait(0, timeout_s=timeout_s) is None
            # The time of one is not that of another.
            await asleep(store, 1)
            await session.commit(step("b"))
            assert revision(await tasks[0]) == 2

    run(main())


@pytest.mark.parametrize(
    ("after", "timeout_s"), [(None, 0), ("1", 0), (-1, 0), (0, "1"), (0, float("nan"))]
)
def test_wait_refuses_an_invalid_revision_or_timeout(after: Any, timeout_s: Any) -> None:
    async def main() -> None:
        async with AsyncStore(lambda: Store(MemoryEngine())) as store:
            with pytest.raises(InvalidInputError):
                await store.session("alpha").wait(after, timeout_s)

    run(main())


def test_a_cancelled_wait_releases_its_resources_at_once(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 1) as tasks:
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]

    run(main())


def test_cancelling_a_waiter_leaves_the_others_waiting(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 10) as tasks:
            for task in tasks[::2]:
                task.cancel()
            await asyncio.wait(tasks[::2])
            await asleep(store, 5)
            await store.session("alpha").commit(step("b"))
            assert [revision(head) for head in await asyncio.gather(*tasks[1::2])] == [2] * 5

    run(main())


def test_waits_cancelled_at_any_moment_leave_nothing_behind(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store:
            session = store.session("alpha")
            await session.commit(step("a"))
            before = open_descriptors()
            for rounds in range(60):
                tasks = [asyncio.create_task(session.wait(1)) for _ in range(3)]
                for _ in range(rounds % 20):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                assert all(task.cancelled() for task in tasks)
                assert not has_waiting_tasks(store)
        # A watch that a thread was just making is closed by that thread; all have ended.
        assert open_descriptors() <= before

    run(main())


class SlowWatch(MemoryEngine):
    """An engine on which a watch is made only when the test allows it, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.making = threading.Semaphore(0)
        self.may_make = threading.Event()
        self.error: Exception | None = None
        self.made: list[Watch] = []

    def watch(self) -> Watch:
        self.making.release()
        assert self.may_make.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        self.made.append(super().watch())
        return self.made[-1]


def test_a_watch_without_a_waiter_is_closed_when_it_is_made() -> None:
    async def main() -> None:
        engine = SlowWatch()
        async with AsyncStore(lambda: Store(engine)) as store:
            task = asyncio.create_task(store.session("alpha").wait(0))
            await asyncio.to_thread(engine.making.acquire, timeout=TIMEOUT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not has_waiting_tasks(store)
            # Whoever comes now gets a watch of their own.
            task = asyncio.create_task(store.session("alpha").wait(0))
            await asyncio.to_thread(engine.making.acquire, timeout=TIMEOUT_S)
            engine.may_make.set()
            await asleep(store)
            await store.session("alpha").commit(step("a"))
            assert revision(await task) == 1
        assert len(engine.made) == 2
        for watch in engine.made:
            with pytest.raises(ClosedError):
                watch.fileno()

    run(main())


def test_cancelling_a_waiter_does_not_stop_the_watch_of_the_others() -> None:
    async def main() -> None:
        async with AsyncStore(lambda: Store(MemoryEngine())) as store:
            # With every thread taken, the watch is still to be begun.
            go = threading.Event()
            busy = [asyncio.create_task(store.run(go.wait, TIMEOUT_S)) for _ in range(THREADS)]
            tasks = [asyncio.create_task(store.session("alpha").wait(0)) for _ in range(2)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            go.set()
            await asyncio.gather(*busy)
            await asleep(store)
            await store.session("alpha").commit(step("a"))
            assert revision(await tasks[1]) == 1

    run(main())


def test_a_watch_that_cannot_be_made_is_an_error_for_all_and_may_be_tried_again() -> None:
    async def main() -> None:
        engine = SlowWatch()
        engine.error = StorageError("no descriptors")
        async with AsyncStore(lambda: Store(engine)) as store:
            tasks = [asyncio.create_task(store.session("alpha").wait(0)) for _ in range(3)]
            await asyncio.to_thread(engine.making.acquire, timeout=TIMEOUT_S)
            engine.may_make.set()
            for task in tasks:
                with pytest.raises(StorageError):
                    await task
            assert not has_waiting_tasks(store)
            engine.error = None
            assert await store.session("alpha").wait(0, 0) is None

    run(main())


def test_a_store_runs_32_calls_at_once() -> None:
    async def main() -> None:
        async with AsyncStore(lambda: Store(MemoryEngine())) as store:
            began, go = threading.Semaphore(0), threading.Event()

            def stay() -> None:
                began.release()
                assert go.wait(TIMEOUT_S)

            calls = [asyncio.create_task(store.run(stay)) for _ in range(THREADS + 1)]
            for _ in range(THREADS):
                assert await asyncio.to_thread(began.acquire, timeout=TIMEOUT_S)
            assert not await asyncio.to_thread(began.acquire, timeout=0.05)
            go.set()
            await asyncio.gather(*calls)

    run(main())


def test_a_hundred_waiters_share_one_watch_and_use_no_thread(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store:
            before = open_descriptors()
            async with waiters(store, WAITERS) as tasks:
                # Two for the watch, and one for the map of the log, which the commits have opened.
                assert open_descriptors() - before <= 3
                # All threads of the pool can meet: none is taken.
                barrier = threading.Barrier(THREADS)
                meeting = [store.run(barrier.wait, TIMEOUT_S) for _ in range(THREADS)]
                assert sorted(await asyncio.gather(*meeting)) == list(range(THREADS))
                await store.session("alpha").commit(step("b"))
                heads = await asyncio.gather(*tasks)
                assert [head.revision for head in heads] == [2] * WAITERS

    run(main())


def on_loops(store: AsyncStore, count: int) -> tuple[list[threading.Thread], list[Any]]:
    """Tasks that wait for the session to get past revision 1, each asleep on a loop of its own."""
    ended: list[Any] = []

    async def wait() -> None:
        waiting = asyncio.create_task(store.session("alpha").wait(1))
        await asleep(store)
        ready.release()
        [answer] = await asyncio.gather(waiting, return_exceptions=True)
        ended.append(answer)

    ready = threading.Semaphore(0)
    threads = [threading.Thread(target=run, args=(wait(),)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert ready.acquire(timeout=TIMEOUT_S)
    return threads, ended


def test_a_commit_wakes_waiters_on_other_loops(opener: Opener) -> None:
    """Only the loop on which the first had begun to wait was ever told."""
    store = opener()
    run(store.start())
    run(store.session("alpha").commit(step("first")))
    threads, ended = on_loops(store, 3)
    run(store.session("alpha").commit(step("second")))
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [head.revision for head in ended] == [2, 2, 2]
    assert not has_waiting_tasks(store)
    run(store.close())


def test_a_loop_that_ends_does_not_disturb_waiters_on_other_loops(opener: Opener) -> None:
    store = opener()
    run(store.start())
    run(store.session("alpha").commit(step("first")))

    others: list[tuple[list[threading.Thread], list[Any]]] = []

    async def give_up() -> None:
        waiting = asyncio.create_task(store.session("alpha").wait(1))
        await asleep(store)
        others.append(await asyncio.to_thread(on_loops, store, 1))
        waiting.cancel()

    run(give_up())
    [(threads, ended)] = others
    run(store.session("alpha").commit(step("second")))
    threads[0].join(TIMEOUT_S)
    assert [head.revision for head in ended] == [2]
    run(store.close())


def test_closing_ends_the_waits_on_all_loops(opener: Opener) -> None:
    store = opener()
    run(store.start())
    run(store.session("alpha").commit(step("first")))
    threads, ended = on_loops(store, 3)
    run(store.close())
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [type(each) for each in ended] == [ClosedError] * 3


def test_deleting_the_session_ends_a_wait(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 2) as tasks:
            await store.delete_session("alpha")
            for task in tasks:
                with pytest.raises(SessionDeletedError):
                    await task

    run(main())


def test_closing_the_store_ends_every_wait(opener: Opener) -> None:
    async def main() -> None:
        store = opener()
        async with store, waiters(store, 20) as tasks:
            await store.close()
            assert all(task.done() for task in tasks)
            for task in tasks:
                with pytest.raises(ClosedError):
                    await task

    run(main())


def test_closing_ends_a_wait_also_if_others_share_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        with casstore.open(tmp_path / "s", "relaxed") as other:
            store = aio.open(tmp_path / "s", "relaxed")
            async with store, waiters(store, 2) as tasks:
                session = store.session("alpha")
                await store.close()
                for task in tasks:
                    with pytest.raises(ClosedError):
                        await task
                with pytest.raises(ClosedError):
                    await session.wait(0)
                async with store:
                    # Of the store as it was before it was closed.
                    with pytest.raises(ClosedError):
                        await session.wait(0)
                    assert revision(await store.session("alpha").wait(0)) == 1
            assert revision(other.session("alpha").head()) == 1

    run(main())


def test_closing_the_engine_beneath_ends_a_wait(opener: Opener) -> None:
    async def main() -> None:
        async with opener() as store, waiters(store, 3) as tasks:
            await asyncio.to_thread(store.sync.close)
            for task in tasks:
                with pytest.raises(ClosedError):
                    await task
            with pytest.raises(ClosedError):
                await store.session("alpha").wait(0)

    run(main())


# --- closed -----------------------------------------------------------------------------------


def test_a_session_of_a_closed_store_refuses_every_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            session = store.session("alpha")
            await session.commit(step("a"))
            lease = await session.claim_lease("worker", MINUTE_MS)
            assert lease is not None
            await session.queue.enqueue([1])
            claim = await session.queue.claim(lease)
            nodes = await session.nodes()
        known: dict[str, Any] = {
            "after": 0, "attachment_id": "a", "attachment_ids": ["a"], "batch_id": "b",
            "batch_ids": ["b"], "by": "run", "claim": claim, "component": "config", "content": b"",
            "items": [1], "lease": lease, "name": "n", "names": ["anna"], "node_id": "a",
            "node_ids": ["a"], "older_than_ms": 0, "other": "beta", "owner": "worker", "to": 1,
            "target": "fork", "ttl_ms": MINUTE_MS, "turn": "t",
            "words": "word",
        }  # fmt: skip
        for face in (session, session.queue, session.attachments):
            for name in methods(type(face)):
                method = getattr(face, name)
                wanted = inspect.signature(method).parameters.values()
                given = {
                    one.name: known[one.name]
                    for one in wanted
                    if one.default is one.empty
                    and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
                }
                with pytest.raises(ClosedError):
                    await first_answer(method(**given))
        for answer in (nodes.load(), nodes.at(0), nodes.pages(), aiter(nodes)):
            with pytest.raises(ClosedError):
                await first_answer(answer)

    run(main())


def test_closing_lets_a_commit_under_way_end() -> None:
    class Slow(MemoryEngine):
        """Its first write waits until the store is being closed."""

        def __init__(self) -> None:
            super().__init__()
            self.arrived, self.go = threading.Event(), threading.Event()

        def write(self, write: Write) -> WriteResult:
            self.arrived.set()
            assert self.go.wait(TIMEOUT_S)
            return super().write(write)

    async def main() -> None:
        engine = Slow()
        store = await AsyncStore(lambda: Store(engine)).start()
        session = store.session("alpha")
        task = asyncio.create_task(session.commit(step("a")))
        await asyncio.to_thread(engine.arrived.wait, TIMEOUT_S)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await session.head()
        engine.go.set()
        assert (await task).revision == 1
        await closing

    run(main())
