"""LangGraph's savers and casstore's, one ``put`` a turn, without a graph around them.

The state of a thread is kept in memory between turns, as if loading it were free. A graph
would make several checkpoints a turn; here it is one for each of them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import casstore
from benchmarks.peers.peer import Flush, Peer, Turn
from benchmarks.peers.sqlite_wal import bring_log_home


class _Place(NamedTuple):
    config: dict[str, Any]
    values: dict[str, Any]
    versions: dict[str, Any]


def _config(thread: str, checkpoint: str | None = None) -> dict[str, Any]:
    named = {"thread_id": thread, "checkpoint_ns": ""}
    return {"configurable": named | ({"checkpoint_id": checkpoint} if checkpoint else {})}


class _Saver(Peer):
    """The common base of the savers."""

    saver: Any

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def _put(self, source: _Place, target: str, channel: str, value: Any) -> None:
        checkpoint: Any = import_module("langgraph.checkpoint.base").empty_checkpoint()
        new = {channel: self.saver.get_next_version(source.versions.get(channel), None)}
        checkpoint["channel_values"] = source.values | {channel: value}
        checkpoint["channel_versions"] = source.versions | new
        config = self.saver.put(source.config, checkpoint, {"source": "loop", "step": 1}, new)
        self._places[target] = _Place(
            config, checkpoint["channel_values"], checkpoint["channel_versions"]
        )

    def _place(self, session: str) -> _Place:
        return self._places.get(session) or _Place(_config(session), {}, {})

    def commit(self, session: str, turn: Turn) -> None:
        """One checkpoint."""
        self.branch(session, session, turn)

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One checkpoint a session."""
        for session, turns in sessions.items():
            self.commit(session, [message for turn in turns for message in turn])

    def path(self, session: str) -> Sequence[Any]:
        """The newest checkpoint's messages."""
        found: Any = self.saver.get_tuple(self._places[session].config)
        messages: list[Any] = found.checkpoint["channel_values"]["messages"]
        return messages

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """A channel is replaced as a whole."""
        self._put(self._place(session), session, "tool_state", dict(state))

    def fork(self, source: str, target: str) -> None:
        """The newest state as a thread's first checkpoint, without its history."""
        there = self._places[source]
        start = _Place(_config(target), there.values, {})
        self._put(start, target, "messages", there.values["messages"])

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """One checkpoint with the source as its parent, in the same thread."""
        there = self._place(source)
        self._put(there, target, "messages", [*there.values.get("messages", ()), *turn])

    def collect(self, gone: Sequence[str]) -> None:
        """Delete the threads; the interface has no more, and CasstoreSaver frees nothing yet."""
        for session in gone:
            self.saver.delete_thread(session)


class SqliteSaver(_Saver):
    """LangGraph's saver on SQLite."""

    name = "LangGraph SqliteSaver"
    flush = Flush.EACH
    needs = ("langgraph.checkpoint.sqlite",)

    def start(self, place: Path) -> None:
        """As its own factory does, and FULL by name."""
        self._database = place / "db"
        self._db = sqlite3.connect(self._database, check_same_thread=False)
        self.saver = import_module("langgraph.checkpoint.sqlite").SqliteSaver(self._db)
        self.saver.setup()
        self._db.execute("pragma synchronous=full")

    def stop(self) -> None:
        """Close the database."""
        self._db.close()

    def settle(self, place: Path) -> None:
        """The log counts twice otherwise."""
        bring_log_home(self._database)


class InMemorySaver(_Saver):
    """LangGraph's saver in memory: nothing is written anywhere."""

    name = "LangGraph InMemorySaver"
    flush = Flush.NEVER
    needs = ("langgraph.checkpoint.memory",)

    def start(self, place: Path) -> None:
        """Make one."""
        self.saver = import_module("langgraph.checkpoint.memory").InMemorySaver()

    def stop(self) -> None:
        """Nothing is open."""

    def reopen(self, place: Path) -> None:
        """It would forget everything."""

    def size_bytes(self, place: Path) -> int:
        """The serialised values it holds in memory."""
        return sum(len(content) for _, content in self.saver.blobs.values())


class CasstoreSaver(_Saver):
    """casstore behind LangGraph's interface."""

    name = "casstore's CasstoreSaver"
    flush = Flush.EACH
    needs = ("langgraph.checkpoint.base",)

    def start(self, place: Path) -> None:
        """Open the store."""
        # It warns of every branch of a thread; here branches are the point.
        logging.getLogger("casstore").setLevel(logging.ERROR)
        module = import_module("casstore.adapters.langgraph")
        self.saver = module.CasstoreSaver.from_path(place / "store")

    def stop(self) -> None:
        """Close the store."""
        self.saver.close()

    def settle(self, place: Path) -> None:
        """Apply the log. Nothing is that old, so this packs nothing."""
        with casstore.open(place / "store") as store:
            store.pack(min_age_ms=1 << 40)

    def fork(self, source: str, target: str) -> None:
        """The whole thread, history included."""
        there = self._places[source]
        self.saver.copy_thread(there.config["configurable"]["thread_id"], target)
        config = _config(target, there.config["configurable"]["checkpoint_id"])
        self._places[target] = there._replace(config=config)
