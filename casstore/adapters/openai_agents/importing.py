"""Imports databases of the SDK's SQLiteSession and AdvancedSQLiteSession.

A session is a unit: the import checks every item, compares what the store holds of the session, and
only then writes the rest, a batch to a commit. A branch is written from where it leaves another, so
shared items are stored once. A session that continued in the source is continued in the store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.adapters.openai_agents.branches import MAIN, Branch, Branches
from casstore.adapters.openai_agents.conversation import (
    Conversation,
    ConversationView,
    TurnUsage,
    is_user,
    spent,
    step,
)
from casstore.adapters.openai_agents.sdk_database import (
    Item,
    SdkDatabase,
    SourceBranch,
    SourceMessage,
    SourceSession,
    UnreadableItemError,
)
from casstore.compat.importing import (
    IMPORTED,
    UNCHANGED,
    UPDATED,
    ImportedSession,
    ImportNote,
    ImportReport,
    Notes,
    Part,
    PartReport,
    Unit,
    Wrote,
    paged,
    run,
)
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    ConflictError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NodeNotFoundError,
)
from casstore.maintenance.progress import Progress
from casstore.records.json_values import restored
from casstore.session.arguments import check_text
from casstore.session.attempts import Attempts
from casstore.session.data import NodeDraft, Usage
from casstore.session.keys import session_key
from casstore.session.loading import Nodes
from casstore.store import Store, check_store

_SESSIONS_TABLE: Final = "agent_sessions"
_MESSAGES_TABLE: Final = "agent_messages"
# Items may be long, and a page of stored ones is held in memory.
_PAGE: Final = 16
# The SDK does not record the model of a turn.
_MODEL: Final = "unknown"

UNREADABLE: Final = "messages that are not JSON, left out as the SDK does"
UNLINKED: Final = "messages on no branch, which the SDK does not show, left out"


def import_sessions(
    store: Store,
    source: str | os.PathLike[str],
    *,
    sessions: Sequence[str] | None = None,
    sessions_table: str = _SESSIONS_TABLE,
    messages_table: str = _MESSAGES_TABLE,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the conversations of a database of the SDK.

    All sessions, or those named, with their branches, turns and usage, under their ids. Notes
    count messages that are not JSON, which the SDK does not show either. A session of which the
    store holds a beginning is continued; one of which it holds all, or more, is left alone.
    ForeignSourceError if the tables are missing; InvalidInputError if there is no session of a
    name; ConflictError if the store holds a session of that id with other content, of which
    nothing is written then.

    >>> import asyncio
    >>> from agents import SQLiteSession
    >>> talk = SQLiteSession("talk", place / "old.db")
    >>> asyncio.run(talk.add_items([{"role": "user", "content": "hello"}]))
    >>> talk.close()
    >>> import_sessions(store, place / "old.db").part("items").imported
    1
    """
    check_store(store)
    check_text(sessions_table, "sessions_table")
    check_text(messages_table, "messages_table")
    with SqliteSource(source) as opened:
        database = SdkDatabase(opened, sessions_table, messages_table)
        part = _DatabasePart(database, store, database.choose(sessions))
        return run("openai-agents", opened, store, [part], dry_run=dry_run, progress=progress)


# --- where branches part ------------------------------------------------------------------------


class BranchPoint(NamedTuple):
    """Where a branch leaves another: it shares the first ``at`` items with ``base``."""

    #: None: it shares no item with another branch.
    base: str | None
    at: int
    #: The number of its items, shared ones included.
    length: int


class BranchTree:
    """The branches of one session, compared without holding their rows.

    ``rows`` returns a new iterator over the rows of a branch at each call. ``add`` compares a
    branch with one that was added before, up to the first different row. If an earlier branch left
    that one at the same position, with the same row, the comparison continues with that branch.
    The tree holds one entry for each branch, however long it is.
    """

    def __init__(self, rows: Callable[[str], Iterator[int]]) -> None:
        self._rows = rows
        # By branch, position and next row: the first branch that left it there with this row.
        self._left: dict[tuple[str | None, int, int], str] = {}

    def add(self, name: str) -> BranchPoint:
        """Add a branch; return where it leaves those that were added before."""
        base: str | None = None
        theirs: Iterator[int] = iter(())
        rows, at = self._rows(name), 0
        for row in rows:
            if next(theirs, None) != row:
                other = self._left.setdefault((base, at, row), name)
                if other == name:
                    return BranchPoint(base, at, at + 1 + sum(1 for _ in rows))
                base, theirs = other, islice(self._rows(other), at + 1, None)
            at += 1
        return BranchPoint(base, at, at)


# --- the import ---------------------------------------------------------------------------------


class _BranchPlan(NamedTuple):
    """A branch of the source, and what the store holds of it."""

    source: SourceBranch
    fork: BranchPoint
    #: None: the store has no such branch.
    stored: Branch | None
    #: The number of its items that the store holds.
    have: int

    @property
    def start(self) -> int:
        """The first item to write."""
        return self.fork.at if self.stored is None else self.have


class _DatabasePart(Part):
    """The sessions of a database, counted by their messages."""

    name = "items"

    def __init__(self, database: SdkDatabase, store: Store, chosen: Sequence[str] | None) -> None:
        self._database = database
        self._store = store
        self._chosen = chosen
        # By session, the rows that are not JSON; sessions not checked yet have no entry.
        self._unreadable: dict[str, frozenset[int]] = {}
        self._notes = Notes()

    def count(self) -> int:
        return self._database.count_messages(self._chosen)

    def units(self) -> Iterator[Unit]:
        for session in self._database.sessions(self._chosen):
            # Raises if the id cannot be a session id, before anything of it is written.
            session_key(session.id)
            unreadable = self._unreadable.get(session.id)
            if unreadable is None:
                unreadable = self._unreadable[session.id] = self._check(session)
            yield _ConversationUnit(self._database, self._store, session, unreadable)

    def notes(self) -> Sequence[ImportNote]:
        return self._notes.all()

    def _check(self, session: SourceSession) -> frozenset[int]:
        """Decode every message of a session, and note what is left out; returns the rows that are
        not JSON.
        """
        bad: set[int] = set()
        for row in self._database.messages(session):
            try:
                self._database.item(row)
            except UnreadableItemError as exc:
                bad.add(row)
                named = f"message {row} of session {session.id}: {exc.reason}"
                self._notes.add(UNREADABLE, named)
        for row in self._database.unlinked(session):
            if row not in bad:
                self._notes.add(UNLINKED, f"message {row} of session {session.id}")
        return frozenset(bad)


class _ConversationUnit(Unit):
    """One session of the source."""

    def __init__(
        self,
        database: SdkDatabase,
        store: Store,
        session: SourceSession,
        unreadable: frozenset[int],
    ) -> None:
        self._database = database
        self._session = session
        self._unreadable = unreadable
        self._conversation = Conversation(store, session.id)
        self._handle = store.session(session.id)
        self._now_ms = store.engine.now_ms
        tree = BranchTree(lambda name: (each.row for each in self._path(name)))
        self._branches = [(each, tree.add(each.name)) for each in database.branches(session)]
        self._view = self._look()
        self._plans: list[_BranchPlan] = []
        self._outcome = UNCHANGED
        self.size = sum(1 for _ in database.messages(session))

    def session(self) -> ImportedSession:
        return ImportedSession(self._session.id, self._outcome, "")

    def compare(self) -> Sequence[PartReport]:
        self._plans = plans = self._plan()
        items = sum(each.fork.length - each.fork.at for each in plans)
        missing = sum(each.fork.length - each.start for each in plans)
        is_new = not self._view.revision
        # A new session has a branch main already.
        new_branches = sum(is_new or each.stored is None for each in plans)
        if is_new:
            self._outcome = IMPORTED
        elif missing or new_branches or not self._is_settled():
            self._outcome = UPDATED
        else:
            self._outcome = UNCHANGED
        return [
            PartReport("sessions", 1, self._outcome == IMPORTED, self._outcome == UPDATED),
            PartReport("branches", len(plans), new_branches),
            PartReport("items", items, missing),
        ]

    def _path(self, branch: str, start: int = 0) -> Iterator[SourceMessage]:
        return islice(self._database.path(self._session, branch, self._unreadable), start, None)

    def _look(self) -> ConversationView:
        """The session as the store holds it; a new one with the source's count of clears."""
        try:
            view = self._conversation.view()
        except InvalidInputError as exc:
            raise self._conflict(f"is not a conversation in the store ({exc})") from exc
        clears = self._database.clears(self._session.id)
        if not view.revision:
            return view._replace(branches=view.branches._replace(clears=clears))
        if view.branches.clears > clears:
            raise self._conflict("was cleared in the store")
        return view

    def _conflict(self, what: str) -> ConflictError:
        return ConflictError(f"session {self._session.id!r} {what}; import into another store")

    # --- comparing ----------------------------------------------------------------------------

    def _plan(self) -> list[_BranchPlan]:
        """What the store holds of each branch; ConflictError if it holds other items."""
        plans: dict[str | None, _BranchPlan] = {}
        for source, fork in self._branches:
            stored = self._view.branches.by_name.get(source.name)
            try:
                have = 0 if stored is None else self._compare(source, fork, stored, plans)
            except NodeNotFoundError as exc:
                raise self._conflict(f"lacks nodes of branch {source.name!r} in the store") from exc
            plan = plans[source.name] = _BranchPlan(source, fork, stored, have)
            if self._view.revision:
                self._require_never_there(plan)
        return list(plans.values())

    def _compare(
        self,
        source: SourceBranch,
        fork: BranchPoint,
        stored: Branch,
        plans: dict[str | None, _BranchPlan],
    ) -> int:
        """The number of items of a branch that the store holds; ConflictError if one differs."""
        both = min(len(self._nodes(stored)), fork.length)
        start, base = 0, plans.get(fork.base)
        if base is not None and base.stored is not None and fork.at <= min(both, base.have):
            # The shared items were compared with the base, if the store shares them as well.
            last = fork.at - 1
            if self._nodes(stored)[last].digest == self._nodes(base.stored)[last].digest:
                start = fork.at
        nodes = self._conversation.path(stored)[start:both]
        messages = self._path(source.name, start)
        for page in nodes.pages(_PAGE):
            for at, (node, message) in enumerate(zip(page, messages, strict=False), start):
                if not _same(node.payload, self._database.item(message.row).payload):
                    raise self._conflict(
                        f"has another item {at + 1} on branch {source.name!r} in the store, which "
                        f"is message {message.row} of the database"
                    )
            start += len(page)
        return both

    def _nodes(self, branch: Branch) -> Nodes:
        return self._conversation.path(branch, payloads=False)

    def _require_never_there(self, plan: _BranchPlan) -> None:
        """Raise ConflictError if items to be written were deleted in the store."""
        name = plan.source.name
        own = next(self._path(name, plan.start), None)
        if own is None:
            gone = plan.stored is None and name in self._view.branches.used
        else:
            gone = self._handle.node(own.node) is not None
        if gone:
            what = f"branch {name!r}" if plan.stored is None else f"items of branch {name!r}"
            raise self._conflict(f"had {what} in the store before, deleted since")

    # --- writing ------------------------------------------------------------------------------

    def write(self, wrote: Wrote) -> None:
        # Not a ``transaction``: pages that were written stay, and the rest is planned again.
        attempts = Attempts(f"session {self._session.id!r}", "import it when no agent uses it")
        while True:
            attempts.begin()
            try:
                for plan in self._plans:
                    self._write_branch(plan, wrote)
                self._settle()
            except HeadConflictError:
                # Another process continued the session; compare it again.
                self._view = self._look()
                self._plans = self._plan()
                continue
            except DuplicateNodeError as exc:
                raise self._conflict(f"has another node {exc.node!r} in the store") from exc
            return

    def _write_branch(self, plan: _BranchPlan, wrote: Wrote) -> None:
        if plan.stored is not None and plan.start >= plan.fork.length:
            return
        branch = self._begin(plan)
        items = (
            (message, self._database.item(message.row))
            for message in self._path(plan.source.name, plan.start)
        )
        for page in paged(items, lambda pair: pair[1].size_bytes):
            branch = self._append(branch, page, wrote)
        # A branch without items of its own is written as well.
        if branch.name not in self._view.branches.by_name:
            self._append(branch, [], wrote)

    def _begin(self, plan: _BranchPlan) -> Branch:
        """The branch to append to: the stored one, or a new one from its last item in the base."""
        created_at_ms = plan.source.created_at_ms or self._now_ms()
        if plan.stored is not None:
            return plan.stored._replace(created_at_ms=plan.stored.created_at_ms or created_at_ms)
        begun = Branch(plan.source.name, None, created_at_ms, plan.fork.at, 0)
        if plan.fork.base is None or not plan.fork.at:
            return begun
        base = self._view.branches.get(plan.fork.base)
        shared = self._nodes(base)[: plan.fork.at]
        last = shared[-1]
        turns = _turn_of(last.frame)
        if turns is None:
            items = (restored(node.payload) for node in self._conversation.path(base))
            turns = sum(is_user(item) for item in islice(items, plan.fork.at))
        return begun._replace(leaf=last.id, turns=turns)

    def _append(
        self, branch: Branch, items: list[tuple[SourceMessage, Item]], wrote: Wrote
    ) -> Branch:
        drafts: list[NodeDraft] = []
        leaf, turns = branch.leaf, branch.turns
        for message, item in items:
            turns += is_user(restored(item.payload))
            drafts.append(
                NodeDraft(message.node, item.payload, leaf, frame=str(turns), time=message.time_ms)
            )
            leaf = message.node
        grown = branch._replace(
            leaf=leaf,
            items=branch.items + len(drafts),
            turns=turns,
        )
        # The session's leaf is that of main, where a new CasstoreSession continues.
        follows = branch.name == MAIN and self._view.leaf == branch.leaf
        self._commit(
            self._view.branches.put(grown),
            append=drafts,
            leaf=grown.leaf if follows else self._view.leaf,
        )
        wrote(len(drafts))
        return grown

    def _settle(self) -> None:
        """Write usage and reserved names; also creates a session that has no items."""
        if self._view.revision and self._is_settled():
            return
        branches = self._view.branches
        used = branches.used | self._database.reserved(self._session.id)
        usage, ledger = self._missing_usage()
        self._commit(branches._replace(used=used), usage=usage, ledger=ledger, leaf=self._view.leaf)

    def _is_settled(self) -> bool:
        """Whether the store holds the usage of all turns, and all reserved names."""
        reserved = self._database.reserved(self._session.id)
        return reserved <= self._view.branches.used and self._missing_usage()[0] is None

    def _commit(self, branches: Branches, **parts: Any) -> None:
        result = self._handle.commit(step(self._view, branches, **parts))
        self._view = self._look()
        if self._view.revision != result.revision:
            raise HeadConflictError(self._session.id, result.revision, self._view.revision)

    # --- usage --------------------------------------------------------------------------------

    def _missing_usage(self) -> tuple[dict[str, Any] | None, Usage | None]:
        """The usage of store and source together, and what the source adds to the ledger.

        None if the store lacks none of it. If a branch continued in the store, the usage that the
        store has of a turn counts, not the source's.
        """
        usage = dict(self._conversation.usage(self._view))
        added: list[Usage] = []
        for source, fork in self._branches:
            stored = self._view.branches.by_name.get(source.name)
            rows = self._database.usage(self._session, source.name)
            if not rows or stored is None:
                continue
            own = dict(usage.get(source.name, {}))
            for anchor, row in self._anchored(stored, rows):
                before = own.get(anchor)
                if before == list(row) or (before is not None and stored.items > fork.length):
                    continue
                own[anchor] = list(row)
                added.append(spent(row, None if before is None else TurnUsage(*before), _MODEL))
            usage[source.name] = own
        if not added:
            return None, None
        return usage, added[0]._replace(
            input=sum(each.input for each in added),
            output=sum(each.output for each in added),
            cached_input=sum(each.cached_input for each in added),
            reasoning=sum(each.reasoning for each in added),
        )

    def _anchored(
        self, branch: Branch, rows: Sequence[TurnUsage]
    ) -> Iterator[tuple[str, TurnUsage]]:
        """Usage by the first node of its turn, with the turn number of the store."""
        wanted = {row.turn for row in rows}
        begins: dict[int, int] = {}
        for at, message in enumerate(self._path(branch.name)):
            if message.turn in wanted:
                begins.setdefault(message.turn, at)
        nodes = self._nodes(branch)
        for row in rows:
            if row.turn not in begins:
                # The turn was deleted, and the SDK still reports its usage.
                yield f"turn {row.turn}", row
                continue
            node = nodes[begins[row.turn]]
            turn = _turn_of(node.frame)
            yield node.id, row if turn is None else row._replace(turn=turn)


def _same(stored: Any, payload: Any) -> bool:
    """Whether two items are equal as JSON, apart from the order of keys."""
    return _as_json(stored) == _as_json(payload)


def _as_json(payload: Any) -> str:
    # To Python 1, 1.0 and True are equal, and NaN is not equal to itself.
    return json.dumps(restored(payload), sort_keys=True)


def _turn_of(frame: str | None) -> int | None:
    return int(frame) if frame is not None and frame.isdecimal() else None
