"""Converts LangGraph's configs to rows, and rows to LangGraph's tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import CheckpointTuple, DeltaChannelHistory, get_checkpoint_id

from casstore.adapters.langgraph import layout
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.history import ChannelHistory, channel_histories
from casstore.adapters.langgraph.layout import Channel, CheckpointKey, CheckpointRow
from casstore.adapters.langgraph.lists import ListCodec
from casstore.adapters.langgraph.threads import StoredCheckpoint, Threads
from casstore.errors import CorruptionError, InvalidInputError, ObjectNotFoundError

# Tuples that a listing reads at once.
PAGE: Final = 16


def config_parts(config: RunnableConfig) -> tuple[str, str, str | None]:
    """Thread, namespace and checkpoint id that a config names."""
    names = config.get("configurable") or {}
    if names.get("thread_id") is None:
        raise InvalidInputError('the config names no thread: {"configurable": {"thread_id": …}}')
    checkpoint = get_checkpoint_id(config)
    namespace = names.get("checkpoint_ns")
    return (
        str(names["thread_id"]),
        "" if namespace is None else str(namespace),
        str(checkpoint) if checkpoint else None,
    )


def config_of(place: CheckpointKey) -> RunnableConfig:
    """The config that names a checkpoint."""
    return {
        "configurable": {
            "thread_id": place.thread,
            "checkpoint_ns": place.namespace,
            "checkpoint_id": place.checkpoint,
        }
    }


def find_row(threads: Threads, config: RunnableConfig) -> CheckpointRow | None:
    """The row of the checkpoint that a config names, or of the latest."""
    thread, namespace, checkpoint = config_parts(config)
    if checkpoint is None:
        return threads.find_latest(thread, namespace)
    return threads.find(CheckpointKey(thread, namespace, checkpoint))


def find_rows(
    threads: Threads, config: RunnableConfig | None, before: str | None
) -> Iterator[CheckpointRow]:
    """The rows of a listing, newest first."""
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


class TupleReader:
    """Reads checkpoints as LangGraph's tuples."""

    def __init__(self, threads: Threads, codec: Codec, lists: ListCodec | None) -> None:
        self._threads = threads
        self._decode = codec.decode
        self._lists = lists

    def find(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config names, or the latest; None if it does not exist."""
        while (row := find_row(self._threads, config)) is not None:
            if found := self._present([row], {}):
                return found[0]
        return None

    def list(
        self, config: RunnableConfig | None, wanted: Mapping[str, Any], before: str | None
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints whose metadata matches, newest first."""
        rows = find_rows(self._threads, config, before)
        # Read one first, because many callers need no more; then read pages.
        page = 1
        while batch := [*islice(rows, page)]:
            yield from self._present(batch, wanted)
            page = PAGE

    def _present(
        self, rows: Sequence[CheckpointRow], wanted: Mapping[str, Any]
    ) -> Sequence[CheckpointTuple]:
        """The tuples of the matching rows, without those deleted meanwhile."""
        try:
            return self._tuples(
                [
                    stored
                    for stored in self._threads.read(rows)
                    if not wanted or self._matches(stored, wanted)
                ]
            )
        except (ObjectNotFoundError, CorruptionError):
            # Objects may be missing only if the checkpoints were deleted since the rows were read.
            left = [row for row in rows if self._is_unchanged(row)]
            if len(left) == len(rows):
                raise
        return self._present(left, wanted) if left else []

    def _is_unchanged(self, row: CheckpointRow) -> bool:
        now = self._threads.find(row.place)
        return now is not None and now._replace(record=row.record) == row

    def histories(
        self, config: RunnableConfig, channels: Sequence[str]
    ) -> dict[str, DeltaChannelHistory]:
        """What channels start from at a checkpoint, and the writes since, oldest first."""
        row = find_row(self._threads, config)
        if row is None:
            return {channel: {"writes": []} for channel in channels}
        found = channel_histories(self._threads, row, channels)
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
        channels = [stored.channels for stored in found]
        places = [each.value for own in channels for each in own.values() if each.has_value]
        # A reader of one checkpoint may continue from it; a listing would only evict other entries.
        values = iter(self._values(places, remember=len(found) == 1))
        return [
            self._tuple(stored, own, values) for stored, own in zip(found, channels, strict=True)
        ]

    def _values(self, places: Sequence[Any], *, remember: bool) -> Sequence[Any]:
        """The values of channels; each is a stored form or a link to one."""
        lists = self._lists
        if lists is None:
            return [self._decode(stored) for stored in self._threads.resolve(places)]
        known = [lists.load_known(place) for place in places]
        others = [place for place, found in zip(places, known, strict=True) if found is None]
        stored = iter(self._threads.resolve(others))
        return [
            self._value(lists, place, next(stored), remember) if found is None else found
            for place, found in zip(places, known, strict=True)
        ]

    def _value(self, lists: ListCodec, place: Any, stored: Any, remember: bool) -> Any:
        found = lists.load(place, stored, remember=remember)
        return self._decode(stored) if found is None else found

    def _tuple(
        self, stored: StoredCheckpoint, channels: dict[str, Channel], values: Iterator[Any]
    ) -> CheckpointTuple:
        row, value = stored
        checkpoint: dict[str, Any] = {
            "v": value.get("v"),
            "id": value.get("id"),
            "ts": value.get("ts"),
            "channel_values": {
                name: next(values) for name, each in channels.items() if each.has_value
            },
            "channel_versions": {
                name: layout.unpack_version(each.version)
                for name, each in channels.items()
                if each.version is not None
            },
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
