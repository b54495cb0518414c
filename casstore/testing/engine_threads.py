"""The part of the engine contract about threads: concurrent calls, serialised writes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from casstore.engine.protocol import Engine, NewObject, PutRow, RowIs, RowKey, Write
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.testing.engine_fixtures import (
    ABSENT,
    EngineFixtures,
    all_objects,
    all_rows,
    assert_reads_back,
    find_object,
    find_row,
    new_blob,
    new_object,
    new_parent,
    put_objects,
    put_row,
)

THREADS = 8
# Long enough for a slow machine; a deadlock fails the test after this time.
TIMEOUT_S = 120.0
# Python switches threads every five milliseconds, longer than a whole write takes, so two writes
# would hardly ever interleave.
_SWITCH_S = 1e-6
# How many times at most a thread polls whether another is done.
_LOOKS = 20_000

Answer = TypeVar("Answer")


def start(work: Callable[[], Answer]) -> Future[Answer]:
    """Run ``work`` on a daemon thread, so that a deadlock does not keep the process alive."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as exc:  # any exception must reach the test that waits
            answer.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return answer


@contextmanager
def _switching() -> Iterator[None]:
    """Switch threads as often as possible, so that they interleave between any two lines."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


class _Noticed(bytes):
    """Bytes that call a function once, when they are first compared."""

    happens: Callable[[], None] | None = None

    def __eq__(self, other: object) -> bool:
        equal = super().__eq__(other)
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return equal

    __hash__ = bytes.__hash__


def _at_once(work: Callable[[int], Answer]) -> list[Answer]:
    """Run ``work(0)``, ``work(1)``, … on eight threads that start together; their results."""
    barrier = threading.Barrier(THREADS, timeout=TIMEOUT_S)

    def run(number: int) -> Answer:
        barrier.wait()
        return work(number)

    with _switching():
        answers = [start(partial(run, number)) for number in range(THREADS)]
        return [answer.result(TIMEOUT_S) for answer in answers]


def _read_during(work: Callable[[], None], look: Callable[[], None]) -> None:
    """Call ``look`` repeatedly on a second thread until ``work`` is done."""
    begun, done = threading.Event(), threading.Event()

    def reader() -> None:
        finished = False
        while not finished:
            # Read before looking, so that the last look comes after all the work.
            finished = done.is_set()
            begun.set()
            look()

    with _switching():
        reading = start(reader)
        begun.wait(TIMEOUT_S)
        try:
            work()
        finally:
            done.set()
        reading.result(TIMEOUT_S)


class ThreadContract(EngineFixtures):
    """Concurrent calls behave as if they were made one after the other."""

    def test_all_writes_of_many_threads_are_stored(self, engine: Engine) -> None:
        def work(thread: int) -> int:
            new = 0
            for n in range(20):
                child = new_blob(b"child %d of thread %d" % (n, thread))
                parent = new_parent(child)
                row = PutRow("heads", b"%d/%02d" % (thread, n), parent.digest)
                new += engine.write(Write(objects=[child, parent], rows=[row])).new_objects
            return new

        assert _at_once(work) == [40] * THREADS
        infos = all_objects(engine)
        assert len(infos) == len({info.id for info in infos}) == 40 * THREADS
        ids = [info.id for info in infos]
        assert ids == sorted(ids, reverse=True)
        id_of = {info.digest: info.id for info in infos}
        rows = dict(all_rows(engine, "heads"))
        assert len(rows) == 20 * THREADS
        for thread in range(THREADS):
            for n in range(20):
                child = new_blob(b"child %d of thread %d" % (n, thread))
                parent = new_parent(child)
                assert_reads_back(engine, child, parent)
                assert rows[b"%d/%02d" % (thread, n)] == parent.digest
                assert id_of[child.digest] < id_of[parent.digest]
        for info in infos:
            assert all(child < info.id for child in info.children)

    def test_of_threads_that_swap_the_same_revision_exactly_one_wins(self, engine: Engine) -> None:
        current = b"revision 0"
        put_row(engine, "heads", b"key", current)
        for round_ in range(20):
            proposals = [b"revision %d by %d" % (round_ + 1, n) for n in range(THREADS)]
            expected = current

            def work(
                thread: int, expected: bytes = expected, proposals: list[bytes] = proposals
            ) -> bytes | None:
                try:
                    engine.write(
                        Write(
                            conditions=[RowIs("heads", b"key", expected)],
                            rows=[PutRow("heads", b"key", proposals[thread])],
                        )
                    )
                except ConditionFailedError as exc:
                    return exc.actual
                return None

            answers = _at_once(work)
            winners = [n for n, answer in enumerate(answers) if answer is None]
            assert len(winners) == 1
            current = proposals[winners[0]]
            assert find_row(engine, "heads", b"key") == current
            # The error of each loser has the value that the winner wrote.
            assert set(answers) == {None, current}

    def test_no_write_comes_between_the_conditions_of_another_and_its_changes(
        self, engine: Engine
    ) -> None:
        # If the engine compares rows in this process, comparing ``expected`` starts a second write
        # and waits for it for a while. The second must not complete before the first.
        put_row(engine, "heads", b"key", b"before")
        others: list[Future[bool]] = []

        def swap(expected: bytes, value: bytes) -> bool:
            row = PutRow("heads", b"key", value)
            try:
                engine.write(Write(conditions=[RowIs("heads", b"key", expected)], rows=[row]))
            except ConditionFailedError:
                return False
            return True

        def let_another_write() -> None:
            others.append(start(partial(swap, b"before", b"the other's")))
            for _ in range(_LOOKS):
                if others[0].done():
                    break

        expected = _Noticed(b"before")
        expected.happens = let_another_write
        with _switching():
            won = [swap(expected, b"mine"), *[other.result(TIMEOUT_S) for other in others]]
        assert won.count(True) == 1
        assert find_row(engine, "heads", b"key") == (b"mine" if won[0] else b"the other's")

    def test_a_counter_that_threads_retry_to_raise_counts_them_all(self, engine: Engine) -> None:
        put_row(engine, "heads", b"key", b"0")

        def work(_thread: int) -> None:
            found = find_row(engine, "heads", b"key")
            raised = 0
            # A thread loses only to another thread that counted, so the number of lost attempts is
            # bounded.
            for _ in range(10 * THREADS):
                if raised == 10:
                    return
                assert found is not None
                change = PutRow("heads", b"key", b"%d" % (int(found) + 1))
                condition = RowIs("heads", b"key", found)
                try:
                    engine.write(Write(conditions=[condition], rows=[change]))
                except ConditionFailedError as exc:
                    found = exc.actual
                else:
                    raised += 1
                    found = change.value

        _at_once(work)
        assert find_row(engine, "heads", b"key") == b"%d" % (10 * THREADS)

    def test_writes_made_at_the_same_time_succeed_and_fail_each_on_its_own(
        self, engine: Engine
    ) -> None:
        # An engine may put concurrent writes in one batch; each result must be the same as alone.
        put_row(engine, "heads", b"key", b"1")

        def work(thread: int) -> list[str]:
            answers = []
            for n in range(10):
                name = b"%d by %d" % (n, thread)
                good = Write(
                    objects=[new_blob(name)],
                    conditions=[RowIs("heads", b"key", b"1")],
                    rows=[PutRow("records", name, name)],
                )
                bad = [
                    good,
                    good._replace(conditions=[RowIs("heads", b"key", b"2")]),
                    good._replace(objects=[new_blob(name), new_object(name, [ABSENT])]),
                    good._replace(rows=[*good.rows, PutRow("nothing", name, name)]),
                ][thread % 4]
                try:
                    engine.write(bad)
                except (ConditionFailedError, ObjectNotFoundError, InvalidInputError) as exc:
                    answers.append(type(exc).__name__)
                else:
                    answers.append("written")
            return answers

        outcomes = ["written", "ConditionFailedError", "ObjectNotFoundError", "InvalidInputError"]
        assert _at_once(work) == [[outcomes[thread % 4]] * 10 for thread in range(THREADS)]
        names = {b"%d by %d" % (n, thread) for n in range(10) for thread in (0, 4)}
        assert {row.key for row in all_rows(engine, "records")} == names
        stored = {info.digest for info in all_objects(engine)}
        assert stored == {new_blob(name).digest for name in names}

    def test_an_object_that_many_threads_put_is_stored_once(self, engine: Engine) -> None:
        for round_ in range(10):
            child = new_blob(b"shared child %d" % round_)
            parent = new_parent(child)

            def work(_thread: int, objects: tuple[NewObject, ...] = (child, parent)) -> int:
                return put_objects(engine, *objects)

            assert sum(_at_once(work)) == 2
            assert_reads_back(engine, child, parent)
            assert len(engine.scan_objects()) == 2 * (round_ + 1)

    def test_a_reader_never_sees_a_row_that_names_a_missing_object(self, engine: Engine) -> None:
        # P3: the object and the row that refers to it become visible together.
        def work() -> None:
            for n in range(200):
                blob = new_blob(b"state %d" % n)
                row = PutRow("heads", b"key", blob.digest)
                engine.write(Write(objects=[blob], rows=[row]))

        def look() -> None:
            digest = find_row(engine, "heads", b"key")
            if digest is not None:
                assert engine.missing([digest]) == []
                assert find_object(engine, digest) is not None

        _read_during(work, look)

    def test_rows_read_in_one_call_come_from_one_snapshot(self, engine: Engine) -> None:
        places = [
            RowKey(table, key)
            for table in ("heads", "history", "records")
            for key in (b"a", b"m", b"z")
        ]

        def work() -> None:
            for n in range(200):
                rows = [PutRow(place.table, place.key, b"%d" % n) for place in places]
                engine.write(Write(rows=rows))

        def look() -> None:
            assert len(set(engine.get_rows(places))) == 1
            assert len({row.value for row in engine.scan_rows("heads")}) <= 1

        _read_during(work, look)

    def test_a_reader_never_sees_half_of_a_write_of_objects(self, engine: Engine) -> None:
        def objects(n: int) -> list[bytes]:
            return [new_blob(b"%d of write %d" % (part, n)).digest for part in range(5)]

        def work() -> None:
            for n in range(100):
                put_objects(engine, *(new_blob(b"%d of write %d" % (p, n)) for p in range(5)))
                engine.write(Write(deletes=objects(n - 1)))

        def look() -> None:
            for n in (0, 25, 50, 75, 99):
                assert len(engine.missing(objects(n))) in (0, 5)
                assert engine.get_many(objects(n)).count(None) in (0, 5)
            assert len(engine.scan_objects()) % 5 == 0

        _read_during(work, look)
