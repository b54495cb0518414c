"""What PostgresSaver has stored moves over whole, is compared, and stays as it was."""

from __future__ import annotations

import json
from itertools import count
from typing import Any, NamedTuple

import pytest

psycopg = pytest.importorskip("psycopg", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("langgraph.checkpoint.postgres", reason="needs the extra: pip install '.[dev]'")

from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.shallow import ShallowPostgresSaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import TASKS
from langgraph.types import Command, Send

from casstore.adapters.langgraph import CasstoreSaver, import_checkpoints
from casstore.errors import (
    ConflictError,
    CorruptionError,
    ForeignSourceError,
    InvalidInputError,
    StorageUnavailableError,
    UnsafePayloadError,
)
from casstore.maintenance.progress import Step
from casstore.store import Store
from servers.postgres import Server
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on, say
from tests.adapters.langgraph.test_checkpoint_import import Mirror, Stopped, told
from tests.adapters.langgraph.test_serializer import Mine
from tests.adapters.langgraph.test_threads import put, records

_numbers = count(1)


class Team(NamedTuple):
    """A schema of its own in which a team keeps its checkpoints."""

    url: str

    def saver(self) -> Any:
        return PostgresSaver.from_conn_string(self.url)

    def execute(self, statement: str, *values: Any) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def fingerprint(self) -> list[Any]:
        tables = ("checkpoints", "checkpoint_blobs", "checkpoint_writes")
        return [
            self.execute(f"SELECT md5(string_agg(t::text || xmin, '' ORDER BY t::text)) FROM {t} t")
            for t in tables
        ]


def made(server: Server, kind: type[Team] = Team) -> Team:
    schema = f"lg_{next(_numbers)}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    team = kind(f"{server.url()}&options=-csearch_path%3D{schema}")
    with team.saver() as saver:
        saver.setup()
    return team


@pytest.fixture(scope="module")
def filled(postgres_server: Server) -> Team:
    """Threads of all kinds. Nobody may change it."""
    team = made(postgres_server)
    with team.saver() as saver:
        chat = graphs.chat(saver)
        for n in range(12):
            chat.invoke(say(f"{n} " * 200), {**on("chat"), "metadata": {"run_id": f"r{n}"}})
        graphs.asking(saver).invoke({"log": ["x"], "answer": ""}, on("asking"))
        graphs.nested(saver).invoke({"log": [], "answer": ""}, on("nested"))
        graphs.parallel(saver).invoke({"log": [], "answer": ""}, on("parallel"))
        for n in range(5):
            graphs.delta(saver).invoke({"log": [f"in {n}"], "n": n}, on("delta"))
        plain = {
            "none": None,
            "yes": True,
            "real": 0.1,
            "whole": 1.0,
            "text": "ä\n",
            "far": 2**64 - 1,
        }
        put(saver, {"own": Mine(name="x"), "odd": {1: {2}}, "raw": b"\0", **plain}, thread="own")
        put(saver, {"unversioned": "text"}, thread="own", versions={}, source="fork")
        put(saver, {}, thread="own", versions={"without a value": "7"})
        # As its own older releases say that there is none.
        team.execute(
            "INSERT INTO checkpoint_blobs VALUES ('own', '', 'without a value', '7', 'empty')"
        )
        # Numbers as versions, as other savers give them.
        put(saver, {"list": [1]}, thread="numbered", versions={"list": 3})
        saver.put_writes(on("early", checkpoint_ns="", checkpoint_id="later"), [("x", [1])], "task")
    return team


@pytest.fixture
def team(postgres_server: Server) -> Team:
    return made(postgres_server)


def test_everything_is_imported_and_the_source_is_unchanged(filled: Team, store: Store) -> None:
    before = filled.fingerprint()
    steps: list[Step] = []
    report = import_checkpoints(store, filled.url, progress=steps.append)
    assert filled.fingerprint() == before
    ours = CasstoreSaver(store, allowed=[Mine])
    with filled.saver() as theirs:
        theirs.serde = JsonPlusSerializer(allowed_msgpack_modules=[Mine])
        assert told(ours) == told(theirs)
        assert (
            report.part("checkpoints").found
            == report.part("checkpoints").imported
            == len(told(ours))
            > 60
        )
    assert report.store_bytes is not None
    assert 0 < report.store_bytes < report.source_bytes
    assert {step.phase: step.done for step in steps if step.unit == "checkpoints"} == dict.fromkeys(
        ("copy", "verify"), report.part("checkpoints").found
    )
    # Writes without a checkpoint wait for it here, too.
    assert len([row for row in records(store) if b"later" in row.key]) == 1


def test_imported_graphs_continue_where_they_were(filled: Team, store: Store) -> None:
    import_checkpoints(store, filled.url)
    saver = CasstoreSaver(store, on_branch="refuse")
    asking = graphs.asking(saver)
    asking.invoke(Command(resume="Ada"), on("asking"))
    assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"
    assert graphs.nested(saver).invoke(Command(resume="s"), on("nested"))["log"][-1] == "told s"
    assert len(graphs.chat(saver).invoke(say("more"), on("chat"))["messages"]) == 26
    assert len(graphs.delta(saver).invoke({"log": ["more"], "n": 9}, on("delta"))["log"]) == 24


def test_a_stopped_import_can_continue(
    filled: Team, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 10)
    steps: list[Step] = []

    def stop(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        import_checkpoints(store, filled.url, progress=stop)
    assert len(list(CasstoreSaver(store, allowed=[Mine]).list(None))) == 30
    report = import_checkpoints(store, filled.url)
    assert report.part("checkpoints").imported == report.part("checkpoints").found - 30
    again = import_checkpoints(store, filled.url)
    assert (again.part("checkpoints").imported, again.part("checkpoints").found) == (
        0,
        report.part("checkpoints").found,
    )


def test_tables_in_use_are_read_as_of_one_moment(team: Team, store: Store) -> None:
    with team.saver() as saver:
        chat = graphs.chat(saver)
        chat.invoke(say("one"), on())
        count = len(list(saver.list(None)))

        def meanwhile(step: Step) -> None:
            if step.phase == "copy":
                chat.invoke(say("two"), on("other"))
                saver.delete_thread("t")

        assert (
            import_checkpoints(store, team.url, progress=meanwhile).part("checkpoints").found
            == count
        )
    assert {
        each.config["configurable"]["thread_id"] for each in CasstoreSaver(store).list(None)
    } == {"t"}


def test_other_content_under_the_same_name_is_reported(team: Team, store: Store) -> None:
    with team.saver() as saver:
        put(saver, {"n": 1}, thread="chat")
    import_checkpoints(store, team.url)
    ours = CasstoreSaver(store)
    latest = ours.get_tuple(on("chat"))
    assert latest is not None
    ours.put_writes(latest.config, [("x", 1)], "somebody")
    with pytest.raises(ConflictError, match="another store"):
        import_checkpoints(store, team.url)


def test_pending_sends_of_an_older_langgraph_are_executed(team: Team, store: Store) -> None:
    """It stood among the writes of the parent; today's looks for it in a channel."""
    with team.saver() as saver:
        parent = put(saver, {"n": 1}, versions={"n": "1"})
        sends = [Send("work", {"n": n}) for n in (1, 2)]
        for n, send in enumerate(sends):
            saver.put_writes(
                on(checkpoint_ns="", checkpoint_id=parent),
                [(TASKS, send)],
                f"task {n}",
                f"path {n}",
            )
        put(saver, {"n": 2}, parent, versions={"n": "2"})
        team.execute("UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{v}', '3')")
        import_checkpoints(store, team.url)
        latest = CasstoreSaver(store).get_tuple(on())
        assert latest is not None
        assert latest.checkpoint["channel_values"][TASKS] == sends
        assert told(CasstoreSaver(store)) == told(saver)
    assert import_checkpoints(store, team.url).part("checkpoints").imported == 0


def test_tables_without_the_task_path_column_are_read(team: Team, store: Store) -> None:
    with team.saver() as saver:
        graphs.asking(saver).invoke({"log": [], "answer": ""}, on("asking"))
    team.execute("ALTER TABLE checkpoint_writes DROP COLUMN task_path")
    import_checkpoints(store, team.url)
    asking = graphs.asking(CasstoreSaver(store))
    asking.invoke(Command(resume="Ada"), on("asking"))
    assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"


def test_encrypted_state_moves_with_its_serialiser(team: Team, store: Store) -> None:
    serde = EncryptedSerializer(Mirror(), JsonPlusSerializer(allowed_msgpack_modules=None))
    with team.saver() as saver:
        saver.serde = serde
        graphs.chat(saver).invoke(say("a secret " * 100), on())
        want = told(saver)
    with pytest.raises(UnsafePayloadError, match="serde"):
        import_checkpoints(store, team.url)
    import_checkpoints(store, team.url, serde=serde)
    assert told(CasstoreSaver(store, serde=serde)) == want


def test_content_that_cannot_be_imported_is_refused_by_name(
    team: Team, store: Store, postgres_server: Server
) -> None:
    with pytest.raises(ForeignSourceError, match="search_path"):
        import_checkpoints(store, postgres_server.url())
    for wrong in ("localhost/x?no_such=1", "[localhost/x"):
        with pytest.raises(InvalidInputError) as refused:
            import_checkpoints(store, f"postgresql://me:secret@{wrong}")
        assert "secret" not in str(refused.value)
        assert refused.value.__cause__ is None
    with pytest.raises(StorageUnavailableError) as away:
        import_checkpoints(store, "postgresql://me:secret@localhost:1/x")
    assert "secret" not in str(away.value)
    with team.saver() as saver:
        put(saver, {"n": [1]})
    team.execute("CREATE TABLE sound AS TABLE checkpoints")
    for statement, error in (
        ("UPDATE checkpoints SET metadata = '[]'", CorruptionError),
        ("UPDATE checkpoints SET checkpoint = '{\"channel_values\": 7}'", CorruptionError),
        ('UPDATE checkpoints SET checkpoint = checkpoint || \'{"v": "1"}\'', CorruptionError),
        (
            "UPDATE checkpoints SET checkpoint = checkpoint || '{\"versions_seen\": 5}'",
            CorruptionError,
        ),
        ("UPDATE checkpoint_blobs SET blob = '\\x91'", CorruptionError),
        ("UPDATE checkpoint_blobs SET type = 'pickle'", UnsafePayloadError),
        ("ALTER TABLE checkpoint_blobs DROP COLUMN version CASCADE", ForeignSourceError),
    ):
        team.execute(
            "UPDATE checkpoints c SET checkpoint = s.checkpoint, metadata = s.metadata FROM sound s"
        )
        team.execute(statement)
        with pytest.raises(error):
            import_checkpoints(store, team.url)
    assert list(CasstoreSaver(store).list(None)) == []


def test_a_number_that_only_json_can_hold_is_refused(team: Team, store: Store) -> None:
    with team.saver() as saver:
        put(saver, {"n": 1}, versions={"n": "1"})
    document = json.dumps({"n": 2**70})
    team.execute(
        "UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values}', %s)",
        document,
    )
    with pytest.raises(InvalidInputError, match="cannot encode"):
        import_checkpoints(store, team.url)


def test_the_source_cannot_be_written_to(team: Team) -> None:
    from casstore.compat.postgres_source import PostgresSource
    from casstore.errors import StorageError

    with PostgresSource(team.url, ()) as source, pytest.raises(StorageError, match="read-only"):
        list(source.ask(b"DELETE FROM checkpoints"))


# --- ShallowPostgresSaver -------------------------------------------------------------------------


class ShallowTeam(Team):
    """One that keeps the latest checkpoints alone."""

    def saver(self) -> Any:
        return ShallowPostgresSaver.from_conn_string(self.url)


@pytest.fixture
def shallow(postgres_server: Server) -> Team:
    return made(postgres_server, ShallowTeam)


def shown(saver: Any) -> list[Any]:
    """Checkpoints in an order of ours, without a field that LangGraph takes out when it reads."""
    found = [
        each._replace(checkpoint={k: v for k, v in each.checkpoint.items() if k != "pending_sends"})
        for each in told(saver)
    ]
    return sorted(found, key=lambda each: str(each.config))


@pytest.mark.filterwarnings("ignore:ShallowPostgresSaver is deprecated:DeprecationWarning")
class TestOfShallowTables:
    """ShallowPostgresSaver keeps one checkpoint for each thread and namespace; that one moves."""

    def test_the_latest_checkpoints_are_imported_and_graphs_continue(
        self, shallow: Team, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("casstore.adapters.langgraph.checkpoint_sources.PAGE_ROWS", 2)
        with shallow.saver() as saver:
            for n in range(5):
                graphs.chat(saver).invoke(say(f"{n}"), on("chat"))
            graphs.asking(saver).invoke({"log": ["x"], "answer": ""}, on("asking"))
            graphs.nested(saver).invoke({"log": [], "answer": ""}, on("nested"))
            graphs.parallel(saver).invoke({"log": [], "answer": ""}, on("parallel"))
            before = shallow.fingerprint()
            report = import_checkpoints(store, shallow.url)
            assert shallow.fingerprint() == before
            ours = CasstoreSaver(store, on_branch="refuse")
            assert shown(ours) == shown(saver)
            assert (
                report.part("checkpoints").found
                == report.part("checkpoints").imported
                == len(shown(ours))
                == 5
            )
            assert sum(len(each.pending_writes or ()) for each in shown(ours)) > 0
        # Nothing is left of writes whose checkpoints are gone.
        assert len(records(store)) == report.part("checkpoints").found + len(
            {(str(each.config), write[0]) for each in shown(ours) for write in each.pending_writes}
        )
        assert import_checkpoints(store, shallow.url).part("checkpoints").imported == 0
        asking = graphs.asking(ours)
        asking.invoke(Command(resume="Ada"), on("asking"))
        assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"
        assert graphs.nested(ours).invoke(Command(resume="s"), on("nested"))["log"][-1] == "told s"
        assert len(graphs.chat(ours).invoke(say("more"), on("chat"))["messages"]) == 12

    def test_a_later_import_brings_the_checkpoints_since(self, shallow: Team, store: Store) -> None:
        with shallow.saver() as saver:
            graphs.chat(saver).invoke(say("one"), on())
            import_checkpoints(store, shallow.url)
            graphs.chat(saver).invoke(say("two"), on())
            report = import_checkpoints(store, shallow.url)
            assert (report.part("checkpoints").found, report.part("checkpoints").imported) == (1, 1)
            latest = CasstoreSaver(store).get_tuple(on())
            assert latest is not None
            assert latest.checkpoint["id"] == saver.get_tuple(on()).checkpoint["id"]
            assert len(latest.checkpoint["channel_values"]["messages"]) == 4

    def test_pending_sends_of_an_older_langgraph_are_executed(
        self, shallow: Team, store: Store
    ) -> None:
        with shallow.saver() as saver:
            parent = put(saver, {"n": 1}, versions={"n": "1"})
            config = on(checkpoint_ns="", checkpoint_id=parent)
            sends = [Send("work", {"n": n}) for n in (1, 2)]
            for n, send in enumerate(sends):
                saver.put_writes(config, [(TASKS, send)], f"task {n}", f"path {n}")
            put(saver, {"n": 2}, parent, versions={"n": "2"})
            shallow.execute("UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{v}', '3')")
            assert saver.get_tuple(on()).checkpoint["pending_sends"] == sends
        import_checkpoints(store, shallow.url)
        latest = CasstoreSaver(store).get_tuple(on())
        assert latest is not None
        assert latest.checkpoint["channel_values"][TASKS] == sends
        assert latest.checkpoint["channel_versions"][TASKS] == "2"

    def test_a_document_without_an_id_is_refused(self, shallow: Team, store: Store) -> None:
        with shallow.saver() as saver:
            put(saver, {"n": 1})
        shallow.execute("UPDATE checkpoints SET checkpoint = checkpoint - 'id'")
        with pytest.raises(CorruptionError):
            import_checkpoints(store, shallow.url)
