"""Plain SQLite: one row for each message with its parent, one for each head, JSON text.

Forks share rows, as a careful schema of one's own would have it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import Flush, Peer, Turn

_SCHEMA = """
create table if not exists nodes (id text primary key, parent text, body text);
create table if not exists heads (session text primary key, leaf text) without rowid;
create table if not exists states (number integer primary key, session text, body text);
"""

_PATH = """
with recursive path(parent, body, depth) as (
    select parent, body, 0 from nodes where id = (select leaf from heads where session = ?)
    union all
    select nodes.parent, nodes.body, depth + 1 from nodes join path on nodes.id = path.parent
) select body from path order by depth desc
"""

_SWEEP = """
delete from nodes where id not in (
    with recursive live(id) as (
        select leaf from heads
        union
        select nodes.parent from nodes join live on nodes.id = live.id where parent is not null
    ) select id from live
)
"""


def bring_log_home(database: Path) -> None:
    """Move the write-ahead log into the database and cut it to nothing."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")


class SqliteFull(Peer):
    """Every transaction flushed."""

    name = "SQLite, WAL, FULL"
    flush = Flush.EACH
    synchronous = "full"

    def start(self, place: Path) -> None:
        """Open the database."""
        self._database = place / "db"
        self._db = sqlite3.connect(self._database, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute(f"pragma synchronous={self.synchronous}")
        self._db.executescript(_SCHEMA)

    def stop(self) -> None:
        """Close the database."""
        self._db.close()

    def settle(self, place: Path) -> None:
        """The log counts twice otherwise."""
        bring_log_home(self._database)

    def _append(self, source: str, target: str, turn: Turn) -> None:
        found = self._db.execute("select leaf from heads where session = ?", (source,)).fetchone()
        parent = found[0] if found else None
        for message in turn:
            row = (message["id"], parent, json.dumps(message))
            self._db.execute("insert into nodes values (?, ?, ?)", row)
            parent = message["id"]
        self._db.execute("insert or replace into heads values (?, ?)", (target, parent))

    def commit(self, session: str, turn: Turn) -> None:
        """One transaction."""
        self.branch(session, session, turn)

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One transaction for all."""
        self._db.execute("begin immediate")
        for session, turns in sessions.items():
            for turn in turns:
                self._append(session, session, turn)
        self._db.execute("commit")

    def path(self, session: str) -> Sequence[Any]:
        """One query."""
        return [json.loads(body) for (body,) in self._db.execute(_PATH, (session,))]

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """The whole state as a row."""
        row = (session, json.dumps(dict(state)))
        self._db.execute("insert into states (session, body) values (?, ?)", row)

    def fork(self, source: str, target: str) -> None:
        """One row."""
        self.branch(source, target, ())

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """One transaction."""
        self._db.execute("begin immediate")
        self._append(source, target, turn)
        self._db.execute("commit")

    def collect(self, gone: Sequence[str]) -> None:
        """Delete the heads, then the rows that no head leads to; one transaction."""
        self._db.execute("begin immediate")
        self._db.executemany("delete from heads where session = ?", [(name,) for name in gone])
        self._db.execute(_SWEEP)
        self._db.execute("commit")

    def pack(self) -> None:
        """Rewrite the database."""
        self._db.execute("vacuum")


class SqliteNormal(SqliteFull):
    """No flush a transaction."""

    name = "SQLite, WAL, NORMAL"
    flush = Flush.LATER
    synchronous = "normal"
