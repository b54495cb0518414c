"""The tables of runs, and what their rows hold.

    runs.schema          name                     family, version
    runs.counter         next                     the number to be given next
    runs.threads         thread                   the thread, with all that is counted
    runs.runs            run                      the run
    runs.thread_runs     thread key, number       run             in order of beginning
    runs.thread_order    number                   thread          in order of change
    runs.run_order       number                   run             in order of change
    runs.events          run key, sequence        the event
    runs.messages        thread key, number       the message
    runs.approvals       approval                 the approval
    runs.thread_approvals  thread key, number     approval        in order of request
    runs.approval_order  number                   approval        in order of request
    runs.pending         number                   approval        those not resolved
    runs.requests        run                      what to run
    runs.intents         run                      how to go on
    runs.artifacts       run key, number          the artifact, a link to its content
    runs.artifact_paths  run key, path            its number
    runs.deleted         thread key               what is left of a deleted thread

A **key** is a number that is given once: a thread or run that comes after a deleted one of
the same id never meets what is left of that.

Whatever changes below a thread also changes the thread's own row. So a write that expects
that row to be as it was read knows that everything it has read of the thread is, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from casstore.errors import CasstoreError, CorruptionError, LimitError
from casstore.format.canonical import Link
from casstore.records.runs.data import (
    Approval,
    Artifact,
    CheckpointRef,
    Event,
    Message,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    Thread,
)
from casstore.session.records import Record, Table
from casstore.store import Store

_NONE: Final = type(None)
_ANY: Final = None
_Kinds = tuple[type, ...] | None


class Tables:
    """The tables of runs in one store."""

    def __init__(self, store: Store) -> None:
        self.schema = Table(store, "runs.schema", 1)
        self.counter = Table(store, "runs.counter", 1)
        self.threads = Table(store, "runs.threads", 1)
        self.runs = Table(store, "runs.runs", 1)
        self.thread_runs = Table(store, "runs.thread_runs", 2)
        self.thread_order = Table(store, "runs.thread_order", 1)
        self.run_order = Table(store, "runs.run_order", 1)
        self.events = Table(store, "runs.events", 2)
        self.messages = Table(store, "runs.messages", 2)
        self.approvals = Table(store, "runs.approvals", 1)
        self.thread_approvals = Table(store, "runs.thread_approvals", 2)
        self.approval_order = Table(store, "runs.approval_order", 1)
        self.pending = Table(store, "runs.pending", 1)
        self.requests = Table(store, "runs.requests", 1)
        self.intents = Table(store, "runs.intents", 1)
        self.artifacts = Table(store, "runs.artifacts", 2)
        self.artifact_paths = Table(store, "runs.artifact_paths", 2)
        self.deleted = Table(store, "runs.deleted", 1)

    def all(self) -> list[Table]:
        """Every one of them."""
        return list(vars(self).values())


COUNTER: Final = ("next",)


# --- rows with what only the store knows of them ---------------------------------------------


class ThreadRow(NamedTuple):
    """A thread, and how to find what belongs to it."""

    thread: Thread
    key: str
    order: int
    #: Which run the latest is, by its number in the thread; 0: none.
    latest: int
    #: Counts the writes, so that no two rows of a thread are the same.
    revision: int


class RunRow(NamedTuple):
    """A run, and how to find what belongs to it."""

    run: Run
    key: str
    order: int
    #: The highest so far; None: there are no events.
    last_sequence: int | None


class ApprovalRow(NamedTuple):
    """An approval and its place in the order of requests."""

    approval: Approval
    order: int


class DeletedRow(NamedTuple):
    """What is left of a deleted thread lies under these keys."""

    key: str
    runs: list[str]


# --- going in ------------------------------------------------------------------------------


def pack_thread(row: ThreadRow) -> dict[str, Any]:
    """A thread as its row holds it."""
    value = row.thread._asdict()
    del value["id"]
    return {**value, "key": row.key, "order": row.order, "latest": row.latest, "rev": row.revision}


def pack_run(row: RunRow) -> dict[str, Any]:
    """A run as its row holds it."""
    value = row.run._asdict()
    del value["id"]
    value["checkpoint"] = pack_checkpoint(row.run.checkpoint)
    return {**value, "key": row.key, "order": row.order, "last": row.last_sequence}


def pack_event(event: Event) -> dict[str, Any]:
    """An event as its row holds it."""
    return {"event": event.event, "at": event.created_at_ms}


def pack_message(message: Message) -> dict[str, Any]:
    """A message as its row holds it."""
    return {
        "role": message.role,
        "content": message.content,
        "run": message.run,
        "at": message.created_at_ms,
    }


def pack_approval(row: ApprovalRow) -> dict[str, Any]:
    """An approval as its row holds it."""
    value = row.approval._asdict()
    del value["id"]
    value["checkpoint"] = pack_checkpoint(row.approval.checkpoint)
    value["allowed"] = list(row.approval.allowed)
    value["events"] = list(row.approval.events)
    return {**value, "order": row.order}


def pack_request(request: RunRequest) -> dict[str, Any]:
    """A request as its row holds it."""
    value = request._asdict()
    del value["run"]
    return value


def pack_intent(intent: RecoveryIntent) -> dict[str, Any]:
    """An intent as its row holds it."""
    value = intent._asdict()
    del value["run"]
    value["checkpoint"] = pack_checkpoint(intent.checkpoint)
    return value


def pack_artifact(artifact: Artifact) -> dict[str, Any]:
    """An artifact as its row holds it."""
    return {
        "id": artifact.id,
        "kind": artifact.kind,
        "path": artifact.path,
        "content": Link(artifact.digest),
        "blob": artifact.is_blob,
        "at": artifact.created_at_ms,
    }


def pack_checkpoint(ref: CheckpointRef | None) -> Any:
    """A reference as rows hold it: a text, or session and revision."""
    return list(ref) if isinstance(ref, SessionCheckpoint) else ref


# --- coming out: a row that cannot be read is an error, never nothing --------------------------

_THREAD: Final = {
    "workspace": (str,),
    "agent": (str,),
    "status": (str, _NONE),
    "latest_run": (str, _NONE),
    "created_at_ms": (int,),
    "updated_at_ms": (int,),
    "runs": (int,),
    "messages": (int,),
    "events": (int,),
    "artifacts": (int,),
    "approvals": (int,),
    "key": (str,),
    "order": (int,),
    "latest": (int,),
    "rev": (int,),
}
_RUN: Final = {
    "thread": (str,),
    "agent": (str,),
    "mode": (str,),
    "adapter": (str,),
    "created_at_ms": (int,),
    "updated_at_ms": (int,),
    "state": (str,),
    "previous_state": (str, _NONE),
    "state_entered_at_ms": (int,),
    "last_transition_at_ms": (int,),
    "checkpoint": (str, list, _NONE),
    "number": (int,),
    "events": (int,),
    "artifacts": (int,),
    "key": (str,),
    "order": (int,),
    "last": (int, _NONE),
}
_EVENT: Final = {"event": _ANY, "at": (int,)}
_MESSAGE: Final = {"role": (str,), "content": _ANY, "run": (str, _NONE), "at": (int,)}
_APPROVAL: Final = {
    "thread": (str,),
    "run": (str,),
    "action": (str,),
    "tool_call": (str,),
    "tool": (str,),
    "status": (str,),
    "allowed": (list,),
    "decision": (str, _NONE),
    "requested_at_ms": (int,),
    "resolved_at_ms": (int, _NONE),
    "preview": _ANY,
    "checkpoint": (str, list, _NONE),
    "events": (list,),
    "order": (int,),
}
_REQUEST: Final = {"thread": (str,), "input": _ANY, "invocation": _ANY, "saved_at_ms": (int,)}
_INTENT: Final = {
    "thread": (str,),
    "kind": (str,),
    "payload": _ANY,
    "checkpoint": (str, list, _NONE),
    "attempts": (int,),
    "saved_at_ms": (int,),
}
_ARTIFACT: Final = {
    "id": (str,),
    "kind": (str,),
    "path": (str,),
    "content": (Link,),
    "blob": (bool,),
    "at": (int,),
}
_DELETED: Final = {"runs": (list,)}


def _damaged(record: Record, what: str) -> CorruptionError:
    return CorruptionError(
        f"the row of {what} {' '.join(record.key)!r} is damaged, or of a newer kind; "
        "check the store"
    )


def read_value(record: Record, what: str) -> Any:
    """What a record holds; CorruptionError if that cannot be read."""
    try:
        return record.value
    except (CorruptionError, LimitError):
        raise
    except (CasstoreError, ValueError) as exc:
        raise _damaged(record, what) from exc


def _read(record: Record, what: str, kinds: Mapping[str, _Kinds]) -> dict[str, Any]:
    value = read_value(record, what)
    if type(value) is not dict or value.keys() != kinds.keys():
        raise _damaged(record, what)
    for name, allowed in kinds.items():
        if allowed is not None and type(value[name]) not in allowed:
            raise _damaged(record, what)
    if "checkpoint" in value:
        value["checkpoint"] = _checkpoint(record, what, value["checkpoint"])
    return value


def _checkpoint(record: Record, what: str, value: Any) -> CheckpointRef | None:
    if type(value) is not list:
        # Its kind was looked at, with those of the other fields.
        name: str | None = value
        return name
    if len(value) != 2 or type(value[0]) is not str or type(value[1]) is not int:
        raise _damaged(record, what)
    return SessionCheckpoint(*value)


def read_text(record: Record, what: str) -> str:
    """The name that an entry of an order holds."""
    value = read_value(record, what)
    if type(value) is not str:
        raise _damaged(record, what)
    return value


def read_number(record: Record, what: str) -> int:
    """The number that a record holds."""
    value = read_value(record, what)
    if type(value) is not int or value < 0:
        raise _damaged(record, what)
    return value


def read_thread(record: Record) -> ThreadRow:
    """The thread of a row."""
    value = _read(record, "thread", _THREAD)
    row = [value.pop(name) for name in ("key", "order", "latest", "rev")]
    return ThreadRow(Thread(id=record.key[0], **value), *row)


def read_run(record: Record) -> RunRow:
    """The run of a row."""
    value = _read(record, "run", _RUN)
    row = [value.pop(name) for name in ("key", "order", "last")]
    return RunRow(Run(id=record.key[0], **value), *row)


def read_event(record: Record, run: Run) -> Event:
    """The event of a row."""
    value = _read(record, "event", _EVENT)
    return Event(run.thread, run.id, int(record.key[1]), value["event"], value["at"])


def read_message(record: Record, thread: str) -> Message:
    """The message of a row."""
    value = _read(record, "message", _MESSAGE)
    said = value["role"], value["content"], value["run"], value["at"]
    return Message(thread, int(record.key[1]), *said)


def read_approval(record: Record) -> ApprovalRow:
    """The approval of a row."""
    value = _read(record, "approval", _APPROVAL)
    order = value.pop("order")
    value["allowed"] = tuple(value["allowed"])
    value["events"] = tuple(value["events"])
    if not all(type(one) is str for one in value["allowed"]):
        raise _damaged(record, "approval")
    return ApprovalRow(Approval(id=record.key[0], **value), order)


def read_request(record: Record) -> RunRequest:
    """The request of a row."""
    return RunRequest(run=record.key[0], **_read(record, "run request", _REQUEST))


def read_intent(record: Record) -> RecoveryIntent:
    """The intent of a row."""
    return RecoveryIntent(run=record.key[0], **_read(record, "recovery intent", _INTENT))


def read_artifact(record: Record, run: Run) -> Artifact:
    """The artifact of a row, without its content."""
    value = _read(record, "artifact", _ARTIFACT)
    return Artifact(
        run.thread,
        run.id,
        value["id"],
        value["kind"],
        value["path"],
        value["content"].digest,
        value["blob"],
        value["at"],
        int(record.key[1]),
    )


def read_deleted(record: Record) -> DeletedRow:
    """What a deleted thread has left."""
    return DeletedRow(record.key[0], _read(record, "deleted thread", _DELETED)["runs"])
