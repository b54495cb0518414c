"""Views of operators: fixed orders, page by page, and no clock decides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.engine.protocol import DeleteRow, Write
from casstore.errors import CorruptionError, InvalidInputError
from casstore.records.runs import WAITING, Page, Runs
from casstore.session.records import Table
from casstore.store import Store
from tests.records.conftest import Clock


def everything(view: Callable[..., Page[Any]], limit: int, **fields: Any) -> list[Any]:
    """All items of a view, read in pages of so many."""
    found: list[Any] = []
    cursor = None
    while True:
        page = view(limit=limit, cursor=cursor, **fields)
        assert len(page.items) <= limit
        found += page.items
        if page.cursor is None:
            return found
        assert len(page.items) == limit
        cursor = page.cursor


@pytest.fixture
def many(runs: Runs, clock: Clock) -> Runs:
    """Seven threads of three runs each, made while the clock goes back."""
    for number in range(7):
        runs.create_thread(f"t{number}", f"agent {number % 2}")
        for place in range(3):
            clock.move(-10)
            runs.create_run(f"t{number}", f"r{number}{place}", f"agent {place}", "graph")
    return runs


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_listings_are_ordered_by_last_change_whatever_the_clock(many: Runs, limit: int) -> None:
    for name in ("t2", "t5", "t0"):
        many.set_state(name, f"r{name[1]}0", WAITING, checkpoint="one")
    threads = [thread.id for thread in everything(many.threads, limit)]
    assert threads == ["t0", "t5", "t2", "t6", "t4", "t3", "t1"]
    runs = [run.id for run in everything(many.runs, limit)]
    assert runs[:4] == ["r00", "r50", "r20", "r62"]
    assert runs[4:] == [
        f"r{n}{p}" for n in range(6, -1, -1) for p in (2, 1, 0)
        if f"r{n}{p}" not in ("r00", "r50", "r20", "r62")
    ]  # fmt: skip
    waiting = [run.id for run in everything(many.runs, limit, state=WAITING)]
    assert waiting == ["r00", "r50", "r20"]
    assert len(everything(many.runs, limit, agent="agent 1")) == 7
    assert [thread.id for thread in everything(many.threads, limit, agent="agent 1")] == [
        "t5", "t3", "t1",
    ]  # fmt: skip
    assert everything(many.threads, limit, status=WAITING) == []
    many.create_thread("elsewhere", "agent 1", workspace="other")
    assert [one.id for one in everything(many.threads, limit, workspace="other")] == ["elsewhere"]
    assert len(everything(many.threads, limit, workspace="default")) == 7
    many.set_state("t3", "r32", WAITING)
    assert [each.id for each in everything(many.threads, limit, status=WAITING)] == ["t3"]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_runs_of_a_thread_come_in_reverse_order_of_beginning(many: Runs, limit: int) -> None:
    many.set_state("t1", "r10", "failed")

    def view(**fields: Any) -> Page[Any]:
        return many.thread_runs("t1", **fields)

    assert [run.id for run in everything(view, limit)] == ["r12", "r11", "r10"]
    assert [run.number for run in everything(view, limit)] == [3, 2, 1]
    assert [run.id for run in everything(view, limit, state="failed")] == ["r10"]


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_approvals_are_listed_in_the_order_of_their_requests(
    many: Runs, clock: Clock, limit: int
) -> None:
    asked = []
    for name in ("z", "a", "m", "b", "y"):
        for thread, run in (("t1", "r10"), ("t2", "r22"), ("t1", "r11")):
            clock.move(-1)
            approval = f"{name} of {run}"
            many.request_approval(thread, run, approval, "shell", checkpoint="one")
            asked.append(approval)
    many.resolve_approval("t1", "r10", "a of r10", "approve")
    many.resolve_approval("t2", "r22", "z of r22", "reject")

    def names(**fields: Any) -> list[str]:
        return [each.id for each in everything(many.approvals, limit, **fields)]

    assert names() == asked
    resolved = {"a of r10", "z of r22"}
    assert names(status="pending") == [name for name in asked if name not in resolved]
    assert names(status="approved") == ["a of r10"]
    assert names(thread="t2") == [name for name in asked if name.endswith("r22")]
    assert names(run="r11") == [name for name in asked if name.endswith("r11")]
    assert names(thread="t1", run="r10", status="pending") == [
        name for name in asked if name.endswith("r10") and name not in resolved
    ]


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_events_artifacts_requests_and_intents_are_paged(busy: Runs, limit: int) -> None:
    for number in range(9):
        busy.append_event("t", "r", number, sequence=number * 3)
        busy.put_artifact("t", "r", f"file {9 - number}", number, "json")
        busy.create_run("t", f"run {9 - number}", "agent", "graph")
        busy.save_request("t", f"run {9 - number}", number)
        busy.save_intent("t", f"run {9 - number}", number)

    def events(**fields: Any) -> Page[Any]:
        return busy.events("t", "r", **fields)

    def artifacts(**fields: Any) -> Page[Any]:
        return busy.artifacts("t", "r", **fields)

    assert [event.sequence for event in everything(events, limit)] == list(range(0, 27, 3))
    assert [event.sequence for event in everything(events, limit, after=10)] == [
        12, 15, 18, 21, 24,
    ]  # fmt: skip
    assert [one.path for one in everything(artifacts, limit)] == [f"file {9 - n}" for n in range(9)]
    assert [one.run for one in everything(busy.requests, limit)] == [
        f"run {n}" for n in range(1, 10)
    ]
    assert [one.payload for one in everything(busy.intents, limit)] == list(range(8, -1, -1))


def test_an_entry_that_changes_between_two_pages_is_not_listed_twice(many: Runs) -> None:
    first = many.threads(limit=3)
    assert [thread.id for thread in first.items] == ["t6", "t5", "t4"]
    many.set_state("t6", "r60", "failed")
    many.set_state("t2", "r20", "failed")
    many.delete_thread("t1")
    rest = many.threads(limit=10, cursor=first.cursor)
    assert [thread.id for thread in rest.items] == ["t3", "t0"]
    assert [thread.id for thread in many.threads(limit=2).items] == ["t2", "t6"]


def test_an_entry_that_changes_while_a_page_is_read_is_left_out(many: Runs, store: Store) -> None:
    engine: Any = store.engine
    whole = engine.scan_rows

    def scan_rows(*given: Any, **named: Any) -> Any:
        engine.scan_rows = whole
        found = whole(*given, **named)
        many.set_state("t4", "r40", "failed")
        many.delete_thread("t5")
        return found

    engine.scan_rows = scan_rows
    found = [thread.id for thread in many.threads().items]
    assert found == ["t6", "t3", "t2", "t1", "t0"]


@pytest.mark.leaves_damage
@pytest.mark.parametrize(
    ("table", "view"),
    [
        ("runs.threads", lambda runs: runs.threads()),
        ("runs.runs", lambda runs: runs.runs()),
        ("runs.runs", lambda runs: runs.thread_runs("t")),
        ("runs.approvals", lambda runs: runs.approvals()),
    ],
)
def test_an_order_row_without_its_record_is_damage(
    busy: Runs, store: Store, table: str, view: Callable[[Runs], object]
) -> None:
    busy.request_approval("t", "r", "a", "shell", checkpoint="one")
    keys = Table(store, table, 1).keys
    name = {"runs.threads": "t", "runs.runs": "r", "runs.approvals": "a"}[table]
    store.engine.write(Write(rows=[DeleteRow("records", keys.key((name,)))]))
    with pytest.raises((CorruptionError, LookupError)) as refused:
        view(busy)
    assert isinstance(refused.value, CorruptionError)


def test_names_too_long_for_a_key_are_distinguished_and_paged(runs: Runs) -> None:
    ends = ["a", "b", "c", ""]
    for end in ends:
        name = "long " * 200 + end
        path = "/".join(["directory " * 20] * 4) + f"/{end}x"
        runs.create_thread(name, "agent")
        runs.create_run(name, f"run {name}", "agent", "graph")
        runs.save_request(name, f"run {name}", end)
        runs.save_intent(name, f"run {name}", end)
        runs.request_approval(name, f"run {name}", f"approval {name}", "shell", checkpoint="one")
        runs.put_artifact(name, f"run {name}", path, end, "kind")
        assert runs.read_artifact(name, f"run {name}", path) == end
    assert sorted(one.input for one in everything(runs.requests, 1)) == sorted(ends)
    assert sorted(one.payload for one in everything(runs.intents, 3)) == sorted(ends)
    assert [one.id[-1:].strip() for one in everything(runs.threads, 2)] == ends[::-1]
    for end in ends:
        assert runs.delete_thread("long " * 200 + end)
    for view in (runs.runs(), runs.approvals(), runs.requests()):
        assert view.items == []


def test_invalid_cursors_and_limits_are_refused(busy: Runs) -> None:
    views: list[Callable[..., Page[Any]]] = [
        busy.threads,
        busy.runs,
        busy.approvals,
        lambda **fields: busy.thread_runs("t", **fields),
        lambda **fields: busy.artifacts("t", "r", **fields),
        lambda **fields: busy.events("t", "r", **fields),
    ]
    for view in views:
        for cursor in ("", "x", "-1", "²", 7):
            with pytest.raises(InvalidInputError):
                view(cursor=cursor)
        for limit in (0, -1, 1001, True, "7"):
            with pytest.raises(InvalidInputError):
                view(limit=limit)
