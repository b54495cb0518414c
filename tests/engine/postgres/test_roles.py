"""The roles of ``docs/guides/postgres.md``: each does its work, and the server refuses the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Collecting, PutRow, RowKey, Write
from casstore.errors import CasstoreError, ReadOnlyError
from casstore.maintenance import check, copy, expiring, gc, vacuum
from casstore.store import open as open_store
from servers.postgres import Server

DOCUMENT = Path(__file__).parent.parent.parent.parent / "docs" / "guides" / "postgres.md"
SQL = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROLES = ("reader", "writer", "collector")

OpenAs = Callable[..., Store]


def documented(schema: str) -> list[str]:
    """The statements of the document, for a store in this schema."""
    found = SQL.findall(DOCUMENT.read_text())
    assert len(found) == 2, "roles, and settings of vacuum"
    return [
        text.replace("casstore.", f"{schema}.")
        .replace("SCHEMA casstore", f"SCHEMA {schema}")
        .replace("casstore_", f"{schema}_")
        for text in found
    ]


def commit(store: Store, node: str, session: str = "s") -> None:
    store.session(session).commit(Commit(append=[NodeDraft(node, node * 2000)]))


@pytest.fixture
def open_as(postgres_server: Server, schema: str) -> Iterator[OpenAs]:
    """Opens the store, which its owner has made and filled, in one of the roles, or in several."""
    with open_store(postgres_server.url(schema=schema)) as store:
        commit(store, "a")
        commit(store, "b", session="gone")
        store.delete_session("gone")
    with psycopg.connect(postgres_server.url(), autocommit=True) as owner:
        for text in documented(schema):
            owner.execute(text)
        for name in (*ROLES, "keeper", "stranger"):
            owner.execute(f"CREATE ROLE {schema}_the_{name} LOGIN")
        for name in ROLES:
            owner.execute(f"GRANT {schema}_{name} TO {schema}_the_{name}")
        owner.execute(f"GRANT {schema}_writer, {schema}_collector TO {schema}_the_keeper")
    opened: list[Store] = []

    def opener(role: str, *, readonly: bool = False) -> Store:
        url = postgres_server.url(user=f"{schema}_the_{role}", schema=schema)
        opened.append(casstore.open(url, readonly=readonly))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


def refused(postgres_server: Server, schema: str, role: str, statement: str) -> None:
    """The server itself refuses a statement to a role, whatever casstore would do."""
    url = postgres_server.url(user=f"{schema}_the_{role}")
    with (
        psycopg.connect(url, autocommit=True) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement.format(s=schema))


def test_a_reader_role_can_read_check_plan_and_wait(open_as: OpenAs) -> None:
    reader, writer = open_as("reader", readonly=True), open_as("writer")
    session = reader.session("s")
    assert [node.id for node in session.nodes()] == ["a"]
    assert check.check(reader, level="full").sound
    assert gc.plan(reader, grace_ms=0).report.objects_unreached > 0
    watch = reader.engine.watch()
    commit(writer, "later")
    assert watch.wait(60)
    watch.close()
    assert [node.id for node in session.nodes()] == ["a", "later"]


@pytest.mark.parametrize("readonly", [True, False])
def test_a_reader_role_cannot_change_anything(
    open_as: OpenAs, postgres_server: Server, schema: str, readonly: bool
) -> None:
    reader = open_as("reader", readonly=readonly)
    with pytest.raises(ReadOnlyError):
        commit(reader, "mine")
    with pytest.raises(ReadOnlyError):
        reader.put_blob(b"mine")
    with pytest.raises(ReadOnlyError):
        reader.session("s").claim_lease("me", 1000)
    with pytest.raises(CasstoreError):
        gc.collect(reader, grace_ms=0)
    assert [node.id for node in reader.session("s").nodes()] == ["a"]
    for statement in (
        "DELETE FROM {s}.rows",
        "INSERT INTO {s}.clients VALUES ('x', 1, 1, 1)",
        "UPDATE {s}.objects SET epoch = 0",
        "SELECT nextval('{s}.object_ids')",
        "UPDATE {s}.state SET epoch = 0",
        "UPDATE {s}.meta SET value = '9'",
    ):
        refused(postgres_server, schema, "reader", statement)


def test_a_writer_role_can_do_everything_that_an_agent_does(
    open_as: OpenAs, postgres_server: Server, schema: str
) -> None:
    writer = open_as("writer")
    session = writer.session("s")
    commit(writer, "more")
    lease = session.claim_lease("me", 60_000)
    assert lease is not None
    session.queue.enqueue(["work"])
    claim = session.queue.claim(lease)
    assert claim is not None
    session.attachments.put(b"attached" * 1000)
    session.commit(Commit(append=[NodeDraft("done", "x")], completes=[claim], lease=lease))
    session.release_lease(lease)
    writer.fork("s", "forked")
    session.rewind(1)
    writer.tag("release", writer.put_value({"a": list(range(5000))}))
    writer.delete_session("forked")
    # What is stored already is touched, not written: that is all that may change of it.
    assert writer.put_blob(b"attached" * 1000) in writer
    watch = writer.engine.watch()
    with psycopg.connect(postgres_server.url()) as owner:
        # It may leave word that it waits, and so is told.
        assert owner.execute(f"SELECT count(*) FROM {schema}.watchers").fetchone() == (1,)
    commit(writer, "again")
    assert watch.wait(60)
    watch.close()
    # Copying into it, and retention, are writing, too.
    with Store(MemoryEngine()) as other:
        commit(other, "n", session="from elsewhere")
        assert copy.copy(other, writer).sessions == 1
    expiring.expire_rows(writer)


def test_a_writer_removes_no_object_and_does_not_collect(
    open_as: OpenAs, postgres_server: Server, schema: str
) -> None:
    writer = open_as("writer")
    with pytest.raises(ReadOnlyError):
        gc.collect(writer, grace_ms=0)
    for statement in (
        "DELETE FROM {s}.objects",
        "UPDATE {s}.objects SET content = ''",
        "UPDATE {s}.objects SET digest = ''",
        "TRUNCATE {s}.rows",
        "UPDATE {s}.state SET epoch = 0",
        "UPDATE {s}.meta SET value = '9'",
        "DROP TABLE {s}.rows",
        "CREATE TABLE {s}.mine ()",
        "ALTER FUNCTION {s}.now_ms() RENAME TO earlier",
    ):
        refused(postgres_server, schema, "writer", statement)


def test_a_collector_collects_and_changes_no_session(
    open_as: OpenAs, postgres_server: Server, schema: str
) -> None:
    collector = open_as("collector")
    with psycopg.connect(postgres_server.url(), autocommit=True) as owner:
        owner.execute(f"UPDATE {schema}.clients SET now_ms = 0")
        report = gc.collect(collector, grace_ms=0)
        # Clients that were last heard of long ago are forgotten, too.
        assert owner.execute(f"SELECT count(*) FROM {schema}.clients").fetchone() == (0,)
    assert report.outcome is gc.Outcome.SWEPT
    assert report.objects_swept > 0
    assert check.check(collector, level="full").sound
    # It was able to say that it has ended: nobody need wait for the next, or count it as missing.
    engine = collector.engine
    assert isinstance(engine, Collecting)
    assert engine.commits_since_collection() == 0
    assert gc.collect(collector, grace_ms=0).outcome is not gc.Outcome.REFUSED
    with pytest.raises(ReadOnlyError):
        commit(collector, "mine")
    with pytest.raises(ReadOnlyError):
        collector.engine.write(Write(rows=[PutRow("records", b"a", b"b")]))
    assert collector.engine.get_rows([RowKey("records", b"a")]) == [None]
    for statement in (
        "DELETE FROM {s}.rows",
        "INSERT INTO {s}.rows VALUES (1, 'a', 'b')",
        "INSERT INTO {s}.objects SELECT * FROM {s}.objects",
        "UPDATE {s}.objects SET content = ''",
    ):
        refused(postgres_server, schema, "collector", statement)
    assert [node.id for node in collector.session("s").nodes()] == ["a"]


def test_a_collector_role_leaves_expired_pins_and_their_objects_to_a_writer(
    open_as: OpenAs,
) -> None:
    writer, collector = open_as("writer"), open_as("collector")
    pinned = writer.put_blob(b"pinned for a moment")
    writer.pin("moment", pinned, ttl_ms=1)
    while writer.find_pin("moment") is not None:
        pass
    report = gc.collect(collector, grace_ms=0)
    assert (report.problem, report.pins_expired) == (None, 0)
    assert writer.get_blob(pinned) == b"pinned for a moment"
    assert expiring.expire_rows(writer).pins == 1
    gc.collect(collector, grace_ms=0)
    assert writer.missing([pinned]) == [pinned]


def test_a_role_with_both_rights_can_run_maintenance(open_as: OpenAs) -> None:
    keeper = open_as("keeper")
    keeper.session("s").commit(Commit(append=[NodeDraft("c", "c" * 900)]))
    keeper.delete_session("s")
    report = gc.collect(keeper, grace_ms=0)
    assert report.outcome is gc.Outcome.SWEPT
    assert report.objects_swept > 0


def test_a_vacuum_needs_the_writer_and_the_collector_role(open_as: OpenAs) -> None:
    writer, keeper = open_as("writer"), open_as("keeper")
    for node in ("b", "c"):
        commit(writer, node)
    writer.session("s").tombstone(["b"])
    with pytest.raises(ReadOnlyError):
        vacuum.vacuum(writer, grace_ms=0)
    assert [node.id for node in writer.session("s").nodes()] == ["a", "c"]
    report = vacuum.vacuum(keeper, grace_ms=0)
    assert report.collected is not None
    assert report.collected.objects_swept > 0
    assert check.check(keeper, level="full").sound


def test_a_role_without_rights_cannot_open_the_store(open_as: OpenAs) -> None:
    with pytest.raises(CasstoreError):
        open_as("stranger", readonly=True)
