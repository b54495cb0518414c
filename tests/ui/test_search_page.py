"""The search page: escaped snippets that lead to their places."""

from __future__ import annotations

from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

import casstore
from casstore import NodeDraft
from casstore.search import update
from tests.ui.serving import serve


def test_words_are_marked_and_lead_to_the_node_the_state_and_the_record(own: Path) -> None:
    with casstore.open(own) as store:
        draft = NodeDraft("n/1", "<b>needle</b> & more")
        store.session("a & b").append(draft, tool_state="a needle in the state")
        update(store)
    with serve(own) as running, running.client() as client:
        page = client.get("/search", params={"q": "needle"}).text
        assert "&lt;b&gt;<mark>needle</mark>&lt;/b&gt; &amp; more" in page
        assert "/session?id=a+%26+b&amp;node=n%2F1" in page
        assert "/session?id=a+%26+b&amp;parts=1" in page
        found = client.get("/session", params={"id": "a & b", "node": "n/1"})
        assert found.status_code == 200
        threads = client.get("/search", params={"q": "rome"}).text
        assert "/record?system=lg&amp;id=trip-to-rome" in threads


def test_a_viewer_that_does_not_write_says_how_to_make_the_index(own: Path) -> None:
    with serve(own) as running, running.client() as client:
        answer = client.get("/search", params={"q": "needle"})
        assert answer.status_code == 200
        assert "casstore search --rebuild" in answer.text
        assert not (own / "search.sqlite").exists()


def test_a_viewer_that_writes_searches_what_is_there_now(own: Path) -> None:
    with serve(own, write=True) as running, running.client() as client:
        assert "Nothing found." in client.get("/search", params={"q": "unheardof"}).text
        with casstore.open(own) as store:
            store.session("new").append("unheardof words")
        assert "<mark>unheardof</mark> words" in client.get("/search?q=unheardof").text
        assert "a letter or digit, got" in client.get("/search", params={"q": "?!"}).text
