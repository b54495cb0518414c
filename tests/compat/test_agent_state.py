"""morrow's ``agent_state`` on a store: the same program, and databases moved over."""

from __future__ import annotations

import inspect
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from casstore.compat.agent_state import AgentSession, NotStorableError, UserStore
from casstore.compat.agent_state_import import import_morrow
from casstore.compat.importing import PAGE_ROWS, ImportNote, PartReport
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write, WriteResult
from casstore.errors import (
    ConflictError,
    CorruptionError,
    ForeignStoreError,
    InvalidInputError,
    SessionNotFoundError,
    SessionUserError,
)
from casstore.maintenance.progress import Step
from casstore.records.lifecycles import FileKeys, Lifecycles
from casstore.store import Store
from casstore.testing.session_fixtures import nothing_written

ROOT = Path(__file__).parents[2]

# A program for the original: nothing in it but the import is about casstore.
PROGRAM = """
from pathlib import Path
from {module} import AgentSession, UserStore

store = UserStore()
store.set("user_1", "email", "someone@example.org")
store.set("user_1", "name", "Someone")
print("email", store.get("user_1", "email"))

session = AgentSession(session_id="demo", user_id="user_1")
session.set_working("subtask", "report")
session.set_working("call", {{"name": "fetch", "status": "pending"}})
session.set_working("draft", "# Report")
print("working", list(session._working.keys()))
made = session.checkpoint(label="done", include_keys=["subtask", "draft"])
print("id", len(made), [entry["id"] == made for entry in session.list_checkpoints()])
session.close()

print("deleted", store.delete_user("user_1"), store.get("user_1", "email"))
restored = AgentSession.restore("demo")
print("restored", restored._working, restored.get_working("draft", "nothing"))
print("checkpoint", restored.get_checkpoint("done"), restored.get_checkpoint("other"))
restored.close()
store.close()
Path(".agent_state.db").unlink(missing_ok=True)
Path(".user_store.db").unlink(missing_ok=True)
"""

ANSWER = """\
email someone@example.org
working ['subtask', 'call', 'draft']
id 36 [True]
deleted 2 None
restored {} nothing
checkpoint {'draft': '# Report', 'subtask': 'report'} None
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        yield store


def test_a_program_for_the_original_runs_by_changing_its_import(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(module="casstore.compat.agent_state"))
    answer = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert answer.stderr == ""
    assert answer.stdout == ANSWER
    assert [path.name for path in tmp_path.iterdir() if path.name != "program.py"] == [
        ".agent_state.casstore"
    ]


def test_the_calls_have_the_names_and_parameters_of_the_original() -> None:
    def parameters(call: Any) -> list[str]:
        return [
            name if each.default is each.empty else f"{name}={each.default}"
            for name, each in inspect.signature(call).parameters.items()
            if each.kind is not each.KEYWORD_ONLY and name != "self"
        ]

    assert {
        f"{kind.__name__}.{name}": parameters(call)
        for kind in (AgentSession, UserStore)
        for name, call in inspect.getmembers(kind, callable)
        if not name.startswith("_")
    } == {
        "AgentSession.set_working": ["key", "value"],
        "AgentSession.get_working": ["key", "default=None"],
        "AgentSession.clear_working": [],
        "AgentSession.checkpoint": ["label", "include_keys=None"],
        "AgentSession.get_checkpoint": ["label"],
        "AgentSession.list_checkpoints": [],
        "AgentSession.restore": ["session_id"],
        "AgentSession.close": [],
        "UserStore.set": ["user_id", "key", "value"],
        "UserStore.get": ["user_id", "key", "default=None"],
        "UserStore.delete_user": ["user_id"],
        "UserStore.close": [],
    }
    assert parameters(AgentSession) == ["session_id", "user_id=None"]
    assert parameters(UserStore) == []


# --- faults of the original that are gone -----------------------------------------------------


def test_an_empty_list_promotes_nothing_and_the_newest_is_the_last(store: Store) -> None:
    session = AgentSession("s", store=store)
    session.set_working("a", 1)
    session.checkpoint("x", [])
    assert session.get_checkpoint("x") == {}
    for number in range(50):
        session.set_working("a", number)
        session.checkpoint("x")
    assert session.get_checkpoint("x") == {"a": 49}
    assert [entry["label"] for entry in session.list_checkpoints()] == ["x"] * 51


def test_restoring_an_unknown_session_raises(store: Store) -> None:
    with pytest.raises(SessionNotFoundError):
        AgentSession.restore("never", store=store)
    AgentSession("s", store=store).close()
    assert AgentSession.restore("s", store=store).list_checkpoints() == []


def test_a_value_round_trips_or_is_refused(store: Store) -> None:
    session, users = AgentSession("s", store=store), UserStore(store=store)
    # What JSON has and stored values do not.
    strange = {"number": 1 << 80, "half": "\ud800", "deep": json.loads("[" * 80 + "]" * 80)}
    session.set_working("strange", strange)
    session.checkpoint("x")
    users.set("u", "strange", strange)
    assert session.get_checkpoint("x") == {"strange": strange}
    assert users.get("u", "strange") == strange
    assert users.get("u", "missing", {"json": b"{}"}) == {"json": b"{}"}
    for value in ({1: "one"}, {"deep": [{2: 3}]}, object(), {"set": {1}}, float("nan")):
        with nothing_written(store):
            with pytest.raises(TypeError) as raised:
                users.set("u", "x", value)
            assert isinstance(raised.value, NotStorableError)
            session.set_working("bad", value)
            with pytest.raises(NotStorableError):
                session.checkpoint("bad", ["bad"])


def test_any_thread_may_call(store: Store) -> None:
    session, users = AgentSession("s", "user", store=store), UserStore(store=store)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            session.set_working("from", "another thread")
            session.checkpoint("x")
            users.set("user", "key", 1)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert session.get_checkpoint("x") == {"from": "another thread"}
    assert users.get("user", "key") == 1


def test_a_session_remembers_its_user(store: Store) -> None:
    AgentSession("s", "anna", store=store).checkpoint("x")
    life = Lifecycles(store)
    assert list(life.sessions(user="anna")) == ["s"]
    assert life.is_for("s", "anna")
    AgentSession("s", store=store).checkpoint("y")
    with pytest.raises(SessionUserError):
        AgentSession("s", "berta", store=store)
    AgentSession("nobody's", store=store).checkpoint("z")
    AgentSession("nobody's", "anna", store=store)
    assert list(life.sessions(user="anna")) == ["nobody's", "s"]
    # Deleting the user's data leaves checkpoints, as the original promises.
    users = UserStore(store=store)
    users.set("anna", "k", 1)
    assert users.delete_user("anna") == 1
    assert len(AgentSession("s", store=store).list_checkpoints()) == 2


def test_the_store_is_created_at_db_path_and_an_sqlite_file_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentSession, "DB_PATH", tmp_path / "sessions")
    monkeypatch.setattr(UserStore, "DB_PATH", tmp_path / "users")
    session, users = AgentSession("s", "u"), UserStore()
    users.set("u", "k", 1)
    session.close()
    users.close()
    assert {path.name for path in tmp_path.iterdir()} == {"sessions", "users"}
    (tmp_path / "old.db").write_bytes(b"SQLite format 3\0")
    monkeypatch.setattr(UserStore, "DB_PATH", tmp_path / "old.db")
    with pytest.raises(InvalidInputError, match="import_morrow"):
        UserStore()


# --- moving over ------------------------------------------------------------------------------

CHECKPOINTS = [
    # Two in one tick: the second is the newer.
    ("id-1", "s1", "draft", '{"n": 1}', 1_700_000_000.25),
    ("id-2", "s1", "draft", '{"n": 2, "text": "' + "long " * 300 + '"}', 1_700_000_000.25),
    ("id-3", "s2", "ünï", '{"big": 1180591620717411303424, "nan": NaN}', 1_700_000_001.5),
    ("id-4", "s1", "done", "{}", 1_600_000_000.0),
]
USERS = [
    ("anna", "email", '"anna@example.org"', 1_700_000_002.125),
    ("anna", "tags", '["a", {"b": null}]', 1_700_000_003.0),
    ("berta", "email", '"berta@example.org"', 1_700_000_004.0),
]


def database(path: Path, checkpoints: Any = CHECKPOINTS, users: Any = USERS) -> Path:
    with closing(sqlite3.connect(path)) as made, made:
        if checkpoints is not None:
            made.execute(
                "CREATE TABLE checkpoints (id TEXT PRIMARY KEY, session_id TEXT NOT NULL, "
                "label TEXT NOT NULL, payload TEXT NOT NULL, created_at REAL NOT NULL)"
            )
            made.executemany("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", checkpoints)
        if users is not None:
            made.execute(
                "CREATE TABLE user_data (user_id TEXT NOT NULL, key TEXT NOT NULL, "
                "value TEXT NOT NULL, created_at REAL NOT NULL, PRIMARY KEY (user_id, key))"
            )
            made.executemany("INSERT INTO user_data VALUES (?, ?, ?, ?)", users)
    return path


def test_importing_both_databases_loses_nothing(store: Store, tmp_path: Path) -> None:
    first = database(tmp_path / "agent.db", users=None)
    second = database(tmp_path / "user.db", checkpoints=None)
    before = first.read_bytes(), second.read_bytes()
    with nothing_written(store):
        dry = import_morrow(store, first, dry_run=True)
    assert (dry.dry_run, dry.parts) == (True, (PartReport("checkpoints", 4, 4),))
    told: list[Step] = []
    report = import_morrow(store, first, progress=told.append)
    assert report.parts == (PartReport("checkpoints", 4, 4),)
    assert {step.phase for step in told} == {"copy", "verify"}
    assert import_morrow(store, second).parts == (PartReport("user_data", 3, 3),)
    with nothing_written(store):
        assert import_morrow(store, first).imported == 0
        assert import_morrow(store, second).imported == 0
    assert (first.read_bytes(), second.read_bytes()) == before

    session = AgentSession.restore("s1", store=store)
    assert session.list_checkpoints() == [
        {"id": row[0], "label": row[2], "created_at": row[4]}
        for row in CHECKPOINTS
        if row[1] == "s1"
    ]
    newest = session.get_checkpoint("draft")
    assert newest is not None
    assert newest["n"] == 2
    other = AgentSession.restore("s2", store=store).get_checkpoint("ünï")
    assert other is not None
    assert (other["big"], other["nan"] == other["nan"]) == (1 << 70, False)
    users = UserStore(store=store)
    assert users.get("anna", "tags") == ["a", {"b": None}]
    # What is deleted is forgotten, where it came from as well.
    Lifecycles(store).delete_session("s2")
    assert import_morrow(store, first).imported == 1
    # It continues from there.
    session.set_working("n", 3)
    session.checkpoint("draft")
    assert session.get_checkpoint("draft") == {"n": 3}
    assert users.delete_user("anna") == 2


def test_user_data_arrives_encrypted_if_there_are_keys(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra: pip install '.[sealing]'")
    keys = FileKeys(tmp_path / "keys")
    file = database(tmp_path / "both.db")
    assert import_morrow(store, file, keys=keys).imported == 7
    assert import_morrow(store, file, keys=keys).imported == 0
    assert not [row for row in store.engine.scan_rows("records") if b"example.org" in row.value]
    users = UserStore(store=store, keys=keys)
    assert users.get("anna", "email") == "anna@example.org"
    assert users.delete_user("anna") == 2


def test_a_stopped_import_continues_where_it_was(store: Store, tmp_path: Path) -> None:
    rows = [(f"id-{n}", f"s{n % 3}", "x", json.dumps({"n": n}), float(n)) for n in range(600)]
    file = database(tmp_path / "a.db", rows, None)

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_morrow(store, file, progress=stop)
    assert import_morrow(store, file).parts == (PartReport("checkpoints", 600, 600 - PAGE_ROWS),)
    found = [entry["created_at"] for entry in AgentSession("s1", store=store).list_checkpoints()]
    assert found == [float(n) for n in range(600) if n % 3 == 1]


def test_large_rows_are_moved_few_at_a_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_BYTES", 1000)
    rows = [("u", f"k{n}", json.dumps("x" * 600), float(n)) for n in range(5)]
    told: list[Step] = []
    import_morrow(store, database(tmp_path / "a.db", None, rows), progress=told.append)
    assert [step.done for step in told if step.phase == "copy"] == [2, 4, 5]


def test_content_in_the_store_that_differs_ends_the_import(store: Store, tmp_path: Path) -> None:
    file = database(tmp_path / "a.db")
    import_morrow(store, file)
    changed = [(*CHECKPOINTS[0][:3], '{"n": 1.0}', CHECKPOINTS[0][4]), *CHECKPOINTS[1:]]
    with nothing_written(store), pytest.raises(ConflictError, match="id-1"):
        import_morrow(store, database(tmp_path / "b.db", changed, None))
    other = [("anna", "email", '"other"', USERS[0][3])]
    with nothing_written(store), pytest.raises(ConflictError, match="email"):
        import_morrow(store, database(tmp_path / "c.db", None, other))
    # A session that went on would have its older checkpoints taken for newer ones.
    AgentSession("s1", store=store).checkpoint("own")
    more = [*CHECKPOINTS, ("id-9", "s1", "late", "{}", 5.0)]
    with nothing_written(store), pytest.raises(ConflictError, match="all of its checkpoints"):
        import_morrow(store, database(tmp_path / "d.db", more, None))


@pytest.mark.parametrize(
    ("checkpoints", "users"),
    [
        ([("i", "s", "l", "no json", 1.0)], None),
        ([("i", "s", "l", "[1]", 1.0)], None),
        ([("i", "s", "l", "[" * 100_000, 1.0)], None),
        ([("i", "s", "l", b"{}", 1.0)], None),
        ([("i", "s", "l", "{}", "yesterday")], None),
        ([("i", "s", "l", "{}", -5.0)], None),
        ([("i", "s", "l", "{}", 1e300)], None),
        ([(b"i", "s", "l", "{}", 1.0)], None),
        (None, [("u", "k", "{", 1.0)]),
        (None, [(b"u", "k", "1", 1.0)]),
    ],
)
def test_an_invalid_row_is_named_and_nothing_is_written(
    store: Store, tmp_path: Path, checkpoints: Any, users: Any
) -> None:
    file = database(tmp_path / "a.db", checkpoints, users)
    with nothing_written(store), pytest.raises(CorruptionError, match=r"a\.db"):
        import_morrow(store, file)


def test_a_database_of_another_program_than_morrow_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(ForeignStoreError, match="neither"):
        import_morrow(store, database(tmp_path / "a.db", None, None))
    with closing(sqlite3.connect(tmp_path / "b.db")) as made, made:
        made.execute("CREATE TABLE checkpoints (thread_id TEXT, checkpoint BLOB)")
    with pytest.raises(ForeignStoreError, match="not a table of morrow"):
        import_morrow(store, tmp_path / "b.db")


def test_values_in_a_column_of_a_later_release_are_counted(store: Store, tmp_path: Path) -> None:
    file = database(tmp_path / "a.db", [("i", "s", "l", "{}", 1.0)], None)
    with closing(sqlite3.connect(file)) as made, made:
        made.execute("ALTER TABLE checkpoints ADD COLUMN class TEXT DEFAULT 'x'")
    report = import_morrow(store, file)
    assert report.parts == (PartReport("checkpoints", 1, 1),)
    assert report.notes == (
        ImportNote("values of the unknown column class of checkpoints, left out", 1),
    )


def test_two_imports_at_once_make_no_checkpoint_twice(tmp_path: Path) -> None:
    class Between(MemoryEngine):
        """Does something else just before the first write."""

        other: Callable[[], object] | None = None

        def write(self, write: Write) -> WriteResult:
            if self.other is not None:
                other, self.other = self.other, None
                other()
            return super().write(write)

    rows = [(str(at), "s", "l", "{}", 1.0) for at in range(9)]
    file = database(tmp_path / "a.db", rows, None)
    engine = Between()
    with Store(engine) as store:
        engine.other = lambda: import_morrow(store, file)
        with pytest.raises(ConflictError, match="another writer has imported"):
            import_morrow(store, file)
        assert import_morrow(store, file).imported == 0
        assert len(list(Lifecycles(store).tables.checkpoints.scan("s"))) == 9
