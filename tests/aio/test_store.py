"""The store for asyncio: the same operations, awaited, sharing commits, safe to cancel."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from casstore import Append, Digest, Set, Store, aio
from casstore import open as open_store
from casstore.aio import AsyncStore
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import (
    ClosedError,
    InvalidValueError,
    ObjectNotFoundError,
    PathNotFoundError,
    StorageError,
)
from casstore.testing.inspection import open_places

TIMEOUT_S = 60.0


def run(main: Coroutine[Any, Any, Any]) -> None:
    """Run to the end; a deadlock ends as a failure."""
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def methods(kind: type) -> set[str]:
    return {name for name, what in vars(kind).items() if isfunction(what) and name[0] != "_"}


def test_awaited_puts_read_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            blob = await store.put_blob(b"content")
            value = await store.put_value({"list": list(range(3_000)), "text": "t" * 900})
            stream = await store.put_stream(io.BytesIO(bytes(300_000)))
            assert await store.put_many([b"content"]) == [blob]
            assert await store.get_blob(blob) == b"content"
            assert (await store.get_value(value))["text"] == "t" * 900
            assert len((await store.get_many([stream, value]))[0]) == 300_000
            assert await store.missing([blob, Digest.of_blob(b"?")]) == [Digest.of_blob(b"?")]
            opened = await store.open_blob(stream)
            assert await opened.seek(-5, io.SEEK_END) == 299_995
            assert await opened.read() == bytes(5)
            changed = await store.edit(value, Append(("list",), "end"), Set(("text",), "short"))
            view = await store.view(changed)
            assert len(view) == 2
            inner = await view.get("list")
            assert await inner.slice(2_999, 3_001) == [2_999, "end"]
            assert await view.at(("list", 7)) == 7
            assert await view.get("absent", "none") == "none"
            assert (await inner.load())[-1] == "end"
            assert await store.view(await store.put_value(5)) == 5
            await store.flush()
            assert (await store.train_dictionary()).adopted is None

    run(main())


def test_changes_and_keys_are_iterated_in_full(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            old = await store.put_value({f"{n:04}": n for n in range(1_000)})
            new = await store.put_value({f"{n:04}": -n for n in range(1_000)})
            found = [change.path async for change in store.diff(old, new)]
            assert found == [(f"{n:04}",) for n in range(1, 1_000)]
            assert [change async for change in store.diff(old, old)] == []
            view = await store.view(old)
            keys = [key async for key in view.keys()]  # noqa: SIM118 - a view, not a dict
            assert keys == [f"{n:04}" for n in range(1_000)]
            async for _ in store.diff(old, new):
                break

    run(main())


def test_errors_are_raised_at_the_await(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            absent = Digest.of_blob(b"?")
            there = await store.put_value({"a": 1})
            with pytest.raises(ObjectNotFoundError):
                await store.get_blob(absent)
            with pytest.raises(InvalidValueError):
                await store.put_value(object())
            with pytest.raises(PathNotFoundError):
                await (await store.view(there)).at(("b",))
            with pytest.raises(ObjectNotFoundError):
                async for _ in store.diff(there, absent):
                    pass
            results = await asyncio.gather(
                store.put_value(1), store.put_value(object()), store.put_value(2),
                return_exceptions=True,
            )  # fmt: skip
            assert [type(result) for result in results] == [Digest, InvalidValueError, Digest]

    run(main())


def calls(digest: Digest) -> dict[str, Callable[[AsyncStore], Any]]:
    return {
        "flush": lambda store: store.flush(),
        "pack": lambda store: store.pack(),
        "train_dictionary": lambda store: store.train_dictionary(),
        "put_blob": lambda store: store.put_blob(b"x"),
        "put_value": lambda store: store.put_value(1),
        "put_many": lambda store: store.put_many([]),
        "put_stream": lambda store: store.put_stream(io.BytesIO()),
        "get_blob": lambda store: store.get_blob(digest),
        "get_value": lambda store: store.get_value(digest),
        "get_many": lambda store: store.get_many([]),
        "missing": lambda store: store.missing([]),
        "open_blob": lambda store: store.open_blob(digest),
        "view": lambda store: store.view(digest),
        "edit": lambda store: store.edit(digest, Append((), 1)),
        "diff": lambda store: store.diff(digest, digest),
        "session": lambda store: store.session("s"),
        "create_session": lambda store: store.create_session("s"),
        "sessions": lambda store: store.sessions(),
        "sessions_about": lambda store: store.sessions_about("anna"),
        "delete_session": lambda store: store.delete_session("s"),
        "gc": lambda store: store.gc(),
        "vacuum": lambda store: store.vacuum(),
        "prune": lambda store: store.prune(),
        "check": lambda store: store.check(),
        "fork": lambda store: store.fork("s", "t"),
        "compare": lambda store: store.compare(digest, digest),
        "tag": lambda store: store.tag("t", digest),
        "pin": lambda store: store.pin("p", digest),
        "unpin": lambda store: store.unpin("p"),
        "find_pin": lambda store: store.find_pin("p"),
        "pins": lambda store: store.pins(),
        "search": lambda store: store.search("word"),
    }


async def first_answer(result: Any) -> None:
    if isinstance(result, AsyncIterator):
        await anext(result)
    elif isinstance(result, AbstractAsyncContextManager):
        await result.__aenter__()
    else:
        await result


def test_a_store_not_yet_started_or_closed_refuses_every_call(tmp_path: Path) -> None:
    async def main() -> None:
        digest = Digest.of_blob(b"")
        tried = calls(digest)
        assert set(tried) == {
            name for name, what in vars(Store).items() if isfunction(what) and name[0] != "_"
        } - {"close"}
        fresh = aio.open(tmp_path / "s", "relaxed")
        closed = aio.open(tmp_path / "s", "relaxed")
        async with closed:
            view = await closed.view(await closed.put_value(list(range(3_000))))
        for store in (fresh, closed):
            for call in tried.values():
                with pytest.raises(ClosedError):
                    await first_answer(call(store))
            with pytest.raises(ClosedError):
                _ = store.sync
        with pytest.raises(ClosedError):
            await view.at((5,))
        await fresh.close()
        await closed.close()
        async with closed:
            assert await closed.missing([digest]) == [digest]

    run(main())
    assert open_places() == []


def test_a_store_that_cannot_be_opened_may_be_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "s").write_text("a file")
        store = aio.open(tmp_path / "s", "relaxed")
        with pytest.raises(ValueError, match="is a file"):
            await store.start()
        (tmp_path / "s").unlink()
        async with store:
            await store.put_value(1)

    run(main())


class Gate(MemoryEngine):
    """Writes wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Semaphore(0)
        self.open = threading.Event()
        self.closed = False

    def write(self, write: Write) -> WriteResult:
        self.arrived.release()
        assert self.open.wait(TIMEOUT_S)
        return super().write(write)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_closing_waits_for_the_calls_under_way(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        store = await AsyncStore(lambda: Store(gate)).start()
        puts = [asyncio.create_task(store.put_blob(b"%d" % n)) for n in range(4)]
        for _ in puts:
            await asyncio.to_thread(gate.arrived.acquire, timeout=TIMEOUT_S)
        closing = asyncio.create_task(store.close())
        # The close has been handed over when the loop has gone round; let it get as far
        # as it will before the writes may go on.
        for _ in range(10):
            await asyncio.to_thread(lambda: None)
        with pytest.raises(ClosedError):
            await store.put_blob(b"too late")
        gate.open.set()
        results = await asyncio.gather(*puts, return_exceptions=True)
        await closing
        assert gate.closed
        assert [type(result) for result in results] == [Digest] * 4

    run(main())


def test_a_cancelled_close_closes_all_the_same() -> None:
    gate = Gate()

    async def main() -> None:
        store = await AsyncStore(lambda: Store(gate)).start()
        put = asyncio.create_task(store.put_blob(b"content"))
        await asyncio.to_thread(gate.arrived.acquire, timeout=TIMEOUT_S)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not gate.closed
        gate.open.set()
        await put

    run(main())
    # asyncio.run waits for the thread that closes.
    assert gate.closed


def test_the_store_works_after_a_cancelled_call(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "s", "relaxed") as store:
            for round_ in range(20):
                tasks = [
                    asyncio.create_task(store.put_value([round_, n, "t" * 600])) for n in range(10)
                ]
                await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                for n, result in enumerate(results):
                    if isinstance(result, Digest):
                        assert await store.get_value(result) == [round_, n, "t" * 600]
                    else:
                        assert isinstance(result, asyncio.CancelledError)
            assert await store.get_value(await store.put_value("fine")) == "fine"

    run(main())
    assert open_places() == []


class HeldUp:
    """An opener that says when it is asked, and waits until it may."""

    def __init__(self, open_one: Callable[[], Store]) -> None:
        self._open_one = open_one
        self.opening = threading.Event()
        self.may_open = threading.Event()

    def __call__(self) -> Store:
        self.opening.set()
        assert self.may_open.wait(TIMEOUT_S)
        return self._open_one()


def test_a_cancelled_start_leaves_nothing_open() -> None:
    engine = Gate()
    opener = HeldUp(lambda: Store(engine))
    before = threading.enumerate()

    async def main() -> None:
        store = AsyncStore(opener)
        start = asyncio.create_task(store.start())
        await asyncio.to_thread(opener.opening.wait, TIMEOUT_S)
        start.cancel()
        await asyncio.sleep(0)
        opener.may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await start
        await store.close()

    run(main())
    # asyncio.run has ended; only a thread that this test started can still close the store.
    for thread in set(threading.enumerate()).difference(before):
        thread.join(TIMEOUT_S)
    assert engine.closed


@pytest.mark.parametrize("cancelled", [0, 1, 2])
def test_tasks_that_start_at_once_wait_for_one_opening(tmp_path: Path, cancelled: int) -> None:
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(open_store(tmp_path / "s", "relaxed"))
        return opened[-1]

    opener = HeldUp(open_one)

    async def main() -> None:
        store = AsyncStore(opener)

        async def use(number: int) -> Digest:
            await store.start()
            return await store.put_value(number)

        users = [asyncio.create_task(use(number)) for number in range(3)]
        await asyncio.to_thread(opener.opening.wait, TIMEOUT_S)
        for user in users[:cancelled]:
            user.cancel()
        await asyncio.sleep(0)
        opener.may_open.set()
        results = await asyncio.gather(*users, return_exceptions=True)
        assert [type(result) for result in results] == [
            *[asyncio.CancelledError] * cancelled,
            *[Digest] * (3 - cancelled),
        ]
        assert len(opened) == 1
        await store.close()

    run(main())
    assert open_places() == []


def test_an_opening_that_fails_fails_for_all_and_may_be_tried_again() -> None:
    asked = 0

    def opener() -> Store:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise StorageError("not yet")
        return Store(Gate())

    async def main() -> None:
        store = AsyncStore(opener)
        results = await asyncio.gather(store.start(), store.start(), return_exceptions=True)
        assert [str(result) for result in results] == ["not yet", "not yet"]
        await store.start()
        await store.close()

    run(main())
    assert asked == 2


def test_closing_a_store_that_is_still_opening_closes_it() -> None:
    engine = Gate()
    opener = HeldUp(lambda: Store(engine))

    async def main() -> None:
        store = AsyncStore(opener)
        start = asyncio.create_task(store.start())
        await asyncio.to_thread(opener.opening.wait, TIMEOUT_S)
        close = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        opener.may_open.set()
        await close
        assert engine.closed
        with pytest.raises(ClosedError):
            await start

    run(main())


PROGRAM = """
import asyncio, sys
import casstore, casstore.aio

store = casstore.aio.open(sys.argv[1], "relaxed")

async def main():
    await store.start()
    await store.put_value(1)

asyncio.run(main())
if sys.argv[2] == "close":
    asyncio.run(store.close())
"""


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_program_that_exits_with_an_open_store_prints_nothing(tmp_path: Path, end: str) -> None:
    """A store that lived as long as its module left the traceback of a weak method."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "s"), end], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
