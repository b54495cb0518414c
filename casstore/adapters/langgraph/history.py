"""The history that delta channels need: writes of ancestors, back to a stored value.

A delta channel stores no value at most steps; reading it replays the writes of its ancestors onto
the last stored value, the seed. Where ancestors were deleted, the row of the checkpoint below them
has the writes and the seed that the walk would have found there: the folded history.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from casstore.adapters.langgraph.layout import CheckpointKey, CheckpointRow
from casstore.adapters.langgraph.threads import StoredCheckpoint, Threads
from casstore.errors import CorruptionError


class ChannelHistory(NamedTuple):
    """Writes of one channel, oldest first, as (task, stored value), and their starting value."""

    writes: list[tuple[str, Any]]
    has_seed: bool
    #: The value before the first write, in stored form or as a link to it.
    seed: Any


class _Walk(NamedTuple):
    """What has been found so far, newest first."""

    writes: dict[str, list[tuple[str, Any]]]
    found: dict[str, ChannelHistory]

    def end(self, channel: str, older: list[tuple[str, Any]], *seed: Any) -> None:
        """End the search: ``older`` writes precede those found, and start from the seed."""
        writes = self.writes.pop(channel)
        writes.reverse()
        self.found[channel] = ChannelHistory(older + writes, bool(seed), seed[0] if seed else None)


def channel_histories(
    threads: Threads, row: CheckpointRow, channels: Collection[str]
) -> dict[str, ChannelHistory]:
    """The history of channels above a checkpoint, without its own writes."""
    walk = _Walk({channel: [] for channel in channels}, {})
    seen: set[str] = set()
    _end_at_fold(walk, row)
    while walk.writes and row.parent is not None and row.parent not in seen:
        seen.add(row.parent)
        above = threads.find(CheckpointKey(row.place.thread, row.place.namespace, row.parent))
        if above is None:
            break
        row = above
        for write in reversed(threads.pending(row)):
            if write.channel in walk.writes:
                walk.writes[write.channel].append((write.task, write.value))
        stored = threads.read([row])[0].channels
        for channel in list(walk.writes):
            if channel in stored and stored[channel].has_value:
                walk.end(channel, [], stored[channel].value)
        _end_at_fold(walk, row)
    for channel in list(walk.writes):
        walk.end(channel, [])
    return walk.found


def fold(threads: Threads, checkpoint: StoredCheckpoint) -> dict[str, list[Any]]:
    """The folded history that a checkpoint needs when its ancestors are deleted, by channel.

    Covers every channel that has a version and no value: the store does not know which of them are
    delta channels, and the others have hardly any history.
    """
    wanted = [name for name, each in checkpoint.channels.items() if not each.has_value]
    folded: dict[str, list[Any]] = {}
    for name, history in channel_histories(threads, checkpoint.row, wanted).items():
        if history.writes or history.has_seed:
            writes = [list(write) for write in history.writes]
            folded[name] = [writes, history.seed] if history.has_seed else [writes]
    return folded


def _end_at_fold(walk: _Walk, row: CheckpointRow) -> None:
    for channel in list(walk.writes):
        folded = row.folded_history.get(channel)
        if folded is None:
            continue
        try:
            older = [(task, value) for task, value in folded[0]]
        except (IndexError, TypeError, ValueError) as exc:
            raise CorruptionError(f"the folded history of {row.place} is damaged") from exc
        walk.end(channel, older, *folded[1:])
