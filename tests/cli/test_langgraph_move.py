"""What LangGraph's own savers have stored moves over by one command."""

from __future__ import annotations

from pathlib import Path

import psycopg
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from servers.postgres import Server
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


def test_tables_on_a_server_move_over_once(tmp_path: Path, postgres_server: Server) -> None:
    place, source = str(tmp_path / "store"), postgres_server.url("moving")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE moving")
    with PostgresSaver.from_conn_string(source) as saver:
        saver.setup()
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": ["hello"]}
        saver.put(
            {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, checkpoint, {"step": 1}, {}
        )
    run("init", place)
    told = run("import-langgraph-postgres", source, "--json", store=place).json
    assert (told["checkpoints"], told["imported"]) == (1, 1)
    assert told["source"] == "postgresql:///moving"
    again = run("import-langgraph-postgres", source, store=place).out
    assert "moved 0 checkpoints of 1 from postgresql:///moving" in again
    for wrong, code in ((str(tmp_path), 3), (postgres_server.url(), 9)):
        refused = run("import-langgraph-postgres", wrong, store=place, ends=code)
        assert refused.err.startswith("error: ")
        assert "--store" not in refused.err
