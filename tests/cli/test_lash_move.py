"""``import-lash``: session databases of lash by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from tests.cli.running import HOSTILE, run
from tests.compat.lash_files import LashFile
from tests.compat.test_lash import filled


@pytest.fixture
def place(tmp_path: Path) -> str:
    made = str(tmp_path / "store")
    run("init", made)
    return made


def test_sessions_move_over_once(tmp_path: Path, place: str) -> None:
    source = tmp_path / "sessions"
    source.mkdir()
    filled(source / "s1.db", 4)
    LashFile(source / "empty.db")
    would = run("import-lash", str(source), "--dry-run", "--json", store=place).json
    assert (would["dry_run"], [one["outcome"] for one in would["sessions"]]) == (
        True, ["empty", "imported"],
    )  # fmt: skip
    told = run("import-lash", str(source), "-n", store=place).out
    assert "would move s1, revision 5, from " in told
    assert "nothing in " in told
    assert "s1" not in run("sessions", store=place).out
    told = run("import-lash", str(source), store=place).out
    assert "moved s1, revision 5, from " in told
    assert "  5 of 5 rows: nodes" in told
    assert "2 databases: " in told
    [one] = run("sessions", "--json", store=place).json["sessions"]
    assert (one["id"], one["revision"]) == ("s1", 5)
    assert "text of u1" in run("log", "s1", store=place).out
    again = run("import-lash", str(source / "s1.db"), store=place).out
    assert "was there s1, revision 5" in again
    assert "  0 of 5 rows: nodes" in again
    run("check", store=place)


def test_what_is_not_as_it_was_is_told(tmp_path: Path, place: str) -> None:
    file = filled(tmp_path / "a.db", 4)
    file.node(HOSTILE, "gone")
    file.run("UPDATE blobs SET content = x'00'")
    file.run("CREATE TABLE notes (x)")
    file.run("INSERT INTO notes VALUES (1)")
    ended = run("import-lash", str(file.path), store=place, ends=3)
    assert "of " + str(file.path) in ended.err
    assert "--leave-out-damaged" in ended.err
    told = run("import-lash", str(file.path), "--leave-out-damaged", store=place).out
    assert "  1 nodes whose parent is gone, which are roots now; the first: " in told
    assert "  2 damaged blobs that were left out; the first: " in told
    assert "  0 of 1 row: table notes" in told
    assert "\x1b[31m" not in told
    found = run("import-lash", str(file.path), "--leave-out-damaged", "--json", store=place).json
    [one] = found["sessions"]
    assert one["findings"][0]["first"] == HOSTILE
    assert {"name": "table notes", "found": 1, "imported": 0} in one["parts"]


def test_what_cannot_be_moved_ends_it(tmp_path: Path, place: str) -> None:
    run("import-lash", store=place, ends=2)
    gone = run("import-lash", str(tmp_path / "nowhere"), store=place, ends=4)
    assert "name the file to read from" in gone.err
    file = filled(tmp_path / "a.db", 4)
    file.run("PRAGMA user_version = 14")
    old = run("import-lash", str(file.path), store=place, ends=9)
    assert "schema version 14, this release reads 1, 3, 4, 8, 11, 12" in old.err
    file.run("PRAGMA user_version = 4")
    other = tmp_path / "text.db"
    other.write_text("x" * 2000)
    foreign = run("import-lash", str(other), store=place, ends=9)
    assert "name a database of the program to move from" in foreign.err
    with casstore.open(place) as store:
        file.lease(5, owner="worker", expires_ms=store.engine.now_ms() + 60_000)
    held = run("import-lash", str(file.path), store=place, ends=7)
    assert "held by 'worker'" in held.err
    file.lease(5)
    run("import-lash", str(file.path), store=place)
    file.batch("late", 12)
    grown = run("import-lash", str(file.path), "--json", store=place, ends=5)
    assert "came from lash at revision 5" in grown.err
    assert "--name ID" in grown.err
    told = run("import-lash", str(file.path), "--name", "again", "--json", store=place).json
    assert [one["session"] for one in told["sessions"]] == ["again"]
