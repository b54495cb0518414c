"""Threads, runs and what belongs to them: plain data, no behaviour.

Everything here is a NamedTuple. Times are milliseconds since 1970, by the engine's clock or as the
caller gave them, and end in ``_ms``. They are never compared: orders come from counters.

The examples use ``runs`` as those of ``Runs`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from casstore.format.digest import Digest

Item = TypeVar("Item")

#: The state of a run that begins, and of one that somebody must decide about.
RUNNING: Final = "running"
WAITING: Final = "waiting_for_approval"
#: The states in which nobody comes back to the checkpoint of a run.
TERMINAL: Final = frozenset(("completed", "failed", "cancelled"))
#: The status of an approval that nobody has resolved.
PENDING: Final = "pending"
#: The status of an approval that ended without a decision.
EXPIRED: Final = "expired"
#: What an approval is called once it was resolved so; after other decisions it has their name.
STATUS_OF: Final = {"approve": "approved", "edit": "edited", "reject": "rejected"}
#: What a recovery intent is for, unless it is said otherwise.
APPROVAL_DECISION: Final = "approval-decision"


class Given(Enum):
    """Marks for a checkpoint that None cannot stand for, because None takes it away."""

    #: As it is.
    KEEP = "keep"
    #: The revision that the commit makes beside which the steps happen.
    COMMITTED = "committed"


KEEP: Final = Given.KEEP
COMMITTED: Final = Given.COMMITTED


class SessionCheckpoint(NamedTuple):
    """A revision of a session of the same store: protected as long as a run may need it.

    >>> start = SessionCheckpoint("s", 1)
    >>> run = runs.set_state("t", "r", "waiting_for_approval", checkpoint=start)
    >>> [kept.revision for kept in store.session("s").protections()]
    [1]
    """

    session: str
    revision: int


#: Where a run can be resumed: in a session of this store, or by a name that means something
#: to whoever keeps the checkpoints.
CheckpointRef = SessionCheckpoint | str
NewCheckpoint = SessionCheckpoint | str | Literal[Given.KEEP, Given.COMMITTED] | None


class Thread(NamedTuple):
    """A conversation, and how its latest run stands.

    >>> thread = runs.find_thread("t")
    >>> thread.agent, thread.latest_run, thread.runs
    ('helper', 'r', 1)
    """

    id: str
    workspace: str
    agent: str
    #: The state of the latest run; None: it has had none.
    status: str | None
    latest_run: str | None
    created_at_ms: int
    updated_at_ms: int
    runs: int
    messages: int
    #: Of all its runs.
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
    #: Its place among the runs of the thread, from 1 on.
    number: int
    events: int
    artifacts: int

    @property
    def resumable(self) -> bool:
        """Does it wait for somebody's decision?

        >>> runs.find_run("r").resumable, runs.set_state("t", "r", "waiting_for_approval").resumable
        (False, True)
        """
        return self.state == WAITING

    @property
    def protected(self) -> bool:
        """Has it a checkpoint that somebody may come back to?

        >>> runs.set_state("t", "r", "waiting_for_approval", checkpoint="checkpoints/17").protected
        True
        """
        return self.checkpoint is not None and self.state not in TERMINAL


class Event(NamedTuple):
    """Something that happened in a run.

    >>> event = runs.append_event("t", "r", {"type": "started"})
    >>> event.run, event.sequence, event.event
    ('r', 1, {'type': 'started'})
    """

    thread: str
    run: str
    sequence: int
    event: Any
    created_at_ms: int


class Message(NamedTuple):
    """Something that was said in a thread. ``number`` counts from 1 without gaps.

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
    """A question that a run waits with, and its answer.

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
    #: ``pending``, what it was resolved to, or ``expired``.
    status: str
    allowed: tuple[str, ...]
    #: One of those allowed; None: not yet, never, or not known.
    decision: str | None
    requested_at_ms: int
    resolved_at_ms: int | None
    preview: Any
    checkpoint: CheckpointRef | None
    events: tuple[Any, ...]


class RunRequest(NamedTuple):
    """What to run, for whoever takes the run up after a restart.

    >>> request = runs.save_request("t", "r", {"text": "Tidy up."})
    >>> request.run, request.input
    ('r', {'text': 'Tidy up.'})
    """

    thread: str
    run: str
    input: Any
    invocation: Any
    saved_at_ms: int


class RecoveryIntent(NamedTuple):
    """How to go on with a run about which somebody has decided, until that has succeeded.

    >>> intent = runs.save_intent("t", "r", {"decision": "approve"})
    >>> intent.kind, intent.payload, intent.attempts
    ('approval-decision', {'decision': 'approve'}, 0)
    """

    thread: str
    run: str
    kind: str
    payload: Any
    checkpoint: CheckpointRef | None
    attempts: int
    saved_at_ms: int


class Artifact(NamedTuple):
    """Something that a run has made. ``digest`` names its content, which is read by itself.

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
    #: Is it opaque bytes, and not a value?
    is_blob: bool
    created_at_ms: int
    #: Its place among the artifacts of the run, from 1 on.
    number: int


class Page(NamedTuple, Generic[Item]):
    """Some of a list, and where the rest begins; None: that was all.

    >>> for number in range(3):
    ...     event = runs.append_event("t", "r", number)
    >>> page = runs.events("t", "r", limit=2)
    >>> rest = runs.events("t", "r", limit=2, cursor=page.cursor)
    >>> [event.event for event in page.items], [event.event for event in rest.items], rest.cursor
    ([0, 1], [2], None)
    """

    items: Sequence[Item]
    cursor: str | None
