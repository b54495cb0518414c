"""The data types that a session log accepts and returns, and the check of their numbers.

A **send** is a user's message and the agent's work on it; a **round** is one step of that work,
such as a call of the model. A **fold** replaces messages in the agent's context by one message, the
**note**.

The examples use ``log`` as those of ``SessionLog`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError

ROOT: Final = "root"
SUBAGENT: Final = "subagent"
KINDS: Final = (ROOT, SUBAGENT)

#: A lifecycle: deleted when ``finish`` reports the session completed, or with its parent.
EPHEMERAL: Final = "ephemeral"
#: A lifecycle: kept after completion, deleted with its parent.
LINKED: Final = "linked"
#: A lifecycle: kept even if its parent is deleted.
DETACHED: Final = "detached"
LIFECYCLES: Final = (EPHEMERAL, LINKED, DETACHED)

#: A session is active or archived, a message active or folded.
ACTIVE: Final = "active"
ARCHIVED: Final = "archived"
FOLDED: Final = "compacted_out"

#: The status with which ``finish`` deletes an ephemeral session.
COMPLETED: Final = "completed"

#: The role of a note, which replaces the messages folded into it.
NOTE_ROLE: Final = "system"
NOTE_NAME: Final = "compact_note"

DEPTH_LIMIT: Final = 3


class LogSession(NamedTuple):
    """A session and its position in the tree of sessions.

    >>> made = log.create("research", parent="chat", prompt="be brief")
    >>> made.id, made.kind, made.parent, made.depth
    ('research', 'subagent', 'chat', 1)
    """

    id: str
    created_at_ms: int
    #: The last change of the session or anything in it.
    updated_at_ms: int
    status: str
    kind: str
    lifecycle: str
    parent: str | None
    #: The number of its ancestors.
    depth: int
    #: The tool call with which its parent created it.
    spawn_call: str | None
    prompt: str | None
    model: str | None
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]


class NewMessage(NamedTuple):
    """A message to append. ``content`` may be any value and is returned unchanged.

    >>> log.append("chat", NewMessage("user", [{"type": "text", "text": "why left?"}]))
    3
    >>> log.append("chat", NewMessage("assistant", tool_calls=[{"id": "c1", "name": "read"}]))
    4
    >>> log.append("chat", NewMessage("tool", "text of a file", tool_call_id="c1"))
    5
    """

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] | None = None
    tool_call_id: str | None = None
    round: int | None = None
    meta: Mapping[str, Any] | None = None


class Message(NamedTuple):
    """A stored message. Numbers count from 1, without gaps, in order of arrival.

    >>> message = log.message("chat", 2)
    >>> message.role, message.content, message.state
    ('assistant', 'left', 'active')
    """

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
    """Fold ``number`` of a session: message ``note`` replaces the messages in ``runs``.

    Each run is a range: its first and its last number.

    >>> fold = log.fold("chat", [1, 2], "they chose the way")
    >>> fold.note, fold.runs
    (3, ((1, 2),))
    """

    number: int
    note: int
    runs: tuple[tuple[int, int], ...]
    before_tokens: int | None
    after_tokens: int | None
    round: int | None
    created_at_ms: int

    @property
    def first(self) -> int:
        """The lowest number folded.

        >>> log.fold("chat", [1, 2], "they chose the way").first
        1
        """
        return self.runs[0][0]

    @property
    def last(self) -> int:
        """The highest number folded.

        >>> log.fold("chat", [1, 2], "they chose the way").last
        2
        """
        return self.runs[-1][1]

    @property
    def messages(self) -> list[int]:
        """Every number folded, ascending.

        >>> log.fold("chat", [1, 2], "they chose the way").messages
        [1, 2]
        """
        return [each for first, last in self.runs for each in range(first, last + 1)]


class Pending(NamedTuple):
    """Tool calls without a result, in full, as in their message.

    >>> call = {"id": "c1", "name": "read"}
    >>> number = log.append("chat", NewMessage("assistant", tool_calls=[call]))
    >>> log.pending("chat")
    Pending(number=3, round=None, calls=({'id': 'c1', 'name': 'read'},))
    """

    #: The number of the message that makes the calls.
    number: int
    round: int | None
    calls: tuple[Mapping[str, Any], ...]


class Tokens(NamedTuple):
    """The tokens that one round used.

    >>> answer = NewMessage("assistant", "it is shorter", round=0)
    >>> number = log.append("chat", answer, tokens=Tokens(prompt=12, completion=4, total=16))
    >>> [used.tokens.total for used in log.usage("chat")]
    [16]
    """

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    model: str | None = None


class RoundUsage(NamedTuple):
    """The tokens that one round of a send used, and when they were recorded.

    >>> log.record_usage("chat", Tokens(total=12), round=1)
    >>> [(used.send, used.round, used.tokens.total) for used in log.usage("chat")]
    [(0, 1, 12)]
    """

    send: int
    round: int
    tokens: Tokens
    created_at_ms: int


class UsageTotals(NamedTuple):
    """The tokens that a session has used, including rounds that were pruned since.

    >>> log.record_usage("chat", Tokens(prompt=10, completion=2, total=12))
    >>> totals = log.totals("chat")
    >>> totals.rounds, totals.prompt, totals.completion, totals.total
    (1, 10, 2, 12)
    """

    rounds: int = 0
    prompt: int = 0
    completion: int = 0
    total: int = 0


class Counters(NamedTuple):
    """The counters of a session.

    >>> fold = log.fold("chat", [1, 2], "they chose the way")
    >>> counters = log.counters("chat")
    >>> counters.next_number, counters.folds
    (4, 1)
    """

    next_number: int
    send: int
    round: int
    folds: int


def check_number(number: object, what: str, *, least: int = 0) -> None:
    """InvalidInputError unless ``number`` is an int from ``least`` to 2**53 - 1."""
    if type(number) is not int or not least <= number < 1 << 53:
        raise InvalidInputError(
            f"{what} must be a whole number from {least} to 2**53 - 1, got {number!r}"
        )
