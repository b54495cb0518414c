"""Copying, pruning and deleting threads: rows change, payloads are neither read nor copied.

Each call is one write for each thread, done wholly or not at all. A checkpoint that stays while
its parent goes keeps what its delta channels need (``history.fold``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from casstore.adapters.langgraph.history import fold
from casstore.adapters.langgraph.layout import PendingRow, Place, pack_task, unpack_task
from casstore.adapters.langgraph.threads import CheckpointRow, Threads, sorted_writes
from casstore.errors import InvalidInputError
from casstore.session.attempts import transact
from casstore.session.records import Draft

KEEP_LATEST: Final = "keep_latest"
DELETE: Final = "delete"


def retry(what: str, attempt: Callable[[Draft], None], threads: Threads) -> None:
    """Repeat a write until no other writer has changed the rows that it was made from."""

    def write() -> None:
        draft = Draft(threads.store)
        attempt(draft)
        draft.commit()

    transact(what, write)


def delete_thread(threads: Threads, thread: str) -> None:
    """Take everything of a thread away."""
    draft = Draft(threads.store)
    threads.delete_thread(draft, thread)
    draft.commit()


def copy_thread(threads: Threads, source: str, target: str) -> None:
    """Give another thread all checkpoints and writes of this one, one row for each checkpoint."""
    if source == target:
        return
    retry(f"thread {source!r}", lambda draft: _copy(threads, source, target, draft), threads)


def _copy(threads: Threads, source: str, target: str, draft: Draft) -> None:
    tasks: dict[Place, dict[str, list[PendingRow]]] = defaultdict(dict)
    for record in threads.writes.scan(source):
        draft.expect(threads.writes, record.key, record)
        _, namespace, checkpoint, task = record.key
        tasks[Place(source, namespace, checkpoint)][task] = unpack_task(task, record.value)
    copied = False
    for record in threads.checkpoints.scan(source):
        place = Place(*record.key)
        moved = place._replace(thread=target)
        # A task's row in the target would count before what is folded into the copy.
        for stale in threads.writes.scan(*moved):
            draft.delete(threads.writes, stale.key)
        if place in tasks:
            row = threads.find(place)
            if row is None:
                continue
            draft.expect(threads.checkpoints, place, row.record)
            folded = row._replace(folded_writes=sorted_writes(row.folded_writes, tasks.pop(place)))
            draft.put(threads.checkpoints, moved, folded.content())
        else:
            draft.copy(threads.checkpoints, record, moved)
        copied = True
    for place, writes in tasks.items():
        # Writes may come before their checkpoint does.
        for task, own in writes.items():
            draft.put(threads.writes, (target, *place[1:], task), pack_task(own))
    if copied:
        # The copy has no writer yet that could be branched off from.
        for head in threads.heads.scan(target):
            draft.delete(threads.heads, head.key)


def prune(threads: Threads, thread_ids: Iterable[str], strategy: str) -> None:
    """Keep the latest checkpoint of each namespace of these threads, or none of them."""
    if strategy not in (KEEP_LATEST, DELETE):
        raise InvalidInputError(f"prune with {KEEP_LATEST!r} or {DELETE!r}, not {strategy!r}")
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
            # A task may have written when its checkpoint was gone already: nobody comes to that.
            for record in threads.writes.scan(thread, namespace, before=latest.place.checkpoint):
                if record.key[2] not in known:
                    draft.delete(threads.writes, record.key)

    retry(f"thread {thread!r}", attempt, threads)


def delete_for_runs(threads: Threads, runs: Collection[str]) -> None:
    """Take away the checkpoints of these runs, with their writes, in all threads.

    Reads the rows of all threads once, and no payload.
    """
    wanted = {str(run) for run in runs}
    if not wanted:
        return
    # Long texts leave a row: of a long id only what all such rows hold can be looked for.
    spelled = [run.encode() if len(run) < 128 else b"" for run in wanted]
    groups = {
        record.key[:2]
        for record in threads.checkpoints.scan()
        # A cheap look at the bytes first: most rows are of other runs.
        if not record.is_inline or any(run in record.row for run in spelled)
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
            # Whoever goes on from an earlier checkpoint now does what was asked for.
            draft.delete(threads.heads, (thread, namespace))

    retry(f"thread {thread!r}", attempt, threads)


def _expect_head(threads: Threads, draft: Draft, thread: str, namespace: str) -> None:
    """Let a write fail if a checkpoint comes that may need what the write takes away."""
    draft.expect(threads.heads, (thread, namespace), threads.heads.find(thread, namespace))


def _remove(
    threads: Threads, draft: Draft, gone: list[CheckpointRow], kept: list[CheckpointRow]
) -> None:
    """Add to a write: these go, and those of the others that lose their parent are prepared."""
    ids = {row.place.checkpoint for row in gone}
    for row in kept:
        if row.parent in ids:
            folded = row._replace(folded_history=fold(threads, threads.read([row])[0]))
            draft.expect(threads.checkpoints, row.place, row.record)
            draft.put(threads.checkpoints, row.place, folded.content())
    for row in gone:
        threads.delete_checkpoint(draft, row.place)
