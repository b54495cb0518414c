"""What goes into a session log and what comes out: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

ROOT: Final = "root"
SUBAGENT: Final = "subagent"
KINDS: Final = (ROOT, SUBAGENT)

#: Goes when it has completed, or with its parent.
EPHEMERAL: Final = "ephemeral"
#: Stays, and goes with its parent.
LINKED: Final = "linked"
#: Stays, whatever becomes of its parent.
DETACHED: Final = "detached"
LIFECYCLES: Final = (EPHEMERAL, LINKED, DETACHED)

#: The status of a session, and the state of a message.
ACTIVE: Final = "active"
ARCHIVED: Final = "archived"
FOLDED: Final = "compacted_out"

#: With this status an ephemeral session has done its work.
COMPLETED: Final = "completed"

#: A note stands for the messages that were folded into it.
NOTE_ROLE: Final = "system"
NOTE_NAME: Final = "compact_note"

DEPTH_LIMIT: Final = 3


class LogSession(NamedTuple):
    """A session and where it stands among others."""

    id: str
    created_at_ms: int
    #: When it, or anything in it, changed last.
    updated_at_ms: int
    status: str
    kind: str
    lifecycle: str
    parent: str | None
    #: How many sessions stand above it.
    depth: int
    #: The tool call by which its parent began it.
    spawn_call: str | None
    prompt: str | None
    model: str | None
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]


class NewMessage(NamedTuple):
    """A message on its way in. ``content`` may be any value, and comes back as it was."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    tool_call_id: str | None = None
    round: int | None = None
    meta: Mapping[str, Any] | None = None


class Message(NamedTuple):
    """A message as it comes out. Numbers count from 1 on, without a gap, in order of arrival."""

    number: int
    role: str
    content: Any
    name: str | None
    tool_calls: Sequence[Mapping[str, Any]] | None
    tool_call_id: str | None
    round: int | None
    meta: Mapping[str, Any]
    #: "active", or "compacted_out": folded into a note.
    state: str
    created_at_ms: int


class Fold(NamedTuple):
    """Messages that a note stands for: their exact set, as runs from first to last."""

    number: int
    note: int
    runs: tuple[tuple[int, int], ...]
    before_tokens: int | None
    after_tokens: int | None
    round: int | None
    created_at_ms: int

    @property
    def first(self) -> int:
        """The lowest number folded."""
        return self.runs[0][0]

    @property
    def last(self) -> int:
        """The highest number folded."""
        return self.runs[-1][1]

    @property
    def messages(self) -> list[int]:
        """Every number folded, ascending."""
        return [each for first, last in self.runs for each in range(first, last + 1)]


class Pending(NamedTuple):
    """Tool calls without a result, whole, as their message has them."""

    #: The message that makes the calls.
    number: int
    round: int | None
    calls: tuple[Mapping[str, Any], ...]


class Tokens(NamedTuple):
    """What one round has used."""

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    model: str | None = None


class RoundUsage(NamedTuple):
    """What a round of a send has used, and when that was written down."""

    send: int
    round: int
    tokens: Tokens
    created_at_ms: int


class UsageTotals(NamedTuple):
    """What a session has used so far, also in rounds that were pruned since."""

    rounds: int = 0
    prompt: int = 0
    completion: int = 0
    total: int = 0


class Counters(NamedTuple):
    """Where a session stands."""

    next_number: int
    send: int
    round: int
    folds: int
