"""``import-langgraph-sqlite``: a database of LangGraph's SqliteSaver by one command."""

from __future__ import annotations

from pathlib import Path

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver

from tests.cli.running import run


def test_a_database_moves_over_once(tmp_path: Path) -> None:
    source, place = tmp_path / "checkpoints.sqlite", str(tmp_path / "store")
    with SqliteSaver.from_conn_string(str(source)) as saver:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": ["hello"]}
        saver.put(
            {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, checkpoint, {"step": 1}, {}
        )
    run("init", place)
    told = run("import-langgraph-sqlite", str(source), "--json", store=place).json
    assert (told["checkpoints"], told["imported"]) == (1, 1)
    again = run("import-langgraph-sqlite", str(source), store=place).out
    assert "moved 0 checkpoints of 1" in again
    nothing = run("import-langgraph-sqlite", str(tmp_path / "nowhere"), store=place, ends=4)
    assert nothing.err.startswith("error: ")
