"""Rows as another store has them, with their own times and numbers: for importers.

Each call is one write, of any number of threads. What is there already stays as it is: ``stored``
tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import RecordNotFoundError
from casstore.records.runs import layout
from casstore.records.runs.data import (
    PENDING,
    Approval,
    Artifact,
    Event,
    Message,
    RecoveryIntent,
    Run,
    RunRequest,
    Thread,
)
from casstore.records.runs.layout import COUNTER, ApprovalRow, RunRow, ThreadRow
from casstore.records.runs.names import check_id, check_path, number_text
from casstore.records.runs.working import Ground, Numbers, Place
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, Table, find_records


class Made(NamedTuple):
    """An artifact with its content, and how many bytes that took where it was."""

    artifact: Artifact
    content: Any
    size_bytes: int


Item = Thread | Run | Message | Event | Approval | RunRequest | RecoveryIntent | Made


def stored(ground: Ground, items: Sequence[Item]) -> list[Any]:
    """What the store has in the place of each item, in the same form; None: nothing.

    Threads and runs come with what is counted of them left at 0, as they are inserted.
    """
    owners = _Owners(ground, items)
    places = [_PLACES[type(item)](ground, owners, item) for item in items]
    known = iter(find_records(ground.store, [place for place in places if place is not None]))
    records = [None if place is None else next(known) for place in places]
    return [
        None if record is None else _READ[type(item)](owners, item, record)
        for item, record in zip(items, records, strict=True)
    ]


def insert(ground: Ground, items: Sequence[Item]) -> None:
    """Put those that are not there; RecordNotFoundError if a thread or run of theirs is not."""
    transact("the runs of this store", lambda: _Insertion(ground, items).commit())


class _Owners:
    """The threads and runs that items belong to, as they are."""

    def __init__(self, ground: Ground, items: Iterable[Any]) -> None:
        tables, schema = ground.tables, ground.schema
        runs = {run for run in map(_run_of, items) if run is not None}
        threads = {_thread_of(item) for item in items}
        wanted: list[Place] = [*schema.places, (tables.counter, COUNTER)]
        wanted += [(tables.threads, (check_id(name, "a thread"),)) for name in sorted(threads)]
        wanted += [(tables.runs, (check_id(name, "a run"),)) for name in sorted(runs)]
        self.family, self.version, self.counter, *found = find_records(ground.store, wanted)
        schema.is_stamped(self.family, self.version)
        self.records = dict(zip(sorted(threads), found, strict=False))
        self.threads = {
            name: layout.read_thread(record)
            for name, record in self.records.items()
            if record is not None
        }
        self.runs = {
            record.key[0]: layout.read_run(record)
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


def _thread_of(item: Any) -> str:
    if isinstance(item, Thread):
        return item.id
    return str(item.artifact.thread if isinstance(item, Made) else item.thread)


def _run_of(item: Any) -> str | None:
    if isinstance(item, Thread):
        return None
    if isinstance(item, Run):
        return item.id
    run: str | None = item.artifact.run if isinstance(item, Made) else item.run
    return run


class _Insertion:
    """Items on their way into one write."""

    def __init__(self, ground: Ground, items: Sequence[Item]) -> None:
        self._ground = ground
        self._tables = ground.tables
        self._owners = _Owners(ground, items)
        self._numbers = Numbers(ground.tables, self._owners.counter)
        self._draft = Draft(ground.store)
        # Asked after the owners: who puts one of them changes its thread, and this write fails.
        # Put twice, a thread would get another key, and lose all that stands under the first.
        for item, there in zip(items, stored(ground, items), strict=True):
            if there is None:
                _PUT[type(item)](self, item)

    def commit(self) -> None:
        """Write everything at once."""
        draft, owners = self._draft, self._owners
        self._ground.schema.expect(draft, owners.family, owners.version)
        for name, row in owners.threads.items():
            draft.expect(self._tables.threads, (name,), owners.records[name])
            row = row._replace(revision=row.revision + 1)
            draft.put(self._tables.threads, (name,), layout.pack_thread(row))
        for name, run in owners.runs.items():
            draft.put(self._tables.runs, (name,), layout.pack_run(run))
        self._numbers.finish(draft)
        draft.commit()

    def _count(self, thread: str, **more: int) -> None:
        row = self._owners.thread(thread)
        counts = {name: getattr(row.thread, name) + number for name, number in more.items()}
        self._owners.threads[thread] = row._replace(thread=row.thread._replace(**counts))

    def thread(self, thread: Thread) -> None:
        """Put a thread; the last one put is the one that changed last."""
        key, order = number_text(self._numbers.take()), self._numbers.take()
        self._owners.threads[thread.id] = ThreadRow(thread, key, order, 0, 0)
        self._draft.put(self._tables.thread_order, (number_text(order),), thread.id)

    def run(self, run: Run) -> None:
        """Put a run at its place in its thread; the last one put is the one that changed last."""
        thread = self._owners.thread(run.thread)
        key, order = number_text(self._numbers.take()), self._numbers.take()
        self._owners.runs[run.id] = RunRow(run, key, order, None)
        self._draft.put(self._tables.run_order, (number_text(order),), run.id)
        self._draft.put(self._tables.thread_runs, (thread.key, number_text(run.number)), run.id)
        if thread.thread.latest_run == run.id:
            self._owners.threads[run.thread] = thread._replace(latest=run.number)
        self._count(run.thread, runs=1)

    def message(self, message: Message) -> None:
        """Put a message at its place."""
        thread = self._owners.thread(message.thread)
        place = thread.key, number_text(message.number)
        self._draft.put(self._tables.messages, place, layout.pack_message(message))
        self._count(message.thread, messages=1)

    def event(self, event: Event) -> None:
        """Put an event at its place."""
        row = self._owners.run(event.run, event.thread)
        place = row.key, number_text(event.sequence)
        self._draft.put(self._tables.events, place, layout.pack_event(event))
        last = event.sequence if row.last_sequence is None else row.last_sequence
        run = row.run._replace(events=row.run.events + 1)
        row = row._replace(run=run, last_sequence=max(last, event.sequence))
        self._owners.runs[event.run] = row
        self._count(event.thread, events=1)

    def approval(self, approval: Approval) -> None:
        """Put an approval behind those put before."""
        self._owners.run(approval.run, approval.thread)
        order = self._numbers.take()
        place, tables = number_text(order), self._tables
        row = ApprovalRow(approval, order)
        self._draft.put(tables.approvals, (approval.id,), layout.pack_approval(row))
        self._draft.put(tables.approval_order, (place,), approval.id)
        key = self._owners.thread(approval.thread).key
        self._draft.put(tables.thread_approvals, (key, place), approval.id)
        if approval.status == PENDING:
            self._draft.put(tables.pending, (place,), approval.id)
        self._count(approval.thread, approvals=1)

    def request(self, request: RunRequest) -> None:
        """Put what to run."""
        self._owners.run(request.run, request.thread)
        self._draft.put(self._tables.requests, (request.run,), layout.pack_request(request))

    def intent(self, intent: RecoveryIntent) -> None:
        """Put how to go on."""
        self._owners.run(intent.run, intent.thread)
        self._draft.put(self._tables.intents, (intent.run,), layout.pack_intent(intent))

    def made(self, made: Made) -> None:
        """Put an artifact with its content at its place."""
        artifact = made.artifact
        row = self._owners.run(artifact.run, artifact.thread)
        self._draft.keep_blob(made.content) if artifact.is_blob else self._draft.keep(made.content)
        place = row.key, number_text(artifact.number)
        self._draft.put(self._tables.artifacts, place, layout.pack_artifact(artifact))
        self._draft.put(
            self._tables.artifact_paths, (row.key, check_path(artifact.path)), artifact.number
        )
        run = row.run._replace(artifacts=max(row.run.artifacts, artifact.number))
        self._owners.runs[artifact.run] = row._replace(run=run)
        self._count(artifact.thread, artifacts=1)


# --- where each kind of item stands, and how it is read back ---------------------------------


def _below_run(table: Callable[[Ground], Table], number: Callable[[Any], int]) -> Any:
    def place(ground: Ground, owners: _Owners, item: Any) -> Place | None:
        row = owners.runs.get(_run_of(item) or "")
        return None if row is None else (table(ground), (row.key, number_text(number(item))))

    return place


def _message_place(ground: Ground, owners: _Owners, item: Message) -> Place | None:
    row = owners.threads.get(item.thread)
    if row is None:
        return None
    return ground.tables.messages, (row.key, number_text(item.number))


def _read_run(owners: _Owners, item: Run, record: Record) -> Run:
    return layout.read_run(record).run._replace(events=0, artifacts=0)


def _read_thread(owners: _Owners, item: Thread, record: Record) -> Thread:
    thread = layout.read_thread(record).thread
    return thread._replace(runs=0, messages=0, events=0, artifacts=0, approvals=0)


def _owner(owners: _Owners, item: Any) -> Run:
    return owners.runs[str(_run_of(item))].run


_PUT: Final[dict[type, Callable[[_Insertion, Any], None]]] = {
    Thread: _Insertion.thread,
    Run: _Insertion.run,
    Message: _Insertion.message,
    Event: _Insertion.event,
    Approval: _Insertion.approval,
    RunRequest: _Insertion.request,
    RecoveryIntent: _Insertion.intent,
    Made: _Insertion.made,
}
_PLACES: Final[dict[type, Callable[[Ground, _Owners, Any], Place | None]]] = {
    Thread: lambda ground, owners, item: (ground.tables.threads, (item.id,)),
    Run: lambda ground, owners, item: (ground.tables.runs, (item.id,)),
    Message: _message_place,
    Event: _below_run(lambda ground: ground.tables.events, lambda item: int(item.sequence)),
    Approval: lambda ground, owners, item: (
        ground.tables.approvals,
        (check_id(item.id, "an approval"),),
    ),
    RunRequest: lambda ground, owners, item: (ground.tables.requests, (item.run,)),
    RecoveryIntent: lambda ground, owners, item: (ground.tables.intents, (item.run,)),
    Made: _below_run(
        lambda ground: ground.tables.artifacts, lambda item: int(item.artifact.number)
    ),
}
_READ: Final[dict[type, Callable[[_Owners, Any, Record], Any]]] = {
    Thread: _read_thread,
    Run: _read_run,
    Message: lambda owners, item, record: layout.read_message(record, item.thread),
    Event: lambda owners, item, record: layout.read_event(record, _owner(owners, item)),
    Approval: lambda owners, item, record: layout.read_approval(record).approval,
    RunRequest: lambda owners, item, record: layout.read_request(record),
    RecoveryIntent: lambda owners, item, record: layout.read_intent(record),
    Made: lambda owners, item, record: layout.read_artifact(record, _owner(owners, item)),
}
