"""LangGraph threads, LangGraph memory and Claude transcripts as record systems."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("claude_agent_sdk", reason="needs the extra: pip install '.[dev]'")

from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.claude.transcripts import Transcripts
from casstore.adapters.langgraph import CasstoreSaver, CasstoreStore
from casstore.adapters.langgraph.item_records import items_table
from casstore.adapters.langgraph.threads import Threads
from casstore.maintenance import systems
from casstore.maintenance.check import check
from casstore.maintenance.expiring import expire_rows
from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.adapters.langgraph.graphs import chat, on, say


@pytest.fixture
def filled(store: Store) -> Store:
    """Two threads, items in two namespaces, a transcript with that of a subagent."""
    graph = chat(CasstoreSaver(store))
    for thread in ("t/1", "t/2"):
        graph.invoke(say("hello"), on(thread))
    memory = CasstoreStore(store)
    memory.put(("users", "anna"), "language", {"is": "en"})
    memory.put(("users", "anna"), "brief", {"is": "short"}, ttl=0)
    memory.put(("users", "ben"), "language", {"is": "de"})
    sessions = CasstoreSessionStore(store)
    main: Any = {"project_key": "p/1", "session_id": "s"}
    entry: Any = {"type": "user", "uuid": "1", "message": {"role": "user", "content": "hi"}}
    later: Any = {**entry, "uuid": "2"}
    below: Any = {**main, "subpath": "subagents/a"}
    asyncio.run(sessions.append(main, [entry]))
    asyncio.run(sessions.append(below, [entry, later]))
    return store


def test_check_knows_every_adapter_table_and_finds_nothing(filled: Store) -> None:
    assert systems.names(filled.engine) == ["claude", "lg", "lgm"]
    report = check(filled, level="full")
    assert (report.sound, report.counts) == (True, {})


TITLE = "step 1; channels messages"


def test_threads_namespaces_and_transcripts_are_listed(filled: Store) -> None:
    before_ms = int(time.time() * 1000) - 600_000
    listed = {one.name: one.entries(filled) for one in systems.held_by(filled).systems}
    assert {name: [(one.id, one.title) for one in found] for name, found in listed.items()} == {
        "claude": [("p%2F1/s", "hi (3 entries in 2 transcripts)")],
        "lg": [("t/1", TITLE), ("t/2", TITLE)],
        "lgm": [
            ("users.anna.", "2 items in users.anna"),
            ("users.ben.", "1 item in users.ben"),
        ],
    }
    for entry in [one for found in listed.values() for one in found]:
        assert entry.size_bytes > 0
        assert entry.changed_at_ms is not None
        assert entry.changed_at_ms > before_ms


def test_expire_rows_removes_expired_items(filled: Store) -> None:
    assert expire_rows(filled).records == 1
    assert expire_rows(filled).records == 0
    assert [one.key[1] for one in items_table(filled).scan()] == ["language", "language"]


@pytest.mark.parametrize("system", ["lg", "lgm", "claude"])
def test_a_record_that_cannot_be_decoded_is_found(filled: Store, system: str) -> None:
    tables: dict[str, Table] = {
        "lg": Threads(filled).checkpoints,
        "lgm": items_table(filled),
        "claude": Transcripts(filled).heads,
    }
    table = tables[system]
    draft = Draft(filled)
    draft.put(table, next(table.scan()).key, 5)
    draft.commit()
    report = check(filled)
    assert (report.sound, report.counts) == (False, {"row_malformed": 1})
