"""Compares CasstoreSaver with LangGraph's own savers on one conversation."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.measuring import Goal, Pair, at_least, at_most, side_by_side, texts

_NEEDED = ("langgraph", "langgraph.checkpoint.sqlite", "langchain_core")
_MESSAGE_BYTES = 1500
_SHORT_BYTES = 800
_SHORT_TURNS = 5
_CONFIG = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


def _missing() -> str | None:
    for name in _NEEDED:
        try:
            if find_spec(name) is None:
                return name
        except ModuleNotFoundError:
            return name
    return None


class Conversation:
    """A graph of one node that answers, and how long each turn of it took."""

    def __init__(self, saver: Any, turns: int) -> None:
        from langchain_core.messages import AIMessage, HumanMessage
        from langgraph.graph import START, MessagesState, StateGraph

        said = iter(texts(2 * turns + 2, _MESSAGE_BYTES, seed=3))

        def answer(state: MessagesState) -> Any:
            return {"messages": [AIMessage(next(said))]}

        builder = StateGraph(MessagesState)
        builder.add_node("answer", answer)
        builder.add_edge(START, "answer")
        self._graph: Any = builder.compile(checkpointer=saver)
        human: Any = HumanMessage
        self._human: Callable[[], Any] = lambda: {"messages": [human(next(said))]}
        self.times_s: list[float] = []

    def turn(self) -> None:
        """Send a message and get an answer. Durable when it returns."""
        words = self._human()
        started = perf_counter()
        self._graph.invoke(words, _CONFIG, durability="sync")
        self.times_s.append(perf_counter() - started)

    @property
    def late_s(self) -> float:
        """How long a turn takes at the end."""
        return median(self.times_s[-20:])


def _size(place: str) -> int:
    return sum(each.stat().st_size for each in Path(place).rglob("*.*") if each.is_file())


def conversation(quick: bool) -> list[Goal]:
    """Sizes and times of a long conversation, and of copying it."""
    missing = _missing()
    if missing is not None:
        print(f"langgraph is skipped: {missing} is not installed", file=sys.stderr)
        return []
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.checkpoint.sqlite import SqliteSaver

    from casstore.adapters.langgraph import CasstoreSaver

    turns = 100 if quick else 400
    with tempfile.TemporaryDirectory() as place:
        ours_place, theirs_place = os.path.join(place, "ours"), os.path.join(place, "theirs")
        os.mkdir(theirs_place)
        with (
            CasstoreSaver.from_path(ours_place) as saver,
            SqliteSaver.from_conn_string(os.path.join(theirs_place, "c.sqlite")) as stock,
        ):
            memory_saver = InMemorySaver()
            ours, theirs, memory = (
                Conversation(each, 2 * turns) for each in (saver, stock, memory_saver)
            )
            order = random.Random(1)
            for _ in range(turns):
                # Interleaved, so that disturbances of the machine affect all three.
                for each in order.sample((ours, theirs, memory), 3):
                    each.turn()
            single, stock_bytes = _file(ours_place), _size(theirs_place)
            goals = [
                at_most(
                    f"file after {turns} turns, against SqliteSaver's", single / stock_bytes,
                    1 / 300 if not quick else 1 / 75, "",
                    detail=f"{single:,} bytes, SqliteSaver {stock_bytes:,}: "
                    f"1/{stock_bytes / single:.0f}",
                ),
                at_most(
                    f"a turn at turn {turns}, against SqliteSaver, both durable",
                    ours.late_s / theirs.late_s, 0.5,
                    detail=f"{ours.late_s * 1000:.2f} ms, SqliteSaver "
                    f"{theirs.late_s * 1000:.2f} ms",
                ),
                at_most(
                    "the same against InMemorySaver", ours.late_s / memory.late_s, 1.5,
                    detail=f"{memory.late_s * 1000:.2f} ms",
                ),
                *_reading(saver, stock),
                _copying(saver, stock),
            ]  # fmt: skip
    goals.insert(1, _doubling(turns))
    return [*goals, *_crowd(quick)]


def _doubling(turns: int) -> Goal:
    """A store with one conversation and nothing else, and the same twice as long."""
    from casstore.adapters.langgraph import CasstoreSaver

    with tempfile.TemporaryDirectory() as place, CasstoreSaver.from_path(place) as saver:
        conversation = Conversation(saver, 2 * turns)
        sizes: list[int] = []
        for _ in range(2):
            for _ in range(turns):
                conversation.turn()
            sizes.append(_file(place))
    return at_most(
        "twice the turns: times the file", sizes[1] / sizes[0], 2.1,
        detail=f"{sizes[0]:,} and {sizes[1]:,} bytes",
    )  # fmt: skip


def _file(place: str) -> int:
    return os.stat(os.path.join(place, "data.mdb")).st_size


def _reading(saver: Any, stock: Any) -> list[Goal]:
    def time(read: Callable[[], object]) -> float:
        started = perf_counter()
        read()
        return perf_counter() - started

    pairs = [
        (time(lambda: saver.get_tuple(_CONFIG)), time(lambda: stock.get_tuple(_CONFIG)))
        for _ in range(30)
    ]
    ours, theirs = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    return [
        at_most(
            "get_tuple of the newest checkpoint, against SqliteSaver", ours / theirs, 1.0,
            detail=f"{ours * 1000:.2f} ms, SqliteSaver {theirs * 1000:.2f} ms",
        )
    ]  # fmt: skip


# --- short threads --------------------------------------------------------------------------


class ShortThreads:
    """A graph of three nodes that each say something, for many threads of a few turns."""

    def __init__(self, saver: Any) -> None:
        from langchain_core.messages import AIMessage, HumanMessage
        from langgraph.graph import START, MessagesState, StateGraph

        said = cycle(texts(1000, _SHORT_BYTES, seed=5))
        message: Any = AIMessage

        def answer(state: MessagesState) -> Any:
            return {"messages": [message(next(said))]}

        builder = StateGraph(MessagesState)
        before = START
        for name in ("plan", "act", "answer"):
            builder.add_node(name, answer)
            builder.add_edge(before, name)
            before = name
        self._graph: Any = builder.compile(checkpointer=saver)
        human: Any = HumanMessage
        self._human: Callable[[], Any] = lambda: {"messages": [human(next(said))]}
        self._numbers = count()

    def run(self, threads: int) -> float:
        """How long a turn of a new thread takes; the median."""
        taken: list[float] = []
        for _ in range(threads):
            config = {"configurable": {"thread_id": f"t{next(self._numbers)}"}}
            for _ in range(_SHORT_TURNS):
                words = self._human()
                started = perf_counter()
                self._graph.invoke(words, config, durability="sync")
                taken.append(perf_counter() - started)
        return median(taken)


def short_threads(quick: bool) -> list[Goal]:
    """Threads of a few turns, the commonest use; and two tasks that write at the same moment."""
    missing = _missing()
    if missing is not None:
        print(f"langgraph-short is skipped: {missing} is not installed", file=sys.stderr)
        return []
    from langgraph.checkpoint.sqlite import SqliteSaver

    from casstore.adapters.langgraph import CasstoreSaver

    threads, repeats = (8, 5) if quick else (20, 11)
    with (
        tempfile.TemporaryDirectory() as place,
        CasstoreSaver.from_path(os.path.join(place, "ours")) as saver,
        SqliteSaver.from_conn_string(os.path.join(place, "c.sqlite")) as stock,
    ):
        ours, theirs = ShortThreads(saver), ShortThreads(stock)
        ours.run(2), theirs.run(2)
        pair = side_by_side(lambda: ours.run(threads), lambda: theirs.run(threads), repeats)
        two = _concurrent_writes(saver, 50 if quick else 200, repeats)
    return [
        at_most(
            f"a turn of a thread of {_SHORT_TURNS} turns, three nodes, messages of "
            f"{_SHORT_BYTES} bytes, against SqliteSaver, both durable",
            pair.ratio, 1.2,
            detail=f"{pair.ours_s * 1e3:.2f} ms, SqliteSaver {pair.theirs_s * 1e3:.2f} ms; "
            f"{pair.spread}",
        ),
        at_most(
            "two put_writes of one thread at the same moment, until both are done, against one "
            "alone",
            two.ratio, 2.0,
            detail=f"{two.ours_s * 1e3:.2f} ms, one {two.theirs_s * 1e3:.2f} ms; {two.spread}",
        ),
    ]  # fmt: skip


def _concurrent_writes(saver: Any, times: int, repeats: int) -> Pair:
    """Two tasks of one step that write at the same moment, against one."""
    from langgraph.checkpoint.base import empty_checkpoint

    tasks = count()
    said = cycle(texts(1000, _SHORT_BYTES, seed=6))
    with ThreadPoolExecutor(2) as pool:

        def write(config: Any) -> None:
            saver.put_writes(config, [("messages", next(said))], f"task-{next(tasks)}")

        def run(tasks_at_once: int) -> float:
            thread = f"writes-{next(tasks)}"
            place: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
            config = saver.put(place, empty_checkpoint(), {"step": 0}, {})
            taken: list[float] = []
            for _ in range(times):
                started = perf_counter()
                # One alone is handed to a thread as well: that is not what differs.
                for each in [pool.submit(write, config) for _ in range(tasks_at_once)]:
                    each.result()
                taken.append(perf_counter() - started)
            return median(taken)

        run(2), run(1)
        return side_by_side(lambda: run(2), lambda: run(1), repeats)


def _copying(saver: Any, stock: Any) -> Goal:
    started = perf_counter()
    saver.copy_thread("t", "copy")
    ours = perf_counter() - started
    started = perf_counter()
    for found in reversed(list(stock.list(_CONFIG))):
        parent = found.parent_config["configurable"]["checkpoint_id"] if found.parent_config else ""
        config = {
            "configurable": {"thread_id": "copy", "checkpoint_ns": "", "checkpoint_id": parent}
        }
        stock.put(config, found.checkpoint, found.metadata, found.checkpoint["channel_versions"])
    theirs = perf_counter() - started
    return at_least(
        "copy_thread, against reading and writing every checkpoint through SqliteSaver: times "
        "as fast",
        theirs / ours, 50.0,
        detail=f"{ours * 1000:.1f} ms, SqliteSaver {theirs * 1000:.0f} ms",
    )  # fmt: skip


def _crowd(quick: bool) -> list[Goal]:
    """Many threads of conversation, twenty tasks at a time."""
    from langgraph.checkpoint.base import empty_checkpoint

    from casstore.adapters.langgraph import CasstoreSaver

    threads = 200 if quick else 1000

    async def run(place: str) -> int:
        async with CasstoreSaver.from_path(place) as saver:
            turnstile = asyncio.Semaphore(20)

            async def talk(number: int) -> None:
                config: Any = {"configurable": {"thread_id": f"t{number}", "checkpoint_ns": ""}}
                async with turnstile:
                    for step in range(3):
                        checkpoint: Any = empty_checkpoint()
                        checkpoint["channel_values"] = {"n": [number, step]}
                        checkpoint["channel_versions"] = {"n": str(step + 1)}
                        config = await saver.aput(
                            config, checkpoint, {"step": step}, {"n": str(step + 1)}
                        )

            await asyncio.gather(*(talk(number) for number in range(threads)))
            lost = 0
            for number in range(threads):
                config: Any = {"configurable": {"thread_id": f"t{number}"}}
                newest: Any = await saver.aget_tuple(config)
                there = [one async for one in saver.alist(config)]
                lost += len(there) != 3 or newest.checkpoint["channel_values"]["n"] != [number, 2]
            return lost

    with tempfile.TemporaryDirectory() as place:
        started = perf_counter()
        lost = asyncio.run(run(os.path.join(place, "s")))
        took = perf_counter() - started
    return [
        at_most(
            f"{threads} threads of conversation, 20 tasks at a time: lost or refused", lost, 0,
            "threads", detail=f"{3 * threads / took:,.0f} checkpoints a second, read back included",
        )
    ]  # fmt: skip


ALL = {"langgraph": conversation, "langgraph-short": short_threads}
