"""How much a LangGraph conversation takes as it grows: here, and with LangGraph's SqliteSaver.

Usage: python tools/langgraph_growth.py [TURNS]   (default: 400)
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, MessagesState, StateGraph

from casstore.adapters.langgraph import CasstoreSaver

WORDS = [
    f"{start}{end}"
    for start in ("re", "con", "un", "pro", "")
    for end in "tain mit vert do a".split()
]


def text(source: random.Random, words: int) -> str:
    """Words by chance; they compress, as what people say does."""
    return " ".join(source.choice(WORDS) + str(source.randint(0, 99)) for _ in range(words))


def converse(saver: Any, turns: int, marks: set[int], tell: Callable[[int, float], None]) -> None:
    """Run a graph of one node, a turn at a time."""
    source = random.Random(0)

    def answer(state: MessagesState) -> Any:
        return {"messages": [AIMessage(text(source, 200))]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph: Any = builder.compile(checkpointer=saver)
    began = time.perf_counter()
    for turn in range(1, turns + 1):
        said = {"messages": [HumanMessage(text(source, 60))]}
        graph.invoke(said, {"configurable": {"thread_id": "t"}})
        if turn in marks:
            tell(turn, time.perf_counter() - began)


def main() -> None:
    """Print a table of sizes."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    marks = {turns // 4, turns // 2, turns}
    print("| saver | turns | bytes | seconds |\n|---|---|---|---|")

    def row(name: str, place: Path) -> Callable[[int, float], None]:
        def tell(turn: int, seconds: float) -> None:
            size = sum(each.stat().st_size for each in place.rglob("*") if each.is_file())
            print(f"| {name} | {turn} | {size:,} | {seconds:.1f} |", flush=True)

        return tell

    with tempfile.TemporaryDirectory() as made:
        ours, theirs = Path(made, "ours"), Path(made, "theirs")
        theirs.mkdir()
        with CasstoreSaver.from_path(ours) as saver:
            converse(saver, turns, marks, row("CasstoreSaver", ours))
        with SqliteSaver.from_conn_string(str(theirs / "c.sqlite")) as stock:
            converse(stock, turns, marks, row("SqliteSaver", theirs))


if __name__ == "__main__":
    main()
