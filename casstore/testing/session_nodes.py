"""The part of the session suite about reading nodes a few at a time."""

from __future__ import annotations

from typing import Literal

import pytest

from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    SessionFixtures,
    counted,
    full,
    grow_branches,
    grow_long,
    ids,
    load,
    message,
    path,
    step,
)

SCOPES: tuple[Literal["path", "full"], ...] = ("path", "full")

SLICES = [
    slice(None),
    slice(0, 3),
    slice(3, None),
    slice(-3, None),
    slice(None, -3),
    slice(2, 250, 7),
    slice(None, None, -1),
    slice(200, 100, -3),
    slice(-1, -300, -50),
    slice(5, 5),
    slice(290, 1000),
    slice(1000, 2000),
]


class NodesConformance(SessionFixtures):
    """``nodes`` is a lazy sequence: it reads the nodes that are accessed."""

    def test_nodes_support_len_index_and_reversed(self, session: Session) -> None:
        grow_branches(session)
        nodes = session.nodes()
        assert len(nodes) == 3
        assert [nodes[0].id, nodes[1].id, nodes[-1].id, nodes[-3].id] == ["a", "c", "d", "a"]
        assert ids(reversed(nodes)) == ["d", "c", "a"]
        for index in (3, -4):
            with pytest.raises(IndexError):
                nodes[index]

    def test_nodes_may_be_read_more_than_once(self, session: Session) -> None:
        grow_branches(session)
        for nodes in (session.nodes(), session.nodes("full"), load(session).nodes):
            assert list(nodes) == list(nodes)
            assert len(list(nodes)) == len(nodes)

    @pytest.mark.parametrize("part", SLICES, ids=str)
    def test_nodes_are_sliced_like_any_sequence(self, session: Session, part: slice) -> None:
        for n in range(0, 300, 100):
            step(session, *(message(f"n{i}") for i in range(n, n + 100)))
        every = [f"n{n}" for n in range(300)]
        assert path(session) == full(session) == every
        assert ids(session.nodes()[part]) == every[part]
        assert ids(session.nodes("full")[part]) == every[part]

    def test_nodes_of_an_empty_graph_are_none(self, session: Session) -> None:
        step(session)
        assert len(session.nodes()) == len(session.nodes("full")) == 0
        assert list(session.nodes()) == list(session.nodes()[1:]) == []

    def test_nodes_that_were_read_are_unchanged_by_later_commits(self, session: Session) -> None:
        step(session, "a", "b")
        nodes, state = session.nodes(), load(session)
        step(session, "c")
        step(session, replace=[message("x")])
        assert ids(nodes) == ids(state.nodes) == ["a", "b"]

    def test_nodes_without_payloads_have_everything_else(self, session: Session) -> None:
        grow_branches(session)
        for scope in SCOPES:
            bare = list(session.nodes(scope, payloads=False))
            assert bare == [node._replace(payload=None) for node in session.nodes(scope)]
        assert ids(session.nodes(leaf="b", payloads=False)) == ["a", "b"]

    def test_nodes_are_counted_without_being_read(self, store: Store, session: Session) -> None:
        total = grow_long(session)
        reader, counter = counted(session, store)
        for count in (len(reader.nodes()), len(reader.nodes("full")), len(load(reader).nodes)):
            assert count == 600
        assert counter.bytes_read < total / 10

    @pytest.mark.parametrize("scope", SCOPES)
    def test_the_last_nodes_are_read_without_the_others(
        self, store: Store, session: Session, scope: Literal["path", "full"]
    ) -> None:
        total = grow_long(session)
        reader, counter = counted(session, store)
        assert ids(reader.nodes(scope)[-3:]) == ["n597", "n598", "n599"]
        assert counter.bytes_read < total / 10

    def test_nodes_are_read_in_pages(self, store: Store, session: Session) -> None:
        total = grow_long(session)
        reader, counter = counted(session, store)
        nodes = iter(reader.nodes())
        assert next(nodes).id == "n0"
        assert counter.bytes_read < total / 2
        assert ids(nodes) == [f"n{n}" for n in range(1, 600)]
        assert counter.bytes_read > total / 2

    def test_long_contents_are_not_read_without_payloads(
        self, store: Store, session: Session
    ) -> None:
        total = grow_long(session)
        reader, counter = counted(session, store)
        assert ids(reader.nodes(payloads=False)) == [f"n{n}" for n in range(600)]
        assert counter.bytes_read < total / 5
