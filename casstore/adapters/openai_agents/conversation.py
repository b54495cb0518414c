"""A conversation as a session of the runtime: items are nodes, branches name leaves.

Every change is one commit based on the revision that was read. If another writer commits first, the
change is retried on the new revision: so two writers on one branch both succeed, one after the
other. The ``frame`` of a node is the number of its turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.adapters.openai_agents import branches as table
from casstore.adapters.openai_agents.branches import MAIN, Branch, Branches
from casstore.errors import (
    CorruptionError,
    HeadConflictError,
    InvalidInputError,
    NodeNotFoundError,
)
from casstore.format.canonical import Link
from casstore.maintenance import retention
from casstore.maintenance.retention import Policy
from casstore.records.json_values import restored, storable
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.data import Checkpoint, Commit, Node, NodeDraft, Time, Usage
from casstore.session.loading import Nodes
from casstore.store import Store

Result = TypeVar("Result")

_SOURCE: Final = "openai-agents"


class ConversationView(NamedTuple):
    """A conversation at one revision."""

    revision: int
    leaf: str | None
    nodes: int
    checkpoint: Checkpoint
    branches: Branches


class CurrentBranch(NamedTuple):
    """The current branch of a ``CasstoreSession``, and the conversation's number of clears then.

    If the conversation was cleared since, the current branch is main.
    """

    branch: str
    clears: int


class LastItems(NamedTuple):
    """The last items of a branch, oldest first, and their nodes."""

    at: CurrentBranch
    nodes: list[str]
    items: list[Any]
    #: True if the branch has no other items.
    complete: bool


class TurnUsage(NamedTuple):
    """The requests and tokens that a turn has used."""

    turn: int
    requests: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_details: Any
    output_details: Any


class Conversation:
    """Reads and changes one conversation."""

    def __init__(self, store: Store, session_id: str) -> None:
        self._store = store
        self._session = store.session(session_id)

    # --- reading ------------------------------------------------------------------------

    def view(self) -> ConversationView:
        """The current revision of the conversation."""
        state = self._session.load(hydrate=False)
        if state is None:
            return ConversationView(0, None, 0, Checkpoint(), table.none_yet())
        found = table.unpack(self._session.id, state.checkpoint.turn_state)
        if found is None:
            found = table.none_yet()
            turns = sum(is_user(restored(node.payload)) for node in state.nodes)
            found = found.put(
                Branch(MAIN, state.leaf, state.head.created_at_ms, len(state.nodes), turns)
            )
        head = state.head
        return ConversationView(head.revision, state.leaf, head.node_count, state.checkpoint, found)

    def where(self, at: CurrentBranch, view: ConversationView) -> Branch:
        """The branch that ``at`` names; main if the conversation was cleared since."""
        return view.branches.get(at.branch if at.clears == view.branches.clears else MAIN)

    @transaction("session {self._session.id!r}")
    def read(
        self,
        at: CurrentBranch,
        pick: Callable[[ConversationView, Branch, Nodes], Result],
    ) -> Result:
        """The result of ``pick`` for a branch and its nodes."""
        view = self.view()
        branch = self.where(at, view)
        # NodeNotFoundError if another writer has cleared or pruned the branch meanwhile.
        return pick(view, branch, self.path(branch))

    def path(self, branch: Branch, *, payloads: bool = True) -> Nodes:
        """The nodes of a branch, from its beginning."""
        if branch.leaf is None:
            return self._session.nodes(payloads=payloads)[:0]
        return self._session.nodes(leaf=branch.leaf, payloads=payloads)

    # --- appending and removing -----------------------------------------------------------

    def add(self, at: CurrentBranch, items: Sequence[Any]) -> None:
        """Append items to a branch, all or none."""
        payloads = _payloads(items)

        def change(view: ConversationView) -> Commit:
            branch = self.where(at, view)
            now_ms = self._store.engine.now_ms()
            added = _NewItems(branch.leaf, branch.turns, view.revision + 1)
            added.extend(payloads, now_ms)
            grown = branch._replace(
                leaf=added.leaf,
                created_at_ms=branch.created_at_ms or now_ms,
                items=branch.items + len(items),
                turns=added.turns,
            )
            return step(view, view.branches.put(grown), append=added.drafts)

        self._change(change)

    def tail(self, at: CurrentBranch, limit: int) -> LastItems:
        """The last ``limit`` items of a branch."""

        def pick(view: ConversationView, branch: Branch, nodes: Nodes) -> LastItems:
            chosen = list(nodes[max(len(nodes) - limit, 0) :])
            return LastItems(
                CurrentBranch(branch.name, view.branches.clears),
                [node.id for node in chosen],
                [restored(node.payload) for node in chosen],
                len(chosen) == len(nodes),
            )

        return self.read(at, pick)

    def replace_tail(
        self,
        at: CurrentBranch,
        expected: Sequence[str] | None,
        items: Sequence[Any],
        drops: Callable[[Any], bool] | None = None,
    ) -> bool:
        """Replace the last items of a branch, in one commit.

        ``expected`` are the nodes of the items to replace, or None for all items of the branch;
        False, and nothing happens, if the branch no longer ends in them, as after a clear. Items
        at the beginning of the branch are removed as well, as long as ``drops`` returns True for
        them. What is replaced or removed stays in the session, as after ``pop``, until ``prune``.
        """
        payloads = _payloads(items)
        replaced = False

        def change(view: ConversationView) -> Commit | None:
            nonlocal replaced
            replaced = False
            branch = self.where(at, view)
            nodes = self.path(branch)
            start = 0 if expected is None else len(nodes) - len(expected)
            if expected is not None and (
                start < 0 or [node.id for node in nodes[start:]] != [*expected]
            ):
                return None
            kept = list(nodes[:start])
            dropped = 0
            while drops is not None and dropped < start and drops(restored(kept[dropped].payload)):
                dropped += 1
            now_ms = self._store.engine.now_ms()
            if dropped:
                # A path starts at its root, so the nodes after removed ones are stored again.
                grown = _NewItems(None, 0, view.revision + 1)
                for node in kept[dropped:]:
                    grown.extend([node.payload], node.time)
            else:
                turns = sum(is_user(restored(node.payload)) for node in kept)
                grown = _NewItems(kept[-1].id if kept else None, turns, view.revision + 1)
            moved = [draft.id for draft in grown.drafts]
            grown.extend(payloads, now_ms)
            shorter = branch._replace(
                leaf=grown.leaf, items=start - dropped + len(items), turns=grown.turns
            )
            replaced = True
            return step(
                view,
                view.branches.put(shorter),
                append=grown.drafts,
                leaf=grown.leaf,
                usage=self._usage_after(view, branch, kept, dropped, moved),
            )

        self._change(change)
        return replaced

    def _usage_after(
        self,
        view: ConversationView,
        branch: Branch,
        kept: Sequence[Node],
        dropped: int,
        moved: Sequence[str],
    ) -> dict[str, Any] | None:
        """The usage without that of turns removed from a branch; None if nothing changes.

        ``kept`` are the nodes before the replaced ones. The first ``dropped`` of them are removed,
        too; then the rest get new nodes, whose ids are ``moved``.
        """
        usage = self.usage(view)
        own = usage.get(branch.name, {})
        ids = moved if dropped else [node.id for node in kept]
        gone = sum(is_user(restored(node.payload)) for node in kept[:dropped])
        left: dict[str, list[Any]] = {}
        for node, new in zip(kept[dropped:], ids, strict=True):
            if node.id in own:
                row = TurnUsage(*own[node.id])
                left[new] = list(row._replace(turn=row.turn - gone))
        return None if left == own else {**usage, branch.name: left}

    def pop(self, at: CurrentBranch) -> Any:
        """Remove and return the last item of a branch; None if it is empty."""
        popped: list[Any] = []

        def change(view: ConversationView) -> Commit | None:
            popped.clear()
            branch = self.where(at, view)
            if branch.leaf is None:
                return None
            node = self._session.node(branch.leaf)
            if node is None:
                raise NodeNotFoundError(self._session.id, branch.leaf)
            item = restored(node.payload)
            popped.append(item)
            shorter = branch._replace(
                leaf=node.parent,
                items=branch.items - 1,
                turns=branch.turns - is_user(item),
            )
            usage = self.usage(view)
            # If the turn started with this item, the turn is empty now, and its usage is removed.
            own = usage.get(branch.name, {})
            left = {anchor: row for anchor, row in own.items() if anchor != node.id}
            changed = None if left == own else {**usage, branch.name: left}
            return step(view, view.branches.put(shorter), leaf=node.parent, usage=changed)

        self._change(change)
        return popped[0] if popped else None

    def clear(self) -> Branches:
        """Remove all items, branches and usage, and earlier revisions."""

        def change(view: ConversationView) -> Commit | None:
            if not view.revision:
                return None
            cleared = view.branches.cleared(self._store.engine.now_ms())
            nothing = view._replace(checkpoint=Checkpoint())
            return step(nothing, cleared, replace=[], leaf=None)

        self._change(change)
        self._forget_history()
        return self.view().branches

    def prune(self) -> int:
        """Remove items of no branch, and earlier revisions; returns the number of items."""
        removed = 0

        def change(view: ConversationView) -> Commit | None:
            nonlocal removed
            # The new parent of each node that stays. Hidden nodes are removed, so it is the node
            # before it on its path, which is not always its present parent.
            kept: dict[str, str | None] = {}
            for branch in view.branches.by_name.values():
                parent = None
                for node in self.path(branch, payloads=False):
                    kept[node.id] = parent
                    parent = node.id
            removed = view.nodes - len(kept)
            if not removed:
                return None
            nodes = [
                node._replace(parent=kept[node.id])
                for node in self._session.nodes("full")
                if node.id in kept
            ]
            leaf = view.leaf if view.leaf in kept else view.branches.get(MAIN).leaf
            return step(view, view.branches, replace=nodes, leaf=leaf)

        self._change(change)
        self._forget_history()
        return removed

    def _forget_history(self) -> None:
        """Delete earlier revisions, except those protected, pinned or leased."""
        if self._session.head() is None:
            return
        plan = retention.plan(
            self._store,
            sessions=[self._session.id],
            policy=Policy(last=1, labelled=False),
            # The caller asked to delete these items, so retention policies do not apply.
            override_policies=True,
        )
        retention.execute(self._store, plan)

    # --- branches ---------------------------------------------------------------------------

    def branch(
        self, at: CurrentBranch, turn: int | None, name: Callable[[Branches], str]
    ) -> CurrentBranch:
        """Create a branch before a turn of this one, or (None) at its end."""
        made = at

        def change(view: ConversationView) -> Commit:
            nonlocal made
            source = self.where(at, view)
            now_ms = self._store.engine.now_ms()
            new = Branch(name(view.branches), source.leaf, now_ms, source.items, source.turns)
            if turn is not None:
                nodes = self.path(source, payloads=False)
                start = self._turn_start(source, nodes, turn)
                leaf = nodes[start - 1].id if start else None
                new = new._replace(leaf=leaf, items=start, turns=turn - 1)
            made = CurrentBranch(new.name, view.branches.clears)
            return step(view, view.branches.put(new), leaf=new.leaf)

        self._change(change)
        return made

    def delete_branch(self, name: str) -> None:
        """Delete a branch; items shared with other branches stay."""

        def change(view: ConversationView) -> Commit:
            branch = view.branches.get(name)
            usage = self.usage(view)
            left = {key: rows for key, rows in usage.items() if key != branch.name}
            # The session's visible leaf must not be that of a deleted branch.
            leaf = view.branches.get(MAIN).leaf if view.leaf == branch.leaf else view.leaf
            return step(view, view.branches.drop(name), leaf=leaf, usage=left if usage else None)

        self._change(change)

    def _turn_start(self, branch: Branch, nodes: Nodes, turn: int) -> int:
        """The position of the message that starts a turn."""
        if type(turn) is not int or not 1 <= turn <= branch.turns:
            raise InvalidInputError(
                f"turn must be from 1 to {branch.turns} in branch {branch.name!r}, got {turn!r}"
            )
        if nodes[0].frame is not None:
            return bisect_left(range(len(nodes)), turn, key=lambda at: _turn_of(nodes[at]))
        # The nodes of an imported conversation have no turn numbers: count the user messages.
        for at, node in enumerate(self.path(branch)):
            turn -= is_user(restored(node.payload))
            if not turn:
                return at
        raise CorruptionError(
            f"branch {branch.name!r} has fewer turns than the {branch.turns} recorded for it"
        )

    # --- usage ------------------------------------------------------------------------------

    def usage(self, view: ConversationView) -> dict[str, dict[str, list[Any]]]:
        """The recorded usage: a ``TurnUsage`` as a list, by branch and first node of its turn."""
        link = view.checkpoint.execution_state
        if not isinstance(link, Link):
            return {}
        found: dict[str, dict[str, list[Any]]] = self._store.get_value(link.digest)
        return found

    def put_usage(self, at: CurrentBranch, used: TurnUsage, model: str) -> bool:
        """Record the usage of the latest turn of a branch, replacing an earlier record.

        False, and nothing happens, if the conversation was cleared since, or has no turn.
        """
        stored = False

        def change(view: ConversationView) -> Commit | None:
            nonlocal stored
            stored = False
            if at.clears != view.branches.clears:
                return None
            branch = view.branches.get(at.branch)
            if branch.leaf is None:
                return None
            nodes = self.path(branch, payloads=False)
            start = self._turn_start(branch, nodes, branch.turns) if branch.turns else 0
            anchor = nodes[start].id
            usage = self.usage(view)
            own = dict(usage.get(branch.name, {}))
            before = TurnUsage(*own[anchor]) if anchor in own else None
            own[anchor] = list(used._replace(turn=branch.turns))
            stored = True
            return step(
                view,
                view.branches,
                usage={**usage, branch.name: own},
                ledger=spent(used, before, model),
            )

        self._change(change)
        return stored

    # --- committing -------------------------------------------------------------------------

    @transaction("session {self._session.id!r}")
    def _change(self, make: Callable[[ConversationView], Commit | None]) -> None:
        """Commit what ``make`` returns for the current conversation; retry if it has changed.

        If ``make`` returns None, nothing is committed.
        """
        commit = make(self.view())
        if commit is not None:
            try:
                self._session.commit(commit)
            except HeadConflictError as exc:
                raise ChangedMeanwhile from exc


def step(
    view: ConversationView,
    branches: Branches,
    *,
    usage: dict[str, Any] | None = None,
    ledger: Usage | None = None,
    **parts: Any,
) -> Commit:
    """A commit based on the revision that was read. ``usage`` None keeps the recorded usage."""
    checkpoint = view.checkpoint._replace(turn_state=table.pack(branches))
    if usage is not None:
        checkpoint = checkpoint._replace(execution_state=usage)
    return Commit(
        checkpoint=checkpoint,
        expected=view.revision,
        usage=[] if ledger is None else [ledger],
        **parts,
    )


class _NewItems:
    """Nodes to append after a leaf; ``leaf`` and ``turns`` are those of the branch with them."""

    def __init__(self, leaf: str | None, turns: int, revision: int) -> None:
        self.leaf = leaf
        self.turns = turns
        self.drafts: list[NodeDraft] = []
        self._revision = revision

    def extend(self, payloads: Sequence[Any], time: Time) -> None:
        """Append items in stored form."""
        for payload in payloads:
            self.turns += is_user(restored(payload))
            # Revision numbers are never reused, so the ids are new.
            own = f"i{self._revision}.{len(self.drafts)}"
            self.drafts.append(NodeDraft(own, payload, self.leaf, frame=str(self.turns), time=time))
            self.leaf = own


def is_user(item: Any) -> bool:
    """Whether a turn starts with this item."""
    return type(item) is dict and item.get("role") == "user"


def _payloads(items: Sequence[Any]) -> list[Any]:
    """The stored forms of items; InvalidInputError if one is not a dict."""
    for item in items:
        if type(item) is not dict:
            raise InvalidInputError(f"an item must be a dict, got {type(item).__name__}")
    return [storable(item) for item in items]


def _turn_of(node: Node) -> int:
    if node.frame is None or not node.frame.isdecimal():
        raise CorruptionError(f"node {node.id!r} does not say which turn it belongs to")
    return int(node.frame)


def spent(used: TurnUsage, before: TurnUsage | None, model: str) -> Usage:
    """The usage to add to the session's ledger, which has counted ``before`` already."""

    def counts(one: TurnUsage | None) -> tuple[int, int, int, int]:
        if one is None:
            return (0, 0, 0, 0)
        cached = int((one.input_details or {}).get("cached_tokens") or 0)
        reasoning = int((one.output_details or {}).get("reasoning_tokens") or 0)
        # The SDK counts reasoning as output, too.
        return (one.input_tokens, max(one.output_tokens - reasoning, 0), cached, reasoning)

    more = [max(now - then, 0) for now, then in zip(counts(used), counts(before), strict=True)]
    return Usage(_SOURCE, model, *more)
