"""Records on the command line: listed with sessions, shown, logged and compared by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.checkpoint", reason="needs casstore[langgraph]")
pytest.importorskip("claude_agent_sdk", reason="needs casstore[claude]")

from langgraph.checkpoint.base import empty_checkpoint

import casstore
from casstore import Commit, NodeDraft
from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.langgraph import CasstoreSaver
from casstore.records.log import SessionLog
from casstore.records.runs import Runs
from casstore.session.records import Draft, Table
from tests.cli.running import run

NOT_REGISTERED = "no installed package registers it"
CLAUDE = "claude:project/11111111-1111-4111-8111-111111111111"


def put_checkpoint(saver: Any, thread: str, step: int, config: Any, **channels: Any) -> Any:
    """One checkpoint of a thread, with a new version for each channel."""
    checkpoint = empty_checkpoint()
    checkpoint["ts"] = f"2026-11-18T07:00:{step:02}+00:00"
    checkpoint["channel_values"] = {"total": 0, **channels}
    versions = dict.fromkeys(channels, f"{step:032}.0")
    checkpoint["channel_versions"] = {"total": f"{0:032}.0", **versions}
    config = config or {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
    metadata = {"source": "loop", "step": step, "parents": {}}
    return saver.put(config, checkpoint, metadata, versions)


@pytest.fixture
def place(tmp_path: Path) -> str:
    """A store with a session, a LangGraph thread, a transcript, a log, runs and unknown rows."""
    path = tmp_path / "store"
    with casstore.open(path) as store:
        store.session("agent").commit(Commit(append=[NodeDraft("n", "hello")]))
        log = SessionLog(store)
        log.create("chat 1")
        log.create("chat 2")
        Runs(store).create_thread("t", "helper")
        saver = CasstoreSaver(store)
        config = put_checkpoint(saver, "t0", 1, None, messages=["hello"])
        put_checkpoint(saver, "t0", 2, config, messages=["hello", "there"])
        put_checkpoint(saver, "t1", 1, None, messages=["hello"])
        entries: list[Any] = [
            {"type": "user", "uuid": f"u{at}", "timestamp": f"2026-11-18T07:00:0{at}Z",
             "message": {"role": "user", "content": f"question {at}"}}
            for at in range(3)
        ]  # fmt: skip
        project, session = CLAUDE.removeprefix("claude:").split("/")
        key: Any = {"project_key": project, "session_id": session}
        asyncio.run(CasstoreSessionStore(store).append(key, entries))
        draft = Draft(store)
        draft.put(Table(store, "notes.pages", 1), ("anna",), "hello")
        draft.commit()
    return str(path)


def test_everything_in_a_store_is_listed(place: str) -> None:
    listed = run("ls", "--json", store=place).json
    assert {"agent"} <= {one["id"] for one in listed["sessions"]}
    entries = {one["name"]: one for one in listed["entries"]}
    assert {"langgraph:t0", "langgraph:t1", CLAUDE, "log:chat 1", "runs:t"} <= set(entries)
    thread = entries["langgraph:t0"]
    assert (thread["kind"], thread["id"]) == ("langgraph", "t0")
    assert thread["changed_at"] == "2026-11-18T07:00:02.000Z"
    assert thread["size_bytes"] > 0
    text = run("sessions", store=place).out
    assert text.splitlines()[0].split()[:2] == ["name", "kind"]
    [line] = [line for line in text.splitlines() if line.startswith("langgraph:t0 ")]
    assert "2026-11-18 07:00" in line
    assert " B" in line or "KiB" in line
    threads = run("sessions", "langgraph:", "--json", store=place).json
    assert [one["id"] for one in threads["entries"]] == ["t0", "t1"]
    assert threads["sessions"] == []


def test_a_long_list_continues_behind_a_name(place: str) -> None:
    everything = run("sessions", "--json", store=place).json
    names = [one["id"] for one in everything["sessions"]]
    names += [one["name"] for one in everything["entries"]]
    seen: list[str] = []
    for _ in names:
        more = ("--after", seen[-1]) if seen else ()
        page = run("sessions", "--limit", "2", *more, "--json", store=place).json
        seen += [one["id"] for one in page["sessions"]]
        seen += [one["name"] for one in page["entries"]]
        if not page["more"]:
            break
    assert seen == names
    recent = run("sessions", "--recent", "--json", store=place).json
    assert len(recent["entries"]) == len(everything["entries"])
    assert "--after" in run("sessions", "--limit", "1", store=place).err


def test_a_thread_logs_its_checkpoints(place: str) -> None:
    steps = run("log", "langgraph:t0", "--json", store=place).json["steps"]
    assert [one["details"]["step"] for one in steps] == [2, 1]
    assert steps[0]["details"]["source"] == "loop"
    assert steps[0]["details"]["changed_channels"] == ["messages"]
    assert steps[0]["details"]["parent"] == steps[1]["id"]
    assert steps[1]["details"]["changed_channels"] == ["messages", "total"]
    text = run("log", "langgraph:t0", "--limit", "1", store=place)
    assert "2026-11-18 07:00 step 2; loop; changed messages" in text.out
    newest, oldest = [one["id"] for one in steps]
    assert f"there are more: --before {newest}" in text.err
    page = run("log", "langgraph:t0", "--limit", "1", "--json", store=place).json
    assert page["cursor"] == newest
    rest = run("log", "langgraph:t0", "--before", newest, "--json", store=place).json
    assert ([one["id"] for one in rest["steps"]], rest["cursor"]) == ([oldest], None)
    run("log", "langgraph:t0", "--before", "nothing", store=place, ends=4)
    run("log", "agent", "--before", newest, store=place, ends=2)


def test_a_misspelt_record_gets_a_suggestion(place: str) -> None:
    refusal = run("show", "langgraf:t0", store=place, ends=4).err
    assert "did you mean langgraph:t0" in refusal


def test_a_transcript_logs_its_entries(place: str) -> None:
    steps = run("log", CLAUDE, "--json", store=place).json["steps"]
    assert [one["id"] for one in steps] == ["u2", "u1", "u0"]
    assert steps[0]["made_at"] == "2026-11-18T07:00:02.000Z"
    assert "u1 2026-11-18 07:00 user: question 1" in run("log", CLAUDE, store=place).out


def test_records_are_shown_and_compared(place: str) -> None:
    shown = run("show", "langgraph:t0", "--json", store=place).json
    assert (shown["kind"], shown["entry"]["id"]) == ("entry", "t0")
    assert shown["value"][""]["messages"] == ["hello", "there"]
    text = run("show", "langgraph:t0", store=place).out
    assert "LangGraph threads" in text
    assert '"there"' in text
    part = run("show", CLAUDE, "--path", '[""][1].uuid', store=place).out
    assert part == '"u1"\n'
    found = run("diff", "langgraph:t1", "langgraph:t0", "--json", store=place).json
    assert (found["kind"], found["equal"]) == ("record", False)
    assert [one["after"] for one in found["changes"]] == ["there"]
    assert "there" in run("diff", "langgraph:t1", "langgraph:t0", store=place).out
    assert "the same" in run("diff", "langgraph:t0", "entry:lg:t0", store=place).out
    assert "only two of a kind" in run("diff", "agent", "langgraph:t0", store=place, ends=3).err


def test_commands_for_sessions_refuse_a_record_by_name(place: str) -> None:
    for arguments in (
        ("fork", "langgraph:t0", "x"), ("label", "langgraph:t0", "x"),
        ("rewind", "langgraph:t0"), ("export", "langgraph:t0", "x"),
    ):  # fmt: skip
        told = run(*arguments, store=place, ends=3).err
        assert "entry 't0' of LangGraph threads" in told
    assert "not one object" in run("tag", "x", "langgraph:t0", store=place, ends=3).err
    run("show", "langgraph:nowhere", store=place, ends=4)


def test_showing_a_thread_imports_no_class_that_it_names(tmp_path: Path) -> None:
    from langchain_core.messages import HumanMessage

    place = tmp_path / "store"
    with casstore.open(place) as store:
        put_checkpoint(CasstoreSaver(store), "t", 1, None, messages=[HumanMessage("hi", id="1")])
    value = run("show", "langgraph:t", "--json", store=str(place)).json["value"]
    [message] = value[""]["messages"]
    assert message["class"] == "langchain_core.messages.human.HumanMessage"
    assert message["fields"]["content"] == "hi"


def test_sessions_reports_an_empty_store(tmp_path: Path) -> None:
    casstore.open(tmp_path / "store").close()
    assert "nothing is stored yet" in run("sessions", store=str(tmp_path / "store")).err


def test_systems_that_are_not_installed_are_named(place: str) -> None:
    stats = run("stats", "--json", store=place).json["systems"]
    assert [(one["name"], one["rows"], one["missing"]) for one in stats if one["missing"]] == [
        ("notes", 1, NOT_REGISTERED)
    ]
    assert "not installed" in run("stats", store=place).out
    assert run("sessions", "--json", store=place).json["missing_systems"] == ["notes"]
    assert "record system notes cannot be listed" in run("sessions", store=place).err
    assert run("gc", "--json", store=place).json["missing_systems"] == ["notes"]
    assert "systems that are not installed  notes" in run("gc", store=place).out
    told = [{"name": "notes", "why": NOT_REGISTERED}]
    assert (
        run("prune", "--last", "5", "--yes", "--json", store=place).json["missing_systems"] == told
    )
    assert "record system notes" in run("prune", "--last", "5", "--yes", store=place).out
    assert "notes.pages" in run("check", store=place).out
    with casstore.open(place) as store:
        store.create_session("s", subjects=["anna"])
    assert run("erase", "anna", "--dry-run", "--json", store=place).json["missing_systems"] == told
    assert "record system notes" in run("erase", "anna", "--yes", store=place).out
