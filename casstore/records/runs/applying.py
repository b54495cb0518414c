"""The steps on a thread: what each requires, and which rows it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import (
    ApprovalResolvedError,
    CorruptionError,
    DecisionNotAllowedError,
    InvalidInputError,
    RecordConflictError,
    RecordNotFoundError,
)
from casstore.format.digest import Digest
from casstore.records.runs import steps
from casstore.records.runs.data import (
    EXPIRED,
    KEEP,
    PENDING,
    RUNNING,
    STATUS_OF,
    Approval,
    Artifact,
    Event,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    ThreadMessage,
)
from casstore.records.runs.names import (
    check_id,
    check_number,
    check_path,
    same_value,
    value_digest,
)
from casstore.records.runs.tables import (
    APPROVALS,
    ApprovalRow,
    ArtifactRow,
    EventRow,
    RunRow,
    RunTables,
    ThreadMessageRow,
)
from casstore.records.runs.working import Working
from casstore.records.schema import RowPlace, RowTable, number_text
from casstore.session.arguments import check_flag
from casstore.session.records import Draft


class Applied(NamedTuple):
    """Steps ready to be written."""

    #: The result of each step.
    results: tuple[Any, ...]
    #: None: the steps change nothing.
    draft: Draft | None


def apply(
    tables: RunTables,
    thread: str,
    todo: Sequence[steps.Step],
    committed: SessionCheckpoint | None = None,
) -> Applied:
    """Read a thread and build the write that applies the steps to it; writes nothing."""
    check_id(thread, "a thread")
    for step in todo:
        if type(step) not in _HANDLERS:
            raise InvalidInputError(
                f"a step must be of a class in casstore.records.runs.steps, got {step!r:.80}"
            )
    work = Working(tables, thread, _places(tables, todo), committed)
    results = tuple([_HANDLERS[type(step)](work, step) for step in todo])
    return Applied(results, work.finish() if work.is_changed else None)


def _places(tables: RunTables, todo: Sequence[steps.Step]) -> list[RowPlace]:
    """The rows that the steps need, to be read in one transaction."""
    places: dict[tuple[bytes, str], RowPlace] = {}

    def want(table: Any, name: str, what: str) -> None:
        places[table.keys.start, name] = (table, (check_id(name, what),))

    for step in todo:
        if step.run is not None or not isinstance(step, steps.AppendMessage):
            want(tables.runs, step.run, "a run")
        if isinstance(step, steps.RequestApproval | steps.ResolveApproval | steps.ExpireApproval):
            want(tables.approvals, step.approval, "an approval")
        if isinstance(step, steps.SaveIntent | steps.BeginAttempt | steps.ClearIntent):
            want(tables.intents, step.run, "a run")
        if isinstance(step, steps.ClearRequest):
            want(tables.requests, step.run, "a run")
    return list(places.values())


# --- runs -------------------------------------------------------------------------------------


def _create_run(work: Working, step: steps.CreateRun) -> Run:
    check_id(step.agent, "an agent")
    check_id(step.mode, "a mode")
    adapter = step.mode if step.adapter is None else check_id(step.adapter, "an adapter")
    found = work.find_run(step.run)
    if found is not None:
        there = found.run
        if there.thread != work.thread.id:
            raise RecordConflictError("run", step.run, f"belongs to thread {there.thread!r}")
        if (there.agent, there.mode, there.adapter) != (step.agent, step.mode, adapter):
            raise RecordConflictError("run", step.run, "exists with another agent, mode or adapter")
        return there
    at_ms = work.time_of(step.at_ms)
    run = Run(
        id=step.run,
        thread=work.thread.id,
        agent=step.agent,
        mode=step.mode,
        adapter=adapter,
        created_at_ms=at_ms,
        updated_at_ms=at_ms,
        state=RUNNING,
        previous_state=None,
        state_entered_at_ms=at_ms,
        last_transition_at_ms=at_ms,
        checkpoint=None,
        number=work.thread.runs + 1,
        events=0,
        artifacts=0,
    )
    key = number_text(work.numbers.take())
    work.put_run(RunRow(run, key, work.key, work.numbers.take()))
    work.change_thread(runs=run.number)
    _mirror(work, run)
    return run


def _set_state(work: Working, step: steps.SetState) -> Run:
    check_id(step.state, "a state")
    row = work.run(step.run)
    at_ms = work.time_of(step.at_ms)
    run = row.run._replace(
        state=step.state,
        previous_state=row.run.state,
        state_entered_at_ms=at_ms,
        last_transition_at_ms=at_ms,
        updated_at_ms=at_ms,
        checkpoint=work.checkpoint(step.checkpoint, row.run.checkpoint),
    )
    work.put_run(row._replace(run=run, order=work.numbers.take()))
    _mirror(work, run)
    return run


def _renew_protection(work: Working, step: steps.RenewProtection) -> Run:
    run = work.run(step.run).run
    work.renew_protection(step.run)
    return run


def _mirror(work: Working, run: Run) -> None:
    """Copy the state of the latest run into the thread; of an older run, only the time."""
    # The thread's time never goes back, even if a caller gives an earlier time.
    updated_at_ms = max(work.thread.updated_at_ms, run.updated_at_ms)
    if run.number < work.latest:
        work.change_thread(moves=True, updated_at_ms=updated_at_ms)
    else:
        work.change_thread(
            moves=True,
            latest=run.number,
            latest_run=run.id,
            status=run.state,
            updated_at_ms=updated_at_ms,
        )


# --- events and messages ------------------------------------------------------------------------


def _append_event(work: Working, step: steps.AppendEvent) -> Event:
    row = work.run(step.run)
    last = row.last_sequence
    if step.sequence is None:
        sequence = check_number(1 if last is None else last + 1, "sequence")
    else:
        sequence = check_number(step.sequence, "sequence")
    if last is not None and sequence <= last:
        there = _find_event(work, row, sequence)
        if there is not None:
            if not same_value(there.event, step.event):
                raise RecordConflictError(
                    "event", f"{step.run} {sequence}", "exists with other content"
                )
            return there
    event = Event(work.thread.id, step.run, sequence, step.event, work.time_of(step.at_ms))
    work.tables.events.put(work.draft, EventRow(row.key, *event[2:]))
    work.new_events[row.key, sequence] = event
    run = row.run._replace(events=row.run.events + 1)
    work.put_run(row._replace(run=run, last_sequence=max(sequence, last or 0)))
    work.change_thread(events=work.thread.events + 1)
    return event


def _find_event(work: Working, row: RunRow, sequence: int) -> Event | None:
    known = work.new_events.get((row.key, sequence))
    if known is not None:
        return known
    found = work.tables.events.get(row.key, sequence)
    return None if found is None else found.public(row.run)


def _append_message(work: Working, step: steps.AppendMessage) -> ThreadMessage:
    check_id(step.role, "a role")
    if step.run is not None:
        work.run(step.run)
    number = work.thread.messages + 1
    at_ms = work.time_of(step.at_ms)
    message = ThreadMessage(
        thread=work.thread.id,
        number=number,
        role=step.role,
        content=step.content,
        run=step.run,
        created_at_ms=at_ms,
    )
    work.tables.messages.put(work.draft, ThreadMessageRow(work.key, *message[1:]))
    work.change_thread(messages=number)
    return message


# --- approvals ----------------------------------------------------------------------------------


def _request_approval(work: Working, step: steps.RequestApproval) -> Approval:
    row = work.run(step.run)
    checkpoint = work.checkpoint(step.checkpoint, row.run.checkpoint)
    if checkpoint is None and step.checkpoint is KEEP:
        raise InvalidInputError(
            f"run {step.run!r} has no checkpoint to resume from: pass checkpoint for approval "
            f"{step.approval!r}, or None for an approval without one"
        )
    check_id(step.tool, "a tool")
    if type(step.tool_call) is not str:
        raise InvalidInputError(f"tool_call must be a str, got {step.tool_call!r}")
    if type(step.events) not in (list, tuple):
        raise InvalidInputError(f"events must be a list or tuple, got {type(step.events).__name__}")
    approval = Approval(
        id=step.approval,
        thread=work.thread.id,
        run=step.run,
        action=step.approval if step.action is None else check_id(step.action, "an action"),
        tool_call=step.tool_call,
        tool=step.tool,
        status=PENDING,
        allowed=_decisions(step.allowed),
        decision=None,
        requested_at_ms=work.time_of(step.at_ms),
        resolved_at_ms=None,
        preview=step.preview,
        checkpoint=checkpoint,
        events=tuple(step.events),
    )
    approvals = work.tables.approvals
    found = work.find(approvals, step.approval)
    if found is None:
        work.put(approvals, approval.id, ApprovalRow(approval, work.key, work.numbers.take()))
        work.change_thread(approvals=work.thread.approvals + 1)
        return approval
    asked = found.approval._replace(
        status=PENDING,
        decision=None,
        resolved_at_ms=None,
        requested_at_ms=approval.requested_at_ms,
    )
    if not same_value(_plain(asked), _plain(approval)):
        raise RecordConflictError("approval", step.approval, "exists with other content")
    return found.approval


def _decisions(allowed: Sequence[str]) -> tuple[str, ...]:
    if isinstance(allowed, str) or not isinstance(allowed, Sequence) or not allowed:
        raise InvalidInputError(f"allowed must be a sequence of at least one str, got {allowed!r}")
    decisions = tuple([check_id(one, "a decision") for one in allowed])
    if len(set(decisions)) != len(decisions) or PENDING in decisions:
        raise InvalidInputError(
            f"decisions must differ from each other and from {PENDING!r}, got {decisions!r}"
        )
    return decisions


def _resolve_approval(work: Working, step: steps.ResolveApproval) -> Approval:
    approval = _pending_approval(work, step).approval
    if step.decision not in approval.allowed:
        raise DecisionNotAllowedError(step.approval, step.decision, approval.allowed)
    status = STATUS_OF.get(step.decision, step.decision)
    return _end_approval(work, step, status, step.decision)


def _expire_approval(work: Working, step: steps.ExpireApproval) -> Approval:
    return _end_approval(work, step, EXPIRED, None)


def _pending_approval(
    work: Working, step: steps.ResolveApproval | steps.ExpireApproval
) -> ApprovalRow:
    """The approval of a step, if it is not resolved; ApprovalResolvedError if it is."""
    row = work.run(step.run)
    found = work.find(work.tables.approvals, step.approval)
    if found is None or found.approval.run != row.run.id:
        raise RecordNotFoundError("approval", step.approval, f"of run {step.run!r}")
    if found.approval.status != PENDING:
        raise ApprovalResolvedError(step.approval, found.approval.status)
    return found


def _end_approval(
    work: Working,
    step: steps.ResolveApproval | steps.ExpireApproval,
    status: str,
    decision: str | None,
) -> Approval:
    found = _pending_approval(work, step)
    ended = found.approval._replace(
        status=status, decision=decision, resolved_at_ms=work.time_of(step.at_ms)
    )
    work.put(work.tables.approvals, ended.id, found._replace(approval=ended))
    return ended


# --- requests and recovery intents ----------------------------------------------------------------


def _save_request(work: Working, step: steps.SaveRequest) -> RunRequest:
    work.run(step.run)
    at_ms = work.time_of(step.at_ms)
    request = RunRequest(step.run, work.thread.id, step.input, step.invocation, at_ms)
    work.put(work.tables.requests, step.run, request)
    return request


def _clear_request(work: Working, step: steps.ClearRequest) -> bool:
    return _clear(work, work.tables.requests, step.run)


def _save_intent(work: Working, step: steps.SaveIntent) -> RecoveryIntent:
    row = work.run(step.run)
    intent = RecoveryIntent(
        run=step.run,
        thread=work.thread.id,
        kind=check_id(step.kind, "a kind"),
        payload=step.payload,
        checkpoint=work.checkpoint(step.checkpoint, row.run.checkpoint),
        attempts=check_number(step.attempts, "attempts"),
        saved_at_ms=work.time_of(step.at_ms),
    )
    work.put(work.tables.intents, step.run, intent)
    return intent


def _begin_attempt(work: Working, step: steps.BeginAttempt) -> RecoveryIntent:
    work.run(step.run)
    found = work.find(work.tables.intents, step.run)
    if found is None:
        raise RecordNotFoundError("recovery intent", step.run)
    intent = found._replace(attempts=found.attempts + 1)
    work.put(work.tables.intents, step.run, intent)
    return intent


def _clear_intent(work: Working, step: steps.ClearIntent) -> bool:
    return _clear(work, work.tables.intents, step.run)


def _clear(work: Working, table: RowTable[Any], run: str) -> bool:
    work.run(run)
    if not work.has(table, run):
        return False
    work.delete(table, run)
    return True


# --- artifacts ------------------------------------------------------------------------------------


def _put_artifact(work: Working, step: steps.PutArtifact) -> Artifact:
    row = work.run(step.run)
    path = check_path(step.path)
    name = path if step.artifact is None else check_id(step.artifact, "an artifact")
    check_id(step.kind, "a kind")
    check_flag(step.replace, "replace")
    is_blob = type(step.content) is bytes
    digest = Digest.of_blob(step.content) if is_blob else value_digest(step.content)
    number = row.run.artifacts + 1
    artifact = Artifact(
        thread=work.thread.id,
        run=step.run,
        id=name,
        kind=step.kind,
        path=path,
        digest=digest,
        is_blob=is_blob,
        created_at_ms=work.time_of(step.at_ms),
        number=number,
    )
    there = _find_artifact(work, row, path)
    if there is not None:
        expected = there._replace(created_at_ms=artifact.created_at_ms, number=number)
        if expected == artifact:
            return there
        if not step.replace:
            raise RecordConflictError("artifact", path, "exists with other content")
        artifact = artifact._replace(number=there.number)
    work.draft.keep_blob(step.content) if is_blob else work.draft.keep(step.content)
    work.tables.artifacts.put(work.draft, ArtifactRow.of(row.key, artifact))
    work.new_artifacts[row.key, path] = artifact
    work.is_changed = True
    if there is None:
        work.put_run(row._replace(run=row.run._replace(artifacts=number)))
        work.change_thread(artifacts=work.thread.artifacts + 1)
    return artifact


def _find_artifact(work: Working, row: RunRow, path: str) -> Artifact | None:
    known = work.new_artifacts.get((row.key, path))
    if known is not None:
        return known
    entry = work.tables.artifact_paths.find(row.key, path)
    if entry is None:
        return None
    found = work.tables.artifacts.get(*work.tables.artifact_paths.leads_to(entry))
    if found is None:
        raise CorruptionError(f"artifact {path!r} of run {row.run.id!r} is lost; check the store")
    return found.public(row.run)


def _plain(approval: Approval) -> list[Any]:
    return list(APPROVALS.encode(ApprovalRow(approval, "", 0)))


_HANDLERS: Final[dict[type, Callable[[Working, Any], Any]]] = {
    steps.CreateRun: _create_run,
    steps.SetState: _set_state,
    steps.RenewProtection: _renew_protection,
    steps.AppendEvent: _append_event,
    steps.AppendMessage: _append_message,
    steps.RequestApproval: _request_approval,
    steps.ResolveApproval: _resolve_approval,
    steps.ExpireApproval: _expire_approval,
    steps.SaveRequest: _save_request,
    steps.ClearRequest: _clear_request,
    steps.SaveIntent: _save_intent,
    steps.BeginAttempt: _begin_attempt,
    steps.ClearIntent: _clear_intent,
    steps.PutArtifact: _put_artifact,
}
