"""The store of a saver: opened off the event loop, and closed whoever is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.checkpoint", reason="pip install '.[langgraph]'")

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

import casstore
from casstore.adapters.langgraph import CasstoreSaver, CasstoreStore
from casstore.errors import ClosedError, StoreNotFoundError
from casstore.store import Store
from tests.adapters.langgraph.graphs import on

TIMEOUT_S = 60.0


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, TIMEOUT_S))


def is_closed(store: Store) -> bool:
    try:
        store.put_value(1)
    except ClosedError:
        return True
    return False


class Gate:
    """Opens stores only when it is told to."""

    def __init__(self, open_store: Callable[..., Store]) -> None:
        self._open = open_store
        self.asked = threading.Event()
        self.go = threading.Event()
        self.opened: list[Store] = []

    def __call__(self, *args: Any, **options: Any) -> Store:
        self.asked.set()
        assert self.go.wait(TIMEOUT_S)
        self.opened.append(self._open(*args, **options))
        return self.opened[-1]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(casstore.open)
    monkeypatch.setattr(casstore.store, "open", gate)
    return gate


@pytest.mark.parametrize("kind", [CasstoreSaver, CasstoreStore])
def test_entering_that_is_cancelled_leaves_nothing_open(
    tmp_path: Path, gate: Gate, kind: Any
) -> None:
    """The store was opened all the same, and nobody ever closed it."""

    async def main() -> None:
        made = kind.from_path(tmp_path / "s", "relaxed")
        entering = asyncio.create_task(made.__aenter__())
        assert await asyncio.to_thread(gate.asked.wait, TIMEOUT_S)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        gate.go.set()
        while not gate.opened or not is_closed(gate.opened[0]):
            await asyncio.sleep(0.001)
        # It may be tried again.
        async with made:
            pass
        assert [is_closed(store) for store in gate.opened] == [True, True]

    run(main())


def test_a_cancelled_entering_closes_no_store_that_was_open(store: Store, tmp_path: Path) -> None:
    async def cancelled(saver: CasstoreSaver) -> None:
        entering = asyncio.create_task(saver.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)

    async def main() -> None:
        await cancelled(CasstoreSaver(store))
        own = CasstoreSaver.from_path(tmp_path / "own", "relaxed")
        assert await own.aget_tuple(on()) is None
        await cancelled(own)
        # A saver whose store was closed cannot open it again.
        assert await own.aget_tuple(on()) is None
        own.close()

    run(main())
    store.put_value("still open")


def test_the_event_loop_does_not_wait_for_a_store_to_be_opened(tmp_path: Path, gate: Gate) -> None:
    """A second call on the loop waited for the first to have opened the store."""

    async def main() -> None:
        saver = CasstoreSaver.from_path(tmp_path / "s", "relaxed")
        first = asyncio.create_task(saver.aget_tuple(on()))
        assert await asyncio.to_thread(gate.asked.wait, TIMEOUT_S)
        second = asyncio.create_task(saver.aget_tuple(on()))
        await asyncio.sleep(0)
        # Only this loop lets the store be opened: were it waiting, it would wait for ever.
        gate.go.set()
        assert (await first, await second) == (None, None)
        assert len(gate.opened) == 1
        saver.close()

    run(main())


def test_a_store_that_cannot_be_opened_may_be_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        saver = CasstoreSaver.from_path(tmp_path / "s", "relaxed", create=False)
        with pytest.raises(StoreNotFoundError):
            await saver.__aenter__()
        casstore.open(tmp_path / "s", "relaxed").close()
        async with saver:
            assert await saver.aget_tuple(on()) is None

    run(main())


def test_a_cancelled_entering_leaves_the_store_to_another_that_enters(
    tmp_path: Path, gate: Gate
) -> None:
    """The cancelled task closed the store that another task had waited for."""

    async def main() -> None:
        saver = CasstoreSaver.from_path(tmp_path / "s", "relaxed")
        first, second = (asyncio.create_task(saver.__aenter__()) for _ in range(2))
        assert await asyncio.to_thread(gate.asked.wait, TIMEOUT_S)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        gate.go.set()
        await second
        for _ in range(3):
            assert await saver.aget_tuple(on()) is None
        assert [is_closed(store) for store in gate.opened] == [False]
        saver.close()

    run(main())


@pytest.mark.parametrize("call", ["aget_tuple", "get_tuple", "__aenter__", "__enter__"])
def test_a_closed_saver_refuses_calls_and_opens_no_store(tmp_path: Path, call: str) -> None:
    async def main() -> None:
        saver = CasstoreSaver.from_path(tmp_path / "s", "relaxed")
        saver.close()

        async def use() -> None:
            # The synchronous methods raise before there is anything to await.
            await getattr(saver, call)(*[] if "enter" in call else [on()])

        with pytest.raises(ClosedError):
            await use()
        assert not (tmp_path / "s").exists()

    run(main())


def test_every_synchronous_method_of_langgraph_has_its_awaited_one() -> None:
    for kind, behind in ((CasstoreSaver, BaseCheckpointSaver), (CasstoreStore, BaseStore)):
        for name, method in vars(kind).items():
            if f"a{name}" in vars(behind) or f"a{name}" in vars(kind):
                found = vars(kind)[f"a{name}"]
                # Those that embed texts, collect calls or end a thread have bodies of their own.
                assert getattr(found, "__wrapped__", method) is method, name
                assert [*signature(found).parameters] == [*signature(method).parameters], name


def test_closing_a_saver_leaves_a_borrowed_store_open(store: Store) -> None:
    async def main() -> None:
        async with CasstoreSaver(store) as saver:
            assert await saver.aget_tuple(on()) is None

    with CasstoreSaver(store) as saver:
        assert saver.get_tuple(on()) is None
    assert not is_closed(store)
    run(main())
    assert not is_closed(store)
