"""The part of the session suite about deletion: immediate, for all handles, permanent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from casstore.errors import SessionDeletedError
from casstore.session.data import (
    Claim,
    Commit,
    Lease,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    TIMEOUT_S,
    SessionFixtures,
    at_once,
    contents_of,
    enqueue,
    fill,
    hold,
    message,
    nothing_written,
    path,
    step,
    take,
)

_LEASE = Lease("alpha", "worker", b"token", 1, 0, 2**50)
_CLAIM = Claim("claim", "alpha", 1, ())

# Every call on a session by its id.
CALLS: dict[str, Callable[[Store, Session], object]] = {
    "head": lambda _, session: session.head(),
    "load": lambda _, session: session.load(),
    "load at": lambda _, session: session.load(1),
    "nodes": lambda _, session: list(session.nodes()),
    "node": lambda _, session: session.node("a"),
    "checkpoint": lambda _, session: session.checkpoint(),
    "usage": lambda _, session: session.usage(),
    "meta": lambda _, session: session.meta(),
    "info": lambda _, session: session.info(),
    "commit": lambda _, session: step(session, "b"),
    "replay": lambda _, session: step(session, "a", turn="turn"),
    "commit in vain": lambda _, session: session.commit(Commit(expected=9)),
    "rewind": lambda _, session: session.rewind(1),
    "tombstone": lambda _, session: session.tombstone(["a"]),
    "rename": lambda _, session: session.rename("name"),
    "update_meta": lambda _, session: session.update_meta(model="small"),
    "history": lambda _, session: list(session.history()),
    "entry": lambda _, session: session.entry(1),
    "label": lambda _, session: session.label("label"),
    "unlabel": lambda _, session: session.unlabel("mark"),
    "wait": lambda _, session: session.wait(5, timeout_s=0),
    "claim_lease": lambda _, session: session.claim_lease("worker", MINUTE_MS),
    "renew_lease": lambda _, session: session.renew_lease(_LEASE, MINUTE_MS),
    "release_lease": lambda _, session: session.release_lease(_LEASE),
    "queue.enqueue": lambda _, session: enqueue(session),
    "queue.claim": lambda _, session: session.queue.claim(_LEASE),
    "queue.claim_exactly": lambda _, session: session.queue.claim_exactly(_LEASE, ["b"]),
    "queue.verify": lambda _, session: session.queue.verify(_CLAIM),
    "queue.abandon": lambda _, session: session.queue.abandon(_CLAIM),
    "queue.cancel": lambda _, session: session.queue.cancel("batch"),
    "queue.batches": lambda _, session: session.queue.batches(),
    "queue.pending": lambda _, session: session.queue.pending(),
    "attachments.intend": lambda _, session: session.attachments.intend("new", uri="x:y"),
    "attachments.put": lambda _, session: session.attachments.put(b"new"),
    "attachments.commit": lambda _, session: session.attachments.commit(["file"]),
    "attachments.find": lambda _, session: session.attachments.find("file"),
    "attachments.list": lambda _, session: session.attachments.list(),
    "attachments.uncommitted": lambda _, session: session.attachments.uncommitted(older_than_ms=0),
    "attachments.condemn": lambda _, session: session.attachments.condemn("file"),
    "attachments.forget": lambda _, session: session.attachments.forget("file"),
    "subjects": lambda _, session: session.subjects(),
    "add_subjects": lambda _, session: session.add_subjects(["anna"]),
    "remove_subjects": lambda _, session: session.remove_subjects(["anna"]),
    "expires_at_ms": lambda _, session: session.expires_at_ms(),
    "expire_in": lambda _, session: session.expire_in(MINUTE_MS),
    "never expire": lambda _, session: session.expire_in(None),
    "protect": lambda _, session: session.protect(by="run"),
    "unprotect": lambda _, session: session.unprotect("run"),
    "protections": lambda _, session: session.protections(),
    "create_session": lambda store, _: store.create_session("alpha"),
    "create_session about": lambda store, _: store.create_session("alpha", subjects=["anna"]),
    "fork from": lambda store, _: store.fork("alpha", "new"),
    "fork to": lambda store, _: store.fork("beta", "alpha"),
    "compare": lambda store, _: store.compare("alpha", "beta"),
}


class DeletionConformance(SessionFixtures):
    """A deleted session disappears at once and never returns."""

    def test_factory_deletes_once(self, store: Store, session: Session, other: Session) -> None:
        fill(session)
        step(other, "a")
        assert store.delete_session("alpha") is True
        with nothing_written(store):
            assert store.delete_session("alpha") is False
        assert store.delete_session("never was") is False
        assert [info.meta.session for info in store.sessions()] == ["beta"]
        assert path(other) == ["a"]

    @pytest.mark.parametrize("call", CALLS)
    def test_fault_14_a_deleted_id_is_refused_everywhere_and_forever(
        self, store: Store, session: Session, other: Session, call: str
    ) -> None:
        fill(session)
        step(other, "a")
        store.delete_session("alpha")
        with nothing_written(store), pytest.raises(SessionDeletedError) as caught:
            CALLS[call](store, session)
        assert caught.value.session == "alpha"

    def test_factory_a_session_that_was_only_created_is_deleted_too(self, store: Store) -> None:
        store.create_session("alpha")
        assert store.delete_session("alpha") is True
        with pytest.raises(SessionDeletedError):
            store.create_session("alpha")
        assert list(store.sessions()) == []

    def test_factory_deleting_a_session_leaves_only_its_tombstone(
        self, store: Store, session: Session
    ) -> None:
        step(store.session("beta"), "a")
        before = contents_of(store).rows
        fill(session)
        store.delete_session("alpha")
        after = contents_of(store).rows
        for table in ("heads", "history", "leases", "queue", "receipts", "sessions"):
            assert after[table] == before[table], table
        assert len(after["tombstones"]) == len(before["tombstones"]) + 1
        assert [row for row in after["retention"] if b"alpha" in row.key + row.value] == []
        assert list(store.sessions_about("anna")) == []

    def test_factory_deleting_amid_writers_leaves_nothing_behind(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        owned = ("attachments", "heads", "history", "leases", "queue", "receipts", "sessions")

        def work(handle: Store, number: int) -> None:
            mine = handle.session("alpha")
            if number == 0:
                mine.wait(20, timeout_s=TIMEOUT_S)
                assert handle.delete_session("alpha") is True
                return
            calls: list[Callable[[str], object]] = [
                lambda name: step(mine, name, turn=name, label=name),
                lambda name: enqueue(mine, source_key=name),
                lambda name: mine.attachments.put(name.encode()),
                lambda name: mine.label(name),
            ]
            for n in range(100_000):
                calls[number % 4](f"{number}.{n}")

        answers = at_once(store, work)
        assert answers[0] is None
        assert {type(answer) for answer in answers[1:]} == {SessionDeletedError}
        rows = contents_of(store).rows
        assert {table: rows[table] for table in owned} == {table: [] for table in owned}

    def test_deleting_ends_the_lease_and_what_was_claimed_with_it(
        self, store: Store, session: Session
    ) -> None:
        enqueue(session)
        lease = hold(session)
        claim = take(session, lease)
        step(store.session("beta"), "a")
        session.commit(Commit(append=[message("a")], lease=lease))
        store.delete_session("alpha")
        for call in (
            lambda: session.renew_lease(lease, MINUTE_MS),
            lambda: session.queue.verify(claim),
            lambda: session.commit(Commit(lease=lease, completes=[claim])),
        ):
            with pytest.raises(SessionDeletedError):
                call()
