"""Behind PgBouncer in transaction mode: every transaction may meet another backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

psycopg = pytest.importorskip("psycopg")

import casstore
from casstore import Commit, NodeDraft
from casstore.maintenance import gc
from servers.pgbouncer import Bouncer, program
from servers.postgres import Server

CLIENTS = 4
TURNS = 15

pytestmark = pytest.mark.skipif(
    program() is None, reason="needs PgBouncer: Debian's package pgbouncer"
)


@pytest.fixture(scope="module")
def bouncer(postgres_server: Server) -> Iterator[Bouncer]:
    with Bouncer(postgres_server, backends=2) as running:
        yield running


def test_transactions_of_one_client_do_meet_different_backends(
    postgres_server: Server, bouncer: Bouncer
) -> None:
    """Or else nothing else here would prove anything."""
    url = postgres_server.url(port=bouncer.port)
    with (
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as one,
        psycopg.connect(url, autocommit=True, prepare_threshold=None) as other,
    ):
        backends = set()
        for _ in range(3):
            with other.transaction():
                other.execute("SELECT 1")
                backends.add(one.execute("SELECT pg_backend_pid()").fetchone())
            with one.transaction():
                one.execute("SELECT 1")
                other.execute("SELECT 1")
                backends.add(one.execute("SELECT pg_backend_pid()").fetchone())
        assert len(backends) == 2


def test_agents_collection_and_watches_work_without_prepared_statements(
    postgres_server: Server, bouncer: Bouncer, schema: str
) -> None:
    url = postgres_server.url(port=bouncer.port, schema=schema, prepare="off")
    failed: list[BaseException] = []

    def agent(number: int) -> None:
        try:
            with casstore.open(url) as store:
                session = store.session(f"s{number}")
                for turn in range(TURNS):
                    draft = NodeDraft(f"n{turn}", {"text": f"{number} {turn} " * 50})
                    session.commit(Commit(append=[draft], turn=f"t{turn}"))
                assert len(list(session.nodes())) == TURNS
        except BaseException as exc:
            failed.append(exc)
            raise

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(CLIENTS)]
    for one in agents:
        one.start()
    for one in agents:
        one.join()
    assert failed == []
    with casstore.open(url) as store:
        assert len(list(store.sessions())) == CLIENTS
        watch = store.engine.watch()
        store.delete_session("s0")
        assert watch.wait(60)
        watch.close()
        report = gc.collect(store, grace_ms=0)
        assert report.outcome is gc.Outcome.SWEPT
        assert report.objects_swept >= TURNS
        lease = store.session("s1").claim_lease("me", 60_000)
        assert lease is not None
        assert store.session("s1").claim_lease("you", 60_000) is None
