#!/usr/bin/env python3
"""Count the functions and modules of casstore that one call passes through.

    tools/callpaths.py            a table in Markdown, as docs/internals/architecture.md has it
    tools/callpaths.py commit     each function of one operation, with its number of calls

Every operation runs on a warm store and is counted in the calling thread alone. Comprehensions
and generator expressions belong to the function that they are written in.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any, Final, NamedTuple

from checkout import ROOT, use_checkout

_PACKAGE: Final = f"{ROOT / 'casstore'}/"
# Frames of their own up to Python 3.11, and parts of their function since.
_INNER: Final = (".<listcomp>", ".<setcomp>", ".<dictcomp>", ".<genexpr>")
_WARM_UP: Final = 40
# Some calls also do work that is due now and then. The shortest of a few does none of it.
_COUNTED: Final = 5
_TEXT_CHARACTERS: Final = 1700
_SESSION_COMMITS: Final = 40


class Operation(NamedTuple):
    """A call to count. The number that it is given differs in every run."""

    name: str
    title: str
    run: Callable[[int], object]


class Called(NamedTuple):
    """A function, and the module that it is in."""

    module: str
    function: str


Calls = Counter[Called]


def count_calls(run: Callable[[], object]) -> Calls:
    """How often ``run`` calls which function of casstore, in this thread."""
    calls: Calls = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGE):
            function = code.co_qualname
            while function.endswith(_INNER):
                function = function.rpartition(".")[0].removesuffix(".<locals>")
            calls[Called(code.co_filename.removeprefix(_PACKAGE), function)] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def count_warm(run: Callable[[int], object]) -> Calls:
    """The calls of a warm run."""
    numbers = count()
    for _ in range(_WARM_UP):
        run(next(numbers))
    counted = [count_calls(lambda: run(next(numbers))) for _ in range(_COUNTED)]
    return min(counted, key=lambda calls: (len(calls), calls.total()))


@contextmanager
def operations() -> Iterator[list[Operation]]:
    """The operations, on a new store."""
    import casstore
    from casstore import Commit, NodeDraft

    def message(role: str, number: int) -> dict[str, str]:
        return {"role": role, "content": f"{number:08}".ljust(_TEXT_CHARACTERS, "x")}

    def step(number: int) -> Commit:
        question = NodeDraft(f"q{number}", message("user", number))
        answer = NodeDraft(f"a{number}", message("assistant", number))
        return Commit(append=[question, answer], turn=f"t{number}")

    with tempfile.TemporaryDirectory() as place, casstore.open(f"{place}/store") as store:
        # Commits go to a session of their own, so that the one to load and fork keeps its length.
        session, growing = store.session("session"), store.session("growing")
        for number in range(_SESSION_COMMITS):
            session.commit(step(number))

        def load(_: int) -> object:
            state = session.load()
            assert state is not None
            return list(state.nodes)

        yield [
            Operation(
                "commit",
                "`commit`: two messages, a turn id",
                lambda number: growing.commit(step(number)),
            ),
            Operation(
                "put_value",
                "`put_value` of a message",
                lambda number: store.put_value(message("user", number)),
            ),
            Operation("load", f"`load`, and its {2 * _SESSION_COMMITS} nodes", load),
            Operation("fork", "`fork`", lambda number: store.fork("session", f"fork-{number}")),
            *langgraph_operations(store, message),
        ]


def langgraph_operations(store: Any, message: Callable[[str, int], Any]) -> list[Operation]:
    """``put`` of a LangGraph checkpoint; none if langgraph is not installed."""
    try:
        from langgraph.checkpoint.base import empty_checkpoint
    except ImportError:
        return []
    from casstore.adapters.langgraph import CasstoreSaver

    saver = CasstoreSaver(store)
    config: Any = {"configurable": {"thread_id": "thread", "checkpoint_ns": ""}}
    messages: list[Any] = []
    version: Any = None

    def put(number: int) -> None:
        nonlocal config, version
        version = saver.get_next_version(version, None)
        messages.append(message("user", number))
        checkpoint: Any = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": list(messages)}
        checkpoint["channel_versions"] = {"messages": version}
        meta: Any = {"source": "loop", "step": number}
        config = saver.put(config, checkpoint, meta, {"messages": version})

    return [Operation("langgraph_put", "LangGraph `put`: one message more", put)]


def main() -> None:
    """Print the table, or the calls of one operation."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("operation", nargs="?", help="list the functions of this operation")
    wanted = arguments.parse_args().operation
    with operations() as every:
        if wanted is None:
            print("| call | functions | modules | calls |\n|---|---|---|---|")
            for operation in every:
                calls = count_warm(operation.run)
                modules = {called.module for called in calls}
                numbers = f"{len(calls)} | {len(modules)} | {calls.total()}"
                print(f"| {operation.title} | {numbers} |")
            return
        chosen = {operation.name: operation for operation in every}
        if wanted not in chosen:
            arguments.error(f"operation must be one of {', '.join(chosen)}, got {wanted!r}")
        for called, number in count_warm(chosen[wanted].run).most_common():
            print(f"{number:4}  {called.module}  {called.function}")


if __name__ == "__main__":
    use_checkout()
    main()
