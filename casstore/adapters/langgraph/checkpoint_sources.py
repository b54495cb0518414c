"""Reads the checkpoints that LangGraph's own savers stored, in SQLite or PostgreSQL.

State is read without rebuilding the objects in it (``encoding.load_raw``): nothing that it names is
imported, and no type needs to be allowed.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS

from casstore.adapters.langgraph.encoding import (
    Codec,
    decode,
    dump_raw,
    encode,
    load_raw,
    open_snapshot,
    pack_form,
    pack_raw,
)
from casstore.adapters.langgraph.layout import CheckpointKey, PendingRow
from casstore.compat.importing import PAGE_ROWS, Source, columns_bytes
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    ConflictError,
    CorruptionError,
    ForeignSourceError,
    InvalidInputError,
    UnsafePayloadError,
)
from casstore.store import is_server

if TYPE_CHECKING:
    from casstore.compat.postgres_source import PostgresSource


class FoundCheckpoint(NamedTuple):
    """A checkpoint of the source, its state in the form that ``encoding`` takes."""

    place: CheckpointKey
    parent: str | None
    fields: Mapping[str, Any]
    metadata: Mapping[str, Any]
    writes: Sequence[PendingRow]
    #: About the bytes that its state takes in the source.
    size_bytes: int


class Queries(NamedTuple):
    """The queries of every saver, in the dialect of its database."""

    count: Any
    #: One checkpoint; the first column is its parent.
    checkpoint: Any
    #: The keys of the checkpoints after one, in order, up to a limit.
    keys: Any
    #: The writes of a checkpoint: task, path, index, channel, tag, payload.
    writes: Any
    #: The keys of checkpoints that do not exist, and have writes.
    early: Any


class SaverSource(ABC):
    """The checkpoints of a saver. ``serde`` is its serialiser, if that is not LangGraph's own."""

    def __init__(
        self,
        name: str,
        ask: Callable[[Any, Sequence[Any]], Iterator[tuple[Any, ...]]],
        queries: Queries,
        serde: SerializerProtocol | None,
    ) -> None:
        self.name = name
        self._ask = ask
        self._queries = queries
        self._serde = serde

    @abstractmethod
    def read(
        self, place: CheckpointKey, row: tuple[Any, ...]
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        """The fields and the metadata of a checkpoint, and about the bytes of its state."""

    def count(self) -> int:
        """The number of checkpoints."""
        return int(next(self._ask(self._queries.count, ()))[0])

    def checkpoints(self) -> Iterator[FoundCheckpoint]:
        """All checkpoints, by thread, namespace and id."""
        after = CheckpointKey("", "", "")
        while page := [
            CheckpointKey(*row) for row in self._ask(self._queries.keys, (*after, PAGE_ROWS))
        ]:
            yield from map(self._checkpoint, page)
            after = page[-1]

    def _checkpoint(self, place: CheckpointKey) -> FoundCheckpoint:
        row = next(self._ask(self._queries.checkpoint, place), None)
        if row is None:
            raise ConflictError(
                f"checkpoint {place.checkpoint} was deleted from {self.name} during the import; "
                "import again"
            )
        fields, metadata, size_bytes = self.read(place, row)
        return FoundCheckpoint(
            place=place,
            parent=row[0],
            fields=fields,
            metadata=metadata,
            writes=self.writes(place),
            size_bytes=size_bytes,
        )

    def early(self) -> Iterator[CheckpointKey]:
        """The keys of checkpoints that do not exist, and have writes."""
        return (CheckpointKey(*row) for row in self._ask(self._queries.early, ()))

    def writes(self, place: CheckpointKey) -> list[PendingRow]:
        """The pending writes of a checkpoint, in stored form."""
        return [
            PendingRow(task, path, index, channel, self.encode(self.load(place, tag, payload)))
            for task, path, index, channel, tag, payload in self._ask(self._queries.writes, place)
        ]

    def encode(self, value: Any) -> Any:
        """The stored form of a value that was read."""
        if self._serde is not None:
            return Codec(self._serde).encode(value)
        return encode(open_snapshot(value), dump_raw)

    def decode(self, stored: Any) -> Any:
        """The value of a stored form."""
        load = load_raw if self._serde is None else self._serde.loads_typed
        return decode(stored, load)

    def same(self, value: Any, stored: Any) -> bool:
        """Whether a stored form is that of the value."""
        return self.equal(self.decode(stored), value)

    def same_write(self, one: PendingRow, other: PendingRow) -> bool:
        """Whether two writes in stored form are equal. Encryption encodes a value differently
        every time.
        """
        if one[:-1] != other[:-1]:
            return False
        if pack_form(one.value) == pack_form(other.value):
            return True
        if self._serde is None:
            return False
        return self.equal(self.decode(one.value), self.decode(other.value))

    def equal(self, one: Any, other: Any) -> bool:
        """Whether two values that were read are equal."""
        if self._serde is not None:
            return bool(one == other)
        return pack_raw(one) == pack_raw(other)

    def load(self, place: CheckpointKey, tag: str, payload: bytes) -> Any:
        """Decode serialised state of a checkpoint."""
        if self._serde is not None:
            return self._serde.loads_typed((tag, payload))
        if tag == "null":
            return None
        if type(tag) is str and not isinstance(payload, bytes | str):
            raise self.damaged(place, "its state is neither bytes nor text")
        if tag == "json":
            tag, payload = self._rewritten(place, payload)
        try:
            return load_raw((tag, payload))
        except UnsafePayloadError as exc:
            raise UnsafePayloadError(
                exc.name,
                f"checkpoint {place.checkpoint} of thread {place.thread!r} is in a codec that "
                "needs its serialiser; pass that as serde",
            ) from exc

    def _rewritten(self, place: CheckpointKey, payload: bytes | str) -> tuple[str, bytes]:
        """State that LangGraph once wrote as JSON, as it would write it today.

        LangGraph's own list decides which objects it rebuilds; it raises any exception for others.
        """
        try:
            json.loads(payload)
        except (ValueError, RecursionError) as exc:
            raise self.damaged(place, f"its state is not JSON: {exc}") from exc
        strict = JsonPlusSerializer(allowed_msgpack_modules=None)
        try:
            value = strict.loads_typed(("json", payload))  # type: ignore[arg-type]
        except Exception as exc:
            raise UnsafePayloadError(
                "json",
                f"checkpoint {place.checkpoint} of thread {place.thread!r} holds what LangGraph "
                f"does not rebuild ({exc!s:.200}); pass a serialiser that does as serde",
            ) from exc
        try:
            return strict.dumps_typed(value)
        except (TypeError, ValueError) as exc:
            raise InvalidInputError(
                f"checkpoint {place.checkpoint} of thread {place.thread!r} holds what LangGraph's "
                f"serialiser cannot encode: {exc}"
            ) from exc

    def damaged(self, place: CheckpointKey, why: str) -> CorruptionError:
        """The error for a checkpoint that cannot be decoded."""
        return CorruptionError(
            f"checkpoint {place.checkpoint} of thread {place.thread!r} in {self.name} is damaged: "
            f"{why}"
        )

    def require_fields(self, place: CheckpointKey, fields: Any) -> None:
        """Raise CorruptionError unless a checkpoint has the fields of every checkpoint."""
        if type(fields) is not dict:
            raise self.damaged(place, "it is not a map")
        if type(fields.get("channel_values")) is not dict:
            raise self.damaged(place, "its channel_values are not a map")
        if type(fields.get("v")) not in (int, type(None)):
            raise self.damaged(place, "its version is not a number")
        versions, seen = fields.get("channel_versions"), fields.get("versions_seen")
        for name, found in (("channel_versions", versions), ("versions_seen", seen)):
            if found is not None and type(found) is not dict:
                raise self.damaged(place, f"its {name} are not a map")
        kinds = {type(version) for version in (versions or {}).values()}
        if not (kinds <= {str} or kinds <= {int, float}):
            raise self.damaged(place, "versions of its channels are neither texts nor numbers")
        if any(type(one) is not dict for one in (seen or {}).values()):
            raise self.damaged(place, "its versions_seen are not maps of versions")
        for names in (fields["channel_values"], versions or {}, seen or {}):
            if any(type(name) is not str for name in names):
                raise self.damaged(place, "the name of a channel is not a text")

    def parse(self, place: CheckpointKey, text: str | bytes, what: str) -> dict[str, Any]:
        """Decode a map that a checkpoint stores as JSON."""
        try:
            found = json.loads(text)
        except (TypeError, ValueError, RecursionError) as exc:
            raise CorruptionError(f"the {what} of {place} in {self.name} is damaged") from exc
        if type(found) is not dict:
            raise CorruptionError(f"the {what} of {place} in {self.name} is not a map")
        return found


@contextmanager
def open_saver(
    source: str | os.PathLike[str], serde: SerializerProtocol | None
) -> Iterator[tuple[Source, SaverSource]]:
    """Open a file of SqliteSaver, or the tables of PostgresSaver at a ``postgresql://`` URL."""
    if isinstance(source, str) and is_server(source):
        from casstore.compat.postgres_source import PostgresSource

        with PostgresSource(source, _POSTGRES_TABLES) as server:
            yield server, _PostgresSaver(server, serde)
    else:
        with SqliteSource(source) as file:
            yield file, _SqliteSaver(file, serde)


# --- SQLite -------------------------------------------------------------------------------------

_SQLITE_KEYS: Final = """
    SELECT thread_id, checkpoint_ns, checkpoint_id FROM checkpoints
    WHERE (thread_id, checkpoint_ns, checkpoint_id) > (?, ?, ?)
    ORDER BY thread_id, checkpoint_ns, checkpoint_id LIMIT ?"""
_SQLITE_CHECKPOINT: Final = """
    SELECT parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints
    WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?"""
_SQLITE_WRITES: Final = """
    SELECT task_id, {path}, idx, channel, type, value FROM writes
    WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? ORDER BY task_id, idx"""
_SQLITE_EARLY: Final = """
    SELECT DISTINCT thread_id, checkpoint_ns, checkpoint_id FROM writes AS w
    WHERE NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id)"""


class _SqliteSaver(SaverSource):
    """A database of SqliteSaver."""

    def __init__(self, source: SqliteSource, serde: SerializerProtocol | None) -> None:
        columns = source.columns("writes")
        if not {"checkpoints", "writes"} <= source.tables or "idx" not in columns:
            raise ForeignSourceError(f"{source.path} is not a database of LangGraph's SqliteSaver")
        # Databases of an older LangGraph lack the column task_path.
        writes = _SQLITE_WRITES.format(path="task_path" if "task_path" in columns else "''")
        count = "SELECT count(*) FROM checkpoints"
        queries = Queries(count, _SQLITE_CHECKPOINT, _SQLITE_KEYS, writes, _SQLITE_EARLY)
        super().__init__(source.name, source.ask, queries, serde)

    def read(
        self, place: CheckpointKey, row: tuple[Any, ...]
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        _, tag, payload, metadata = row
        fields = self.load(place, tag, payload)
        meta = self.parse(place, metadata, "metadata") if metadata else {}
        self.require_fields(place, fields)
        return fields, meta, columns_bytes(row)


# --- PostgreSQL ---------------------------------------------------------------------------------

_POSTGRES_TABLES: Final = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
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
# The version as text: it may be a number.
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
# Of any checkpoint: the sends are of the previous one, whose row ShallowPostgresSaver has deleted.
_SHALLOW_SENDS: Final = _SENDS.replace(b"AND checkpoint_id = %s ", b"AND %s::text IS NOT NULL ")
# Writes without a checkpoint belong to a deleted one, and no task waits for them.
_SHALLOW_EARLY: Final = b"SELECT NULL WHERE false"
_EARLY: Final = b"""
    SELECT DISTINCT thread_id, checkpoint_ns, checkpoint_id FROM checkpoint_writes AS w
    WHERE NOT EXISTS (SELECT 1 FROM checkpoints AS c WHERE c.thread_id = w.thread_id
        AND c.checkpoint_ns = w.checkpoint_ns AND c.checkpoint_id = w.checkpoint_id)"""
# The first version of checkpoints that has a channel for the next tasks.
_TASKS_SINCE: Final = 4
# The version that a channel begins with.
_FIRST_VERSION: Final = f"{1:032}.{0:016}"


class _PostgresSaver(SaverSource):
    """The tables of PostgresSaver, or of ShallowPostgresSaver.

    A checkpoint is a JSON document; values that are not plain are in another table, by channel and
    version. The next tasks of an older LangGraph are among the writes of the parent.
    ShallowPostgresSaver keeps only the latest checkpoint of a thread: the id is in the document,
    and a channel has one value.
    """

    def __init__(self, source: PostgresSource, serde: SerializerProtocol | None) -> None:
        found = {table: source.columns(table) for table in _POSTGRES_TABLES}
        has_ids = "checkpoint_id" in found["checkpoints"]
        if (
            not all(found.values())
            or "metadata" not in found["checkpoints"]
            or has_ids != ("version" in found["checkpoint_blobs"])
        ):
            raise ForeignSourceError(
                f"{source.name} has no tables of LangGraph's PostgresSaver on the search path of "
                "this role; options=-csearch_path%3DNAME in the URL names another schema"
            )
        # Tables of an older LangGraph lack the column task_path.
        path = b"task_path" if "task_path" in found["checkpoint_writes"] else b"''"
        queries = Queries(
            b"SELECT count(*) FROM checkpoints",
            _CHECKPOINT if has_ids else _SHALLOW_CHECKPOINT,
            _KEYS if has_ids else _SHALLOW_KEYS,
            _WRITES.replace(b"%PATH%", path),
            _EARLY if has_ids else _SHALLOW_EARLY,
        )
        super().__init__(source.name, source.ask, queries, serde)
        self._is_shallow = not has_ids
        self._blobs = _BLOBS if has_ids else _SHALLOW_BLOBS
        self._sends = (_SENDS if has_ids else _SHALLOW_SENDS).replace(b"%PATH%", path)

    def read(
        self, place: CheckpointKey, row: tuple[Any, ...]
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        parent, document, metadata = row
        fields = self.parse(place, document, "checkpoint")
        values, versions = fields.get("channel_values"), fields.get("channel_versions")
        is_named = bool(place.checkpoint)
        if not is_named or type(values or {}) is not dict or type(versions or {}) is not dict:
            raise CorruptionError(f"checkpoint {place.checkpoint} in {self.name} is damaged")
        fields["channel_values"] = values = values or {}
        # Blobs replace values of the document, which only marks a delta snapshot.
        size = columns_bytes(row)
        for channel, tag, payload in self._ask(self._blobs, place):
            values[channel] = self.load(place, tag, payload or b"")
            size += len(payload or b"")
        self.require_fields(place, fields)
        if (fields.get("v") or 0) < _TASKS_SINCE:
            if self._is_shallow:
                self._add_tasks(place, fields)
            elif parent is not None:
                self._add_tasks(place._replace(checkpoint=parent), fields)
        return fields, self.parse(place, metadata, "metadata"), size

    def _add_tasks(self, place: CheckpointKey, fields: dict[str, Any]) -> None:
        """Add the next tasks to the channel where today's LangGraph looks for them.

        They are among the writes of the checkpoint at ``place``.
        """
        values = (*place, TASKS)
        sends = [self.load(place, tag, payload) for tag, payload in self._ask(self._sends, values)]
        if sends:
            versions = fields["channel_versions"] = fields.get("channel_versions") or {}
            fields["channel_values"][TASKS] = sends
            versions[TASKS] = max(versions.values()) if versions else _FIRST_VERSION
