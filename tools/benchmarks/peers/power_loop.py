"""power-loop's session store: a log of messages in SQLite, WAL and NORMAL by its own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Flush, Peer, Turn
from benchmarks.peers.sqlite_wal import bring_log_home


class PowerLoop(Peer):
    """It has no call for several messages at once; each is a write of its own."""

    name = "power-loop"
    flush = Flush.LATER
    needs = ("power_loop.runtime.session_store",)

    def __init__(self) -> None:
        self._known: set[str] = set()

    def start(self, place: Path) -> None:
        """Open the database."""
        self._database = place / "db"
        module = import_module("power_loop.runtime.session_store")
        self._store: Any = module.SessionStore.open(self._database)

    def stop(self) -> None:
        """Close the database."""
        self._store.close()

    def settle(self, place: Path) -> None:
        """The log counts twice otherwise."""
        bring_log_home(self._database)

    def commit(self, session: str, turn: Turn) -> None:
        """A call a message."""
        if session not in self._known:
            self._store.create_session(session_id=session)
            self._known.add(session)
        for message in turn:
            rest = {key: message[key] for key in message if key not in ("role", "content")}
            self._store.append_message(
                session, role=message["role"], content=message["content"], meta=rest
            )

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """A call a message."""
        for session, turns in sessions.items():
            for turn in turns:
                self.commit(session, turn)

    def path(self, session: str) -> Sequence[Any]:
        """The active messages."""
        found: list[Any] = self._store.load_active_messages(session)
        return found

    def collect(self, gone: Sequence[str]) -> None:
        """Delete the sessions' rows."""
        for session in gone:
            self._store.close_session(session)
