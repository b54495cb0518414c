"""Databases of LangBot: runner state moves over with its keys, times and contexts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from casstore.compat.importing import ImportReport
from casstore.compat.langbot_import import import_langbot
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.errors import ConflictError, ForeignStoreError, InvalidInputError
from casstore.maintenance.progress import Step
from casstore.records.scoped import SCOPES, Context, ScopedState, StatePolicy
from casstore.records.scoped.scope_keys import scope_key
from casstore.store import Store

ALL = StatePolicy(scopes=SCOPES)
HERE = Context(
    "plugin:me/agent/default", "bot:b1", "b1", "w1", "talk", None, "ann", None, "t7", "ticket"
)
CONTEXT = (
    "runner_id", "binding_identity", "bot_id", "workspace_id", "conversation_id", "thread_id",
    "actor_id", "actor_type", "subject_id", "subject_type",
)  # fmt: skip
RESETTER = "__langbot_context_reset__"
FIRST, LAST = "2026-05-23 19:49:08.529110", "2026-06-01 00:00:00.000000"
FIRST_MS, LAST_MS = 1_779_565_748_529, 1_780_272_000_000


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        yield store


class Source:
    """A database as LangBot leaves it."""

    def __init__(self, path: Path, *tables: str) -> None:
        self.path = path
        for table in tables:
            self.create(table)

    def run(self, sql: str, values: Any = ()) -> None:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute(sql, values)

    def create(self, table: str) -> None:
        self.run(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, scope VARCHAR(50) NOT NULL, "
            "scope_key VARCHAR(512) NOT NULL, state_key VARCHAR(255) NOT NULL, value_json TEXT, "
            "created_at DATETIME NOT NULL, updated_at DATETIME NOT NULL, "
            + ", ".join(f"{name} VARCHAR(255)" for name in CONTEXT)
            + ", UNIQUE (scope_key, state_key))"
        )

    def add(
        self,
        scope: str,
        state_key: str,
        value_json: str | None,
        context: Context = HERE,
        *,
        key: str | None = None,
        table: str = "runner_state",
        created: str = FIRST,
        updated: str | None = LAST,
    ) -> None:
        made = key if key is not None else scope_key(context, scope)
        row = (scope, made, state_key, value_json, created, updated, *context)
        self.run(
            f"INSERT INTO {table} (scope, scope_key, state_key, value_json, created_at, "
            f"updated_at, {', '.join(CONTEXT)}) VALUES ({', '.join('?' * len(row))})",
            row,
        )

    def add_reset(self, generation: str, context: Context = HERE) -> None:
        marker = Context(RESETTER, RESETTER, *context[2:5])
        self.add("conversation", "generation", json.dumps(generation), marker, key="host-reset:x")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "langbot.db", "runner_state")


EMPTY = "rows without a value, left out"
SUPERSEDED = "rows that a newer row replaces, left out"
UNREADABLE = "rows whose value is not JSON, left out"
UNKNOWN = "values of the unknown column version of runner_state, left out"


def counts(report: ImportReport) -> dict[str, tuple[int, int]]:
    parts = {part.name: (part.found, part.imported) for part in report.parts if part.found}
    return {**parts, **{note.what: (note.number, 0) for note in report.notes}}


def fill(source: Source, number: int = 30) -> dict[str, dict[str, Any]]:
    values: list[Any] = [None, 1, 1.0, "ü", ["x" * 5000], {"a": {"b": [10**30]}}, True, [], ""]
    told: dict[str, dict[str, Any]] = {scope: {} for scope in SCOPES}
    for n in range(number):
        scope, value = SCOPES[n % 4], values[n % len(values)]
        told[scope][f"k{n}"] = value
        source.add(scope, f"k{n}", json.dumps(value, ensure_ascii=False))
    return told


def test_every_value_moves_with_its_times_and_context(store: Store, source: Source) -> None:
    told = fill(source)
    report = import_langbot(store, source.path)
    assert counts(report) == {"values": (30, 30)}
    states = ScopedState(store)
    seen = states.snapshot(HERE, ALL)
    assert seen["conversation"].pop("external.conversation_id") == "talk"
    assert json.dumps(seen, sort_keys=True) == json.dumps(told, sort_keys=True)
    for scope in SCOPES:
        for key in told[scope]:
            entry = states.scope(HERE, scope, ALL).find(key)
            assert entry is not None
            assert (entry.created_ms, entry.updated_ms) == (FIRST_MS, LAST_MS)
            assert states.scope(HERE, scope, ALL).origin(key) == HERE
        assert states.scope(HERE, scope, ALL).usage().keys == len(told[scope])
    # Imported values can be changed and erased like native ones.
    first = states.scope(HERE, "actor").put("k1", 2)
    assert first.created_ms == FIRST_MS
    assert states.erase_actor("ann").values == 30
    assert states.snapshot(HERE, ALL)["runner"] == {}


def test_a_dry_run_returns_the_same_report_and_writes_nothing(store: Store, source: Source) -> None:
    fill(source)
    source.add_reset("g1")
    source.add("actor", "empty", None)
    report = import_langbot(store, source.path, dry_run=True)
    assert counts(report) == {"resets": (1, 1), "values": (30, 30), EMPTY: (1, 0)}
    assert report.dry_run
    assert store.engine.scan_rows("records") == []
    assert counts(import_langbot(store, source.path)) == counts(report)


def test_a_repeated_import_does_nothing_and_a_stopped_one_continues(
    store: Store, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 7)
    told = fill(source)

    class Stop(Exception):
        pass

    def stop(step: Step) -> None:
        if step.phase == "copy" and step.done == 14:
            raise Stop

    with pytest.raises(Stop):
        import_langbot(store, source.path, progress=stop)
    steps: list[Step] = []
    assert counts(import_langbot(store, source.path, progress=steps.append)) == {"values": (30, 16)}
    assert {step.phase for step in steps} == {"check", "copy", "verify"}
    assert counts(import_langbot(store, source.path)) == {"values": (30, 0)}
    states = ScopedState(store)
    assert {scope: states.scope(HERE, scope, ALL).usage().keys for scope in SCOPES} == {
        scope: len(values) for scope, values in told.items()
    }


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("value_json", "[1.0]"), ("value_json", "[true]"), ("updated_at", FIRST),
        ("created_at", LAST), ("actor_id", "bob"),
    ],
)  # fmt: skip
def test_content_in_the_store_that_differs_ends_the_import(
    store: Store, source: Source, column: str, other: str
) -> None:
    source.add("runner", "k", "[1]")
    import_langbot(store, source.path)
    before = store.engine.scan_rows("records")
    source.run(f"UPDATE runner_state SET {column} = ?", (other,))
    with pytest.raises(ConflictError, match="'k'"):
        import_langbot(store, source.path)
    assert store.engine.scan_rows("records") == before


def test_migration__both_tables_with_rows_are_refused(store: Store, source: Source) -> None:
    source.create("agent_runner_state")
    source.add("runner", "new", "1")
    import_langbot(store, source.path, dry_run=True)
    source.add("runner", "old", "2", table="agent_runner_state")
    with pytest.raises(ConflictError, match="agent_runner_state"):
        import_langbot(store, source.path)
    assert store.engine.scan_rows("records") == []
    source.run("DELETE FROM runner_state")
    import_langbot(store, source.path)
    assert ScopedState(store).snapshot(HERE, ALL)["runner"] == {"old": 2}


def test_migration__a_database_with_only_the_old_table_is_imported(
    store: Store, tmp_path: Path
) -> None:
    source = Source(tmp_path / "old.db", "agent_runner_state")
    source.add("runner", "k", "1", table="agent_runner_state")
    assert counts(import_langbot(store, source.path)) == {"values": (1, 1)}


def test_a_database_of_another_program_is_refused(store: Store, tmp_path: Path) -> None:
    source = Source(tmp_path / "other.db")
    source.run("CREATE TABLE bots (id INTEGER)")
    with pytest.raises(ForeignStoreError, match="runner_state"):
        import_langbot(store, source.path)
    source.run("CREATE TABLE runner_state (id INTEGER, scope TEXT)")
    with pytest.raises(ForeignStoreError, match="column"):
        import_langbot(store, source.path)


JOINED = [
    ("conversation", HERE, "conversation:plugin:me/agent/default:bot:b1:talk"),
    ("conversation", HERE._replace(thread_id="th"),
     "conversation:plugin:me/agent/default:bot:b1:talk:th"),
    ("actor", HERE, "actor:plugin:me/agent/default:bot:b1:user:ann"),
    ("actor", HERE._replace(actor_type="admin"),
     "actor:plugin:me/agent/default:bot:b1:admin:ann"),
    ("subject", HERE, "subject:plugin:me/agent/default:bot:b1:ticket:t7"),
    ("subject", HERE._replace(subject_type=None),
     "subject:plugin:me/agent/default:bot:b1:unknown:t7"),
    ("runner", HERE, "runner:plugin:me/agent/default:bot:b1"),
]  # fmt: skip


@pytest.mark.parametrize(("scope", "context", "key"), JOINED)
def test_old_keys__the_columns_decide_the_scope_of_a_row(
    store: Store, source: Source, scope: str, context: Context, key: str
) -> None:
    source.add(scope, "k", "7", context, key=key)
    assert counts(import_langbot(store, source.path)) == {"values": (1, 1)}
    found = ScopedState(store).scope(context, scope, ALL).find("k")
    assert found is not None
    assert found.value == 7


def test_old_keys__a_row_with_a_new_key_supersedes_one_with_an_old_key(
    store: Store, source: Source
) -> None:
    for scope, context, key in JOINED[:3]:
        source.add(scope, "k", '"old"', context, key=key)
        source.add(scope, "alone", '"old"', context, key=key)
        source.add(scope, "k", '"new"', context)
    report = import_langbot(store, source.path)
    assert counts(report) == {"values": (6, 6), SUPERSEDED: (3, 0)}
    assert ScopedState(store).snapshot(HERE)["actor"] == {"k": "new", "alone": "old"}
    assert counts(import_langbot(store, source.path)) == {"values": (6, 0), SUPERSEDED: (3, 0)}


def test_old_keys__an_alias_is_treated_as_its_key(store: Store, source: Source) -> None:
    talk = HERE._replace(conversation_id="other")
    source.add("conversation", "conversation_id", '"alias"')
    source.add("conversation", "external.conversation_id", '"real"')
    source.add("conversation", "conversation_id", '"alias"', talk)
    assert counts(import_langbot(store, source.path)) == {"values": (2, 2), SUPERSEDED: (1, 0)}
    states = ScopedState(store)
    key = "external.conversation_id"
    assert states.snapshot(HERE)["conversation"] == {key: "real"}
    assert states.snapshot(talk)["conversation"] == {key: "alias"}


def test_old_keys__rows_that_collide_through_an_alias_keep_the_value_of_the_new_key(
    store: Store, source: Source
) -> None:
    source.add("conversation", "conversation_id", '"later"')
    for name in ("external.conversation_id", "conversation_id"):
        source.add("conversation", name, '"older"', key=JOINED[0][2])
    for dry_run in (True, False):
        report = import_langbot(store, source.path, dry_run=dry_run)
        assert counts(report) == {"values": (1, 1), SUPERSEDED: (2, 0)}
    found = ScopedState(store).snapshot(HERE)["conversation"]
    assert found == {"external.conversation_id": "later"}
    assert import_langbot(store, source.path).imported == 0


def test_resets_are_imported_with_the_values_after_them(store: Store, source: Source) -> None:
    other = HERE._replace(workspace_id=None, bot_id=None)
    source.add_reset("generation-id")
    source.add("conversation", "k", "1")
    source.add("conversation", "k", "2", HERE._replace(thread_id="th"))
    source.add("conversation", "k", "3", other)
    source.add("actor", "k", "4")
    assert counts(import_langbot(store, source.path)) == {"resets": (1, 1), "values": (4, 4)}
    states = ScopedState(store)
    talk: dict[str, Any] = {"workspace_id": "w1", "bot_id": "b1", "conversation_id": "talk"}
    latest = states.generation(**talk)
    assert latest is not None
    assert latest[:3] == (1, "generation-id", FIRST_MS)
    assert states.snapshot(HERE)["conversation"] == {
        "k": 1, "external.conversation_id": "generation-id"
    }  # fmt: skip
    assert states.snapshot(other)["conversation"]["k"] == 3
    # Reset once more here, what moved is history, and importing again changes nothing.
    states.reset(**talk)
    assert "k" not in states.snapshot(HERE)["conversation"]
    assert counts(import_langbot(store, source.path)) == {"resets": (1, 0), "values": (4, 0)}


def test_a_reset_in_the_store_conflicts_with_an_imported_reset(
    store: Store, source: Source
) -> None:
    ScopedState(store).reset(workspace_id="w1", bot_id="b1", conversation_id="talk")
    source.add_reset("g1")
    with pytest.raises(ConflictError, match="talk"):
        import_langbot(store, source.path)


@pytest.mark.parametrize("text", ["{", "[1", "nul", "'x'", "{'a': 1}"])
def test_rows_that_langbot_cannot_read_are_left_out_and_reported(
    store: Store, source: Source, text: str
) -> None:
    source.add("actor", "bad", text)
    source.add("actor", "null", None)
    source.add("actor", "blank", "")
    source.add("actor", "good", "null")
    report = import_langbot(store, source.path)
    assert counts(report) == {"values": (1, 1), EMPTY: (2, 0), UNREADABLE: (1, 0)}
    assert ScopedState(store).snapshot(HERE)["actor"] == {"good": None}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"value_json": "NaN"}, "not JSON"),
        ({"value_json": "[1e999]"}, "not JSON"),
        ({"value_json": json.dumps("\ud800")}, "not JSON"),
        ({"value_json": "[" * 100_000}, "cannot be read"),
        ({"value_json": json.dumps("x" * 262_143)}, "262144"),
        ({"value_json": b"\x80"}, "cannot be read"),
        ({"state_key": "k" * 256}, "255"),
        ({"state_key": ""}, "255"),
        ({"scope": "galaxy"}, "galaxy"),
        ({"scope_key": "actor:v2:" + "0" * 64}, "scope_key"),
        ({"scope_key": "actor:a:b"}, "scope_key"),
        ({"actor_id": None}, "actor"),
        ({"runner_id": ""}, "runner_id"),
        ({"bot_id": "another"}, "scope_key"),
        ({"created_at": "yesterday"}, "yesterday"),
        ({"updated_at": "1960-01-01 00:00:00"}, "1970"),
        ({"updated_at": 12}, "12"),
    ],
)
def test_an_impossible_row_is_named_and_nothing_is_imported(
    store: Store, source: Source, changed: dict[str, Any], why: str
) -> None:
    source.add("actor", "k", "1")
    for column, value in changed.items():
        source.run(f"UPDATE runner_state SET {column} = ?", (value,))
    with pytest.raises(InvalidInputError, match=why) as refused:
        import_langbot(store, source.path)
    assert "row 1 of runner_state" in str(refused.value)
    assert store.engine.scan_rows("records") == []


@pytest.mark.parametrize("value", [None, "7", "nonsense", '""'])
def test_an_invalid_reset_row_is_refused_by_number(
    store: Store, source: Source, value: str | None
) -> None:
    source.add_reset("g1")
    source.run("UPDATE runner_state SET value_json = ?", (value,))
    with pytest.raises(InvalidInputError, match="row 1"):
        import_langbot(store, source.path)


def meanwhile(store: Store, act: Callable[[], Any]) -> None:
    """Let something happen just before the next write of the store."""
    engine: Any = store.engine
    whole = engine.write

    def write(change: Any) -> Any:
        engine.write = whole
        act()
        return whole(change)

    engine.write = write


def test_a_host_that_works_during_an_import_loses_nothing(store: Store, source: Source) -> None:
    scope = ScopedState(store).scope(HERE, "actor")
    scope.put("before", 1)
    source.add("actor", "k", '"theirs"')
    meanwhile(store, lambda: scope.put("beside", 2))
    import_langbot(store, source.path)
    assert scope.list_keys().keys == ["before", "beside", "k"]
    assert scope.usage().keys == 3
    source.add("actor", "l", '"theirs"')
    meanwhile(store, lambda: scope.put("l", "mine"))
    with pytest.raises(ConflictError):
        import_langbot(store, source.path)
    found = scope.find("l")
    assert found is not None
    assert found.value == "mine"
    assert scope.usage().keys == 4
    states = ScopedState(store)
    talk: dict[str, Any] = {"workspace_id": "w1", "bot_id": "b1", "conversation_id": "talk"}
    source.run("DELETE FROM runner_state")
    source.add_reset("theirs")
    meanwhile(store, lambda: states.reset(**talk))
    with pytest.raises(ConflictError):
        import_langbot(store, source.path)
    assert [one.number for one in states.generations(**talk)] == [1]
    assert states.generations(**talk)[0].id != "theirs"


def test_long_values_move_a_few_at_a_time(
    store: Store, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_BYTES", 10_000)
    for n in range(6):
        source.add("runner", f"k{n}", json.dumps(f"{n}" * 6000))
    steps: list[Step] = []
    import_langbot(store, source.path, progress=steps.append)
    assert [step.done for step in steps if step.phase == "copy"] == [2, 4, 6]
    assert ScopedState(store).scope(HERE, "runner", ALL).usage().keys == 6


def test_values_in_a_column_of_a_later_release_are_counted(store: Store, source: Source) -> None:
    source.add("conversation", "k", "1")
    source.run("ALTER TABLE runner_state ADD COLUMN version INTEGER DEFAULT 1")
    report = import_langbot(store, source.path)
    assert counts(report) == {"values": (1, 1), UNKNOWN: (1, 0)}
