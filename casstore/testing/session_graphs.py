"""The part of the session suite about the graph: append only, branches, and reading it."""

from __future__ import annotations

import pytest

from casstore.errors import (
    CycleError,
    DuplicateNodeError,
    InvalidInputError,
    NodeNotFoundError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.session.data import Commit, CommitResult, NodeDraft
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    SessionFixtures,
    full,
    grow_branches,
    ids,
    load,
    message,
    nothing_written,
    path,
    step,
)

LONG_ID = "n" * 4999


def _replace(session: Session, *nodes: str | NodeDraft) -> CommitResult:
    drafts = [message(node) if isinstance(node, str) else node for node in nodes]
    return session.commit(Commit(replace=drafts))


class GraphConformance(SessionFixtures):
    """Nodes are created once, have parents, and are read by path or all together."""

    # --- append -----------------------------------------------------------------------

    def test_graph_append_keeps_every_field_of_a_node(self, session: Session) -> None:
        payload = {"role": "tool", "content": [1, 2.5, None, True, b"\x00\xff", {"é": "☃"}]}
        cause = {"tool_call": "call-1"}
        step(session, "root")
        step(session, NodeDraft("n", payload, "root", cause, "frame-1", "2026-01-01T00:00:00Z"))
        node = session.node("n")
        assert node is not None
        assert (node.id, node.payload, node.parent) == ("n", payload, "root")
        assert (node.cause, node.frame, node.time) == (cause, "frame-1", "2026-01-01T00:00:00Z")
        assert (node.seq, node.depth) == (session.nodes()[0].seq + 1, 2)
        assert session.nodes()[1] == node

    @pytest.mark.parametrize("time", [None, 0, 1_700_000_000_000, 17.25, "2026-01-01T00:00:00Z"])
    def test_graph_append_keeps_the_time_as_it_was_given(
        self, session: Session, time: str | float | None
    ) -> None:
        step(session, message("a", time=time))
        [node] = session.nodes()
        assert (node.time, type(node.time)) == (time, type(time))

    def test_graph_append_uses_the_previous_node_or_the_leaf_as_default_parent(
        self, session: Session
    ) -> None:
        step(session, "a", "b")
        step(session, "c", "d")
        assert [node.parent for node in session.nodes()] == [None, "a", "b", "c"]
        assert [node.depth for node in session.nodes()] == [1, 2, 3, 4]

    @pytest.mark.parametrize("taken", ["a", "b", "off the path"])
    def test_graph_append_refuses_an_id_that_is_taken(
        self, store: Store, session: Session, taken: str
    ) -> None:
        step(session, "a", message("off the path", parent=None), message("b", parent="a"))
        with nothing_written(store), pytest.raises(DuplicateNodeError) as caught:
            step(session, "new", message(taken, "another text"))
        assert caught.value.node == taken

    def test_graph_append_refuses_even_an_equal_node_a_second_time(self, session: Session) -> None:
        step(session, "a")
        with pytest.raises(DuplicateNodeError):
            step(session, message("a", parent=None))

    def test_graph_append_refuses_an_id_twice_in_one_commit(
        self, store: Store, session: Session
    ) -> None:
        with nothing_written(store), pytest.raises(DuplicateNodeError) as caught:
            step(session, "a", "b", "a")
        assert caught.value.node == "a"

    def test_graph_append_refuses_an_unknown_parent(self, store: Store, session: Session) -> None:
        step(session, "a")
        with nothing_written(store), pytest.raises(UnknownParentError) as caught:
            step(session, "b", message("c", parent="nobody"))
        assert caught.value.node == "c"

    def test_graph_append_may_name_parents_that_come_later_in_the_commit(
        self, session: Session
    ) -> None:
        step(session, message("c", parent="b"), message("b", parent="a"), message("a", parent=None))
        assert sorted(full(session)) == ["a", "b", "c"]
        assert path(session) == ["a"]
        assert ids(session.nodes(leaf="c")) == ["a", "b", "c"]

    @pytest.mark.parametrize(
        "parents", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "b", "b": "c", "c": "d", "d": "b"}]
    )
    def test_graph_append_refuses_circles(
        self, store: Store, session: Session, parents: dict[str, str]
    ) -> None:
        step(session, "root")
        nodes = [message(node, parent=parent) for node, parent in parents.items()]
        with nothing_written(store), pytest.raises(CycleError) as caught:
            step(session, "good", *nodes)
        assert caught.value.node in parents

    def test_graph_append_takes_several_roots(self, session: Session) -> None:
        step(session, "a", message("b", parent=None))
        step(session, message("c", parent=None), "d")
        assert full(session) == ["a", "b", "c", "d"]
        assert path(session) == ["c", "d"]
        assert ids(session.nodes(leaf="a")) == ["a"]

    def test_graph_append_accepts_nodes_read_from_another_session(
        self, session: Session, other: Session
    ) -> None:
        grow_branches(session)
        step(other, *session.nodes("full"))
        assert list(other.nodes("full")) == list(session.nodes("full"))

    @pytest.mark.parametrize("node_id", [LONG_ID, "会话/é", "../weird", " ", "a\nb"])
    def test_graph_append_takes_odd_ids(self, session: Session, node_id: str) -> None:
        step(session, node_id, message(node_id + "2", parent=node_id))
        assert path(session) == [node_id, node_id + "2"]
        node = session.node(node_id)
        assert node is not None
        assert node.id == node_id
        with pytest.raises(DuplicateNodeError):
            step(session, node_id)

    @pytest.mark.parametrize("node_id", ["", "a\x00b", "\ud800"])
    def test_graph_append_refuses_invalid_ids(
        self, store: Store, session: Session, node_id: str
    ) -> None:
        with nothing_written(store), pytest.raises(InvalidInputError):
            step(session, node_id)

    def test_a_digest_names_a_node_and_the_path_to_it(
        self, session: Session, other: Session
    ) -> None:
        step(session, "a", "b")
        step(other, "a", "b")
        step(other, message("elsewhere", parent=None), "c")
        step(session, "c")
        of_session = {node.id: node.digest for node in session.nodes("full")}
        of_other = {node.id: node.digest for node in other.nodes("full")}
        assert [of_session[node] == of_other[node] for node in "abc"] == [True, True, False]
        assert len({*of_session.values(), *of_other.values()}) == 5

    # --- replace ----------------------------------------------------------------------

    def test_replace_full_leaves_nothing_of_the_graph_before(self, session: Session) -> None:
        grow_branches(session)
        result = _replace(session, "x", "y")
        assert (result.revision, result.nodes, result.leaf) == (2, ("x", "y"), "y")
        assert full(session) == path(session) == ["x", "y"]
        assert session.node("a") is None
        assert [node.parent for node in session.nodes()] == [None, "x"]
        with pytest.raises(UnknownParentError):
            step(session, message("z", parent="a"))

    def test_replace_full_makes_the_old_ids_available_again(self, session: Session) -> None:
        grow_branches(session)
        _replace(session, message("d", "other"), message("a", "other"))
        assert path(session) == ["d", "a"]
        step(session, "b")
        assert path(session) == ["d", "a", "b"]

    def test_replace_full_takes_hidden_nodes_away_too(self, session: Session) -> None:
        step(session, "a", "b")
        session.tombstone(["b"])
        _replace(session, "a", message("b", "another b"))
        assert path(session) == ["a", "b"]

    def test_replace_full_with_the_loaded_path_removes_the_other_branches(
        self, session: Session
    ) -> None:
        grow_branches(session)
        kept = list(session.nodes())
        session.commit(Commit(replace=kept))
        assert full(session) == path(session) == ["a", "c", "d"]
        assert [node.payload for node in session.nodes()] == [node.payload for node in kept]

    def test_replace_full_with_nothing_empties_the_graph(self, session: Session) -> None:
        grow_branches(session)
        assert _replace(session).leaf is None
        assert full(session) == path(session) == []
        step(session, "a")
        assert path(session) == ["a"]

    def test_replace_full_obeys_the_rules_of_append(self, store: Store, session: Session) -> None:
        step(session, "a")
        with nothing_written(store):
            with pytest.raises(DuplicateNodeError):
                _replace(session, "x", "x")
            with pytest.raises(UnknownParentError):
                _replace(session, message("x", parent="a"))
            with pytest.raises(CycleError):
                _replace(session, message("x", parent="x"))

    def test_replace_full_keeps_the_graph_before_in_the_history(self, session: Session) -> None:
        grow_branches(session)
        _replace(session, "x")
        assert full(session, at=1) == ["a", "b", "c", "d"]
        assert path(session, at=1) == ["a", "c", "d"]

    # --- leaves -----------------------------------------------------------------------

    def test_a_commit_may_move_the_leaf_and_branch_from_there(self, session: Session) -> None:
        step(session, "a", "b", "c")
        result = step(session, leaf="a")
        assert (result.revision, result.leaf, result.nodes) == (2, "a", ())
        assert path(session) == ["a"]
        assert full(session) == ["a", "b", "c"]
        step(session, "d")
        assert path(session) == ["a", "d"]
        step(session, leaf="c")
        assert path(session) == ["a", "b", "c"]

    def test_a_commit_may_append_and_leave_the_leaf_elsewhere(self, session: Session) -> None:
        step(session, "a")
        assert step(session, "b", "c", leaf="b").leaf == "b"
        assert path(session) == ["a", "b"]
        assert step(session, "d", leaf="c").leaf == "c"
        assert [node.parent for node in session.nodes("full")] == [None, "a", "b", "b"]

    def test_a_commit_may_set_the_leaf_to_none(self, session: Session) -> None:
        step(session, "a", "b")
        assert step(session, leaf=None).leaf is None
        assert path(session) == []
        assert full(session) == ["a", "b"]
        step(session, "c")
        assert path(session) == ["c"]

    def test_an_unknown_leaf_is_refused(self, store: Store, session: Session) -> None:
        step(session, "a")
        with nothing_written(store), pytest.raises(UnknownLeafError) as caught:
            step(session, "b", leaf="nobody")
        assert caught.value.node == "nobody"

    # --- reading ----------------------------------------------------------------------

    def test_full_vs_active_path_differ_in_the_nodes_of_other_branches(
        self, session: Session
    ) -> None:
        grow_branches(session)
        assert (path(session), full(session)) == (["a", "c", "d"], ["a", "b", "c", "d"])
        by_path, by_full = load(session), load(session, scope="full")
        assert (ids(by_path.nodes), ids(by_full.nodes)) == (path(session), full(session))
        assert by_path.leaf == by_full.leaf == "d"
        assert not by_path.healed

    @pytest.mark.parametrize(
        ("leaf", "expected"), [("a", ["a"]), ("b", ["a", "b"]), ("c", ["a", "c"])]
    )
    def test_full_vs_active_path_a_given_leaf_selects_its_path(
        self, session: Session, leaf: str, expected: list[str]
    ) -> None:
        grow_branches(session)
        state = load(session, leaf=leaf)
        assert (ids(state.nodes), state.leaf) == (expected, leaf)
        assert ids(session.nodes(leaf=leaf)) == expected
        assert path(session) == ["a", "c", "d"]

    def test_full_vs_active_path_of_an_unknown_leaf_is_not_found(self, session: Session) -> None:
        grow_branches(session)
        with pytest.raises(NodeNotFoundError) as caught:
            session.load(leaf="nobody")
        assert (caught.value.session, caught.value.node) == ("alpha", "nobody")
        with pytest.raises(NodeNotFoundError):
            session.nodes(leaf="nobody")

    def test_one_node_is_found_on_any_branch_and_in_any_revision(self, session: Session) -> None:
        grow_branches(session)
        step(session, "e")
        node = session.node("b")
        assert node is not None
        assert node == session.nodes("full")[1]
        assert session.node("b", at=1) == node
        assert session.node("e", at=1) is None
        assert session.node("nobody") is None

    def test_fault_09_every_path_is_finite_and_as_long_as_its_depth(self, session: Session) -> None:
        for n in range(50):
            step(session, message(f"n{n}", parent=f"n{(7 * n + 3) % n}" if n else None))
        for node in session.nodes("full"):
            trail = ids(session.nodes(leaf=node.id))
            assert (len(trail), trail[-1]) == (node.depth, node.id)
            assert len(set(trail)) == len(trail)
