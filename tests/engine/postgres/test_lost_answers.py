"""The server did it and its answer was lost: the call ends well, and nothing happened twice.

Every call is made again and again, each time with another of its answers lost, until a call needs
no more answers than were given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import pytest

pytest.importorskip("psycopg")

import psycopg

import casstore
from casstore import Commit, NodeDraft, Store
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import PutRow, RowIs, RowKey, Stamp, Write
from casstore.errors import StorageUnavailableError
from casstore.testing.engine_fixtures import new_blob, put_objects
from casstore.testing.engine_threads import TIMEOUT_S, start
from servers.delay_proxy import DelayProxy
from servers.postgres import Server

MOST_ANSWERS = 50


class Far(NamedTuple):
    """A store behind a link, and the link."""

    store: Store
    link: DelayProxy


@pytest.fixture
def far(postgres_server: Server, schema: str) -> Iterator[Far]:
    place = str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")
    with (
        DelayProxy(place) as link,
        casstore.open(postgres_server.url(port=link.port, schema=schema)) as store,
    ):
        # Its first connection is made in the background, and is there now.
        store.engine.now_ms()
        yield Far(store, link)


def with_each_answer_lost(far: Far, work: Callable[[str], object]) -> int:
    """Do ``work`` under one name after the other; how often an answer was lost in it."""
    for number in range(MOST_ANSWERS):
        lost = far.link.lose_next_answer(after=number)
        work(f"x{number}")
        if not lost.is_set():
            far.link.lose_nothing()
            return number
    raise AssertionError(f"a call that needs more than {MOST_ANSWERS} answers")


def test_a_commit_without_a_turn_happens_once_though_its_answer_is_lost(far: Far) -> None:
    session = far.store.session("s")
    revisions: list[int] = []

    def commit(name: str) -> None:
        change = Commit(append=[NodeDraft(name, {"text": name})], expected=len(revisions))
        revisions.append(session.commit(change).revision)

    lost = with_each_answer_lost(far, commit)
    assert lost >= 1
    assert revisions == list(range(1, lost + 2))
    assert [node.id for node in session.nodes()] == [f"x{at}" for at in range(lost + 1)]
    assert [entry.revision for entry in session.history()] == revisions[::-1]


def test_a_fork_a_lease_and_an_enqueue_happen_once_though_their_answers_are_lost(far: Far) -> None:
    store = far.store
    store.session("s").commit(Commit(append=[NodeDraft("a", "a")]))
    assert with_each_answer_lost(far, lambda name: store.fork("s", name)) >= 1

    fencing: list[int] = []

    def lease(name: str) -> None:
        claimed = store.session("s").claim_lease(name, 60_000)
        assert claimed is not None
        fencing.append(claimed.fencing)
        store.session("s").release_lease(claimed)

    assert with_each_answer_lost(far, lease) >= 2
    assert fencing == list(range(1, len(fencing) + 1))

    queue = store.session("s").queue
    queued = with_each_answer_lost(far, lambda name: queue.enqueue([name])) + 1
    assert [list(batch.items) for batch in queue.batches()] == [[f"x{at}"] for at in range(queued)]


def test_a_rewind_happens_once_though_its_answer_is_lost(far: Far) -> None:
    session = far.store.session("s")
    for at in range(3):
        session.commit(Commit(append=[NodeDraft(f"n{at}", at)]))
    expected = [3]

    def rewind(name: str) -> None:
        done = session.rewind(1, expected=expected[-1], label=name)
        assert done.revision == expected[-1] + 1
        expected.append(done.revision)

    assert with_each_answer_lost(far, rewind) >= 1


def test_a_retried_write_is_not_refused_because_its_first_attempt_changed_the_row(far: Far) -> None:
    engine = far.store.engine

    def write(name: str) -> None:
        place = RowKey("records", name.encode())
        put = PutRow(*place, bytes(8) + b"first", stamps=[Stamp(0)])
        done = engine.write(Write(conditions=[RowIs(*place, None)], rows=[put]))
        [value] = engine.get_rows([place])
        # The answer is the one of the time when it happened.
        assert value == done.now_ms.to_bytes(8, "big") + b"first"

    assert with_each_answer_lost(far, write) >= 2


@pytest.mark.parametrize("what", ["checkpoint", "nodes", "sessions", "scan"])
def test_a_read_whose_answer_is_lost_is_retried(far: Far, what: str) -> None:
    store = far.store
    for at in range(3):
        store.session("s").commit(Commit(append=[NodeDraft(f"n{at}", at)]))
    reads: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: store.session("s").checkpoint(),
        "nodes": lambda: [node.id for node in store.session("s").nodes()],
        "sessions": lambda: list(store.sessions()),
        "scan": lambda: store.engine.scan_rows("history"),
    }
    read = reads[what]
    expected = read()

    def same(name: str) -> None:
        assert read() == expected

    assert with_each_answer_lost(far, same) >= 1


def test_a_retried_write_waits_for_the_standby_again_after_its_connection_was_lost(
    postgres_server: Server,
) -> None:
    """Whoever asks again finds it made, and it would be lost with this machine all the same."""
    settings = {**postgres_server.settings, "wal_level": "replica", "max_wal_senders": "1"}
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"

    def next_to_wait(sql: psycopg.Connection[Any], doing: Future[Any], before: int = 0) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while not doing.done():
            row = sql.execute(waiting).fetchone()
            if row is not None and row[0] != before:
                return int(row[0])
            assert time.monotonic() < deadline
        return 0

    with (
        Server(postgres_server.installation, settings=settings) as server,
        psycopg.connect(server.url(), autocommit=True) as sql,
        casstore.open(server.url()) as store,
    ):
        store.engine.now_ms()
        sql.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        sql.execute("SELECT pg_reload_conf()")
        # The server hears of it a moment later.
        for number in count():
            doing = start(partial(store.put_blob, b"%d" % number))
            if first := next_to_wait(sql, doing):
                break
        sql.execute("SELECT pg_terminate_backend(%s)", (first,))
        assert next_to_wait(sql, doing, before=first), "the retry does not wait for the standby"
        sql.execute("ALTER SYSTEM RESET synchronous_standby_names")
        sql.execute("SELECT pg_reload_conf()")
        assert store.get_blob(doing.result(TIMEOUT_S)) == b"%d" % number


def test_an_object_is_not_read_from_the_cache_after_the_answer_of_its_deletion_was_lost(
    postgres_server: Server, schema: str
) -> None:
    place = str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")
    blob = new_blob(b"deleted")
    with DelayProxy(place) as link:
        # One connection: a second that the pool is making would lose the answer in its place.
        url = postgres_server.url(port=link.port, schema=schema, patience="0", pool="1")
        engine = PostgresEngine(parse(url))
        put_objects(engine, blob)
        assert engine.get_many([blob.digest]) != [None]
        link.lose_next_answer()
        with pytest.raises(StorageUnavailableError):
            engine.write(Write(deletes=[blob.digest]))
        assert engine.get_many([blob.digest]) == [None]
        engine.close()
