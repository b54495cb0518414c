"""The data types of threads, runs and the records that belong to them.

Everything here is a NamedTuple. Times are milliseconds since 1970, by the engine's clock or as the
caller gave them, and end in ``_ms``. Lists are ordered by counters, never by times.

The examples use ``runs`` as those of ``Runs`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from casstore.format.digest import Digest

Item = TypeVar("Item")

#: The state of a run that begins, and of a run that waits for a decision.
RUNNING: Final = "running"
WAITING: Final = "waiting_for_approval"
#: The final states: a run does not resume from its checkpoint, which is not protected.
TERMINAL: Final = frozenset(("completed", "failed", "cancelled"))
#: The status of an approval that is not resolved.
PENDING: Final = "pending"
#: The status of an approval that ended without a decision.
EXPIRED: Final = "expired"
#: The status of an approval after these decisions; any other decision is itself the status.
STATUS_OF: Final = {"approve": "approved", "edit": "edited", "reject": "rejected"}
#: The default kind of a recovery intent.
APPROVAL_DECISION: Final = "approval-decision"


class CheckpointMark(Enum):
    """What a step may pass in place of a checkpoint. None is no mark: it removes the checkpoint."""

    #: Keep the current checkpoint.
    KEEP = "keep"
    #: The revision that the commit in the same write creates.
    COMMITTED = "committed"


KEEP: Final = CheckpointMark.KEEP
COMMITTED: Final = CheckpointMark.COMMITTED


class SessionCheckpoint(NamedTuple):
    """A revision of a session of the same store: protected while a run can resume from it.

    >>> start = SessionCheckpoint("s", 1)
    >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint=start)
    >>> [kept.revision for kept in store.session("s").protections()]
    [1]
    """

    session: str
    revision: int


#: Where a run can resume: a revision of a session of this store, or a name in another checkpoint
#: store.
CheckpointRef = SessionCheckpoint | str
NewCheckpoint = (
    SessionCheckpoint | str | Literal[CheckpointMark.KEEP, CheckpointMark.COMMITTED] | None
)


class Thread(NamedTuple):
    """A conversation, and the state of its latest run.

    >>> thread = runs.find_thread("t")
    >>> thread.agent, thread.latest_run, thread.runs
    ('helper', 'r', 1)
    """

    id: str
    workspace: str
    agent: str
    #: The state of the latest run; None: no run yet.
    status: str | None
    latest_run: str | None
    created_at_ms: int
    updated_at_ms: int
    runs: int
    messages: int
    #: The number of events of all its runs.
    events: int
    artifacts: int
    approvals: int


class Run(NamedTuple):
    """One execution of an agent in a thread.

    >>> run = runs.find_run("r")
    >>> run.thread, run.mode, run.state
    ('t', 'stream', 'running')
    """

    id: str
    thread: str
    agent: str
    mode: str
    adapter: str
    created_at_ms: int
    updated_at_ms: int
    state: str
    previous_state: str | None
    state_entered_at_ms: int
    last_transition_at_ms: int
    checkpoint: CheckpointRef | None
    #: Its position among the runs of the thread, from 1.
    number: int
    events: int
    artifacts: int

    @property
    def resumable(self) -> bool:
        """True if the run waits for a decision.

        >>> runs.find_run("r").resumable, runs.set_state("t", "r", "waiting_for_approval").resumable
        (False, True)
        """
        return self.state == WAITING

    @property
    def protected(self) -> bool:
        """True if the run has a checkpoint that it can resume from.

        >>> runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17").protected
        True
        """
        return self.checkpoint is not None and self.state not in TERMINAL


class Event(NamedTuple):
    """An event of a run.

    >>> event = runs.append_event("t", "r", {"type": "started"})
    >>> event.run, event.sequence, event.event
    ('r', 1, {'type': 'started'})
    """

    thread: str
    run: str
    sequence: int
    event: Any
    created_at_ms: int


class ThreadMessage(NamedTuple):
    """A message in a thread. ``number`` counts from 1 without gaps.

    >>> message = runs.append_message("t", "user", "Tidy up.", run="r")
    >>> message.number, message.role, message.run
    (1, 'user', 'r')
    """

    thread: str
    number: int
    role: str
    content: Any
    run: str | None
    created_at_ms: int


class Approval(NamedTuple):
    """A decision that a run waits for, and its outcome.

    >>> asked = runs.request_approval("t", "r", "a1", "shell", checkpoint="checkpoints/17")
    >>> asked.tool, asked.status, asked.decision
    ('shell', 'pending', None)
    """

    id: str
    thread: str
    run: str
    action: str
    tool_call: str
    tool: str
    #: ``pending``, ``expired``, ``approved``, ``edited``, ``rejected``, or another decision itself.
    status: str
    allowed: tuple[str, ...]
    #: One of the allowed decisions; None: pending, expired or unknown.
    decision: str | None
    requested_at_ms: int
    resolved_at_ms: int | None
    preview: Any
    checkpoint: CheckpointRef | None
    events: tuple[Any, ...]


class RunRequest(NamedTuple):
    """What to run: read by the process that continues the run after a restart.

    >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
    >>> request.run, request.input
    ('r', {'text': 'Tidy up.'})
    """

    run: str
    thread: str
    input: Any
    invocation: Any
    saved_at_ms: int


class RecoveryIntent(NamedTuple):
    """How to resume a run after a decision; deleted when the run has resumed.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> intent.kind, intent.payload, intent.attempts
    ('approval-decision', {'decision': 'approve'}, 0)
    """

    run: str
    thread: str
    kind: str
    payload: Any
    checkpoint: CheckpointRef | None
    attempts: int
    saved_at_ms: int


class Artifact(NamedTuple):
    """A result of a run. ``digest`` names its content, which is read separately.

    >>> made = runs.put_artifact("t", "r", "map.png", b"pixels", "image")
    >>> store.get_blob(made.digest)
    b'pixels'
    """

    thread: str
    run: str
    id: str
    kind: str
    path: str
    digest: Digest
    #: True if the content is opaque bytes, not a value.
    is_blob: bool
    created_at_ms: int
    #: Its position among the artifacts of the run, from 1.
    number: int


class Page(NamedTuple, Generic[Item]):
    """One page of a list, and the cursor of the next page; None: this is the last page.

    >>> for number in range(3):
    ...     event = runs.append_event("t", "r", number)
    >>> page = runs.events("t", "r", limit=2)
    >>> rest = runs.events("t", "r", limit=2, cursor=page.cursor)
    >>> [event.event for event in page.items], [event.event for event in rest.items], rest.cursor
    ([0, 1], [2], None)
    """

    items: Sequence[Item]
    cursor: str | None
