"""A thread at work: its rows as they were read, and as steps have changed them, into one write.

The thread's row is expected to be as it was read, and that stands for everything below it
(``layout``). What threads share is expected by itself: the stamp, and the counter of numbers by
whoever takes one. All new threads, runs and approvals do; so nobody else has given their
names meanwhile, in whatever thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from casstore.engine.protocol import Write
from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.records.runs import layout
from casstore.records.runs.data import (
    COMMITTED,
    KEEP,
    Artifact,
    CheckpointRef,
    Event,
    NewCheckpoint,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    Thread,
)
from casstore.records.runs.layout import COUNTER, ApprovalRow, RunRow, Tables
from casstore.records.runs.names import check_id, check_number, check_time, number_text
from casstore.records.runs.schema import Schema
from casstore.session import protection
from casstore.session.attempts import read_again
from casstore.session.records import Draft, Record, Table, find_records
from casstore.session.state import Runtime
from casstore.store import Store

Place = tuple[Table, tuple[str, ...]]


class Ground(NamedTuple):
    """What all operations on the runs of a store stand on."""

    store: Store
    tables: Tables
    schema: Schema
    runtime: Runtime


def ground_of(store: Store) -> Ground:
    """The ground in a store; nothing is read or written yet."""
    tables = Tables(store)
    return Ground(store, tables, Schema(store, tables), Runtime(store))


class Numbers:
    """Numbers that are given once, and rise; written back with the draft that uses them."""

    def __init__(self, tables: Tables, record: Record | None) -> None:
        self._tables = tables
        self._record = record
        self._first = 1 if record is None else layout.read_number(record, "counter")
        self._next = self._first

    def take(self) -> int:
        """A number that nobody else gets, higher than all before."""
        self._next += 1
        return self._next - 1

    def finish(self, draft: Draft) -> None:
        """Let the write fail if others have taken numbers since, and keep what was taken."""
        if self._next != self._first:
            draft.expect(self._tables.counter, COUNTER, self._record)
            draft.put(self._tables.counter, COUNTER, self._next)


class Working:
    """The rows of one thread, of one moment, and what becomes of them."""

    def __init__(
        self,
        ground: Ground,
        thread: str,
        places: Sequence[Place],
        committed: SessionCheckpoint | None = None,
    ) -> None:
        self.ground = ground
        self.tables = ground.tables
        self.draft = Draft(ground.store)
        self.now_ms = ground.store.engine.now_ms()
        #: The revision that the commit will make which this goes beside.
        self._committed = committed
        schema = ground.schema
        own = (ground.tables.threads, (thread,))
        wanted = [*schema.places, (ground.tables.counter, COUNTER), own, *places]
        family, version, counter, record, *found = find_records(ground.store, wanted)
        schema.is_stamped(family, version)
        if record is None:
            raise RecordNotFoundError("thread", thread)
        self._stamp = family, version
        self._record = record
        self._found = {
            (table.keys.start, key): each for (table, key), each in zip(places, found, strict=True)
        }
        self.numbers = Numbers(self.tables, counter)
        self._before = self._row = layout.read_thread(record)
        self._runs_before: dict[str, RunRow] = {}
        self._runs: dict[str, RunRow] = {}
        self._approvals: dict[str, ApprovalRow | None] = {}
        self._intents: dict[str, RecoveryIntent | None] = {}
        self._requests: dict[str, bool] = {}
        self._renewed: set[str] = set()
        #: What was added here, and cannot be read yet: events by run key and sequence, artifacts
        #: by run key and path.
        self.new_events: dict[tuple[str, int], Event] = {}
        self.new_artifacts: dict[tuple[str, str], Artifact] = {}
        #: Has anything changed?
        self.is_changed = False

    # --- as it is after the steps so far ------------------------------------------------------

    @property
    def thread(self) -> Thread:
        """The thread."""
        return self._row.thread

    @property
    def key(self) -> str:
        """Under which the thread's messages and orders lie."""
        return self._row.key

    @property
    def latest(self) -> int:
        """The number of the latest run."""
        return self._row.latest

    def run(self, run: str) -> RunRow:
        """A run of the thread, or RecordNotFoundError."""
        row = self.find_run(run)
        if row is None or row.run.thread != self.thread.id:
            raise RecordNotFoundError("run", run, f"in thread {self.thread.id!r}")
        return row

    def find_run(self, run: str) -> RunRow | None:
        """A run, also of another thread; None if there is none."""
        if run not in self._runs:
            record = self._found[self.tables.runs.keys.start, (run,)]
            if record is None:
                return None
            self._runs[run] = self._runs_before[run] = layout.read_run(record)
        return self._runs[run]

    def find_approval(self, approval: str) -> ApprovalRow | None:
        """An approval, also of another thread; None if there is none."""
        if approval not in self._approvals:
            record = self._found[self.tables.approvals.keys.start, (approval,)]
            self._approvals[approval] = None if record is None else layout.read_approval(record)
        return self._approvals[approval]

    def find_intent(self, run: str) -> RecoveryIntent | None:
        """The intent of a run; None if there is none."""
        if run not in self._intents:
            record = self._found[self.tables.intents.keys.start, (run,)]
            self._intents[run] = None if record is None else layout.read_intent(record)
        return self._intents[run]

    def has_request(self, run: str) -> bool:
        """Is it kept what to run?"""
        if run not in self._requests:
            record = self._found[self.tables.requests.keys.start, (run,)]
            self._requests[run] = record is not None
        return self._requests[run]

    def checkpoint(self, new: NewCheckpoint, current: CheckpointRef | None) -> CheckpointRef | None:
        """What a reference is from now on."""
        if new is KEEP:
            return current
        if new is COMMITTED and self._committed is not None:
            return self._committed
        if new is COMMITTED:
            raise InvalidInputError(
                "COMMITTED goes with Runs.commit, and a commit that says which revision it expected"
            )
        if isinstance(new, SessionCheckpoint):
            check_id(new.session, "a session")
            check_number(new.revision, "a revision")
        elif new == "":
            return None
        elif new is not None:
            check_id(new, "a checkpoint")
        return new

    def time_of(self, at_ms: int | None) -> int:
        """The time that a step gives, or now."""
        return check_time(at_ms, self.now_ms)

    # --- changing -----------------------------------------------------------------------

    def put(self, table: Table, key: tuple[str, ...], value: Any) -> None:
        """Write a row."""
        self.draft.put(table, key, value)
        self.is_changed = True

    def delete(self, table: Table, key: tuple[str, ...]) -> None:
        """Remove a row."""
        self.draft.delete(table, key)
        self.is_changed = True

    def change_thread(self, *, latest: int | None = None, moves: bool = False, **to: Any) -> None:
        """Change fields of the thread; if it ``moves``, it is the one that changed last."""
        order = self.numbers.take() if moves else self._row.order
        number = self._row.latest if latest is None else latest
        thread = self._row.thread._replace(**to)
        self._row = self._row._replace(thread=thread, order=order, latest=number)
        self.is_changed = True

    def put_run(self, row: RunRow) -> None:
        """Let this be how a run is."""
        self._runs[row.run.id] = row
        self.is_changed = True

    def renew_protection(self, run: str) -> None:
        """Let the checkpoint of a run be protected again, if it should be."""
        self._renewed.add(run)
        self.is_changed = True

    def put_approval(self, row: ApprovalRow) -> None:
        """Let this be how an approval is."""
        self._approvals[row.approval.id] = row
        self.put(self.tables.approvals, (row.approval.id,), layout.pack_approval(row))

    def put_intent(self, run: str, intent: RecoveryIntent | None) -> None:
        """Let this be how to go on with a run."""
        self._intents[run] = intent
        if intent is None:
            self.delete(self.tables.intents, (run,))
        else:
            self.put(self.tables.intents, (run,), layout.pack_intent(intent))

    def put_request(self, run: str, request: RunRequest | None) -> None:
        """Let this be what to run."""
        self._requests[run] = request is not None
        if request is None:
            self.delete(self.tables.requests, (run,))
        else:
            self.put(self.tables.requests, (run,), layout.pack_request(request))

    # --- into the write -------------------------------------------------------------------

    def finish(self) -> Draft:
        """Everything as one write."""
        draft, tables = self.draft, self.tables
        self.ground.schema.expect(draft, *self._stamp)
        draft.expect(tables.threads, self._record.key, self._record)
        for run, row in self._runs.items():
            old = self._runs_before.get(run)
            if row != old:
                self._finish_run(old, row)
            if run in self._renewed:
                self._protect(None, row.run)
        if self._row.order != self._before.order:
            draft.delete(tables.thread_order, (number_text(self._before.order),))
            draft.put(tables.thread_order, (number_text(self._row.order),), self.thread.id)
        thread = self._row._replace(revision=self._before.revision + 1)
        draft.put(tables.threads, self._record.key, layout.pack_thread(thread))
        self.numbers.finish(draft)
        return draft

    def _finish_run(self, old: RunRow | None, row: RunRow) -> None:
        draft, tables, run = self.draft, self.tables, row.run
        if old is None:
            draft.put(tables.thread_runs, (self.key, number_text(run.number)), run.id)
        if old is None or old.order != row.order:
            if old is not None:
                draft.delete(tables.run_order, (number_text(old.order),))
            draft.put(tables.run_order, (number_text(row.order),), run.id)
        draft.put(tables.runs, (run.id,), layout.pack_run(row))
        self._protect(None if old is None else old.run, run)

    def _protect(self, old: Run | None, new: Run) -> None:
        """Let the checkpoint that a run may come back to stay, and no other."""
        before = None if old is None else protected_revision(old)
        after = protected_revision(new)
        if before == after:
            return
        by = protector(new.id)
        if before is not None:
            released = protection.release(before.session, before.revision, by=by)
            self.draft.also(Write(rows=[released]))
        if after is not None and after == self._committed:
            self.draft.also(Write(rows=protection.changes(after.session, after.revision, by=by)))
        elif after is not None:
            _, write = read_again(
                partial(protection.plan, self.ground.runtime, after.session, after.revision, by=by)
            )
            self.draft.also(write)


def protector(run: str) -> str:
    """By which name a run protects its checkpoint."""
    return f"run {run}"


def protected_revision(run: Run) -> SessionCheckpoint | None:
    """The revision of a session that a run protects."""
    if run.protected and isinstance(run.checkpoint, SessionCheckpoint):
        return run.checkpoint
    return None
