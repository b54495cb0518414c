"""Runs as a record system: its entries, check, unfinished deletions, and rows after a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.runs import copied
from casstore.records.runs.check import CODES, RunsCheck
from casstore.records.runs.layout import SCHEMAS, VERSION, RunTables
from casstore.records.runs.runs import Runs
from casstore.records.schema import tables_of
from casstore.session.records import Table
from casstore.store import Store


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
        return RunsCheck(store, facts).judges()

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove the rows that interrupted deletions have left; returns the number of threads."""
        return Runs(store).finish_deletions()

    def after_copy(self, source: Store, target: Store) -> int:
        """Delete index rows, requests and intents that newer rows contradict."""
        return copied.tidy(source, target)


SYSTEM: Final = RunsSystem()
