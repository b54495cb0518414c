"""Conversations of the OpenAI Agents SDK: with its runner, and beside its own sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the extra: pip install '.[openai-agents]'")

from agents import Agent, RunConfig, Runner, SessionSettings, function_tool
from agents.extensions.memory import AdvancedSQLiteSession
from agents.memory import Session

from casstore import Commit, NodeDraft
from casstore.adapters.openai_agents import CasstoreSession
from casstore.adapters.openai_agents.conversation import Conversation, CurrentBranch
from casstore.errors import (
    BranchNotFoundError,
    BusyError,
    HeadConflictError,
    InvalidInputError,
    InvalidValueError,
    LeaseHeldError,
    SessionDeletedError,
)
from casstore.maintenance import gc, retention
from casstore.maintenance.retention import Policy
from casstore.session.session import Session as StoreSession
from casstore.store import Store
from tests.adapters.openai_agents.scripted_model import ScriptedModel, call

QUIET = RunConfig(tracing_disabled=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def say(text: Any) -> Any:
    return {"role": "user", "content": text}


def reply(text: str) -> Any:
    return {"role": "assistant", "content": text}


def talk(session: Any, *texts: str) -> None:
    """Each text said by the user and answered, in a step of its own."""

    async def add() -> None:
        for text in texts:
            await session.add_items([say(text), reply(f"{text}!")])

    run(add())


def texts(items: list[Any]) -> list[str]:
    return [item["content"] for item in items]


def shown(session: Any, branch: str | None = None) -> list[str]:
    return texts(run(session.get_items(branch_id=branch)))


@pytest.fixture
def session(store: Store) -> Any:
    return CasstoreSession(store, "talk")


@pytest.fixture
def advanced(tmp_path: Path) -> Iterator[Any]:
    session = AdvancedSQLiteSession(
        session_id="talk", db_path=tmp_path / "talk.sqlite", create_tables=True
    )
    yield session
    session.close()


# --- the SDK's runner -----------------------------------------------------------------------


@function_tool
def weather(city: str) -> str:
    """The weather."""
    return f"rain in {city}"


def test_casstore_session_implements_the_session_protocol_of_the_sdk(session: Any) -> None:
    assert isinstance(session, Session)


def test_the_runner_continues_a_stored_conversation(store: Store, session: Any) -> None:
    model = ScriptedModel(
        [call("weather", '{"city": "Ulm"}')], "it rains", "take an umbrella", "as I said"
    )
    agent = Agent(name="a", model=model, tools=[weather])

    async def converse() -> None:
        await Runner.run(agent, "how is it?", session=session, run_config=QUIET)
        await Runner.run(agent, "what to do?", session=session, run_config=QUIET)

    run(converse())
    kinds = [item.get("type", item.get("role")) for item in run(session.get_items())]
    assert kinds == [
        "user", "function_call", "function_call_output", "message", "user", "message",
    ]  # fmt: skip
    # Another process: the model is shown everything that was said.
    again = CasstoreSession(store, "talk")
    run(Runner.run(agent, "sure?", session=again, run_config=QUIET))
    assert len(model.inputs[-1]) == 7
    assert model.inputs[-1][2]["output"] == "rain in Ulm"
    assert store.session("talk").info().first_user_message == "how is it?"
    assert store.session("talk").info().user_message_count == 3


def test_streamed_runs_are_stored(session: Any) -> None:
    agent = Agent(name="a", model=ScriptedModel("one", "two"))

    async def converse() -> None:
        for text in ("first", "second"):
            result = Runner.run_streamed(agent, text, session=session, run_config=QUIET)
            async for _ in result.stream_events():
                pass
            await session.store_run_usage(result)

    run(converse())
    assert [turn.number for turn in run(session.turns())] == [1, 2]
    assert run(session.get_session_usage())["total_tokens"] == 240


def test_a_run_can_branch_from_any_turn(session: Any) -> None:
    model = ScriptedModel("one", "two", "other")
    agent = Agent(name="a", model=model)

    async def converse() -> None:
        await Runner.run(agent, "first", session=session, run_config=QUIET)
        await Runner.run(agent, "second", session=session, run_config=QUIET)
        await session.branch(2, "another way")
        await Runner.run(agent, "instead", session=session, run_config=QUIET)

    run(converse())
    assert [item["content"] for item in model.inputs[2] if item.get("role") == "user"] == [
        "first",
        "instead",
    ]
    assert [turn.items[0]["content"] for turn in run(session.turns("main"))] == ["first", "second"]


def test_a_limit_returns_the_last_items(store: Store, session: Any) -> None:
    talk(session, "a", "b", "c")
    assert texts(run(session.get_items(limit=3))) == ["b!", "c", "c!"]
    assert run(session.get_items(limit=0)) == []
    assert len(run(session.get_items(limit=100))) == 6
    assert len(run(session.get_items(limit=-1))) == 6
    few = CasstoreSession(store, "talk", session_settings=SessionSettings(limit=2))
    assert texts(run(few.get_items())) == ["c", "c!"]
    assert len(run(few.get_items(limit=4))) == 4
    model = ScriptedModel("d!")
    run(Runner.run(Agent(name="a", model=model), "d", session=few, run_config=QUIET))
    assert len(model.inputs[0]) == 3


# --- as AdvancedSQLiteSession does ------------------------------------------------------------

TOOLS: list[Any] = [
    say("look it up"),
    {"type": "function_call", "name": "search", "call_id": "1", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "found"},
    {"type": "function_call", "name": "search", "call_id": "2", "arguments": "{}"},
    {"type": "function_call", "name": "read", "namespace": "files", "call_id": "3"},
    {"type": "function_call", "name": "same", "namespace": "same", "call_id": "4"},
    {"type": "mcp_call", "server_label": "srv", "name": "go", "id": "5"},
    {"type": "mcp_approval_request", "server_label": "srv", "id": "6"},
    {"type": "shell_call", "call_id": "7"},
    {"type": "tool_search_output", "call_id": "8"},
    reply("done"),
    # Maps come back in order of their keys, which shows in a preview.
    say([{"text": "And Again", "type": "input_text"}, {"image_url": "x", "type": "input_image"}]),
    {"type": "tool_search_call", "call_id": "9"},
    {"type": "tool_search_output", "call_id": "9"},
    {"type": "reasoning", "id": "r", "summary": []},
    reply("done again " + "x" * 200),
]  # fmt: skip


class Result:
    """What the sessions read of a run's result."""

    def __init__(self, *, total: int) -> None:
        from agents import RunContextWrapper, Usage

        usage = Usage(requests=1, input_tokens=total - 1, output_tokens=1, total_tokens=total)
        self.context_wrapper = RunContextWrapper(context=None, usage=usage)
        self.last_agent = Agent(name="a", model="model-1")


def without_times(found: Any) -> Any:
    if isinstance(found, list):
        return [without_times(each) for each in found]
    if isinstance(found, dict):
        times = ("timestamp", "created_at")
        return {key: type(each) if key in times else each for key, each in found.items()}
    return found


async def scenario(session: Any) -> list[Any]:
    """Everything that a program might ask, and each answer."""
    said: list[Any] = []

    async def ask(work: Any) -> Any:
        try:
            answer = without_times(await work)
        except ValueError as exc:
            # Whose words they are does not matter, that it is refused does.
            answer = isinstance(exc, ValueError)
        said.append(answer)
        return answer

    async def look(branch: str | None = None) -> None:
        for name in (
            "get_items", "get_conversation_turns", "get_conversation_by_turns",
            "get_session_usage", "get_turn_usage",
        ):  # fmt: skip
            await ask(getattr(session, name)(branch_id=branch))
        said.append(sorted(map(str, await session.get_tool_usage(branch_id=branch))))
        await ask(session.list_branches())

    await ask(session.pop_item())
    await ask(session.create_branch_from_turn(1))
    await session.add_items([reply("before any turn")])
    await session.add_items(TOOLS)
    await session.store_run_usage(Result(total=10))
    await look()
    await session.add_items([say("third")])
    await session.store_run_usage(Result(total=20))
    await session.store_run_usage(Result(total=30))
    await look()
    await ask(session.get_turn_usage(3))
    await ask(session.get_turn_usage(7))
    await ask(session.find_turns_by_content("AND again"))
    await ask(session.find_turns_by_content("image"))
    await ask(session.find_turns_by_content("."))
    await ask(session.create_branch_from_turn(3, "three"))
    await look()
    await session.add_items([say("instead"), reply("well")])
    await session.store_run_usage(Result(total=40))
    await look()
    await look("main")
    await ask(session.create_branch_from_content("again", "again"))
    await ask(session.create_branch_from_content("never said"))
    await ask(session.create_branch_from_turn(9))
    await ask(session.create_branch_from_turn(1, "three"))
    await ask(session.create_branch_from_turn(1, "main"))
    await ask(session.create_branch_from_turn(1, "  "))
    await ask(session.switch_to_branch("nowhere"))
    await ask(session.delete_branch("main"))
    await ask(session.delete_branch("again"))
    await ask(session.delete_branch("nowhere"))
    await session.switch_to_branch("three")
    await ask(session.delete_branch("again"))
    await look()
    await ask(session.pop_item())
    await look()
    await ask(session.pop_item())
    await look()
    await ask(session.delete_branch("three", force=True))
    await ask(session.create_branch_from_turn(1, "three"))
    await look()
    await session.clear_session()
    await ask(session.get_items())
    await ask(session.get_session_usage())
    await ask(session.get_conversation_turns())
    await session.add_items([say("anew")])
    await ask(session.create_branch_from_turn(1, "again"))
    await look()
    return said


def test_it_answers_as_advanced_sqlite_session_does(session: Any, advanced: Any) -> None:
    ours, theirs = run(scenario(session)), run(scenario(advanced))
    assert len(ours) == len(theirs)
    for at, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our == their, at


def test_turns_are_found_by_what_the_user_said_as_advanced_sqlite_session_finds_them(
    session: Any, advanced: Any
) -> None:
    async def found(one: Any) -> list[list[int]]:
        # What was said before the user spoke is in no turn.
        await one.add_items([reply("Ärger before anybody"), say("Ärger, and K"), say("ärger, k")])
        searches = ("Ärger", "ärger", "ÄRGER", "K", "\N{KELVIN SIGN}", "before", "")
        return [
            [turn["turn"] for turn in await one.find_turns_by_content(text)] for text in searches
        ]

    ours = run(found(session))
    assert ours == run(found(advanced))
    assert ours[:4] == [[1], [2], [1], [1, 2]]


# --- branches -------------------------------------------------------------------------------


def test_a_branch_copies_nothing(
    store: Store, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows_of_branching(turns: int) -> tuple[int, int]:
        talk(session, *(f"{n} " + "x" * 300 for n in range(turns)))
        writes: list[Any] = []
        write = store.engine.write

        def watched(one: Any) -> Any:
            writes.append(one)
            return write(one)

        with monkeypatch.context() as patch:
            patch.setattr(store.engine, "write", watched)
            run(session.branch(turns // 2))
        [one] = writes
        run(session.switch("main"))
        return len(one.rows), sum(len(item.data) for item in one.objects)

    short, long = rows_of_branching(4), rows_of_branching(60)
    # The head, and where it was before; nothing that grows with the conversation.
    assert short[0] == long[0] == 2
    assert long[1] < short[1] + 100


def test_branches_of_branches(session: Any) -> None:
    talk(session, "a", "b", "c")
    assert run(session.branch(2, "one")) == "one"
    talk(session, "d", "e")
    run(session.branch(3, "two"))
    talk(session, "f")
    run(session.branch(name="three"))
    talk(session, "g")
    assert shown(session) == ["a", "a!", "d", "d!", "f", "f!", "g", "g!"]
    assert shown(session, "two") == ["a", "a!", "d", "d!", "f", "f!"]
    assert shown(session, "one") == ["a", "a!", "d", "d!", "e", "e!"]
    assert shown(session, "main") == ["a", "a!", "b", "b!", "c", "c!"]
    found = run(session.branches())
    assert [(each.name, each.items, each.turns) for each in found] == [
        ("main", 6, 3), ("one", 6, 3), ("two", 6, 3), ("three", 8, 4),
    ]  # fmt: skip
    assert session.current_branch == "three"
    run(session.branch(1, "empty"))
    assert shown(session) == []
    assert run(session.pop_item()) is None


def test_unnamed_branches_get_unique_names(session: Any) -> None:
    talk(session, "a")
    names = {run(session.branch()) for _ in range(4)}
    assert len(names) == 4


def test_each_session_object_has_its_own_current_branch(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(2, "side"))
    assert CasstoreSession(store, "talk").current_branch == "main"
    other: Any = CasstoreSession(store, "talk", branch="side")
    talk(other, "c")
    assert shown(session) == ["a", "a!", "c", "c!"]
    run(session.switch("main"))
    assert shown(other) == ["a", "a!", "c", "c!"]
    run(other.delete_branch("side", force=True))
    assert other.current_branch == "main"
    with pytest.raises(BranchNotFoundError):
        run(session.switch("side"))
    gone: Any = CasstoreSession(store, "talk", branch="side")
    with pytest.raises(BranchNotFoundError):
        run(gone.get_items())
    with pytest.raises(BranchNotFoundError):
        talk(gone, "lost?")
    assert shown(session) == ["a", "a!", "b", "b!"]


def test_the_session_info_does_not_count_a_deleted_branch(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(1, "side"))
    talk(session, "c", "d", "e")
    assert store.session("talk").info().user_message_count == 3
    run(session.delete_branch("side", force=True))
    assert store.session("talk").info().user_message_count == 2
    run(session.prune())
    assert store.session("talk").info().user_message_count == 2


def test_a_clear_moves_every_session_object_to_main(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(2, "side"))
    other: Any = CasstoreSession(store, "talk")
    run(other.clear_session())
    talk(session, "new")
    assert (session.current_branch, shown(other)) == ("main", ["new", "new!"])
    with pytest.raises(InvalidInputError):
        run(session.branch(1, "side"))


def test_a_call_concurrent_with_a_clear_continues_on_main(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(2, "side"))
    # As a call has found it, before it does anything.
    conversation, found = Conversation(store, "talk"), CurrentBranch("side", 0)
    run(session.clear_session())
    conversation.add(found, [say("late")])
    assert conversation.read(found, lambda _, branch, nodes: (branch.name, len(nodes))) == (
        "main",
        1,
    )
    assert shown(session) == ["late"]
    assert conversation.pop(found) == say("late")


def test_usage_of_a_turn_that_was_cleared_is_not_stored(store: Store, session: Any) -> None:
    talk(session, "a")
    other: Any = CasstoreSession(store, "talk")
    run(other.clear_session())
    talk(other, "of another run")
    run(session.store_run_usage(Result(total=10)))
    assert run(session.get_session_usage()) is None


def test_the_ledger_counts_each_run_once(store: Store, session: Any) -> None:
    agent = Agent(name="a", model=ScriptedModel("one", "two"))

    async def converse() -> None:
        for text in ("first", "second"):
            result = await Runner.run(agent, text, session=session, run_config=QUIET)
            await session.store_run_usage(result)
            await session.store_run_usage(result)
        await session.pop_item()
        await session.pop_item()

    run(converse())
    [entry] = store.session("talk").usage()
    assert entry[0] == "openai-agents"
    assert entry[2:] == (200, 30, 120, 10)
    # What is noted by turns goes with its turn.
    [row] = run(session.get_turn_usage())
    assert row["input_tokens_details"]["cached_tokens"] == 60
    assert row["output_tokens_details"] == {"reasoning_tokens": 5}


def test_the_ledger_keeps_the_largest_usage_reported_for_a_turn(store: Store, session: Any) -> None:
    run(session.add_items([say("first")]))
    for total in (30, 10):
        run(session.store_run_usage(Result(total=total)))
    [entry] = store.session("talk").usage()
    assert entry[2:4] == (29, 1)
    # What is noted for the turn is the latest.
    assert run(session.get_turn_usage(1))["total_tokens"] == 10


# --- other writers ----------------------------------------------------------------------------


def test_two_writers_on_one_branch_lose_nothing(store: Store, session: Any) -> None:
    barrier = threading.Barrier(3)

    def write(name: str) -> None:
        own: Any = CasstoreSession(store, "talk")
        barrier.wait()
        talk(own, *(f"{name}{n}" for n in range(15)))

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = shown(session)
    assert len(found) == 90
    for name in "abc":
        own = [text for text in found if text[0] == name]
        assert own == [f"{name}{n}{end}" for n in range(15) for end in ("", "!")]
    # What was added together stays together.
    assert all(found[at + 1] == found[at] + "!" for at in range(0, 90, 2))
    assert run(session.branches())[0].turns == 45


def test_calls_take_effect_in_their_order(session: Any) -> None:
    async def together() -> None:
        await session.add_items([say("first")])
        await asyncio.gather(
            *(session.add_items([say(str(n))]) for n in range(20)),
            session.pop_item(),
            session.branch(name="side"),
            session.add_items([say("on the side")]),
            session.switch("main"),
            session.add_items([say("on main")]),
        )

    run(together())
    numbers = [str(n) for n in range(19)]
    assert shown(session, "main") == ["first", *numbers, "on main"]
    assert shown(session, "side") == ["first", *numbers, "on the side"]


def test_a_cancelled_write_has_happened_when_the_caller_gets_the_cancellation(
    store: Store, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    commit = StoreSession.commit

    def slow(self: Any, change: Any) -> Any:
        begun.set()
        go_on.wait(30)
        return commit(self, change)

    monkeypatch.setattr(StoreSession, "commit", slow)

    async def cancel() -> None:
        task = asyncio.create_task(session.add_items([say("kept")]))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.session("talk").head() is not None

    run(cancel())
    assert shown(session) == ["kept"]


def test_the_event_loop_never_waits_for_the_disk(
    store: Store, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    for name in ("write", "get_rows", "scan_rows", "get_many"):
        real = getattr(store.engine, name, None)
        if real is None:
            continue

        def watched(*args: Any, real: Any = real, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return real(*args, **options)

        monkeypatch.setattr(store.engine, name, watched)
    run(scenario(session))
    assert threads
    assert threading.get_ident() not in threads


def test_a_conversation_that_keeps_changing_raises_busy_error(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, change: Any) -> None:
        raise HeadConflictError("talk", 0, 1)

    monkeypatch.setattr(StoreSession, "commit", fail)
    with pytest.raises(BusyError):
        talk(session, "a")


def test_a_lease_of_another_owner_is_respected(store: Store, session: Any) -> None:
    talk(session, "a")
    lease = store.session("talk").claim_lease("worker", 60_000)
    assert lease is not None
    with pytest.raises(LeaseHeldError):
        talk(session, "b")
    store.session("talk").release_lease(lease)
    talk(session, "b")
    assert shown(session) == ["a", "a!", "b", "b!"]


# --- items ------------------------------------------------------------------------------------


def test_json_items_round_trip(session: Any) -> None:
    items: list[Any] = [
        {"role": "user", "content": "half a pair \ud83d"},
        {"role": "user", "content": "x" * 100_000},
        {"type": "reasoning", "n": 2**70, "none": None, "float": 0.1, "list": []},
        {"json": "a"},
    ]
    run(session.add_items(items))
    assert run(session.get_items()) == items
    assert [turn.number for turn in run(session.turns())] == [1, 2]


def test_an_invalid_item_is_refused_and_nothing_is_written(store: Store, session: Any) -> None:
    with pytest.raises(InvalidInputError):
        run(session.add_items([say("fine"), "not fine"]))
    with pytest.raises(InvalidValueError):
        run(session.add_items([say("fine"), {"content": object()}]))
    run(session.add_items([]))
    assert store.session("talk").head() is None


def test_a_session_of_plain_messages_is_taken_over(store: Store, session: Any) -> None:
    plain = [say("a"), reply("a!"), say("b"), reply("b!")]
    drafts = [NodeDraft(f"n{at}", item) for at, item in enumerate(plain)]
    store.session("talk").commit(Commit(append=drafts))
    assert run(session.get_items()) == plain
    talk(session, "c")
    run(session.branch(2, "side"))
    assert shown(session) == ["a", "a!"]
    run(session.switch("main"))
    run(session.branch(3, "later"))
    assert shown(session) == ["a", "a!", "b", "b!"]
    with pytest.raises(InvalidInputError):
        run(session.branch(4))


def test_a_session_with_foreign_state_is_refused(store: Store, session: Any) -> None:
    from casstore import Checkpoint

    own = Commit(checkpoint=Checkpoint(turn_state={"mine": 1}))
    store.session("talk").commit(own)
    with pytest.raises(InvalidInputError):
        talk(session, "a")
    assert store.session("talk").checkpoint().turn_state == {"mine": 1}


def test_a_fork_of_the_session_is_a_conversation(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(2, "side"))
    store.fork("talk", "copy")
    copy: Any = CasstoreSession(store, "copy", branch="side")
    talk(copy, "c")
    assert shown(copy) == ["a", "a!", "c", "c!"]
    assert shown(session) == ["a", "a!"]


# --- what stays, and what goes ----------------------------------------------------------------


def used_bytes(store: Store) -> int:
    return store.engine.used_bytes()  # type: ignore[attr-defined,no-any-return]


LONG = [f"{n:04d}" * 1000 for n in range(40)]


def digests(store: Store) -> list[bytes]:
    return [node.digest for node in store.session("talk").nodes("full")]


def test_gc_and_retention_keep_every_branch(store: Store, session: Any) -> None:
    talk(session, *LONG[:4])
    run(session.branch(2, "side"))
    talk(session, "on the side")
    run(session.switch("main"))
    talk(session, "on main")
    retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    gc.collect(store, grace_ms=0)
    fresh: Any = CasstoreSession(store, "talk")
    assert shown(fresh)[-2:] == ["on main", "on main!"]
    assert shown(fresh, "side") == [LONG[0], LONG[0] + "!", "on the side", "on the side!"]


@pytest.mark.parametrize("policy", [None, Policy(everything=True)])
def test_clearing_a_session_frees_its_objects(
    store: Store, session: Any, policy: Policy | None
) -> None:
    talk(session, "small")
    retention.set_policy(store, policy, "talk")
    talk(session, *LONG)
    run(session.branch(2, "side"))
    gone = digests(store)
    run(session.clear_session())
    assert [entry.revision for entry in store.session("talk").history()] == [43]
    gc.collect(store, grace_ms=0)
    assert store.missing(gone) == gone
    assert run(session.get_items()) == []
    talk(session, "again")
    assert shown(session) == ["again", "again!"]


def test_pruning_frees_items_that_no_branch_reaches(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.store_run_usage(Result(total=10)))
    run(session.branch(2, "side"))
    talk(session, *LONG)
    run(session.branch(name="tip"))
    popped = run(session.pop_item())
    assert popped == reply(LONG[-1] + "!")
    before = digests(store)
    run(session.delete_branch("side"))
    run(session.pop_item())
    # The other ends one turn before: of the deleted branch only that turn is nobody's.
    gc.collect(store, grace_ms=0)
    assert store.missing(before) == []
    assert run(session.prune()) == 2
    gc.collect(store, grace_ms=0)
    assert shown(session)[-1] == LONG[-2] + "!"
    assert shown(session, "main") == ["a", "a!", "b", "b!"]
    assert run(session.get_session_usage())["total_tokens"] == 10
    run(session.delete_branch("tip", force=True))
    assert run(session.prune()) == 78
    assert run(session.prune()) == 0
    gc.collect(store, grace_ms=0)
    assert len(store.session("talk").nodes("full")) == 4
    assert shown(session) == ["a", "a!", "b", "b!"]
    run(session.branch(2))
    assert shown(session) == ["a", "a!"]
    talk(session, "c")
    assert shown(session) == ["a", "a!", "c", "c!"]


def test_pruning_keeps_the_current_branch_of_a_session(store: Store, session: Any) -> None:
    talk(session, "a", "b")
    run(session.branch(2, "side"))
    talk(session, "c", "d")
    run(session.pop_item())
    before = store.session("talk").head()
    assert run(session.prune()) == 1
    after = store.session("talk").head()
    assert before is not None
    assert after is not None
    assert after.leaf == before.leaf
    state = store.session("talk").load()
    assert state is not None
    assert [node.payload["content"] for node in state.nodes if node.payload["role"] == "user"] == [
        "a", "c", "d",
    ]  # fmt: skip


def test_pruning_handles_hidden_items(store: Store, session: Any) -> None:
    talk(session, "a", "my password", "c")
    [hidden] = [
        node for node in store.session("talk").nodes() if node.payload == say("my password")
    ]
    store.session("talk").tombstone([hidden.id])
    assert shown(session) == ["a", "a!", "my password!", "c", "c!"]
    assert run(session.prune()) == 1
    gc.collect(store, grace_ms=0)
    assert hidden.digest not in store
    assert shown(session) == ["a", "a!", "my password!", "c", "c!"]


def test_a_deleted_session_frees_its_objects_and_refuses_new_items(
    store: Store, session: Any
) -> None:
    talk(session, *LONG[:3])
    gone = digests(store)
    store.delete_session("talk")
    gc.collect(store, grace_ms=0)
    assert store.missing(gone) == gone
    with pytest.raises(SessionDeletedError):
        talk(session, "a")
