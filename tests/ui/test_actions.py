"""What the viewer changes with --write: each action does what its dialog says, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

import httpx

import casstore
from casstore.errors import InvalidInputError, SessionDeletedError
from casstore.ui.actions import ACTIONS, act
from tests.ui.serving import Running, serve


@pytest.fixture
def writing(own: Path) -> Iterator[Running]:
    with serve(own, write=True) as running:
        yield running


def post(running: Running, action: str, **given: str) -> httpx.Response:
    with running.client() as client:
        return client.post("/act", params={"action": action}, data=given,
                           headers={"origin": running.base})  # fmt: skip


def test_each_action_changes_the_store(writing: Running, own: Path) -> None:
    at = "strict-mode"
    assert post(writing, "fork", session=at, target="mine", at="5").headers["location"] == (
        "/session?id=mine"
    )
    assert post(writing, "fork", session=at, target="at-node", node="u1").status_code == 303
    assert post(writing, "label", session=at, name="good", at="5").status_code == 303
    assert post(writing, "tag", session=at, name="kept", at="5", note="n").status_code == 303
    assert post(writing, "rewind", session=at, at="5", expected="6").status_code == 303
    assert post(writing, "adopt", session="mine", other="warn-only").status_code == 303
    assert post(writing, "delete", session="rewrite", confirm="rewrite").status_code == 303
    with casstore.open(own) as store:
        session = store.session(at)
        assert store.session("mine").history().__next__().operation == "adopt"
        assert store.session("at-node").head().leaf == "u1"  # type: ignore[union-attr]
        assert session.entry("good").revision == 5
        pin = store.find_pin("kept")
        assert pin is not None
        assert (pin.digest, pin.note) == (session.entry(5).manifest, "n")
        assert (session.entry().operation, session.entry().rewound_to) == ("rewind", 5)
        with pytest.raises(SessionDeletedError):
            store.session("rewrite").head()
    assert post(writing, "unlabel", session=at, name="good").status_code == 303
    with casstore.open(own) as store, pytest.raises(casstore.errors.NotFoundError):
        store.session(at).entry("good")


@pytest.mark.parametrize(
    ("action", "given", "status"),
    [
        ("fork", {"session": "strict-mode", "target": ""}, 400),
        ("fork", {"session": "strict-mode", "target": "warn-only"}, 409),
        ("fork", {"session": "nope", "target": "x"}, 404),
        ("rewind", {"session": "strict-mode", "at": ""}, 400),
        ("rewind", {"session": "strict-mode", "at": "-5"}, 400),
        ("rewind", {"session": "strict-mode", "at": "5", "expected": "3"}, 409),
        ("rewind", {"session": "fix-parser", "at": "5"}, 409),
        ("adopt", {"session": "strict-mode", "other": "nope"}, 404),
        ("delete", {"session": "strict-mode", "confirm": "strict"}, 400),
        ("delete", {"session": "strict-mode"}, 400),
        ("erase", {"session": "strict-mode"}, 400),
    ],
)
def test_a_refused_action_says_why_and_changes_nothing(
    writing: Running, own: Path, action: str, given: dict[str, str], status: int
) -> None:
    with casstore.open(own) as store:
        before = [(info.meta.session, info.head) for info in store.sessions()]
    answer = post(writing, action, **given)
    assert answer.status_code == status
    assert 'class="card error"' in answer.text
    with casstore.open(own) as store:
        assert [(info.meta.session, info.head) for info in store.sessions()] == before


def test_a_page_of_another_site_cannot_act(writing: Running, own: Path) -> None:
    with writing.client() as client:
        given = {"action": "delete", "session": "rewrite", "confirm": "rewrite"}
        for headers in ({}, {"origin": "http://evil.example"}, {"origin": "null"}):
            assert client.post("/act", data=given, headers=headers).status_code == 403
        assert client.get("/act", params=given).status_code == 405
        cookieless = {"origin": writing.base}
        assert httpx.post(writing.base + "/act", data=given, headers=cookieless).status_code == 403
    with casstore.open(own) as store:
        assert store.session("rewrite").head() is not None


def test_a_page_shows_that_its_session_was_deleted(writing: Running) -> None:
    with (
        writing.client() as client,
        client.stream("GET", "/events", params={"session": "rewrite"}) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "event: hello"
        assert post(writing, "delete", session="rewrite", confirm="rewrite").status_code == 303
        assert [line for line in lines if line.startswith("event")] == ["event: gone"]


def test_the_pages_have_a_dialog_for_each_action(writing: Running) -> None:
    with writing.client() as client:
        page = client.get("/session", params={"id": "strict-mode", "at": "5"}).text
    for name in ACTIONS:
        if name != "unlabel":
            assert f'id="{name}-dialog"' in page
            assert f"action={name}" in page


def test_an_unknown_action_is_named(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store, pytest.raises(InvalidInputError, match="'burn'"):
        act(store, "burn", {})


def test_a_label_stays_if_its_removal_names_an_invalid_revision(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        session = store.session("s")
        session.append(casstore.NodeDraft("n", "hello"))
        session.label("good", 1)
        with pytest.raises(InvalidInputError, match="a revision must be a number, got 'last'"):
            act(store, "unlabel", {"session": "s", "name": "good", "at": "last"})
        assert session.entry("good").revision == 1
