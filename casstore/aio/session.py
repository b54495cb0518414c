"""A session for asyncio: its operations run in threads, and waiting for a commit takes none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from casstore.aio.pool import StorePool
from casstore.aio.proxies import Proxy, awaited, iterated, opened
from casstore.errors import CasstoreError
from casstore.session import loading
from casstore.session.arguments import check_seconds
from casstore.session.attachments import Attachments
from casstore.session.compare import Comparison
from casstore.session.data import Checkpoint, Claim, CommitResult, Head, Lease, Node, Usage
from casstore.session.holding import HeldSession
from casstore.session.leases import Claiming
from casstore.session.loading import At, Nodes
from casstore.session.queue import IDLE, Queue
from casstore.session.session import Session, SessionState


class AsyncNodes(Proxy[Nodes]):
    """``Nodes`` whose reads are awaited. Slices are ``AsyncNodes`` too and read nothing.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         await session.append(*range(5))
    ...         nodes = await session.nodes()
    ...         return len(nodes), [node.payload async for node in nodes[-2:]]
    >>> asyncio.run(main())
    (5, [3, 4])
    """

    def __len__(self) -> int:
        return len(self.sync)

    def __getitem__(self, at: slice) -> AsyncNodes:
        if not isinstance(at, slice):
            raise TypeError("AsyncNodes takes only slices; for one node, await nodes.at(index)")
        return AsyncNodes(self._pool, self.sync[at])

    def __aiter__(self) -> AsyncIterator[Node]:
        return self._pool.iterate(self.sync.__iter__)

    async def at(self, index: int) -> Node:
        """As ``nodes[index]``."""
        return await self._pool.run(lambda: self.sync[index])

    async def load(self) -> list[Node]:
        """Read all nodes."""
        return await self._pool.run(lambda: list(self.sync))

    pages = iterated(Nodes.pages, page=1)
    digests = iterated(Nodes.digests)


class AsyncSessionState(NamedTuple):
    """A ``SessionState`` whose nodes are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         await session.append(NodeDraft("a", "hello"))
    ...         state = await session.load()
    ...         return state.leaf, [node.payload async for node in state.nodes]
    >>> asyncio.run(main())
    ('a', ['hello'])
    """

    head: Head
    checkpoint: Checkpoint
    usage: tuple[Usage, ...]
    nodes: AsyncNodes
    leaf: str | None
    healed: bool


def _show_state(pool: StorePool, state: SessionState | None) -> AsyncSessionState | None:
    if state is None:
        return None
    fields = state._asdict() | {"nodes": AsyncNodes(pool, state.nodes)}
    return AsyncSessionState(**fields)


def _show_session(pool: StorePool, session: Session) -> AsyncSession:
    return AsyncSession(pool, session)


class AsyncQueue(Proxy[Queue]):
    """A ``Queue`` whose operations are awaited.

    A cancelled ``enqueue`` may still happen; with a source key, repeating it is safe. A cancelled
    claim may still take its batches, which are free again when the lease ends.

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

    enqueue = awaited(Queue.enqueue)
    claim = awaited(Queue.claim)
    claim_exactly = awaited(Queue.claim_exactly)
    verify = awaited(Queue.verify)
    abandon = awaited(Queue.abandon)
    cancel = awaited(Queue.cancel)
    batches = awaited(Queue.batches)
    pending = awaited(Queue.pending)


class AsyncAttachments(Proxy[Attachments]):
    """``Attachments`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         image = await session.attachments.put(b"pixels")
    ...         await session.commit(attachments=[image.id])
    ...         return (await session.attachments.find(image.id)).state
    >>> asyncio.run(main())
    'committed'
    """

    intend = awaited(Attachments.intend)
    put = awaited(Attachments.put)
    commit = awaited(Attachments.commit)
    find = awaited(Attachments.find)
    list = awaited(Attachments.list)
    uncommitted = awaited(Attachments.uncommitted)
    condemn = awaited(Attachments.condemn)
    forget = awaited(Attachments.forget)


class AsyncSession(Proxy[Session]):
    """A ``Session`` whose operations are awaited.

    The values of a commit must not be changed while it runs. A cancelled commit may still happen
    after the task has ended. Give it a ``turn``: then repeating the commit is safe, and returns
    the first result if there was one. A cancelled ``claim_lease`` may still take the lease, which
    then expires.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         moved = asyncio.create_task(session.wait(after=0))
    ...         await session.append("hello")
    ...         return (await moved).revision
    >>> asyncio.run(main())
    1
    """

    @property
    def id(self) -> str:
        """The id of the session."""
        return self.sync.id

    def __repr__(self) -> str:
        return f"AsyncSession({self.id!r})"

    head = awaited(Session.head)
    load = opened(Session.load, _show_state)
    nodes = opened(Session.nodes, AsyncNodes)
    node = awaited(Session.node)
    checkpoint = awaited(Session.checkpoint)
    usage = awaited(Session.usage)
    meta = awaited(Session.meta)
    info = awaited(Session.info)
    search = awaited(Session.search)
    append = awaited(Session.append)
    edit = awaited(Session.edit)
    commit = awaited(Session.commit)
    find_turn = awaited(Session.find_turn)
    fork = opened(Session.fork, _show_session)
    rewind = awaited(Session.rewind)
    tombstone = awaited(Session.tombstone)
    rename = awaited(Session.rename)
    update_meta = awaited(Session.update_meta)
    history = iterated(Session.history)
    entry = awaited(Session.entry)
    label = awaited(Session.label)
    unlabel = awaited(Session.unlabel)
    subjects = awaited(Session.subjects)
    add_subjects = awaited(Session.add_subjects)
    remove_subjects = awaited(Session.remove_subjects)
    expires_at_ms = awaited(Session.expires_at_ms)
    expire_in = awaited(Session.expire_in)
    protect = awaited(Session.protect)
    unprotect = awaited(Session.unprotect)
    protections = awaited(Session.protections)
    renew_lease = awaited(Session.renew_lease)
    release_lease = awaited(Session.release_lease)

    async def adopt(
        self,
        other: AsyncSession | str,
        *,
        lease: Lease | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.adopt``."""
        return await self._pool.run(
            self.sync.adopt, _sync(other), lease=lease, expected=expected, label=label
        )

    async def diff(
        self, other: AsyncSession | str, *, at: At = None, other_at: At = None
    ) -> Comparison:
        """As ``Session.diff``.

        Printing it reads payloads, so do that in a thread: ``await store.run(str, found)``.
        """
        return await self._pool.run(self.sync.diff, _sync(other), at=at, other_at=other_at)

    async def claim_lease(
        self, owner: str, ttl_ms: int, *, wait_s: float | None = None
    ) -> Lease | None:
        """As ``Session.claim_lease``; waiting takes no thread."""
        claiming = Claiming(self.sync._runtime, self.id, owner, ttl_ms)
        if wait_s is None:
            return await self._pool.run(claiming)
        check_seconds(wait_s, "wait_s")
        return await _claimed(self._pool, claiming, wait_s)

    def hold(self, owner: str, *, ttl_s: float = 30, wait_s: float = 0) -> AsyncHeldSession:
        """As ``Session.hold``, for ``async with``; waiting takes no thread."""
        return AsyncHeldSession(self._pool, self.sync.hold(owner, ttl_s=ttl_s, wait_s=wait_s))

    async def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """As ``Session.wait``, without a thread: any number of tasks may wait.

        ClosedError if the store is closed meanwhile.
        """
        loading.check_wait(after, timeout_s)
        moved = loading.Moved(self.sync._runtime, self.id, after)
        return await self._pool.changes.until(moved, timeout_s)

    @property
    def queue(self) -> AsyncQueue:
        """As ``Session.queue``."""
        return AsyncQueue(self._pool, self.sync.queue)

    @property
    def attachments(self) -> AsyncAttachments:
        """As ``Session.attachments``."""
        return AsyncAttachments(self._pool, self.sync.attachments)


class AsyncHeldSession(AsyncSession):
    """A ``HeldSession`` whose operations are awaited.

    A cancelled ``work`` may still claim a batch, which is free again when the lease ends.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         await session.queue.enqueue(["fix the test"])
    ...         async with session.hold("worker-1") as held:
    ...             async for work in held.work(wait_s=0):
    ...                 await held.append("done", completes=[work])
    ...         return await session.queue.batches()
    >>> asyncio.run(main())
    []
    """

    def __init__(self, pool: StorePool, held: HeldSession) -> None:
        super().__init__(pool, held)
        self._held = held

    async def __aenter__(self) -> Self:
        held = self._held
        held._begin(await _claimed(self._pool, held._claiming, held._wait_s))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Not in the call below, which may be cancelled before a thread begins it.
        self._held._stop_renewing()
        with suppress(*([] if exc is None else [CasstoreError])):
            await self._pool.run(self._held._end)

    @property
    def lease(self) -> Lease:
        """As ``HeldSession.lease``."""
        return self._held.lease

    async def work(
        self, *, wait_s: float | None = None, boundary: str = IDLE, limit: int = 1
    ) -> AsyncIterator[Claim]:
        """As ``HeldSession.work``; waiting takes no thread."""
        taking = self._held._taking(wait_s, boundary, limit)
        while (claim := await self._pool.changes.until(taking, wait_s)) is not None:
            yield claim


def _sync(session: AsyncSession | str) -> Session | str:
    return session.sync if isinstance(session, AsyncSession) else session


async def _claimed(pool: StorePool, claiming: Claiming, wait_s: float) -> Lease:
    lease = await pool.changes.until(claiming, wait_s)
    if lease is None:
        raise claiming.held()
    return lease
