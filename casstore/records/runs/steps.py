"""What can be done to a thread, as plain data: any number of steps are one write.

Each step sees what those before it did. One that is refused ends all of them.

The examples use ``runs`` as those of ``Runs`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from casstore.records.runs.data import (
    APPROVAL_DECISION,
    KEEP,
    NewCheckpoint,
)

#: What may be decided about an approval, unless it is said otherwise.
DECISIONS: Final = ("approve", "edit", "reject")


class CreateRun(NamedTuple):
    """Begin a run. Repeated with the same agent, mode and adapter it gives what is there.

    >>> [run] = runs.apply("t", CreateRun("r2", "helper", "stream"))
    >>> run.id, run.state
    ('r2', 'running')
    """

    run: str
    agent: str
    mode: str
    #: As the mode, if it is not given.
    adapter: str | None = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class SetState(NamedTuple):
    """Move a run on; its thread follows if it is the latest run.

    >>> [run] = runs.apply("t", SetState("r", "completed"))
    >>> run.state, run.previous_state
    ('completed', 'running')
    """

    run: str
    state: str
    #: KEEP: as it is; None or "": none from now on.
    checkpoint: NewCheckpoint = KEEP
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class RenewProtection(NamedTuple):
    """Protect the checkpoint of a run again, as it should be, whether or not it is.

    >>> [run] = runs.apply("t", RenewProtection("r"))
    >>> run.id
    'r'
    """

    run: str


class AppendEvent(NamedTuple):
    """Write down an event. Repeated with the same content it counts once; with other, never.

    >>> [event] = runs.apply("t", AppendEvent("r", {"type": "started"}))
    >>> event.sequence
    1
    """

    run: str
    event: Any
    #: None: the next one.
    sequence: int | None = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class AppendMessage(NamedTuple):
    """Add to what was said in the thread.

    >>> [message] = runs.apply("t", AppendMessage("user", "Tidy up.", "r"))
    >>> message.number, message.content
    (1, 'Tidy up.')
    """

    role: str
    content: Any
    run: str | None = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class RequestApproval(NamedTuple):
    """Ask for a decision. Repeated with the same content it gives what is there.

    >>> run, asked = runs.apply(
    ...     "t",
    ...     SetState("r", "waiting_for_approval", checkpoint="checkpoints/17"),
    ...     RequestApproval("r", "a1", "shell", preview={"cmd": "git clean -fd"}),
    ... )
    >>> asked.status, asked.checkpoint
    ('pending', 'checkpoints/17')
    """

    run: str
    approval: str
    tool: str
    #: KEEP: that of the run, which must have one; None or "": none.
    checkpoint: NewCheckpoint = KEEP
    allowed: Sequence[str] = DECISIONS
    preview: Any = None
    #: As the approval, if it is not given.
    action: str | None = None
    tool_call: str = ""
    events: Sequence[Any] = ()
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class ResolveApproval(NamedTuple):
    """Decide. Only one decision ever counts, whoever comes first.

    >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
    >>> [answer] = runs.apply("t", ResolveApproval("r", "a1", "approve"))
    >>> answer.status, answer.decision
    ('approved', 'approve')
    """

    run: str
    approval: str
    decision: str
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class ExpireApproval(NamedTuple):
    """End a pending approval without a decision: its status becomes ``expired``.

    >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
    >>> [ended] = runs.apply("t", ExpireApproval("r", "a1"))
    >>> ended.status, ended.decision
    ('expired', None)
    """

    run: str
    approval: str
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class SaveRequest(NamedTuple):
    """Keep what to run, in place of what was kept for this run before.

    >>> run, request = runs.apply(
    ...     "t", CreateRun("r2", "helper", "stream"), SaveRequest("r2", {"text": "Tidy up."})
    ... )
    >>> request.input
    {'text': 'Tidy up.'}
    """

    run: str
    input: Any
    invocation: Any = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class ClearRequest(NamedTuple):
    """Forget what to run; it need not be there.

    >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
    >>> run, cleared = runs.apply("t", SetState("r", "completed"), ClearRequest("r"))
    >>> cleared
    True
    """

    run: str


class SaveIntent(NamedTuple):
    """Keep how to go on, in place of what was kept for this run before.

    >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
    >>> answer, intent = runs.apply(
    ...     "t", ResolveApproval("r", "a1", "approve"), SaveIntent("r", {"decision": "approve"})
    ... )
    >>> intent.attempts
    0
    """

    run: str
    payload: Any
    #: KEEP: that of the run; None or "": none.
    checkpoint: NewCheckpoint = KEEP
    kind: str = APPROVAL_DECISION
    attempts: int = 0
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class BeginAttempt(NamedTuple):
    """Count an attempt to go on, before it is made.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> [intent] = runs.apply("t", BeginAttempt("r"))
    >>> intent.attempts
    1
    """

    run: str


class ClearIntent(NamedTuple):
    """Forget how to go on, once that has succeeded; it need not be there.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> run, cleared = runs.apply("t", SetState("r", "running"), ClearIntent("r"))
    >>> cleared
    True
    """

    run: str


class PutArtifact(NamedTuple):
    """Keep what a run has made, under a relative path; bytes as a blob, else as a value.

    Repeated with the same content it gives what is there; other content is refused
    unless it may ``replace`` what is there.

    >>> run, made = runs.apply(
    ...     "t", SetState("r", "completed"), PutArtifact("r", "map.png", b"pixels", "image")
    ... )
    >>> made.path, made.is_blob
    ('map.png', True)
    """

    run: str
    path: str
    content: Any
    kind: str
    #: As the path, if it is not given.
    artifact: str | None = None
    replace: bool = False
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


Step = (
    CreateRun
    | SetState
    | RenewProtection
    | AppendEvent
    | AppendMessage
    | RequestApproval
    | ResolveApproval
    | ExpireApproval
    | SaveRequest
    | ClearRequest
    | SaveIntent
    | BeginAttempt
    | ClearIntent
    | PutArtifact
)
