"""LangBot's calls on a store: by event and binding, and by the keys frozen in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace as Bag
from typing import Any

import pytest

from casstore.compat.langbot_state import PersistentStateStore, context_of
from casstore.engine.memory import MemoryEngine
from casstore.errors import InvalidInputError
from casstore.records.scoped import ScopedState
from casstore.records.scoped.scope_keys import scope_keys
from casstore.store import Store

RUNNER = Bag(id="plugin:me/agent/default")


def event(**changes: Any) -> Any:
    told: dict[str, Any] = {
        "bot_id": "b1", "workspace_id": "w1", "conversation_id": "talk", "thread_id": None,
        "actor": Bag(actor_type=None, actor_id="ann"), "subject": None,
    }  # fmt: skip
    return Bag(**{**told, **changes})


def binding(*scopes: str, enabled: bool = True) -> Any:
    policy = Bag(enable_state=enabled, state_scopes=list(scopes or ("conversation", "actor")))
    bound = Bag(scope_type="bot", scope_id="b1")
    return Bag(binding_id="", scope=bound, state_policy=policy)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


def test_updates_and_snapshots_by_event(store: Store) -> None:
    async def use() -> None:
        states = PersistentStateStore(store)
        here, bound = event(), binding()
        for args, ok in (
            ((here, bound, RUNNER, "actor", "k", {"a": 1}), True),
            ((here, binding(enabled=False), RUNNER, "actor", "k", 1), False),
            ((here, bound, RUNNER, "galaxy", "k", 1), False),
            ((here, bound, RUNNER, "runner", "k", 1), False),
            ((event(actor=None), bound, RUNNER, "actor", "k", 1), False),
            ((here, bound, RUNNER, "actor", "k", object()), False),
            ((here, bound, RUNNER, "actor", "k", "x" * 300_000), False),
        ):
            told = await states.apply_update_from_event(*args)
            assert told[0] == ok
            assert (told[1] is None) == ok
        assert await states.build_snapshot_from_event(here, bound, RUNNER) == {
            "conversation": {"external.conversation_id": "talk"},
            "actor": {"k": {"a": 1}}, "subject": {}, "runner": {},
        }  # fmt: skip

    asyncio.run(use())


def test_the_state_api_works_by_scope_keys(store: Store) -> None:
    async def use() -> None:
        states = PersistentStateStore(store)
        context = context_of(event(), binding(), RUNNER)
        keys = scope_keys(context)
        talk = keys["conversation"]
        told = {name: value for name, value in context._asdict().items() if value is not None}
        place = (context.runner_id, context.binding_identity)
        assert await states.state_get(talk, "k") is None
        assert await states.state_list(talk) == ([], False)
        assert not await states.state_delete(talk, "k")
        for scope, key in keys.items():
            for n in range(105):
                done = await states.state_set(key, f"a_{n:03}", n, *place, scope, told)
                assert done == (True, None)
        assert await states.state_set(talk, "k", float("nan"), *place, "conversation", told) != (
            True, None
        )  # fmt: skip
        assert await states.state_set(talk, "conversation_id", "x", *place, "conversation", told)
        assert await states.state_get(talk, "external.conversation_id") == "x"
        listed, more = await states.state_list(talk, "a_", 1000)
        assert (listed[0], len(listed), more) == ("a_000", 100, True)
        assert await states.state_list(talk, "a%") == ([], False)
        assert await states.state_delete(talk, "a_000")
        assert not await states.state_delete(talk, "a_000")
        # The same state as by context.
        found = ScopedState(store).scope(context, "actor").find("a_001")
        assert found is not None
        assert (found.value, found.written_by) == (1, ("user", "ann"))
        with pytest.raises(InvalidInputError):
            await states.state_set(talk, "k", 1, *place, "galaxy", told)

    asyncio.run(use())


def test_a_reset_is_visible_by_event_and_by_scope_key(store: Store) -> None:
    async def use() -> None:
        states = PersistentStateStore(store)
        here, bound = event(), binding()
        talk = scope_keys(context_of(here, bound, RUNNER))["conversation"]
        await states.apply_update_from_event(here, bound, RUNNER, "conversation", "k", 1)
        assert await states.get_reset_generation("w1", "b1", "talk") is None
        assert await states.state_get(talk, "k") == 1
        made = await states.reset_runner_context("w1", "b1", "talk")
        assert await states.get_reset_generation("w1", "b1", "talk") == made
        assert await states.state_get(talk, "k") is None
        assert not await states.state_delete(talk, "k")
        seen = await states.build_snapshot_from_event(here, bound, RUNNER)
        assert seen["conversation"] == {"external.conversation_id": made}
        await states.apply_update_from_event(here, bound, RUNNER, "conversation", "k", 2)
        assert await states.state_get(talk, "k") == 2

    asyncio.run(use())


def test_eight_first_writes_at_once_all_succeed(store: Store) -> None:
    async def use() -> list[Any]:
        states = PersistentStateStore(store)
        return await asyncio.gather(
            *[
                states.apply_update_from_event(event(), binding(), RUNNER, "actor", "k", n)
                for n in range(8)
            ]
        )

    assert asyncio.run(use()) == [(True, None)] * 8
