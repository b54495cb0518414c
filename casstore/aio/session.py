"""A session, awaited: its operations in threads, its nodes in pages, its moves without either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from casstore.aio.attachments import AsyncAttachments
from casstore.aio.changes import Changes
from casstore.aio.queue import AsyncQueue
from casstore.aio.threads import Run, iterate
from casstore.session import watching
from casstore.session.data import (
    Checkpoint,
    Commit,
    CommitResult,
    Entry,
    Given,
    Head,
    Hidden,
    Lease,
    Node,
    Protection,
    SessionInfo,
    SessionMeta,
    Usage,
)
from casstore.session.loading import At
from casstore.session.nodes import PATH, Nodes
from casstore.session.session import Session


class AsyncNodes:
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

    def __init__(self, run: Run, nodes: Nodes) -> None:
        self._run = run
        self._nodes = nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, at: slice) -> AsyncNodes:
        if not isinstance(at, slice):
            raise TypeError("a single node is read: await nodes.at(index)")
        return AsyncNodes(self._run, self._nodes[at])

    def __aiter__(self) -> AsyncIterator[Node]:
        return iterate(self._run, self._nodes.__iter__)

    async def at(self, index: int) -> Node:
        """As ``nodes[index]``."""
        return await self._run(lambda: self._nodes[index])

    def pages(self, size: int = 256) -> AsyncIterator[list[Node]]:
        """As ``Nodes.pages``."""
        return iterate(self._run, partial(self._nodes.pages, size), page=1)

    async def load(self) -> list[Node]:
        """All of them."""
        return await self._run(lambda: list(self._nodes))


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


class AsyncSession:
    """A ``Session`` whose operations are awaited.

    A call that is cancelled while it writes cannot take the write back: its thread goes
    on, and what it does is done or not as if nobody had cancelled.

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

    def __init__(self, run: Run, changes: Changes, session: Session) -> None:
        self._run = run
        self._changes = changes
        self._session = session
        self.id = session.id

    def __repr__(self) -> str:
        return f"AsyncSession({self.id!r})"

    # --- reading ------------------------------------------------------------------------

    async def head(self) -> Head | None:
        """As ``Session.head``."""
        return await self._run(self._session.head)

    async def load(
        self,
        at: At = None,
        *,
        scope: Literal["path", "full"] = PATH,
        leaf: str | None = None,
        hydrate: bool = True,
    ) -> AsyncSessionState | None:
        """As ``Session.load``, with awaited nodes."""
        state = await self._run(self._session.load, at, scope=scope, leaf=leaf, hydrate=hydrate)
        if state is None:
            return None
        return AsyncSessionState(
            state.head,
            state.checkpoint,
            state.usage,
            AsyncNodes(self._run, state.nodes),
            state.leaf,
            state.healed,
        )

    async def nodes(
        self,
        scope: Literal["path", "full"] = PATH,
        *,
        leaf: str | None = None,
        at: At = None,
        payloads: bool = True,
    ) -> AsyncNodes:
        """As ``Session.nodes``: ``async for node in await session.nodes()``."""
        found = await self._run(self._session.nodes, scope, leaf=leaf, at=at, payloads=payloads)
        return AsyncNodes(self._run, found)

    async def node(self, node_id: str, *, at: At = None) -> Node | None:
        """As ``Session.node``."""
        return await self._run(self._session.node, node_id, at=at)

    async def checkpoint(self, at: At = None, *, hydrate: bool = False) -> Checkpoint:
        """As ``Session.checkpoint``."""
        return await self._run(self._session.checkpoint, at, hydrate=hydrate)

    async def usage(self, at: At = None) -> tuple[Usage, ...]:
        """As ``Session.usage``."""
        return await self._run(self._session.usage, at)

    async def meta(self) -> SessionMeta:
        """As ``Session.meta``."""
        return await self._run(self._session.meta)

    async def info(self) -> SessionInfo:
        """As ``Session.info``."""
        return await self._run(self._session.info)

    # --- writing ------------------------------------------------------------------------

    async def commit(self, change: Commit) -> CommitResult:
        """As ``Session.commit``. The values must not be changed meanwhile.

        A cancelled commit cannot be taken back: its thread goes on, and the commit may
        happen after the task has ended. Give it a ``turn``: repeating it is safe then, and
        returns the first result if there was one.
        """
        return await self._run(self._session.commit, change)

    async def rewind(
        self,
        to: int | str | Entry,
        *,
        lease: Lease | Literal[Given.UNFENCED] | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.rewind``."""
        return await self._run(
            self._session.rewind, to, lease=lease, expected=expected, label=label
        )

    async def adopt(
        self,
        other: AsyncSession | str,
        *,
        lease: Lease | Literal[Given.UNFENCED] | None = None,
        expected: int | None = None,
        label: str | None = None,
    ) -> CommitResult:
        """As ``Session.adopt``."""
        name = other if isinstance(other, str) else other.id
        return await self._run(
            self._session.adopt, name, lease=lease, expected=expected, label=label
        )

    async def tombstone(self, node_ids: Sequence[str]) -> Hidden:
        """As ``Session.tombstone``."""
        return await self._run(self._session.tombstone, node_ids)

    async def rename(self, name: str) -> SessionMeta:
        """As ``Session.rename``."""
        return await self._run(self._session.rename, name)

    async def update_meta(self, **changes: Any) -> SessionMeta:
        """As ``Session.update_meta``."""
        return await self._run(self._session.update_meta, **changes)

    # --- history ------------------------------------------------------------------------

    def history(
        self, *, before: int | None = None, limit: int | None = None
    ) -> AsyncIterator[Entry]:
        """As ``Session.history``: ``async for entry in session.history()``."""
        return iterate(self._run, partial(self._session.history, before=before, limit=limit))

    async def entry(self, at: At = None) -> Entry:
        """As ``Session.entry``."""
        return await self._run(self._session.entry, at)

    async def label(self, name: str, at: At = None) -> Entry:
        """As ``Session.label``."""
        return await self._run(self._session.label, name, at)

    async def unlabel(self, name: str) -> bool:
        """As ``Session.unlabel``."""
        return await self._run(self._session.unlabel, name)

    async def wait(self, after: int, timeout_s: float | None = None) -> Head | None:
        """As ``Session.wait``, without a thread: any number of tasks may wait.

        ClosedError if the store is closed meanwhile.
        """
        watching.check(after, timeout_s)

        async def moved() -> Head | None:
            head = await self.head()
            return head if head is not None and head.revision > after else None

        return await self._changes.until(moved, timeout_s)

    # --- how long it stays ----------------------------------------------------------------

    async def subjects(self) -> tuple[str, ...]:
        """As ``Session.subjects``."""
        return await self._run(self._session.subjects)

    async def add_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """As ``Session.add_subjects``."""
        return await self._run(self._session.add_subjects, names)

    async def remove_subjects(self, names: Sequence[str]) -> tuple[str, ...]:
        """As ``Session.remove_subjects``."""
        return await self._run(self._session.remove_subjects, names)

    async def expires_at_ms(self) -> int | None:
        """As ``Session.expires_at_ms``."""
        return await self._run(self._session.expires_at_ms)

    async def expire_in(self, ttl_ms: int | None) -> int | None:
        """As ``Session.expire_in``."""
        return await self._run(self._session.expire_in, ttl_ms)

    async def protect(
        self, at: At = None, *, by: str, ttl_ms: int | None = None, note: str | None = None
    ) -> Protection:
        """As ``Session.protect``."""
        return await self._run(self._session.protect, at, by=by, ttl_ms=ttl_ms, note=note)

    async def unprotect(self, by: str, revision: int | None = None) -> int:
        """As ``Session.unprotect``."""
        return await self._run(self._session.unprotect, by, revision)

    async def protections(self, *, lapsed: bool = False) -> list[Protection]:
        """As ``Session.protections``."""
        return await self._run(self._session.protections, lapsed=lapsed)

    # --- leases -------------------------------------------------------------------------

    async def claim_lease(self, owner: str, ttl_ms: int) -> Lease | None:
        """As ``Session.claim_lease``.

        Cancelled, it may be taken all the same, by nobody who knows; it then runs out.
        """
        return await self._run(self._session.claim_lease, owner, ttl_ms)

    async def renew_lease(self, lease: Lease, ttl_ms: int) -> Lease:
        """As ``Session.renew_lease``."""
        return await self._run(self._session.renew_lease, lease, ttl_ms)

    async def release_lease(self, lease: Lease) -> bool:
        """As ``Session.release_lease``."""
        return await self._run(self._session.release_lease, lease)

    # --- queue and attachments ----------------------------------------------------------

    @property
    def queue(self) -> AsyncQueue:
        """Work waiting for this session."""
        return AsyncQueue(self._run, self._session.queue)

    @property
    def attachments(self) -> AsyncAttachments:
        """Bytes that belong to this session."""
        return AsyncAttachments(self._run, self._session.attachments)
