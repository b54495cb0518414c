"""Whoever waits for a change hears of it: while writers come and go, and so does the server."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("psycopg")

from casstore.engine.postgres import connections, watching
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import StorageError, StorageUnavailableError
from casstore.maintenance import gc
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import find_row, put_row
from casstore.testing.engine_threads import TIMEOUT_S, start
from servers.delay_proxy import DelayProxy
from servers.postgres import THROWN_AWAY, Server
from tests.engine.postgres.open_writes import opened
from tests.faults.children import in_child

HERE = RowKey("records", b"here")


def watchers(engine: PostgresEngine) -> list[tuple[Any, ...]]:
    return engine.connections.fetch(engine.statement("SELECT until_ms FROM {s}.watchers"))


# --- where no notification arrives ---------------------------------------------------------------


def test_a_write_that_is_running_when_a_watch_begins_is_not_missed(
    engine: PostgresEngine,
) -> None:
    url = f"{engine.address.conninfo}&schema={engine.address.schema}"
    # May only read, so it looks several times a second.
    reader = PostgresEngine(parse(f"{url}&options=-c%20default_transaction_read_only%3Don"))
    watch = reader.watch()
    with opened(engine) as begin:
        writer = begin()
        assert writer.write(Write(rows=[PutRow(*HERE, b"1")]))
        # It looks meanwhile; what wakes it now comes too early.
        while watch.wait(10 * watching._LOOK_OFTEN_S):
            assert find_row(reader, *HERE) is None
        writer.commit()
        assert watch.wait(TIMEOUT_S)
    assert find_row(reader, *HERE) == b"1"
    reader.close()


def test_every_write_is_noticed_on_a_standby(postgres_server: Server) -> None:
    settings = {**THROWN_AWAY, "wal_level": "replica", "max_wal_senders": "2"}
    with Server(postgres_server.installation, settings=settings) as primary:
        engine = PostgresEngine(parse(primary.url()))
        put_row(engine, *HERE, b"")
        standby = Server(postgres_server.installation, settings=settings)
        try:
            standby.create_standby(of=primary)
            standby.start()
            reader = PostgresEngine(parse(standby.url()), readonly=True)
            watch = reader.watch()
            for number in range(5):
                put_row(engine, *HERE, b"%d" % number)
                assert watch.wait(TIMEOUT_S), number
                assert find_row(reader, *HERE) == b"%d" % number
            reader.close()
        finally:
            standby.remove()
        engine.close()


# --- where much is written -----------------------------------------------------------------------


def test_a_closed_listener_unregisters_while_writers_never_pause(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LOOK_S", 0.2)
    watch = engine.watch()
    assert watchers(engine)
    watch.close()
    del watch
    deadline = time.monotonic() + TIMEOUT_S
    # Each write sends a notification while there is a listener.
    while watchers(engine):
        put_row(engine, *HERE, b"")
        assert time.monotonic() < deadline, "writers keep notifying without a listener"


def test_a_listener_renews_its_registration_while_writers_never_pause(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LOOK_S", 2 * TIMEOUT_S)
    monkeypatch.setattr(watching, "_RENEW_S", 0.0)
    clock = ManualClock()
    engine = PostgresEngine(parse(postgres_url), clock=clock)
    watch = engine.watch()
    before = watchers(engine)
    clock.now_ms += 1000
    deadline = time.monotonic() + TIMEOUT_S
    while watchers(engine) == before:
        put_row(engine, *HERE, b"")
        assert watch.wait(TIMEOUT_S)
        assert time.monotonic() < deadline, "the registration was not renewed"
    engine.close()


def test_a_new_watch_blocks_no_writer(engine: PostgresEngine) -> None:
    with opened(engine) as begin:
        long = begin()
        assert long.write(Write(rows=[PutRow(*HERE, b"long")]))
        making = start(engine.watch)
        # The one that is under way does not know of the watch, which waits for it, alone.
        for number in range(200):
            start(partial(put_row, engine, "records", b"%d" % number, b"")).result(TIMEOUT_S)
        assert not making.done()
        long.commit()
    watch = making.result(TIMEOUT_S)
    assert find_row(engine, *HERE) == b"long"
    watch.close()


# --- where the server is away --------------------------------------------------------------------


@pytest.fixture
def own_server(postgres_server: Server) -> Iterator[Server]:
    with Server(postgres_server.installation) as server:
        yield server


def test_watch_and_gc_plan_wait_for_a_stopped_server(own_server: Server) -> None:
    impatient = PostgresEngine(parse(own_server.url(patience="0")))
    engine = PostgresEngine(parse(own_server.url(patience="600")))
    put_row(engine, *HERE, b"1")
    collection = gc.plan(Store(engine), grace_ms=0)
    assert collection.report.objects_unreached == 0
    own_server.stop()
    with pytest.raises(StorageUnavailableError):
        impatient.watch()
    impatient.close()
    making = start(engine.watch)
    planning = start(lambda: gc.plan(Store(engine), grace_ms=0))
    for each in (making, planning):
        with pytest.raises(TimeoutError):
            each.result(0.3)
    own_server.start()
    watch = making.result(TIMEOUT_S)
    assert planning.result(TIMEOUT_S).report.objects_unreached == 0
    put_row(engine, *HERE, b"2")
    assert watch.wait(TIMEOUT_S)
    engine.close()


def test_writes_made_while_a_listener_was_disconnected_wake_it(
    postgres_server: Server, schema: str
) -> None:
    place = str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")
    with DelayProxy(place) as link:
        near = PostgresEngine(parse(postgres_server.url(schema=schema)))
        far = PostgresEngine(parse(postgres_server.url(port=link.port, schema=schema)))
        watch = far.watch()
        for number in range(3):
            link.cut_all()
            put_row(near, *HERE, b"%d" % number)
            while find_row(far, *HERE) != b"%d" % number:
                assert watch.wait(TIMEOUT_S)
        far.close()
        near.close()


def test_closing_does_not_wait_for_a_silent_machine(
    postgres_server: Server, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener is about to connect again, and by itself psycopg would wait for 130 seconds."""
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(connections, "_CONNECT_S", 2)
    place = str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")
    with DelayProxy(place) as link, socket.create_server(("127.0.0.1", 0)) as silent:
        engine = PostgresEngine(parse(postgres_server.url(port=link.port, schema=schema)))
        watch = engine.watch()
        link.lead_to(silent.getsockname())
        link.cut_all()
        # Woken, because something may be missed from now on; then it tries again.
        assert watch.wait(TIMEOUT_S)
        with silent.accept()[0]:
            start(engine.close).result(TIMEOUT_S / 2)


def test_watch_raises_without_free_descriptors_and_works_once_there_are_some(
    engine: PostgresEngine,
) -> None:
    def watched() -> str:
        mine = PostgresEngine(engine.address)
        mine.now_ms()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Enough for the pipe of a watch, and for nothing else.
        highest = os.dup(0)
        os.close(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, most[1]))
        try:
            mine.watch()
        except StorageError as exc:
            said = str(exc)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        watch = mine.watch()
        put_row(mine, *HERE, b"1")
        assert watch.wait(TIMEOUT_S)
        mine.close()
        return said

    assert "cannot open a pipe" in in_child(watched)
