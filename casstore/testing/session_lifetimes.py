"""The part of the session suite about subjects, expiry and protection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.engine.protocol import PutRow, Write
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.session import keys
from casstore.session.data import Protection
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    at_once,
    interrupted,
    nothing_written,
    step,
)

_LONG = "s" * 4999
# Each is a subject of its own, even if another begins with the same characters.
ODD_SUBJECTS = ["anna", "anna ", "Anna", "ann", "../anna", "安娜", "a\nb", _LONG, _LONG + "x"]


def about(store: Store, subject: str) -> list[str]:
    """The sessions of a subject."""
    return list(store.sessions_about(subject))


class LifetimeConformance(SessionFixtures):
    """A session records its subjects, when it may be deleted, and what must be kept."""

    # --- subjects ---------------------------------------------------------------------------

    def test_subjects_are_given_at_creation_and_later(self, store: Store) -> None:
        store.create_session("alpha", subjects=["berta", "anna", "anna"])
        session = store.session("alpha")
        assert session.subjects() == ("anna", "berta")
        assert session.add_subjects(["cleo"]) == ("anna", "berta", "cleo")
        assert (
            session.remove_subjects(["anna", "nobody"]) == ("berta", "cleo") == session.subjects()
        )
        assert [about(store, one) for one in ("anna", "berta", "cleo")] == [
            [],
            ["alpha"],
            ["alpha"],
        ]
        with nothing_written(store):
            assert session.add_subjects(["cleo"]) == ("berta", "cleo")
        assert session.remove_subjects(["berta", "cleo"]) == ()
        assert store.engine.scan_rows("retention") == []

    def test_subjects_are_added_to_a_session_that_is_there(
        self, store: Store, session: Session, other: Session
    ) -> None:
        step(session, "a")
        made = store.create_session("alpha", name="First", subjects=["anna"])
        assert store.create_session("alpha", name="Second", subjects=["berta"]) == made
        assert session.subjects() == ("anna", "berta")
        step(other, "a")
        assert other.subjects() == ()

    def test_subjects_find_their_sessions_and_no_others(self, store: Store) -> None:
        for number, subject in enumerate(ODD_SUBJECTS):
            store.create_session(f"s{number}", subjects=[subject, "all"])
        for number, subject in enumerate(ODD_SUBJECTS):
            assert about(store, subject) == [f"s{number}"]
        assert about(store, "all") == sorted(f"s{n}" for n in range(len(ODD_SUBJECTS)))
        long = "x" * 3000
        store.create_session(long, subjects=["anna"])
        assert about(store, "anna") == ["s0", long]

    def test_subjects_of_a_fork_are_those_of_its_source(
        self, store: Store, session: Session
    ) -> None:
        store.create_session("alpha", subjects=["anna", "berta"])
        step(session, "a")
        step(session, "b")
        store.fork("alpha", "same")
        store.fork("alpha", "earlier", at=1)
        store.fork("alpha", "other", subjects=["cleo"])
        store.fork("alpha", "nobody", subjects=[])
        for name, expected in {
            "same": ("anna", "berta"),
            "earlier": ("anna", "berta"),
            "other": ("cleo",),
            "nobody": (),
        }.items():
            assert store.session(name).subjects() == expected
        assert about(store, "anna") == ["alpha", "earlier", "same"]
        session.remove_subjects(["anna"])
        assert store.session("same").subjects() == ("anna", "berta")

    def test_subjects_given_while_a_fork_is_made_reach_the_fork(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        late = interrupted(store, before=lambda: session.add_subjects(["anna"]))
        late.fork("alpha", "fork")
        assert store.session("fork").subjects() == ("anna",)

    def test_subjects_given_at_the_same_time_are_all_kept(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        late = interrupted(store, before=lambda: session.add_subjects(["zoe"]))
        assert late.session("alpha").add_subjects(["anna"]) == ("anna", "zoe")
        late = interrupted(store, before=lambda: session.remove_subjects(["zoe"]))
        assert late.session("alpha").remove_subjects(["anna"]) == ()
        at_once(store, lambda handle, n: handle.session("alpha").add_subjects([f"subject {n}"]))
        assert session.subjects() == tuple(f"subject {n}" for n in range(8))

    def test_subjects_are_deleted_with_their_session(self, store: Store, session: Session) -> None:
        store.create_session("alpha", subjects=["anna"])
        store.delete_session("alpha")
        assert about(store, "anna") == []
        late = interrupted(store, before=lambda: store.delete_session("beta"))
        store.create_session("beta")
        with pytest.raises(SessionDeletedError):
            late.session("beta").add_subjects(["anna"])
        assert about(store, "anna") == []

    @pytest.mark.parametrize("bad", ["anna", [""], ["a\0b"], [1], [f"{n}" for n in range(1025)]])
    def test_subjects_that_are_invalid_are_refused(
        self, store: Store, session: Session, bad: Any
    ) -> None:
        step(session, "a")
        calls: list[Callable[[], object]] = [
            lambda: session.add_subjects(bad),
            lambda: store.create_session("new", subjects=bad),
            lambda: store.fork("alpha", "fork", subjects=bad),
        ]
        for call in calls:
            with nothing_written(store), pytest.raises(InvalidInputError):
                call()

    def test_subjects_of_a_session_that_is_not_there_are_refused(
        self, store: Store, session: Session
    ) -> None:
        for call in (session.subjects, lambda: session.add_subjects(["anna"])):
            with nothing_written(store), pytest.raises(SessionNotFoundError):
                call()

    # --- expiry -----------------------------------------------------------------------------

    def test_expiry_is_set_extended_and_cleared(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        store.create_session("alpha", ttl_ms=MINUTE_MS)
        assert session.expires_at_ms() == clock.now_ms + MINUTE_MS
        clock.now_ms += 10
        assert session.expire_in(MINUTE_MS) == clock.now_ms + MINUTE_MS == session.expires_at_ms()
        assert session.expire_in(0) == clock.now_ms
        assert session.expire_in(None) is None
        assert session.expires_at_ms() is None

    def test_expiry_alone_does_not_delete_the_session(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        store.create_session("alpha", ttl_ms=1)
        clock.now_ms += MINUTE_MS
        step(session, "a")
        assert [info.meta.session for info in store.sessions()] == ["alpha"]
        assert session.expires_at_ms() == clock.now_ms - MINUTE_MS + 1

    def test_expiry_is_not_set_by_creating_again(self, store: Store, session: Session) -> None:
        store.create_session("alpha")
        store.create_session("alpha", ttl_ms=MINUTE_MS)
        assert session.expires_at_ms() is None

    def test_expiry_is_not_inherited(self, store: Store, session: Session) -> None:
        store.create_session("alpha", ttl_ms=MINUTE_MS)
        step(session, "a")
        store.fork("alpha", "fork")
        assert store.session("fork").expires_at_ms() is None

    def test_expiry_needs_a_session_and_a_time(self, store: Store, session: Session) -> None:
        with pytest.raises(SessionNotFoundError):
            session.expire_in(MINUTE_MS)
        with pytest.raises(SessionNotFoundError):
            session.expires_at_ms()
        step(session, "a")
        for bad in (-1, 1.5, True, "1", 1 << 60):
            with nothing_written(store), pytest.raises(InvalidInputError):
                session.expire_in(bad)  # type: ignore[arg-type]
            with nothing_written(store), pytest.raises(InvalidInputError):
                store.create_session("beta", ttl_ms=bad)  # type: ignore[arg-type]

    def test_expiry_of_a_session_deleted_meanwhile_is_refused(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        late = interrupted(store, before=lambda: store.delete_session("alpha"))
        with pytest.raises(SessionDeletedError):
            late.session("alpha").expire_in(MINUTE_MS)
        assert [row for row in store.engine.scan_rows("retention") if b"alpha" in row.key] == []

    # --- protections ------------------------------------------------------------------------

    def test_protection_is_added_listed_and_removed(
        self, session: Session, clock: ManualClock
    ) -> None:
        for node in "abc":
            step(session, node, label=f"label {node}")
        now = clock.now_ms
        first = session.protect(1, by="run 1", ttl_ms=MINUTE_MS, note="waits for approval")
        assert first == Protection("alpha", 1, "run 1", now, now + MINUTE_MS, "waits for approval")
        second = session.protect("label b", by="run 2")
        third = session.protect(by="run 2")
        assert (second.revision, third.revision) == (2, 3)
        assert session.protections() == [first, second, third]
        clock.now_ms += MINUTE_MS
        assert session.protections() == [second, third]
        assert session.protections(lapsed=True) == [first, second, third]
        assert session.unprotect("run 2", 2) == 1
        assert session.unprotect("run 2") == 1
        assert session.unprotect("run 2") == 0
        assert session.protections(lapsed=True) == [first]

    def test_protection_given_again_has_the_latest_expiry(
        self, session: Session, clock: ManualClock
    ) -> None:
        step(session, "a")
        session.protect(by="run")
        clock.now_ms += 1
        assert [session.protect(by="run", ttl_ms=5)] == session.protections()

    def test_protection_of_a_missing_session_or_revision_is_refused(
        self, store: Store, session: Session
    ) -> None:
        with pytest.raises(SessionNotFoundError):
            session.protect(by="run")
        step(session, "a")
        with nothing_written(store):
            with pytest.raises(RevisionNotFoundError):
                session.protect(7, by="run")
            for bad in ({"by": ""}, {"by": "run", "ttl_ms": 0}, {"by": "run", "note": ""}):
                with pytest.raises(InvalidInputError):
                    session.protect(**bad)

    def test_protection_of_the_head_follows_a_concurrent_commit(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        late = interrupted(store, before=lambda: step(session, "b")).session("alpha")
        assert late.protect(1, by="run").revision == 1
        late = interrupted(store, before=lambda: step(session, "c")).session("alpha")
        assert late.protect(by="run").revision == 3

    def test_protection_that_cannot_be_read_is_an_error(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        session.protect(by="run")
        place = keys.protection(keys.session_key("alpha"), 1, "run")
        for damaged in (b"", b"\0" * 16, b"\0" * 16 + b"\x91\xc0"):
            store.engine.write(Write(rows=[PutRow(*place, damaged)]))
            with pytest.raises(CorruptionError):
                session.protections()

    def test_protection_does_not_stop_a_rewind(self, session: Session) -> None:
        step(session, "a")
        session.protect(by="run")
        step(session, "b")
        session.rewind(1)
        assert [one.revision for one in session.protections()] == [1]
