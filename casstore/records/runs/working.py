"""One thread during a write: its rows as they were read, and as the steps change them.

The write makes the row of the thread a condition, which covers all that belongs to the thread
(``tables``). Rows that threads share are conditions of their own: the stamp, and the counter when
the write takes a number. Every new thread, run and approval takes one, so no other writer can have
used their ids meanwhile, in any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from casstore.engine.protocol import Write
from casstore.errors import InvalidInputError, RecordNotFoundError
from casstore.records.runs.data import (
    COMMITTED,
    KEEP,
    Artifact,
    CheckpointRef,
    Event,
    NewCheckpoint,
    Run,
    SessionCheckpoint,
    Thread,
)
from casstore.records.runs.names import check_id, check_number, check_time
from casstore.records.runs.tables import NEXT, CounterRow, RunRow, RunTables
from casstore.records.schema import R, RowPlace, RowTable
from casstore.session import protection
from casstore.session.records import Draft, Record, find_records


class Numbers:
    """Issues ascending numbers, each only once: ``finish`` stores the next number."""

    def __init__(self, tables: RunTables, record: Record | None) -> None:
        self._tables = tables
        self._record = record
        self._first = 1 if record is None else tables.counter.decode(record).next
        self._next = self._first

    def take(self) -> int:
        """A number that no other writer gets, higher than all before."""
        self._next += 1
        return self._next - 1

    def finish(self, draft: Draft) -> None:
        """Store the numbers taken, under the condition that no other writer has taken any."""
        if self._next != self._first:
            draft.expect(self._tables.counter, (NEXT,), self._record)
            self._tables.counter.put(draft, CounterRow(NEXT, self._next))


class Working:
    """The rows of one thread, read in one transaction, and what the steps make of them."""

    def __init__(
        self,
        tables: RunTables,
        thread: str,
        places: Sequence[RowPlace],
        committed: SessionCheckpoint | None = None,
    ) -> None:
        self.tables = tables
        self.draft = Draft(tables.store)
        self.now_ms = tables.store.engine.now_ms()
        #: The revision that the commit in the same write creates.
        self._committed = committed
        own: RowPlace = (tables.threads, (thread,))
        wanted = [tables.stamp_place, (tables.counter, (NEXT,)), own, *places]
        stamp, counter, record, *found = find_records(tables.store, wanted)
        tables.is_stamped(stamp)
        if record is None:
            raise RecordNotFoundError("thread", thread)
        self._stamp = stamp
        self._record = record
        self._found = {
            (table.keys.start, key): each for (table, key), each in zip(places, found, strict=True)
        }
        self.numbers = Numbers(tables, counter)
        self._before = self._row = tables.threads.decode(record)
        self._runs_before: dict[str, RunRow] = {}
        self._runs: dict[str, RunRow] = {}
        #: Approvals, requests and intents, by table and id.
        self._rows: dict[tuple[bytes, str], Any] = {}
        self._renewed: set[str] = set()
        #: Rows of this write, which cannot be read yet: events by run key and sequence, artifacts
        #: by run key and path.
        self.new_events: dict[tuple[str, int], Event] = {}
        self.new_artifacts: dict[tuple[str, str], Artifact] = {}
        #: True once a step has changed anything.
        self.is_changed = False

    # --- the rows after the steps so far --------------------------------------------------------

    @property
    def thread(self) -> Thread:
        """The thread."""
        return self._row.thread

    @property
    def key(self) -> str:
        """The key of the thread: the start of the keys of its messages and index rows."""
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
        """A run, also of another thread, or None."""
        if run not in self._runs:
            record = self._found[self.tables.runs.keys.start, (run,)]
            if record is None:
                return None
            self._runs[run] = self._runs_before[run] = self.tables.runs.decode(record)
        return self._runs[run]

    def find(self, table: RowTable[R], name: str) -> R | None:
        """An approval, also of another thread, or the request or intent of a run; None without."""
        start = table.keys.start
        if (start, name) not in self._rows:
            self._rows[start, name] = table.decode_found(self._found[start, (name,)])
        row: R | None = self._rows[start, name]
        return row

    def has(self, table: RowTable[Any], name: str) -> bool:
        """Whether ``find`` finds a row; does not decode it."""
        start = table.keys.start
        return self._rows.get((start, name), self._found[start, (name,)]) is not None

    def checkpoint(self, new: NewCheckpoint, current: CheckpointRef | None) -> CheckpointRef | None:
        """The reference that replaces ``current`` when a step gives ``new``."""
        if new is KEEP:
            return current
        if new is COMMITTED and self._committed is not None:
            return self._committed
        if new is COMMITTED:
            raise InvalidInputError(
                "COMMITTED is allowed only in Runs.commit, with a change that has expected=REVISION"
            )
        if isinstance(new, SessionCheckpoint):
            check_id(new.session, "a session")
            check_number(new.revision, "revision")
        elif new == "":
            return None
        elif new is not None:
            check_id(new, "a checkpoint")
        return new

    def time_of(self, at_ms: int | None) -> int:
        """The time that a step gives, or now."""
        return check_time(at_ms, self.now_ms)

    # --- changing -----------------------------------------------------------------------

    def change_thread(self, *, latest: int | None = None, moves: bool = False, **to: Any) -> None:
        """Change fields of the thread; if it ``moves``, it becomes the first in order of change."""
        order = self.numbers.take() if moves else self._row.order
        number = self._row.latest if latest is None else latest
        thread = self._row.thread._replace(**to)
        self._row = self._row._replace(thread=thread, order=order, latest=number)
        self.is_changed = True

    def put_run(self, row: RunRow) -> None:
        """Replace a run, or add one."""
        self._runs[row.run.id] = row
        self.is_changed = True

    def renew_protection(self, run: str) -> None:
        """Protect the checkpoint of a run again, if it needs protection."""
        self._renewed.add(run)
        self.is_changed = True

    def put(self, table: RowTable[R], name: str, row: R) -> None:
        """Replace an approval, request or intent, or add one."""
        table.put(self.draft, row, self._rows.get((table.keys.start, name)))
        self._rows[table.keys.start, name] = row
        self.is_changed = True

    def delete(self, table: RowTable[Any], name: str) -> None:
        """Delete a request or an intent."""
        self.draft.delete(table, (name,))
        self._rows[table.keys.start, name] = None
        self.is_changed = True

    # --- the write --------------------------------------------------------------------------------

    def finish(self) -> Draft:
        """All changes as one draft."""
        draft, tables = self.draft, self.tables
        tables.expect_stamp(draft, self._stamp)
        draft.expect(tables.threads, self._record.key, self._record)
        for run, row in self._runs.items():
            old = self._runs_before.get(run)
            if row != old:
                tables.runs.put(draft, row, old)
                self._protect(None if old is None else old.run, row.run)
            if run in self._renewed:
                self._protect(None, row.run)
        thread = self._row._replace(revision=self._before.revision + 1)
        tables.threads.put(draft, thread, self._before)
        self.numbers.finish(draft)
        return draft

    def _protect(self, old: Run | None, new: Run) -> None:
        """Protect the checkpoint that a run can resume from, and release the one before."""
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
            runtime = self.tables.runtime
            _, write = protection.plan(runtime, after.session, after.revision, by=by)
            self.draft.also(write)


def protector(run: str) -> str:
    """The name under which a run protects its checkpoint."""
    return f"run {run}"


def protected_revision(run: Run) -> SessionCheckpoint | None:
    """The revision of a session that a run protects."""
    if run.protected and isinstance(run.checkpoint, SessionCheckpoint):
        return run.checkpoint
    return None
