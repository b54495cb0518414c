"""The face of runs: one method for everything; each that writes is one write."""

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
    Message,
    NewCheckpoint,
    Page,
    RecoveryIntent,
    Run,
    RunRequest,
    SessionCheckpoint,
    Thread,
)
from casstore.records.runs.reading import Reading
from casstore.records.runs.working import ground_of
from casstore.session.attempts import read_again, transact
from casstore.session.commit import check_commit
from casstore.session.data import Commit, CommitResult
from casstore.session.session import Session
from casstore.store import Store

Given = TypeVar("Given")


# A replay looks at no conditions, and everything else fails by this one.
_NEVER: Final = Write(conditions=[RowIs("records", b"runs.never", b"")])


class Committed(NamedTuple):
    """What a commit gave, and the steps beside it; None for these if the turn was replayed.

    >>> change = Commit(append=[NodeDraft("n1", "hello")], lease=UNFENCED, expected=0)
    >>> done = runs.commit("work", change, "t", steps.SetState("r", "completed"))
    >>> done.result.revision, [run.state for run in done.steps]
    (1, ['completed'])
    """

    result: CommitResult
    steps: tuple[Any, ...] | None


def _read_again(read: Callable[[], Given]) -> Given:
    """``read_again`` for collected objects alone.

    A record that is gone is not looked for again: a new one of its name is another record.
    """
    return read_again(read, (CorruptionError,))


class Runs:
    """Threads, runs and what belongs to them, in a store.

    ``find_…`` gives None for what is not there; whatever else names a thread or run that is
    not there raises RecordNotFoundError. Safe to use from many threads and processes.

    A call that stores a time takes ``at_ms``, the time to store: milliseconds since 1970, or None
    for now. Orders do not depend on it.

    The examples use ``runs``, with the thread ``t`` of the agent ``helper``, and in it the run
    ``r``, which goes on. ``store`` is their store.

    >>> message = runs.append_message("t", "user", "Tidy up.", run="r")
    >>> run = runs.set_state("t", "r", "completed")
    >>> runs.find_thread("t").status
    'completed'
    """

    def __init__(self, store: Store) -> None:
        self._ground = ground_of(store)
        self._reading = Reading(self._ground)

    # --- several steps, one write ---------------------------------------------------------

    def apply(self, thread: str, *todo: steps.Step) -> tuple[Any, ...]:
        """Take steps on a thread, all or none; what each of them gives, in order.

        >>> said = steps.AppendMessage("assistant", "Done.", "r")
        >>> run, message = runs.apply("t", steps.SetState("r", "completed"), said)
        >>> run.state, message.number
        ('completed', 1)
        """

        def attempt() -> tuple[Any, ...]:
            applied = applying.apply(self._ground, thread, todo)
            if applied.draft is not None:
                applied.draft.commit()
            return applied.results

        return transact(f"thread {thread!r}", attempt)

    def commit(self, session: str, change: Commit, thread: str, *todo: steps.Step) -> Committed:
        """Commit to a session and take steps on a thread in one write: both, or neither.

        A step may name the checkpoint COMMITTED: the revision that this commit makes. Then
        the commit must say which revision it ``expected``.

        >>> change = Commit(append=[NodeDraft("n1", "may I?")], lease=UNFENCED, expected=0)
        >>> wait = steps.SetState("r", "waiting_for_approval", COMMITTED)
        >>> done = runs.commit("work", change, "t", wait)
        >>> runs.get_run("t", "r").checkpoint
        SessionCheckpoint(session='work', revision=1)
        """
        check_commit(change)
        if change.beside is not None:
            raise InvalidInputError("the steps go beside this commit, and nothing else can")
        committing = self._ground.store.session(session)
        committed = None
        if change.expected is not None:
            committed = SessionCheckpoint(session, change.expected + 1)

        def attempt() -> Committed:
            try:
                applied = applying.apply(self._ground, thread, todo, committed)
            except CasstoreError:
                # Perhaps because they were taken before, with this very turn.
                replayed = _replay(committing, change)
                if replayed is None:
                    raise
                return Committed(replayed, None)
            beside = None if applied.draft is None else applied.draft.as_write()
            result = committing.commit(change._replace(beside=beside))
            return Committed(result, None if result.replayed else applied.results)

        return transact(f"thread {thread!r}", attempt)

    # --- threads --------------------------------------------------------------------------

    def create_thread(
        self, thread: str, agent: str, *, workspace: str = "default", at_ms: int | None = None
    ) -> Thread:
        """Begin a thread. Repeated with the same agent and workspace it gives what is there.

        >>> made = runs.create_thread("t2", "planner", at_ms=1_700_000_000_000)
        >>> made.agent, made.created_at_ms
        ('planner', 1700000000000)
        """
        return _read_again(
            lambda: threads.create(
                self._ground, thread, agent=agent, workspace=workspace, at_ms=at_ms
            )
        )

    def find_thread(self, thread: str) -> Thread | None:
        """A thread; None if there is none.

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
        """Threads, those changed last first.

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
        """Take a thread away with everything in it, all or nothing; False if it is not there.

        What only it held is garbage from then on.

        >>> runs.delete_thread("t"), runs.find_run("r")
        (True, None)
        """
        return threads.delete(self._ground, thread)

    def finish_deletions(self) -> int:
        """Remove what deletions of large threads have left if they were cut short; how many.

        >>> runs.finish_deletions()  # none was cut short
        0
        """
        keys = threads.unfinished(self._ground)
        for key in keys:
            threads.finish(self._ground, key)
        return len(keys)

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
        """Begin a run; it is the thread's latest from then on.

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
        """Move a run to a state; its checkpoint stays, goes (None or "") or is another.

        A revision of a session that it names is protected until the run comes to its end.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> run.resumable, run.checkpoint
        (True, 'checkpoints/17')
        """
        return self._one(thread, steps.SetState(run, state, checkpoint, at_ms), Run)

    def find_run(self, run: str) -> Run | None:
        """A run; None if there is none.

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
        """Runs of all threads, those changed last first.

        >>> run = runs.create_run("t", "r2", "helper", "stream")
        >>> run = runs.set_state("t", "r", "completed")
        >>> [run.id for run in runs.runs(state="running").items]
        ['r2']
        """
        return _read_again(lambda: self._reading.runs(limit, cursor, state, agent))

    def thread_runs(
        self, thread: str, *, state: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> Page[Run]:
        """The runs of a thread, those begun last first.

        >>> run = runs.create_run("t", "r2", "helper", "stream")
        >>> [run.id for run in runs.thread_runs("t").items]
        ['r2', 'r']
        """
        return _read_again(lambda: self._reading.thread_runs(thread, limit, cursor, state))

    def protected_runs(self) -> Iterator[Run]:
        """The runs with a checkpoint that somebody may come back to, by id.

        RecordNotFoundError if no runs were ever kept here, CorruptionError if one cannot be
        read: that is not the same as none.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> [(run.id, run.checkpoint) for run in runs.protected_runs()]
        [('r', 'checkpoints/17')]
        """
        return (run for run in self._reading.all_runs() if run.protected)

    def protected_threads(self) -> frozenset[str]:
        """The threads whose checkpoints a sweep elsewhere must leave alone.

        Fails like ``protected_runs``: then nothing may be swept.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> sorted(runs.protected_threads())
        ['t']
        """
        return frozenset([run.thread for run in self.protected_runs()])

    def renew_protections(self) -> list[Run]:
        """Protect again what runs may come back to; those whose checkpoint is gone.

        For a store that has lost its protections, as one that was salvaged.

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
                    continue  # it was deleted meanwhile, and its protection with it
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
        """Write down an event, as the next one or under its own number.

        A number that is taken by the same event gives that; by another, RecordConflictError.

        >>> event = runs.append_event("t", "r", {"type": "tool", "name": "shell"})
        >>> event.sequence
        1
        """
        return self._one(thread, steps.AppendEvent(run, event, sequence, at_ms), Event)

    def find_event(self, thread: str, run: str, sequence: int) -> Event | None:
        """One event; None if there is none.

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
        """The events of a run in order of their numbers, from behind ``after`` on.

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
    ) -> Message:
        """Add to what was said in a thread.

        >>> runs.append_message("t", "user", "Tidy up.", run="r").number
        1
        """
        return self._one(thread, steps.AppendMessage(role, content, run, at_ms), Message)

    def messages(self, thread: str, *, limit: int = 12, before: int | None = None) -> list[Message]:
        """The last messages, or the last before a number, oldest first.

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
        """Ask for a decision. The checkpoint to resume from is the run's unless it is given.

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
        """Decide, and keep in the same write how to go on, if that is given.

        ApprovalResolvedError if somebody has; DecisionNotAllowedError if it is not allowed.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> intent = steps.SaveIntent("r", {"decision": "approve"}, checkpoint="checkpoints/17")
        >>> runs.resolve_approval("t", "r", "a1", "approve", intent=intent).decision
        'approve'
        >>> runs.find_intent("t", "r").payload
        {'decision': 'approve'}
        """
        todo: list[steps.Step] = [steps.ResolveApproval(run, approval, decision, at_ms)]
        if intent is not None:
            if not isinstance(intent, steps.SaveIntent):
                raise InvalidInputError(f"an intent is a SaveIntent, not {type(intent).__name__}")
            if intent.run != run:
                raise InvalidInputError(f"an intent of run {intent.run!r}, not of {run!r}")
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
        """An approval; None if there is none.

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
        """Approvals in the order in which they were asked for.

        >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
        >>> [(one.id, one.tool) for one in runs.approvals(status="pending").items]
        [('a1', 'shell')]
        """
        return _read_again(lambda: self._reading.approvals(thread, run, status, limit, cursor))

    # --- what to run, and how to go on --------------------------------------------------------

    def save_request(
        self,
        thread: str,
        run: str,
        input: Any,
        *,
        invocation: Any = None,
        at_ms: int | None = None,
    ) -> RunRequest:
        """Keep what to run, until it is cleared.

        >>> runs.save_request("t", "r", {"text": "Tidy up."}).input
        {'text': 'Tidy up.'}
        """
        return self._one(thread, steps.SaveRequest(run, input, invocation, at_ms), RunRequest)

    def find_request(self, thread: str, run: str) -> RunRequest | None:
        """What is kept to be run; None if nothing is.

        >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
        >>> runs.find_request("t", "r").input
        {'text': 'Tidy up.'}
        """
        return _read_again(lambda: self._reading.find_request(thread, run))

    def requests(self, *, limit: int = 100, cursor: str | None = None) -> Page[RunRequest]:
        """Everything that is kept to be run, by run.

        >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
        >>> [request.run for request in runs.requests().items]  # to be done after a restart
        ['r']
        """
        return _read_again(lambda: self._reading.requests(limit, cursor))

    def clear_request(self, thread: str, run: str) -> bool:
        """Forget what to run; False if nothing was kept.

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
        """Keep how to go on with a run, until it has gone on: from its checkpoint, or another.

        >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17")
        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> intent.checkpoint, intent.attempts
        ('checkpoints/17', 0)
        """
        intent = steps.SaveIntent(run, payload, checkpoint, kind, attempts, at_ms)
        return self._one(thread, intent, RecoveryIntent)

    def find_intent(self, thread: str, run: str) -> RecoveryIntent | None:
        """How to go on with a run; None if nothing is kept.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> runs.find_intent("t", "r").payload
        {'decision': 'approve'}
        """
        return _read_again(lambda: self._reading.find_intent(thread, run))

    def intents(self, *, limit: int = 100, cursor: str | None = None) -> Page[RecoveryIntent]:
        """What is kept of how to go on, by run: what to do first after a restart.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> [(intent.run, intent.attempts) for intent in runs.intents().items]
        [('r', 0)]
        """
        return _read_again(lambda: self._reading.intents(limit, cursor))

    def begin_attempt(self, thread: str, run: str) -> RecoveryIntent:
        """Count an attempt to go on before it is made; how to go on.

        >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
        >>> runs.begin_attempt("t", "r").attempts
        1
        """
        return self._one(thread, steps.BeginAttempt(run), RecoveryIntent)

    def clear_intent(self, thread: str, run: str) -> bool:
        """Forget how to go on, once that has succeeded; False if nothing was kept.

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
        """Keep something that a run has made: bytes as a blob, anything else as a value.

        The path is relative and leads nowhere but down. Other content under the same path is
        refused with RecordConflictError, unless it may ``replace`` what is there.

        >>> made = runs.put_artifact("t", "r", "reports/summary.json", {"removed": 12}, "report")
        >>> made.path, made.is_blob
        ('reports/summary.json', False)
        """
        made = steps.PutArtifact(run, path, content, kind, artifact, replace, at_ms)
        return self._one(thread, made, Artifact)

    def find_artifact(self, thread: str, run: str, path: str) -> Artifact | None:
        """An artifact without its content; None if there is none.

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
        store = self._ground.store

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
        """What a run has made, in order, without the contents.

        >>> for path in ("map.png", "reports/summary.json"):
        ...     made = runs.put_artifact("t", "r", path, b"content", "file")
        >>> [artifact.path for artifact in runs.artifacts("t", "r").items]
        ['map.png', 'reports/summary.json']
        """
        return _read_again(lambda: self._reading.artifacts(thread, run, limit, cursor))

    def _one(self, thread: str, step: steps.Step, kind: type[Given]) -> Given:
        """Take one step, which gives something of a kind."""
        given = self.apply(thread, step)[0]
        assert isinstance(given, kind)
        return given


def _replay(session: Session, change: Commit) -> CommitResult | None:
    """The result of a turn that was committed before; None if it was not. Writes nothing new."""
    if change.turn is None:
        return None
    try:
        return session.commit(change._replace(beside=_NEVER))
    except ConditionFailedError:
        return None
