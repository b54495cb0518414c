"""The schemas of the session log.

    log.sessions   session                 the session, and how many children it ever had
    log.children   parent, place           index of sessions; ``place`` counts the parent's children
    log.folds      session, number         a fold: its note, and the messages that it replaces
    log.usage      session, send, round    the tokens of a round
    log.totals     session                 the tokens of all rounds, also of those pruned
    log.inbox      session, item           the number of the message that delivered an item

Messages are nodes of the store's session of the same id.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.records.log.data import Fold, LogSession, RoundUsage, Tokens, UsageTotals
from casstore.records.schema import Index, Parent, Schema
from casstore.session.state import HeadRow


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
