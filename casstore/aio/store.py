"""The store, awaited: opened and closed off the event loop, its operations in threads."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from casstore import store as sync
from casstore.aio.changes import Changes
from casstore.aio.session import AsyncSession
from casstore.aio.threads import Parameters, Result, Run, close_unused, iterate, wait_for
from casstore.engine.forks import Lock, renew_in_child
from casstore.engine.protocol import COLD_AGE_MS
from casstore.errors import ClosedError, ForkedError, PathStep
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects.diff import Change
from casstore.objects.edit import Edit
from casstore.objects.view import View
from casstore.session.compare import Comparison
from casstore.session.data import Entry, Head, Node, NodeDraft, Pin, SessionInfo, SessionMeta

if TYPE_CHECKING:
    from casstore.engine.lmdb.dictionaries import DictionaryReport
    from casstore.engine.protocol import PackReport

# As many writers as one batch of a group commit takes well; readers hardly block.
_THREADS = 32


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


class _Opening:
    """A store on its way, and how many wait for it."""

    __slots__ = ("future", "pool", "waiting")

    def __init__(self, opener: Callable[[], sync.Store]) -> None:
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="casstore")
        self.future = self.pool.submit(opener)
        self.waiting = 0

    def give_up(self) -> None:
        """The opener runs on in its thread: what it opens is closed."""
        self.future.add_done_callback(close_unused)
        self.pool.shutdown(wait=False)


class AsyncStore:
    """A ``Store`` whose operations are awaited, on any number of event loops.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         digests = await asyncio.gather(*[store.put_blob(b"%d" % n) for n in range(10)])
    ...         return await store.get_many(digests[:2])
    >>> asyncio.run(main())
    [b'0', b'1']
    """

    def __init__(self, opener: Callable[[], sync.Store]) -> None:
        self._opener = opener
        self._store: sync.Store | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._changes: Changes | None = None
        self._is_inherited = False
        # Held where one of these becomes another: event loops may be in several threads.
        self._lock = Lock()
        self._opening: _Opening | None = None
        renew_in_child(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a forked child: the threads are the parent's, and so are those who wait."""
        if self._changes is not None:
            self._changes.leave_to_parent()
        if self._pool is not None or self._opening is not None:
            self._pool = self._changes = self._opening = None
            self._is_inherited = True

    async def start(self) -> AsyncStore:
        """Open the store; done by ``async with``. Whoever comes meanwhile waits for it, too."""
        if self._is_inherited:
            raise _forked()
        with self._lock:
            if self._store is not None:
                return self
            if self._opening is None:
                self._opening = _Opening(self._opener)
            opening = self._opening
            opening.waiting += 1
        try:
            await wait_for(opening.future)
            store = opening.future.result()
        except BaseException:
            with self._lock:
                opening.waiting -= 1
                # The others go on waiting for it.
                is_last = opening.waiting == 0 and self._opening is opening
                if is_last:
                    self._opening = None
            if is_last:
                opening.give_up()
            raise
        with self._lock:
            if self._opening is opening:
                self._pool, self._store, self._opening = opening.pool, store, None
                self._changes = Changes(self._submit, store.engine)
            elif self._store is not store:
                # Closed before it was open.
                raise _not_open()
        return self

    async def close(self) -> None:
        """Let go of the files, after the calls under way have ended.

        Whoever waits for a session to move is told with ClosedError.
        """
        if self._is_inherited:
            inherited, self._store, self._is_inherited = self._store, None, False
            if inherited is not None:
                inherited.close()
            return
        with self._lock:
            opening = self._opening
            pool, store, changes = self._pool, self._store, self._changes
            self._pool = self._store = self._changes = self._opening = None
        if opening is not None:
            opening.give_up()
            await wait_for(opening.future)
        if pool is None or store is None or changes is None:
            return
        # Here, because the engine may stay open: others in this process may share it.
        changes.wake()

        def shut() -> None:
            pool.shutdown()
            store.close()

        # One call, and shielded: nobody else could close what a cancelled close has left open.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, shut))

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
        store = self._store
        if store is None:
            raise _not_open()
        return store

    def _submit(self, call: Callable[[], Result], /) -> Future[Result]:
        if self._is_inherited:
            raise _forked()
        pool = self._pool
        if pool is None:
            raise _not_open()
        try:
            return pool.submit(call)
        except RuntimeError as exc:
            # Closed just now, on another thread's event loop?
            if self._pool is pool:
                raise
            raise _not_open() from exc

    async def run(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        """Run any call on ``sync`` in a thread of the store: what has no face of its own."""
        return await asyncio.wrap_future(self._submit(partial(call, *args, **options)))

    async def flush(self) -> None:
        """As ``Store.flush``."""
        await self.run(self.sync.flush)

    async def pack(self, *, min_age_ms: int = COLD_AGE_MS) -> PackReport:
        """As ``Store.pack``."""
        return await self.run(self.sync.pack, min_age_ms=min_age_ms)

    async def train_dictionary(self) -> DictionaryReport:
        """As ``Store.train_dictionary``."""
        return await self.run(self.sync.train_dictionary)

    async def put_blob(self, content: bytes) -> Digest:
        """As ``Store.put_blob``."""
        return await self.run(self.sync.put_blob, content)

    async def put_value(self, value: Any) -> Digest:
        """As ``Store.put_value``. The value must not be changed meanwhile."""
        return await self.run(self.sync.put_value, value)

    async def put_many(self, items: Iterable[Any]) -> list[Digest]:
        """As ``Store.put_many``."""
        return await self.run(self.sync.put_many, items)

    async def put_stream(self, source: BinaryIO) -> Digest:
        """As ``Store.put_stream``; ``source`` is read in a thread."""
        return await self.run(self.sync.put_stream, source)

    async def get_blob(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> bytes:
        """As ``Store.get_blob``."""
        return await self.run(self.sync.get_blob, digest, max_bytes=max_bytes)

    async def get_value(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """As ``Store.get_value``."""
        return await self.run(self.sync.get_value, digest, max_bytes=max_bytes)

    async def get_many(
        self, digests: Sequence[bytes], *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> list[Any]:
        """As ``Store.get_many``."""
        return await self.run(self.sync.get_many, digests, max_bytes=max_bytes)

    async def missing(self, digests: Sequence[bytes]) -> list[Digest]:
        """As ``Store.missing``."""
        return await self.run(self.sync.missing, digests)

    async def open_blob(self, digest: bytes) -> AsyncBlob:
        """As ``Store.open_blob``, with awaited reads."""
        return AsyncBlob(self.run, await self.run(self.sync.open_blob, digest))

    async def view(self, digest: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Any:
        """As ``Store.view``, with awaited reads."""
        found = await self.run(self.sync.view, digest, max_bytes=max_bytes)
        return AsyncView(self.run, found) if type(found) is View else found

    async def edit(self, digest: bytes, *edits: Edit) -> Digest:
        """As ``Store.edit``."""
        return await self.run(self.sync.edit, digest, *edits)

    def diff(
        self, old: bytes, new: bytes, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> AsyncIterator[Change]:
        """As ``Store.diff``: ``async for change in store.diff(old, new)``."""
        return iterate(self.run, partial(self.sync.diff, old, new, max_bytes=max_bytes))

    # --- sessions -----------------------------------------------------------------------

    def session(self, session_id: str) -> AsyncSession:
        """As ``Store.session``, with awaited operations; not awaited itself."""
        session, changes = self.sync.session(session_id), self._changes
        if changes is None:
            raise _forked() if self._is_inherited else _not_open()
        return AsyncSession(self.run, changes, session)

    async def create_session(
        self,
        session_id: str,
        *,
        name: str | None = None,
        model: str | None = None,
        cwd: str | None = None,
        parent: str | None = None,
        cause: Any = None,
        extra: Any = None,
        subjects: Sequence[str] = (),
        ttl_ms: int | None = None,
    ) -> SessionMeta:
        """As ``Store.create_session``."""
        return await self.run(
            self.sync.create_session,
            session_id,
            name=name,
            model=model,
            cwd=cwd,
            parent=parent,
            cause=cause,
            extra=extra,
            subjects=subjects,
            ttl_ms=ttl_ms,
        )

    def sessions(
        self, *, after: str | None = None, limit: int | None = None, prefix: str = ""
    ) -> AsyncIterator[SessionInfo]:
        """As ``Store.sessions``: ``async for info in store.sessions()``."""
        return iterate(
            self.run, partial(self.sync.sessions, after=after, limit=limit, prefix=prefix)
        )

    async def delete_session(self, session_id: str) -> bool:
        """As ``Store.delete_session``."""
        return await self.run(self.sync.delete_session, session_id)

    async def fork(
        self,
        source: str,
        target: str,
        *,
        at: int | str | Entry | None = None,
        node: str | None = None,
        subjects: Sequence[str] | None = None,
        append: Sequence[NodeDraft | Node] = (),
    ) -> Head:
        """As ``Store.fork``."""
        return await self.run(
            self.sync.fork, source, target, at=at, node=node, subjects=subjects, append=append
        )

    def sessions_about(self, subject: str) -> AsyncIterator[str]:
        """As ``Store.sessions_about``: ``async for name in store.sessions_about("anna")``."""
        return iterate(self.run, partial(self.sync.sessions_about, subject))

    async def compare(
        self,
        old: AsyncSession | str | tuple[str, int | str | Entry | None] | bytes,
        new: AsyncSession | str | tuple[str, int | str | Entry | None] | bytes,
    ) -> Comparison:
        """As ``Store.compare``."""
        first, second = (
            place.id if isinstance(place, AsyncSession) else place for place in (old, new)
        )
        return await self.run(self.sync.compare, first, second)

    async def tag(
        self, name: str, digest: bytes, *, move: bool = False, note: str | None = None
    ) -> Pin:
        """As ``Store.tag``."""
        return await self.run(self.sync.tag, name, digest, move=move, note=note)

    async def pin(
        self, name: str, digest: bytes, *, ttl_ms: int | None = None, note: str | None = None
    ) -> Pin:
        """As ``Store.pin``."""
        return await self.run(self.sync.pin, name, digest, ttl_ms=ttl_ms, note=note)

    async def unpin(self, name: str) -> bool:
        """As ``Store.unpin``."""
        return await self.run(self.sync.unpin, name)

    async def find_pin(self, name: str) -> Pin | None:
        """As ``Store.find_pin``."""
        return await self.run(self.sync.find_pin, name)

    def pins(self, *, prefix: str = "", expired: bool = False) -> AsyncIterator[Pin]:
        """As ``Store.pins``: ``async for pin in store.pins()``."""
        return iterate(self.run, partial(self.sync.pins, prefix=prefix, expired=expired))


def _not_open() -> ClosedError:
    return ClosedError("this store is not open; use 'async with'")


def _forked() -> ForkedError:
    return ForkedError("this store was opened before this process was forked; open it again here")


class AsyncView:
    """A ``View`` whose reads are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         view = await store.view(await store.put_value([{"n": n} for n in range(1000)]))
    ...         return len(view), await view.slice(998, 1000)
    >>> asyncio.run(main())
    (1000, [{'n': 998}, {'n': 999}])
    """

    def __init__(self, run: Run, view: View) -> None:
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
        part: list[Any] = await self._run(lambda: self._view[start:stop])
        return part

    async def load(self) -> Any:
        """As ``View.load``."""
        return await self._run(self._view.load)

    def keys(self) -> AsyncIterator[str]:
        """As ``View.keys``."""
        return iterate(self._run, self._view.keys)

    def _wrap(self, found: Any) -> Any:
        return AsyncView(self._run, found) if type(found) is View else found


class AsyncBlob:
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

    def __init__(self, run: Run, blob: io.BufferedReader) -> None:
        self._run = run
        self._blob = blob

    async def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the current place; all of them if negative."""
        return await self._run(self._blob.read, size)

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset."""
        return await self._run(self._blob.seek, offset, whence)
