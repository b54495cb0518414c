"""Runs as a record system: entries, check, unfinished deletions, and rows after a copy.

The check compares counts, the state of the latest run in its thread, and protections. The schemas
check the rest: every row decodes and agrees with its indexes and parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from casstore.engine.protocol import RowKey
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, WARNING, Meaning, Where
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.runs.runs import Runs
from casstore.records.runs.tables import (
    RUNS,
    SCHEMAS,
    THREADS,
    VERSION,
    RunRow,
    RunTables,
    ThreadRow,
)
from casstore.records.runs.working import protected_revision, protector
from casstore.records.schema import IndexTable, RowTable, tables_of
from casstore.records.schema_check import judges
from casstore.session import keys
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, Table
from casstore.session.state import decode_head
from casstore.store import Store

_PAGE: Final = 256
#: The row that contradicts a record; None: no row does.
_Contradiction = Callable[[Record], Record | None]

RUN_MIRROR_WRONG: Final = "run_mirror_wrong"
PROTECTION_MISSING: Final = "protection_missing"

#: Findings that only this check reports.
CODES: Final = {
    PROTECTION_MISSING: Meaning(
        ERROR, "a run can resume from a revision that it does not protect, or that is gone",
        "call Runs.renew_protections, which also returns the runs whose checkpoint is gone",
    ),
    RUN_MIRROR_WRONG: Meaning(
        WARNING, "a thread shows another state than its latest run has",
        "set the state of that run once more: the thread follows",
    ),
}  # fmt: skip


class RunsSystem(RecordSystem):
    """Threads of agents, with their runs, events, messages, approvals and artifacts."""

    name = "runs"
    version = VERSION
    title = "Runs"
    tables = tables_of(*SCHEMAS)
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """A page of the threads, by id."""
        tables = RunTables(store)
        found: list[SystemEntry] = []
        for (name,) in entry_keys(tables.threads, 1, after=after, limit=limit):
            row = tables.threads.get(name)
            if row is None:
                continue
            thread = row.thread
            title = f"{thread.agent}, {thread.status or 'no run yet'}"
            size_bytes = tables.threads.size_bytes(name)
            of_thread: list[Table] = [tables.messages, tables.thread_runs, tables.thread_approvals]
            size_bytes += sum([table.size_bytes(row.key) for table in of_thread])
            for entry in tables.thread_runs.scan(row.key):
                run = tables.runs.get(*tables.thread_runs.leads_to(entry))
                if run is not None:
                    size_bytes += tables.runs.size_bytes(run.run.id)
                    of_run: list[Table] = [tables.events, tables.artifacts, tables.artifact_paths]
                    size_bytes += sum([table.size_bytes(run.key) for table in of_run])
            found.append(SystemEntry(name, title, thread.updated_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Check that threads agree with their runs, and that runs protect their checkpoints."""
        own = RunsCheck(store, facts)
        tables = [RowTable(store, schema) for schema in SCHEMAS]
        return judges(store, facts, tables, {RUNS: own.run}, {THREADS: own.thread})

    def expire(self, store: Store, progress: Callable[[int], None]) -> int:
        """Remove the rows that interrupted deletions have left; returns the number of threads."""
        return Runs(store).finish_deletions()

    def after_copy(self, source: Store, target: Store) -> int:
        """Delete index rows, requests and intents that newer rows contradict."""
        return tidy(source, target)


# --- the check ------------------------------------------------------------------------------------


class RunsCheck:
    """Checks the records of runs."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = RunTables(store)
        self._facts = facts

    def thread(self, row: ThreadRow) -> Iterator[Wrong]:
        """Compare the counts and the latest run of a thread with its rows."""
        tables, thread = self._tables, row.thread
        where = where_is(tables.threads, [thread.id])
        title = f"thread {thread.id!r}"
        counted = dict.fromkeys(("runs", "events", "artifacts"), 0)
        latest: RunRow | None = None
        for entry in tables.thread_runs.scan(row.key):
            counted["runs"] += 1
            run = tables.runs.get(*tables.thread_runs.leads_to(entry))
            if run is None or entry.key not in tables.thread_runs.keys_of(run):
                continue  # reported by the check of the index
            if run.run.number == row.latest:
                latest = run
            yield from self._counts_of_run(run)
            counted["events"] += run.run.events
            counted["artifacts"] += sum(1 for _ in tables.artifacts.scan(run.key))
        counted["messages"] = sum(1 for _ in tables.messages.scan(row.key))
        counted["approvals"] = sum(1 for _ in tables.thread_approvals.scan(row.key))
        for what, number in counted.items():
            count = getattr(thread, what)
            if count != number:
                says = f"{title} counts {count} {what}, and has {number}"
                yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        if latest is not None and (thread.latest_run, thread.status) != (
            latest.run.id,
            latest.run.state,
        ):
            says = (
                f"{title} shows run {thread.latest_run!r} as {thread.status!r}; its latest is "
                f"{latest.run.id!r}, {latest.run.state!r}"
            )
            yield Wrong(RUN_MIRROR_WRONG, says, where)
        if latest is None and thread.latest_run is not None and row.latest:
            says = f"{title} shows run {thread.latest_run!r}, which it does not have"
            yield Wrong(codes.RECORD_INDEX_WRONG, says, where)

    def _counts_of_run(self, row: RunRow) -> Iterator[Wrong]:
        tables, run = self._tables, row.run
        where = where_is(tables.runs, [run.id])
        count, last = 0, None
        for event in tables.events.rows(row.key):
            count, last = count + 1, event.sequence
        if (count, last) != (run.events, row.last_sequence):
            says = (
                f"run {run.id!r} counts {run.events} events up to {row.last_sequence}, and has "
                f"{count} up to {last}"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        number = 0
        for artifact in tables.artifacts.rows(row.key):
            number = artifact.number
        if number != run.artifacts:
            says = f"run {run.id!r} has artifacts up to {number}, and counts {run.artifacts}"
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    def run(self, record: Record, row: RunRow) -> None:
        """Check that a run protects the revision that it can resume from."""
        protected = protected_revision(row.run)
        if protected is None:
            return
        session, revision = protected
        run, own = row.run.id, self._tables.runs.place(*record.key)
        key = keys.session_key(session)
        places = [
            own,
            keys.protection(key, revision, protector(run)),
            RowKey("heads", key),
            RowKey("history", keys.history(key, revision)),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            found, protection, head, earlier = values
            title = f"run {run!r} can resume from revision {revision} of session {session!r}"
            if found != record.row:
                return None
            if earlier is None and (head is None or decode_head(head).revision != revision):
                return f"{title}, which is gone"
            return f"{title}, and does not protect it" if protection is None else None

        where = Where(session, revision, None, own.table, own.key)
        self._facts.ask(PROTECTION_MISSING, where, places, judge)


# --- rows after a copy ----------------------------------------------------------------------------


def tidy(source: Store, target: Store) -> int:
    """Delete the rows of the target that its newer rows contradict; returns how many.

    A copy puts rows and deletes none, because the target may have rows of its own. But since an
    older copy, a thread or run may have moved to another key of its order index, an approval may
    have been resolved, and a request or intent deleted.
    """
    there, here = RunTables(source), RunTables(target)

    def stale(index: IndexTable[Any], table: RowTable[Any]) -> _Contradiction:
        def judge(entry: Record) -> Record | None:
            owner = table.find(*index.leads_to(entry))
            is_stale = owner is not None and entry.key not in index.keys_of(table.decode(owner))
            return owner if is_stale else None

        return judge

    def deleted(table: Table) -> _Contradiction:
        def judge(entry: Record) -> Record | None:
            if table.find(*entry.key) is not None:
                return None
            run = here.runs.get(*entry.key)
            if run is None:
                return None
            own, others = here.threads.find(run.run.thread), there.threads.find(run.run.thread)
            # Every write in a thread changes the thread's row. If that is the same in both stores,
            # no writer in the target has put this record since the copy.
            is_same = own is not None and others is not None and own.row == others.row
            return own if is_same else None

        return judge

    threads, runs, approvals = here.threads, here.runs, here.approvals
    return (
        _remove(target, here.thread_order, threads, stale(here.thread_order, threads))
        + _remove(target, here.run_order, runs, stale(here.run_order, runs))
        + _remove(target, here.pending, approvals, stale(here.pending, approvals))
        + _remove(target, here.requests, threads, deleted(there.requests))
        + _remove(target, here.intents, threads, deleted(there.intents))
    )


def _remove(store: Store, table: Table, owners: Table, judge: _Contradiction) -> int:
    """Delete the records of a table that a row of ``owners`` contradicts; returns how many."""

    def attempt(page: list[Record]) -> int:
        draft = Draft(store)
        count = 0
        for entry in table.find_many([listed.key for listed in page]):
            owner = None if entry is None else judge(entry)
            if entry is not None and owner is not None:
                # A writer in the target that puts another record under this key changes the owner.
                draft.expect(owners, owner.key, owner)
                draft.delete(table, entry.key)
                count += 1
        if count:
            draft.commit()
        return count

    removed = 0
    entries = table.scan()
    while page := list(islice(entries, _PAGE)):
        removed += transact("the runs of this store", partial(attempt, page))
    return removed


SYSTEM: Final = RunsSystem()
