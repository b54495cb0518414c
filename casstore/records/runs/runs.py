"""``Runs``: the API of threads and runs. Each method that writes is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.engine.protocol import RowIs, Write
from casstore.errors import (
    CasstoreError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    RecordNotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.records.runs import applying, steps, threads
from casstore.records.runs.data import (
    APPROVAL_DECISION,
    KEEP,
    Approval,
    Artifact,
    Event,
    NewCheckpoint,
    Page,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    Thread,
    ThreadMessage,
)
from casstore.records.runs.reading import Reading
from casstore.records.runs.tables import RunTables
from casstore.session.arguments import check_kind
from casstore.session.attempts import read_again, transaction
from casstore.session.commit import checked_commit
from casstore.session.data import Commit, CommitResult
from casstore.session.session import Session
from casstore.store import Store

Given = TypeVar("Given")


# A condition that never holds. A commit with it writes nothing: it returns the first result of its
# turn if that was committed before, because a replay ignores conditions, and else fails.
_NEVER: Final = Write(conditions=[RowIs("records", b"runs.never", b"")])


class Committed(NamedTuple):
    """The results of a commit and of the steps in its write; no steps if the turn was replayed.

    >>> change = Commit(append=[NodeDraft("n1", "hello")], expected=0)
    >>> done = runs.commit("work", change, "t", steps.SetState("r", "completed"))
    >>> done.result.revision, [run.state for run in done.steps]
    (1, ['completed'])
    """

    result: CommitResult
    steps: tuple[Any, ...] | None


def _read_again(read: Callable[[], Given]) -> Given:
    """``read_again``, but only if gc has collected an object between two reads.

    A read is not repeated for a missing record: a new record of the same name is another one.
    """
    return read_again(read, (CorruptionError,))


class Runs:
    """Threads, runs and their records in a store.

    ``find_…`` returns None if the record that it looks for does not exist. Any other use of a
    thread or run that does not exist raises RecordNotFoundError. Safe to use from many threads and
    processes.

    A call that stores a time takes ``at_ms``, the time to store: milliseconds since 1970, or None
    for now. Orders do not depend on it.

    The examples use ``runs``, with the thread ``t`` of the agent ``helper``, and in it the run
    ``r``, which is running. ``store`` is their store.

    >>> message = runs.append_message("t", "user", "Tidy up.", run="r")
    >>> run = runs.set_state("t", "r", "completed")
    >>> runs.find_thread("t").status
    'completed'
    """

    def __init__(self, store: Store) -> None:
        self._tables = RunTables(store)
        self._reading = Reading(self._tables)

    # --- several steps, one write ---------------------------------------------------------

    @transaction("thread {thread!r}")
    def apply(self, thread: str, *todo: steps.Step) -> tuple[Any, ...]:
        """Apply steps to a thread, all or none; returns the result of each step, in order.

        >>> said = steps.AppendMessage("assistant", "Done.", "r")
        >>> run, message = runs.apply("t", steps.SetState("r", "completed"), said)
        >>> run.state, message.number
        ('completed', 1)
        """
        applied = applying.apply(self._tables, thread, todo)
        if applied.draft is not None:
            applied.draft.commit()
        return applied.results

    @transaction("thread {thread!r}")
    def commit(self, session: str, change: Commit, thread: str, *todo: steps.Step) -> Committed:
        """Commit to a session and apply steps to a thread in one write: both, or neither.

        A step may name the checkpoint COMMITTED: the revision that this commit creates. The commit
        must then give the revision it ``expected``.

        >>> change = Commit(append=[NodeDraft("n1", "may I?")], expected=0)
        >>> wait = steps.SetState("r", "waiting_for_approval", COMMITTED)
        >>> done = runs.commit("work", change, "t", wait)
        >>> runs.get_run("t", "r").checkpoint
        SessionCheckpoint(session='work', revision=1)
        """
        checked_commit(change)
        if change.also is not None:
            raise InvalidInputError("change.also must be None: the steps use it in this commit")
        committing = self._tables.store.session(session)
        committed = None
        if change.expected is not None:
            committed = SessionCheckpoint(session, change.expected + 1)
        try:
            applied = applying.apply(self._tables, thread, todo, committed)
        except CasstoreError:
            # The steps may fail because they were applied before, in the same turn.
            replayed = _replay(committing, change)
            if replayed is None:
                raise
            return Committed(replayed, None)
        also = None if applied.draft is None else applied.draft.as_write()
        result = committing.commit(change._replace(also=also))
        return Committed(result, None if result.replayed else applied.results)

    # --- threads --------------------------------------------------------------------------

    def create_thread(
        self, thread: str, agent: str, *, workspace: str = "default", at_ms: int | None = None
    ) -> Thread:
        """Create a thread. Repeating it with the same agent and workspace returns the existing one.

        >>> made = runs.create_thread("t2", "planner", at_ms=1_700_000_000_000)
        >>> made.agent, made.created_at_ms
        ('planner', 1700000000000)
        """
        return _read_again(
            lambda: threads.create(
                self._tables, thread, agent=agent, workspace=workspace, at_ms=at_ms
            )
        )

    def find_thread(self, thread: str) -> Thread | None:
        """A thread, or None if it does not exist.

        >>> thread = runs.find_thread("t")
        >>> thread.agent, thread.latest_run, thread.status
        ('helper', 'r', 'running')
        """
        return _read_again(lambda: self._reading.find_thread(thread))

    def threads(
        self,
        *,
        status: str | None = None,
        agent: str | None = None,
        workspace: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Thread]:
        """A page of the threads that match all filters, most recently changed first.

        >>> thread = runs.create_thread("t2", "planner")
        >>> [thread.id for thread in runs.threads(agent="planner").items]
        ['t2']
        """
        return _read_again(
            lambda: self._reading.threads(
                limit, cursor, status=status, agent=agent, workspace=workspace
            )
        )

    def delete_thread(self, thread: str) -> bool:
        """Delete a thread with everything in it, all or nothing; False if it does not exist.

        gc removes the objects that only this thread referred to.

        >>> runs.delete_thread("t"), runs.find_run("r")
        (True, None)
        """
        return threads.delete(self._tables, thread)

    def finish_deletions(self) -> int:
        """Finish interrupted deletions of large threads; returns the number of threads.

        >>> runs.finish_deletions()  # none was cut short
        0
        """
        return threads.finish_all(self._tables)

    # --- runs -----------------------------------------------------------------------------

    def create_run(
        self,
        thread: str,
        run: str,
        agent: str,
        mode: str,
        *,
        adapter: str | None = None,
        at_ms: int | None = None,
    ) -> Run:
        """Create a run; it becomes the latest run of the thread.

        >>> runs.create_run("t", "r2", "helper", "stream").state
        'running'
        >>> runs.find_thread("t").latest_run
        'r2'
        """
        return self._one(thread, steps.CreateRun(run, agent, mode, adapter, at_ms), Run)

    def set_state(
        self,
        thread: str,
        run: str,
        state: str,
        *,
        checkpoint: NewCheckpoint = KEEP,
        at_ms: int | None = None,
    ) -> Run:
        """Set the state of a run; its checkpoint is kept, removed (None or "") or replaced.

        If the checkpoint is a revision of a session, it is protected until the run ends.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> run.resumable, run.checkpoint
        (True, 'checkpoints/17')
        """
        return self._one(thread, steps.SetState(run, state, checkpoint, at_ms), Run)

    def find_run(self, run: str) -> Run | None:
        """A run, or None if it does not exist.

        >>> runs.find_run("r").thread, runs.find_run("nothing")
        ('t', None)
        """
        return _read_again(lambda: self._reading.find_run(run))

    def get_run(self, thread: str, run: str) -> Run:
        """A run of a thread, or RecordNotFoundError.

        >>> runs.get_run("t", "r").mode
        'stream'
        """
        return _read_again(lambda: self._reading.run(thread, run).run)

    def runs(
        self,
        *,
        state: str | None = None,
        agent: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Run]:
        """A page of the runs of all threads, most recently changed first.

        >>> run = runs.create_run("t", "r2", "helper", "stream")
        >>> run = runs.set_state("t", "r", "completed")
        >>> [run.id for run in runs.runs(state="running").items]
        ['r2']
        """
        return _read_again(lambda: self._reading.runs(limit, cursor, state, agent))

    def thread_runs(
        self, thread: str, *, state: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Run]:
        """A page of the runs of a thread, most recently created first.

        >>> run = runs.create_run("t", "r2", "helper", "stream")
        >>> [run.id for run in runs.thread_runs("t").items]
        ['r2', 'r']
        """
        return _read_again(lambda: self._reading.thread_runs(thread, limit, cursor, state))

    def protected_runs(self) -> Iterator[Run]:
        """The runs with a checkpoint that they can resume from, by id.

        RecordNotFoundError if the store has never held runs, CorruptionError if a run cannot be
        read; neither means that no run is protected.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> [(run.id, run.checkpoint) for run in runs.protected_runs()]
        [('r', 'checkpoints/17')]
        """
        return (run for run in self._reading.all_runs() if run.protected)

    def protected_threads(self) -> frozenset[str]:
        """The threads whose checkpoints another store must not remove.

        Raises the same errors as ``protected_runs``; after one, remove no checkpoint.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> sorted(runs.protected_threads())
        ['t']
        """
        return frozenset([run.thread for run in self.protected_runs()])

    def renew_protections(self) -> list[Run]:
        """Protect again the revisions that runs resume from; returns runs whose checkpoint is gone.

        For a store that has lost its protections, for example after salvage.

        >>> start = SessionCheckpoint("s", 1)
        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint=start)
        >>> [protector] = store.session("s").protections()
        >>> store.session("s").unprotect(protector.by), runs.renew_protections()
        (1, [])
        >>> len(store.session("s").protections())
        1
        """
        gone: list[Run] = []
        for run in self.protected_runs():
            if isinstance(run.checkpoint, SessionCheckpoint):
                try:
                    self.apply(run.thread, steps.RenewProtection(run.id))
                except (SessionNotFoundError, SessionDeletedError, RevisionNotFoundError):
                    gone.append(run)
                except RecordNotFoundError:
                    continue  # deleted meanwhile, together with its protection
        return gone

    # --- events and messages ----------------------------------------------------------------

    def append_event(
        self,
        thread: str,
        run: str,
        event: Any,
        *,
        sequence: int | None = None,
        at_ms: int | None = None,
    ) -> Event:
        """Append an event, as the next one or with a given sequence number.

        If the number is taken: by the same event, it is returned; by another, RecordConflictError.

        >>> event = runs.append_event("t", "r", {"type": "tool", "name": "shell"})
        >>> event.sequence
        1
        """
        return self._one(thread, steps.AppendEvent(run, event, sequence, at_ms), Event)

    def find_event(self, thread: str, run: str, sequence: int) -> Event | None:
        """One event, or None if it does not exist.

        >>> event = runs.append_event("t", "r", {"type": "started"})
        >>> runs.find_event("t", "r", 1).event
        {'type': 'started'}
        """
        return _read_again(lambda: self._reading.find_event(thread, run, sequence))

    def events(
        self,
        thread: str,
        run: str,
        *,
        after: int | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Event]:
        """A page of the events of a run in order of their numbers, starting after ``after``.

        >>> for kind in ("started", "tool", "ended"):
        ...     event = runs.append_event("t", "r", {"type": kind})
        >>> [event.event["type"] for event in runs.events("t", "r", after=1).items]
        ['tool', 'ended']
        """
        return _read_again(lambda: self._reading.events(thread, run, limit, cursor, after))

    def append_message(
        self,
        thread: str,
        role: str,
        content: Any,
        *,
        run: str | None = None,
        at_ms: int | None = None,
    ) -> ThreadMessage:
        """Append a message to a thread.

        >>> runs.append_message("t", "user", "Tidy up.", run="r").number
        1
        """
        return self._one(thread, steps.AppendMessage(role, content, run, at_ms), ThreadMessage)

    def messages(
        self, thread: str, *, limit: int = 12, before: int | None = None
    ) -> list[ThreadMessage]:
        """The last ``limit`` messages, or the last before number ``before``, oldest first.

        >>> for text in ("Tidy up.", "Which part?", "All of it."):
        ...     message = runs.append_message("t", "user", text)
        >>> [message.content for message in runs.messages("t", limit=2)]
        ['Which part?', 'All of it.']
        """
        return _read_again(lambda: self._reading.messages(thread, limit, before))

    # --- approvals --------------------------------------------------------------------------

    def request_approval(
        self,
        thread: str,
        run: str,
        approval: str,
        tool: str,
        *,
        checkpoint: NewCheckpoint = KEEP,
        allowed: Sequence[str] = steps.DECISIONS,
        preview: Any = None,
        action: str | None = None,
        tool_call: str = "",
        events: Sequence[Any] = (),
        at_ms: int | None = None,
    ) -> Approval:
        """Request a decision. The run's checkpoint is used unless ``checkpoint`` is given.

        With None or "" the approval has no checkpoint. InvalidInputError if ``checkpoint`` is left
        out and the run has none.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> asked = runs.request_approval("t", "r", "a1", "shell", preview={"cmd": "git clean -fd"})
        >>> asked.status, asked.checkpoint
        ('pending', 'checkpoints/17')
        """
        asked = steps.RequestApproval(
            run, approval, tool, checkpoint, allowed, preview, action, tool_call, events, at_ms
        )
        return self._one(thread, asked, Approval)

    def resolve_approval(
        self,
        thread: str,
        run: str,
        approval: str,
        decision: str,
        *,
        intent: steps.SaveIntent | None = None,
        at_ms: int | None = None,
    ) -> Approval:
        """Resolve a pending approval; stores the recovery intent, if given, in the same write.

        ApprovalResolvedError if the approval is not pending; DecisionNotAllowedError if it does not
        allow the decision.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> intent = steps.SaveIntent("r", {"decision": "approve"}, checkpoint="checkpoints/17")
        >>> runs.resolve_approval("t", "r", "a1", "approve", intent=intent).decision
        'approve'
        >>> runs.find_intent("t", "r").payload
        {'decision': 'approve'}
        """
        todo: list[steps.Step] = [steps.ResolveApproval(run, approval, decision, at_ms)]
        if intent is not None:
            check_kind(intent, "intent", steps.SaveIntent)
            if intent.run != run:
                raise InvalidInputError(f"intent must be of run {run!r}, got one of {intent.run!r}")
            todo.append(intent)
        resolved: Approval = self.apply(thread, *todo)[0]
        return resolved

    def expire_approval(
        self, thread: str, run: str, approval: str, *, at_ms: int | None = None
    ) -> Approval:
        """End a pending approval without a decision.

        ApprovalResolvedError if the approval is not pending.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> runs.expire_approval("t", "r", "a1").status
        'expired'
        >>> [one.id for one in runs.approvals(status="pending").items]
        []
        """
        return self._one(thread, steps.ExpireApproval(run, approval, at_ms), Approval)

    def find_approval(self, approval: str) -> Approval | None:
        """An approval, or None if it does not exist.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> runs.find_approval("a1").tool
        'shell'
        """
        return _read_again(lambda: self._reading.find_approval(approval))

    def approvals(
        self,
        *,
        thread: str | None = None,
        run: str | None = None,
        status: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Approval]:
        """A page of the approvals that match all filters, in order of request.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> [(one.id, one.tool) for one in runs.approvals(status="pending").items]
        [('a1', 'shell')]
        """
        return _read_again(lambda: self._reading.approvals(thread, run, status, limit, cursor))

    # --- requests and recovery intents --------------------------------------------------------

    def save_request(
        self,
        thread: str,
        run: str,
        input: Any,
        *,
        invocation: Any = None,
        at_ms: int | None = None,
    ) -> RunRequest:
        """Store the request of a run: what to run, for the process that continues it.

        >>> runs.save_request("t", "r", {"text": "Tidy up."}).input
        {'text': 'Tidy up.'}
        """
        return self._one(thread, steps.SaveRequest(run, input, invocation, at_ms), RunRequest)

    def find_request(self, thread: str, run: str) -> RunRequest | None:
        """The stored request of a run, or None.

        >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
        >>> runs.find_request("t", "r").input
        {'text': 'Tidy up.'}
        """
        return _read_again(lambda: self._reading.find_request(thread, run))

    def requests(self, *, limit: int = 100, cursor: str | None = None) -> Page[RunRequest]:
        """A page of the stored requests, by run.

        >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
        >>> [request.run for request in runs.requests().items]  # to be done after a restart
        ['r']
        """
        return _read_again(lambda: self._reading.requests(limit, cursor))

    def clear_request(self, thread: str, run: str) -> bool:
        """Delete the request of a run; False if it has none.

        >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
        >>> runs.clear_request("t", "r"), runs.clear_request("t", "r")
        (True, False)
        """
        return self._one(thread, steps.ClearRequest(run), bool)

    def save_intent(
        self,
        thread: str,
        run: str,
        payload: Any,
        *,
        checkpoint: NewCheckpoint = KEEP,
        kind: str = APPROVAL_DECISION,
        attempts: int = 0,
        at_ms: int | None = None,
    ) -> RecoveryIntent:
        """Store how to resume a run, from its checkpoint or another, until it has resumed.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> intent.checkpoint, intent.attempts
        ('checkpoints/17', 0)
        """
        intent = steps.SaveIntent(run, payload, checkpoint, kind, attempts, at_ms)
        return self._one(thread, intent, RecoveryIntent)

    def find_intent(self, thread: str, run: str) -> RecoveryIntent | None:
        """The recovery intent of a run, or None.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> runs.find_intent("t", "r").payload
        {'decision': 'approve'}
        """
        return _read_again(lambda: self._reading.find_intent(thread, run))

    def intents(self, *, limit: int = 100, cursor: str | None = None) -> Page[RecoveryIntent]:
        """A page of the recovery intents, by run. After a restart, resume these runs first.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> [(intent.run, intent.attempts) for intent in runs.intents().items]
        [('r', 0)]
        """
        return _read_again(lambda: self._reading.intents(limit, cursor))

    def begin_attempt(self, thread: str, run: str) -> RecoveryIntent:
        """Count an attempt to resume before it starts; returns the intent.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> runs.begin_attempt("t", "r").attempts
        1
        """
        return self._one(thread, steps.BeginAttempt(run), RecoveryIntent)

    def clear_intent(self, thread: str, run: str) -> bool:
        """Delete the recovery intent after the run has resumed; False if it has none.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> runs.clear_intent("t", "r"), runs.clear_intent("t", "r")
        (True, False)
        """
        return self._one(thread, steps.ClearIntent(run), bool)

    # --- artifacts ----------------------------------------------------------------------------

    def put_artifact(
        self,
        thread: str,
        run: str,
        path: str,
        content: Any,
        kind: str,
        *,
        artifact: str | None = None,
        replace: bool = False,
        at_ms: int | None = None,
    ) -> Artifact:
        """Store an artifact of a run: bytes as a blob, anything else as a value.

        The path is relative and stays below its root. Other content under the same path raises
        RecordConflictError, unless ``replace`` is set.

        >>> made = runs.put_artifact("t", "r", "reports/summary.json", {"removed": 12}, "report")
        >>> made.path, made.is_blob
        ('reports/summary.json', False)
        """
        made = steps.PutArtifact(run, path, content, kind, artifact, replace, at_ms)
        return self._one(thread, made, Artifact)

    def find_artifact(self, thread: str, run: str, path: str) -> Artifact | None:
        """An artifact without its content, or None if it does not exist.

        >>> made = runs.put_artifact("t", "r", "map.png", b"pixels", "image")
        >>> runs.find_artifact("t", "r", "map.png").kind
        'image'
        """
        return _read_again(lambda: self._reading.find_artifact(thread, run, path))

    def read_artifact(
        self, thread: str, run: str, path: str, *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> Any:
        """The content of an artifact as it was put, or RecordNotFoundError.

        >>> made = runs.put_artifact("t", "r", "map.png", b"pixels", "image")
        >>> runs.read_artifact("t", "r", "map.png")
        b'pixels'
        """
        store = self._tables.store

        def read() -> Any:
            found = self._reading.find_artifact(thread, run, path)
            if found is None:
                raise RecordNotFoundError("artifact", path, f"of run {run!r}")
            get = store.get_blob if found.is_blob else store.get_value
            try:
                return get(found.digest, max_bytes=max_bytes)
            except ObjectNotFoundError as exc:
                raise CorruptionError(f"the content of artifact {path!r} is lost: {exc}") from exc

        return _read_again(read)

    def artifacts(
        self, thread: str, run: str, *, limit: int = 100, cursor: str | None = None
    ) -> Page[Artifact]:
        """A page of the artifacts of a run, in order of creation, without their contents.

        >>> for path in ("map.png", "reports/summary.json"):
        ...     made = runs.put_artifact("t", "r", path, b"content", "file")
        >>> [artifact.path for artifact in runs.artifacts("t", "r").items]
        ['map.png', 'reports/summary.json']
        """
        return _read_again(lambda: self._reading.artifacts(thread, run, limit, cursor))

    def _one(self, thread: str, step: steps.Step, kind: type[Given]) -> Given:
        """Apply one step whose result is of type ``kind``."""
        given = self.apply(thread, step)[0]
        assert isinstance(given, kind)
        return given


def _replay(session: Session, change: Commit) -> CommitResult | None:
    """The result of a turn that was committed before; None if it was not. Writes nothing new."""
    if change.turn is None:
        return None
    try:
        return session.commit(change._replace(also=_NEVER))
    except ConditionFailedError:
        return None
