"""Times that no two writes share, whatever the clock does and whoever else writes."""

from __future__ import annotations

import threading

import pytest

from casstore.errors import ConditionFailedError, CorruptionError
from casstore.records.unique_times import SLOTS, UniqueTimes
from casstore.session.records import Draft, Table
from casstore.store import Store

NAME = "test.times"


def take(store: Store, times: UniqueTimes, now: int, count: int = 1) -> int:
    """Reserve ticks in a write of their own, as often as it takes; the first of them."""
    table = Table(store, "test.rows", 1)
    while True:
        draft, moment = Draft(store), times.read(store, table, [("k",)])
        with times.reserve(draft, moment, now, count=count) as first:
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return first


def test_each_time_is_later_than_all_before(any_store: Store) -> None:
    """On a clock that stands still, runs, jumps and goes back."""
    given: list[int] = []
    for now in [100] * 50 + [101, 200, 200, 150, 1, *range(300, 340), 120, 10**15, 5]:
        # Another object each time: what one process knows, another does not.
        given.append(take(any_store, UniqueTimes(NAME), now))
        assert given[-1] >= now
    assert given == sorted(set(given))
    assert given[:3] == [100, 101, 102]
    assert given[-1] == 10**15 + 1
    assert len(list(Table(any_store, NAME, 1).scan())) <= SLOTS


def test_a_write_can_reserve_consecutive_ticks(any_store: Store) -> None:
    times = UniqueTimes(NAME)
    taken: list[int] = []
    for count in (1, 3, SLOTS - 1, SLOTS, SLOTS + 1, 1, 100, 1, 0, 1):
        first = take(any_store, times, 7, count)
        taken += range(first, first + count)
    assert taken == list(range(7, 7 + len(taken)))
    assert len(list(Table(any_store, NAME, 1).scan())) == SLOTS


@pytest.mark.parametrize("counts", [(1, 1), (5, 1), (1, 5), (100, 1), (1, 100)])
def test_exactly_one_of_two_writes_with_the_same_tick_succeeds(
    any_store: Store, counts: tuple[int, int]
) -> None:
    one, other = UniqueTimes(NAME), UniqueTimes(NAME)
    take(any_store, one, 1)
    table = Table(any_store, "test.rows", 1)
    late, moment = Draft(any_store), other.read(any_store, table, [("k",)])
    with other.reserve(late, moment, 50, count=counts[0]) as first:
        assert take(any_store, one, 50, counts[1]) == first == 50
        with pytest.raises(ConditionFailedError):
            late.commit()
    assert take(any_store, other, 50, counts[0]) >= 50 + counts[1]


def test_writes_that_choose_different_ticks_do_not_disturb_each_other(any_store: Store) -> None:
    times = UniqueTimes(NAME)
    table = Table(any_store, "test.rows", 1)
    moment = times.read(any_store, table, [("k",)])
    drafts = [Draft(any_store) for _ in range(SLOTS)]
    reserved = [times.reserve(draft, moment, 9 * at) for at, draft in enumerate(drafts)]
    first = [each.__enter__() for each in reserved]
    assert len(set(first)) == SLOTS
    for draft, each in zip(reversed(drafts), reversed(reserved), strict=True):
        draft.commit()
        each.__exit__(None, None, None)
    # The latest counts, in whatever order they came.
    assert take(any_store, UniqueTimes(NAME), 0) == max(first) + 1


def test_threads_get_different_times(any_store: Store) -> None:
    times = UniqueTimes(NAME)
    given: list[list[int]] = [[] for _ in range(6)]
    gate = threading.Barrier(len(given))

    def work(own: list[int]) -> None:
        gate.wait()
        for _ in range(15):
            own.append(take(any_store, times, 10))

    workers = [threading.Thread(target=work, args=(own,)) for own in given]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(own == sorted(own) for own in given)
    assert len({tick for own in given for tick in own}) == 6 * 15


def test_a_row_that_holds_no_time_is_damage(any_store: Store) -> None:
    draft = Draft(any_store)
    draft.put(Table(any_store, NAME, 1), ("03",), "text in place of a time")
    draft.commit()
    with pytest.raises(CorruptionError, match="holds no time"):
        take(any_store, UniqueTimes(NAME), 1)
