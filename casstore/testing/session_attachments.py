"""The part of the session suite about attachments: intent, bytes, commit; or condemned."""

from __future__ import annotations

import pytest

from casstore.errors import (
    AttachmentNotFoundError,
    AttachmentStateError,
    DuplicateNodeError,
    ObjectNotFoundError,
    SessionDeletedError,
)
from casstore.format.digest import Digest
from casstore.session.data import Attachment
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import SessionFixtures, nothing_written, step


def _find(session: Session, attachment_id: str) -> Attachment:
    found = session.attachments.find(attachment_id)
    assert found is not None, f"no attachment {attachment_id!r}"
    return found


def _names(attachments: list[Attachment]) -> list[str]:
    return [attachment.id for attachment in attachments]


class AttachmentConformance(SessionFixtures):
    """Bytes need an intent, condemned attachments cannot be committed, deletions are recorded."""

    def test_attachment_wal_an_intent_describes_the_attachment(
        self, session: Session, clock: ManualClock
    ) -> None:
        intent = session.attachments.intend("a", uri="s3://bucket/a", owner="turn-1")
        assert intent == Attachment(
            "a", "alpha", "s3://bucket/a", None, "turn-1", "intent", clock.now_ms, None
        )
        assert session.attachments.find("a") == intent
        assert session.attachments.find("b") is None
        assert session.head() is None

    def test_attachment_wal_a_commit_marks_its_attachments_as_committed(
        self, session: Session, clock: ManualClock
    ) -> None:
        begun_ms = clock.now_ms
        for name in ("one", "two", "orphan"):
            session.attachments.intend(name, uri=f"file:///{name}")
        clock.now_ms += 10
        step(session, "a", attachments=["one", "two"])
        for name in ("one", "two"):
            found = _find(session, name)
            assert (found.state, found.intent_at_ms) == ("committed", begun_ms)
            assert found.committed_at_ms == clock.now_ms
        assert _names(session.attachments.uncommitted(older_than_ms=clock.now_ms)) == ["orphan"]
        assert session.attachments.forget("orphan") is True
        assert session.attachments.uncommitted(older_than_ms=clock.now_ms) == []

    def test_attachment_wal_a_repeated_commit_keeps_the_first_commit_time(
        self, session: Session, clock: ManualClock
    ) -> None:
        session.attachments.intend("a", uri="file:///a")
        [first] = session.attachments.commit(["a"])
        assert first.committed_at_ms == clock.now_ms
        clock.now_ms += 10
        assert session.attachments.commit(["a"]) == (first,)
        step(session, "n", attachments=["a"])
        assert _find(session, "a") == first
        assert session.attachments.intend("a", uri="file:///elsewhere") == first

    def test_attachment_wal_attachments_commit_is_all_or_nothing(
        self, store: Store, session: Session
    ) -> None:
        for name in ("b", "a"):
            session.attachments.intend(name, uri=f"file:///{name}")
        with nothing_written(store), pytest.raises(AttachmentNotFoundError) as caught:
            session.attachments.commit(["a", "unknown"])
        assert (caught.value.session, caught.value.attachment) == ("alpha", "unknown")
        assert _names(list(session.attachments.commit(["b", "a"]))) == ["b", "a"]

    def test_attachment_wal_a_failed_commit_stamps_nothing(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        session.attachments.intend("picture", uri="file:///picture")
        with nothing_written(store), pytest.raises(DuplicateNodeError):
            step(session, "a", attachments=["picture"])
        assert _find(session, "picture").state == "intent"

    def test_attachment_wal_bytes_are_put_under_their_digest(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        content = b"\x89PNG" + bytes(range(256)) * 10
        digest = Digest.of_blob(content)
        attachment = session.attachments.put(content, owner="turn-1")
        assert attachment == Attachment(
            digest.hex(), "alpha", None, digest, "turn-1", "intent", clock.now_ms, None
        )
        assert store.get_blob(digest) == content
        step(session, "a", attachments=[attachment.id])
        assert _find(session, attachment.id).state == "committed"
        assert session.attachments.put(content) == _find(session, attachment.id)

    def test_attachment_wal_large_bytes_are_put_too(self, store: Store, session: Session) -> None:
        content = bytes(range(256)) * 40_000
        attachment = session.attachments.put(content)
        assert attachment.digest is not None
        assert store.get_blob(attachment.digest) == content

    def test_attachment_wal_an_intent_names_no_blob_that_is_not_there(
        self, store: Store, session: Session
    ) -> None:
        """A row that refers to a missing object would stop every collection."""
        with nothing_written(store), pytest.raises(ObjectNotFoundError):
            session.attachments.intend("file", digest=Digest.of_blob(b"never put"))
        blob = store.put_blob(b"put")
        assert session.attachments.intend("file", digest=blob).digest == blob

    def test_attachment_wal_put_to_a_deleted_session_stores_no_bytes(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        store.delete_session("alpha")
        with nothing_written(store), pytest.raises(SessionDeletedError):
            session.attachments.put(b"too late")
        assert Digest.of_blob(b"too late") not in store

    def test_attachment_wal_uncommitted_are_listed_by_age(
        self, session: Session, clock: ManualClock
    ) -> None:
        begun_ms = clock.now_ms
        for name in ("c", "b", "a", "d"):
            session.attachments.intend(name, uri=f"file:///{name}")
            clock.now_ms += 10
        session.attachments.commit(["b"])
        session.attachments.condemn("c")
        ages = [
            _names(session.attachments.uncommitted(older_than_ms=begun_ms + after_ms))
            for after_ms in (-1, 0, 19, 20, 30)
        ]
        assert ages == [[], ["c"], ["c"], ["c", "a"], ["c", "a", "d"]]

    def test_attachment_wal_lists_are_by_id_and_by_state(self, session: Session) -> None:
        for name in ("c", "a", "d", "b"):
            session.attachments.intend(name, uri=f"file:///{name}")
        session.attachments.commit(["d"])
        session.attachments.condemn("b")
        assert _names(session.attachments.list()) == ["a", "b", "c", "d"]
        states = {"intent": ["a", "c"], "committed": ["d"], "condemned": ["b"]}
        for state, names in states.items():
            assert _names(session.attachments.list(state=state)) == names

    def test_attachment_wal_forget_removes_announced_and_condemned_attachments(
        self, store: Store, session: Session
    ) -> None:
        session.attachments.intend("intent", uri="file:///intent")
        session.attachments.intend("condemned", uri="file:///condemned")
        session.attachments.condemn("condemned")
        for name in ("intent", "condemned"):
            assert session.attachments.forget(name) is True
            assert session.attachments.find(name) is None
        with nothing_written(store):
            assert session.attachments.forget("intent") is False

    # --- condemned --------------------------------------------------------------------------

    def test_a_condemned_attachment_cannot_be_committed(
        self, store: Store, session: Session
    ) -> None:
        intent = session.attachments.intend("a", uri="file:///a")
        condemned = session.attachments.condemn("a")
        assert condemned == intent._replace(state="condemned")
        assert session.attachments.condemn("a") == condemned
        with nothing_written(store):
            for use in (
                lambda: step(session, "n", attachments=["a"]),
                lambda: session.attachments.commit(["a"]),
                lambda: session.attachments.intend("a", uri="file:///a"),
            ):
                with pytest.raises(AttachmentStateError) as caught:
                    use()
                error = caught.value
                assert (error.attachment, error.state) == ("a", "condemned")

    def test_a_condemned_and_forgotten_attachment_may_be_announced_again(
        self, session: Session
    ) -> None:
        session.attachments.intend("a", uri="file:///a")
        session.attachments.condemn("a")
        session.attachments.forget("a")
        assert session.attachments.intend("a", uri="file:///a").state == "intent"
        step(session, "n", attachments=["a"])

    def test_a_committed_attachment_cannot_be_condemned(
        self, store: Store, session: Session
    ) -> None:
        session.attachments.intend("a", uri="file:///a")
        session.attachments.commit(["a"])
        with nothing_written(store), pytest.raises(AttachmentStateError) as caught:
            session.attachments.condemn("a")
        assert caught.value.state == "committed"

    def test_an_unknown_attachment_cannot_be_condemned(self, session: Session) -> None:
        with pytest.raises(AttachmentNotFoundError):
            session.attachments.condemn("unknown")

    # --- faults that must not come along ------------------------------------------------------

    def test_fault_12_each_session_has_its_own_record_of_the_same_bytes(
        self, store: Store, session: Session, other: Session
    ) -> None:
        mine, theirs = session.attachments.put(b"shared"), other.attachments.put(b"shared")
        assert (mine.id, mine.session, theirs.session) == (theirs.id, "alpha", "beta")
        session.attachments.commit([mine.id])
        assert _find(other, theirs.id) == theirs
        assert other.attachments.forget(theirs.id) is True
        assert _find(session, mine.id).state == "committed"
        assert store.get_blob(Digest.of_blob(b"shared")) == b"shared"

    def test_fault_12_a_second_intent_refreshes_the_first(
        self, session: Session, clock: ManualClock
    ) -> None:
        session.attachments.intend("a", uri="file:///a")
        clock.now_ms += 10
        assert session.attachments.intend("a", uri="file:///a").intent_at_ms == clock.now_ms
        assert session.attachments.uncommitted(older_than_ms=clock.now_ms - 1) == []
        assert len(session.attachments.list()) == 1

    def test_fault_12_what_is_committed_cannot_be_forgotten(
        self, store: Store, session: Session
    ) -> None:
        session.attachments.intend("a", uri="file:///a")
        step(session, "n", attachments=["a"])
        with nothing_written(store), pytest.raises(AttachmentStateError):
            session.attachments.forget("a")
        assert _find(session, "a").state == "committed"
