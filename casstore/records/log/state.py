"""The state of a log session apart from its messages, stored in each revision's checkpoint.

    log       2 while the session is being imported, else 1
    send      the number of sends
    round     the current round of the last send
    folds     the number of folds
    view      [first, last …], and ``upto``: see ``MessageOrder``
    notes     the numbers of the notes that are shown
    pending   [number of the message that makes the calls, ids of those without result …]
    given     the dict that the caller passed to ``set_pending``

Entries that are 0 or empty are omitted. A fork or a rewind takes the state along with the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from casstore.errors import CorruptionError, InvalidInputError, NotALogError
from casstore.objects import graph as objects
from casstore.session.checkpoint import component, read_checkpoint
from casstore.session.data import Checkpoint
from casstore.session.state import Runtime, State

_MARK: Final = "log"
_WHOLE: Final = 1
_UNFINISHED: Final = 2
_KEPT: Final = 256

Run = tuple[int, int]


class MessageOrder(NamedTuple):
    """The order in which messages are shown: ``runs``, then every number above ``upto``.

    Before the first fold, messages are shown in order of arrival. A note arrives last but is shown
    where its fold began. So the order up to the last fold is stored as runs of numbers; later
    messages follow in order of arrival.
    """

    runs: tuple[Run, ...] = ()
    upto: int = 0

    def shown(self, last: int) -> tuple[Run, ...]:
        """All runs of a session whose last message is ``last``."""
        if last <= self.upto:
            return self.runs
        if self.runs and self.runs[-1][1] == self.upto:
            return (*self.runs[:-1], (self.runs[-1][0], last))
        return (*self.runs, (self.upto + 1, last))

    def shows(self, number: int) -> bool:
        """Whether a message with this number is shown."""
        return number > self.upto or any(first <= number <= last for first, last in self.runs)

    def folded(self, numbers: Iterable[int], note: int) -> MessageOrder:
        """The order after messages are folded into ``note``, the number of the newest message.

        InvalidInputError if one of ``numbers`` is not shown.
        """
        left = set(numbers)
        if not left:
            raise InvalidInputError("messages is empty; a fold needs at least one")
        order: list[int] = []
        placed = False
        for number in _numbers(self.shown(note - 1)):
            if number not in left:
                order.append(number)
                continue
            left.discard(number)
            if not placed:
                order.append(note)
                placed = True
        if left:
            raise InvalidInputError(
                f"message {min(left)} cannot be folded: it does not exist, or is folded already"
            )
        return MessageOrder(tuple(runs_of(order)), note)


def runs_of(numbers: Sequence[int]) -> Iterator[Run]:
    """The numbers in the given order; neighbours that count up are joined to runs."""
    first: int | None = None
    last = 0
    for number in numbers:
        if first is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield first, last
        first = last = number
    if first is not None:
        yield first, last


def _numbers(runs: Sequence[Run]) -> Iterator[int]:
    for first, last in runs:
        yield from range(first, last + 1)


class LogState(NamedTuple):
    """The state of a session apart from its messages."""

    send: int = 0
    round: int = 0
    folds: int = 0
    view: MessageOrder = MessageOrder()
    notes: tuple[int, ...] = ()
    #: The message whose tool calls have no results, and the ids of those calls; 0: none.
    calling: int = 0
    calls: tuple[str, ...] = ()
    given: Any = None
    whole: bool = True


def pack(state: LogState) -> dict[str, Any]:
    """The stored form of a state."""
    packed: dict[str, Any] = {_MARK: _WHOLE if state.whole else _UNFINISHED}
    runs = [number for run in state.view.runs for number in run]
    for name, value in (
        ("send", state.send),
        ("round", state.round),
        ("folds", state.folds),
        ("view", runs),
        ("upto", state.view.upto),
        ("notes", list(state.notes)),
        ("pending", [state.calling, *state.calls] if state.calling else []),
    ):
        if value:
            packed[name] = value
    if state.given is not None:
        packed["given"] = state.given
    return packed


def unpack(session: str, packed: Any) -> LogState:
    """Decode the result of ``pack``; NotALogError if it is something else."""
    if type(packed) is not dict or _MARK not in packed:
        raise NotALogError(
            session, "no log has created it; use SessionLog.create or import_session"
        )
    if packed[_MARK] not in (_WHOLE, _UNFINISHED):
        raise NotALogError(session, "a newer version of casstore wrote it; upgrade casstore")
    try:
        runs = packed.get("view", [])
        calling, *calls = packed.get("pending", [0])
        return LogState(
            packed.get("send", 0),
            packed.get("round", 0),
            packed.get("folds", 0),
            MessageOrder(tuple(zip(runs[::2], runs[1::2], strict=True)), packed.get("upto", 0)),
            tuple(packed.get("notes", ())),
            calling,
            tuple(calls),
            packed.get("given"),
            packed[_MARK] == _WHOLE,
        )
    except (TypeError, ValueError, AttributeError) as exc:
        raise CorruptionError(
            f"the log's state of session {session!r} is damaged; check the store"
        ) from exc


def is_of_later(state: LogState, last: int) -> bool:
    """True if a state refers to messages after ``last``, the last message of its session."""
    named = [state.view.upto, state.calling, *state.notes]
    return any(type(number) is int and number > last for number in named)


def state_fault(state: LogState, last: int) -> str | None:
    """What is wrong with a state whose session ends at message ``last``, or None."""
    named = [number for run in state.view.runs for number in run]
    named += [state.view.upto, state.calling, *state.notes]
    if any(type(number) is not int or not 0 <= number <= last for number in named):
        return f"refers to messages after the last, number {last}"
    runs = sorted(state.view.runs)
    if any(first > end for first, end in runs) or any(
        one[1] >= next_one[0] for one, next_one in pairwise(runs)
    ):
        return "shows messages twice"
    if any(not state.view.shows(note) for note in state.notes):
        return "has a note that it does not show"
    return None


class States:
    """Reads states, and caches what it decoded: most commits do not change the state."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: OrderedDict[bytes, LogState] = OrderedDict()

    def read(self, session: str, state: State) -> LogState:
        """The log's state at a revision."""
        field = component(state.manifest, "turn_state")
        if field.links:
            return unpack(session, self._load(state))
        known = self._known.get(field.data)
        if known is None:
            known = self._known[field.data] = unpack(session, self._load(state))
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return known

    def _load(self, state: State) -> Any:
        return objects.load_encoded(
            self._runtime.reader(), (component(state.manifest, "turn_state"),)
        )[0]

    def checkpoint(self, state: State | None, changed: LogState) -> Checkpoint:
        """The checkpoint of a revision (None: a new session), with the log's state replaced."""
        checkpoint = Checkpoint()
        if state is not None:
            checkpoint = read_checkpoint(self._runtime.reader(), state.manifest, hydrate=False)
        return checkpoint._replace(turn_state=pack(changed))
