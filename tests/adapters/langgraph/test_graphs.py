"""Real graphs: what they do on a store is what they do on LangGraph's own saver in memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.graph", reason="needs the extra: pip install '.[dev]'")

from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from casstore.adapters.langgraph import CasstoreSaver
from casstore.store import Store
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on, say

DURABILITIES = ("sync", "async", "exit")
ROOT = Path(__file__).parents[3]


def told(snapshot: Any) -> Any:
    """What a snapshot says, without ids and times."""
    return (
        snapshot.values,
        snapshot.next,
        snapshot.metadata.get("step"),
        snapshot.metadata.get("source"),
        [(task.name, [each.value for each in task.interrupts]) for task in snapshot.tasks],
    )


def story(graph: Any, thread: str = "t") -> list[Any]:
    """All that can be read of a thread, newest first."""
    config = on(thread)
    return [told(graph.get_state(config)), *map(told, graph.get_state_history(config))]


def talk(saver: Any, durability: str) -> Any:
    graph = graphs.chat(saver)
    said = [graph.invoke(say(f"{n}"), on(), durability=durability) for n in range(4)]
    graph.update_state(on(), {"messages": [RemoveMessage("h-1"), HumanMessage("new", id="h-0")]})
    said.append(graph.invoke(say("last"), on(), durability=durability))
    return said, story(graph)


def ask_and_resume(saver: Any, durability: str) -> Any:
    graph = graphs.asking(saver)
    stopped = graph.invoke({"log": ["start"], "answer": ""}, on(), durability=durability)
    between = story(graph)
    again = graph.invoke(Command(resume="Ada"), on(), durability=durability)
    done = graph.invoke(Command(resume="blue"), on(), durability=durability)
    return (
        [each.value for each in stopped["__interrupt__"]],
        between,
        [each.value for each in again["__interrupt__"]],
        done,
        story(graph),
    )


def stop_inside(saver: Any, durability: str) -> Any:
    graph = graphs.nested(saver)
    graph.invoke({"log": [], "answer": ""}, on(), durability=durability)
    waiting = graph.get_state(on(), subgraphs=True).tasks[0].state
    inside = (waiting.values, waiting.next)
    done = graph.invoke(Command(resume="secret"), on(), durability=durability)
    return inside, done, story(graph)


def fan_out(saver: Any, durability: str) -> Any:
    graph = graphs.parallel(saver)
    done = graph.invoke({"log": [], "answer": ""}, on(), durability=durability)
    return sorted(done["log"]), len(story(graph))


def stream(saver: Any, durability: str) -> Any:
    graph = graphs.asking(saver)
    events = list(
        graph.stream(
            {"log": ["s"], "answer": ""},
            on(),
            stream_mode=["updates", "values"],
            durability=durability,
        )
    )
    return [str(event).split("id=")[0] for event in events], story(graph)


SCENARIOS = [talk, ask_and_resume, stop_inside, fan_out, stream]


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_graph_does_what_it_does_in_memory(
    store: Store, scenario: Callable[[Any, str], Any], durability: str
) -> None:
    assert scenario(CasstoreSaver(store), durability) == scenario(InMemorySaver(), durability)


def test_state_outlives_the_process_that_wrote_it(tmp_path: Path) -> None:
    with CasstoreSaver.from_path(tmp_path / "s", "relaxed") as saver:
        said = graphs.chat(saver).invoke(say("hello"), on())
        before = story(graphs.chat(saver))
    with CasstoreSaver.from_path(tmp_path / "s", "relaxed") as saver:
        graph = graphs.chat(saver)
        assert graph.get_state(on()).values == said
        assert story(graph) == before
        assert len(graph.invoke(say("again"), on())["messages"]) == 4


def test_going_back_to_a_checkpoint_makes_a_branch_and_keeps_the_other(store: Store) -> None:
    saver = CasstoreSaver(store, on_branch="refuse")
    graph = graphs.chat(saver)
    for n in range(3):
        graph.invoke(say(f"{n}"), on())
    first = next(
        snapshot
        for snapshot in graph.get_state_history(on())
        if len(snapshot.values["messages"]) == 2 and not snapshot.next
    )
    old = graph.get_state(on()).config
    # By id: the state as it was.
    assert graph.get_state(first.config).values == first.values
    # A change to it is the start of a branch, which later input goes on from.
    forked = graph.update_state(first.config, {"messages": [HumanMessage("fork", id="f")]})
    graph.invoke(None, forked)
    texts = [each.content for each in graph.invoke(say("on"), on())["messages"]]
    assert texts[:3] == ["0", "echo 0", "fork"]
    assert "1" not in texts
    assert [each.content for each in graph.get_state(old).values["messages"]] == [
        "0", "echo 0", "1", "echo 1", "2", "echo 2",
    ]  # fmt: skip


def test_replaying_from_a_checkpoint_runs_the_rest_again(store: Store) -> None:
    graph = graphs.asking(CasstoreSaver(store))
    graph.invoke({"log": [], "answer": ""}, on())
    graph.invoke(Command(resume="Ada"), on())
    graph.invoke(Command(resume="blue"), on())
    at = next(each for each in graph.get_state_history(on()) if each.next == ("ask",))
    again = graph.invoke(None, at.config)
    assert [each.value for each in again["__interrupt__"]] == [{"question": "name"}]
    graph.invoke(Command(resume="Bob"), on())
    done = graph.invoke(Command(resume="red"), on())
    assert done["log"] == ["first", "asked Bob red", "last Bob"]


def test_async_graphs_and_many_threads_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with CasstoreSaver.from_path(tmp_path / "s", "relaxed") as saver:
            graph = graphs.chat(saver)

            async def converse(thread: str) -> list[str]:
                for n in range(5):
                    await graph.ainvoke(say(f"{thread}-{n}"), on(thread))
                found = await graph.aget_state(on(thread))
                return [each.content for each in found.values["messages"]]

            said = await asyncio.gather(*(converse(f"t{n}") for n in range(8)))
            for at, texts in enumerate(said):
                assert texts == [
                    text for n in range(5) for text in (f"t{at}-{n}", f"echo t{at}-{n}")
                ]
            streamed = [
                each async for each in graph.astream(say("x"), on("t0"), stream_mode="updates")
            ]
            assert list(streamed[0]) == ["answer"]
            history = [each async for each in graph.aget_state_history(on("t0"), limit=3)]
            assert len(history) == 3
            # The sync methods serve the same threads.
            assert await asyncio.to_thread(graph.get_state, on("t1"))

    asyncio.run(work())


def test_a_failed_graph_continues_at_the_failed_step(store: Store) -> None:
    from langgraph.graph import START, StateGraph

    tries = {"right": 0, "left": 0}
    stored = threading.Event()

    class Telling(CasstoreSaver):
        """Says when the first node's writes are stored."""

        def put_writes(self, config: Any, writes: Any, task_id: str, task_path: str = "") -> None:
            super().put_writes(config, writes, task_id, task_path)
            if ("log", ["left"]) in writes:
                stored.set()

    def left(state: graphs.Plan) -> Any:
        tries["left"] += 1
        return {"log": ["left"]}

    def right(state: graphs.Plan) -> Any:
        tries["right"] += 1
        if tries["right"] == 1:
            # LangGraph drops what comes after a failure has ended the step.
            assert stored.wait(60)
            raise RuntimeError("not yet")
        return {"log": ["right"]}

    builder = StateGraph(graphs.Plan)
    builder.add_node("left", left)
    builder.add_node("right", right)
    builder.add_edge(START, "left")
    builder.add_edge(START, "right")
    graph = builder.compile(checkpointer=Telling(store))
    with pytest.raises(RuntimeError, match="not yet"):
        graph.invoke({"log": [], "answer": ""}, on())
    done = graph.invoke(None, on())
    assert sorted(done["log"]) == ["left", "right"]
    # What the other branch had written was kept: it did not run again.
    assert tries == {"left": 1, "right": 2}


STRICT = """
import sys
sys.path.insert(0, {root!r})
from typing import Any
from pydantic import BaseModel
from langgraph.graph import START, StateGraph
from casstore.adapters.langgraph import CasstoreSaver

class Inner(BaseModel):
    name: str

class State(BaseModel):
    inner: Inner

builder = StateGraph(State)
builder.add_node("node", lambda state: {{"inner": Inner(name=state.inner.name + "!")}})
builder.add_edge(START, "node")
config: Any = {{"configurable": {{"thread_id": "t"}}}}
with CasstoreSaver.from_path({place!r}, "relaxed") as saver:
    graph = builder.compile(checkpointer=saver)
    assert graph.checkpointer is not saver
    graph.invoke({{"inner": Inner(name="x")}}, config)
    print(repr(graph.get_state(config).values["inner"]))
"""


def test_in_strict_mode_the_types_of_the_graph_state_are_allowed(tmp_path: Path) -> None:
    script = STRICT.format(root=str(ROOT), place=str(tmp_path / "s"))
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"},
    )  # fmt: skip
    assert answer.stdout == "Inner(name='x!')\n", answer.stderr


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on
from casstore.adapters.langgraph import CasstoreSaver

saver = CasstoreSaver.from_path({place!r}, "relaxed")
put = saver.put
count = 0

def counted(*args):
    global count
    result = put(*args)
    count += 1
    if count == {kill_after}:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

saver.put = counted
graphs.delta(saver).invoke({{"log": ["in"], "n": 0}}, on(), durability="sync")
"""


@pytest.mark.parametrize("kill_after", [1, 2])
def test_a_killed_process_is_resumed_by_another(tmp_path: Path, kill_after: int) -> None:
    script = KILLED.format(root=str(ROOT), place=str(tmp_path / "s"), kill_after=kill_after)
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == -9, answer.stderr
    with CasstoreSaver.from_path(tmp_path / "s", "relaxed") as saver:
        graph = graphs.delta(saver)
        # Not `next`: it leaves out a task whose writes another thread stored before the end.
        assert graph.get_state(on()).tasks
        assert graph.invoke(None, on())["log"] == ["in", "count 0", "left 1", "right 1"]
