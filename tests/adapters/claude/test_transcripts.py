"""Rows of transcripts: unique times, expiry by age and number, and damage that is reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("claude_agent_sdk", reason="needs the extra: pip install '.[claude]'")

from claude_agent_sdk.types import SessionKey

import casstore
from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.claude.transcripts import TranscriptKey, Transcripts
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import (
    CorruptionError,
    InvalidInputError,
)
from casstore.session.records import Draft, Table
from casstore.store import Store
from casstore.testing import ManualClock
from tests.adapters.claude.test_session_store import KEY, PROJECT, Interrupt, run
from tests.faults.children import in_children


def test_modification_times_increase_though_the_clock_goes_back(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = []
    for now_ms in (2_000_000_000_000, 1_900_000_000_000, 1_900_000_000_000):
        monkeypatch.setattr(store.engine, "now_ms", lambda now_ms=now_ms: now_ms)
        run(sessions.append(KEY, [{"type": "x"}]))
        times.append(run(sessions.list_sessions(PROJECT))[0]["mtime"])
    assert times == [2_000_000_000_000, 2_000_000_000_001, 2_000_000_000_002]


def test_no_two_appends_have_the_same_time(any_store: Store) -> None:
    """On a clock that stands still, through two objects, in sessions of two projects."""
    stores: list[Any] = [CasstoreSessionStore(any_store), CasstoreSessionStore(any_store)]
    names = [f"{at}" for at in range(20)]
    for at, session in enumerate(names):
        put(stores[at % 2], "one", session)
        put(stores[at // 2 % 2], "two", session)
    put(stores[0], "one", "7")
    for list_call in ("list_sessions", "list_session_summaries"):
        times: dict[int, str] = {}
        for project in ("one", "two"):
            for found in run(getattr(stores[1], list_call)(project)):
                times[found["mtime"]] = f"{project} {found['session_id']}"
        assert len(times) == 40
        ones = [name for _, name in sorted(times.items()) if name.startswith("one")]
        assert ones == [f"one {name}" for name in [*names[:7], *names[8:], "7"]]


def test_no_two_appends_of_processes_have_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "shared"

    def work(name: str) -> str:
        engine = LmdbEngine(str(path), durability="relaxed", clock=ManualClock())
        with Store(engine) as store:
            for at in range(40):
                Transcripts(store).append(TranscriptKey("p", f"{name}{at}"), [{"type": "x"}])
        return "done"

    assert in_children(partial(work, "a"), partial(work, "b")) == ["done", "done"]
    with casstore.open(path, "relaxed") as store:
        times = {found.mtime_ms for found in Transcripts(store).of_project("p")}
    assert len(times) == 80


def put(sessions: Any, project: str, session: str, subpath: str = "") -> None:
    key: SessionKey = {"project_key": project, "session_id": session}
    if subpath:
        key["subpath"] = subpath
    run(sessions.append(key, [{"type": "x", "text": f"{project} {session}"}]))


def names(expired: list[Any]) -> list[tuple[str, str]]:
    return [(each.project_key, each.session_id) for each in expired]


def test_sessions_expire_by_age_and_number(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = store.engine.now_ms()
    clock = start
    monkeypatch.setattr(store.engine, "now_ms", lambda: clock)
    for day, session in enumerate("abcd"):
        clock = start + day * 86_400_000
        put(sessions, "one", session)
    put(sessions, "one", "a", "subagents/x")
    put(sessions, "two", "z")
    day = 86_400_000
    assert names(run(sessions.expire(idle_ms=day * 3 // 2, dry_run=True))) == [("one", "b")]
    assert names(run(sessions.expire(keep=3, dry_run=True))) == [("one", "b")]
    assert names(run(sessions.expire(keep=1, idle_ms=day, project_key="one"))) == [
        ("one", "c"),
        ("one", "b"),
    ]
    assert run(sessions.list_projects()) == ["one", "two"]
    [gone] = run(sessions.expire(keep=0, project_key="two"))
    # Two others were written to within the same millisecond.
    assert (gone.entries, gone.mtime_ms) == (1, clock + 2)
    assert run(sessions.list_projects()) == ["one"]
    assert run(sessions.delete_project("one")) == 2
    assert run(sessions.list_projects()) == []
    assert list(Table(store, "claude.entries", 4).scan()) == []


def test_expire_requires_a_valid_age_or_number(sessions: Any) -> None:
    for options in ({}, {"keep": -1}, {"idle_ms": 1.5}):
        with pytest.raises(InvalidInputError):
            run(sessions.expire(**options))


def test_a_session_written_to_meanwhile_stays(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(sessions, "one", "a")
    other: Any = CasstoreSessionStore(store)
    Interrupt(store, monkeypatch, lambda: put(other, "one", "a"))
    assert run(sessions.expire(keep=0)) == []
    assert len(run(sessions.load({"project_key": "one", "session_id": "a"}))) == 2


def test_damaged_rows_are_reported(store: Store, sessions: Any) -> None:
    put(sessions, "one", "a")
    key: SessionKey = {"project_key": "one", "session_id": "a"}
    table = Table(store, "claude.entries", 4)
    [record] = table.scan()
    damages: list[Any] = [[], {"h": [{}], "b": []}, {"h": [5], "b": [{}]}, {"h": [], "b": []}]
    for damage in [*damages, {"h": [{"?": 1}], "b": [{}]}]:
        draft = Draft(store)
        draft.put(table, record.key, damage)
        draft.commit()
        with pytest.raises(CorruptionError):
            run(sessions.load(key))
    draft = Draft(store)
    draft.delete(table, record.key)
    draft.commit()
    with pytest.raises(CorruptionError):
        run(sessions.load(key))
