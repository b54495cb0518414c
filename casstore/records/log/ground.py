"""What all of a log works with, and the one way in which it changes a session.

Every change is one commit on the revision that it was decided on, with the log's own rows beside
it. If somebody else was first, it is decided anew on what is there then; so numbers have no gap
and no two messages have the same, whoever writes from where.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from casstore.engine.protocol import Write
from casstore.errors import (
    BusyError,
    ConditionFailedError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NotALogError,
)
from casstore.records.log.state import LogState, States, is_of_later
from casstore.records.rows import Table
from casstore.session import commit, keys
from casstore.session.data import UNFENCED, Claim, Commit, Given, Lease, NodeDraft
from casstore.session.state import Runtime, State
from casstore.store import Store

MAX_ATTEMPTS: Final = 256
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
        return self._at(session, self.runtime.get(session))

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
    ) -> Result:
        """Commit what ``decide`` makes of the session as it is; what else it says is returned.

        ``from_memory`` decides first on what is known of it, without reading: for decisions
        that a commit proves wrong if they are.
        """
        if lease is not UNFENCED and not isinstance(lease, Lease):
            raise InvalidInputError(f"a lease is a Lease or UNFENCED, not {lease!r}")
        known = self.runtime.recall(keys.session_key(session)) if from_memory else None
        for _ in range(MAX_ATTEMPTS):
            recalled = self._recalled(session, known)
            is_recalled = recalled is not None
            at = recalled or self.at(session)
            known = None
            change, result = decide(at)
            if change is None:
                return result
            kept = change.state is at.state
            try:
                commit.commit(
                    self.runtime,
                    session,
                    Commit(
                        append=change.append,
                        checkpoint=(
                            None if kept else self.states.checkpoint(at.revision, change.state)
                        ),
                        expected=at.revision.head.revision,
                        lease=lease,
                        completes=change.completes,
                        beside=change.beside,
                    ),
                )
            except (HeadConflictError, ConditionFailedError):
                continue
            except DuplicateNodeError as exc:
                if is_recalled:
                    continue
                raise NotALogError(session, _moved_back(at.last)) from exc
            return result
        raise BusyError(f"session {session!r} kept moving; try again")

    def _recalled(self, session: str, known: State | None) -> At | None:
        """The session as it is remembered; None if it is not, or was no log then."""
        if known is None:
            return None
        try:
            return self._at(session, known)
        except NotALogError:
            # It may be one by now: somebody else has finished its import.
            return None


def _moved_back(last: int) -> str:
    where = f"to message {last}" if last else "before its first message"
    return (
        f"its leaf was moved back {where} without the log's state of that time; rewind the session "
        "to a revision, or fork it at one: that takes both along"
    )


def digits(number: int) -> str:
    """A number as a text that sorts."""
    return f"{number:0{_DIGITS}}"
