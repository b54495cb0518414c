"""The runtime database of agent-harness moved over into runs, with its artifacts.

Threads, runs, messages, events, approvals, requests, recovery intents and artifacts keep
their ids, times, states and orders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from casstore.compat.agent_harness_rows import RowTable, RuntimeRows
from casstore.compat.importing import ImportReport, Part, move
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import ConflictError, ForeignSourceError, RecordsSchemaError
from casstore.maintenance.progress import Progress
from casstore.records.runs.inserting import Item, Made, insert, stored
from casstore.records.runs.values import same_value
from casstore.records.runs.working import Ground, ground_of
from casstore.store import Store, check_store

_FAMILY: Final = "agent-harness-runtime"
_VERSION: Final = "1"
_PAGE_ROWS: Final = 200
# A page of long rows is shorter, so that a write stays small.
_PAGE_BYTES: Final = 4 << 20


def import_database(
    store: Store,
    file: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move a runtime database and its artifacts over, and compare every row.

    ``root`` is the directory that ``threads/`` is in, if it is not the database's own. A
    database of another family or version is refused, and so is one with only half of that. The
    report also counts what stays behind: rows that say something in a column not known here.
    """
    check_store(store)
    with SqliteSource(file) as source:
        _require_schema(source)
        rows = RuntimeRows(source, Path(source.path.parent if root is None else root))
        ground = ground_of(store)
        parts: list[Part] = [_Part(ground, source, table) for table in rows.tables()]
        parts += rows.unread()
        return move(source, store, parts, dry_run=dry_run, progress=progress)


def _require_schema(source: SqliteSource) -> None:
    place, expected = str(source.path), f"family {_FAMILY!r}, version {_VERSION!r}"
    if "runtime_metadata" not in source.tables:
        raise ForeignSourceError(f"{place} is no runtime database of agent-harness")
    found = dict(source.ask("SELECT key, value FROM runtime_metadata"))
    family, version = found.get("schema_family"), found.get("schema_version")
    if (family, version) != (_FAMILY, _VERSION):
        raise RecordsSchemaError(place, f"family {family!r}, version {version!r}", expected)


class _Part:
    """The rows of one table, in the order in which they are put into the store."""

    def __init__(self, ground: Ground, source: SqliteSource, table: RowTable) -> None:
        self._ground = ground
        self._source = source
        self._query = table.query
        self._item = table.item
        self.name = table.name

    def count(self) -> int:
        """How many there are."""
        return int(next(self._source.ask(f"SELECT count(*) FROM ({self._query})"))[0])

    def pages(self) -> Iterator[Sequence[Item]]:
        """All of them, a page at a time."""
        page: list[Item] = []
        size = 0
        for row in self._source.ask(self._query):
            page.append(self._item(row))
            size += sum([len(value) for value in row if isinstance(value, str | bytes)])
            size += page[-1].size_bytes if isinstance(page[-1], Made) else 0
            if len(page) >= _PAGE_ROWS or size >= _PAGE_BYTES:
                yield page
                page, size = [], 0
        if page:
            yield page

    def is_stored(self, page: Sequence[Item]) -> list[bool]:
        """Which of them the store has; ConflictError if with other content."""
        found = stored(self._ground, page)
        for item, there in zip(page, found, strict=True):
            if there is not None and not _is_same(item, there):
                raise ConflictError(
                    f"one of the {self.name} is in the store with other content: "
                    f"{_named(item)}; import into another store"
                )
        return [there is not None for there in found]

    def store(self, rows: Sequence[Item]) -> None:
        """Put them into the store, in one write."""
        insert(self._ground, rows)


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
