"""The OpenAI Agents SDK's SQLiteSession: a list of items, in WAL and with SQLite's own FULL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Flush, Peer, Turn
from benchmarks.peers.sqlite_wal import bring_log_home


class OpenAiSession(Peer):
    """Its calls are coroutines that work in a thread; that is part of what a turn costs."""

    name = "OpenAI SQLiteSession"
    flush = Flush.EACH
    needs = ("agents.memory.sqlite_session",)

    def start(self, place: Path) -> None:
        """An event loop for all calls."""
        self._database = place / "db"
        self._runner = asyncio.Runner()
        self._sessions: dict[str, Any] = {}

    def stop(self) -> None:
        """Close every session, then the loop."""
        for session in self._sessions.values():
            session.close()
        self._runner.close()

    def settle(self, place: Path) -> None:
        """The log counts twice otherwise."""
        bring_log_home(self._database)

    def _session(self, name: str) -> Any:
        if name not in self._sessions:
            module = import_module("agents.memory.sqlite_session")
            self._sessions[name] = module.SQLiteSession(name, self._database)
        return self._sessions[name]

    def commit(self, session: str, turn: Turn) -> None:
        """One call."""
        self._runner.run(self._session(session).add_items(list(turn)))

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One call a session."""
        for session, turns in sessions.items():
            self.commit(session, [message for turn in turns for message in turn])

    def path(self, session: str) -> Sequence[Any]:
        """All items."""
        found: list[Any] = self._runner.run(self._session(session).get_items())
        return found

    def collect(self, gone: Sequence[str]) -> None:
        """Clear the sessions."""
        for session in gone:
            self._runner.run(self._session(session).clear_session())
