"""Erasing an actor: what it has written and what is about it, in all scopes and generations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import InvalidInputError, StateRefusedError
from casstore.maintenance import compact, erasure, gc
from casstore.maintenance.expiring import expire_rows
from casstore.records.scoped import SCOPES, ActorErasure, ScopedState, changes
from casstore.records.scoped import erasure as scoped_erasure
from casstore.session.data import Commit, NodeDraft
from casstore.session.records import Table
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE, TALK

BOB = HERE._replace(actor_id="bob")


def test_erasure_by_actor__all_rows_in_all_scopes_and_nothing_of_others(store: Store) -> None:
    states = ScopedState(store)
    for scope in SCOPES:
        states.scope(BOB, scope, ALL).put("bobs", scope)
    kept = contents(store)
    for scope in SCOPES:
        for context in (HERE, HERE._replace(runner_id="another", binding_identity="b2")):
            states.scope(context, scope, ALL).put("anns", ["x" * 2000, scope])
    assert states.erase_actor("ann") == (8, 0)
    for scope in SCOPES:
        assert states.scope(HERE, scope, ALL).find("anns") is None
        assert states.scope(BOB, scope, ALL).list_keys().keys == ["bobs"]
        assert states.scope(BOB, scope, ALL).usage().keys == 1
    expire_rows(store)
    gc.collect(store, grace_ms=0)
    # Counts of changes apart, the store is as if ann had never been.
    assert [len(rows) for _, rows in contents(store)[:-1]] == [len(rows) for _, rows in kept[:-1]]
    assert states.erase_actor("ann") == (0, 0)


def test_erasure_by_actor__includes_values_that_the_actor_or_another_actor_overwrote(
    store: Store,
) -> None:
    states = ScopedState(store)
    talk, bobs = states.scope(HERE, "conversation"), states.scope(BOB, "conversation")
    bobs.put("a", "bob")
    talk.put("a", "ann")
    talk.put("b", "ann")
    bobs.put("b", "bob, after ann")
    bobs.put("c", "bob alone")
    assert states.erase_actor("ann").values == 2
    assert bobs.list_keys().keys == ["c"]
    assert states.erase_actor("bob").values == 1


def test_erasure_by_actor__keeps_a_value_put_after_the_value_of_the_actor_was_deleted(
    store: Store,
) -> None:
    states = ScopedState(store)
    talk, bobs = states.scope(HERE, "conversation"), states.scope(BOB, "conversation")
    talk.put("k", "ann")
    bobs.put("k", "bob")
    bobs.delete("k")
    bobs.put("k", "bob's own")
    # A lead from ann to the first value is left, and leads nowhere.
    assert len(list(Table(store, "scoped.people", 5).scan("user", "ann"))) == 1
    assert states.erase_actor("ann").values == 0
    assert states.snapshot(BOB)["conversation"]["k"] == "bob's own"
    assert not list(Table(store, "scoped.people", 5).scan("user", "ann"))


def test_expire_rows_removes_actor_index_rows_of_deleted_values(store: Store) -> None:
    states = ScopedState(store)
    talk, bobs = states.scope(HERE, "conversation"), states.scope(BOB, "conversation")
    talk.put("k", "ann")
    bobs.put("k", "bob")
    bobs.delete("k")
    talk.put("l", "ann")
    assert expire_rows(store).records == 1
    # Also if there is another value of that key.
    talk.put("k", "ann")
    bobs.put("k", "bob")
    bobs.delete("k")
    bobs.put("k", "bob's own")
    assert expire_rows(store).records == 1
    assert states.erase_actor("ann").values == 1


def meanwhile(store: Store, act: Callable[[], Any]) -> None:
    """Let something happen just before the next write of the store."""
    engine: Any = store.engine
    whole = engine.write

    def write(change: Any) -> Any:
        engine.write = whole
        act()
        return whole(change)

    engine.write = write


def test_a_value_written_while_actor_index_rows_expire_is_found_by_erasure(store: Store) -> None:
    states = ScopedState(store)
    talk, bobs = states.scope(HERE, "conversation"), states.scope(BOB, "conversation")

    def leave_a_lead() -> None:
        talk.put("k", "ann")
        bobs.put("k", "bob")
        bobs.delete("k")

    leave_a_lead()
    meanwhile(store, lambda: talk.put("k", "ann, again"))
    assert expire_rows(store).records == 0
    assert states.erase_actor("ann").values == 1
    leave_a_lead()
    meanwhile(store, lambda: talk.put("k", "ann, again"))
    assert states.erase_actor("ann").values == 1
    assert talk.find("k") is None


def test_a_run_restarted_while_expired_runs_are_removed_stays(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    for run in ("r1", "r2"):
        states.begin_run(run, HERE, caller="me", ttl_ms=10)
    clock.move(10)
    meanwhile(store, lambda: states.begin_run("r1", HERE, caller="me"))
    assert expire_rows(store).records == 1
    assert states.find_run("r1") is not None
    assert states.erase_actor("ann") == (0, 1)


def test_erasure_by_actor__includes_values_with_the_actor_as_subject(store: Store) -> None:
    states = ScopedState(store)
    about = BOB._replace(subject_type="user", subject_id="ann")
    states.scope(about, "subject", ALL).put("rating", 3)
    states.scope(about, "actor", ALL).put("mine", 1)
    other = BOB._replace(subject_type="ticket", subject_id="ann")
    states.scope(other, "subject", ALL).put("rating", 4)
    assert states.erase_actor("ann").values == 1
    assert states.snapshot(about, ALL)["subject"] == {}
    assert states.snapshot(other, ALL)["subject"] == {"rating": 4}
    assert states.snapshot(about, ALL)["actor"] == {"mine": 1}


def test_erasure_by_actor__in_earlier_generations_as_well(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    scope.put("k", 0)
    states.reset(**TALK)
    scope.put("k", 1)
    states.scope(BOB, "conversation").put("l", 1)
    assert states.erase_actor("ann").values == 2
    assert scope.find("k", generation=0) is None
    assert scope.list_keys().keys == ["l"]


def test_erasure_by_actor__can_be_limited_to_a_type_workspace_or_bot(store: Store) -> None:
    states = ScopedState(store)
    tenants = [HERE, HERE._replace(workspace_id="space-2"), HERE._replace(bot_id="bot-2")]
    admin = HERE._replace(actor_type="admin")
    for context in (*tenants, admin):
        states.scope(context, "actor").put("k", 1)
    for number, context in enumerate(tenants):
        states.begin_run(f"r{number}", context, caller="me")
    assert states.erase_actor("ann", workspace_id="space-2") == (1, 1)
    assert [states.find_run(f"r{n}") is None for n in range(3)] == [False, True, False]
    assert states.erase_actor("ann", workspace_id="space-1", bot_id="bot-2") == (1, 1)
    assert states.snapshot(HERE)["actor"] == {"k": 1}
    assert states.erase_actor("ann", "admin") == (1, 0)
    assert states.snapshot(HERE)["actor"] == {"k": 1}
    assert states.erase_actor("ann") == (1, 1)


def test_erasure_by_actor__ends_its_runs(store: Store) -> None:
    states = ScopedState(store)
    states.begin_run("r", HERE, ALL, caller="me")
    states.begin_run("b", BOB, ALL, caller="me")
    gate = states.run("r", caller="me")
    gate.put("actor", "k", 1)
    assert states.erase_actor("ann") == (1, 1)
    with pytest.raises(StateRefusedError):
        gate.put("actor", "k", 2)
    states.run("b", caller="me").put("actor", "k", 1)
    for wrong in (None, 7):
        with pytest.raises(InvalidInputError):
            states.erase_actor(wrong)  # type: ignore[arg-type]


def test_a_value_overwritten_during_its_erasure_is_erased(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    scope.put("k", 1)
    engine: Any = store.engine
    whole = engine.write

    def overtaken(change: Any) -> Any:
        engine.write = whole
        states.scope(BOB, "conversation").put("k", "bob, knowing ann's")
        states.scope(BOB, "conversation").put("l", "bob")
        return whole(change)

    engine.write = overtaken
    assert states.erase_actor("ann").values == 1
    assert scope.list_keys().keys == ["l"]
    assert scope.usage().keys == 1


def test_many_values_are_erased_in_batches_and_the_erasure_can_be_stopped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoped_erasure, "REMOVED_AT_ONCE", 8)
    states = ScopedState(store)
    for n in range(20):
        states.scope(HERE, "actor").put(f"k{n}", n)

    class Stop(Exception):
        pass

    def stop(gone: int) -> None:
        raise Stop(gone)

    with pytest.raises(Stop, match="8"):
        states.erase_actor("ann", progress=stop)
    assert states.scope(HERE, "actor").usage().keys == 12
    told: list[int] = []
    assert states.erase_actor("ann", progress=told.append).values == 12
    assert told == [8]
    assert changes.REMOVED_AT_ONCE == 512


def test_scoped_state_goes_with_the_sessions_about_a_subject(store: Store) -> None:
    states = ScopedState(store)
    store.create_session("s", subjects=["ann"])
    store.session("s").commit(Commit(append=[NodeDraft("a", ["x" * 3000])]))
    for context in (HERE, BOB):
        states.scope(context, "actor").put("k", [context.actor_id, "y" * 3000])
        states.begin_run(f"run of {context.actor_id}", context, caller="me")
    provider = ActorErasure()
    assert isinstance(provider, erasure.RecordProvider)
    plan = erasure.plan(store, "ann", providers=[provider])
    assert len(plan.records["scoped"]) == 2
    # What bob has put shares its text with what ann has; her own rows are no sharers.
    bobs = states.scope(BOB, "actor").key
    assert [one.name for one in plan.sharing.sharers] == [f"record scoped.values {bobs} / a0 / k"]
    again = erasure.ErasurePlan.from_json(plan.to_json())
    # The provider of the record system takes the place of one that is not given.
    report = erasure.execute(store, again)
    assert (report.sessions_deleted, report.records_erased) == (1, 2)
    assert states.snapshot(HERE)["actor"] == {}
    assert states.snapshot(BOB)["actor"] == {"k": ["bob", "y" * 3000]}
    assert states.find_run("run of ann") is None
    assert states.find_run("run of bob") is not None
    # Carried out once more, there is nothing left to do.
    assert erasure.execute(store, again, providers=[provider]).records_erased == 0
    assert not erasure.plan(store, "ann", providers=[provider]).records["scoped"]


def test_actor_erasure_maps_the_subject_to_an_actor(store: Store) -> None:
    states = ScopedState(store)
    states.scope(HERE, "actor").put("k", "x" * 3000)
    states.scope(HERE._replace(workspace_id="space-2"), "actor").put("k", 1)
    provider = ActorErasure(lambda subject: ("user", subject.removeprefix("person:")), bot_id="no")
    assert not provider.find(store, "person:ann")
    provider = ActorErasure(
        lambda subject: ("user", subject.removeprefix("person:")), workspace_id="space-1"
    )
    (found,) = provider.find(store, "person:ann")
    assert list(provider.roots(store, [found]))
    assert provider.erase(store, "person:ann", [found]) == 1
    assert not list(provider.roots(store, [found]))
    assert states.scope(HERE._replace(workspace_id="space-2"), "actor").usage().keys == 1
    for wrong in ("", "7", "[]", '["value", "a"]', '["galaxy", 1, 2, 3]', "[" * 100_000):
        with pytest.raises(InvalidInputError):
            provider.erase(store, "person:ann", [wrong])


def test_after_erasing_and_compacting_nothing_of_the_actor_is_in_the_file(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with Store(LmdbEngine(str(place), durability="relaxed")) as store:
        states = ScopedState(store)
        ann = HERE._replace(actor_id="canary-actor", subject_type="user", subject_id="canary-actor")
        states.begin_run("canary-run", ann, ALL, caller="me")
        for scope in SCOPES:
            gate = states.run("canary-run", caller="me")
            gate.put(scope, "canary-key", ["canary-short"])
            gate.put(scope, "canary-long", [f"canary-{n}" for n in range(3)])
            states.scope(BOB, scope, ALL).put("k", f"bobs-{scope}")
        assert any(b"canary" in file.read_bytes() for file in place.iterdir() if file.is_file())
        assert states.erase_actor("canary-actor") == (8, 1)
        gc.collect(store, grace_ms=0)
        store.pack(min_age_ms=0)
    compact.compact(str(place))
    for file in place.rglob("*"):
        if file.is_file():
            assert b"canary" not in file.read_bytes(), file
    with Store(LmdbEngine(str(place), durability="relaxed")) as store:
        assert ScopedState(store).snapshot(BOB, ALL)["actor"] == {"k": "bobs-actor"}
