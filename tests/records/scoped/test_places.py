"""State listed and removed by runner, binding, bot and workspace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from casstore.compat.langbot_state import PersistentStateStore
from casstore.errors import InvalidInputError
from casstore.records.scoped import SCOPES, Context, ScopedState, changes
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE, TALK

# Each differs from ``HERE`` in one dimension, and the last by ids too long for a row.
ELSEWHERE = {
    "runner_id": HERE._replace(runner_id="another"),
    "binding_identity": HERE._replace(binding_identity="binding-2"),
    "bot_id": HERE._replace(bot_id="bot-2"),
    "workspace_id": HERE._replace(workspace_id="space-2"),
    "long": HERE._replace(runner_id="r" * 900, conversation_id="c" * 900),
}


@pytest.fixture
def states(store: Store) -> ScopedState:
    states = ScopedState(store)
    for context in (HERE, *ELSEWHERE.values()):
        for scope in SCOPES:
            states.scope(context, scope, ALL).put("k", [scope, "x" * 600])
    return states


def found(states: ScopedState, **where: Any) -> set[tuple[Context, str]]:
    return {(one.context, one.scope) for one in states.list_state(**where)}


def all_of(*contexts: Context) -> set[tuple[Context, str]]:
    return {(context, scope) for context in contexts for scope in SCOPES}


@pytest.mark.parametrize("name", ["runner_id", "binding_identity", "bot_id", "workspace_id"])
def test_state_is_listed_by_each_dimension_alone(states: ScopedState, name: str) -> None:
    own = {name: getattr(ELSEWHERE[name], name)}
    assert found(states, **own) == all_of(ELSEWHERE[name])
    rest = [each for key, each in ELSEWHERE.items() if key != name]
    if name == "runner_id":
        rest.remove(ELSEWHERE["long"])
    assert found(states, **{name: getattr(HERE, name)}) == all_of(HERE, *rest)
    assert found(states, **{name: "nothing"}) == set()


def test_a_listing_by_several_dimensions_matches_all_of_them(states: ScopedState) -> None:
    assert found(states, runner_id=HERE.runner_id, bot_id="bot-2") == all_of(ELSEWHERE["bot_id"])
    assert found(states, runner_id="another", bot_id="bot-2") == set()
    assert found(states, runner_id="r" * 900) == all_of(ELSEWHERE["long"])


def test_a_listed_value_has_its_context_generation_and_scope_key(
    states: ScopedState, clock: Clock
) -> None:
    states.reset(**TALK)
    states.scope(HERE, "conversation").put("k", "after the reset")
    listed = [
        one
        for one in states.list_state(bot_id="bot-1")
        if one.scope == "conversation" and one.context == HERE
    ]
    assert [(one.generation, one.entry.key) for one in listed] == [(0, "k"), (1, "k")]
    assert listed[1].entry == states.scope(HERE, "conversation").find("k")
    assert listed[1].scope_key == states.scope(HERE, "conversation").key
    assert listed[0].entry.value == ["conversation", "x" * 600]


@pytest.mark.parametrize("name", ["runner_id", "binding_identity", "bot_id", "workspace_id"])
def test_delete_state_removes_exactly_what_list_state_lists(
    store: Store, states: ScopedState, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("casstore.records.scoped.places.REMOVED_AT_ONCE", 3)
    own = {name: getattr(ELSEWHERE[name], name)}
    states.begin_run("theirs", ELSEWHERE[name], ALL, caller="me")
    states.begin_run("ours", HERE, ALL, caller="me")
    others = [each for key, each in ELSEWHERE.items() if key != name]
    told: list[int] = []
    assert states.delete_state(**own, progress=told.append) == (4, 1)
    assert told == [3, 4]
    assert found(states, **own) == set()
    assert states.find_run("theirs") is None
    assert states.find_run("ours") is not None
    for context in (HERE, *others):
        for scope in SCOPES:
            assert states.scope(context, scope, ALL).usage().keys == 1
    for scope in SCOPES:
        assert states.scope(ELSEWHERE[name], scope, ALL).usage().keys == 0
    assert states.delete_state(**own) == (0, 0)


def test_expired_values_are_not_listed_and_are_removed(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    before = contents(store)
    states.scope(HERE, "runner", ALL).put("k", 1, ttl_ms=10)
    clock.move(11)
    assert list(states.list_state(runner_id=HERE.runner_id)) == []
    assert states.delete_state(runner_id=HERE.runner_id).values == 1
    assert contents(store) == before


def test_list_state_and_delete_state_require_a_dimension(states: ScopedState, store: Store) -> None:
    before = contents(store)
    for call in (states.list_state, states.delete_state):
        for where in ({}, {"bot_id": None}, {"bot_id": 7}, {"runner_id": "\ud800"}):
            with pytest.raises(InvalidInputError):
                call(**where)
    with pytest.raises(InvalidInputError):
        states.delete_state(bot_id="bot-1", progress="loud")  # type: ignore[arg-type]
    assert contents(store) == before


def test_a_value_put_during_delete_state_is_removed_or_kept_completely(
    states: ScopedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = states.scope(HERE, "actor", ALL)
    monkeypatch.setattr("casstore.records.scoped.places.REMOVED_AT_ONCE", 1)
    told: list[int] = []

    def meanwhile(gone: int) -> None:
        told.append(gone)
        if gone == 1:
            scope.put("k", "new")
            scope.put("l", "new")

    erased = states.delete_state(runner_id=HERE.runner_id, progress=meanwhile)
    assert erased.values == told[-1]
    left = [one.entry.value for one in states.list_state(runner_id=HERE.runner_id)]
    assert set(left) <= {"new"}
    assert scope.usage().keys == len(left)
    assert changes.REMOVED_AT_ONCE == 512


def test_the_langbot_adapter_lists_and_deletes_state_alike(
    states: ScopedState, store: Store
) -> None:
    async def main() -> tuple[int, int, int]:
        langbot = PersistentStateStore(store)
        listed = await langbot.list_state(bot_id="bot-2")
        removed = await langbot.delete_state(bot_id="bot-2")
        return len(listed), removed, len(await langbot.list_state(bot_id="bot-2"))

    assert asyncio.run(main()) == (4, 4, 0)
