"""``casstore import openai-agents``: a database of the OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the extra: pip install '.[openai-agents]'")

from agents import SQLiteSession

from tests.cli.running import HOSTILE, counts, run


def say(file: Path, session_id: str, *said: str, **tables: Any) -> None:
    with closing(SQLiteSession(session_id, file, **tables)) as session:
        asyncio.run(session.add_items([{"role": "user", "content": text} for text in said]))


def test_a_database_moves_over_once(tmp_path: Path) -> None:
    source, place = tmp_path / "talk.db", str(tmp_path / "store")
    say(source, "one", "a", "b")
    say(source, HOSTILE, "c", "d")
    with closing(sqlite3.connect(source)) as database, database:
        database.execute("UPDATE agent_messages SET message_data = '{' WHERE id = 3")
    run("init", place)
    would = run("import", "openai-agents", str(source), "--dry-run", "--json", store=place).json
    assert would["dry_run"]
    assert (counts(would)["items"], counts(would)["sessions"]) == ((3, 3, 0), (2, 2, 0))
    assert "one" not in run("sessions", store=place).out
    assert (
        "would import 3 of 3 items"
        in run("import", "openai-agents", str(source), "-n", store=place).out
    )
    told = run(
        "import", "openai-agents", str(source), "--session", "one", "--json", store=place
    ).json
    assert (counts(told)["items"], told["notes"]) == ((2, 2, 0), [])
    assert [one["session"] for one in told["sessions"]] == ["one"]
    told = run("import", "openai-agents", str(source), store=place).out
    assert "imported 1 of 3 items" in told
    assert "imported 1 of 2 sessions" in told
    assert "left out as the SDK does (the first: message 3 of session evil" in told
    assert "\x1b[31m" not in told
    again = run("import", "openai-agents", str(source), "--json", store=place).json
    assert counts(again)["items"] == (3, 0, 0)
    [bad] = again["notes"][0]["examples"]
    assert bad.startswith(f"message 3 of session {HOSTILE}: ")


def test_a_source_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    source, place = tmp_path / "talk.db", str(tmp_path / "store")
    tables = {"sessions_table": "s", "messages_table": "m"}
    say(source, "one", "a", **tables)
    run("init", place)
    nothing = run("import", "openai-agents", str(tmp_path / "nowhere"), store=place, ends=4)
    assert nothing.err.startswith("error: ")
    other = run("import", "openai-agents", str(source), store=place, ends=9)
    assert "no tables agent_sessions and agent_messages" in other.err
    told = run(
        "import", "openai-agents", str(source), "--sessions-table", "s", "--messages-table", "m",
        "--json", store=place,
    ).json  # fmt: skip
    assert counts(told)["items"] == (1, 1, 0)
    second = tmp_path / "second.db"
    say(second, "one", "something else")
    run("import", "openai-agents", str(second), "--session", "two", store=place, ends=3)
    assert "another store" in run("import", "openai-agents", str(second), store=place, ends=5).err
