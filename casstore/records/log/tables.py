"""The tables of a session log, and the one transaction that changes a session.

Every change is one commit based on the revision that it was decided on, with rows of the log in the
same transaction. If another writer commits first, the change is decided again on the new revision.
So message numbers have no gaps and no duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from casstore.engine.protocol import Write
from casstore.errors import (
    ConditionFailedError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NotALogError,
)
from casstore.records.log.layout import FOLDS, INBOX, SESSIONS, TOTALS, USAGE
from casstore.records.log.state import LogState, States, is_of_later
from casstore.records.schema import RowTable
from casstore.session import commit, keys
from casstore.session.attempts import Attempts, read_again
from casstore.session.data import Checkpoint, Claim, Commit, Lease, NodeDraft
from casstore.session.state import Runtime, State
from casstore.store import Store

LeaseGiven = Lease | None
Result = TypeVar("Result")


class At(NamedTuple):
    """A session at one revision."""

    session: str
    revision: State
    state: LogState
    #: The number of the last message; 0: no message yet.
    last: int


class LogChange(NamedTuple):
    """The contents of one commit; ``also`` are rows, ``completes`` delivered items of the inbox."""

    state: LogState
    append: Sequence[NodeDraft] = ()
    also: Write | None = None
    completes: Sequence[Claim] = ()


class LogTables:
    """The tables of a session log in a store, and the transaction that changes a session."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runtime = Runtime(store)
        self.states = States(self.runtime)
        self.sessions = RowTable(store, SESSIONS)
        [self.children] = self.sessions.indexes
        self.folds = RowTable(store, FOLDS)
        self.usage = RowTable(store, USAGE)
        self.totals = RowTable(store, TOTALS)
        self.inbox = RowTable(store, INBOX)

    def now_ms(self) -> int:
        """The engine's time."""
        return self.store.engine.now_ms()

    def at(self, session: str) -> At:
        """The current revision; SessionNotFoundError, SessionDeletedError or NotALogError."""
        return read_again(lambda: self._at(session, self.runtime.get(session)))

    def _at(self, session: str, revision: State) -> At:
        state = self.states.read(session, revision)
        if not state.whole:
            raise NotALogError(session, "its import was not finished; import it again")
        leaf = revision.manifest.leaf_id
        try:
            last = 0 if leaf is None else int(leaf)
        except ValueError as exc:
            raise NotALogError(
                session, f"its last node is {leaf!r}, which is not a number"
            ) from exc
        if is_of_later(state, last):
            # The stored order includes folds that this revision does not have, so messages would be
            # missing.
            raise NotALogError(session, _moved_back(last))
        return At(session, revision, state, last)

    def change(
        self,
        session: str,
        decide: Callable[[At], tuple[LogChange | None, Result]],
        *,
        lease: LeaseGiven = None,
        from_memory: bool = False,
        durability: str | None = None,
    ) -> Result:
        """Commit the change, if any, that ``decide`` returns for the session; returns its result.

        ``from_memory`` decides first on the cached revision, without reading. Use it if the commit
        fails whenever the cached revision is stale.
        """
        if lease is not None and not isinstance(lease, Lease):
            raise InvalidInputError(f"lease must be a Lease or None, got {lease!r}")
        waiting = recalled = self._recalled(session) if from_memory else None

        def prepare() -> tuple[At, LogChange | None, Result, Checkpoint | None]:
            # Only the first call decides on the cached revision.
            nonlocal waiting
            at, waiting = waiting, None
            if at is None:
                at = self.at(session)
            change, result = decide(at)
            checkpoint = None
            if change is not None and change.state is not at.state:
                checkpoint = self.states.checkpoint(at.revision, change.state)
            return at, change, result, checkpoint

        attempts = Attempts(f"session {session!r}")
        while True:
            attempts.begin()
            at, change, result, checkpoint = read_again(prepare)
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
                        also=change.also,
                        durability=durability,
                    ),
                )
            except (HeadConflictError, ConditionFailedError):
                continue
            except DuplicateNodeError as exc:
                if at is recalled:
                    continue  # the cached revision was stale: decide on the stored one
                raise NotALogError(session, _moved_back(at.last)) from exc
            return result

    def _recalled(self, session: str) -> At | None:
        """The cached revision of a session; None if it is not cached, or was not a finished log."""
        known = self.runtime.states.get(keys.session_key(session))
        if known is None:
            return None
        try:
            return self._at(session, known)
        except NotALogError:
            # Read the stored revision: another process may have finished the import since.
            return None


def _moved_back(last: int) -> str:
    where = f"to message {last}" if last else "before its first message"
    return (
        f"its leaf was moved back {where}, but the log's state was not; rewind the session to a "
        "revision, or fork it at a revision: both restore messages and state together"
    )
