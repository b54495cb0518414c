"""The steps on a thread, as plain data; ``Runs.apply`` writes any number in one transaction.

Each step sees the changes of the steps before it. If one is refused, none is applied.

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

#: The default decisions of an approval.
DECISIONS: Final = ("approve", "edit", "reject")


class CreateRun(NamedTuple):
    """Create a run. Repeating it with the same agent, mode and adapter returns the existing run.

    >>> [run] = runs.apply("t", CreateRun("r2", "helper", "stream"))
    >>> run.id, run.state
    ('r2', 'running')
    """

    run: str
    agent: str
    mode: str
    #: None: the mode.
    adapter: str | None = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class SetState(NamedTuple):
    """Set the state of a run; the thread shows it if this is the latest run.

    >>> [run] = runs.apply("t", SetState("r", "completed"))
    >>> run.state, run.previous_state
    ('completed', 'running')
    """

    run: str
    state: str
    #: KEEP: unchanged; None or "": removed.
    checkpoint: NewCheckpoint = KEEP
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class RenewProtection(NamedTuple):
    """Protect the checkpoint of a run again, if it needs protection.

    >>> [run] = runs.apply("t", RenewProtection("r"))
    >>> run.id
    'r'
    """

    run: str


class AppendEvent(NamedTuple):
    """Append an event.

    If the ``sequence`` is taken, the same content has no effect, and other content is refused.

    >>> [event] = runs.apply("t", AppendEvent("r", {"type": "started"}))
    >>> event.sequence
    1
    """

    run: str
    event: Any
    #: None: the next number.
    sequence: int | None = None
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class AppendMessage(NamedTuple):
    """Append a message to the thread.

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
    """Request a decision. Repeating it with the same content returns the existing approval.

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
    #: KEEP: the run's checkpoint, which must exist; None or "": no checkpoint.
    checkpoint: NewCheckpoint = KEEP
    allowed: Sequence[str] = DECISIONS
    preview: Any = None
    #: None: the id of the approval.
    action: str | None = None
    tool_call: str = ""
    events: Sequence[Any] = ()
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class ResolveApproval(NamedTuple):
    """Decide an approval. The first decision counts; later ones are refused.

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
    """Store the request of a run, replacing an earlier one.

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
    """Delete the request of a run, if it has one.

    >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
    >>> run, cleared = runs.apply("t", SetState("r", "completed"), ClearRequest("r"))
    >>> cleared
    True
    """

    run: str


class SaveIntent(NamedTuple):
    """Store the recovery intent of a run, replacing an earlier one.

    >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
    >>> answer, intent = runs.apply(
    ...     "t", ResolveApproval("r", "a1", "approve"), SaveIntent("r", {"decision": "approve"})
    ... )
    >>> intent.attempts
    0
    """

    run: str
    payload: Any
    #: KEEP: the run's checkpoint, if it has one; None or "": no checkpoint.
    checkpoint: NewCheckpoint = KEEP
    kind: str = APPROVAL_DECISION
    attempts: int = 0
    #: When it happened, in milliseconds since 1970; None: now.
    at_ms: int | None = None


class BeginAttempt(NamedTuple):
    """Count an attempt to resume, before it starts.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> [intent] = runs.apply("t", BeginAttempt("r"))
    >>> intent.attempts
    1
    """

    run: str


class ClearIntent(NamedTuple):
    """Delete the recovery intent of a run, if it has one.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> run, cleared = runs.apply("t", SetState("r", "running"), ClearIntent("r"))
    >>> cleared
    True
    """

    run: str


class PutArtifact(NamedTuple):
    """Store an artifact of a run under a relative path; bytes as a blob, else as a value.

    Repeating it with the same content returns the existing artifact; other content is refused
    unless ``replace`` is set.

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
    #: The id; None: the path.
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
