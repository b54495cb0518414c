"""A session's turns in SQLite (WAL, synchronous FULL): a row a message, and a row for the head."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgpack

Turn = tuple[dict[str, Any], dict[str, Any]]


def create(path: str) -> None:
    """Make the tables."""
    database = sqlite3.connect(path)
    database.execute("pragma journal_mode=wal")
    database.execute("create table messages (session, id, body, primary key (session, id))")
    database.execute("create table heads (session primary key, revision, leaf)")
    database.commit()
    database.close()


class SqliteTurns:
    """A connection that commits the turns of one session, each in a flushed transaction."""

    def __init__(self, path: str, session: str) -> None:
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._database.execute("pragma synchronous=full")
        self._session = session
        self._revision = 0

    def commit(self, turn: Turn) -> None:
        """Two messages and the head."""
        execute = self._database.execute
        execute("begin immediate")
        for message in turn:
            row = (self._session, message["id"], msgpack.packb(message))
            execute("insert into messages values (?, ?, ?)", row)
        head = (self._session, self._revision, turn[-1]["id"])
        execute("insert or replace into heads values (?, ?, ?)", head)
        execute("commit")
        self._revision += 1

    def close(self) -> None:
        """Close the connection; the last one moves the log into the database."""
        self._database.close()
