"""Rows of another store, inserted with their own times and numbers: for importers.

Each call is one write, into any number of threads. Rows that are already stored stay as they are;
``stored`` reads them for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import RecordNotFoundError
from casstore.records.runs.data import (
    Approval,
    Artifact,
    Event,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
    ThreadMessage,
)
from casstore.records.runs.names import check_id, check_path
from casstore.records.runs.tables import (
    NEXT,
    ApprovalRow,
    ArtifactRow,
    EventRow,
    RunRow,
    RunTables,
    ThreadMessageRow,
    ThreadRow,
)
from casstore.records.runs.working import Numbers
from casstore.records.schema import Key, RowPlace, RowTable, number_text
from casstore.session.attempts import transact
from casstore.session.records import Draft, find_records


class Made(NamedTuple):
    """An artifact with its content, and the size of the content in the other store."""

    artifact: Artifact
    content: Any
    size_bytes: int

    @property
    def thread(self) -> str:
        """The thread of the artifact."""
        return self.artifact.thread

    @property
    def run(self) -> str:
        """The run of the artifact."""
        return self.artifact.run


Item = Thread | Run | ThreadMessage | Event | Approval | RunRequest | RecoveryIntent | Made


def stored(tables: RunTables, items: Sequence[Item]) -> list[Any]:
    """The stored item under the key of each item, or None.

    Threads and runs are returned with counts of 0, as ``items`` have them, to compare them.
    """
    owners = _ThreadsAndRuns(tables, items)
    places = [_place(tables, owners, item) for item in items]
    known = iter(find_records(tables.store, [place for place in places if place is not None]))
    records = [None if place is None else next(known) for place in places]
    return [
        None if record is None or place is None else _public(owners, item, place[0].decode(record))
        for item, place, record in zip(items, places, records, strict=True)
    ]


def insert(tables: RunTables, items: Sequence[Item]) -> None:
    """Insert the items that are not stored yet; RecordNotFoundError without their thread or run."""
    transact("the runs of this store", lambda: _Insertion(tables, items).commit())


class _ThreadsAndRuns:
    """The current threads and runs that the items belong to."""

    def __init__(self, tables: RunTables, items: Iterable[Any]) -> None:
        runs = {run for run in map(_run_of, items) if run is not None}
        threads = {item.id if isinstance(item, Thread) else item.thread for item in items}
        wanted: list[RowPlace] = [tables.stamp_place, (tables.counter, (NEXT,))]
        wanted += [(tables.threads, (check_id(name, "a thread"),)) for name in sorted(threads)]
        wanted += [(tables.runs, (check_id(name, "a run"),)) for name in sorted(runs)]
        self.stamp, self.counter, *found = find_records(tables.store, wanted)
        tables.is_stamped(self.stamp)
        self.records = dict(zip(sorted(threads), found, strict=False))
        self.threads = {
            name: tables.threads.decode(record)
            for name, record in self.records.items()
            if record is not None
        }
        self.runs = {
            record.key[0]: tables.runs.decode(record)
            for record in found[len(threads) :]
            if record is not None
        }

    def thread(self, name: str) -> ThreadRow:
        """A thread, or RecordNotFoundError."""
        if name not in self.threads:
            raise RecordNotFoundError("thread", name)
        return self.threads[name]

    def run(self, name: str, thread: str) -> RunRow:
        """A run of a thread, or RecordNotFoundError."""
        row = self.runs.get(name)
        if row is None or row.run.thread != thread:
            raise RecordNotFoundError("run", name, f"in thread {thread!r}")
        return row


def _run_of(item: Any) -> str | None:
    if isinstance(item, Thread):
        return None
    run: str | None = item.id if isinstance(item, Run) else item.run
    return run


class _Insertion:
    """Items that one write inserts."""

    def __init__(self, tables: RunTables, items: Sequence[Item]) -> None:
        self._tables = tables
        self._owners = owners = _ThreadsAndRuns(tables, items)
        self._threads_before = dict(owners.threads)
        self._runs_before = dict(owners.runs)
        self._numbers = Numbers(tables, owners.counter)
        self._draft = Draft(tables.store)
        # Read after the owners: a writer that puts an item changes its thread, and this write
        # fails. A thread put twice would get another key, and lose all rows under the first.
        for item, there in zip(items, stored(tables, items), strict=True):
            if there is None:
                _PUT[type(item)](self, item)

    def commit(self) -> None:
        """Write everything in one transaction."""
        draft, owners, tables = self._draft, self._owners, self._tables
        tables.expect_stamp(draft, owners.stamp)
        for name, row in owners.threads.items():
            draft.expect(tables.threads, (name,), owners.records[name])
            row = row._replace(revision=row.revision + 1)
            tables.threads.put(draft, row, self._threads_before.get(name))
        for name, run in owners.runs.items():
            tables.runs.put(draft, run, self._runs_before.get(name))
        self._numbers.finish(draft)
        draft.commit()

    def _count(self, thread: str, **more: int) -> None:
        row = self._owners.thread(thread)
        counts = {name: getattr(row.thread, name) + number for name, number in more.items()}
        self._owners.threads[thread] = row._replace(thread=row.thread._replace(**counts))

    def thread(self, thread: Thread) -> None:
        """Put a thread; the last thread put is the first in order of change."""
        key, order = number_text(self._numbers.take()), self._numbers.take()
        self._owners.threads[thread.id] = ThreadRow(thread, key, order)

    def run(self, run: Run) -> None:
        """Put a run with its own number; the last run put is the first in order of change."""
        thread = self._owners.thread(run.thread)
        key, order = number_text(self._numbers.take()), self._numbers.take()
        self._owners.runs[run.id] = RunRow(run, key, thread.key, order)
        if thread.thread.latest_run == run.id:
            self._owners.threads[run.thread] = thread._replace(latest=run.number)
        self._count(run.thread, runs=1)

    def message(self, message: ThreadMessage) -> None:
        """Put a message with its own number."""
        thread = self._owners.thread(message.thread)
        self._tables.messages.put(self._draft, ThreadMessageRow(thread.key, *message[1:]))
        self._count(message.thread, messages=1)

    def event(self, event: Event) -> None:
        """Put an event with its own sequence."""
        row = self._owners.run(event.run, event.thread)
        self._tables.events.put(self._draft, EventRow(row.key, *event[2:]))
        last = event.sequence if row.last_sequence is None else row.last_sequence
        run = row.run._replace(events=row.run.events + 1)
        row = row._replace(run=run, last_sequence=max(last, event.sequence))
        self._owners.runs[event.run] = row
        self._count(event.thread, events=1)

    def approval(self, approval: Approval) -> None:
        """Put an approval after those put before."""
        row = self._owners.run(approval.run, approval.thread)
        new = ApprovalRow(approval, row.thread_key, self._numbers.take())
        self._tables.approvals.put(self._draft, new)
        self._count(approval.thread, approvals=1)

    def request(self, request: RunRequest) -> None:
        """Put a request."""
        self._owners.run(request.run, request.thread)
        self._tables.requests.put(self._draft, request)

    def intent(self, intent: RecoveryIntent) -> None:
        """Put a recovery intent."""
        self._owners.run(intent.run, intent.thread)
        self._tables.intents.put(self._draft, intent)

    def made(self, made: Made) -> None:
        """Put an artifact with its content and its own number."""
        artifact = made.artifact
        row = self._owners.run(artifact.run, artifact.thread)
        check_path(artifact.path)
        self._draft.keep_blob(made.content) if artifact.is_blob else self._draft.keep(made.content)
        self._tables.artifacts.put(self._draft, ArtifactRow.of(row.key, artifact))
        run = row.run._replace(artifacts=max(row.run.artifacts, artifact.number))
        self._owners.runs[artifact.run] = row._replace(run=run)
        self._count(artifact.thread, artifacts=1)


# --- the place of each kind of item, and how it is read back --------------------------------------


def _place(
    tables: RunTables, owners: _ThreadsAndRuns, item: Any
) -> tuple[RowTable[Any], Key] | None:
    """The table and key under which an item is stored; None if its thread or run is missing."""
    match item:
        case Thread():
            return tables.threads, (item.id,)
        case Run():
            return tables.runs, (item.id,)
        case Approval():
            return tables.approvals, (check_id(item.id, "an approval"),)
        case RunRequest():
            return tables.requests, (item.run,)
        case RecoveryIntent():
            return tables.intents, (item.run,)
        case ThreadMessage():
            thread = owners.threads.get(item.thread)
            if thread is None:
                return None
            return tables.messages, (thread.key, number_text(item.number))
    run = owners.runs.get(_run_of(item) or "")
    if run is None:
        return None
    if isinstance(item, Event):
        return tables.events, (run.key, number_text(item.sequence))
    return tables.artifacts, (run.key, number_text(item.artifact.number))


def _public(owners: _ThreadsAndRuns, item: Any, row: Any) -> Any:
    """The stored row of an item as an item."""
    match row:
        case ThreadRow():
            return row.thread._replace(runs=0, messages=0, events=0, artifacts=0, approvals=0)
        case RunRow():
            return row.run._replace(events=0, artifacts=0)
        case ApprovalRow():
            return row.approval
        case ThreadMessageRow():
            return row.public(item.thread)
        case EventRow() | ArtifactRow():
            return row.public(owners.runs[str(_run_of(item))].run)
    return row


_PUT: Final[dict[type, Callable[[_Insertion, Any], None]]] = {
    Thread: _Insertion.thread,
    Run: _Insertion.run,
    ThreadMessage: _Insertion.message,
    Event: _Insertion.event,
    Approval: _Insertion.approval,
    RunRequest: _Insertion.request,
    RecoveryIntent: _Insertion.intent,
    Made: _Insertion.made,
}
