"""power-loop's own agent loop on casstore, by a changed import; its faults gone.

Every scenario runs on the original store as well, where the two must agree.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("power_loop", reason="power-loop is not installed")

from llm_client.interface import LLMResponse, LLMTokenUsage
from power_loop.agent.sink import SQLiteSink
from power_loop.agent.stateful_loop import StatefulAgentLoop
from power_loop.agent.types import AgentLoopConfig
from power_loop.contracts.errors import SessionPendingError
from power_loop.contracts.tools import ToolDefinition
from power_loop.runtime import session_store as original
from power_loop.runtime.compact import DefaultCompactor
from power_loop.runtime.spec import run_agent_spec
from power_loop.tools.registry import ToolRegistry

from casstore.compat import power_loop as ours
from casstore.errors import InvalidInputError, SessionDeletedError, SpawnDepthError

Opened = Callable[[], Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens our store, the same one each time, as another process would."""
    stores: list[ours.SessionStore] = []

    def again() -> ours.SessionStore:
        stores.append(ours.SessionStore.open(tmp_path / "deep" / "sessions", durability="relaxed"))
        return stores[-1]

    yield again
    for store in stores:
        store.close()


@pytest.fixture
def both(opened: Opened, tmp_path: Path) -> Iterator[list[Any]]:
    """Our store, and the original."""
    theirs = original.SessionStore.open(tmp_path / "original.db")
    yield [opened(), theirs]
    theirs.close()


class Scripted:
    """A model with scripted answers that records its requests."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[list[dict[str, Any]]] = []

    async def complete(self, request: Any, **_: Any) -> LLMResponse:
        if "compact note" in str(request.system_prompt) or "compact" in str(request.messages[-1]):
            return LLMResponse(f"summary {len(self.asked)}")
        self.asked.append([dict(message) for message in request.messages])
        answer = self._answers.pop(0)
        usage = LLMTokenUsage(prompt_tokens=10, completion_tokens=5, total_tokens=15)
        if isinstance(answer, str):
            return LLMResponse(answer, token_usage=usage)
        return LLMResponse("", tool_calls=answer, token_usage=usage)


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


class Crash(BaseException):
    """The process dies here."""


class Tools:
    """A registry of one tool that may crash once."""

    def __init__(self, crash_at: str | None = None) -> None:
        self.executed: list[str] = []
        self._crash_at = crash_at
        self.registry = ToolRegistry()
        schema = {"type": "object", "properties": {"word": {"type": "string"}}}
        self.registry.register(
            ToolDefinition(name="say", description="says it", input_schema=schema), self._say
        )

    def _say(self, word: str = "") -> str:
        if word == self._crash_at:
            raise Crash
        self.executed.append(word)
        return f"said {word}"


def loop_on(store: Any, *answers: Any, tools: Tools | None = None, **config: Any) -> Any:
    llm: Any = Scripted(*answers)
    return StatefulAgentLoop(
        llm=llm,
        store=store,
        config=AgentLoopConfig(system_prompt="be brief", **config),
        tool_registry=(tools or Tools()).registry,
    )


def test_every_public_call_of_the_original_is_there_with_its_arguments() -> None:
    calls = [name for name in vars(original.SessionStore) if not name.startswith("_")]
    assert len(calls) > 15
    for name in calls:
        theirs = inspect.signature(getattr(original.SessionStore, name)).parameters
        mine = inspect.signature(getattr(ours.SessionStore, name)).parameters
        assert list(mine)[: len(theirs)] == list(theirs), name
        for parameter in theirs.values():
            assert mine[parameter.name].kind == parameter.kind, (name, parameter)
            optional = parameter.default is not inspect.Parameter.empty
            assert (mine[parameter.name].default is not inspect.Parameter.empty) == optional
        assert all(
            mine[extra].default is not inspect.Parameter.empty
            for extra in list(mine)[len(theirs) :]
        )
    for row in ("SessionRow", "MessageRow", "SessionStateRow", "CompactionRow"):
        theirs_fields = list(getattr(original, row).__dataclass_fields__)
        assert list(getattr(ours, row).__dataclass_fields__) == theirs_fields
    for kind in ("SessionKind", "SessionStatus", "SubagentLifecycle", "MessageState"):
        assert list(getattr(ours, kind)) == list(getattr(original, kind))
    assert ours.MAX_SPAWN_DEPTH == original.MAX_SPAWN_DEPTH


def test_a_conversation_is_the_same_on_casstore_and_the_original(both: list[Any]) -> None:
    seen = []
    for store in both:
        loop = loop_on(store, "hello", [call("say", "c1", word="a")], "done", "bye")
        first = loop.send_sync("hi", metadata={"k": 1})
        second = loop.send_sync("use it", first.session_id)
        third = loop.send_sync(
            {"role": "user", "content": [{"type": "text", "text": "x"}]}, first.session_id
        )
        sid = first.session_id
        state = store.get_state(sid)
        row = store.get_session(sid)
        seen.append(
            (
                [(one.status, one.final_text, one.rounds) for one in (first, second, third)],
                loop.get_messages(sid),
                [
                    (one.seq, one.role, one.round_index, one.tool_call_id)
                    for one in store.load_all_messages(sid)
                ],
                (state.next_seq, state.round_index, state.last_compact_seq, state.pending),
                (row.system_prompt, row.config, row.metadata, row.kind, row.lifecycle),
                loop.llm.asked,
            )
        )
    assert seen[0] == seen[1]


def crashed(store: Any) -> str:
    """A session in which the second of three tools has killed the process."""
    calls = [call("say", f"c{word}", word=word) for word in "abc"]
    loop = loop_on(store, calls, tools=Tools(crash_at="b"))
    sid: str = store.create_session()
    with pytest.raises(Crash):
        loop.send_sync("go", sid)
    return sid


def test_after_a_crash_between_tool_results_resume_executes_the_rest(
    opened: Opened, tmp_path: Path
) -> None:
    # The original forgets the calls with the first result, executes nothing, and goes on
    # with a history that no model accepts.
    theirs = original.SessionStore.open(tmp_path / "original.db")
    sid = crashed(theirs)
    tools = Tools()
    loop = loop_on(theirs, "done", tools=tools)
    asyncio.run(loop.resume(sid))
    assert tools.executed == []
    theirs.close()

    sid = crashed(opened())
    store = opened()
    tools = Tools()
    loop = loop_on(store, "done", "more", tools=tools)
    with pytest.raises(SessionPendingError) as refused:
        loop.send_sync("too early", sid)
    assert [one["id"] for one in refused.value.pending_tool_calls] == ["cb", "cc"]
    assert refused.value.assistant_seq == 2
    asyncio.run(loop.resume(sid))
    assert tools.executed == ["b", "c"]
    roles = [(one["role"], one.get("tool_call_id")) for one in loop.get_messages(sid)]
    assert roles == [
        ("user", None), ("assistant", None), ("tool", "ca"), ("tool", "cb"), ("tool", "cc"),
        ("assistant", None),
    ]  # fmt: skip
    assert loop.get_pending(sid) is None
    assert loop.send_sync("now", sid).final_text == "more"


def test_a_crash_before_the_first_result_leaves_all_calls(opened: Opened) -> None:
    # The message and the calls that it makes are one transaction: there is no moment between.
    store = opened()
    sid = store.create_session()
    calls = [call("say", "c1", word="a")]
    store.append_message(sid, role="user", content="go")
    store.append_message(sid, role="assistant", content="", tool_calls=calls, round_index=3)
    assert opened().get_state(sid).pending == {
        "assistant_seq": 2,
        "round_index": 3,
        "tool_call_ids": ["c1"],
        "tool_calls": calls,
    }


def test_abort_gives_each_call_a_result_once(both: list[Any]) -> None:
    seen = []
    for store in both:
        sid = store.create_session()
        calls = [call("say", f"c{word}", word=word) for word in "ab"]
        loop = loop_on(store, calls, "done", tools=Tools(crash_at="a"))
        with pytest.raises(Crash):
            loop.send_sync("go", sid)
        counts = loop.abort_pending(sid, reason="late"), loop.abort_pending(sid)
        again = loop.send_sync("go on", sid)
        seen.append((counts, again.final_text, loop.get_messages(sid)))
    assert seen[0] == seen[1]
    assert seen[0][0] == (2, 0)


def test_child_sessions_are_deleted_according_to_their_lifecycle(both: list[Any]) -> None:
    seen = []
    for store in both:
        parent = loop_on(store, "child says", "child says", "child says")
        root = store.create_session()

        async def spawn(lifecycle: str, loop: Any = parent, above: str = root) -> Any:
            async with loop._runner.session_async(session_id=above):
                return await run_agent_spec(
                    {"name": "n", "system_prompt": "s", "lifecycle": lifecycle},
                    "task",
                    parent_loop=loop,
                )

        done = [asyncio.run(spawn(each)) for each in ("ephemeral", "linked", "detached")]
        left = [(one.lifecycle, one.spawn_depth, one.kind) for one in store.list_children(root)]
        removed = store.close_session(root)
        detached = store.get_session(done[2]["session_id"])
        seen.append(
            (
                [
                    (one["status"], one["final_text"], one["depth"], one["session_id"] is None)
                    for one in done
                ],
                left,
                removed,
                detached.parent_session_id,
                store.get_session(done[1]["session_id"]),
            )
        )
        if store is both[0]:
            # There it stays as deep as it was.
            assert detached.spawn_depth == 0
    assert seen[0] == seen[1]
    assert seen[0][1] == [("linked", 1, "subagent"), ("detached", 1, "subagent")]


def test_a_fourth_level_of_child_sessions_is_refused(opened: Opened) -> None:
    store = opened()
    sid = store.create_session()
    for _ in range(3):
        sid = store.create_session(parent_session_id=sid)
    before = len(store.list_sessions())
    with pytest.raises(ValueError, match="depth 4") as refused:
        store.create_session(parent_session_id=sid)
    assert isinstance(refused.value, SpawnDepthError)
    loop = loop_on(store)

    async def spawn() -> Any:
        async with loop._runner.session_async(session_id=sid):
            spec = {"name": "n", "system_prompt": "s"}
            return await run_agent_spec(spec, "task", parent_loop=loop)

    assert asyncio.run(spawn())["status"] == "rejected"
    assert len(store.list_sessions()) == before


def compacting() -> dict[str, Any]:
    return {"compactor": DefaultCompactor(absolute_threshold=60, keep_last_n=1)}


def test_a_reload_after_compactions_returns_the_history_that_the_loop_had_in_memory(
    opened: Opened,
) -> None:
    store = opened()
    sid = store.create_session()
    words = [f"answer {number} " + "word " * 30 for number in range(6)]
    folds = 0
    for number, answer in enumerate(words):
        loop = loop_on(store, answer, **compacting())
        loop.send_sync(f"question {number} " + "word " * 30, sid)
        # What the model was shown, and its answer: the history in memory.
        in_memory = [
            (one["role"], one.get("name"), one.get("content")) for one in loop.llm.asked[-1]
        ] + [("assistant", None, answer.strip())]
        rows = opened().load_active_messages(sid)
        assert [(one.role, one.name, one.content) for one in rows] == in_memory
        assert len(store.list_compactions(sid)) >= folds
        folds = len(store.list_compactions(sid))
    assert folds >= 3
    assert all(one.from_seq <= one.to_seq for one in store.list_compactions(sid))
    everyone = store.load_all_messages(sid)
    assert [one.seq for one in everyone] == list(range(1, len(everyone) + 1))
    assert [one.content for one in everyone if one.role == "assistant"] == [
        word.strip() for word in words
    ]


def test_several_folds_in_one_run_agree_with_the_original_sink(both: list[Any]) -> None:
    seen = []
    for store in both:
        sid = store.create_session()
        sink = SQLiteSink(store, sid)
        sink.on_message_appended({"role": "system", "content": "first"}, round_index=0)
        memory = ["first"]
        for number in range(9):
            text = f"m{number}"
            sink.on_message_appended({"role": "user", "content": text}, round_index=0)
            memory.append(text)
        for start, end, note in ((1, 5, "one"), (1, 3, "two"), (1, 2, "three")):
            sink.on_compaction(
                fold_start_idx=start, fold_end_idx=end, summary_text=note,
                before_tokens=9, after_tokens=1, round_index=1,
            )  # fmt: skip
            memory[start : end + 1] = [note]
        rows = store.load_active_messages(sid)
        seen.append([one.content for one in rows])
        if store is both[0]:
            assert seen[0] == memory
            assert sum(one.name == "compact_note" for one in rows) == 1
            assert all(one.from_seq <= one.to_seq for one in store.list_compactions(sid))
            note = rows[1]
            assert (note.role, note.meta["compacted_at_round"]) == ("system", 1)
            assert (note.meta["original_tokens"], note.meta["summary_tokens"]) == (9, 1)
    assert seen[1] != memory, "the original has this fault no longer: compare the two again"


def test_usage_is_kept_for_each_send(opened: Opened) -> None:
    store = opened()
    sid = store.create_session()
    for _ in range(2):
        loop = loop_on(store, [call("say", "c1", word="a")], "done")
        loop.send_sync("go", sid)
    sends = [(one.send, one.round, one.tokens.total) for one in store.log.usage(sid)]
    assert {send for send, _, _ in sends} == {1, 2}
    assert len(sends) >= 2
    assert store.log.totals(sid).rounds == len(sends)


def test_a_custom_pending_dict_is_returned_with_its_calls(opened: Opened) -> None:
    store = opened()
    sid = store.create_session()
    calls = [{"id": "x", "name": "t"}, {"id": "y", "name": "u"}]
    given = {"assistant_seq": 7, "tool_call_ids": ["x", "y"], "tool_calls": calls, "mine": 1}
    store.set_pending(sid, given)
    assert store.get_state(sid).pending == given
    store.set_pending(sid, {"assistant_seq": 7, "tool_call_ids": ["y"]})
    assert store.get_state(sid).pending["tool_calls"] == [calls[1]]
    store.set_pending(sid, {})
    assert store.get_state(sid).pending is None
    store.set_pending(sid, {"huge": 1 << 80})
    assert store.get_state(sid).pending == {"huge": 1 << 80}
    store.set_pending(sid, None)
    assert store.get_state(sid).pending is None


@pytest.mark.parametrize(
    "given",
    [
        {"a": 1},
        {"tool_calls": "text"},
        {"tool_calls": [1, "x", None]},
        {"tool_calls": {"id": "c1"}},
        {"tool_call_ids": 5},
        {"tool_call_ids": {"c1": 1}},
        {"tool_call_ids": [1, None, {}]},
        {"tool_call_ids": ["c1"], "mine": [1]},
        {"assistant_seq": 2, "tool_call_ids": ["c1"], "tool_calls": [{"id": "c1"}], "why": "x"},
        {"tool_calls": [{"name": "no id"}]},
        {1: "a", "nested": {"deep": [{}]}},
        {"tool_call_ids": []},
    ],
)
def test_pending_of_any_form_is_returned_like_by_the_original(
    both: list[Any], given: dict[Any, Any]
) -> None:
    told = []
    for store in both:
        store.create_session(session_id="s")
        store.append_message("s", role="assistant", tool_calls=[{"id": "c1", "name": "t"}])
        store.set_pending("s", given)
        told.append(store.get_state("s").pending)
        # And whatever was given before does not stand in the way of another.
        store.set_pending("s", {"assistant_seq": 1, "tool_call_ids": ["z"]})
        told.append(store.get_state("s").pending["tool_call_ids"])
    assert told[:2] == told[2:]


def test_pending_that_is_not_a_dict_is_refused(opened: Opened) -> None:
    sid = opened().create_session()
    with pytest.raises(InvalidInputError, match="pending must be a dict, got list"):
        opened().set_pending(sid, ["c1"])


def test_structured_content_and_large_integers_round_trip(opened: Opened) -> None:
    store = opened()
    sid = store.create_session(config={"n": 1 << 70}, metadata={"a": [None]})
    content = [{"type": "text", "text": "x"}]
    store.append_message(sid, role="user", content=content, meta={"big": 1 << 90}, tool_calls=[])
    row = opened().get_message(sid, 1)
    assert (row.content, row.meta, row.tool_calls) == (content, {"big": 1 << 90}, None)
    assert store.get_session(sid).config == {"n": 1 << 70}


def nested(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "odd", [1 << 90, float("inf"), {1: "a", None: "b"}, nested(90), {"json": "x"}, (1, 2)]
)
def test_every_json_value_of_python_is_read_back_by_both(both: list[Any], odd: Any) -> None:
    told = []
    for store in both:
        sid = store.create_session(session_id="s", config={"x": odd}, metadata={"x": odd})
        call = {"id": "c1", "name": "t", "arguments": odd}
        store.append_message(sid, role="user", content="a", meta={"x": odd})
        store.append_message(sid, role="user", content="b", meta={"json": odd})
        store.append_message(sid, role="assistant", tool_calls=[call])
        store.set_pending(sid, {"tool_call_ids": ["z"], "x": odd})
        own = store.get_state(sid).pending
        store.record_compaction(
            sid, from_seq=1, to_seq=2, note_content="n", before_tokens=9, after_tokens=1,
            round_index=0, note_meta={"x": odd},
        )  # fmt: skip
        row = store.get_session(sid)
        told.append(
            [
                row.config,
                row.metadata,
                own["x"],
                [(one.seq, one.meta, one.tool_calls) for one in store.load_all_messages(sid)],
            ]
        )
    assert told[0] == told[1]


def test_a_pending_call_keeps_large_integer_arguments(opened: Opened) -> None:
    call = {"id": "c1", "name": "factorial", "arguments": {"n": 1 << 90}}
    sid = opened().create_session()
    opened().append_message(sid, role="assistant", tool_calls=[call])
    assert opened().get_state(sid).pending["tool_calls"] == [call]


def test_bytes_that_would_be_read_as_json_are_refused(opened: Opened) -> None:
    store = opened()
    sid = store.create_session()
    for meta in ({"json": b"no JSON"}, {"json": b"{}"}):
        with pytest.raises(InvalidInputError, match="bytes"):
            store.append_message(sid, role="user", meta=meta)
    assert store.load_all_messages(sid) == []


def test_errors_have_the_messages_of_the_original(both: list[Any]) -> None:
    wrong: dict[str, Callable[[Any], Any]] = {
        "unknown session: nowhere": lambda store: store.append_message("nowhere", role="user"),
        "unknown session: gone": lambda store: store.record_compaction(
            "gone", from_seq=1, to_seq=2, note_content="n", before_tokens=1, after_tokens=1,
            round_index=0,
        ),
        "parent session not found: nowhere": lambda store: store.create_session(
            parent_session_id="nowhere"
        ),
        "spawn depth 4 exceeds max 3": lambda store: store.create_session(parent_session_id="3"),
    }  # fmt: skip
    for store in both:
        for depth in range(4):
            parent = str(depth - 1) if depth else None
            store.create_session(session_id=str(depth), parent_session_id=parent)
        for words, call in wrong.items():
            with pytest.raises(ValueError, match=words):
                call(store)


def test_errors_are_those_that_callers_of_the_original_catch(
    opened: Opened, tmp_path: Path
) -> None:
    store = opened()
    with pytest.raises(ValueError, match="nowhere"):
        store.append_message("nowhere", role="user", content="x")
    with pytest.raises(ValueError, match="nowhere"):
        store.create_session(parent_session_id="nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        store.record_compaction(
            "nowhere", from_seq=1, to_seq=2, note_content="n", before_tokens=1, after_tokens=1,
            round_index=0,
        )  # fmt: skip
    writes: list[Callable[[], Any]] = [
        lambda: store.record_usage(
            "nowhere", round_index=0, prompt_tokens=1, completion_tokens=1, total_tokens=2
        ),
        lambda: store.archive_session("nowhere"),
        lambda: store.set_pending("nowhere", {"a": 1}),
        lambda: store.set_round_index("nowhere", 1),
        lambda: store.update_session_prompt("nowhere", "p"),
    ]
    for write in writes:
        with pytest.raises(ValueError, match="nowhere"):
            write()
    store.create_session(session_id="one")
    with pytest.raises(sqlite3.IntegrityError):
        store.create_session(session_id="one")
    assert store.close_session("nowhere") == 0
    assert store.load_active_messages("nowhere") == []
    assert store.load_all_messages("nowhere") == []
    assert store.list_compactions("nowhere") == []
    assert store.get_message("nowhere", 1) is None
    assert store.get_state("nowhere") is None
    store.append_message("one", role="user", content="x")
    store.update_session_prompt("one", "brief")
    store.archive_session("one")
    row = store.get_session("one")
    assert (row.status, row.system_prompt) == (ours.SessionStatus.ARCHIVED, "brief")
    assert store.close_session("one") == 1
    assert store.get_session("one") is None
    with pytest.raises(SessionDeletedError, match="'one' was deleted"):
        store.create_session(session_id="one")
    assert store.load_all_messages("one") == []
    with pytest.raises(ValueError, match="one"):
        store.append_message("one", role="user", content="x")
    file = tmp_path / "db"
    file.write_bytes(b"SQLite format 3\0")
    with pytest.raises(InvalidInputError, match="casstore import power-loop"):
        ours.SessionStore.open(file)
    assert file.read_bytes() == b"SQLite format 3\0"


def test_a_store_in_memory_accepts_messages_from_many_threads() -> None:
    with ours.SessionStore.open(":memory:") as store:
        sid = store.create_session()

        def write() -> None:
            for _ in range(20):
                store.append_message(sid, role="user", content="x")

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [one.seq for one in store.load_all_messages(sid)] == list(range(1, 81))
