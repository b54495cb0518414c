"""Threads in a store: rows and links of checkpoints and writes, nothing deserialised.

Everything here works on stored forms (``encoding``, ``layout``): copying, pruning and walking
the history of a thread never import or call what a checkpoint names.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from langgraph.checkpoint.base import writes_sort_key

from casstore.adapters.langgraph.layout import (
    Channel,
    PendingRow,
    Place,
    pack_writes,
    unpack_channels,
    unpack_task,
    unpack_writes,
)
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.session.records import Draft, Record, Table
from casstore.store import Store


class CheckpointRow(NamedTuple):
    """The row of a checkpoint."""

    place: Place
    record: Record
    link: Link
    parent: str | None
    run: str | None
    #: Writes of tasks that have no row of their own: those of a copied checkpoint.
    folded_writes: list[PendingRow]
    #: What delta channels need of ancestors that are gone, by channel: [writes, seed?].
    folded_history: dict[str, list[Any]]

    def content(self) -> dict[str, Any]:
        """What the row holds."""
        return row_content(
            self.link, self.parent, self.run, self.folded_writes, self.folded_history
        )


class StoredCheckpoint(NamedTuple):
    """A checkpoint with its row: values of channels are still stored forms or links."""

    row: CheckpointRow
    value: dict[str, Any]

    @property
    def channels(self) -> dict[str, Channel]:
        """Its channels."""
        return unpack_channels(self.value)


def row_content(
    link: Link,
    parent: str | None,
    run: str | None,
    writes: Sequence[PendingRow] = (),
    history: dict[str, list[Any]] | None = None,
) -> dict[str, Any]:
    """What the row of a checkpoint holds."""
    content: dict[str, Any] = {"c": link}
    if parent is not None:
        content["p"] = parent
    if run is not None:
        content["r"] = run
    if writes:
        content["w"] = pack_writes(writes)
    if history:
        content["h"] = history
    return content


class Threads:
    """The rows of all threads of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.checkpoints = Table(store, "lg.checkpoints", 3)
        self.writes = Table(store, "lg.writes", 4)
        self.heads = Table(store, "lg.heads", 2)

    # --- finding ------------------------------------------------------------------------

    def find(self, place: Place) -> CheckpointRow | None:
        """The row of one checkpoint."""
        record = self.checkpoints.find(*place)
        return None if record is None else checkpoint_row(record)

    def find_latest(self, thread: str, namespace: str) -> CheckpointRow | None:
        """The row of the checkpoint with the highest id."""
        for record in self.checkpoints.scan(thread, namespace, reverse=True, page=1):
            return checkpoint_row(record)
        return None

    def rows(
        self, thread: str, namespace: str, before: str | None = None
    ) -> Iterator[CheckpointRow]:
        """The checkpoints of one namespace, newest first."""
        found = self.checkpoints.scan(thread, namespace, before=before, reverse=True, page=32)
        return map(checkpoint_row, found)

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
            row = self.find(Place(group[0], group[1], latest.text))
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
                raise CorruptionError("a row leads to something that is no checkpoint")
        return [StoredCheckpoint(*each) for each in zip(rows, values, strict=True)]

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
        return sorted_writes(row.folded_writes, unpack_tasks(self.writes.scan(*row.place)))

    # --- writing ------------------------------------------------------------------------

    def delete_checkpoint(self, draft: Draft, place: Place) -> None:
        """Add to a write: a checkpoint and its pending writes go."""
        draft.delete(self.checkpoints, place)
        for record in self.writes.scan(*place):
            draft.delete(self.writes, record.key)

    def delete_thread(self, draft: Draft, thread: str) -> None:
        """Add to a write: everything of a thread goes."""
        for table in (self.checkpoints, self.writes, self.heads):
            for record in table.scan(thread):
                draft.delete(table, record.key)


def unpack_tasks(records: Iterable[Record]) -> dict[str, list[PendingRow]]:
    """The pending writes of rows, by their tasks."""
    return {record.key[3]: unpack_task(record.key[3], record.value) for record in records}


def sorted_writes(
    folded: Sequence[PendingRow], by_task: dict[str, list[PendingRow]]
) -> list[PendingRow]:
    """Folded writes and those of tasks' rows together; a task's row counts for all of it."""
    writes = [each for each in folded if each.task not in by_task]
    for own in by_task.values():
        writes += own
    return sorted(writes, key=lambda each: writes_sort_key(each.path, each.task, each.slot))


class _Descending:
    """A text that sorts the other way round."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __lt__(self, other: _Descending) -> bool:
        return self.text > other.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


def checkpoint_row(record: Record) -> CheckpointRow:
    """The row of a checkpoint, as it was found."""
    content = record.value
    try:
        link, parent, run = content["c"], content.get("p"), content.get("r")
        if (type(link), type(parent or ""), type(run or "")) != (Link, str, str):
            raise TypeError(content)
        return CheckpointRow(
            Place(*record.key),
            record,
            link,
            parent,
            run,
            unpack_writes(content.get("w", ())),
            dict(content.get("h", {})),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise CorruptionError(f"the row of checkpoint {record.key} is damaged") from exc
