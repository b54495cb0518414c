"""Proxies for asyncio: each has every method and property of the class that it stands for."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import pkgutil
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type, get_args

import pytest

import casstore
from casstore import Commit, CommitResult, Digest, Head
from casstore.aio import AsyncNodes, AsyncSession, AsyncStore
from casstore.aio.pool import StorePool
from casstore.aio.proxies import Proxy, awaited, iterated
from casstore.engine.memory import MemoryEngine
from casstore.objects.diff import Change
from casstore.records.lifecycles import AgentSession
from casstore.records.lifecycles.user_data import UserData
from casstore.records.scoped import RunState, ScopedState
from casstore.session.attachments import Attachments
from casstore.session.queue import Queue
from casstore.session.session import Session
from casstore.store import Store

# Every module that defines proxies is imported, so that ``Proxy.__subclasses__`` lists them all.
for found in pkgutil.walk_packages(casstore.__path__, "casstore."):
    if found.name.endswith("aio") or ".aio." in found.name:
        importlib.import_module(found.name)

PROXIES: list[tuple[type, type]] = [
    (proxy, get_args(base)[0])
    for proxy in Proxy.__subclasses__()
    for base in vars(proxy)["__orig_bases__"]
    if get_args(base)[0] is not io.BufferedReader  # a file of Python's, and not a class of ours
]

# Methods and properties without an asyncio counterpart, and why.
LEFT_OUT = {
    (Store, "engine"): "its calls block; callers that need it have store.sync.engine",
    (UserData, "remove"): "a step of Lifecycles.remove, inside its transaction",
}
# Methods that read nothing, and return at once.
AT_ONCE = {
    (AgentSession, "close"),
    (RunState, "scope"),
    (ScopedState, "scope"),
    (Session, "hold"),
    (Store, "session"),
    (UserData, "ref"),
}


def public(kind: type) -> dict[str, Any]:
    return {
        name: what
        for name, what in vars(kind).items()
        if name[0] != "_" and (inspect.isfunction(what) or isinstance(what, property))
    }


def parameters(function: Any) -> list[str]:
    """The parameters but ``self``; an ``AsyncX`` is the same as an ``X``."""
    shown = [str(one) for one in inspect.signature(function).parameters.values()]
    return [one.replace("Async", "") for one in shown[1:]]


def returned(function: Any) -> str:
    return str(inspect.signature(function).return_annotation).replace("Async", "")


def faults(proxy: type, behind: type) -> list[str]:
    """What a class has that its proxy lacks, or has differently."""
    known = []
    for name, method in public(behind).items():
        shown = vars(proxy).get(name)
        if (behind, name) in LEFT_OUT:
            known += [f"{name} is both left out and there"] if shown is not None else []
        elif shown is None:
            known.append(f"{name} is missing")
        elif isinstance(method, property):
            known += [f"{name} is not a property"] if not isinstance(shown, property) else []
        elif hasattr(shown, "__wrapped__") and shown.__wrapped__ is not method:
            known.append(f"{name} wraps another method")
        elif parameters(shown) != parameters(method) or returned(shown) != returned(method):
            known.append(f"{name} has another signature")
        else:
            is_iterated = returned(method).startswith("Iterator[")
            is_awaited = not is_iterated and (behind, name) not in AT_ONCE
            if inspect.iscoroutinefunction(shown) != is_awaited:
                known.append(f"{name} must {'' if is_awaited else 'not '}be awaited")
    return known


@pytest.mark.parametrize(("proxy", "behind"), PROXIES)
def test_every_public_method_and_property_has_a_counterpart(proxy: type, behind: type) -> None:
    assert len(public(behind)) > 1
    assert faults(proxy, behind) == []


def test_the_proxies_of_sessions_and_records_are_among_them() -> None:
    names = {proxy.__name__ for proxy, _ in PROXIES}
    assert {"AsyncStore", "AsyncSession", "AsyncQueue", "AsyncRuns", "AsyncScope"} <= names
    for kind in (Store, Session, Queue, Attachments):
        assert kind in {behind for _, behind in PROXIES}


class Things:
    """A class whose proxy lacks something."""

    @property
    def name(self) -> str:
        """A name."""
        return "things"

    def put(self, value: int) -> int:
        """One more than the value."""
        return value + 1

    def find(self, value: int) -> int:
        """The value."""
        return value

    def items(self) -> Iterator[int]:
        """Three numbers."""
        yield from range(3)


class AsyncThings(Proxy[Things]):
    """Things, with a property, a method and an iterator that are wrong."""

    name = awaited(Things.put)
    put = awaited(Things.find)
    items = awaited(Things.items)


def test_a_method_that_a_proxy_lacks_or_wraps_wrongly_is_found() -> None:
    assert faults(AsyncThings, Things) == [
        "name is not a property",
        "put wraps another method",
        "find is missing",
        "items must not be awaited",
    ]


class Double(Things):
    """Overrides a method."""

    def put(self, value: int) -> int:
        """Twice the value."""
        return value * 2


class Overridden(Proxy[Things]):
    """A proxy whose object may be of a subclass."""

    put = awaited(Things.put)
    items = iterated(Things.items, page=2)


def test_a_proxy_calls_the_method_that_a_subclass_overrides() -> None:
    async def main() -> None:
        pool = StorePool.borrowing(Store(MemoryEngine()))
        assert await Overridden(pool, Things()).put(21) == 22
        assert await Overridden(pool, Double()).put(21) == 42
        assert [item async for item in Overridden(pool, Double()).items()] == [0, 1, 2]
        await pool.close()

    asyncio.run(main())


def test_docstrings_and_signatures_are_those_of_the_synchronous_methods() -> None:
    assert AsyncStore.put_blob.__doc__ == Store.put_blob.__doc__
    assert inspect.signature(AsyncStore.fork) == inspect.signature(Store.fork)


def test_type_checkers_see_the_types_of_parameters_and_results() -> None:
    """``mypy`` checks the types; running it proves that the calls are right."""

    async def main() -> None:
        async with AsyncStore(lambda: Store(MemoryEngine())) as store:
            assert_type(await store.put_blob(b"x"), Digest)
            session = store.session("a")
            assert_type(session, AsyncSession)
            step = Commit(append=[casstore.NodeDraft("n", 1)])
            assert_type(await session.commit(step), CommitResult)
            assert_type(await session.head(), Head | None)
            assert_type(await session.nodes(payloads=False), AsyncNodes)
            first = await store.put_value([1])
            assert_type(store.diff(first, first, max_bytes=10), AsyncIterator[Change])
            with pytest.raises(TypeError):
                await session.commit(appended=[])  # type: ignore[call-arg]
            with pytest.raises(casstore.errors.InvalidInputError):
                await store.put_blob("text")  # type: ignore[arg-type]

    asyncio.run(main())
