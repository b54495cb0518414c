"""Runs as a record system: threads, their check, deletions cut short, and rows after a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_keys
from casstore.records.runs import copied, layout
from casstore.records.runs.check import CODES, RunsCheck
from casstore.records.runs.layout import Tables
from casstore.records.runs.runs import Runs
from casstore.records.runs.schema import VERSION
from casstore.store import Store


class RunsSystem(RecordSystem):
    """Threads of agents, with their runs, events, messages, approvals and artifacts."""

    name = "runs"
    version = VERSION
    title = "Runs"
    tables = (
        "runs.approval_order",
        "runs.approvals",
        "runs.artifact_paths",
        "runs.artifacts",
        "runs.counter",
        "runs.deleted",
        "runs.events",
        "runs.intents",
        "runs.messages",
        "runs.pending",
        "runs.requests",
        "runs.run_order",
        "runs.runs",
        "runs.schema",
        "runs.thread_approvals",
        "runs.thread_order",
        "runs.thread_runs",
        "runs.threads",
    )
    codes = CODES

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Threads, by id."""
        tables = Tables(store)
        found: list[SystemEntry] = []
        for (name,) in entry_keys(tables.threads, 1, after=after, limit=limit):
            record = tables.threads.find(name)
            if record is None:
                continue
            row = layout.read_thread(record)
            thread = row.thread
            title = f"{thread.agent}, {thread.status or 'no run yet'}"
            size_bytes = tables.threads.size_bytes(name) + sum(
                [
                    table.size_bytes(row.key)
                    for table in (tables.messages, tables.thread_runs, tables.thread_approvals)
                ]
            )
            for entry in tables.thread_runs.scan(row.key):
                run = tables.runs.find(layout.read_text(entry, "run"))
                if run is not None:
                    key = layout.read_run(run).key
                    size_bytes += tables.runs.size_bytes(*run.key) + sum(
                        [
                            table.size_bytes(key)
                            for table in (tables.events, tables.artifacts, tables.artifact_paths)
                        ]
                    )
            found.append(SystemEntry(name, title, thread.updated_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Compare counts, orders, the state of a thread's latest run and protections."""
        return RunsCheck(store, facts).judges()

    def expire(self, store: Store, pulse: Callable[[int], None]) -> int:
        """Remove the rows of threads whose deletion was cut short; of how many threads."""
        return Runs(store).finish_deletions()

    def after_copy(self, source: Store, target: Store) -> int:
        """Remove entries of orders, requests and intents that newer rows contradict."""
        return copied.tidy(source, target)


SYSTEM: Final = RunsSystem()
