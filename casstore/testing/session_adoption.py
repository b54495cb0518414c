"""The part of the session suite about adoption, and about forks with initial nodes."""

from __future__ import annotations

import pytest

from casstore.errors import (
    DuplicateNodeError,
    HeadConflictError,
    InvalidInputError,
    InvalidValueError,
    LeaseHeldError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
    TurnConflictError,
    UnknownParentError,
)
from casstore.session.data import Checkpoint, Commit, NodeDraft, Origin, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    SessionFixtures,
    contents_of,
    enqueue,
    full,
    hold,
    load,
    message,
    nothing_written,
    path,
    step,
)


class AdoptionConformance(SessionFixtures):
    """The head of one session becomes a revision of another; neither session loses anything."""

    def test_adopt_the_head_of_the_other_is_the_next_revision(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", usage=[Usage("main", "large", 1)])
        store.fork("alpha", "beta")
        state = Checkpoint(tool_state={"n": 1}, execution_state=b"machine")
        step(other, "c", message("d", parent="a"), checkpoint=state,
             usage=[Usage("main", "large", 2)])  # fmt: skip
        result = session.adopt(other, expected=1, label="won")
        head = session.head()
        assert head is not None
        assert (result.revision, result.leaf, result.nodes, result.replayed) == (2, "d", (), False)
        assert result.manifest == head.manifest == other.entry().manifest
        assert (path(session), full(session)) == (path(other), full(other))
        assert load(session).checkpoint == load(other).checkpoint
        assert session.usage() == other.usage()
        entry = session.entry("won")
        assert (entry.revision, entry.operation, entry.adopted) == (
            2, "adopt", Origin("beta", 2, None),
        )  # fmt: skip
        # The earlier state is still stored, and both sessions continue independently.
        assert path(session, at=1) == ["a", "b"]
        step(session, "e")
        step(other, "f")
        assert (path(session)[-1], path(other)[-1]) == ("e", "f")
        assert session.entry().adopted is None

    def test_adopt_is_one_write_without_objects(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, *[f"n{at}" for at in range(60)])
        store.fork("alpha", "beta")
        step(other, *[f"m{at}" for at in range(60)])
        before = contents_of(store)
        session.adopt("beta")
        after = contents_of(store)
        assert after.objects == before.objects
        changed = {table: set(after.rows[table]) - set(before.rows[table]) for table in after.rows}
        assert {table: len(rows) for table, rows in changed.items() if rows} == {
            "heads": 1, "history": 1,
        }  # fmt: skip

    def test_adopt_a_turn_of_the_adopted_session_does_not_run_twice(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", turn="t0")
        store.fork("alpha", "beta")
        turns = [Commit(append=[message(f"n{at}")], turn=f"t{at}") for at in (1, 2)]
        made = [other.commit(turn) for turn in turns]
        other.rewind(2)
        adopted = session.adopt(other)
        before = contents_of(store)
        for turn, first in zip(turns, made, strict=True):
            again = session.commit(turn)
            assert (again.replayed, again.nodes, again.leaf) == (True, first.nodes, first.leaf)
            assert (again.revision, again.manifest) == (adopted.revision, adopted.manifest)
        with pytest.raises(TurnConflictError):
            session.commit(turns[0]._replace(append=[message("something else")]))
        assert contents_of(store) == before
        # The session's own turns are replayed, too; all of them also after the other is deleted.
        assert step(session, "a", turn="t0").replayed
        store.delete_session("beta")
        assert session.commit(turns[1]).nodes == ("n2",)
        # Also if the adopting session is adopted itself.
        store.fork("alpha", "gamma", at=1)
        gamma = store.session("gamma")
        gamma.adopt(session)
        assert gamma.commit(turns[0]).replayed

    def test_adopt_keeps_the_sessions_own_receipt_of_a_turn(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        store.fork("alpha", "beta")
        ours = step(session, "ours", turn="t")
        step(other, "theirs", turn="t")
        session.adopt(other)
        again = step(session, "ours", turn="t")
        assert (again.replayed, again.revision) == (True, ours.revision)

    def test_adopt_keeps_nodes_hidden_in_either_session_hidden(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", "c")
        store.fork("alpha", "beta")
        step(other, "d", "e")
        session.tombstone(["b"])
        other.tombstone(["d"])
        session.adopt(other)
        assert path(session) == ["a", "c", "e"]
        assert path(session, at=1) == ["a", "c"]
        assert path(other) == ["a", "b", "c", "e"]
        for ours, theirs in (([], ["a"]), (["a"], [])):
            store.fork("alpha", f"x{ours}")
            store.fork("alpha", f"y{ours}")
            store.session(f"x{ours}").tombstone(ours)
            store.session(f"y{ours}").tombstone(theirs)
            store.session(f"x{ours}").adopt(f"y{ours}")
            assert path(store.session(f"x{ours}")) == ["c", "e"]

    def test_adopt_labels_queue_lease_and_name_stay(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", label="mine")
        session.rename("ours")
        store.fork("alpha", "beta")
        step(other, "b", label="theirs")
        enqueue(session, "our work")
        enqueue(other, "their work")
        lease = hold(session)
        session.adopt(other, lease=lease)
        assert session.meta().name == "ours"
        assert [one.labels for one in session.history()] == [(), ("mine",)]
        assert [batch.items for batch in session.queue.pending()] == [({"text": "our work"},)]
        assert [batch.items for batch in other.queue.pending()] == [({"text": "their work"},)]
        assert session.renew_lease(lease, 60_000).fencing == lease.fencing

    def test_adopt_committed_attachments_in_the_store_come_along(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        store.fork("alpha", "beta")
        own = session.attachments.put(b"ours")
        kept, waiting = other.attachments.put(b"theirs"), other.attachments.put(b"not yet")
        other.attachments.intend("elsewhere", uri="s3://theirs")
        other.attachments.commit([kept.id, "elsewhere"])
        session.adopt(other)
        found = {one.id: one.state for one in session.attachments.list()}
        assert found == {own.id: "intent", kept.id: "committed"}
        assert other.attachments.find(waiting.id) is not None
        store.delete_session("beta")
        one = session.attachments.find(kept.id)
        assert one is not None
        assert one.digest is not None
        assert store.get_blob(one.digest) == b"theirs"

    def test_adopt_is_refused_under_the_conditions_of_a_commit(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        store.fork("alpha", "beta")
        step(other, "b")
        held = hold(session)
        with nothing_written(store):
            with pytest.raises(LeaseHeldError):
                session.adopt(other)
            with pytest.raises(HeadConflictError):
                session.adopt(other, lease=held, expected=7)
            with pytest.raises(InvalidInputError, match="itself"):
                session.adopt(session, lease=held)
            with pytest.raises(SessionNotFoundError):
                session.adopt("nobody", lease=held)
            with pytest.raises(SessionNotFoundError):
                store.session("nobody").adopt(other)
        store.delete_session("beta")
        with nothing_written(store), pytest.raises(SessionDeletedError):
            session.adopt("beta", lease=held)

    def test_adopt_the_adopted_session_may_be_deleted(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        store.fork("alpha", "beta")
        step(other, *[f"n{at}" for at in range(40)])
        session.adopt(other)
        store.delete_session("beta")
        assert path(session) == ["a", *[f"n{at}" for at in range(40)]]
        step(session, "more")

    # --- forks that begin with nodes --------------------------------------------------------

    def test_fork_with_nodes_is_the_fork_and_its_first_commit(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a", "b", usage=[Usage("main", "large", 1)])
        step(session, message("c", parent="a"))
        head = store.fork("alpha", "beta", append=[message("d"), message("e", parent="b")])
        store.fork("alpha", "gamma")
        twin = store.session("gamma")
        step(twin, "d", message("e", parent="b"))
        assert head == other.head()
        assert (head.revision, head.origin) == (3, Origin("alpha", 2, None))
        assert other.entry().manifest == twin.entry().manifest
        assert [entry.revision for entry in other.history()] == [3]
        assert (full(other), path(other)) == (["a", "b", "c", "d", "e"], ["a", "b", "e"])
        assert path(session) == ["a", "c"]
        step(other, "f")
        assert path(other)[-1] == "f"

    def test_fork_of_a_node_accepts_first_nodes(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, *[f"n{at}" for at in range(20)])
        step(session, message("side", parent="n3"))
        store.fork("alpha", "beta", node="side", append=[message("more")])
        assert full(other) == path(other) == ["n0", "n1", "n2", "n3", "side", "more"]
        # The ids of nodes that are not on the path are free.
        step(other, "n19")
        assert other.node("n7") is None

    def test_fork_with_invalid_nodes_is_refused_and_writes_nothing(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        with nothing_written(store):
            with pytest.raises(DuplicateNodeError):
                store.fork("alpha", "beta", append=[message("a")])
            with pytest.raises(UnknownParentError):
                store.fork("alpha", "beta", append=[message("b", parent="nobody")])
            with pytest.raises(InvalidValueError):
                store.fork("alpha", "beta", append=[NodeDraft("b", float("nan"))])
            with pytest.raises(InvalidInputError):
                store.fork("alpha", "beta", append="b")
            with pytest.raises(SessionExistsError):
                store.fork("alpha", "alpha", append=[message("b")])
