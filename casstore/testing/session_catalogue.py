"""The part of the session suite about creating, naming and listing sessions."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.errors import InvalidInputError, SessionNotFoundError
from casstore.session.data import (
    Hidden,
    SessionInfo,
    SessionMeta,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    SessionFixtures,
    batch_ids,
    enqueue,
    fill,
    hold,
    message,
    nothing_written,
    path,
    step,
    take,
)

_LONG = "s" * 4999
ODD_IDS = ["../weird/session", "会话 é", " ", "a\nb", "/", "con", "0", _LONG, _LONG + "x"]
BAD_IDS = ["", "\x00", "a\x00b", "\ud800"]


class CatalogueConformance(SessionFixtures):
    """Any ids distinguish sessions; a session is created once, and a deleted one never returns."""

    # --- made -----------------------------------------------------------------------------

    def test_factory_creates_once_and_never_overwrites(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        made = store.create_session(
            "alpha",
            name="My session",
            model="large",
            cwd="/work",
            parent="root",
            cause={"tool_call": "call-1"},
            extra={"colour": "red"},
        )
        assert made == SessionMeta(
            "alpha",
            "My session",
            clock.now_ms,
            "large",
            "/work",
            "root",
            {"tool_call": "call-1"},
            {"colour": "red"},
        )
        clock.now_ms += 10
        with nothing_written(store):
            assert store.create_session("alpha", name="Another", model="small") == made
        assert session.meta() == made
        assert session.head() is None
        assert session.info() == SessionInfo(made, None, None, 0)

    def test_factory_a_session_handle_writes_nothing(self, store: Store) -> None:
        with nothing_written(store):
            for name in ("new", *ODD_IDS):
                assert store.session(name).id == name
        assert list(store.sessions()) == []

    def test_factory_a_session_may_begin_with_its_first_commit(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        with pytest.raises(SessionNotFoundError) as caught:
            session.meta()
        assert caught.value.session == "alpha"
        step(session, "a")
        meta = session.meta()
        assert (meta.session, meta.created_at_ms, meta.parent) == ("alpha", clock.now_ms, None)
        assert [info.meta for info in store.sessions()] == [meta]

    def test_factory_creating_does_not_change_a_session_that_has_commits(
        self, store: Store, session: Session
    ) -> None:
        step(session, "a")
        assert store.create_session("alpha", model="large").session == "alpha"
        assert path(session) == ["a"]
        assert len(list(store.sessions())) == 1

    def test_factory_a_session_is_renamed_and_keeps_its_id(
        self, store: Store, session: Session
    ) -> None:
        made = store.create_session("alpha", name="Old", extra=[1])
        assert session.rename("New") == session.meta() == made._replace(name="New")
        changed = session.update_meta(
            model="small", cwd="/", parent="root", cause=1, extra={"a": 2}
        )
        assert (
            changed
            == session.meta()
            == SessionMeta("alpha", "New", made.created_at_ms, "small", "/", "root", 1, {"a": 2})
        )
        assert session.update_meta(cwd=None).cwd is None
        assert [info.meta.name for info in store.sessions()] == ["New"]

    def test_factory_a_missing_session_has_no_data(self, session: Session) -> None:
        for call in (session.meta, session.info, lambda: session.rename("name")):
            with pytest.raises(SessionNotFoundError):
                call()

    @pytest.mark.parametrize("created", [False, True])
    def test_factory_a_session_without_commits_reads_as_empty(
        self, store: Store, session: Session, created: bool
    ) -> None:
        if created:
            store.create_session("alpha")
        assert session.head() is None
        assert session.load() is None
        assert session.load(scope="full") is None
        assert session.node("a") is None
        assert list(session.nodes()) == list(session.nodes("full")) == []
        assert (session.usage(), list(session.history())) == ((), [])
        assert session.tombstone(["a"]) == Hidden((), (), ("a",))
        assert session.unlabel("mark") is False
        for call in (
            session.checkpoint,
            session.entry,
            lambda: session.label("mark"),
            lambda: session.rewind(1),
            lambda: store.fork("alpha", "beta"),
        ):
            with pytest.raises(SessionNotFoundError) as caught:
                call()
            assert caught.value.session == "alpha"

    # --- ids ------------------------------------------------------------------------------

    @pytest.mark.parametrize("odd", ODD_IDS, ids=lambda odd: ascii(odd)[:20])
    def test_factory_takes_any_id(self, store: Store, odd: str) -> None:
        session = store.session(odd)
        fill(session)
        step(session, "b")
        assert path(session) == ["b"]
        assert session.entry("mark").session == odd
        assert take(session, hold(session)).session == odd
        assert [info.meta.session for info in store.sessions()] == [odd]
        assert store.fork(odd, odd + "2").origin is not None
        assert {info.meta.session for info in store.sessions()} == {odd, odd + "2"}
        assert store.delete_session(odd) is True
        assert path(store.session(odd + "2")) == ["b"]

    @pytest.mark.parametrize("bad", BAD_IDS, ids=ascii)
    def test_factory_refuses_invalid_ids(self, store: Store, session: Session, bad: str) -> None:
        step(session, "a")
        with nothing_written(store):
            for call in (
                lambda: store.session(bad),
                lambda: store.create_session(bad),
                lambda: store.delete_session(bad),
                lambda: store.fork("alpha", bad),
                lambda: store.fork(bad, "beta"),
            ):
                with pytest.raises(InvalidInputError):
                    call()

    def test_factory_ids_with_a_common_prefix_are_independent(self, store: Store) -> None:
        names = ["s", "s/", "s1", "ss", "s ", "sé", "s\x01", "S", _LONG, _LONG + "x", _LONG + "y"]
        sessions = [store.session(name) for name in names]
        for session in sessions:
            fill(session)
            step(session, message(f"b{session.id}"), turn="second")
        while sessions:
            assert {info.meta.session for info in store.sessions()} == {s.id for s in sessions}
            for session in sessions:
                assert path(session) == [f"b{session.id}"]
                assert [entry.session for entry in session.history()] == [session.id] * 2
                assert batch_ids(session.queue.batches()) == ["batch"]
                assert [found.session for found in session.attachments.list()] == [session.id]
            store.delete_session(sessions.pop(0).id)

    def test_factory_session_ids_and_inner_ids_with_equal_concatenations_stay_apart(
        self, store: Store
    ) -> None:
        pairs = [("a", "bc"), ("ab", "c"), ("abc", "d"), ("a", "b")]
        for name, inner in pairs:
            session = store.session(name)
            session.attachments.intend(inner, uri=f"{name}:{inner}")
            step(session, inner, turn=inner, label=inner)
            enqueue(session, source_key=inner, batch_id=f"{name}:{inner}")
        for name, inner in pairs:
            session = store.session(name)
            found = session.attachments.find(inner)
            assert found is not None
            assert (found.session, found.uri) == (name, f"{name}:{inner}")
            assert step(session, inner, turn=inner, label=inner).replayed
            assert session.entry(inner).session == name
            assert enqueue(session, source_key=inner).id == f"{name}:{inner}"
        assert store.session("ab").attachments.find("bc") is None

    # --- listed ---------------------------------------------------------------------------

    def test_sessions_are_listed_in_order_of_id(self, store: Store) -> None:
        names = ["b", "a", "é", "B", "a1", "a/", "𝄞", "\uffff", "z" * 300]
        for number, name in enumerate(names):
            if number % 2:
                store.create_session(name)
            else:
                step(store.session(name), "n")
        ordered = sorted(names, key=str.encode)
        listed = list(store.sessions())
        assert [info.meta.session for info in listed] == ordered
        assert listed == [store.session(name).info() for name in ordered]

    def test_sessions_are_listed_in_parts(self, store: Store) -> None:
        names = [f"{letter}{n:02}" for letter in "abc" for n in range(50)]
        for name in names:
            store.create_session(name)

        def listed(**limits: Any) -> list[str]:
            return [info.meta.session for info in store.sessions(**limits)]

        assert listed() == names
        assert listed(prefix="b") == names[50:100]
        assert listed(prefix="b1", limit=3) == ["b10", "b11", "b12"]
        assert listed(after="a48", limit=2) == ["a49", "b00"]
        assert listed(after="b1", prefix="b1") == listed(prefix="b1")
        assert listed(after="b15", prefix="b1") == ["b16", "b17", "b18", "b19"]
        assert listed(after="c49") == listed(prefix="d") == listed(limit=0) == []

    def test_sessions_are_listed_one_by_one_whatever_their_ids(self, store: Store) -> None:
        names = {*ODD_IDS, "a", "ab", _LONG + "y", "s" * 240, "s" * 241}
        for name in names:
            store.create_session(name)
        seen: list[str] = []
        after: str | None = None
        while page := list(store.sessions(after=after, limit=1)):
            after = page[0].meta.session
            assert after not in seen, "the listing goes in circles"
            seen.append(after)
        assert set(seen) == names
        long = {info.meta.session for info in store.sessions(prefix=_LONG)}
        assert long == {_LONG, _LONG + "x", _LONG + "y"}
