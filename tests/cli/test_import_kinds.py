"""What every kind of ``casstore import`` does: dry run, progress, resume, conflicts, one report."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from agents import SQLiteSession
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.postgres import PostgresStore
from langgraph.store.sqlite import SqliteStore
from power_loop.runtime.session_store import SessionStore

import casstore
from casstore import Commit, NodeDraft
from casstore.cli.import_ import FUNCTIONS
from casstore.compat.importing import ImportReport
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES
from casstore.errors import ConflictError
from casstore.maintenance.export import export_session
from casstore.maintenance.progress import Step
from casstore.store import Store
from servers.postgres import Server
from tests.cli.running import run
from tests.compat.test_agent_harness_import import Source as Harness
from tests.compat.test_agent_state import database as morrow_database
from tests.compat.test_langbot import Source as LangBot
from tests.compat.test_lash import filled

pytestmark = pytest.mark.filterwarnings("ignore:The default datetime adapter:DeprecationWarning")

_numbers = count()


def change(file: str, statement: str) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(statement)


# --- sources ------------------------------------------------------------------------------------


def make_bundle(place: Path) -> str:
    with casstore.open(place / "origin", "relaxed") as store:
        for at in range(4):
            content = [NodeDraft(f"n{at}", "x" * at)]
            store.session("agent").commit(Commit(append=content))
        export_session(store, "agent", place / "agent.bundle")
    return str(place / "agent.bundle")


def change_bundle(source: str) -> None:
    place = Path(source).parent
    with casstore.open(place / "other", "relaxed") as store:
        store.session("agent").commit(Commit(append=[NodeDraft("other", 1)]))
        export_session(store, "agent", source, replace=True)


def make_jsonl(place: Path) -> str:
    lines = [{"role": "user", "content": f"text {at}"} for at in range(5)]
    (place / "talk.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(place / "talk.jsonl")


def change_jsonl(source: str) -> None:
    Path(source).write_text(Path(source).read_text().replace("text 2", "new"))


def fill_saver(saver: Any) -> None:
    for thread in ("a", "b"):
        config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        for at in range(3):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"messages": ["hello"] * at}
            checkpoint["channel_versions"] = {"messages": at + 1}
            config = saver.put(config, checkpoint, {"step": at}, {"messages": at + 1})
            saver.put_writes(config, [("x", at)], "task")


def make_checkpoints(place: Path) -> str:
    with SqliteSaver.from_conn_string(str(place / "saver.sqlite")) as saver:
        fill_saver(saver)
    return str(place / "saver.sqlite")


def make_items(place: Path) -> str:
    with SqliteStore.from_conn_string(str(place / "items.sqlite")) as memory:
        memory.setup()
        fill_items(memory)
    return str(place / "items.sqlite")


def fill_items(memory: Any) -> None:
    for at in range(5):
        memory.put(("users", "ada"), f"k{at}", {"n": at})


def schema(server: Server) -> str:
    name = f"kinds_{next(_numbers)}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}".encode())
    return f"{server.url()}&options=-csearch_path%3D{name}"


def make_server_checkpoints(server: Server) -> str:
    url = schema(server)
    with PostgresSaver.from_conn_string(url) as saver:
        saver.setup()
        fill_saver(saver)
    return url


def make_server_items(server: Server) -> str:
    url = schema(server)
    with PostgresStore.from_conn_string(url) as memory:
        memory.setup()
        fill_items(memory)
    return url


def change_server(statement: bytes) -> Callable[[str], None]:
    def change_it(url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement)

    return change_it


def make_openai(place: Path) -> str:
    for session in ("one", "two"):
        with closing(SQLiteSession(session, place / "sdk.db")) as talk:
            items: Any = [{"role": "user", "content": f"text {at}"} for at in range(4)]
            asyncio.run(talk.add_items(items))
    return str(place / "sdk.db")


def make_lash(place: Path) -> str:
    (place / "lash").mkdir()
    filled(place / "lash" / "s1.db", 4)
    return str(place / "lash")


def make_power_loop(place: Path) -> str:
    store = SessionStore.open(place / "power.db")
    for session in ("one", "two"):
        store.create_session(session_id=session)
        for at in range(3):
            store.append_message(session, role="user", content=f"text {at}")
    store.close()
    return str(place / "power.db")


def make_harness(place: Path) -> str:
    Harness(place / "data").fill()
    return str(place / "data" / "runtime.sqlite")


def make_langbot(place: Path) -> str:
    source = LangBot(place / "langbot.db", "runner_state")
    for at in range(5):
        source.add("actor", f"k{at}", str(at))
    return str(source.path)


def make_morrow(place: Path) -> str:
    return str(morrow_database(place / "morrow.db"))


class Case(NamedTuple):
    """A kind: how it is run, a source, and a change to a row that was imported."""

    words: tuple[str, ...]
    make: Callable[[Any], str]
    change: Callable[[str], None]
    on_server: bool = False


def changed(statement: str, name: str = "") -> Callable[[str], None]:
    return lambda source: change(f"{source}{name}", statement)


CASES = {
    "bundle": Case(("import", "bundle", "-n", "--json"), make_bundle, change_bundle),
    "jsonl": Case(
        ("import", "jsonl", "-n", "--json"),
        make_jsonl,
        change_jsonl,
    ),
    "langgraph-checkpoints": Case(
        ("import", "langgraph-checkpoints", "-n", "--json"),
        make_checkpoints,
        changed("UPDATE checkpoints SET metadata = '{\"step\": 9}'"),
    ),
    "langgraph-checkpoints on PostgreSQL": Case(
        ("import", "langgraph-checkpoints", "-n", "--json"),
        make_server_checkpoints,
        change_server(b"UPDATE checkpoints SET metadata = '{\"step\": 9}'"),
        True,
    ),
    "langgraph-items": Case(
        ("import", "langgraph-items", "-n", "--json"),
        make_items,
        changed("UPDATE store SET value = '{\"n\": 9}' WHERE key = 'k3'"),
    ),
    "langgraph-items on PostgreSQL": Case(
        ("import", "langgraph-items", "-n", "--json"),
        make_server_items,
        change_server(b"UPDATE store SET value = '{\"n\": 9}' WHERE key = 'k3'"),
        True,
    ),
    "openai-agents": Case(
        ("import", "openai-agents", "-n", "--json"),
        make_openai,
        changed("UPDATE agent_messages SET message_data = '{\"new\": 1}' WHERE id = 2"),
    ),
    "lash": Case(
        ("import", "lash", "-n", "--json"),
        make_lash,
        changed("UPDATE queued_work_items SET payload_json = '9'", "/s1.db"),
    ),
    "power-loop": Case(
        ("import", "power-loop", "-n", "--json"),
        make_power_loop,
        changed("UPDATE messages SET content = 'new' WHERE seq = 2"),
    ),
    "agent-harness": Case(
        ("import", "agent-harness", "-n", "--json"),
        make_harness,
        changed("UPDATE thread_messages SET content_json = '\"new\"' WHERE id = 2"),
    ),
    "langbot": Case(
        ("import", "langbot", "-n", "--json"),
        make_langbot,
        changed("UPDATE runner_state SET value_json = '9' WHERE state_key = 'k3'"),
    ),
    "morrow": Case(
        ("import", "morrow", "-n", "--json"),
        make_morrow,
        changed("UPDATE checkpoints SET payload = '{\"n\": 9}' WHERE id = 'id-1'"),
    ),
}
every_kind = pytest.mark.parametrize("name", CASES)


# --- running them -------------------------------------------------------------------------------


@pytest.fixture
def case(name: str) -> Case:
    return CASES[name]


@pytest.fixture
def source(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    made = request.getfixturevalue("postgres_server") if case.on_server else tmp_path
    return case.make(made)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 2)


def importer(case: Case) -> Callable[..., ImportReport]:
    module, _, function = FUNCTIONS[case.words[1]].partition(":")
    found: Callable[..., ImportReport] = getattr(import_module(module), function)
    return found


def rows(store: Store) -> dict[str, Any]:
    return {table: store.engine.scan_rows(table, limit=100_000) for table in TABLES}


class Stopped(BaseException):
    """Raised by a progress that stops an import."""


def stopping_at(number: int) -> Callable[[Step], None]:
    seen: list[Step] = []

    def stop(step: Step) -> None:
        seen.append(step)
        if len(seen) == number:
            raise Stopped

    return stop


# --- the tests ----------------------------------------------------------------------------------


def test_every_kind_is_in_the_table() -> None:
    assert {case.words[1] for case in CASES.values()} == FUNCTIONS.keys()


@every_kind
def test_a_dry_run_writes_nothing_and_reports_what_the_import_does(
    case: Case, source: str, store: Store
) -> None:
    before = rows(store)
    dry = importer(case)(store, source, dry_run=True)
    assert rows(store) == before
    assert store.engine.scan_objects() == []
    real = importer(case)(store, source)
    assert (dry.dry_run, real.dry_run) == (True, False)
    assert dry.imported > 0
    for name in ("parts", "sessions", "notes", "kind", "source", "source_bytes"):
        assert getattr(dry, name) == getattr(real, name)
    assert real.kind == case.words[1]


@every_kind
def test_a_second_import_changes_nothing(case: Case, source: str, store: Store) -> None:
    importer(case)(store, source)
    before = rows(store)
    for dry_run in (False, True):
        again = importer(case)(store, source, dry_run=dry_run)
        assert again.imported == 0
        assert {session.outcome for session in again.sessions} <= {"unchanged"}
        assert rows(store) == before


@every_kind
def test_progress_counts_up_to_the_total_in_both_passes(
    case: Case, source: str, store: Store
) -> None:
    steps: list[Step] = []
    importer(case)(store, source, progress=steps.append)
    phases = {step.phase for step in steps}
    # A bundle is verified before anything is written.
    assert phases >= {"store" if case.words[1] == "bundle" else "copy", "verify"}
    counted = [step for step in steps if step.phase in ("copy", "verify", "store")]
    ends = {(step.phase, step.unit): step for step in counted if step.unit != "bytes"}
    assert [step for step in ends.values() if step.done != step.total] == []
    for step in steps:
        assert step.total is None or 0 <= step.done <= step.total


@every_kind
def test_an_interrupted_import_is_finished_by_the_next(case: Case, source: str) -> None:
    steps: list[Step] = []
    with Store(MemoryEngine()) as whole:
        expected = importer(case)(whole, source, progress=steps.append)
    # Each import is interrupted a little later than the one before.
    with Store(MemoryEngine()) as store:
        stopped = 0
        for number in (1, 2, 3, len(steps) // 2, len(steps) - 1):
            try:
                importer(case)(store, source, progress=stopping_at(number))
            except Stopped:
                stopped += 1
        assert stopped > 1
        last = importer(case)(store, source)
        assert [part.found for part in last.parts] == [part.found for part in expected.parts]
        before = rows(store)
        assert importer(case)(store, source).imported == 0
        assert rows(store) == before


@every_kind
def test_an_import_interrupted_in_the_middle_keeps_what_it_wrote(
    case: Case, source: str, store: Store
) -> None:
    steps: list[Step] = []
    with Store(MemoryEngine()) as whole:
        expected = importer(case)(whole, source, progress=steps.append).imported
    writing = [at for at, step in enumerate(steps, 1) if step.phase in ("copy", "store")]
    with pytest.raises(Stopped):
        importer(case)(store, source, progress=stopping_at(writing[len(writing) // 2]))
    rest = importer(case)(store, source)
    if case.words[1] in ("bundle", "lash"):
        # These make a session visible in one write, at the end.
        assert rest.imported <= expected
    else:
        assert 0 < rest.imported < expected


@every_kind
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_row_that_differs_from_the_stored_one_is_not_overwritten(
    case: Case, source: str, store: Store, dry_run: bool
) -> None:
    importer(case)(store, source)
    before = rows(store)
    case.change(source)
    if case.words[1] == "jsonl":
        # A transcript was edited: the changed line begins a branch.
        nodes = {node.id: node.payload for node in store.session("talk").nodes("full")}
        assert importer(case)(store, source, dry_run=dry_run).imported == 3
        found = {node.id: node.payload for node in store.session("talk").nodes("full")}
        assert nodes.items() <= found.items()
        return
    with pytest.raises(ConflictError):
        importer(case)(store, source, dry_run=dry_run)
    assert rows(store) == before


@every_kind
def test_the_command_has_a_dry_run_and_one_document_for_all_kinds(
    case: Case, source: str, tmp_path: Path
) -> None:
    place = str(tmp_path / "store")
    run("init", place)
    command, kind, *options = case.words
    would = run(command, kind, source, *options, store=place).json
    assert (would["schema"], would["kind"], would["dry_run"]) == ("casstore.import/1", kind, True)
    told = run(command, kind, source, "--json", store=place).json
    assert (told["parts"], told["notes"], told["sessions"]) == (
        would["parts"], would["notes"], would["sessions"],
    )  # fmt: skip
    again = run(command, kind, source, store=place).out
    part = told["parts"][0]
    assert f"imported 0 of {part['found']} {part['name']}" in again
