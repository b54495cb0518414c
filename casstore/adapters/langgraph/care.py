"""Copies, prunes and deletes threads: changes rows, and neither reads nor copies payloads.

Copying or deleting a thread is one write. Keeping the latest checkpoints and deleting runs are one
write for each namespace of a thread. A checkpoint whose parent is deleted keeps the history that
its delta channels need (``history.fold``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from casstore.adapters.langgraph.history import fold
from casstore.adapters.langgraph.layout import (
    TASKS,
    CheckpointKey,
    CheckpointRow,
    PendingRow,
    TaskRow,
)
from casstore.adapters.langgraph.threads import Threads, sorted_writes
from casstore.errors import InvalidInputError
from casstore.session.attempts import transact
from casstore.session.records import Draft

KEEP_LATEST: Final = "keep_latest"
DELETE: Final = "delete"


def retry(what: str, attempt: Callable[[Draft], None], threads: Threads) -> None:
    """Retry a write until no other writer has changed the rows that it is based on."""

    def write() -> None:
        draft = Draft(threads.store)
        attempt(draft)
        draft.commit()

    transact(what, write)


def delete_thread(threads: Threads, thread: str) -> None:
    """Delete everything of a thread."""
    draft = Draft(threads.store)
    threads.delete_thread(draft, thread)
    draft.commit()


def copy_thread(threads: Threads, source: str, target: str) -> None:
    """Copy all checkpoints and writes of a thread to another, one row for each checkpoint."""
    if source == target:
        return
    retry(f"thread {source!r}", lambda draft: _copy(threads, source, target, draft), threads)


def _copy(threads: Threads, source: str, target: str, draft: Draft) -> None:
    tasks: dict[CheckpointKey, dict[str, list[PendingRow]]] = defaultdict(dict)
    for record in threads.writes.scan(source):
        draft.expect(threads.writes, record.key, record)
        _, namespace, checkpoint, task = record.key
        tasks[CheckpointKey(source, namespace, checkpoint)][task] = TASKS.read(record).pending()
    copied = False
    for record in threads.checkpoints.scan(source):
        place = CheckpointKey(*record.key)
        moved = place._replace(thread=target)
        # A task's row in the target would take precedence over the writes folded into the copy.
        for stale in threads.writes.scan(*moved):
            draft.delete(threads.writes, stale.key)
        if place in tasks:
            row = threads.find(place)
            if row is None:
                continue
            draft.expect(threads.checkpoints, place, row.record)
            folded = tuple(sorted_writes(row.folded_writes, tasks.pop(place)))
            threads.checkpoints.put(draft, row._replace(place=moved, folded_writes=folded))
        else:
            draft.copy(threads.checkpoints, record, moved)
        copied = True
    for place, writes in tasks.items():
        # Writes may be stored before their checkpoint.
        for task, own in writes.items():
            threads.writes.put(draft, TaskRow.of(place._replace(thread=target), task, own))
    if copied:
        # Without heads, the first step that continues from any copied checkpoint is no branch.
        for head in threads.heads.scan(target):
            draft.delete(threads.heads, head.key)


def prune(threads: Threads, thread_ids: Iterable[str], strategy: str) -> None:
    """Keep only the latest checkpoint of each namespace of these threads, or delete all."""
    if strategy not in (KEEP_LATEST, DELETE):
        raise InvalidInputError(f"strategy must be {KEEP_LATEST!r} or {DELETE!r}, got {strategy!r}")
    for thread in thread_ids:
        if strategy == DELETE:
            delete_thread(threads, str(thread))
        else:
            for namespace in threads.namespaces(str(thread)):
                _keep_latest(threads, str(thread), namespace)


def _keep_latest(threads: Threads, thread: str, namespace: str) -> None:
    def attempt(draft: Draft) -> None:
        _expect_head(threads, draft, thread, namespace)
        rows = iter(threads.rows(thread, namespace))
        latest = next(rows, None)
        if latest is not None:
            gone = list(rows)
            _remove(threads, draft, gone, [latest])
            known = {row.place.checkpoint for row in gone}
            # Also delete writes that a task stored after its checkpoint was deleted: no reader
            # finds them.
            for record in threads.writes.scan(thread, namespace, before=latest.place.checkpoint):
                if record.key[2] not in known:
                    draft.delete(threads.writes, record.key)

    retry(f"thread {thread!r}", attempt, threads)


def delete_for_runs(threads: Threads, runs: Collection[str]) -> None:
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
        for record in threads.checkpoints.scan()
        # Compare the raw bytes first: most rows belong to other runs.
        if not record.is_inline or any(run in record.row for run in encoded)
    }
    for thread, namespace in sorted(groups):
        _delete_runs(threads, thread, namespace, wanted)


def _delete_runs(threads: Threads, thread: str, namespace: str, runs: set[str]) -> None:
    def attempt(draft: Draft) -> None:
        _expect_head(threads, draft, thread, namespace)
        rows = list(threads.rows(thread, namespace))
        gone = [row for row in rows if row.run in runs]
        if gone:
            _remove(threads, draft, gone, [row for row in rows if row.run not in runs])
            # Without a head, a step that then continues from an earlier checkpoint is no branch.
            draft.delete(threads.heads, (thread, namespace))

    retry(f"thread {thread!r}", attempt, threads)


def _expect_head(threads: Threads, draft: Draft, thread: str, namespace: str) -> None:
    """Make a write fail if another writer adds a checkpoint that may need the deleted rows."""
    draft.expect(threads.heads, (thread, namespace), threads.heads.find(thread, namespace))


def _remove(
    threads: Threads, draft: Draft, gone: list[CheckpointRow], kept: list[CheckpointRow]
) -> None:
    """Add deletions to a write, and fold the history that the remaining checkpoints need."""
    ids = {row.place.checkpoint for row in gone}
    for row in kept:
        if row.parent in ids:
            folded = row._replace(folded_history=fold(threads, threads.read([row])[0]))
            draft.expect(threads.checkpoints, row.place, row.record)
            threads.checkpoints.put(draft, folded)
    for row in gone:
        threads.delete_checkpoint(draft, row.place)
