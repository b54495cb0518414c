"""A database of the SDK's SQLiteSession or AdvancedSQLiteSession into a store, compared.

Session by session: every item is looked at, what the store has of the session is compared, and
only then the rest is written, a batch to a commit. Branches are written from where they leave
another, so what they share is stored once. What the store has already, and equal, is passed
over: an import that was stopped goes on where it was, and one that is repeated moves what is new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.adapters.openai_agents.branch_tree import BranchTree, Fork
from casstore.adapters.openai_agents.branches import MAIN, Branch, Branches
from casstore.adapters.openai_agents.conversation import (
    Conversation,
    TurnUsage,
    View,
    spent,
    step,
)
from casstore.adapters.openai_agents.items import is_user
from casstore.adapters.openai_agents.sdk_database import (
    Message,
    SdkDatabase,
    SourceBranch,
    SourceSession,
    UnreadableItemError,
)
from casstore.compat.importing import used_bytes
from casstore.compat.sqlite_source import SqliteSource
from casstore.errors import (
    ConflictError,
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    NodeNotFoundError,
)
from casstore.maintenance.progress import Progress, Step
from casstore.records.json_values import restored
from casstore.session.arguments import check_flag, check_text
from casstore.session.attempts import Attempts
from casstore.session.data import NodeDraft, Usage
from casstore.session.keys import session_key
from casstore.session.nodes import Nodes
from casstore.store import Store, check_store

_SESSIONS_TABLE: Final = "agent_sessions"
_MESSAGES_TABLE: Final = "agent_messages"
# A commit holds so much at the most: what stopping in between would lose.
_BATCH_NODES: Final = 256
_BATCH_BYTES: Final = 4 << 20
# Items may be long, and a page is held whole.
_PAGE: Final = 16
# What a report names of messages that hold no item.
_TOLD_UNREADABLE: Final = 100
# The SDK does not write down which model a turn has used.
_MODEL: Final = "unknown"


class UnreadableItem(NamedTuple):
    """A message that the SDK passes over, too: its ``message_data`` is no JSON."""

    session: str
    #: Its id in the table of messages.
    row: int
    reason: str


class ImportReport(NamedTuple):
    """What an import did, or would do. Sizes in bytes; of the store, None if it does not tell."""

    dry_run: bool
    #: In the source. An item that branches share is counted once.
    sessions: int
    branches: int
    items: int
    #: Moved now, or that would be; the others were in the store already.
    new_sessions: int
    imported: int
    #: Messages that hold no JSON, and the first of them: left out.
    unreadable: int
    unreadable_items: tuple[UnreadableItem, ...]
    #: Messages on no branch of a session that has branches, which the SDK does not show: left out.
    unlinked: int
    source_bytes: int
    store_bytes_before: int | None
    store_bytes: int | None


def import_sqlite(
    store: Store,
    file: str | os.PathLike[str],
    *,
    sessions: Sequence[str] | None = None,
    sessions_table: str = _SESSIONS_TABLE,
    messages_table: str = _MESSAGES_TABLE,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Move the conversations of a database of the SDK over, and compare all of them.

    All sessions, or those named, with their branches, turns and usage, under their ids. The
    file is opened read-only and is as it was afterwards. Messages that hold no JSON are passed
    over as the SDK does, and the report names them. A session that the store has a beginning of
    goes on; one that it has all of, or more, stays. ConflictError if the store has one of the
    same name with other content: nothing is written for that then. Raising from ``progress``
    stops between two commits; the next call goes on from there. ``dry_run`` writes nothing.

    >>> import asyncio
    >>> from agents import SQLiteSession
    >>> talk = SQLiteSession("talk", place / "old.db")
    >>> asyncio.run(talk.add_items([{"role": "user", "content": "hello"}]))
    >>> talk.close()
    >>> import_sqlite(store, place / "old.db").imported
    1
    """
    check_store(store)
    check_text(sessions_table, "a table")
    check_text(messages_table, "a table")
    check_flag(dry_run, "whether nothing is written")
    before = used_bytes(store)
    with SqliteSource(file) as source:
        database = SdkDatabase(source, sessions_table, messages_table)
        work = _Import(database, store, database.choose(sessions), dry_run, progress)
        work.copy()
        if not dry_run:
            work.verify()
        source.require_unchanged()
        size = source.size_bytes
    return ImportReport(
        dry_run,
        work.sessions,
        work.branches,
        work.items,
        work.new_sessions,
        work.imported,
        work.unreadable,
        tuple(work.unreadable_items),
        work.unlinked,
        size,
        before,
        used_bytes(store),
    )


class _Plan(NamedTuple):
    """A branch of the source, and what the store has of it."""

    source: SourceBranch
    fork: Fork
    #: As the store has it, None: not there.
    stored: Branch | None
    #: How many of its items that has.
    have: int

    @property
    def start(self) -> int:
        """The first item that is to be written."""
        return self.fork.at if self.stored is None else self.have


class _Import:
    """One import."""

    def __init__(
        self,
        database: SdkDatabase,
        store: Store,
        chosen: Sequence[str] | None,
        dry_run: bool,
        progress: Progress | None,
    ) -> None:
        self._database = database
        self._store = store
        self._chosen = chosen
        self._dry_run = dry_run
        self._progress = progress
        self._total = database.count_messages(chosen)
        self._done = 0
        # By session, for those that have any.
        self._unreadable: dict[str, frozenset[int]] = {}
        self.sessions = self.branches = self.items = 0
        self.new_sessions = self.imported = 0
        self.unreadable = self.unlinked = 0
        self.unreadable_items: list[UnreadableItem] = []

    def copy(self) -> None:
        """Look at every session, and move what the store does not have of it."""
        for session in self._database.sessions(self._chosen):
            # Whether it can be a name here is told before anything of it is written.
            session_key(session.id)
            before, messages = self._done, self._survey(session)
            one = self._open(session)
            plans = one.plan()
            self.sessions += 1
            self.branches += len(plans)
            self.items += sum(each.fork.length - each.fork.at for each in plans)
            self.new_sessions += one.is_new
            if self._dry_run:
                self.imported += sum(each.fork.length - each.start for each in plans)
            else:
                one.write(plans, self._wrote)
            self._done = before + messages
            self._tell("look" if self._dry_run else "copy", self._total)

    def verify(self) -> None:
        """Read everything back, and compare it with the source."""
        self._done = 0
        for session in self._database.sessions(self._chosen):
            one = self._open(session)
            plans = one.plan()
            if one.is_new or any(each.start < each.fork.length for each in plans):
                raise ConflictError(f"session {session.id!r} became less while it was compared")
            one.verify_usage()
            self._done += sum(each.fork.length - each.fork.at for each in plans)
            self._tell("verify", self.items)

    def _open(self, session: SourceSession) -> _Conversation:
        unreadable = self._unreadable.get(session.id, frozenset())
        return _Conversation(self._database, self._store, session, unreadable)

    def _survey(self, session: SourceSession) -> int:
        """Look at every message of a session, and remember which hold no item; how many it has."""
        bad: set[int] = set()
        messages = 0
        for row in self._database.messages(session):
            messages += 1
            try:
                self._database.item(row)
            except UnreadableItemError as exc:
                bad.add(row)
                if len(self.unreadable_items) < _TOLD_UNREADABLE:
                    self.unreadable_items.append(UnreadableItem(session.id, row, exc.reason))
        if bad:
            self._unreadable[session.id] = frozenset(bad)
        self.unreadable += len(bad)
        self.unlinked += sum(row not in bad for row in self._database.unlinked(session))
        return messages

    def _wrote(self, items: int) -> None:
        self.imported += items
        self._done += items
        self._tell("copy", self._total)

    def _tell(self, phase: str, total: int) -> None:
        if self._progress is not None:
            self._progress(Step(phase, self._done, total, "items"))


class _Conversation:
    """One session of the source, on its way into the store."""

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
        self.is_new = not self._view.revision

    def _path(self, branch: str, start: int = 0) -> Iterator[Message]:
        return islice(self._database.path(self._session, branch, self._unreadable), start, None)

    def _look(self) -> View:
        """The session as the store has it; as the source has it in the beginning, if it has not."""
        try:
            view = self._conversation.view()
        except InvalidInputError as exc:
            raise self._conflict(f"is in the store as something else ({exc})") from exc
        clears = self._database.clears(self._session.id)
        if not view.revision:
            return view._replace(branches=view.branches._replace(clears=clears))
        if view.branches.clears > clears:
            raise self._conflict("was cleared in the store")
        return view

    def _conflict(self, what: str) -> ConflictError:
        return ConflictError(f"session {self._session.id!r} {what}; import into another store")

    # --- comparing ----------------------------------------------------------------------------

    def plan(self) -> list[_Plan]:
        """What the store has of each branch; ConflictError if that is something else."""
        plans: dict[str | None, _Plan] = {}
        for source, fork in self._branches:
            stored = self._view.branches.by_name.get(source.name)
            try:
                have = 0 if stored is None else self._compare(source, fork, stored, plans)
            except NodeNotFoundError as exc:
                raise self._conflict(f"has lost the end of branch {source.name!r}") from exc
            plan = plans[source.name] = _Plan(source, fork, stored, have)
            if self._view.revision:
                self._require_never_there(plan)
        return list(plans.values())

    def _compare(
        self, source: SourceBranch, fork: Fork, stored: Branch, plans: dict[str | None, _Plan]
    ) -> int:
        """How many items of a branch the store has; ConflictError if it has others."""
        both = min(len(self._nodes(stored)), fork.length)
        start, base = 0, plans.get(fork.base)
        if base is not None and base.stored is not None and fork.at <= min(both, base.have):
            # Compared with the branch that it shares them with, if it does so here, too.
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

    def _require_never_there(self, plan: _Plan) -> None:
        """ConflictError if what is to be written was there once: taken away, it stays so."""
        name = plan.source.name
        own = next(self._path(name, plan.start), None)
        if own is None:
            gone = plan.stored is None and name in self._view.branches.used
        else:
            gone = self._handle.node(own.node) is not None
        if gone:
            what = f"branch {name!r}" if plan.stored is None else f"items of branch {name!r}"
            raise self._conflict(f"was in the store with {what} that were taken away there")

    # --- writing ------------------------------------------------------------------------------

    def write(self, plans: Sequence[_Plan], wrote: Callable[[int], None]) -> None:
        """Put everything into the store that it does not have; told after each commit."""
        attempts = Attempts(f"session {self._session.id!r}")
        while True:
            attempts.begin()
            try:
                for plan in plans:
                    self._write_branch(plan, wrote)
                self._settle()
            except HeadConflictError:
                # Somebody else goes on with it; whether that fits is seen from the beginning.
                self._view = self._look()
                plans = self.plan()
                continue
            except DuplicateNodeError as exc:
                raise self._conflict(f"has node {exc.node!r} for something else") from exc
            return

    def _write_branch(self, plan: _Plan, wrote: Callable[[int], None]) -> None:
        if plan.stored is not None and plan.start >= plan.fork.length:
            return
        branch = self._begin(plan)
        drafts: list[NodeDraft] = []
        size, leaf, turns = 0, branch.leaf, branch.turns
        for message in self._path(plan.source.name, plan.start):
            item = self._database.item(message.row)
            turns += is_user(restored(item.payload))
            drafts.append(
                NodeDraft(message.node, item.payload, leaf, frame=str(turns), time=message.time_ms)
            )
            leaf, size = message.node, size + item.size_bytes
            if len(drafts) >= _BATCH_NODES or size >= _BATCH_BYTES:
                branch = self._append(branch, drafts, turns, wrote)
                drafts, size = [], 0
        # A branch that has no items of its own is written, too.
        if drafts or branch.name not in self._view.branches.by_name:
            self._append(branch, drafts, turns, wrote)

    def _begin(self, plan: _Plan) -> Branch:
        """The branch to go on with: as it is in the store, or as it leaves its base."""
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
        self, branch: Branch, drafts: list[NodeDraft], turns: int, wrote: Callable[[int], None]
    ) -> Branch:
        grown = branch._replace(
            leaf=drafts[-1].id if drafts else branch.leaf,
            items=branch.items + len(drafts),
            turns=turns,
        )
        # What a picker shows, and where a new object begins, is main.
        follows = branch.name == MAIN and self._view.leaf == branch.leaf
        self._commit(
            self._view.branches.put(grown),
            append=drafts,
            leaf=grown.leaf if follows else self._view.leaf,
        )
        wrote(len(drafts))
        return grown

    def _settle(self) -> None:
        """Note usage and names that are taken; and that there is a session, if it is empty."""
        branches = self._view.branches
        used = branches.used | self._database.reserved(self._session.id)
        usage, ledger = self._missing_usage()
        if self._view.revision and used == branches.used and usage is None:
            return
        self._commit(branches._replace(used=used), usage=usage, ledger=ledger, leaf=self._view.leaf)

    def _commit(self, branches: Branches, **parts: Any) -> None:
        result = self._handle.commit(step(self._view, branches, **parts))
        self._view = self._look()
        if self._view.revision != result.revision:
            raise HeadConflictError(self._session.id, result.revision, self._view.revision)

    # --- usage --------------------------------------------------------------------------------

    def verify_usage(self) -> None:
        """ConflictError unless the store has the usage of all turns."""
        if self._missing_usage()[0] is not None:
            raise ConflictError(
                f"the usage of session {self._session.id!r} changed while it was compared"
            )

    def _missing_usage(self) -> tuple[dict[str, Any] | None, Usage | None]:
        """All usage with that of the source, and what that adds; None if nothing is missing.

        Where a branch has gone on in the store, what is noted there is the later.
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
        """Usage by the node that its turn begins with, and numbered as turns are here."""
        wanted = {row.turn for row in rows}
        begins: dict[int, int] = {}
        for at, message in enumerate(self._path(branch.name)):
            if message.turn in wanted:
                begins.setdefault(message.turn, at)
        nodes = self._nodes(branch)
        for row in rows:
            if row.turn not in begins:
                # Nothing is left of the turn, and the SDK still tells what it has used.
                yield f"turn {row.turn}", row
                continue
            node = nodes[begins[row.turn]]
            turn = _turn_of(node.frame)
            yield node.id, row if turn is None else row._replace(turn=turn)


def _same(stored: Any, payload: Any) -> bool:
    """Are two items the same JSON, but for the order of keys?"""
    return _spelled(stored) == _spelled(payload)


def _spelled(payload: Any) -> str:
    # 1, 1.0 and true are equal to Python, and not a number is not equal to itself.
    return json.dumps(restored(payload), sort_keys=True)


def _turn_of(frame: str | None) -> int | None:
    return int(frame) if frame is not None and frame.isdecimal() else None
