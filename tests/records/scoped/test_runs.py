"""Runs: what they may do is frozen at their start, and the gate asks for run and caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import Write
from casstore.errors import InvalidInputError, RunFrozenError, StateRefusedError
from casstore.maintenance.expiring import expire_rows
from casstore.records.scoped import Context, Quota, Reason, RunState, ScopedState, StatePolicy
from casstore.store import Store
from casstore.testing.engine_fixtures import all_rows
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE, TALK

ME = "me/agent"


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(StateRefusedError) as refused:
        call()
    assert str(refused.value)
    return refused.value.reason


def test_frozen_authorisation__a_change_of_policy_in_mid_run_has_no_effect(store: Store) -> None:
    states = ScopedState(store)
    policy = StatePolicy(scopes=("conversation", "actor"), quotas={"actor": Quota(max_keys=1)})
    states.begin_run("r1", HERE, policy, caller=ME)
    # The binding is changed: less for some, more for others. Only new runs see it.
    later = StatePolicy(scopes=("runner",))
    states.begin_run("r2", HERE, later, caller=ME)
    first, second = states.run("r1", caller=ME), states.run("r2", caller=ME)
    first.put("actor", "k", 1)
    assert refusal(lambda: first.put("actor", "l", 1)) == Reason.TOO_MANY_KEYS
    assert refusal(lambda: first.put("runner", "k", 1)) == Reason.SCOPE_NOT_ENABLED
    second.put("runner", "k", 2)
    assert refusal(lambda: second.find("actor", "k")) == Reason.SCOPE_NOT_ENABLED
    assert first.snapshot()["actor"] == {"k": 1}
    assert first.snapshot()["runner"] == {}
    assert second.snapshot()["runner"] == {"k": 2}
    with pytest.raises(RunFrozenError):
        states.begin_run("r1", HERE, later, caller=ME)
    assert states.run("r1", caller=ME).run.policy == policy


def test_frozen_authorisation__the_scopes_of_a_run_are_those_of_its_start(store: Store) -> None:
    states = ScopedState(store)
    run = states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    for scope in run.scope_keys:
        gate.put(scope, "k", scope)
        found = states.scope(HERE, scope, ALL).find("k")
        assert found is not None
        assert found.value == scope
        assert gate.scope(scope).key == run.scope_keys[scope]
        assert gate.scope(scope).origin("k") == HERE
    nobody = Context("runner", "binding")
    states.begin_run("n", nobody, ALL, caller=ME)
    for scope in ("conversation", "actor", "subject"):
        asked = states.run("n", caller=ME)
        assert refusal(lambda asked=asked, scope=scope: asked.find(scope, "k")) == (  # type: ignore[misc]
            Reason.MISSING_IDENTITY
        )
    assert states.run("n", caller=ME).find("runner", "k") is None


def test_frozen_authorisation__another_process_sees_the_same(tmp_path: Path) -> None:
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        run = ScopedState(store).begin_run("r", HERE, ALL, caller=ME, capabilities=["state", "x"])
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        assert ScopedState(store).find_run("r") == run
        assert ScopedState(store).run("r", caller=ME).run == run


def test_beginning_a_run_again_with_the_same_arguments_returns_it(
    store: Store, clock: Clock
) -> None:
    states = ScopedState(store)
    run = states.begin_run("r", HERE, ALL, caller=ME)
    before = contents(store)
    clock.move(5)
    assert states.begin_run("r", HERE, ALL, caller=ME) == run
    assert contents(store) == before
    for other in ({"caller": "you/agent"}, {"capabilities": ()}):
        told: dict[str, Any] = {"caller": ME, **other}
        with pytest.raises(RunFrozenError):
            states.begin_run("r", HERE, ALL, **told)
    with pytest.raises(RunFrozenError):
        states.begin_run("r", HERE._replace(actor_id="bob"), ALL, caller=ME)
    assert states.end_run("r")
    states.begin_run("r", HERE._replace(actor_id="bob"), ALL, caller="you/agent")


@pytest.mark.parametrize("caller", [None, ""])
def test_caller_identity__its_absence_is_refused(store: Store, caller: str | None) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, caller=ME)
    assert refusal(lambda: states.run("r", caller=caller)) == Reason.NO_CALLER


def test_caller_identity__a_mismatch_is_refused(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, caller=ME)
    for caller in ("you/agent", "me/agent ", "ME/AGENT", "me"):
        assert refusal(lambda caller=caller: states.run("r", caller=caller)) == (  # type: ignore[misc]
            Reason.WRONG_CALLER
        )


def test_a_run_without_the_capability_reaches_no_state(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, caller=ME, capabilities=["history"])
    assert refusal(lambda: states.run("r", caller=ME)) == Reason.NOT_CAPABLE


def test_the_checks_of_a_run_refuse_in_a_fixed_order(store: Store) -> None:
    states = ScopedState(store)
    off = StatePolicy(enabled=False)
    states.begin_run("r", Context("runner"), off, caller=ME, capabilities=())
    assert refusal(lambda: states.run(None, caller=None)) == Reason.NO_RUN_ID
    assert refusal(lambda: states.run("", caller=ME)) == Reason.NO_RUN_ID
    assert refusal(lambda: states.run("other", caller=None)) == Reason.RUN_NOT_ACTIVE
    assert refusal(lambda: states.run("r", caller=None)) == Reason.NO_CALLER
    assert refusal(lambda: states.run("r", caller="you")) == Reason.WRONG_CALLER
    assert refusal(lambda: states.run("r", caller=ME)) == Reason.NOT_CAPABLE
    states.begin_run("s", Context("runner"), off, caller=ME)
    gate = states.run("s", caller=ME)
    assert refusal(lambda: gate.find(None, None)) == Reason.NO_SCOPE
    assert refusal(lambda: gate.find("galaxy", None)) == Reason.NO_KEY
    assert refusal(lambda: gate.find("galaxy", "k")) == Reason.DISABLED
    assert refusal(lambda: gate.list_keys("actor")) == Reason.DISABLED
    assert gate.snapshot() == {"conversation": {}, "actor": {}, "subject": {}, "runner": {}}
    states.begin_run("t", Context("runner"), StatePolicy(), caller=ME)
    gate = states.run("t", caller=ME)
    assert refusal(lambda: gate.put("galaxy", "k", object())) == Reason.UNKNOWN_SCOPE
    assert refusal(lambda: gate.put("runner", "k", object())) == Reason.SCOPE_NOT_ENABLED
    assert refusal(lambda: gate.put("actor", "k", object())) == Reason.MISSING_IDENTITY


def test_all_calls_go_through_the_gate(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    first = gate.put("actor", "a", 1, ttl_ms=1000)
    second = gate.swap("actor", "a", 2, expected=first.version)
    assert gate.find("actor", "a") == second
    assert gate.list_keys("actor", "a") == (["a"], False, None)
    assert gate.list_keys("actor", limit=1, after="a").keys == []
    assert gate.snapshot(prefix="a")["actor"] == {"a": 2}
    assert gate.delete("actor", "a", expected=second.version)
    assert not gate.delete("actor", "a")


def calls(gate: RunState) -> list[Callable[[], Any]]:
    scope = gate.scope("actor")
    return [
        lambda: gate.find("actor", "k"),
        lambda: gate.put("actor", "k", 2),
        lambda: gate.swap("actor", "k", 2, expected=None),
        lambda: gate.delete("actor", "k"),
        lambda: gate.list_keys("actor"),
        gate.snapshot,
        lambda: scope.prepare_put("k", 2),
        scope.usage,
        lambda: scope.origin("k"),
    ]


def test_after_its_end_a_run_reaches_nothing(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    gate.put("actor", "k", 1)
    waiting = calls(gate)
    assert states.end_run("r")
    assert not states.end_run("r")
    assert states.find_run("r") is None
    for call in waiting:
        assert refusal(call) == Reason.RUN_NOT_ACTIVE
    assert refusal(lambda: states.run("r", caller=ME)) == Reason.RUN_NOT_ACTIVE
    assert states.snapshot(HERE)["actor"] == {"k": 1}


@pytest.mark.parametrize("later", [StatePolicy(enabled=False), ALL])
def test_a_handle_of_an_ended_run_is_refused_though_its_id_is_in_use_again(
    store: Store, later: StatePolicy
) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    scope = gate.scope("runner")
    states.end_run("r")
    # Another caller, or the same one with less: what was frozen before is over.
    states.begin_run("r", HERE, later, caller="you/agent" if later == ALL else ME)
    calls: list[Callable[[], Any]] = [
        lambda: gate.put("runner", "k", 1),
        lambda: scope.put("k", 1),
        lambda: scope.find("k"),
        gate.snapshot,
    ]
    assert [refusal(call) for call in calls] == [Reason.RUN_NOT_ACTIVE] * 4
    assert states.scope(HERE, "runner", ALL).find("k") is None
    # Begun again with the same, it is as good as the one before.
    states.end_run("r")
    states.begin_run("r", HERE, ALL, caller=ME)
    gate.put("runner", "k", 1)


def test_a_run_whose_time_is_up_has_ended(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME, ttl_ms=1000)
    gate = states.run("r", caller=ME)
    clock.move(999)
    gate.put("actor", "k", 1)
    assert states.renew_run("r", ttl_ms=1000)
    clock.move(999)
    gate.put("actor", "k", 2)
    clock.move(1)
    for call in calls(gate):
        assert refusal(call) == Reason.RUN_NOT_ACTIVE
    assert not states.renew_run("r")
    assert states.find_run("r") is None
    # One of the same id may begin, and be another.
    states.begin_run("r", HERE._replace(actor_id="bob"), caller="you", ttl_ms=10)
    assert refusal(lambda: states.run("r", caller=ME)) == Reason.WRONG_CALLER
    assert expire_rows(store).records == 0
    clock.move(10)
    assert expire_rows(store).records == 1
    assert not [row for row in all_rows(store.engine, "records") if b"run" in row.key]
    assert not states.end_run("r")


def test_a_write_of_a_run_that_ends_concurrently_is_refused(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    gate.put("actor", "k", 1)
    engine: Any = store.engine
    whole = engine.write
    for write_of in (lambda: gate.put("actor", "k", 2), lambda: gate.delete("actor", "k")):
        states.begin_run("r", HERE, ALL, caller=ME)

        def write(change: Write) -> Any:
            engine.write = whole
            states.end_run("r")
            return whole(change)

        engine.write = write
        assert refusal(write_of) == Reason.RUN_NOT_ACTIVE
    found = states.scope(HERE, "actor").find("k")
    assert found is not None
    assert found.value == 1


def test_concurrent_changes_of_a_run_are_serialised(store: Store) -> None:
    states = ScopedState(store)
    engine: Any = store.engine
    whole = engine.write

    def first(act: Callable[[], Any]) -> None:
        def write(change: Write) -> Any:
            engine.write = whole
            act()
            return whole(change)

        engine.write = write

    first(lambda: states.begin_run("r", HERE, StatePolicy(scopes=("actor",)), caller="you"))
    with pytest.raises(RunFrozenError):
        states.begin_run("r", HERE, ALL, caller=ME)
    run = states.find_run("r")
    assert run is not None
    assert run.caller == "you"
    # Ended while it is renewed, it has ended; ended while it is ended, it was ended once.
    first(lambda: states.end_run("r"))
    assert not states.renew_run("r")
    assert states.find_run("r") is None
    states.begin_run("r", HERE, ALL, caller=ME)
    first(lambda: states.end_run("r"))
    assert not states.end_run("r")


def test_renewing_does_not_disturb_a_write(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    engine: Any = store.engine
    whole = engine.write

    def write(change: Write) -> Any:
        engine.write = whole
        assert states.renew_run("r", ttl_ms=50_000)
        return whole(change)

    engine.write = write
    gate.put("actor", "k", 2)
    assert gate.snapshot()["actor"] == {"k": 2}


def test_a_run_sees_a_reset_of_its_conversation(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller=ME)
    gate = states.run("r", caller=ME)
    gate.put("conversation", "k", 1)
    generation = states.reset(**TALK)
    assert gate.snapshot()["conversation"] == {"external.conversation_id": generation.id}
    assert gate.find("conversation", "k") is None


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("", {}), (None, {}), ("r\0", {}), ("r", {"caller": ""}), ("r", {"caller": " "}),
        ("r", {"caller": None}), ("r", {"ttl_ms": 0}), ("r", {"ttl_ms": None}),
        ("r", {"capabilities": "state"}), ("r", {"capabilities": [1]}),
        ("r", {"policy": StatePolicy(scopes=("galaxy",))}), ("r", {"context": Context("")}),
    ],
)  # fmt: skip
def test_an_invalid_run_is_refused_and_nothing_is_written(
    store: Store, run: Any, told: dict[str, Any]
) -> None:
    before = contents(store)
    call: dict[str, Any] = {"context": HERE, "caller": ME, **told}
    with pytest.raises((InvalidInputError, TypeError)) as refused:
        ScopedState(store).begin_run(run, **call)
    assert refused.type is InvalidInputError
    assert contents(store) == before


def test_a_run_may_have_a_long_id_and_much_to_say(store: Store) -> None:
    states = ScopedState(store)
    long = "run-" + "x" * 5000
    context = HERE._replace(actor_id="ann" * 80, workspace_id="w" * 3000)
    run = states.begin_run(long, context, ALL, caller="c" * 2000)
    assert states.find_run(long) == run
    states.run(long, caller="c" * 2000).put("actor", "k", 1)
    assert states.erase_actor("ann" * 80) == (1, 1)
    assert states.find_run(long) is None
