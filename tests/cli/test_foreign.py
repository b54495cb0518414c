"""``casstore import`` of databases that become records: power-loop, morrow, agent-harness."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import casstore
from casstore.errors import (
    InvalidInputError,
    KeyMissingError,
    NotFoundError,
    StorageError,
    SubjectSecretError,
)
from casstore.records.lifecycles import FileKeys, Lifecycles
from casstore.records.runs import Runs
from tests.cli.running import counts, run
from tests.compat.test_agent_harness_import import TABLES

power_loop = pytest.importorskip("power_loop", reason="needs the extra: pip install '.[dev]'")


RECORDS = {"agent-harness", "langbot", "morrow", "power-loop"}


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


def test_a_database_moves_over_once(tmp_path: Path, database: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    told = run("import", "power-loop", str(database), "--dry-run", store=place).out
    assert "would import 2 of 2 messages" in told
    found = run("import", "power-loop", str(database), "--json", store=place).json
    assert counts(found)["messages"] == (2, 2, 0)
    assert run("sessions", "--json", store=place).json["sessions"]
    again = run("import", "power-loop", str(database), "-n", store=place).out
    assert "would import 0 of 2 messages" in again


def test_a_source_of_another_kind_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as made, made:
        made.execute("CREATE TABLE t (x)")
    for kind in RECORDS:
        told = run("import", kind, str(other), store=place, ends=None)
        assert told.code not in (0, 1), kind
        assert told.err.startswith("error: "), kind
    told = run("import", "power-loop", str(tmp_path / "nowhere"), store=place, ends=4)
    # The store is there; it is the file that is not.
    assert "--store" not in told.err
    run("import", "nobody", str(other), store=place, ends=2)


# --- options of some of them ----------------------------------------------------------------------


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """User data as morrow keeps it."""
    path = tmp_path / "users.db"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE user_data (user_id, key, value, created_at)")
        made.execute(
            "INSERT INTO user_data VALUES ('ann', 'town', '\"Nowhere in particular\"', 1.5)"
        )
    return path


def test_user_data_arrives_under_keys_and_a_secret(tmp_path: Path, users: Path) -> None:
    place, keys, secret = str(tmp_path / "store"), tmp_path / "keys", tmp_path / "secret"
    secret.write_bytes(b"sixteen or more bytes")
    run("init", place)

    def move(*more: str) -> str:
        return run("import", "morrow", str(users), "--keys", str(keys),
                   "--secret", str(secret), *more, store=place).out  # fmt: skip

    assert "would import 1 of 1 user_data" in move("--dry-run")
    assert not keys.exists()
    assert "imported 1 of 1 user_data" in move()
    assert "would import 0 of 1 user_data" in move("--dry-run")
    assert b"Nowhere in particular" not in (Path(place) / "data.mdb").read_bytes()
    with casstore.open(place) as store:
        users_of = Lifecycles(store, keys=FileKeys(keys), secret=secret.read_bytes()).users
        assert users_of.get("ann", "town") == "Nowhere in particular"
        with pytest.raises(KeyMissingError):
            Lifecycles(store, secret=secret.read_bytes()).users.get("ann", "town")
    # Another secret would make another user of the same one.
    told = run("import", "morrow", str(users), "--keys", str(keys), store=place, ends=None)
    assert told.code == SubjectSecretError.exit_code
    assert told.out == ""


def test_keys_that_others_may_read_or_that_lie_in_the_store_are_refused(
    tmp_path: Path, users: Path
) -> None:
    place, keys = str(tmp_path / "store"), tmp_path / "keys"
    run("init", place)
    keys.mkdir(mode=0o755)
    given = ["import", "morrow", str(users), "--keys"]
    assert run(*given, str(keys), store=place, ends=None).code == StorageError.exit_code
    inside = str(Path(place) / "keys")
    assert run(*given, inside, store=place, ends=None).code == InvalidInputError.exit_code
    assert not Path(inside).exists()
    with casstore.open(place) as store:
        assert list(Lifecycles(store).users.names("ann")) == []


def test_artifacts_may_lie_elsewhere(tmp_path: Path) -> None:
    place, file = str(tmp_path / "store"), tmp_path / "runtime.sqlite"
    run("init", place)
    with closing(sqlite3.connect(file)) as made, made:
        made.executescript(TABLES)
        at = "2026-03-01T10:00:00.000Z"
        made.execute("INSERT INTO threads VALUES ('t', 'w', 'a', 'running', 'r', ?, ?)", (at, at))
        made.execute(
            "INSERT INTO runs VALUES ('r', 't', 'a', 'm', 'm', ?, ?, 'running', NULL, ?, ?, 0, '')",
            (at, at, at, at),
        )
        made.execute("INSERT INTO artifacts VALUES ('x', 't', 'r', 'text', 'dir/x.txt', ?)", (at,))
    folder = tmp_path / "elsewhere" / "threads" / "t" / "runs" / "r" / "dir"
    folder.mkdir(parents=True)
    (folder / "x.txt").write_bytes(b"\x00what was made")
    moved = run("import", "agent-harness", str(file), store=place, ends=None)
    assert moved.code == NotFoundError.exit_code
    told = run("import", "agent-harness", str(file),
               "--artifacts", str(tmp_path / "elsewhere"), store=place).out  # fmt: skip
    assert "imported 1 of 1 artifacts" in told
    with casstore.open(place) as store:
        assert Runs(store).read_artifact("t", "r", "dir/x.txt") == b"\x00what was made"
    nowhere = str(tmp_path / "nowhere")
    run("import", "agent-harness", str(file), "--artifacts", nowhere, store=place, ends=2)


@pytest.mark.parametrize(
    ("option", "kinds"),
    [("--keys", {"morrow"}), ("--secret", {"morrow"}), ("--artifacts", {"agent-harness"})],
)
def test_an_option_that_the_import_kind_does_not_use_is_refused(
    tmp_path: Path, option: str, kinds: set[str]
) -> None:
    """Whoever gives keys must not believe that something was encrypted."""
    place, given = str(tmp_path / "store"), tmp_path / "given"
    run("init", place)
    given.write_bytes(bytes(20)) if option == "--secret" else given.mkdir(mode=0o700)
    for kind in RECORDS - kinds:
        told = run("import", kind, "nowhere", option, str(given), store=place, ends=2)
        assert f"No such option {option!r}" in told.err
    for kind in kinds:
        # The file is not there; the option was accepted.
        run("import", kind, "nowhere", option, str(given), store=place, ends=4)
