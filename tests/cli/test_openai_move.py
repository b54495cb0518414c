"""``import-openai-sqlite``: a database of the OpenAI Agents SDK by one command."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs the extra: pip install '.[openai-agents]'")

from agents import SQLiteSession

from tests.cli.running import HOSTILE, run


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
    would = run("import-openai-sqlite", str(source), "--dry-run", "--json", store=place).json
    assert (would["dry_run"], would["imported"], would["new_sessions"]) == (True, 3, 2)
    assert "one" not in run("sessions", store=place).out
    assert (
        "would move 3 items of 3" in run("import-openai-sqlite", str(source), "-n", store=place).out
    )
    told = run("import-openai-sqlite", str(source), "--session", "one", "--json", store=place).json
    assert (told["sessions"], told["imported"], told["unreadable"]) == (1, 2, 0)
    told = run("import-openai-sqlite", str(source), store=place).out
    assert "moved 1 item of 3" in told
    assert "2 sessions, 1 new; 2 branches" in told
    assert "left out 1 message without JSON, the first is 3 of evil" in told
    assert "\x1b[31m" not in told
    again = run("import-openai-sqlite", str(source), "--json", store=place).json
    assert again["imported"] == 0
    [bad] = again["unreadable_items"]
    assert (bad["session"], bad["row"]) == (HOSTILE, 3)


def test_what_cannot_be_moved_ends_it(tmp_path: Path) -> None:
    source, place = tmp_path / "talk.db", str(tmp_path / "store")
    tables = {"sessions_table": "s", "messages_table": "m"}
    say(source, "one", "a", **tables)
    run("init", place)
    nothing = run("import-openai-sqlite", str(tmp_path / "nowhere"), store=place, ends=4)
    assert nothing.err.startswith("error: ")
    other = run("import-openai-sqlite", str(source), store=place, ends=9)
    assert "no tables agent_sessions and agent_messages" in other.err
    told = run(
        "import-openai-sqlite", str(source), "--sessions-table", "s", "--messages-table", "m",
        "--json", store=place,
    ).json  # fmt: skip
    assert told["imported"] == 1
    second = tmp_path / "second.db"
    say(second, "one", "something else")
    run("import-openai-sqlite", str(second), "--session", "two", store=place, ends=3)
    assert "another store" in run("import-openai-sqlite", str(second), store=place, ends=5).err
