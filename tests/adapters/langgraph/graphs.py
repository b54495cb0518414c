"""Graphs that tests run: small, real, and the same for every saver."""

from __future__ import annotations

import operator
from typing import Annotated, Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

Config = dict[str, Any]


def on(thread: str = "t", **more: Any) -> Any:
    """The config of a thread."""
    return {"configurable": {"thread_id": thread, **more}}


def chat(saver: Any, reply: str = "echo") -> Any:
    """One node that answers each message."""

    def answer(state: MessagesState) -> Any:
        said = state["messages"][-1].content
        return {"messages": [AIMessage(f"{reply} {said}", id=f"a{len(state['messages'])}")]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=saver)


def say(text: str) -> Any:
    """The input of one turn of ``chat``."""
    return {"messages": [HumanMessage(text, id=f"h-{text}")]}


class Plan(TypedDict):
    """State of graphs with several nodes."""

    log: Annotated[list[str], operator.add]
    answer: str


def asking(saver: Any) -> Any:
    """Stops in the middle and asks; two questions, one after the other."""

    def first(state: Plan) -> Any:
        return {"log": ["first"]}

    def ask(state: Plan) -> Any:
        name = interrupt({"question": "name"})
        colour = interrupt({"question": "colour"})
        return {"log": [f"asked {name} {colour}"], "answer": name}

    def last(state: Plan) -> Any:
        return {"log": [f"last {state['answer']}"]}

    builder = StateGraph(Plan)
    builder.add_node("first", first)
    builder.add_node("ask", ask)
    builder.add_node("last", last)
    builder.add_edge(START, "first")
    builder.add_edge("first", "ask")
    builder.add_edge("ask", "last")
    return builder.compile(checkpointer=saver)


def nested(saver: Any) -> Any:
    """A graph inside a graph, which stops inside."""

    def inner_step(state: Plan) -> Any:
        return {"log": ["inner"]}

    def inner_ask(state: Plan) -> Any:
        return {"log": [f"told {interrupt('inside')}"]}

    inner = StateGraph(Plan)
    inner.add_node("inner_step", inner_step)
    inner.add_node("inner_ask", inner_ask)
    inner.add_edge(START, "inner_step")
    inner.add_edge("inner_step", "inner_ask")

    def outer_step(state: Plan) -> Any:
        return {"log": ["outer"]}

    outer = StateGraph(Plan)
    outer.add_node("outer_step", outer_step)
    outer.add_node("inside", inner.compile())
    outer.add_edge(START, "outer_step")
    outer.add_edge("outer_step", "inside")
    return outer.compile(checkpointer=saver)


def parallel(saver: Any) -> Any:
    """Branches that run at once, and work sent to many."""

    def fan(state: Plan) -> Any:
        return Command(
            update={"log": ["fan"]},
            goto=[Send("work", {"log": [], "answer": str(n)}) for n in range(5)],
        )

    def work(state: Plan) -> Any:
        return {"log": [f"work {state['answer']}"]}

    def left(state: Plan) -> Any:
        return {"log": ["left"]}

    def right(state: Plan) -> Any:
        return {"log": ["right"]}

    builder = StateGraph(Plan)
    builder.add_node("fan", fan, destinations=("work",))
    builder.add_node("work", work)
    builder.add_node("left", left)
    builder.add_node("right", right)
    builder.add_edge(START, "fan")
    builder.add_edge(START, "left")
    builder.add_edge("left", "right")
    return builder.compile(checkpointer=saver)


def extend(state: list[str], writes: Any) -> list[str]:
    """The reducer of ``delta``; the order of writes shows in the result."""
    return [*state, *(item for write in writes for item in write)]


class Journal(TypedDict):
    """State of a graph with a delta channel."""

    log: Annotated[list[str], DeltaChannel(extend, list, snapshot_frequency=5)]
    n: int


def delta(saver: Any) -> Any:
    """A delta channel, written by branches at once."""

    def count(state: Journal) -> Any:
        return {"log": [f"count {state['n']}"], "n": state["n"] + 1}

    def left(state: Journal) -> Any:
        return {"log": [f"left {state['n']}"]}

    def right(state: Journal) -> Any:
        return {"log": [f"right {state['n']}"]}

    builder = StateGraph(Journal)
    builder.add_node("count", count)
    builder.add_node("left", left)
    builder.add_node("right", right)
    builder.add_edge(START, "count")
    builder.add_edge("count", "left")
    builder.add_edge("count", "right")
    return builder.compile(checkpointer=saver)
