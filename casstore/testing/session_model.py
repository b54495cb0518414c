"""Compares sessions with a model that is too simple to be wrong.

Random steps (append anywhere, move the leaf, replace the graph, rewind, fork, hide, delete) run on
a store and on dictionaries. After each step, every session must show what the dictionaries hold.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from casstore.session.data import Commit, NodeDraft
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import SessionFixtures, ids

STEPS = 40
MAX_SESSIONS = 8


class _Graph(NamedTuple):
    """A revision: every node's parent and payload in order of insertion, and the leaf."""

    parents: dict[str, str | None]
    payloads: dict[str, Any]
    leaf: str | None

    def path(self, leaf: str | None) -> list[str]:
        found: list[str] = []
        while leaf is not None:
            found.append(leaf)
            leaf = self.parents[leaf]
        return found[::-1]


class _Model:
    """The expected content of a session."""

    def __init__(self, revisions: dict[int, _Graph], hidden: set[str]) -> None:
        self.revisions = revisions
        self.hidden = hidden

    @property
    def head(self) -> int:
        return max(self.revisions)

    @property
    def graph(self) -> _Graph:
        return self.revisions[self.head]

    def visible(self, graph: _Graph) -> list[str]:
        return [node for node in graph.parents if node not in self.hidden]

    def leaf(self, graph: _Graph) -> str | None:
        """The leaf, or the latest visible message if the leaf is hidden."""
        if graph.leaf not in self.hidden:
            return graph.leaf
        messages = [node for node in self.visible(graph) if "role" in graph.payloads[node]]
        return messages[-1] if messages else None

    def path(self, graph: _Graph) -> list[str]:
        return [node for node in graph.path(self.leaf(graph)) if node not in self.hidden]


class ModelRun:
    """A store and its model, changed by the same steps."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.models = {"s0": _Model({}, set())}
        self.names = 0
        self.commit(self.session("s0"), self.models["s0"])

    def session(self, name: str) -> Session:
        return self.store.session(name)

    def new_name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def step(self) -> str:
        """Run one step on one session; returns its description."""
        name = self.random.choice(sorted(self.models))
        session, model = self.session(name), self.models[name]
        kinds = [self.commit, self.commit, self.commit, self.replace_graph, self.rewind, self.hide]
        kinds += [self.move_leaf, self.fork, self.fork, self.fork_node, self.delete]
        kind = self.random.choice(kinds)
        kind(session, model)
        return f"{kind.__name__} on {name}"

    # --- steps ------------------------------------------------------------------------------

    def drafts(self, parents: list[str | None]) -> list[NodeDraft]:
        """New nodes, each with an existing or a new parent."""
        made: list[NodeDraft] = []
        for _ in range(self.random.choice([1, 1, 2, 3, 70])):
            node = self.new_name("n")
            payload = {"role": "user", "text": node} if self.random.random() < 0.7 else {"n": node}
            # Usually a chain, as in practice.
            parent = parents[-1] if self.random.random() < 0.8 else self.random.choice(parents)
            made.append(NodeDraft(node, payload, parent))
            parents = [*parents, node]
        return made

    def commit(self, session: Session, model: _Model) -> None:
        old = model.graph if model.revisions else _Graph({}, {}, None)
        leaf = model.leaf(old)
        made = self.drafts([None, *model.visible(old), leaf])
        result = session.commit(Commit(append=made))
        model.revisions[result.revision] = _Graph(
            {**old.parents, **{node.id: _parent(node) for node in made}},
            {**old.payloads, **{node.id: node.payload for node in made}},
            made[-1].id,
        )

    def replace_graph(self, session: Session, model: _Model) -> None:
        made = self.drafts([None])
        result = session.commit(Commit(replace=made))
        model.revisions[result.revision] = _Graph(
            {node.id: _parent(node) for node in made},
            {node.id: node.payload for node in made},
            made[-1].id,
        )

    def move_leaf(self, session: Session, model: _Model) -> None:
        leaf = self.random.choice([None, *model.visible(model.graph)])
        result = session.commit(Commit(leaf=leaf))
        model.revisions[result.revision] = model.revisions[result.revision - 1]._replace(leaf=leaf)

    def rewind(self, session: Session, model: _Model) -> None:
        to = self.random.choice(sorted(model.revisions))
        result = session.rewind(to)
        model.revisions[result.revision] = model.revisions[to]

    def hide(self, session: Session, model: _Model) -> None:
        nodes = model.visible(model.graph)
        chosen = self.random.sample(nodes, min(len(nodes), self.random.choice([1, 2, 5])))
        assert set(session.tombstone(chosen).hidden) == set(chosen)
        model.hidden |= set(chosen)

    def fork(self, session: Session, model: _Model) -> None:
        if len(self.models) == MAX_SESSIONS:
            return
        at = self.random.choice(sorted(model.revisions))
        target = self.new_name("s")
        self.store.fork(session.id, target, at=at)
        self.models[target] = _Model({at: model.revisions[at]}, set(model.hidden))

    def fork_node(self, session: Session, model: _Model) -> None:
        nodes = model.visible(model.graph)
        if not nodes or len(self.models) == MAX_SESSIONS:
            return
        node = self.random.choice(nodes)
        target = self.new_name("s")
        self.store.fork(session.id, target, node=node)
        kept = model.graph.path(node)
        graph = _Graph(
            {one: model.graph.parents[one] for one in kept},
            {one: model.graph.payloads[one] for one in kept},
            node,
        )
        self.models[target] = _Model({model.head: graph}, set(model.hidden))

    def delete(self, session: Session, model: _Model) -> None:
        if len(self.models) > MAX_SESSIONS // 2:
            assert self.store.delete_session(session.id)
            del self.models[session.id]

    # --- looking ----------------------------------------------------------------------------

    def check(self, store: Store, done: str) -> None:
        """Every session shows what its model holds, now and at one earlier revision."""
        assert [info.meta.session for info in store.sessions()] == sorted(self.models), done
        for name, model in self.models.items():
            session = store.session(name)
            about = f"{done}, looking at {name}"
            numbers = sorted(model.revisions)
            assert [entry.revision for entry in session.history()] == numbers[::-1], about
            self.check_revision(session, model, None, about)
            at = self.random.choice(numbers)
            self.check_revision(session, model, at, f"{about} at {at}")

    def check_revision(self, session: Session, model: _Model, at: int | None, about: str) -> None:
        graph = model.graph if at is None else model.revisions[at]
        visible, path = model.visible(graph), model.path(graph)
        every, active = session.nodes("full", at=at), session.nodes(at=at)
        assert (len(every), len(active)) == (len(visible), len(path)), about
        nodes = list(every)
        assert ids(nodes) == visible, about
        assert ids(active) == path, about
        assert [node.payload for node in nodes] == [graph.payloads[n] for n in visible], about
        state = session.load(at)
        assert state is not None, about
        assert state.leaf == model.leaf(graph), about
        assert state.healed == (graph.leaf in model.hidden), about
        if visible:
            chosen = self.random.choice(visible)
            trail = [node for node in graph.path(chosen) if node not in model.hidden]
            assert ids(session.nodes(leaf=chosen, at=at)) == trail, about
            found = session.node(chosen, at=at)
            assert found is not None, about
            assert found == nodes[visible.index(chosen)], about
        for gone in sorted(model.hidden)[:3]:
            assert session.node(gone, at=at) is None, about


def _parent(node: NodeDraft) -> str | None:
    assert node.parent is None or isinstance(node.parent, str)
    return node.parent


class ModelConformance(SessionFixtures):
    """After any sequence of steps, sessions show the expected content."""

    @pytest.mark.parametrize("seed", range(5))
    def test_sessions_agree_with_the_model(self, store: Store, seed: int) -> None:
        run = ModelRun(store, seed)
        for number in range(STEPS):
            done = f"seed {seed}, step {number}: {run.step()}"
            run.check(store, done)
            if number % 20 == 0:
                # A new handle must see the same.
                run.check(Store(store.engine), done)
