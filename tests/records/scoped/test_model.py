"""Scoped state against plain dicts: whatever is done in whatever order."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from casstore.engine.memory import MemoryEngine
from casstore.errors import StateConflictError
from casstore.maintenance import gc
from casstore.maintenance.expiring import expire_rows
from casstore.records.scoped import SCOPES, Context, Scope, ScopedState
from casstore.store import Store
from tests.records.conftest import Clock
from tests.records.scoped.contexts import ALL

TALKS = ("talk-1", "talk-2")
CONTEXTS = [
    Context(
        runner, "b", "bot", "space", talk, thread, actor,
        subject_id=about, subject_type="user" if about else None,
    )
    for runner, talk, thread, actor, about in (
        ("r1", "talk-1", None, "ann", "bob"),
        ("r1", "talk-1", None, "bob", "ann"),
        ("r1", "talk-1", "t", "ann", None),
        ("r2", "talk-2", None, "bob", "bob"),
        ("r1", "talk-2", None, None, None),
    )
]  # fmt: skip
LONG = ["word " * 200]

contexts = st.sampled_from(CONTEXTS)
scopes = st.sampled_from(SCOPES)
keys = st.sampled_from(["a", "b", "conversation_id"])
values = st.sampled_from([None, 1, "text", LONG, {"a": [1.5]}])


class Held(NamedTuple):
    """A value as the model has it."""

    value: Any
    version: str
    created_ms: int
    expires_ms: int | None
    people: frozenset[str]


def real(key: str) -> str:
    return "external.conversation_id" if key == "conversation_id" else key


class ScopedStateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = Store(MemoryEngine(clock=self.clock))
        self.states = ScopedState(self.store)
        self.rows: dict[tuple[str, int, str], Held] = {}
        self.resets = dict.fromkeys(TALKS, 0)
        self.ids: dict[str, str] = {}
        self.versions: set[str] = set()

    def teardown(self) -> None:
        self.store.close()

    def scope(self, context: Context, scope: str) -> Scope | None:
        lacks = {"actor": context.actor, "subject": context.subject}
        return None if lacks.get(scope, "") is None else self.states.scope(context, scope, ALL)

    def number(self, context: Context, scope: str) -> int:
        talk = context.conversation_id
        assert talk is not None
        return self.resets[talk] if scope == "conversation" else 0

    def live(self, place: tuple[str, int, str]) -> Held | None:
        held = self.rows.get(place)
        if held is None or (held.expires_ms is not None and held.expires_ms <= self.clock.now_ms):
            return None
        return held

    @rule(
        context=contexts, scope=scopes, key=keys, value=values,
        ttl_ms=st.sampled_from([None, 5, 50]), swap=st.sampled_from([None, "right", "wrong"]),
    )  # fmt: skip
    def put(
        self, context: Context, scope: str, key: str, value: Any, ttl_ms: Any, swap: str | None
    ) -> None:
        handle = self.scope(context, scope)
        if handle is None:
            return
        place = (handle.key, self.number(context, scope), real(key))
        before = self.live(place)
        version = None if before is None else before.version
        if swap == "wrong":
            with pytest.raises(StateConflictError) as conflict:
                handle.swap(key, value, expected="x-1" if version is None else None)
            assert conflict.value.actual == version
            return
        if swap == "right":
            entry = handle.swap(key, value, expected=version, ttl_ms=ttl_ms)
        else:
            entry = handle.put(key, value, ttl_ms=ttl_ms)
        assert entry.version not in self.versions
        self.versions.add(entry.version)
        people = set() if before is None else set(before.people)
        people |= {context.actor_id} if context.actor_id else set()
        people |= {context.subject_id} if scope == "subject" and context.subject_id else set()
        now_ms = self.clock.now_ms
        self.rows[place] = Held(
            value,
            entry.version,
            now_ms if before is None else before.created_ms,
            None if ttl_ms is None else now_ms + ttl_ms,
            frozenset(people),
        )

    @rule(context=contexts, scope=scopes, key=keys)
    def delete(self, context: Context, scope: str, key: str) -> None:
        handle = self.scope(context, scope)
        if handle is None:
            return
        place = (handle.key, self.number(context, scope), real(key))
        there = self.live(place) is not None
        assert handle.delete(key) == there
        if there:
            del self.rows[place]

    @rule(talk=st.sampled_from(TALKS))
    def reset(self, talk: str) -> None:
        made = self.states.reset(workspace_id="space", bot_id="bot", conversation_id=talk)
        self.resets[talk] += 1
        self.ids[talk] = made.id
        assert made.number == self.resets[talk]

    @rule(ms=st.sampled_from([1, 10, 100]))
    def wait(self, ms: int) -> None:
        self.clock.move(ms)

    @rule(collect=st.booleans())
    def sweep(self, collect: bool) -> None:
        expire_rows(self.store)
        self.rows = {place: held for place, held in self.rows.items() if self.live(place)}
        if collect:
            gc.collect(self.store, grace_ms=0)

    @rule(actor=st.sampled_from(["ann", "bob"]))
    def erase(self, actor: str) -> None:
        gone = {place for place, held in self.rows.items() if actor in held.people}
        assert self.states.erase_actor(actor).values == len(gone)
        for place in gone:
            del self.rows[place]

    @rule(talk=st.sampled_from(TALKS))
    def drop_history(self, talk: str) -> None:
        keys = {
            self.states.scope(context, "conversation").key
            for context in CONTEXTS
            if context.conversation_id == talk
        }
        gone = {
            place for place in self.rows if place[0] in keys and place[1] < self.resets[talk]
        }  # fmt: skip
        dropped = self.states.drop_history(workspace_id="space", bot_id="bot", conversation_id=talk)
        assert dropped == len(gone)
        for place in gone:
            del self.rows[place]

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        for context in CONTEXTS:
            seen = self.states.snapshot(context, ALL)
            for scope in SCOPES:
                handle = self.scope(context, scope)
                if handle is None:
                    assert seen[scope] == {}
                    continue
                number = self.number(context, scope)
                here = {place[2]: place for place in self.rows if place[:2] == (handle.key, number)}
                told = {key: held.value for key in here if (held := self.live(here[key]))}
                assert handle.list_keys().keys == sorted(told)
                assert handle.usage().keys == len(here)
                if scope == "conversation":
                    talk = context.conversation_id or ""
                    told.setdefault("external.conversation_id", self.ids.get(talk, talk))
                assert seen[scope] == told
        for (key, number, name), held in self.rows.items():
            for context in CONTEXTS:
                handle = self.scope(context, "conversation")
                if handle is not None and handle.key == key:
                    entry = handle.find(name, generation=number)
                    if self.live((key, number, name)) is None:
                        assert entry is None
                    else:
                        assert entry is not None
                        assert entry[1:4] == (held.value, held.version, held.created_ms)


ScopedStateMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None
)
TestScopedState = ScopedStateMachine.TestCase
