"""Writes from many connections: one order, no deadlock, none twice."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("psycopg")

import psycopg
from psycopg.pq import ExecStatus
from psycopg.types.numeric import Int4
from psycopg_pool import PoolTimeout

import casstore
from casstore.engine.postgres import connections, request, tables, watching
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    ForkedError,
    InvalidInputError,
    StorageUnavailableError,
)
from casstore.session.data import Commit, NodeDraft
from casstore.testing.engine_fixtures import (
    all_objects,
    find_row,
    new_blob,
    new_parent,
    put_objects,
    put_row,
)
from casstore.testing.engine_threads import TIMEOUT_S, start
from servers.delay_proxy import DelayProxy
from servers.postgres import Server
from tests.engine.postgres.open_writes import Blocked, opened, replace_function
from tests.faults.children import held, in_child

HERE, THERE = RowKey("records", b"here"), RowKey("records", b"there")


@pytest.fixture
def own_engine(postgres_url: str) -> Iterator[PostgresEngine]:
    """An engine on a schema of its own: its functions may be changed."""
    made = PostgresEngine(parse(postgres_url))
    yield made
    made.close()


# --- one order -----------------------------------------------------------------------------------


def both_look_at_what_the_other_writes(engine: PostgresEngine) -> list[bool]:
    """Each is to write its row only if the other has not; which of them did?"""
    with opened(engine) as begin:
        first, second = begin(), begin()
        first.write(Write(conditions=[RowIs(*THERE, None)], rows=[PutRow(*HERE, b"")]))
        second.write(Write(conditions=[RowIs(*HERE, None)], rows=[PutRow(*THERE, b"")]))
        first.commit()
        second.commit()
    return [row is not None for row in engine.get_rows([HERE, THERE])]


def test_the_rows_of_a_condition_are_locked_until_its_write_is_committed(
    engine: PostgresEngine,
) -> None:
    assert both_look_at_what_the_other_writes(engine) == [True, False]


def test_without_locks_on_keys_two_conflicting_writes_both_succeed(
    own_engine: PostgresEngine,
) -> None:
    replace_function(
        own_engine,
        tables.WRITE_SQL,
        ("IN ARRAY locks LOOP", "IN ARRAY locks[:1] LOOP"),
    )
    assert both_look_at_what_the_other_writes(own_engine) == [True, True]


def test_writes_that_only_check_a_row_do_not_wait_for_each_other(engine: PostgresEngine) -> None:
    put_row(engine, *HERE, b"shared")
    with opened(engine) as begin:
        first, second = begin(), begin()
        condition = RowIs(*HERE, b"shared")
        assert first.write(Write(conditions=[condition], rows=[PutRow("records", b"1", b"")]))
        assert second.write(Write(conditions=[condition], rows=[PutRow("records", b"2", b"")]))
        changing = begin()
        assert not changing.write(Write(rows=[PutRow(*HERE, b"changed")]))
        first.commit()
        second.commit()
        changing.commit()
    assert find_row(engine, *HERE) == b"changed"


def test_a_write_of_more_than_max_locks_rows_locks_the_whole_store(engine: PostgresEngine) -> None:
    many = [PutRow("records", b"%d" % n, b"") for n in range(request.MAX_LOCKS + 1)]
    with opened(engine) as begin:
        first, second = begin(), begin()
        assert first.write(Write(rows=[PutRow("heads", b"another", b"")]))
        assert not second.write(Write(rows=many))
        first.commit()
        second.commit()
    assert len(engine.scan_rows("records")) == len(many)


def test_children_have_lower_ids_whichever_client_stores_them_first(engine: PostgresEngine) -> None:
    """The parent's writer has numbered the child, too, when it finds that another stored it."""
    child = new_blob(b"child")
    parent = new_parent(child)
    with opened(engine) as begin:
        other = begin()
        assert other.write(Write(objects=[child]))
        writing = start(lambda: put_objects(engine, child, parent))
        blocked = Blocked(engine)
        assert not blocked.settle(writing, lambda: blocked.process("write"))
        # By now it has taken numbers; another takes some more, and the first is through.
        other.commit()
        assert writing.result(TIMEOUT_S) == 1
        blocked.close()
    parent_info, child_info = engine.scan_objects()
    assert parent_info.children == (child_info.id,)
    assert child_info.id < parent_info.id


# --- no deadlock ---------------------------------------------------------------------------------


def meet(engine: PostgresEngine) -> str:
    """Two writers store three objects in opposite orders; how does the second one fare?

    A third holds the object in the middle until both of them have begun.
    """
    low, middle, high = sorted([new_blob(b"%d" % n) for n in range(3)])
    with opened(engine) as begin:
        gate, first, second = begin(), begin(), begin()
        for writer in (first, second):
            # A server that looks sooner finds the same deadlocks sooner.
            writer._connection.execute("SET deadlock_timeout = '20ms'")
        assert gate.write(Write(objects=[middle]))
        assert not first.write(Write(objects=[low, middle, high]))
        assert not second.write(Write(objects=[high, middle, low]))
        gate.reset()
        outcomes = set()
        for writer in (first, second):
            try:
                writer.commit()
                outcomes.add("stored")
            except psycopg.Error as exc:
                writer.reset()
                outcomes.add(type(exc).__name__)
    [other] = outcomes - {"stored"}
    return other


def test_writers_of_the_same_objects_wait_for_each_other_in_one_order(
    engine: PostgresEngine,
) -> None:
    # The second finds that the first has stored them, and looks again.
    assert meet(engine) == "UniqueViolation"
    assert len(all_objects(engine)) == 3


def test_writers_that_do_not_sort_their_digests_deadlock(own_engine: PostgresEngine) -> None:
    replace_function(
        own_engine,
        tables.WRITE_SQL,
        ("WHERE fresh[g.at] > 0", "WHERE fresh[g.at] > 0 ORDER BY fresh[g.at]"),
    )
    assert meet(own_engine) == "DeadlockDetected"


def test_many_writers_of_the_same_objects_never_deadlock(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A deadlock would be retried silently; here it is an error.
    monkeypatch.setattr(connections, "_COLLIDED", frozenset(("40001", "23505")))

    def work(number: int) -> None:
        source = random.Random(number)
        for n in range(15):
            objects = [new_blob(b"%d.%d" % (n, part)) for part in range(20)]
            source.shuffle(objects)
            put_objects(engine, *objects, new_parent(*objects[:3]))

    for each in [start(partial(work, number)) for number in range(6)]:
        each.result(TIMEOUT_S)
    for info in all_objects(engine):
        assert all(child < info.id for child in info.children)


# --- none twice ----------------------------------------------------------------------------------


@pytest.fixture
def proxy(postgres_server: Server) -> Iterator[DelayProxy]:
    with DelayProxy(str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")) as made:
        yield made


def through(proxy: DelayProxy, server: Server, schema: str) -> str:
    # One connection: a second that the pool is making would lose an answer in its place.
    return server.url(port=proxy.port, schema=schema, pool="1")


def test_a_write_whose_answer_is_lost_happens_once_and_is_answered(
    proxy: DelayProxy, postgres_server: Server, schema: str
) -> None:
    engine = PostgresEngine(parse(through(proxy, postgres_server, schema)))
    put_row(engine, *HERE, b"0")
    before = engine.commits_since_collection()
    for n in range(5):
        lost = proxy.lose_next_answer()
        # Made twice, its condition would fail the second time.
        result = engine.write(
            Write(
                objects=[new_blob(b"%d" % n)],
                conditions=[RowIs(*HERE, b"%d" % n)],
                rows=[PutRow(*HERE, b"%d" % (n + 1))],
            )
        )
        assert lost.is_set()
        assert result.new_objects == 1
    assert find_row(engine, *HERE) == b"5"
    assert engine.commits_since_collection() == before + 5
    engine.close()


def test_without_write_numbers_a_retried_write_fails_though_it_happened(
    proxy: DelayProxy, postgres_server: Server, schema: str
) -> None:
    engine = PostgresEngine(parse(through(proxy, postgres_server, schema)))
    replace_function(
        engine, tables.WRITE_SQL, ("IF last_number >= the_number THEN", "IF false THEN")
    )
    put_row(engine, *HERE, b"0")
    proxy.lose_next_answer()
    with pytest.raises(ConditionFailedError):
        engine.write(Write(conditions=[RowIs(*HERE, b"0")], rows=[PutRow(*HERE, b"1")]))
    assert find_row(engine, *HERE) == b"1"
    engine.close()


def test_a_write_that_conflicts_is_retried_though_its_connection_made_another_write(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Everybody uses the same connection, and so the same count of writes.
    engine = PostgresEngine(parse(f"{postgres_url}&pool=1"))
    met: list[float] = []

    def another_writes(low: float, high: float) -> float:
        # Called before the pause after which a write that met another is made again.
        if not met:
            met.append(high)
            put_row(engine, *THERE, b"another's")
        return 0.0

    monkeypatch.setattr(random, "uniform", another_writes)
    with opened(engine) as begin:
        first = begin()
        assert first.write(Write(objects=[new_blob(b"the same")]))
        write = Write(objects=[new_blob(b"the same")], rows=[PutRow(*HERE, b"mine")])
        doing = start(lambda: engine.write(write))
        blocked = Blocked(engine)
        assert not blocked.settle(doing, lambda: blocked.process("write"))
        first.commit()
        assert doing.result(TIMEOUT_S).new_objects == 0
        blocked.close()
    assert met
    assert engine.get_rows([HERE, THERE]) == [b"mine", b"another's"]
    engine.close()


def test_a_retry_waits_for_the_first_attempt_that_is_still_running(
    engine: PostgresEngine,
) -> None:
    """The client has lost its connection; the server does not know yet."""
    write = Write(conditions=[RowIs(*HERE, None)], rows=[PutRow(*HERE, b"1")])
    with opened(engine) as begin:
        lost, again = begin(), begin()
        assert lost.write(write)
        again._connection.client, again._connection.number = lost._connection.client, 0
        assert not again.write(write)
        lost.commit()
        again.commit()
        assert again.result()[2] is None
    assert find_row(engine, *HERE) == b"1"


def test_reads_and_commits_survive_cut_connections(
    proxy: DelayProxy, postgres_server: Server, schema: str
) -> None:
    with casstore.open(through(proxy, postgres_server, schema)) as store:
        session = store.session("s")
        lease = session.claim_lease("me", 600_000)
        assert lease is not None
        for n in range(5):
            proxy.cut_all()
            session.commit(Commit(append=[NodeDraft(f"n{n}", n)], lease=lease))
        proxy.cut_all()
        assert [node.id for node in session.nodes()] == [f"n{n}" for n in range(5)]


def test_calls_raise_storage_unavailable_error_until_the_server_returns(
    postgres_server: Server,
) -> None:
    with Server(postgres_server.installation) as server:
        engine = PostgresEngine(parse(server.url(patience="0.5")))
        put_row(engine, *HERE, b"kept")
        server.stop()
        for call in (
            lambda: engine.get_rows([HERE]),
            lambda: put_row(engine, *HERE, b"lost"),
        ):
            with pytest.raises(StorageUnavailableError):
                call()
        with pytest.raises(StorageUnavailableError):
            PostgresEngine(parse(server.url(patience="0.5")))
        server.start()
        assert engine.get_rows([HERE]) == [b"kept"]
        engine.close()


def test_connections_set_the_tcp_keepalive_and_user_timeout_options(
    proxy: DelayProxy, postgres_server: Server, schema: str
) -> None:
    """Checks the socket options; a local link cannot be made to lose every packet."""

    def told(url: str) -> list[int]:
        engine = PostgresEngine(parse(url))

        def look(connection: connections.Client) -> list[int]:
            with socket.socket(fileno=os.dup(connection.fileno())) as link:
                options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
                return [link.getsockopt(socket.IPPROTO_TCP, option) for option in options]

        found = engine.connections.run(look)
        engine.close()
        return found

    url = through(proxy, postgres_server, schema)
    assert told(url) == [10, 2, 20_000]
    # Who says something else means it.
    assert told(f"{url}&keepalives_idle=77&tcp_user_timeout=0") == [77, 2, 0]


def test_the_next_host_of_a_url_is_used_if_the_first_does_not_answer(
    proxy: DelayProxy, postgres_server: Server, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_CONNECT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{proxy.port}"
        engine = PostgresEngine(parse(f"postgresql://postgres@{hosts}/postgres?schema={schema}"))
        put_row(engine, *HERE, b"1")
        assert find_row(engine, *HERE) == b"1"
        engine.close()


# --- limits --------------------------------------------------------------------------------------


def test_a_write_larger_than_the_server_takes_is_refused(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "MAX_WRITE_BYTES", 1000)
    source = random.Random(1)
    with pytest.raises(InvalidInputError):
        put_objects(engine, *[new_blob(source.randbytes(300)) for _ in range(4)])
    with pytest.raises(InvalidInputError):
        put_row(engine, *HERE, bytes(1001))
    assert engine.scan_objects() == []
    assert find_row(engine, *HERE) is None


def test_a_transaction_isolation_other_than_read_committed_is_refused(postgres_url: str) -> None:
    url = postgres_url + "&options=-c%20default_transaction_isolation%3Dserializable"
    engine = PostgresEngine(parse(url))
    with pytest.raises(casstore.errors.StorageError, match="READ COMMITTED"):
        put_row(engine, *HERE, b"")
    engine.close()


def test_the_child_of_a_fork_must_open_the_store_itself(engine: PostgresEngine) -> None:
    put_row(engine, *HERE, b"1")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            put_row(engine, *HERE, b"child")
        except ForkedError:
            engine.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    # The parent's connections were left alone.
    assert find_row(engine, *HERE) == b"1"
    put_row(engine, *HERE, b"2")


def test_the_child_of_a_fork_does_not_end_the_listening_of_its_parent(
    engine: PostgresEngine,
) -> None:
    watch = engine.watch()
    pid = os.fork()
    if pid == 0:
        engine.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not watch.wait(0.2)
    put_row(engine, *HERE, b"1")
    assert watch.wait(TIMEOUT_S)
    watch.close()


@pytest.mark.parametrize("what", ["cache", "connections", "_watching", "_spare"])
def test_the_child_of_a_fork_closes_though_threads_of_its_parent_had_locks(
    postgres_url: str, tmp_path: Path, what: str
) -> None:
    store = casstore.open(f"{postgres_url}&cache={tmp_path}")
    engine: Any = store.engine
    store.put_value([1])

    def close() -> str:
        store.close()
        return "closed"

    with held(getattr(engine, what)._lock):
        assert in_child(close) == "closed"
    assert store.get_value(store.put_value([2])) == [2]
    store.close()


def test_watching_again_and_again_leaves_no_descriptors(
    engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LOOK_S", 0.01)
    put_row(engine, *HERE, b"")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        watch = engine.watch()
        put_row(engine, *HERE, b"")
        assert watch.wait(TIMEOUT_S)
        watch.close()
        del watch
        # Nobody watches any more: the listener notices, and leaves.
        deadline = time.monotonic() + TIMEOUT_S
        while engine._watching._listener is not None or descriptors() > before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert engine.connections.fetch(engine.statement("SELECT count(*) FROM {s}.watchers")) == [(0,)]


def test_a_watch_wakes_in_a_process_that_has_many_descriptors(engine: PostgresEngine) -> None:
    def woken() -> str:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # Above what select can wait for.
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        mine = PostgresEngine(engine.address)
        watch = mine.watch()
        put_row(mine, *HERE, b"1")
        answer = "woken" if watch.wait(TIMEOUT_S) else "not woken"
        mine.close()
        return f"{answer} beside {len(held)}"

    assert in_child(woken) == "woken beside 1100"


def test_content_that_does_not_match_its_declared_size_is_damage(engine: PostgresEngine) -> None:
    blob = new_blob(b"a" * 1000)
    put_objects(engine, blob)
    engine.cache.clear()
    claim = engine.statement("UPDATE {s}.objects SET size_bytes = %b RETURNING 1")
    for size_bytes in (2_000_000_000, 999):
        engine.connections.fetch(claim, (Int4(size_bytes),))
        with pytest.raises(CorruptionError):
            engine.get_many([blob.digest])


def test_every_table_has_a_distinct_number() -> None:
    from casstore.engine.protocol import TABLES

    assert set(request.TABLE_NUMBERS) == set(TABLES)
    assert len(set(request.TABLE_NUMBERS.values())) == len(TABLES)


# --- connections -----------------------------------------------------------------------------


def test_an_idle_connection_is_given_to_a_waiting_thread_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All share one connection; a thread that holds it back must give it to waiting threads.
    engine = PostgresEngine(parse(f"{postgres_url}&pool=1"))
    pool = engine.connections._pool
    assert pool is not None
    getconn, in_vain = pool.getconn, []

    def noted(timeout: float | None = None) -> connections.Client:
        try:
            return getconn(timeout)
        except PoolTimeout as exc:
            # The pool would retry, and find the connection, two seconds later.
            in_vain.append(exc)
            raise

    monkeypatch.setattr(pool, "getconn", noted)

    def work(number: int) -> None:
        for n in range(60):
            put_row(engine, "records", b"%d %d" % (number, n), b"")

    for each in [start(partial(work, number)) for number in range(4)]:
        each.result(TIMEOUT_S)
    assert len(engine.scan_rows("records")) == 240
    assert in_vain == []
    engine.close()


def test_a_thread_reuses_its_recent_connection_without_asking_the_pool(
    engine: PostgresEngine,
) -> None:
    put_row(engine, *HERE, b"1")
    [at_hand] = engine.connections._at_hand
    for _ in range(3):
        put_row(engine, *HERE, b"2")
        assert find_row(engine, *HERE) == b"2"
        assert list(engine.connections._at_hand) == [at_hand]
    engine.connections._lent_s = -connections._LENT_S
    put_row(engine, *HERE, b"3")
    # For long enough: the pool has it, and looks whether it has grown old.
    assert not engine.connections._at_hand
    engine.close()
    assert at_hand.closed


# Both ways to take them are used here, so that what was kept is seen.
@pytest.mark.filterwarnings("ignore:using 'notifies")
def test_unexpected_notifications_are_discarded(engine: PostgresEngine) -> None:
    # Behind a pooler: a server process on which another client listened.
    engine.connections.fetch(b"SELECT 1")
    [at_hand] = engine.connections._at_hand
    at_hand.execute("LISTEN somebody")
    at_hand.execute("NOTIFY somebody")
    put_row(engine, *HERE, b"1")
    assert list(engine.connections._at_hand) == [at_hand]
    assert list(at_hand.notifies(timeout=0)) == []


def test_an_interrupted_write_leaves_no_connection_in_a_transaction(
    engine: PostgresEngine,
) -> None:
    with opened(engine) as begin:
        first = begin()
        assert first.write(Write(rows=[PutRow(*HERE, b"theirs")]))

        def interrupt(signum: int, frame: object) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                # Waits for the lock of the other's row.
                put_row(engine, *HERE, b"mine")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        first.commit()
    assert find_row(engine, *HERE) == b"theirs"
    put_row(engine, *HERE, b"again")
    assert find_row(engine, *HERE) == b"again"


def test_an_interrupted_wait_for_a_connection_loses_no_connection(
    postgres_url: str,
) -> None:
    engine = PostgresEngine(parse(f"{postgres_url}&pool=1&patience=1"))
    taken, given_back = threading.Event(), threading.Event()

    def take(connection: connections.Client) -> None:
        taken.set()
        given_back.wait(TIMEOUT_S)

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(2):
            holding = start(lambda: engine.connections.run(take))
            assert taken.wait(TIMEOUT_S)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                find_row(engine, *HERE)
            # It goes back to the pool, and is not kept at hand.
            engine.connections._lent_s = -connections._LENT_S
            given_back.set()
            holding.result(TIMEOUT_S)
            put_row(engine, *HERE, b"1")
            assert find_row(engine, *HERE) == b"1"
            taken.clear()
            given_back.clear()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    engine.close()


@pytest.mark.parametrize("goes_back", [False, True])
def test_ctrl_c_at_any_point_loses_no_connection_of_the_pool(
    postgres_url: str, goes_back: bool
) -> None:
    engine = PostgresEngine(parse(f"{postgres_url}&pool=1&patience=1"))
    for point in range(1000):
        put_row(engine, *HERE, b"%d" % point)
        if goes_back:
            engine.connections._lent_s = -connections._LENT_S
        left = point

        def interrupt(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            # Where Python looks for signals: as a function begins, and when a call is through.
            if event in ("call", "c_return") and "casstore" in frame.f_code.co_filename:
                left -= 1
                if left < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            engine.commits_since_collection()
        except KeyboardInterrupt:
            # There is only one connection.
            assert find_row(engine, *HERE) == b"%d" % point
            continue
        finally:
            sys.setprofile(None)
        break
    assert 10 < point < 999
    engine.close()


def test_a_connection_can_write_after_an_interrupt_while_a_statement_is_prepared(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PostgresEngine(parse(f"{postgres_url}&pool=1"))
    answered = connections.Client._answer

    def interrupted(self: connections.Client, expected: ExecStatus) -> Any:
        # Ctrl-C has the server give up, which comes too late: the statement has a name there.
        answered(self, expected)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(connections.Client, "_answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put_row(engine, *HERE, b"1")
    put_row(engine, *HERE, b"2")
    assert find_row(engine, *HERE) == b"2"
    engine.close()


def test_the_time_of_a_replayed_write_is_not_used_as_the_current_time(
    engine: PostgresEngine,
) -> None:
    put_row(engine, *HERE, b"1")
    [at_hand] = engine.connections._at_hand
    engine.connections.fetch(
        engine.statement("UPDATE {s}.clients SET now_ms = 1000 WHERE client = %b RETURNING 1"),
        (at_hand.client,),
    )
    at_hand.number -= 1
    # The same number again, as after an answer that was lost.
    assert engine.write(Write(rows=[PutRow(*HERE, b"1")])).now_ms == 1000
    assert engine.now_ms() > 1_000_000_000_000
