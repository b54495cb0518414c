"""Workspaces for asyncio: the operations of ``Workspace`` run in the threads of the store.

``AsyncWorkspace`` takes an ``AsyncSession`` or ``AsyncStore`` where ``Workspace`` takes a
``Session`` or ``Store``; the functions are those of ``casstore.workspace``, awaited.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from casstore.aio import AsyncSession, AsyncStore
from casstore.aio.proxies import Found, awaited, iterated
from casstore.errors import InvalidInputError
from casstore.format.canonical import Link
from casstore.maintenance.progress import Progress
from casstore.session.data import CommitResult
from casstore.session.loading import At
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import workspace
from casstore.workspace.restoring import RestoreReport
from casstore.workspace.tree import COMPONENT
from casstore.workspace.workspace import MAX_FILE_BYTES, Snapshot, Workspace

__all__ = [
    "AsyncWorkspace",
    "diff",
    "diff_snapshots",
    "diff_text",
    "find_snapshot",
    "restore",
    "snapshots",
]

Place: TypeAlias = AsyncSession | AsyncStore


def _on_place(function: Callable[..., Any], place: Place) -> Found:
    """A function on a session or store."""
    if not isinstance(place, AsyncSession | AsyncStore):
        raise InvalidInputError(f"an AsyncStore or an AsyncSession is needed, got {place!r:.80}")
    return place._pool, partial(function, place.sync)


def _of_workspace(method: Callable[..., Any], workspace: AsyncWorkspace, place: Place) -> Found:
    """A method of a workspace, on a session or store."""
    return _on_place(partial(method, workspace.sync), place)


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

    def __init__(
        self,
        path: str | os.PathLike[str],
        ignore: Sequence[str] = (),
        *,
        defaults: bool = True,
        gitignore: bool = False,
        max_file_bytes: int | None = MAX_FILE_BYTES,
        skip_unreadable: bool = False,
        cache: str | os.PathLike[str] | None = None,
        component: str = COMPONENT,
    ) -> None:
        #: The synchronous workspace, for calls from threads.
        self.sync = Workspace(
            path,
            ignore,
            defaults=defaults,
            gitignore=gitignore,
            max_file_bytes=max_file_bytes,
            skip_unreadable=skip_unreadable,
            cache=cache,
            component=component,
        )

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

    snapshot = awaited(Workspace.snapshot, _of_workspace)
    status = awaited(Workspace.status, _of_workspace)
    status_text = awaited(Workspace.status_text, _of_workspace)
    plan_restore = awaited(Workspace.plan_restore, _of_workspace)
    restore = awaited(Workspace.restore, _of_workspace)
    restore_snapshot = awaited(Workspace.restore_snapshot, _of_workspace)

    async def commit(
        self,
        session: AsyncSession,
        *,
        append: Sequence[Any] = (),
        components: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> CommitResult:
        """As ``Workspace.commit``."""
        pool, commit = _of_workspace(Workspace.commit, self, session)
        result: CommitResult = await pool.run(
            commit, append=append, components=components, progress=progress, **fields
        )
        return result


find_snapshot = awaited(workspace.find_snapshot, _on_place)
diff = awaited(workspace.diff, _on_place)
diff_snapshots = awaited(workspace.diff_snapshots, _on_place)
diff_text = awaited(workspace.diff_text, _on_place)
snapshots = iterated(workspace.snapshots, _on_place)


async def restore(
    session: AsyncSession,
    *,
    into: str | os.PathLike[str],
    at: At = None,
    force: bool = False,
    **options: Any,
) -> RestoreReport:
    """As ``casstore.workspace.restore``."""
    pool, restore = _on_place(workspace.restore, session)
    report: RestoreReport = await pool.run(restore, into=into, at=at, force=force, **options)
    return report
