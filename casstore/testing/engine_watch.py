"""The part of the engine contract about watches: a write wakes every waiter."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import pytest

from casstore.engine.protocol import DeleteRow, Engine, RowIs, Watch, Write
from casstore.errors import ClosedError, ConditionFailedError
from casstore.testing.engine_fixtures import (
    EngineFixtures,
    find_row,
    new_blob,
    put_objects,
    put_row,
)
from casstore.testing.engine_threads import TIMEOUT_S, start

WRITES = 300
# Spurious wake-ups are allowed, but not this many in a row.
MANY = 1000


def falls_silent(watch: Watch) -> bool:
    """True if one of many waits times out; there must be no writes meanwhile."""
    return any(not watch.wait(0.01) for _ in range(MANY))


def is_readable(watch: Watch, timeout_s: float) -> bool:
    """True if an event loop would see the descriptor as readable."""
    readable, _, _ = select.select([watch], [], [], timeout_s)
    return bool(readable)


def watch_heads(engine: Engine, watch: Watch, last: int) -> Iterator[int]:
    """The values of a counter in a row, as this waiter sees them change, up to ``last``.

    A write between a read of the row and the next wait must end that wait.
    """
    seen = 0
    while seen < last:
        assert watch.wait(TIMEOUT_S), f"missed a write after {seen}"
        found = int(find_row(engine, "heads", b"key") or b"0")
        if found != seen:
            seen = found
            yield seen


class WatchContract(EngineFixtures):
    """A write wakes every waiter, whichever thread made it and when."""

    @pytest.fixture
    def watch(self, engine: Engine) -> Iterator[Watch]:
        """A watch on ``engine``."""
        with closing(engine.watch()) as made:
            yield made

    def test_without_a_write_no_waiter_wakes(self, watch: Watch) -> None:
        assert falls_silent(watch)
        watch.drain()
        assert falls_silent(watch)

    @pytest.mark.parametrize("timeout_s", [0, -1, 0.0])
    def test_a_timeout_of_zero_does_not_wait(self, watch: Watch, timeout_s: float) -> None:
        assert any(not watch.wait(timeout_s) for _ in range(MANY))

    @pytest.mark.parametrize("timeout_s", [None, TIMEOUT_S, 1e12, float("inf")])
    def test_a_write_before_the_wait_ends_it(
        self, engine: Engine, watch: Watch, timeout_s: float | None
    ) -> None:
        put_row(engine, "heads", b"key", b"1")
        assert watch.wait(timeout_s)
        assert falls_silent(watch)

    def test_every_kind_of_change_wakes(self, engine: Engine, watch: Watch) -> None:
        blob = new_blob(b"blob")
        for change in (
            lambda: put_objects(engine, blob),
            lambda: put_row(engine, "records", b"key", b"1"),
            lambda: put_row(engine, "records", b"key", b"2"),
            lambda: engine.write(Write(rows=[DeleteRow("records", b"key")])),
            lambda: engine.write(Write(deletes=[blob.digest])),
        ):
            assert falls_silent(watch)
            change()
            assert watch.wait(TIMEOUT_S)

    def test_a_write_by_another_thread_ends_a_wait(self, engine: Engine, watch: Watch) -> None:
        waiting = start(lambda: watch.wait(TIMEOUT_S))
        put_row(engine, "heads", b"key", b"1")
        assert waiting.result(TIMEOUT_S)

    def test_the_descriptor_is_readable_until_it_is_drained(
        self, engine: Engine, watch: Watch
    ) -> None:
        assert falls_silent(watch)
        assert not is_readable(watch, 0)
        put_row(engine, "heads", b"key", b"1")
        assert is_readable(watch, TIMEOUT_S)
        assert is_readable(watch, 0)
        watch.drain()
        assert falls_silent(watch)

    def test_drained_changes_do_not_wake_again(self, engine: Engine, watch: Watch) -> None:
        for n in range(3):
            put_row(engine, "heads", b"key", b"%d" % n)
            watch.drain()
            assert falls_silent(watch)

    def test_a_write_before_the_watch_was_created_does_not_wake_it(self, engine: Engine) -> None:
        put_row(engine, "heads", b"key", b"1")
        with closing(engine.watch()) as watch:
            assert falls_silent(watch)
            put_row(engine, "heads", b"key", b"2")
            assert watch.wait(TIMEOUT_S)

    def test_many_writes_before_one_wait_wake_it_once(self, engine: Engine, watch: Watch) -> None:
        for n in range(MANY):
            put_row(engine, "heads", b"key", b"%d" % n)
        assert watch.wait(TIMEOUT_S)
        assert falls_silent(watch)

    def test_a_failed_write_leaves_the_watch_working(self, engine: Engine, watch: Watch) -> None:
        with pytest.raises(ConditionFailedError):
            engine.write(Write(conditions=[RowIs("heads", b"key", b"1")]))
        assert falls_silent(watch)
        put_row(engine, "heads", b"key", b"1")
        assert watch.wait(TIMEOUT_S)

    def test_two_watches_are_both_woken_and_drained_apart(
        self, engine: Engine, watch: Watch
    ) -> None:
        with closing(engine.watch()) as other:
            for n in range(3):
                put_row(engine, "heads", b"key", b"%d" % n)
                assert watch.wait(TIMEOUT_S)
                assert falls_silent(watch)
                assert other.wait(TIMEOUT_S)
                assert falls_silent(other)
        put_row(engine, "heads", b"key", b"after one was closed")
        assert watch.wait(TIMEOUT_S)

    def test_no_waiter_misses_the_last_of_many_writes(self, engine: Engine, watch: Watch) -> None:
        def write() -> None:
            for n in range(1, WRITES + 1):
                put_row(engine, "heads", b"key", b"%d" % n)

        writing = start(write)
        seen = list(watch_heads(engine, watch, WRITES))
        writing.result(TIMEOUT_S)
        assert all(earlier < later for earlier, later in pairwise(seen))
        assert seen[-1] == WRITES

    def test_no_waiter_misses_any_write_when_each_is_the_last(
        self, engine: Engine, watch: Watch
    ) -> None:
        # The writer continues only when the waiter has seen the write, so that no later write
        # compensates for a lost wake-up.
        noticed = threading.Semaphore(0)

        def write() -> None:
            for n in range(1, WRITES + 1):
                put_row(engine, "heads", b"key", b"%d" % n)
                assert noticed.acquire(timeout=TIMEOUT_S)

        writing = start(write)
        for expected, seen in enumerate(watch_heads(engine, watch, WRITES), 1):
            assert seen == expected
            noticed.release()
        writing.result(TIMEOUT_S)

    # --- the end ----------------------------------------------------------------

    def test_a_closed_watch_raises_closed_error_and_may_be_closed_again(
        self, engine: Engine, watch: Watch
    ) -> None:
        watch.close()
        watch.close()
        for call in (watch.fileno, watch.drain, watch.wait):
            with pytest.raises(ClosedError):
                call()
        put_row(engine, "heads", b"key", b"1")
        engine.close()
        watch.close()

    def test_a_watch_of_a_closed_engine_raises_closed_error(
        self, engine: Engine, watch: Watch
    ) -> None:
        handle = watch.fileno()
        engine.close()
        # An event loop that polls the descriptor must call drain and get the error.
        assert select.select([handle], [], [], TIMEOUT_S)[0]
        for call in (watch.fileno, watch.drain, watch.wait):
            with pytest.raises(ClosedError):
                call()
        assert select.select([handle], [], [], 0)[0]
        watch.close()
        engine.close()

    def test_closing_the_engine_ends_a_wait(self, engine: Engine, watch: Watch) -> None:
        waiting = start(watch.wait)
        # Time for the wait to begin; the result is the same if it begins later.
        time.sleep(0.1)
        engine.close()
        with pytest.raises(ClosedError):
            waiting.result(TIMEOUT_S)
