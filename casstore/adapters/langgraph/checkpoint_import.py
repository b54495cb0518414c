"""Imports the checkpoints of LangGraph's own savers, with their pending writes.

A repeated import adds the writes that stored checkpoints have got in the source since. Objects in
the state are stored as they are encoded (``encoding.Raw``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from langgraph.checkpoint.serde.base import SerializerProtocol

from casstore.adapters.langgraph import layout
from casstore.adapters.langgraph.checkpoint_sources import (
    FoundCheckpoint,
    SaverSource,
    open_saver,
)
from casstore.adapters.langgraph.encoding import pack_raw
from casstore.adapters.langgraph.layout import (
    Channel,
    CheckpointKey,
    CheckpointRow,
    PendingRow,
    TaskRow,
)
from casstore.adapters.langgraph.threads import (
    Threads,
    pending_by_task,
    sorted_writes,
)
from casstore.compat.importing import ImportReport, Part, Presence, Row, RowPart, paged, run
from casstore.errors import ConditionFailedError, ConflictError
from casstore.maintenance.progress import Progress
from casstore.session.records import Draft
from casstore.store import Store, check_store


def import_checkpoints(
    store: Store,
    source: str | os.PathLike[str],
    *,
    serde: SerializerProtocol | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the checkpoints and pending writes of SqliteSaver or PostgresSaver.

    ``source`` is the database file, or the saver's connection string as a ``postgresql://`` URL.
    It is read in one snapshot, also while the saver is in use. Of a ShallowPostgresSaver the
    latest checkpoint of each thread is imported, which is all it keeps. ``serde`` is needed only
    if the saver used another serialiser than LangGraph's own, as for encryption.
    ForeignSourceError if the source has other tables; CorruptionError, UnsafePayloadError or
    InvalidInputError, naming the checkpoint, if one cannot be read; ConflictError if the store
    holds a checkpoint with other content.

    >>> from langgraph.checkpoint.base import empty_checkpoint
    >>> from langgraph.checkpoint.sqlite import SqliteSaver
    >>> with SqliteSaver.from_conn_string(str(place / "old.sqlite")) as saver:
    ...     thread = {"configurable": {"thread_id": "a conversation", "checkpoint_ns": ""}}
    ...     config = saver.put(thread, empty_checkpoint(), {}, {})
    >>> import_checkpoints(store, place / "old.sqlite").part("checkpoints").imported
    1
    """
    check_store(store)
    with open_saver(source, serde) as (database, saver):
        parts: list[Part] = [_CheckpointPart(saver, store), _EarlyWritesPart(saver, store)]
        return run(
            "langgraph-checkpoints", database, store, parts, dry_run=dry_run, progress=progress
        )


class _DraftedPart(RowPart[Row]):
    """Rows that are converted into a draft when they are compared."""

    def __init__(self, source: SaverSource, store: Store) -> None:
        self._source = source
        self._threads = Threads(store)
        self._draft = Draft(store)

    def store(self, rows: Sequence[Row]) -> None:
        try:
            self._draft.commit()
        except ConditionFailedError as exc:
            raise ConflictError(
                "another process changed checkpoints during the import; import once more"
            ) from exc

    def draft_writes(
        self, place: CheckpointKey, writes: Sequence[PendingRow], folded: Sequence[PendingRow] = ()
    ) -> bool:
        """Add the writes that the store lacks to the draft; False if it lacks none.

        ConflictError if the store has a write that the source has not: the thread continued here.
        """
        rows = {record.key[3]: record for record in self._threads.writes.scan(*place)}
        there = sorted_writes(folded, pending_by_task(rows.values()))
        wanted = {(each.task, each.slot): each for each in writes}
        for each in there:
            known = wanted.pop((each.task, each.slot), None)
            if known is None or not self._source.same_write(known, each):
                raise _other_content(place)
        for task in {each.task: None for each in wanted.values()}:
            own = [each for each in writes if each.task == task]
            key = (*place, task)
            self._draft.expect(self._threads.writes, key, rows.get(task))
            self._threads.writes.put(self._draft, TaskRow.of(place, task, own))
        return bool(wanted)


class _EarlyWritesPart(_DraftedPart[CheckpointKey]):
    """Writes that were stored before their checkpoint."""

    name = "checkpoints that have writes alone"

    def count(self) -> int:
        return sum(1 for _ in self._source.early())

    def pages(self) -> Iterator[Sequence[CheckpointKey]]:
        return paged(self._source.early(), lambda place: 0)

    def look(self, page: Sequence[CheckpointKey]) -> list[Presence]:
        self._draft = Draft(self._threads.store)
        return [
            Presence.MISSING
            if self.draft_writes(place, self._source.writes(place))
            else Presence.EQUAL
            for place in page
        ]


class _CheckpointPart(_DraftedPart[FoundCheckpoint]):
    """Checkpoints with their writes."""

    name = "checkpoints"

    def __init__(self, source: SaverSource, store: Store) -> None:
        super().__init__(source, store)
        # The channels of the previous checkpoint, as read and as stored: most are equal in the
        # next, and are not encoded again.
        self._before: dict[str, tuple[Any, Any]] = {}
        self._group: tuple[str, str] = ("", "")

    def count(self) -> int:
        return self._source.count()

    def pages(self) -> Iterator[Sequence[FoundCheckpoint]]:
        return paged(self._source.checkpoints(), lambda checkpoint: checkpoint.size_bytes)

    def look(self, page: Sequence[FoundCheckpoint]) -> list[Presence]:
        self._draft = Draft(self._threads.store)
        known = self._threads.checkpoints.find_many([each.place for each in page])
        return [
            self._drafted(each)
            if record is None
            else self._compared(each, self._threads.checkpoints.decode(record))
            for each, record in zip(page, known, strict=True)
        ]

    def _compared(self, checkpoint: FoundCheckpoint, row: CheckpointRow) -> Presence:
        if not _is_same(self._source, self._threads, row, checkpoint):
            raise _other_content(checkpoint.place)
        lacks = self.draft_writes(checkpoint.place, checkpoint.writes, row.folded_writes)
        return Presence.OUTDATED if lacks else Presence.EQUAL

    def _drafted(self, checkpoint: FoundCheckpoint) -> Presence:
        fields, place = checkpoint.fields, checkpoint.place
        if self._group != place[:2]:
            self._group, self._before = (place.thread, place.namespace), {}
        values = fields["channel_values"]
        versions = fields.get("channel_versions") or {}
        channels: dict[str, Channel] = {}
        for name in {**versions, **values}:
            version = layout.pack_version(versions[name]) if name in versions else None
            value = self._value(name, values[name]) if name in values else None
            channels[name] = Channel(version, name in values, value)
        packed = layout.pack_fields(
            {**fields, "id": fields.get("id", place.checkpoint)},
            self._source.encode(layout.other_fields(fields)),
            self._source.encode(dict(checkpoint.metadata)),
        )
        link = layout.keep_checkpoint(packed, channels, self._draft.emit)
        run = checkpoint.metadata.get("run_id")
        row = CheckpointRow(place, link, checkpoint.parent, None if run is None else str(run))
        # Another process may have put it since it was looked for.
        self._draft.expect(self._threads.checkpoints, place, None)
        self._threads.checkpoints.put(self._draft, row)
        self.draft_writes(place, checkpoint.writes)
        return Presence.MISSING

    def _value(self, name: str, value: Any) -> Any:
        known = self._before.get(name)
        if known is None or not self._source.equal(known[0], value):
            known = (value, self._draft.keep_long(self._source.encode(value)))
            self._before[name] = known
        return known[1]


def _is_same(
    source: SaverSource, threads: Threads, row: CheckpointRow, checkpoint: FoundCheckpoint
) -> bool:
    """Whether a stored checkpoint equals one of the source, apart from its writes."""
    fields = checkpoint.fields
    stored = threads.read([row])[0]
    values = threads.values(stored)
    return (
        row.parent == checkpoint.parent
        and set(values) == set(fields["channel_values"])
        and all(
            source.same(value, values[name]) for name, value in fields["channel_values"].items()
        )
        and layout.unpack_versions(stored.channels) == (fields.get("channel_versions") or {})
        and layout.unpack_seen(stored.value) == (fields.get("versions_seen") or {})
        and all(stored.value[name] == fields.get(name) for name in ("v", "ts"))
        and source.same(layout.other_fields(fields), stored.value["more"])
        # Compared by encoding, because metadata may hold NaN, which is not equal to itself.
        and pack_raw(source.decode(stored.value["meta"])) == pack_raw(dict(checkpoint.metadata))
    )


def _other_content(place: CheckpointKey) -> ConflictError:
    return ConflictError(
        f"the store holds checkpoint {place.checkpoint} of thread {place.thread!r}, namespace "
        f"{place.namespace!r}, with other content; import into another store"
    )
