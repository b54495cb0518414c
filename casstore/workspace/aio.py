"""Workspaces for asyncio: the operations of ``Workspace`` run in the threads of the store.

``AsyncWorkspace`` takes an ``AsyncSession`` or ``AsyncStore`` where ``Workspace`` takes a
``Session`` or ``Store``; the functions are those of ``casstore.workspace``, awaited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from casstore.aio import AsyncSession, AsyncStore
from casstore.aio.pool import StorePool
from casstore.errors import InvalidInputError
from casstore.format.canonical import Link
from casstore.session.data import CommitResult
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import workspace
from casstore.workspace.restoring import RestoreReport
from casstore.workspace.tree import COMPONENT
from casstore.workspace.workspace import LogEntry, Snapshot, Workspace

__all__ = [
    "AsyncWorkspace",
    "diff",
    "diff_snapshots",
    "diff_text",
    "find_snapshot",
    "restore",
    "snapshots",
]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _parts(place: AsyncSession | AsyncStore) -> tuple[StorePool, Any]:
    """The threads of a session or store, and its synchronous object."""
    if isinstance(place, AsyncSession | AsyncStore):
        return place._pool, place.sync
    raise InvalidInputError(f"an AsyncStore or an AsyncSession is needed, got {place!r:.80}")


def _function(
    function: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[AsyncSession | AsyncStore, Parameters], Coroutine[Any, Any, Result]]:
    """Run a function on a session or store in a thread."""

    @wraps(function)
    async def call(
        place: AsyncSession | AsyncStore, /, *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        pool, behind = _parts(place)
        return await pool.run(function, behind, *args, **options)

    return call


def _method(
    method: Callable[Concatenate[Workspace, Any, Parameters], Result],
) -> Callable[
    Concatenate[AsyncWorkspace, AsyncSession | AsyncStore, Parameters],
    Coroutine[Any, Any, Result],
]:
    """Run a method of the workspace on a session or store in a thread."""

    @wraps(method)
    async def call(
        ws: AsyncWorkspace,
        place: AsyncSession | AsyncStore,
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        pool, behind = _parts(place)
        return await pool.run(method, ws.sync, behind, *args, **options)

    return call


class AsyncWorkspace:
    """A ``Workspace`` whose operations are awaited; parameters are those of ``Workspace``.

    A cancelled call is not undone: its thread goes on, and a commit or restore may still happen.

    >>> import asyncio, casstore.aio
    >>> from casstore.workspace.aio import AsyncWorkspace
    >>> files = place / "files"
    >>> files.mkdir()
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         ws = AsyncWorkspace(files)
    ...         await session.append("nothing yet", workspace=ws)
    ...         (files / "a.py").write_text("pass")
    ...         return [change.path for change in await ws.status(session)]
    >>> asyncio.run(main())
    ['a.py']
    """

    def __init__(self, path: Any, *args: Any, **options: Any) -> None:
        #: The synchronous workspace, for calls from threads.
        self.sync = Workspace(path, *args, **options)

    def __repr__(self) -> str:
        return f"AsyncWorkspace({self.path!r})"

    @property
    def path(self) -> str:
        """As ``Workspace.path``."""
        return self.sync.path

    @property
    def component(self) -> str:
        """As ``Workspace.component``."""
        return self.sync.component

    @property
    def last(self) -> Snapshot | None:
        """As ``Workspace.last``."""
        return self.sync.last

    def component_link(self, place: Store | Session) -> Link:
        """As ``Workspace.component_link``: commits call it in their thread."""
        return self.sync.component_link(place)

    snapshot = _method(Workspace.snapshot)
    status = _method(Workspace.status)
    status_text = _method(Workspace.status_text)
    plan_restore = _method(Workspace.plan_restore)
    restore = _method(Workspace.restore)
    restore_snapshot = _method(Workspace.restore_snapshot)

    async def commit(self, session: AsyncSession, **fields: Any) -> CommitResult:
        """As ``Workspace.commit``."""
        pool, behind = _parts(session)
        return await pool.run(self.sync.commit, behind, **fields)


find_snapshot = _function(workspace.find_snapshot)
diff = _function(workspace.diff)
diff_snapshots = _function(workspace.diff_snapshots)
diff_text = _function(workspace.diff_text)


def snapshots(session: AsyncSession, *, component: str = COMPONENT) -> AsyncIterator[LogEntry]:
    """As ``casstore.workspace.snapshots``."""
    pool, behind = _parts(session)
    return pool.iterate(partial(workspace.snapshots, behind, component=component))


async def restore(session: AsyncSession, **options: Any) -> RestoreReport:
    """As ``casstore.workspace.restore``."""
    pool, behind = _parts(session)
    return await pool.run(workspace.restore, behind, **options)
