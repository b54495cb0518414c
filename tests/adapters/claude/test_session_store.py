"""The Claude Agent SDK's session store: its own suite, and what that does not ask."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine
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

import casstore
from casstore.adapters.claude import CasstoreSessionStore
from casstore.adapters.claude.transcripts import Transcripts
from casstore.errors import (
    BusyError,
    ConditionFailedError,
)
from casstore.maintenance import gc
from casstore.store import Store
from tests.adapters.transcripts import new_id, transcript

SESSION = new_id(random.Random("session"))
DIRECTORY = "/home/ada/project"
PROJECT = project_key_for_directory(DIRECTORY)
KEY: SessionKey = {"project_key": PROJECT, "session_id": SESSION}
OPTIONAL = ("list_sessions", "list_session_summaries", "delete", "list_subkeys")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


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
