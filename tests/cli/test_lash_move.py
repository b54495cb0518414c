"""``casstore import lash``: session databases of lash."""

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
    would = run("import", "lash", str(source), "--dry-run", "--json", store=place).json
    assert (would["dry_run"], [one["outcome"] for one in would["sessions"]]) == (True, ["imported"])
    told = run("import", "lash", str(source), "-n", store=place).out
    assert "  would be imported: s1\n" in told
    assert "note: 1 databases without a session, left out" in told
    assert "s1" not in run("sessions", store=place).out
    told = run("import", "lash", str(source), store=place).out
    assert "  imported: s1\n" in told
    assert "imported 5 of 5 nodes" in told
    [one] = run("sessions", "--json", store=place).json["sessions"]
    assert (one["id"], one["revision"]) == ("s1", 5)
    assert "text of u1" in run("log", "s1", store=place).out
    again = run("import", "lash", str(source / "s1.db"), store=place).out
    assert "imported 0 of 5 nodes" in again
    assert "imported: s1" not in again
    run("check", store=place)


def test_damage_and_changes_of_the_source_are_reported(tmp_path: Path, place: str) -> None:
    file = filled(tmp_path / "a.db", 4)
    file.node(HOSTILE, "gone")
    file.run("UPDATE blobs SET content = x'00'")
    file.run("CREATE TABLE notes (x)")
    file.run("INSERT INTO notes VALUES (1)")
    ended = run("import", "lash", str(file.path), store=place, ends=3)
    assert "of " + str(file.path) in ended.err
    assert "--leave-out-damaged" in ended.err
    told = run("import", "lash", str(file.path), "--leave-out-damaged", store=place).out
    assert "note: 1 nodes whose parent is gone, stored as roots (the first: " in told
    assert "note: 2 damaged blobs, left out (the first: " in told
    assert "note: 1 rows of the unknown table notes, left out" in told
    assert "\x1b[31m" not in told
    found = run("import", "lash", str(file.path), "--leave-out-damaged", "--json", store=place).json
    assert found["notes"][0]["examples"] == [HOSTILE]


def test_a_source_that_cannot_be_imported_is_refused(tmp_path: Path, place: str) -> None:
    run("import", "lash", store=place, ends=2)
    gone = run("import", "lash", str(tmp_path / "nowhere"), store=place, ends=4)
    assert "name the file to read from" in gone.err
    file = filled(tmp_path / "a.db", 4)
    file.run("PRAGMA user_version = 14")
    old = run("import", "lash", str(file.path), store=place, ends=9)
    assert "schema version 14, this release reads 1, 3, 4, 8, 11, 12" in old.err
    file.run("PRAGMA user_version = 4")
    other = tmp_path / "text.db"
    other.write_text("x" * 2000)
    foreign = run("import", "lash", str(other), store=place, ends=9)
    assert "name a source of that kind" in foreign.err
    with casstore.open(place) as store:
        file.lease(5, owner="worker", expires_ms=store.engine.now_ms() + 60_000)
    held = run("import", "lash", str(file.path), store=place, ends=7)
    assert "held by 'worker'" in held.err
    file.lease(5)
    run("import", "lash", str(file.path), store=place)
    file.batch("late", 12)
    grown = run("import", "lash", str(file.path), "--json", store=place, ends=5)
    assert "came from lash at revision 5" in grown.err
    assert "--name ID" in grown.err
    told = run("import", "lash", str(file.path), "--name", "again", "--json", store=place).json
    assert [one["session"] for one in told["sessions"]] == ["again"]
