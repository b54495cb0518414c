"""Threads: their checkpoints and writes as rows; finds, copies, prunes and deletes them.

Works on stored forms (``encoding``, ``layout``) and deserialises nothing: copying, pruning and
walking the history of a thread never import or call a type that a checkpoint names. Copying or
deleting a thread is one write, which neither reads nor copies payloads. Keeping the latest
checkpoints and deleting runs are one write for each namespace of a thread.

A delta channel stores no value at most steps; reading it replays the writes of its ancestors onto
the last stored value, the seed. Where ancestors were deleted, the row of the checkpoint below them
has the writes and the seed that the walk would have found there: the folded history.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from langgraph.checkpoint.base import writes_sort_key

from casstore.adapters.langgraph.layout import (
    CHECKPOINTS,
    HEADS,
    TASKS,
    Channel,
    CheckpointKey,
    CheckpointRow,
    PendingRow,
    TaskRow,
    unpack_channels,
)
from casstore.errors import CorruptionError
from casstore.format.canonical import Link
from casstore.records.schema import RowTable
from casstore.session.arguments import check_choice
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record
from casstore.store import Store

#: The strategies of ``Threads.prune``.
KEEP_LATEST: Final = "keep_latest"
DELETE: Final = "delete"


class StoredCheckpoint(NamedTuple):
    """A checkpoint with its row: values of channels are still stored forms or links."""

    row: CheckpointRow
    #: Its fields, in stored form.
    value: Mapping[str, Any]
    channels: dict[str, Channel]


class ChannelHistory(NamedTuple):
    """Writes of one channel, oldest first, as (task, stored value), and their starting value."""

    writes: list[tuple[str, Any]]
    has_seed: bool
    #: The value before the first write, in stored form or as a link to it.
    seed: Any


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
        groups = self.checkpoints.groups(2, *(() if thread is None else (thread,)))
        newest = [self._keys(group, before) for group in groups]
        for place in heapq.merge(*newest, key=lambda place: place.checkpoint, reverse=True):
            if (row := self.find(place)) is not None:
                yield row

    def _keys(self, group: tuple[str, ...], before: str | None) -> Iterator[CheckpointKey]:
        """The keys of the checkpoints of one namespace, newest first, read one at a time."""
        while (before := self._newest_id(group, before)) is not None:
            yield CheckpointKey(group[0], group[1], before)

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

    def values(self, stored: StoredCheckpoint) -> dict[str, Any]:
        """The values of a checkpoint's channels, in stored form, by name."""
        channels = {name: each.value for name, each in stored.channels.items() if each.has_value}
        return dict(zip(channels, self.resolve(channels.values()), strict=True))

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

    def histories(self, row: CheckpointRow, channels: Collection[str]) -> dict[str, ChannelHistory]:
        """The history of channels above a checkpoint, without its own writes."""
        walk = _ChannelWalk({channel: [] for channel in channels}, {})
        seen: set[str] = set()
        walk.end_at_fold(row)
        while walk.writes and row.parent is not None and row.parent not in seen:
            seen.add(row.parent)
            above = self.find(row.place._replace(checkpoint=row.parent))
            if above is None:
                break
            row = above
            for write in reversed(self.pending(row)):
                if write.channel in walk.writes:
                    walk.writes[write.channel].append((write.task, write.value))
            stored = self.read([row])[0].channels
            for channel in list(walk.writes):
                if channel in stored and stored[channel].has_value:
                    walk.end(channel, [], stored[channel].value)
            walk.end_at_fold(row)
        for channel in list(walk.writes):
            walk.end(channel, [])
        return walk.found

    # --- writing ------------------------------------------------------------------------

    def change(self, what: str, attempt: Callable[[Draft], None]) -> None:
        """Write what ``attempt`` drafts; retry while other writers change the rows it read."""

        def write() -> None:
            draft = Draft(self.store)
            attempt(draft)
            draft.commit()

        transact(what, write)

    def delete_checkpoint(self, draft: Draft, place: CheckpointKey) -> None:
        """Add to a write the deletion of a checkpoint and its pending writes."""
        draft.delete(self.checkpoints, place)
        _delete_all(draft, self.writes, *place)

    def delete_thread(self, thread: str) -> None:
        """Delete everything of a thread."""
        draft = Draft(self.store)
        for table in (self.checkpoints, self.writes, self.heads):
            _delete_all(draft, table, thread)
        draft.commit()

    def copy_thread(self, source: str, target: str) -> None:
        """Copy all checkpoints and writes of a thread to another, one row for each checkpoint."""
        if source != target:
            self.change(f"thread {source!r}", lambda draft: self._copy(draft, source, target))

    def _copy(self, draft: Draft, source: str, target: str) -> None:
        tasks: dict[CheckpointKey, dict[str, list[PendingRow]]] = defaultdict(dict)
        for record in self.writes.scan(source):
            draft.expect(self.writes, record.key, record)
            place, task = CheckpointKey(*record.key[:3]), record.key[3]
            tasks[place][task] = TASKS.read(record).pending()
        copied = False
        for record in self.checkpoints.scan(source):
            place = CheckpointKey(*record.key)
            moved = place._replace(thread=target)
            # A task's row in the target would take precedence over the writes folded into the copy.
            _delete_all(draft, self.writes, *moved)
            if place in tasks:
                row = self.find(place)
                if row is None:
                    continue
                draft.expect(self.checkpoints, place, row.record)
                folded = tuple(sorted_writes(row.folded_writes, tasks.pop(place)))
                self.checkpoints.put(draft, row._replace(place=moved, folded_writes=folded))
            else:
                draft.copy(self.checkpoints, record, moved)
            copied = True
        for place, writes in tasks.items():
            # Writes may be stored before their checkpoint.
            for task, own in writes.items():
                self.writes.put(draft, TaskRow.of(place._replace(thread=target), task, own))
        if copied:
            # Without heads, the first step that continues from any copied checkpoint is no branch.
            _delete_all(draft, self.heads, target)

    def prune(self, thread_ids: Iterable[str], strategy: str) -> None:
        """Keep only the latest checkpoint of each namespace of these threads, or delete all."""
        check_choice(strategy, "strategy", (KEEP_LATEST, DELETE))
        for thread in map(str, thread_ids):
            if strategy == DELETE:
                self.delete_thread(thread)
            else:
                for namespace in self.namespaces(thread):
                    self._keep_latest(thread, namespace)

    def _keep_latest(self, thread: str, namespace: str) -> None:
        def attempt(draft: Draft) -> None:
            self._expect_head(draft, thread, namespace)
            rows = iter(self.rows(thread, namespace))
            latest = next(rows, None)
            if latest is not None:
                gone = list(rows)
                self._remove(draft, gone, [latest])
                known = {row.place.checkpoint for row in gone}
                # Also delete writes that a task stored after its checkpoint was deleted: no reader
                # finds them.
                for record in self.writes.scan(thread, namespace, before=latest.place.checkpoint):
                    if record.key[2] not in known:
                        draft.delete(self.writes, record.key)

        self.change(f"thread {thread!r}", attempt)

    def delete_for_runs(self, runs: Collection[str]) -> None:
        """Delete the checkpoints of these runs, with their writes, in all threads.

        Reads the rows of all threads once, and no payload.
        """
        wanted = {str(run) for run in runs}
        if not wanted:
            return
        # Long texts are stored outside the row, so for a long id every row is a candidate.
        encoded = [run.encode() if len(run) < 128 else b"" for run in wanted]
        groups = {
            record.key[:2]
            for record in self.checkpoints.scan()
            # Compare the raw bytes first: most rows belong to other runs.
            if not record.is_inline or any(run in record.row for run in encoded)
        }
        for thread, namespace in sorted(groups):
            self._delete_runs(thread, namespace, wanted)

    def _delete_runs(self, thread: str, namespace: str, runs: set[str]) -> None:
        def attempt(draft: Draft) -> None:
            self._expect_head(draft, thread, namespace)
            rows = list(self.rows(thread, namespace))
            gone = [row for row in rows if row.run in runs]
            if gone:
                self._remove(draft, gone, [row for row in rows if row.run not in runs])
                # Without a head, a step that then continues from an earlier checkpoint is no
                # branch.
                draft.delete(self.heads, (thread, namespace))

        self.change(f"thread {thread!r}", attempt)

    def _expect_head(self, draft: Draft, thread: str, namespace: str) -> None:
        """Make a write fail if another writer adds a checkpoint that may need the deleted rows."""
        draft.expect(self.heads, (thread, namespace), self.heads.find(thread, namespace))

    def _remove(
        self, draft: Draft, gone: Sequence[CheckpointRow], kept: Iterable[CheckpointRow]
    ) -> None:
        """Add deletions to a write, and fold the history that the remaining checkpoints need."""
        ids = {row.place.checkpoint for row in gone}
        for row in kept:
            if row.parent in ids:
                draft.expect(self.checkpoints, row.place, row.record)
                self.checkpoints.put(draft, row._replace(folded_history=self._folded(row)))
        for row in gone:
            self.delete_checkpoint(draft, row.place)

    def _folded(self, row: CheckpointRow) -> dict[str, list[Any]]:
        """The folded history that a checkpoint needs when its ancestors are deleted, by channel.

        Covers every channel that has a version and no value: the store does not know which of them
        are delta channels, and the others have hardly any history.
        """
        channels = self.read([row])[0].channels
        wanted = [name for name, each in channels.items() if not each.has_value]
        folded: dict[str, list[Any]] = {}
        for name, history in self.histories(row, wanted).items():
            if history.writes or history.has_seed:
                writes = [list(write) for write in history.writes]
                folded[name] = [writes, history.seed] if history.has_seed else [writes]
        return folded


def _delete_all(draft: Draft, table: RowTable[Any], *prefix: str) -> None:
    """Add to a write the deletion of all rows whose keys start with ``prefix``."""
    for record in table.scan(*prefix):
        draft.delete(table, record.key)


class _ChannelWalk(NamedTuple):
    """What a walk up the history of channels has found so far, newest first."""

    writes: dict[str, list[tuple[str, Any]]]
    found: dict[str, ChannelHistory]

    def end(self, channel: str, older: list[tuple[str, Any]], *seed: Any) -> None:
        """End the search: ``older`` writes precede those found, and start from the seed."""
        writes = self.writes.pop(channel)
        writes.reverse()
        self.found[channel] = ChannelHistory(older + writes, bool(seed), seed[0] if seed else None)

    def end_at_fold(self, row: CheckpointRow) -> None:
        """End the search of the channels whose history is folded into a row."""
        for channel in list(self.writes):
            folded = row.folded_history.get(channel)
            if folded is None:
                continue
            try:
                older = [(task, value) for task, value in folded[0]]
            except (IndexError, TypeError, ValueError) as exc:
                raise CorruptionError(f"the folded history of {row.place} is damaged") from exc
            self.end(channel, older, *folded[1:])


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
