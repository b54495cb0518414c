"""Collection on a server: writers on other connections, in every order, lose nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

pytest.importorskip("psycopg")

from psycopg.types.numeric import Int8

from casstore.engine.postgres import collection as collecting
from casstore.engine.postgres import tables
from casstore.engine.postgres.adapting import Longs
from casstore.engine.postgres.address import parse
from casstore.engine.postgres.collection import PostgresCollection
from casstore.engine.postgres.engine import PostgresEngine
from casstore.engine.protocol import DeleteRow, ObjectsExist, PutRow, RowIs, Write
from casstore.errors import BusyError, CollectionOvertakenError, CorruptionError
from casstore.maintenance import gc
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import find_row, new_blob, put_objects, put_row
from casstore.testing.engine_threads import TIMEOUT_S, start
from tests.engine.lmdb.test_gc_interleavings import FIRST, ROOTS, SECOND, A, B, C, D, schedules
from tests.engine.postgres.engines import Schemas, engines
from tests.engine.postgres.open_writes import (
    Blocked,
    OpenTransaction,
    opened,
    replace_function,
    without_touches,
)


@pytest.fixture
def own_engine(postgres_schemas: Schemas, postgres_url: str) -> Iterator[PostgresEngine]:
    """An engine on a schema of its own: its functions may be changed."""
    made = PostgresEngine(parse(postgres_url))
    yield made
    made.close()


def collection(engine: PostgresEngine) -> PostgresCollection:
    return PostgresCollection(engine, ROOTS, grace_ms=0, dry_run=False)


# --- a hit and a sweep ---------------------------------------------------------------------------

ADOPT = Write(objects=[A], rows=[PutRow(*FIRST, A.digest)])


def writer_first(engine: PostgresEngine) -> bool:
    """The writer has found A, and has not committed, when A is swept. Is A there afterwards?"""
    put_objects(engine, A)
    with opened(engine) as begin, collection(engine) as collected:
        collected.mark()
        writer = begin()
        assert writer.write(ADOPT)
        sweeping = start(lambda: collected.sweep(10))
        blocked = Blocked(engine)
        blocked.settle(sweeping, lambda: blocked.process("sweep"))
        writer.commit()
        sweeping.result(TIMEOUT_S)
        blocked.close()
    return not engine.missing([A.digest])


def sweep_first(engine: PostgresEngine) -> bool:
    """A was swept, and that is not committed, when the writer finds it. Is it there afterwards?"""
    put_objects(engine, A)
    with opened(engine) as begin, collection(engine) as collected:
        collected.mark()
        sweeping, writer = begin(), begin()
        [id_] = collected._unreached
        arguments = (
            collected._token, engine.given_ms(), Int8(1000),
            Int8(collected._epoch), Longs([id_]), Longs(),
        )  # fmt: skip
        assert sweeping.execute(collected._sweep, arguments)
        writer.write(ADOPT)
        sweeping.commit()
        writer.commit()
    return not engine.missing([A.digest])


@pytest.mark.parametrize("story", [writer_first, sweep_first])
def test_an_object_that_is_put_again_during_a_sweep_is_not_lost(
    engine: PostgresEngine, story: Callable[[PostgresEngine], bool]
) -> None:
    assert story(engine)
    assert find_row(engine, *FIRST) == A.digest


@pytest.mark.parametrize("story", [writer_first, sweep_first])
def test_without_touching_the_row_a_put_of_a_stored_object_loses_it_to_the_sweep(
    own_engine: PostgresEngine, story: Callable[[PostgresEngine], bool]
) -> None:
    """What ON CONFLICT DO NOTHING alone would do."""
    replace_function(own_engine, tables.WRITE_SQL, without_touches())
    assert not story(own_engine)
    assert find_row(own_engine, *FIRST) == A.digest


@pytest.mark.parametrize(
    "write",
    [
        Write(objects=[B], rows=[PutRow(*FIRST, B.digest)]),
        Write(conditions=[ObjectsExist([A.digest])], rows=[PutRow(*FIRST, A.digest)]),
    ],
    ids=["child", "condition"],
)
def test_a_write_touches_the_children_and_conditions_that_it_relies_on(
    engine: PostgresEngine, write: Write
) -> None:
    put_objects(engine, A)
    with opened(engine) as begin, collection(engine) as collected:
        collected.mark()
        writer = begin()
        assert writer.write(write)
        sweeping = start(lambda: collected.sweep(10))
        blocked = Blocked(engine)
        assert not blocked.settle(sweeping, lambda: blocked.process("sweep"))
        writer.commit()
        assert sweeping.result(TIMEOUT_S).objects == 0
        blocked.close()
    assert engine.missing([A.digest]) == []


# --- beginning -----------------------------------------------------------------------------------


def begun_beside_a_writer(engine: PostgresEngine) -> bool:
    """A collection begins while a write is under way; is what it relied on there afterwards?"""
    put_objects(engine, A)
    with collection(engine) as earlier:
        # A carries the epoch of this collection: the next write has nothing to leave there.
        put_objects(engine, A)
        earlier.mark()
    with opened(engine) as begin:
        writer = begin()
        assert writer.write(ADOPT)

        def collect() -> None:
            with collection(engine) as collected:
                collected.mark()
                while not collected.sweep(10).done:
                    pass

        collecting_ = start(collect)
        blocked = Blocked(engine)
        blocked.settle(collecting_, lambda: blocked.process("begin_collection"))
        writer.commit()
        collecting_.result(TIMEOUT_S)
        blocked.close()
    return not engine.missing([A.digest])


def test_a_collection_begins_when_no_write_is_running(engine: PostgresEngine) -> None:
    assert begun_beside_a_writer(engine)


def test_without_the_store_lock_a_collection_that_begins_during_a_write_loses_objects(
    own_engine: PostgresEngine,
) -> None:
    replace_function(
        own_engine, tables.BEGIN_SQL, ("PERFORM pg_advisory_xact_lock(the_store);", "")
    )
    assert not begun_beside_a_writer(own_engine)


# --- two writers and a collector, in every order -------------------------------------------------

# All 420 of them take half a minute; these are one in six, and every kind is among them.
SCHEDULES = schedules(2, 2, 4)[:: 1 if os.environ.get("CASSTORE_ALL_SCHEDULES") else 6]


class Actor:
    """Runs one step after the other, unless the last one still waits for a lock."""

    def __init__(self, steps: list[Callable[[], Any]], blocked: Blocked) -> None:
        self._steps = steps
        self._blocked = blocked
        self._doing: Future[Any] | None = None
        self._pids: set[int] = set()

    def go(self, pid: Callable[[], int | None]) -> None:
        if self._doing is not None and not self._blocked.settle(self._doing, pid):
            return
        self.check()
        if self._steps:
            self._doing = start(self._steps.pop(0))
            self._blocked.settle(self._doing, pid)

    def check(self) -> None:
        if self._doing is not None:
            self._doing.result(TIMEOUT_S)
            self._doing = None

    @property
    def is_through(self) -> bool:
        return not self._steps and (self._doing is None or self._doing.done())


class Stage:
    """A store with the garbage of the model, and the actors' steps."""

    def __init__(self, engine: PostgresEngine, writers: list[OpenTransaction]) -> None:
        self.engine = engine
        self.writers = writers
        self.blocked = Blocked(engine)

    def reset(self) -> None:
        everything = [item.digest for item in (D, C, B, A)]
        rows = [DeleteRow(*FIRST), DeleteRow(*SECOND)]
        self.engine.write(Write(rows=rows, deletes=everything))
        self.engine.write(Write(objects=[A, B, C]))

    def is_whole(self) -> bool:
        heads = [row for row in self.engine.get_rows([FIRST, SECOND]) if row is not None]
        wanted = {C.digest: [C, B, A], D.digest: [D, B, A]}
        needed = [item.digest for head in heads for item in wanted[head]]
        return not self.engine.missing(needed)

    def play(self, schedule: tuple[int, ...]) -> bool:
        """Is everything that is named there, at every moment?"""
        self.reset()
        first = Write(objects=[A, B, C], rows=[PutRow(*FIRST, C.digest)])
        second = Write(objects=[D], rows=[PutRow(*SECOND, D.digest)])
        writers = self.writers
        collected = collection(self.engine)
        steps: list[list[Callable[[], Any]]] = [
            [self.step(writers[0], first), writers[0].commit],
            [self.step(writers[1], second), writers[1].commit],
            self.collector(collected),
        ]
        actors = [Actor(each, self.blocked) for each in steps]
        pids: list[Callable[[], int | None]] = [
            lambda: writers[0].pid,
            lambda: writers[1].pid,
            lambda: self.blocked.process("sweep", "begin_collection"),
        ]
        whole = True
        try:
            for number in schedule:
                actors[number].go(pids[number])
                whole = whole and self.is_whole()
            while not all(actor.is_through for actor in actors):
                for actor, pid in zip(actors, pids, strict=True):
                    actor.go(pid)
            for actor in actors:
                actor.check()
        except CorruptionError:
            # The collector itself has found that something reached is missing.
            whole = False
        finally:
            for writer in writers:
                writer.reset()
            collected.__exit__(None, None, None)
        return whole and self.is_whole()

    @staticmethod
    def step(writer: OpenTransaction, write: Write) -> Callable[[], Any]:
        def run() -> None:
            writer.write(write)
            writer.result()

        return run

    @staticmethod
    def collector(collected: PostgresCollection) -> list[Callable[[], Any]]:
        def begin() -> None:
            collected.__enter__()
            collected.mark()

        return [begin, *[lambda: collected.sweep(1)] * 3]


def lost(engine: PostgresEngine, limit: int | None = None) -> int:
    count = 0
    with opened(engine) as begin:
        stage = Stage(engine, [begin(), begin()])
        for schedule in SCHEDULES:
            count += not stage.play(schedule)
            if limit is not None and count >= limit:
                break
        stage.blocked.close()
    return count


def test_no_schedule_of_writers_and_collector_loses_an_object(engine: PostgresEngine) -> None:
    assert lost(engine) == 0


def test_without_touching_stored_objects_a_schedule_loses_an_object(
    own_engine: PostgresEngine,
) -> None:
    replace_function(own_engine, tables.WRITE_SQL, without_touches())
    assert lost(own_engine, limit=1) == 1


def test_without_sparing_touched_objects_in_the_sweep_a_schedule_loses_an_object(
    own_engine: PostgresEngine,
) -> None:
    replace_function(
        own_engine, tables.SWEEP_SQL, ("l.epoch >= the_epoch OR l.id = ANY (spared)", "false")
    )
    assert lost(own_engine, limit=1) == 1


def test_without_sweeping_the_newest_objects_first_a_schedule_loses_an_object(
    own_engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PostgresCollection.mark

    def oldest_first(self: PostgresCollection, **options: Any) -> Any:
        report = original(self, **options)
        self._unreached.reverse()
        return report

    monkeypatch.setattr(PostgresCollection, "mark", oldest_first)
    assert lost(own_engine, limit=1) == 1


# --- at random -----------------------------------------------------------------------------------

LONG = "long " * 800


def test_writers_that_repeatedly_store_the_same_objects_never_lose_one(
    postgres_schemas: Schemas,
) -> None:
    """Each on its own connections, concurrently with a collector that never pauses."""
    with engines(postgres_schemas) as make:
        made = make()
        assert isinstance(made, PostgresEngine)
        stop = threading.Event()

        def write(number: int) -> None:
            with Store(PostgresEngine(made.address)) as store:
                for n in range(25):
                    session = store.session(f"w{number}-{n}")
                    state = {"shared": LONG, "n": [n % 3, LONG + str(n % 5)]}
                    session.commit(
                        Commit(
                            append=[NodeDraft("a", {"text": LONG})],
                            checkpoint=Checkpoint(tool_state=state),
                        )
                    )  # fmt: skip
                    loaded = session.load(hydrate=True)
                    assert loaded is not None
                    assert loaded.checkpoint.tool_state == state
                    store.delete_session(session.id)

        with Store(made) as store:

            def collect() -> int:
                rounds = 0
                while not stop.is_set():
                    report = gc.collect(store, grace_ms=0, batch=7)
                    assert report.problem is None
                    rounds += 1
                return rounds

            collecting_ = start(collect)
            writing = [start(partial(write, number)) for number in range(3)]
            try:
                for each in writing:
                    each.result(TIMEOUT_S)
            finally:
                stop.set()
            assert collecting_.result(TIMEOUT_S) > 0
            gc.collect(store, grace_ms=0)
            # What deleted sessions leave says only that they are gone.
            assert made.scan_objects() == []


# --- who collects --------------------------------------------------------------------------------


@pytest.fixture
def timed(postgres_schemas: Schemas, clock: ManualClock) -> Iterator[PostgresEngine]:
    """An engine whose clock is moved by hand."""
    with engines(postgres_schemas) as make:
        engine = make(clock=clock)
        assert isinstance(engine, PostgresEngine)
        yield engine


def test_a_second_collector_is_refused_until_the_lease_of_the_first_expires(
    timed: PostgresEngine, clock: ManualClock
) -> None:
    put_objects(timed, A, B)
    first = collection(timed)
    first.__enter__()
    first.mark()
    with pytest.raises(BusyError):
        collection(timed).__enter__()
    clock.now_ms += collecting.LEASE_MS
    with collection(timed) as second:
        second.mark()
        with pytest.raises(CollectionOvertakenError):
            first.sweep(1)
        assert second.sweep(10).objects == 2
    first.__exit__(None, None, None)
    assert timed.scan_objects() == []


def test_the_next_collector_completes_the_work_of_one_that_died(
    timed: PostgresEngine, clock: ManualClock
) -> None:
    put_objects(timed, A, B, C)
    timed.write(Write(rows=[PutRow(*FIRST, A.digest)]))
    dead = collection(timed)
    dead.__enter__()
    dead.mark()
    dead.sweep(1)
    clock.now_ms += collecting.LEASE_MS
    with collection(timed) as next_:
        report = next_.mark()
        assert (report.objects_kept, report.objects_unreached) == (1, 1)
        next_.sweep(10)
    assert timed.missing([A.digest, B.digest, C.digest]) == [B.digest, C.digest]


def test_commits_since_the_last_collection_are_counted(engine: PostgresEngine) -> None:
    before = engine.commits_since_collection()
    for n in range(3):
        put_objects(engine, new_blob(b"%d" % n))
    engine.write(Write(conditions=[RowIs(*FIRST, None)]))
    assert engine.commits_since_collection() == before + 3
    with collection(engine) as collected:
        collected.mark()
        assert engine.commits_since_collection() == before + 3
        while not collected.sweep(1).done:
            pass
    assert engine.commits_since_collection() == 0


def test_the_cache_of_a_client_is_cleared_when_it_learns_of_a_collection_by_another(
    engine: PostgresEngine,
) -> None:
    put_objects(engine, A)
    other = PostgresEngine(engine.address)
    try:
        assert other.get_many([A.digest]) != [None]
        put_objects(other, new_blob(b"knows the epoch"))
        with collection(engine) as collected:
            collected.mark()
            while not collected.sweep(10).done:
                pass
        assert engine.get_many([A.digest]) == [None]
        put_objects(other, new_blob(b"hears of it"))
        assert other.get_many([A.digest]) == [None]
    finally:
        other.close()


def test_rows_of_clients_that_left_long_ago_are_deleted(
    postgres_schemas: Schemas, clock: ManualClock
) -> None:
    with engines(postgres_schemas) as make:
        engine = make(clock=clock)
        assert isinstance(engine, PostgresEngine)
        count = engine.statement("SELECT count(*) FROM {s}.clients")
        for _ in range(2):
            other = PostgresEngine(engine.address, clock=clock)
            put_objects(other, A)
            engine.write(Write(deletes=[A.digest]))
            other.close()
        assert engine.connections.fetch(count) == [(3,)]
        clock.now_ms += 8 * 86_400_000
        put_objects(engine, A)
        with collection(engine) as collected:
            collected.mark()
        assert engine.connections.fetch(count) == [(1,)]
        # It may have been one of them.
        assert put_objects(engine, A) == 0


def test_beginning_a_collection_again_after_a_lost_answer_returns_the_same_collection(
    engine: PostgresEngine,
) -> None:
    collected = collection(engine)
    assert collected._begun() == collected._begun()
    collected.__exit__(None, None, None)
    with collection(engine):
        pass


def test_a_retried_begin_waits_for_its_first_call_and_returns_the_same_collection(
    engine: PostgresEngine,
) -> None:
    collected = collection(engine)
    blocked = Blocked(engine)
    with opened(engine) as begin:
        lost = begin()
        asked = (Int8(engine.store_number), collected._token, None, Int8(collecting.LEASE_MS))
        assert lost.execute(collected._begin, asked)
        again = start(collected._begun)
        assert not blocked.settle(again, lambda: blocked.process("begin_collection"))
        lost.commit()
        assert again.result(TIMEOUT_S) == lost.result()[0]
    blocked.close()
    collected.__exit__(None, None, None)


def test_objects_cached_before_the_first_write_are_dropped_after_a_collection(
    engine: PostgresEngine,
) -> None:
    """The first write is also the first that hears of it."""
    blob = new_blob(b"collected")
    put_objects(engine, blob)
    other = PostgresEngine(engine.address)
    assert other.get_many([blob.digest]) != [None]
    assert gc.collect(Store(engine), grace_ms=0).objects_swept == 1
    put_row(other, "records", b"a", b"")
    assert other.get_many([blob.digest]) == [None]
    other.close()
