"""``CasstoreSession``: a conversation of the OpenAI Agents SDK in a store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from agents.memory.session_settings import (
    SessionSettings,
    coerce_session_settings,
    resolve_session_limit,
)

from casstore.adapters.in_order import InOrder
from casstore.adapters.openai_agents.branches import MAIN, Branch, Branches
from casstore.adapters.openai_agents.conversation import (
    Conversation,
    CurrentBranch,
    TurnUsage,
    is_user,
)
from casstore.adapters.openai_agents.sqlite_names import SqliteNames
from casstore.engine.forks import Lock
from casstore.errors import InvalidInputError
from casstore.records.json_values import restored
from casstore.session.loading import Nodes
from casstore.store import Store

if TYPE_CHECKING:
    from agents import RunResult, RunResultStreaming
    from agents.items import TResponseInputItem
    from agents.memory.session import _CompactionSnapshot

Result = TypeVar("Result")


class Turn(NamedTuple):
    """A turn of a branch: a message of the user and what followed."""

    number: int
    items: list[Any]
    #: None: imported without a time.
    began_at_ms: int | None


class CasstoreSession(SqliteNames):
    """A session for ``Runner.run(…, session=…)``, with branches from any turn.

    Starts on the branch ``main``, or on ``branch``. Each object has its own current branch; the
    content of the branches is shared by all objects with the same id, in all processes. Calls on
    one object take effect in the order in which they were made. The caller opens and closes the
    store.

    >>> import asyncio
    >>> async def main():
    ...     session = CasstoreSession(store, "a conversation")
    ...     for text in ("hello", "which way?"):
    ...         await session.add_items([{"role": "user", "content": text}])
    ...     await session.branch(2, "another")  # from before the second message
    ...     await session.add_items([{"role": "user", "content": "left or right?"}])
    ...     return [item["content"] for item in await session.get_items()]
    >>> asyncio.run(main())
    ['hello', 'left or right?']
    """

    session_settings: SessionSettings | None

    def __init__(
        self,
        store: Store,
        session_id: str,
        *,
        branch: str = MAIN,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        self.session_id = session_id
        self.session_settings = coerce_session_settings(session_settings or SessionSettings())
        self._conversation = Conversation(store, session_id)
        self._line = InOrder()
        self._lock = Lock()
        # -1: the number of clears is unknown until the first call reads the conversation.
        self._at = CurrentBranch(branch, -1)

    @property
    def current_branch(self) -> str:
        """The branch that calls use by default."""
        return self._at.branch

    # --- the SDK's protocol ---------------------------------------------------------------

    async def get_items(
        self, limit: int | None = None, branch_id: str | None = None
    ) -> list[TResponseInputItem]:
        """The items of the current branch or another one; with ``limit``, the last ones."""
        most = resolve_session_limit(limit, self.session_settings)
        found = await self._read(branch_id, partial(_items, most))
        return cast("list[TResponseInputItem]", found)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Append items to the current branch, all or none."""
        if items:
            await self._write(lambda at: self._conversation.add(at, items))

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove and return the last item of the current branch; None if it is empty."""
        popped = await self._write(self._conversation.pop)
        return cast("TResponseInputItem | None", popped)

    async def clear_session(self) -> None:
        """Delete all items, branches, usage and earlier revisions.

        gc then reclaims the space. The names of branches stay reserved.
        """

        def clear(at: CurrentBranch) -> None:
            self._move(CurrentBranch(MAIN, self._conversation.clear().clears))

        await self._write(clear)

    # --- what the SDK's wrappers of sessions look for -----------------------------------------

    # OpenAIResponsesCompactionSession and EncryptedSession find these two by name. Without them
    # compaction is skipped where only part of a history can be compacted, and otherwise clears
    # the session, with all its branches, before it adds what it has compacted.

    async def _get_compaction_snapshot(
        self, limit: int, *, prune_prefix: Callable[[TResponseInputItem], bool] | None = None
    ) -> _CompactionSnapshot | None:
        """The last ``limit`` items of the current branch, and a function that replaces its end."""
        from agents.memory.session import _CompactionSnapshot

        if self._changes_items:
            return None
        tail = await self._read_at(lambda at: self._conversation.tail(at, limit))

        async def replace_suffix(start: int, output: list[TResponseInputItem]) -> bool:
            expected = tail.nodes[start:]
            if not expected:
                return False
            return await self._write(
                lambda _: self._conversation.replace_tail(tail.at, expected, output, prune_prefix)
            )

        return _CompactionSnapshot(tail.items, tail.complete, replace_suffix)

    async def _atomic_replace_items(self, items: list[TResponseInputItem]) -> bool:
        """Replace all items of the current branch; other branches stay."""
        if self._changes_items:
            return False
        return await self._write(lambda at: self._conversation.replace_tail(at, None, items))

    @property
    def _changes_items(self) -> bool:
        """True if a subclass overrides how items are read or written: the SDK must then call it."""
        kind = type(self)
        return (kind.get_items, kind.add_items, kind.clear_session) != (
            CasstoreSession.get_items,
            CasstoreSession.add_items,
            CasstoreSession.clear_session,
        )

    # --- branches -------------------------------------------------------------------------

    async def branch(self, turn: int | None = None, name: str | None = None) -> str:
        """Create a branch and switch to it: before the message of a turn, or (None) at the end.

        Writes one commit, which copies no items, however long the conversation is.
        InvalidInputError if the turn does not exist, or the name was used before, also by a deleted
        branch.
        """
        if name is not None and (type(name) is not str or not name.strip()):
            raise InvalidInputError(f"name must be a text that is not empty, got {name!r:.80}")
        label = "branch" if turn is None else f"branch_from_turn_{turn}"

        def begin(at: CurrentBranch) -> str:
            made = self._conversation.branch(at, turn, partial(_unused_name, name, label))
            self._move(made)
            return made.branch

        return await self._write(begin)

    async def switch(self, name: str) -> None:
        """Switch to another branch; BranchNotFoundError if the name does not exist."""

        def go(at: CurrentBranch) -> None:
            branches = self._conversation.view().branches
            self._move(CurrentBranch(branches.get(name).name, branches.clears))

        await self._write(go)

    async def branches(self) -> list[Branch]:
        """All branches, oldest first."""

        def read(at: CurrentBranch) -> list[Branch]:
            found = self._conversation.view().branches.by_name.values()
            return sorted(found, key=lambda each: each.created_at_ms)

        return await self._read_at(read)

    async def delete_branch(self, branch_id: str, force: bool = False) -> None:
        """Delete a branch. The current one needs ``force``; main then becomes the current one.

        Items that no other branch shares stay stored until ``prune``.
        """
        if branch_id == MAIN:
            raise InvalidInputError(
                f"the branch {MAIN!r} cannot be deleted; clear_session() deletes all items"
            )

        def delete(at: CurrentBranch) -> None:
            if branch_id == at.branch and not force:
                raise InvalidInputError(
                    f"{branch_id!r} is the current branch; switch to another, or use force=True"
                )
            self._conversation.delete_branch(branch_id)
            if branch_id == at.branch:
                self._move(at._replace(branch=MAIN))

        await self._write(delete)

    async def prune(self) -> int:
        """Remove popped items, items of deleted branches, and earlier revisions permanently.

        Returns the number of items. Revisions that are protected, pinned or leased stay. gc then
        reclaims the space. Reads the whole conversation.
        """
        return await self._write(lambda at: self._conversation.prune())

    # --- turns and usage --------------------------------------------------------------------

    async def turns(self, branch_id: str | None = None) -> list[Turn]:
        """The items of a branch by turn; items before the first user message are turn 0."""
        return await self._read(branch_id, _turns)

    async def store_run_usage(self, result: RunResult | RunResultStreaming) -> None:
        """Record the usage of a run for the latest turn, replacing an earlier record.

        The usage is also added to the ledger of the session (``store.session(id).usage()``),
        which nothing removes from, not even ``clear_session``.
        """
        usage = result.context_wrapper.usage
        if usage is None:
            return
        used = TurnUsage(
            turn=0,
            requests=usage.requests or 0,
            input_tokens=usage.input_tokens or 0,
            output_tokens=usage.output_tokens or 0,
            total_tokens=usage.total_tokens or 0,
            input_details=_details(usage.input_tokens_details),
            output_details=_details(usage.output_tokens_details),
        )
        model = getattr(result.last_agent, "model", None)
        name = model if type(model) is str else "unknown"

        def note(at: CurrentBranch) -> None:
            # ``as_known``: if another object has cleared the conversation since the run, its turn
            # is gone, and nothing is recorded.
            self._conversation.put_usage(at, used, name)

        await self._write(note, as_known=True)

    async def usage(self, branch_id: str | None = None) -> dict[str, list[TurnUsage]]:
        """The recorded usage of the turns of each branch, or of one branch."""

        def read(at: CurrentBranch) -> dict[str, list[TurnUsage]]:
            return {
                name: sorted(TurnUsage(*row) for row in rows.values())
                for name, rows in self._conversation.usage(self._conversation.view()).items()
                if branch_id in (None, name)
            }

        return await self._read_at(read)

    # --- in threads -------------------------------------------------------------------------

    def _move(self, at: CurrentBranch) -> None:
        with self._lock:
            self._at = at

    def _standing(self) -> CurrentBranch:
        """The current branch of this object; main if the conversation was cleared since its last
        call.
        """
        clears = self._conversation.view().branches.clears
        with self._lock:
            if self._at.clears != clears:
                known = self._at.clears >= 0
                self._at = CurrentBranch(MAIN if known else self._at.branch, clears)
            return self._at

    async def _read(self, branch: str | None, pick: Callable[[Nodes], Result]) -> Result:
        """What ``pick`` returns for the nodes of the current branch or another one."""

        def read(at: CurrentBranch) -> Result:
            if branch is not None:
                at = at._replace(branch=branch)
            return self._conversation.read(at, lambda view, branch, nodes: pick(nodes))

        return await self._read_at(read)

    async def _read_at(self, read: Callable[[CurrentBranch], Result]) -> Result:
        return await asyncio.to_thread(lambda: read(self._standing()))

    async def _write(
        self, change: Callable[[CurrentBranch], Result], *, as_known: bool = False
    ) -> Result:
        def write() -> Result:
            known = self._at
            at = known if as_known and known.clears >= 0 else self._standing()
            return change(at)

        place = self._line.take_place(write)
        return await _settled(asyncio.to_thread(place.finish))


async def _settled(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait until a write is done, even if the caller is cancelled meanwhile.

    A write in a thread cannot be cancelled. If the caller got CancelledError before the write had
    ended, it would not know whether the write happens, and might repeat it.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            raise cancelled from task.exception()
        raise cancelled
    return task.result()


def _items(limit: int | None, nodes: Nodes) -> list[Any]:
    chosen = nodes if limit is None or limit < 0 else nodes[max(len(nodes) - limit, 0) :]
    return [restored(node.payload) for node in chosen]


def _turns(nodes: Nodes) -> list[Turn]:
    turns: list[Turn] = []
    for node in nodes:
        item = restored(node.payload)
        if is_user(item) or not turns:
            number = (turns[-1].number if turns else 0) + is_user(item)
            began = node.time if type(node.time) is int else None
            turns.append(Turn(number, [], began))
        turns[-1].items.append(item)
    return turns


def _unused_name(wanted: str | None, label: str, branches: Branches) -> str:
    if wanted is not None:
        if wanted in branches.used:
            raise InvalidInputError(f"the name {wanted!r} was used before; choose another")
        return wanted
    base = f"{label}_{int(time.time())}"
    name, count = base, 1
    while name in branches.used:
        count += 1
        name = f"{base}_{count}"
    return name


def _details(details: Any) -> dict[str, Any] | None:
    """The values of a token breakdown; None if it cannot be stored."""
    if details is None:
        return None
    try:
        found: dict[str, Any] = json.loads(json.dumps(vars(details)))
    except TypeError:
        return None
    return found
