"""Stores of LangGraph's own, filled by themselves: what is moved from."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Protocol

import psycopg
from langgraph.store.postgres import PostgresStore
from langgraph.store.sqlite import SqliteStore

from casstore.adapters.langgraph import import_items
from casstore.compat.importing import ImportReport
from casstore.store import Store


class Memory(Protocol):
    """A store of LangGraph's, where it keeps its items, and how they move."""

    def open(self, **how: Any) -> AbstractContextManager[Any]:
        """LangGraph's store."""
        ...

    def move(self, store: Store, **how: Any) -> ImportReport:
        """Import from it."""
        ...

    def execute(self, statement: str, *values: Any) -> list[Any]:
        """Go behind its back; values stand where ``?`` is."""
        ...

    def fingerprint(self) -> Any:
        """What changes if anybody writes to it."""
        ...


class SqliteMemory:
    """A file of SqliteStore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.open() as store:
            store.setup()

    def open(self, **how: Any) -> AbstractContextManager[Any]:
        return SqliteStore.from_conn_string(str(self.path), **how)

    def move(self, store: Store, **how: Any) -> ImportReport:
        return import_items(store, self.path, **how)

    def execute(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.path)) as database, database:
            return database.execute(statement, values).fetchall()

    def fingerprint(self) -> Any:
        return [
            (each.name, each.stat().st_mtime_ns, hashlib.sha256(each.read_bytes()).hexdigest())
            for each in sorted(self.path.parent.glob(self.path.name + "*"))
        ]


class PostgresMemory:
    """A schema of PostgresStore."""

    def __init__(self, url: str) -> None:
        self.url = url
        with self.open() as store:
            store.setup()

    def open(self, **how: Any) -> AbstractContextManager[Any]:
        return PostgresStore.from_conn_string(self.url, **how)

    def move(self, store: Store, **how: Any) -> ImportReport:
        return import_items(store, self.url, **how)

    def execute(self, statement: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.replace("?", "%s").encode(), values)
            return cursor.fetchall() if cursor.description else []

    def fingerprint(self) -> Any:
        return self.execute(
            "SELECT md5(string_agg(t::text || xmin, '' ORDER BY t::text)) FROM store t"
        )
