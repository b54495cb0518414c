"""Reads of threads and runs: one by id, or many in a fixed order, in pages.

Each page has the cursor of the next. A row in an order of change moves to the front when it
changes, so a reader that pages towards the back reads it at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, TypeVar

from casstore.errors import CorruptionError, InvalidInputError, RecordNotFoundError
from casstore.records.runs.data import (
    PENDING,
    Approval,
    Artifact,
    Event,
    Page,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
    ThreadMessage,
)
from casstore.records.runs.names import check_id, check_number, check_path
from casstore.records.runs.tables import ApprovalRow, RunRow, RunTables, ThreadRow
from casstore.records.schema import IndexTable, R, RowPlace, RowTable, number_text, text_number
from casstore.session.arguments import check_text
from casstore.session.records import Record, find_records

Item = TypeVar("Item")

_MAX_PAGE: Final = 1000
_READ_AT_ONCE: Final = 64


class Reading:
    """Reads the runs of a store."""

    def __init__(self, tables: RunTables) -> None:
        self._tables = tables

    # --- by id ------------------------------------------------------------------------------------

    def find(self, *places: RowPlace) -> list[Record | None]:
        """Rows, read in one transaction; RecordsSchemaError if the runs are not of this version."""
        stamp, *found = find_records(self._tables.store, [self._tables.stamp_place, *places])
        self._tables.is_stamped(stamp)
        return found

    def thread(self, thread: str) -> ThreadRow:
        """A thread, or RecordNotFoundError."""
        record = self.find((self._tables.threads, (check_id(thread, "a thread"),)))[0]
        if record is None:
            raise RecordNotFoundError("thread", thread)
        return self._tables.threads.decode(record)

    def run(self, thread: str, run: str) -> RunRow:
        """A run of a thread, or RecordNotFoundError."""
        check_id(thread, "a thread")
        record = self.find((self._tables.runs, (check_id(run, "a run"),)))[0]
        row = self._tables.runs.decode_found(record)
        if row is None or row.run.thread != thread:
            raise RecordNotFoundError("run", run, f"in thread {thread!r}")
        return row

    def find_thread(self, thread: str) -> Thread | None:
        """A thread, or None if it does not exist."""
        row = self._find_row(self._tables.threads, thread, "a thread")
        return None if row is None else row.thread

    def find_run(self, run: str) -> Run | None:
        """A run, or None if it does not exist."""
        row = self._find_row(self._tables.runs, run, "a run")
        return None if row is None else row.run

    def find_approval(self, approval: str) -> Approval | None:
        """An approval, or None if it does not exist."""
        row = self._find_row(self._tables.approvals, approval, "an approval")
        return None if row is None else row.approval

    def _find_row(self, table: RowTable[R], name: str, what: str) -> R | None:
        return table.decode_found(self.find((table, (check_id(name, what),)))[0])

    def find_request(self, thread: str, run: str) -> RunRequest | None:
        """The request of a run; None if it has none."""
        return self._below(self._tables.requests, thread, run)

    def find_intent(self, thread: str, run: str) -> RecoveryIntent | None:
        """The recovery intent of a run; None if it has none."""
        return self._below(self._tables.intents, thread, run)

    def _below(self, table: RowTable[R], thread: str, run: str) -> R | None:
        """A row that has the key of its run; RecordNotFoundError if there is no such run."""
        check_id(thread, "a thread")
        key = (check_id(run, "a run"),)
        owner, record = self.find((self._tables.runs, key), (table, key))
        if owner is None or self._tables.runs.decode(owner).run.thread != thread:
            raise RecordNotFoundError("run", run, f"in thread {thread!r}")
        return table.decode_found(record)

    def _still(self, before: RunRow | ThreadRow) -> None:
        """RecordNotFoundError if this run or thread was deleted since the read, with its rows."""
        if isinstance(before, RunRow):
            run = before.run
            if self.run(run.thread, run.id).key != before.key:
                raise RecordNotFoundError("run", run.id, f"in thread {run.thread!r}")
        elif self.thread(before.thread.id).key != before.key:
            raise RecordNotFoundError("thread", before.thread.id)

    def find_event(self, thread: str, run: str, sequence: int) -> Event | None:
        """One event, or None if it does not exist."""
        check_number(sequence, "sequence")
        row = self.run(thread, run)
        found = self._tables.events.get(row.key, sequence)
        if found is None:
            self._still(row)
            return None
        return found.public(row.run)

    def find_artifact(self, thread: str, run: str, path: str) -> Artifact | None:
        """An artifact by its path, or None if it does not exist."""
        check_path(path)
        row = self.run(thread, run)
        entry = self._tables.artifact_paths.find(row.key, path)
        if entry is None:
            self._still(row)
            return None
        found = self._tables.artifacts.get(*self._tables.artifact_paths.leads_to(entry))
        if found is None:
            # Either the run was deleted between the two reads, or a row is lost.
            self._still(row)
            raise CorruptionError(f"artifact {path!r} of run {run!r} is lost; check the store")
        return found.public(row.run)

    # --- in order -------------------------------------------------------------------------

    def threads(
        self,
        limit: int,
        cursor: str | None,
        *,
        status: str | None,
        agent: str | None,
        workspace: str | None,
    ) -> Page[Thread]:
        """A page of threads, most recently changed first."""
        _check_wishes(status, agent, workspace)

        def wanted(row: ThreadRow) -> bool:
            thread = row.thread
            wished = (status, thread.status), (agent, thread.agent), (workspace, thread.workspace)
            return all(wish in (None, found) for wish, found in wished)

        rows = self._ordered(self._tables.thread_order, self._tables.threads, cursor)
        return _page(((place, row.thread) for place, row in rows if wanted(row)), limit)

    def runs(
        self, limit: int, cursor: str | None, state: str | None, agent: str | None
    ) -> Page[Run]:
        """A page of the runs of all threads, most recently changed first."""
        wanted = _wanted_run(state, agent)
        rows = self._ordered(self._tables.run_order, self._tables.runs, cursor)
        return _page(((place, row.run) for place, row in rows if wanted(row)), limit)

    def thread_runs(
        self, thread: str, limit: int, cursor: str | None, state: str | None
    ) -> Page[Run]:
        """A page of the runs of a thread, most recently created first."""
        wanted, owner = _wanted_run(state, None), self.thread(thread)
        rows = self._ordered(self._tables.thread_runs, self._tables.runs, cursor, owner.key)
        page = _page(((place, row.run) for place, row in rows if wanted(row)), limit)
        self._still(owner)
        return page

    def approvals(
        self,
        thread: str | None,
        run: str | None,
        status: str | None,
        limit: int,
        cursor: str | None,
    ) -> Page[Approval]:
        """A page of approvals, in order of request."""
        _check_wishes(status)
        tables = self._tables
        if run is not None:
            asking = self.find_run(run)
            if asking is None or thread not in (None, asking.thread):
                place = "in this store" if thread is None else f"in thread {thread!r}"
                raise RecordNotFoundError("run", run, place)
            thread = asking.thread
        owner = None if thread is None else self.thread(thread)
        order = tables.pending if status == PENDING else tables.approval_order
        prefix: tuple[str, ...] = ()
        if owner is not None:
            order, prefix = tables.thread_approvals, (owner.key,)

        def wanted(row: ApprovalRow) -> bool:
            approval = row.approval
            return run in (None, approval.run) and status in (None, approval.status)

        rows = self._ordered(order, tables.approvals, cursor, *prefix, newest_first=False)
        page = _page(((place, row.approval) for place, row in rows if wanted(row)), limit)
        if owner is not None:
            self._still(owner)
        return page

    def events(
        self, thread: str, run: str, limit: int, cursor: str | None, after: int | None
    ) -> Page[Event]:
        """A page of the events of a run, in order."""
        row = self.run(thread, run)
        start = _cursor(cursor)
        if after is not None:
            start = max(start or "", number_text(check_number(after, "after")))
        entries = (
            (record.key[1], self._tables.events.decode(record).public(row.run))
            for record in self._tables.events.scan(row.key, after=start, page=_fetch(limit))
        )
        page = _page(entries, limit)
        self._still(row)
        return page

    def messages(self, thread: str, limit: int, before: int | None) -> list[ThreadMessage]:
        """The last messages of a thread, or the last before number ``before``, oldest first."""
        _fetch(limit)
        row = self.thread(thread)
        stop = None if before is None else number_text(check_number(before, "before"))
        records = self._tables.messages.scan(row.key, before=stop, reverse=True, page=limit)
        found = [
            self._tables.messages.decode(record).public(thread) for record in islice(records, limit)
        ]
        self._still(row)
        return found[::-1]

    def artifacts(self, thread: str, run: str, limit: int, cursor: str | None) -> Page[Artifact]:
        """A page of the artifacts of a run, in order of creation."""
        row = self.run(thread, run)
        entries = (
            (record.key[1], self._tables.artifacts.decode(record).public(row.run))
            for record in self._tables.artifacts.scan(
                row.key, after=_cursor(cursor), page=_fetch(limit)
            )
        )
        page = _page(entries, limit)
        self._still(row)
        return page

    def requests(self, limit: int, cursor: str | None) -> Page[RunRequest]:
        """A page of the requests of all runs, by run."""
        return self._by_run(self._tables.requests, limit, cursor)

    def intents(self, limit: int, cursor: str | None) -> Page[RecoveryIntent]:
        """A page of the recovery intents of all runs, by run."""
        return self._by_run(self._tables.intents, limit, cursor)

    def _by_run(self, table: RowTable[R], limit: int, cursor: str | None) -> Page[R]:
        self.find()
        if cursor is not None:
            check_id(cursor, "a cursor")
        records = table.scan(after=cursor, page=_fetch(limit))
        entries = ((record.key[0], table.decode(record)) for record in records)
        return _page(entries, limit)

    def all_runs(self) -> Iterator[Run]:
        """Every run, by id; CorruptionError if one cannot be read.

        RecordNotFoundError if this store has never held runs.
        """
        stamp, key = self._tables.stamp_place
        if not self._tables.is_stamped(stamp.find(*key)):
            raise RecordNotFoundError("records", "runs")
        yield from (row.run for row in self._tables.runs.rows())

    def _ordered(
        self,
        order: IndexTable[R],
        table: RowTable[R],
        cursor: str | None,
        *prefix: str,
        newest_first: bool = True,
    ) -> Iterator[tuple[str, R]]:
        """Rows in the order of an index, each with the last part of its index key: the cursor.

        The index and the rows are read one after the other. A row that a writer has moved in the
        index meanwhile, or deleted, is left out.
        """
        self.find()
        bound = _cursor(cursor)
        if newest_first:
            entries = order.scan(*prefix, before=bound, reverse=True)
        else:
            entries = order.scan(*prefix, after=bound)

        def row_at(record: Record | None, entry: Record) -> R | None:
            row = table.decode_found(record)
            return row if entry.key in order.keys_of(row) else None

        while page := list(islice(entries, _READ_AT_ONCE)):
            keys = [order.leads_to(entry) for entry in page]
            for entry, key, record in zip(page, keys, table.find_many(keys), strict=True):
                row = row_at(record, entry)
                if row is not None:
                    yield entry.key[-1], row
                    continue
                places: list[RowPlace] = [(order, entry.key), (table, key)]
                again, record = find_records(self._tables.store, places)
                if again is not None and row_at(record, again) is None:
                    # Both were read in one transaction, so no writer has moved the row.
                    raise CorruptionError(f"the row of {key[0]!r} is lost; check the store")


def _check_wishes(*wishes: str | None) -> None:
    """Refuse a filter that is not a text: no row would match it, and the page would be empty."""
    for wish in wishes:
        if wish is not None:
            check_text(wish, "a filter")


def _wanted_run(state: str | None, agent: str | None) -> Callable[[RunRow], bool]:
    _check_wishes(state, agent)
    return lambda row: state in (None, row.run.state) and agent in (None, row.run.agent)


def _cursor(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        text_number(cursor)
    except (TypeError, ValueError) as exc:
        raise InvalidInputError(
            f"cursor must be the cursor of the previous page, got {cursor!r:.80}"
        ) from exc
    return cursor


def _fetch(limit: int) -> int:
    """The number of rows to read for a page: one more shows whether there is a next page."""
    if type(limit) is not int or not 1 <= limit <= _MAX_PAGE:
        raise InvalidInputError(f"limit must be from 1 to {_MAX_PAGE}, got {limit!r}")
    return limit + 1


def _page(entries: Iterator[tuple[str, Item]], limit: int) -> Page[Item]:
    """The first ``limit`` items, each given with its cursor."""
    _fetch(limit)
    found: list[Item] = []
    last = None
    for place, item in entries:
        if len(found) == limit:
            return Page(found, last)
        found.append(item)
        last = place
    return Page(found, None)
