"""The schemas of runs: threads, runs and what belongs to them.

    runs.schema            "runs"               the family and version of the rows
    runs.counter           "next"               the next number to issue
    runs.threads           thread               the thread, with its counts
    runs.thread_order      number               index of threads, in order of change
    runs.runs              run                  the run
    runs.run_order         number               index of runs, in order of change
    runs.thread_runs       thread key, number   index of runs, in order of beginning
    runs.events            run key, sequence    the event
    runs.messages          thread key, number   the message
    runs.approvals         approval             the approval
    runs.approval_order    number               index of approvals, in order of request
    runs.thread_approvals  thread key, number   the same, by thread
    runs.pending           number               index of approvals that are not resolved
    runs.requests          run                  the request: what to run
    runs.intents           run                  the recovery intent: how to resume
    runs.artifacts         run key, number      the artifact, with a link to its content
    runs.artifact_paths    run key, path        index of artifacts
    runs.deleted           thread key           the run keys of a deleted thread, if rows are left

The **key** of a thread or run is a number that is issued only once. A thread or run that takes the
id of a deleted one has another key, so it never finds rows that the deletion has left.

Every write to a thread, or to anything in it, changes the thread's row. A write that makes this row
a condition therefore fails if anything that it has read of the thread has changed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.errors import RecordsSchemaError
from casstore.format.digest import Digest
from casstore.records.runs.data import (
    PENDING,
    Approval,
    Artifact,
    Event,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
    ThreadMessage,
)
from casstore.records.schema import Index, Parent, RowPlace, RowTable, Schema
from casstore.session.records import Draft, Record, Table
from casstore.session.state import runtime_of
from casstore.store import Store

FAMILY: Final = "casstore.runs"
VERSION: Final = 1
#: The keys of the only row of ``runs.counter``, and of the only row of ``runs.schema``.
NEXT: Final = "next"
_STAMP: Final = "runs"


class StampRow(NamedTuple):
    """The family and version of all rows."""

    name: str
    family: Any
    version: Any


class CounterRow(NamedTuple):
    """The next number to issue as a key or a position in an order."""

    name: str
    next: int


class ThreadRow(NamedTuple):
    """A thread, its key and its position in the order of change."""

    thread: Thread
    key: str
    order: int
    #: The number of the latest run in the thread; 0: no run yet.
    latest: int = 0
    #: Counts the writes, so that every write changes the row.
    revision: int = 0


class RunRow(NamedTuple):
    """A run, its key, that of its thread, and its position in the order of change."""

    run: Run
    key: str
    thread_key: str
    order: int
    #: The highest sequence so far; None: there are no events.
    last_sequence: int | None = None


class ApprovalRow(NamedTuple):
    """An approval, the key of its thread, and its position in the order of requests."""

    approval: Approval
    thread_key: str
    order: int


class EventRow(NamedTuple):
    """An event of the run with this key."""

    run_key: str
    sequence: int
    event: Any
    created_at_ms: int

    def public(self, run: Run) -> Event:
        """The event as callers see it."""
        return Event(run.thread, run.id, *self[1:])


class ThreadMessageRow(NamedTuple):
    """A message of the thread with this key."""

    thread_key: str
    number: int
    role: str
    content: Any
    run: str | None
    created_at_ms: int

    def public(self, thread: str) -> ThreadMessage:
        """The message as callers see it."""
        return ThreadMessage(thread, *self[1:])


class ArtifactRow(NamedTuple):
    """An artifact of the run with this key."""

    run_key: str
    number: int
    id: str
    kind: str
    path: str
    digest: Digest
    is_blob: bool
    created_at_ms: int

    @staticmethod
    def of(run_key: str, artifact: Artifact) -> ArtifactRow:
        """The row of an artifact."""
        return ArtifactRow(run_key, artifact.number, *artifact[2:-1])

    def public(self, run: Run) -> Artifact:
        """The artifact as callers see it."""
        return Artifact(run.thread, run.id, *self[2:], self.number)


class DeletedRow(NamedTuple):
    """The key of a deleted thread, and those of its runs: rows under these are to be removed."""

    key: str
    runs: tuple[str, ...]


STAMP: Final = Schema("runs.schema", StampRow, 1)
COUNTER: Final = Schema("runs.counter", CounterRow, 1)


def _given(row: Any, counter: CounterRow) -> bool:
    return bool(row.order < counter.next)


THREADS: Final[Schema[ThreadRow]] = Schema(
    "runs.threads",
    ThreadRow,
    1,
    indexes=[Index("runs.thread_order", 1, lambda row: [(row.order,)])],
    parents=[Parent(STAMP, lambda _: (_STAMP,)), Parent(COUNTER, lambda _: (NEXT,), _given)],
)
RUNS: Final[Schema[RunRow]] = Schema(
    "runs.runs",
    RunRow,
    1,
    indexes=[
        Index("runs.run_order", 1, lambda row: [(row.order,)]),
        Index("runs.thread_runs", 2, lambda row: [(row.thread_key, row.run.number)]),
    ],
    parents=[
        Parent(
            THREADS,
            lambda row: (row.run.thread,),
            lambda row, thread: bool(thread.key == row.thread_key),
        ),
        Parent(COUNTER, lambda _: (NEXT,), _given),
    ],
)


def _of_run(row: Any, run: RunRow) -> bool:
    return bool(run.run.thread == row.thread)


APPROVALS: Final[Schema[ApprovalRow]] = Schema(
    "runs.approvals",
    ApprovalRow,
    1,
    indexes=[
        Index("runs.approval_order", 1, lambda row: [(row.order,)]),
        Index("runs.thread_approvals", 2, lambda row: [(row.thread_key, row.order)]),
        Index(
            "runs.pending",
            1,
            lambda row: [(row.order,)] if row.approval.status == PENDING else [],
        ),
    ],
    parents=[
        Parent(
            RUNS,
            lambda row: (row.approval.run,),
            lambda row, run: bool(run.thread_key == row.thread_key),
        ),
        Parent(COUNTER, lambda _: (NEXT,), _given),
    ],
)
EVENTS: Final = Schema("runs.events", EventRow, 2)
MESSAGES: Final = Schema("runs.messages", ThreadMessageRow, 2)
REQUESTS: Final[Schema[RunRequest]] = Schema(
    "runs.requests", RunRequest, 1, parents=[Parent(RUNS, lambda row: (row.run,), _of_run)]
)
INTENTS: Final[Schema[RecoveryIntent]] = Schema(
    "runs.intents", RecoveryIntent, 1, parents=[Parent(RUNS, lambda row: (row.run,), _of_run)]
)
ARTIFACTS: Final = Schema(
    "runs.artifacts",
    ArtifactRow,
    2,
    # Artifacts that were imported may share a path.
    indexes=[Index("runs.artifact_paths", 2, lambda row: [(row.run_key, row.path)], unique=False)],
)
DELETED: Final = Schema("runs.deleted", DeletedRow, 1)
SCHEMAS: Final = (
    STAMP, COUNTER, THREADS, RUNS, APPROVALS, EVENTS, MESSAGES, REQUESTS, INTENTS, ARTIFACTS,
    DELETED,
)  # fmt: skip


class RunTables:
    """The tables of runs in one store, and the stamp with the family and version of its rows.

    The first write stamps a store that has no rows of runs. Rows without a stamp, or with another
    one, are refused before anything is written.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stamp = RowTable(store, STAMP)
        self.runtime = runtime_of(store)
        self.counter = RowTable(store, COUNTER)
        self.threads = RowTable(store, THREADS)
        [self.thread_order] = self.threads.indexes
        self.runs = RowTable(store, RUNS)
        [self.run_order, self.thread_runs] = self.runs.indexes
        self.approvals = RowTable(store, APPROVALS)
        [self.approval_order, self.thread_approvals, self.pending] = self.approvals.indexes
        self.events = RowTable(store, EVENTS)
        self.messages = RowTable(store, MESSAGES)
        self.requests = RowTable(store, REQUESTS)
        self.intents = RowTable(store, INTENTS)
        self.artifacts = RowTable(store, ARTIFACTS)
        [self.artifact_paths] = self.artifacts.indexes
        self.deleted = RowTable(store, DELETED)
        #: The place of the stamp, to read it with other rows for ``is_stamped``, ``expect_stamp``.
        self.stamp_place: RowPlace = (self.stamp, (_STAMP,))

    def is_stamped(self, stamp: Record | None) -> bool:
        """True if the store has runs; RecordsSchemaError if their family or version differs."""
        if stamp is None:
            self._require_empty()
            return False
        row = self.stamp.decode(stamp)
        if row[1:] != (FAMILY, VERSION):
            raise self._refusal(f"runs of family {row.family!r}, version {row.version!r}")
        return True

    def expect_stamp(self, draft: Draft, stamp: Record | None) -> None:
        """Make the stamp a condition of a draft; stamp a store that has none."""
        draft.expect(*self.stamp_place, stamp)
        if stamp is None:
            self.stamp.put(draft, StampRow(_STAMP, FAMILY, VERSION))

    def _require_empty(self) -> None:
        """RecordsSchemaError if a store without a stamp has rows of runs."""
        tables = [table for table in vars(self).values() if isinstance(table, Table)]
        if all(next(table.scan(page=1), None) is None for table in tables):
            return
        if self.stamp.find(_STAMP) is None:
            raise self._refusal("rows of runs without family and version")
        # Another process has stamped the store since the stamp was read. A write of this process
        # fails on its condition then, and a read returns what was stored at that time.

    def _refusal(self, found: str) -> RecordsSchemaError:
        # Not every engine has a path.
        path: str = getattr(self.store.engine, "path", "this store")
        return RecordsSchemaError(path, found, f"family {FAMILY!r}, version {VERSION!r}")
