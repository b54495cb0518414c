"""What all of a log works with, and the one way in which it changes a session.

Every change is one commit on the revision that it was decided on, with the log's own rows beside
it. If somebody else was first, it is decided anew on what is there then; so numbers have no gap
and no two messages have the same, whoever writes from where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from casstore.engine.protocol import Write
from casstore.errors import (
    ConditionFailedError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NotALogError,
)
from casstore.records.log.state import LogState, States, is_of_later
from casstore.session import commit, keys
from casstore.session.attempts import Attempts, read_again
from casstore.session.data import UNFENCED, Checkpoint, Claim, Commit, Given, Lease, NodeDraft
from casstore.session.records import Table
from casstore.session.state import Runtime, State
from casstore.store import Store

# Numbers in keys: as many digits as a counter can ever have, so that they sort.
_DIGITS: Final = 16

LeaseGiven = Lease | Literal[Given.UNFENCED]
Result = TypeVar("Result")


class At(NamedTuple):
    """A session at one revision."""

    session: str
    revision: State
    state: LogState
    #: Of the last message; 0: there is none yet.
    last: int


class Change(NamedTuple):
    """What to do to it."""

    state: LogState
    append: Sequence[NodeDraft] = ()
    beside: Write | None = None
    completes: Sequence[Claim] = ()


class Ground:
    """A store, and where in it a log keeps what."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runtime = Runtime(store)
        self.states = States(self.runtime)
        self.sessions = Table(store, "log.sessions", 1)
        self.children = Table(store, "log.children", 2)
        self.folds = Table(store, "log.folds", 2)
        self.usage = Table(store, "log.usage", 3)
        self.totals = Table(store, "log.totals", 1)
        self.inbox = Table(store, "log.inbox", 2)

    def now_ms(self) -> int:
        """The engine's time."""
        return self.store.engine.now_ms()

    def at(self, session: str) -> At:
        """A session as it is; SessionNotFoundError or SessionDeletedError if it is not."""
        return read_again(lambda: self._at(session, self.runtime.get(session)))

    def _at(self, session: str, revision: State) -> At:
        state = self.states.read(session, revision)
        if not state.whole:
            raise NotALogError(session, "its import was not finished; import it again")
        leaf = revision.manifest.leaf_id
        try:
            last = 0 if leaf is None else int(leaf)
        except ValueError as exc:
            raise NotALogError(session, f"its last node is {leaf!r}, which is no number") from exc
        if is_of_later(state, last):
            # The order of messages is that after folds which are not here; some would be missing.
            raise NotALogError(session, _moved_back(last))
        return At(session, revision, state, last)

    def change(
        self,
        session: str,
        decide: Callable[[At], tuple[Change | None, Result]],
        *,
        lease: LeaseGiven = UNFENCED,
        from_memory: bool = False,
        durability: str | None = None,
    ) -> Result:
        """Commit what ``decide`` makes of the session as it is; what else it says is returned.

        ``from_memory`` decides first on what is known of it, without reading: for decisions
        that a commit proves wrong if they are.
        """
        if lease is not UNFENCED and not isinstance(lease, Lease):
            raise InvalidInputError(f"a lease is a Lease or UNFENCED, not {lease!r}")
        known = self.runtime.recall(keys.session_key(session)) if from_memory else None
        attempts = Attempts(f"session {session!r}")
        while True:
            attempts.begin()
            recalled = self._recalled(session, known)
            known = None
            decided = read_again(_Deciding(self, session, decide, recalled))
            at, change, result, checkpoint = decided
            if change is None:
                return result
            try:
                commit.commit(
                    self.runtime,
                    session,
                    Commit(
                        append=change.append,
                        checkpoint=checkpoint,
                        expected=at.revision.head.revision,
                        lease=lease,
                        completes=change.completes,
                        beside=change.beside,
                        durability=durability,
                    ),
                )
            except (HeadConflictError, ConditionFailedError):
                continue
            except DuplicateNodeError as exc:
                if at is recalled:
                    continue
                raise NotALogError(session, _moved_back(at.last)) from exc
            return result

    def _recalled(self, session: str, known: State | None) -> At | None:
        """The session as it is remembered; None if it is not, or was no log then."""
        if known is None:
            return None
        try:
            return self._at(session, known)
        except NotALogError:
            # It may be one by now: somebody else has finished its import.
            return None


class _Decided(NamedTuple, Generic[Result]):
    """A change, the session that it was decided on, and its new checkpoint if it has one."""

    at: At
    change: Change | None
    result: Result
    checkpoint: Checkpoint | None


class _Deciding(Generic[Result]):
    """Decides on what is remembered of a session, and, called again, on what is there."""

    def __init__(
        self,
        ground: Ground,
        session: str,
        decide: Callable[[At], tuple[Change | None, Result]],
        recalled: At | None,
    ) -> None:
        self._ground = ground
        self._session = session
        self._decide = decide
        self._recalled = recalled

    def __call__(self) -> _Decided[Result]:
        at, self._recalled = self._recalled, None
        if at is None:
            at = self._ground.at(self._session)
        change, result = self._decide(at)
        checkpoint = None
        if change is not None and change.state is not at.state:
            checkpoint = self._ground.states.checkpoint(at.revision, change.state)
        return _Decided(at, change, result, checkpoint)


def _moved_back(last: int) -> str:
    where = f"to message {last}" if last else "before its first message"
    return (
        f"its leaf was moved back {where} without the log's state of that time; rewind the session "
        "to a revision, or fork it at one: that takes both along"
    )


def digits(number: int) -> str:
    """A number as a text that sorts."""
    return f"{number:0{_DIGITS}}"
