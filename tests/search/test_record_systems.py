"""Threads, transcripts and other entries of record systems are searched by what they hold now."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("claude_agent_sdk", reason="needs the extra: pip install '.[dev]'")

from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.langgraph import CasstoreSaver, CasstoreStore
from casstore.errors import InvalidInputError
from casstore.maintenance.systems import content_texts
from casstore.records.log import NewMessage, SessionLog
from casstore.search import update
from casstore.store import Store
from tests.adapters.langgraph.graphs import chat, on, say

MAIN: Any = {"project_key": "p/1", "session_id": "s"}
BELOW: Any = {**MAIN, "subpath": "subagents/a"}


def entries(store: Store, words: str, **options: Any) -> list[tuple[str | None, str | None]]:
    return [(hit.entry, hit.position) for hit in store.search(words, **options)]


def wrote(text: str, number: int) -> Any:
    return {
        "type": "user",
        "uuid": str(number),
        "timestamp": f"2026-01-0{number}T00:00:00Z",
        "gitBranch": "main",
        "message": {"role": "user", "content": [{"type": "text", "text": text}]},
    }


def test_threads_are_found_by_their_newest_messages_until_they_are_deleted(store: Store) -> None:
    saver = CasstoreSaver(store)
    graph = chat(saver)
    graph.invoke(say("a needle"), on("t1"))
    graph.invoke(say("something else"), on("t2"))
    [(entry, position)] = entries(store, '"a needle"')[:1]
    assert (entry, position) == ("langgraph:t1", "messages/0")
    graph.invoke(say("another needle"), on("t2"))
    found = entries(store, '"another needle"', kinds=["langgraph"])
    assert found[0][0] == "langgraph:t2"
    assert entries(store, "HumanMessage") == []
    saver.delete_thread("t2")
    assert entries(store, '"another needle"', fresh=False) == []
    assert entries(store, '"another needle"') == []
    assert entries(store, '"a needle"', kinds=["lg"])[0] == ("langgraph:t1", "messages/0")


def test_a_text_of_many_threads_is_indexed_once(store: Store) -> None:
    graph = chat(CasstoreSaver(store))
    for number in range(5):
        graph.invoke(say("the same needle"), on(f"t{number}"))
    before = update(store).texts
    graph.invoke(say("the same needle"), on("one more"))
    assert update(store).texts == before
    assert len(entries(store, '"same needle"', kinds=["langgraph"])) <= 2


def test_memory_items_are_found_by_their_current_content(store: Store) -> None:
    memory = CasstoreStore(store)
    memory.put(("users", "anna"), "likes", {"text": "needles"})
    assert entries(store, "needles") == [("langgraph-memory:users.anna.", "likes/text")]
    memory.put(("users", "anna"), "likes", {"text": "thread"})
    assert entries(store, "needles", fresh=False) == []
    assert entries(store, "needles") == []
    assert entries(store, "thread") == [("langgraph-memory:users.anna.", "likes/text")]


def test_transcripts_are_found_by_their_messages_and_times(store: Store) -> None:
    sessions = CasstoreSessionStore(store)
    asyncio.run(sessions.append(MAIN, [wrote("a needle", 1), wrote("hay", 2)]))
    asyncio.run(sessions.append(BELOW, [wrote("sub needle", 3)]))
    name = "claude:p%2F1/s"
    found = entries(store, "needle")
    assert sorted(found) == [(name, "0"), (name, "subagents/a/0")]
    assert entries(store, "main") == []
    # 2026-01-02
    assert entries(store, "needle", since=1_767_312_000_000) == [(name, "subagents/a/0")]
    asyncio.run(sessions.append(MAIN, [wrote("needle again", 4)]))
    assert len(entries(store, "needle")) == 3
    asyncio.run(sessions.delete(MAIN))
    assert entries(store, "needle", fresh=False) == []
    assert entries(store, "needle") == []


def test_messages_of_a_session_log_are_nodes(store: Store) -> None:
    log = SessionLog(store)
    log.create("chat")
    log.extend("chat", [NewMessage("user", "a needle")])
    [hit] = store.search("needle")
    assert (hit.kind, hit.session) == ("node", "chat")


def test_sessions_restrict_a_search_to_sessions(store: Store) -> None:
    chat(CasstoreSaver(store)).invoke(say("a needle"), on("t1"))
    store.session("s").append("a needle")
    assert [hit.session for hit in store.search("needle", sessions=["s"])] == ["s"]
    with pytest.raises(InvalidInputError, match="got 'claude'"):
        store.search("needle", kinds=["claude"])


def test_the_parts_of_a_content_are_its_list_items_and_single_values() -> None:
    content = {"": {"messages": [{"text": "a"}, "b"], "topic": "c"}, "inner": {"plan": {"x": 1}}}
    assert [(one.position, one.value) for one in content_texts(content)] == [
        ("messages/0", {"text": "a"}),
        ("messages/1", "b"),
        ("topic", "c"),
        ("inner/plan", {"x": 1}),
    ]
