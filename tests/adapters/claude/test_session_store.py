"""The Claude Agent SDK's session store: its own suite, and what that does not ask."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("claude_agent_sdk", reason="needs the extra: pip install '.[claude]'")

from claude_agent_sdk import (
    delete_session_via_store,
    fork_session_via_store,
    get_session_messages_from_store,
    import_session_to_store,
    list_sessions_from_store,
    project_key_for_directory,
    rename_session_via_store,
)
from claude_agent_sdk.testing import run_session_store_conformance
from claude_agent_sdk.types import SessionKey, SessionStore
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import casstore
from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.claude.transcripts import TranscriptKey, Transcripts
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import (
    BusyError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    InvalidValueError,
)
from casstore.maintenance import gc
from casstore.session.records import Draft, Table
from casstore.store import Store
from casstore.testing import ManualClock
from tests.adapters.transcripts import new_id, transcript
from tests.faults.children import in_children

SESSION = new_id(random.Random("session"))
DIRECTORY = "/home/ada/project"
PROJECT = project_key_for_directory(DIRECTORY)
KEY: SessionKey = {"project_key": PROJECT, "session_id": SESSION}
OPTIONAL = ("list_sessions", "list_session_summaries", "delete", "list_subkeys")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


@pytest.fixture
def sessions(store: Store) -> Any:
    return CasstoreSessionStore(store)


def used_bytes(store: Store) -> int:
    return store.engine.used_bytes()  # type: ignore[attr-defined,no-any-return]


# --- the SDK's suite ----------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_the_suite_of_the_sdk_passes_and_skips_nothing(tmp_path: Path, loop: str) -> None:
    opened: list[Store] = []

    def make() -> CasstoreSessionStore:
        opened.append(casstore.open(tmp_path / str(len(opened)), "relaxed"))
        return CasstoreSessionStore(opened[-1])

    for name in OPTIONAL:
        # What is not overridden the suite would pass over.
        assert getattr(CasstoreSessionStore, name) is not getattr(SessionStore, name)
    anyio.run(run_session_store_conformance, make, backend=loop)
    # One to look at, and one for each of the 14 contracts.
    assert len(opened) == 1 + 14
    for store in opened:
        store.close()


# --- forks ----------------------------------------------------------------------------------


def test_a_fork_costs_little_more_than_its_ids(store: Store, sessions: Any) -> None:
    entries = transcript(SESSION, 1000)
    run(sessions.append(KEY, entries))
    gc.collect(store, grace_ms=0)
    before = used_bytes(store)
    fork = run(fork_session_via_store(sessions, SESSION, DIRECTORY))
    cost = used_bytes(store) - before

    forked: SessionKey = {"project_key": PROJECT, "session_id": fork.session_id}
    loaded = run(sessions.load(forked))
    assert [entry["message"] for entry in loaded[:-1]] == [entry["message"] for entry in entries]
    assert not {entry["uuid"] for entry in loaded} & {entry["uuid"] for entry in entries}
    # An entry has two ids of its own, 16 bytes each, and a link of 36; the text has 1500.
    assert cost / len(entries) < 160, cost


def test_equal_bodies_are_one_object_whatever_their_ids(store: Store, sessions: Any) -> None:
    first, second = transcript(SESSION, 2, seed=1), transcript("other", 2, seed=1)
    for entry in second:
        entry["uuid"] = new_id(random.Random(entry["uuid"]))
    second[1]["parentUuid"] = second[0]["uuid"]
    rows = Transcripts(store).rows
    run(sessions.append(KEY, first))
    run(sessions.append({"project_key": PROJECT, "session_id": "other"}, second))
    bodies = [rows.decode(record).bodies for record in rows.scan()]
    assert bodies[0] == bodies[1]
    assert all(type(body) is casstore.Link for body in bodies[0])


def test_a_fork_outlives_its_source(store: Store, sessions: Any) -> None:
    run(sessions.append(KEY, transcript(SESSION, 20)))
    fork = run(fork_session_via_store(sessions, SESSION, DIRECTORY))
    forked: SessionKey = {"project_key": PROJECT, "session_id": fork.session_id}
    before = run(sessions.load(forked))
    run(delete_session_via_store(sessions, SESSION, DIRECTORY))
    gc.collect(store, grace_ms=0)
    assert run(sessions.load(KEY)) is None
    assert run(sessions.load(forked)) == before


# --- entries --------------------------------------------------------------------------------

ODD: list[dict[str, Any]] = [
    {"type": "x", "text": "half a pair \ud800"},
    {"type": "x", "uuid": "\udfff half in the id"},
    {"type": "x", "number": 10**40, "uuid": new_id(random.Random(1))},
    {"type": "x", "float": 1e300, "zero": -0.0, "none": None, "yes": True},
    {"type": "x", "uuid": None, "parentUuid": None, "sessionId": None, "forkedFrom": None},
    {"type": "x", "uuid": 5, "isSidechain": True, "slug": ["a"], "teamName": {"a": 1}},
    {"type": "x", "uuid": new_id(random.Random(2)).upper()},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": 1}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "b", "more": "c"}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "b"}},
    {"type": "x", "forkedFrom": {"sessionId": "a", "messageUuid": "c"}},
    {"type": "x", "sessionId": SESSION, "json": "not bytes"},
    {"json": "alone"},
    {"type": "x", "": {"": [[], {}]}},
]


def deep(levels: int) -> dict[str, Any]:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return {"type": "x", "value": value, "uuid": new_id(random.Random(levels))}


@pytest.mark.parametrize("entry", [*ODD, deep(50), deep(60), deep(200)], ids=str)
def test_every_json_entry_round_trips(sessions: Any, entry: dict[str, Any]) -> None:
    entry = json.loads(json.dumps(entry))
    plain = {"type": "x", "uuid": "before"}
    run(sessions.append(KEY, [plain, entry, {"type": "x", "parentUuid": entry.get("uuid")}]))
    loaded = run(sessions.load(KEY))
    assert loaded[:2] == [plain, entry]
    assert loaded[2]["parentUuid"] == entry.get("uuid")


@pytest.mark.parametrize("field", ["value", "slug"])
def test_an_entry_of_any_depth_is_accepted(sessions: Any, field: str) -> None:
    """Between what a value may have and what the row has room for, the append failed."""
    entries = []
    for levels in range(55, 70):
        entry = deep(levels)
        entry[field] = entry.pop("value")
        entries.append(entry)
        run(sessions.append(KEY, [entry]))
    assert run(sessions.load(KEY)) == entries


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
IDS = st.sampled_from([None, "a", SESSION, new_id(random.Random(3)), 7])
ORIGIN = st.none() | st.fixed_dictionaries({"sessionId": IDS, "messageUuid": IDS})
ENTRIES = st.fixed_dictionaries(
    {"type": st.just("x")},
    optional={
        "uuid": IDS, "parentUuid": IDS, "sessionId": IDS, "logicalParentUuid": IDS,
        "forkedFrom": ORIGIN, "isSidechain": st.booleans(), "slug": JSON, "message": JSON,
    },
)  # fmt: skip


@given(st.lists(st.lists(ENTRIES, max_size=4), max_size=4))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_transcripts_come_back_as_they_were_appended(
    sessions: Any, batches: list[list[dict[str, Any]]]
) -> None:
    expected: list[dict[str, Any]] = []

    async def append_all() -> list[Any]:
        await sessions.delete(KEY)
        for batch in batches:
            await sessions.append(KEY, batch)
            for entry in batch:
                own = entry.get("uuid")
                if type(own) is not str or own not in [each.get("uuid") for each in expected]:
                    expected.append(entry)
        return await sessions.load(KEY) or []

    assert run(append_all()) == expected


def test_an_entry_that_is_not_json_is_refused_and_nothing_is_written(sessions: Any) -> None:
    fine = {"type": "x", "uuid": "a"}
    for bad in ({"type": "x", "value": object()}, {"type": "x", "value": float("nan")}):
        with pytest.raises(InvalidValueError):
            run(sessions.append(KEY, [fine, bad]))
    with pytest.raises(InvalidInputError):
        run(sessions.append(KEY, ["no entry"]))
    with pytest.raises(InvalidInputError):
        run(sessions.append({**KEY, "subpath": ""}, [fine]))
    assert run(sessions.load(KEY)) is None


# --- appending ------------------------------------------------------------------------------


def test_an_entry_sent_twice_is_stored_once(store: Store, sessions: Any) -> None:
    entries = transcript(SESSION, 6, chars=20)
    title = {"type": "custom-title", "customTitle": "no id"}
    run(sessions.append(KEY, [*entries[:3], entries[0], title]))
    run(sessions.append(KEY, entries[1:4]))
    # Another process knows nothing of what this one remembers.
    other: Any = CasstoreSessionStore(store)
    run(other.append(KEY, [*entries[2:5], title]))
    run(sessions.append(KEY, entries))
    expected = [*entries[:3], title, *entries[3:5], title, entries[5]]
    assert run(sessions.load(KEY)) == expected


@pytest.mark.parametrize("odd", [None, 5, True, [], ["a"], {"a": 1}], ids=str)
def test_an_id_that_is_not_text_does_not_stop_the_import(
    store: Store, sessions: Any, odd: Any
) -> None:
    """A process that had not written the transcript itself could not append to it any more."""
    entry = {"type": "x", "uuid": odd}
    run(sessions.append(KEY, [entry]))
    other: Any = CasstoreSessionStore(store)
    run(other.append(KEY, [entry, {"type": "x", "uuid": "b"}]))
    run(sessions.append(KEY, [{"type": "x", "uuid": "b"}]))
    # Without an id of its own an entry is new each time.
    assert run(sessions.load(KEY)) == [entry, entry, {"type": "x", "uuid": "b"}]


@pytest.mark.parametrize("own", ["é", "half a pair \ud800"])
def test_an_entry_stored_as_text_is_stored_once_however_its_id_is_encoded(
    store: Store, sessions: Any, own: str
) -> None:
    """Of ids beyond ASCII nothing was noted, so another process kept the entry again."""
    entry = {"type": "x", "uuid": own, "number": 10**40}
    run(sessions.append(KEY, [entry, entry]))
    other: Any = CasstoreSessionStore(store)
    run(other.append(KEY, [entry]))
    assert run(sessions.load(KEY)) == [entry]


def test_a_batch_that_is_there_already_changes_nothing(sessions: Any) -> None:
    entries = transcript(SESSION, 3, chars=20)
    run(sessions.append(KEY, entries))
    before = run(sessions.list_session_summaries(PROJECT))
    run(sessions.append(KEY, entries))
    assert run(sessions.list_session_summaries(PROJECT)) == before


def test_batches_stay_in_the_order_of_the_calls(sessions: Any) -> None:
    async def append_together() -> None:
        await asyncio.gather(*(sessions.append(KEY, [{"type": "x", "n": n}]) for n in range(60)))

    run(append_together())
    assert [entry["n"] for entry in run(sessions.load(KEY))] == list(range(60))


def test_two_writers_lose_nothing(store: Store, sessions: Any) -> None:
    barrier = threading.Barrier(3)

    def write(name: str) -> None:
        own: Any = CasstoreSessionStore(store)
        barrier.wait()
        for n in range(25):
            title = {"type": "custom-title", "customTitle": f"{name}{n}"}
            run(own.append(KEY, [{"type": "x", "uuid": f"{name}{n}"}, title]))

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    loaded = run(sessions.load(KEY))
    for name in "abc":
        own = [entry["uuid"] for entry in loaded if entry.get("uuid", "").startswith(name)]
        assert own == [f"{name}{n}" for n in range(25)]
    assert len(loaded) == 150
    [summary] = run(sessions.list_session_summaries(PROJECT))
    assert summary["data"]["custom_title"] == loaded[-1]["customTitle"]


class Interrupt:
    """Does something once, between what a write has read and the write itself."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]):
        write = store.engine.write

        def first_act(change: Any) -> Any:
            monkeypatch.undo()
            act()
            return write(change)

        monkeypatch.setattr(store.engine, "write", first_act)


def test_appending_to_a_session_deleted_concurrently_recreates_it(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sessions.append(KEY, [{"type": "x", "uuid": "a"}]))
    other: Any = CasstoreSessionStore(store)
    Interrupt(store, monkeypatch, lambda: asyncio.run(other.delete(KEY)))
    run(sessions.append(KEY, [{"type": "x", "uuid": "a"}, {"type": "x", "uuid": "b"}]))
    # Its first entry went with the session it was told of before: it is not there already.
    assert [entry["uuid"] for entry in run(sessions.load(KEY))] == ["a", "b"]


def test_the_same_entry_from_two_writers_at_once_is_kept_once(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sessions.append(KEY, [{"type": "x", "uuid": "a"}]))
    other: Any = CasstoreSessionStore(store)
    entry = {"type": "x", "uuid": "b"}
    Interrupt(store, monkeypatch, lambda: asyncio.run(other.append(KEY, [entry])))
    run(sessions.append(KEY, [entry]))
    assert [entry["uuid"] for entry in run(sessions.load(KEY))] == ["a", "b"]


def test_a_session_that_keeps_changing_raises_busy_error(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(change: Any) -> None:
        raise ConditionFailedError(0, None, None)

    monkeypatch.setattr(store.engine, "write", fail)
    with pytest.raises(BusyError):
        run(sessions.append(KEY, [{"type": "x"}]))


def test_the_event_loop_never_waits_for_the_disk(
    store: Store, sessions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    for name in ("write", "get_rows", "scan_rows"):
        real = getattr(store.engine, name)

        def watched(*args: Any, real: Any = real, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return real(*args, **options)

        monkeypatch.setattr(store.engine, name, watched)

    async def use_all() -> None:
        await sessions.append(KEY, [{"type": "x"}])
        await sessions.append({**KEY, "subpath": "a"}, [{"type": "x"}])
        await sessions.load(KEY)
        await sessions.list_sessions(PROJECT)
        await sessions.list_session_summaries(PROJECT)
        await sessions.list_subkeys({"project_key": PROJECT, "session_id": SESSION})
        await sessions.list_projects()
        await sessions.expire(idle_ms=10**9)
        await sessions.delete(KEY)
        await sessions.delete_project(PROJECT)

    run(use_all())
    assert threads
    assert threading.get_ident() not in threads


# --- through the SDK ------------------------------------------------------------------------


def test_the_functions_of_the_sdk_work_on_it(sessions: Any) -> None:
    entries = transcript(SESSION, 4, chars=40)
    run(sessions.append(KEY, entries))
    run(rename_session_via_store(sessions, SESSION, "a title", DIRECTORY))
    [info] = run(list_sessions_from_store(sessions, DIRECTORY))
    assert (info.session_id, info.custom_title) == (SESSION, "a title")
    messages = run(get_session_messages_from_store(sessions, SESSION, DIRECTORY))
    assert [message.uuid for message in messages] == [entry["uuid"] for entry in entries]


def test_transcripts_on_disk_are_imported(
    sessions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "config"))
    place = tmp_path / "config" / "projects" / PROJECT
    (place / SESSION / "subagents").mkdir(parents=True)
    entries = transcript(SESSION, 30, chars=40)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (place / f"{SESSION}.jsonl").write_text(lines)
    (place / SESSION / "subagents" / "agent-1.jsonl").write_text(lines)
    for _ in range(2):
        run(import_session_to_store(SESSION, sessions))
    assert run(sessions.load(KEY)) == entries
    listed = {"project_key": PROJECT, "session_id": SESSION}
    assert run(sessions.list_subkeys(listed)) == ["subagents/agent-1"]


# --- retention ------------------------------------------------------------------------------


def test_deleting_a_session_frees_its_space(store: Store, sessions: Any) -> None:
    run(sessions.append(KEY, transcript(SESSION, 4)))
    gc.collect(store, grace_ms=0)
    before = used_bytes(store)
    big: SessionKey = {"project_key": PROJECT, "session_id": "big"}
    run(sessions.append(big, transcript("big", 300, seed=5)))
    run(sessions.append({**big, "subpath": "subagents/a"}, transcript("big", 300, seed=6)))
    rows = Transcripts(store).rows
    bodies = [
        body.digest for record in rows.scan(PROJECT, "big") for body in rows.decode(record).bodies
    ]
    gc.collect(store, grace_ms=0)
    grown = used_bytes(store) - before
    assert grown > 400_000
    assert store.missing(bodies) == []
    assert len(run(sessions.load(big))) == 300
    run(sessions.delete(big))
    gc.collect(store, grace_ms=0)
    assert store.missing(bodies) == bodies
    assert used_bytes(store) - before < grown / 4
    assert len(run(sessions.load(KEY))) == 4


def test_a_deleted_session_may_be_written_again(sessions: Any) -> None:
    entries = transcript(SESSION, 3, chars=20)
    run(sessions.append(KEY, entries))
    run(sessions.delete(KEY))
    run(sessions.append(KEY, entries[:2]))
    assert run(sessions.load(KEY)) == entries[:2]


def test_cached_entries_of_a_deleted_session_are_stored_again(store: Store, sessions: Any) -> None:
    entries = transcript(SESSION, 3, chars=20)
    run(sessions.append(KEY, entries[:1]))
    other: Any = CasstoreSessionStore(store)
    run(other.delete(KEY))
    run(other.append(KEY, entries[1:2]))
    run(sessions.append(KEY, [entries[0], entries[2]]))
    assert run(sessions.load(KEY)) == [entries[1], entries[0], entries[2]]


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
