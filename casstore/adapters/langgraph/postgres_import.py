"""The tables of LangGraph's PostgresSaver, to move over from.

A checkpoint is a JSON document there; values that are no plain ones stand beside it, by channel
and version, and what an older LangGraph had to do next among the writes of the parent. Those of
ShallowPostgresSaver have the latest checkpoint of a thread alone: its id is in the document, and a
channel has one value.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import TASKS

from casstore.adapters.langgraph.layout import Place
from casstore.adapters.langgraph.moving_in import (
    FoundCheckpoint,
    ImportReport,
    Queries,
    SaverSource,
    move_in,
)
from casstore.compat.postgres_source import PostgresSource
from casstore.errors import CorruptionError, ForeignSourceError
from casstore.maintenance.progress import Progress
from casstore.store import Store, check_store

_TABLES: Final = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
_KEYS: Final = b"""
    SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints
    WHERE (thread_id, checkpoint_ns, checkpoint_id) > (%s, %s, %s)
    ORDER BY thread_id, checkpoint_ns, checkpoint_id LIMIT %s"""
_CHECKPOINT: Final = b"""
    SELECT parent_checkpoint_id, checkpoint::text, metadata::text FROM checkpoints
    WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s"""
# A checkpoint of ShallowPostgresSaver has its id in the document.
_SHALLOW_ID: Final = b"coalesce(c.checkpoint ->> 'id', '')"
_SHALLOW_KEYS: Final = b"""
    SELECT thread_id, checkpoint_ns, %ID% FROM checkpoints AS c
    WHERE (thread_id, checkpoint_ns, %ID%) > (%s, %s, %s)
    ORDER BY thread_id, checkpoint_ns LIMIT %s""".replace(b"%ID%", _SHALLOW_ID)
_SHALLOW_CHECKPOINT: Final = b"""
    SELECT NULL, checkpoint::text, metadata::text FROM checkpoints AS c
    WHERE thread_id = %s AND checkpoint_ns = %s AND %ID% = %s""".replace(b"%ID%", _SHALLOW_ID)
# The version as the server spells it: it may be a number.
_BLOBS: Final = b"""
    SELECT b.channel, b.type, b.blob FROM checkpoints c
    CROSS JOIN LATERAL jsonb_each_text(c.checkpoint -> 'channel_versions') AS v(channel, version)
    JOIN checkpoint_blobs b ON b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
        AND b.channel = v.channel AND b.version = v.version
    WHERE c.thread_id = %s AND c.checkpoint_ns = %s AND c.checkpoint_id = %s AND b.type <> 'empty'
    """
_SHALLOW_BLOBS: Final = _BLOBS.replace(b" AND b.version = v.version", b"").replace(
    b"c.checkpoint_id", _SHALLOW_ID
)
_WRITES: Final = b"""
    SELECT task_id, %PATH%, idx, channel, type, blob FROM checkpoint_writes
    WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s ORDER BY task_id, idx"""
_SENDS: Final = b"""
    SELECT type, blob FROM checkpoint_writes
    WHERE thread_id = %s AND checkpoint_ns = %s AND checkpoint_id = %s AND channel = %s
    ORDER BY %PATH%, task_id, idx"""
# All that the saver has kept: those of the checkpoint before, which it has no more.
_SHALLOW_SENDS: Final = _SENDS.replace(b"AND checkpoint_id = %s ", b"AND %s::text IS NOT NULL ")
_SHALLOW_COUNT_WRITES: Final = b"""
    SELECT count(*) FROM checkpoint_writes AS w JOIN checkpoints AS c ON c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND %ID% = w.checkpoint_id""".replace(
    b"%ID%", _SHALLOW_ID
)
# Writes that have no checkpoint are those of one that is gone, and nobody waits for them.
_SHALLOW_EARLY: Final = b"SELECT NULL WHERE false"
_EARLY: Final = b"""
    SELECT DISTINCT thread_id, checkpoint_ns, checkpoint_id FROM checkpoint_writes AS w
    WHERE NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id)"""
# From here on a checkpoint has a channel for what is to be done next.
_TASKS_SINCE: Final = 4
# The version that a channel begins with.
_FIRST_VERSION: Final = f"{1:032}.{0:016}"


def import_postgres(
    store: Store,
    url: str,
    *,
    serde: SerializerProtocol | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Move the checkpoints and writes of a PostgresSaver over, and compare all of them.

    Of a ShallowPostgresSaver these are the latest checkpoint of each thread, and its writes.
    ``url`` is the saver's connection string, as a URL. Everything is read in one transaction that
    can only read, as of one moment, also while the saver is in use. ``serde`` is needed only if
    it was written with another serialiser than LangGraph's own, as for encryption. Raising from
    ``progress`` stops; the next call goes on from there. ConflictError if the store has a
    checkpoint of the same name with other content.
    """
    check_store(store)
    with PostgresSource(url) as source:
        return move_in(_PostgresSaver(source, serde), store, progress)


class _Sql(NamedTuple):
    """How the tables are asked, beside what every saver's are."""

    checkpoint: bytes
    blobs: bytes
    sends: bytes


class _PostgresSaver(SaverSource):
    """Reads the tables of PostgresSaver, or of ShallowPostgresSaver."""

    def __init__(self, source: PostgresSource, serde: SerializerProtocol | None) -> None:
        found = {table: source.columns(table) for table in _TABLES}
        has_ids = "checkpoint_id" in found["checkpoints"]
        if (
            not all(found.values())
            or "metadata" not in found["checkpoints"]
            or has_ids != ("version" in found["checkpoint_blobs"])
        ):
            raise ForeignSourceError(
                f"{source.place} has no tables of LangGraph's PostgresSaver, where this role looks "
                "for them; options=-csearch_path%3DNAME in the URL names another schema"
            )
        # Databases from before the column have it nowhere.
        path = b"task_path" if "task_path" in found["checkpoint_writes"] else b"''"
        queries = Queries(
            b"SELECT count(*) FROM checkpoints",
            b"SELECT count(*) FROM checkpoint_writes" if has_ids else _SHALLOW_COUNT_WRITES,
            _KEYS if has_ids else _SHALLOW_KEYS,
            _WRITES.replace(b"%PATH%", path),
            _EARLY if has_ids else _SHALLOW_EARLY,
        )
        super().__init__(source.place, source.ask, queries, serde)
        self._source = source
        self._is_shallow = not has_ids
        self._sql = (
            _Sql(_CHECKPOINT, _BLOBS, _SENDS.replace(b"%PATH%", path))
            if has_ids
            else _Sql(_SHALLOW_CHECKPOINT, _SHALLOW_BLOBS, _SHALLOW_SENDS.replace(b"%PATH%", path))
        )

    def checkpoint(self, place: Place) -> FoundCheckpoint:
        found = next(self._source.ask(self._sql.checkpoint, place), None)
        if found is None:
            raise self.lost(place)
        parent, document, metadata = found
        fields = self.parse(place, document, "checkpoint")
        values, versions = fields.get("channel_values"), fields.get("channel_versions")
        is_named = bool(place.checkpoint)
        if not is_named or type(values or {}) is not dict or type(versions or {}) is not dict:
            raise CorruptionError(f"checkpoint {place.checkpoint} in {self.name} is none")
        fields["channel_values"] = values = values or {}
        # They win over what the document says of them: of a delta snapshot it says that it is.
        for channel, tag, payload in self._source.ask(self._sql.blobs, place):
            values[channel] = self.load(place, tag, payload or b"")
        self.require_fields(place, fields)
        if (fields.get("v") or 0) < _TASKS_SINCE:
            if self._is_shallow:
                self._add_tasks(place, fields)
            elif parent is not None:
                self._add_tasks(place._replace(checkpoint=parent), fields)
        meta = self.parse(place, metadata, "metadata")
        return FoundCheckpoint(place, parent, fields, meta, self.writes(place))

    def _add_tasks(self, told_by: Place, fields: dict[str, Any]) -> None:
        """What is to be done next, where today's LangGraph looks for it."""
        values = (*told_by, TASKS)
        sends = [
            self.load(told_by, tag, payload)
            for tag, payload in self._source.ask(self._sql.sends, values)
        ]
        if sends:
            versions = fields["channel_versions"] = fields.get("channel_versions") or {}
            fields["channel_values"][TASKS] = sends
            versions[TASKS] = max(versions.values()) if versions else _FIRST_VERSION

    def require_unchanged(self) -> None:
        """All of it was read in one transaction."""

    @property
    def size_bytes(self) -> int:
        return self._source.size_bytes(*_TABLES)
