"""Databases of the SDK's own sessions move over whole, are compared, and stay as they were."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the extra: pip install '.[openai-agents]'")

from agents import Agent, Runner, SQLiteSession
from agents.extensions.memory import AdvancedSQLiteSession
from agents.extensions.memory.async_sqlite_session import AsyncSQLiteSession
from agents.extensions.memory.encrypt_session import EncryptedSession

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.adapters.openai_agents import CasstoreSession, import_sessions
from casstore.adapters.openai_agents import importing as module
from casstore.adapters.openai_agents.importing import UNLINKED, UNREADABLE
from casstore.adapters.openai_agents.sdk_database import SdkDatabase
from casstore.compat.importing import PAGE_BYTES, PAGE_ROWS, PartReport
from casstore.errors import (
    BusyError,
    ConflictError,
    CorruptionError,
    ForeignStoreError,
    InvalidInputError,
    LeaseHeldError,
    SessionDeletedError,
    SourceNotFoundError,
    StorageError,
)
from casstore.maintenance.progress import Step
from casstore.session.session import Session as StoreSession
from casstore.store import Store
from tests.adapters.openai_agents.scripted_model import ScriptedModel, call
from tests.adapters.openai_agents.test_session import (
    QUIET,
    Result,
    reply,
    run,
    say,
    talk,
    texts,
    weather,
)

ROOT = Path(__file__).parents[3]

# What JSON can say and other stores have trouble with.
ODD: list[Any] = [
    say("größer \U0001f600 \0 \u2028 " + "語" * 50),
    {"role": "assistant", "content": [{"type": "output_text", "text": "x" * 300_000}]},
    {"type": "function_call_output", "call_id": "1", "output": "\ud800 half a pair"},
    {"type": "reasoning", "id": "", "summary": [], "n": 10**30, "f": 1.0, "i": 1, "t": True},
    {"type": "other", "float": -0.0, "small": 5e-324, "none": None, "": {"": []}},
    {"json": "not a text"},
    say([{"type": "input_image", "image_url": "data:" + "QUJD" * 20_000}]),
]
deep: Any = "bottom"
for _ in range(100):
    deep = {"in": [deep]}
ODD.append({"type": "nested", "value": deep})


def add(session: Any, *items: Any) -> None:
    run(session.add_items(list(items)))


def encoded(items: list[Any]) -> list[str]:
    """1, 1.0 and True are equal to Python, but not here."""
    return [json.dumps(item, sort_keys=True) for item in items]


def fill_plain(path: Path) -> None:
    """Sessions of all kinds."""
    agent = Agent(
        name="a",
        model=ScriptedModel([call("weather", '{"city": "Ulm"}')], "it rains", "an umbrella"),
        tools=[weather],
    )
    with closing(SQLiteSession("run", path)) as session:
        run(Runner.run(agent, "how is it?", session=session, run_config=QUIET))
        run(Runner.run(agent, "what to do?", session=session, run_config=QUIET))
    with closing(SQLiteSession("odd", path)) as session:
        add(session, *ODD)
    with closing(SQLiteSession("ids with / and ü", path)) as session:
        talk(session, *(f"{n} " * 100 for n in range(40)))
    with closing(SQLiteSession("empty", path)) as session:
        add(session, say("gone"))
        run(session.pop_item())
    with closing(SQLiteSession("cleared", path)) as session:
        add(session, say("gone"))
        run(session.clear_session())


def open_advanced(path: Path, session: str = "talk", **options: Any) -> Any:
    return AdvancedSQLiteSession(session_id=session, db_path=path, create_tables=True, **options)


def fill_advanced(path: Path) -> None:
    agent = Agent(
        name="a",
        model=ScriptedModel(
            [call("weather", '{"city": "Ulm"}')], "one", "two", "three", "other", "deeper"
        ),
        tools=[weather],
    )

    async def said(session: Any, text: str) -> None:
        result = await Runner.run(agent, text, session=session, run_config=QUIET)
        await session.store_run_usage(result)

    async def converse(session: Any) -> None:
        for text in ("first", "second", "third"):
            await said(session, text)
        await session.create_branch_from_turn(2, "left")
        await said(session, "instead")
        # Nothing was said in it: it ends where it began.
        await session.create_branch_from_turn(2, "nothing of its own")
        await session.switch_to_branch("left")
        await session.create_branch_from_turn(2, "deeper")
        await said(session, "deeper")
        await session.switch_to_branch("main")
        await session.create_branch_from_turn(1, "from nothing")
        await session.add_items([reply("before anybody"), say("hello"), *ODD[3:6]])
        await session.store_run_usage(Result(total=7))
        await session.create_branch_from_turn(1, "gone")
        await session.add_items([say("to be deleted")])
        await session.switch_to_branch("main")
        await session.delete_branch("gone")
        # Shorter than what others share with it.
        await session.create_branch_from_turn(3, "shorter")
        await session.pop_item()

    with closing(open_advanced(path)) as session:
        run(converse(session))
    with closing(open_advanced(path, "other")) as session:
        talk(session, "a", "b")
        run(session.create_branch_from_turn(2, "left"))
        talk(session, "c")
    with closing(open_advanced(path, "cleared")) as session:
        talk(session, "gone")
        run(session.clear_session())
        talk(session, "anew")
    with closing(open_advanced(path, "popped")) as session:
        add(session, say("gone"))
        run(session.pop_item())


def written(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    path = factory.mktemp(name) / f"{name}.db"
    fill(path)
    return path


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, "plain", fill_plain)


@pytest.fixture(scope="module")
def advanced_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory, "advanced", fill_advanced)


@pytest.fixture
def plain(plain_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(plain_file, tmp_path / "plain.db"))


@pytest.fixture
def advanced(advanced_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(advanced_file, tmp_path / "advanced.db"))


def fingerprint(path: Path) -> Any:
    return [
        (each.name, each.stat().st_mtime_ns, hashlib.sha256(each.read_bytes()).hexdigest())
        for each in sorted(path.parent.glob(path.name + "*"))
    ]


def rows(path: Path, statement: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as database, database:
        return database.execute(statement, values).fetchall()


def ids(path: Path) -> list[str]:
    return [name for (name,) in rows(path, "SELECT session_id FROM agent_sessions")]


def require_plain_same(path: Path, store: Store, **tables: Any) -> None:
    for name in ids(path) if not tables else ["run"]:
        with closing(SQLiteSession(name, path, **tables)) as theirs:
            ours = CasstoreSession(store, name)
            assert encoded(run(ours.get_items())) == encoded(run(theirs.get_items()))


async def _answers(session: Any, branch: str) -> list[Any]:
    turns = await session.get_conversation_turns(branch)
    return [
        encoded(await session.get_items(branch_id=branch)),
        encoded(await session.get_items(limit=3, branch_id=branch)),
        # When a shared message was copied is not when it was said; and keys come back sorted.
        [(each["turn"], json.dumps(each["full_content"], sort_keys=True)) for each in turns],
        await session.get_conversation_by_turns(branch),
        sorted(await session.get_tool_usage(branch), key=str),
        await session.get_turn_usage(branch_id=branch),
        await session.get_session_usage(branch),
    ]


async def require_same(theirs: Any, ours: Any) -> None:
    """What one session tells of itself, the other does, too."""

    def known(branches: list[Any]) -> list[Any]:
        # An empty main branch is listed by one of them.
        return sorted((each for each in branches if each["message_count"]), key=str)

    assert known(await ours.list_branches()) == known(await theirs.list_branches())
    for each in (*await theirs.list_branches(), {"branch_id": "main"}):
        branch = each["branch_id"]
        assert await _answers(ours, branch) == await _answers(theirs, branch)
    assert await ours.get_session_usage() == await theirs.get_session_usage()


def require_advanced_same(path: Path, store: Store) -> None:
    for name in ids(path):
        with closing(open_advanced(path, name)) as theirs:
            run(require_same(theirs, CasstoreSession(store, name)))


# --- everything -------------------------------------------------------------------------------


def test_everything_is_imported_and_the_source_is_unchanged(plain: Path, store: Store) -> None:
    before = fingerprint(plain)
    steps: list[Step] = []

    def look(step: Step) -> None:
        steps.append(step)
        # Nothing stands beside it in between, either.
        assert fingerprint(plain) == before

    report = import_sessions(store, plain, progress=look)
    assert fingerprint(plain) == before
    [[messages]] = rows(plain, "SELECT count(*) FROM agent_messages")
    assert report.parts == (
        PartReport("items", messages, messages),
        PartReport("sessions", 4, 4),
        PartReport("branches", 4, 4),
    )
    assert (report.source_bytes, report.notes) == (plain.stat().st_size, ())
    assert report.store_bytes is not None
    assert report.store_bytes_before is not None
    assert report.store_bytes_before < report.store_bytes < report.source_bytes
    assert [step.phase for step in steps] == sorted(step.phase for step in steps)
    assert {step.phase: (step.done, step.total) for step in steps} == dict.fromkeys(
        ("copy", "verify"), (messages, messages)
    )
    require_plain_same(plain, store)
    assert sorted(info.meta.session for info in store.sessions()) == sorted(ids(plain))
    assert store.session("run").info().first_user_message == "how is it?"
    assert encoded(run(CasstoreSession(store, "odd").get_items())) == encoded(ODD)


def test_times_are_those_of_the_source(plain: Path, store: Store) -> None:
    rows(plain, "UPDATE agent_messages SET created_at = '2024-02-29 12:30:01'")
    rows(plain, "UPDATE agent_sessions SET created_at = '2023-01-01 00:00:00'")
    rows(plain, "UPDATE agent_messages SET created_at = 'no time' WHERE session_id = 'odd'")
    import_sessions(store, plain)
    session = CasstoreSession(store, "run")
    assert run(session.get_conversation_turns())[1]["timestamp"] == "2024-02-29 12:30:01"
    assert run(session.list_branches())[0]["created_at"] == "2023-01-01 00:00:00"
    assert run(CasstoreSession(store, "odd").turns())[0].began_at_ms is None


def test_branches_turns_and_usage_are_reported_as_by_the_sdk(advanced: Path, store: Store) -> None:
    before = fingerprint(advanced)
    report = import_sessions(store, advanced)
    assert fingerprint(advanced) == before
    require_advanced_same(advanced, store)
    assert (
        report.part("sessions").found,
        report.part("sessions").imported,
        report.part("branches").found,
    ) == (4, 4, 10)
    assert (report.note(UNREADABLE).number, report.note(UNLINKED).number) == (0, 0)
    # What branches share is there once.
    for name in ids(advanced):
        [[messages]] = rows(
            advanced, "SELECT count(*) FROM agent_messages WHERE session_id = ?", name
        )
        head = store.session(name).head()
        assert head is not None
        assert head.node_count == messages
    [[messages]] = rows(advanced, "SELECT count(*) FROM agent_messages")
    assert report.part("items").found == report.part("items").imported == messages
    # The ledger has what is noted for all branches.
    total = run(CasstoreSession(store, "talk").get_session_usage())
    [ledger] = store.session("talk").usage()
    assert ledger.total == total["total_tokens"]


def test_an_imported_session_starts_on_main_and_keeps_its_branch_names(
    advanced: Path, store: Store
) -> None:
    import_sessions(store, advanced)
    session = CasstoreSession(store, "talk")
    assert session.current_branch == "main"
    # Those of one second, too, in the order in which they were begun.
    names = [each.name for each in run(session.branches())]
    assert names[:3] == ["main", "left", "nothing of its own"]
    main = run(session.get_items(branch_id="main"))
    assert run(session.get_items()) == main
    state = store.session("talk").load()
    assert state is not None
    assert len(state.nodes) == len(main)
    for name in ("left", "gone"):
        with pytest.raises(InvalidInputError, match="used before"):
            run(session.branch(1, name))


def test_imported_conversations_continue_where_they_were(advanced: Path, store: Store) -> None:
    import_sessions(store, advanced)
    model = ScriptedModel("fourth answer", "again")
    agent = Agent(name="a", model=model)
    session = CasstoreSession(store, "talk")

    async def converse() -> None:
        await session.switch("deeper")
        result = await Runner.run(agent, "more", session=session, run_config=QUIET)
        await session.store_run_usage(result)
        await session.create_branch_from_turn(2)
        await Runner.run(agent, "another", session=session, run_config=QUIET)

    run(converse())
    asked = [item["content"] for item in model.inputs[0] if item.get("role") == "user"]
    assert asked == ["first", "deeper", "more"]
    asked = [item["content"] for item in model.inputs[1] if item.get("role") == "user"]
    assert asked == ["first", "another"]
    assert [row["user_turn_number"] for row in run(session.get_turn_usage(branch_id="deeper"))] == [
        2,
        3,
    ]
    # A turn that is popped takes its usage along, as in the SDK.
    run(session.switch("left"))
    while len(run(session.turns())) > 1:
        run(session.pop_item())
    assert run(session.get_turn_usage()) == []
    assert run(session.prune()) > 0
    assert texts(run(session.get_items(branch_id="main"))[:1]) == ["first"]


# --- again ------------------------------------------------------------------------------------


def test_a_second_import_imports_only_new_items(advanced: Path, store: Store) -> None:
    first = import_sessions(store, advanced)
    before = {info.meta.session: info.head for info in store.sessions()}
    again = import_sessions(store, advanced)
    assert (
        again.part("items").imported,
        again.part("sessions").imported,
        again.part("items").found,
    ) == (0, 0, first.part("items").found)
    assert {info.meta.session: info.head for info in store.sessions()} == before
    with closing(open_advanced(advanced)) as session:
        talk(session, "fourth")
        run(session.store_run_usage(Result(total=11)))
        run(session.switch_to_branch("left"))
        talk(session, "further")
        run(session.store_run_usage(Result(total=12)))
        run(session.create_branch_from_turn(3, "even later"))
        talk(session, "x")
        run(session.switch_to_branch("from nothing"))
        # In place of what was noted, with items of the same turn.
        add(session, reply("once more"))
        run(session.store_run_usage(Result(total=13)))
    with closing(open_advanced(advanced, "new")) as session:
        talk(session, "new")
    report = import_sessions(store, advanced)
    assert (report.part("items").imported, report.part("sessions").imported) == (
        2 + 2 + 2 + 1 + 2,
        1,
    )
    require_advanced_same(advanced, store)
    assert store.session("other").head() == before["other"]
    state = store.session("talk").load()
    assert state is not None
    assert state.nodes[-1].payload["content"] == "fourth!"


def test_a_reserved_branch_name_can_become_a_branch_in_a_later_import(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "a.db"
    with closing(open_advanced(path)) as session:
        talk(session, "one")
        run(session.create_branch_from_turn(1, "begun"))
        import_sessions(store, path)
        talk(session, "other")
    assert import_sessions(store, path).part("items").imported == 2
    require_advanced_same(path, store)


def test_an_import_keeps_items_added_in_the_store(plain: Path, store: Store) -> None:
    import_sessions(store, plain)
    session = CasstoreSession(store, "run")
    talk(session, "later")
    report = import_sessions(store, plain)
    assert report.part("items").imported == 0
    assert texts(run(session.get_items(limit=2))) == ["later", "later!"]


def test_an_import_keeps_usage_recorded_in_the_store(advanced: Path, store: Store) -> None:
    import_sessions(store, advanced)
    session: Any = CasstoreSession(store, "talk")
    add(session, reply("of the same turn"))
    run(session.store_run_usage(Result(total=99)))
    import_sessions(store, advanced)
    assert run(session.get_turn_usage(3))["total_tokens"] == 99


def test_an_import_keeps_the_head_of_a_session_on_its_branch(advanced: Path, store: Store) -> None:
    import_sessions(store, advanced)
    talk(CasstoreSession(store, "talk", branch="left"), "went on here")
    before = store.session("talk").head()
    with closing(open_advanced(advanced)) as theirs:
        talk(theirs, "on main")
    assert import_sessions(store, advanced).part("items").imported == 2
    after = store.session("talk").head()
    assert before is not None
    assert after is not None
    assert (after.leaf, after.node_count) == (before.leaf, before.node_count + 2)
    assert texts(run(CasstoreSession(store, "talk").get_items(limit=1))) == ["on main!"]


def test_items_added_without_the_import_are_matched_by_their_content(
    plain: Path, store: Store
) -> None:
    with closing(SQLiteSession("run", plain)) as theirs:
        items = run(theirs.get_items())
    session = CasstoreSession(store, "run")
    run(session.add_items(items[:3]))
    report = import_sessions(store, plain, sessions=["run"])
    assert (report.part("sessions").found, report.part("sessions").imported) == (1, 0)
    assert report.part("items").imported == len(items) - 3
    assert encoded(run(session.get_items())) == encoded(items)
    assert [turn.number for turn in run(session.turns())] == [1, 2]


def test_branches_are_attached_to_nodes_added_without_the_import(
    advanced: Path, store: Store
) -> None:
    with closing(open_advanced(advanced)) as theirs:
        items = run(theirs.get_items(branch_id="main"))
    # Without numbers of turns, as an import of lines makes them.
    drafts = [NodeDraft(f"line-{at}", item) for at, item in enumerate(items)]
    store.session("talk").commit(Commit(append=drafts))
    import_sessions(store, advanced, sessions=["talk"])
    session = CasstoreSession(store, "talk")
    for name in ("left", "shorter", "deeper", "from nothing"):
        with closing(open_advanced(advanced)) as theirs:
            assert encoded(run(session.get_items(branch_id=name))) == encoded(
                run(theirs.get_items(branch_id=name))
            )
            assert run(session.get_turn_usage(branch_id=name)) == run(
                theirs.get_turn_usage(branch_id=name)
            )
    assert {each.name: each.turns for each in run(session.branches())}["left"] == 2
    head = store.session("talk").head()
    assert head is not None
    [[messages]] = rows(advanced, "SELECT count(*) FROM agent_messages WHERE session_id = 'talk'")
    assert head.node_count == messages


# --- other content ------------------------------------------------------------------------------


def say_other(store: Store) -> None:
    run(CasstoreSession(store, "talk").pop_item())
    talk(CasstoreSession(store, "talk"), "something else")


def pop(store: Store) -> None:
    run(CasstoreSession(store, "talk").pop_item())


def pop_in_branch(store: Store) -> None:
    run(CasstoreSession(store, "talk", branch="deeper").pop_item())


def delete_branch(store: Store) -> None:
    run(CasstoreSession(store, "talk").delete_branch("deeper"))


def delete_branch_without_items(store: Store) -> None:
    run(CasstoreSession(store, "talk").delete_branch("nothing of its own"))


def clear(store: Store) -> None:
    run(CasstoreSession(store, "talk").clear_session())


def hide_the_end(store: Store) -> None:
    head = store.session("talk").head()
    assert head is not None
    assert head.leaf is not None
    store.session("talk").tombstone([head.leaf])


def give_another_state(store: Store) -> None:
    also = Checkpoint(turn_state={"mine": 1})
    store.session("talk").commit(Commit(checkpoint=also))


@pytest.mark.parametrize(
    "change",
    [
        say_other, pop, pop_in_branch, delete_branch, delete_branch_without_items, clear,
        hide_the_end, give_another_state,
    ],
)  # fmt: skip
def test_other_content_under_the_same_name_is_reported_and_left(
    advanced: Path, store: Store, change: Callable[[Store], None]
) -> None:
    import_sessions(store, advanced)
    change(store)
    with closing(open_advanced(advanced)) as session:
        run(session.switch_to_branch("left"))
        talk(session, "further")
    before = store.session("talk").head()
    for dry_run in (True, False):
        with pytest.raises(ConflictError, match=r"'talk' .*another store"):
            import_sessions(store, advanced, dry_run=dry_run)
        assert store.session("talk").head() == before
    # The others can be moved all the same.
    assert (
        import_sessions(store, advanced, sessions=["other", "popped"]).part("sessions").found == 2
    )


def test_a_conversation_that_was_cleared_in_the_store_is_not_filled_again(
    plain: Path, advanced: Path, store: Store
) -> None:
    """Nothing is there any more by which it could be told that it was ever moved."""
    import_sessions(store, plain)
    # Cleared in the source, too, and once less than here.
    import_sessions(store, advanced, sessions=["cleared", "talk"])
    # Never moved, but made and cleared here.
    talk(CasstoreSession(store, "other"), "mine")
    for file, name in (
        (plain, "run"),
        (advanced, "cleared"),
        (advanced, "talk"),
        (advanced, "other"),
    ):
        session = CasstoreSession(store, name)
        assert run(session.get_items())
        run(session.clear_session())
        before = store.session(name).head()
        for dry_run in (True, False):
            with pytest.raises(ConflictError, match="was cleared in the store"):
                import_sessions(store, file, sessions=[name], dry_run=dry_run)
        assert store.session(name).head() == before
        assert run(session.get_items()) == []


def test_a_conversation_cleared_as_often_in_the_store_as_in_the_source_is_continued(
    advanced: Path, store: Store
) -> None:
    session = CasstoreSession(store, "cleared")
    talk(session, "gone")
    run(session.clear_session())
    add(session, say("anew"))
    report = import_sessions(store, advanced, sessions=["cleared"])
    assert (report.part("sessions").imported, report.part("items").imported) == (0, 1)
    assert texts(run(session.get_items())) == ["anew", "anew!"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("phase", ["copy", "verify"])
def test_a_conversation_cleared_during_the_import_stays_cleared(
    plain: Path, store: Store, phase: str
) -> None:
    session = CasstoreSession(store, "ids with / and ü")

    def clear_it(step: Step) -> None:
        if step.phase == phase and run(session.get_items()):
            run(session.clear_session())

    with pytest.raises(ConflictError, match="was cleared in the store"):
        import_sessions(store, plain, sessions=["empty", session.session_id], progress=clear_it)
    assert run(session.get_items()) == []


def fill_two_branches(path: Path) -> None:
    with closing(open_advanced(path)) as session:
        talk(session, "one", "two")
        run(session.create_branch_from_turn(2, "left"))
        talk(session, "three")


@pytest.fixture
def items_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The messages of a database whose content was looked at, each time."""
    asked: list[int] = []
    item = SdkDatabase.item

    def spy(self: SdkDatabase, row: int) -> Any:
        asked.append(row)
        return item(self, row)

    monkeypatch.setattr(SdkDatabase, "item", spy)
    return asked


def test_the_shared_beginning_of_branches_is_compared_once(
    advanced: Path, store: Store, items_read: list[int]
) -> None:
    import_sessions(store, advanced)
    items_read.clear()
    report = import_sessions(store, advanced, dry_run=True)
    assert report.part("items").imported == 0
    # Each is looked at, whether it is an item at all, and then compared.
    assert sorted(items_read) == sorted([*set(items_read)] * 2)
    assert len(items_read) == 2 * report.part("items").found


def test_a_branch_that_does_not_share_its_beginning_here_is_compared_whole(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "a.db"
    fill_two_branches(path)
    session = CasstoreSession(store, "talk")
    talk(session, "one", "two")
    run(session.branch(1, "left"))
    add(session, say("not one"), reply("one!"), say("three"), reply("three!"))
    with pytest.raises(ConflictError, match="another item 1 on branch 'left'"):
        import_sessions(store, path)


def test_a_branch_longer_in_the_store_than_its_parent_branch_is_compared_completely(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "a.db"
    fill_two_branches(path)
    with closing(open_advanced(path)) as theirs:
        run(theirs.create_branch_from_turn(2, "left again"))
        talk(theirs, "four")
    session = CasstoreSession(store, "talk")
    add(session, say("one"))
    run(session.branch(None, "left"))
    add(session, reply("one!"), say("three"))
    report = import_sessions(store, path)
    assert report.part("sessions").imported == 0
    with closing(open_advanced(path)) as theirs:
        for name in ("main", "left", "left again"):
            assert encoded(run(session.get_items(branch_id=name))) == encoded(
                run(theirs.get_items(branch_id=name))
            )


def test_a_foreign_node_with_the_id_of_a_message_is_reported_and_kept(
    plain: Path, store: Store
) -> None:
    with closing(SQLiteSession("run", plain)) as theirs:
        first = run(theirs.get_items())[0]
    [[row]] = rows(plain, "SELECT min(id) FROM agent_messages WHERE session_id = 'run'")
    # The same beginning, under the name of what comes later.
    taken = NodeDraft(f"m{row + 2}", first)
    store.session("run").commit(Commit(append=[taken]))
    before = store.session("run").head()
    with pytest.raises(ConflictError, match=f"has another node '{taken.id}'"):
        import_sessions(store, plain, sessions=["run"])
    assert store.session("run").head() == before


def test_numbers_that_python_considers_equal_count_as_different_content(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "a.db"
    with closing(SQLiteSession("s", path)) as session:
        add(session, {"n": 1})
    for other in (1.0, True):
        name = str(other)
        add(CasstoreSession(store, name), {"n": other})
        rows(path, "UPDATE agent_messages SET session_id = ?", name)
        rows(path, "UPDATE agent_sessions SET session_id = ?", name)
        with pytest.raises(ConflictError, match="item 1"):
            import_sessions(store, path)


def test_deleted_and_leased_sessions_are_not_written_to(plain: Path, store: Store) -> None:
    import_sessions(store, plain, sessions=["odd"])
    store.delete_session("odd")
    with pytest.raises(SessionDeletedError):
        import_sessions(store, plain, sessions=["odd"])
    lease = store.session("run").claim_lease("somebody", 60_000)
    assert lease is not None
    with pytest.raises(LeaseHeldError):
        import_sessions(store, plain, sessions=["run"])


# --- stopped ------------------------------------------------------------------------------------


class Stopped(Exception):
    """Raised by a progress that has had enough."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 3)
    monkeypatch.setattr(module, "_PAGE", 2)


@pytest.mark.usefixtures("small")
def test_an_import_stopped_at_any_step_can_continue(
    advanced: Path, plain: Path, tmp_path: Path
) -> None:
    for number, (file, same) in enumerate(
        ((advanced, require_advanced_same), (plain, require_plain_same))
    ):
        imported = total = 0
        with casstore.open(tmp_path / f"store{number}", "relaxed") as store:
            for after in range(1, 100):
                steps: list[Step] = []

                def stop(step: Step, steps: list[Step] = steps, after: int = after) -> None:
                    steps.append(step)
                    if len(steps) == after:
                        raise Stopped

                try:
                    report = import_sessions(store, file, progress=stop)
                except Stopped:
                    continue
                assert report.part("items").imported == 0 < after
                break
            else:
                pytest.fail("it never ended")
            same(file, store)
            for info in store.sessions():
                assert info.head is not None
                imported += info.head.node_count
            [[total]] = rows(file, "SELECT count(*) FROM agent_messages")
            assert imported == total


KILLED = """
import os, signal, sys
import casstore
from casstore.adapters.openai_agents import import_sessions
from casstore.compat import importing
importing.PAGE_ROWS = 5
steps = []
def progress(step):
    steps.append(step)
    if len(steps) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
with casstore.open(sys.argv[2], "relaxed") as store:
    import_sessions(store, sys.argv[1], progress=progress)
"""


def test_a_killed_import_can_continue(advanced: Path, tmp_path: Path) -> None:
    place = tmp_path / "store"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(advanced), str(place)], cwd=ROOT, check=False
    )
    assert died.returncode == -signal.SIGKILL
    with casstore.open(place, "relaxed") as store:
        heads = [info.head for info in store.sessions()]
        there = sum(head.node_count for head in heads if head is not None)
        report = import_sessions(store, advanced)
        assert 0 < there < report.part("items").found
        assert report.part("items").imported == report.part("items").found - there
        require_advanced_same(advanced, store)


@pytest.mark.usefixtures("small")
def test_two_imports_at_once_both_get_through(advanced: Path, store: Store) -> None:
    inner: list[int] = []

    def meanwhile(step: Step) -> None:
        if len(inner) < 3:
            inner.append(0)
            inner[-1] = import_sessions(store, advanced, sessions=["talk"]).part("items").imported

    report = import_sessions(store, advanced, progress=meanwhile)
    assert sum(inner) + report.part("items").imported == report.part("items").found
    assert sum(inner) > 0
    require_advanced_same(advanced, store)


@pytest.mark.usefixtures("small")
def test_a_session_continued_meanwhile_is_not_overwritten(plain: Path, store: Store) -> None:
    said: list[str] = []

    def meanwhile(step: Step) -> None:
        if not said and store.session("run").head() is not None:
            said.append("me first")
            talk(CasstoreSession(store, "run"), *said)

    with pytest.raises(ConflictError, match="another item 4"):
        import_sessions(store, plain, sessions=["run"], progress=meanwhile)
    # A batch of the import, and what was said then.
    items = run(CasstoreSession(store, "run").get_items())
    assert len(items) == 5
    assert texts(items[3:]) == ["me first", "me first!"]


@pytest.mark.usefixtures("small")
def test_a_session_continued_right_after_a_commit_is_not_overwritten(
    plain: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the import has looked what became of it."""
    commit = StoreSession.commit

    def overtaken(self: StoreSession, change: Commit) -> Any:
        monkeypatch.setattr(StoreSession, "commit", commit)
        result = commit(self, change)
        talk(CasstoreSession(store, "run"), "me first")
        return result

    monkeypatch.setattr(StoreSession, "commit", overtaken)
    with pytest.raises(ConflictError, match="another item 4"):
        import_sessions(store, plain, sessions=["run"])
    items = run(CasstoreSession(store, "run").get_items())
    assert texts(items[3:]) == ["me first", "me first!"]


def pop_after_it_was_copied(store: Store) -> None:
    pop(store)


def note_after_it_was_copied(store: Store) -> None:
    session: Any = CasstoreSession(store, "talk")
    run(session.store_run_usage(Result(total=99)))


@pytest.mark.parametrize("change", [pop_after_it_was_copied, note_after_it_was_copied])
def test_entries_missing_at_the_comparison_are_reported(
    advanced: Path, store: Store, change: Callable[[Store], None]
) -> None:
    def meanwhile(step: Step) -> None:
        if step.phase == "copy" and step.done == step.total:
            change(store)

    with pytest.raises(ConflictError, match="'talk'"):
        import_sessions(store, advanced, progress=meanwhile)


# --- what the SDK passes over -----------------------------------------------------------------


def test_messages_without_json_are_reported(advanced: Path, store: Store) -> None:
    with closing(open_advanced(advanced)) as session:
        shared = rows(
            advanced,
            "SELECT m.id FROM agent_messages m JOIN message_structure s ON s.message_id = m.id "
            "WHERE s.session_id = 'talk' AND s.branch_id = 'left' ORDER BY s.sequence_number",
        )
        run(session.get_items())
    broken = shared[1][0], shared[-1][0]
    rows(advanced, "UPDATE agent_messages SET message_data = '{\"cut' WHERE id = ?", broken[0])
    rows(advanced, "UPDATE agent_messages SET message_data = '' WHERE id = ?", broken[1])
    report = import_sessions(store, advanced)
    assert report.note(UNREADABLE).number == 2
    examples = report.note(UNREADABLE).examples
    assert [each.partition(":")[0] for each in examples] == [
        f"message {row} of session talk" for row in broken
    ]
    assert "Unterminated" in examples[0]
    [[messages]] = rows(advanced, "SELECT count(*) FROM agent_messages")
    assert report.part("items").found == report.part("items").imported == messages - 2
    for each in rows(advanced, "SELECT DISTINCT branch_id FROM message_structure"):
        with closing(open_advanced(advanced)) as theirs:
            ours = CasstoreSession(store, "talk")
            if each[0] in {branch.name for branch in run(ours.branches())}:
                items = run(theirs.get_items(branch_id=each[0]))
                assert encoded(run(ours.get_items(branch_id=each[0]))) == encoded(items)
                usage = run(theirs.get_turn_usage(branch_id=each[0]))
                assert run(ours.get_turn_usage(branch_id=each[0])) == usage
    assert import_sessions(store, advanced).part("items").imported == 0


def test_usage_is_of_the_turns_as_they_are_counted_here(advanced: Path, store: Store) -> None:
    """The SDK goes on counting a turn whose first message it cannot read."""
    rows(advanced, "UPDATE agent_messages SET message_data = '{' WHERE id = 1")
    [bad] = import_sessions(store, advanced).note(UNREADABLE).examples
    assert bad.startswith("message 1 of session talk")
    session = CasstoreSession(store, "talk")
    usage = run(session.get_turn_usage())
    assert [turn.number for turn in run(session.turns())] == [0, 1, 2]
    assert [row["user_turn_number"] for row in usage] == [0, 1, 2]
    with closing(open_advanced(advanced)) as theirs:
        told = run(theirs.get_turn_usage())
    assert [row["user_turn_number"] for row in told] == [1, 2, 3]
    assert [row["total_tokens"] for row in usage] == [row["total_tokens"] for row in told]
    assert import_sessions(store, advanced).part("items").imported == 0


def test_a_message_that_is_not_text_is_reported_and_the_others_move(
    plain: Path, store: Store
) -> None:
    [[first]] = rows(plain, "SELECT min(id) FROM agent_messages WHERE session_id = 'run'")
    change = "UPDATE agent_messages SET message_data = {} WHERE id = ?"
    rows(plain, change.format("CAST(X'7B22C3' AS TEXT)"), first)
    rows(plain, change.format("'1' || hex(zeroblob(3000))"), first + 1)
    rows(plain, change.format(f"'{'[' * 2000}'"), first + 2)
    # The SDK gives these back.
    rows(plain, change.format("X'7B2261223A317D'"), first + 3)
    rows(plain, change.format("'[NaN, 5]'"), first + 4)
    report = import_sessions(store, plain)
    named = [each.split()[1] for each in report.note(UNREADABLE).examples]
    assert named == [str(first), str(first + 1), str(first + 2)]
    assert report.note(UNREADABLE).number == 3
    items = run(CasstoreSession(store, "run").get_items())
    assert encoded(items[:2]) == ['{"a": 1}', "[NaN, 5]"]
    assert import_sessions(store, plain).part("items").imported == 0


def test_many_bad_messages_are_counted_and_the_first_named(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "a.db"
    with closing(SQLiteSession("s", path)) as session:
        add(session, *(say(str(n)) for n in range(150)))
    rows(path, "UPDATE agent_messages SET message_data = '{' WHERE id <= 120")
    report = import_sessions(store, path)
    note = report.note(UNREADABLE)
    assert (note.number, len(note.examples), report.part("items").imported) == (120, 100, 30)


def test_messages_on_no_branch_are_reported(advanced: Path, store: Store) -> None:
    with closing(SQLiteSession("talk", advanced)) as session:
        talk(session, "beside the branches")
    with closing(SQLiteSession("plain", advanced)) as session:
        talk(session, "a plain one in the same file")
    report = import_sessions(store, advanced)
    assert (report.note(UNLINKED).number, report.note(UNREADABLE).number) == (2, 0)
    assert texts(run(CasstoreSession(store, "plain").get_items()))[0].startswith("a plain one")
    with closing(open_advanced(advanced)) as theirs:
        run(require_same(theirs, CasstoreSession(store, "talk")))


def test_a_message_on_no_branch_that_holds_no_json_is_reported_once(
    advanced: Path, store: Store
) -> None:
    with closing(SQLiteSession("talk", advanced)) as session:
        talk(session, "beside the branches")
    rows(
        advanced,
        "UPDATE agent_messages SET message_data = '{' "
        "WHERE id = (SELECT max(id) FROM agent_messages)",
    )
    report = import_sessions(store, advanced)
    assert (report.note(UNLINKED).number, report.note(UNREADABLE).number) == (1, 1)


def test_messages_that_were_popped_by_the_plain_class_are_gone(
    advanced: Path, store: Store
) -> None:
    with closing(SQLiteSession("talk", advanced)) as session:
        for _ in range(6):
            run(session.pop_item())
    import_sessions(store, advanced)
    ours = CasstoreSession(store, "talk")
    with closing(open_advanced(advanced)) as theirs:
        for each in run(theirs.list_branches()):
            name = each["branch_id"]
            assert encoded(run(ours.get_items(branch_id=name))) == encoded(
                run(theirs.get_items(branch_id=name))
            )
            # Also for turns of which nothing is left.
            assert run(ours.get_turn_usage(branch_id=name)) == run(
                theirs.get_turn_usage(branch_id=name)
            )


def test_messages_without_a_session_are_moved_too(plain: Path, store: Store) -> None:
    rows(plain, "DELETE FROM agent_sessions WHERE session_id = 'run'")
    assert import_sessions(store, plain).part("sessions").found == 4
    with closing(SQLiteSession("run", plain)) as theirs:
        ours = CasstoreSession(store, "run")
        assert encoded(run(ours.get_items())) == encoded(run(theirs.get_items()))


# --- databases of all kinds -------------------------------------------------------------------


def test_sessions_in_tables_with_other_names_are_imported_on_request(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "a.db"
    tables: dict[str, Any] = {"sessions_table": "my_sessions", "messages_table": "my_messages"}
    with closing(SQLiteSession("run", path, **tables)) as session:
        talk(session, "mine")
    with pytest.raises(ForeignStoreError, match="other names"):
        import_sessions(store, path)
    import_sessions(store, path, **tables)
    require_plain_same(path, store, **tables)
    # Branches of others are about others' messages, whose numbers are the same.
    with closing(open_advanced(path, "run")) as session:
        talk(session, "theirs")
        run(session.create_branch_from_turn(1, "b"))
        talk(session, "in a branch")
    assert import_sessions(store, path, **tables).part("branches").found == 1
    with casstore.open(tmp_path / "second", "relaxed") as second:
        import_sessions(second, path)
        require_advanced_same(path, second)


def test_branches_in_tables_with_other_names_are_imported(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "a.db"
    tables: dict[str, Any] = {"sessions_table": "S", "messages_table": "Messages"}
    with closing(open_advanced(path, **tables)) as theirs:
        talk(theirs, "one", "two")
        run(theirs.create_branch_from_turn(2, "b"))
        talk(theirs, "three")
        import_sessions(store, path, sessions_table="s", messages_table="messages")
        run(theirs.switch_to_branch("main"))
        run(require_same(theirs, CasstoreSession(store, "talk")))


def test_the_async_session_of_the_sdk_writes_the_same_files(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "a.db"

    async def write() -> None:
        session = AsyncSQLiteSession("run", path)
        await session.add_items(ODD)
        await session.close()

    run(write())
    import_sessions(store, path)
    require_plain_same(path, store)


def test_items_that_were_encrypted_stay_so(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "a.db"

    def wrapped(session: Any) -> Any:
        return EncryptedSession("run", session, encryption_key="a key of the test")

    with closing(SQLiteSession("run", path)) as theirs:
        add(wrapped(theirs), *ODD[:2])
    import_sessions(store, path)
    ours = CasstoreSession(store, "run")
    assert encoded(run(wrapped(ours).get_items())) == encoded(ODD[:2])
    assert "größer" not in json.dumps(run(ours.get_items()), ensure_ascii=False)


def test_a_database_without_branch_reservations_is_imported(advanced: Path, store: Store) -> None:
    rows(advanced, "DROP TABLE branch_reservations")
    rows(advanced, "DROP TABLE session_clear_generations")
    copy = Path(shutil.copy(advanced, advanced.with_name("copy.db")))
    import_sessions(store, advanced)
    require_advanced_same(copy, store)


def test_a_database_in_use_is_read_as_of_one_moment(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "live.db"
    with closing(open_advanced(path)) as session:
        talk(session, "one")
        assert Path(f"{path}-wal").stat().st_size
        before = [path.read_bytes(), Path(f"{path}-wal").read_bytes()]

        def meanwhile(step: Step) -> None:
            if step.phase == "copy" and len(run(session.get_items())) == 2:
                assert [path.read_bytes(), Path(f"{path}-wal").read_bytes()] == before
                talk(session, "two")

        report = import_sessions(store, path, progress=meanwhile)
        assert (report.part("items").found, len(run(session.get_items()))) == (2, 4)
        assert import_sessions(store, path).part("items").imported == 2
        run(require_same(session, CasstoreSession(store, "talk")))


def test_a_database_that_changes_while_it_is_read_is_reported(plain: Path, store: Store) -> None:
    def write(step: Step) -> None:
        if step.phase == "verify" and "late" not in ids(plain):
            with closing(SQLiteSession("late", plain)) as session:
                talk(session, "late")

    with pytest.raises(ConflictError, match="once more"):
        import_sessions(store, plain, progress=write)
    assert import_sessions(store, plain).part("items").imported == 2


def test_order_is_that_of_the_sdk_whatever_the_rows_say(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "a.db"
    with closing(open_advanced(path)) as theirs:
        talk(theirs, "one", "two", "three")
        run(theirs.create_branch_from_turn(3, "b"))
        talk(theirs, "four")
        # Twice on one branch, before what it stood behind, and behind something else.
        rows(
            path,
            "INSERT INTO message_structure (session_id, message_id, branch_id, message_type, "
            "sequence_number, user_turn_number, branch_turn_number) VALUES "
            "('talk', 3, 'b', 'user', 0, 1, 1), ('talk', 6, 'b', 'other', 100, 9, 9), "
            "('talk', 6, 'c', 'other', 50, 0, 0), ('talk', 1, 'c', 'user', 60, 1, 1), "
            "('talk', 2, 'c', 'assistant', 61, 1, 1)",
        )
        rows(path, "UPDATE message_structure SET sequence_number = -1 WHERE id = 4")
        import_sessions(store, path)
        ours = CasstoreSession(store, "talk")
        for branch in ("main", "b", "c"):
            items = run(theirs.get_items(branch_id=branch))
            assert len(items) > 2
            assert encoded(run(ours.get_items(branch_id=branch))) == encoded(items)
        assert import_sessions(store, path).part("items").imported == 0


def test_messages_are_in_the_order_in_which_they_came_whatever_the_clock_said(
    plain: Path, store: Store
) -> None:
    rows(plain, "UPDATE agent_messages SET created_at = datetime('2024-01-01', -id || ' hours')")
    import_sessions(store, plain)
    require_plain_same(plain, store)


def test_a_dry_run_reports_the_same_and_writes_nothing(advanced: Path, tmp_path: Path) -> None:
    rows(advanced, "UPDATE agent_messages SET message_data = '{' WHERE id = 2")
    place = tmp_path / "store"
    with casstore.open(place, "relaxed") as store:
        talk(CasstoreSession(store, "popped"), "more than the source has")
    phases: set[str] = set()
    with casstore.open(place, readonly=True) as store:
        told = import_sessions(
            store, advanced, dry_run=True, progress=lambda step: phases.add(step.phase)
        )
        assert [info.meta.session for info in store.sessions()] == ["popped"]
    assert phases == {"look"}
    with casstore.open(place, "relaxed") as store:
        report = import_sessions(store, advanced)
        assert told.dry_run
        assert told.part("items").imported > 0
        assert told._replace(dry_run=False, store_bytes=report.store_bytes) == report._replace(
            store_bytes_before=told.store_bytes_before
        )
        assert import_sessions(store, advanced, dry_run=True).part("items").imported == 0


def test_only_the_named_sessions_are_imported(plain: Path, store: Store) -> None:
    report = import_sessions(store, plain, sessions=["odd", "run", "odd"])
    items = report.part("items")
    assert (report.part("sessions").found, items.imported) == (2, items.found)
    with pytest.raises(InvalidInputError, match="no session 'cleared'"):
        import_sessions(store, plain, sessions=["empty", "cleared"])
    assert store.session("empty").head() is None
    assert import_sessions(store, plain, sessions=[]).part("sessions").found == 0


# --- what cannot be moved ---------------------------------------------------------------------


def test_a_file_of_another_kind_is_refused_by_name(
    plain: Path, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(SourceNotFoundError):
        import_sessions(store, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "text").write_text("no database " * 500)
    with pytest.raises(ForeignStoreError):
        import_sessions(store, tmp_path / "text")
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(ForeignStoreError, match="SQLiteSession"):
        import_sessions(store, tmp_path / "empty")
    rows(plain, "ALTER TABLE agent_messages RENAME COLUMN message_data TO data")
    with pytest.raises(ForeignStoreError, match="SQLiteSession"):
        import_sessions(store, plain)
    assert list(store.sessions()) == []


def test_a_file_that_was_cut_off_is_reported(plain: Path, store: Store, tmp_path: Path) -> None:
    whole = plain.read_bytes()
    for keep in (50, 100, 4096, len(whole) // 3, len(whole) // 2, len(whole) - 5000):
        cut = tmp_path / f"cut-{keep}"
        cut.write_bytes(whole[:keep])
        with pytest.raises((StorageError, ForeignStoreError)):
            import_sessions(store, cut)


def test_a_file_that_another_process_writes_to_is_reported(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.sqlite_source._PATIENCE_S", 0.05)
    path = tmp_path / "a.db"
    with closing(SQLiteSession("run", path)) as session:
        talk(session, "one")
    rows(path, "PRAGMA journal_mode = delete")
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        writer.execute("UPDATE agent_messages SET message_data = '{}'")
        with pytest.raises(BusyError):
            import_sessions(store, path)
        writer.execute("ROLLBACK")
    import_sessions(store, path)
    require_plain_same(path, store)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_may_not_be_written_to_is_read(plain: Path, store: Store) -> None:
    plain.chmod(0o400)
    assert import_sessions(store, plain).part("items").imported > 0


@pytest.mark.parametrize("name", ["", "with \0 in it", "x" * 20_000])
def test_a_name_that_cannot_be_one_here_is_reported_before_its_items_are_read(
    tmp_path: Path, store: Store, items_read: list[int], name: str
) -> None:
    path = tmp_path / "a.db"
    with closing(SQLiteSession(name, path)) as session:
        talk(session, "one")
    for dry_run in (True, False):
        with pytest.raises(InvalidInputError, match="session id"):
            import_sessions(store, path, dry_run=dry_run)
    assert items_read == []
    assert list(store.sessions()) == []


def damaged(statement: str) -> Any:
    return pytest.param(statement, id=statement.split(" WHERE")[0][:40])


@pytest.mark.parametrize(
    "statement",
    [
        damaged("UPDATE turn_usage SET total_tokens = 'many'"),
        damaged("UPDATE message_structure SET session_id = 'other' WHERE session_id = 'talk'"),
        damaged("UPDATE agent_sessions SET session_id = NULL WHERE session_id = 'talk'"),
        damaged("UPDATE branch_reservations SET branch_id = CAST(branch_id AS BLOB)"),
    ],
)
def test_rows_that_the_sdk_never_writes_are_reported(
    advanced: Path, store: Store, statement: str
) -> None:
    rows(advanced, statement)
    with pytest.raises(CorruptionError):
        import_sessions(store, advanced)


@pytest.mark.parametrize("table", ["agent_sessions", "agent_messages"])
def test_a_view_without_end_in_the_place_of_a_table_is_refused(
    plain: Path, store: Store, table: str
) -> None:
    """Counting its rows kept the import busy for ever, deaf to Ctrl-C."""
    rows(plain, f"ALTER TABLE {table} RENAME TO real")
    rows(
        plain,
        f"""CREATE VIEW {table} AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)
        SELECT x AS id, 's' || x AS session_id, '{{}}' AS message_data, '' AS created_at,
        '' AS updated_at FROM c""",
    )
    with pytest.raises(ForeignStoreError, match="has no tables"):
        import_sessions(store, plain)
    assert list(store.sessions()) == []


# --- much, and at random ------------------------------------------------------------------------


def test_a_commit_holds_a_batch_however_long_the_session_is(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    with closing(SQLiteSession("long", path)) as session:
        add(session, *(say(f"{n:05}" * 60_000) for n in range(40)))
        add(session, *(say(f"{n}") for n in range(600)))
    commits: list[list[int]] = []
    commit = StoreSession.commit

    def spy(self: StoreSession, change: Commit) -> Any:
        commits.append([len(draft.payload["content"]) for draft in change.append])
        return commit(self, change)

    monkeypatch.setattr(StoreSession, "commit", spy)
    assert import_sessions(store, path).part("items").imported == 640
    assert sum(len(each) for each in commits) == 640
    assert max(sum(each) for each in commits) < PAGE_BYTES + 300_000
    assert max(len(each) for each in commits) == PAGE_ROWS
    require_plain_same(path, store)


@pytest.mark.parametrize("seed", range(4))
def test_sessions_with_random_histories_are_imported_correctly(
    tmp_path: Path, store: Store, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 2)
    chance = random.Random(seed)
    path = tmp_path / "a.db"
    with closing(open_advanced(path)) as session:

        async def do(number: int, kinds: str) -> None:
            branches = [each["branch_id"] for each in await session.list_branches()]
            turns = await session.get_conversation_turns()
            match chance.choice(kinds):
                case "a":
                    whose: list[Callable[[str], Any]] = [say, reply]
                    items = [chance.choice(whose)(f"{number}") for _ in range(chance.randint(1, 4))]
                    await session.add_items(items)
                case "b" if turns:
                    await session.create_branch_from_turn(chance.choice(turns)["turn"], f"{number}")
                case "s" if branches:
                    await session.switch_to_branch(chance.choice(branches))
                case "p":
                    await session.pop_item()
                case "d" if set(branches) > {"main"}:
                    name = chance.choice(sorted(set(branches) - {"main"}))
                    await session.delete_branch(name, force=True)
                case "u":
                    await session.store_run_usage(Result(total=number + 1))

        async def everything(numbers: range, kinds: str) -> None:
            await session.add_items([say("a beginning")])
            for number in numbers:
                await do(number, kinds)

        imported = 0
        for part in range(3):
            # What is taken away after it was moved is still in the store.
            kinds = "aaaabbsuppd" if part == 0 else "aaaabbsu"
            run(everything(range(part * 12, part * 12 + 12), kinds))
            report = import_sessions(store, path)
            imported += report.part("items").imported
            assert imported == report.part("items").found
            run(require_standing(session, CasstoreSession(store, "talk")))


async def require_standing(theirs: Any, ours: Any) -> None:
    """As ``require_same``, of an object that may stand on another branch than main."""
    at = theirs._branch_state
    theirs._branch_state = ("main", at[1])
    try:
        await require_same(theirs, ours)
    finally:
        theirs._branch_state = at
