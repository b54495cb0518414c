"""The part of the session suite about turns: a repeated commit returns the first result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import DuplicateNodeError, TurnConflictError
from casstore.session.data import (
    Checkpoint,
    Claim,
    Commit,
    CommitResult,
    NodeDraft,
    Usage,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    at_once,
    batch_ids,
    enqueue,
    full,
    hold,
    message,
    nothing_written,
    path,
    revision,
    start,
    step,
    take,
)

_NODES = (
    NodeDraft(
        "n0",
        {
            "id": "message-0",
            "role": "user",
            "parts": [{"id": "part-0", "kind": "text", "content": "hi", "prune_state": "whole"}],
        },
        parent="root",
        time="2026-01-01T00:00:00Z",
    ),
    NodeDraft(
        "n1",
        {"message": {"id": "message-1", "role": "assistant", "parts": []}},
        frame="frame-0",
        time=1_700_000_000.5,
    ),
    # A child of n0, so that its parent differs from the node before it.
    NodeDraft(
        "n2",
        {"plugin": "notes", "id": "data", "timestamp": 1, "node_id": "data", "leaf_node_id": 1},
        parent="n0",
        cause={"id": "call-0", "timestamp": 1},
    ),
)
_TURN = Commit(
    append=_NODES,
    checkpoint=Checkpoint(
        turn_state={"turn_index": 1, "timestamp": 1},
        tool_state={"id": "tools", "parent_node_id": 1},
        plugin_revision=1,
        frames=[{"frame_id": "frame-0", "reason": "initial", "created_at": 1}],
        current_frame="frame-0",
        config={"model": "large", "created_at": 1},
    ),
    turn="turn-1",
    usage=[Usage("main", "large", 10, 5)],
)


def _checkpoint(change: Commit, **fields: Any) -> Commit:
    assert change.checkpoint is not None
    return change._replace(checkpoint=change.checkpoint._replace(**fields))


def _node(change: Commit, index: int, **fields: Any) -> Commit:
    nodes = list(change.append)
    nodes[index] = nodes[index]._replace(**fields)
    return change._replace(append=nodes)


def _payload(change: Commit, index: int, **fields: Any) -> Commit:
    return _node(change, index, payload={**change.append[index].payload, **fields})


def _part(change: Commit, **fields: Any) -> Commit:
    [part] = change.append[0].payload["parts"]
    return _payload(change, 0, parts=[{**part, **fields}])


def _renamed(change: Commit) -> Commit:
    """The same nodes under other ids, with the same structure."""
    for index in range(3):
        change = _node(change, index, id=f"x{index}")
    return _node(change, 2, parent="x0")


# Differences that a repeated commit may have and still be the same turn.
IGNORED: dict[str, Callable[[Commit], Commit]] = {
    "nothing": lambda c: c,
    "the revision it expects": lambda c: c._replace(expected=17),
    "the lease": lambda c: c._replace(lease=None),
    "the ids of nodes": _renamed,
    "a parent before the commit": lambda c: _node(c, 0, parent="elsewhere"),
    "a parent given explicitly": lambda c: _node(c, 1, parent="n0"),
    "a leaf given explicitly": lambda c: c._replace(leaf="n2"),
    "the time of a node": lambda c: _node(c, 0, time="2027-12-31T00:00:00Z"),
    "a time left out": lambda c: _node(c, 1, time=None),
}

# Differences for which a commit is another one, so that repeating the turn with it is a conflict.
COUNTED: dict[str, Callable[[Commit], Commit]] = {
    "a text": lambda c: _part(c, content="ho"),
    "a role": lambda c: _payload(c, 0, role="assistant"),
    "a field more": lambda c: _payload(c, 0, pinned=True),
    "the id of a message": lambda c: _payload(c, 0, id="message-new"),
    "the id of a part": lambda c: _part(c, id="part-new"),
    "when a frame was made": lambda c: _checkpoint(
        c, frames=[{"frame_id": "frame-0", "reason": "initial", "created_at": 2}]
    ),
    "an id that is data": lambda c: _payload(c, 2, id="other"),
    "a timestamp that is data": lambda c: _payload(c, 2, timestamp=2),
    "a node_id that is data": lambda c: _payload(c, 2, node_id="other"),
    "a leaf_node_id that is data": lambda c: _payload(c, 2, leaf_node_id=2),
    "a cause": lambda c: _node(c, 2, cause={"id": "call-1", "timestamp": 1}),
    "the time in a cause": lambda c: _node(c, 2, cause={"id": "call-0", "timestamp": 2}),
    "the frame of a node": lambda c: _node(c, 1, frame="frame-1"),
    "a parent in the commit": lambda c: _node(c, 2, parent="n1"),
    "the leaf": lambda c: c._replace(leaf="n1"),
    "a node more": lambda c: c._replace(append=[*c.append, message("n3")]),
    "a node less": lambda c: c._replace(append=c.append[:2]),
    "the order of nodes": lambda c: c._replace(append=[c.append[i] for i in (0, 2, 1)]),
    "replacing the graph": lambda c: c._replace(append=(), replace=_NODES),
    "the turn state": lambda c: _checkpoint(c, turn_state={"turn_index": 2, "timestamp": 1}),
    "a timestamp in the turn state": lambda c: _checkpoint(
        c, turn_state={"turn_index": 1, "timestamp": 2}
    ),
    "an id in a component": lambda c: _checkpoint(
        c, tool_state={"id": "others", "parent_node_id": 1}
    ),
    "a parent_node_id in a component": lambda c: _checkpoint(
        c, tool_state={"id": "tools", "parent_node_id": 2}
    ),
    "a component more": lambda c: _checkpoint(c, plugin_snapshot={"notes": []}),
    "the plugin revision": lambda c: _checkpoint(c, plugin_revision=2),
    "a frame": lambda c: _checkpoint(
        c, frames=[{"frame_id": "frame-0", "reason": "compaction", "created_at": 1}]
    ),
    "the current frame": lambda c: _checkpoint(c, current_frame=None),
    "the configuration": lambda c: _checkpoint(c, config={"model": "small", "created_at": 1}),
    "a created_at outside frames": lambda c: _checkpoint(
        c, config={"model": "large", "created_at": 2}
    ),
    "no checkpoint": lambda c: c._replace(checkpoint=None),
    "the usage": lambda c: c._replace(usage=[Usage("main", "large", 10, 6)]),
    "an attachment": lambda c: c._replace(attachments=["picture"]),
    "the label": lambda c: c._replace(label="mark"),
}


class TurnConformance(SessionFixtures):
    """A turn is committed once, however often its commit is sent."""

    # --- replay -----------------------------------------------------------------------

    def test_replay_returns_the_first_result_and_writes_nothing(
        self, store: Store, session: Session
    ) -> None:
        step(session, "root")
        first = session.commit(_TURN)
        assert first == CommitResult(2, first.manifest, "n2", ("n0", "n1", "n2"), replayed=False)
        with nothing_written(store):
            assert session.commit(_TURN) == first._replace(replayed=True)

    def test_replay_needs_no_lease_and_no_matching_revision(
        self, store: Store, session: Session
    ) -> None:
        lease = hold(session)
        change = Commit(append=[message("a")], expected=0, lease=lease, release=True, turn="t")
        first = session.commit(change)
        with nothing_written(store):
            for again in (
                change,
                change._replace(expected=9),
                change._replace(lease=None, release=False),
            ):
                assert session.commit(again) == first._replace(replayed=True)

    def test_replay_succeeds_while_another_owner_holds_the_lease(
        self, store: Store, session: Session
    ) -> None:
        change = Commit(append=[message("a")], lease=hold(session), release=True, turn="t")
        first = session.commit(change)
        newer = hold(session, "successor")
        with nothing_written(store):
            assert session.commit(change) == first._replace(replayed=True)
        session.renew_lease(newer, MINUTE_MS)

    def test_replay_only_releases_the_lease(self, session: Session) -> None:
        enqueue(session)
        change = Commit(append=[message("a")], usage=[Usage("main", "large", 1)], turn="t")
        session.commit(change)
        lease = hold(session)
        claim = take(session, lease)
        assert session.commit(change._replace(lease=lease, release=True)).replayed
        assert revision(session) == 1
        assert session.usage() == (Usage("main", "large", 1),)
        assert batch_ids(session.queue.pending()) == batch_ids(claim.batches)
        assert hold(session, "successor").fencing == lease.fencing + 1

    def test_replay_without_release_keeps_the_lease(self, session: Session) -> None:
        lease = hold(session)
        change = Commit(append=[message("a")], lease=lease, turn="t")
        session.commit(change)
        assert session.commit(change).replayed
        assert session.claim_lease("successor", MINUTE_MS) is None

    def test_replay_finds_the_result_after_later_commits(
        self, session: Session, clock: ManualClock
    ) -> None:
        first = step(session, "a", turn="t")
        for n in range(5):
            clock.now_ms += MINUTE_MS
            step(session, f"n{n}", turn=f"t{n}")
        assert step(session, "a", turn="t") == first._replace(replayed=True)
        assert revision(session) == 6

    def test_replay_of_the_same_turn_in_another_session_is_a_commit(
        self, session: Session, other: Session
    ) -> None:
        step(session, "a", turn="t")
        assert not step(other, "a", turn="t").replayed
        assert path(other) == ["a"]

    def test_replay_of_the_same_content_as_another_turn_is_a_commit(self, session: Session) -> None:
        step(session, "a", turn="t1")
        with pytest.raises(DuplicateNodeError):
            step(session, "a", turn="t2")
        assert step(session, message("b", "this is a"), turn="t2").revision == 2

    def test_replay_without_a_turn_is_a_commit(self, session: Session) -> None:
        for expected in (1, 2):
            result = session.commit(Commit(usage=[Usage("main", "large", 1)]))
            assert (result.revision, result.replayed) == (expected, False)
        assert session.usage() == (Usage("main", "large", 2),)

    def test_replay_that_races_with_its_original_is_done_once(
        self, store: Store, session: Session
    ) -> None:
        spent = [Usage("main", "large", 1)]
        answers = at_once(
            store, lambda handle, _: step(handle.session("alpha"), "a", turn="t", usage=spent)
        )
        results = [answer for answer in answers if isinstance(answer, CommitResult)]
        assert len(results) == len(answers), answers
        assert sorted(result.replayed for result in results)[:2] == [False, True]
        assert {result._replace(replayed=True) for result in results} == {
            results[0]._replace(replayed=True)
        }
        assert session.usage() == (Usage("main", "large", 1),)

    def test_replay_from_another_thread_is_answered_the_same(self, session: Session) -> None:
        first = step(session, "a", turn="t")
        assert start(lambda: step(session, "a", turn="t")).result() == first._replace(replayed=True)

    # --- conflict ---------------------------------------------------------------------

    def test_replay_conflict_names_the_session_and_the_turn(
        self, store: Store, session: Session
    ) -> None:
        step(session, turn="t", checkpoint=Checkpoint(turn_state={"turn_index": 1}))
        with nothing_written(store), pytest.raises(TurnConflictError) as caught:
            step(session, turn="t", checkpoint=Checkpoint(turn_state={"turn_index": 2}))
        assert (caught.value.session, caught.value.turn) == ("alpha", "t")

    def test_replay_conflict_does_not_release_the_lease(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a", turn="t")
        lease = hold(session)
        with nothing_written(store), pytest.raises(TurnConflictError):
            session.commit(Commit(append=[message("b")], lease=lease, release=True, turn="t"))

    @pytest.mark.parametrize("difference", COUNTED)
    def test_replay_conflict_when_a_repeated_turn_has_other_content(
        self, store: Store, session: Session, difference: str
    ) -> None:
        step(session, "root")
        session.commit(_TURN)
        with nothing_written(store), pytest.raises(TurnConflictError):
            session.commit(COUNTED[difference](_TURN))

    # --- what the hash ignores -----------------------------------------------------------

    @pytest.mark.parametrize("difference", IGNORED)
    def test_hash_ignores_differences_that_do_not_change_the_turn(
        self, session: Session, difference: str
    ) -> None:
        step(session, "root")
        first = session.commit(_TURN)
        assert session.commit(IGNORED[difference](_TURN)) == first._replace(replayed=True)
        assert revision(session) == 2

    def test_hash_ignores_how_work_was_claimed_but_not_which(self, session: Session) -> None:
        enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        change = Commit(lease=lease, turn="t", completes=[claim])
        first = session.commit(change)
        [batch] = claim.batches
        reclaimed = Claim(
            "another", "alpha", claim.fencing + 1, (batch._replace(fence=7, held_by=7),)
        )
        again = session.commit(change._replace(completes=[reclaimed]))
        assert again == first._replace(replayed=True)
        other = claim._replace(batches=(batch._replace(id="another"),))
        for completes in ([], [other]):
            with pytest.raises(TurnConflictError):
                session.commit(change._replace(completes=completes))

    # --- faults that must not come along ---------------------------------------------------

    def test_fault_10_a_replay_returns_the_stored_nodes(self, session: Session) -> None:
        first = step(session, "a", "b", turn="t")
        texts = [message("x", "this is a"), message("y", "this is b")]
        again = step(session, *texts, turn="t")
        assert (again.nodes, again.leaf) == (("a", "b"), "b")
        assert again == first._replace(replayed=True)
        assert full(session) == ["a", "b"]
        assert session.node("x") is None
