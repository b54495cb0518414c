"""A database of LangGraph's SqliteSaver, to move over from."""

from __future__ import annotations

import os
from typing import Final

from langgraph.checkpoint.serde.base import SerializerProtocol

from casstore.adapters.langgraph.layout import Place
from casstore.adapters.langgraph.moving_in import (
    FoundCheckpoint,
    ImportReport,
    Queries,
    SaverSource,
    move_in,
)
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import ForeignSourceError
from casstore.maintenance.progress import Progress
from casstore.store import Store, check_store

_KEYS: Final = """
    SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints
    WHERE (thread_id, checkpoint_ns, checkpoint_id) > (?, ?, ?)
    ORDER BY thread_id, checkpoint_ns, checkpoint_id LIMIT ?"""
_CHECKPOINT: Final = """
    SELECT parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints
    WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"""
_WRITES: Final = """
    SELECT task_id, {path}, idx, channel, type, value FROM writes
    WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? ORDER BY task_id, idx"""
_EARLY: Final = """
    SELECT DISTINCT thread_id, checkpoint_ns, checkpoint_id FROM writes AS w
    WHERE NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id)"""


def import_sqlite(
    store: Store,
    file: str | os.PathLike[str],
    *,
    serde: SerializerProtocol | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Move the checkpoints and writes of a SqliteSaver's database over, and compare all of them.

    The file is opened read-only and is as it was afterwards. ``serde`` is needed only if the
    database was written with another serialiser than LangGraph's own, as for encryption: then
    state is loaded with it. Raising from ``progress`` stops; the next call goes on from there.
    ConflictError if the store has a checkpoint of the same name with other content.

    >>> from langgraph.checkpoint.base import empty_checkpoint
    >>> from langgraph.checkpoint.sqlite import SqliteSaver
    >>> with SqliteSaver.from_conn_string(str(place / "old.sqlite")) as saver:
    ...     thread = {"configurable": {"thread_id": "a conversation", "checkpoint_ns": ""}}
    ...     config = saver.put(thread, empty_checkpoint(), {}, {})
    >>> import_sqlite(store, place / "old.sqlite").checkpoints
    1
    """
    check_store(store)
    with SqliteSource(file) as source:
        return move_in(_SqliteSaver(source, serde), store, progress)


class _SqliteSaver(SaverSource):
    """Reads a database of SqliteSaver."""

    def __init__(self, source: SqliteSource, serde: SerializerProtocol | None) -> None:
        columns = source.columns("writes")
        if not {"checkpoints", "writes"} <= source.tables or "idx" not in columns:
            raise ForeignSourceError(f"{source.path} is no database of LangGraph's SqliteSaver")
        # Databases from before the column have it nowhere.
        writes = _WRITES.format(path="task_path" if "task_path" in columns else "''")
        queries = Queries(
            "SELECT count(*) FROM checkpoints", "SELECT count(*) FROM writes", _KEYS, writes, _EARLY
        )
        super().__init__(str(source.path), source.ask, queries, serde)
        self._source = source

    def checkpoint(self, place: Place) -> FoundCheckpoint:
        found = next(self._source.ask(_CHECKPOINT, place), None)
        if found is None:
            raise self.lost(place)
        parent, tag, payload, metadata = found
        fields = self.load(place, tag, payload)
        meta = self.parse(place, metadata, "metadata") if metadata else {}
        self.require_fields(place, fields)
        return FoundCheckpoint(place, parent, fields, meta, self.writes(place))

    def require_unchanged(self) -> None:
        self._source.require_unchanged()

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes
