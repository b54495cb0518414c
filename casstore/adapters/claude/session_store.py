"""``CasstoreSessionStore``: the Claude Agent SDK's transcripts in a store."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple, cast

from anyio import to_thread
from claude_agent_sdk.types import (
    SessionKey,
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
)

from casstore.adapters.claude.entries import check_entries
from casstore.adapters.claude.transcripts import Transcript, TranscriptKey, Transcripts, place_of
from casstore.adapters.in_order import InOrder
from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Progress, Step
from casstore.session.arguments import check_count
from casstore.store import Store

# The number of queues. The writes to one transcript use the same queue and stay in order; those in
# different queues can share a flush.
_LINES: Final = 64


class ExpiredSession(NamedTuple):
    """A session that retention deleted, or would delete in a dry run.

    >>> import asyncio
    >>> async def main():
    ...     sessions = CasstoreSessionStore(store)
    ...     await sessions.append({"project_key": "p", "session_id": "1"}, [{"type": "user"}])
    ...     return [(gone.session_id, gone.entries) for gone in await sessions.expire(keep=0)]
    >>> asyncio.run(main())
    [('1', 1)]
    """

    project_key: str
    session_id: str
    #: The number of entries in its transcripts, those of subagents included.
    entries: int
    mtime_ms: int


class CasstoreSessionStore(SessionStore):
    """A session store for ``ClaudeAgentOptions(session_store=…)``, with all optional methods.

    The caller opens and closes the store. Safe to use from several event loops, of asyncio or trio,
    and from several processes. A call that is cancelled ends when its thread has.

    >>> import asyncio
    >>> async def main():
    ...     sessions = CasstoreSessionStore(store)  # ClaudeAgentOptions(session_store=sessions)
    ...     key = {"project_key": "p", "session_id": "1"}
    ...     entry = {"type": "user", "uuid": "u1", "message": {"role": "user", "content": "hi"}}
    ...     await sessions.append(key, [entry])
    ...     return [entry["message"]["content"] for entry in await sessions.load(key)]
    >>> asyncio.run(main())
    ['hi']
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._transcripts = Transcripts(store)
        self._lines = [InOrder() for _ in range(_LINES)]

    # --- the SDK's protocol ---------------------------------------------------------------

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Append entries to a transcript, all or none. Entries whose uuid exists are skipped."""
        place, checked = place_of(key), check_entries(entries)
        if not checked:
            return
        line = self._lines[hash(place) % _LINES]
        own = line.take_place(partial(self._transcripts.append, place, checked))
        try:
            await to_thread.run_sync(own.finish)
        finally:
            # Has an effect only if the caller was cancelled before a thread was free.
            own.give_up()

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """All entries of a transcript, in order; None if it does not exist."""
        found = await to_thread.run_sync(self._transcripts.load, place_of(key))
        # The entries have the type that append took.
        return cast(list[SessionStoreEntry] | None, found)

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """The sessions of a project, and the time of each one's last write."""

        def read() -> list[SessionStoreListEntry]:
            return [
                {"session_id": found.place.session, "mtime": found.mtime_ms}
                for found in self._transcripts.of_project(project_key)
                if found.place.is_main
            ]

        return await to_thread.run_sync(read)

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """The SDK's summary of each session of a project, kept up to date by ``append``."""

        def read() -> list[SessionSummaryEntry]:
            return [
                {
                    "session_id": found.place.session,
                    "mtime": found.mtime_ms,
                    "data": found.summary or {},
                }
                for found in self._transcripts.of_project(project_key)
                if found.place.is_main
            ]

        return await to_thread.run_sync(read)

    async def delete(self, key: SessionKey) -> None:
        """Delete a session with its subagents' transcripts, or only one of those."""
        await to_thread.run_sync(self._transcripts.delete, place_of(key))

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """The subpaths of the transcripts of a session's subagents."""
        main = TranscriptKey(key["project_key"], key["session_id"])

        def read() -> list[str]:
            below = self._transcripts.below(main)
            return [found.place.subpath for found in below if not found.place.is_main]

        return await to_thread.run_sync(read)

    # --- listing and deleting, which the SDK does not ask a store for ------------------------

    async def list_projects(self) -> list[str]:
        """The keys of all projects that have transcripts."""
        return await to_thread.run_sync(lambda: list(self._transcripts.projects()))

    async def delete_project(self, project_key: str) -> int:
        """Delete all sessions of a project; returns how many."""

        def delete() -> int:
            sessions = {found.place.session for found in self._transcripts.of_project(project_key)}
            for session in sessions:
                self._transcripts.delete(TranscriptKey(project_key, session))
            return len(sessions)

        return await to_thread.run_sync(delete)

    async def expire(
        self,
        *,
        idle_ms: int | None = None,
        keep: int | None = None,
        project_key: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> list[ExpiredSession]:
        """Delete sessions idle for at least ``idle_ms``, or all but the latest ``keep``.

        A session is idle since the last append to any of its transcripts. ``keep`` counts for
        each project. If both are given, only sessions that meet both are deleted. A session that
        is written to meanwhile stays. ``dry_run`` deletes nothing. gc reclaims the space.
        """
        for number, what in ((idle_ms, "idle_ms"), (keep, "keep")):
            if number is not None:
                check_count(number, what)
        if idle_ms is None and keep is None:
            raise InvalidInputError("idle_ms and keep are missing: pass one of them, or both")
        return await to_thread.run_sync(
            partial(self._expire, idle_ms, keep, project_key, dry_run, progress)
        )

    def _expire(
        self,
        idle_ms: int | None,
        keep: int | None,
        project: str | None,
        dry_run: bool,
        progress: Progress | None,
    ) -> list[ExpiredSession]:
        projects = list(self._transcripts.projects()) if project is None else [project]
        gone: list[ExpiredSession] = []
        for at, name in enumerate(projects):
            sessions: dict[str, list[Transcript]] = {}
            for found in self._transcripts.of_project(name):
                sessions.setdefault(found.place.session, []).append(found)
            latest_first = sorted(sessions.values(), key=_mtime_ms, reverse=True)
            before_ms = None
            if idle_ms is not None:
                before_ms = self._store.engine.now_ms() - idle_ms
            for transcripts in latest_first[keep or 0 :]:
                if before_ms is not None and _mtime_ms(transcripts) > before_ms:
                    continue
                if dry_run or self._delete_unchanged(transcripts):
                    gone.append(_expired(transcripts))
            if progress is not None:
                progress(Step("expire", at + 1, len(projects), "projects"))
        return gone

    def _delete_unchanged(self, planned: list[Transcript]) -> bool:
        place = TranscriptKey(planned[0].place.project, planned[0].place.session)
        rows = [each[1:-1] for each in planned]
        return bool(
            self._transcripts.delete(
                place, unless=lambda found: [each[1:-1] for each in found] != rows
            )
        )


def _mtime_ms(transcripts: list[Transcript]) -> int:
    return max(each.mtime_ms for each in transcripts)


def _expired(transcripts: list[Transcript]) -> ExpiredSession:
    place = transcripts[0].place
    entries = sum(each.entries for each in transcripts)
    return ExpiredSession(place.project, place.session, entries, _mtime_ms(transcripts))
