"""The store for asyncio: opened and closed off the event loop, its operations run in threads."""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from casstore import store as sync
from casstore.aio.pool import Parameters, Result, StorePool
from casstore.aio.proxies import Proxy, awaited, iterated, made, opened
from casstore.aio.session import AsyncSession
from casstore.objects.view import View
from casstore.session.compare import Comparison
from casstore.session.data import Entry
from casstore.store import Store


def open(path: str | os.PathLike[str], durability: str = "full", **options: Any) -> AsyncStore:
    """An ``AsyncStore`` on ``path``; options as for ``casstore.open``.

    Opening happens in ``async with`` (or ``await store.start()``), off the event loop.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         name = await store.put_value({"text": "hello"})
    ...         return await store.get_value(name)
    >>> asyncio.run(main())
    {'text': 'hello'}
    """
    return AsyncStore(partial(sync.open, path, durability, **options))


def _show(pool: StorePool, found: Any) -> Any:
    """A proxy for a view; any other value as it is."""
    return AsyncView(pool, found) if type(found) is View else found


class AsyncView(Proxy[View]):
    """A ``View`` whose reads are awaited. ``view.slice(0, 9)`` reads what ``view[0:9]`` reads.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         view = await store.view(await store.put_value([{"n": n} for n in range(1000)]))
    ...         return len(view), await view.slice(998, 1000)
    >>> asyncio.run(main())
    (1000, [{'n': 998}, {'n': 999}])
    """

    def __len__(self) -> int:
        return len(self.sync)

    @property
    def is_map(self) -> bool:
        """As ``View.is_map``."""
        return self.sync.is_map

    @property
    def pieces_read(self) -> int:
        """As ``View.pieces_read``."""
        return self.sync.pieces_read

    async def slice(self, start: int, stop: int) -> list[Any]:
        """As ``view[start:stop]``."""
        part: list[Any] = await self._pool.run(lambda: self.sync[start:stop])
        return part

    async def items(self) -> AsyncIterator[tuple[str, Any]]:
        """As ``View.items``."""
        async for key, found in self._pool.iterate(self.sync.items):
            yield key, _show(self._pool, found)

    get = opened(View.get, _show)
    at = opened(View.at, _show)
    keys = iterated(View.keys)
    load = awaited(View.load)


class AsyncBlob(Proxy[io.BufferedReader]):
    """An open blob whose reads are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         blob = await store.open_blob(await store.put_blob(b"0123456789"))
    ...         await blob.seek(5)
    ...         return await blob.read()
    >>> asyncio.run(main())
    b'56789'
    """

    async def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the current offset; all of them if negative."""
        return await self._pool.run(self.sync.read, size)

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset; returns it, counted from the beginning."""
        return await self._pool.run(self.sync.seek, offset, whence)


class AsyncStore(Proxy[Store]):
    """A ``Store`` whose operations are awaited, on any number of event loops.

    Values must not be changed while they are being written. A stream is read in a thread.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         digests = await asyncio.gather(*[store.put_blob(b"%d" % n) for n in range(10)])
    ...         return await store.get_many(digests[:2])
    >>> asyncio.run(main())
    [b'0', b'1']
    """

    def __init__(self, opener: Callable[[], Store]) -> None:
        self._pool = StorePool(opener)

    @property
    def sync(self) -> Store:
        """The synchronous store; ClosedError if it is not open."""
        return self._pool.store

    async def start(self) -> AsyncStore:
        """Open the store; ``async with`` does it. Concurrent callers wait for the same opening."""
        await self._pool.open()
        return self

    async def close(self) -> None:
        """Close the store after the calls under way. It may be started again.

        A task that waits for the next commit of a session gets ClosedError.
        """
        await self._pool.close()

    async def __aenter__(self) -> AsyncStore:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run any call in a thread of the store, for example one on ``sync``."""
        return await self._pool.run(call, *args, **options)

    gc = awaited(Store.gc)
    vacuum = awaited(Store.vacuum)
    prune = awaited(Store.prune)
    check = awaited(Store.check)
    flush = awaited(Store.flush)
    pack = awaited(Store.pack)
    train_dictionary = awaited(Store.train_dictionary)
    put_blob = awaited(Store.put_blob)
    put_value = awaited(Store.put_value)
    put_many = awaited(Store.put_many)
    put_stream = awaited(Store.put_stream)
    get_blob = awaited(Store.get_blob)
    get_value = awaited(Store.get_value)
    get_many = awaited(Store.get_many)
    missing = awaited(Store.missing)
    open_blob = opened(Store.open_blob, AsyncBlob)
    view = opened(Store.view, _show)
    edit = awaited(Store.edit)
    diff = iterated(Store.diff)
    session = made(Store.session, AsyncSession)
    create_session = awaited(Store.create_session)
    sessions = iterated(Store.sessions)
    delete_session = awaited(Store.delete_session)
    fork = awaited(Store.fork)
    sessions_about = iterated(Store.sessions_about)
    search = awaited(Store.search)
    tag = awaited(Store.tag)
    pin = awaited(Store.pin)
    unpin = awaited(Store.unpin)
    find_pin = awaited(Store.find_pin)
    pins = iterated(Store.pins)

    async def compare(
        self,
        old: AsyncSession | str | tuple[str, int | str | Entry | None] | bytes,
        new: AsyncSession | str | tuple[str, int | str | Entry | None] | bytes,
        *,
        describe: bool = True,
    ) -> Comparison:
        """As ``Store.compare``."""
        first, second = (
            place.sync if isinstance(place, AsyncSession) else place for place in (old, new)
        )
        return await self.run(self.sync.compare, first, second, describe=describe)
