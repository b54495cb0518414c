"""The part of the session suite about a session's title for a picker, a list to choose from."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.session.data import (
    NodeDraft,
)
from casstore.session.session import Session
from casstore.store import Store
from casstore.testing.session_fixtures import (
    SessionFixtures,
    counted,
    grow_branches,
    grow_long,
    message,
    step,
)


def _pick(session: Session) -> tuple[str | None, int]:
    info = session.info()
    return info.first_user_message, info.user_message_count


class PickerConformance(SessionFixtures):
    """A session's title is the first user message on its active path."""

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
    def test_picker_skips_messages_of_other_roles(self, session: Session, payload: Any) -> None:
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
        session.rewind(1)
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
