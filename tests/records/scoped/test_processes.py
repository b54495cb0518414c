"""Scoped state from several processes at once: nothing is lost, one wins, quotas hold."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore.errors import StateConflictError, StateRefusedError
from casstore.records.scoped import Quota, Reason, ScopedState, StatePolicy
from casstore.store import Store
from tests.records.scoped.contexts import ALL, HERE, TALK

SPAWN = multiprocessing.get_context("spawn")
PROCESSES = 3
STEPS = 12


def together(path: Path, work: Callable[[Store, int], Any]) -> list[Any]:
    """What ``work`` answers in processes that start together, each with the store open."""
    with SPAWN.Manager() as manager:
        barrier = manager.Barrier(PROCESSES)
        with SPAWN.Pool(PROCESSES) as pool:
            return pool.starmap(
                _work, [(str(path), work, number, barrier) for number in range(PROCESSES)]
            )


def _work(path: str, work: Callable[[Store, int], Any], number: int, barrier: Any) -> Any:
    with casstore.open(path, "relaxed") as store:
        barrier.wait(120)
        return work(store, number)


def mixed(store: Store, number: int) -> dict[str, Any]:
    """A bit of everything on shared scopes; what this process alone knows."""
    states = ScopedState(store)
    context = HERE._replace(actor_id=f"actor-{number}")
    tight = StatePolicy(scopes=("runner",), quotas={"runner": Quota(max_keys=PROCESSES * 4)})
    shared = states.scope(context, "conversation")
    first = states.update(context, ALL, "subject", "first", number)
    counted = granted = won = 0
    try:
        states.scope(context, "subject", ALL).swap("won", number, expected=None)
        won = 1
    except StateConflictError:
        pass
    for step in range(STEPS):
        while True:
            entry = shared.find("counter")
            value, version = (0, None) if entry is None else (entry.value, entry.version)
            try:
                shared.swap("counter", value + 1, expected=version)
            except StateConflictError:
                continue
            counted += 1
            break
        shared.put(f"own-{number}-{step}", step)
        try:
            states.scope(context, "runner", tight).put(f"{number}-{step}", 1)
            granted += 1
        except StateRefusedError as refused:
            if refused.reason != Reason.TOO_MANY_KEYS:
                raise
    return {"first": first.ok, "counted": counted, "granted": granted, "won": won}


def resetting(store: Store, number: int) -> list[int]:
    """Resets of one conversation, with writes in between; the numbers that they were given."""
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    numbers = []
    for step in range(STEPS):
        scope.put(f"{number}-{step}", step)
        numbers.append(states.reset(**TALK).number)
    return numbers


def beginning(store: Store, number: int) -> int:
    """One of the same run for all: the first freezes it."""
    states = ScopedState(store)
    try:
        states.begin_run("r", HERE, StatePolicy(scopes=("actor",)), caller=f"caller-{number}")
    except casstore.CasstoreError:
        return 0
    states.run("r", caller=f"caller-{number}").put("actor", "k", number)
    return 1


def erasing(store: Store, number: int) -> int:
    """One erases, again and again, what the others go on writing."""
    states = ScopedState(store)
    if number == 0:
        return sum(states.erase_actor("ann").values for _ in range(STEPS))
    context = HERE if number == 1 else HERE._replace(actor_id="bob")
    for step in range(STEPS):
        states.scope(context, "runner", ALL).put(f"k{step % 5}", "word " * 200)
        states.scope(context, "runner", ALL).put(f"{number}-{step}", step)
    return 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with casstore.open(tmp_path / "s", "relaxed"):
        return tmp_path / "s"


def test_concurrent_processes_lose_no_write_and_stay_within_quotas(path: Path) -> None:
    told = together(path, mixed)
    assert all(one["first"] for one in told)
    assert sum(one["won"] for one in told) == 1
    with casstore.open(path, "relaxed") as store:
        states = ScopedState(store)
        seen = states.snapshot(HERE, ALL)
        talk = seen["conversation"]
        assert talk.pop("external.conversation_id") == "talk-1"
        assert talk.pop("counter") == PROCESSES * STEPS == sum(one["counted"] for one in told)
        assert talk == {f"own-{n}-{s}": s for n in range(PROCESSES) for s in range(STEPS)}
        assert len(seen["runner"]) == PROCESSES * 4 == sum(one["granted"] for one in told)
        usage = states.scope(HERE, "conversation").usage()
        assert usage.keys == len(talk) + 1
        assert [one["won"] for one in told][seen["subject"]["won"]] == 1


def test_concurrent_resets_have_gapless_numbers_and_each_write_is_in_one_generation(
    path: Path,
) -> None:
    numbers = [number for told in together(path, resetting) for number in told]
    assert sorted(numbers) == list(range(1, PROCESSES * STEPS + 1))
    with casstore.open(path, "relaxed") as store:
        states = ScopedState(store)
        assert [one.number for one in states.generations(**TALK)] == sorted(numbers)
        scope = states.scope(HERE, "conversation")
        found = [
            key
            for number in range(PROCESSES * STEPS + 1)
            for key in scope.list_keys(generation=number).keys
        ]
        assert sorted(found) == sorted(
            [f"{n}-{step}" for n in range(PROCESSES) for step in range(STEPS)]
        )


def test_exactly_one_process_begins_a_run(path: Path) -> None:
    told = together(path, beginning)
    assert sum(told) == 1
    with casstore.open(path, "relaxed") as store:
        states = ScopedState(store)
        run = states.find_run("r")
        assert run is not None
        assert run.caller == f"caller-{told.index(1)}"
        assert states.snapshot(HERE)["actor"] == {"k": told.index(1)}


def test_counts_stay_exact_during_an_erasure(path: Path) -> None:
    together(path, erasing)
    with casstore.open(path, "relaxed") as store:
        states = ScopedState(store)
        scope = states.scope(HERE, "runner", ALL)
        entries = states.snapshot(HERE, ALL)["runner"]
        assert scope.usage().keys == len(entries)
        assert {f"2-{step}" for step in range(STEPS)} <= set(entries)
        states.erase_actor("ann")
        assert not [key for key in states.snapshot(HERE, ALL)["runner"] if key.startswith("1-")]
        states.erase_actor("bob")
        assert scope.usage() == (0, 0)
