"""Threads and runs: counts, orders, the thread's mirror of its latest run, protections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from casstore.engine.protocol import Row, RowKey
from casstore.maintenance import findings as codes
from casstore.maintenance.consistency import Facts, Judges, Wrong, where_is
from casstore.maintenance.findings import ERROR, WARNING, Meaning, Where
from casstore.records.runs import layout
from casstore.records.runs.data import PENDING
from casstore.records.runs.layout import COUNTER, RunRow, Tables, ThreadRow
from casstore.records.runs.names import number_text
from casstore.records.runs.working import protected_revision, protector
from casstore.session import keys
from casstore.session.heads import decode_head
from casstore.session.records import Record, Table
from casstore.store import Store

RUN_MIRROR_WRONG: Final = "run_mirror_wrong"
PROTECTION_MISSING: Final = "protection_missing"

#: What only the check of runs finds.
CODES: Final = {
    PROTECTION_MISSING: Meaning(
        ERROR, "a run may come back to a revision that it does not protect, or that is gone",
        "Runs.renew_protections, which also gives the runs whose checkpoint is gone",
    ),
    RUN_MIRROR_WRONG: Meaning(
        WARNING, "a thread shows another state than its latest run has",
        "set the state of that run once more: the thread follows",
    ),
}  # fmt: skip


class RunsCheck:
    """Judges the records of runs."""

    def __init__(self, store: Store, facts: Facts) -> None:
        self._tables = Tables(store)
        self._facts = facts

    def judges(self) -> Judges:
        """For each table, the function that checks a record of it."""
        tables = self._tables
        return {
            tables.threads: self._thread,
            tables.runs: self._run,
            tables.approvals: self._approval,
            tables.thread_order: self._ordered(
                tables.thread_order, tables.threads, lambda one: layout.read_thread(one).order
            ),
            tables.run_order: self._ordered(
                tables.run_order, tables.runs, lambda one: layout.read_run(one).order
            ),
            tables.approval_order: self._ordered(
                tables.approval_order, tables.approvals, lambda one: layout.read_approval(one).order
            ),
            tables.pending: self._pending,
            tables.requests: self._of_run(
                tables.requests, lambda one: layout.read_request(one).thread
            ),
            tables.intents: self._of_run(
                tables.intents, lambda one: layout.read_intent(one).thread
            ),
            tables.artifact_paths: self._path,
        }

    # --- orders ---------------------------------------------------------------------------------

    def _ordered(
        self, table: Table, owners: Table, order_of: Callable[[Record], int]
    ) -> Callable[[Record], None]:
        """A judge of entries in an order: each is of something that stands there, and was given."""

        def judge_entry(entry: Record) -> None:
            name, number = layout.read_text(entry, "entry"), int(entry.key[0])
            places = [
                table.place(*entry.key),
                owners.place(name),
                self._tables.counter.place(*COUNTER),
            ]

            def judge(values: Sequence[bytes | None]) -> str | None:
                own, owner, counter = values
                if own != entry.row:
                    return None
                title = f"number {number} of an order of runs is for {name!r}"
                if owner is None:
                    return f"{title}, which is not there"
                if order_of(_record(owners, (name,), owner)) != number:
                    return f"{title}, which stands elsewhere"
                if counter is None or number >= self._next(counter):
                    return f"{title}, but that number was not given yet"
                return None

            where = where_is(table, entry.key)
            self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

        return judge_entry

    def _next(self, counter: bytes) -> int:
        return layout.read_number(_record(self._tables.counter, COUNTER, counter), "counter")

    def _pending(self, entry: Record) -> None:
        name, tables = layout.read_text(entry, "approval"), self._tables
        places = [tables.pending.place(*entry.key), tables.approvals.place(name)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, approval = values
            if own != entry.row:
                return None
            if approval is not None:
                row = layout.read_approval(_record(tables.approvals, (name,), approval))
                if row.approval.status == PENDING and row.order == int(entry.key[0]):
                    return None
            return f"approval {name!r} is listed as pending, and is not"

        where = where_is(tables.pending, entry.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    # --- threads --------------------------------------------------------------------------------

    def _thread(self, record: Record) -> None:
        layout.read_thread(record)
        tables, name = self._tables, record.key[0]
        place = tables.threads.place(name)
        stamp = [tables.schema.place(part) for part in ("family", "version")]

        def judge(values: Sequence[bytes | None]) -> str | None:
            if values[0] != record.row or None not in values:
                return None
            return "there are threads, but not of which family and version they are"

        where = where_is(tables.threads, [name])
        self._facts.ask(codes.RECORD_ORPHANED, where, [place, *stamp], judge)
        self._facts.count(
            place,
            lambda row: self._look(layout.read_thread(_record(tables.threads, (name,), row))),
        )

    def _look(self, row: ThreadRow) -> Iterator[Wrong]:
        tables, thread = self._tables, row.thread
        where = where_is(tables.threads, [thread.id])
        title = f"thread {thread.id!r}"
        entry = tables.thread_order.find(number_text(row.order))
        if entry is None or layout.read_text(entry, "thread") != thread.id:
            yield Wrong(codes.RECORD_INDEX_WRONG, f"{title} is not in the order of threads", where)
        counted = dict.fromkeys(("runs", "events", "artifacts"), 0)
        latest: RunRow | None = None
        for run in self._runs_of(row):
            counted["runs"] += 1
            if run is None:
                continue
            if run.run.number == row.latest:
                latest = run
            yield from self._look_at_run(run)
            counted["events"] += run.run.events
            counted["artifacts"] += sum(1 for _ in tables.artifacts.scan(run.key))
        counted["messages"] = sum(1 for _ in tables.messages.scan(row.key))
        counted["approvals"] = sum(1 for _ in tables.thread_approvals.scan(row.key))
        for what, number in counted.items():
            told = getattr(thread, what)
            if told != number:
                says = f"{title} counts {told} {what}, and has {number}"
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

    def _runs_of(self, row: ThreadRow) -> Iterator[RunRow | None]:
        """The runs that a thread lists; None for one that is not there, or is another's."""
        tables = self._tables
        for entry in tables.thread_runs.scan(row.key):
            name = layout.read_text(entry, "run")
            record = tables.runs.find(name)
            run = None if record is None else layout.read_run(record)
            if run is None or (run.run.thread, run.run.number) != (
                row.thread.id,
                int(entry.key[1]),
            ):
                self._lost_run(row, entry, name)
                yield None
            else:
                yield run

    def _lost_run(self, row: ThreadRow, entry: Record, name: str) -> None:
        tables, thread = self._tables, row.thread.id
        places = [tables.thread_runs.place(*entry.key), tables.runs.place(name)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, run = values
            if own != entry.row:
                return None
            if run is not None:
                told = layout.read_run(_record(tables.runs, (name,), run)).run
                if (told.thread, told.number) == (thread, int(entry.key[1])):
                    return None
            return f"thread {thread!r} lists run {name!r}, which is not there, or is another's"

        where = where_is(tables.thread_runs, entry.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _look_at_run(self, row: RunRow) -> Iterator[Wrong]:
        tables, run = self._tables, row.run
        where = where_is(tables.runs, [run.id])
        count, last = 0, None
        for entry in tables.events.scan(row.key):
            count, last = count + 1, int(entry.key[1])
        if (count, last) != (run.events, row.last_sequence):
            says = (
                f"run {run.id!r} counts {run.events} events up to {row.last_sequence}, and has "
                f"{count} up to {last}"
            )
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)
        number = 0
        for entry in tables.artifacts.scan(row.key):
            number = int(entry.key[1])
            artifact = layout.read_artifact(entry, run)
            if tables.artifact_paths.find(row.key, artifact.path) is None:
                says = f"artifact {artifact.path!r} of run {run.id!r} is not found by its path"
                yield Wrong(codes.RECORD_INDEX_WRONG, says, where_is(tables.artifacts, entry.key))
        if number != run.artifacts:
            says = f"run {run.id!r} has artifacts up to {number}, and counts {run.artifacts}"
            yield Wrong(codes.RECORD_COUNT_WRONG, says, where)

    # --- runs -----------------------------------------------------------------------------------

    def _run(self, record: Record) -> None:
        row, tables = layout.read_run(record), self._tables
        run, own = row.run, tables.runs.place(*record.key)
        thread = tables.threads.find(run.thread)
        # Its key is given once: as long as there is the thread, the run is listed under it.
        key = "" if thread is None else layout.read_thread(thread).key
        places = [
            own,
            tables.threads.place(run.thread),
            tables.run_order.place(number_text(row.order)),
            tables.thread_runs.place(key, number_text(run.number)),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            found, owner, order, listed = values
            if found != record.row:
                return None
            if owner is None:
                return f"run {run.id!r} is of thread {run.thread!r}, which is not there"
            if order is None or listed is None:
                return f"run {run.id!r} is not in the orders that it should be found by"
            return None

        code = codes.RECORD_ORPHANED if thread is None else codes.RECORD_INDEX_WRONG
        self._facts.ask(code, where_is(tables.runs, [run.id]), places, judge)
        kept = protected_revision(run)
        if kept is not None:
            self._protected(own, record, kept.session, kept.revision)

    def _protected(self, own: RowKey, record: Record, session: str, revision: int) -> None:
        run, key = record.key[0], keys.session_key(session)
        places = [
            own,
            keys.protection(key, revision, protector(run)),
            RowKey("heads", key),
            RowKey("history", keys.history(key, revision)),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            found, protection, head, earlier = values
            title = f"run {run!r} may come back to revision {revision} of session {session!r}"
            if found != record.row:
                return None
            if earlier is None and (head is None or decode_head(head).revision != revision):
                return f"{title}, which is gone"
            return f"{title}, and does not protect it" if protection is None else None

        where = Where(session, revision, None, own.table, own.key)
        self._facts.ask(PROTECTION_MISSING, where, places, judge)

    def _approval(self, record: Record) -> None:
        row, tables = layout.read_approval(record), self._tables
        approval, order = row.approval, number_text(row.order)
        places = [
            tables.approvals.place(*record.key),
            tables.runs.place(approval.run),
            tables.approval_order.place(order),
            tables.pending.place(order),
        ]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, run, listed, pending = values
            if own != record.row:
                return None
            title = f"approval {approval.id!r}"
            if run is None:
                return f"{title} is of run {approval.run!r}, which is not there"
            if listed is None:
                return f"{title} is not in the order of requests"
            if approval.status == PENDING and pending is None:
                return f"{title} is pending, and is not listed so"
            return None

        where = where_is(tables.approvals, [approval.id])
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)

    def _of_run(self, table: Table, thread_of: Callable[[Record], str]) -> Callable[[Record], None]:
        """A judge of what is kept for a run: the run is there, in the same thread."""

        def judge_kept(record: Record) -> None:
            name, thread = record.key[0], thread_of(record)
            places = [table.place(name), self._tables.runs.place(name)]

            def judge(values: Sequence[bytes | None]) -> str | None:
                own, run = values
                if own != record.row:
                    return None
                if run is not None:
                    told = layout.read_run(_record(self._tables.runs, (name,), run)).run
                    if told.thread == thread:
                        return None
                return f"something is kept for run {name!r} of thread {thread!r}: there is none"

            self._facts.ask(codes.RECORD_ORPHANED, where_is(table, [name]), places, judge)

        return judge_kept

    def _path(self, entry: Record) -> None:
        tables, (key, path) = self._tables, entry.key
        number = number_text(layout.read_number(entry, "artifact"))
        places = [tables.artifact_paths.place(key, path), tables.artifacts.place(key, number)]

        def judge(values: Sequence[bytes | None]) -> str | None:
            own, artifact = values
            if own != entry.row:
                return None
            if artifact is not None:
                told = _record(tables.artifacts, (key, number), artifact).value
                if told["path"] == path:
                    return None
            return f"path {path!r} leads to an artifact that is not there, or has another path"

        where = where_is(tables.artifact_paths, entry.key)
        self._facts.ask(codes.RECORD_INDEX_WRONG, where, places, judge)


def _record(table: Table, key: tuple[str, ...], row: bytes) -> Record:
    return table.record_of(Row(table.keys.key(key), row))
