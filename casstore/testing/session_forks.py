"""The part of the session suite about forks: one row, then independent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import (
    NodeNotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.session.data import Checkpoint, Origin, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    SessionFixtures,
    contents_of,
    enqueue,
    full,
    grow_branches,
    hold,
    ids,
    load,
    message,
    nothing_written,
    path,
    revision,
    step,
)


def _grow(session: Session) -> None:
    """Three revisions: ``a``, then ``a → b``, then a second branch ``a → c → d``."""
    step(session, "a", checkpoint=Checkpoint(turn_state=1), usage=[Usage("main", "large", 1)])
    step(
        session,
        "b",
        label="mark",
        checkpoint=Checkpoint(turn_state=2, tool_state={"n": 2}, execution_state=b"machine"),
        usage=[Usage("main", "large", 1), Usage("helper", "small", 5)],
    )
    step(session, message("c", parent="a"), "d", checkpoint=Checkpoint(turn_state=3))


# Where to fork the session of ``_grow``: the arguments for ``fork``, and what the fork must have:
# its revision, the nodes on its path, and all of its nodes.
PLACES: dict[str, tuple[Callable[[Session], dict[str, Any]], int, str, str]] = {
    "the head": (lambda _: {}, 3, "acd", "abcd"),
    "a revision": (lambda _: {"at": 2}, 2, "ab", "ab"),
    "a label": (lambda _: {"at": "mark"}, 2, "ab", "ab"),
    "an entry": (lambda session: {"at": session.entry(1)}, 1, "a", "a"),
    "a node": (lambda _: {"node": "c"}, 3, "ac", "ac"),
    "a node off the path": (lambda _: {"node": "b"}, 3, "ab", "ab"),
    "a node of a revision": (lambda _: {"at": 2, "node": "a"}, 2, "a", "a"),
}


class ForkConformance(SessionFixtures):
    """A fork costs one row, has the content of its source, and is independent of it afterwards."""

    @pytest.mark.parametrize("place", PLACES)
    def test_fork_from_a_revision_label_or_node_has_its_path_and_origin(
        self, store: Store, session: Session, other: Session, place: str
    ) -> None:
        _grow(session)
        arguments, number, on_path, in_all = PLACES[place]
        chosen = arguments(session)
        head = store.fork("alpha", "beta", **chosen)
        assert head == other.head()
        assert (head.session, head.revision, head.leaf) == ("beta", number, on_path[-1])
        assert head.origin == Origin("alpha", number, chosen.get("node"))
        assert (path(other), full(other)) == (list(on_path), list(in_all))
        source = {node.id: node for node in session.nodes("full")}
        assert [node.payload for node in other.nodes()] == [source[n].payload for n in on_path]
        assert load(other).usage == session.usage(at=number)

    @pytest.mark.parametrize("place", PLACES)
    def test_fork_writes_one_row(
        self, store: Store, session: Session, other: Session, place: str
    ) -> None:
        _grow(session)
        chosen = PLACES[place][0](session)
        before = contents_of(store)
        store.fork("alpha", "beta", **chosen)
        after = contents_of(store)
        # A fork of an earlier revision also marks it, so that no older plan removes the revision.
        marks = 1 if "at" in chosen else 0
        assert len(after.rows["heads"]) == len(before.rows["heads"]) + 1
        assert after.row_count == before.row_count + 1 + marks
        for table, rows in before.rows.items():
            assert set(rows) <= set(after.rows[table]), f"fork changed a row of {table}"
        if "node" not in chosen:
            assert after.objects == before.objects

    def test_fork_keeps_the_checkpoint_usage_and_nodes_that_fault_15_lost(
        self, store: Store, session: Session, other: Session
    ) -> None:
        _grow(session)
        store.fork("alpha", "beta", at=2)
        mine, theirs = load(session, 2), load(other)
        assert theirs.checkpoint == mine.checkpoint
        assert theirs.checkpoint.execution_state == b"machine"
        assert theirs.usage == mine.usage == other.usage()
        assert len(theirs.usage) == 2
        assert theirs.head.revision == 2
        assert list(theirs.nodes) == list(mine.nodes)

    def test_fork_continues_from_its_revision(
        self, store: Store, session: Session, other: Session, clock: ManualClock
    ) -> None:
        _grow(session)
        clock.now_ms += 10
        store.fork("alpha", "beta", at=2)
        clock.now_ms += 10
        assert step(other, "e", expected=2, usage=[Usage("main", "large", 1)]).revision == 3
        assert path(other) == ["a", "b", "e"]
        assert other.usage()[0] == Usage("main", "large", 3)
        assert [(entry.revision, entry.operation) for entry in other.history()] == [
            (3, "commit"),
            (2, "fork"),
        ]
        assert path(other, at=2) == ["a", "b"]
        head = other.head()
        assert head is not None
        assert (head.created_at_ms, head.committed_at_ms) == (clock.now_ms - 10, clock.now_ms)
        assert head.origin == Origin("alpha", 2, None)

    def test_fork_and_source_do_not_see_each_other_afterwards(
        self, store: Store, session: Session, other: Session
    ) -> None:
        _grow(session)
        enqueue(session)
        lease = hold(session)
        store.fork("alpha", "beta")
        step(other, "mine")
        assert other.queue.batches() == []
        hold(other)
        assert session.node("mine") is None
        assert revision(session) == 3
        session.release_lease(lease)
        step(session, message("mine", "another of this name"))
        assert path(session)[-1] == path(other)[-1] == "mine"
        assert session.nodes()[-1].payload != other.nodes()[-1].payload

    @pytest.mark.parametrize("place", PLACES)
    def test_fork_outlives_its_source(
        self, store: Store, session: Session, other: Session, place: str
    ) -> None:
        _grow(session)
        arguments, number, on_path, in_all = PLACES[place]
        store.fork("alpha", "beta", **arguments(session))
        before = load(other)
        nodes = list(before.nodes)
        assert store.delete_session("alpha") is True
        after = load(other)
        assert (after.head, after.checkpoint, after.usage) == before[:3]
        assert list(after.nodes) == nodes
        assert full(other) == list(in_all)
        assert path(other, at=number) == list(on_path)
        step(other, "e")
        assert path(other) == [*on_path, "e"]

    def test_fork_of_a_fork_of_a_fork(self, store: Store, session: Session) -> None:
        step(session, "n0")
        for n in range(1, 6):
            store.fork("alpha" if n == 1 else f"fork {n - 1}", f"fork {n}")
            step(store.session(f"fork {n}"), f"n{n}")
        last = store.session("fork 5")
        assert path(last) == [f"n{n}" for n in range(6)]
        head = last.head()
        assert head is not None
        assert (head.revision, head.origin) == (6, Origin("fork 4", 5, None))
        for n in range(5):
            store.delete_session("alpha" if n == 0 else f"fork {n}")
        assert path(last) == [f"n{n}" for n in range(6)]
        assert step(last, "more").revision == 7

    def test_fork_of_a_node_has_no_nodes_of_other_branches(
        self, store: Store, session: Session, other: Session
    ) -> None:
        grow_branches(session)
        store.fork("alpha", "beta", node="b")
        assert other.node("d") is None
        step(other, "c")
        assert path(other) == full(other) == ["a", "b", "c"]

    def test_fork_does_not_show_what_was_hidden_before(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", "c")
        session.tombstone(["b"])
        store.fork("alpha", "beta")
        store.fork("beta", "gamma")
        store.fork("alpha", "delta", node="c")
        for name in ("beta", "gamma", "delta"):
            fork = store.session(name)
            assert path(fork) == full(fork) == ["a", "c"], name
            assert fork.node("b") is None, name
        store.delete_session("alpha")
        assert path(other) == ["a", "c"]
        step(other, "d")
        assert path(other) == ["a", "c", "d"]

    def test_fork_keeps_showing_what_is_hidden_later(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", "c")
        store.fork("alpha", "beta")
        session.tombstone(["b"])
        assert (path(session), path(other)) == (["a", "c"], ["a", "b", "c"])
        other.tombstone(["a"])
        assert (path(session), path(other)) == (["a", "c"], ["b", "c"])

    def test_fork_is_listed_with_its_relation(
        self, store: Store, session: Session, other: Session
    ) -> None:
        store.create_session("alpha", name="source", model="large", cwd="/work")
        step(session, "a")
        store.fork("alpha", "beta")
        assert [info.meta.session for info in store.sessions()] == ["alpha", "beta"]
        assert other.meta().parent == "alpha"
        assert other.info().first_user_message == "this is a"

    def test_fork_refuses_a_missing_revision(self, store: Store, session: Session) -> None:
        _grow(session)
        with nothing_written(store):
            with pytest.raises(SessionNotFoundError) as no_session:
                store.fork("nobody", "beta")
            with pytest.raises(RevisionNotFoundError):
                store.fork("alpha", "beta", at=9)
            with pytest.raises(RevisionNotFoundError):
                store.fork("alpha", "beta", at="unknown")
            with pytest.raises(NodeNotFoundError) as no_node:
                store.fork("alpha", "beta", node="unknown")
            with pytest.raises(NodeNotFoundError):
                store.fork("alpha", "beta", at=1, node="d")
        assert no_session.value.session == "nobody"
        assert (no_node.value.session, no_node.value.node) == ("alpha", "unknown")

    def test_fork_refuses_a_hidden_node(self, store: Store, session: Session) -> None:
        step(session, "a", "b")
        session.tombstone(["b"])
        with pytest.raises(NodeNotFoundError):
            store.fork("alpha", "beta", node="b")

    def test_fork_refuses_the_id_of_an_existing_or_deleted_session(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        step(other, "a")
        step(store.session("deleted"), "a")
        store.delete_session("deleted")
        with nothing_written(store):
            for target in ("beta", "alpha"):
                with pytest.raises(SessionExistsError) as exists:
                    store.fork("alpha", target)
                assert exists.value.session == target
            with pytest.raises(SessionDeletedError):
                store.fork("alpha", "deleted")
            with pytest.raises(SessionDeletedError):
                store.fork("deleted", "gamma")

    def test_fork_of_a_long_session_is_read_like_any_other(
        self, store: Store, session: Session, other: Session
    ) -> None:
        for start in range(0, 500, 50):
            step(session, *(f"n{n}" for n in range(start, start + 50)))
        store.fork("alpha", "beta", node="n250")
        assert ids(other.nodes()[-2:]) == ["n249", "n250"]
        assert len(other.nodes("full")) == 251
