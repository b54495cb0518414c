"""The rows of threads: checkpoints and writes with their links; nothing is deserialised.

Works on stored forms (``encoding``, ``layout``): copying, pruning and walking the history of a
thread never import or call a type that a checkpoint names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from langgraph.checkpoint.base import writes_sort_key

from casstore.adapters.langgraph.layout import (
    CHECKPOINTS,
    HEADS,
    TASKS,
    Channel,
    CheckpointKey,
    CheckpointRow,
    PendingRow,
    unpack_channels,
)
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.records.schema import RowTable
from casstore.session.records import Draft, Record
from casstore.store import Store


class StoredCheckpoint(NamedTuple):
    """A checkpoint with its row: values of channels are still stored forms or links."""

    row: CheckpointRow
    #: Its fields, in stored form.
    value: Mapping[str, Any]
    channels: dict[str, Channel]


class Threads:
    """The rows of all threads of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.checkpoints = RowTable(store, CHECKPOINTS)
        self.writes = RowTable(store, TASKS)
        self.heads = RowTable(store, HEADS)

    # --- finding ------------------------------------------------------------------------

    def find(self, place: CheckpointKey) -> CheckpointRow | None:
        """The row of one checkpoint."""
        return self.checkpoints.get(*place)

    def find_latest(self, thread: str, namespace: str) -> CheckpointRow | None:
        """The row of the checkpoint with the highest id."""
        for record in self.checkpoints.scan(thread, namespace, reverse=True, page=1):
            return self.checkpoints.decode(record)
        return None

    def rows(
        self, thread: str, namespace: str, before: str | None = None
    ) -> Iterator[CheckpointRow]:
        """The checkpoints of one namespace, newest first."""
        found = self.checkpoints.scan(thread, namespace, before=before, reverse=True, page=32)
        return map(self.checkpoints.decode, found)

    def merged_rows(self, thread: str | None, before: str | None = None) -> Iterator[CheckpointRow]:
        """The checkpoints of all namespaces of a thread, or of all threads, newest first.

        Keeps one id for each namespace in memory, not its rows.
        """
        newest: list[tuple[_Descending, tuple[str, ...]]] = []
        for group in self.checkpoints.groups(2, *(() if thread is None else (thread,))):
            if (first := self._newest_id(group, before)) is not None:
                newest.append((_Descending(first), group))
        heapq.heapify(newest)
        while newest:
            (latest, group) = newest[0]
            row = self.find(CheckpointKey(group[0], group[1], latest.text))
            if row is not None:
                yield row
            if (following := self._newest_id(group, latest.text)) is None:
                heapq.heappop(newest)
            else:
                heapq.heapreplace(newest, (_Descending(following), group))

    def _newest_id(self, group: tuple[str, ...], before: str | None) -> str | None:
        for record in self.checkpoints.scan(*group, before=before, reverse=True, page=1):
            return record.key[2]
        return None

    def namespaces(self, thread: str) -> list[str]:
        """The namespaces in which a thread has checkpoints."""
        return [group[1] for group in self.checkpoints.groups(2, thread)]

    # --- reading ------------------------------------------------------------------------

    def read(self, rows: Sequence[CheckpointRow]) -> list[StoredCheckpoint]:
        """The checkpoints of rows, all at once; values of long channels stay links."""
        values = self.store.get_many([row.link.digest for row in rows])
        for value in values:
            if type(value) is not dict:
                raise CorruptionError("a row links to a value that is not a checkpoint")
        return [
            StoredCheckpoint(row, value, unpack_channels(value))
            for row, value in zip(rows, values, strict=True)
        ]

    def resolve(self, values: Iterable[Any]) -> list[Any]:
        """Stored forms with links followed, all at once."""
        known = list(values)
        places = [at for at, value in enumerate(known) if type(value) is Link]
        for at, value in zip(
            places, self.store.get_many([known[at].digest for at in places]), strict=True
        ):
            known[at] = value
        return known

    def pending(self, row: CheckpointRow) -> list[PendingRow]:
        """The pending writes of a checkpoint, in the order in which LangGraph applies them."""
        return sorted_writes(row.folded_writes, pending_by_task(self.writes.scan(*row.place)))

    # --- writing ------------------------------------------------------------------------

    def delete_checkpoint(self, draft: Draft, place: CheckpointKey) -> None:
        """Add to a write the deletion of a checkpoint and its pending writes."""
        draft.delete(self.checkpoints, place)
        for record in self.writes.scan(*place):
            draft.delete(self.writes, record.key)

    def delete_thread(self, draft: Draft, thread: str) -> None:
        """Add to a write the deletion of everything of a thread."""
        for table in (self.checkpoints, self.writes, self.heads):
            for record in table.scan(thread):
                draft.delete(table, record.key)


def pending_by_task(records: Iterable[Record]) -> dict[str, list[PendingRow]]:
    """The pending writes of rows, by their tasks."""
    return {record.key[3]: TASKS.read(record).pending() for record in records}


def sorted_writes(
    folded: Sequence[PendingRow], by_task: dict[str, list[PendingRow]]
) -> list[PendingRow]:
    """Merge folded writes and those of task rows; a task's row replaces its folded writes."""
    writes = [each for each in folded if each.task not in by_task]
    for own in by_task.values():
        writes += own
    return sorted(writes, key=lambda each: writes_sort_key(each.path, each.task, each.slot))


class _Descending:
    """A text with inverted sort order."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __lt__(self, other: _Descending) -> bool:
        return self.text > other.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]
