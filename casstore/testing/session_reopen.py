"""The part of the session suite about several handles, and about reopening a store."""

from __future__ import annotations

import pytest

from casstore.engine.protocol import Engine
from casstore.errors import (
    DuplicateNodeError,
    LeaseHeldError,
    SessionDeletedError,
    TurnConflictError,
)
from casstore.session.data import Checkpoint, Commit, Lease, Usage
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock, Reopen
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    contents_of,
    enqueue,
    full,
    hold,
    load,
    message,
    path,
    revision,
    step,
    take,
)


def _live(store: Store) -> Lease:
    """Use every feature in session ``alpha``; returns a lease that stays valid."""
    session = store.session("alpha")
    store.create_session("alpha", name="My session", model="large", cwd="/work")
    step(
        session,
        "a",
        "b",
        checkpoint=Checkpoint(turn_state=1, tool_state={"tools": ["saw"]}),
        usage=[Usage("main", "large", 1, 2)],
        label="mark",
    )
    step(session, message("c", parent="a"), turn="turn")
    store.fork("alpha", "fork", at=1)
    session.tombstone(["b"])
    enqueue(session, "waiting", source_key="key")
    session.attachments.intend("file", uri="file:///file")
    store.pin("anchor", load(session, 1).head.manifest, ttl_ms=MINUTE_MS)
    step(store.session("gone"), "a")
    store.delete_session("gone")
    return hold(session)


def _check_all_of_it(store: Store, lease: Lease) -> None:
    """Check everything that ``_live`` wrote, and continue."""
    session = store.session("alpha")
    state = load(session)
    assert (state.head.revision, state.leaf, state.head.turn) == (2, "c", "turn")
    assert (path(session), full(session)) == (["a", "c"], ["a", "c"])
    assert state.checkpoint.tool_state == {"tools": ["saw"]}
    assert state.usage == (Usage("main", "large", 1, 2),)
    meta = session.meta()
    assert (meta.name, meta.model, meta.cwd) == ("My session", "large", "/work")
    assert [entry.labels for entry in session.history()] == [(), ("mark",)]
    assert [info.meta.session for info in store.sessions()] == ["alpha", "fork"]
    [batch] = session.queue.pending()
    assert list(batch.items) == [{"text": "waiting"}]
    assert enqueue(session, "other", source_key="key") == batch
    [file] = session.attachments.list()
    assert (file.id, file.state) == ("file", "intent")
    assert [pin.name for pin in store.pins()] == ["anchor"]
    assert path(store.session("fork")) == ["a", "b"]
    with pytest.raises(SessionDeletedError):
        store.session("gone").load()
    assert step(session, message("c", parent="a"), turn="turn").replayed
    with pytest.raises(TurnConflictError):
        step(session, "other", turn="turn")
    with pytest.raises(LeaseHeldError):
        step(session, "d")
    assert session.claim_lease("successor", MINUTE_MS) is None
    with pytest.raises(DuplicateNodeError):
        session.commit(Commit(append=[message("b")], lease=lease))
    claim = take(session, session.renew_lease(lease, MINUTE_MS))
    session.commit(
        Commit(
            append=[message("d")],
            expected=2,
            lease=lease,
            release=True,
            completes=[claim],
            attachments=["file"],
        )
    )
    assert path(session) == ["a", "c", "d"]
    assert session.queue.batches() == []
    assert hold(session).fencing == lease.fencing + 1


class HandleConformance(SessionFixtures):
    """Handles have no state: all handles of a session see the same."""

    def test_a_second_handle_sees_everything_and_continues(
        self, store: Store, clocked: Engine
    ) -> None:
        lease = _live(store)
        _check_all_of_it(Store(clocked), lease)

    def test_a_handle_sees_every_commit_of_another_handle(
        self, store: Store, session: Session, clocked: Engine
    ) -> None:
        second = Store(clocked).session("alpha")
        for n in range(0, 10, 2):
            assert step(session, f"n{n}", expected=n).revision == n + 1
            assert step(second, f"n{n + 1}", expected=n + 1).revision == n + 2
            assert revision(session) == revision(second) == n + 2
        assert list(session.nodes()) == list(second.nodes())
        second.tombstone(["n3"])
        assert session.node("n3") is None
        store.delete_session("alpha")
        with pytest.raises(SessionDeletedError):
            second.head()


class ReopenConformance(SessionFixtures):
    """A store that was closed and reopened has the same content."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        """A function that closes an engine and reopens its store on the same ``clock``."""
        raise NotImplementedError(f"{type(self).__name__} must override the fixture reopen")

    def test_reopen_finds_everything_and_accepts_commits(
        self, store: Store, reopen: Reopen
    ) -> None:
        lease = _live(store)
        _check_all_of_it(Store(reopen(store.engine)), lease)

    def test_reopen_changes_nothing(self, store: Store, reopen: Reopen) -> None:
        _live(store)
        before = contents_of(store)
        for _ in range(3):
            store = Store(reopen(store.engine))
            assert contents_of(store) == before

    def test_reopen_keeps_claims_as_long_as_their_lease(
        self, store: Store, session: Session, clock: ManualClock, reopen: Reopen
    ) -> None:
        enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        store = Store(reopen(store.engine))
        session = store.session("alpha")
        session.queue.verify(claim)
        assert session.queue.pending() == []
        clock.now_ms = lease.expires_at_ms
        store = Store(reopen(store.engine))
        session = store.session("alpha")
        newer = hold(session, "successor")
        assert newer.fencing == lease.fencing + 1
        assert take(session, newer).batches[0].fence == 2

    def test_reopen_after_each_commit_makes_no_difference(
        self, store: Store, reopen: Reopen
    ) -> None:
        for n in range(10):
            session = store.session("alpha")
            assert step(session, f"n{n}", usage=[Usage("main", "large", 1)]).revision == n + 1
            store = Store(reopen(store.engine))
        session = store.session("alpha")
        assert path(session) == [f"n{n}" for n in range(10)]
        assert session.usage() == (Usage("main", "large", 10),)
        assert [entry.revision for entry in session.history()] == list(range(10, 0, -1))

    def test_reopen_finds_nothing_of_a_commit_that_failed(
        self, store: Store, session: Session, reopen: Reopen
    ) -> None:
        step(session, "a")
        before = contents_of(store)
        with pytest.raises(DuplicateNodeError):
            step(session, "b", "a", usage=[Usage("main", "large", 1)])
        assert contents_of(Store(reopen(store.engine))) == before
