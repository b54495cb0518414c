"""Converts LangGraph's configs to rows, and rows to LangGraph's tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, DeltaChannelHistory

from casstore.adapters.langgraph import layout
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.layout import (
    Channel,
    CheckpointKey,
    CheckpointRow,
    config_of,
    config_parts,
)
from casstore.adapters.langgraph.lists import ListCodec
from casstore.adapters.langgraph.steps import RecentCheckpoints
from casstore.adapters.langgraph.threads import ChannelHistory, StoredCheckpoint, Threads
from casstore.errors import CorruptionError, ObjectNotFoundError

# Tuples that a listing reads at once.
PAGE: Final = 16


class TupleReader:
    """Reads checkpoints as LangGraph's tuples."""

    def __init__(
        self,
        threads: Threads,
        codec: Codec,
        recent: RecentCheckpoints,
        lists: ListCodec | None,
    ) -> None:
        self._threads = threads
        self._decode = codec.decode
        self._recent = recent
        self._lists = lists

    def find(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config names, or the latest; None if it does not exist."""
        while (row := self._find_row(config)) is not None:
            if found := self._present([row], {}):
                return found[0]
        return None

    def _find_row(self, config: RunnableConfig) -> CheckpointRow | None:
        thread, namespace, checkpoint = config_parts(config)
        if checkpoint is None:
            return self._threads.find_latest(thread, namespace)
        return self._threads.find(CheckpointKey(thread, namespace, checkpoint))

    def list(
        self, config: RunnableConfig | None, wanted: Mapping[str, Any], before: str | None
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints whose metadata matches, newest first."""
        rows = self._find_rows(config, before)
        # Read one first, because many callers need no more; then read pages.
        page = 1
        while batch := [*islice(rows, page)]:
            yield from self._present(batch, wanted)
            page = PAGE

    def _find_rows(
        self, config: RunnableConfig | None, before: str | None
    ) -> Iterator[CheckpointRow]:
        """The rows of a listing, newest first."""
        threads = self._threads
        if config is None:
            return threads.merged_rows(None, before)
        thread, namespace, checkpoint = config_parts(config)
        everywhere = config["configurable"].get("checkpoint_ns") is None
        if checkpoint is not None:
            namespaces = threads.namespaces(thread) if everywhere else [namespace]
            found = [threads.find(CheckpointKey(thread, each, checkpoint)) for each in namespaces]
            return iter([row for row in found if row and (before is None or checkpoint < before)])
        if everywhere:
            return threads.merged_rows(thread, before)
        return threads.rows(thread, namespace, before)

    def _present(
        self, rows: Sequence[CheckpointRow], wanted: Mapping[str, Any]
    ) -> Sequence[CheckpointTuple]:
        """The tuples of the matching rows, without those deleted meanwhile."""
        try:
            return self._tuples(
                [
                    stored
                    for stored in self._read(rows)
                    if not wanted or self._matches(stored, wanted)
                ]
            )
        except (ObjectNotFoundError, CorruptionError):
            # Objects may be missing only if the checkpoints were deleted since the rows were read.
            left = [row for row in rows if self._is_unchanged(row)]
            if len(left) == len(rows):
                raise
        return self._present(left, wanted) if left else []

    def _read(self, rows: Sequence[CheckpointRow]) -> Iterator[StoredCheckpoint]:
        """The checkpoints of rows, from the cache if they are in it, else from the store."""
        known = [self._recent.stored(row) for row in rows]
        others = [row for row, found in zip(rows, known, strict=True) if found is None]
        read = iter(self._threads.read(others) if others else ())
        return (next(read) if found is None else found for found in known)

    def _is_unchanged(self, row: CheckpointRow) -> bool:
        now = self._threads.find(row.place)
        return now is not None and now._replace(record=row.record) == row

    def histories(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> dict[str, DeltaChannelHistory]:
        """For delta channels of a checkpoint: the last stored value, and the writes since."""
        row = self._find_row(config)
        if row is None:
            return {channel: {"writes": []} for channel in channels}
        found = self._threads.histories(row, channels)
        return {channel: self._history(channel, found[channel]) for channel in channels}

    def _history(self, channel: str, found: ChannelHistory) -> DeltaChannelHistory:
        history: DeltaChannelHistory = {
            "writes": [(task, channel, self._decode(value)) for task, value in found.writes]
        }
        if found.has_seed:
            history["seed"] = self._decode(self._threads.resolve([found.seed])[0])
        return history

    def _matches(self, stored: StoredCheckpoint, wanted: Mapping[str, Any]) -> bool:
        metadata = self._fields(stored, "meta")
        # Compare in Python: a metadata key is never part of a query.
        return all(metadata.get(key) == value for key, value in wanted.items())

    def _tuples(self, found: Sequence[StoredCheckpoint]) -> Sequence[CheckpointTuple]:
        channels = [each for stored in found for each in stored.channels.values() if each.has_value]
        # The reader of a single checkpoint may continue from it, so its lists are cached; those of
        # a listing would only evict others.
        values = iter(self._values(channels, remember=len(found) == 1))
        return [self._tuple(stored, values) for stored in found]

    def _values(self, channels: Sequence[Channel], *, remember: bool) -> Sequence[Any]:
        """The values of channels."""
        lists = self._lists
        known = [None if lists is None else lists.load_known(each.key) for each in channels]
        stored = iter(
            self._threads.resolve(
                each.value for each, found in zip(channels, known, strict=True) if found is None
            )
        )
        return [
            self._value(each, next(stored), remember) if found is None else found
            for each, found in zip(channels, known, strict=True)
        ]

    def _value(self, channel: Channel, stored: Any, remember: bool) -> Any:
        found = None
        if self._lists is not None:
            found = self._lists.load(channel.key, stored, remember=remember)
        return self._decode(stored) if found is None else found

    def _tuple(self, stored: StoredCheckpoint, values: Iterator[Any]) -> CheckpointTuple:
        row, value, channels = stored
        checkpoint: dict[str, Any] = {
            "v": value.get("v"),
            "id": value.get("id"),
            "ts": value.get("ts"),
            "channel_values": {
                name: next(values) for name, each in channels.items() if each.has_value
            },
            "channel_versions": layout.unpack_versions(channels),
            "versions_seen": layout.unpack_seen(value),
            **self._fields(stored, "more"),
        }
        parent = None if row.parent is None else row.place._replace(checkpoint=row.parent)
        return CheckpointTuple(
            config=config_of(row.place),
            checkpoint=checkpoint,  # type: ignore[arg-type]
            metadata=self._fields(stored, "meta"),  # type: ignore[arg-type]
            parent_config=None if parent is None else config_of(parent),
            pending_writes=[
                (each.task, each.channel, self._decode(each.value))
                for each in self._threads.pending(row)
            ],
        )

    def _fields(self, stored: StoredCheckpoint, part: str) -> dict[str, Any]:
        """A dict that is part of a checkpoint."""
        fields = self._decode(stored.value.get(part))
        if type(fields) is not dict:
            raise CorruptionError(f"checkpoint {stored.row.place} is damaged")
        return fields
