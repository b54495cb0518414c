"""``import-records``: the database of another store by one command."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest

from casstore.compat.importing import IMPORTERS
from tests.cli.running import run

power_loop = pytest.importorskip(
    "power_loop", reason="needs the extra: pip install 'casstore[dev]'"
)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    from power_loop.runtime.session_store import SessionStore

    path = tmp_path / "sessions.db"
    store = SessionStore.open(path)
    session = store.create_session(system_prompt="be brief")
    store.append_message(session, role="user", content="hello")
    store.append_message(session, role="assistant", content="yes?")
    store.close()
    return path


def test_every_importer_is_there() -> None:
    for place in IMPORTERS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))


def test_a_database_moves_over_once(tmp_path: Path, database: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    told = run("import-records", "power-loop", str(database), "--dry-run", store=place).out
    assert "would move 2 of 2 rows: messages" in told
    found = run("import-records", "power-loop", str(database), "--json", store=place).json
    assert {part["name"]: part["imported"] for part in found["parts"]}["messages"] == 2
    assert run("sessions", "--json", store=place).json["sessions"]
    again = run("import-records", "power-loop", str(database), "-n", store=place).out
    assert "would move 0 of 2 rows: messages" in again


def test_what_is_not_one_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as made, made:
        made.execute("CREATE TABLE t (x)")
    for kind in IMPORTERS:
        told = run("import-records", kind, str(other), store=place, ends=None)
        assert told.code not in (0, 1), kind
        assert told.err.startswith("error: "), kind
    run("import-records", "power-loop", str(tmp_path / "nowhere"), store=place, ends=4)
    run("import-records", "nobody", str(other), store=place, ends=2)
