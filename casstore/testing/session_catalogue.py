"""The part of the session suite about sessions as such: made, named, listed and deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.errors import InvalidInputError, SessionDeletedError, SessionNotFoundError
from casstore.session.data import (
    UNFENCED,
    Claim,
    Commit,
    Lease,
    NodeDraft,
    SessionInfo,
    SessionMeta,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.engine_fixtures import ManualClock
from casstore.testing.session_fixtures import (
    MINUTE_MS,
    SessionFixtures,
    batch_ids,
    contents_of,
    counted,
    enqueue,
    grow_branches,
    grow_long,
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

_LEASE = Lease("alpha", "worker", b"token", 1, 0, 2**50)
_CLAIM = Claim("claim", "alpha", 1, ())

# Everything that can be asked of a session by its id.
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
    "rewind": lambda _, session: session.rewind(1, lease=UNFENCED),
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
    "create_session": lambda store, _: store.create_session("alpha"),
    "fork from": lambda store, _: store.fork("alpha", "new"),
    "fork to": lambda store, _: store.fork("beta", "alpha"),
    "compare": lambda store, _: store.compare("alpha", "beta"),
}


def _fill(session: Session) -> None:
    """Leave something of the session in every place where there can be something."""
    step(session, "a", turn="turn", label="mark")
    session.tombstone(["a"])
    enqueue(session, source_key="key", batch_id="batch")
    session.attachments.intend("file", uri="file:///file")
    session.release_lease(hold(session))


def _pick(session: Session) -> tuple[str | None, int]:
    info = session.info()
    return info.first_user_message, info.user_message_count


class CatalogueConformance(SessionFixtures):
    """Sessions are told apart by any id, made once, and never come back."""

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

    def test_factory_a_handle_touches_nothing(self, store: Store) -> None:
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

    def test_factory_nothing_is_known_of_a_session_that_is_not(self, session: Session) -> None:
        for call in (session.meta, session.info, lambda: session.rename("name")):
            with pytest.raises(SessionNotFoundError):
                call()

    @pytest.mark.parametrize("created", [False, True])
    def test_factory_there_is_nothing_to_read_before_the_first_commit(
        self, store: Store, session: Session, created: bool
    ) -> None:
        if created:
            store.create_session("alpha")
        assert session.head() is None
        assert session.load() is None
        assert session.load(scope="full") is None
        for call in (
            session.nodes,
            session.checkpoint,
            session.usage,
            session.entry,
            lambda: list(session.history()),
            lambda: session.node("a"),
            lambda: session.tombstone(["a"]),
            lambda: session.rewind(1, lease=UNFENCED),
            lambda: store.fork("alpha", "beta"),
        ):
            with pytest.raises(SessionNotFoundError) as caught:
                call()
            assert caught.value.session == "alpha"

    # --- ids ------------------------------------------------------------------------------

    @pytest.mark.parametrize("odd", ODD_IDS, ids=lambda odd: ascii(odd)[:20])
    def test_factory_takes_any_id(self, store: Store, odd: str) -> None:
        session = store.session(odd)
        _fill(session)
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
    def test_factory_refuses_what_is_no_id(self, store: Store, session: Session, bad: str) -> None:
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

    def test_factory_ids_that_begin_alike_are_strangers(self, store: Store) -> None:
        names = ["s", "s/", "s1", "ss", "s ", "sé", "s\x01", "S", _LONG, _LONG + "x", _LONG + "y"]
        sessions = [store.session(name) for name in names]
        for session in sessions:
            _fill(session)
            step(session, message(f"b{session.id}"), turn="second")
        while sessions:
            assert {info.meta.session for info in store.sessions()} == {s.id for s in sessions}
            for session in sessions:
                assert path(session) == [f"b{session.id}"]
                assert [entry.session for entry in session.history()] == [session.id] * 2
                assert batch_ids(session.queue.batches()) == ["batch"]
                assert [found.session for found in session.attachments.list()] == [session.id]
            store.delete_session(sessions.pop(0).id)

    def test_factory_two_ids_in_a_row_are_not_one(self, store: Store) -> None:
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

    # --- picked ---------------------------------------------------------------------------

    def test_picker_shows_the_first_user_message_and_where_it_was(
        self, store: Store, session: Session
    ) -> None:
        store.create_session("alpha", cwd="/work", parent="root")
        step(session, message("s", "be kind", role="system"), message("a", "hello"))
        step(session, message("b", "hi", role="assistant"), message("c", "bye"))
        info = session.info()
        assert (info.first_user_message, info.user_message_count) == ("hello", 2)
        assert (info.meta.cwd, info.meta.parent, info.head) == ("/work", "root", session.head())
        assert list(store.sessions()) == [info]

    @pytest.mark.parametrize(
        ("payload", "shown"),
        [
            ({"role": "user", "text": "hello"}, "hello"),
            ({"role": "user", "content": "hello"}, "hello"),
            ({"role": "user", "content": [{"type": "text", "text": "hello"}]}, "hello"),
            ({"role": "user", "parts": [{"kind": "text", "text": "hello"}]}, "hello"),
            ({"role": "user", "content": [{"type": "image"}, {"text": "hello"}]}, "hello"),
            ({"message": {"role": "user", "content": "hello"}}, "hello"),
            ({"role": "user", "content": [{"type": "image", "data": b""}]}, "[Image attached]"),
            ({"role": "user", "parts": [{"kind": "image"}]}, "[Image attached]"),
            ({"role": "user", "content": [{"type": "image_url"}]}, "[Image attached]"),
            ({"role": "user", "content": [{"type": "input_image"}]}, "[Image attached]"),
            ({"role": "user", "type": "image"}, "[Image attached]"),
        ],
        ids=str,
    )
    def test_picker_finds_the_text_of_a_message(
        self, session: Session, payload: Any, shown: str
    ) -> None:
        step(session, NodeDraft("a", payload), message("b", "later"))
        assert _pick(session) == (shown, 2)

    @pytest.mark.parametrize(
        "payload",
        [
            {"role": "assistant", "text": "hello"},
            {"role": "user", "content": [{"type": "tool_result", "content": "done"}]},
            {"role": "user", "content": [{"type": "tool_result"}, {"type": "tool_result"}]},
            {"plugin": "notes", "text": "hello"},
            "user",
            None,
        ],
        ids=str,
    )
    def test_picker_passes_over_what_no_user_said(self, session: Session, payload: Any) -> None:
        step(session, NodeDraft("a", payload))
        assert _pick(session) == (None, 0)
        step(session, message("b", "hello"))
        assert _pick(session) == ("hello", 1)

    def test_picker_shows_nothing_of_a_session_without_messages(self, session: Session) -> None:
        step(session)
        assert _pick(session) == (None, 0)

    def test_fault_14_the_picker_counts_the_active_path_alone(self, session: Session) -> None:
        grow_branches(session)
        assert _pick(session) == ("this is a", 3)
        step(session, leaf="b")
        assert _pick(session) == ("this is a", 2)
        step(session, message("new", parent=None))
        assert _pick(session) == ("this is new", 1)
        step(session, leaf=None)
        assert _pick(session) == (None, 0)
        session.rewind(1, lease=UNFENCED)
        assert _pick(session) == ("this is a", 3)

    def test_fault_14_the_picker_does_not_read_the_graph(
        self, store: Store, session: Session
    ) -> None:
        total = grow_long(session)
        reader, counter = counted(session, store)
        assert reader.info().user_message_count == 600
        assert counter.bytes_read < total / 10

    def test_picker_does_not_show_what_is_hidden(self, session: Session) -> None:
        step(session, message("a", "a secret"), message("b", "hello"))
        session.tombstone(["a"])
        assert _pick(session) == ("hello", 1)

    # --- deleted --------------------------------------------------------------------------

    def test_factory_deletes_once(self, store: Store, session: Session, other: Session) -> None:
        _fill(session)
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
        _fill(session)
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

    def test_factory_deleting_leaves_little_more_than_the_memory_of_it(
        self, store: Store, session: Session
    ) -> None:
        step(store.session("beta"), "a")
        before = contents_of(store).rows
        _fill(session)
        store.delete_session("alpha")
        after = contents_of(store).rows
        for table in ("heads", "history", "leases", "queue", "receipts", "sessions"):
            assert after[table] == before[table], table
        assert len(after["tombstones"]) == len(before["tombstones"]) + 1

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
