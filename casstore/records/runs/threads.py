"""Threads: made in one write, and deleted so that they are gone at once.

The write that deletes takes the thread, its runs, approvals, requests and intents, and everything
by which anybody could come to the rest: after it the thread is gone for everybody. If there
are few events, messages and artifacts they go in the same write. If there are many, the write
leaves a note of where they lie, and they follow in batches: here, or by whoever finds the note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import CorruptionError, RecordConflictError
from casstore.records.runs import layout
from casstore.records.runs.data import Thread
from casstore.records.runs.layout import COUNTER, ApprovalRow, RunRow, ThreadRow
from casstore.records.runs.names import check_id, check_time, number_text
from casstore.records.runs.working import Ground, Numbers, Place, protected_revision, protector
from casstore.session import protection
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, Table, find_records

# So many rows of events, messages and artifacts go along with the write that deletes.
_AT_ONCE_ROWS: Final = 2000
_BATCH_ROWS: Final = 1000
_PAGE: Final = 256


def create(ground: Ground, thread: str, *, agent: str, workspace: str, at_ms: int | None) -> Thread:
    """Make a thread; what is there if it is there with the same agent and workspace."""
    now_ms = check_time(at_ms, ground.store.engine.now_ms())
    check_id(thread, "a thread")
    check_id(agent, "an agent")
    check_id(workspace, "a workspace")
    there = transact(
        "the runs of this store", lambda: _create(ground, thread, agent, workspace, now_ms)
    )
    if (there.agent, there.workspace) != (agent, workspace):
        raise RecordConflictError("thread", thread, "is there with another agent or workspace")
    return there


def _create(ground: Ground, thread: str, agent: str, workspace: str, now_ms: int) -> Thread:
    tables, schema = ground.tables, ground.schema
    own: Place = (tables.threads, (thread,))
    places = [*schema.places, (tables.counter, COUNTER), own]
    family, version, counter, record = find_records(ground.store, places)
    schema.is_stamped(family, version)
    if record is not None:
        return layout.read_thread(record).thread
    fresh = Thread(thread, workspace, agent, None, None, now_ms, now_ms, 0, 0, 0, 0, 0)
    numbers = Numbers(tables, counter)
    key, order = number_text(numbers.take()), numbers.take()
    draft = Draft(ground.store)
    schema.expect(draft, family, version)
    draft.put(tables.threads, (thread,), layout.pack_thread(ThreadRow(fresh, key, order, 0, 0)))
    draft.put(tables.thread_order, (number_text(order),), thread)
    numbers.finish(draft)
    draft.commit()
    return fresh


# --- deleting -------------------------------------------------------------------------------------


def delete(ground: Ground, thread: str) -> bool:
    """Take a thread away with everything in it; False if it is not there."""
    check_id(thread, "a thread")
    done = transact(f"thread {thread!r}", lambda: _delete(ground, thread))
    if done is None:
        return False
    if done.is_left:
        finish(ground, done.key)
    return True


class _Deleted(NamedTuple):
    """A thread that was deleted. Are rows left that nobody comes to any more?"""

    key: str
    is_left: bool


def _delete(ground: Ground, thread: str) -> _Deleted | None:
    tables, schema = ground.tables, ground.schema
    places: list[Place] = [*schema.places, (tables.threads, (thread,))]
    family, version, record = find_records(ground.store, places)
    schema.is_stamped(family, version)
    if record is None:
        return None
    row = layout.read_thread(record)
    runs, approvals = _runs(ground, row), _approvals(ground, row)
    draft = Draft(ground.store)
    schema.expect(draft, family, version)
    draft.expect(tables.threads, (thread,), record)
    draft.delete(tables.threads, (thread,))
    draft.delete(tables.thread_order, (number_text(row.order),))
    for run in runs:
        _delete_run(ground, draft, row, run)
    for approval in approvals:
        order = number_text(approval.order)
        draft.delete(tables.approvals, (approval.approval.id,))
        draft.delete(tables.approval_order, (order,))
        draft.delete(tables.pending, (order,))
        draft.delete(tables.thread_approvals, (row.key, order))
    counts = row.thread
    complete = len(runs) == counts.runs and len(approvals) == counts.approvals
    rest = counts.events + counts.messages + 2 * counts.artifacts
    run_keys = [run.key for run in runs]
    if rest > _AT_ONCE_ROWS:
        draft.put(tables.deleted, (row.key,), {"runs": run_keys})
    else:
        found = list(_rest(ground, row.key, run_keys))
        # Two artifacts that came from elsewhere may have one path.
        counted = [place for place in found if place[0] is not tables.artifact_paths]
        complete = complete and len(counted) == rest - counts.artifacts
        for table, key in found:
            draft.delete(table, key)
    if not complete and _is_same(tables.threads.find(thread), record):
        # What is not known is never taken for nothing.
        raise CorruptionError(f"thread {thread!r} has lost some of its rows; check the store")
    draft.commit()
    return _Deleted(row.key, rest > _AT_ONCE_ROWS)


def _is_same(found: Record | None, record: Record) -> bool:
    return found is not None and found.row == record.row


def _runs(ground: Ground, row: ThreadRow) -> list[RunRow]:
    names = [layout.read_text(each, "run") for each in ground.tables.thread_runs.scan(row.key)]
    found: list[RunRow] = []
    for start in range(0, len(names), _PAGE):
        page = [(name,) for name in names[start : start + _PAGE]]
        records = ground.tables.runs.find_many(page)
        found += [layout.read_run(record) for record in records if record is not None]
    return found


def _approvals(ground: Ground, row: ThreadRow) -> list[ApprovalRow]:
    entries = ground.tables.thread_approvals.scan(row.key)
    names = [layout.read_text(each, "approval") for each in entries]
    found: list[ApprovalRow] = []
    for start in range(0, len(names), _PAGE):
        page = [(name,) for name in names[start : start + _PAGE]]
        records = ground.tables.approvals.find_many(page)
        found += [layout.read_approval(record) for record in records if record is not None]
    return found


def _delete_run(ground: Ground, draft: Draft, thread: ThreadRow, row: RunRow) -> None:
    tables, run = ground.tables, row.run
    draft.delete(tables.runs, (run.id,))
    draft.delete(tables.run_order, (number_text(row.order),))
    draft.delete(tables.thread_runs, (thread.key, number_text(run.number)))
    draft.delete(tables.requests, (run.id,))
    draft.delete(tables.intents, (run.id,))
    kept = protected_revision(run)
    if kept is not None:
        released = protection.release(kept.session, kept.revision, by=protector(run.id))
        draft.also(Write(rows=[released]))


def _rest(
    ground: Ground, thread: str, runs: Sequence[str]
) -> Iterator[tuple[Table, tuple[str, ...]]]:
    """The rows that lie under the keys of a thread and its runs."""
    tables = ground.tables
    for run in runs:
        for table in (tables.events, tables.artifacts, tables.artifact_paths):
            for record in table.scan(run):
                yield table, record.key
    for record in tables.messages.scan(thread):
        yield tables.messages, record.key


def finish(ground: Ground, key: str) -> None:
    """Remove what is left of a deleted thread, in batches."""
    note = ground.tables.deleted.find(key)
    if note is None:
        return  # somebody else was quicker
    rest = _rest(ground, key, layout.read_deleted(note).runs)
    while batch := list(islice(rest, _BATCH_ROWS)):
        draft = Draft(ground.store)
        for table, place in batch:
            draft.delete(table, place)
        draft.commit()
    draft = Draft(ground.store)
    draft.delete(ground.tables.deleted, (key,))
    draft.commit()


def unfinished(ground: Ground) -> list[str]:
    """The keys of deleted threads that have something left."""
    return [record.key[0] for record in ground.tables.deleted.scan()]
