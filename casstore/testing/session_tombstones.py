"""The part of the session suite about hiding nodes: at once, everywhere, permanently."""

from __future__ import annotations

import pytest

from casstore.errors import (
    DuplicateNodeError,
    NodeNotFoundError,
    UnknownLeafError,
    UnknownParentError,
)
from casstore.session.data import Commit, Hidden, NodeDraft
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    SessionFixtures,
    at_once,
    full,
    grow_branches,
    ids,
    load,
    message,
    nothing_written,
    path,
    revision,
    step,
)


class TombstoneConformance(SessionFixtures):
    """A hidden node is invisible to every reader, and the remaining graph stays valid."""

    def test_tombstone_hides_at_once(self, session: Session) -> None:
        grow_branches(session)
        assert session.tombstone(["b"]) == Hidden(("b",), (), ())
        assert session.node("b") is None
        assert full(session) == ids(load(session, scope="full").nodes) == ["a", "c", "d"]
        assert len(session.nodes("full")) == 3
        assert path(session) == ["a", "c", "d"]

    def test_tombstone_needs_no_lease_and_makes_no_revision(self, session: Session) -> None:
        grow_branches(session)
        assert session.claim_lease("worker", 1000) is not None
        session.tombstone(["b"])
        assert revision(session) == 1
        assert len(list(session.history())) == 1

    def test_tombstone_reports_what_it_did(self, store: Store, session: Session) -> None:
        grow_branches(session)
        session.tombstone(["b"])
        found = session.tombstone(["unknown", "c", "b", "nobody"])
        assert found == Hidden(("c",), ("b",), ("unknown", "nobody"))
        with nothing_written(store):
            assert session.tombstone(["b", "c"]) == Hidden((), ("b", "c"), ())
            assert session.tombstone(["unknown"]) == Hidden((), (), ("unknown",))
            assert session.tombstone([]) == Hidden((), (), ())

    def test_tombstone_of_an_unknown_id_leaves_the_id_available(self, session: Session) -> None:
        step(session, "a")
        session.tombstone(["b"])
        step(session, "b")
        assert path(session) == ["a", "b"]

    def test_tombstone_lasts_through_every_later_commit(self, session: Session) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["b"])
        for node in "defg":
            step(session, node)
            assert session.node("b") is None
        assert path(session) == full(session) == ["a", "c", "d", "e", "f", "g"]

    @pytest.mark.parametrize("hidden", [["a"], ["b"], ["b", "c"], ["a", "b"], ["a", "c"]])
    def test_fault_09_a_path_stays_whole_without_a_hidden_node(
        self, session: Session, hidden: list[str]
    ) -> None:
        step(session, "a", "b", "c", "d")
        session.tombstone(hidden)
        left = [node for node in "abcd" if node not in hidden]
        assert path(session) == full(session) == left
        nodes = session.nodes()
        assert (len(nodes), nodes[0].id, nodes[-1].id) == (len(left), left[0], "d")
        assert ids(nodes[::-1]) == left[::-1]
        state = load(session)
        assert (state.leaf, state.healed) == ("d", False)

    def test_tombstone_hides_in_earlier_revisions_too(self, session: Session) -> None:
        step(session, "a", "b")
        step(session, "c")
        session.tombstone(["a"])
        for at in (1, 2):
            assert "a" not in path(session, at=at)
            assert "a" not in full(session, at=at)
            assert session.node("a", at=at) is None
        assert ids(load(session, 1).nodes) == ["b"]

    def test_tombstone_stays_after_more_commits(self, session: Session) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["b"])
        step(session, "d")
        step(session, message("e", parent="a"))
        assert full(session) == ["a", "c", "d", "e"]
        assert path(session) == ["a", "e"]

    def test_tombstone_applies_to_one_session(self, session: Session, other: Session) -> None:
        step(session, "a", "b")
        step(other, "a", "b")
        session.tombstone(["b"])
        assert path(other) == ["a", "b"]

    @pytest.mark.parametrize("text", ["this is b", "another b"])
    def test_fault_09_a_hidden_id_stays_taken(
        self, store: Store, session: Session, text: str
    ) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["b"])
        with nothing_written(store), pytest.raises(DuplicateNodeError) as caught:
            step(session, message("b", text))
        assert caught.value.node == "b"
        assert session.node("b") is None

    def test_tombstone_makes_a_node_unfit_as_parent_or_leaf(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["b"])
        with nothing_written(store):
            with pytest.raises(UnknownParentError):
                step(session, message("d", parent="b"))
            with pytest.raises(UnknownLeafError):
                step(session, leaf="b")
            with pytest.raises(NodeNotFoundError):
                session.load(leaf="b")

    # --- a leaf that is hidden ------------------------------------------------------------------

    def test_tombstone_on_the_leaf_heals_to_the_latest_message(self, session: Session) -> None:
        step(session, "a", "b", NodeDraft("note", {"plugin": "notes"}), "c")
        session.tombstone(["c"])
        state = load(session)
        assert (state.leaf, state.healed) == ("b", True)
        assert ids(state.nodes) == path(session) == ["a", "b"]
        assert full(session) == ["a", "b", "note"]

    def test_tombstone_on_the_leaf_heals_to_a_message_of_any_kind(self, session: Session) -> None:
        step(
            session,
            "a",
            NodeDraft("inside", {"message": {"role": "assistant", "parts": []}}),
            NodeDraft("no role", {"text": "hello"}),
            NodeDraft("role is no text", {"role": 1}),
            NodeDraft("plain", "role"),
            "b",
        )
        session.tombstone(["b"])
        assert load(session).leaf == "inside"

    def test_tombstone_on_the_leaf_heals_across_branches(self, session: Session) -> None:
        step(session, "a", "b", message("c", parent="a"), leaf="b")
        session.tombstone(["b"])
        state = load(session)
        assert (state.leaf, state.healed) == ("c", True)
        assert ids(state.nodes) == ["a", "c"]

    def test_tombstone_on_the_leaf_heals_past_other_hidden_messages(self, session: Session) -> None:
        step(session, "a", "b", "c", "d")
        session.tombstone(["c", "d"])
        assert load(session).leaf == "b"
        session.tombstone(["b"])
        assert load(session).leaf == "a"

    def test_tombstone_on_everything_leaves_an_empty_path(self, session: Session) -> None:
        step(session, "a", "b")
        session.tombstone(["b", "a"])
        state = load(session)
        assert (state.leaf, state.healed, list(state.nodes)) == (None, True, [])
        assert full(session) == []
        step(session, "c")
        assert path(session) == full(session) == ["c"]
        assert not load(session).healed

    def test_tombstone_on_the_leaf_heals_in_earlier_revisions(self, session: Session) -> None:
        step(session, "a", "b")
        step(session, "c")
        session.tombstone(["b"])
        assert not load(session).healed
        state = load(session, 1)
        assert (state.leaf, state.healed, ids(state.nodes)) == ("a", True, ["a"])

    def test_tombstone_on_the_leaf_makes_the_session_continue_from_the_visible_one(
        self, session: Session
    ) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["c"])
        step(session, "d")
        state = load(session)
        assert (state.leaf, state.healed) == ("d", False)
        assert ids(state.nodes) == ["a", "b", "d"]
        assert state.nodes[-1].parent == "b"

    def test_tombstone_does_not_heal_a_leaf_that_was_asked_for(self, session: Session) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["c"])
        state = load(session, leaf="a")
        assert (state.leaf, ids(state.nodes)) == ("a", ["a"])

    # --- other graphs ---------------------------------------------------------------------------

    def test_tombstone_does_not_hide_a_later_node_with_the_same_id(self, session: Session) -> None:
        step(session, "a")
        step(session, NodeDraft("b", {"text": "secret"}))
        session.tombstone(["b"])
        session.rewind(1)
        step(session, NodeDraft("b", {"text": "another"}))
        assert path(session) == full(session) == ["a", "b"]
        assert load(session, 2).leaf == "a"
        assert session.node("b", at=2) is None

    def test_tombstone_refuses_the_very_same_node_after_a_rewind(self, session: Session) -> None:
        step(session, "a")
        step(session, NodeDraft("b", {"text": "secret"}))
        session.tombstone(["b"])
        session.rewind(1)
        with pytest.raises(DuplicateNodeError):
            step(session, NodeDraft("b", {"text": "secret"}))
        assert path(session) == ["a"]

    def test_tombstone_still_hides_in_old_revisions_when_a_new_graph_uses_the_id(
        self, session: Session
    ) -> None:
        step(session, NodeDraft("a", {"text": "secret"}))
        session.tombstone(["a"])
        session.commit(Commit(replace=[NodeDraft("a", {"text": "new"})]))
        assert full(session) == ["a"]
        assert ids(session.nodes("full", at=1)) == []
        assert session.node("a", at=1) is None

    def test_tombstone_map_survives_a_new_graph_with_many_branches(self, session: Session) -> None:
        roots = [NodeDraft(f"root {n:03}", {"n": n}, parent=None) for n in range(60)]
        step(session, *roots)
        session.tombstone([f"root {n:03}" for n in range(0, 60, 2)])
        # The same nodes are appended again: half of the hidden ones become visible, the others are
        # absent and stay hidden in the revision before.
        session.commit(Commit(replace=roots[:30]))
        assert len(full(session)) == 30
        assert ids(session.nodes("full", at=1)) == [
            f"root {n:03}" for n in range(60) if n < 30 or n % 2
        ]

    # --- at the same time -----------------------------------------------------------------------

    def test_tombstones_that_race_all_hide(self, store: Store, session: Session) -> None:
        step(session, *(f"n{n}" for n in range(40)), "leaf")

        def work(handle: Store, number: int) -> None:
            found = handle.session("alpha").tombstone([f"n{5 * number + n}" for n in range(5)])
            assert len(found.hidden) == 5

        answers = at_once(store, work)
        assert answers == [None] * len(answers)
        assert path(session) == full(session) == ["leaf"]

    def test_tombstone_concurrent_with_commits_disturbs_neither(
        self, store: Store, session: Session
    ) -> None:
        step(session, *(f"n{n}" for n in range(10)), "leaf")

        def work(handle: Store, number: int) -> None:
            mine = handle.session("alpha")
            if number % 2:
                step(mine, f"new {number}")
            else:
                mine.tombstone([f"n{number}"])

        answers = at_once(store, work)
        assert answers == [None] * len(answers)
        assert set(full(session)) == {
            *(f"n{n}" for n in (1, 3, 5, 7, 8, 9)),
            "leaf",
            *(f"new {n}" for n in (1, 3, 5, 7)),
        }
        assert len(path(session)) == 11
