"""What LangGraph's own savers have stored moves over by one command."""

from __future__ import annotations

from pathlib import Path

import psycopg
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver

from servers.postgres import Server
from tests.cli.running import counts, run


def test_a_database_moves_over_once(tmp_path: Path) -> None:
    source, place = tmp_path / "checkpoints.sqlite", str(tmp_path / "store")
    with SqliteSaver.from_conn_string(str(source)) as saver:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"messages": ["hello"]}
        saver.put(
            {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}, checkpoint, {"step": 1}, {}
        )
    run("init", place)
    would = run("import", "langgraph-checkpoints", str(source), "--dry-run", store=place).out
    assert "would import 1 of 1 checkpoints" in would
    told = run("import", "langgraph-checkpoints", str(source), "--json", store=place).json
    assert counts(told)["checkpoints"] == (1, 1, 0)
    again = run("import", "langgraph-checkpoints", str(source), store=place).out
    assert "imported 0 of 1 checkpoints" in again
    nothing = run("import", "langgraph-checkpoints", str(tmp_path / "nowhere"), store=place, ends=4)
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
    told = run("import", "langgraph-checkpoints", source, "--json", store=place).json
    assert counts(told)["checkpoints"] == (1, 1, 0)
    assert told["source"] == "postgresql:///moving"
    again = run("import", "langgraph-checkpoints", source, store=place).out
    assert "imported 0 of 1 checkpoints" in again
    assert "postgresql:///moving" in again
    for wrong, code in (("postgresql://[", 3), (postgres_server.url(), 9)):
        refused = run("import", "langgraph-checkpoints", wrong, store=place, ends=code)
        assert refused.err.startswith("error: ")
        assert "--store" not in refused.err
