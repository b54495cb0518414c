"""The store for asyncio: the same operations, awaited.

Each call runs in a thread of the store's own pool, so the event loop never waits for
a disk, and calls awaited together share a flush (group commit).

    async with casstore.aio.open("store") as store:
        name = await store.put_value({"role": "user", "text": "hello"})
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from casstore import store as sync
from casstore.errors import ClosedError, PathStep
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects.diff import Change
from casstore.objects.edit import Edit
from casstore.objects.view import View

if TYPE_CHECKING:
    from casstore.engine.lmdb.dictionaries import DictionaryReport

Result = TypeVar("Result")

# As many writers as one batch of a group commit takes well; readers hardly block.
_THREADS = 32
# How many items an async iterator fetches each time it goes to a thread.
_PAGE = 64


def open(path: str | os.PathLike[str], durability: str = "full", **options: Any) -> AsyncStore:
    """An ``AsyncStore`` on ``path``; options as for ``casstore.open``.

    Opening happens in ``async with`` (or ``await store.start()``), off the event loop.
    """
    return AsyncStore(partial(sync.open, path, durability, **options))


def _close_unused(opening: Future[sync.Store]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class AsyncStore:
    """A ``Store`` whose operations are awaited."""

    def __init__(self, opener: Callable[[], sync.Store]) -> None:
        self._opener = opener
        self._store: sync.Store | None = None
        self._pool: ThreadPoolExecutor | None = None

    async def start(self) -> AsyncStore:
        """Open the store; done by ``async with``."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="casstore")
            opening = self._pool.submit(self._opener)
            try:
                self._store = await asyncio.wrap_future(opening)
            except BaseException:
                # Cancelled, the opener runs on in its thread: what it opens must be closed.
                opening.add_done_callback(_close_unused)
                self._pool.shutdown(wait=False)
                self._pool = None
                raise
        return self

    async def close(self) -> None:
        """Let go of the files, after the calls under way have ended."""
        pool, store = self._pool, self._store
        if pool is None or store is None:
            return
        self._pool = self._store = None
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, pool.shutdown)
        await loop.run_in_executor(None, store.close)

    async def __aenter__(self) -> AsyncStore:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def sync(self) -> sync.Store:
        """The synchronous store behind this one."""
        if self._store is None:
            raise ClosedError("this store is not open; use 'async with'")
        return self._store

    async def _run(self, call: Callable[..., Result], *args: Any, **options: Any) -> Result:
        if self._pool is None:
            raise ClosedError("this store is not open; use 'async with'")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(call, *args, **options))

    async def flush(self) -> None:
        """As ``Store.flush``."""
        await self._run(self.sync.flush)

    async def train_dictionary(self) -> DictionaryReport:
        """As ``Store.train_dictionary``."""
        return await self._run(self.sync.train_dictionary)

    async def put_blob(self, content: bytes) -> Digest:
        """As ``Store.put_blob``."""
        return await self._run(self.sync.put_blob, content)

    async def put_value(self, value: Any) -> Digest:
        """As ``Store.put_value``. The value must not be changed meanwhile."""
        return await self._run(self.sync.put_value, value)

    async def put_many(self, items: Iterable[Any]) -> list[Digest]:
        """As ``Store.put_many``."""
        return await self._run(self.sync.put_many, items)

    async def put_stream(self, source: BinaryIO) -> Digest:
        """As ``Store.put_stream``; ``source`` is read in a thread."""
        return await self._run(self.sync.put_stream, source)

    async def get_blob(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
        """As ``Store.get_blob``."""
        return await self._run(self.sync.get_blob, digest, max_bytes=max_bytes)

    async def get_value(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """As ``Store.get_value``."""
        return await self._run(self.sync.get_value, digest, max_bytes=max_bytes)

    async def get_many(
        self, digests: Sequence[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> list[Any]:
        """As ``Store.get_many``."""
        return await self._run(self.sync.get_many, digests, max_bytes=max_bytes)

    async def missing(self, digests: Sequence[bytes]) -> list[Digest]:
        """As ``Store.missing``."""
        return await self._run(self.sync.missing, digests)

    async def open_blob(self, digest: bytes) -> AsyncBlob:
        """As ``Store.open_blob``, with awaited reads."""
        return AsyncBlob(self._run, await self._run(self.sync.open_blob, digest))

    async def view(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """As ``Store.view``, with awaited reads."""
        found = await self._run(self.sync.view, digest, max_bytes=max_bytes)
        return AsyncView(self._run, found) if type(found) is View else found

    async def edit(self, digest: bytes, *edits: Edit) -> Digest:
        """As ``Store.edit``."""
        return await self._run(self.sync.edit, digest, *edits)

    async def diff(
        self, old: bytes, new: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> AsyncIterator[Change]:
        """As ``Store.diff``: ``async for change in store.diff(old, new)``."""
        changes = await self._run(self.sync.diff, old, new, max_bytes=max_bytes)
        async for change in _paged(self._run, changes):
            yield change


async def _paged(run: Callable[..., Any], source: Iterator[Result]) -> AsyncIterator[Result]:
    """Iterate over something that reads from disk, a page at a time in a thread."""
    while page := await run(lambda: list(islice(source, _PAGE))):
        for item in page:
            yield item


class AsyncView:
    """A ``View`` whose reads are awaited."""

    def __init__(self, run: Callable[..., Any], view: View) -> None:
        self._run = run
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    async def get(self, step: PathStep, default: Any = None) -> Any:
        """As ``View.get``."""
        return self._wrap(await self._run(self._view.get, step, default))

    async def at(self, path: Sequence[PathStep]) -> Any:
        """As ``View.at``."""
        return self._wrap(await self._run(self._view.at, path))

    async def slice(self, start: int, stop: int) -> list[Any]:
        """As ``view[start:stop]``."""
        part: list[Any] = await self._run(self._view.__getitem__, slice(start, stop))
        return part

    async def load(self) -> Any:
        """As ``View.load``."""
        return await self._run(self._view.load)

    async def keys(self) -> AsyncIterator[str]:
        """As ``View.keys``."""
        async for key in _paged(self._run, self._view.keys()):
            yield key

    def _wrap(self, found: Any) -> Any:
        return AsyncView(self._run, found) if type(found) is View else found


class AsyncBlob:
    """An open blob whose reads are awaited."""

    def __init__(self, run: Callable[..., Any], blob: io.BufferedReader) -> None:
        self._run = run
        self._blob = blob

    async def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the current place; all of them if negative."""
        content: bytes = await self._run(self._blob.read, size)
        return content

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset."""
        position: int = await self._run(self._blob.seek, offset, whence)
        return position
