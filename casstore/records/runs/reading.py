"""Looking at threads and runs: one by name, or many in a fixed order, a page at a time.

Each page says where the next begins. What stands in an order of change moves to its front
when it changes, so a reader on the way back sees it at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

from casstore.errors import CorruptionError, InvalidInputError, RecordNotFoundError
from casstore.records.runs import layout
from casstore.records.runs.data import (
    PENDING,
    Approval,
    Artifact,
    Event,
    Message,
    Page,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
)
from casstore.records.runs.layout import RunRow, ThreadRow
from casstore.records.runs.names import check_id, check_number, check_path, number_text
from casstore.records.runs.working import Ground, Place
from casstore.session.arguments import check_text
from casstore.session.records import Record, Table, find_records

Item = TypeVar("Item")
Row = TypeVar("Row")

_MAX_PAGE: Final = 1000


class Reading:
    """Reads the runs of a store."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._tables = ground.tables

    # --- by name --------------------------------------------------------------------------

    def find(self, *places: Place) -> list[Record | None]:
        """Rows of one moment; RecordsSchemaError if the store's runs are of another kind."""
        schema = self._ground.schema
        family, version, *found = find_records(self._ground.store, [*schema.places, *places])
        schema.is_stamped(family, version)
        return found

    def require_stamp(self) -> None:
        """RecordNotFoundError if nobody has ever kept runs in this store."""
        schema = self._ground.schema
        if not schema.is_stamped(*find_records(self._ground.store, schema.places)):
            raise RecordNotFoundError("records", "runs")

    def thread(self, thread: str) -> ThreadRow:
        """A thread, or RecordNotFoundError."""
        record = self.find((self._tables.threads, (check_id(thread, "a thread"),)))[0]
        if record is None:
            raise RecordNotFoundError("thread", thread)
        return layout.read_thread(record)

    def run(self, thread: str, run: str) -> RunRow:
        """A run of a thread, or RecordNotFoundError."""
        check_id(thread, "a thread")
        record = self.find((self._tables.runs, (check_id(run, "a run"),)))[0]
        row = None if record is None else layout.read_run(record)
        if row is None or row.run.thread != thread:
            raise RecordNotFoundError("run", run, f"in thread {thread!r}")
        return row

    def find_thread(self, thread: str) -> Thread | None:
        """A thread; None if there is none."""
        record = self.find((self._tables.threads, (check_id(thread, "a thread"),)))[0]
        return None if record is None else layout.read_thread(record).thread

    def find_run(self, run: str) -> Run | None:
        """A run; None if there is none."""
        record = self.find((self._tables.runs, (check_id(run, "a run"),)))[0]
        return None if record is None else layout.read_run(record).run

    def find_approval(self, approval: str) -> Approval | None:
        """An approval; None if there is none."""
        record = self.find((self._tables.approvals, (check_id(approval, "an approval"),)))[0]
        return None if record is None else layout.read_approval(record).approval

    def find_request(self, thread: str, run: str) -> RunRequest | None:
        """What is kept to be run; None if nothing is."""
        record = self._below(self._tables.requests, thread, run)
        return None if record is None else layout.read_request(record)

    def find_intent(self, thread: str, run: str) -> RecoveryIntent | None:
        """How to go on with a run; None if nobody has decided."""
        record = self._below(self._tables.intents, thread, run)
        return None if record is None else layout.read_intent(record)

    def _below(self, table: Table, thread: str, run: str) -> Record | None:
        """A row of a run that must be there."""
        check_id(thread, "a thread")
        key = (check_id(run, "a run"),)
        owner, record = self.find((self._tables.runs, key), (table, key))
        if owner is None or layout.read_run(owner).run.thread != thread:
            raise RecordNotFoundError("run", run, f"in thread {thread!r}")
        return record

    def _still(self, before: RunRow | ThreadRow) -> None:
        """RecordNotFoundError if what was read below this may have been deleted meanwhile."""
        if isinstance(before, RunRow):
            run = before.run
            if self.run(run.thread, run.id).key != before.key:
                raise RecordNotFoundError("run", run.id, f"in thread {run.thread!r}")
        elif self.thread(before.thread.id).key != before.key:
            raise RecordNotFoundError("thread", before.thread.id)

    def find_event(self, thread: str, run: str, sequence: int) -> Event | None:
        """One event; None if there is none."""
        check_number(sequence, "a sequence")
        row = self.run(thread, run)
        record = self._tables.events.find(row.key, number_text(sequence))
        if record is None:
            self._still(row)
            return None
        return layout.read_event(record, row.run)

    def find_artifact(self, thread: str, run: str, path: str) -> Artifact | None:
        """An artifact by its path; None if there is none."""
        check_path(path)
        row = self.run(thread, run)
        entry = self._tables.artifact_paths.find(row.key, path)
        if entry is None:
            self._still(row)
            return None
        number = layout.read_number(entry, "artifact")
        record = self._tables.artifacts.find(row.key, number_text(number))
        if record is None:
            # Either its run was deleted between the two readings, or a row is lost.
            self._still(row)
            raise CorruptionError(f"artifact {path!r} of run {run!r} is lost; check the store")
        return layout.read_artifact(record, row.run)

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
        """Threads, those changed last first."""
        _check_wishes(status, agent, workspace)

        def wanted(row: ThreadRow) -> bool:
            thread = row.thread
            wished = (status, thread.status), (agent, thread.agent), (workspace, thread.workspace)
            return all(wish in (None, found) for wish, found in wished)

        rows = self._ordered(
            self._tables.thread_order,
            self._tables.threads,
            layout.read_thread,
            lambda row: row.order,
            cursor=cursor,
            newest_first=True,
        )
        return _page(rows, limit, wanted, lambda row: row.thread)

    def runs(
        self, limit: int, cursor: str | None, state: str | None, agent: str | None
    ) -> Page[Run]:
        """Runs of all threads, those changed last first."""
        rows = self._ordered(
            self._tables.run_order,
            self._tables.runs,
            layout.read_run,
            lambda row: row.order,
            cursor=cursor,
            newest_first=True,
        )
        return _page(rows, limit, _wanted_run(state, agent), lambda row: row.run)

    def thread_runs(
        self, thread: str, limit: int, cursor: str | None, state: str | None
    ) -> Page[Run]:
        """The runs of a thread, those begun last first."""
        owner = self.thread(thread)
        rows = self._ordered(
            self._tables.thread_runs,
            self._tables.runs,
            layout.read_run,
            lambda row: row.run.number,
            owner.key,
            cursor=cursor,
            newest_first=True,
        )
        page = _page(rows, limit, _wanted_run(state, None), lambda row: row.run)
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
        """Approvals in the order in which they were asked for."""
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

        def wanted(row: layout.ApprovalRow) -> bool:
            approval = row.approval
            return run in (None, approval.run) and status in (None, approval.status)

        rows = self._ordered(
            order, tables.approvals, layout.read_approval, lambda row: row.order, *prefix,
            cursor=cursor, newest_first=False,
        )  # fmt: skip
        page = _page(rows, limit, wanted, lambda row: row.approval)
        if owner is not None:
            self._still(owner)
        return page

    def events(
        self, thread: str, run: str, limit: int, cursor: str | None, after: int | None
    ) -> Page[Event]:
        """The events of a run in order."""
        row = self.run(thread, run)
        start = _cursor(cursor)
        if after is not None:
            start = max(start or "", number_text(check_number(after, "a sequence")))
        entries = (
            (record.key[1], layout.read_event(record, row.run))
            for record in self._tables.events.scan(row.key, after=start, page=_fetch(limit))
        )
        page = _page(entries, limit, _anything, lambda event: event)
        self._still(row)
        return page

    def messages(self, thread: str, limit: int, before: int | None) -> list[Message]:
        """The last messages of a thread, or the last before one, oldest first."""
        _fetch(limit)
        row = self.thread(thread)
        stop = None if before is None else number_text(check_number(before, "a message"))
        records = self._tables.messages.scan(row.key, before=stop, reverse=True, page=limit)
        found = [layout.read_message(record, thread) for record in islice(records, limit)]
        self._still(row)
        return found[::-1]

    def artifacts(self, thread: str, run: str, limit: int, cursor: str | None) -> Page[Artifact]:
        """The artifacts of a run in the order in which they were made."""
        row = self.run(thread, run)
        entries = (
            (record.key[1], layout.read_artifact(record, row.run))
            for record in self._tables.artifacts.scan(
                row.key, after=_cursor(cursor), page=_fetch(limit)
            )
        )
        page = _page(entries, limit, _anything, lambda artifact: artifact)
        self._still(row)
        return page

    def requests(self, limit: int, cursor: str | None) -> Page[RunRequest]:
        """Everything that is kept to be run, by run."""
        return self._kept(self._tables.requests, layout.read_request, limit, cursor)

    def intents(self, limit: int, cursor: str | None) -> Page[RecoveryIntent]:
        """All runs that somebody has decided about and that did not go on yet, by run."""
        return self._kept(self._tables.intents, layout.read_intent, limit, cursor)

    def _kept(
        self, table: Table, read: Callable[[Record], Item], limit: int, cursor: str | None
    ) -> Page[Item]:
        self.find()
        if cursor is not None:
            check_id(cursor, "a cursor")
        records = table.scan(after=cursor, page=_fetch(limit))
        entries = ((record.key[0], read(record)) for record in records)
        return _page(entries, limit, _anything, lambda item: item)

    def all_runs(self) -> Iterator[Run]:
        """Every run, by id, as its row says; CorruptionError if one cannot be read."""
        self.require_stamp()
        table = self._tables.runs
        yield from table.read_each(table.scan(), lambda record: layout.read_run(record).run)

    def _ordered(
        self,
        order: Table,
        table: Table,
        read: Callable[[Record], Row],
        place: Callable[[Row], int],
        *prefix: str,
        cursor: str | None,
        newest_first: bool,
    ) -> Iterator[tuple[str, Row]]:
        """Rows in an order, with their places in it.

        Order and rows are read one after the other. A row that has moved on in between is left
        out, since it stands elsewhere now; one that is gone, too.
        """
        self.find()
        bound = _cursor(cursor)
        if newest_first:
            entries = order.scan(*prefix, before=bound, reverse=True)
        else:
            entries = order.scan(*prefix, after=bound)

        def is_at(record: Record | None, entry: Record) -> Row | None:
            row = None if record is None else read(record)
            return row if row is not None and number_text(place(row)) == entry.key[-1] else None

        while page := list(islice(entries, 64)):
            names = [layout.read_text(entry, "order") for entry in page]
            records = table.find_many([(name,) for name in names])
            for entry, name, record in zip(page, names, records, strict=True):
                row = is_at(record, entry)
                if row is not None:
                    yield entry.key[-1], row
                    continue
                places: list[Place] = [(order, entry.key), (table, (name,))]
                again, record = find_records(self._ground.store, places)
                if again is not None and is_at(record, again) is None:
                    # At one moment: so nobody has moved it, and a row is lost.
                    raise CorruptionError(f"the row of {name!r} is lost; check the store")


def _check_wishes(*wishes: str | None) -> None:
    """Refuse what nothing can have: it would be taken for a list without anything in it."""
    for wish in wishes:
        if wish is not None:
            check_text(wish, "what is looked for")


def _wanted_run(state: str | None, agent: str | None) -> Callable[[RunRow], bool]:
    _check_wishes(state, agent)
    return lambda row: state in (None, row.run.state) and agent in (None, row.run.agent)


def _anything(item: Any) -> bool:
    return True


def _cursor(cursor: str | None) -> str | None:
    if cursor is None:
        return None
    if not (type(cursor) is str and cursor.isascii() and cursor.isdigit()):
        raise InvalidInputError(f"a cursor comes from the page before, unlike {cursor!r}")
    return cursor


def _fetch(limit: int) -> int:
    """How many to read for a page, and one more to know whether there is one."""
    if type(limit) is not int or not 1 <= limit <= _MAX_PAGE:
        raise InvalidInputError(f"a page has 1 to {_MAX_PAGE} items, not {limit!r}")
    return limit + 1


def _page(
    entries: Iterator[tuple[str, Row]],
    limit: int,
    wanted: Callable[[Row], bool],
    item: Callable[[Row], Item],
) -> Page[Item]:
    _fetch(limit)
    found: list[Item] = []
    last = None
    for place, row in entries:
        if wanted(row):
            if len(found) == limit:
                return Page(found, last)
            found.append(item(row))
            last = place
    return Page(found, None)
