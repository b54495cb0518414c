"""Workspaces with asyncio: the same operations, awaited, on sessions and stores of casstore.aio."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from casstore import NodeDraft, aio
from casstore.errors import InvalidInputError, RestoreConflictError
from casstore.workspace import Workspace
from casstore.workspace import aio as awaited
from casstore.workspace.aio import AsyncWorkspace


def test_commit_status_diff_restore_and_log_are_awaited(files: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            agent = store.session("agent")
            ws = AsyncWorkspace(files, ["*.log"], cache=tmp_path / "cache")
            (files / "a").write_text("one\n")
            (files / "x.log").write_text("ignored")
            first = await ws.commit(agent, append=[NodeDraft("n", "hello")], turn="t1")
            assert first.revision == 1
            assert ws.last is not None
            assert ws.last.files == 1
            (files / "a").write_text("two\n")
            [change] = await ws.status(agent)
            assert (await ws.status_text(agent, change))[-2:] == ["-one", "+two"]
            await agent.append("more", workspace=ws, turn="t2")
            [changed] = await awaited.diff(agent, 1)
            assert (await awaited.diff_text(agent, changed))[-1] == "+two"
            found = await awaited.find_snapshot(agent)
            assert found is not None
            assert (await ws.snapshot(store)).digest == found.digest
            assert await awaited.diff_snapshots(store, found.digest, found.digest) == []
            logged = [one.entry.turn async for one in awaited.snapshots(agent)]
            assert logged == ["t2", "t1"]
            assert (await ws.plan_restore(agent, 1)).changed == ("a",)
            await ws.restore(agent, 1)
            assert (files / "a").read_text() == "one\n"
            (files / "a").write_text("unsaved")
            with pytest.raises(RestoreConflictError):
                await ws.restore(agent)
            report = await ws.restore(agent, force=True)
            assert report.saved is not None
            await ws.restore_snapshot(store, report.saved)
            assert (files / "a").read_text() == "unsaved"
            await awaited.restore(agent, at=1, into=tmp_path / "elsewhere")
            assert (tmp_path / "elsewhere" / "a").read_text() == "one\n"

    asyncio.run(main())


def test_a_held_session_and_a_synchronous_workspace_commit_as_well(
    files: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            agent = store.session("agent")
            async with agent.hold("worker-1") as held:
                await AsyncWorkspace(files).commit(held)
                await held.append("more", workspace=Workspace(files))
            assert (await awaited.find_snapshot(agent)) is not None

    asyncio.run(main())


def test_tasks_that_share_a_workspace_each_commit_the_files(files: Path, tmp_path: Path) -> None:
    for number in range(20):
        (files / str(number)).write_text(str(number))

    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            ws = AsyncWorkspace(files, cache=tmp_path / "cache")
            sessions = [store.session(f"s{number}") for number in range(16)]
            await asyncio.gather(*[ws.commit(session) for session in sessions])
            found = [await awaited.find_snapshot(session) for session in sessions]
            assert [one.files for one in found if one is not None] == [20] * 16
            assert len({one.digest for one in found if one is not None}) == 1
            assert (await store.check(level="full")).sound

    asyncio.run(main())


def test_each_kind_of_workspace_names_the_other_for_the_wrong_kind_of_session(
    files: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with aio.open(tmp_path / "store", "relaxed") as store:
            session = store.session("s")
            with pytest.raises(InvalidInputError, match="AsyncWorkspace"):
                Workspace(files).commit(session)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="AsyncWorkspace"):
                Workspace(files).status(session)  # type: ignore[arg-type]
            with pytest.raises(InvalidInputError, match="AsyncSession is needed"):
                await AsyncWorkspace(files).commit(session.sync)  # type: ignore[arg-type]

    asyncio.run(main())
