"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from casstore.records.scoped import (
    SCOPES,
    ActorErasure,
    Context,
    Quota,
    ScopedState,
    StatePolicy,
    binding_identity,
    scope_key,
)
from casstore.store import Store
from tests.refusals import NAN, SURROGATE, CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None
HERE = Context("runner", bot_id="bot", conversation_id="talk", actor_id="anna")
ALL = StatePolicy(scopes=SCOPES)


@pytest.fixture
def store(engine: CountingEngine) -> Iterator[Store]:
    with Store(engine) as store:
        states = ScopedState(store)
        for scope in ("conversation", "actor"):
            states.scope(HERE, scope).put("key", "value")
        states.reset(workspace_id=None, bot_id="bot", conversation_id="talk")
        states.begin_run("run", HERE, caller="plugin")
        yield store


@pytest.fixture
def states(store: Store) -> ScopedState:
    return ScopedState(store)


CALLS: dict[str, Callable[[ScopedState], object]] = {
    "no context": lambda states: states.snapshot(NONE),
    "a context that is its runner": lambda states: states.scope("runner", "actor"),  # type: ignore[arg-type]
    "the fields of a context": lambda states: states.update(
        tuple(HERE),  # type: ignore[arg-type]
        ALL,
        "actor",
        "key",
        1,
    ),
    "a context of a run": lambda states: states.begin_run("new", NONE, caller="plugin"),
    "no policy": lambda states: states.update(HERE, NONE, "actor", "key", 1),
    "a policy for a scope": lambda states: states.scope(HERE, "actor", NONE),
    "a policy for a snapshot": lambda states: states.snapshot(HERE, NONE),
    "a policy of a run": lambda states: states.begin_run("new", HERE, NONE, caller="plugin"),
    "how much a snapshot takes": lambda states: states.snapshot(HERE, max_bytes=NONE),
    "a bound that bounds nothing": lambda states: states.snapshot(HERE, max_bytes=NAN),  # type: ignore[arg-type]
    "how much a run's snapshot takes": lambda states: states.run("run", caller="plugin").snapshot(
        max_bytes=NONE
    ),
    "capabilities that are lists": lambda states: states.begin_run(
        "new",
        HERE,
        caller="plugin",
        capabilities=[[]],  # type: ignore[list-item]
    ),
    "a pulse while dropping": lambda states: states.drop_history(
        workspace_id=None, bot_id="bot", conversation_id="talk", pulse=ODD
    ),
    "a pulse while erasing": lambda states: states.erase_actor("anna", pulse=ODD),
    "an actor without a name": lambda states: states.erase_actor(""),
    "a workspace to erase in": lambda states: states.erase_actor("anna", workspace_id=ODD),
    "a bot to erase of": lambda states: states.erase_actor("anna", bot_id=SURROGATE),
    "the type of a binding": lambda states: binding_identity(scope_type=ODD, scope_id="id"),
    "the id of a binding": lambda states: binding_identity(ODD),
    "the key of no context": lambda states: scope_key(NONE, "actor"),
    "the key of an actor that is a number": lambda states: scope_key(
        HERE._replace(actor_id=ODD), "actor"
    ),
    "the key of an actor that cannot be spelled": lambda states: scope_key(
        HERE._replace(actor_id=SURROGATE), "actor"
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_scoped_state_calls_refuse_invalid_arguments(
    engine: CountingEngine, states: ScopedState, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](states))
    assert states.snapshot(HERE)["actor"] == {"key": "value"}


POLICIES: dict[str, StatePolicy] = {
    "enabled by a text": StatePolicy("no"),  # type: ignore[arg-type]
    "enabled by a number": StatePolicy(1),  # type: ignore[arg-type]
    "scopes that are none": StatePolicy(scopes=NONE),
    "one scope": StatePolicy(scopes="actor"),  # type: ignore[arg-type]
    "scopes that are lists": StatePolicy(scopes=("actor", [])),  # type: ignore[arg-type]
    "a scope that there is not": StatePolicy(scopes=("actor", "actors")),
    "scopes that can be read once": StatePolicy(scopes=iter(["actor"])),  # type: ignore[arg-type]
    "quotas that are none": StatePolicy(quotas=NONE),
    "quotas that are a list": StatePolicy(quotas=[Quota()]),  # type: ignore[arg-type]
    "a quota of a scope that there is not": StatePolicy(quotas={"actors": Quota(1)}),
    "a quota that is a number": StatePolicy(quotas={"actor": ODD}),
    "a quota that is two": StatePolicy(quotas={"actor": (1, 2)}),  # type: ignore[dict-item]
    "a quota of a text": StatePolicy(quotas={"actor": Quota("9")}),  # type: ignore[arg-type]
    "a quota below zero": StatePolicy(quotas={"actor": Quota(max_bytes=-1)}),
    "a quota that is no number": StatePolicy(quotas={"actor": Quota(max_bytes=NAN)}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_that_takes_a_policy_refuses_an_invalid_one(
    engine: CountingEngine, states: ScopedState, policy: str
) -> None:
    given = POLICIES[policy]
    assert_refused(engine, lambda: states.update(HERE, given, "actor", "new", 1))
    assert_refused(engine, lambda: states.scope(HERE, "actor", given))
    assert_refused(engine, lambda: states.snapshot(HERE, given))
    assert_refused(engine, lambda: states.begin_run("new", HERE, given, caller="plugin"))


PEOPLE: dict[str, Any] = {
    "nobody": None,
    "nothing, which everybody begins with": "",
    "a type, which many have": ("user",),
    "one without a name": ("user", ""),
}


@pytest.mark.parametrize("person", PEOPLE)
def test_an_erasure_finds_only_the_given_subject(
    engine: CountingEngine, store: Store, person: str
) -> None:
    erasure = ActorErasure(lambda subject: PEOPLE[person])
    assert_refused(engine, lambda: erasure.find(store, "anna"))


ERASURES: dict[str, Callable[[Store], object]] = {
    "nothing that tells actors": lambda store: ActorErasure(ODD),
    "a workspace": lambda store: ActorErasure(workspace_id=ODD),
    "a bot": lambda store: ActorErasure(bot_id=ODD),
    "what was found is none": lambda store: ActorErasure().erase(store, "anna", NONE),
    "what was found is a number": lambda store: ActorErasure().erase(store, "anna", [ODD]),
    "the roots of nothing": lambda store: ActorErasure().roots(store, NONE),
    "the rows of a number": lambda store: ActorErasure().rows(store, [ODD]),
}


@pytest.mark.parametrize("call", ERASURES)
def test_an_erasure_with_invalid_arguments_is_refused(
    engine: CountingEngine, store: Store, call: str
) -> None:
    assert_refused(engine, lambda: ERASURES[call](store))
