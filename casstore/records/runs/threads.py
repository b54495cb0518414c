"""Threads: created in one write, and deleted in one write.

The write that deletes a thread removes its row, its runs, approvals, requests and intents, and the
index rows that lead to them: after it no reader finds the thread. Events, messages and artifacts go
in the same write if they are few. If they are many, the write leaves a row in ``runs.deleted``, and
they are removed in batches: by this call, or by ``finish_deletions`` if this call is interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import CorruptionError, RecordConflictError
from casstore.records.runs.data import Run, Thread
from casstore.records.runs.names import check_id, check_time
from casstore.records.runs.tables import NEXT, DeletedRow, RunTables, ThreadRow
from casstore.records.runs.working import Numbers, protected_revision, protector
from casstore.records.schema import RowPlace, number_text
from casstore.session import protection
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, find_records

# If a thread has more rows of events, messages and artifacts, later writes remove them in batches.
_AT_ONCE_ROWS: Final = 2000
_BATCH_ROWS: Final = 1000


def create(
    tables: RunTables, thread: str, *, agent: str, workspace: str, at_ms: int | None
) -> Thread:
    """Create a thread, or return the one that exists with the same agent and workspace."""
    now_ms = check_time(at_ms, tables.store.engine.now_ms())
    check_id(thread, "a thread")
    check_id(agent, "an agent")
    check_id(workspace, "a workspace")
    fresh = Thread(
        id=thread,
        workspace=workspace,
        agent=agent,
        status=None,
        latest_run=None,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        runs=0,
        messages=0,
        events=0,
        artifacts=0,
        approvals=0,
    )

    def attempt() -> Thread:
        places = [tables.stamp_place, (tables.counter, (NEXT,)), (tables.threads, (thread,))]
        stamp, counter, record = find_records(tables.store, places)
        tables.is_stamped(stamp)
        if record is not None:
            return tables.threads.decode(record).thread
        numbers = Numbers(tables, counter)
        draft = Draft(tables.store)
        tables.expect_stamp(draft, stamp)
        tables.threads.put(draft, ThreadRow(fresh, number_text(numbers.take()), numbers.take()))
        numbers.finish(draft)
        draft.commit()
        return fresh

    there = transact("the runs of this store", attempt)
    if (there.agent, there.workspace) != (agent, workspace):
        raise RecordConflictError("thread", thread, "exists with another agent or workspace")
    return there


# --- deleting -------------------------------------------------------------------------------------


def delete(tables: RunTables, thread: str) -> bool:
    """Delete a thread with everything in it; False if it does not exist."""
    check_id(thread, "a thread")
    done = transact(f"thread {thread!r}", lambda: _delete(tables, thread))
    if done is None:
        return False
    if done.is_left:
        finish(tables, done.key)
    return True


class _DeletedThread(NamedTuple):
    """A thread that was deleted, and whether rows under its keys are left."""

    key: str
    is_left: bool


def _delete(tables: RunTables, thread: str) -> _DeletedThread | None:
    places: list[RowPlace] = [tables.stamp_place, (tables.threads, (thread,))]
    stamp, record = find_records(tables.store, places)
    tables.is_stamped(stamp)
    if record is None:
        return None
    row = tables.threads.decode(record)
    of_thread = tables.runs.indexed(tables.thread_runs, row.key)
    runs = [tables.runs.decode(record) for record in of_thread]
    of_thread = tables.approvals.indexed(tables.thread_approvals, row.key)
    approvals = [tables.approvals.decode(record) for record in of_thread]
    draft = Draft(tables.store)
    tables.expect_stamp(draft, stamp)
    draft.expect(tables.threads, (thread,), record)
    tables.threads.remove(draft, row)
    for run in runs:
        tables.runs.remove(draft, run)
        draft.delete(tables.requests, (run.run.id,))
        draft.delete(tables.intents, (run.run.id,))
        _release(draft, run.run)
    for approval in approvals:
        tables.approvals.remove(draft, approval)
    counts = row.thread
    complete = len(runs) == counts.runs and len(approvals) == counts.approvals
    rest = counts.events + counts.messages + 2 * counts.artifacts
    run_keys = [run.key for run in runs]
    if rest > _AT_ONCE_ROWS:
        tables.deleted.put(draft, DeletedRow(row.key, tuple(run_keys)))
    else:
        found = list(_rest(tables, row.key, run_keys))
        # Imported artifacts may share a path, so rows of that index are not counted.
        counted = [place for place in found if place[0] is not tables.artifact_paths]
        complete = complete and len(counted) == rest - counts.artifacts
        for table, key in found:
            draft.delete(table, key)
    if not complete and _is_same(tables.threads.find(thread), record):
        # Refuse to delete: the rows that cannot be found now would stay in the store, unreachable.
        raise CorruptionError(f"thread {thread!r} has lost some of its rows; check the store")
    draft.commit()
    return _DeletedThread(row.key, rest > _AT_ONCE_ROWS)


def _is_same(found: Record | None, record: Record) -> bool:
    return found is not None and found.row == record.row


def _release(draft: Draft, run: Run) -> None:
    protected = protected_revision(run)
    if protected is not None:
        released = protection.release(protected.session, protected.revision, by=protector(run.id))
        draft.also(Write(rows=[released]))


def _rest(tables: RunTables, thread: str, runs: Sequence[str]) -> Iterator[RowPlace]:
    """The rows under the keys of a thread and its runs."""
    for run in runs:
        for table in (tables.events, tables.artifacts, tables.artifact_paths):
            for record in table.scan(run):
                yield table, record.key
    for record in tables.messages.scan(thread):
        yield tables.messages, record.key


def finish(tables: RunTables, key: str) -> None:
    """Remove the rows that a deleted thread has left, in batches."""
    row = tables.deleted.get(key)
    if row is None:
        return  # another process has removed them
    rest = _rest(tables, key, row.runs)
    while batch := list(islice(rest, _BATCH_ROWS)):
        draft = Draft(tables.store)
        for table, place in batch:
            draft.delete(table, place)
        draft.commit()
    draft = Draft(tables.store)
    draft.delete(tables.deleted, (key,))
    draft.commit()


def finish_all(tables: RunTables) -> int:
    """Remove the rows that deleted threads have left; returns the number of threads."""
    keys = [record.key[0] for record in tables.deleted.scan()]
    for key in keys:
        finish(tables, key)
    return len(keys)
