"""The schemas of the session log, its tables, and the one transaction that changes a session.

    log.sessions   session                 the session, and how many children it ever had
    log.children   parent, place           index of sessions; ``place`` counts the parent's children
    log.folds      session, number         a fold: its note, and the messages that it replaces
    log.usage      session, send, round    the tokens of a round
    log.totals     session                 the tokens of all rounds, also of those pruned
    log.inbox      session, item           the number of the message that delivered an item

Messages are nodes of the store's session of the same id. Every change is one commit based on the
revision that it was decided on, with rows of the log in the same transaction. If another writer
commits first, the change is decided again on the new revision. So message numbers have no gaps and
no duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.engine.protocol import Write
from casstore.errors import (
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NotALogError,
)
from casstore.records.log.data import Fold, LogSession, RoundUsage, Tokens, UsageTotals
from casstore.records.log.state import LogState, States, is_of_later
from casstore.records.schema import Index, Parent, RowTable, Schema
from casstore.session import commit, keys
from casstore.session.attempts import ChangedMeanwhile, read_again, transact
from casstore.session.data import Claim, Commit, Lease, NodeDraft
from casstore.session.state import HeadRow, State, runtime_of
from casstore.store import Store

LeaseGiven = Lease | None
Result = TypeVar("Result")


class LogSessionRow(NamedTuple):
    """A session of the log."""

    session: str
    created_at_ms: int
    updated_at_ms: int
    status: str
    kind: str
    lifecycle: str
    parent: str | None
    #: Its number among the children of its parent, from 1; 0: no parent.
    place: int
    depth: int
    spawn_call: str | None
    prompt: str | None
    model: str | None
    config: dict[str, Any]
    metadata: dict[str, Any]
    #: The number of children ever created.
    children: int
    #: The last revision that the import made, which is no change to the session. 0: not imported.
    brought_in: int = 0

    def as_of(self, head: HeadRow) -> LogSessionRow:
        """The row with ``updated_at_ms`` of the last commit, unless that was made by the import."""
        if head.revision <= self.brought_in:
            return self
        return self._replace(updated_at_ms=max(self.updated_at_ms, head.committed_at_ms))

    def public(self) -> LogSession:
        """As callers see it."""
        return LogSession(
            id=self.session,
            created_at_ms=self.created_at_ms,
            updated_at_ms=self.updated_at_ms,
            status=self.status,
            kind=self.kind,
            lifecycle=self.lifecycle,
            parent=self.parent,
            depth=self.depth,
            spawn_call=self.spawn_call,
            prompt=self.prompt,
            model=self.model,
            config=self.config,
            metadata=self.metadata,
        )


class FoldRow(NamedTuple):
    """A fold of a session."""

    session: str
    number: int
    note: int
    runs: tuple[tuple[int, int], ...]
    before_tokens: int | None
    after_tokens: int | None
    round: int | None
    created_at_ms: int

    def public(self) -> Fold:
        """The fold as callers see it."""
        return Fold(*self[1:])


class UsageRow(NamedTuple):
    """The tokens of a round."""

    session: str
    send: int
    round: int
    prompt: int | None
    completion: int | None
    total: int | None
    model: str | None
    created_at_ms: int

    @staticmethod
    def of(session: str, used: RoundUsage) -> UsageRow:
        """The row of a round."""
        return UsageRow(session, used.send, used.round, *used.tokens, used.created_at_ms)

    def public(self) -> RoundUsage:
        """The round as callers see it."""
        return RoundUsage(self.send, self.round, self.tokens, self.created_at_ms)

    @property
    def tokens(self) -> Tokens:
        """The tokens alone."""
        return Tokens(*self[3:7])


class TotalsRow(NamedTuple):
    """The tokens of all rounds of a session."""

    session: str
    rounds: int
    prompt: int
    completion: int
    total: int

    def public(self) -> UsageTotals:
        """The totals as callers see them."""
        return UsageTotals(*self[1:])


class InboxRow(NamedTuple):
    """An item that was delivered."""

    session: str
    item: str
    number: int


SESSIONS: Final = Schema(
    "log.sessions",
    LogSessionRow,
    1,
    indexes=[
        Index(
            "log.children", 2, lambda row: [] if row.parent is None else [(row.parent, row.place)]
        )
    ],
)
FOLDS: Final = Schema("log.folds", FoldRow, 2)
TOTALS: Final = Schema("log.totals", TotalsRow, 1)
USAGE: Final = Schema(
    "log.usage", UsageRow, 3, parents=[Parent(TOTALS, lambda row: (row.session,))]
)
INBOX: Final = Schema("log.inbox", InboxRow, 2)
SCHEMAS: Final = (SESSIONS, FOLDS, TOTALS, USAGE, INBOX)


# --- changes to a session -------------------------------------------------------------------------


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
        self.sessions = RowTable(store, SESSIONS)
        self.runtime = runtime_of(store)
        self.states = States(self.runtime)
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
        return read_again(lambda: self.load(session))

    def load(self, session: str) -> At:
        """As ``at``, read once: for a caller that repeats this read together with its own."""
        return self._at(session, self.runtime.get(session))

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
        recalled = self._recalled(session) if from_memory else None

        def attempt() -> Result:
            # Only the first attempt decides on the cached revision.
            nonlocal recalled
            cached, recalled = recalled, None
            at = self.load(session) if cached is None else cached
            change, result = decide(at)
            if change is None:
                return result
            checkpoint = None
            if change.state is not at.state:
                checkpoint = self.states.checkpoint(at.revision, change.state)
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
            except HeadConflictError as exc:
                raise ChangedMeanwhile from exc
            except DuplicateNodeError as exc:
                if cached is not None:
                    raise ChangedMeanwhile from exc  # the cached revision was stale
                raise NotALogError(session, _moved_back(at.last)) from exc
            return result

        return transact(f"session {session!r}", attempt)

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
