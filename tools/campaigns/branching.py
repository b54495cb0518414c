"""Compares random trees of sessions with plain dicts: forks, rewinds, adoptions, deletions, gc.

``Branches`` runs random steps on a store and on a model of plain dicts, and compares the two. A
node of the model has an identity that depends on its content, as a digest does: id, payload, number
and parent. ``run`` is the campaign; the test suite runs a few steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import casstore
from campaigns.tally import Progress, Report, Tally, silent
from casstore.errors import DuplicateNodeError
from casstore.maintenance import gc, vacuum
from casstore.maintenance.check import check
from casstore.session.data import Commit, NodeDraft

_STEPS = 150
_CHAINS = (3, 20, 100, 500)


class Item(NamedTuple):
    """A node of the model."""

    id: str
    said: int
    seq: int
    #: The identity of its parent, which includes that of the parent's parent.
    parent: int | None

    @property
    def identity(self) -> int:
        """The counterpart of a digest."""
        return hash(self)


class Graph(NamedTuple):
    """The nodes of one revision in order, and its leaf."""

    items: tuple[Item, ...] = ()
    leaf: int | None = None

    def find(self, identity: int | None) -> Item | None:
        """The node of this identity."""
        return next((one for one in self.items if one.identity == identity), None)

    def path(self, leaf: int | None) -> list[Item]:
        """The nodes from the root to a node."""
        known = {one.identity: one for one in self.items}
        found: list[Item] = []
        while leaf is not None:
            found.append(known[leaf])
            leaf = known[leaf].parent
        return found[::-1]

    def seen_leaf(self, hidden: set[int]) -> int | None:
        """The leaf, or if it is hidden the latest visible node."""
        if self.leaf is None or self.leaf not in hidden:
            return self.leaf
        visible = [one.identity for one in self.items if one.identity not in hidden]
        return visible[-1] if visible else None

    def grown(self, parent: int | None, names: list[tuple[str, int]]) -> Graph:
        """The graph with a chain of new nodes after ``parent``."""
        items = list(self.items)
        for name, said in names:
            seq = items[-1].seq + 1 if items else 0
            items.append(Item(name, said, seq, parent))
            parent = items[-1].identity
        return Graph(tuple(items), parent)

    def without(self, hidden: set[int]) -> Graph:
        """The graph after a vacuum."""
        items: list[Item] = []
        became: dict[int, int | None] = {}
        for one in self.items:
            above = None if one.parent is None else became[one.parent]
            if one.identity in hidden:
                became[one.identity] = above
                continue
            seq = one.seq if len(items) == len(became) else (items[-1].seq + 1 if items else 0)
            items.append(Item(one.id, one.said, seq, above))
            became[one.identity] = items[-1].identity
        leaf = self.seen_leaf(hidden)
        return Graph(tuple(items), None if leaf is None else became[leaf])


class Model:
    """A session of the model."""

    def __init__(self, revision: int, graph: Graph, hidden: set[int]) -> None:
        self.revisions = {revision: graph}
        self.hidden = hidden

    @property
    def revision(self) -> int:
        """The revision of its head."""
        return max(self.revisions)

    @property
    def graph(self) -> Graph:
        """The graph of its head."""
        return self.revisions[self.revision]

    def move(self, graph: Graph) -> None:
        """Make a graph the next revision."""
        self.revisions[self.revision + 1] = graph


class Branches:
    """A store and its model, changed by the same steps."""

    def __init__(self, place: Path, seed: int, *, chains: tuple[int, ...] = (3, 20, 100)) -> None:
        """``chains``: the numbers of forks that a chain may have."""
        self._place = place
        self._chains = chains
        self.random = random.Random(seed)
        self.store = casstore.open(place, "relaxed")
        self.models: dict[str, Model] = {}
        self._made = 0
        self.depth = 0
        self.done: list[str] = []

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> str:
        """Run one random step; returns its description."""
        ways: list[tuple[Callable[[], str], int]] = [
            (self._commit, 6), (self._fork, 5), (self._chain, 1), (self._rewind, 2),
            (self._adopt, 3), (self._hide, 2), (self._vacuum, 2), (self._delete, 2),
            (self._collect, 2), (self._reopen, 1),
        ]  # fmt: skip
        way = self.random.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
        if not self.models or (len(self.models) > 40 and way in (self._fork, self._chain)):
            way = self._begin if not self.models else self._delete
        said = way()
        self.done.append(said)
        return said

    def _any(self) -> tuple[str, Model]:
        name = self.random.choice(sorted(self.models))
        return name, self.models[name]

    def _names(self, count: int) -> list[tuple[str, int]]:
        self._made += count
        return [(f"n{at}", at) for at in range(self._made - count, self._made)]

    def _drafts(self, names: list[tuple[str, int]]) -> list[NodeDraft]:
        return [NodeDraft(name, {"role": "user", "text": str(said)}) for name, said in names]

    def _begin(self) -> str:
        self._made += 1
        name = f"s{self._made}"
        names = self._names(self.random.choice((1, 5, 40, 150)))
        self.store.session(name).commit(Commit(append=self._drafts(names)))
        self.models[name] = Model(1, Graph().grown(None, names), set())
        return f"begin {name}"

    def _commit(self) -> str:
        name, model = self._any()
        graph, session = model.graph, self.store.session(name)
        if graph.items and self.random.random() < 0.15:
            taken = self.random.choice(graph.items).id
            try:
                session.commit(Commit(append=[NodeDraft(taken, "again")]))
            except DuplicateNodeError:
                return f"refuse {taken} in {name}"
            raise AssertionError(f"{taken} was appended to {name} twice")
        names = self._names(self.random.choice((1, 1, 2, 15, 16, 17, 60)))
        drafts = self._drafts(names)
        parent = graph.seen_leaf(model.hidden)
        visible = [one for one in graph.items if one.identity not in model.hidden]
        if visible and self.random.random() < 0.3:
            chosen = self.random.choice(visible)
            parent = chosen.identity
            drafts[0] = drafts[0]._replace(parent=chosen.id)
        session.commit(Commit(append=drafts))
        model.move(graph.grown(parent, names))
        return f"commit {len(names)} to {name}"

    def _fork(self) -> str:
        source, model = self._any()
        self._made += 1
        target = f"s{self._made}"
        at = self.random.choice([None, *sorted(model.revisions)])
        graph = model.graph if at is None else model.revisions[at]
        node: str | None = None
        visible = [one for one in graph.items if one.identity not in model.hidden]
        if visible and self.random.random() < 0.4:
            chosen = self.random.choice(visible)
            node, graph = chosen.id, Graph(tuple(graph.path(chosen.identity)), chosen.identity)
        revision = model.revision if at is None else at
        names = self._names(self.random.choice((0, 0, 1, 3)))
        self.store.fork(source, target, at=at, node=node, append=self._drafts(names))
        if names:
            graph = graph.grown(graph.seen_leaf(model.hidden), names)
            revision += 1
        self.models[target] = Model(revision, graph, set(model.hidden))
        return f"fork {source} at {at}, {node} with {len(names)} to {target}"

    def _chain(self) -> str:
        """Fork a session repeatedly, with a commit on each fork; most of them are deleted."""
        name, model = self._any()
        length = self.random.choice(self._chains)
        first = name
        for _ in range(length):
            self._made += 1
            target = f"s{self._made}"
            names = self._names(1)
            self.store.fork(name, target, append=self._drafts(names))
            graph = model.graph
            grown = graph.grown(graph.seen_leaf(model.hidden), names)
            below = model
            model = self.models[target] = Model(below.revision + 1, grown, set(below.hidden))
            if name != first and self.random.random() < 0.9:
                self.store.delete_session(name)
                del self.models[name]
            name = target
        self.depth += length
        return f"chain of {length} from {first} to {name}"

    def _rewind(self) -> str:
        name, model = self._any()
        to = self.random.choice(sorted(model.revisions))
        self.store.session(name).rewind(to)
        model.move(model.revisions[to])
        return f"rewind {name} to {to}"

    def _adopt(self) -> str:
        name, model = self._any()
        other, theirs = self._any()
        if name == other:
            return "nothing"
        self.store.session(name).adopt(other)
        model.hidden |= theirs.hidden
        model.move(theirs.graph)
        return f"adopt {other} by {name}"

    def _hide(self) -> str:
        name, model = self._any()
        if not model.graph.items:
            return "nothing"
        chosen = self.random.sample(model.graph.items, min(2, len(model.graph.items)))
        self.store.session(name).tombstone([one.id for one in chosen])
        model.hidden |= {one.identity for one in chosen}
        return f"hide {[one.id for one in chosen]} in {name}"

    def _vacuum(self) -> str:
        name, model = self._any()
        outcome = vacuum.rewrite_hidden(self.store, name).outcome
        if model.hidden:
            assert outcome is vacuum.VacuumOutcome.DONE, outcome
        model.revisions = {
            revision: graph.without(model.hidden) for revision, graph in model.revisions.items()
        }
        model.hidden = set()
        return f"vacuum {name}"

    def _delete(self) -> str:
        name, _ = self._any()
        self.store.delete_session(name)
        del self.models[name]
        return f"delete {name}"

    def _collect(self) -> str:
        gc.collect(self.store, grace_ms=0)
        return "collect"

    def _reopen(self) -> str:
        self.store.close()
        self.store = casstore.open(self._place, "relaxed")
        return "reopen"

    # --- comparing ----------------------------------------------------------------------------

    def compare(self, sessions: int = 2) -> None:
        """Compare some sessions with their models, at their heads and at one other revision."""
        for name in self.random.sample(sorted(self.models), min(sessions, len(self.models))):
            model = self.models[name]
            for at in (None, self.random.choice(sorted(model.revisions))):
                self._compare(name, model, at)

    def compare_all(self) -> None:
        """Compare everything with the model, and check the store."""
        for name, model in self.models.items():
            for at in model.revisions:
                self._compare(name, model, at)
        report = check(self.store, level="full")
        assert report.sound, report.findings

    def _compare(self, name: str, model: Model, at: int | None) -> None:
        graph = model.graph if at is None else model.revisions[at]
        session = self.store.session(name)
        where = f"{name} at {at} after {self.done[-8:]}"
        visible = [one for one in graph.items if one.identity not in model.hidden]
        found = list(session.nodes("full", at=at))
        assert [(node.id, node.seq) for node in found] == [(one.id, one.seq) for one in visible], (
            where
        )
        leaf = graph.seen_leaf(model.hidden)
        path = [one.id for one in graph.path(leaf) if one.identity not in model.hidden]
        assert [node.id for node in session.nodes(at=at)] == path, where
        for one in self.random.sample(visible, min(5, len(visible))):
            node = session.node(one.id, at=at)
            assert node is not None, where
            assert node.payload == {"role": "user", "text": str(one.said)}, where
        for one in graph.items:
            if one.identity in model.hidden:
                assert session.node(one.id, at=at) is None, where
        assert session.node("absent", at=at) is None, where


def run(scratch: Path, *, count: int, seed: int, progress: Progress = silent) -> Report:
    """Run random steps on ``count`` stores."""
    tally = Tally("branching", total=count, progress=progress)
    for number in range(count):
        branches = Branches(scratch / f"store-{number}", seed + number, chains=_CHAINS)
        try:
            for at in range(_STEPS):
                branches.step()
                if not at % 5:
                    branches.compare()
            branches.compare_all()
        except Exception as exc:
            tally.broke(f"seed {seed + number}, {branches.done[-1:]}", repr(exc)[:1000])
        finally:
            branches.close()
        tally.count("steps", len(branches.done))
        tally.count("forks in chains", branches.depth)
        tally.tried()
    return tally.report()
