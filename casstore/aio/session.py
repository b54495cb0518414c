"""A session for asyncio: its operations run in threads, and waiting for a commit takes none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, NamedTuple

from casstore.aio.pool import StorePool
from casstore.aio.proxies import Proxy, awaited, iterated, opened
from casstore.session import loading
from casstore.session.attachments import Attachments
from casstore.session.data import Checkpoint, CommitResult, Given, Head, Lease, Node, Usage
from casstore.session.nodes import Nodes
from casstore.session.queue import Queue
from casstore.session.session import Session, SessionState


class AsyncNodes(Proxy[Nodes]):
    """``Nodes`` whose reads are awaited. Slices are ``AsyncNodes`` too and read nothing.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         drafts = [NodeDraft(str(n), n) for n in range(5)]
    ...         await session.commit(Commit(append=drafts, lease=UNFENCED))
    ...         nodes = await session.nodes()
    ...         return len(nodes), [node.payload async for node in nodes[-2:]]
    >>> asyncio.run(main())
    (5, [3, 4])
    """

    def __len__(self) -> int:
        return len(self.sync)

    def __getitem__(self, at: slice) -> AsyncNodes:
        if not isinstance(at, slice):
            raise TypeError("a single node is read: await nodes.at(index)")
        return AsyncNodes(self._pool, self.sync[at])

    def __aiter__(self) -> AsyncIterator[Node]:
        return self._pool.iterate(self.sync.__iter__)

    async def at(self, index: int) -> Node:
        """As ``nodes[index]``."""
        return await self._pool.run(lambda: self.sync[index])

    async def load(self) -> list[Node]:
        """All nodes."""
        return await self._pool.run(lambda: list(self.sync))

    pages = iterated(Nodes.pages, page=1)
    digests = iterated(Nodes.digests)


class AsyncSessionState(NamedTuple):
    """A ``SessionState`` whose nodes are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         await session.commit(Commit(append=[NodeDraft("a", "hello")], lease=UNFENCED))
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
    ...         await session.commit(Commit(attachments=[image.id], lease=UNFENCED))
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
    ...         await session.commit(Commit(append=[NodeDraft("a", "hello")], lease=UNFENCED))
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
    commit = awaited(Session.commit)
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
    claim_lease = awaited(Session.claim_lease)
    renew_lease = awaited(Session.renew_lease)
    release_lease = awaited(Session.release_lease)

    async def adopt(
        self,
        other: AsyncSession | str,
        *,
        lease: Lease | Literal[Given.UNFENCED] | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.adopt``."""
        source = other.sync if isinstance(other, AsyncSession) else other
        return await self._pool.run(
            self.sync.adopt, source, lease=lease, expected=expected, label=label
        )

    async def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """As ``Session.wait``, without a thread: any number of tasks may wait.

        ClosedError if the store is closed meanwhile.
        """
        loading.check_wait(after, timeout_s)

        async def moved() -> Head | None:
            head = await self.head()
            return head if head is not None and head.revision > after else None

        return await self._pool.changes.until(moved, timeout_s)

    @property
    def queue(self) -> AsyncQueue:
        """As ``Session.queue``."""
        return AsyncQueue(self._pool, self.sync.queue)

    @property
    def attachments(self) -> AsyncAttachments:
        """As ``Session.attachments``."""
        return AsyncAttachments(self._pool, self.sync.attachments)
