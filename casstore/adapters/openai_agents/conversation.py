"""A conversation as a session of the runtime: items are nodes, branches name leaves.

Every change is one commit on the revision that it was made from. If somebody else was first, it
is made anew from what is there then: so two writers on one branch both get through, one behind
the other. The ``frame`` of a node is the number of its turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from casstore.adapters.openai_agents import branches as table
from casstore.adapters.openai_agents.branches import MAIN, Branch, Branches
from casstore.adapters.openai_agents.items import is_user
from casstore.errors import (
    BusyError,
    CorruptionError,
    HeadConflictError,
    InvalidInputError,
    NodeNotFoundError,
)
from casstore.format.canonical import Link
from casstore.maintenance import retention
from casstore.maintenance.retention import Policy
from casstore.records.json_values import restored, storable
from casstore.session.data import UNFENCED, Checkpoint, Commit, Node, NodeDraft, Usage
from casstore.session.nodes import Nodes
from casstore.store import Store

Result = TypeVar("Result")

_MAX_ATTEMPTS: Final = 256
_SOURCE: Final = "openai-agents"


class View(NamedTuple):
    """A conversation at one revision."""

    revision: int
    leaf: str | None
    nodes: int
    checkpoint: Checkpoint
    branches: Branches


class At(NamedTuple):
    """Where somebody stands in a conversation. A clear takes everybody back to main."""

    branch: str
    clears: int


class TurnUsage(NamedTuple):
    """What a turn has used."""

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

    def view(self) -> View:
        """The conversation as it is."""
        state = self._session.load(hydrate=False)
        if state is None:
            return View(0, None, 0, Checkpoint(), table.none_yet())
        found = table.unpack(self._session.id, state.checkpoint.turn_state)
        if found is None:
            found = table.none_yet()
            turns = sum(is_user(restored(node.payload)) for node in state.nodes)
            found = found.put(
                Branch(MAIN, state.leaf, state.head.created_at_ms, len(state.nodes), turns)
            )
        head = state.head
        return View(head.revision, state.leaf, head.node_count, state.checkpoint, found)

    def where(self, at: At, view: View) -> Branch:
        """The branch that somebody means; after a clear by anybody, main."""
        return view.branches.get(at.branch if at.clears == view.branches.clears else MAIN)

    def read(
        self, at: At, pick: Callable[[View, Branch, Nodes], Result], *, payloads: bool = True
    ) -> Result:
        """What ``pick`` makes of a branch and its nodes."""
        for _ in range(_MAX_ATTEMPTS):
            view = self.view()
            branch = self.where(at, view)
            try:
                return pick(view, branch, self.path(branch, payloads=payloads))
            except NodeNotFoundError:
                # Cleared or pruned since it was looked up; unless it is just not there.
                if self.view().revision == view.revision:
                    raise
        raise BusyError(f"session {self._session.id!r} kept changing")

    def path(self, branch: Branch, *, payloads: bool = True) -> Nodes:
        """The nodes of a branch, from its beginning."""
        if branch.leaf is None:
            return self._session.nodes(payloads=payloads)[:0]
        return self._session.nodes(leaf=branch.leaf, payloads=payloads)

    # --- adding and taking away -----------------------------------------------------------

    def add(self, at: At, items: Sequence[Any]) -> None:
        """Put items at the end of a branch, all or none."""
        for item in items:
            if type(item) is not dict:
                raise InvalidInputError(f"an item is a dict, not {type(item).__name__}")
        payloads = [storable(item) for item in items]

        def change(view: View) -> Commit:
            branch = self.where(at, view)
            now_ms = self._store.engine.now_ms()
            drafts: list[NodeDraft] = []
            parent, turn = branch.leaf, branch.turns
            for number, (item, payload) in enumerate(zip(items, payloads, strict=True)):
                turn += is_user(item)
                # Revisions are never given twice, so the ids are new.
                own = f"i{view.revision + 1}.{number}"
                drafts.append(NodeDraft(own, payload, parent, frame=str(turn), time=now_ms))
                parent = own
            grown = branch._replace(
                leaf=parent,
                created_at_ms=branch.created_at_ms or now_ms,
                items=branch.items + len(items),
                turns=turn,
            )
            return step(view, view.branches.put(grown), append=drafts)

        self._change(change)

    def pop(self, at: At) -> Any:
        """Take the last item of a branch off; None if it is empty."""
        popped: list[Any] = []

        def change(view: View) -> Commit | None:
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
            # If the turn began with this item, nothing is left of it.
            own = usage.get(branch.name, {})
            left = {anchor: row for anchor, row in own.items() if anchor != node.id}
            changed = None if left == own else {**usage, branch.name: left}
            return step(view, view.branches.put(shorter), leaf=node.parent, usage=changed)

        self._change(change)
        return popped[0] if popped else None

    def clear(self) -> Branches:
        """Take everything away, also what it was before."""

        def change(view: View) -> Commit | None:
            if not view.revision:
                return None
            cleared = view.branches.cleared(self._store.engine.now_ms())
            nothing = view._replace(checkpoint=Checkpoint())
            return step(nothing, cleared, replace=[], leaf=None)

        self._change(change)
        self._forget_history()
        return self.view().branches

    def prune(self) -> int:
        """Remove for good what no branch leads to, and earlier revisions; how many items went."""
        removed = 0

        def change(view: View) -> Commit | None:
            nonlocal removed
            # By id, the parent: a path goes on over nodes that are hidden, and a graph cannot.
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
        """Earlier revisions go, except what is protected, pinned or held by a lease."""
        if self._session.head() is None:
            return
        plan = retention.plan(
            self._store,
            sessions=[self._session.id],
            policy=Policy(last=1, labelled=False),
            # The caller asked for these items to go: a policy for pruning does not keep them.
            override_policies=True,
        )
        retention.execute(self._store, plan)

    # --- branches ---------------------------------------------------------------------------

    def branch(self, at: At, turn: int | None, name: Callable[[Branches], str]) -> At:
        """Begin a branch before a turn of this one, or (None) at its end."""
        made = at

        def change(view: View) -> Commit:
            nonlocal made
            source = self.where(at, view)
            now_ms = self._store.engine.now_ms()
            new = Branch(name(view.branches), source.leaf, now_ms, source.items, source.turns)
            if turn is not None:
                nodes = self.path(source, payloads=False)
                start = self._turn_start(source, nodes, turn)
                leaf = nodes[start - 1].id if start else None
                new = new._replace(leaf=leaf, items=start, turns=turn - 1)
            made = At(new.name, view.branches.clears)
            return step(view, view.branches.put(new), leaf=new.leaf)

        self._change(change)
        return made

    def delete_branch(self, name: str) -> None:
        """Take a branch away; what other branches share stays."""

        def change(view: View) -> Commit:
            branch = view.branches.get(name)
            usage = self.usage(view)
            left = {key: rows for key, rows in usage.items() if key != branch.name}
            # What a picker shows of the session is not a branch that is gone.
            leaf = view.branches.get(MAIN).leaf if view.leaf == branch.leaf else view.leaf
            return step(view, view.branches.drop(name), leaf=leaf, usage=left if usage else None)

        self._change(change)

    def _turn_start(self, branch: Branch, nodes: Nodes, turn: int) -> int:
        """The place of the message that a turn begins with."""
        if type(turn) is not int or not 1 <= turn <= branch.turns:
            raise InvalidInputError(
                f"branch {branch.name!r} has turns 1 to {branch.turns}, not {turn!r}"
            )
        if nodes[0].frame is not None:
            return bisect_left(range(len(nodes)), turn, key=lambda at: _turn_of(nodes[at]))
        # Imported, without numbers.
        for at, node in enumerate(self.path(branch)):
            turn -= is_user(restored(node.payload))
            if not turn:
                return at
        raise CorruptionError(f"branch {branch.name!r} has fewer turns than it says")

    # --- usage ------------------------------------------------------------------------------

    def usage(self, view: View) -> dict[str, dict[str, list[Any]]]:
        """By branch and by the node that a turn begins with."""
        link = view.checkpoint.execution_state
        if not isinstance(link, Link):
            return {}
        found: dict[str, dict[str, list[Any]]] = self._store.get_value(link.digest)
        return found

    def put_usage(self, at: At, used: TurnUsage, model: str) -> bool:
        """Note what the latest turn of a branch has used, in place of what was noted before.

        False, and nothing happens, if the conversation was cleared since, or has no turn.
        """
        stored = False

        def change(view: View) -> Commit | None:
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

    def _change(self, make: Callable[[View], Commit | None]) -> None:
        """Commit what ``make`` makes of the conversation as it is; None: nothing to do."""
        for _ in range(_MAX_ATTEMPTS):
            view = self.view()
            try:
                commit = make(view)
                if commit is not None:
                    self._session.commit(commit)
            except HeadConflictError:
                continue
            except NodeNotFoundError:
                if self.view().revision == view.revision:
                    raise
                continue
            return
        raise BusyError(f"session {self._session.id!r} kept moving; try again when it is quieter")


def step(
    view: View,
    branches: Branches,
    *,
    usage: dict[str, Any] | None = None,
    ledger: Usage | None = None,
    **parts: Any,
) -> Commit:
    """A commit on top of what was seen. ``usage`` None keeps what is noted."""
    checkpoint = view.checkpoint._replace(turn_state=table.pack(branches))
    if usage is not None:
        checkpoint = checkpoint._replace(execution_state=usage)
    return Commit(
        checkpoint=checkpoint,
        expected=view.revision,
        lease=UNFENCED,
        usage=[] if ledger is None else [ledger],
        **parts,
    )


def _turn_of(node: Node) -> int:
    if node.frame is None or not node.frame.isdecimal():
        raise CorruptionError(f"node {node.id!r} does not say which turn it belongs to")
    return int(node.frame)


def spent(used: TurnUsage, before: TurnUsage | None, model: str) -> Usage:
    """What the ledger of the session does not count yet."""

    def counts(one: TurnUsage | None) -> tuple[int, int, int, int]:
        if one is None:
            return (0, 0, 0, 0)
        cached = int((one.input_details or {}).get("cached_tokens") or 0)
        reasoning = int((one.output_details or {}).get("reasoning_tokens") or 0)
        # The SDK counts reasoning as output, too.
        return (one.input_tokens, max(one.output_tokens - reasoning, 0), cached, reasoning)

    more = [max(now - then, 0) for now, then in zip(counts(used), counts(before), strict=True)]
    return Usage(_SOURCE, model, *more)
