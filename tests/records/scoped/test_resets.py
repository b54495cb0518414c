"""Resets: a conversation begins anew, and what was before stays for those who ask for it."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.errors import (
    ConditionFailedError,
    InvalidInputError,
    StateRefusedError,
)
from casstore.records.scoped import SCOPES, Generation, ScopedState
from casstore.session.data import Commit, NodeDraft
from casstore.session.records import Table
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.one_transaction import contents
from tests.records.scoped.contexts import ALL, HERE, TALK

SEED = "external.conversation_id"


def test_reset__only_the_conversation_scope_of_that_triple(store: Store) -> None:
    states = ScopedState(store)
    inside = [
        HERE, HERE._replace(thread_id="t1"), HERE._replace(binding_identity="binding-2"),
        HERE._replace(runner_id="another"), HERE._replace(actor_id="bob"),
    ]  # fmt: skip
    outside = [
        HERE._replace(workspace_id="space-2"), HERE._replace(workspace_id=None),
        HERE._replace(bot_id="bot-2"), HERE._replace(conversation_id="talk-2"),
    ]  # fmt: skip
    for context in inside + outside:
        for scope in SCOPES:
            states.scope(context, scope, ALL).put("k", scope)
    generation = states.reset(**TALK)
    for context in inside:
        told = states.snapshot(context, ALL)
        assert told["conversation"] == {SEED: generation.id}
        assert [told[scope] for scope in SCOPES[1:]] == [{"k": scope} for scope in SCOPES[1:]]
        assert states.scope(context, "conversation").find("k") is None
        assert states.scope(context, "conversation").list_keys().keys == []
        assert states.scope(context, "conversation").usage() == (0, 0)
    for context in outside:
        assert states.snapshot(context, ALL)["conversation"] == {
            "k": "conversation", SEED: context.conversation_id
        }  # fmt: skip


def test_reset__a_marker_is_written_with_number_id_and_time(store: Store, clock: Clock) -> None:
    states = ScopedState(store)
    assert states.generation(**TALK) is None
    assert states.generations(**TALK) == []
    first = states.reset(**TALK, note={"seq": 17})
    clock.move(-5000)
    second = states.reset(**TALK)
    assert (first.number, first.note, second.number, second.note) == (1, {"seq": 17}, 2, None)
    assert first.id != second.id
    # Numbers order them, whatever the clock says.
    assert second.at_ms < first.at_ms
    assert states.generation(**TALK) == second
    assert states.generations(**TALK) == [first, second]
    assert states.generation(**{**TALK, "conversation_id": "talk-2"}) is None


def test_reset__history_is_retained_and_read_on_request(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    long = ["old", "x" * 3000]
    old = scope.put("k", long)
    scope.put("only", 1)
    states.reset(**TALK)
    scope.put("k", "new")
    states.reset(**TALK)
    assert scope.find("k") is None
    assert scope.find("k", generation=0) == old
    assert scope.list_keys(generation=0).keys == ["k", "only"]
    assert scope.usage(generation=0).keys == 2
    found = scope.find("k", generation=1)
    assert found is not None
    assert found.value == "new"
    assert scope.find("only", generation=1) is None
    assert scope.find("k", generation=7) is None
    for wrong in (-1, "0", 1.0):
        with pytest.raises(InvalidInputError):
            scope.find("k", generation=wrong)  # type: ignore[arg-type]


def test_reset__the_conversation_id_is_the_id_of_the_reset_until_another_is_put(
    store: Store,
) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    scope.put("conversation_id", "theirs")
    generation = states.reset(**TALK)
    before = contents(store)
    assert states.snapshot(HERE)["conversation"] == {SEED: generation.id}
    assert contents(store) == before
    scope.put("conversation_id", "theirs again")
    assert states.snapshot(HERE)["conversation"] == {SEED: "theirs again"}


def test_reset__works_without_workspace_or_bot(store: Store) -> None:
    states = ScopedState(store)
    context = HERE._replace(workspace_id=None, bot_id=None)
    place: dict[str, Any] = {"workspace_id": None, "bot_id": None, "conversation_id": "talk-1"}
    states.scope(context, "conversation").put("k", 1)
    states.scope(HERE, "conversation").put("k", 1)
    generation = states.reset(**place)
    assert states.snapshot(context)["conversation"] == {SEED: generation.id}
    assert states.snapshot(HERE)["conversation"]["k"] == 1
    for wrong in (None, "", 7):
        with pytest.raises(InvalidInputError):
            states.reset(**{**place, "conversation_id": wrong})


def test_a_write_that_a_reset_overtakes_belongs_to_the_new_generation(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    version = scope.put("k", 1).version
    engine: Any = store.engine
    whole = engine.write

    def overtaken(change: Any) -> Any:
        engine.write = whole
        states.reset(**TALK)
        return whole(change)

    engine.write = overtaken
    scope.put("k", 2)
    assert states.snapshot(HERE)["conversation"]["k"] == 2
    first = scope.find("k", generation=0)
    assert first is not None
    assert (first.value, first.version) == (1, version)
    engine.write = overtaken
    assert not scope.delete("k")
    late = scope.find("k", generation=1)
    assert late is not None
    assert late.value == 2


def test_two_concurrent_resets_make_two_generations(store: Store) -> None:
    states = ScopedState(store)
    engine: Any = store.engine
    whole = engine.write

    def overtaken(change: Any) -> Any:
        engine.write = whole
        states.reset(**TALK, note="inner")
        return whole(change)

    engine.write = overtaken
    outer = states.reset(**TALK, note="outer")
    assert [(one.number, one.note) for one in states.generations(**TALK)] == [
        (1, "inner"), (2, "outer")
    ]  # fmt: skip
    assert states.generation(**TALK) == outer


def test_a_reset_writes_the_same_number_of_rows_whatever_the_scope_holds(store: Store) -> None:
    states = ScopedState(store)
    scope = states.scope(HERE, "conversation")
    for n in range(50):
        scope.put(f"k{n}", n)
    engine: Any = store.engine
    whole = engine.write
    sizes: list[int] = []

    def write(change: Any) -> Any:
        sizes.append(len(change.rows))
        return whole(change)

    engine.write = write
    states.reset(**TALK)
    engine.write = whole
    assert sizes == [2]


def test_a_reset_happens_with_a_commit_or_not_at_all(store: Store) -> None:
    states = ScopedState(store)
    session = store.session("s")
    session.commit(Commit(append=[NodeDraft("a", 1)]))
    generation, write = states.prepare_reset(**TALK, note={"revision": 2})
    assert states.generation(**TALK) is None
    session.commit(Commit(append=[NodeDraft("b", "/new")], also=write))
    assert states.generation(**TALK) == generation == Generation(1, *generation[1:])
    stale = states.prepare_reset(**TALK)[1]
    states.reset(**TALK)
    before = contents(store)
    with pytest.raises(ConditionFailedError):
        session.commit(Commit(append=[NodeDraft("c", 1)], also=stale))
    assert contents(store) == before


def test_the_note_of_a_reset_must_be_json(store: Store) -> None:
    states = ScopedState(store)
    for wrong in (object(), float("nan"), "x" * 300_000):
        with pytest.raises(StateRefusedError):
            states.reset(**TALK, note=wrong)
    assert states.reset(**TALK, note=[10**30, "x" * 2000]).note == [10**30, "x" * 2000]
    assert states.generations(**TALK)[0].note == [10**30, "x" * 2000]


def test_old_generations_can_be_deleted(store: Store) -> None:
    states = ScopedState(store)
    other = HERE._replace(runner_id="another")
    elsewhere = HERE._replace(conversation_id="talk-2")
    for context in (HERE, other, elsewhere):
        states.scope(context, "conversation").put("k", 0)
        states.scope(context, "actor").put("k", 0)
    for number in (1, 2, 3):
        states.reset(**TALK)
        for context in (HERE, other):
            states.scope(context, "conversation").put("k", number)
    scope = states.scope(HERE, "conversation")
    told: list[int] = []
    assert states.drop_history(**TALK, before=1, progress=told.append) == 2
    assert told == [1, 2]
    assert [scope.find("k", generation=n) is None for n in range(4)] == [True, False, False, False]
    assert states.drop_history(**TALK, before=99) == 4
    assert states.drop_history(**TALK) == 0
    assert [scope.find("k", generation=n) is None for n in range(4)] == [True, True, True, False]
    assert states.snapshot(HERE)["conversation"]["k"] == 3
    assert states.snapshot(elsewhere)["conversation"]["k"] == 0
    assert states.snapshot(HERE)["actor"] == {"k": 0}
    assert len(states.generations(**TALK)) == 3
    # Nothing leads to what is gone: two of the conversation, one elsewhere, two actors' own.
    assert len(list(Table(store, "scoped.people", 5).scan())) == 2 + 1 + 2
    assert len(list(Table(store, "scoped.conversations", 3).scan())) == 3
