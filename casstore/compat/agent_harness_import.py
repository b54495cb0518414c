"""Imports the runtime database of agent-harness into runs, with its artifacts.

Threads, runs, messages, events, approvals, requests, recovery intents and artifacts keep their ids,
times, states and order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from casstore.compat.agent_harness_rows import RuntimeRows, SourceRows
from casstore.compat.importing import (
    ImportReport,
    Presence,
    RowPart,
    columns_bytes,
    paged,
    presence,
    run,
)
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import ConflictError, ForeignSourceError, RecordsSchemaError
from casstore.maintenance.progress import Progress
from casstore.records.runs.inserting import Item, Made, insert, stored
from casstore.records.runs.names import same_value
from casstore.records.runs.tables import RunTables
from casstore.store import Store, check_store

_FAMILY: Final = "agent-harness-runtime"
_VERSION: Final = "1"


def import_agent_harness(
    store: Store,
    source: str | os.PathLike[str],
    *,
    artifacts: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a runtime database and its artifacts.

    ``artifacts`` is the directory that holds ``threads/``, if that is not the database's own.
    ForeignSourceError or RecordsSchemaError if the database is of another program, family or
    version. Notes count values in columns that this release does not know.
    """
    check_store(store)
    with SqliteSource(source) as database:
        _require_schema(database)
        rows = RuntimeRows(database, Path(artifacts or database.path.parent))
        tables = RunTables(store)
        parts = [_Part(tables, database, table) for table in rows.tables()]
        return run(
            "agent-harness", database, store, parts,
            notes=rows.unread(), dry_run=dry_run, progress=progress,
        )  # fmt: skip


def _require_schema(source: SqliteSource) -> None:
    expected = f"family {_FAMILY!r}, version {_VERSION!r}"
    if "runtime_metadata" not in source.tables:
        raise ForeignSourceError(f"{source.path} is not a runtime database of agent-harness")
    found = dict(source.ask("SELECT key, value FROM runtime_metadata"))
    family, version = found.get("schema_family"), found.get("schema_version")
    if (family, version) != (_FAMILY, _VERSION):
        raise RecordsSchemaError(source.name, f"family {family!r}, version {version!r}", expected)


class _Part(RowPart[Item]):
    """The rows of one table, in the order in which they are stored."""

    def __init__(self, tables: RunTables, source: SqliteSource, table: SourceRows) -> None:
        self._tables = tables
        self._source = source
        self._query = table.query
        self._item = table.item
        self.name = table.name

    def count(self) -> int:
        return int(next(self._source.ask(f"SELECT count(*) FROM ({self._query})"))[0])

    def pages(self) -> Iterator[Sequence[Item]]:
        sized = ((columns_bytes(row), self._item(row)) for row in self._source.ask(self._query))
        for page in paged(sized, _sized_bytes):
            yield [item for _, item in page]

    def look(self, page: Sequence[Item]) -> list[Presence]:
        found = stored(self._tables, page)
        for item, there in zip(page, found, strict=True):
            if there is not None and not _is_same(item, there):
                raise ConflictError(
                    f"the store holds one of the {self.name} with other content: "
                    f"{_named(item)}; import into another store"
                )
        return presence(there is not None for there in found)

    def store(self, rows: Sequence[Item]) -> None:
        insert(self._tables, rows)


def _sized_bytes(sized: tuple[int, Item]) -> int:
    row_bytes, item = sized
    return row_bytes + (item.size_bytes if isinstance(item, Made) else 0)


def _is_same(item: Any, there: Any) -> bool:
    if isinstance(item, Made):
        return bool(item.artifact == there)
    return same_value(_plain(item), _plain(there))


def _plain(item: Any) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in item]


def _named(item: Any) -> str:
    names = item.artifact if isinstance(item, Made) else item
    shown = ("thread", "run", "id", "sequence", "number", "path")
    return " ".join([f"{name} {getattr(names, name)!r}" for name in shown if hasattr(names, name)])
